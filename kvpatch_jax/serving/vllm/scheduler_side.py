"""The scheduler's side of the connector: plans requests while others are served, and commands their loads and saves.

Requests, blocks and a step's output are the engine's objects, of which only attributes are read; vllm is not imported.
"""

import collections
import dataclasses
import logging
from typing import Any, NamedTuple

from ...errors import KVPatchError, WeightsError
from ...plan import Certificate
from .layouts import CacheFormat
from .messages import ChunkPayload, LoadCommand, SaveCommand, StepCommands, blocks_from
from .prefetcher import Prefetcher
from .request_plan import RequestPlan, plan_request
from .segments import PromptFeature, PromptSegment, segments_of
from .settings import ConnectorConfig, RequestOptions
from .stores import StoreCatalog, Stores

logger = logging.getLogger(__name__)

MAX_UNPLACED = 1024
"""Number of chunks that are remembered because they could not be placed."""
IDLE_SECONDS = 0.005
"""Time for which a step without other work waits for a plan, instead of polling."""


class PlannedRequest(NamedTuple):
    """A plan with the data that it needs, made on a reading thread.

    Attributes:
      plan: the plan.
      payloads: chunks and patches that the plan places.
      wanted: indices of segments to be formed, if the request is prefilled exactly.
      salt: salt that the request needs.
    """

    plan: RequestPlan = RequestPlan()
    payloads: tuple[ChunkPayload, ...] = ()
    wanted: tuple[int, ...] = ()
    salt: str | None = None


@dataclasses.dataclass
class RequestState:
    """State of a request until it is finished.

    Attributes:
      request: the engine's object.
      options: the request's options.
      segments: the prompt's chunks.
      own_salt: the salt that it came with.
      planned: its plan. The payloads are kept until a load was commanded.
      placed: whether a load was commanded since the plan was made.
      served: plans under which it was computed, one after another if it was preempted in between.
      blocks: blocks to be filled for it, with the index of the first token of each.
      saved: whether nothing more is to be formed from it.
      failed: whether a load failed; nothing more is loaded for it.
    """

    request: Any
    options: RequestOptions
    segments: tuple[PromptSegment, ...]
    own_salt: str | None
    planned: PlannedRequest = dataclasses.field(default_factory=PlannedRequest)
    placed: bool = False
    served: list[RequestPlan] = dataclasses.field(default_factory=list)
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    saved: bool = False
    failed: bool = False

    @property
    def matched(self) -> int:
        """Number of tokens that the plan serves; 0 once a load has failed."""
        return 0 if self.failed else self.planned.plan.matched

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


