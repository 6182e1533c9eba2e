"""The plan of one request: which stored chunks serve it, how, what that may lose, and the salt that it needs."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ...cache import Chunk, Identities, Likeness, Ways, digest_of, encoded, identity, likeness_keys, prefilled
from ...plan import Certificate, Goal, Losses, Option, choose
from ...plan.choice import Options
from ...window import Promise
from .config import ConnectorConfig, RequestOptions
from .segments import PromptSegment

EXACT = ("leading", "restored")
"""Points that place what a prefill computes."""


class SurvivorKey(NamedTuple):
    """Names what a request leaves of a chunk to the next request of its agent.

    Attributes:
      tenant: owner of the chunk. agent: whose window it is in, as its requests say.
      place: digest of the chunk, of the pinned lead, and of how often the chunk comes before.
    """

    tenant: str
    agent: str
    place: str


class Survivor(NamedTuple):
    """A chunk's KV as a request left it.

    Attributes:
      chunk: its KV, position-free, on the host.
      identity: of that KV.
      seen: identities of the KV that it was computed behind.
      ways: points and ranks of the approximate ones among those, other than survivors.
    """

    chunk: Chunk
    identity: str
    seen: Identities
    ways: Ways = ()


class PromptHistory:
    """The chunks of one prompt with the identities that an exact prefill of it gives them.

    The *lead* of a prompt is the texts in front of its first image; of a prompt without images, its first chunk.
    Agents keep it while everything behind it comes and goes.

    Attributes:
      segments: every chunk, from the start of the prompt.
      tenant, agent: whose prompt it is.
      ids: of the chunks.
      lead: number of chunks in the lead.
    """

    def __init__(self, segments: Sequence[PromptSegment], tenant: str = "default", agent: str = ""):
        self.segments, self.tenant, self.agent = tuple(segments), tenant, agent
        self.ids = tuple(segment.id for segment in segments)
        texts = next((place for place, segment in enumerate(segments) if segment.modality != "text"), 0)
        self.lead = max(texts, 1)

    @functools.cached_property
    def exact(self) -> Identities:
        """Identities of the chunks where all of them are prefilled."""
        return prefilled(self.ids)

    def alike(self, index: int) -> dict[Likeness, str]:
        """Returns the keys of stored prefills that were computed behind chunks like these, as `likeness_keys`."""
        return likeness_keys(self.exact[: min(self.lead, index)], self.ids[index - 1]) if index else {}

    def survivor_key(self, index: int) -> SurvivorKey:
        """Returns the name of what a request leaves of a chunk: one version behind a lead, per agent and repeat."""
        id, lead = self.ids[index], self.exact[: min(self.lead, index)]
        return SurvivorKey(self.tenant, self.agent, identity(id, f"repeat {self._repeats[index]}", lead))

    @functools.cached_property
    def _repeats(self) -> list[int]:
        """How many chunks with the same content precede each."""
        counts, repeats = collections.Counter[str](), []
        for id in self.ids:
            repeats.append(counts[id])
            counts[id] += 1
        return repeats


class ChunkStep(NamedTuple):
    """The way in which a plan serves one chunk.

    Attributes:
      segment: the chunk.
      point: "leading" or "restored" (exact); else an operating point, such as "stored" (canonical and a patch),
        "near" (a stored prefill behind the same nearest chunk), "survivor" or "bare" (the canonical alone).
      identity: of the KV that it places.
      rank: of its patch, or 0.
      ways: by which a certificate bounds it; none of a chunk that is as promised.
    """

    segment: PromptSegment
    point: str
    identity: str
    rank: int = 0
    ways: Ways = ()

    @property
    def exact(self) -> bool:
        """Whether the chunk is served as a prefill computes it."""
        return self.point in EXACT


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """The chunks from the start of a prompt that are served from the store; the engine prefills the rest.

    Attributes:
      steps: one per chunk that is served, in order.
      kl: nats that the answer may lose; 0 if every chunk is as promised, None if nothing bounds the loss.
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

    def salt(self, backbone: str, own_salt: str | None) -> str | None:
        """Returns the salt under which the engine may cache this request's blocks.

        Everything after an approximate chunk is approximate too, whereas an engine's prefix cache compares tokens only.
        The salt lets requests with the same plan share blocks, and no others, whatever salt a request came with.

        Args:
          own_salt: the request's own salt, returned if the plan is exact.
        """
        if self.exact:
            return own_salt
        fields = [b"plan", encoded(backbone), encoded(own_salt or "")]
        fields += [encoded(step.identity) for step in self.steps]
        return f"kvpatch-{digest_of(fields, size=16)}"


