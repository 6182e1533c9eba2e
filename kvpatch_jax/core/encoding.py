"""Arrays in few bits: group-wise quantisation of KV and of factors, packed, and unpacked inside jitted programs.

A matrix [..., rows, columns] is cut into groups of numbers along one axis. Each group has a scale and, unless it is
symmetric about zero, a least value; both bfloat16, rounded outwards, so that no number is clipped and every decoded
number is within half a step of its own. KV: keys by feature, in groups of tokens, before they are rotated; all else by
token, in groups of features. KIVI (Liu et al. 2024, arXiv 2402.02750, section 3) found that split for rotated keys;
before the rotation a feature keeps one magnitude over all positions, while the rotation spreads it over a pair of
features (measured: docs/experiments/bytes.md).

Codes of b bits are cut into planes of 1, 2, 4 and 8 bits (6 = 4 + 2), and a plane of w bits holds 8/w codes in a byte:
byte j has those of columns j, j + n, j + 2n, … of n = columns·w/8. So unpacking is a shift, without a transpose, and
there is no byte order.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from ..errors import InputError, ShapeError
from ..utils.kinds import is_whole
from .layout import AnyArray, Channel, KVLayout

BITS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Bits that a number can be encoded in."""
GROUP = 32
"""Numbers in a group by default, as in KIVI, section 4."""
PART_DTYPE = np.dtype(jnp.bfloat16)
"""What the parts of a transition are kept in where the rows are kept in fewer bits."""

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_WORD = re.compile(r"k([1-8])v([1-8])(?:g([1-9][0-9]{0,4}|all))?")


