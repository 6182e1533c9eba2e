"""Repairs that choose tokens by the question: InfoFlow KV, ProphetKV, PRCR, and pages as Quest scores them.

All read `splice.question`, and never an answer. Axis letters: B batch, T tokens of the splice, S keys, Q tokens of the
question, N query heads, K KV heads, H head width, P pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone, LayerAttention, Tokens
from ..core import KVLayout
from ..errors import InputError
from .attention_scores import READINGS, Reading, attention_scores
from .keys import attended_keys, scaled_queries
from .positions import Geometry, chunk_scores, placed_for_scoring, reordered
from .recomputation import LayerSet, recompute_sets, repair_everywhere
from .references import all_tokens, new_text_alone
from .repair_budget import RepairBudget
from .spliced_cache import (
    AnyArray,
    Repaired,
    SplicedCache,
    check_budget,
    choose_scored,
    counted,
    largest,
    live_tokens,
    mark,
    recompute_bytes,
    required,
    untouched,
)

PAGE = 16
"""Tokens of a page, as in Quest (Tang et al. 2024, section 4)."""


@functools.cache
def score_reduction(reading: Reading, context: int) -> Callable[[LayerAttention], Float[Array, "B S"]]:
    """Returns `attention_scores` of a context as a reduction; the same function each time, so that it compiles once."""
    return functools.partial(attention_scores, reading=reading, context=context)


def infoflow_layers(layout: KVLayout, reading: Reading = "mass") -> tuple[int, ...]:
    """Returns the layers that InfoFlow KV scores with, for a model of another depth than its own.

    Layers 22 to 25 of 40 (appendix B, Qwen3-14B); the last two for the readings of vision-language models, as in the
    released code.
    """
    if reading in ("head_norm", "head_entropy"):
        return tuple(range(max(0, layout.layers - 2), layout.layers))
    first, last = round(0.55 * layout.layers), round(0.65 * layout.layers)
    return tuple(range(min(first, layout.layers - 1), min(max(first, last), layout.layers - 1) + 1))


def question_scores(
    backbone: Backbone,
    splice: SplicedCache,
    layers: Sequence[int],
    reading: Reading = "mass",
    geometry: Geometry = "global",
) -> Float[Array, "B T"]:
    """Scores the splice's tokens by the attention of its question over the spliced cache; padding has −inf.

    Source: InfoFlow KV (arXiv 2603.05353), section 4.2, equations 7 and 8, and its released code.

    Args:
      layers: whose scores are averaged.
      reading: how a layer's attention becomes a score.
      geometry: the positions that context and question have while tokens are scored; see `positions`.

    Raises:
      InputError: no question, an unknown reading or geometry, or layers that the backbone lacks.
    """
    if reading not in READINGS:
        raise InputError(f"question_scores.reading: got {reading!r}; expected one of {', '.join(READINGS)}")
    required(splice, "question", "question_scores", "the question's tokens behind the cache")
    question, cache = placed_for_scoring(backbone.layout, splice, geometry)
    reduce = score_reduction(reading, next(iter(cache.values())).shape[2])
    found = backbone.attention(question, cache, _question_mask(splice, question), layers=layers, reduce=reduce)
    return _of_tokens(found, jnp.asarray(splice.slots), live_tokens(splice))


@jax.jit
def _of_tokens(found: Float[Array, "L B S"], slots: Array, live: Array) -> Float[Array, "B T"]:
    return jnp.where(live, jnp.take_along_axis(found.mean(0), slots, axis=1), -jnp.inf)


def _question_mask(splice: SplicedCache, question: Tokens) -> Bool[Array, "B 1 Q _"] | None:
    """Returns what the question may attend to: the keys that count, and causally its own tokens."""
    if splice.seen is None and splice.length is None:
        return None
    B, Q = question.embeddings.shape[:2]
    S = next(iter(splice.cache.values())).shape[2]
    seen = jnp.ones((B, S), bool) if splice.seen is None else jnp.asarray(splice.seen)
    if splice.length is not None:
        # Padding of the chunk is no key either.
        rows = jnp.arange(B)[:, None]
        seen = seen.at[rows, jnp.asarray(splice.slots)].min(live_tokens(splice))
    own = jnp.tril(jnp.ones((Q, Q), bool))
    return jnp.concatenate(
        [jnp.broadcast_to(seen[:, None, None], (B, 1, Q, S)), jnp.broadcast_to(own, (B, 1, Q, Q))], axis=-1
    )


@counted
def infoflow(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    layers: Sequence[int] | None = None,
    reading: Reading = "mass",
    geometry: Geometry = "global",
    whole_layers: int = 0,
    first_tokens: int = 0,
) -> Repaired:
    """Recomputes in context the tokens that the question attends to most.

    Source: InfoFlow KV (arXiv 2603.05353), section 4.2; all layers are recomputed (appendix B). The released code
    differs: its reading is a norm or an entropy, layer 0 is recomputed whole (`whole_layers=1`), and the first tokens
    of each chunk may be added (`first_tokens`, its `chunk_k` of 0 to 16).

    Args:
      layers: that tokens are scored with; None: `infoflow_layers`.
      first_tokens: of every chunk, chosen before others within the budget.

    Raises:
      InputError: no question, an unknown reading or geometry, layers out of range, or a budget that is out of range or
        by layer. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, T = backbone.layout, splice.slots.shape[1]
    count = check_budget(backbone, splice, budget, "infoflow")
    if not 0 <= whole_layers < layout.layers or first_tokens < 0:
        found = f"whole_layers {whole_layers}, first_tokens {first_tokens}"
        raise InputError(f"infoflow: got {found}; expected 0 to {layout.layers - 1} layers, and 0 tokens or more")
    if count == 0:
        return new_text_alone(backbone, splice)

    chosen_layers = infoflow_layers(layout, reading) if layers is None else tuple(layers)
    score = question_scores(backbone, splice, chosen_layers, reading, geometry)
    if first_tokens:
        leading = np.zeros(T, bool)
        for first, last in splice.parts:
            leading[first : min(last, first + first_tokens)] = True
        # Raised above all others by no more than that: a large number would round what tells them apart.
        above = 1 + jnp.max(score, axis=1, keepdims=True)
        score = jnp.where(jnp.asarray(leading) & live_tokens(splice), score + above, score)
    index = choose_scored(splice, score, count)

    sets = [LayerSet(whole_layers, layout.layers, index)]
    if whole_layers:
        sets.insert(0, LayerSet(0, whole_layers, all_tokens(splice, np.arange(T))))
    counts = (splice.cached_count,) * whole_layers + (count,) * (layout.layers - whole_layers)
    # The question reads all spliced keys before any of them is recomputed.
    bytes = recompute_bytes(layout, splice, counts, compared=sum(counts))
    return recompute_sets(backbone, splice, sets, bytes)


