"""The scheduler's side: requests are planned when they come, while others are computed; salted, matched, and ordered.

Requests, blocks and a step's output are the engine's objects, of which only attributes are read; vllm is not imported.
"""

import collections
import dataclasses
import logging
from typing import Any, NamedTuple

from ...errors import KVPatchError
from ...plan.certificate import Certificate
from .ahead import Ahead
from .messages import Load, Orders, Piece, Save, blocks_from
from .planning import RequestPlan, plan_request
from .segments import Feature, Segment, segments_of
from .settings import Asked, Settings
from .stores import Looked, Stores

logger = logging.getLogger(__name__)


class Planned(NamedTuple):
    """What was found out on a reading thread.

    Attributes:
      pieces: what the plan places. wanted: places of chunks to be formed, if the request is prefilled exactly.
    """

    plan: RequestPlan = RequestPlan()
    pieces: tuple[Piece, ...] = ()
    wanted: tuple[int, ...] = ()


PLAIN = Planned()
IDLE_SECONDS = 0.005
"""That a step with nothing else to do waits for a plan, in place of asking again and again."""


@dataclasses.dataclass
class Tracked:
    """What is known of a request until it is finished.

    Attributes:
      own_salt: that it came with.
      planned: its plan; the pieces of it are held until a step was ordered to place them. placed: that was.
      blocks: of what was placed. saved: nothing is to be formed of it any more.
    """

    request: Any
    asked: Asked
    segments: tuple[Segment, ...]
    own_salt: str | None
    planned: Planned = PLAIN
    placed: bool = False
    blocks: set[int] = dataclasses.field(default_factory=set)
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


class SchedulerSide:
    """Plans requests, and keeps what was planned until they are finished."""

    def __init__(self, settings: Settings, page_size: int, certificate: Certificate | None = None):
        """Knows no request yet.

        Args:
          page_size: tokens of the scheduler's blocks.
          certificate: of the settings' backbone.
        """
        self.settings, self.page_size, self.certificate = settings, page_size, certificate
        self.stores = Stores(settings)
        self.counts: collections.Counter[str] = collections.Counter()
        self._tracked: dict[str, Tracked] = {}
        self._ahead: Ahead[Planned] = Ahead(settings.readers, settings.ahead, settings.patience)
        self._loads: list[Load] = []

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

    def _asked(self, request: Any) -> Tracked | None:
        asked = Asked.read(request.kv_transfer_params)
        if asked is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        if request.lora_request is not None:  # other weights than those that chunks were made by
            return None
        features = [
            Feature(own.identifier, own.mm_position.offset, own.mm_position.length) for own in request.mm_features
        ]
        tokens, frame = list(request.prompt_token_ids), self.settings.image_frame
        segments = segments_of(self.settings.backbone, tokens, features, asked.segments, frame)
        return Tracked(request, asked, segments, request.cache_salt)

    def _begin(self, tracked: Tracked) -> None:
        self._ahead.add(tracked.request.request_id, lambda: self._planned(tracked))

    def _planned(self, tracked: Tracked) -> Planned:
        """Plans, and reads what the plan places: on a thread of its own."""
        if tracked.request.skip_reading_prefix_cache:
            return Planned(RequestPlan(why="the request reads no cache"), (), self._wanted(tracked))
        looked = Looked(self.stores, tracked.asked.tenant)
        plan = plan_request(tracked.segments, looked, self.settings, tracked.asked, self.certificate)
        return Planned(plan, looked.held(plan.steps), self._wanted(tracked) if plan.exact else ())

    def _wanted(self, tracked: Tracked) -> tuple[int, ...]:
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
            tracked.planned = Planned(RequestPlan(why="its chunks could not be read"))
            tracked.saved = True  # nothing more is asked of that store
        if not tracked.planned.pieces:
            self._ahead.let_go(id)
        request, salt = tracked.request, tracked.plan.salt(self.settings, tracked.asked, tracked.own_salt)
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
        tracked.blocks = set()
        if count:
            first = tracked.matched - count
            self._loads.append(Load(id, tracked.planned.pieces, first, blocks))
            tracked.blocks = blocks_from(blocks, self.page_size, first, tracked.matched)
            self.counts["loaded_tokens"] += count
        tracked.planned, tracked.placed = tracked.planned._replace(pieces=()), True
        if id not in self._ahead:  # what is to be formed of a request that reads no cache may still be looked up
            self._ahead.let_go(id)

    def orders(self, output: Any) -> Orders:
        """Gathers what the engine's next step is to load, and to save of prompts that it finishes."""
        loads, self._loads = tuple(self._loads), []
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
        return Orders(loads, tuple(saves))

    def _saves(self, request: str, tracked: Tracked, output: Any) -> list[Save]:
        """What to form of a prompt that was prefilled exactly, once."""
        wanted = tracked.planned.wanted
        if tracked.saved or not wanted:
            return []
        tracked.saved = True
        (blocks,) = output.kv_connector_block_state.get_block_ids(request)
        self.counts["saves"] += 1
        return [Save(request, tracked.asked.tenant, tracked.segments, wanted, tuple(blocks))]

    def failed(self, blocks: set[int]) -> None:
        """Takes note of blocks that could not be loaded: their requests are computed by the engine from then on."""
        for tracked in self._tracked.values():
            if tracked.blocks & blocks and not tracked.failed:
                tracked.failed = True
                self.counts["failed"] += 1

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request; returns what it was served, for whoever asked."""
        self._ahead.let_go(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        served = () if tracked.failed else tracked.plan.steps
        told = {"matched": tracked.matched, "served": [[step.point, step.rank] for step in served]}
        told |= {"exact": all(step.exact for step in served), "kl": tracked.plan.kl if served else 0.0}
        return {"kvpatch": {**told, "failed": tracked.failed, "why": tracked.plan.why}}

    def close(self) -> None:
        """Plans no more, and closes the stores."""
        self._ahead.close()
        self.stores.close()
