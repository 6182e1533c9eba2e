"""Which implementation runs."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence

import jax

from ._target import target
from ._wins import winner
from .errors import KernelUnavailableError

IMPLEMENTATIONS = ("xla", "gpu", "tpu")


_PREFERRED: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("preferred", default=None)


@contextlib.contextmanager
def preferring(*implementations: str) -> Iterator[None]:
    """Inside, implementation=None means these in order, then "xla": for all operations, whoever calls them.

    So `with preferring("tpu"):` takes the kernels on a TPU that they were not timed on. It acts while a function is
    traced: functions that are already compiled stay as they are. In a process of several devices, only inside
    `jax.shard_map`.

    Raises:
      KernelUnavailableError: an unknown name.
    """
    for name in implementations:
        if name not in IMPLEMENTATIONS:
            raise KernelUnavailableError(f"preferring {name!r}; expected one of {IMPLEMENTATIONS}")
    token = _PREFERRED.set((*implementations, "xla"))
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def choose(
    operation: str,
    implementation: str | Sequence[str] | None,
    reasons: Mapping[str, str | None] | None = None,
    shape: str = "",
) -> str:
    """The implementation to run: the first of those asked for that can.

    Args:
      operation: for messages.
      implementation: one name; several in order of preference; or None: what `preferring` says, else the platform's
        kernel where it can run and won this shape on this kind of device (see `_wins.winner`) or `targeting` asks for
        the platform, else "xla". In a process of several devices None is "xla", for XLA cannot partition a kernel: ask
        by name, inside `jax.shard_map`.
      reasons: for each kernel that the operation has, why it cannot take these arguments, or None if it can.
      shape: the word of the shape, see `_wins.shape_word`.

    Raises:
      KernelUnavailableError: none of those asked for can run; the message has the reason of each.
    """
    aimed = target()
    platform = jax.default_backend() if aimed is None else aimed.platform
    if implementation is None:
        implementation = _PREFERRED.get()
    if implementation is None:
        implementation = (*_unasked(operation, shape, platform, aimed is not None), "xla")
    asked = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    refused = []
    for name in asked:
        reason = _reason(name, platform, reasons or {})
        if reason is None:
            return name
        refused.append(f"{name!r}: {reason}")
    raise KernelUnavailableError(f"{operation}: no implementation of {asked} can run here: {'; '.join(refused)}")


def _unasked(operation: str, shape: str, platform: str, aimed: bool) -> tuple[str, ...]:
    """The kernel that is taken though nobody asked for one: at most one name."""
    if platform not in ("gpu", "tpu"):
        return ()
    if aimed:
        return (platform,)
    won = winner(jax.devices()[0].device_kind, operation, shape) if jax.device_count() == 1 else None
    return (platform,) if won == platform else ()


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
