"""Chooses the implementation that runs, and imports a kernel's module when it is first wanted.

Pallas takes longer to import than all else here, and most processes never run a kernel: nothing imports the `gpu` and
`tpu` modules of an operation but `kernel_module`. A kernel says that it does not take a call by NotImplementedError,
while it is traced; the next implementation is tried then.
"""

import contextlib
import contextvars
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax

from ._target import target
from .errors import KernelUnavailableError

IMPLEMENTATIONS = ("xla", "gpu", "tpu")
RESULTS = Path(__file__).with_name("results")
"""What was measured on devices, a file for each: a link to `evals/bench/results`."""
_PREFERRED: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("preferred", default=None)


class Case(NamedTuple):
    """What calls have in common that are chosen for together.

    Attributes:
      one_head: a latent or its rope key. patched: there are factors. packed: x is in four bits.
    """

    operation: str
    one_head: bool = False
    patched: bool = False
    packed: bool = False

    def __str__(self) -> str:
        heads = "one head" if self.one_head else "several heads"
        return f"{self.operation}, {heads}{', patched' * self.patched}{', 4 bits' * self.packed}"


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
    """Imports the kernel of an operation for a platform, `pallas_kernels.<operation>.<platform>`."""
    return importlib.import_module(f".{operation}.{platform}", __package__)


@functools.cache
def measured(kind: str) -> Mapping[str, float]:
    """Reads how many times as fast as XLA kernels are on a kind of device, by the text of a case, from the results.

    What was wrong on the device is 0. The latest file of a device counts.
    """
    found: dict[str, float] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.name[-15:]):  # DEVICE-YYYY-MM-DD.json
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["environment"].get("device") == kind:
            found |= results["kernels"]
    return found


def candidates(case: Case) -> tuple[str, ...]:
    """Names what a call of a case tries in order where it names no implementation.

    What `preferring` says; else the kernel of the platform that `targeting` names; else, on the process's one device,
    the kernel that was right and faster than XLA on this kind of device; "xla" last.
    """
    asked, aimed = preferred(), target()
    if asked is not None:
        return asked
    if aimed is not None:
        return (aimed.platform, "xla") if aimed.platform in ("gpu", "tpu") else ("xla",)
    platform = jax.default_backend()
    # XLA cannot partition a kernel over several devices.
    if platform not in ("gpu", "tpu") or jax.device_count() > 1:
        return ("xla",)
    wins = measured(str(jax.devices()[0].device_kind)).get(str(case), 0.0) > 1.0
    return (platform, "xla") if wins else ("xla",)


def dispatch[Result](
    case: Case,
    implementation: str | Sequence[str] | None,
    run: Callable[[str], Result],
    kernels: Sequence[str] = ("gpu", "tpu"),
) -> Result:
    """Runs the first implementation of those asked for that takes the call.

    Args:
      implementation: one name; several in order of preference; or None: `candidates`.
      run: the call, by an implementation's name; NotImplementedError says why it does not take it.
      kernels: those that the operation has.

    Raises:
      KernelUnavailableError: none of those asked for can run; the message has the reason of each.
    """
    aimed = target()
    platform = jax.default_backend() if aimed is None else aimed.platform
    names = candidates(case) if implementation is None else implementation
    asked, refused = (names,) if isinstance(names, str) else tuple(names), []
    for name in asked:
        if name not in IMPLEMENTATIONS:
            reason = f"unknown; expected one of {IMPLEMENTATIONS}"
        elif name != "xla" and name not in kernels:
            reason = "the operation has no such kernel"
        elif name not in ("xla", platform):
            reason = f"the platform is {platform!r}"
        else:
            try:
                return run(name)
            except NotImplementedError as error:
                reason = error
        refused.append(f"{name!r}: {reason}")
    raise KernelUnavailableError(
        f"{case.operation}: got {asked}; expected an implementation that can run here ({'; '.join(refused)})"
    )
