"""Prefill that reuses stored segments in the lower layers, tests each at its borders, and computes the rest.

Segment reuse (proposal without experiments, §3.4), changed where it could not run as written:

- *Residuals.* "Recompute all layers outside L_reuse" needs what enters them. The residual above the reused layers is
  stored with the KV, and a reused token begins there.
- *Halos.* A halo token is computed from the bottom, all layers of it: only reused tokens begin higher up.
- *The reference of the test.* True logits of a segment's tokens are those of a full prefill, which reuse is to save.
  The reference is the halo, which is computed anyway, in the new context; the candidate is the same token from its
  stored residual, "keeping everything else identical". At the left border the reference is exact, unless an earlier
  segment is reused; at the right one it reads the reused interior.
- *Its cost.* The candidate's upper layers and the logits of both are counted, and a run that saves less is left out.
- *Order.* A run is tested at its left border before its interior is touched, and at its right one before anything
  behind it is computed. A rejection therefore costs its own tokens and taints nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..backbone import KV, Backbone, Recomputed, Tokens, check_cached
from ..core import AnyArray, Buckets, EngineKV, as_start, check_positions, rotate_kv, to_phase_free, zero_padded
from ..errors import InputError
from .options import ReuseThresholds
from .plan import PlannedRun, plan_runs
from .store import SegmentStore
from .text import SegmentPrompt, segments, spans

SIZES, CACHE_SIZES = Buckets(16, 2), Buckets(64, 1)
"""Sizes of forwards and of caches, so that prompts and runs of any length share programs."""
SMALLEST = 8
"""Tokens of a forward at least: fewer take as long, and would be programs of their own."""


class SegmentDecision(NamedTuple):
    """Decision about one run.

    Attributes:
      run: tokens that stored spans have.
      rejected_at: the border where the test failed; None: the interior was reused.
      kl: KL(computed ‖ stored) of each probe, in nats, from left to right.
    """

    run: PlannedRun
    rejected_at: Literal["left", "right"] | None
    kl: tuple[float, ...]

    @property
    def accepted(self) -> bool:
        """Whether the interior was reused."""
        return self.rejected_at is None


class SegmentPrefill(NamedTuple):
    """Result of a prefill with reused segments.

    Attributes:
      logits: [1,V] of the last token.
      cache: {channel: [L,1,S,K,H]}, slots behind the prompt's tokens are free.
      reused: [L,T], layers and tokens whose KV was stored.
      decisions: about each planned run, in order.
      flops, full_flops: of all that was computed, tests and rejected runs included, and of a prefill without reuse
        behind what was cached. Matrix products, without padding.
      residual: [T,D] float32, entering the lowest layer that is not reused; zeros of cached tokens.
      prefix: tokens in front that were cached already.
    """

    logits: Float[Array, "1 V"]
    cache: EngineKV
    reused: Bool[np.ndarray, "L T"]
    decisions: tuple[SegmentDecision, ...]
    flops: int
    full_flops: int
    residual: Float[np.ndarray, "T D"]
    prefix: int


def segment_prefill(
    backbone: Backbone,
    prompt: SegmentPrompt,
    store: SegmentStore,
    thresholds: ReuseThresholds | None = None,
    prefix: KV | None = None,
) -> SegmentPrefill:
    """Computes a prompt's cache and last logits, with stored KV where a segment is found and passes its test.

    Args:
      store: of this model; only read, see `store_segments`.
      prefix: engine-frame KV {channel: [L,1,n,K,H]} of the prompt's first n tokens, from a prefix cache.

    Raises:
      InputError: segments of another model, a prompt longer than the regime that the rope is pinned to, or a prefix
      that is not shorter than the prompt. LayoutError, ShapeError, FrameError: a prefix that is not KV of this model.
    """
    store.expect(backbone)
    thresholds, count = thresholds or ReuseThresholds(), len(prompt.ids)
    check_positions(backbone.layout.rope, np.array([count - 1], np.int32), np.zeros((), np.int32))
    tokens = backbone.embed(**backbone.prepare([prompt.ids.tolist()]))
    first = 0
    if prefix is not None:
        check_cached(backbone.layout, tokens, prefix, "prefix")
        first = next(iter(prefix.values())).shape[2]
        if first >= count:
            raise InputError(f"prefix: got {first} tokens of a prompt of {count}; expected fewer")

    # Plan, and copy what is planned: another thread may evict it.
    costs, layers = backbone.forward_costs, store.options.reuse_layers
    with store.lock:
        runs = store.index.runs(prompt, thresholds)
        plan = plan_runs(prompt, runs, store.index.spans, thresholds, costs, layers, first)
        donors, residual = _read_donors(store, plan, CACHE_SIZES.round_up(count), tokens.embeddings.shape[-1])

    # Compute from left to right, run by run.
    execution = _Execution(backbone, tokens, thresholds, layers, donors, residual, prefix or {})
    decisions = [execution.serve(run) for run in plan]
    logits = execution.compute(count, [count - 1])
    for decision in decisions:
        for piece in decision.run.pieces if decision.accepted else ():
            store.use(piece.span)

    full_flops = costs.flops(count - first, first) + costs.logit
    return SegmentPrefill(
        logits=logits,
        cache=EngineKV(execution.cache),
        reused=execution.reused,
        decisions=tuple(decisions),
        flops=execution.flops,
        full_flops=full_flops,
        residual=execution.residual,
        prefix=first,
    )


def store_segments(backbone: Backbone, prompt: SegmentPrompt, prefill: SegmentPrefill, store: SegmentStore) -> int:
    """Stores the spans of a prompt of which nothing was reused and nothing was cached; returns how many are new.

    Raises:
      InputError: segments of another model.
    """
    store.expect(backbone)
    # Spans behind an accepted run are approximations themselves, unless it is exact.
    generations = np.zeros(len(prompt.ids), np.int64)
    for decision in prefill.decisions:
        if decision.accepted:
            behind = generations[decision.run.interior[0] :]
            np.maximum(behind, decision.run.generation, out=behind)

    served = prefill.reused.any(0)
    served[: prefill.prefix] = True
    new = []
    for tokens in spans(prompt):
        rows = slice(tokens.start, tokens.stop)
        if segments(tokens) and not served[rows].any():
            span = store.index.describe(prompt, tokens, int(generations[rows].max()))
            new += [(rows, span)] if store.lacks(span) else []
    if not new:
        return 0

    # One rotation of the complete prompt, at a size that prompts share, and one copy to the host.
    local = _text_positions(backbone, next(iter(prefill.cache.values())).shape[2])
    host = {name: np.asarray(value) for name, value in to_phase_free(backbone.layout, prefill.cache, local).items()}
    count = 0
    for rows, span in new:
        kv = {name: value[: store.options.reuse_layers, 0, rows] for name, value in host.items()}
        count += store.add(prompt, span, kv, prefill.residual[rows])
    return count


class _Execution:
    """State of one prefill: a cache that is filled from left to right, and what it cost.

    Attributes:
      cache: engine frame, {channel: [L,1,S,K,H]}, S a bucket. done: tokens that are final.
      embeddings [T,D], positions [T] or [T,A]: of the prompt, on the host, where slices of any size compile nothing.
      donors: stored KV {channel: [R,1,S,K,H]} at this prompt's positions. stored_residual: [S,D], likewise.
      residual, reused, flops: as in the result.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: Tokens,
        thresholds: ReuseThresholds,
        layers: int,
        donors: dict[str, np.ndarray],
        residual: np.ndarray,
        prefix: KV,
    ):
        self.backbone, self.thresholds, self.layers, self.dtype = backbone, thresholds, layers, tokens.embeddings.dtype
        self.embeddings, self.positions = np.asarray(tokens.embeddings[0]), np.asarray(tokens.positions)[0]
        self.costs, layout, T = backbone.forward_costs, backbone.layout, len(self.embeddings)
        self.reused, self.flops = np.zeros((layout.layers, T), bool), 0
        self.residual, self.stored_residual = np.zeros((T, residual.shape[-1]), np.float32), residual

        # This model's KV has the embeddings' dtype.
        size = CACHE_SIZES.round_up(T)
        self.done, self.cache = 0, dict[str, Any]()
        for channel in layout.channels:
            shape = (layout.layers, 1, size, channel.heads, channel.width)
            self.cache[channel.name] = jnp.zeros(shape, self.dtype)
        for name, value in prefix.items():
            self.done = value.shape[2]
            self.cache[name] = jnp.asarray(zero_padded(value, 2, size), self.dtype)

        self.donors: dict[str, Any] = {}
        if donors:
            phase_free = {name: jnp.asarray(value, self.dtype) for name, value in donors.items()}
            self.donors = rotate_kv(layout, phase_free, _text_positions(backbone, size), as_start(layout.rope, 0))

    def serve(self, run: PlannedRun) -> SegmentDecision:
        """Computes what stands in front of a run, tests it, and reuses its interior if it passes."""
        begin, end = run.interior
        probes = 0 if run.exact else self.thresholds.probes
        kl: list[float] = []

        def fails(start: int, reference: Array, candidate: Array) -> bool:
            self.flops += self._upper_flops(start, start + probes) + 2 * probes * self.costs.logit
            kl.extend(np.asarray(_kl_rows(reference, candidate)).tolist())
            failed = sum(value > self.thresholds.epsilon for value in kl)
            return failed > int(self.thresholds.failing * 2 * probes)

        # Compute the left halo with all that is not yet; its last tokens are the reference.
        if begin > self.done:
            reference = self.compute(begin, range(begin - probes, begin))
            if probes:
                candidate = self._run_upper(begin - probes, begin, probes).logits[0]
                if fails(begin - probes, reference, candidate):
                    return SegmentDecision(run, "left", tuple(kl))

        # Lower layers from the store, upper layers over them; the right probes run along as candidates.
        self.cache = _with_donors(self.cache, self.donors, begin, end, self.layers)
        step = self._run_upper(begin, end + probes, probes)
        self.cache = dict(step.cache)
        self.flops += self._upper_flops(begin, end)
        self.reused[: self.layers, begin:end] = True
        self.residual[begin:end] = self.stored_residual[begin:end]
        self.done = end
        if not run.halo:
            return SegmentDecision(run, None, tuple(kl))
        reference = self.compute(run.stop, range(end, end + probes))
        if not probes or not fails(end, reference, step.logits[0]):
            return SegmentDecision(run, None, tuple(kl))

        # Compute the run again, from its interior on; nothing behind it has been computed.
        self.reused[:, begin:end] = False
        self.done = begin
        self.compute(run.stop, [])
        return SegmentDecision(run, "right", tuple(kl))

    def compute(self, stop: int, probes: Sequence[int]) -> Float[Array, "n V"]:
        """Computes all tokens up to `stop` that are not final from the bottom; returns logits of some of them."""
        start = self.done
        # Without probes there are no rows: not even the last token's logits are computed.
        rows = np.array([token - start for token in probes], np.int32)[None]
        step = self._run(start, stop, self.embeddings[start:stop], rows, hidden_at=(self.layers,))
        self.cache = dict(step.cache)
        self.residual[start:stop] = np.asarray(step.hidden[self.layers][0], np.float32)[: stop - start]
        self.done = stop

        # Logits of probes belong to the test; only the prompt's last ones are asked for.
        last = stop == len(self.embeddings)
        self.flops += self.costs.flops(stop - start, start) + (self.costs.logit if last else 0)
        return step.logits[0]

    def _run_upper(self, start: int, stop: int, probes: int) -> Recomputed:
        """Runs tokens from their stored residuals through the upper layers; returns logits of the last ones."""
        rows = np.arange(stop - start - probes, stop - start, dtype=np.int32)[None]
        return self._run(start, stop, self.stored_residual[start:stop], rows, start_layer=self.layers)

    def _run(self, start: int, stop: int, entering: np.ndarray, rows: np.ndarray, **layers: Any) -> Recomputed:
        """Runs tokens start … stop-1, whose residual is `entering` [n,D], and writes them into the cache.

        The last one is repeated up to a size that forwards share: it is written several times with the same values.
        """
        size = max(SIZES.round_up(stop - start), SMALLEST)
        places = np.minimum(np.arange(start, start + size), stop - 1)
        embeddings = jnp.asarray(entering[places - start][None], self.dtype)
        slots = jnp.asarray(places[None], jnp.int32)
        tokens = Tokens(embeddings, self.positions[places][None])
        return self.backbone.recompute(tokens, self.cache, slots, logits=rows, **layers)

    def _upper_flops(self, start: int, stop: int) -> int:
        return self.costs.flops(stop - start, start, self.layers)


