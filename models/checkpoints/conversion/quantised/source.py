"""`DequantisedSource`: the tensors of a quantised checkpoint as if it were a plain one."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvpatch_jax.errors import WeightsError

from ...json_table import read_table
from ...safetensors_files import SafetensorsSource
from ...source import Slices, StoredTensor, TensorInfo, TensorSource, stored_tensor, whole_region
from .arithmetic import WORD
from .settings import Quantisation, split_config
from .tensors import AwqTensor, GptqTensor, PackedTensor, QuantisedTensor, ScaledTensor

_FLOATS = ("F32", "F16", "BF16")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_zero_point|input_scale_ub|activation_scale|output_scale|[qkv]_scale)"
)
"""Scales of what is multiplied with the weights or kept in a cache; here both stay as they are."""
_MARKS = re.compile(
    r".*(\.qweight|\.qzeros|\.g_idx|_packed|_blocks|_scale_inv|\.absmax|\.SCB|\.nested_absmax|weight_scale)"
)
"""Names that only quantised checkpoints have."""


class DequantisedSource:
    """Tensors of a quantised checkpoint, dequantised where they are read; plain ones as they are.

    Values are computed in float32 and rounded once. Only the packed parts of the region that is asked for are read.

    Args:
      inner: the checkpoint's own tensors.
      quantisation: what its configuration says of them.
      dtype: type of dequantised tensors: float32, bfloat16 or float16.

    Attributes:
      unused: biases of zeros, which GPTQ's packers give to modules that have none.

    Raises:
      WeightsError: quantised tensors that lack a part, or with parts of another shape or type than each other or the
        configuration say, or that the configuration says are not quantised.
    """

    def __init__(self, inner: TensorSource, quantisation: Quantisation, dtype: DTypeLike = np.float32):
        self.origin, self._inner, self._quantisation = inner.origin, inner, quantisation
        self._dtype = np.dtype(jnp.dtype(dtype))
        find = {"gptq": self._gptq, "awq": self._awq}.get(quantisation.method, self._scaled)
        self._quantised: dict[str, QuantisedTensor] = dict(find())

        # A plain checkpoint has neither the parts of quantised weights nor scales of activations.
        self._check_plain()
        parts = set[str]().union(*(tensor.parts for tensor in self._quantised.values()))
        self.tensors: dict[str, TensorInfo] = {
            name: info for name, info in inner.tensors.items() if name not in parts and not _ACTIVATIONS.fullmatch(name)
        }
        twice = sorted(set(self._quantised) & set(self.tensors))
        if twice:
            raise WeightsError(f"{self.origin}: got tensor {twice[0]!r} plain and quantised; expected one of them")

        check_plain_tensors(self.origin, self.tensors, f"{quantisation.place} says {quantisation.method!r}")
        kind = _NAMES[self._dtype.name]
        self.tensors |= {name: TensorInfo(tensor.shape, kind) for name, tensor in self._quantised.items()}
        self.unused = frozenset(self._zero_biases())

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it, dequantised where it is quantised.

        Raises:
          WeightsError: data that cannot be read, or that names groups that are not there.
        """
        tensor = self._quantised.get(name)
        if tensor is None:
            return self._inner.read(name, region)
        return tensor.read(self._inner, whole_region(tensor.shape, region), self._dtype)

    def stored(self, name: str) -> StoredTensor | None:
        """Returns where a plain tensor's bytes lie."""
        return None if name in self._quantised else stored_tensor(self._inner, name)

    # ------------------------------------------------------------------------------------- what there is

    def _gptq(self) -> Iterator[tuple[str, QuantisedTensor]]:
        """Plans GPTQ's tensors, with each part's shape held against the others'."""
        for prefix, found in self._modules("qweight"):
            assert found.bits is not None
            rows, outputs = self._info(f"{prefix}.qweight", ("I32",), 2)
            inputs = rows * WORD // found.bits
            size = found.group_size or inputs
            groups = -(-inputs // size)
            # Weights are packed along the inputs, zeros along the outputs.
            self._expect(f"{prefix}.qzeros", ("I32",), (groups, -(-outputs * found.bits // WORD)))
            self._expect(f"{prefix}.scales", _FLOATS, (groups, outputs))
            indexed = f"{prefix}.g_idx" in self._inner.tensors

            if indexed:
                self._expect(f"{prefix}.g_idx", ("I32", "I64"), (inputs,))
            elif not found.ordered:
                raise WeightsError(f"{self.origin}: got no tensor '{prefix}.g_idx'; expected it with desc_act")

            yield (
                f"{prefix}.weight",
                GptqTensor(prefix, found.bits, (outputs, inputs), size, indexed, found.ordered, found.zero_offset),
            )

    def _awq(self) -> Iterator[tuple[str, QuantisedTensor]]:
        """Plans AWQ's tensors."""
        for prefix, found in self._modules("qweight"):
            # Eight values of 4 bits to a word, packed along the outputs.
            inputs, words = self._info(f"{prefix}.qweight", ("I32",), 2)
            size = found.group_size or inputs
            groups = -(-inputs // size)
            self._expect(f"{prefix}.qzeros", ("I32",), (groups, words))
            self._expect(f"{prefix}.scales", _FLOATS, (groups, 8 * words))
            yield f"{prefix}.weight", AwqTensor(prefix, (8 * words, inputs), size)

    def _scaled(self) -> Iterator[tuple[str, QuantisedTensor]]:
        """Plans FP8 and int8 tensors with scales beside them, and packed integers."""
        for prefix, found in self._modules("weight_packed"):
            yield f"{prefix}.weight", self._packed(f"{prefix}.weight", found)
        for name, info in self._inner.tensors.items():
            if info.dtype in _FLOAT8 or (info.dtype == "I8" and f"{name}_scale" in self._inner.tensors):
                yield name, self._blocks(name, info)

    def _packed(self, prefix: str, found: Quantisation) -> PackedTensor:
        """Plans a tensor of packed integers."""
        outputs, words = self._info(f"{prefix}_packed", ("I32",), 2)
        self._expect(f"{prefix}_shape", ("I32", "I64"), (2,))
        shape = [int(size) for size in self._inner.read(f"{prefix}_shape")]
        # Groups of several widths may be in one file, so the words say which width a tensor has.
        fitting = [bits for bits in (4, 8) if shape == [outputs, shape[1]] and -(-shape[1] * bits // WORD) == words]
        if found.bits is not None:
            fitting = [bits for bits in fitting if bits == found.bits]
        if not fitting or shape[1] < 1:
            wanted = f"{found.bits} bits" if found.bits else "4 or 8 bits"
            raise WeightsError(
                f"{self.origin}: got tensor '{prefix}_packed' of shape {(outputs, words)}; expected that of {shape} in "
                f"{wanted}, as '{prefix}_shape' says"
            )

        inputs, bits = shape[1], fitting[0]
        rows = self._info(f"{prefix}_scale", _FLOATS, 2)
        size = inputs if rows[1] == 1 else found.group_size or inputs
        self._expect(f"{prefix}_scale", _FLOATS, (outputs, -(-inputs // size)))
        zeros, indexed = (f"{prefix}_{part}" in self._inner.tensors for part in ("zero_point", "g_idx"))
        if zeros:
            self._expect(f"{prefix}_zero_point", ("I32",), (-(-outputs * bits // WORD), -(-inputs // size)))
        if indexed:
            self._expect(f"{prefix}_g_idx", ("I32", "I64"), (inputs,))
        return PackedTensor(prefix, bits, (outputs, inputs), size, zeros, indexed)

    def _blocks(self, name: str, info: TensorInfo) -> ScaledTensor:
        """Plans a tensor of bytes with scales."""
        scale = next(
            (f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in self._inner.tensors), None
        )
        if scale is None:
            raise WeightsError(
                f"{self.origin}: got tensor {name!r} of {info.dtype} without scales; expected '{name}_scale_inv' or "
                f"'{name}_scale'"
            )
        if len(info.shape) < 2:
            raise WeightsError(
                f"{self.origin}: got tensor {name!r} of {info.dtype} {info.shape}; expected two axes or more"
            )

        kinds = (*_FLOATS, "F8_E8M0", "U8") if info.dtype in _FLOAT8 else _FLOATS
        block = self._block(name, info.shape, scale)
        shape = self._info(scale, kinds, None)
        zero = f"{name}_zero_point" if f"{name}_zero_point" in self._inner.tensors else None
        if zero is not None:
            self._expect(zero, ("I8", *_FLOAT8), shape)
        return ScaledTensor(name, scale, zero, info.dtype, info.shape, block)

    def _block(self, name: str, shape: tuple[int, ...], scale: str) -> tuple[int, int]:
        """Returns rows and columns that share a scale, as the shape of the scales says."""
        *leading, rows, columns = shape
        found, quantisation = self._inner.tensors[scale].shape, self._quantisation
        known = [quantisation.block] if quantisation.block else []
        known += [(1, quantisation.group_size)] if quantisation.group_size else []
        known += [(1, columns), (rows, columns)]
        # Where two ways make scales of one shape, the first of `known` counts: what the configuration says.
        fitting: dict[tuple[int, ...], tuple[int, int]]
        fitting = {(*leading, -(-rows // block[0]), -(-columns // block[1])): block for block in reversed(known)}
        # A single scale may have any number of axes, none included.
        if math.prod(found) == 1 and not leading:
            return rows, columns
        if found not in fitting:
            raise WeightsError(
                f"{self.origin}: got tensor {scale!r} of shape {found}; expected one of {sorted(fitting)} for {name!r} "
                f"of shape {shape}"
            )
        return fitting[found]

    # --------------------------------------------------------------------------------------------- checks

    def _modules(self, part: str) -> Iterator[tuple[str, Quantisation]]:
        """Yields modules with a tensor of this name, and how each is quantised."""
        for name in self._inner.tensors:
            prefix = name.removesuffix(f".{part}")
            if prefix != name:
                found = self._quantisation.of_module(prefix)
                yield prefix, self._quantisation if found is None else found  # which ones must not be is checked below

    def _info(self, name: str, kinds: tuple[str, ...], axes: int | None) -> tuple[int, ...]:
        """Returns the shape of a part, whose type and number of axes are checked."""
        info = self._inner.tensors.get(name)
        if info is None:
            raise WeightsError(
                f"{self.origin}: got no tensor {name!r}; expected it beside the others of its module, which "
                f"{self._quantisation.place} says is quantised by {self._quantisation.method!r}"
            )
        if info.dtype not in kinds:
            raise WeightsError(
                f"{self.origin}: got tensor {name!r} of type {info.dtype}; expected one of {', '.join(kinds)}"
            )
        if axes is not None and (len(info.shape) != axes or 0 in info.shape):
            raise WeightsError(
                f"{self.origin}: got tensor {name!r} of shape {info.shape}; expected {axes} axes, none empty"
            )
        return info.shape

    def _expect(self, name: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
        found = self._info(name, kinds, None)
        if found != shape:
            raise WeightsError(
                f"{self.origin}: got tensor {name!r} of shape {found}; expected {shape}, as the rest of its module and "
                f"{self._quantisation.place} say"
            )

    def _check_plain(self) -> None:
        """Refuses quantised tensors of modules that are said to be plain: one of the two is wrong."""
        for name, tensor in self._quantised.items():
            module = name.removesuffix(".weight")
            if self._quantisation.of_module(module) is None:
                raise WeightsError(
                    f"{self.origin}: got tensor {tensor.parts[0]!r} quantised, where {self._quantisation.place} says "
                    f"that {module!r} is not; expected a plain {name!r}"
                )

    def _zero_biases(self) -> Iterator[str]:
        """Yields biases that GPTQ's packers give to modules that have none."""
        for name in self._quantised if self._quantisation.method in ("gptq", "awq") else ():
            bias = f"{name.removesuffix('weight')}bias"
            if bias in self.tensors and not self._inner.read(bias).any():
                yield bias


def check_plain_tensors(origin: str, tensors: Mapping[str, TensorInfo], why: str) -> None:
    """Refuses tensors that only quantised checkpoints have, where they are not, or no longer, accounted for.

    Raises:
      WeightsError: it names the first of them and `why` it is not read.
    """
    for name, info in tensors.items():
        if info.dtype.startswith("F8") or _MARKS.fullmatch(name):
            raise WeightsError(
                f"{origin}: got tensor {name!r} ({info.dtype} {info.shape}) of quantised weights; expected settings "
                f"that account for it ({why})"
            )


@dataclasses.dataclass(frozen=True)
class QuantisedDirectory:
    """A directory of quantised weights, as a `Conversion`."""

    directory: Path
    config: dict[str, Any]
    quantisation: Quantisation

    def source(self, dtype: DTypeLike) -> TensorSource:
        """See `Conversion`."""
        return DequantisedSource(SafetensorsSource(self.directory), self.quantisation, dtype)


def find_quantised(directory: Path) -> QuantisedDirectory | None:
    """Returns how a directory's weights are quantised; None where nothing in it says that they are.

    Raises:
      ConfigError: a `config.json` that is not JSON, or what `split_config` refuses.
    """
    path = directory / "config.json"
    raw = read_table(path) if path.is_file() else {}
    config, quantisation = split_config(raw, directory)
    return None if quantisation is None else QuantisedDirectory(directory, config, quantisation)
