"""Which way each chunk of a request is served, how far the prompt is matched, and the salt that this asks for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...cache import digest_of, encoded
from ...plan import Certificate
from .segments import PromptSegment
from .settings import ConnectorConfig, RequestOptions


class StockedPatch(NamedTuple):
    """A stored patch: its digest, and its rank as a certificate is asked for it."""

    digest: str
    rank: int


@runtime_checkable
class ChunkCatalog(Protocol):
    """What a store has of one tenant, as a plan looks it up."""

    def has_canonical(self, id: str) -> bool:
        """Whether it has a chunk's canonical."""
        ...

    def patches(self, id: str, front: tuple[str, ...]) -> Sequence[StockedPatch]:
        """A chunk's patches that were formed behind exactly these, prefilled."""
        ...


class ChunkStep(NamedTuple):
    """How one chunk is served.

    Attributes:
      segment: which. point: "leading" (exact), "stored" (canonical and a patch) or "bare" (the canonical alone).
      patch, rank: digest and rank of its patch; None and 0 without one.
    """

    segment: PromptSegment
    point: str
    patch: str | None = None
    rank: int = 0

    @property
    def exact(self) -> bool:
        """Whether it is served as a prefill computes it."""
        return self.point == "leading"


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """How the front of one request is served: from the first token on, without gaps. The rest is the engine's.

    Attributes:
      steps: of the chunks that are served, in order. kl: bound of an answer's loss in nats; 0 where all is exact; None
        where nothing bounds it. why: in what the plan ends before the question, for people.
    """

    steps: tuple[ChunkStep, ...] = ()
    kl: float | None = 0.0
    why: str = ""

    @property
    def matched(self) -> int:
        """Tokens that are served."""
        return self.steps[-1].segment.end if self.steps else 0

    @property
    def exact(self) -> bool:
        """Whether every chunk is served as a prefill computes it."""
        return all(step.exact for step in self.steps)

    def cut(self, end: int) -> "RequestPlan":
        """What is left of it where tokens from `end` on were computed by the engine after all.

        The bound is kept where anything approximate is: what the engine computed stands behind that.
        """
        steps = [step for step in self.steps if step.segment.begin < end]
        if steps and steps[-1].segment.end > end:
            steps[-1] = steps[-1]._replace(segment=steps[-1].segment._replace(end=end))
        cut = dataclasses.replace(self, steps=tuple(steps))
        return dataclasses.replace(cut, kl=0.0) if cut.exact else cut

    def salt(self, settings: ConnectorConfig, asked: RequestOptions, own: str | None) -> str | None:
        """The salt under which the engine may cache this request's blocks.

        Everything behind an approximate chunk is approximate too, and an engine's prefix cache asks for tokens alone.
        So blocks are shared by requests of one plan and by no others, whatever salt a request came with.

        Args:
          own: the request's own salt.

        Returns:
          `own` where the plan is exact.
        """
        if self.exact:
            return own
        fields = [b"plan", encoded(settings.backbone), encoded(asked.tenant), encoded("" if own is None else own)]
        for step in self.steps:
            fields += [encoded(step.segment.id), encoded(step.point), encoded(step.patch or "")]
        return f"kvpatch-{digest_of(fields, size=16)}"


def plan_request(
    segments: Sequence[PromptSegment],
    stored: ChunkCatalog,
    settings: ConnectorConfig,
    asked: RequestOptions,
    certificate: Certificate | None = None,
) -> RequestPlan:
    """Plans the longest front that is stored and may be served; of several patches the largest.

    A chunk that leads is exact: it was prefilled alone, and nothing stands in front of it. Any other is the canonical
    with a patch that was formed behind those in front, or without: as far as the certificate bounds the answer within
    what the request and the operator allow, the chunks that the engine prefills behind them included; or, where both
    say "blind", all of them.
    """
    best = _truest(segments, stored, asked)
    beyond = None
    if certificate is not None and segments:
        # The leading chunk is what a window pins: it is exact, and counts among its tokens alone.
        beyond = certificate.beyond(segments[-1].end, [(own.span, own.modality) for own in segments[1:]])
    certificate = None if beyond else certificate
    bound = lambda steps: bound_of([(step.point, step.rank) for step in steps], len(segments), certificate)
    flips = lambda steps: _flips_of([(step.point, step.rank) for step in steps], len(segments), certificate)
    missing = "" if len(best) == len(segments) else f"chunk {len(best) + 1} of {len(segments)} is not stored"
    if asked.policy == "exact" and best and missing:
        missing = "what stands behind another chunk is approximate"
    for count in range(len(best), 0, -1):
        steps = best[:count]
        kl = bound(steps)
        if _allowed(kl, lambda own=steps: flips(own), settings, asked):
            return RequestPlan(tuple(steps), kl, missing)
        missing = f"chunk {count} of {len(segments)} is not certified within {_most_kl(settings, asked):g} nats"
        missing += f": {beyond}" if beyond else ""
    return RequestPlan((), 0.0, missing)


def _truest(segments: Sequence[PromptSegment], stored: ChunkCatalog, asked: RequestOptions) -> list[ChunkStep]:
    """Every chunk from the front in the truest way that is stored, up to the first that is not."""
    steps: list[ChunkStep] = []
    for place, segment in enumerate(segments):
        if (place and asked.policy == "exact") or not stored.has_canonical(segment.id):
            break
        if place == 0:
            steps.append(ChunkStep(segment, "leading"))
            continue
        patches = stored.patches(segment.id, tuple(own.id for own in segments[:place]))
        if patches:
            found = max(patches, key=lambda patch: (patch.rank, patch.digest))
            steps.append(ChunkStep(segment, "stored", found.digest, found.rank))
        else:
            steps.append(ChunkStep(segment, "bare"))
    return steps


def bound_of(served: Sequence[tuple[str, int]], count: int, certificate: Certificate | None) -> float | None:
    """Bounds an answer behind `count` chunks of which the first are served so and the engine prefills the others.

    Returns:
      Nats; 0 where all is exact; None where nothing bounds it.
    """
    if all(point == "leading" for point, _ in served):
        return 0.0
    if certificate is None:
        return None
    return certificate.together([*served, *([("prefill", 0)] * (count - len(served)))])


def _flips_of(served: Sequence[tuple[str, int]], count: int, certificate: Certificate | None) -> float | None:
    approximate = [way for way in served if way[0] != "leading"]
    if not approximate:
        return 0.0
    if certificate is None:
        return None
    others = count - next(place for place, way in enumerate(served) if way[0] != "leading") - 1
    found = [certificate.flips(point, rank, behind=others) for point, rank in approximate]
    return None if None in found else max(own for own in found if own is not None)


def _allowed(kl: float | None, flips: Callable[[], Any], settings: ConnectorConfig, asked: RequestOptions) -> bool:
    if kl == 0.0 or (asked.policy == "blind" and settings.uncertified):
        return True
    if kl is None or kl > _most_kl(settings, asked):
        return False
    if asked.flips is None:
        return True
    found = flips()
    return found is not None and found <= asked.flips


def _most_kl(settings: ConnectorConfig, asked: RequestOptions) -> float:
    """Nats that an answer may lose: never more than the operator allows."""
    return settings.most_kl if asked.kl is None else min(asked.kl, settings.most_kl)