@dataclasses.dataclass(frozen=True)
class KVEncoding:
    """How many bits a chunk's KV is kept in. Hashable; `str` gives its word, such as "k4v4g32".

    The transition of a hybrid model is kept in bfloat16 beside it: each number within 2⁻⁸ of its magnitude.

    Attributes:
      keys: bits of keys: the channels that rotate, and one named k. 1 to 8.
      values: bits of the other channels.
      group: numbers that share a scale and a least value; None: one group over all tokens (of keys) or all features.

    Raises:
      InputError: other bits, or a group below 1.
    """

    keys: int = 4
    values: int = 4
    group: int | None = GROUP

    def __post_init__(self) -> None:
        for word, bits in (("keys", self.keys), ("values", self.values)):
            if not is_whole(bits, 1) or bits not in BITS:
                raise InputError(f"encoding.{word}: got {bits!r:.80} bits; expected one of {BITS}")
        if self.group is not None and (not is_whole(self.group, 1) or self.group > 99_999):
            raise InputError(f"encoding.group: got {self.group!r:.80}; expected 1 to 99999 numbers, or None")

    def __str__(self) -> str:
        return f"k{self.keys}v{self.values}g{'all' if self.group is None else self.group}"

    @classmethod
    def of(cls, word: "str | KVEncoding") -> "KVEncoding":
        """Parses the word of an encoding; "k4v4" has the default group.

        Raises:
          InputError: not such a word.
        """
        if isinstance(word, cls):
            return word
        found = _WORD.fullmatch(word) if isinstance(word, str) else None
        if found is None:
            raise InputError(f"encoding: got {word!r:.80}; expected a word such as 'k4v4' or 'k6v4g64'")
        keys, values, group = found.groups()
        return cls(int(keys), int(values), None if group == "all" else int(group or GROUP))

    def of_channel(self, channel: Channel) -> tuple[int, int]:
        """Returns the bits of a channel, and the axis of its groups: −2 over tokens, −1 over features."""
        return (self.keys, -2) if channel.rotates or channel.name == "k" else (self.values, -1)

    def nbytes(self, layout: KVLayout, tokens: int) -> int:
        """Counts the bytes of a chunk's KV in this encoding, scales and least values included."""
        total = 0
        for channel in layout.token_channels:
            bits, axis = self.of_channel(channel)
            total += packed_bytes(tokens, channel.features, bits, self.group, axis) * layout.depth(channel.name)
        return total + layout.transition_bytes(PART_DTYPE)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("planes", "scale", "least"),
    meta_fields=("bits", "group", "axis", "columns", "heads", "dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PackedArray:
    """An array in few bits: [..., rows, columns], or with `heads` K an array [..., T, K, H] with its heads joined.

    A pytree of arrays. Its leading axes may be sliced, mapped and scanned over like an array's. `np.asarray` and
    `jnp.asarray` decode it.

    Attributes:
      planes: codes, uint8 [..., rows, columns·w/8] for each plane of w bits, the highest bits first.
      scale: bfloat16, a step for each group: [..., groups, columns] of groups over rows, else [..., rows, groups].
      least: likewise what code 0 stands for; None: zero is the middle code, 2^(bits−1).
      bits: of a code. group: numbers of a group; the last may be shorter. axis: −2 for groups over rows, else −1.
      columns: of the matrix. heads: K, or None. dtype: what is decoded to.
    """

    planes: tuple[Any, ...]
    scale: Any
    least: Any
    bits: int
    group: int
    axis: int
    columns: int
    heads: int | None
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        leading = tuple(self.planes[0].shape[:-1])
        return (*leading, self.columns) if self.heads is None else (*leading, self.heads, self.columns // self.heads)

    @property
    def ndim(self) -> int:
        """Number of axes of the decoded array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: codes, scales and least values."""
        return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(_jitted_unpack(self), dtype)

    def __jax_array__(self) -> Array:
        return _jitted_unpack(self)

    def __getitem__(self, index: Any) -> Array:
        """Decodes, and returns numbers."""
        return _jitted_unpack(self)[index]

    def astype(self, dtype: Any) -> Array:
        """Decodes to another dtype."""
        return _jitted_unpack(self).astype(dtype)

    def __repr__(self) -> str:
        return f"PackedArray({self.dtype}{list(self.shape)} in {self.bits} bits, groups of {self.group})"


def packed_bytes(rows: int, columns: int, bits: int, group: int | None, axis: int, *, symmetric: bool = False) -> int:
    """Counts the bytes of a packed matrix: codes, bfloat16 scales and, unless `symmetric`, bfloat16 least values."""
    along, across = (rows, columns) if axis == -2 else (columns, rows)
    groups = 1 if group is None else -(-along // group)
    codes = sum(rows * -(-columns * width // 8) for width in _PLANES[bits])
    return codes + (2 if symmetric else 4) * groups * across


def plane_widths(bits: int) -> tuple[int, ...]:
    """Returns the widths of the planes that codes of some bits are cut into, the highest bits first."""
    return _PLANES[bits]


# ------------------------------------------------------------------------------------------------------ packing


def pack(
    value: Float[AnyArray, "..."],
    bits: int,
    group: int | None = GROUP,
    axis: int = -1,
    *,
    symmetric: bool = False,
    heads: bool = False,
    length: AnyArray | int | None = None,
) -> PackedArray:
    """Encodes numbers in few bits, in groups along an axis of the matrix [..., rows, columns].

    Args:
      value: [..., rows, columns]; with `heads` [..., T, K, H], whose heads are joined. Of a floating-point dtype, to
        which it is decoded; finite, and below 2¹²⁵ in magnitude.
      bits: 1 to 8, of a number.
      group: numbers in a group; None: one group.
      axis: −2 for groups over rows (tokens), −1 over columns (features).
      symmetric: about zero, with a scale alone; zero is encoded exactly. At least 2 bits.
      length: rows that count; later ones, padding, are encoded as the last of these and take no part in a group's
        range (`symmetric`: as zeros). None: all.

    Raises:
      InputError: other bits or another axis. ShapeError: too few axes, or no rows.
    """
    if bits not in BITS or (symmetric and bits < 2):
        raise InputError(f"pack: got {bits!r:.80} bits; expected one of {BITS[1:] if symmetric else BITS}")
    if axis not in (-1, -2) or (group is not None and not is_whole(group, 1)):
        raise InputError(f"pack: got group {group!r:.80} along axis {axis!r:.80}; expected 1 or more, along -1 or -2")
    if value.ndim < 2 + heads or 0 in value.shape:
        raise ShapeError(f"pack: got shape {value.shape}; expected [..., rows, columns] with numbers")
    count = None if length is None else jnp.asarray(length, jnp.int32)
    return _jitted_pack(jnp.asarray(value), count, bits, group, axis, symmetric, heads)


def _packed(
    value: Array, length: Array | None, bits: int, group: int | None, axis: int, symmetric: bool, heads: bool
) -> PackedArray:
    count = value.shape[-2] if heads else None
    matrix = value.reshape(*value.shape[:-2], -1) if heads else value
    size = min(group or matrix.shape[axis], matrix.shape[axis])

    def encode(matrix: Array) -> PackedArray:
        planes, scale, least = _encoded(matrix, length, bits, size, axis, symmetric)
        return PackedArray(planes, scale, least, bits, size, axis, matrix.shape[-1], count, matrix.dtype)

    # Layer by layer, so that float32 of one layer at most is there, in the cache.
    return jax.lax.map(encode, matrix) if matrix.ndim > 2 else encode(matrix)


_jitted_pack = jax.jit(_packed, static_argnums=(2, 3, 4, 5, 6), inline=True)


def _encoded(
    matrix: Array, length: Array | None, bits: int, size: int, axis: int, symmetric: bool
) -> tuple[tuple[Array, ...], Array, Array | None]:
    """Returns planes, scales and least values of a matrix in groups of `size` numbers."""
    # Written once, since every step reads it again.
    wide = jax.lax.optimization_barrier(matrix.astype(jnp.float32))
    if length is not None:
        live = (jnp.arange(wide.shape[-2]) < length)[:, None]
        # A padded row repeats the last one, which leaves every range as it is.
        filling = 0.0 if symmetric else jnp.take(wide, jnp.maximum(length, 1) - 1, axis=-2)[..., None, :]
        wide = jnp.where(live, wide, filling)

    cut, along = _grouped(wide, size, axis), wide.shape[axis]
    most = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    if symmetric:
        least = None
        scale = _rounded_up(jnp.max(jnp.abs(cut), axis=axis) / most)
    else:
        least = _rounded_down(jnp.min(cut, axis=axis))
        # Divided first: the difference of two large numbers may be infinite.
        scale = _rounded_up(jnp.max(cut, axis=axis) / most - least.astype(jnp.float32) / most)

    # The inverse of a subnormal step may be infinite; numbers so small are encoded as the least one.
    step = scale.astype(jnp.float32)
    step = jnp.where(step > 2.0**-125, step, 1.0)
    inverse = _spread(jax.lax.optimization_barrier(1.0 / step), size, axis, along)
    if least is None:
        levels, low, high = jnp.round(wide * inverse) + most + 1, 1, 2 * most + 1
    else:
        levels, low, high = jnp.round((wide - _spread(least, size, axis, along)) * inverse), 0, most
    codes = jax.lax.optimization_barrier(jnp.clip(levels, low, high).astype(jnp.uint8))
    return _planes_of(codes, bits), scale, least


def _grouped(matrix: Array, size: int, axis: int) -> Array:
    """Cuts a matrix into groups along an axis, [..., groups, size, columns] or [..., rows, groups, size].

    The last number is repeated to fill the last group, which leaves its extremes.
    """
    short = -matrix.shape[axis] % size
    widths = [(0, 0)] * matrix.ndim
    widths[axis] = (0, short)
    filled = jnp.pad(matrix, widths, mode="edge")
    place = filled.ndim + axis
    return filled.reshape(*filled.shape[:place], -1, size, *filled.shape[place + 1 :])


def _spread(value: Array, size: int, axis: int, along: int) -> Array:
    """Repeats what a group has for each of its numbers, in float32."""
    wide = jnp.broadcast_to(
        jnp.expand_dims(value.astype(jnp.float32), axis=axis if axis == -1 else value.ndim - 1),
        (*value.shape, size) if axis == -1 else (*value.shape[:-1], size, value.shape[-1]),
    )
    place = value.ndim + axis
    joined = wide.reshape(*value.shape[:place], -1, *value.shape[place + 1 :])
    return jax.lax.slice_in_dim(joined, 0, along, axis=place)


def _planes_of(codes: UInt8[AnyArray, "*rest rows columns"], bits: int, xp: ModuleType = jnp) -> tuple[Any, ...]:
    """Packs codes into planes of bytes, the highest bits first."""
    planes, above = [], bits
    for width in _PLANES[bits]:
        above -= width
        part = (codes >> above) & np.uint8((1 << width) - 1)
        per_byte = 8 // width
        short = -part.shape[-1] % per_byte
        part = xp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, short)])
        part = part.reshape(*part.shape[:-1], per_byte, -1)
        # Each summand has bits of its own.
        shifts = (width * np.arange(per_byte, dtype=np.uint8))[:, None]
        planes.append(xp.sum(part << shifts, axis=-2, dtype=np.uint8))
    return tuple(planes)


def steps_of(packed: PackedArray) -> Float[Array, "..."]:
    """Returns the step between codes of each number, float32, in the shape of the decoded array."""
    return _of_numbers(packed, packed.scale).reshape(packed.shape)


def _of_numbers(packed: PackedArray, value: Any) -> Float[Array, "*rest rows columns"]:
    """Repeats what each group of an array has, its scale or least value, for each of its numbers."""
    along = packed.planes[0].shape[-2] if packed.axis == -2 else packed.columns
    return _spread(jnp.asarray(value), packed.group, packed.axis, along)


def _codes_of(packed: PackedArray, xp: ModuleType = jnp) -> UInt8[AnyArray, "*rest rows columns"]:
    """Unpacks codes."""
    parts, above = [], packed.bits
    for width, plane in zip(_PLANES[packed.bits], packed.planes, strict=True):
        above -= width
        plane, mask = xp.asarray(plane), np.uint8((1 << width) - 1)
        codes = [(plane >> np.uint8(width * place)) & mask for place in range(8 // width)]
        part = xp.concatenate(codes, axis=-1)[..., : packed.columns] << np.uint8(above)
        # Each plane is unpacked in whole words; fused with what follows, it would be read number by number.
        parts.append(jax.lax.optimization_barrier(part) if xp is jnp else part)
    return functools.reduce(operator.or_, parts)


def unpack(packed: PackedArray, dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
    """Decodes an array: least + scale · code in float32, rounded once to its dtype.

    To be called inside jitted programs, which fuse it. The gradient flows to scales and least values.

    Args:
      dtype: of the result in place of the array's own.
    """
    value, step = jnp.asarray(_codes_of(packed)).astype(jnp.float32), _of_numbers(packed, packed.scale)
    if packed.least is None:
        value = (value - 2.0 ** (packed.bits - 1)) * step
    else:
        value = value * step + _of_numbers(packed, packed.least)
    dtype = packed.dtype if dtype is None else jnp.dtype(dtype)
    if dtype == jnp.float16:
        # Steps are rounded up, so the largest number of a group may come out above it, and here above all of float16.
        value = jnp.clip(value, -65504.0, 65504.0)
    return value.astype(dtype).reshape(packed.shape)


_jitted_unpack = jax.jit(unpack)


def round_trip(
    value: Float[Array, "..."], bits: int, group: int | None = GROUP, axis: int = -1, **options: Any
) -> Array:
    """Returns what `pack` and `unpack` make of numbers; the gradient is that of the identity.

    A straight-through estimate, because rounding has no gradient of its own. Arguments as `pack`.
    """
    rounded = unpack(pack(jax.lax.stop_gradient(value), bits, group, axis, **options))
    return value + jax.lax.stop_gradient(rounded - value)


def _rounded_down(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds float32 to bfloat16 towards −∞; beyond its range, to the least finite number."""
    bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    # Cutting off bits rounds towards zero, so a negative number takes one unit more.
    more = ((bits >> 31) == 1) & ((bits & 0xFFFF) != 0)
    kept = (bits >> 16).astype(jnp.uint16) + more.astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
    return jnp.maximum(rounded, jnp.finfo(jnp.bfloat16).min)


def _rounded_up(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds float32 to bfloat16 towards +∞."""
    return -_rounded_down(-value)


# --------------------------------------------------------------------------------------------- KV and directions


def encode_kv(
    layout: KVLayout, kv: Mapping[str, Float[AnyArray, "..."]], encoding: KVEncoding, length: int | None = None
) -> dict[str, Any]:
    """Encodes phase-free KV {channel: [L, ..., T, K, H]}; tokens from `length` on are padding.

    Returns:
      {channel: `PackedArray`}; the parts of a transition as arrays in `PART_DTYPE`.
    """
    encoded: dict[str, Any] = {
        channel.name: jnp.asarray(kv[channel.name]).astype(PART_DTYPE) for channel in layout.parts
    }
    for channel in layout.token_channels:
        bits, axis = encoding.of_channel(channel)
        encoded[channel.name] = pack(
            jnp.asarray(kv[channel.name]), bits, encoding.group, axis, heads=True, length=length
        )
    return encoded


def is_packed(value: Any) -> TypeGuard[PackedArray]:
    """Whether an array is in few bits."""
    return isinstance(value, PackedArray)


def resize(packed: PackedArray, axis: int, size: int, *, host: bool = False) -> PackedArray:
    """Cuts a packed matrix to its first `size` rows (−2) or columns (−1), or pads it; codes that stay are the same.

    Padding of a symmetric array is zero, exactly; of others it is finite. One group over everything stays one group.

    Args:
      host: on the host, where another size compiles no program; the result has NumPy arrays.
    """
    if host:
        return _resized(jax.tree.map(np.asarray, packed), axis, size, np)
    return _resized(jax.tree.map(jnp.asarray, packed), axis, size, jnp)


def _resized(packed: PackedArray, axis: int, size: int, xp: ModuleType) -> PackedArray:
    codes, middle = _codes_of(packed, xp), 0 if packed.least is not None else 2 ** (packed.bits - 1)
    along, have = axis == packed.axis, codes.shape[axis]
    # Arrays of many lengths then have groups of few sizes: those of the padded lengths.
    single = along and packed.scale.shape[axis] == 1
    group = size if single else packed.group
    groups = -(-size // group) if along else size

    def fitted(value: Any, count: int, filling: int) -> Any:
        widths = [(0, 0)] * value.ndim
        widths[axis] = (0, max(0, count - value.shape[axis]))
        index = [slice(None)] * value.ndim
        index[axis] = slice(count)
        return xp.pad(value, widths, constant_values=filling)[tuple(index)]

    return dataclasses.replace(
        packed,
        planes=_planes_of(fitted(codes, size, middle), packed.bits, xp),
        scale=fitted(packed.scale, groups, 0),
        least=None if packed.least is None else fitted(packed.least, groups, 0),
        columns=packed.columns + (size - have if axis == -1 else 0),
        group=group,
    )
