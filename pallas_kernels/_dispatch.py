"""Chooses the implementation that runs, and imports a kernel's module when it is first wanted.

Pallas takes longer to import than all else here, and most processes never run a kernel: nothing imports the `gpu` and
`tpu` modules of an operation but `kernel_module`.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

import jax

from ._target import target
from .errors import KernelUnavailableError

IMPLEMENTATIONS = ("xla", "gpu", "tpu")

Unsupported = Mapping[str, Callable[[], str | None]]
"""By kernel, what says why it cannot take the arguments of a call, or None where it can."""

_PREFERRED: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("preferred", default=None)


@contextlib.contextmanager
def preferring(*implementations: str) -> Iterator[None]:
    """Makes implementation=None mean these in order, then "xla", for all operations inside the context.

    So `with preferring("tpu"):` takes the kernels on a TPU. It acts while a function is
    traced: functions that are already compiled stay as they are. In a process of several devices, only inside
    `jax.shard_map`.

    Raises:
      KernelUnavailableError: an unknown name.
    """
    for name in implementations:
        if name not in IMPLEMENTATIONS:
            raise KernelUnavailableError(f"preferring: got {name!r}; expected one of {IMPLEMENTATIONS}")
    token = _PREFERRED.set((*implementations, "xla"))
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def preferred() -> tuple[str, ...] | None:
    """Returns what `preferring` says, "xla" last; None outside."""
    return _PREFERRED.get()


def kernel_module(operation: str, platform: str) -> ModuleType:
    """Imports the kernel of an operation for a platform, `pallas_kernels.<operation>.<platform>`.

    Args:
      operation: "rotate_patch" or "splice". platform: "gpu" or "tpu".
    """
    return importlib.import_module(f".{operation}.{platform}", __package__)


def choose(
    operation: str,
    implementation: str | Sequence[str] | None,
    unsupported: Unsupported | None = None,
) -> str:
    """Chooses the implementation to run: the first of those asked for that can.

    Args:
      operation: for messages.
      implementation: one name; several in order of preference; or None: what `preferring` says, else the kernel of
        the platform that `targeting` names, where it can run, else "xla". XLA cannot partition a kernel over several
        devices: ask for one by name, inside `jax.shard_map`.
      unsupported: the kernels that the operation has; only the one that could be taken is asked.

    Raises:
      KernelUnavailableError: none of those asked for can run; the message has the reason of each.
    """
    aimed = target()
    platform = jax.default_backend() if aimed is None else aimed.platform
    if implementation is None:
        implementation = preferred()

    # Nobody asked: a kernel only where calls are aimed at its platform.
    if implementation is None:
        implementation = (platform, "xla") if aimed is not None and platform in ("gpu", "tpu") else "xla"

    asked = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    kernels, refused = unsupported or {}, []
    for name in asked:
        if name == "xla":
            return name
        if name not in IMPLEMENTATIONS:
            reason = f"unknown; expected one of {IMPLEMENTATIONS}"
        elif name not in kernels:
            reason = "the operation has no such kernel"
        elif name != platform:
            reason = f"the platform is {platform!r}"
        else:
            reason = kernels[name]()
            if reason is None:
                return name
        refused.append(f"{name!r}: {reason}")

    raise KernelUnavailableError(
        f"{operation}: got {asked}; expected an implementation that can run here ({'; '.join(refused)})"
    )
