"""Compilations, as jax itself reports them: the one way in which tests count programs."""

import contextlib
from collections.abc import Iterator

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event of every program that jax compiles, or takes compiled from its cache on disk."""


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list that receives the name of every program compiled inside the block, such as `jit(apply)`."""
    names: list[str] = []

    def heard(event: str, duration_secs: float, **about: object) -> None:
        if event == COMPILED:
            names.append(str(about["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
