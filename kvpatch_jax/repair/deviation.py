"""Repairs that choose tokens by how far their KV, or the attention over it, is from what it should be."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone
from ..core import KVLayout, to_engine
from ..errors import InputError
from .keys import attended_keys, scaled_queries
from .recomputation import LayerRun, LayerSet, begin, repair_everywhere, run_layers
from .references import all_tokens, new_text_alone
from .repair_budget import RepairBudget
from .spliced_cache import (
    RepairBytes,
    Repaired,
    SplicedCache,
    check_budget,
    choose_scored,
    counted,
    deviation,
    live_tokens,
    read_slots,
    recompute_bytes,
    required,
)


@counted
def cacheblend(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, check_layer: int = 1
) -> Repaired:
    """Recomputes all tokens through one layer, and above it those whose KV deviates most there.

    The single check of CacheBlend's released code (LMCache, `check_layers` of one layer). Tokens that are not chosen
    end at the check layer; recomputed ones attend to the full context, the strongest form of Kamera §6 and Table 6.
    Source: CacheBlend (Yao et al. 2025, "KV deviation" and "HKVD tokens").

    Args:
      budget: cached tokens above the check layer; 0 returns the cache unchanged (of a prompt: `blind`).
      check_layer: layer at which recomputed and spliced KV are compared.

    Raises:
      InputError: the budget is out of range or by layer, or the backbone lacks the layer. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    count = check_budget(backbone, splice, budget, "cacheblend")
    _check_layers(backbone.layout, (check_layer,), "cacheblend.check_layer")
    if count == 0:
        return new_text_alone(backbone, splice)
    return _blend(backbone, splice, {check_layer: count})


@counted
def cacheblend_gradual(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    check_layers: Sequence[int] = (1, 2, 3),
    surplus: float = 0.5,
) -> Repaired:
    """Recomputes all tokens through the first check layer, and narrows the chosen tokens at each further one.

    Source: CacheBlend (Yao et al. 2025, section 4.3, "gradual filtering"): a first check chooses slightly more tokens
    than are wanted; recomputed through the next layer, those whose KV deviates most there stay, and so on. The paper
    gives no ratios: here the surplus over the budget falls evenly from `surplus` at the first check to 0 at the last.

    Args:
      budget: cached tokens above the last check layer; 0 returns the cache unchanged.
      check_layers: ascending; those that the backbone lacks are left out.

    Raises:
      InputError: the budget is out of range or by layer, the first of the check layers is not in the backbone, they do
        not ascend, or the surplus is negative. ShapeError, LayoutError, DtypeError: the splice does not match the
        backbone.
    """
    layout, checks = backbone.layout, tuple(check_layers)
    count = check_budget(backbone, splice, budget, "cacheblend_gradual")
    _check_layers(layout, checks[:1], "cacheblend_gradual.check_layers")
    if list(checks) != sorted(set(checks)) or not surplus >= 0:
        found = f"check_layers {checks}, surplus {surplus}"
        raise InputError(f"cacheblend_gradual: got {found}; expected ascending layers and a surplus of at least 0")
    if count == 0:
        return new_text_alone(backbone, splice)

    # A check of the last layer would choose nothing.
    checks = tuple(layer for layer in checks if layer < layout.layers - 1) or checks[:1]
    counts = {}
    for place, layer in enumerate(checks):
        left = (len(checks) - 1 - place) / max(1, len(checks) - 1)
        counts[layer] = min(splice.cached_count, int(np.ceil(count * (1 + surplus * left))))
    return _blend(backbone, splice, counts)


def _blend(backbone: Backbone, splice: SplicedCache, counts: dict[int, int]) -> Repaired:
    """Recomputes nested sets: all tokens up to the first check, `counts[layer]` cached tokens above each check."""
    layout, T = backbone.layout, splice.slots.shape[1]
    index, run, start = all_tokens(splice, np.arange(T)), begin(backbone.layout.layers, splice), 0
    chosen_at = [splice.cached_count] * layout.layers

    for layer, count in counts.items():
        run = run_layers(backbone, splice, run, LayerSet(start, layer + 1, index))
        start = layer + 1
        chosen_at[start:] = [count] * (layout.layers - start)
        if start == layout.layers:
            break

        # Both are in the engine frame, at the same positions: what differs is what the tokens have seen. Tokens that
        # were dropped below have no fresh KV, so that they cannot come back.
        fresh, spliced = (read_slots(cache, splice.slots, layer) for cache in (run.cache, splice.cache))
        score = deviation(fresh, spliced, live_tokens(splice))
        score = jnp.where(run.chosen[layer], score, -jnp.inf)
        index = choose_scored(splice, score, count)

    if start < layout.layers:
        run = run_layers(backbone, splice, run, LayerSet(start, layout.layers, index))
    # Cached KV is read at the checks, to be compared with what overwrites it.
    compared = sum(chosen_at[layer] for layer in counts)
    bytes = recompute_bytes(layout, splice, tuple(chosen_at), compared=compared)
    return _result(run, bytes)


