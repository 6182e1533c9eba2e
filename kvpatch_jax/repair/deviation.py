"""Repairs that choose tokens by how far their KV, or the attention over it, is from what it should be."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone, LayerAttention
from ..core import KVLayout, to_engine
from ..errors import InputError
from .recomputation import Recompute, choose_scored, new_text_alone, recompute_bytes, recompute_scored
from .repair_budget import RepairBudget
from .repaired import Repaired, method
from .spliced_cache import SplicedCache, deviation, live_tokens, read_slots, required

CHECK_LAYERS, SURPLUS = (1, 2, 3), 0.5
"""Layers at which gradual filtering checks, and its surplus over the budget at the first of them."""
KVSHARE_LAYER = 1
"""The layer at which KVShare compares attention."""


@method()
def cacheblend(backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, check_layer: int = 1) -> Repaired:
    """Recomputes all tokens through one layer, and above it those whose KV deviates most there.

    The single check of CacheBlend's released code (LMCache, `check_layers` of one layer). Tokens that are not chosen
    end at the check layer; recomputed ones attend to the full context, the strongest form of Kamera §6 and Table 6.
    Source: CacheBlend (Yao et al. 2025, "KV deviation" and "HKVD tokens").

    Args:
      budget: cached tokens above the check layer; 0 returns the cache unchanged (of a prompt: `blind`).
      check_layer: layer at which recomputed and spliced KV are compared.
    """
    if not 0 <= check_layer < backbone.layout.layers:
        raise InputError(f"cacheblend.check_layer: got {check_layer}; expected 0 to {backbone.layout.layers - 1}")
    return _blend(backbone, splice, {check_layer: budget.count(backbone.layout, splice.cached_count)})


@method()
def cacheblend_gradual(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes all tokens through the first check layer, and narrows the chosen tokens at each further one.

    Source: CacheBlend (Yao et al. 2025, section 4.3, "gradual filtering"): a first check chooses slightly more tokens
    than are wanted; recomputed through the next layer, those whose KV deviates most there stay, and so on. The paper
    gives no ratios: here layers 1, 2 and 3 check, as far as there are layers above them, and the surplus over the
    budget falls evenly from one half at the first check to 0 at the last.

    Args:
      budget: cached tokens above the last check layer; 0 returns the cache unchanged.
    """
    layout = backbone.layout
    count = budget.count(layout, splice.cached_count)
    # A check of the last layer would choose nothing.
    checks = tuple(layer for layer in CHECK_LAYERS if layer < layout.layers - 1) or (layout.layers - 1,)
    counts = {}
    for place, layer in enumerate(checks):
        left = (len(checks) - 1 - place) / max(1, len(checks) - 1)
        counts[layer] = min(splice.cached_count, int(np.ceil(count * (1 + SURPLUS * left))))
    return _blend(backbone, splice, counts)


def _blend(backbone: Backbone, splice: SplicedCache, counts: dict[int, int]) -> Repaired:
    """Recomputes nested sets: all tokens up to the first check, `counts[layer]` cached tokens above each check."""
    layout, run = backbone.layout, Recompute(backbone, splice)
    index, start, chosen_at = np.arange(splice.slots.shape[1]), 0, [splice.cached_count] * layout.layers
    if not any(counts.values()):
        return new_text_alone(backbone, splice)

    for layer, count in counts.items():
        run.run(start, layer + 1, index)
        start = layer + 1
        chosen_at[start:] = [count] * (layout.layers - start)
        if start == layout.layers:
            break

        # Both are in the engine frame, at the same positions: what differs is what the tokens have seen. Tokens that
        # were dropped below have no fresh KV, so that they cannot come back.
        fresh, spliced = (read_slots(cache, splice.slots, layer) for cache in (run.cache, splice.cache))
        score = deviation(fresh, spliced, live_tokens(splice))
        index = choose_scored(splice, jnp.where(run.chosen[layer], score, -jnp.inf), count)

    run.run(start, layout.layers, index)
    # Cached KV is read at the checks, to be compared with what overwrites it.
    compared = sum(chosen_at[layer] for layer in counts)
    return run.repaired(recompute_bytes(layout, splice, chosen_at, compared=compared))


