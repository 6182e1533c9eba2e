"""Phi-3-vision's HD transform: an image as rows and columns of square crops, behind a small whole of it.

Every step rounds as Microsoft's `processing_phi3_v.py` does with torchvision and torch.
"""

import math

import numpy as np
from jaxtyping import Float32, UInt8

from ..towers.common import axis_taps
from .qwen_images import ImageConfig, resize

WHITE = 255


def hd_scale(long: int, short: int, crops: int) -> int:
    """Returns how many crops the longer side of an image is wide: as many as leave at most `crops` in all."""
    scale = 1
    while scale * math.ceil(scale / (long / short)) <= crops:
        scale += 1
    return scale - 1


def hd_transform(
    image: UInt8[np.ndarray, "H W 3"], side: int, crops: int, pixels: ImageConfig
) -> UInt8[np.ndarray, "H2 W2 3"]:
    """Resizes an image to a whole number of crops along its longer side, and pads the shorter one with white to such.

    Args:
      side: pixels of a crop's side. crops: how many there are at most.
    """
    # A tall image lies down meanwhile: the order of the two passes of a resize decides how it rounds.
    tall = image.shape[1] < image.shape[0]
    if tall:
        image = np.ascontiguousarray(image.transpose(1, 0, 2))

    height, width = image.shape[:2]
    wide = hd_scale(width, height, crops) * side
    image = resize(image, max(int(wide / (width / height)), 1), wide, pixels)

    room = -image.shape[0] % side
    top = room // 2
    padded = np.pad(image, ((top, room - top), (0, 0), (0, 0)), constant_values=WHITE)
    return padded.transpose(1, 0, 2) if tall else padded


def shrink(image: Float32[np.ndarray, "3 H W"], side: int) -> Float32[np.ndarray, "3 S S"]:
    """Returns a normalised image as a square: torch's bicubic interpolation, which reads 4×4 pixels for each one
    however much it shrinks.
    """
    places = np.arange(side)
    for axis in (2, 1):
        taps, weights = axis_taps(places, side, image.shape[axis], "bicubic")
        shape = [1, 1, 1]
        shape[axis] = side
        # Tap by tap in float32, as torch sums them.
        total = np.zeros((), np.float32)
        for tap in range(taps.shape[1]):
            total = total + np.take(image, taps[:, tap], axis=axis) * weights[:, tap].reshape(shape)
        image = total
    return image
