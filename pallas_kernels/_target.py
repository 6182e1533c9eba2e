"""What calls are traced for: the platform that the process has, or what `targeting` says."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Target(NamedTuple):
    """A platform ("tpu", "gpu", "cpu") that calls are traced for, and how kernels are interpreted there."""

    platform: str
    interpret: Any = False


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def targeting(platform: str, interpret: Any = False) -> Iterator[None]:
    """Chooses kernels inside the context as on one device of `platform`, whatever this process has.

    For compiling ahead of time, and for interpreting on a CPU. It acts while a function is traced: functions that are
    already compiled stay as they are.

    Args:
      platform: "tpu", "gpu" or "cpu".
      interpret: what the kernels pass on, such as `pltpu.InterpretParams()`; False compiles them.
    """
    token = _TARGET.set(Target(platform, interpret))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target() -> Target | None:
    """Returns what `targeting` says; None outside."""
    return _TARGET.get()


def platform() -> str:
    """Returns the platform that calls are traced for: what `targeting` says, else the process's own."""
    aimed = _TARGET.get()
    return jax.default_backend() if aimed is None else aimed.platform


def interpretation() -> Any:
    """Returns how kernels are to be interpreted: False where they are compiled."""
    aimed = _TARGET.get()
    return False if aimed is None else aimed.interpret


def require_hopper() -> None:
    """Raises NotImplementedError where the process's own GPU has other instructions than Hopper's."""
    if jax.default_backend() == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", "9.0")
        if capability != "9.0":
            raise NotImplementedError(f"a GPU of compute capability {capability}; expected 9.0")
