"""Arrays in few bits: the quantiser of KV and of factors, packed, and unpacked inside jitted programs.

A matrix [..., rows, columns] is cut into groups of numbers along one axis. Each group has a scale and, unless it is
symmetric about zero, a least value; both bfloat16, rounded outwards, so that no number is clipped and every decoded
number is within half a step of its own. KV: keys by feature, in groups of tokens, before they are rotated; all else by
token, in groups of features. KIVI (Liu et al. 2024, arXiv 2402.02750, section 3) found that split for rotated keys;
before the rotation a feature keeps one magnitude over all positions, while the rotation spreads it over a pair of
features (measured: docs/findings.md).

Codes of b bits are cut into planes of 1, 2, 4 and 8 bits (6 = 4 + 2), and a plane of w bits holds 8/w codes in a byte:
byte j has those of columns j, j + n, j + 2n, … of n = columns·w/8. So unpacking is a shift, without a transpose, and
there is no byte order. Factors in int8 or float8 have these numbers themselves as codes, and float32 scales (`scaled`).
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, UInt8

from ..errors import InputError, ShapeError
from ..utils.kinds import is_whole
from .layout import AnyArray, Channel, KVLayout

BITS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Bits that a number can be packed in."""
WHOLE = 16
"""Bits of bfloat16, in which numbers are not packed."""
GROUP = 32
"""Numbers in a group by default, as in KIVI, section 4."""
Axes = Literal["kivi", "token", "feature"]
"""What shares a scale: keys by feature and all else by token, all by token, or all by feature."""

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_WORD = re.compile(r"k([1-8]|16)v([1-8]|16)(?:g([1-9][0-9]{0,4}|all))?(token|feature)?(s)?")


