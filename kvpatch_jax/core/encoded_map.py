"""Maps of transitions in as few directions as an error allows, stored as factors of a rank for each layer and head.

Of a head's map M [R, W] with singular values σ₁ ≥ σ₂ ≥ …, r directions take r·(R + W) numbers, and no other M_r of
rank r has a smaller ‖(M − M_r)·S‖_F for the worst state S (Eckart, Young and Mirsky: `transitions.truncated_map`). A
head that lets nothing through beyond the error takes none; one whose factors would take as many numbers as M, or whose
error is below what rounding leaves, is kept whole. Numbers are bfloat16, decoded in float32.

The heads lie one behind the other. Whole, a head is M row by row; else it is r pairs of vectors, √σ u (R numbers) and
√σ v (W numbers), the largest first. A decay per row, or one decay, is a map of width 1: dropped, or whole.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..errors import ShapeError
from .layout import AnyArray

PART_DTYPE = np.dtype(jnp.bfloat16)
"""What the parts of a transition are kept in where the rows are kept in fewer bits."""
MOST_WIDTH = 1024
"""Limit of a map's rows and width: a few bytes may stand for a whole map, which decoding allocates."""

_FLOAT32 = np.dtype(np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("factors", "ranks"), meta_fields=("rows", "width"))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EncodedMap:
    """A map [..., R, K, W] in factors. A pytree of arrays; `np.asarray` and `jnp.asarray` decode it, to float32.

    Attributes:
      factors: bfloat16 [n], what the heads keep, one behind the other. On the host, as `ranks`: n depends on the
        numbers of the map, and decoding pads it, so that maps of all ranks share one program.
      ranks: directions of each head, int32 [..., K]: 0 where nothing is kept, R where the head is whole.
      rows, width: R and W.
    """

    factors: Any
    ranks: Any
    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        return (*self.ranks.shape[:-1], self.rows, self.ranks.shape[-1], self.width)

    @property
    def ndim(self) -> int:
        """Number of axes of the decoded array."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """What is decoded to: float32."""
        return _FLOAT32

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: factors and ranks."""
        return int(self.factors.nbytes) + int(self.ranks.nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(unpack_map(self), dtype)

    def __jax_array__(self) -> Array:
        return unpack_map(self)

    def __getitem__(self, index: Any) -> Array:
        """Decodes, and returns numbers."""
        return unpack_map(self)[index]

    def astype(self, dtype: Any) -> Array:
        """Decodes to another dtype."""
        return unpack_map(self).astype(dtype)

    def __repr__(self) -> str:
        return f"EncodedMap({list(self.shape)} in {self.factors.shape[0]} numbers)"


def is_encoded_map(value: Any) -> TypeGuard[EncodedMap]:
    """Whether an array is a map in factors."""
    return isinstance(value, EncodedMap)


def with_decoded_map(kv: Mapping[str, Any]) -> dict[str, Any]:
    """Returns KV with a map in factors decoded: a program that took these would be compiled for each number of them."""
    return {name: unpack_map(value) if is_encoded_map(value) else value for name, value in kv.items()}


def most_directions(rows: int, width: int) -> int:
    """Returns how many directions take fewer numbers than a map [R, W] does; 0 of a width of 1."""
    return 0 if width == 1 else (rows * width - 1) // (rows + width)


def numbers_of(ranks: Int[np.ndarray, "..."], rows: int, width: int) -> Int[np.ndarray, "..."]:
    """Counts the numbers that each head keeps."""
    return np.where(ranks == rows, rows * width, ranks.astype(np.int64) * (rows + width))


def check_ranks(encoded: EncodedMap, what: str) -> None:
    """Checks, on the host, that a map's arrays are as `encode_map` makes them; reads no factor.

    Raises:
      ShapeError: a rank that no map of these rows has, or another number of factors; or a map beyond `MOST_WIDTH`.
    """
    ranks, factors, rows, width = encoded.ranks, encoded.factors, encoded.rows, encoded.width
    if max(rows, width) > MOST_WIDTH:
        raise ShapeError(f"{what}: got a map of {rows} rows and width {width}; expected at most {MOST_WIDTH}")
    if ranks.dtype != np.int32 or factors.dtype != PART_DTYPE or factors.ndim != 1:
        raise ShapeError(
            f"{what}: got {ranks.dtype} ranks of {factors.dtype}{list(factors.shape)}; expected int32 "
            f"ranks of {PART_DTYPE} [n]"
        )
    most = most_directions(rows, width)
    if ranks.size and not np.all((ranks >= 0) & ((ranks <= most) | (ranks == rows))):
        raise ShapeError(f"{what}: got ranks {ranks.min()} to {ranks.max()}; expected 0 to {most}, or {rows}")
    expected = int(numbers_of(ranks, rows, width).sum())
    if factors.shape[0] != expected:
        raise ShapeError(f"{what}: got {factors.shape[0]} numbers; expected the {expected} that the ranks say")


# ------------------------------------------------------------------------------------------------------ encoding


def encode_map(map_: Float[AnyArray, "*batch R K W"], error: float | int) -> EncodedMap:
    """Encodes a map in the fewest directions with which every head is decoded within an error, or else kept whole.

    Of a head that is not whole, ‖(M − M̂)·S‖_F ≤ error·‖S‖_F for every state S, with M̂ as it is decoded: what is left
    out (σ_{r+1}), the rounding of the factors to bfloat16, for which a bound is computed, and an allowance for float32
    count towards the error together. A whole head is M rounded to bfloat16, each number within 2⁻⁸ of its magnitude, as
    all heads are without a map error. A map of width 1 has no directions: a head is dropped where no decay exceeds the
    error, else it is whole.

    Raises:
      ShapeError: more rows or a larger width than `MOST_WIDTH`.
    """
    rows, width = map_.shape[-3], map_.shape[-1]
    if max(rows, width) > MOST_WIDTH:
        raise ShapeError(f"map: got {rows} rows and width {width}; expected at most {MOST_WIDTH}")
    ranks, pairs, whole = map(np.asarray, _factored(jnp.asarray(map_), np.float32(error)))

    # How much a head keeps is in its numbers, so it is gathered on the host.
    kept = [np.zeros(0, PART_DTYPE)]
    for place in np.ndindex(*ranks.shape):
        rank = ranks[place]
        kept.append((whole[place] if rank == rows else pairs[place][:rank]).reshape(-1))
    factors = np.concatenate(kept)
    for array in (factors, ranks := np.array(ranks)):
        array.flags.writeable = False
    return EncodedMap(factors, ranks, rows, width)


@jax.jit
def _factored(map_: Array, error: Array) -> tuple[Array, Array, Array]:
    """Returns ranks [..., K], pairs of vectors [..., K, directions, R + W] and whole heads [..., K, R, W]."""
    heads = jnp.moveaxis(map_.astype(jnp.float32), -2, -3)
    rows, width = heads.shape[-2:]
    most = most_directions(rows, width)
    whole = heads.astype(PART_DTYPE)
    if width == 1:
        largest = jnp.abs(heads[..., 0]).max(-1)
        pairs = jnp.zeros((*largest.shape, 0, rows + width), PART_DTYPE)
        return jnp.where(largest <= error, 0, rows).astype(jnp.int32), pairs, whole

    first, sizes, second = jnp.linalg.svd(heads, full_matrices=False)
    # Float32's part: once in the decomposition (LAPACK Users' Guide §4.9), once in the product that decodes.
    bounds = sizes + 2 * rows * float(jnp.finfo(jnp.float32).eps) * sizes[..., :1]
    roots = jnp.sqrt(sizes[..., :most])
    left = jnp.swapaxes(first[..., :most], -1, -2) * roots[..., None]
    right = second[..., :most, :] * roots[..., None]

    # As bfloat16 is; XLA may take two conversions for none.
    lost_left, lost_right = (value - jax.lax.reduce_precision(value, 8, 7) for value in (left, right))
    # A B − Â B̂ = A δB + δA B − δA δB, and ‖A δB‖ = ‖√Σ δB‖ as A = U √Σ. Fewer directions have no larger norms.
    rounding = sum(_norm_bound(lost * roots[..., None]) for lost in (lost_left, lost_right))
    rounding = rounding + jnp.sqrt(jnp.square(lost_left).sum((-1, -2)) * jnp.square(lost_right).sum((-1, -2)))

    rank = (bounds + rounding[..., None] > error).sum(-1)
    # Nothing is rounded where nothing is kept.
    rank = jnp.where(bounds[..., 0] <= error, 0, jnp.where(rank > most, rows, rank))
    pairs = jnp.concatenate([left, right], axis=-1).astype(PART_DTYPE)
    return rank.astype(jnp.int32), pairs, whole


def _norm_bound(rows: Float[Array, "*batch M N"]) -> Float[Array, "*batch"]:
    """Bounds the largest singular value by the Schatten norm (Σ σ³²)^(1/32), at most M^(1/32) of it, by products."""
    scale = jnp.sqrt(jnp.square(rows).sum((-1, -2), keepdims=True))
    scaled = rows / jnp.where(scale > 0, scale, 1.0)
    power = jnp.einsum("...mn,...kn->...mk", scaled, scaled, precision=jax.lax.Precision.HIGHEST)
    for _ in range(3):
        power = jnp.matmul(power, power, precision=jax.lax.Precision.HIGHEST)
    # A thousandth for the rounding of these products themselves.
    return 1.001 * scale[..., 0, 0] * jnp.square(power).sum((-1, -2)) ** (1 / 32)


# ------------------------------------------------------------------------------------------------------ decoding


def unpack_map(encoded: EncodedMap) -> Float[Array, "*batch R K W"]:
    """Decodes a map to float32. One program serves maps of one shape, whatever their ranks, and gives the same bits."""
    rows, width = encoded.rows, encoded.width
    room = max(1, int(np.prod(encoded.shape)))
    if isinstance(encoded.factors, Tracer) or isinstance(encoded.ranks, Tracer):
        factors = jnp.pad(encoded.factors, (0, room - encoded.factors.shape[0]))
        return _unpacked(factors, encoded.ranks, rows, width)

    # Padded on the host, where no number of factors compiles a program.
    factors = np.zeros(room, PART_DTYPE)
    factors[: encoded.factors.shape[0]] = np.asarray(encoded.factors)
    return _jitted_unpacked(factors, np.asarray(encoded.ranks), rows, width)


def _unpacked(factors: Array, ranks: Array, rows: int, width: int) -> Array:
    factors = jnp.asarray(factors)
    flat = jnp.asarray(ranks).reshape(-1, ranks.shape[-1])
    most = most_directions(rows, width)
    sizes = jnp.where(flat == rows, rows * width, flat * (rows + width))
    begins = (jnp.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)).reshape(flat.shape)

    def read(begin: Array, *shape: int) -> Array:
        """Returns [K, *shape] numbers from where each head begins; what lies behind its own is not used."""
        places = begin[:, None] + jnp.arange(int(np.prod(shape)))
        return jnp.take(factors, places, mode="clip").reshape(-1, *shape).astype(jnp.float32)

    def layer(operands: tuple[Array, Array]) -> Array:
        begin, rank = operands
        value = jnp.where((rank == rows)[:, None, None], read(begin, rows, width), 0.0)
        if most:
            pairs = read(begin, most, rows + width)
            pairs = jnp.where((jnp.arange(most) < rank[:, None])[..., None], pairs, 0.0)
            left, right = pairs[..., :rows], pairs[..., rows:]
            product = jnp.einsum("kmr,kmw->krw", left, right, precision=jax.lax.Precision.HIGHEST)
            value = jnp.where((rank == rows)[:, None, None], value, product)
        return jnp.swapaxes(value, 0, 1)

    # Layer by layer, as all that is gathered takes more than a layer's map.
    decoded = jax.lax.map(layer, (begins, flat))
    return decoded.reshape(*ranks.shape[:-1], rows, ranks.shape[-1], width)


_jitted_unpacked = jax.jit(_unpacked, static_argnums=(2, 3))


# -------------------------------------------------------------------------------------------------------- layers


def split_layers(encoded: EncodedMap) -> list[EncodedMap]:
    """Returns the map of each layer, [R, K, W] of [L, R, K, W], as views."""
    sizes = numbers_of(np.asarray(encoded.ranks), encoded.rows, encoded.width).sum(-1)
    ends = [0, *itertools.accumulate(int(size) for size in sizes)]
    factors = np.asarray(encoded.factors)
    return [
        EncodedMap(factors[begin:end], ranks, encoded.rows, encoded.width)
        for begin, end, ranks in zip(ends[:-1], ends[1:], np.asarray(encoded.ranks), strict=True)
    ]


def join_layers(layers: Sequence[EncodedMap]) -> EncodedMap:
    """Returns the map [L, R, K, W] of layers [R, K, W]: what `split_layers` had."""
    factors, ranks = np.concatenate([one.factors for one in layers]), np.stack([one.ranks for one in layers])
    for array in (factors, ranks):
        array.flags.writeable = False
    return EncodedMap(factors, ranks, layers[0].rows, layers[0].width)