@counted
def kvshare(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, check_layer: int = 1
) -> Repaired:
    """Recomputes all tokens through one layer, and above it those whose attention there deviates most.

    Source: KVShare (Yang et al. 2025, arXiv 2503.16525), as VLCache describes it ("the deviation of the attention
    map", Table 5 "Attn."): tokens are compared by attention maps over recomputed and over reused keys. Our reading of
    its prefill stage: Σ |A(recomputed) − A(reused)| over the splice's own queries and all heads, of the attention that
    each token receives at the check layer. Its decode stage, which adds tokens while decoding, is left out.

    Args:
      budget: cached tokens above the check layer; 0 returns the cache unchanged.

    Raises:
      InputError: the budget is out of range or by layer, or the backbone lacks the layer. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    layout, T = backbone.layout, splice.slots.shape[1]
    count = check_budget(backbone, splice, budget, "kvshare")
    _check_layers(layout, (check_layer,), "kvshare.check_layer")
    if count == 0:
        return new_text_alone(backbone, splice)

    everything, run = all_tokens(splice, np.arange(T)), begin(layout.layers, splice)
    if check_layer:
        run = run_layers(backbone, splice, run, LayerSet(0, check_layer, everything))
    entering = splice.tokens.embeddings if run.residual is None else run.residual
    run = run_layers(backbone, splice, run, LayerSet(check_layer, check_layer + 1, everything))
    queries = backbone.attention(
        splice.tokens._replace(embeddings=entering),
        run.cache,
        splice.mask,
        layers=(check_layer,),
        reduce=scaled_queries,
        slots=splice.slots,
        start_layer=check_layer,
    )
    keys = [attended_keys(layout, cache, check_layer) for cache in (run.cache, splice.cache)]
    shift = attention_shift(queries[0], *keys, jnp.asarray(splice.slots), splice.mask)
    live = live_tokens(splice)
    score = jnp.where(live, jnp.take_along_axis(shift, jnp.asarray(splice.slots), axis=1), -jnp.inf)
    index = choose_scored(splice, score, count)

    if check_layer + 1 < layout.layers:
        run = run_layers(backbone, splice, run, LayerSet(check_layer + 1, layout.layers, index))
    counts = [splice.cached_count] * (check_layer + 1) + [count] * (layout.layers - check_layer - 1)
    return _result(run, recompute_bytes(layout, splice, tuple(counts), compared=splice.cached_count))


@jax.jit
def attention_shift(
    queries: Float[Array, "B T N H"],
    fresh: Float[Array, "B S K H"],
    spliced: Float[Array, "B S K H"],
    slots: Int[Array, "B T"],
    mask: Bool[Array, "B 1 T S"] | None,
) -> Float[Array, "B S"]:
    """Computes how the attention that each key receives differs between two caches' keys: Σ |difference|.

    The sum is over heads and over the queries, which are scaled and in the engine frame. Heads are compared one after
    another, so that one head's maps [B,T,S] are in memory.
    """
    allowed = jnp.arange(fresh.shape[1]) <= slots[..., None] if mask is None else mask[:, 0]
    group = queries.shape[2] // fresh.shape[2]

    def of_head(total: Array, head: Array) -> tuple[Array, None]:
        query, maps = queries[:, :, head], []
        for keys in (fresh, spliced):
            scores = jnp.einsum("BTH,BSH->BTS", query, keys[:, :, head // group], preferred_element_type=jnp.float32)
            maps.append(jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1))
        return total + jnp.abs(maps[0] - maps[1]).sum(1), None

    start = jnp.zeros(fresh.shape[:2], jnp.float32)
    return jax.lax.scan(of_head, start, jnp.arange(queries.shape[2]))[0]


@counted
def oracle_delta(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Recomputes in context, at every layer, the tokens with the largest true deficit ‖Δ‖.

    It cannot be used in serving, because it needs Δ. It is not an upper bound of token selection either: a question
    need not read the tokens with the largest Δ, and a selection by the question's attention can do better with fewer
    tokens. ‖Δ‖ is ‖conditioned − spliced‖ over each channel's typical norm, summed over layers and channels. Source:
    Kamera App. C.3, Fig. 6a (an oracle that selects tokens by true Δ-magnitude needs about half of them).

    Args:
      splice: with `conditioned`, which affects only the selection, never the values in the cache.

    Raises:
      InputError: `conditioned` is None, or the budget is out of range or by layer. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    count = check_budget(backbone, splice, budget, "oracle_delta")
    conditioned = required(splice, "conditioned", "oracle_delta", "the chunk's phase-free KV in context")
    if count == 0:
        return new_text_alone(backbone, splice)

    # The truth is rotated to where the chunk lies, and only scored: the values are recomputed as in any repair.
    true = to_engine(backbone.layout, conditioned, splice.tokens.positions, 0)
    score = deviation(true, read_slots(splice.cache, splice.slots), live_tokens(splice))
    return repair_everywhere(backbone, splice, choose_scored(splice, score, count))


@counted
def random_tokens(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    seed: int | Sequence[int | Sequence[int]] = 0,
) -> Repaired:
    """Recomputes tokens drawn at random in context, at every layer: what choosing has to beat.

    Args:
      seed: of all rows, or one for each row.

    Raises:
      InputError: the budget is out of range or by layer, or there is another number of seeds than rows. ShapeError,
        LayoutError, DtypeError: the splice does not match the backbone.
    """
    count, (B, T) = check_budget(backbone, splice, budget, "random_tokens"), splice.slots.shape
    seeds = [(seed, row) for row in range(B)] if isinstance(seed, int) else list(seed)
    if len(seeds) != B:
        raise InputError(f"random_tokens.seed: got {len(seeds)} seeds; expected one, or one for each of {B} rows")
    if count == 0:
        return new_text_alone(backbone, splice)

    score = np.stack([np.random.default_rng(number).random(T, np.float32) for number in seeds])
    score = jnp.where(live_tokens(splice), jnp.asarray(score), -jnp.inf)
    return repair_everywhere(backbone, splice, choose_scored(splice, score, count))


def _result(run: LayerRun, bytes: RepairBytes) -> Repaired:
    return Repaired(run.cache, run.chosen, bytes, logits=run.logits)


def _check_layers(layout: KVLayout, layers: Sequence[int], what: str) -> None:
    for layer in layers or (-1,):
        if not 0 <= layer < layout.layers:
            raise InputError(f"{what}: got {layer}; expected 0 to {layout.layers - 1}")
