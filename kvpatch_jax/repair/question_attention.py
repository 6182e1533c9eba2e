"""Repairs that choose tokens by the question: InfoFlow KV, ProphetKV, PRCR, and pages as Quest scores them.

All read `splice.question`, and never an answer. Axis letters: B batch, T tokens of the splice, S keys, Q tokens of the
question, N query heads, K KV heads, H head width, P pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone, LayerAttention, Tokens
from ..core import KVLayout
from ..errors import InputError
from .deviation import attended_keys, scaled_queries
from .positions import Geometry, chunk_scores, placed_for_scoring, reordered
from .recomputation import recompute_scored
from .repair_budget import RepairBudget
from .repaired import Repaired, method, untouched
from .spliced_cache import SplicedCache, largest, live_tokens, required

PAGE = 16
"""Tokens of a page, as in Quest (Tang et al. 2024, section 4)."""
Reading = Literal["mass", "norm", "head_norm"]
"""How attention weights A [N heads, T question tokens, S keys] of a layer become one score per key.

"mass": Σ_q mean_h A (equation 7, the mean over heads ours). "norm": sqrt(Σ_q (mean_h A)²), the code's for language
models. "head_norm": sqrt(Σ_{h,q} A²), the code's for vision-language models.
"""
READINGS: tuple[str, ...] = get_args(Reading)

# Equation 7 of the paper is attention mass, and names no reduction over heads. The code that its authors released
# (github.com/tx467/InfoFlow-KV) takes norms instead, or entropies, which are left out.


def attention_scores(
    seen: LayerAttention, reading: Reading, context: int, axis: str | None = None
) -> Float[Array, "B context"]:
    """Scores the first `context` keys of one layer by the attention that they get.

    The softmax runs over all that the question sees: the context and the question's own earlier tokens. Over a mesh its
    mass is summed over devices. (The released code leaves each device its own softmax, so that its scores of two
    devices do not compare; here selection is that of one device.)

    Args:
      seen: a question over its context; over a mesh, over the keys of this device.
      axis: the mesh axis that keys lie over, inside `jax.shard_map`; None: all keys are here.
    """
    scores = seen.scores()
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = top if axis is None else jax.lax.pmax(top, axis)
    weights = jnp.exp(scores - top)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    mass = mass if axis is None else jax.lax.psum(mass, axis)
    weights = weights[..., :context] / mass

    if reading == "mass":
        return weights.mean(1).sum(1)
    if reading == "norm":
        weights = weights.mean(1, keepdims=True)
    return jnp.sqrt(jnp.square(weights).sum((1, 2)))


def infoflow_layers(layout: KVLayout, reading: Reading = "mass") -> tuple[int, ...]:
    """Returns the layers that InfoFlow KV scores with, at .55 to .65 of the depth; for "head_norm" the last two.

    The source scores with layers 22 to 25 of Qwen3-14B's 40 (appendix B), where this takes 22 to 26; its released code
    takes the last two by default.
    """
    if reading == "head_norm":
        return tuple(range(max(0, layout.layers - 2), layout.layers))
    first, last = round(0.55 * layout.layers), round(0.65 * layout.layers)
    return tuple(range(min(first, layout.layers - 1), min(max(first, last), layout.layers - 1) + 1))


@functools.cache
def _score_reduction(reading: Reading, context: int) -> Callable[[LayerAttention], Float[Array, "B S"]]:
    """Returns `attention_scores` of a context as a reduction; the same function each time, so that it compiles once."""
    return functools.partial(attention_scores, reading=reading, context=context)


def layer_scores(
    backbone: Backbone,
    splice: SplicedCache,
    layers: Sequence[int],
    reading: Reading = "mass",
    geometry: Geometry = "global",
) -> Float[Array, "L B T"]:
    """Scores the splice's tokens at each of some layers by the attention of its question over the spliced cache."""
    if reading not in READINGS:
        raise InputError(f"infoflow.reading: got {reading!r}; expected one of {', '.join(READINGS)}")
    question, cache = placed_for_scoring(backbone.layout, splice, geometry)
    reduce = _score_reduction(reading, next(iter(cache.values())).shape[2])
    scores = backbone.attention(question, cache, _question_mask(splice, question), layers=layers, reduce=reduce)
    return jnp.take_along_axis(scores, jnp.asarray(splice.slots)[None], axis=2)


def question_scores(
    backbone: Backbone, splice: SplicedCache, reading: Reading = "mass", geometry: Geometry = "global"
) -> Float[Array, "B T"]:
    """Scores tokens as InfoFlow KV does: the mean over its layers of `layer_scores`; padding has −inf.

    Source: InfoFlow KV (arXiv 2603.05353), section 4.2, equations 7 and 8, and its released code.
    """
    scores = layer_scores(backbone, splice, infoflow_layers(backbone.layout, reading), reading, geometry)
    return jnp.where(live_tokens(splice), scores.mean(0), -jnp.inf)


