"""Compiled programs: kept for the next run, and counted."""

from pathlib import Path
from typing import Any

import jax


def use_compilation_cache() -> None:
    """Keeps compiled programs in the project's own cache directory, .cache/jax."""
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache" / "jax"))
    # Small programs too: the control of evals.run runs the same ones again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Compilations:
    """Counts programs that jax compiles, or takes compiled from its cache on disk."""

    def __init__(self) -> None:
        """Listens from now on."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"
