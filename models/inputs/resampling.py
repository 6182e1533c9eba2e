"""Antialiased resize of uint8 frames, as torchvision's video processors do it, in NumPy.

transformers resizes images by Pillow and videos by torchvision, whose kernel differs from Pillow's in the width of its
integer weights (in 1% of the values, by two steps of 256 at most). This is that kernel: weights in float64, rounded to
as many bits as an int16 holds, along the width first, each direction rounded to uint8.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, UInt8

from kvpatch_jax.errors import ConfigError


def _linear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _cubic(x: float) -> float:
    """Returns Keys' cubic with a = −½, which Pillow has too."""
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def _lanczos(x: float) -> float:
    if not -3 <= x < 3:
        return 0.0
    return _sinc(x) * _sinc(x / 3)


def _sinc(x: float) -> float:
    return 1.0 if x == 0 else math.sin(math.pi * x) / (math.pi * x)


_FILTERS: dict[int, tuple[Callable[[float], float], int]] = {1: (_lanczos, 3), 2: (_linear, 1), 3: (_cubic, 2)}
"""By Pillow's numbers: the filter, and how far it reaches."""
_MOST_BITS = 22


def resize_frames(
    frames: UInt8[np.ndarray, "N H W 3"], height: int, width: int, resample: int
) -> UInt8[np.ndarray, "N h w 3"]:
    """Resizes frames to a size.

    Args:
      resample: Pillow's number of the filter: 1 Lanczos, 2 bilinear, 3 bicubic.

    Raises:
      ConfigError: another filter.
    """
    if resample not in _FILTERS:
        raise ConfigError(f"video resample: got {resample}; expected one of {sorted(_FILTERS)}")
    for axis, size in ((2, width), (1, height)):
        if frames.shape[axis] != size:
            frames = _along(frames, axis, size, resample)
    return frames


def _along(frames: np.ndarray, axis: int, size: int, resample: int) -> np.ndarray:
    places, weights, bits = _taps(frames.shape[axis], size, resample)
    shape = [size if number == axis else length for number, length in enumerate(frames.shape)]
    out, lead = np.empty(shape, np.uint8), (-1,) + (1,) * (len(shape) - 1 - axis)
    # Frame by frame, for room. Weights sum to 2^22 at most, so that the sums of bytes fit.
    for number, frame in enumerate(frames):
        sums = np.full(shape[1:], 1 << (bits - 1), np.int32)
        for place, weight in zip(places, weights, strict=True):
            sums += np.take(frame, place, axis - 1) * weight.reshape(lead)
        out[number] = np.clip(sums >> bits, 0, 255)
    return out


def _taps(
    source: int, target: int, resample: int
) -> tuple[Int32[np.ndarray, "taps target"], Int32[np.ndarray, "taps target"], int]:
    """Returns which places each new one reads, their weights as whole numbers, and how many bits are the fraction."""
    filter_, reach = _FILTERS[resample]
    scale = source / target
    stretch = max(scale, 1.0)
    support = reach * stretch
    rows: list[list[float]] = []
    firsts = []

    for place in range(target):
        centre = scale * (place + 0.5)
        first = max(int(centre - support + 0.5), 0)
        count = min(int(centre + support + 0.5), source) - first
        row = [filter_((number + first - centre + 0.5) / stretch) for number in range(count)]
        total = sum(row)
        rows.append([weight / total for weight in row])
        firsts.append(first)

    most = max(map(max, rows))
    bits = next(n for n in range(_MOST_BITS + 1) if n == _MOST_BITS or int(0.5 + most * 2 ** (n + 1)) >= 2**15)
    weights = np.zeros((max(map(len, rows)), target))
    for place, row in enumerate(rows):
        weights[: len(row), place] = row
    places = np.minimum(np.array(firsts) + np.arange(len(weights))[:, None], source - 1)
    return places.astype(np.int32), np.trunc(weights * 2.0**bits + np.copysign(0.5, weights)).astype(np.int32), bits