class SchedulerSide:
    """Plans requests and tracks them until they are finished.

    Args:
      config: the operator's settings.
      page_size: tokens per block of the scheduler.
      cache: the engine's cache format; chunks in another format count as not stored.
      certificate: certificate of the config's backbone.
      weights: digest of the engine's weights; stored chunks of other weights count as not stored.

    Attributes:
      counts: numbers of requests by outcome, such as "refused", "unread", "failed" or "saves", and of "loaded_tokens".
    """

    def __init__(
        self,
        config: ConnectorConfig,
        page_size: int,
        cache: CacheFormat,
        certificate: Certificate | None = None,
        weights: str | None = None,
    ):
        self.config, self.page_size, self.cache, self.certificate = config, page_size, cache, certificate
        self.stores = Stores(config, weights)
        self.counts: collections.Counter[str] = collections.Counter()
        self._requests: dict[str, RequestState] = {}
        self._prefetcher: Prefetcher[PlannedRequest] = Prefetcher(config.readers, config.ahead, config.patience)
        self._loads: list[LoadCommand] = []
        self._lost: set[int] = set()
        self._unplaced: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()

    # -------------------------------------------------------------------------------------------------- planning

    def add_request(self, request: Any) -> None:
        """Queues a request to be planned and its chunks to be read. One that cannot be planned is not tracked."""
        try:
            state = self._read_request(request)
        except KVPatchError as error:
            self.counts["refused"] += 1
            logger.warning("kvpatch: request %s is served without stored chunks: %s", request.request_id, error)
            return
        if state is not None:
            self._requests[request.request_id] = state
            self._prefetch(state)

    def _read_request(self, request: Any) -> RequestState | None:
        """Returns the state of a new request; None if it does not ask for stored chunks or cannot use them.

        Raises:
          InputError: the options are invalid, or ask for blind reuse, which the operator does not allow.
        """
        options = self.config.options_of(request.kv_transfer_params)
        if options is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        if request.lora_request is not None:  # other weights than those that chunks were formed with
            return None

        features = []
        for feature in request.mm_features:
            span = feature.mm_position
            features.append(PromptFeature(feature.identifier, span.offset, span.length))

        config, tokens = self.config, request.prompt_token_ids
        segments = segments_of(config.backbone, tokens, features, options.segments, config.image_frame, config.chunking)
        # Without chunks there is nothing to plan, and a plan would cost the request a step of the engine.
        return RequestState(request, options, segments, request.cache_salt) if segments else None

    def _prefetch(self, state: RequestState) -> None:
        self._prefetcher.add(state.request.request_id, lambda: self._plan(state))

    def _plan(self, state: RequestState) -> PlannedRequest:
        """Plans a request and reads its chunks, on a reading thread."""
        tenant = state.options.tenant
        try:
            self.stores.of(tenant)
        except WeightsError as error:
            self._note_unfit(error)
            return PlannedRequest(RequestPlan(why="its chunks are of other weights"), salt=state.own_salt)

        if state.request.skip_reading_prefix_cache:
            plan = RequestPlan(why="the request reads no cache")
            return PlannedRequest(plan, (), self._wanted(state), state.own_salt)

        placeable = [segment for segment in state.segments if (tenant, segment.id) not in self._unplaced]
        catalog = StoreCatalog(self.stores, tenant, self.cache, placeable)
        plan = plan_request(state.segments, catalog, self.config, state.options, self.certificate)
        for error in catalog.unfit:
            self._note_unfit(error)

        # What the engine prefills behind an approximate chunk is approximate too, so nothing is formed from it.
        wanted = self._wanted(state) if plan.exact else ()
        salt = plan.salt(self.config, state.options, state.own_salt)
        return PlannedRequest(plan, catalog.payloads(plan.steps), wanted, salt)

    def _note_unfit(self, error: KVPatchError) -> None:
        kind = f"unfit: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("kvpatch: stored chunks of this engine's backbone count as not stored: %s", error)

    def _wanted(self, state: RequestState) -> tuple[int, ...]:
        """Returns the segments to form: the first as a canonical, later ones with a stored canonical as patches."""
        if not (self.config.save and state.options.save) or state.saved:
            return ()

        tenant, ids = state.options.tenant, [segment.id for segment in state.segments]
        wanted = []
        try:
            for index, id in enumerate(ids):
                has_base = index == 0 or self.stores.has_canonical(tenant, id)
                if has_base and not self.stores.is_formed(tenant, id, tuple(ids[:index])):
                    wanted.append(index)
        except (KVPatchError, OSError) as error:  # the plan can be served all the same
            self.counts["unsaved"] += 1
            logger.warning("kvpatch: request %s is not saved: %s", state.request.request_id, error)
            return ()

        return tuple(wanted)

    # ----------------------------------------------------------------------------------------- the engine's steps

    def match(self, request: Any, computed: int) -> int | None:
        """Counts the tokens that the plan serves beyond those that the engine has.

        Returns:
          None if the engine has to call again in its next step: the request's chunks are being read, or its salt has
          just changed, so that the engine looked into its cache with another one.
        """
        id = request.request_id
        if request.skip_reading_prefix_cache:  # the engine ignores the answer
            return 0
        if id in self._prefetcher and (not self._prefetcher.is_ready(id) or self._accept_plan(id)):
            self.counts["asked_again"] += 1
            return None

        state = self._requests.get(id)
        count = 0 if state is None else max(0, state.matched - computed)
        if state is not None and count and state.placed:
            # It was preempted after its payloads were released: read and plan it again.
            state.placed = False
            self._prefetch(state)
            self.counts["asked_again"] += 1
            return None
        return count

    def _accept_plan(self, id: str) -> bool:
        """Takes a plan that is ready, and salts its request. Returns whether the salt changed."""
        state = self._requests[id]
        try:
            state.planned = self._prefetcher.take(id)
        except Exception as error:  # the engine must go on, whatever failed
            self.counts["unread"] += 1
            logger.warning("kvpatch: request %s is served without stored chunks: %s", id, error)
            state.planned = PlannedRequest(RequestPlan(why="its chunks could not be read"), salt=state.own_salt)
            state.saved = True  # do not use that store again

        if not state.planned.payloads:
            self._prefetcher.release(id)
        return self._set_salt(state.request, state.planned.salt)

    def _set_salt(self, request: Any, salt: str | None) -> bool:
        """Has the engine cache a request's blocks under a salt. Returns whether the salt changed."""
        if salt == request.cache_salt:
            return False
        # The engine hashed the blocks when it made the request, before any hook was called.
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
        self.counts["salted"] += 1
        return True

    def order_load(self, request: Any, blocks: tuple[int, ...], count: int) -> None:
        """Commands the load of the last `count` of a request's matched tokens, and releases their chunks."""
        id = request.request_id
        state = self._requests.get(id)
        if state is None:
            return

        state.blocks = {}
        if count:
            first = state.matched - count
            self._loads.append(LoadCommand(id, state.planned.payloads, first, blocks))
            for page in range(first // self.page_size, -(-state.matched // self.page_size)):
                state.blocks[blocks[page]] = self.page_size * page
            self.counts["loaded_tokens"] += count

        if not state.failed:
            state.served.append(state.planned.plan)
        state.planned, state.placed = state.planned._replace(payloads=()), True

        # A request that reads no cache may still be planned at this point, to find what is to be formed from it.
        if id not in self._prefetcher:
            self._prefetcher.release(id)

    def build_commands(self, output: Any) -> StepCommands:
        """Returns the loads of the engine's next step, and the saves of prompts that it finishes."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

        saves = []
        for id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(id)
            if state is None or not state.segments or id not in computed:
                continue

            is_prefilled = computed[id] + scheduled >= state.segments[-1].end
            if is_prefilled and state.planned.wanted and not state.saved:
                state.saved = True
                (blocks,) = output.kv_connector_block_state.get_block_ids(id)
                wanted, tenant = state.planned.wanted, state.options.tenant
                saves.append(SaveCommand(id, tenant, state.segments, wanted, tuple(blocks)))
                self.counts["saves"] += 1

        for id in self._prefetcher.ready(0.0 if output.num_scheduled_tokens else IDLE_SECONDS):
            self._accept_plan(id)
        return dataclasses.replace(self.take_promised(), saves=tuple(saves))

    def take_promised(self) -> StepCommands:
        """Returns only the loads and lost blocks that the engine relies on, whatever else the step needs."""
        loads, self._loads = tuple(self._loads), []
        lost, self._lost = frozenset(self._lost), set()
        return StepCommands(loads, lost=lost)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request. Returns the report of how it was served, if it asked for stored chunks."""
        self._prefetcher.release(request.request_id)
        state = self._requests.pop(request.request_id, None)
        return None if state is None else {"kvpatch": state.report()}

    # ------------------------------------------------------------------------------------------------- failures

    def mark_failed(self, blocks: set[int]) -> None:
        """Registers blocks that could not be loaded: the engine computes their requests from then on.

        The chunk that could not be placed counts as not stored while the engine lives, or the next request that uses
        it would fail in the same way.
        """
        for state in self._requests.values():
            if state.failed or not state.blocks.keys() & blocks:
                continue
            chunk = state.fail(blocks)
            self.counts["failed"] += 1
            if chunk is not None:
                self._unplaced[state.options.tenant, chunk] = None
                if len(self._unplaced) > MAX_UNPLACED:
                    self._unplaced.popitem(last=False)

    def mark_lost(self, request: Any, blocks: tuple[int, ...], count: int) -> None:
        """Registers that the last `count` of a request's matched tokens were promised and will not be loaded."""
        state = self._requests.get(request.request_id)
        end = len(blocks) * self.page_size if state is None else state.matched
        self._lost |= blocks_from(blocks, self.page_size, max(0, end - count), end)

    def discard(self, request: Any) -> bool:
        """Forgets a request that could not be handled: the engine computes it from here on.

        Loads that were promised for it and not commanded yet count as lost.

        Returns:
          Whether its salt was taken back, so that the engine has to look into its cache again.
        """
        id = request.request_id
        self._prefetcher.release(id)

        # What was not sent to the worker yet never will be, so nobody fills these blocks.
        kept = []
        for load in self._loads:
            if load.request == id:
                self._lost |= blocks_from(load.blocks, self.page_size, load.first, load.end)
            else:
                kept.append(load)
        self._loads = kept

        state = self._requests.pop(id, None)
        return state is not None and self._set_salt(request, state.own_salt)

    def close(self) -> None:
        """Plans no more, and closes the stores; a store that hangs is waited for within the config's patience."""
        self._prefetcher.close()
        self.stores.close()