@dataclasses.dataclass(frozen=True)
class KVEncoding:
    """How many bits KV is kept in, and which numbers share a scale. Hashable; `str` gives its word, such as "k4v4g32".

    The transition of a hybrid model is kept in bfloat16 beside it: each number within 2⁻⁸ of its magnitude.

    Attributes:
      keys: bits of keys: the channels that rotate, and one named k. 1 to 8, or 16: bfloat16.
      values: bits of the other channels, likewise.
      group: numbers that share a scale and a least value; None: one group over all tokens or all features.
      axes: "kivi": keys by feature in groups of tokens, the others by token in groups of features (arXiv 2402.02750);
        "token" or "feature": all channels so.
      symmetric: about zero, without a least value. At least 2 bits.

    Raises:
      InputError: other bits, a group below 1, or other axes.
    """

    keys: int = 4
    values: int = 4
    group: int | None = GROUP
    axes: Axes = "kivi"
    symmetric: bool = False

    def __post_init__(self) -> None:
        allowed = (*BITS[1 if self.symmetric else 0 :], WHOLE)
        for word, bits in (("keys", self.keys), ("values", self.values)):
            if not is_whole(bits, 1) or bits not in allowed:
                raise InputError(f"encoding.{word}: got {bits!r:.80} bits; expected one of {allowed}")
        if self.group is not None and (not is_whole(self.group, 1) or self.group > 99_999):
            raise InputError(f"encoding.group: got {self.group!r:.80}; expected 1 to 99999 numbers, or None")
        if self.axes not in get_args(Axes):
            raise InputError(f"encoding.axes: got {self.axes!r:.80}; expected one of {get_args(Axes)}")

    def __str__(self) -> str:
        group = "all" if self.group is None else self.group
        axes = "" if self.axes == "kivi" else self.axes
        return f"k{self.keys}v{self.values}g{group}{axes}{'s' if self.symmetric else ''}"

    @classmethod
    def of(cls, encoding: "str | KVEncoding") -> "KVEncoding":
        """Parses the word of an encoding; "k4v4" has the default group.

        Raises:
          InputError: not such a word.
        """
        if isinstance(encoding, cls):
            return encoding
        match = _WORD.fullmatch(encoding) if isinstance(encoding, str) else None
        if match is None:
            raise InputError(f"encoding: got {encoding!r:.80}; expected a word such as 'k4v4' or 'k6v4g64'")
        keys, values, group, axes, symmetric = match.groups()
        size = None if group == "all" else int(group or GROUP)
        options: dict[str, Any] = {"axes": axes or "kivi", "symmetric": symmetric is not None}
        return cls(int(keys), int(values), size, **options)

    @classmethod
    def of_bits(cls, bits: int) -> "KVEncoding":
        """Returns the encoding of all channels in some bits with the fewest scales: one for each feature."""
        return cls(bits, bits, None, "feature")

    def of_channel(self, channel: Channel) -> tuple[int, int]:
        """Returns the bits of a channel, and the axis of its groups: −2 over tokens, −1 over features."""
        is_key = channel.rotates or channel.name == "k"
        by_feature = is_key if self.axes == "kivi" else self.axes == "feature"
        return self.keys if is_key else self.values, -2 if by_feature else -1

    def nbytes(self, layout: KVLayout, tokens: int) -> int:
        """Counts the bytes of a chunk's KV in this encoding, scales and least values included."""
        total = 0
        for channel in layout.token_channels:
            bits, axis = self.of_channel(channel)
            size = packed_bytes(tokens, channel.features, bits, self.group, axis, symmetric=self.symmetric)
            total += size * layout.depth(channel.name)
        return total + layout.transition_bytes(jnp.bfloat16)

    @property
    def decoding(self) -> int:
        """FLOPs of decoding one number: its product with the scale, and the least value added; none in 16 bits."""
        return 0 if self.keys == self.values == WHOLE else 2


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
      planes: codes, uint8 [..., rows, columns·w/8] for each plane of w bits, the highest bits first; or one array
        [..., rows, columns] in int8 or float8 (`scaled`).
      scale: a step for each group: [..., groups, columns] of groups over rows, else [..., rows, groups]; bfloat16, or
        float32 of `scaled` arrays.
      least: likewise what code 0 stands for; None: zero is the middle code, 2^(bits−1), or the number 0.
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
    def scaled(self) -> bool:
        """Whether codes are int8 or float8 numbers, to be multiplied by a float32 scale."""
        return self.planes[0].dtype != np.uint8

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
        kept = f"{self.planes[0].dtype}" if self.scaled else f"{self.bits} bits"
        return f"PackedArray({self.dtype}{list(self.shape)} in {kept}, groups of {self.group})"


