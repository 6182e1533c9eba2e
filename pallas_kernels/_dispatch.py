"""Which implementation runs, and for which platform: what the process has, or what `targeting` says."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .errors import KernelUnavailableError

IMPLEMENTATIONS = ("xla", "gpu", "tpu")


class Target(NamedTuple):
    """A platform ("tpu", "gpu", "cpu") that calls are traced for, how kernels are interpreted there, kind of device."""

    platform: str
    interpret: Any = False
    kind: str = ""


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def targeting(platform: str, interpret: Any = False, kind: str = "") -> Iterator[None]:
    """Inside, kernels are chosen as on one device of `platform`, whatever this process has.

    For compiling ahead of time, and for interpreting on a CPU. It acts while a function is traced: functions that are
    already compiled stay as they are.

    Args:
      platform: "tpu", "gpu" or "cpu".
      interpret: what the kernels pass on, such as `pltpu.InterpretParams()`; False compiles them.
      kind: of the device, such as "TPU v5e", whose configuration gives block sizes; "" for heuristics alone.
    """
    token = _TARGET.set(Target(platform, interpret, kind))
    try:
        yield
    finally:
        _TARGET.reset(token)


def interpretation() -> Any:
    """How kernels are to be interpreted: False where they are compiled."""
    target = _TARGET.get()
    return False if target is None else target.interpret


def targeted_kind() -> str | None:
    """The kind of device that `targeting` names; None outside."""
    target = _TARGET.get()
    return None if target is None else target.kind


def choose(
    operation: str, implementation: str | Sequence[str] | None, reasons: Mapping[str, str | None] | None = None
) -> str:
    """The implementation to run: the first of those asked for that can.

    Args:
      operation: for messages.
      implementation: one name; several in order of preference; or None for the platform's kernel where it can run, else
        "xla". In a process of several devices None is "xla", for XLA cannot partition a kernel: ask by name, inside
        `jax.shard_map`.
      reasons: for each kernel that the operation has, why it cannot take these arguments, or None if it can.

    Raises:
      KernelUnavailableError: none of those asked for can run; the message has the reason of each.
    """
    target = _TARGET.get()
    platform = jax.default_backend() if target is None else target.platform
    if implementation is None:
        alone = target is not None or jax.device_count() == 1
        implementation = (platform, "xla") if alone and platform in ("gpu", "tpu") else ("xla",)
    asked = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    refused = []
    for name in asked:
        reason = _reason(name, platform, reasons or {})
        if reason is None:
            return name
        refused.append(f"{name!r}: {reason}")
    raise KernelUnavailableError(f"{operation}: no implementation of {asked} can run here: {'; '.join(refused)}")


def _reason(name: str, platform: str, reasons: Mapping[str, str | None]) -> str | None:
    if name == "xla":
        return None
    if name not in IMPLEMENTATIONS:
        return f"unknown; expected one of {IMPLEMENTATIONS}"
    if name not in reasons:
        return "the operation has no such kernel"
    if name != platform:
        return f"the platform is {platform!r}"
    return reasons[name]
