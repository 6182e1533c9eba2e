"""Antialiased resize of uint8 frames, as torchvision's video processors do it, in NumPy.

transformers resizes images by Pillow and videos by torchvision, whose kernel differs from Pillow's in the width of its
integer weights, by one step of 256 at most. This is that kernel: weights in float64, rounded to as many bits as an
int16 holds, rows first, each direction rounded to uint8.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, UInt8

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
    weights, bits = _weights(frames.shape[axis], size, resample)
    out = np.empty([size if place == axis else length for place, length in enumerate(frames.shape)], np.uint8)
    # Sums of whole numbers below 2^53: exact in float64, where products of matrices are fast. Frame by frame, for room.
    for number, frame in enumerate(frames):
        sums = np.moveaxis(np.tensordot(weights, frame.astype(np.float64), (1, axis - 1)), 0, axis - 1)
        out[number] = np.clip(np.floor((sums + 2.0 ** (bits - 1)) / 2.0**bits), 0, 255)
    return out


def _weights(source: int, target: int, resample: int) -> tuple[Float64[np.ndarray, "target source"], int]:
    """Returns whole-number weights, and how many bits of them are the fraction."""
    filter_, reach = _FILTERS[resample]
    scale = source / target
    stretch = max(scale, 1.0)
    support = reach * stretch
    weights = np.zeros((target, source))

    for place in range(target):
        centre = scale * (place + 0.5)
        first = max(int(centre - support + 0.5), 0)
        count = min(int(centre + support + 0.5), source) - first
        row = [filter_((number + first - centre + 0.5) / stretch) for number in range(count)]
        total = sum(row)
        weights[place, first : first + count] = [weight / total for weight in row]

    bits = next(n for n in range(_MOST_BITS + 1) if n == _MOST_BITS or int(0.5 + weights.max() * 2 ** (n + 1)) >= 2**15)
    return np.trunc(weights * 2.0**bits + np.copysign(0.5, weights)), bits
