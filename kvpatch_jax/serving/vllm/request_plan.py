"""The plan of one request: which stored chunks serve it, how, what that may lose, and the salt that it needs."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ...cache import digest_of, encoded
from ...plan import Certificate
from .segments import PromptSegment
from .settings import ConnectorConfig, RequestOptions


class StockedPatch(NamedTuple):
    """A stored patch: its digest, and the rank under which a certificate lists it."""

    digest: str
    rank: int


@runtime_checkable
class ChunkCatalog(Protocol):
    """The chunks and patches of one tenant that a plan may use."""

    def has_canonical(self, id: str) -> bool:
        """Returns whether a chunk's canonical is available."""
        ...

    def patches(self, id: str, antecedent: tuple[str, ...]) -> Sequence[StockedPatch]:
        """Returns a chunk's patches that were formed behind exactly this antecedent, prefilled."""
        ...


class ChunkStep(NamedTuple):
    """The way in which a plan serves one chunk.

    Attributes:
      segment: the chunk.
      point: "leading" (exact), "stored" (canonical and a patch) or "bare" (the canonical alone).
      patch: digest of the patch, or None.
      rank: rank of the patch, or 0.
    """

    segment: PromptSegment
    point: str
    patch: str | None = None
    rank: int = 0

    @property
    def exact(self) -> bool:
        """Whether the chunk is served as a prefill computes it."""
        return self.point == "leading"


@dataclasses.dataclass(frozen=True)
class RequestPlan:
    """The chunks from the start of a prompt that are served from the store; the engine prefills the rest.

    Attributes:
      steps: one per chunk, from the start of the prompt without a gap.
      kl: nats that the answer may lose; 0 if every chunk is exact, None if nothing bounds the loss.
      why: why the plan ends where it does, for people; empty if it reaches the question.
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
        for step in self.steps:
            fields += [encoded(step.segment.id), encoded(step.point), encoded(step.patch or "")]
        return f"kvpatch-{digest_of(fields, size=16)}"


def plan_request(
    segments: Sequence[PromptSegment],
    catalog: ChunkCatalog,
    config: ConnectorConfig,
    options: RequestOptions,
    certificate: Certificate | None = None,
) -> RequestPlan:
    """Plans as many chunks from the start of the prompt as are stored and may be served.

    The first chunk is exact unless it is encoded: it was prefilled alone, and nothing precedes it. Every later chunk is
    its canonical with the largest patch that was formed behind the chunks before it, or without a patch if there is
    none. Approximate chunks are served as far as the certificate bounds the answer within the limits of the request and
    the operator, including the loss of chunks that the engine prefills behind them. If both allow "blind", all of them
    are served.
    """
    steps = _available_steps(segments, catalog, options, encoded=config.encoding is not None)

    # A certificate bounds nothing for a prompt unlike those that it was measured on. The first chunk is exact, so only
    # its tokens count.
    beyond = None
    if certificate is not None and segments:
        beyond = certificate.beyond(segments[-1].end, [(segment.span, segment.modality) for segment in segments[1:]])
    certificate = None if beyond else certificate

    why = "" if len(steps) == len(segments) else f"chunk {len(steps) + 1} of {len(segments)} is not stored"
    if options.policy == "exact" and steps and why:
        why = "what stands behind another chunk is approximate"
    if options.policy == "exact" and config.encoding is not None:
        why = "encoded canonicals are approximate"

    # Take the longest prefix of the steps whose loss is within the limits.
    blind = options.policy == "blind" and config.uncertified
    max_kl = config.most_kl if options.kl is None else min(options.kl, config.most_kl)
    for count in range(len(steps), 0, -1):
        kl, flips = _certified_loss(steps[:count], len(segments), certificate)
        within_kl = kl is not None and kl <= max_kl
        within_flips = options.flips is None or (flips is not None and flips <= options.flips)
        if kl == 0.0 or blind or (within_kl and within_flips):
            return RequestPlan(tuple(steps[:count]), kl, why)
        why = f"chunk {count} of {len(segments)} is not certified within {max_kl:g} nats"
        why += f": {beyond}" if beyond else ""

    return RequestPlan((), 0.0, why)


def _available_steps(
    segments: Sequence[PromptSegment], catalog: ChunkCatalog, options: RequestOptions, encoded: bool
) -> list[ChunkStep]:
    """Returns the best available step for every chunk, up to the first one that is not stored.

    Args:
      encoded: whether canonicals are in few bits, so that none of them is exact.
    """
    steps: list[ChunkStep] = []
    for index, segment in enumerate(segments):
        exact = index == 0 and not encoded
        if (not exact and options.policy == "exact") or not catalog.has_canonical(segment.id):
            break
        if index == 0:
            steps.append(ChunkStep(segment, "leading" if exact else "bare"))
            continue

        patches = catalog.patches(segment.id, tuple(before.id for before in segments[:index]))
        if patches:
            largest = max(patches, key=lambda patch: (patch.rank, patch.digest))
            steps.append(ChunkStep(segment, "stored", largest.digest, largest.rank))
        else:
            steps.append(ChunkStep(segment, "bare"))

    return steps


def _certified_loss(
    steps: Sequence[ChunkStep], count: int, certificate: Certificate | None
) -> tuple[float | None, float | None]:
    """Bounds the loss of an answer if the first of `count` chunks are served by `steps` and the engine prefills others.

    Returns:
      Bounds of the KL in nats and of the share of flipped tokens; 0 if every step is exact, None if nothing bounds it.
    """
    exact = [step.exact for step in steps]
    if all(exact):
        return 0.0, 0.0
    if certificate is None:
        return None, None

    served = [(step.point, step.rank) for step in steps]
    kl = certificate.together([*served, *([("prefill", 0)] * (count - len(steps)))])

    # Every chunk after the first approximate one is approximate too, those that the engine prefills included.
    others = count - exact.index(False) - 1

    flips = 0.0
    for step in steps:
        if not step.exact:
            bound = certificate.flips(step.point, step.rank, behind=others)
            if bound is None:
                return kl, None
            flips = max(flips, bound)

    return kl, flips