@method()
def kvshare(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes all tokens through layer 1, and above it those whose attention there deviates most.

    Source: KVShare (Yang et al. 2025, arXiv 2503.16525), as VLCache describes it ("the deviation of the attention
    map", Table 5 "Attn."): tokens are compared by attention maps over recomputed and over reused keys. Our reading of
    its prefill stage: Σ |A(recomputed) − A(reused)| over the splice's own queries and all heads, of the attention that
    each token receives at the check layer. Its decode stage, which adds tokens while decoding, is left out.

    Args:
      budget: cached tokens above the check layer; 0 returns the cache unchanged.
    """
    layout, everything = backbone.layout, np.arange(splice.slots.shape[1])
    count = budget.count(layout, splice.cached_count)
    if count == 0:
        return new_text_alone(backbone, splice)

    check, run = min(KVSHARE_LAYER, layout.layers - 1), Recompute(backbone, splice)
    run.run(0, check, everything)
    entering = splice.tokens if run.residual is None else splice.tokens._replace(embeddings=run.residual)
    run.run(check, check + 1, everything)
    queries = backbone.attention(
        entering, run.cache, layers=(check,), reduce=scaled_queries, slots=splice.slots, start_layer=check
    )
    fresh, spliced = (attended_keys(layout, cache, check) for cache in (run.cache, splice.cache))
    slots, rows = jnp.asarray(splice.slots), jnp.arange(len(splice.slots))[:, None]
    # Nothing is cached where new text goes: what lies there says nothing of the chunks.
    new = slots[:, np.flatnonzero(splice.new_text())]
    spliced = jnp.asarray(spliced).at[rows, new].set(fresh[rows, new])
    shift = attention_shift(queries[0], fresh, spliced, slots)
    score = jnp.take_along_axis(shift, slots, axis=1)
    run.run(check + 1, layout.layers, choose_scored(splice, jnp.where(live_tokens(splice), score, -jnp.inf), count))
    counts = [splice.cached_count] * (check + 1) + [count] * (layout.layers - check - 1)
    return run.repaired(recompute_bytes(layout, splice, counts, compared=splice.cached_count))


def scaled_queries(layer: LayerAttention) -> Float[Array, "B T N H"]:
    """Returns queries in the engine frame times the scale of scores."""
    return layer.query * layer.scale


def attended_keys(layout: KVLayout, cache: KV, layer: int) -> Float[Array, "B S K H"]:
    """Returns the keys that queries meet at a layer; for MLA the latent and the rotary key of one head."""
    if layout.kind == "mla":
        return jnp.concatenate([cache["ckv"][layer], cache["kpe"][layer]], axis=-1)
    return cache["k"][layer]


@jax.jit
def attention_shift(
    queries: Float[Array, "B T N H"],
    fresh: Float[Array, "B S K H"],
    spliced: Float[Array, "B S K H"],
    slots: Int[Array, "B T"],
) -> Float[Array, "B S"]:
    """Computes how the attention that each key receives differs between two caches' keys: Σ |difference|.

    The sum is over heads and over the queries, which are scaled and in the engine frame. Heads are compared one after
    another, so that one head's maps [B,T,S] are in memory.
    """
    allowed = jnp.arange(fresh.shape[1]) <= slots[..., None]
    group = queries.shape[2] // fresh.shape[2]

    def of_head(total: Array, head: Array) -> tuple[Array, None]:
        query, maps = queries[:, :, head], []
        for keys in (fresh, spliced):
            scores = jnp.einsum("BTH,BSH->BTS", query, keys[:, :, head // group], preferred_element_type=jnp.float32)
            maps.append(jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1))
        return total + jnp.abs(maps[0] - maps[1]).sum(1), None

    start = jnp.zeros(fresh.shape[:2], jnp.float32)
    return jax.lax.scan(of_head, start, jnp.arange(queries.shape[2]))[0]


@method()
def oracle_delta(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes in context, at every layer, the tokens with the largest true deficit ‖Δ‖.

    It cannot be used in serving, because it needs Δ. It is not an upper bound of token selection either: a question
    need not read the tokens with the largest Δ, and a selection by the question's attention can do better with fewer
    tokens. ‖Δ‖ is ‖recorded − spliced‖ over each channel's typical norm, summed over layers and channels. Source:
    Kamera App. C.3, Fig. 6a (an oracle that selects tokens by true Δ-magnitude needs about half of them).
    Recorded KV affects the selection alone, never the values in the cache.
    """
    # The truth is rotated to where the chunk lies, and only scored: the values are recomputed as in any repair.
    true = to_engine(backbone.layout, required(splice, "recorded"), splice.tokens.positions, 0)

    def scores() -> Float[Array, "B T"]:
        return deviation(true, read_slots(splice.cache, splice.slots), live_tokens(splice))

    return recompute_scored(backbone, splice, budget, scores)


@method()
def random_tokens(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes tokens drawn at random in context, at every layer, in each row others: what choosing has to beat."""
    B, T = splice.slots.shape

    def scores() -> Float[Array, "B T"]:
        rows = [np.random.default_rng((0, row)).random(T, np.float32) for row in range(B)]
        return jnp.where(live_tokens(splice), jnp.asarray(np.stack(rows)), -jnp.inf)

    return recompute_scored(backbone, splice, budget, scores)
