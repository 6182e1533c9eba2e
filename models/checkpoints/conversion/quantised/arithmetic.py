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


@functools.cache
def _float8_pairs(kind: str) -> np.ndarray:
    """Returns the values of every two bytes, side by side in a word: half the look-ups."""
    values = float8_values(kind)
    return np.stack(np.broadcast_arrays(values[None, :], values[:, None]), -1).view(np.uint64).reshape(-1)


def float8_to_float32(stored: UInt8[np.ndarray, "R C"], kind: str) -> Float[np.ndarray, "R C"]:
    """Turns bytes into the numbers of an 8-bit type (see `float8_values`)."""
    if stored.size % 2:
        return np.take(float8_values(kind), stored)
    pairs = np.ascontiguousarray(stored).reshape(-1).view("<u2")
    return np.take(_float8_pairs(kind), pairs).view(np.float32).reshape(stored.shape)


@functools.cache
def _half_words(order: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for the low and the high half of a word of eight fields, its four fields as bytes in place."""
    halves = np.arange(1 << 16, dtype=np.uint64)
    tables = np.zeros((2, 1 << 16), np.uint64)
    for place, column in enumerate(order):
        field = (halves >> np.uint64(4 * (place % 4))) & np.uint64(15)
        tables[place // 4] |= field << np.uint64(8 * column)
    return tables[0].astype("<u8"), tables[1].astype("<u8")


def unpack_columns(
    words: UInt32[np.ndarray, "R W"], bits: int, order: tuple[int, ...] | None = None
) -> UInt8[np.ndarray, "R C"]:
    """Unpacks words that hold consecutive columns, the lowest bits first; C = W · 32 / bits.

    Args:
      bits: 2, 4 or 8.
      order: for 4 bits, which column of its word each field is, from the lowest bits on; None for 0, 1, 2, …
    """
    words = np.ascontiguousarray(words, "<u4")
    if bits == 8:
        return words.view(np.uint8)
    if bits == 4:
        halves = words.view("<u2").reshape(*words.shape, 2)
        low, high = _half_words(order or tuple(range(8)))
        return (low[halves[..., 0]] | high[halves[..., 1]]).view(np.uint8)
    places = np.arange(0, WORD, bits, dtype=np.uint32)
    return ((words[..., None] >> places) & np.uint32(3)).astype(np.uint8).reshape(len(words), -1)


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
    kind: str | None = None,
    zeros: Float[np.ndarray, "r z"] | None = None,
) -> None:
    """Writes (value − zero) · scale into `out`, where scales lie along the columns: blocks, rows, groups in rows.

    Args:
      stored: whole numbers, or the bytes of an 8-bit type, `kind`.
      rows, columns: which scale each row and column has; rows ascend.
      zeros: one beside each scale, or one per row of scales; None for 0.
    """
    width = len(columns)
    count = int(columns[-1] - columns[0]) + 1
    # Shuffled groups may end before they begin: then no count of equal runs describes them.
    even = count > 0 and width % count == 0
    regular = even and np.array_equal(columns, columns[0] + np.arange(width) // (width // count))
    used = slice(int(columns[0]), int(columns[-1]) + 1)

    for first, last in _pieces(rows, width):
        piece = stored[first:last]
        values = piece.astype(np.float32) if kind is None else float8_to_float32(piece, kind)
        which = rows[first] if rows[first] == rows[last - 1] else rows[first:last]

        for factors, apply in ((zeros, np.subtract), (scales, np.multiply)):
            if factors is None:
                continue

            part = factors[which]
            if factors.shape[1] == 1:
                apply(values, part, out=values)
            elif regular:
                grouped = values.reshape(len(values), count, -1)
                apply(grouped, part[..., used, None], out=grouped)
            else:
                apply(values, part[..., columns], out=values)

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
    """Yields rows to take at once: few enough for the cache, and of one group where groups are long."""
    step = max(1, _PIECE // max(1, width))
    borders = np.flatnonzero(np.diff(groups)) + 1
    stops = [*borders.tolist(), len(groups)] if len(borders) * 8 < len(groups) else [len(groups)]
    first = 0
    for stop in stops:
        for start in range(first, stop, step):
            yield start, min(start + step, stop)
        first = stop
