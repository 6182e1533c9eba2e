"""Duration of actions on a device: seconds per launch, FLOP and byte for each kind, measured or assumed."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..window import Action, ActionKind

FORMAT = "kvpatch_jax.device_costs"
VERSION = 2
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


class Rates(NamedTuple):
    """Seconds per launch, per FLOP and per byte of one kind of action."""

    launch: float = 0.0
    flop: float = 0.0
    byte: float = 0.0


_FREE = Rates()


class _DeviceGuess(NamedTuple):
    """Assumed speed of devices whose kind contains a word: FLOP/s, bytes/s, and seconds per launch."""

    word: str
    flops: float
    bytes: float
    launch: float


_GUESSES = (
    _DeviceGuess("h200", 4e14, 3.0e12, 3e-5),
    _DeviceGuess("h100", 4e14, 2.0e12, 3e-5),
    _DeviceGuess("a100", 1.5e14, 1.2e12, 3e-5),
    _DeviceGuess("tpu v5 lite", 1e14, 6e11, 3e-5),
    _DeviceGuess("tpu v5", 2e14, 2e12, 3e-5),
    _DeviceGuess("tpu", 1e14, 6e11, 3e-5),
    _DeviceGuess("cpu", 3e10, 5e9, 3e-4),
    _DeviceGuess("", 3e13, 4e11, 5e-5),
)
"""At most half of what data sheets say. The first match counts; the last row matches every device."""


@dataclasses.dataclass(frozen=True)
class DeviceCosts:
    """Seconds that actions take on one device.

    Attributes:
      device: its kind, as in `jax.devices()[0].device_kind`.
      date: of the measurement, ISO 8601; None if the rates are assumed.
      kinds: rates by kind of action. A kind that is missing costs nothing, but for "compose" (see `rates`).
      about: what it was measured with, or what is assumed.
    """

    device: str
    date: str | None
    kinds: Mapping[str, Rates]
    about: str = ""

    @classmethod
    def assumed(cls, device: str | None = None) -> "DeviceCosts":
        """Returns rates guessed from a kind of device, for use before any measurement.

        Args:
          device: its kind; None: that of the first device of this process.
        """
        if device is None:
            import jax

            device = str(jax.devices()[0].device_kind)

        if not isinstance(device, str):
            raise InputError(f"device costs.device: got {device!r:.80}; expected a device's kind, or None")

        guess = next(row for row in _GUESSES if row.word in device.lower())
        rates = Rates(guess.launch, 1 / guess.flops, 1 / guess.bytes)
        kinds = {str(kind): rates for kind in KINDS if kind != "compose"}
        kinds["fetch"] = Rates(1e-4, 0.0, 1e-9)  # from a disk, whatever the device
        about = f"assumed: {guess.flops:g} FLOP/s, {guess.bytes:g} bytes/s, {guess.launch:g} s per launch"
        return cls(device, None, kinds, about)

    @property
    def measured(self) -> bool:
        """Whether the rates were measured."""
        return self.date is not None

    def rates(self, kind: str) -> Rates:
        """Returns the rates of a kind of action; of "compose", where it has none, those of "patch"."""
        # Both are small matrix products over what is read and written once.
        if kind == "compose" and kind not in self.kinds:
            kind = "patch"
        return self.kinds.get(kind, _FREE)

    def seconds(self, step: Iterable[Action]) -> float:
        """Predicts the duration of actions. All rotations share one launch."""
        total, rotated = 0.0, False
        for kind, _, _, nbytes, flops in step:
            launch, flop, byte = self.rates(kind)
            total += flop * flops + byte * nbytes
            if kind != "rotate" or not rotated:
                total += launch
            rotated = rotated or kind == "rotate"
        return total

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the rates as JSON, atomically.

        Raises:
          InputError: the file cannot be written.
        """
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        try:
            replace(path_of(path, "device costs", InputError), (json.dumps(body, indent=2) + "\n").encode())
        except OSError as error:
            raise InputError(
                f"device costs {os.fspath(path)!r}: got {error}; expected a file that can be written"
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str], device: str | None = None) -> "DeviceCosts":
        """Reads a file that `write` wrote.

        Args:
          device: the kind of device that the file must be of; None accepts any.

        Raises:
          InputError: a missing or damaged file, another version, another device, an unknown kind of action, or rates
          that are negative or not finite.
        """
        path = path_of(path, "device costs", InputError)
        what = f"device costs {os.fspath(path)!r}"
        try:
            body = strict_json.object_of(path.read_text("utf-8"), what)
            version = body["format"], body["version"]
            if version != (FORMAT, VERSION):
                raise InputError(f"{what}: got format {version!r:.80}; expected {(FORMAT, VERSION)}")
            kinds = {kind: Rates(*map(float, rates)) for kind, rates in body["kinds"].items()}
            costs = cls(body["device"], body["date"], kinds, body["about"])
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{what}: got {error!r:.120}; expected a file of `DeviceCosts.write`") from error
        for kind, rates in costs.kinds.items():
            if kind not in KINDS or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
                raise InputError(f"{what}: got {rates!r:.120} of {kind!r:.40}; expected finite numbers >= 0 of {KINDS}")
        if device is not None and costs.device != device:
            raise InputError(f"{what}: got rates of device {costs.device!r:.80}; expected {device!r:.80}")
        return costs