@runtime_checkable
class ChunkCatalog(Protocol):
    """What one tenant has stored of the chunks of one prompt (`catalog.StoreCatalog`)."""

    forwards: list[Option]
    """A forward of every chunk."""

    def options(self, goal: Goal, promise: Promise) -> Options:
        """Returns the options of every chunk, as `choose` takes them; costs are tokens to prefill."""
        ...

    def provide(self, chosen: Sequence[Option]) -> bool:
        """Reads what options place, from the first chunk on. False: some of it is lacking, and is offered no more."""
        ...


def plan_request(
    history: PromptHistory,
    catalog: ChunkCatalog,
    config: ConnectorConfig,
    options: RequestOptions,
    certificate: Certificate | None = None,
) -> RequestPlan:
    """Plans chunks from the start of the prompt by `choose`, the fewest tokens being prefilled within the goal.

    With "certified" the bound includes the loss of chunks that the engine prefills behind approximate ones.
    """
    segments, count = history.segments, len(history.segments)
    goal = goal_of(config, options, certificate)
    # A certificate bounds nothing for a prompt unlike those that it was measured on. The first chunk is exact, so only
    # its tokens count.
    beyond = None
    if certificate is not None and segments:
        beyond = certificate.beyond(segments[-1].end, [(segment.span, segment.modality) for segment in segments[1:]])
    losses = Losses(certificate, options.promise, count, beyond)

    # What is listed may be damaged, or not fit the engine: then the next best.
    offered = catalog.options(goal, options.promise)
    while True:
        chosen, kl = choose(count, offered, losses, goal, forwards=catalog.forwards)
        served = list(itertools.takewhile(lambda option: not option.is_forward, chosen))
        if catalog.provide(served):
            break

    pairs = zip(segments, served, strict=False)
    steps = tuple(ChunkStep(segment, option.point, option.made, option.rank, option.ways) for segment, option in pairs)
    end, why = len(steps), ""
    if end < count:
        why = f"chunk {end + 1} of {count} is not stored"
        is_offered = any(not option.is_forward for option in offered(end, served))
        if goal.reuse == "certified" and is_offered:
            why = f"chunk {end + 1} of {count} is not certified within {goal.kl:g} nats"
            why += f": {beyond}" if beyond else ""
        elif options.reuse == "certified" and certificate is None:
            why = f"chunk {end + 1} of {count} is not certified within {config.kl:g} nats: there is no certificate"
        elif goal.reuse == "exact" and steps:
            why += " behind those in front of it"
    return RequestPlan(steps, kl, why)


def goal_of(config: ConnectorConfig, options: RequestOptions, certificate: Certificate | None) -> Goal:
    """Returns the goal of a request within the operator's limits: without a certificate nothing is certified."""
    if options.reuse == "certified" and certificate is None:
        return Goal()
    return Goal(options.reuse, config.kl if options.kl is None else min(options.kl, config.kl))


def learning_allowed(
    history: PromptHistory, config: ConnectorConfig, options: RequestOptions, certificate: Certificate | None
) -> bool:
    """Returns whether a prefill behind the same nearest chunk would serve a request within its limits."""
    goal = goal_of(config, options, certificate)
    if certificate is None or (goal.reuse, options.promise) != ("certified", "forget"):
        return False
    bound = certificate.bound("near", behind=max(0, len(history.segments) - 2))
    return bound is not None and bound <= goal.kl


def identities_of(history: PromptHistory, steps: Sequence[ChunkStep]) -> Identities:
    """Returns the identities of a prompt's chunks, of which the engine prefills those behind the steps of a plan."""
    return prefilled(history.ids[len(steps) :], tuple(step.identity for step in steps))
