"""Copying a tensor of a file into memory in another type and order, by pieces that stay in the cache meanwhile."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from kvpatch_jax.errors import WeightsError

from .source import StoredTensor

PIECE = 1 << 20
"""Bytes at once: they stay in a core's second-level cache from the read to the last look at them."""
_ROWS, _ALIASED_ROWS = 512, 128  # at once where axes change places; of rows that fall on the same sets of the cache
_PAGE = 4096  # bytes; rows of a multiple of them do

Spans = tuple[tuple[int, int], ...]
"""A region: where each axis starts and stops."""

Look = Callable[[np.ndarray, tuple[int, ...]], None]

_WIDE = np.dtype([("low", "<u2"), ("high", "<u2")])
"""A float32 as two halves, the high one being its bfloat16."""


def fill(stored: StoredTensor, spans: Spans, out: np.ndarray, look: Look | None = None) -> None:
    """Copies a region of a tensor into an array of its shape, of any floating type and any order of axes.

    Args:
      stored: the tensor.
      spans: the region.
      out: where it goes. An array of float32 for a tensor of bfloat16 must hold zeros.
      look: is shown each piece, with its place in the tensor, and may raise.

    Raises:
      WeightsError: a file that ends before or cannot be read.
    """
    if not out.size:
        return
    if not spans:
        return fill(StoredTensor(stored.file, stored.start, (1,), stored.dtype), ((0, 1),), out[None], look)

    start = tuple(first for first, _ in spans)
    for place, piece, part in _pieces(stored, spans, out):
        if look is not None:
            look(piece, tuple(a + b for a, b in zip(start, place, strict=True)))
        if part is not None:
            convert(piece, part)


def _pieces(
    stored: StoredTensor, spans: Spans, out: np.ndarray
) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray | None]]:
    """Yields pieces of the region as they are read: place in the region, values, and the part of `out` they are for.

    That part is None where they were read into `out` itself. Values are there until the next piece is asked for.
    """
    first, last = spans[0]
    if len(spans) > 2 or (len(spans) == 2 and _row_bytes(spans, stored.dtype) > PIECE):
        for index in range(last - first):
            for place, piece, part in _pieces(stored[first + index], spans[1:], out[index]):
                yield (index, *place), piece[None], None if part is None else part[None]
        return

    row_bytes, stride = _row_bytes(spans, stored.dtype), math.prod(stored.shape[1:]) * stored.dtype.itemsize
    step = max(1, PIECE // row_bytes)
    straight = out.dtype == stored.dtype and out.flags.c_contiguous
    if len(spans) == 2 and not straight and out.strides[1] > out.strides[0]:
        step = min(step, _ROWS if row_bytes % _PAGE else _ALIASED_ROWS)
    skip = sum(first for first, _ in spans[1:]) * stored.dtype.itemsize
    buffer = np.empty((0 if straight else step, *out.shape[1:]), stored.dtype)

    for index in range(0, last - first, step):
        part = out[index : index + step]
        rows = part if straight else buffer[: len(part)]
        start = stored.start + (first + index) * stride
        if row_bytes == stride:
            stored.file.read_into(rows, start)
        else:
            for number, row in enumerate(rows):
                stored.file.read_into(row, start + number * stride + skip)
        yield (index, *[0] * (len(spans) - 1)), rows, None if straight else part


def _row_bytes(spans: Spans, dtype: np.dtype) -> int:
    return math.prod(stop - start for start, stop in spans[1:]) * dtype.itemsize


def convert(values: np.ndarray, out: np.ndarray) -> None:
    """Copies values into an array of their shape, rounded to its type, whatever the order of its axes.

    bfloat16 goes into float32 as the high half of each number: the low halves must be zeros.
    """
    if values.dtype == out.dtype and out.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{out.dtype.itemsize}")  # NumPy's own types: copied without the interpreter's lock
        out.view(bits)[...] = values.view(bits)
    elif values.dtype.name == "bfloat16" and out.dtype == np.float32:
        out.view(_WIDE)["high"] = values.view(np.uint16)
    elif out.ndim and out.strides[-1] != out.dtype.itemsize:  # first the type, then the order: each loop is simple
        convert(values.astype(out.dtype), out)
    else:
        out[...] = values


_EXPONENTS = {"float64": (8, 0x7FF << 52), "float32": (4, 0xFF << 23), "float16": (2, 0x1F << 10)}
_EXPONENTS |= {"bfloat16": (2, 0xFF << 7)}
"""By type: its width in bytes, and the bits of the exponent, which are all set in infinities and NaN alone."""


def check_finite(values: np.ndarray, start: tuple[int, ...], name: str, infinite: bool = False) -> None:
    """Raises WeightsError for NaN and, unless they are allowed, infinities; `start` is where the values begin in the
    tensor.

    Looks at the bits, without a cast: as signed numbers those of a positive NaN or infinity are the largest, as
    unsigned ones those of a negative one.
    """
    width, exponent = _EXPONENTS.get(values.dtype.name, (0, 0))
    if not width or not values.size:
        return

    bits, sign = values.view(f"u{width}"), 1 << (8 * width - 1)
    if int(values.view(f"i{width}").max()) < exponent + infinite and int(bits.max()) < (sign | exponent) + infinite:
        return

    mask = bits.dtype.type(exponent)
    wrong = (bits & bits.dtype.type(sign - 1)) > mask if infinite else (bits & mask) == mask
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    shifted = [at + first for at, first in zip(place, start, strict=True)]
    raise WeightsError(f"tensor {name!r}: got {float(values[place])} at {shifted}; expected finite numbers")
