"""Prefill that reuses stored segments in the lower layers, tests each at its borders, and computes the rest.

Segment reuse (proposal without experiments, §3.4), mended where it could not be run as it is written:

- *Residuals.* "Recompute all layers outside L_reuse" needs what enters them. The residual above the reused layers is
  stored with the KV, and a reused token begins there.
- *Halos.* A halo token is computed from the bottom, all layers of it: its sets are nested, and only reused tokens begin
  higher up.
- *The reference of the test.* True logits of a segment's tokens are those of a full prefill, which is what reuse is to
  save. Here the reference is the halo, which is computed anyway, in the new context; the candidate is the same token
  from its stored residual, "keeping everything else identical". At the left border the reference is exact, unless an
  earlier segment is reused; at the right one it reads the reused interior.
- *Its cost.* The candidate's upper layers and the logits of both are counted, and a run that saves less is left out.
- *Order.* A run is tested at its left border before its interior is touched, and at its right one before anything
  behind it is computed. A rejection therefore costs its own tokens and taints nothing.
- *Similar is not equal.* Only runs of equal token ids are reused (`segment_index`).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..backbone import KV, Backbone, ForwardCosts, Recomputed, Tokens, check_cached
from ..core import AnyArray, Buckets, EngineKV, as_start, check_positions, rotate_kv, to_phase_free
from ..errors import InputError
from .reuse_plan import PlannedRun, plan_runs
from .segment_options import ReuseThresholds
from .segment_store import TenantSegments
from .segmentation import SegmentPrompt, TokenRange, as_ids

SIZES, CACHE_SIZES = Buckets(16, 2), Buckets(64, 1)
"""Sizes of forwards and of caches, so that prompts and runs of any length share programs."""
SMALLEST = 8
"""Tokens of a forward at least: fewer take as long, and would be programs of their own."""
Border = Literal["left", "right"]


class SegmentDecision(NamedTuple):
    """What was decided about one run.

    Attributes:
      start, stop, interior: of the run, and the tokens of it that were to be reused.
      accepted: whether they were. rejected_at: the border where the test failed; None: it passed, or there was none.
      kl: KL(computed ‖ stored) of each probe, in nats, from left to right.
      equal_prefix: whether nothing had to be tested. generation: reuses behind its stored KV.
    """

    start: int
    stop: int
    interior: tuple[int, int]
    accepted: bool
    rejected_at: Border | None
    kl: tuple[float, ...]
    equal_prefix: bool
    generation: int


class PrefillFlops(NamedTuple):
    """FLOPs of one prefill, of matrix products, without padding.

    Attributes:
      full: of a prefill without reuse, behind what was cached.
      bottom: of tokens computed from the bottom, halos among them, and of the last logits.
      upper: of reused tokens in the upper layers.
      test: of candidates, and of the logits of both sides.
      discarded: of everything computed of runs that were rejected at their right border.
    """

    full: int
    bottom: int = 0
    upper: int = 0
    test: int = 0
    discarded: int = 0

    @property
    def spent(self) -> int:
        """All that was computed."""
        return self.bottom + self.upper + self.test + self.discarded

    @property
    def saved(self) -> int:
        """What was not computed, net of tests and halos; negative if reuse was a loss."""
        return self.full - self.spent


class SegmentPrefill(NamedTuple):
    """Prefill of a prompt.

    Attributes:
      logits: [1,V], of the last token.
      cache: engine frame, {channel: [L,1,S,K,H]}: S is T or more, and slots from T on are free.
      reused: bool [L,T], tokens × layers that were taken from the store.
      decisions: of all runs that were tried, in order.
      flops: spent and saved.
      residual: [T,D] float32, entering the boundary layer; of cached tokens zeros.
      probe_logits: {token: [V]}, the served logits of the probes.
      prefix: tokens in front that were cached already.
    """

    logits: Float[Array, "1 V"]
    cache: EngineKV
    reused: Bool[np.ndarray, "L T"]
    decisions: tuple[SegmentDecision, ...]
    flops: PrefillFlops
    residual: Float[np.ndarray, "T D"]
    probe_logits: dict[int, np.ndarray]
    prefix: int


def segment_prefill(
    backbone: Backbone,
    prompt: SegmentPrompt,
    segments: TenantSegments,
    thresholds: ReuseThresholds | None = None,
    *,
    tenant: str,
    prefix: KV | None = None,
) -> SegmentPrefill:
    """Computes a prompt's cache and last logits, with stored KV where a segment is found and passes its test.

    Args:
      segments: this tenant's, of this model. Nothing is stored by this call: see `store_segments`.
      thresholds: of retrieval and test.
      prefix: engine-frame KV {channel: [L,1,n,K,H]} of the prompt's first n tokens, from a prefix cache.

    Raises:
      InputError: segments of another model or tenant. InputError: a prompt that is longer than the
      regime that the rope is pinned to. InputError: no tokens, or a prefix that is not shorter than the prompt.
      LayoutError, ShapeError, FrameError: a prefix that is not KV of this model.
    """
    segments.expect(backbone, tenant)
    thresholds = thresholds or ReuseThresholds()
    ids = as_ids(prompt.ids)
    check_positions(backbone.layout.rope, np.array([len(ids) - 1], np.int32), np.zeros((), np.int32))
    tokens = backbone.embed(**backbone.prepare([ids.tolist()]))
    first = 0
    if prefix is not None:
        check_cached(backbone.layout, tokens, prefix, "prefix")
        first = next(iter(prefix.values())).shape[2]
        if first >= len(ids):
            raise InputError(f"prefix: got {first} tokens of a prompt of {len(ids)}; expected fewer")

    costs, layers = backbone.forward_costs, segments.options.reuse_layers
    with segments.lock:
        found = segments.index.runs(prompt, thresholds)
        plan = plan_runs(prompt, found, segments.index.spans, thresholds, costs, layers, first)
        # Copies, so that another thread may evict what this prefill reads.
        donors, residual = _read_donors(segments, plan, len(ids), tokens.embeddings.shape[-1])

    run = _Execution(backbone, tokens, thresholds, layers, donors, residual, prefix)
    decisions = [run.serve(planned) for planned in plan]
    logits = run.compute(len(ids), (len(ids) - 1,))
    for planned, decision in zip(plan, decisions, strict=True):
        for piece in planned.pieces if decision.accepted else ():
            segments.use(piece.span)

    full = costs.flops(len(ids) - first, first) + costs.logit
    flops = run.flops._replace(full=full)
    return SegmentPrefill(
        logits, EngineKV(run.cache), run.reused, tuple(decisions), flops, run.residual, run.probe_logits, first
    )


def store_segments(
    backbone: Backbone, prompt: SegmentPrompt, prefill: SegmentPrefill, segments: TenantSegments, *, tenant: str
) -> int:
    """Stores the spans of a prompt of which nothing was reused and nothing was cached; returns how many are new.

    Spans behind accepted runs are approximations themselves: their generation is one more than the largest in front of
    them, and `SegmentIndexOptions.generations` bounds it.

    Raises:
      InputError: segments of another model or tenant.
    """
    segments.expect(backbone, tenant)
    layers, T = segments.options.reuse_layers, len(prompt.ids)
    generations = np.zeros(T, np.int64)
    for decision in prefill.decisions:
        if decision.accepted and not (decision.equal_prefix and decision.generation == 0):
            begin = decision.interior[0]
            generations[begin:] = np.maximum(generations[begin:], decision.generation + 1)

    taken = prefill.reused.any(0)
    taken[: prefill.prefix] = True
    wanted = []
    for span in segments.index.described(prompt, generations.tolist()):
        stop = span.start + len(span.ids)
        if not taken[span.start : stop].any() and segments.lacks(span):
            wanted.append(span)
    if not wanted:
        return 0

    # One rotation of the whole prompt, at a size that prompts share, and one copy to the host.
    local = _text_positions(backbone, next(iter(prefill.cache.values())).shape[2])
    host = {name: np.asarray(value) for name, value in to_phase_free(backbone.layout, prefill.cache, local).items()}
    stored = 0
    for span in wanted:
        rows = slice(span.start, span.start + len(span.ids))
        kv = {name: value[:layers, 0, rows] for name, value in host.items()}
        stored += segments.add(prompt, span, kv, prefill.residual[rows])
    return stored


class _Execution:
    """State of one prefill: a cache that is filled from left to right, and what it cost.

    Attributes:
      cache: engine frame, {channel: [L,1,S,K,H]}, S a bucket. done: tokens that are final.
      embeddings [T,D], positions [T] or [T,A]: of the prompt, on the host, where slices of any size compile nothing.
      residual: [T,D], what entered the boundary layer. reused, flops, probe_logits: as in the result.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: Tokens,
        thresholds: ReuseThresholds,
        layers: int,
        donors: dict[str, np.ndarray],
        residual: np.ndarray,
        prefix: KV | None,
    ):
        self.backbone, self.thresholds, self.layers, self.dtype = backbone, thresholds, layers, tokens.embeddings.dtype
        self.embeddings, self.positions = np.asarray(tokens.embeddings[0]), np.asarray(tokens.positions)[0]
        self.costs: ForwardCosts = backbone.forward_costs
        T, layout = tokens.embeddings.shape[1], backbone.layout
        self.size = CACHE_SIZES.round_up(T)
        self.done, self.flops = 0, PrefillFlops(0)
        self.reused = np.zeros((layout.layers, T), bool)
        self.residual, self.stored_residual = np.zeros((T, residual.shape[-1]), np.float32), residual
        self.probe_logits: dict[int, np.ndarray] = {}

        # This model's KV has the embeddings' dtype.
        dtype = self.dtype
        self.cache: dict[str, Any] = {}
        for channel in layout.channels:
            shape = (layout.layers, 1, self.size, channel.heads, channel.width)
            self.cache[channel.name] = jnp.zeros(shape, dtype)
        if prefix is not None:
            self.done = next(iter(prefix.values())).shape[2]
            self.cache = {name: _grown(value, self.size).astype(dtype) for name, value in prefix.items()}

        # Stored keys are rotated to this prompt's positions, all at once.
        self.donors: dict[str, Any] = {}
        if donors:
            local, start = _text_positions(backbone, self.size), as_start(layout.rope, 0)
            padded = {name: jnp.asarray(_grown(value, self.size), dtype) for name, value in donors.items()}
            self.donors = rotate_kv(layout, padded, local, start)

    def serve(self, run: PlannedRun) -> SegmentDecision:
        """Computes what stands in front of a run, tests it, and reuses its interior if it passes."""
        begin, end = run.interior
        probes = self.thresholds.probes if self.thresholds.test and not run.equal_prefix else 0
        allowed = int(self.thresholds.failing * 2 * probes)
        kl: list[float] = []

        def decided(accepted: bool, at: Border | None = None) -> SegmentDecision:
            return SegmentDecision(
                run.start, run.stop, (begin, end), accepted, at, tuple(kl), run.equal_prefix, run.generation
            )

        # The left halo is computed with all that is not yet; its last tokens are the reference.
        left = tuple(range(begin - probes, begin))
        if begin > self.done:
            reference = self.compute(begin, left)
            if probes:
                candidate = self._upper(begin - probes, begin, probes)[1]
                self._count(test=self._upper_flops(begin - probes, begin) + 2 * probes * self.costs.logit)
                kl += divergences(reference, candidate)
                if sum(value > self.thresholds.epsilon for value in kl) > allowed:
                    return decided(False, "left")

        # Lower layers from the store, upper layers over them; the right probes ride along as candidates.
        self.cache = _with_donors(self.cache, self.donors, begin, end, self.layers)
        right = tuple(range(end, end + probes))
        self.cache, candidate = self._upper(begin, end + probes, probes)
        interior = self._upper_flops(begin, end)
        self._count(upper=interior)
        self.reused[: self.layers, begin:end] = True
        self.residual[begin:end] = self.stored_residual[begin:end]
        self.done = end
        if not run.halo:
            return decided(True)

        before = self.flops
        reference = self.compute(run.stop, right)
        if not probes:
            return decided(True)

        self._count(test=self._upper_flops(end, end + probes) + 2 * probes * self.costs.logit)
        kl += divergences(reference, candidate)
        if sum(value > self.thresholds.epsilon for value in kl) <= allowed:
            return decided(True)

        # Nothing behind the run has been computed: it is computed again, from its interior on.
        halo = self.flops.bottom - before.bottom
        self._count(upper=-interior, bottom=-halo, discarded=interior + halo)
        self.reused[:, begin:end] = False
        for token in right:
            self.probe_logits.pop(token, None)
        self.done = begin
        self.compute(run.stop, ())
        return decided(False, "right")

    def compute(self, stop: int, probes: tuple[int, ...]) -> Float[Array, "n V"]:
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
        self._count(bottom=self.costs.flops(stop - start, start) + (self.costs.logit if last else 0))
        if not last:
            served = np.asarray(step.logits[0])
            self.probe_logits.update(zip(probes, served, strict=False))
        return step.logits[0]

    def _upper(self, start: int, stop: int, probes: int) -> tuple[dict[str, Any], Float[Array, "n V"]]:
        """Runs tokens from their stored residuals through the upper layers; returns the cache and the last logits."""
        rows = np.arange(stop - start - probes, stop - start, dtype=np.int32)[None]
        step = self._run(start, stop, self.stored_residual[start:stop], rows, start_layer=self.layers)
        return dict(step.cache), step.logits[0]

    def _run(
        self, start: int, stop: int, entering: np.ndarray, rows: np.ndarray, start_layer: int = 0, hidden_at: tuple = ()
    ) -> Recomputed:
        """Runs tokens start … stop-1, whose residual is `entering` [n,D], and writes them into the cache.

        The last one is repeated up to a size that forwards share: it is written several times with the same values.
        """
        size = max(SIZES.round_up(stop - start), SMALLEST)
        places = np.minimum(np.arange(start, start + size), stop - 1)
        embeddings = jnp.asarray(entering[places - start][None], self.dtype)
        taken = Tokens(embeddings, self.positions[places][None])
        slots, part = jnp.asarray(places[None], jnp.int32), {"start_layer": start_layer, "hidden_at": hidden_at}
        return self.backbone.recompute(taken, self.cache, slots, logits=rows, **part)

    def _upper_flops(self, start: int, stop: int) -> int:
        return self.costs.flops(stop - start, start, self.layers)

    def _count(self, **more: int) -> None:
        self.flops = self.flops._replace(**{name: getattr(self.flops, name) + value for name, value in more.items()})


