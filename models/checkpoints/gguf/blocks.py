"""Stored types of GGUF tensors: plain ones by NumPy, quantised ones by the package `gguf`."""

import dataclasses
import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from kvpatch_jax.errors import WeightsError
from kvpatch_jax.utils.optional_packages import require

_PLAIN = {
    0: ("F32", np.dtype(np.float32)),
    1: ("F16", np.dtype(np.float16)),
    28: ("F64", np.dtype(np.float64)),
    30: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


@dataclasses.dataclass(frozen=True)
class BlockType:
    """How the values of a row are stored, block by block.

    Attributes:
      name: ggml's. plain: whether `name` is safetensors' name too, the values standing as they are.
      values: in a block. size: of a block in bytes.
      unpack: bytes [R, blocks · size] → values [R, blocks · values].
    """

    name: str
    plain: bool
    values: int
    size: int
    unpack: Callable[[np.ndarray], np.ndarray]


def block_type(kind: int, where: str) -> BlockType:
    """Finds a type by its number.

    Args:
      where: the tensor, for messages.

    Raises:
      WeightsError: a number that is no type, or a type that the installed `gguf` does not dequantise.
      MissingExtraError: a quantised type where `gguf` is not installed.
    """
    if kind in _PLAIN:
        name, dtype = _PLAIN[kind]
        return BlockType(name, True, 1, dtype.itemsize, lambda data: np.ascontiguousarray(data).view(dtype))

    quants = require("gguf.quants", "gguf", "gguf")
    constants = require("gguf.constants", "gguf", "gguf")
    known = {int(member): member for member in constants.GGMLQuantizationType}
    if kind not in known:
        raise WeightsError(
            f"{where}: got type {kind}; expected one of {', '.join(kind.name for kind in known.values())}"
        )

    # Tried on one block: some types have a size there and no arithmetic.
    values, size = constants.GGML_QUANT_SIZES[known[kind]]
    unpack = functools.partial(quants.dequantize, qtype=known[kind])
    try:
        unpack(np.zeros((1, size), np.uint8))
    except NotImplementedError as error:
        raise WeightsError(
            f"{where}: got type {known[kind].name}; expected one that the package gguf dequantises"
        ) from error

    return BlockType(known[kind].name, False, values, size, unpack)
