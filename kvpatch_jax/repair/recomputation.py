"""Recomputation of chosen tokens, through all layers or through sets that shrink with depth: work that is not done is
not run."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone, Tokens
from .repaired import RepairBytes, Repaired, blind_bytes, recompute_bytes, untouched
from .spliced_cache import AnyArray, SplicedCache, choose_scored, live_tokens

LARGEST_STEP = 16
"""Numbers of recomputed tokens are padded to a multiple of a step of at most this."""


def padded_count(count: int, tokens: int) -> int:
    """Returns how many of `tokens` are run for `count` chosen ones: padded by less than 1 % of all, up to all.

    So there are at most some hundred programs per shape, and none is compiled for every count.
    """
    step = min(LARGEST_STEP, 1 << max(0, (tokens // 128).bit_length() - 1)) if tokens >= 128 else 1
    return min(tokens, -(-count // step) * step)


class LayerSet(NamedTuple):
    """Tokens that are run through some layers.

    Attributes:
      start, stop: layers start … stop-1.
      index: the tokens [B,n], a subset of those of the set below.
      counts: how many of the index's tokens, its first ones, are written at each of these layers; None: all.
    """

    start: int
    stop: int
    index: Int[Array, "B n"]
    counts: tuple[int, ...] | None = None


class LayerRun(NamedTuple):
    """State of a recompute between two sets: the cache so far, the residual of the tokens that were run, and which
    tokens these are ([B,T] residual rows by token, filled where they were run).
    """

    cache: dict[str, Array]
    residual: Array | None
    chosen: Bool[Array, "L B T"]
    logits: Array | None = None


def begin(layers: int, splice: SplicedCache) -> LayerRun:
    """Returns the state before any set has run."""
    return LayerRun(dict(splice.cache), None, jnp.zeros((layers, *splice.slots.shape), bool))


def run_layers(backbone: Backbone, splice: SplicedCache, run: LayerRun, part: LayerSet) -> LayerRun:
    """Runs one set of tokens through its layers, from the embeddings or from the residual that `run` has of them.

    They attend to each other's new KV and to the rest of the cache, as the splice's mask says. The last set's logits
    are those of its last token.
    """
    layers, T = backbone.layout.layers, splice.slots.shape[1]
    count = part.index.shape[1]
    # Padding repeats the last token: written twice with the same values.
    index = jnp.pad(part.index, ((0, 0), (0, padded_count(count, T) - count)), mode="edge")
    start = splice.tokens if run.residual is None else splice.tokens._replace(embeddings=run.residual)
    tokens, slots, mask = _gather_tokens(start, splice.slots, splice.mask, index)

    live = live_tokens(splice)
    counts = np.asarray(part.counts or (count,) * (part.stop - part.start), np.int32)
    chosen = _mark_written(run.chosen, part.index, counts, live, part.start)
    keep = None
    if part.counts is not None or splice.length is not None:
        # Sets are nested, and layers below are not run.
        keep = jnp.take_along_axis(chosen.at[: part.start].set(True), index[None], axis=2)
    top = part.stop == layers
    # The last token is new text, whose logits a forward over the prompt gives.
    reads = top and splice.chunks is not None and bool(splice.new_text()[-1])
    step = backbone.recompute(
        tokens,
        run.cache,
        slots,
        keep,
        mask,
        _row_of(index, T - 1) if reads else jnp.zeros((index.shape[0], 0), jnp.int32),
        start_layer=part.start,
        stop_layer=part.stop,
        hidden_at=() if top else (part.stop,),
    )
    residual = None if top else _scatter(splice.tokens.embeddings, index, step.hidden[part.stop])
    return LayerRun(dict(step.cache), residual, chosen, step.logits if reads else None)


def recompute_sets(backbone: Backbone, splice: SplicedCache, sets: Sequence[LayerSet], bytes: RepairBytes) -> Repaired:
    """Runs nested sets from the lowest layers up; see `run_layers`."""
    run = begin(backbone.layout.layers, splice)
    for part in sets:
        run = run_layers(backbone, splice, run, part)
    return Repaired(run.cache, run.chosen, bytes, logits=run.logits)


def repair_everywhere(
    backbone: Backbone, splice: SplicedCache, index: Int[Array, "B n"], bytes: RepairBytes
) -> Repaired:
    """Recomputes one set of tokens at every layer."""
    return recompute_sets(backbone, splice, [LayerSet(0, backbone.layout.layers, index)], bytes)


def recompute_scored(
    backbone: Backbone,
    splice: SplicedCache,
    count: int,
    scores: Callable[[], Float[Array, "B T"]],
    *,
    compared: bool = False,
    whole_layers: int = 0,
) -> Repaired:
    """Recomputes in context the `count` cached tokens with the largest scores, and all new text.

    Args:
      scores: computes a score for each token; not called where `count` is 0.
      compared: whether scores read all cached KV, before any of it is recomputed.
      whole_layers: lowest layers, at which all tokens are recomputed.
    """
    layers = backbone.layout.layers
    if count == 0:
        return new_text_alone(backbone, splice)
    sets = [LayerSet(whole_layers, layers, choose_scored(splice, scores(), count))]
    if whole_layers:
        sets.insert(0, LayerSet(0, whole_layers, all_tokens(splice, np.arange(splice.slots.shape[1]))))
    counts = (splice.cached_count,) * whole_layers + (count,) * (layers - whole_layers)
    bytes = recompute_bytes(backbone.layout, splice, counts, compared=sum(counts) if compared else 0)
    return recompute_sets(backbone, splice, sets, bytes)


def new_text_alone(backbone: Backbone, splice: SplicedCache) -> Repaired:
    """Computes new text over the cache as it was spliced: what every repair returns for a budget of 0."""
    new = np.flatnonzero(splice.new_text())
    if not len(new):
        return untouched(backbone.layout, splice)
    return repair_everywhere(backbone, splice, all_tokens(splice, new), blind_bytes(backbone.layout, splice))


def all_tokens(splice: SplicedCache, tokens: np.ndarray) -> jax.Array:
    """Returns the same token indices for every row, [B,n]."""
    return jax.device_put(np.broadcast_to(tokens.astype(np.int32), (splice.slots.shape[0], len(tokens))))


def repair_by_layer(
    backbone: Backbone, splice: SplicedCache, index: Int[Array, "B n"], counts: Sequence[int], bytes: RepairBytes
) -> Repaired:
    """Recomputes the first `counts[l]` tokens of an index at layer l, counts not increasing with depth.

    Tokens that a layer does not need are dropped below it: their attention and MLP are not run.
    """
    T, sets = splice.slots.shape[1], []
    # Layers whose padded number is the same run in one program.
    for size, group in itertools.groupby(enumerate(counts), lambda item: padded_count(item[1], T)):
        layers, numbers = zip(*group, strict=True)
        if size == 0:
            break
        sets.append(LayerSet(layers[0], layers[-1] + 1, index[:, : numbers[0]], numbers))
    return recompute_sets(backbone, splice, sets, bytes)


@functools.partial(jax.jit, static_argnames=("token",))
def _row_of(index: Int[Array, "B n"], token: int) -> Int[Array, "B 1"]:
    return jnp.argmax(index == token, axis=1, keepdims=True).astype(jnp.int32)


@jax.jit
def _gather_tokens(
    tokens: Tokens,
    slots: Int[AnyArray, "B T"],
    mask: Bool[AnyArray, "B 1 T S"] | None,
    index: Int[Array, "B n"],
) -> tuple[Tokens, Int[Array, "B n"], Bool[Array, "B 1 n S"] | None]:
    """Gathers the tokens at `index` with their slots and rows of the mask, in one program."""

    # Of arrays [B,T,…], whatever their trailing axes.
    def take(x: AnyArray) -> Array:
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)

    seen = None if mask is None else jnp.take_along_axis(mask, index[:, None, :, None], axis=2)
    return jax.tree.map(take, tokens), take(slots), seen


@functools.partial(jax.jit, static_argnames=("start",))
def _mark_written(
    chosen: Bool[Array, "L B T"],
    index: Int[Array, "B n"],
    counts: Int[AnyArray, " l"],
    live: Bool[Array, "B T"],
    start: int,
) -> Bool[Array, "L B T"]:
    """Marks the first `counts` tokens of an index at the layers from `start` on, except padding."""
    B, n = index.shape
    within = jnp.broadcast_to(jnp.arange(n) < counts[:, None, None], (len(counts), B, n))
    marked = jnp.zeros((len(counts), *live.shape), bool).at[:, jnp.arange(B)[:, None], index].set(within)
    return chosen.at[start : start + len(counts)].set(marked & live)


@jax.jit
def _scatter(like: Array, index: Int[Array, "B n"], residual: Array) -> Array:
    rows = jnp.arange(index.shape[0])[:, None]
    return jnp.zeros(like.shape, residual.dtype).at[rows, index].set(residual)
