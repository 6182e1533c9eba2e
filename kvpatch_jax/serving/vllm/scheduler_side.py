"""The scheduler's side of the connector: plans requests while others are served, and commands their loads and saves.

Requests, blocks and a step's output are the engine's objects, of which only attributes are read; vllm is not imported.
"""

import collections
import dataclasses
import logging
from typing import Any

from ...errors import KVPatchError, WeightsError
from ...plan import Certificate
from ...window import StoredPrefills
from .admission import Admission, WantedChunks
from .block_events import BlockEvents
from .engine_metrics import EngineMetrics, reason_of
from .layouts import CacheFormat
from .left_behind import keep_served, left_behind
from .messages import LeftBehind, LoadCommand, SaveCommand, StepCommands, blocks_from
from .prefetcher import Prefetcher
from .prompt_history import PromptHistory
from .request_plan import RequestPlan, plan_request, worth_learning
from .request_state import PlannedRequest, RequestState
from .segments import PromptFeature, segments_of
from .settings import ConnectorConfig
from .stores import StoreCatalog, Stores
from .survivors import Survivors

logger = logging.getLogger(__name__)

MAX_UNPLACED = 1024
"""Number of chunks that are remembered because they could not be placed."""
IDLE_SECONDS = 0.005
"""Time for which a step without other work waits for a plan, instead of polling."""


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
      metrics: what was counted and not reported to the engine yet.
      events: blocks that became available or unavailable.
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
        self._admission = Admission(config, self.stores, cache)
        self.counts: collections.Counter[str] = collections.Counter()
        self.metrics, self.events = EngineMetrics(), BlockEvents(page_size)
        self._requests: dict[str, RequestState] = {}
        self._prefetcher: Prefetcher[PlannedRequest] = Prefetcher(config.readers, config.ahead, config.patience)
        self._loads: list[LoadCommand] = []
        self._lost: set[int] = set()
        self._unplaced: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()

    @property
    def survivors(self) -> Survivors:
        """What requests have left for the next ones of their agents."""
        return self.stores.shared.survivors

    # -------------------------------------------------------------------------------------------------- planning

    def add_request(self, request: Any) -> None:
        """Queues a request to be planned and its chunks to be read. One that cannot be planned is not tracked."""
        try:
            state = self._read_request(request)
        except KVPatchError as error:
            self.counts["refused"] += 1
            self.metrics.add("requests", "invalid")
            self.metrics.add("refusals", reason_of(str(error)))
            logger.warning("kvpatch: request %s is served without stored chunks: %s", request.request_id, error)
            return
        if state is not None:
            self.metrics.add("requests", state.options.policy)
            self._requests[request.request_id] = state
            self._prefetch(state)

    def _read_request(self, request: Any) -> RequestState | None:
        """Returns the state of a new request; None if it does not ask for stored chunks or cannot use them.

        Raises:
          InputError: the options are invalid, or ask for blind reuse, which the operator does not allow.
        """
        options = self.config.options_of(request.kv_transfer_params)
        if options is None:
            return None
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            self.metrics.add("refusals", "embeddings")
            return None
        if request.lora_request is not None:  # other weights than those that chunks were formed with
            self.metrics.add("refusals", "lora")
            return None

        features = []
        for feature in request.mm_features:
            span = feature.mm_position
            features.append(PromptFeature(feature.identifier, span.offset, span.length))

        config, tokens, backbone = self.config, request.prompt_token_ids, self.stores.backbone
        segments = segments_of(backbone, tokens, features, options.segments, config.image_frame, config.chunking)
        # Without chunks there is nothing to plan, and a plan would cost the request a step of the engine.
        return RequestState(request, options, PromptHistory(segments), request.cache_salt) if segments else None

    def _prefetch(self, state: RequestState) -> None:
        state.settled = False
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

        unplaced = {segment.id for segment in state.segments if (tenant, segment.id) in self._unplaced}
        catalog = StoreCatalog(self.stores, state.options, self.cache, state.history, unplaced)
        plan = plan_request(state.history, catalog, self.config, state.options, self.certificate)
        for error in catalog.unfit:
            self._note_unfit(error)

        wanted = self._wanted(state, catalog.stored_prefills)
        learnt = worth_learning(state.history, plan, wanted.lacking, self.config, state.options, self.certificate)
        if learnt is not None:
            why = f"chunk {learnt + 1} of {len(state.segments)} is prefilled behind exact ones, to be stored"
            plan = plan.exact_part(why)
        # What the engine prefills behind an approximate chunk is approximate too, so nothing is formed from it.
        salt = plan.salt(self.config, state.options, state.own_salt)
        return PlannedRequest(plan, catalog.payloads(plan.steps), wanted, salt)

    def _note_unfit(self, error: KVPatchError) -> None:
        kind = f"unfit: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("kvpatch: stored chunks of this engine's backbone count as not stored: %s", error)

    def _wanted(self, state: RequestState, prefills: StoredPrefills | None = None) -> WantedChunks:
        """Returns what to store of a request if it is prefilled exactly, as `Admission.wanted`."""
        if not (self.config.save and state.options.save) or state.saved:
            return WantedChunks()
        try:
            return self._admission.wanted(state.options.tenant, state.history, prefills)
        except (KVPatchError, OSError) as error:  # the plan can be served all the same
            self.counts["unsaved"] += 1
            logger.warning("kvpatch: request %s is not saved: %s", state.request.request_id, error)
            return WantedChunks()

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
        if id in self._prefetcher:
            if not self._prefetcher.is_ready(id):
                self.counts["asked_again"] += 1
                return None
            self._accept_plan(id)

        state = self._requests.get(id)
        if state is not None and not state.settled and self._settle(state, computed):
            self.counts["asked_again"] += 1
            return None
        count = 0 if state is None else max(0, state.matched - computed)
        if state is not None and count and state.placed:
            # It was preempted after its payloads were released: read and plan it again.
            state.placed = False
            self._prefetch(state)
            self.counts["asked_again"] += 1
            return None
        return count

    def _accept_plan(self, id: str) -> None:
        """Takes a plan that is ready."""
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

    def _settle(self, state: RequestState, computed: int) -> bool:
        """Decides whether a request is served by its plan, and salts it. Returns whether the salt changed.

        Args:
          computed: tokens that the engine has in its own cache, under the salt that the request has.
        """
        state.settled = True
        planned = state.planned
        gain = planned.plan.matched - computed
        if not planned.plan.exact and state.request.cache_salt == state.own_salt and gain <= self.page_size:
            # With another salt the engine would no longer find its own blocks, which are exact.
            self.counts["left_to_the_engine"] += 1
            state.planned = planned.without_approximate(state.own_salt)
            if not state.planned.payloads:
                self._prefetcher.release(state.request.request_id)
        if state.planned.plan.why:
            self.metrics.add("refusals", reason_of(state.planned.plan.why))
        self.events.note_plan(state.request, state.options.tenant, state.segments, state.planned.plan.steps)
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
            state.expect(blocks, self.page_size, first, state.matched)
            self.counts["loaded_tokens"] += count
            self.metrics.add_served(state.planned.plan.steps, first)

        if not state.failed:
            state.served.append(state.planned.plan)
            if self._leaves_survivors(state):
                keep_served(self.survivors, state.history, state.options, state.planned.payloads)
        state.planned, state.placed = state.planned._replace(payloads=()), True

        # A request that reads no cache may still be planned at this point, to find what is to be formed from it.
        if id not in self._prefetcher:
            self._prefetcher.release(id)

    def _leaves_survivors(self, state: RequestState) -> bool:
        own = state.options
        return own.policy != "exact" and own.save and not state.failed and self.config.survivor_bytes > 0

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
            if not is_prefilled or state.saved:
                continue
            state.saved = True
            # Behind an approximate chunk what the engine prefills is approximate too.
            wanted = state.planned.wanted if all(plan.exact for plan in state.served) else WantedChunks()
            left: tuple[LeftBehind, ...] = ()
            if self._leaves_survivors(state):
                steps = state.served[-1].steps if state.served else ()
                left = left_behind(self.survivors, state.history, state.options, steps)
            if wanted.formed or wanted.prefills or left:
                (blocks,) = output.kv_connector_block_state.get_block_ids(id)
                tenant, segments = state.options.tenant, state.segments
                saves.append(SaveCommand(id, tenant, segments, wanted.formed, tuple(blocks), wanted.prefills, left))
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
        if state is None:
            return None
        return {"kvpatch": state.report()}

    @property
    def reading(self) -> tuple[int, int]:
        """Numbers of requests that wait for a reading thread, and that are read or hold what was read."""
        return self._prefetcher.backlog

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

    def reset(self) -> None:
        """Forgets what was stored so far: it counts as not stored from now on, for this engine alone.

        The engine asks for that when its weights change too, so nothing approximate is certified any more. Requests
        that run keep what they were served, and their salt.
        """
        self.stores.shared.reset()
        self.certificate = None
        self._unplaced.clear()
        self.events.clear()
        self.counts["resets"] += 1
        for id, state in self._requests.items():
            state.saved = True  # its chunks' names are those of before
            if id in self._prefetcher or state.planned.payloads:
                self._prefetch(state)  # finds nothing under the new name, and releases what was read

    def close(self) -> None:
        """Plans no more, and closes the stores; a store that hangs is waited for within the config's patience."""
        self._prefetcher.close()
        self.stores.close()