def packed_bytes(rows: int, columns: int, bits: int, group: int | None, axis: int, *, symmetric: bool = False) -> int:
    """Counts the bytes of a packed matrix: codes, bfloat16 scales and, unless `symmetric`, bfloat16 least values.

    In 16 bits those of the matrix in bfloat16.
    """
    if bits == WHOLE:
        return 2 * rows * columns
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
      InputError: other bits or another axis. ShapeError: too few axes, no rows, or no floating-point dtype.
    """
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
        found = getattr(value, "dtype", type(value).__name__)
        raise ShapeError(f"pack: got a value of {found}; expected an array of a floating-point dtype")
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


def _of_numbers(packed: PackedArray, value: Any) -> Float[Array, "*rest rows columns"]:
    """Repeats what each group of an array has, its scale or least value, for each of its numbers."""
    along = packed.planes[0].shape[-2] if packed.axis == -2 else packed.columns
    return _spread(jnp.asarray(value), packed.group, packed.axis, along)


def _codes_of(packed: PackedArray, xp: ModuleType = jnp) -> Num[AnyArray, "*rest rows columns"]:
    """Unpacks codes; those of `scaled` arrays are int8 or float8."""
    if packed.scaled:
        return xp.asarray(packed.planes[0])
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
    value = jnp.asarray(_codes_of(packed)).astype(jnp.float32)
    if packed.scaled:
        # Each scale is of a whole slice, so it broadcasts.
        return (value * packed.scale).astype(packed.dtype if dtype is None else dtype)
    step = _of_numbers(packed, packed.scale)
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
    layout: KVLayout,
    kv: Mapping[str, Float[AnyArray, "..."]],
    encoding: KVEncoding,
    length: AnyArray | int | None = None,
) -> dict[str, Any]:
    """Encodes phase-free KV {channel: [L, ..., T, K, H]}; tokens from `length` on are padding.

    Returns:
      {channel: `PackedArray`}; the parts of a transition, and channels of 16 bits, as arrays in bfloat16.
    """
    encoded: dict[str, Any] = {}
    for channel in layout.channels:
        value, (bits, axis) = jnp.asarray(kv[channel.name]), encoding.of_channel(channel)
        if channel.rows is not None or bits == WHOLE:
            encoded[channel.name] = value.astype(jnp.bfloat16)
        else:
            options: dict[str, Any] = {"symmetric": encoding.symmetric, "heads": True, "length": length}
            encoded[channel.name] = pack(value, bits, encoding.group, axis, **options)
    return encoded


_FACTOR_WORD = re.compile(r"int([2-7])(?:g([1-9][0-9]{0,4}|all))?")


def factor_bits(dtype: Any) -> tuple[int, int | None] | None:
    """Returns the bits and the group that a factor's dtype stands for; None for dtypes that are not packed.

    "int4" is 4 bits in groups of 32; "int4g64" in groups of 64, "int4gall" with one scale per direction.
    """
    word = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or getattr(dtype, "name", "")
    match = _FACTOR_WORD.fullmatch(word)
    if match is None:
        return None
    group = match.group(2)
    return int(match.group(1)), GROUP if group is None else None if group == "all" else int(group)


def quantised(value: Float[AnyArray, "..."], dtype: jax.typing.DTypeLike, axis: int) -> AnyArray | PackedArray:
    """Converts a factor to its stored dtype: int8 or a float8 with scales, int2 to int7 in groups, others by rounding.

    8-bit dtypes get one float32 scale per slice along `axis`, an axis of length 1 in the scale. It maps the largest
    magnitude of the slice to the largest of the dtype, so nothing overflows. int2 to int7 are packed, symmetric about
    zero, in groups along `axis`; see `factor_bits`.
    """
    few = factor_bits(dtype)
    if few is not None:
        return pack(value, *few, axis, symmetric=True)
    target = jnp.dtype(dtype)
    if target.itemsize > 1:
        return value.astype(target)
    codes, scale = _scaled(value, target, axis)
    return PackedArray((codes,), scale, None, 8, value.shape[axis], axis, value.shape[-1], None, np.dtype(np.float32))


# Inlined in a traced caller. Called eagerly, it is one program in place of one per operation.
@functools.partial(jax.jit, static_argnames=("target", "axis"), inline=True)
def _scaled(value: Array, target: np.dtype, axis: int) -> tuple[Array, Array]:
    """Converts values to an 8-bit dtype; returns them and their scale."""
    largest = 127.0 if target == jnp.int8 else float(jnp.finfo(target).max)
    value = value.astype(jnp.float32)
    scale = jnp.max(jnp.abs(value), axis=axis, keepdims=True) / largest
    # A slice of zeros stays zeros.
    scale = jnp.where(scale > 0, scale, 1.0)

    # The quotient may exceed the largest value by a rounding error.
    scaled = jnp.clip(value / scale, -largest, largest)
    return (jnp.round(scaled) if target == jnp.int8 else scaled).astype(target), scale


def is_packed(value: Any) -> TypeGuard[PackedArray]:
    """Returns whether an array is in few bits."""
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
    codes, middle = _codes_of(packed, xp), 0
    if packed.least is None and not packed.scaled:
        middle = 2 ** (packed.bits - 1)
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
        planes=(fitted(codes, size, 0),) if packed.scaled else _planes_of(fitted(codes, size, middle), packed.bits, xp),
        scale=fitted(packed.scale, groups, 0),
        least=None if packed.least is None else fitted(packed.least, groups, 0),
        columns=packed.columns + (size - have if axis == -1 else 0),
        group=group,
    )
