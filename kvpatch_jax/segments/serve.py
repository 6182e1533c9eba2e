"""Prefill that reuses stored segments in the lower layers, tests each at its borders, and computes the rest.

Segment reuse (proposal without experiments, §3.4), changed where it could not run as written:

- The residual above the reused layers is stored with the KV, and a reused token begins there.
- A halo token is computed from the bottom, all layers of it.
- The reference of the test is the halo, which is computed anyway, in the new context; the candidate is the same token
  from its stored residual. (True logits are those of a full prefill, which reuse is to save.) At the left border the
  reference is exact, unless an earlier segment is reused; at the right one it reads the reused interior.
- A run is tested at its left border before its interior is touched, and at its right one before anything behind it is
  computed. A rejection therefore costs its own tokens and taints nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Backbone, Step, Tokens
from ..core import AnyArray, Buckets, EngineKV, as_start, check_positions, rotate_kv, to_phase_free
from .plan import PlannedRun, ReuseThresholds, plan_runs
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
      residual: [T,D] float32, entering the lowest layer that is not reused.
      generations: [T], reuses behind the KV of each token; −1 of reused ones.
      decisions: about each planned run, in order.
      flops, full_flops: of all that was computed, tests and rejected runs included, and of a prefill without reuse.
        Matrix products, without padding.
    """

    logits: Float[Array, "1 V"]
    cache: EngineKV
    residual: Float[np.ndarray, "T D"]
    generations: Int[np.ndarray, " T"]
    decisions: tuple[SegmentDecision, ...]
    flops: int
    full_flops: int


def segment_prefill(
    backbone: Backbone, prompt: SegmentPrompt, store: SegmentStore, thresholds: ReuseThresholds | None = None
) -> SegmentPrefill:
    """Computes a prompt's cache and last logits, with stored KV where a segment is found and passes its test.

    Args:
      store: of this model; only read, see `store_segments`.

    Raises:
      InputError: segments of another model, or a prompt longer than the regime that the rope is pinned to.
    """
    store.expect(backbone)
    thresholds, count = thresholds or ReuseThresholds(), len(prompt.ids)
    check_positions(backbone.layout.rope, np.array([count - 1], np.int32), np.zeros((), np.int32))
    embeddings = backbone.embed(**backbone.prepare([prompt.ids.tolist()])).embeddings

    # Plan, and copy what is planned, at its tokens of the prompt: another thread may evict it.
    layout, costs, layers = backbone.layout, backbone.forward_costs, store.reuse_layers
    size = CACHE_SIZES.round_up(count)
    shapes = {channel.name: (layers, 1, size, channel.heads, channel.width) for channel in layout.channels}
    stored = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    residual = np.zeros((size, embeddings.shape[-1]), np.float32)
    with store.lock:
        runs = store.index.runs(prompt, thresholds.segment, thresholds.context)
        plan = plan_runs(prompt, runs, store.index.spans, thresholds, costs, layers)
        for start, stop, span, offset, _ in [piece for run in plan for piece in run.pieces]:
            kv, residual[start:stop] = store.read(span, offset, offset + stop - start)
            for name, value in kv.items():
                stored[name][:, 0, start:stop] = value

    # Put stored KV into the cache. No token sees a slot behind its own, and what is rejected is overwritten.
    positions, dtype = _text_positions(backbone, size), embeddings.dtype
    phase_free = {name: jnp.asarray(value, dtype) for name, value in stored.items()}
    rotated = rotate_kv(layout, phase_free, positions, as_start(layout.rope, 0))
    above = [(0, layout.layers - layers)] + [(0, 0)] * 4
    cache = {name: jnp.pad(value, above) for name, value in rotated.items()}

    # Compute from left to right, run by run.
    execution = _Execution(backbone, thresholds, layers, np.asarray(embeddings[0]), positions, cache, residual)
    decisions = tuple(execution.serve(run) for run in plan)
    logits = execution.compute(count, [count - 1])
    # Tokens behind an accepted run are approximations themselves, unless the run is exact.
    generations = np.zeros(count, np.int32)
    for run in [decision.run for decision in decisions if decision.accepted]:
        begin, end = run.interior
        generations[begin:end] = -1
        generations[end:] = np.maximum(generations[end:], run.generation)
    cache, full_flops = EngineKV(execution.cache), costs.flops(count) + costs.logit
    return SegmentPrefill(logits, cache, residual[:count], generations, decisions, execution.flops, full_flops)


def store_segments(backbone: Backbone, prompt: SegmentPrompt, prefill: SegmentPrefill, store: SegmentStore) -> int:
    """Stores the spans of a prompt that were computed in full; returns how many are new.

    Raises:
      InputError: segments of another model.
    """
    store.expect(backbone)
    new = []
    for tokens in spans(prompt):
        rows = slice(tokens.start, tokens.stop)
        generations = prefill.generations[rows]
        if segments(tokens) and generations.min() >= 0:
            span = store.index.describe(prompt, tokens, int(generations.max()))
            if store.lacks(span):
                new.append((rows, span))
    if not new:
        return 0

    # One rotation of the complete prompt, at a size that prompts share, and one copy to the host.
    local = _text_positions(backbone, next(iter(prefill.cache.values())).shape[2])
    host = {name: np.asarray(value) for name, value in to_phase_free(backbone.layout, prefill.cache, local).items()}
    count = 0
    for rows, span in new:
        kv = {name: value[: store.reuse_layers, 0, rows] for name, value in host.items()}
        count += store.add(prompt, span, kv, prefill.residual[rows])
    return count


