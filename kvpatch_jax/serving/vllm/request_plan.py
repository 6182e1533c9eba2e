"""The plan of one request: which stored chunks serve it, how, what that may lose, and the salt that it needs."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ...cache import Identities, Way, Ways, digest_of, encoded, identity, prefilled, slides
from ...plan import Certificate, is_promised
from ...window import Promise
from .prompt_history import PromptHistory
from .segments import PromptSegment
from .settings import ConnectorConfig, RequestOptions
from .survivors import Survivor

CLOSEST = ("leading", "restored", "stored", "orbit", "survivor", "mean", "near", "bare")
"""Points of a chunk, the one that is closest to a prefill first, as far as nothing measured says otherwise."""
EXACT = ("leading", "restored")
CANONICAL = ("leading", "stored", "orbit", "bare")
"""Points that place a canonical, with a patch or without. The others place KV of a forward behind other chunks."""


class StockedPatch(NamedTuple):
    """A stored patch: its digest, the rank under which a certificate lists it, and whether it is of several orders."""

    digest: str
    rank: int
    orbit: bool = False


class ChunkStep(NamedTuple):
    """The way in which a plan serves one chunk.

    Attributes:
      segment: the chunk.
      point: "leading" or "restored" (exact); else an operating point, such as "stored" (canonical and a patch),
        "near" (a stored prefill behind the same nearest chunk), "survivor" or "bare" (the canonical alone).
      identity: of the KV that it places.
      patch: digest of the patch, or None.
      rank: rank of the patch, or 0.
      slides: of a survivor: how many chunks have left that it was computed behind.
      inherited: of a survivor: ways of the approximate chunks that it was computed behind.
    """

    segment: PromptSegment
    point: str
    identity: str
    patch: str | None = None
    rank: int = 0
    slides: int = 0
    inherited: Ways = ()

    @property
    def exact(self) -> bool:
        """Whether the chunk is served as a prefill computes it."""
        return self.point in EXACT

    def ways(self, promise: Promise) -> Ways:
        """Returns the points and ranks by which a certificate bounds it; none of a chunk that is as promised."""
        # A survivor in front of which nothing has left is what the engine would compute behind chunks served so.
        kept = self.point == "survivor" and not self.slides
        rank = self.slides if self.point == "survivor" else self.rank
        own = () if kept or is_promised(self.point, promise) else ((self.point, rank),)
        return own + tuple(way for way in self.inherited if not is_promised(way[0], promise))


@runtime_checkable
class ChunkCatalog(Protocol):
    """What one tenant has stored of the chunks of one prompt."""

    def has_canonical(self, id: str) -> bool:
        """Returns whether a chunk's canonical is available."""
        ...

    def patches(self, id: str, antecedent: tuple[str, ...]) -> Sequence[StockedPatch]:
        """Returns a chunk's patches that were formed behind this antecedent, prefilled, or behind orders of it."""
        ...

    def prefills(self, index: int) -> Mapping[str, str]:
        """Returns the identities of a chunk's stored prefills by operating point.

        "restored" is the exact prefill behind the chunks in front of it.
        """
        ...

    def survivor(self, index: int, front: Identities) -> Survivor | None:
        """Returns what an earlier request left of a chunk, if this one's front is a part of that one's."""
        ...

    def provide(self, step: ChunkStep) -> bool:
        """Reads what a step places. Returns whether it is there and fits the engine."""
        ...


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """The chunks from the start of a prompt that are served from the store; the engine prefills the rest.

    Attributes:
      steps: one per chunk that is served, in order.
      kl: nats that the answer may lose; 0 if every chunk is exact, None if nothing bounds the loss.
      why: why the plan ends where it does, for people; empty if it serves every chunk.
    """

    steps: tuple[ChunkStep, ...] = ()
    kl: float | None = 0.0
    why: str = ""

    @property
    def matched(self) -> int:
        """Number of tokens that are served."""
        return self.steps[-1].segment.end if self.steps else 0

    @property
    def exact(self) -> bool:
        """Whether every chunk is served as a prefill computes it."""
        return all(step.exact for step in self.steps)

    def cut(self, end: int) -> "RequestPlan":
        """Returns the part of the plan that was carried out if the engine computed the tokens from `end` on itself.

        If any of the remaining chunks is approximate, the bound stays: the engine's own KV is conditioned on it.
        """
        steps = [step for step in self.steps if step.segment.begin < end]
        if steps and steps[-1].segment.end > end:
            steps[-1] = steps[-1]._replace(segment=steps[-1].segment._replace(end=end))
        cut = dataclasses.replace(self, steps=tuple(steps))
        return dataclasses.replace(cut, kl=0.0) if cut.exact else cut

    def exact_part(self, why: str) -> "RequestPlan":
        """Returns the exact chunks from the start of the prompt alone, and why the others are left out."""
        steps = tuple(itertools.takewhile(lambda step: step.exact, self.steps))
        return RequestPlan(steps, 0.0, why)

    def salt(self, config: ConnectorConfig, options: RequestOptions, own_salt: str | None) -> str | None:
        """Returns the salt under which the engine may cache this request's blocks.

        Everything after an approximate chunk is approximate too, whereas an engine's prefix cache compares tokens only.
        The salt lets requests with the same plan share blocks, and no others, whatever salt a request came with.

        Args:
          own_salt: the request's own salt, returned if the plan is exact.
        """
        if self.exact:
            return own_salt
        fields = [b"plan", encoded(config.backbone), encoded(options.tenant), encoded(own_salt or "")]
        fields += [encoded(step.identity) for step in self.steps]
        return f"kvpatch-{digest_of(fields, size=16)}"


