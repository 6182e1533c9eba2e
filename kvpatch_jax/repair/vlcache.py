"""VLCache: recompute a chunk's first tokens, with a number of tokens per layer that follows the layer's sensitivity."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone
from ..core import KVLayout, to_engine
from ..errors import InputError
from .spliced_cache import Repaired, SplicedCache, check_splice, live_tokens, recompute_tokens, untouched


def vlcache(backbone: Backbone, splice: SplicedCache, counts: Sequence[int]) -> Repaired:
    """Recomputes the first `counts[l]` tokens of the chunk in context at layer l, for every layer.

    Source: VLCache (Qin et al. 2025, section 4), its dynamic recomputation ratio; `layer_counts` computes the counts.

    Args:
      counts: tokens per row for each layer, static, 0 … T, not increasing with depth.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: counts increase with depth, are not one per layer, or lie outside 0 … T. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    layers, (_, T) = backbone.layout.layers, splice.slots.shape
    counts = [int(count) for count in counts]
    if len(counts) != layers or any(upper > lower for lower, upper in itertools.pairwise(counts)):
        raise InputError(f"vlcache.counts: got {counts}; expected {layers}, none larger than the one below it")
    if counts[-1] < 0:
        raise InputError(f"vlcache.counts: got {counts[-1]}; expected 0 to the chunk's {T} tokens")

    check_splice(backbone.layout, splice, counts[0])
    if counts[0] == 0:
        return untouched(backbone.layout, splice)

    # The tokens of the lowest layer are computed, and those above write fewer of them: their sets are nested.
    first = (np.arange(T) < np.asarray(counts)[:, None])[:, None]
    chosen = jax.device_put(first) & live_tokens(splice)
    index = jax.device_put(np.broadcast_to(np.arange(counts[0], dtype=np.int32), (splice.slots.shape[0], counts[0])))
    return Repaired(recompute_tokens(backbone, splice, index, chosen), chosen)