@dataclasses.dataclass
class _Execution:
    """State of one prefill, whose cache is filled from left to right.

    Attributes:
      layers: whose KV is reused, from the bottom.
      embeddings [T,D], positions [S] or [S,A]: on the host, where slices of any size compile nothing.
      cache: engine frame, {channel: [L,1,S,K,H]}.
      residual: [S,D], entering the boundary layer: stored at first, computed where tokens are.
      done: tokens that are final.
      flops: of all that was computed.
    """

    backbone: Backbone
    thresholds: ReuseThresholds
    layers: int
    embeddings: np.ndarray
    positions: np.ndarray
    cache: dict[str, Any]
    residual: np.ndarray
    done: int = 0
    flops: int = 0

    def serve(self, run: PlannedRun) -> SegmentDecision:
        """Computes the tokens in front of a run, tests it, and reuses its interior if it passes."""
        begin, end = run.interior
        probes, stop = self.thresholds.probes if run.halo else 0, end + run.halo
        entering = self.residual[begin - probes : end + probes].copy()
        kl: list[float] = []

        def fails(reference: Array, candidate: Array) -> bool:
            kl.extend(np.asarray(_kl_rows(reference, candidate)).tolist())
            failed = sum(value > self.thresholds.epsilon for value in kl)
            return failed > int(self.thresholds.failing * 2 * probes)

        # Compute everything in front of the interior; the left halo's last tokens are the reference.
        if begin > self.done:
            reference = self.compute(begin, range(begin - probes, begin))
            if probes:
                candidate = self._run(begin - probes, entering[:probes], range(probes), start_layer=self.layers)
                if fails(reference, candidate.logits[0]):
                    return SegmentDecision(run, "left", tuple(kl))

        # Run the interior through the upper layers, and with it the candidates of the right border.
        count = end - begin
        step = self._run(begin, entering[probes:], range(count, count + probes), start_layer=self.layers)
        self.cache, self.done = dict(step.cache), end
        if run.halo:
            reference = self.compute(stop, range(end, end + probes))
            if fails(reference, step.logits[0]):
                # Compute the run again from its interior on. Nothing behind it was computed yet.
                self.done = begin
                self.compute(stop, [])
                return SegmentDecision(run, "right", tuple(kl))
        return SegmentDecision(run, None, tuple(kl))

    def compute(self, stop: int, probes: Sequence[int]) -> Float[Array, "n V"]:
        """Computes all tokens up to `stop` that are not final from the bottom; returns logits of some of them."""
        start = self.done
        rows = [token - start for token in probes]
        step = self._run(start, self.embeddings[start:stop], rows, hidden_at=(self.layers,))
        self.cache, self.done = dict(step.cache), stop
        self.residual[start:stop] = np.asarray(step.hidden[self.layers][0], np.float32)[: stop - start]
        return step.logits[0]

    def _run(
        self, start: int, entering: np.ndarray, rows: Sequence[int], start_layer: int = 0, hidden_at: tuple = ()
    ) -> Step:
        """Runs tokens from `start` on, whose residual is `entering` [n,D]; returns logits of some rows.

        The last one is repeated up to a size that forwards share: it is written several times with the same values.
        """
        count = len(entering)
        self.flops += self.backbone.forward_costs.flops(count, start, start_layer)
        self.flops += len(rows) * self.backbone.forward_costs.logit
        places = np.minimum(np.arange(max(SIZES.round_up(count), SMALLEST)), count - 1)
        tokens = Tokens(
            jnp.asarray(entering[places][None], self.embeddings.dtype), self.positions[start + places][None]
        )
        slots, logits = jnp.asarray(start + places[None], jnp.int32), np.array(rows, np.int32)[None]
        return self.backbone.recompute(
            tokens, self.cache, slots, logits=logits, start_layer=start_layer, hidden_at=hidden_at
        )


@jax.jit
def _kl_rows(reference: Float[AnyArray, "n V"], candidate: Float[AnyArray, "n V"]) -> Float[Array, " n"]:
    """Computes KL(reference ‖ candidate) of each row, in nats."""
    first = jax.nn.log_softmax(reference.astype(jnp.float32), axis=-1)
    second = jax.nn.log_softmax(candidate.astype(jnp.float32), axis=-1)
    # Rounding may leave a sum just below zero.
    return jnp.maximum((jnp.exp(first) * (first - second)).sum(-1), 0.0)


def _text_positions(backbone: Backbone, size: int) -> np.ndarray:
    """Returns positions 0 … size-1 of text: int32 [S], or [S,A], where all axes advance alike."""
    positions, axes = np.arange(size, dtype=np.int32), backbone.layout.rope.axes
    return positions if axes is None else np.repeat(positions[:, None], axes, axis=1)
