"""Compiled programs that are kept for the next run."""

from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Keeps compiled programs in the project's own cache directory, .cache/jax."""
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parents[1] / ".cache" / "jax"))
    # Small programs too: the control of evals.run runs the same ones again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
