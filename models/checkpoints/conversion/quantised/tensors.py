"""Quantised tensors of each form: what they stand for, which tensors hold them, and how a region of one is read."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import numpy as np

from kvpatch_jax.errors import WeightsError

from ...source import TensorSource
from .arithmetic import WORD, float8_values, scale_columns, scale_rows, unpack_columns, unpack_rows

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of its word that each field is, from the lowest bits on, as AutoAWQ packs for its kernels."""


@runtime_checkable
class QuantisedTensor(Protocol):
    """A weight that is held in other tensors.

    Attributes:
      shape: of the weight, as the unquantised checkpoint has it ([out, in] for a linear map).
      parts: names of the tensors that hold it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    def read(self, source: TensorSource, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Dequantises a region (a slice with start and stop per axis), of which alone the parts are read."""
        ...


@dataclasses.dataclass(frozen=True)
class ScaledTensor:
    """Bytes (float8 or int8) with a scale per block of the last two axes: FP8 releases, compressed-tensors.

    Attributes:
      name, scale, zero: of the tensors; `zero` None for symmetric ones.
      kind: type of the bytes, by safetensors' name.
      block: rows and columns that share a scale.
    """

    name: str
    scale: str
    zero: str | None
    kind: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.scale) if self.zero is None else (self.name, self.scale, self.zero)

    def read(self, source: TensorSource, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """See `QuantisedTensor`."""
        out = np.empty([part.stop - part.start for part in region], dtype)
        *leading, rows, columns = region
        for lead in np.ndindex(*(part.stop - part.start for part in leading)):
            place = tuple(slice(part.start + at, part.start + at + 1) for part, at in zip(leading, lead, strict=True))
            self._read_matrix(source, place, rows, columns, out[lead])
        return out

    def _read_matrix(
        self, source: TensorSource, place: tuple[slice, ...], rows: slice, columns: slice, out: np.ndarray
    ) -> None:
        stored = source.read(self.name, (*place, rows, columns))
        stored = stored.reshape(out.shape).view(np.int8 if self.kind == "I8" else np.uint8)
        blocks = [_blocks(part, size) for part, size in zip((rows, columns), self.block, strict=True)]
        scales = self._factors(source, self.scale, place, blocks)
        zeros = None if self.zero is None else self._factors(source, self.zero, place, blocks)
        row, column = (
            np.arange(part.start, part.stop) // size - first.start
            for part, size, first in zip((rows, columns), self.block, blocks, strict=True)
        )
        scale_columns(stored, scales, row, column, out, None if self.kind == "I8" else self.kind, zeros)

    def _factors(self, source: TensorSource, name: str, place: tuple[slice, ...], blocks: list[slice]) -> np.ndarray:
        """Reads scales or zeros of some blocks, float32 [r, c]. A single one may be stored without axes."""
        info = source.tensors[name]
        found = source.read(name, None if math.prod(info.shape) == 1 else (*place, *blocks))
        # A U8 scale is an exponent alone (MX): float8_e8m0 in all but name.
        if info.dtype == "U8" or info.dtype.startswith("F8"):
            table = float8_values("F8_E8M0" if info.dtype == "U8" else info.dtype)
            found = table[np.atleast_1d(found).view(np.uint8)]
        return found.astype(np.float32).reshape([part.stop - part.start for part in blocks])


@dataclasses.dataclass(frozen=True)
class GptqTensor:
    """GPTQ: words of several input rows [in · bits / 32, out], zeros packed along the outputs, scales [groups, out].

    Attributes:
      prefix: of the module. bits: 2, 4 or 8. shape: [out, in].
      group_size: inputs per group, where they lie in order. indexed: whether `g_idx` is there.
      ordered: whether the inputs of a group lie side by side (no act-order), so that `g_idx` must say so.
      zero_offset: what the format took from the zeros: "none" (v2), "fields" (AutoGPTQ: 1 from each, kept within its
        bits), "words" (GPTQModel: 1 from each, as one subtraction over the word).
    """

    prefix: str
    bits: int
    shape: tuple[int, int]
    group_size: int
    indexed: bool
    ordered: bool
    zero_offset: str

    @property
    def parts(self) -> tuple[str, ...]:
        names = ("qweight", "qzeros", "scales", *(("g_idx",) if self.indexed else ()))
        return tuple(f"{self.prefix}.{name}" for name in names)

    def read(self, source: TensorSource, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """See `QuantisedTensor`."""
        outputs, inputs = region
        fields = _packed_rows(source, f"{self.prefix}.qweight", inputs, outputs, self.bits)
        groups = self._groups(source, inputs)
        scales = source.read(f"{self.prefix}.scales", (slice(None), outputs)).astype(np.float32)
        out = np.empty(fields.shape, dtype)
        scale_rows(fields, scales, self._zeros(source, outputs), groups, out)
        return out.T

    def _groups(self, source: TensorSource, inputs: slice) -> np.ndarray:
        in_order = np.arange(inputs.start, inputs.stop) // self.group_size
        if not self.indexed:
            return in_order

        name = f"{self.prefix}.g_idx"
        found = source.read(name, (inputs,))
        if self.ordered and not np.array_equal(found, in_order):
            raise WeightsError(
                f"{source.origin}: got tensor {name!r} out of order where desc_act is false; expected groups of "
                f"{self.group_size} inputs side by side"
            )
        _check_groups(source, name, found, -(-self.shape[1] // self.group_size))
        return found

    def _zeros(self, source: TensorSource, outputs: slice) -> np.ndarray:
        # The 1 that was taken from each field comes back as it went: with carries from field to field, or without.
        ones = sum(1 << place for place in range(0, WORD, self.bits)) if self.zero_offset == "words" else 0
        fields = _packed_columns(source, f"{self.prefix}.qzeros", slice(None), outputs, self.bits, added=ones)
        if self.zero_offset == "fields":
            fields = (fields + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return fields.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class AwqTensor:
    """AWQ in AutoAWQ's gemm layout: words of eight outputs [in, out / 8] in a shuffled order, zeros likewise.

    Attributes:
      prefix: of the module. shape: [out, in]. group_size: inputs that share a scale.
    """

    prefix: str
    shape: tuple[int, int]
    group_size: int

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in ("qweight", "qzeros", "scales"))

    def read(self, source: TensorSource, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """See `QuantisedTensor`."""
        outputs, inputs = region
        groups = _blocks(inputs, self.group_size)
        weight, zero, scale = self.parts
        fields = _packed_columns(source, weight, inputs, outputs, 4, _AWQ_ORDER)
        zeros = _packed_columns(source, zero, groups, outputs, 4, _AWQ_ORDER)
        scales = source.read(scale, (groups, outputs)).astype(np.float32)
        out = np.empty(fields.shape, dtype)
        which = np.arange(inputs.start, inputs.stop) // self.group_size - groups.start
        scale_rows(fields, scales, zeros.astype(np.float32), which, out)
        return out.T


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """compressed-tensors' packed integers: words of several inputs [out, in · bits / 32], scales [out, groups].

    Attributes:
      prefix: of the weight (`….weight`). bits: 4 or 8. shape: [out, in]. group_size: inputs that share a scale.
      zeros: whether there are zeros, packed along the outputs. indexed: whether `g_idx` is there.
    """

    prefix: str
    bits: int
    shape: tuple[int, int]
    group_size: int
    zeros: bool
    indexed: bool

    @property
    def parts(self) -> tuple[str, ...]:
        more = ("zero_point",) * self.zeros + ("g_idx",) * self.indexed
        return tuple(f"{self.prefix}_{name}" for name in ("packed", "scale", "shape", *more))

    def read(self, source: TensorSource, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """See `QuantisedTensor`."""
        outputs, inputs = region
        fields = _packed_columns(source, f"{self.prefix}_packed", outputs, inputs, self.bits)
        scales = source.read(f"{self.prefix}_scale", (outputs, slice(None))).astype(np.float32)
        out = np.empty(fields.shape, dtype)
        rows = np.arange(len(fields))
        scale_columns(
            fields, scales, rows, self._groups(source, inputs), out, None, self._zeros(source, outputs, scales)
        )
        return out

    def _groups(self, source: TensorSource, inputs: slice) -> np.ndarray:
        in_order = np.arange(inputs.start, inputs.stop) // self.group_size
        if not self.indexed:
            return in_order

        name = f"{self.prefix}_g_idx"
        found = source.read(name, (inputs,))
        if (found == -1).all():  # as it was made, before anything was reordered
            return in_order
        _check_groups(source, name, found, -(-self.shape[1] // self.group_size))
        return found

    def _zeros(self, source: TensorSource, outputs: slice, scales: np.ndarray) -> np.ndarray:
        """Returns zeros of the stored fields, which are shifted by half their range to be positive."""
        if not self.zeros:
            return np.full((len(scales), 1), 1 << (self.bits - 1), np.float32)
        return _packed_rows(source, f"{self.prefix}_zero_point", outputs, slice(None), self.bits).astype(np.float32)


def _blocks(part: slice, size: int) -> slice:
    """Returns the blocks that a span touches."""
    return slice(part.start // size, -(-part.stop // size))


def _packed_rows(source: TensorSource, name: str, rows: slice, columns: slice, bits: int) -> np.ndarray:
    """Reads fields of a tensor whose words hold consecutive rows; of the words only those that have any of them."""
    count = WORD // bits
    words = _blocks(rows, count)
    fields = unpack_rows(np.ascontiguousarray(source.read(name, (words, columns))).view(np.uint32), bits)
    return fields[rows.start - words.start * count : rows.stop - words.start * count]


def _packed_columns(
    source: TensorSource,
    name: str,
    rows: slice,
    columns: slice,
    bits: int,
    order: tuple[int, ...] | None = None,
    added: int = 0,
) -> np.ndarray:
    """Reads fields of a tensor whose words hold consecutive columns, `added` to each word; see `_packed_rows`."""
    count = WORD // bits
    blocks = _blocks(columns, count)
    words = np.ascontiguousarray(source.read(name, (rows, blocks))).view(np.uint32)
    fields = unpack_columns(words + np.uint32(added) if added else words, bits, order)
    return fields[:, columns.start - blocks.start * count : columns.stop - blocks.start * count]


def _check_groups(source: TensorSource, name: str, groups: np.ndarray, count: int) -> None:
    """Refuses numbers of groups that have no scales."""
    if groups.size and not 0 <= groups.min() <= groups.max() < count:
        raise WeightsError(
            f"{source.origin}: got tensor {name!r} with groups {int(groups.min())} … {int(groups.max())}; expected 0 … "
            f"{count - 1}"
        )
