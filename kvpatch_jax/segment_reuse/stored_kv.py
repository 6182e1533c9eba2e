"""Stored KV of segments: phase-free lower layers and the residual above them, on the host, in one of three precisions.

Segment reuse (proposal, §3.2) stores keys after RoPE and turns them by the difference of positions. Here keys are
phase-free, and rotated once. The proposal stores no residual, without which the upper layers of a reused token cannot
run; it is stored beside the KV.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float

Storage = Literal["float32", "bfloat16", "int8"]
STORAGES: tuple[Storage, ...] = ("float32", "bfloat16", "int8")
HostArray = np.ndarray


class Quantised(NamedTuple):
    """Values in int8, and the float32 scale that they are multiplied by."""

    values: HostArray
    scale: HostArray


class StoredKV(NamedTuple):
    """KV of a span as it is stored.

    Attributes:
      kv: {channel: [R,T,K,H]}, layers below the boundary, as floats, or int8 with one float32 scale per layer, head and
        feature.
      residual: [T,D], entering layer R. In bfloat16 if the KV is int8: a step of a 255th of the largest value over all
        tokens would drown the residual of most.
    """

    kv: Mapping[str, HostArray | Quantised]
    residual: HostArray

    @property
    def arrays(self) -> list[HostArray]:
        """All arrays, scales too."""
        found = [self.residual]
        for value in self.kv.values():
            found += [np.asarray(part) for part in value] if isinstance(value, Quantised) else [value]
        return found

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def erase(self) -> None:
        """Overwrites everything with zeros, so that nothing of a segment stays in memory after its eviction."""
        for array in self.arrays:
            array.fill(0)


def pack(kv: Mapping[str, HostArray], residual: Float[HostArray, "T D"], storage: Storage) -> StoredKV:
    """Converts KV {channel: [R,T,K,H]} and its residual to the arrays that are stored, which are copies."""
    if storage == "int8":
        return StoredKV({name: _quantised(value) for name, value in kv.items()}, residual.astype(ml_dtypes.bfloat16))
    dtype = np.dtype(np.float32) if storage == "float32" else np.dtype(ml_dtypes.bfloat16)
    return StoredKV({name: value.astype(dtype) for name, value in kv.items()}, residual.astype(dtype))


def unpack(stored: StoredKV, start: int, stop: int) -> tuple[dict[str, HostArray], HostArray]:
    """Converts tokens start … stop-1 back to float32: {channel: [R,n,K,H]} and the residual [n,D]."""
    kv = {}
    for name, value in stored.kv.items():
        if isinstance(value, Quantised):
            values = np.asarray(value.values)[:, start:stop].astype(np.float32)
            kv[name] = values * np.asarray(value.scale)
        else:
            kv[name] = value[:, start:stop].astype(np.float32)
    return kv, stored.residual[start:stop].astype(np.float32)


def _quantised(value: HostArray) -> Quantised:
    """Rounds to int8, with one scale per layer, head and feature over all tokens."""
    largest = np.abs(value.astype(np.float32)).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest / 127.0, 1.0).astype(np.float32)
    return Quantised(np.rint(value / scale).astype(np.int8), scale)  # pyright: ignore[reportArgumentType]