def plan_request(
    history: PromptHistory,
    catalog: ChunkCatalog,
    config: ConnectorConfig,
    options: RequestOptions,
    certificate: Certificate | None = None,
) -> RequestPlan:
    """Plans as many chunks from the start of the prompt as are stored and may be served.

    A chunk is exact if it is first and not encoded, or if a prefill of it is stored behind exactly the chunks in front.
    Else it is served in the way with the least bound; without a certificate, in the first one of `CLOSEST`. Approximate
    chunks are served as far as the certificate bounds the answer within the limits of the request and the operator,
    including the loss of chunks that the engine prefills behind them. If both allow "blind", all of them are served.
    """
    segments = history.segments

    # A certificate bounds nothing for a prompt unlike those that it was measured on. The first chunk is exact, so only
    # its tokens count.
    beyond = None
    if certificate is not None and segments:
        beyond = certificate.beyond(segments[-1].end, [(segment.span, segment.modality) for segment in segments[1:]])
    limits = _Limits(config, options, None if beyond else certificate)
    steps = _available_steps(history, catalog, limits)

    why = "" if len(steps) == len(segments) else f"chunk {len(steps) + 1} of {len(segments)} is not stored"
    if options.policy == "exact" and steps and why:
        why = f"chunk {len(steps) + 1} of {len(segments)} is not stored behind those in front of it"
    if options.policy == "exact" and config.encoding is not None:
        why = "encoded canonicals are approximate"

    # Take the longest prefix of the steps whose loss is within the limits.
    losses = _losses(steps, len(segments), limits.certificate, options.promise)
    for count in range(len(steps), 0, -1):
        kl, flips = losses[count - 1]
        if limits.allow(kl, flips):
            return RequestPlan(tuple(steps[:count]), kl, why)
        why = f"chunk {count} of {len(segments)} is not certified within {limits.max_kl:g} nats"
        why += f": {beyond}" if beyond else ""
    return RequestPlan((), 0.0, why)


def worth_learning(
    history: PromptHistory,
    plan: RequestPlan,
    lacking: Collection[int],
    config: ConnectorConfig,
    options: RequestOptions,
    certificate: Certificate | None,
) -> int | None:
    """Finds a chunk for which a request is better prefilled exactly, so that what it leaves can be stored.

    What is prefilled behind approximate chunks is not stored. Where a plan of those ends in front of a chunk that comes
    again and again, every request like this one would prefill that chunk anew.

    Args:
      lacking: indices of chunks that come again behind their nearest, and are not stored behind it.

    Returns:
      The index of a chunk that the plan does not serve, and that its prefill would serve within the limits; or None.
    """
    if plan.exact or certificate is None or (options.policy, options.promise) != ("approximate", "forget"):
        return None
    others, limits = max(0, len(history.segments) - 2), _Limits(config, options, certificate)
    if not limits.allow(certificate.bound("near", behind=others), certificate.flips("near", behind=others)):
        return None
    return next((index for index in lacking if index >= len(plan.steps)), None)


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What may be served to a request, by the operator, the request and the certificate, if that bounds anything."""

    config: ConnectorConfig
    options: RequestOptions
    certificate: Certificate | None

    @property
    def max_kl(self) -> float:
        """Nats that an answer may lose."""
        own, most = self.options.kl, self.config.most_kl
        return most if own is None else min(own, most)

    def allow(self, kl: float | None, flips: float | None) -> bool:
        """Returns whether an answer with these bounds may be served."""
        if kl == 0.0 or (self.options.policy == "blind" and self.config.uncertified):
            return True
        most = self.options.flips
        return kl is not None and kl <= self.max_kl and (most is None or (flips is not None and flips <= most))


def identities_of(history: PromptHistory, steps: Sequence[ChunkStep]) -> Identities:
    """Returns the identities of a prompt's chunks, of which the engine prefills those behind the steps of a plan."""
    return prefilled(history.ids[len(steps) :], tuple(step.identity for step in steps))


def _available_steps(history: PromptHistory, catalog: ChunkCatalog, limits: _Limits) -> list[ChunkStep]:
    """Returns the best available step for every chunk, up to the first one that is not stored."""
    steps, front = list[ChunkStep](), Identities()
    for _ in history.segments:
        step = _best_step(history, front, catalog, limits)
        if step is None:
            break
        steps.append(step)
        front = (*front, step.identity)
    return steps


