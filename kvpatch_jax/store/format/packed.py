"""Packed arrays in objects: a leaf for each plane of codes, one for the scales and one for the least values.

`<leaf>.bytes`, `.nibbles`, `.pairs` and `.bits` are the planes of 8, 4, 2 and 1 bits, uint8 [rows, ⌈columns·w/8⌉];
`<leaf>.scale` and `<leaf>.least` (absent where zero is the middle code) are bfloat16, [groups, columns] or
[rows, groups]. `core.encoding` says which code is in which bits; there is no byte order but bfloat16's, little-endian
as all of a file. Widths are words and not numbers so that `objects.arranged` puts the layers of a plane together.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import KVEncoding, KVLayout, PackedArray, is_packed
from ...core.encoding import BITS, plane_widths
from ...errors import InputError, ShapeError, StoreCorruptError
from .header import DTYPES

PLANES = {8: "bytes", 4: "nibbles", 2: "pairs", 1: "bits"}
"""Name of a plane's leaf by its bits."""
SUFFIXES = (*PLANES.values(), "scale", "least")
"""All that may follow the name of a packed leaf."""

_BFLOAT16, _UINT8 = np.dtype(jnp.bfloat16), np.dtype(np.uint8)
_FLOATS = {str(dtype): dtype for dtype in DTYPES.values() if jnp.issubdtype(dtype, jnp.floating)}


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """What says how the leaves of a packed array are read, and which shapes they must have.

    Attributes:
      bits, group, axis, columns, heads, dtype: as of `PackedArray`.
      symmetric: whether there are no least values.

    Raises:
      StoreCorruptError: an invalid value.
    """

    bits: int
    group: int
    axis: int
    columns: int
    heads: int | None
    dtype: str
    symmetric: bool

    def __post_init__(self) -> None:
        numbers = [self.bits, self.group, self.axis, self.columns, *(() if self.heads is None else (self.heads,))]
        whole = all(type(number) is int for number in numbers) and type(self.symmetric) is bool
        whole = whole and self.dtype in _FLOATS and self.bits in BITS[int(self.symmetric) :] and self.axis in (-1, -2)
        whole = whole and min(self.group, self.columns) >= 1
        if not whole or (self.heads is not None and (self.heads < 1 or self.columns % self.heads)):
            raise StoreCorruptError(
                f"object: got a packed leaf {str(dataclasses.astuple(self))[:100]}; expected a form"
            )

    @property
    def leaves(self) -> tuple[str, ...]:
        """Suffixes of the leaves, in the order of the file."""
        planes = [PLANES[width] for width in plane_widths(self.bits)]
        return (*planes, "scale") if self.symmetric else (*planes, "scale", "least")

    def shapes(self, rows: int) -> dict[str, tuple[int, int]]:
        """Returns the shape of each leaf of a matrix with so many rows.

        Raises:
          ShapeError: a group is larger than what it is cut from: decoding would allocate for it.
        """
        along = rows if self.axis == -2 else self.columns
        if self.group > along:
            raise ShapeError(f"object: got groups of {self.group} along {along}; expected at most as many")
        groups = -(-along // self.group)
        shapes = {PLANES[width]: (rows, -(-self.columns * width // 8)) for width in plane_widths(self.bits)}
        scale = (groups, self.columns) if self.axis == -2 else (rows, groups)
        return shapes | dict.fromkeys(self.leaves[len(shapes) :], scale)


def form_of(packed: PackedArray) -> PackedForm:
    """Returns the form of a packed array."""
    rows = packed.planes[0].shape[-2]
    # A cut array may have groups that end beyond it; they decode to the same numbers when they end with it.
    group = min(packed.group, rows if packed.axis == -2 else packed.columns)
    dtype, symmetric = str(packed.dtype), packed.least is None
    return PackedForm(packed.bits, group, packed.axis, packed.columns, packed.heads, dtype, symmetric)


def leaves_of(packed: PackedArray, leaf: str) -> dict[str, Any]:
    """Returns the leaves of a packed array by name, each with all its leading axes."""
    parts = (*packed.planes, packed.scale, *(() if packed.least is None else (packed.least,)))
    return {f"{leaf}.{suffix}": part for suffix, part in zip(form_of(packed).leaves, parts, strict=True)}


def packed_of(arrays: Mapping[str, Any], leaf: str, form: PackedForm) -> PackedArray:
    """Makes a packed array from its leaves, NumPy or JAX, without a copy.

    Raises:
      ShapeError: a leaf has another dtype or shape than the form says. KeyError: a leaf is missing.
    """
    parts = {suffix: arrays[f"{leaf}.{suffix}"] for suffix in form.leaves}
    first = parts[form.leaves[0]]
    if first.ndim < 2:
        raise ShapeError(f"object: got codes of shape {first.shape}; expected [..., rows, bytes]")

    leading, rows = first.shape[:-2], first.shape[-2]
    for suffix, shape in form.shapes(rows).items():
        found, dtype = parts[suffix], _UINT8 if suffix in PLANES.values() else _BFLOAT16
        if found.dtype != dtype or found.shape != (*leading, *shape):
            raise ShapeError(
                f"object: got {suffix} {found.dtype}{list(found.shape)}; expected {dtype}{[*leading, *shape]}"
            )

    planes = tuple(parts[PLANES[width]] for width in plane_widths(form.bits))
    return PackedArray(
        planes,
        parts["scale"],
        parts.get("least"),
        form.bits,
        form.group,
        form.axis,
        form.columns,
        form.heads,
        _FLOATS[form.dtype],
    )


# ------------------------------------------------------------------------------------------------------ canonicals


def kv_encoding(body: Mapping[str, Any]) -> KVEncoding | None:
    """Returns the encoding of a canonical's body; None if its kv are arrays.

    Raises:
      StoreCorruptError: it is no word of an encoding.
    """
    word = body.get("encoding")
    if word is None:
        return None
    if not isinstance(word, str):
        raise StoreCorruptError(f"object: got an encoding of type {type(word).__name__}; expected a word")
    try:
        encoding = KVEncoding.of(word)
    except InputError:
        encoding = None
    if encoding is None or str(encoding) != word:
        raise StoreCorruptError(f"object: got encoding {word[:40]!r}; expected a known one")
    return encoding


def kv_forms(body: Mapping[str, Any], layout: KVLayout, encoding: KVEncoding) -> dict[str, PackedForm]:
    """Returns the form of each packed channel of a canonical with packed kv: those with a row per token.

    Raises:
      StoreCorruptError: as `PackedForm`, or groups that are not of the encoding.
    """
    forms = {}
    for channel in layout.token_channels:
        bits, axis = encoding.of_channel(channel)
        group, dtype = body["groups"][channel.name], body["dtypes"][channel.name]
        form = PackedForm(bits, group, axis, channel.features, channel.heads, dtype, False)
        # Fewer numbers than a group has are one group, which grows with the chunk when that is padded; `shapes` refuses
        # one beyond the padded tokens.
        whole, declared = channel.features if axis == -1 else body["length"], encoding.group
        several = declared is not None and whole > declared
        if group != declared and (several or group < whole):
            raise StoreCorruptError(f"object: got groups of {group} in {encoding}; expected those of the encoding")
        forms[channel.name] = form
    return forms


def stacked(layers: Sequence[Any], stack: Callable[[Sequence[Any]], Any]) -> Any:
    """Stacks the layers of a channel, leaf by leaf, with a function that stacks arrays."""
    return jax.tree.map(lambda *leaves: stack(leaves), *layers)


def layer_in(layout: KVLayout, kv: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Returns {channel: [T, K, H]} of what one layer keeps; a packed channel is cut before it is decoded."""
    values = {}
    for name, value in kv.items():
        for row in layout.rows_of(name, (layer,)):
            values[name] = jax.tree.map(operator.itemgetter(row), value)
    return decoded(values)


def decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns channels as arrays: packed ones decoded, on the host if they are there, others as they are."""
    arrays = {}
    for name, value in values.items():
        on_host = is_packed(value) and isinstance(value.scale, np.ndarray)
        arrays[name] = np.asarray(value) if on_host else jnp.asarray(value) if is_packed(value) else value
    return arrays
