"""The state of one request on the scheduler's side, until it is finished."""

import dataclasses
from typing import Any, NamedTuple

from .admission import WantedChunks
from .messages import ChunkPayload
from .prompt_history import PromptHistory
from .request_plan import ChunkStep, RequestPlan
from .segments import PromptSegment
from .settings import RequestOptions


class PlannedRequest(NamedTuple):
    """A plan with the data that it needs, made on a reading thread.

    Attributes:
      plan: the plan.
      payloads: chunks and patches that the plan places.
      wanted: what is to be stored, if the request is prefilled exactly.
      salt: salt that the request needs.
    """

    plan: RequestPlan = RequestPlan()
    payloads: tuple[ChunkPayload, ...] = ()
    wanted: WantedChunks = WantedChunks()
    salt: str | None = None

    def without_approximate(self, own_salt: str | None) -> "PlannedRequest":
        """Returns the same with the exact chunks from the start of the prompt alone."""
        plan = self.plan.exact_part("the engine has as much of it in its own cache")
        return PlannedRequest(plan, self.payloads[: len(plan.steps)], self.wanted, own_salt)


@dataclasses.dataclass
class RequestState:
    """State of a request until it is finished.

    Attributes:
      request: the engine's object.
      options: the request's options.
      history: the prompt's chunks.
      own_salt: the salt that it came with.
      planned: its plan. The payloads are kept until their load was commanded.
      settled: whether it was decided to serve it by the plan, and its salt set.
      matched_end: index after the last token that was matched when the engine asked.
      placed: whether it was allocated blocks since the plan was made.
      served: plans under which it was computed, one after another if it was preempted in between.
      blocks: blocks to be filled for it, with the index of the first token of each.
      saved: whether nothing more is to be formed from it.
      failed: whether a load failed; nothing more is loaded for it.
    """

    request: Any
    options: RequestOptions
    history: PromptHistory
    own_salt: str | None
    planned: PlannedRequest = dataclasses.field(default_factory=PlannedRequest)
    settled: bool = True
    matched_end: int = 0
    placed: bool = False
    served: list[RequestPlan] = dataclasses.field(default_factory=list)
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    saved: bool = False
    failed: bool = False

    @property
    def segments(self) -> tuple[PromptSegment, ...]:
        """The prompt's chunks."""
        return self.history.segments

    def next_range(self, computed: int) -> tuple[int, int] | None:
        """Returns begin and end of the next tokens that can be loaded, from the token `computed` on; None of none."""
        begin = end = computed
        for payload in () if self.failed else self.planned.payloads:
            segment = payload.step.segment
            if segment.end <= computed:
                continue
            if begin == end:  # the first chunk, of which the engine may have a part
                begin = max(segment.begin, computed)
            elif segment.begin > end:
                break
            end = segment.end
        return (begin, end) if end > begin else None

    def exact_part(self, wanted: WantedChunks) -> WantedChunks:
        """Returns what can be stored of a request that was served by its plans.

        Behind an approximate chunk what the engine prefills is approximate too; what it prefilled in a gap in front of
        the first one is not.
        """
        if all(plan.exact for plan in self.served):
            return wanted
        steps = [step for plan in self.served for step in plan.steps]
        end = min(step.segment.begin for step in steps if not step.exact)
        begins = {step.segment.begin for step in steps}

        def prefilled(indices: tuple[int, ...]) -> tuple[int, ...]:
            gaps = {index for index, segment in enumerate(self.segments) if segment.begin not in begins}
            return tuple(index for index in indices if index in gaps and self.segments[index].begin < end)

        return wanted._replace(formed=prefilled(wanted.formed), prefills=prefilled(wanted.prefills))

    def expect(self, blocks: tuple[int, ...], page_size: int, begin: int, end: int) -> None:
        """Registers that the blocks of tokens in [begin, end) are to be filled."""
        for page in range(begin // page_size, -(-end // page_size)):
            self.blocks[blocks[page]] = page_size * page

    def fail(self, blocks: set[int]) -> str | None:
        """Registers blocks that could not be loaded, and cuts the last plan before the first of them.

        Returns:
          The id of the first chunk that is wholly after the cut: as a rule, the one that could not be placed.
        """
        self.failed = True
        end = min(self.blocks[block] for block in blocks & self.blocks.keys())
        last = self.served[-1]
        self.served[-1] = last.cut(end)
        for step in last.steps:
            if step.segment.begin >= end:
                return step.segment.id
        return None

    def report(self) -> dict[str, Any]:
        """Returns how it was served: the chunks of the last plan, and the weakest guarantee of all plans.

        The tokens of every earlier plan are part of the answer, so `exact` and `kl` cover all of them.
        """
        last = self.served[-1] if self.served else RequestPlan()
        bounds = [plan.kl for plan in self.served if plan.kl is not None]
        return {
            "matched": last.matched,
            "served": [list(way) for way in self._ways(last.steps)],
            "exact": all(plan.exact for plan in self.served),
            "kl": max(bounds, default=0.0) if len(bounds) == len(self.served) else None,
            "failed": self.failed,
            "promise": self.options.promise,
            "why": self.planned.plan.why,
        }

    def _ways(self, steps: tuple[ChunkStep, ...]) -> list[tuple[str, int]]:
        """Returns the point and rank of every chunk up to the last one that is served."""
        served = {step.segment.begin: (step.point, step.rank) for step in steps}
        last = self.history.places[steps[-1].segment.begin] + 1 if steps else 0
        return [served.get(segment.begin, ("prefilled", 0)) for segment in self.segments[:last]]
