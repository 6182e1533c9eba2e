"""VLCache: recompute a chunk's first tokens, at each layer its own number of them, shared out by what layers need."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone
from ..core import KVLayout, to_engine
from ..errors import InputError
from ._common import Repaired, SplicedCache, check_splice, live_tokens, recompute_tokens, untouched


def vlcache(backbone: Backbone, splice: SplicedCache, counts: Sequence[int]) -> Repaired:
    """Recomputes the first `counts[l]` tokens of the chunk in context at layer l, for every layer.

    Source: VLCache (Qin et al. 2025, section 4), its dynamic recomputation ratio; `layer_counts` finds the counts.

    Args:
      counts: tokens per row for each layer, static, 0 … T, none larger than the one below.

    Returns:
      The mended cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: counts that rise with depth, are not one for each layer, or lie outside 0 … T. ShapeError,
        LayoutError, DtypeError: a splice that does not fit.
    """
    layers, (_, T) = backbone.layout.layers, splice.slots.shape
    counts = [int(count) for count in counts]
    if len(counts) != layers or any(upper > lower for lower, upper in itertools.pairwise(counts)):
        raise InputError(f"vlcache: counts {counts}; expected {layers}, none larger than the one below it")
    if counts[-1] < 0:
        raise InputError(f"vlcache: count {counts[-1]}; expected 0 to the chunk's {T} tokens")
    check_splice(backbone.layout, splice, counts[0])
    if counts[0] == 0:
        return untouched(backbone.layout, splice)

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
    """Measures what is lost where a layer has the true KV of its first tokens, for each layer and count.

    Source: VLCache, equation 5: one layer alone has it. Its layer is recomputed on reused inputs; here the layer has
    the KV of a prefill in context, which needs one forward where the other needs one for each layer and count.

    No cache that VLCache serves is like that: where a layer's first tokens are recomputed, so are those of all layers
    below it, and what is lost is no sum over layers. With `blocks`, a row is a block of so many layers, all layers
    below have the same tokens' true KV (what `vlcache` serves, since first tokens see only one another and what stands
    in front), and an entry is what the block's own adds to the loss: a column sums to the whole loss of its count.

    Args:
      splice: of a calibration item; `conditioned` is needed.
      counts: tokens, each 0 … T.
      loss: of a cache {channel: [L,B,S,K,H]}: how far the answers over it are from a re-prefill's.
      blocks: layers of a block, a divisor of L; None: VLCache's own way, a row per layer.

    Returns:
      A row per layer, or per block.

    Raises:
      InputError: no `conditioned`, a count outside 0 … T, or blocks that do not divide the layers. ShapeError,
        LayoutError, DtypeError: a splice that does not fit.
    """
    for count in counts:
        check_splice(layout, splice, count)
    if splice.conditioned is None:
        raise InputError("layer_sensitivity: splice.conditioned is None; expected the chunk's phase-free KV in context")
    if blocks is not None and (blocks < 1 or layout.layers % blocks):
        raise InputError(f"layer_sensitivity: blocks {blocks}; expected a divisor of {layout.layers} layers")
    true = to_engine(layout, splice.conditioned, splice.tokens.positions, 0)
    blind = loss(splice.cache)
    found = np.full((layout.layers // (blocks or 1), len(counts)), blind)
    for place, count in enumerate(counts):
        for row in range(len(found) if count else 0):  # of a count of 0 nothing is true, whichever layer it is
            first, last = (row, row) if blocks is None else (0, (row + 1) * blocks - 1)
            where = jax.device_put((first, last, count))
            found[row, place] = loss(_true_at(splice.cache, true, splice.slots, *where))
    return found if blocks is None else np.diff(found, axis=0, prepend=blind)


@jax.jit
def _true_at(
    cache: KV,
    true: KV,
    slots: Int[Array, "B T"],
    first: Int[Array, ""],
    last: Int[Array, ""],
    count: Int[Array, ""],
) -> dict[str, Array]:
    """The cache with the chunk's first `count` tokens true at the layers first … last."""
    rows = jnp.arange(slots.shape[0])[:, None]
    layers = jnp.arange(next(iter(cache.values())).shape[0])
    taken = ((layers >= first) & (layers <= last))[:, None] & (jnp.arange(slots.shape[1]) < count)
    taken = taken[:, None, :, None, None]
    return {
        name: value.at[:, rows, slots].set(jnp.where(taken, true[name], value[:, rows, slots]))
        for name, value in cache.items()
    }


def layer_counts(
    sensitivity: Float[np.ndarray, "L n"], counts: Sequence[int], budget: int, spend: bool = False
) -> tuple[int, ...]:
    """Shares out tokens among layers: the least sum of sensitivities, none getting more than the one below.

    Source: VLCache, equations 6 to 9. It solves them greedily; here they are solved exactly, by dynamic programming
    over layers, the last count and the tokens spent.

    Args:
      sensitivity: `layer_sensitivity`'s, or a mean of several.
      counts: the tokens that its columns stand for, ascending.
      budget: tokens of all layers together, at most.
      spend: leave less of the budget than the largest step between counts, also where sensitivities say that tokens
        more harm: so methods are compared at one budget.

    Returns:
      Tokens for each layer.

    Raises:
      InputError: counts that do not ascend or are not the columns'; values that are not finite; a budget that the
        smallest count exceeds.
    """
    sensitivity = np.asarray(sensitivity, np.float64)
    ascending = all(small < large for small, large in itertools.pairwise(counts))
    if sensitivity.ndim != 2 or sensitivity.shape[1] != len(counts) or not ascending or min(counts, default=-1) < 0:
        raise InputError(
            f"layer_counts: counts {list(counts)}, sensitivity {sensitivity.shape}; expected ascending ones"
        )
    if not np.isfinite(sensitivity).all():
        raise InputError("layer_counts: a sensitivity that is not finite; expected numbers")
    if len(sensitivity) * counts[0] > budget:
        raise InputError(f"layer_counts: budget {budget}; expected at least {len(sensitivity) * counts[0]}")

    layers, left = len(sensitivity), min(budget, len(sensitivity) * counts[-1])
    # least[m, b]: of the layers from here on, none beyond counts[m], with b tokens; taken: which count it begins with.
    # Layers raised by one count each, the lowest first, leave less than a step: with `spend` there is an answer.
    unspent = max(np.diff(counts), default=1) if spend else left + 1
    least = np.tile(np.where(np.arange(left + 1) < unspent, 0.0, np.inf), (len(counts), 1))
    taken = np.zeros((layers, len(counts), left + 1), np.int16)
    for layer in reversed(range(layers)):
        behind, best, which = least, np.full(left + 1, np.inf), np.zeros(left + 1, np.int16)
        least = np.empty_like(behind)
        for place, count in enumerate([count for count in counts if count <= left]):
            own = np.full(left + 1, np.inf)
            own[count:] = sensitivity[layer, place] + behind[place, : left + 1 - count]
            which = np.where(own < best, place, which)
            best = np.minimum(own, best)
            least[place], taken[layer, place] = best, which
        least[place + 1 :], taken[layer, place + 1 :] = best, which

    found, place = [], len(counts) - 1
    for layer in range(layers):
        place = int(taken[layer, place, left])
        found.append(counts[place])
        left -= counts[place]
    return tuple(found)
