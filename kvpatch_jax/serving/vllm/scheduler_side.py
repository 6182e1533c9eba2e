"""The scheduler's side of the connector: plans requests while others are served, and commands their loads and saves.

Requests, blocks and a step's output are the engine's objects, of which only attributes are read; vllm is not imported.
"""

import collections
import dataclasses
import logging
from typing import Any, NamedTuple

from ...errors import KVPatchError, WeightsError
from ...plan import Certificate
from .admission import Admission, WantedChunks
from .catalog import StoreCatalog
from .config import PATIENCE, ConnectorConfig, RequestOptions, tenant_of
from .engine import CacheFormat
from .events import BlockEvents
from .messages import ChunkPayload, LeftBehind, LoadCommand, SaveCommand, StepCommands, blocks_from
from .metrics import EngineMetrics, reason_of
from .plan import EXACT, PromptHistory, RequestPlan, Survivor, identities_of, learning_allowed, plan_request
from .prefetch import Prefetcher
from .segments import PromptFeature, segments_of
from .stores import Stores

logger = logging.getLogger(__name__)

READERS, AHEAD = 2, 8
"""Threads that read chunks for new requests; requests whose chunks are in memory before they are placed."""
MAX_UNPLACED = 1024
"""Number of chunks that are remembered because they could not be placed."""
IDLE_SECONDS = 0.005
"""Time for which a step without other work waits for a plan, instead of polling."""


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
      history: the prompt's chunks, and whose they are.
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
    settled: bool = False
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
        return next((step.segment.id for step in last.steps if step.segment.begin >= end), None)

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
            "reuse": self.options.reuse,
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
      patience: seconds, from a request's arrival, within which its chunks have to be read.
      readers, ahead: threads that read, and requests whose chunks may be in memory before they are placed.

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
        *,
        patience: float = PATIENCE,
        readers: int = READERS,
        ahead: int = AHEAD,
    ):
        self.config, self.page_size, self.cache, self.certificate = config, page_size, cache, certificate
        self.stores = Stores(config, weights)
        self.counts: collections.Counter[str] = collections.Counter()
        self.metrics, self.events = EngineMetrics(), BlockEvents(page_size)
        self._admission = Admission(self.stores, config.store_after)
        self._requests: dict[str, RequestState] = {}
        self._patience = patience
        self._prefetcher: Prefetcher[PlannedRequest] = Prefetcher(readers, ahead, patience)
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
            self.metrics.add("requests", "invalid")
            self.metrics.add("refusals", reason_of(str(error)))
            logger.warning("kvpatch: request %s is served without stored chunks: %s", request.request_id, error)
            return
        if state is not None:
            self.metrics.add("requests", state.options.reuse)
            self._requests[request.request_id] = state
            self._prefetch(state)

    def _read_request(self, request: Any) -> RequestState | None:
        """Returns the state of a new request; None if it does not ask for stored chunks or cannot use them.

        Raises:
          InputError: the options are invalid, or ask for what the operator does not allow.
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
        tokens, chunking = request.prompt_token_ids, self.config.chunking
        segments = segments_of(self.stores.backbone, tokens, features, options.segments, chunking)
        # Tenants are vLLM's: who shares a salt shares chunks. Without chunks there is nothing to plan, and a plan would
        # cost the request a step of the engine.
        history = PromptHistory(segments, tenant_of(request.cache_salt), options.agent)
        return RequestState(request, options, history, request.cache_salt) if segments else None

    def _prefetch(self, state: RequestState) -> None:
        state.settled = False
        self._prefetcher.add(state.request.request_id, lambda: self._plan(state))

    def _plan(self, state: RequestState) -> PlannedRequest:
        """Plans a request and reads its chunks, on a reading thread."""
        history, config, options = state.history, self.config, state.options
        try:
            unplaced = {id for id in history.ids if (history.tenant, id) in self._unplaced}
            catalog = StoreCatalog(self.stores, history, self.cache, unplaced)
        except WeightsError as error:
            self._note_unfit(error)
            return PlannedRequest(RequestPlan(why="its chunks are of other weights"), salt=state.own_salt)
        if state.request.skip_reading_prefix_cache:
            wanted = self._wanted(state)
            return PlannedRequest(RequestPlan(why="the request reads no cache"), (), wanted, state.own_salt)

        plan = plan_request(history, catalog, config, options, self.certificate)
        for error in catalog.unfit:
            self._note_unfit(error)
        wanted = self._wanted(state)
        if not plan.exact and learning_allowed(history, config, options, self.certificate):
            learnt = self._admission.learns(history, plan, wanted.lacking)
            if learnt is not None:
                why = f"chunk {learnt + 1} of {len(history.segments)} is prefilled behind exact ones, to be stored"
                plan = plan.exact_part(why)
        # What the engine prefills behind an approximate chunk is approximate too, so nothing is formed from it.
        salt = plan.salt(self.stores.backbone, state.own_salt)
        return PlannedRequest(plan, catalog.payloads(plan.steps), wanted, salt)

    def _note_unfit(self, error: KVPatchError) -> None:
        kind = f"unfit: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("kvpatch: stored chunks of this engine's backbone count as not stored: %s", error)

    def _wanted(self, state: RequestState) -> WantedChunks:
        """Returns what to store of a request if it is prefilled exactly, as `Admission.wanted`."""
        if not (self.config.store_after and state.options.save) or state.saved:
            return WantedChunks()
        try:
            prefills = self.stores.prefills(state.history.tenant, self.cache.dtype)
            return self._admission.wanted(state.history, prefills, state.options.reuse == "exact")
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
        self.events.note_plan(state.request, state.own_salt, state.planned.plan.steps)
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

        plan, payloads = state.planned.plan, state.planned.payloads
        state.blocks = {}
        if count:
            first = state.matched - count
            self._loads.append(LoadCommand(id, payloads, first, blocks))
            for page in range(first // self.page_size, -(-state.matched // self.page_size)):
                state.blocks[blocks[page]] = self.page_size * page
            self.counts["loaded_tokens"] += count
            self.metrics.add_served(plan.steps, first)
            self._admission.note_saved(state.history.tenant, plan)

        if not state.failed:
            state.served.append(plan)
            if self._leaves_survivors(state):
                self._keep_served(state.history, payloads)
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
            if state is None or id not in computed or state.saved:
                continue
            if computed[id] + scheduled < state.history.segments[-1].end:
                continue
            state.saved = True
            # Behind an approximate chunk what the engine prefills is approximate too.
            wanted = state.planned.wanted if all(plan.exact for plan in state.served) else WantedChunks()
            left = self._left_behind(state) if self._leaves_survivors(state) else ()
            if wanted.formed or wanted.prefills or left:
                (blocks,) = output.kv_connector_block_state.get_block_ids(id)
                tenant, segments = state.history.tenant, state.history.segments
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
        return None if state is None else {"kvpatch": state.report()}

    @property
    def reading(self) -> tuple[int, int]:
        """Numbers of requests that wait for a reading thread, and that are read or hold what was read."""
        return self._prefetcher.backlog

    # ------------------------------------------------------------------------------------------------- survivors

    def _leaves_survivors(self, state: RequestState) -> bool:
        options = state.options
        is_useful = options.reuse != "exact" or options.promise == "remember"
        return is_useful and options.save and not state.failed and self.config.survivors > 0

    def _keep_served(self, history: PromptHistory, payloads: tuple[ChunkPayload, ...]) -> None:
        """Keeps the chunks that a request is served exactly; survivors that serve it count as used.

        What is approximate is found again as it was found now. The first chunk is always there as a canonical.
        """
        for index, payload in enumerate(payloads):
            step, key = payload.step, history.survivor_key(index)
            if index and step.exact:
                self.stores.survivors.put(key, Survivor(payload.chunk, step.identity, history.exact[:index]))
            elif step.point == "survivor":
                self.stores.survivors.get(key)

    def _left_behind(self, state: RequestState) -> tuple[LeftBehind, ...]:
        """Returns the chunks that the engine prefills behind the steps of a plan, and that are not kept yet."""
        history, left = state.history, []
        steps = state.served[-1].steps if state.served else ()
        identities = identities_of(history, steps)
        # A window that remembers promises its survivors, but not what was computed behind other approximate chunks.
        ways = {way for step in steps for way in step.ways}
        passed_on = tuple(sorted(way for way in ways if way[0] not in (*EXACT, "survivor")))
        for index in range(max(len(steps), 1), len(identities)):
            key = history.survivor_key(index)
            known = self.stores.survivors.get(key)
            if known is None or known.identity != identities[index]:
                left.append(LeftBehind(index, key, identities[index], identities[:index], passed_on))
        return tuple(left)

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
                self._unplaced[state.history.tenant, chunk] = None
                if len(self._unplaced) > MAX_UNPLACED:
                    self._unplaced.popitem(last=False)

    def mark_lost(self, request: Any, blocks: tuple[int, ...], count: int) -> None:
        """Registers that the last `count` of a request's matched tokens were promised and will not be loaded."""
        state = self._requests.get(request.request_id)
        end = len(blocks) * self.page_size if state is None else state.matched
        self._lost |= blocks_from(blocks, self.page_size, max(0, end - count), end)

    def discard(self, request: Any, placed: bool = False) -> bool:
        """Forgets a request that could not be handled: the engine computes it from here on.

        Loads that were promised for it and not commanded yet count as lost.

        Args:
          placed: whether it has its blocks. Those that the engine found under the plan's salt may be approximate, and
            so is what it computes behind them: the request keeps that salt.

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
        return state is not None and not placed and self._set_salt(request, state.own_salt)

    def reset(self) -> None:
        """Forgets what was stored so far: it counts as not stored from now on, for this engine alone.

        The engine asks for that when its weights change too, so nothing approximate is certified any more. Requests
        that run keep what they were served, and their salt.
        """
        self.stores.reset()
        self.certificate = None
        self._unplaced.clear()
        self.events.clear()
        self.counts["resets"] += 1
        for id, state in self._requests.items():
            state.saved = True  # its chunks' names are those of before
            if id in self._prefetcher or state.planned.payloads:
                self._prefetch(state)  # finds nothing under the new name, and releases what was read

    def close(self) -> None:
        """Plans no more, and gives up the stores; one that hangs is waited for within the patience. Idempotent."""
        self._prefetcher.close()
        self.stores.close(self._patience)