def layer_sensitivity(
    layout: KVLayout,
    splice: SplicedCache,
    counts: Sequence[int],
    loss: Callable[[KV], float],
    blocks: int | None = None,
) -> Float[np.ndarray, "L n"]:
    """Measures the loss when one layer has the true KV of the chunk's first tokens, for every layer and count.

    Source: VLCache, equation 5. There the layer is recomputed on reused inputs, which takes a forward per layer and
    count; here it has the KV of a prefill in context, which takes one forward in all.

    VLCache never serves such a cache: whenever a layer's first tokens are recomputed, so are those of all layers below
    it, and the loss is not a sum over layers. With `blocks`, a row is a block of that many layers, all layers below
    have the true KV of the same tokens (as `vlcache` serves them, because first tokens attend only to one another and
    to the preceding context), and an entry is the change of the loss that the block adds. A column then sums to the
    whole change of its count.

    Args:
      splice: of a calibration item, with `conditioned`.
      counts: numbers of tokens, 0 … T.
      loss: maps a cache {channel: [L,B,S,K,H]} to the distance of its answers from those of a re-prefill.
      blocks: layers per block, a divisor of L; None: as VLCache, one row per layer.

    Returns:
      One row per layer or per block.

    Raises:
      InputError: `conditioned` is None, a count is outside 0 … T, or `blocks` does not divide the layers. ShapeError,
        LayoutError, DtypeError: the splice does not match the layout.
    """
    for count in counts:
        check_splice(layout, splice, count)
    if splice.conditioned is None:
        raise InputError("layer_sensitivity.conditioned: got None; expected the chunk's phase-free KV in context")
    if blocks is not None and (blocks < 1 or layout.layers % blocks):
        raise InputError(f"layer_sensitivity.blocks: got {blocks}; expected a divisor of {layout.layers} layers")

    # A loss of the blind cache is what a count of 0 has in every row.
    true = to_engine(layout, splice.conditioned, splice.tokens.positions, 0)
    blind = loss(splice.cache)
    losses = np.full((layout.layers // (blocks or 1), len(counts)), blind)

    for place, count in enumerate(counts):
        # With a count of 0 every cache is the blind one.
        if count == 0:
            continue

        for row in range(len(losses)):
            first, last = (row, row) if blocks is None else (0, (row + 1) * blocks - 1)
            # Traced, so that one program serves all layers and counts.
            bounds = jax.device_put((first, last, count))
            losses[row, place] = loss(_true_at(splice.cache, true, splice.slots, *bounds))

    return losses if blocks is None else np.diff(losses, axis=0, prepend=blind)


@jax.jit
def _true_at(
    cache: KV,
    true: KV,
    slots: Int[Array, "B T"],
    first: Int[Array, ""],
    last: Int[Array, ""],
    count: Int[Array, ""],
) -> dict[str, Array]:
    """Writes the true KV of the chunk's first `count` tokens into the cache at layers first … last."""
    rows = jnp.arange(slots.shape[0])[:, None]
    layers = jnp.arange(next(iter(cache.values())).shape[0])
    replaced = ((layers >= first) & (layers <= last))[:, None] & (jnp.arange(slots.shape[1]) < count)
    replaced = replaced[:, None, :, None, None]

    result = {}
    for name, value in cache.items():
        result[name] = value.at[:, rows, slots].set(jnp.where(replaced, true[name], value[:, rows, slots]))
    return result


def layer_counts(
    sensitivity: Float[np.ndarray, "L n"], counts: Sequence[int], budget: int, spend: bool = False
) -> tuple[int, ...]:
    """Allocates tokens to layers so that the sum of sensitivities is least and counts do not increase with depth.

    Source: VLCache, equations 6 to 9. VLCache solves them greedily; here dynamic programming over layers, the last
    count and the tokens spent solves them exactly.

    Args:
      sensitivity: result of `layer_sensitivity`, or a mean of several.
      counts: numbers of tokens of its columns, ascending.
      budget: maximum number of tokens of all layers together.
      spend: leave less of the budget than the largest step between counts, even if sensitivities say that more tokens
        do harm, so that methods are compared at the same budget.

    Returns:
      Tokens for each layer.

    Raises:
      InputError: counts do not ascend or do not match the columns; a sensitivity is not finite; the budget is below
        the smallest count for every layer.
    """
    sensitivity = np.asarray(sensitivity, np.float64)
    ascending = all(small < large for small, large in itertools.pairwise(counts))
    if sensitivity.ndim != 2 or sensitivity.shape[1] != len(counts) or not ascending or min(counts, default=-1) < 0:
        found = f"counts {list(counts)}, sensitivity {sensitivity.shape}"
        raise InputError(f"layer_counts: got {found}; expected ascending counts, one for each column")
    if not np.isfinite(sensitivity).all():
        raise InputError("layer_counts.sensitivity: got NaN or infinity; expected finite numbers")
    if len(sensitivity) * counts[0] > budget:
        raise InputError(f"layer_counts.budget: got {budget}; expected at least {len(sensitivity) * counts[0]}")

    # least[m, b] is the least sum over the layers from the current one on, with at most counts[m] tokens each and b
    # tokens in all; taken holds the index of the current layer's count. With `spend` a solution always exists: raising
    # layers by one count each, the lowest first, leaves less than a step.
    layers, left = len(sensitivity), min(budget, len(sensitivity) * counts[-1])
    unspent = max(np.diff(counts), default=1) if spend else left + 1
    least = np.tile(np.where(np.arange(left + 1) < unspent, 0.0, np.inf), (len(counts), 1))
    taken = np.zeros((layers, len(counts), left + 1), np.int16)

    for layer in reversed(range(layers)):
        above, best, which = least, np.full(left + 1, np.inf), np.zeros(left + 1, np.int16)
        least = np.empty_like(above)
        for place, count in enumerate([count for count in counts if count <= left]):
            candidate = np.full(left + 1, np.inf)
            candidate[count:] = sensitivity[layer, place] + above[place, : left + 1 - count]
            which = np.where(candidate < best, place, which)
            best = np.minimum(candidate, best)
            least[place], taken[layer, place] = best, which

        # Counts beyond the budget cannot be taken, so allowing them changes nothing.
        least[place + 1 :], taken[layer, place + 1 :] = best, which

    # Follow the decisions from the lowest layer.
    allocation, place = [], len(counts) - 1
    for layer in range(layers):
        place = int(taken[layer, place, left])
        allocation.append(counts[place])
        left -= counts[place]

    return tuple(allocation)
