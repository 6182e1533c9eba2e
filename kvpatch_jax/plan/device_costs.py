"""What edits take on a device: seconds per launch, FLOP and byte of each kind, measured or guessed; it says which."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..cache import digest_of
from ..errors import PlanError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..window import Edit, Rotate

FORMAT = "kvpatch_jax.device_costs"
VERSION = 1
KINDS = ("Drop", "Compact", "Fetch", "Rotate", "Copy", "ApplyPatch", "Prefill", "Recompute")


class Rates(NamedTuple):
    """Of one kind of edit."""

    launch: float = 0.0
    flop: float = 0.0
    byte: float = 0.0


class _Guess(NamedTuple):
    """Of devices whose kind contains a word: FLOP/s and bytes/s that are reached, seconds per launch."""

    word: str
    flops: float
    bytes: float
    launch: float


_GUESSES = (
    _Guess("h200", 4e14, 3.0e12, 3e-5),
    _Guess("h100", 4e14, 2.0e12, 3e-5),
    _Guess("a100", 1.5e14, 1.2e12, 3e-5),
    _Guess("tpu v5 lite", 1e14, 6e11, 3e-5),
    _Guess("tpu v5", 2e14, 2e12, 3e-5),
    _Guess("tpu", 1e14, 6e11, 3e-5),
    _Guess("cpu", 3e10, 5e9, 3e-4),
    _Guess("", 3e13, 4e11, 5e-5),
)
"""Half of what data sheets say, or less; the last is of any other device."""


@dataclasses.dataclass(frozen=True)
class DeviceCosts:
    """Seconds of edits on one device.

    Attributes:
      device: its kind, as `jax.devices()[0].device_kind` has it.
      date: of the measurement, ISO 8601; None where nothing was measured.
      kinds: rates by kind of edit.
      about: what it was measured with, or what is assumed.

    Raises:
      PlanError: a kind that is none, or rates that are negative or not finite.
    """

    device: str
    date: str | None
    kinds: Mapping[str, Rates]
    about: str = ""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise PlanError(f"device costs: kind {unknown[0]!r:.80}; expected one of {KINDS}")
        for kind, rates in self.kinds.items():
            numbers = all(isinstance(rate, int | float) and not isinstance(rate, bool) for rate in rates)
            if len(rates) != 3 or not numbers or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
                raise PlanError(f"device costs: {kind} {rates!r:.120}; expected three numbers from 0")
        kinds = {kind: Rates(*(float(rate) for rate in rates)) for kind, rates in self.kinds.items()}
        object.__setattr__(self, "kinds", kinds)

    @classmethod
    def assumed(cls, device: str | None = None) -> "DeviceCosts":
        """Guesses from a device's kind, for where nothing was measured. `measured` is False.

        Args:
          device: its kind; None: of the first device there is.
        """
        if device is None:
            import jax

            device = str(jax.devices()[0].device_kind)
        if not isinstance(device, str):
            raise PlanError(f"device costs: device {device!r:.80}; expected its kind, a text, or None")
        guess = next(each for each in _GUESSES if each.word in device.lower())
        rates = Rates(guess.launch, 1 / guess.flops, 1 / guess.bytes)
        kinds = {kind: rates for kind in KINDS if kind not in ("Drop", "Fetch")}
        kinds["Fetch"] = Rates(1e-4, 0.0, 1e-9)
        about = f"assumed: {guess.flops:g} FLOP/s, {guess.bytes:g} bytes/s, {guess.launch:g} s per launch"
        return cls(device, None, kinds, about)

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return self.date is not None

    def rates(self, kind: str) -> Rates:
        """The rates of a kind; none cost nothing."""
        return self.kinds.get(kind, _FREE)

    def seconds(self, edits: Iterable[Edit]) -> float:
        """Predicts what a run of edits takes: rotations that follow one another are one launch."""
        total, kind, rates = 0.0, type(None), _FREE
        for edit in edits:
            before, kind = kind, type(edit)
            if kind is not before:
                rates = self.rates(kind.__name__)
            flops, nbytes = edit.flops, edit.bytes
            total += rates[1] * flops + rates[2] * nbytes
            if (flops or nbytes) and (kind is not before or kind is not Rotate):
                total += rates[0]
        return total

    @functools.cached_property
    def digest(self) -> str:
        """Digests device, date and rates: 64 hexadecimal digits."""
        return digest_of([FORMAT.encode(), json.dumps(self._body(), sort_keys=True).encode()])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON with its digest, whole or not at all.

        Raises:
          PlanError: a file that cannot be written.
        """
        body = {"format": FORMAT, "version": VERSION, **self._body(), "digest": self.digest}
        try:
            replace(path_of(path, "device costs", PlanError), (json.dumps(body, indent=2) + "\n").encode())
        except OSError as error:
            raise PlanError(
                f"device costs {os.fspath(path)!r}: {error}; expected a file that can be written"
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str], device: str | None = None) -> "DeviceCosts":
        """Reads what `write` wrote.

        Args:
          device: the kind of device that it must be of; None takes any.

        Raises:
          PlanError: no such file, damage, another version, or another device's.
        """
        path = path_of(path, "device costs", PlanError)
        try:
            body = strict_json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"device costs {os.fspath(path)!r}: {error}; expected JSON as `write` wrote it") from error
        found = (body.get("format"), body.get("version")) if isinstance(body, dict) else None
        if found != (FORMAT, VERSION):
            raise PlanError(f"device costs {os.fspath(path)!r}: {found}; expected {(FORMAT, VERSION)}")
        try:
            kinds = {str(kind): Rates(*rates) for kind, rates in body["kinds"].items()}
            read = cls(body["device"], body["date"], kinds, body["about"])
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"device costs {os.fspath(path)!r}: {error!r}; expected what `write` wrote") from error
        if read.digest != body.get("digest"):
            raise PlanError(f"device costs {os.fspath(path)!r}: digest {body.get('digest')}; expected {read.digest}")
        if device is not None and read.device != device:
            raise PlanError(f"device costs {os.fspath(path)!r}: of device {read.device!r}; expected {device!r}")
        return read

    def _body(self) -> dict[str, Any]:
        kinds = {kind: list(self.kinds[kind]) for kind in sorted(self.kinds)}
        return {"device": self.device, "date": self.date, "about": self.about, "kinds": kinds}


_FREE = Rates()
