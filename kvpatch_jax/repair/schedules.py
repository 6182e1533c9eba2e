"""Schedules of VLCache: how many tokens each layer needs, measured on a proxy set, and their allocation.

Source: VLCache (Qin et al. 2025), sections 3.2 and 4.1, equations 5 to 9.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone, Tokens
from ..core import KVLayout, PhaseFreeKV, end_position, to_engine
from ..errors import InputError
from .recomputation import LayerSet, begin, run_layers
from .references import all_tokens, joined_tokens
from .repair_budget import RepairBudget
from .spliced_cache import AnyArray, SplicedCache, check_splice, required

RATIOS = tuple(round(0.002 * step, 3) for step in range(1, 151))
"""VLCache's ratios, 0.002 to 0.300 (equation 9)."""
MOST_STARTS, MOST_EXCHANGES = 64, 2_000_000
"""First moves that a greedy schedule tries, and numbers of one round of exchanges, at most."""


def behind_substitute(backbone: Backbone, substitute: Tokens, chunk: Tokens) -> PhaseFreeKV:
    """Prefills a chunk behind a substitute prompt: VLCache's canonical, {channel: [L,B,T,K,H]} phase-free.

    Source: VLCache section 3.2 and 5.2: image KV is cached in the context of another prompt ("Please describe this
    image"), never alone, so that the image's first tokens are no attention sinks.

    Args:
      substitute: a prompt's tokens from position 0. chunk: the chunk's, with positions from its own start.

    Raises:
      ShapeError, InputError: the tokens do not fit the backbone.
    """
    positions = jnp.asarray(substitute.positions)
    span = end_position(positions) + 1
    by = span.reshape(-1, *[1] * (positions.ndim - 1))
    moved = chunk._replace(positions=jnp.asarray(chunk.positions) + by.astype(jnp.asarray(chunk.positions).dtype))
    kv = backbone.prefill(joined_tokens(substitute, moved)).kv
    first = substitute.embeddings.shape[1]
    return PhaseFreeKV({name: value[:, :, first:] for name, value in kv.items()})


def recomputed_sensitivity(
    backbone: Backbone,
    proxies: Sequence[SplicedCache],
    ratios: Sequence[float | int],
    loss: Callable[[int, KV], float],
) -> Float[np.ndarray, "L n"]:
    """Measures VLCache's S_i(r): the loss when layer i alone is recomputed for the first tokens of every chunk.

    Source: VLCache section 3.2 and equation 5. The first ⌊r·T⌋ tokens of each chunk run through the layers below
    without being written (their residual enters layer i as it would while serving), and are written at layer i alone.

    Args:
      proxies: splices of the proxy set, whose caches hold KV made behind another prompt.
      ratios: shares of each chunk's tokens, 0 … 1.
      loss: maps a proxy's number and a cache to the distance of its answers from the original model's; the paper's is
        the mean squared error of logits of the text that the original model decodes (`logit_error`).

    Returns:
      The mean over proxies, one row per layer.

    Raises:
      InputError: no proxies, one without a cached chunk, or a ratio out of range. ShapeError, LayoutError, DtypeError:
        a splice does not match the backbone.
    """
    layers = backbone.layout.layers
    if not proxies:
        raise InputError("recomputed_sensitivity.proxies: got none; expected splices of cached images")
    for splice in proxies:
        if splice.chunks == ():
            raise InputError("recomputed_sensitivity.proxies: got a prompt without cached images; expected some")
        check_splice(backbone.layout, splice)

    total = np.zeros((layers, len(ratios)))
    for number, splice in enumerate(proxies):
        reused = loss(number, dict(splice.cache))
        for place, ratio in enumerate(ratios):
            RepairBudget(share=float(ratio))
            first = [
                token
                for begin_, end in splice.parts
                for token in range(begin_, begin_ + int(ratio * (end - begin_) + 1e-9))
            ]
            if not first:
                total[:, place] += reused
                continue
            index = all_tokens(splice, np.array(first))
            for layer in range(layers):
                total[layer, place] += loss(number, _recomputed_at(backbone, splice, index, layer))

    return total / len(proxies)


