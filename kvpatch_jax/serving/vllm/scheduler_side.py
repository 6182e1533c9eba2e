"""The scheduler's side: requests are planned when they come, while others are computed; salted, matched, and ordered.

Requests, blocks and a step's output are the engine's objects, of which only attributes are read; vllm is not imported.
"""

import collections
import dataclasses
import logging
from typing import Any, NamedTuple

from ...errors import InputError, KVPatchError, WeightsError
from ...plan import Certificate
from .layouts import CacheFormat
from .messages import ChunkPayload, LoadCommand, SaveCommand, StepCommands, blocks_from
from .prefetcher import Prefetcher
from .request_plan import RequestPlan, plan_request
from .segments import PromptFeature, PromptSegment, segments_of
from .settings import ConnectorConfig, RequestOptions
from .stores import StoreCatalog, Stores

logger = logging.getLogger(__name__)


class PlannedRequest(NamedTuple):
    """What was found out on a reading thread.

    Attributes:
      pieces: what the plan places. wanted: places of chunks to be formed, if the request is prefilled exactly.
      salt: that the plan asks for.
    """

    plan: RequestPlan = RequestPlan()
    pieces: tuple[ChunkPayload, ...] = ()
    wanted: tuple[int, ...] = ()
    salt: str | None = None


PLAIN = PlannedRequest()
MOST_UNPLACED = 1024
"""Chunks that are remembered because they could not be placed."""
IDLE_SECONDS = 0.005
"""That a step with nothing else to do waits for a plan, in place of asking again and again."""


@dataclasses.dataclass
class RequestState:
    """What is known of a request until it is finished.

    Attributes:
      own_salt: that it came with.
      planned: its plan; the pieces of it are held until a step was ordered to place them. placed: that was.
      served: plans that it was computed by, one behind the other where it was preempted in between.
      blocks: that were to be filled for it, with the place of the first token of each.
      saved: nothing is to be formed of it any more.
      failed: a load of it did; nothing is loaded for it any more.
    """

    request: Any
    asked: RequestOptions
    segments: tuple[PromptSegment, ...]
    own_salt: str | None
    planned: PlannedRequest = PLAIN
    placed: bool = False
    served: list[RequestPlan] = dataclasses.field(default_factory=list)
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    saved: bool = False
    failed: bool = False

    @property
    def plan(self) -> RequestPlan:
        """How it is served."""
        return self.planned.plan

    @property
    def matched(self) -> int:
        """Tokens that are served; none once a load has failed."""
        return 0 if self.failed else self.plan.matched

    def lose(self, blocks: set[int]) -> str | None:
        """Takes note of blocks that hold nothing: of its last plan, what stands in front of them was served.

        Returns:
          The id of the first chunk that is wholly behind them: as a rule the one that could not be placed.
        """
        self.failed = True
        end = min(self.blocks[block] for block in blocks & self.blocks.keys())
        last = self.served[-1]
        self.served[-1] = last.cut(end)
        return next((step.segment.id for step in last.steps if step.segment.begin >= end), None)

    def told(self) -> dict[str, Any]:
        """What it was served: the last plan's chunks, and the least true of all plans that its tokens come from."""
        last = self.served[-1] if self.served else RequestPlan()
        bounds = [plan.kl for plan in self.served if plan.kl is not None]
        return {
            "matched": last.matched,
            "served": [[step.point, step.rank] for step in last.steps],
            "exact": all(plan.exact for plan in self.served),
            "kl": max(bounds, default=0.0) if len(bounds) == len(self.served) else None,
            "failed": self.failed,
            "why": self.plan.why,
        }


