"""The arithmetic of quantised weights, on plain arrays: float32 throughout, rounded once to the wanted type.

Scaling goes piece by piece, so that beside what comes in and what goes out there is a megabyte.
"""

import functools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from jaxtyping import Float, Integer, Shaped, UInt8, UInt32

WORD = 32  # bits of a packed word
_PIECE = 1 << 17  # values scaled at once: they and their scales stay in the cache
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


@functools.cache
def float8_values(kind: str) -> Float[np.ndarray, "256"]:
    """Tabulates the 256 bytes of an 8-bit type (by safetensors' name: "F8_E4M3", "F8_E5M2", "F8_E8M0") in float32."""
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, _FLOAT8[kind])).astype(np.float32)


def unpack_columns(
    words: UInt32[np.ndarray, "R W"], bits: int, order: tuple[int, ...] | None = None
) -> UInt8[np.ndarray, "R C"]:
    """Unpacks words that hold consecutive columns, the lowest bits first; C = W · 32 / bits.

    Args:
      order: which column of its word each field is, from the lowest bits on; None for 0, 1, 2, …
    """
    count, mask = WORD // bits, np.uint32((1 << bits) - 1)
    fields = np.empty((*words.shape, count), np.uint8)
    for place in range(count):
        fields[..., place if order is None else order[place]] = (words >> np.uint32(place * bits)) & mask
    return fields.reshape(len(words), -1)


def unpack_rows(words: UInt32[np.ndarray, "W C"], bits: int) -> UInt8[np.ndarray, "R C"]:
    """Unpacks words that hold consecutive rows, the lowest bits first; R = W · 32 / bits."""
    count, mask = WORD // bits, np.uint32((1 << bits) - 1)
    fields = np.empty((len(words), count, words.shape[1]), np.uint8)
    for place in range(count):
        fields[:, place] = (words >> np.uint32(place * bits)) & mask
    return fields.reshape(-1, words.shape[1])


def scale_columns(
    stored: Shaped[np.ndarray, "R C"],
    scales: Float[np.ndarray, "r c"],
    rows: Integer[np.ndarray, " R"],
    columns: Integer[np.ndarray, " C"],
    out: Shaped[np.ndarray, "R C"],
    table: Float[np.ndarray, "256"] | None = None,
    zeros: Float[np.ndarray, "r z"] | None = None,
) -> None:
    """Writes (value − zero) · scale into `out`, where scales lie along the columns: blocks, rows, groups in rows.

    Args:
      stored: whole numbers, or bytes that `table` has the values of.
      rows, columns: which scale each row and column has; rows ascend.
      zeros: one beside each scale, or one per row of scales; None for 0.
    """
    for first, last in _pieces(rows, stored.shape[1]):
        values = stored[first:last].astype(np.float32) if table is None else np.take(table, stored[first:last])
        which = rows[first] if rows[first] == rows[last - 1] else rows[first:last]
        for factors, apply in ((zeros, np.subtract), (scales, np.multiply)):
            if factors is not None:
                part = factors[which]
                apply(values, part if factors.shape[1] == 1 else part[..., columns], out=values)
        out[first:last] = values


def scale_rows(
    fields: UInt8[np.ndarray, "R C"],
    scales: Float[np.ndarray, "groups C"],
    zeros: Float[np.ndarray, "groups C"],
    groups: Integer[np.ndarray, " R"],
    out: Shaped[np.ndarray, "R C"],
) -> None:
    """Writes (field − zero) · scale into `out`, where each row is of one group, in any order."""
    for first, last in _pieces(groups, fields.shape[1]):
        values = fields[first:last].astype(np.float32)
        which = groups[first:last]
        one = int(which[0]) if (which == which[0]).all() else which
        values -= zeros[one]
        values *= scales[one]
        out[first:last] = values


def _pieces(groups: Integer[np.ndarray, " R"], width: int) -> Iterator[tuple[int, int]]:
    """Rows to take at once: few enough for the cache, and of one group where groups are long."""
    step = max(1, _PIECE // max(1, width))
    borders = np.flatnonzero(np.diff(groups)) + 1
    stops = [*borders.tolist(), len(groups)] if len(borders) * 8 < len(groups) else [len(groups)]
    first = 0
    for stop in stops:
        for start in range(first, stop, step):
            yield start, min(start + step, stop)
        first = stop
