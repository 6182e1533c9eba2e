"""Ranks by layer and channel under a budget of bytes: the directions that hold most of a deficit.

The exact singular value decomposition of each layer and channel gives directions whose squared singular values are
what the patch's squared error loses by keeping them. So the largest ones over all layers and channels are the best set
at equal bytes for each direction: no other set of factors of the same ranks' sum has a smaller error (`relative=0`).
The least error over all is not what a model reads, though: the first layers have small numbers, and would get nothing.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..cache import Chunk, check_finite
from ..core import PARTS, AnyArray, RaggedFactors, factor_bits, ops, packed_bytes, quantised
from ..errors import InputError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from ..utils.sizes import size_of

Weights = Mapping[str, Float[AnyArray, "L F"]]
"""A weight for each feature of each layer, by channel: an error in it counts that many times."""

DEFAULT_SIZE = "15 %"
"""Size of a patch where none is named: the smallest measured at which no context of a corpus lost more than blind reuse
does (docs/results.md)."""
LEAST_DIRECTIONS = 4
"""Directions for each layer and channel that a share pays for at least, so that short chunks are not cut to nothing."""

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", re.ASCII)


@dataclasses.dataclass(frozen=True)
class ByteBudget:
    """Most bytes that a patch may take (`Patch.nbytes`), in place of one rank everywhere.

    Attributes:
      nbytes: 1 or more.
      relative: 0 compares directions by their energy, which leaves the least error over all; 1 by their share of the
        energy of their layer and channel, so that layers of small numbers are corrected as far as others; between, by
        energy over that power of the layer's.
      least: directions for each layer and channel that are paid for on average, whatever `nbytes` says.

    Raises:
      InputError: a number below 1, or none; `relative` outside 0 to 1; `least` below 0.
    """

    nbytes: int
    relative: float | int = 0.5
    least: int = 0

    def __post_init__(self) -> None:
        power = self.relative
        if isinstance(power, bool) or not isinstance(power, float | int) or not 0 <= power <= 1:
            raise InputError(f"ByteBudget.relative: got {self.relative!r:.80}; expected a number from 0 to 1")
        if not is_whole(self.least, 0):
            raise InputError(f"ByteBudget.least: got {self.least!r:.80}; expected a whole number from 0")
        if not is_whole(self.nbytes, 1):
            raise InputError(f"ByteBudget.nbytes: got {self.nbytes!r:.80}; expected a whole number from 1")

    @classmethod
    def share(cls, chunk: Chunk, share: float | int, relative: float | int = 0.5, least: int = 0) -> "ByteBudget":
        """Returns a share of the bytes of a chunk's KV in 16 bits, padding left out; a transition counts once.

        Raises:
          InputError: a share that is not above 0, or one of less than a byte, where `least` is 0.
        """
        expect_kind(chunk, Chunk, "ByteBudget.share", "a Chunk")
        if not isinstance(share, float | int) or isinstance(share, bool) or not 0 < share < 1e6:
            raise InputError(f"ByteBudget.share: got {share!r:.80}; expected a number above 0")
        whole = chunk.layout.bytes_per_token() * chunk.length + chunk.layout.transition_bytes(jnp.bfloat16)
        return cls(max(int(share * whole), min(least, 1)), relative, least)


def budget_of(chunk: Chunk, size: str) -> ByteBudget:
    """Reads the size of a patch that is given as text.

    Args:
      size: bytes ("12 kB"), or a share of the chunk's KV in 16 bits ("15 %"), of at least `LEAST_DIRECTIONS` directions
        for each layer and channel.

    Raises:
      InputError: it cannot be read.
    """
    number, is_share = parse_size(size, "patch")
    return ByteBudget.share(chunk, number, least=LEAST_DIRECTIONS) if is_share else ByteBudget(int(number))


def parse_size(size: str, what: str) -> tuple[int | float, bool]:
    """Reads a size given as text: bytes, or a share and True.

    Raises:
      InputError: it is neither; the message begins with `what`.
    """
    match = _PERCENT.fullmatch(size.strip())
    if match is not None and float(match[1]) > 0:
        return float(match[1]) / 100, True
    try:
        return size_of(size, f"{what}: rank", 1), False
    except InputError as error:
        raise InputError(f"{error}, or a share of the KV above 0 such as '15 %'") from None


def _direction_bytes(tokens: int, features: int, dtype: jax.typing.DTypeLike) -> int:
    """Counts the bytes of one direction: a coefficient for each token and a number for each feature, with scales."""
    few = factor_bits(dtype)
    if few is not None:
        return sum(packed_bytes(1, size, *few, -1, symmetric=True) for size in (tokens, features))
    size = jnp.dtype(dtype).itemsize
    # 8-bit dtypes have one float32 scale for each of the two vectors.
    return size * (tokens + features) + (8 if size == 1 else 0)


def choose_directions(
    singular_values: Mapping[str, Float[np.ndarray, "L R"]],
    costs: Mapping[str, int],
    budget: int,
    column_bytes: Mapping[str, int] | None = None,
) -> dict[str, Int[np.ndarray, " L"]]:
    """Chooses how many directions each layer and channel keeps, by greedy choice of the largest squared values.

    At equal costs no other choice within the budget has a smaller sum of the squared values that are left out, which is
    the squared error. Of unequal costs a direction that does not fit any more is passed over for cheaper ones.
    Directions of no energy are not taken.

    Args:
      singular_values: by channel, descending in each layer. costs: bytes of one direction, by channel.
      budget: bytes.
      column_bytes: by channel, what every further rank of its highest layer costs beside (the table of rows).
    """
    # All directions in one list: their energy, channel, layer, and place within the layer.
    names, columns = list(singular_values), column_bytes or {}
    ranks = {name: np.zeros(len(value), np.int64) for name, value in singular_values.items()}
    energies, places = [np.zeros(0)], [np.zeros((0, 3), np.int64)]
    for number, values in enumerate(singular_values.values()):
        layer, rank = np.indices(values.shape)
        energies.append((np.asarray(values, np.float64) ** 2).ravel())
        places.append(np.stack([np.full(values.size, number), layer.ravel(), rank.ravel()], axis=1))

    # The stable order keeps equal values of a layer in theirs.
    energy, place = np.concatenate(energies), np.concatenate(places)
    order = np.argsort(-energy, kind="stable")
    order = order[energy[order] > 0]

    left, cheapest = budget, min(costs.values(), default=0)
    for number, layer, rank in place[order].tolist():
        if left < cheapest:
            break
        # A direction counts on those before it in its layer: after one was passed over, so are the rest.
        name = names[number]
        cost = costs[name] + (columns.get(name, 0) if rank == ranks[name].max() else 0)
        if rank == ranks[name][layer] and cost <= left:
            ranks[name][layer] += 1
            left -= cost

    return ranks


def form_ragged(
    delta: Mapping[str, Float[Array, "L T _ _"]],
    length: int,
    budget: ByteBudget,
    dtype: str,
    what: str,
    weights: Weights | None = None,
) -> ops.Factors:
    """Factorises a deficit with a rank for each layer and channel, within a budget of bytes.

    Args:
      delta: float32, zero on padding. length: tokens that are not padding.
      dtype: of the factors, as `storable_dtype` names it. what: begins messages.
      weights: for each layer and feature; the error is minimised in the norm that they give.

    Returns:
      `RaggedFactors` by channel; channels without directions are left out.

    Raises:
      InputError: the budget does not hold one direction. NotFiniteError: factors beyond the dtype's range.
    """
    shapes = {name: value.shape for name, value in delta.items()}
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ShapeError(f"{what}: got a batch with a ByteBudget; expected one chunk")
    found = _jitted_directions(dict(delta), None if weights is None else dict(weights))
    values, costs, columns, index_dtype, limits = {}, {}, {}, {}, {}
    power, nbytes = budget.relative, 0
    for name, (_, tokens, *heads) in shapes.items():
        features = math.prod(heads)
        costs[name] = _direction_bytes(tokens, features, dtype)
        # A transition's part has no padding: all of its rows count.
        limits[name] = min(tokens if name in PARTS else length, features)
        # With what a further rank takes in the table of rows.
        nbytes += min(budget.least, limits[name]) * shapes[name][0] * (costs[name] + 2)
    nbytes = max(nbytes, budget.nbytes)
    for name, (singular, _, _) in found.items():
        layers, limit = shapes[name][0], limits[name]
        # Rounding must not let values ascend, nor the tail of a thin deficit count as energy.
        host = np.minimum.accumulate(np.asarray(singular)[:, :limit].clip(0), axis=1)
        values[name] = np.where(host > 1e-7 * host[:, :1], host, 0.0)
        if power:
            # A layer of next to nothing, such as the roundings of the first one, has no claim to a share of its own.
            norms = np.linalg.norm(np.asarray(singular, np.float64), axis=1, keepdims=True)
            values[name] = values[name] / np.maximum(norms, 1e-3 * norms.max() + 1e-30) ** power
        # The budget bounds how many rows there are.
        index_dtype[name] = np.int16 if min(layers * limit, nbytes // costs[name]) < 1 << 15 else np.int32
        columns[name] = layers * np.dtype(index_dtype[name]).itemsize

    ranks = choose_directions(values, costs, nbytes, columns)
    least = min(costs[name] + columns[name] for name in costs)
    if nbytes < least:
        raise InputError(f"{what}: got a budget of {nbytes} bytes; expected at least {least}, for one direction")

    factors: ops.Factors = {}
    for name, own in ranks.items():
        total = int(own.sum())
        if not total:
            continue
        rows = np.full((len(own), own.max()), total, index_dtype[name])
        taken = np.arange(own.max()) < own[:, None]
        rows[taken] = np.arange(total)
        # Numbers of all directions, layer by layer; the selection is padded with the first one, and cut on the host.
        layer, rank = np.nonzero(taken)
        index = np.zeros((2, ops.padded_directions(total)), np.int32)
        index[:, :total] = layer, rank
        _, u, v = found[name]
        pair = _jitted_selection(u, v, index, None if weights is None else jnp.asarray(weights[name]), dtype)
        check_finite([(name, leaf) for leaf in jax.tree.leaves(pair) if jnp.issubdtype(leaf.dtype, jnp.floating)], what)
        u, v = jax.tree.map(functools.partial(_first, count=total), jax.device_get(pair))
        factors[name] = RaggedFactors(u, v, jax.device_put(rows))

    return factors


def _first(leaf: np.ndarray, count: int) -> Array:
    return jax.device_put(leaf[:count])


@jax.jit
def _jitted_directions(
    delta: dict[str, Float[Array, "L T _ _"]], weights: dict[str, Array] | None
) -> dict[str, tuple[Array, Array, Array]]:
    """Computes by channel the singular values [L, R], u with them [L, T, R] and v [L, R, F] of each layer."""
    result = {}
    for name, value in delta.items():
        matrix = ops.flatten_heads(value)
        matrix = matrix if weights is None else matrix * jnp.asarray(weights[name], jnp.float32)[:, None]
        u, singular, v = jnp.linalg.svd(matrix, full_matrices=False)
        result[name] = singular, u * singular[:, None], v
    return result


@functools.partial(jax.jit, static_argnames=("dtype",))
def _jitted_selection(
    u: Array, v: Array, index: Int[AnyArray, "2 R"], weights: Array | None, dtype: str
) -> tuple[Any, Any]:
    """Returns the u [R, T] and v [R, F] of some directions (layer, rank), in the dtype of factors."""
    layer, rank = index
    own = v[layer, rank]
    # Directions were found of weighted features; the product u v is of the features themselves.
    own = own if weights is None else own / weights[layer]
    return quantised(u[layer, :, rank], dtype, -1), quantised(own, dtype, -1)