def reordered_by_question(
    backbone: Backbone,
    splice: SplicedCache,
    *,
    share: float = 0.15,
    layers: Sequence[int] | None = None,
    reading: Reading = "mass",
) -> SplicedCache:
    """Orders independent chunks by what the question attends to in them, the most important one nearest to it.

    The first stage of InfoFlow KV's reordering (section 4.3): tokens are scored within each chunk with its own
    positions from the head and the question at its place ("hl_tp", section 5.1), so that chunks near the question are
    not favoured. The second stage is `infoflow` of the result, which scores the new order.

    Args:
      splice: of several chunks without text between them, and a question.
      share: of each chunk's tokens, whose scores count for it.
      layers: that tokens are scored with; None: `infoflow_layers`.

    Raises:
      InputError: no question, fewer than two chunks, text between them, or rows whose orders differ: repair those one
        by one.
    """
    if len(splice.parts) < 2:
        raise InputError(f"reordered_by_question.chunks: got {splice.chunks}; expected at least two")
    wanted = infoflow_layers(backbone.layout, reading) if layers is None else tuple(layers)
    score = question_scores(backbone, splice, wanted, reading, "hl_tp")
    orders = np.argsort(chunk_scores(splice, score, share), axis=1, kind="stable")
    if (orders != orders[0]).any():
        raise InputError(f"reordered_by_question: got orders {orders.tolist()}; expected one for all rows")
    return reordered(backbone.layout, splice, orders[0].tolist())