def _recomputed_at(backbone: Backbone, splice: SplicedCache, index: Int[Array, "B n"], layer: int) -> KV:
    """Returns the cache with the tokens recomputed at one layer alone."""
    layers, run = backbone.layout.layers, begin(backbone.layout.layers, splice)
    if layer:
        below = run_layers(backbone, splice, run, LayerSet(0, layer, index, (0,) * layer))
        run = run._replace(residual=below.residual)
    return run_layers(backbone, splice, run, LayerSet(layer, layer + 1, index)).cache if layers else {}


def logit_error(expected: Float[AnyArray, "*B V"], found: Float[AnyArray, "*B V"]) -> float:
    """Computes the mean squared error of logits (VLCache equation 5)."""
    return float(jnp.mean(jnp.square(jnp.asarray(expected) - jnp.asarray(found))))


def greedy_schedule(
    sensitivity: Float[np.ndarray, "L n"], ratios: Sequence[float | int], target: float
) -> tuple[float, ...]:
    """Allocates a ratio to each layer, not increasing with depth, so that the sum of sensitivities is small.

    Source: VLCache section 4.1, equations 6 to 9, "a simple greedy algorithm", of which it says no more. Here the move
    that lowers the sum most for each unit of ratio is made until the total is spent; a move raises the layers 1 … l to
    at least a ratio, which keeps the order. By itself that was up to 43 % above the optimum of five layers and six
    ratios, so it starts from the smallest ratio everywhere and once more behind each of the best first moves, and the
    best end is improved while raising some layers and lowering others helps (within 3 % then, of 12 000 drawn).
    `layer_counts` is exact.

    Args:
      sensitivity: S_i(r), one row per layer and one column per ratio.
      ratios: ascending.
      target: sum of the ratios of all layers at most (P_tar).

    Raises:
      InputError: ratios do not ascend or do not match the columns, a sensitivity is not finite, or the target is below
        the smallest ratio for every layer.
    """
    sensitivity, steps = np.asarray(sensitivity, np.float64), np.asarray(ratios, np.float64)
    _check_sensitivity(sensitivity, ratios, "greedy_schedule")
    layers, rows = len(sensitivity), np.arange(len(sensitivity))
    if layers * steps[0] > target + 1e-12:
        raise InputError(f"greedy_schedule.target: got {target}; expected at least {layers * steps[0]}")

    # A schedule is a step for each layer. First moves are tried in the order of what they leave.
    firsts = np.unique(_raised(np.zeros(layers, int), len(steps)).reshape(-1, layers), axis=0)
    firsts = firsts[steps[firsts].sum(axis=1) <= target + 1e-12]
    tried = min(MOST_STARTS, max(4, 200_000 // (layers * layers * len(steps))))
    order = np.argsort(sensitivity[rows, firsts].sum(axis=1), kind="stable")[:tried]

    best = np.zeros(layers, int)
    for start in (best, *firsts[order]):
        taken = _completed(sensitivity, steps, start, target)
        if sensitivity[rows, taken].sum() < sensitivity[rows, best].sum():
            best = taken
    best = _exchanged(sensitivity, steps, best, target)
    return tuple(float(steps[step]) for step in best)


def _raised(taken: np.ndarray, count: int) -> Int[np.ndarray, "L count L"]:
    """Raises the layers up to each layer to at least each step: one schedule for each of both."""
    rows = np.arange(len(taken))
    return np.where(rows <= rows[:, None, None], np.maximum(taken, np.arange(count)[:, None]), taken)


def _completed(sensitivity: np.ndarray, steps: np.ndarray, taken: np.ndarray, target: float) -> np.ndarray:
    """Makes the best move for each unit of ratio until none helps or fits."""
    rows = np.arange(len(taken))
    while True:
        raised = _raised(taken, len(steps))
        cost = steps[raised].sum(axis=-1) - steps[taken].sum()
        gain = sensitivity[rows, taken].sum() - sensitivity[rows, raised].sum(axis=-1)
        fits = (cost > 0) & (cost <= target - steps[taken].sum() + 1e-12) & (gain > 0)
        if not fits.any():
            return taken
        rate = np.where(fits, gain / np.where(fits, cost, 1.0), -1.0)
        taken = raised[np.unravel_index(rate.argmax(), rate.shape)]


def _exchanged(sensitivity: np.ndarray, steps: np.ndarray, taken: np.ndarray, target: float) -> np.ndarray:
    """Raises the lower layers and lowers the upper ones, or does either, while that helps and fits."""
    layers, count = sensitivity.shape
    rows = np.arange(layers)
    # Of many layers and ratios only steps nearby are looked at.
    reach = count
    while reach > 1 and layers * (reach * layers) ** 2 > MOST_EXCHANGES:
        reach -= 1

    while True:
        near = np.abs(_raised(taken, count) - taken).max(axis=-1) <= reach
        raised = np.unique(np.concatenate([taken[None], _raised(taken, count)[near]]), axis=0)
        candidates = [raised]
        for layer in range(layers):
            for step in range(max(0, taken[layer] - reach), min(count, taken[layer] + reach)):
                candidates.append(np.where(rows >= layer, np.minimum(raised, step), raised))
        schedules = np.unique(np.concatenate(candidates), axis=0)
        schedules = schedules[steps[schedules].sum(axis=1) <= target + 1e-12]
        values = sensitivity[rows, schedules].sum(axis=1)
        best = values.argmin()
        if values[best] >= sensitivity[rows, taken].sum() - 1e-12 * max(1.0, np.abs(sensitivity).max()):
            return taken
        taken = schedules[best]


def _check_sensitivity(sensitivity: np.ndarray, ratios: Sequence[float | int], what: str) -> None:
    ascending = all(small < large for small, large in itertools.pairwise(ratios))
    if sensitivity.ndim != 2 or sensitivity.shape[1] != len(ratios) or not ascending or min(ratios, default=-1) < 0:
        found = f"counts {list(ratios)}, sensitivity {sensitivity.shape}"
        raise InputError(f"{what}: got {found}; expected ascending counts, one for each column")
    if not np.isfinite(sensitivity).all():
        raise InputError(f"{what}.sensitivity: got NaN or infinity; expected finite numbers")


def layer_sensitivity(
    layout: KVLayout,
    splice: SplicedCache,
    counts: Sequence[int],
    loss: Callable[[KV], float],
    blocks: int | None = None,
) -> Float[np.ndarray, "L n"]:
    """Measures the loss when one layer has the true KV of the chunk's first tokens, for every layer and count.

    A cheap form of `recomputed_sensitivity`: there the layer is recomputed, which takes a forward per layer and count;
    here it has the KV of a prefill in context, which takes one forward in all.

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
    check_splice(layout, splice)
    for count in counts:
        RepairBudget(tokens=count).count(layout, splice.cached_count, "layer_sensitivity")
    conditioned = required(splice, "conditioned", "layer_sensitivity", "the chunk's phase-free KV in context")
    if blocks is not None and (blocks < 1 or layout.layers % blocks):
        raise InputError(f"layer_sensitivity.blocks: got {blocks}; expected a divisor of {layout.layers} layers")

    # A loss of the blind cache is what a count of 0 has in every row.
    true = to_engine(layout, conditioned, splice.tokens.positions, 0)
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

    Source: VLCache, equations 6 to 9, which `greedy_schedule` solves as there; here dynamic programming over layers,
    the last count and the tokens spent solves them exactly.

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
    _check_sensitivity(sensitivity, counts, "layer_counts")
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
