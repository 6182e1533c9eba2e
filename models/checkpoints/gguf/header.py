"""The header of a GGUF file: metadata and where each tensor lies. Every length is checked before it is believed.

(The package `gguf` reads headers too, but makes an array of every token, seconds and hundreds of megabytes, and follows
a count that is larger than the file.) Source: ggml's `docs/gguf.md`.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_NAME, _MOST_AXES = 1 << 16, 4
_MOST_VALUES = 8  # in a byte of any type


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
      shape: slowest axis first, as NumPy has it (ggml counts the other way round).
      kind: number of its type. start: its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself. `metadata` has texts, numbers, and lists of them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def find_gguf(checkpoint: Path) -> Path | None:
    """Finds the GGUF file that a checkpoint is: itself, or the only one in a directory without safetensors.

    Raises:
      WeightsError: a directory of several GGUF files.
    """
    if checkpoint.suffix == ".gguf" and not checkpoint.is_dir():
        return checkpoint
    if not checkpoint.is_dir() or any(checkpoint.glob("*.safetensors*")):
        return None

    found = sorted(checkpoint.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise WeightsError(f"{checkpoint}: got {len(found)} GGUF files ({names}); expected the name of one of them")
    return found[0] if found else None


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Reads the header of a GGUF file; its tensors are not looked at.

    Raises:
      WeightsError: a file that cannot be opened, is no GGUF file, is of another version or byte order, or ends early.
    """
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise WeightsError(f"{path}: got an empty file; expected a GGUF file")
        data = memoryview(np.memmap(path, np.uint8, "r")).toreadonly()
    except OSError as error:
        raise WeightsError(f"{path}: got a file that cannot be opened ({error}); expected a GGUF file") from error

    if bytes(data[:4]) != _MAGIC:
        raise WeightsError(
            f"{path}: got a file that begins with {bytes(data[:4])!r}; expected a GGUF file, which begins with "
            f"{_MAGIC!r}"
        )

    try:
        return _Reader(path, data).header()
    except (struct.error, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: got a damaged or truncated file ({error}); expected a GGUF file") from error


class _Reader:
    """Walks through the bytes of one header."""

    def __init__(self, path: Path, data: memoryview):
        self._path, self._data, self._at = path, data, len(_MAGIC)

    def header(self) -> GgufHeader:
        """Reads the header from behind the magic number on."""
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = " (its bytes are swapped)" if version & 0xFFFF == 0 else ""
            raise WeightsError(f"{self._path}: got GGUF version {version}{swapped}; expected 2 or 3, little-endian")

        # The least that they take: a tensor its name's length, axes, type and place, an entry a length and a type.
        count, entries = self._number("Q"), self._number("Q")
        self._afford(count, 24, "tensors")
        self._afford(entries, 12, "metadata entries")

        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text(_LONGEST_NAME)
            if key in metadata:
                raise WeightsError(f"{self._path}: got metadata {key!r} twice; expected it once")
            metadata[key] = self._value(key)

        # Tensors are listed before it is known where their data begins.
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._text(_LONGEST_NAME)
            axes = self._number("I")
            if axes > _MOST_AXES:
                raise WeightsError(f"{self._path}: got tensor {name!r} with {axes} axes; expected {_MOST_AXES} at most")
            shape = tuple(self._number("Q") for _ in range(axes))
            if math.prod(shape) > _MOST_VALUES * len(self._data):
                raise WeightsError(
                    f"{self._path}: got tensor {name!r} of shape {shape}; expected at most what the file has room for"
                )
            if name in found:
                raise WeightsError(f"{self._path}: got tensor {name!r} twice; expected it once")
            # ggml lists the fastest axis first.
            found[name] = shape[::-1], self._number("I"), self._number("Q")

        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise WeightsError(f"{self._path}: got general.alignment {alignment!r}; expected a power of two")
        start = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(shape, kind, start + offset) for name, (shape, kind, offset) in found.items()}
        return GgufHeader(self._path, metadata, tensors)

    def _value(self, key: str) -> Any:
        """Reads a value of any type; lists of lists are refused."""
        kind = self._number("I")
        if kind == _STRING:
            return self._text(len(self._data))
        if kind != _ARRAY:
            return self._number(self._scalar(key, kind))

        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            self._afford(count, 8, f"texts in {key!r}")
            return [self._text(len(self._data)) for _ in range(count)]

        form = self._scalar(key, inner)
        size = struct.calcsize(f"<{form}")
        self._afford(count, size, f"numbers in {key!r}")
        values = struct.unpack_from(f"<{count}{form}", self._data, self._at)
        self._at += count * size
        return list(values)

    def _scalar(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise WeightsError(f"{self._path}: got metadata {key!r} of type {kind}; expected 0 … 12, no lists of lists")
        return _SCALARS[kind]

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _text(self, longest: int) -> str:
        length = self._number("Q")
        if length > min(longest, len(self._data) - self._at):
            raise WeightsError(
                f"{self._path}: got a damaged or truncated file; expected a text of {length} bytes at byte {self._at} "
                f"of {len(self._data)}"
            )

        text = bytes(self._data[self._at : self._at + length]).decode("utf-8")
        self._at += length
        return text

    def _afford(self, count: int, size: int, what: str) -> None:
        """Refuses a count of things that the rest of the file has no room for."""
        if count * size > len(self._data) - self._at:
            raise WeightsError(
                f"{self._path}: got a damaged or truncated file; expected {count} {what} with "
                f"{len(self._data) - self._at} bytes left"
            )
