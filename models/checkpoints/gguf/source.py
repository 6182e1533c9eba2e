"""`GgufSource`: the tensors of a GGUF file by Hugging Face's names, in Hugging Face's order."""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvpatch_jax.errors import WeightsError

from ..source import NUMPY_TYPES, OpenFile, Slices, StoredTensor, TensorInfo, whole_region
from .blocks import BlockType, block_type
from .header import GgufHeader, GgufTensor

_PIECE = 1 << 18
"""Values dequantised at once."""
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Where a tensor of the model lies in a file.

    Attributes:
      name: of the file's tensor. index: which of its slowest axis' entries (an expert); None for all of it.
      heads: of so many heads, the rows lie with each pair's two side by side, and not in halves; 0 for as they are.
    """

    name: str
    index: int | None = None
    heads: int = 0


class GgufSource:
    """Tensors of a GGUF file, dequantised region by region where they are read.

    Args:
      header: of the file. places: name to where that tensor lies.
      dtype: type of quantised tensors: float32, bfloat16 or float16. Values are computed in float32 and rounded once.

    Raises:
      WeightsError: a tensor past the end of the file, of a type that is not read, or of a shape that its type or its
        heads do not divide. MissingExtraError: quantised tensors where `gguf` is not installed.
    """

    def __init__(self, header: GgufHeader, places: Mapping[str, TensorLocation], dtype: DTypeLike = np.float32):
        self.origin, self._header, self._places = str(header.path), header, dict(places)
        self._file = OpenFile(header.path)
        self._dtype = np.dtype(jnp.dtype(dtype))
        self._types: dict[int, BlockType] = {}
        for name, tensor in header.tensors.items():
            if tensor.kind not in self._types:
                self._types[tensor.kind] = block_type(tensor.kind, f"{self.origin}: tensor {name!r}")

            # Blocks do not reach from one row into the next.
            form, width = self._types[tensor.kind], tensor.shape[-1] if tensor.shape else 1
            if 0 in tensor.shape or width % form.values:
                raise WeightsError(
                    f"{self.origin}: got tensor {name!r} of shape {tensor.shape}; expected rows of whole blocks of "
                    f"{form.values} values, as {form.name} has them"
                )
            stop = tensor.start + math.prod(tensor.shape) // form.values * form.size
            if stop > self._file.size:
                raise WeightsError(
                    f"{self.origin}: got a damaged or truncated file; expected tensor {name!r} up to byte {stop} of "
                    f"{self._file.size}"
                )

        self.tensors: dict[str, TensorInfo] = {}
        for name, place in self._places.items():
            stored = header.tensors[place.name]
            shape = stored.shape if place.index is None else stored.shape[1:]
            if place.heads and (not shape or shape[0] % (2 * place.heads)):
                raise WeightsError(
                    f"{self.origin}: got tensor {place.name!r} of shape {shape}; expected rows of {place.heads} heads "
                    "of pairs"
                )
            form = self._types[stored.kind]
            self.tensors[name] = TensorInfo(shape, form.name if form.plain else _NAMES[self._dtype.name])

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it; of quantised ones whole blocks are taken from the file."""
        place, shape = self._places[name], self.tensors[name].shape
        stored = self._header.tensors[place.name]
        form = self._types[stored.kind]
        span = whole_region(shape, region)
        if len(shape) < 2:
            width = stored.shape[-1] if stored.shape else 1
            values = self._columns(stored, form, np.arange(1), slice(0, width)).reshape(stored.shape)
            return (values[_pairs_to_halves(width, place.heads)] if place.heads else values)[span]

        # Rows are numbered through all leading axes, as they lie in the file.
        *leading, columns = span
        numbers = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])[tuple(leading)].reshape(-1)
        if place.heads:
            numbers = _pairs_to_halves(shape[0], place.heads)[numbers]
        if place.index is not None:
            numbers = numbers + place.index * math.prod(shape[:-1])
        out = self._columns(stored, form, numbers, columns)
        return out.reshape([part.stop - part.start for part in span])

    def stored(self, name: str) -> StoredTensor | None:
        """Returns where a tensor's bytes lie; None for one that is quantised or in another order."""
        place, shape = self._places[name], self.tensors[name].shape
        found = self._header.tensors[place.name]
        form = self._types[found.kind]
        if not form.plain or place.heads:
            return None
        start = found.start + (place.index or 0) * math.prod(shape) * form.size
        return StoredTensor(self._file, start, shape, NUMPY_TYPES[form.name])

    def _columns(self, stored: GgufTensor, form: BlockType, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Returns some columns of some rows, a piece of the rows at a time (and those between rows that are out of
        order).
        """
        width = stored.shape[-1] if stored.shape else 1
        blocks = slice(columns.start // form.values, -(-columns.stop // form.values))
        cut = slice(columns.start - blocks.start * form.values, columns.stop - blocks.start * form.values)
        size = width // form.values * form.size
        dtype = NUMPY_TYPES[form.name] if form.plain else self._dtype
        out = np.empty((len(rows), columns.stop - columns.start), dtype)
        step = max(1, _PIECE // width)

        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            first = int(part.min())
            data = np.empty((int(part.max()) + 1 - first, size), np.uint8)
            self._file.read_into(data, stored.start + first * size)
            chosen = np.ascontiguousarray(data[part - first, blocks.start * form.size : blocks.stop * form.size])
            # Numbers that are not finite are refused by the reader, which knows their tensor.
            with np.errstate(all="ignore"):
                out[start : start + step] = form.unpack(chosen)[:, cut]

        return out


def _pairs_to_halves(rows: int, heads: int) -> np.ndarray:
    """Returns where each row of a matrix whose heads rotate in halves lies, where they are stored in pairs."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