@counted
def prophetkv(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Recomputes in context the tokens that the question attends to most, all layers weighing alike.

    Source: ProphetKV (arXiv 2602.02579). What is public describes tokens ranked by their relevance to the user's query
    and "a dual-stage recomputation pipeline to fuse layer-wise attention metrics into a high-utility set". Our
    reading: the question's pass over the spliced cache, each layer's attention over the splice divided by its sum,
    the mean over layers; then these tokens are recomputed.

    Raises:
      InputError: no question, or a budget that is out of range or by layer. ShapeError, LayoutError, DtypeError: the
        splice does not match the backbone.
    """
    count = check_budget(backbone, splice, budget, "prophetkv")
    if count == 0:
        return new_text_alone(backbone, splice)

    question = required(splice, "question", "prophetkv", "the question's tokens behind the cache")
    found = backbone.attention(
        question,
        splice.cache,
        _question_mask(splice, question),
        layers=range(backbone.layout.layers),
        reduce=score_reduction("mass", next(iter(splice.cache.values())).shape[2]),
    )
    score = _alike(found, jnp.asarray(splice.slots), live_tokens(splice))
    index = choose_scored(splice, score, count)
    counts = (count,) * backbone.layout.layers
    return repair_everywhere(
        backbone, splice, index, recompute_bytes(backbone.layout, splice, counts, compared=sum(counts))
    )


@jax.jit
def _alike(found: Float[Array, "L B S"], slots: Array, live: Array) -> Float[Array, "B T"]:
    own = jnp.take_along_axis(found, slots[None], axis=2) * live
    return jnp.where(live, (own / own.sum(-1, keepdims=True)).mean(0), -jnp.inf)


@counted
def prcr(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, layers: Sequence[int] | None = None
) -> Repaired:
    """Shows the question only the cached tokens that it attends to most, and recomputes none.

    Source: Position Rebinding Cache Reuse (arXiv 2606.26631). What is public describes raw visual KV kept with its
    spatial coordinates, of which selected entries are given places that suit the text that is being decoded, their
    keys rebound to these, and put into the decoder's cache; nothing is run again. Our reading: of the canonical,
    rotated to its new place, the question reads the entries that its own attention selects, and no others.

    Raises:
      InputError: no question, a whole prompt, or a budget that is out of range or by layer. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    count = check_budget(backbone, splice, budget, "prcr")
    if splice.new_text().any():
        raise InputError("prcr.chunks: got a prompt with new text; expected a splice of chunks alone")
    wanted = infoflow_layers(backbone.layout) if layers is None else layers
    score = question_scores(backbone, splice, wanted)
    kept = mark(largest(score, count), live_tokens(splice)) if count else jnp.zeros(score.shape, bool)

    blind = untouched(backbone.layout, splice)
    size = next(iter(splice.cache.values())).shape[2]
    seen = jnp.ones((len(kept), size), bool) if splice.seen is None else jnp.asarray(splice.seen)
    return dataclasses.replace(blind, visible=_hidden(seen, jnp.asarray(splice.slots), kept))


@jax.jit
def _hidden(seen: Array, slots: AnyArray, kept: Array) -> Array:
    return seen.at[jnp.arange(len(slots))[:, None], slots].min(kept)


# ----------------------------------------------------------------------------------------------------------- pages


@counted
def quest(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    layers: Sequence[int] | None = None,
    page: int = PAGE,
) -> Repaired:
    """Recomputes in context the pages of the splice that the question could attend to most, by Quest's bound.

    Source: Quest (Tang et al. 2024): each page keeps the least and the largest of its keys by feature, and a query's
    score over a page is bounded by Σ_h max(q·min, q·max). Quest attends to the highest pages of each layer and head;
    Kamera's Table 6 recomputes them ("oracle query-aware recompute (Quest-style)"). Pages are ranked here by how many
    (layer, head, query) would take them, ties by their mean share of the bounds; whole pages are taken, and of the
    last one its first tokens, so that the budget is met exactly.

    Args:
      layers: whose heads vote; None: all.
      page: tokens of a page; pages are counted from each chunk's first token.

    Raises:
      InputError: no question, a page below 1, or a budget that is out of range or by layer. ShapeError, LayoutError,
        DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    count = check_budget(backbone, splice, budget, "quest")
    if page < 1:
        raise InputError(f"quest.page: got {page}; expected at least 1")
    if count == 0:
        return new_text_alone(backbone, splice)

    question = required(splice, "question", "quest", "the question's tokens behind the cache")
    on_page = jnp.where(live_tokens(splice), jnp.asarray(page_numbers(splice, page)), -1)
    wanted = tuple(range(layout.layers)) if layers is None else tuple(layers)
    queries = backbone.attention(
        question, splice.cache, _question_mask(splice, question), layers=wanted, reduce=scaled_queries
    )
    keys = jnp.stack([attended_keys(layout, splice.cache, layer) for layer in wanted])
    own = jnp.take_along_axis(keys, jnp.asarray(splice.slots)[None, :, :, None, None], axis=2)
    pages = int(page_numbers(splice, page).max()) + 1
    order = page_order(queries, own, on_page, pages, -(-count // page))
    score = jnp.where(on_page >= 0, jnp.take_along_axis(order, jnp.maximum(on_page, 0), axis=1), -jnp.inf)
    index = choose_scored(splice, score, count)
    counts = (count,) * layout.layers
    bytes = recompute_bytes(layout, splice, counts, compared=sum(counts))
    return repair_everywhere(backbone, splice, index, bytes)


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

    Args:
      queries: scaled, engine frame. keys: of the splice's tokens. on_page: each token's page; −1: none.
    """
    inside = (on_page[..., None] == jnp.arange(pages)).transpose(0, 2, 1)  # [B,P,T]
    group = queries.shape[3] // keys.shape[3]

    def of_layer(total: tuple[Array, Array], layer: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        query, key = layer
        least, most = jax.vmap(_least)(key, inside), -jax.vmap(_least)(-key, inside)
        B, Q, N, H = query.shape
        grouped = query.reshape(B, Q, N // group, group, H)
        # Σ_h max(q·min, q·max): positive features of a query meet the largest key, negative ones the least.
        bound = jnp.einsum("BQKGH,BPKH->BQKGP", jnp.maximum(grouped, 0), most)
        bound = bound + jnp.einsum("BQKGH,BPKH->BQKGP", jnp.minimum(grouped, 0), least)
        exists = inside.any(-1)[:, None, None, None]
        bound = jnp.where(exists, bound, -jnp.inf)
        threshold = jax.lax.top_k(bound, min(taken, pages))[0][..., -1:]
        votes = ((bound >= threshold) & exists).sum((1, 2, 3))
        return (total[0] + votes, total[1] + jax.nn.softmax(bound, axis=-1).sum((1, 2, 3))), None

    zero = jnp.zeros(inside.shape[:2], jnp.float32)
    (votes, share), _ = jax.lax.scan(of_layer, (zero, zero), (queries, keys))
    return votes + share / (share.sum(-1, keepdims=True) + 1e-6) / 2


def _least(key: Float[Array, "T K H"], member: Bool[Array, "P T"]) -> Float[Array, "P K H"]:
    """Returns the least key of each page by feature; 0 for pages without tokens."""

    def of_page(own: Array) -> Array:
        return jnp.where(own.any(), jnp.where(own[:, None, None], key, jnp.inf).min(0), 0.0)

    return jax.lax.map(of_page, member)