def _question_mask(splice: SplicedCache, question: Tokens) -> Bool[Array, "B 1 Q _"] | None:
    """Returns what the question may attend to: the keys that count, and causally its own tokens."""
    if splice.seen is None and splice.length is None:
        return None
    B, Q = question.embeddings.shape[:2]
    # Padding of the chunk is no key either.
    seen = seen_keys(splice, live_tokens(splice))[:, None, None]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((Q, Q), bool)), (B, 1, Q, Q))
    return jnp.concatenate([jnp.broadcast_to(seen, (B, 1, Q, seen.shape[-1])), causal], axis=-1)


def seen_keys(splice: SplicedCache, shown: Bool[Array, "B T"]) -> Bool[Array, "B S"]:
    """Returns the keys that a question may attend to, of the splice's tokens those that are shown."""
    B, size = len(splice.slots), next(iter(splice.cache.values())).shape[2]
    seen = jnp.ones((B, size), bool) if splice.seen is None else jnp.asarray(splice.seen)
    return seen.at[jnp.arange(B)[:, None], jnp.asarray(splice.slots)].min(shown)


@method()
def infoflow(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
    *,
    reading: Reading = "mass",
    geometry: Geometry = "global",
    whole_layers: int = 0,
) -> Repaired:
    """Recomputes in context the tokens that the question attends to most.

    Source: InfoFlow KV (arXiv 2603.05353), section 4.2; all layers are recomputed (appendix B). The released code
    differs: its reading is a norm, and layer 0 is recomputed for all tokens (`whole_layers=1`). Tokens are scored at
    `infoflow_layers`.

    Args:
      reading: how attention becomes a score; see `Reading`.
      geometry: positions while tokens are scored, "global", "hl_hp", "hl_tp" or "tl_tp"; see `positions`.
      whole_layers: lowest layers, at which all tokens are recomputed.
    """
    if not 0 <= whole_layers < backbone.layout.layers:
        raise InputError(f"infoflow.whole_layers: got {whole_layers}; expected 0 to {backbone.layout.layers - 1}")

    def scores() -> Float[Array, "B T"]:
        return question_scores(backbone, splice, reading, geometry)

    # The question reads all spliced keys before any of them is recomputed.
    return recompute_scored(backbone, splice, budget, scores, compared=True, whole_layers=whole_layers)


def reordered_by_question(backbone: Backbone, splice: SplicedCache, *, share: float = 0.15) -> SplicedCache:
    """Orders independent chunks by what the question attends to in them, the most important one nearest to it.

    The first stage of InfoFlow KV's reordering (section 4.3): tokens are scored within each chunk with its own
    positions from the head and the question at its place ("hl_tp", section 5.1), so that chunks near the question are
    not favoured. The second stage is `infoflow` of the result, which scores the new order.

    Args:
      splice: of several chunks without text between them, and a question.
      share: of each chunk's tokens, whose scores count for it.

    Raises:
      InputError: no question, fewer than two chunks, text between them, or rows whose orders differ: repair those one
        by one.
    """
    if len(splice.parts) < 2:
        raise InputError(f"reordered_by_question.chunks: got {splice.chunks}; expected at least two")
    score = question_scores(backbone, splice, geometry="hl_tp")
    orders = np.argsort(chunk_scores(splice, score, share), axis=1, kind="stable")
    if (orders != orders[0]).any():
        raise InputError(f"reordered_by_question: got orders {orders.tolist()}; expected one for all rows")
    return reordered(backbone.layout, splice, orders[0].tolist())


