"""Recomputation of chosen tokens, through all layers or through sets that shrink with depth: work that is not done is
not run."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone, Tokens
from ..core import AnyArray, KVLayout
from .repair_budget import RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, input_bytes, untouched
from .spliced_cache import SplicedCache, largest, live_tokens

LARGEST_STEP = 16
"""Numbers of recomputed tokens are padded to a multiple of a step of at most this."""


def padded_count(count: int, tokens: int) -> int:
    """Returns how many of `tokens` are run for `count` chosen ones: padded by less than 1 % of all, up to all.

    So there are at most some hundred programs per shape, and none is compiled for every count.
    """
    step = min(LARGEST_STEP, 1 << max(0, (tokens // 128).bit_length() - 1)) if tokens >= 128 else 1
    return min(tokens, -(-count // step) * step)


class Recompute:
    """A recompute in progress: nested sets of a splice's tokens run through layers, from the lowest layer up.

    Attributes:
      cache: engine-frame KV so far.
      chosen: tokens that were written, at each layer, [L,B,T].
      residual: [B,T,D] that leaves the layers run so far, filled where tokens were run; None: no layer has run.
      logits: of a prompt's last token, once the last layer has run it; else None.
    """

    def __init__(self, backbone: Backbone, splice: SplicedCache, mask: Bool[AnyArray, "B 1 T S"] | None = None):
        self.backbone, self.splice, self.mask = backbone, splice, mask
        self.cache = dict(splice.cache)
        self.chosen = jnp.zeros((backbone.layout.layers, *splice.slots.shape), bool)
        self.residual: Array | None = None
        self.logits: Array | None = None

    def run(
        self, start: int, stop: int, index: Int[AnyArray, "*B n"], counts: tuple[int, ...] | None = None
    ) -> "Recompute":
        """Runs a set of tokens through layers start … stop-1, from the embeddings or from the residual; returns itself.

        They attend to each other's new KV and to the rest of the cache, where the mask (None: causal) allows.

        Args:
          index: the tokens, [n] or of each row [B,n], a subset of those of the set below.
          counts: how many of the index's tokens, its first ones, are written at each of these layers; None: all.
        """
        splice, layers, (B, T) = self.splice, self.backbone.layout.layers, self.splice.slots.shape
        if start == stop:
            return self
        if index.ndim == 1:
            index = np.broadcast_to(np.asarray(index, np.int32), (B, len(index)))
        index, count = jax.device_put(index), index.shape[1]
        written = np.asarray(counts or (count,) * (stop - start), np.int32)
        self.chosen = _mark_written(self.chosen, index, written, live_tokens(splice), start)

        # Padding repeats the last token: written twice with the same values.
        index = jnp.pad(index, ((0, 0), (0, padded_count(count, T) - count)), mode="edge")
        entering = splice.tokens if self.residual is None else splice.tokens._replace(embeddings=self.residual)
        tokens, slots, mask = _gather_tokens(entering, splice.slots, self.mask, index)
        keep = None
        if counts is not None or splice.length is not None:
            # Sets are nested, and layers below are not run.
            keep = jnp.take_along_axis(self.chosen.at[:start].set(True), index[None], axis=2)
        top = stop == layers
        # The last token is new text, whose logits a forward over the prompt gives.
        reads = top and splice.chunks is not None and bool(splice.new_text()[-1])
        rows = jnp.argmax(index == T - 1, axis=1, keepdims=True).astype(jnp.int32)
        step = self.backbone.recompute(
            tokens, self.cache, slots, keep, mask, rows if reads else rows[:, :0], start, stop, () if top else (stop,)
        )
        self.cache = dict(step.cache)
        if not top:
            residual = jnp.zeros(splice.tokens.embeddings.shape, step.hidden[stop].dtype)
            self.residual = residual.at[jnp.arange(B)[:, None], index].set(step.hidden[stop])
        self.logits = step.logits if reads else None
        return self

    def repaired(self, bytes: RepairBytes) -> Repaired:
        """Returns what was recomputed."""
        return Repaired(self.cache, self.chosen, bytes, logits=self.logits)


def recompute_everything(backbone: Backbone, splice: SplicedCache, bytes: RepairBytes) -> Repaired:
    """Recomputes all tokens at every layer."""
    return Recompute(backbone, splice).run(0, backbone.layout.layers, np.arange(splice.slots.shape[1])).repaired(bytes)


def new_text_alone(backbone: Backbone, splice: SplicedCache) -> Repaired:
    """Computes new text over the cache as it was spliced: what every repair returns for a budget of 0."""
    new, bytes = np.flatnonzero(splice.new_text()), untouched(backbone.layout, splice).bytes
    run = Recompute(backbone, splice)
    return (run.run(0, backbone.layout.layers, new) if len(new) else run).repaired(bytes)


def recompute_scored(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
    scores: Callable[[], Float[Array, "B T"]],
    *,
    compared: bool = False,
    whole_layers: int = 0,
) -> Repaired:
    """Recomputes in context the cached tokens with the largest scores, as many as a budget allows, and all new text.

    Args:
      scores: computes a score for each token; not called where the budget is 0.
      compared: whether scores read all cached KV, before any of it is recomputed.
      whole_layers: lowest layers, at which all tokens are recomputed.
    """
    layout, count = backbone.layout, budget.count(backbone.layout, splice.cached_count)
    if count == 0:
        return new_text_alone(backbone, splice)
    index, run = choose_scored(splice, scores(), count), Recompute(backbone, splice)
    run.run(0, whole_layers, np.arange(splice.slots.shape[1])).run(whole_layers, layout.layers, index)
    counts = (splice.cached_count,) * whole_layers + (count,) * (layout.layers - whole_layers)
    return run.repaired(recompute_bytes(layout, splice, counts, compared=sum(counts) if compared else 0))


def choose_scored(splice: SplicedCache, score: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """Chooses all new text, and of the cached tokens the `count` with the largest scores; ascending indices."""
    new = splice.new_text()
    if new.any():
        score = jnp.where(jnp.asarray(new), jnp.inf, score)
    return largest(score, count + int(new.sum()))


def recompute_bytes(
    layout: KVLayout, splice: SplicedCache, counts: Sequence[int], inputs: int | None = None, compared: int = 0
) -> RepairBytes:
    """Counts the bytes of a repair that recomputes `counts[l]` cached tokens at layer l.

    Args:
      inputs: tokens whose inputs are kept; None: all, because any may be chosen.
      compared: token-layers whose cached KV is read to be compared, though it is overwritten.
    """
    unit, cached = kv_bytes(layout, 1) // layout.layers, splice.cached_count
    read = sum(cached - count for count in counts) + compared
    return RepairBytes(
        canonical=unit * cached * layout.layers,
        inputs=input_bytes(splice) * (cached if inputs is None else inputs),
        moved=unit * read + input_bytes(splice) * max(counts),
    )


@jax.jit
def _gather_tokens(
    tokens: Tokens, slots: Int[AnyArray, "B T"], mask: Bool[AnyArray, "B 1 T S"] | None, index: Int[Array, "B n"]
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