class SchedulerSide:
    """Plans requests, and keeps what was planned until they are finished."""

    def __init__(
        self,
        settings: ConnectorConfig,
        page_size: int,
        cache: CacheFormat,
        certificate: Certificate | None = None,
        weights: str | None = None,
    ):
        """Knows no request yet.

        Args:
          page_size: tokens of the scheduler's blocks.
          cache: of the engine; what is stored in another one counts as not stored.
          certificate: of the settings' backbone.
          weights: digest of the engine's, as `Stores`; of a tenant whose store has chunks of others, none are stored.
        """
        self.settings, self.page_size, self.cache, self.certificate = settings, page_size, cache, certificate
        self.stores = Stores(settings, weights)
        self.counts: collections.Counter[str] = collections.Counter()
        self._tracked: dict[str, RequestState] = {}
        self._ahead: Prefetcher[PlannedRequest] = Prefetcher(settings.readers, settings.ahead, settings.patience)
        self._loads: list[LoadCommand] = []
        self._lost: set[int] = set()
        self._unplaced: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()

    def arrived(self, request: Any) -> None:
        """Has a request planned, and what it needs read. What cannot be planned is served plainly."""
        try:
            tracked = self._asked(request)
        except KVPatchError as error:
            self.counts["refused"] += 1
            logger.warning("kvpatch: request %s is served plainly: %s", request.request_id, error)
            return
        if tracked is None:
            return
        self._tracked[request.request_id] = tracked
        self._begin(tracked)

    def _asked(self, request: Any) -> RequestState | None:
        asked = RequestOptions.read(request.kv_transfer_params)
        if asked is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        if asked.policy == "blind" and not self.settings.uncertified:
            raise InputError(
                "kv_transfer_params: policy 'blind'; expected 'exact' or 'approximate', for the operator's settings "
                "do not say 'uncertified'"
            )
        if request.lora_request is not None:  # other weights than those that chunks were made by
            return None
        features = [
            PromptFeature(own.identifier, own.mm_position.offset, own.mm_position.length) for own in request.mm_features
        ]
        tokens, frame = list(request.prompt_token_ids), self.settings.image_frame
        segments = segments_of(self.settings.backbone, tokens, features, asked.segments, frame)
        return RequestState(request, asked, segments, request.cache_salt)

    def _begin(self, tracked: RequestState) -> None:
        self._ahead.add(tracked.request.request_id, lambda: self._planned(tracked))

    def _planned(self, tracked: RequestState) -> PlannedRequest:
        """Plans, and reads what the plan places: on a thread of its own."""
        try:
            self.stores.of(tracked.asked.tenant)
        except WeightsError as error:
            self._note_unfit(error)
            return PlannedRequest(RequestPlan(why="its chunks are of other weights"), salt=tracked.own_salt)
        if tracked.request.skip_reading_prefix_cache:
            plan = RequestPlan(why="the request reads no cache")
            return PlannedRequest(plan, (), self._wanted(tracked), tracked.own_salt)
        tenant = tracked.asked.tenant
        placeable = [own for own in tracked.segments if (tenant, own.id) not in self._unplaced]
        looked = StoreCatalog(self.stores, tenant, self.cache, placeable)
        plan = plan_request(tracked.segments, looked, self.settings, tracked.asked, self.certificate)
        for error in looked.unfit:
            self._note_unfit(error)
        salt = plan.salt(self.settings, tracked.asked, tracked.own_salt)
        return PlannedRequest(plan, looked.held(plan.steps), self._wanted(tracked) if plan.exact else (), salt)

    def _note_unfit(self, error: KVPatchError) -> None:
        kind = f"unfit: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("kvpatch: what the store has under this engine's name counts as not stored: %s", error)

    def _wanted(self, tracked: RequestState) -> tuple[int, ...]:
        """Places of chunks to be formed: a canonical of the first, patches of others whose canonical is stored."""
        if not (self.settings.save and tracked.asked.save) or tracked.saved:
            return ()
        tenant, ids = tracked.asked.tenant, [own.id for own in tracked.segments]
        missing = lambda place: not self.stores.formed(tenant, ids[place], tuple(ids[:place]))
        known = lambda place: place == 0 or self.stores.has(tenant, ids[place])
        try:
            return tuple(place for place in range(len(ids)) if known(place) and missing(place))
        except (KVPatchError, OSError) as error:  # what was planned can be served all the same
            self.counts["unsaved"] += 1
            logger.warning("kvpatch: request %s is not saved: %s", tracked.request.request_id, error)
            return ()

    def _settle(self, id: str) -> bool:
        """Takes a plan that is ready, and salts its request where it is approximate; returns whether that changed."""
        tracked = self._tracked[id]
        try:
            tracked.planned = self._ahead.take(id)
        except Exception as error:  # whatever reading met: the engine goes on
            self.counts["unread"] += 1
            logger.warning("kvpatch: request %s is served plainly: %s", id, error)
            tracked.planned = PlannedRequest(RequestPlan(why="its chunks could not be read"), salt=tracked.own_salt)
            tracked.saved = True  # nothing more is asked of that store
        if not tracked.planned.pieces:
            self._ahead.let_go(id)
        return self._salt(tracked.request, tracked.planned.salt)

    def _salt(self, request: Any, salt: str | None) -> bool:
        """Has the engine cache a request's blocks under a salt; returns whether that is another one."""
        if salt == request.cache_salt:
            return False
        # The engine hashes blocks when a request is made, before anybody is asked.
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
        self.counts["salted"] += 1
        return True

    def matched(self, request: Any, computed: int) -> int | None:
        """Counts tokens that are served beyond those that the engine has.

        Returns:
          None: not known yet, ask again in the next step. The request's chunks are being read; or its salt has changed
          just now, so that what the engine has was looked up without it.
        """
        id = request.request_id
        if request.skip_reading_prefix_cache:  # the engine asks, and does not listen
            return 0
        if id in self._ahead and (not self._ahead.is_ready(id) or self._settle(id)):
            self.counts["asked_again"] += 1
            return None
        tracked = self._tracked.get(id)
        count = 0 if tracked is None else max(0, tracked.matched - computed)
        if tracked is not None and count and tracked.placed:
            # It was preempted, and what was held for it is no longer: read again, and planned anew.
            tracked.placed = False
            self._begin(tracked)
            self.counts["asked_again"] += 1
            return None
        return count

    def allocated(self, request: Any, blocks: tuple[int, ...], count: int) -> None:
        """Orders what fills the last `count` of a request's matched tokens, and holds it no longer."""
        id = request.request_id
        tracked = self._tracked.get(id)
        if tracked is None:
            return
        tracked.blocks = {}
        if count:
            first = tracked.matched - count
            self._loads.append(LoadCommand(id, tracked.planned.pieces, first, blocks))
            places = range(first // self.page_size, -(-tracked.matched // self.page_size))
            tracked.blocks = {blocks[place]: self.page_size * place for place in places}
            self.counts["loaded_tokens"] += count
        if not tracked.failed:
            tracked.served.append(tracked.plan)
        tracked.planned, tracked.placed = tracked.planned._replace(pieces=()), True
        if id not in self._ahead:  # what is to be formed of a request that reads no cache may still be looked up
            self._ahead.let_go(id)

    def orders(self, output: Any) -> StepCommands:
        """Gathers what the engine's next step is to load, and to save of prompts that it finishes."""
        cached = output.scheduled_cached_reqs
        computed = {own.req_id: own.num_computed_tokens for own in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        saves = []
        for request, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request)
            if tracked is None or not tracked.segments or request not in computed:
                continue
            if computed[request] + scheduled >= tracked.segments[-1].end:
                saves += self._saves(request, tracked, output)
        for id in self._ahead.ready(0.0 if output.num_scheduled_tokens else IDLE_SECONDS):
            self._settle(id)
        return dataclasses.replace(self.promised(), saves=tuple(saves))

    def _saves(self, request: str, tracked: RequestState, output: Any) -> list[SaveCommand]:
        """What to form of a prompt that was prefilled exactly, once."""
        wanted = tracked.planned.wanted
        if tracked.saved or not wanted:
            return []
        tracked.saved = True
        (blocks,) = output.kv_connector_block_state.get_block_ids(request)
        self.counts["saves"] += 1
        return [SaveCommand(request, tracked.asked.tenant, tracked.segments, wanted, tuple(blocks))]

    def failed(self, blocks: set[int]) -> None:
        """Takes note of blocks that could not be loaded: their requests are computed by the engine from then on.

        The chunk that could not be placed counts as not stored, for as long as the engine lives.
        """
        for tracked in self._tracked.values():
            if tracked.blocks.keys() & blocks and not tracked.failed:
                chunk = tracked.lose(blocks)
                self.counts["failed"] += 1
                if chunk is not None:  # or the next request of it would end in the same way
                    self._unplaced[tracked.asked.tenant, chunk] = None
                    if len(self._unplaced) > MOST_UNPLACED:
                        self._unplaced.popitem(last=False)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request; returns what it was served, for whoever asked."""
        self._ahead.let_go(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        return {"kvpatch": tracked.told()}

    def discard(self, request: Any) -> bool:
        """Forgets a request that could not be handled: it is served plainly from here on.

        What was promised for it and not ordered yet is told as lost.

        Returns:
          Whether its salt was taken back, so that what the engine looked up with it no longer counts.
        """
        id = request.request_id
        self._ahead.let_go(id)
        for load in [own for own in self._loads if own.request == id]:
            self._loads.remove(load)
            self._lost |= blocks_from(load.blocks, self.page_size, load.first, load.end)
        tracked = self._tracked.pop(id, None)
        return tracked is not None and self._salt(request, tracked.own_salt)

    def lose(self, request: Any, blocks: tuple[int, ...], count: int) -> None:
        """Takes note that the last `count` of a request's matched tokens were promised, and will not be loaded."""
        tracked = self._tracked.get(request.request_id)
        end = len(blocks) * self.page_size if tracked is None else tracked.matched
        self._lost |= blocks_from(blocks, self.page_size, max(0, end - count), end)

    def promised(self) -> StepCommands:
        """Gathers what was promised alone: what a step needs, whatever else is to be done."""
        loads, self._loads = tuple(self._loads), []
        lost, self._lost = frozenset(self._lost), set()
        return StepCommands(loads, lost=lost)

    def close(self) -> None:
        """Plans no more, and closes the stores; of a store that hangs no longer than the patience."""
        self._ahead.close()
        self.stores.close()