def divergences(reference: Float[AnyArray, "n V"], candidate: Float[AnyArray, "n V"]) -> list[float]:
    """Computes KL(reference ‖ candidate) of each row, in nats."""
    return np.asarray(_divergences(reference, candidate)).tolist()


@jax.jit
def _divergences(reference: Float[AnyArray, "n V"], candidate: Float[AnyArray, "n V"]) -> Float[Array, " n"]:
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
    segments: TenantSegments, plan: list[PlannedRun], tokens: int, width: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Reads the KV [R,1,T,K,H] and residuals [T,D] of all planned runs, at their tokens of the prompt."""
    donors: dict[str, np.ndarray] = {}
    residual = np.zeros((tokens, width), np.float32)
    for run in plan:
        for piece in run.pieces:
            kv, entering = segments.read(piece.span, TokenRange(piece.offset, piece.offset + piece.length))
            for name, value in kv.items():
                if name not in donors:
                    donors[name] = np.zeros((value.shape[0], 1, tokens, *value.shape[2:]), np.float32)
                donors[name][:, 0, piece.start : piece.stop] = value
            residual[piece.start : piece.stop] = entering
    return donors, residual


def _text_positions(backbone: Backbone, size: int) -> np.ndarray:
    """Returns positions 0 … size-1 of text: int32 [S], or [S,A], where all axes advance alike."""
    positions, axes = np.arange(size, dtype=np.int32), backbone.layout.rope.axes
    return positions if axes is None else np.repeat(positions[:, None], axes, axis=1)


def _grown(value: Any, size: int) -> Any:
    """Pads the token axis of [L,1,T,K,H] with zeros to a size."""
    numbers = np if isinstance(value, np.ndarray) else jnp
    return numbers.pad(value, ((0, 0), (0, 0), (0, size - value.shape[2]), (0, 0), (0, 0)))