def _best_step(history: PromptHistory, front: Identities, catalog: ChunkCatalog, limits: _Limits) -> ChunkStep | None:
    """Returns the best available step for the next chunk; None if there is none."""
    options, others = limits.options, max(0, len(history.segments) - 2)

    def bound(step: ChunkStep) -> tuple[float, int]:
        kl = _bound(step, others, limits.certificate, options.promise)
        remembered = options.promise == "remember" and step.point == "survivor"
        return math.inf if kl is None else kl, -1 if remembered else CLOSEST.index(step.point)

    # With encoded canonicals none of them is exact.
    is_encoded = limits.config.encoding is not None
    candidates = _candidates(history, front, catalog, options, is_encoded)
    # What is listed may be damaged, or not fit the engine: then the next best.
    return next((step for step in sorted(candidates, key=bound) if catalog.provide(step)), None)


def _candidates(
    history: PromptHistory, front: Identities, catalog: ChunkCatalog, options: RequestOptions, encoded: bool
) -> list[ChunkStep]:
    """Lists the ways in which the next chunk can be served: an exact one, or all others.

    Args:
      front: identities of the chunks in front, as they are served.
    """
    index, exact_only = len(front), options.policy == "exact"
    segment, prefill = history.segments[index], history.exact[index]
    bare = ChunkStep(segment, "bare", identity(segment.id, "bare"))
    if index == 0:
        is_served = not (encoded and exact_only) and catalog.has_canonical(segment.id)
        return [bare if encoded else ChunkStep(segment, "leading", prefill)] if is_served else []

    # Behind exact chunks, a prefill that was computed behind them is what the engine would compute.
    is_exact, prefills = front == history.exact[:index], dict(catalog.prefills(index))
    candidates = []
    if prefills.pop("restored", None) is not None:
        # Behind approximate chunks it is at least as close as what is near.
        candidates.append(ChunkStep(segment, "restored" if is_exact else "near", prefill))
    survivor = catalog.survivor(index, front)
    if survivor is not None:
        point = "restored" if is_exact and survivor.identity == prefill else "survivor"
        left = slides(survivor.seen, front) or 0
        candidates.append(ChunkStep(segment, point, survivor.identity, slides=left, inherited=survivor.ways))
    exact = [step for step in candidates if step.exact]
    # A window that remembers goes on with what it has, of which what stands behind it was computed.
    remembered = options.promise == "remember" and survivor is not None
    if exact_only or (exact and not remembered):
        return exact

    candidates += [ChunkStep(segment, point, stored) for point, stored in prefills.items()]
    if catalog.has_canonical(segment.id):
        patches = catalog.patches(segment.id, history.ids[:index])
        for point, is_orbit in (("stored", False), ("orbit", True)):
            of_point = [patch for patch in patches if patch.orbit == is_orbit]
            if of_point:
                largest = max(of_point, key=lambda patch: (patch.rank, patch.digest))
                patched = identity(segment.id, f"patch {largest.digest}")
                candidates.append(ChunkStep(segment, point, patched, largest.digest, largest.rank))
        candidates.append(bare)
    return candidates


def _bound(step: ChunkStep, others: int, certificate: Certificate | None, promise: Promise) -> float | None:
    """Bounds the KL, in nats, of an answer behind one such chunk and as many others; None if nothing does."""
    kl = 0.0
    for point, rank in step.ways(promise):
        bound = None if certificate is None else certificate.bound(point, rank, behind=others, promise=promise)
        if bound is None:
            return None
        kl = max(kl, bound)
    return kl


def _losses(
    steps: Sequence[ChunkStep], count: int, certificate: Certificate | None, promise: Promise
) -> list[tuple[float | None, float | None]]:
    """Bounds the loss of an answer if the first steps serve the first of `count` chunks and the engine prefills others.

    It is that of a prompt all of whose chunks, from the first approximate one on, are served in the worst of these
    ways, as `Certificate.together` says.

    Returns:
      For one step, two, and so on: bounds of the KL in nats and of the share of flipped tokens; 0 if
      every step is as promised, None if nothing bounds it.
    """
    losses, known, others = list[tuple[float | None, float | None]](), set[Way](), 0
    kl: float | None = 0.0
    flips: float | None = 0.0
    for place, step in enumerate(steps):
        for way in step.ways(promise):
            if way in known:
                continue
            if not known:  # all behind the first approximate chunk are approximate too, those of the engine included
                others = count - place - 1
            known.add(way)
            if certificate is None:
                kl = flips = None
            else:
                kl = _worse(kl, certificate.bound(*way, behind=others, promise=promise))
                flips = _worse(flips, certificate.flips(*way, behind=others, promise=promise))
        losses.append((kl, flips))
    return losses


def _worse(bound: float | None, other: float | None) -> float | None:
    return None if bound is None or other is None else max(bound, other)
