"""The state of one request on the scheduler's side, until it is finished."""

import dataclasses
from typing import Any, NamedTuple

from .admission import WantedChunks
from .messages import ChunkPayload
from .prompt_history import PromptHistory
from .request_plan import RequestPlan
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
      placed: whether a load was commanded since the plan was made.
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
    placed: bool = False
    served: list[RequestPlan] = dataclasses.field(default_factory=list)
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    saved: bool = False
    failed: bool = False

    @property
    def segments(self) -> tuple[PromptSegment, ...]:
        """The prompt's chunks."""
        return self.history.segments

    @property
    def matched(self) -> int:
        """Number of tokens that the plan serves; 0 once a load has failed."""
        return 0 if self.failed else self.planned.plan.matched

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
            "served": [[step.point, step.rank] for step in last.steps],
            "exact": all(plan.exact for plan in self.served),
            "kl": max(bounds, default=0.0) if len(bounds) == len(self.served) else None,
            "failed": self.failed,
            "promise": self.options.promise,
            "why": self.planned.plan.why,
        }
