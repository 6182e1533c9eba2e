"""Pieces of a tensor that stay in the cache from their read to their place: cast, turned, and checked for NaN."""

import math
from collections.abc import Iterator

import numpy as np

from kvpatch_jax.errors import WeightsError

PIECE = 1 << 20
"""Bytes at once: they stay in a core's second-level cache from the read to the last look at them."""
_ROWS, _ALIASED_ROWS = 512, 128  # at once where axes change places; of rows that fall on the same sets of the cache
_PAGE = 4096  # bytes; rows of a multiple of them do

Spans = tuple[tuple[int, int], ...]
"""A region: where each axis starts and stops."""

_WIDE = np.dtype([("low", "<u2"), ("high", "<u2")])
"""A float32 as two halves, the high one being its bfloat16."""


def pieces(spans: Spans, width: int, turned: bool) -> Iterator[Spans]:
    """Yields the regions that a region is read by, which lie one behind the other in C order.

    Args:
      width: bytes of a number. turned: the last two axes change places where the region goes.
    """
    if not spans:
        yield spans
        return
    (first, last), *inner = spans
    row_bytes = width * math.prod(stop - start for start, stop in inner)
    if len(spans) > 2 or (inner and row_bytes > PIECE):
        for index in range(first, last):
            for rest in pieces(tuple(inner), width, turned):
                yield (index, index + 1), *rest
        return
    step = max(1, PIECE // max(row_bytes, 1))
    if inner and turned:
        step = min(step, _ROWS if row_bytes % _PAGE else _ALIASED_ROWS)
    for start in range(first, last, step):
        yield (start, min(start + step, last)), *inner


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