@jax.jit
def _kl_rows(reference: Float[AnyArray, "n V"], candidate: Float[AnyArray, "n V"]) -> Float[Array, " n"]:
    """Computes KL(reference ‖ candidate) of each row, in nats."""
    first = jax.nn.log_softmax(reference.astype(jnp.float32), axis=-1)
    second = jax.nn.log_softmax(candidate.astype(jnp.float32), axis=-1)
    # Rounding may leave a sum just below zero.
    return jnp.maximum((jnp.exp(first) * (first - second)).sum(-1), 0.0)


@functools.partial(jax.jit, static_argnames=("layers",))
def _with_donors(cache: KV, donors: KV, begin: Any, end: Any, layers: int) -> dict[str, Array]:
    """Puts stored KV [R,1,S,K,H] into slots begin … end-1 of the lowest layers of a cache [L,1,S,K,H]."""
    result = {}
    for name, value in cache.items():
        slots = jnp.arange(value.shape[2])[:, None, None]
        inside = (slots >= begin) & (slots < end)
        result[name] = value.at[:layers].set(jnp.where(inside, donors[name], value[:layers]))
    return result


def _read_donors(
    store: SegmentStore, plan: list[PlannedRun], size: int, width: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Reads the KV [R,1,S,K,H] and residuals [S,D] of all planned runs, at their tokens of the prompt."""
    donors: dict[str, np.ndarray] = {}
    residual = np.zeros((size, width), np.float32)
    for run in plan:
        for piece in run.pieces:
            kv, residual[piece.start : piece.stop] = store.read(piece.span, piece.offset, piece.offset + piece.length)
            for name, value in kv.items():
                if name not in donors:
                    donors[name] = np.zeros((value.shape[0], 1, size, *value.shape[2:]), np.float32)
                donors[name][:, 0, piece.start : piece.stop] = value
    return donors, residual


def _text_positions(backbone: Backbone, size: int) -> np.ndarray:
    """Returns positions 0 … size-1 of text: int32 [S], or [S,A], where all axes advance alike."""
    positions, axes = np.arange(size, dtype=np.int32), backbone.layout.rope.axes
    return positions if axes is None else np.repeat(positions[:, None], axes, axis=1)