@method()
def prophetkv(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes in context the tokens that the question attends to most, all layers weighing alike.

    Source: ProphetKV (arXiv 2602.02579). What is public describes tokens ranked by their relevance to the user's query
    and "a dual-stage recomputation pipeline to fuse layer-wise attention metrics into a high-utility set". Our
    reading: the question's pass over the spliced cache, each layer's attention over the splice divided by its sum,
    the mean over layers; then these tokens are recomputed.
    """

    def scores() -> Float[Array, "B T"]:
        live = live_tokens(splice)
        masses = layer_scores(backbone, splice, range(backbone.layout.layers)) * live
        return jnp.where(live, (masses / masses.sum(-1, keepdims=True)).mean(0), -jnp.inf)

    return recompute_scored(backbone, splice, budget, scores, compared=True)


@method()
def prcr(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Shows the question only the cached tokens that it attends to most, and recomputes none.

    Source: Position Rebinding Cache Reuse (arXiv 2606.26631). What is public describes raw visual KV kept with its
    spatial coordinates, of which selected entries are given places that suit the text that is being decoded, their
    keys rebound to these, and put into the decoder's cache; nothing is run again. Our reading: of the canonical,
    rotated to its new place, the question reads the entries that its own attention selects, and no others.

    Raises:
      InputError: a prompt with new text.
    """
    if splice.new_text().any():
        raise InputError("prcr.chunks: got a prompt with new text; expected a splice of chunks alone")
    count, live = budget.count(backbone.layout, splice.cached_count), live_tokens(splice)
    best = largest(question_scores(backbone, splice), count)
    shown = jnp.zeros(live.shape, bool).at[jnp.arange(len(live))[:, None], best].set(True) & live
    return dataclasses.replace(untouched(backbone.layout, splice), visible=seen_keys(splice, shown))


# ----------------------------------------------------------------------------------------------------------- pages


@method()
def quest(backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, page: int = PAGE) -> Repaired:
    """Recomputes in context the pages of the splice that the question could attend to most, by Quest's bound.

    Source: Quest (Tang et al. 2024): each page keeps the least and the largest of its keys by feature, and a query's
    score over a page is bounded by Σ_h max(q·min, q·max). Quest attends to the highest pages of each layer and head;
    Kamera's Table 6 recomputes them ("oracle query-aware recompute (Quest-style)"). Pages are ranked here by how many
    (layer, head, query) would take them, ties by their mean share of the bounds; whole pages are taken, and of the
    last one its first tokens, so that the budget is met exactly.

    Args:
      page: tokens of a page; pages are counted from each chunk's first token.
    """
    layout = backbone.layout
    if page < 1:
        raise InputError(f"quest.page: got {page}; expected at least 1")

    def scores() -> Float[Array, "B T"]:
        question, layers = required(splice, "question"), range(layout.layers)
        numbers = page_numbers(splice, page)
        on_page = jnp.where(live_tokens(splice), jnp.asarray(numbers), -1)
        mask = _question_mask(splice, question)
        queries = backbone.attention(question, splice.cache, mask, layers=layers, reduce=scaled_queries)
        keys = jnp.stack([attended_keys(layout, splice.cache, layer) for layer in layers])
        keys = jnp.take_along_axis(keys, jnp.asarray(splice.slots)[None, :, :, None, None], axis=2)
        taken = -(-budget.count(layout, splice.cached_count) // page)
        order = page_order(queries, keys, on_page, int(numbers.max()) + 1, taken)
        return jnp.where(on_page >= 0, jnp.take_along_axis(order, jnp.maximum(on_page, 0), axis=1), -jnp.inf)

    return recompute_scored(backbone, splice, budget, scores, compared=True)


def page_numbers(splice: SplicedCache, page: int) -> Int[np.ndarray, " T"]:
    """Numbers the pages of a splice's chunks, counted from each chunk's first token; −1 for new text."""
    numbers, first_page = np.full(splice.slots.shape[1], -1, np.int32), 0
    for first, last in splice.parts:
        numbers[first:last] = first_page + np.arange(last - first) // page
        first_page = int(numbers[last - 1]) + 1
    return numbers


@functools.partial(jax.jit, static_argnames=("pages", "taken"))
def page_order(
    queries: Float[Array, "L B Q N H"],
    keys: Float[Array, "L B T K H"],
    on_page: Int[Array, "B T"],
    pages: int,
    taken: int,
) -> Float[Array, "B P"]:
    """Ranks pages by Quest's bound: votes of (layer, head, query) for their `taken` highest, and a share below 1.

    Queries are scaled, in the engine frame; keys are of the splice's tokens, each on a page (−1: on none).
    """
    exists = (on_page[..., None] == jnp.arange(pages)).any(1)
    # Padding and new text lie on a page behind the last one, which counts nowhere.
    segments, group = jnp.where(on_page < 0, pages, on_page), queries.shape[3] // keys.shape[3]
    lowest, highest = (
        jax.vmap(functools.partial(reduce, num_segments=pages)) for reduce in (jax.ops.segment_min, jax.ops.segment_max)
    )

    def of_layer(total: tuple[Array, Array], layer: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        query, key = layer
        B, Q, N, H = query.shape
        grouped = query.reshape(B, Q, N // group, group, H)
        # Σ_h max(q·min, q·max): positive features of a query meet the largest key, negative ones the least.
        bound = jnp.einsum("BQKGH,BPKH->BQKGP", jnp.maximum(grouped, 0), highest(key, segments))
        bound = bound + jnp.einsum("BQKGH,BPKH->BQKGP", jnp.minimum(grouped, 0), lowest(key, segments))
        bound = jnp.where(exists[:, None, None, None], bound, -jnp.inf)
        threshold = jax.lax.top_k(bound, min(taken, pages))[0][..., -1:]
        votes = ((bound >= threshold) & exists[:, None, None, None]).sum((1, 2, 3))
        return (total[0] + votes, total[1] + jax.nn.softmax(bound, axis=-1).sum((1, 2, 3))), None

    zero = jnp.zeros(exists.shape, jnp.float32)
    (votes, share), _ = jax.lax.scan(of_layer, (zero, zero), (queries, keys))
    return votes + share / (share.sum(-1, keepdims=True) + 1e-6) / 2
