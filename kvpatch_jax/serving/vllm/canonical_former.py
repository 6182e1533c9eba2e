"""Canonicals of chunks that requests have behind others, formed in the background while the engine has no request."""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ...core import EngineKV
from ...errors import KVPatchError
from ...store import Lease
from ...utils.background import JobQueue
from .forming import ChunkFormer
from .lone_forward import LoneChunk
from .settings import ConnectorConfig
from .stores import Stores

logger = logging.getLogger(__name__)

MAX_BACKLOG = 64
"""Chunks that wait; more are dropped, and asked for again by the next request that has them."""
MOST_TIME = 0.05
"""Share of the engine's idle time that forwards take, so that few requests come while one runs."""
QUIET_SECONDS = 0.05
"""Time without a request before a forward begins: a burst, or an agent's next request, comes at once."""
LOOK_SECONDS = 0.2
"""Longest time after which a closed queue is noticed."""
LEASE_SECONDS = 60.0
MOST_FAILURES = 3
"""Forwards that may fail in a row; then the engine is not what is expected, and no canonical is formed any more."""


@runtime_checkable
class LonePrefill(Protocol):
    """What prefills a chunk alone; see `LoneForward`."""

    capacity: int
    nbytes: int

    def prefill(self, chunk: LoneChunk, may_go_on: Callable[[int], bool]) -> EngineKV | None:
        """Prefills a chunk, asking before each step whether it may go on."""
        ...


class CanonicalFormer:
    """Forms canonicals at low priority: while no request waits or runs, within `ConnectorConfig.forming_rate` tokens a
    second and `MOST_TIME` of the time, and each by one process of those that share a store.

    Args:
      config: the operator's settings.
      stores: the stores.
      former: makes chunks of KV and stores them.
      forward: prefills a chunk alone.

    Attributes:
      counts: numbers of chunks by outcome: "background" (canonicals that were formed), "lease_lost" (another process
        forms it), "known" (already stored), "failed", "dropped".
    """

    def __init__(self, config: ConnectorConfig, stores: Stores, former: ChunkFormer, forward: LonePrefill):
        self._config, self._stores, self._former, self._forward = config, stores, former, forward
        self.counts: collections.Counter[str] = collections.Counter()
        self._waiting: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._next_start, self._failures = 0.0, 0
        self._queue: JobQueue[LoneChunk] = JobQueue(
            self._run, MAX_BACKLOG, "canonical-former", patience=config.patience
        )

    def wants(self, tenant: str, id: str, tokens: int) -> bool:
        """Returns whether a chunk of so many tokens would be queued."""
        return tokens <= self._forward.capacity and (tenant, id) not in self._waiting and not self._queue.full

    def add(self, chunk: LoneChunk) -> None:
        """Queues a chunk, unless it is queued already."""
        key = chunk.tenant, chunk.segment.id
        with self._lock:
            if key in self._waiting:
                return
            self._waiting.add(key)
        held = sum(own.nbytes for own in chunk.embeddings)
        is_over = self._former.held_bytes + held > self._config.pending_bytes
        self._former.reserve(held)
        if is_over or not self._queue.add(chunk):
            self._forget(chunk, "over_budget" if is_over else "dropped")

    @property
    def jobs(self) -> int:
        """Number of chunks that wait or are in work."""
        return self._queue.backlog

    def flush(self) -> None:
        """Waits until every queued chunk is formed or given up."""
        self._queue.flush()

    def close(self, patience: float) -> bool:
        """Gives up what waits or is in work, and ends the thread; waits for it some seconds at most."""
        return self._queue.close(patience)

    def _forget(self, chunk: LoneChunk, outcome: str) -> None:
        with self._lock:
            self._waiting.discard((chunk.tenant, chunk.segment.id))
        self._former.reserve(-sum(own.nbytes for own in chunk.embeddings))
        self.counts[outcome] += 1

    def _run(self, chunk: LoneChunk) -> None:
        outcome = "failed"
        try:
            outcome = self._form(chunk)
        except Exception as error:  # requests are prefilled, as they were before
            logger.warning("kvpatch: a canonical was not formed in the background: %s", error)
        self._forget(chunk, outcome)

    def _form(self, chunk: LoneChunk) -> str:
        """Forms one canonical. Returns what became of it."""
        tenant, id = chunk.tenant, chunk.segment.id
        if self._failures >= MOST_FAILURES or not self._wait_for_room(chunk):
            return "dropped"
        if self._is_stored(chunk):
            return "known"
        lease = self._stores.of(tenant).lease(id, chunk.backbone, LEASE_SECONDS)
        if lease is None:
            return "lease_lost"
        outcome = "failed"
        try:
            outcome = self._form_under(lease, chunk)
        finally:
            # Other machines do not see a canonical before it is sent to them: until then the lease stands for it.
            if outcome != "background" or self._config.remote is None:
                with contextlib.suppress(KVPatchError):  # it ends by itself
                    lease.release()
        return outcome

    def _form_under(self, lease: Lease, chunk: LoneChunk) -> str:
        if self._is_stored(chunk):  # by the last holder of the lease
            return "known"
        begun = renewed = time.monotonic()

        def may_go_on(count: int) -> bool:
            nonlocal begun, renewed
            self._rest(time.monotonic() - begun)
            if not self._wait_for_room(chunk):
                return False
            if time.monotonic() - renewed > LEASE_SECONDS / 3:
                renewed = time.monotonic()
                if not lease.renew(LEASE_SECONDS):
                    return False
            begun = time.monotonic()
            self._next_start = begun + count / self._config.forming_rate
            return lease.held

        self._former.reserve(self._forward.nbytes)
        try:
            kv = self._forward.prefill(chunk, may_go_on)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                logger.warning("kvpatch: no canonicals are formed in the background any more: %s", error)
            raise
        finally:
            self._former.reserve(-self._forward.nbytes)
            self._rest(time.monotonic() - begun)

        if not lease.held:
            return "lease_lost"
        if kv is None or chunk.backbone != self._stores.backbone:
            return "dropped"
        self._former.store_canonical(chunk.tenant, chunk.segment.id, chunk.backbone, kv, chunk.local)
        return "background"

    def _is_stored(self, chunk: LoneChunk) -> bool:
        """Returns whether there is a canonical, also in the remote store, from which it is then copied to this one."""
        tenant, id = chunk.tenant, chunk.segment.id
        if self._stores.has_canonical(tenant, id):
            return True
        return self._config.remote is not None and self._stores.canonical(tenant, id) is not None

    def _rest(self, worked: float) -> None:
        """Has the next forward wait, so that forwards take no more than their share of the time."""
        self._next_start = max(self._next_start, time.monotonic() + worked * (1 / MOST_TIME - 1))

    def _wait_for_room(self, chunk: LoneChunk) -> bool:
        """Waits until a forward may begin. Returns whether one is still wanted."""
        activity = self._stores.shared.activity
        while not self._queue.closed:  # also at the interpreter's exit, which waits for this thread
            rest = self._next_start - time.monotonic()
            # A reset renames what is stored: weights may change, and nothing that mixes them may be kept.
            if chunk.backbone != self._stores.backbone:
                return False
            if rest > 0:
                time.sleep(min(rest, LOOK_SECONDS))
            elif activity.wait_idle(QUIET_SECONDS, LOOK_SECONDS):
                return True
        return False
