"""Fetching of several chunks: stored ones are loaded while missing ones are computed (MPIC, section 3.2).

Loads run in threads, computation in the caller's. A chunk whose load fails is computed. Of several threads that miss a
chunk, one computes it and the others wait for it.
"""

import collections
import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..cache import Chunk, encode_chunk, fingerprint_of
from ..errors import InputError, StoreError
from ..utils.kinds import is_whole
from .names import Encoding, encoding_word
from .queue import Ack
from .store import ChunkStore

Source = Literal["store", "shared", "computed", "joined"]
"""Origin of a chunk: the store, the request's shared store, computation, or another thread's computation."""
LOADERS = 2
"""Threads that load the chunks of one `fetch`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Request for a chunk. Requests with equal id, backbone, encoding and lead are the same.

    Attributes:
      id, backbone, encoding, lead: as in `ChunkStore.get`. A computed chunk is stored in this encoding, and must have
        this lead. In few bits it is returned encoded too, as it will be read, because its patches are of that base.
      item: input of the computation, such as an item for `Backbone.prepare`, or a function that returns it.
      expires: expiry of a computed chunk in the store, in seconds since the epoch; None: the store's default.
      shared: a store that is read after the tenant's own, and never written.
    """

    id: str = dataclasses.field(repr=False)
    backbone: str
    encoding: Encoding | None = None
    item: Any = dataclasses.field(default=None, compare=False, repr=False)
    expires: float | None = dataclasses.field(default=None, compare=False)
    shared: ChunkStore | None = dataclasses.field(default=None, compare=False)
    lead: str | None = None

    def __post_init__(self) -> None:
        fingerprint_of(self.backbone, "request")
        object.__setattr__(self, "encoding", encoding_word(self.encoding))

    @property
    def names(self) -> dict[str, Any]:
        """Arguments of `ChunkStore.get` that name the chunk."""
        return {"id": self.id, "backbone": self.backbone, "encoding": self.encoding, "lead": self.lead}


@dataclasses.dataclass(frozen=True, eq=False)
class Miss:
    """A request whose chunk no store has, as the input of `compute`, which returns the chunks in order.

    def compute(misses):
        return [kvp.make_chunk(backbone, [miss.item], id=miss.request.id, encoder=miss.encoder()) for miss in misses]
    """

    request: Request
    store: ChunkStore

    @property
    def item(self) -> Any:
        """The request's item, or the result of its function."""
        return self.request.item() if callable(self.request.item) else self.request.item

    def encoder(self) -> np.ndarray | None:
        """Reads the chunk's encoder output, an object of its own that may outlive the canonical; None if there is none.

        With it `make_chunk(encoder=)` prefills, and `backbone.embed(features=)` embeds, without running the tower.
        """
        for store in (self.store, self.request.shared):
            output = None if store is None else store.get_encoder(self.request.id, self.request.backbone)
            if output is not None:
                return output
        return None


class Fetched(NamedTuple):
    """A chunk, its source, and if it was computed the future of its asynchronous put."""

    chunk: Chunk
    source: Source
    ack: Ack | None = None


Compute = Callable[[Sequence[Miss]], Sequence[Chunk]]


def fetch(
    store: ChunkStore,
    requests: Sequence[Request],
    compute: Compute,
    *,
    batch: int | None = 1,
    timeout: float | int | None = None,
) -> list[Fetched]:
    """Loads stored chunks while it computes the others, and queues computed ones for the store.

    Args:
      store: the tenant's store.
      compute: computes missing chunks, in the caller's thread. It must not call `fetch` for the same chunks.
      batch: number of misses per call of `compute`; None: all that there are at that time.
      timeout: seconds after which chunks that are not loaded are computed instead. None: no limit.

    Returns:
      One result per request, in order; equal requests share theirs. `Fetched.ack`, `ChunkStore.flush` and `close`
      report the errors of puts.

    Raises:
      StoreError: `compute` raised, or returned other chunks than requested; its error is the cause. Loads have ended by
        then, and chunks computed before are stored.
      StoreError: the store is closed. InputError: `batch` is below 1.
    """
    if batch is not None and not is_whole(batch, 1):
        raise InputError(f"fetch: got batch={batch!r:.40}; expected an integer >= 1, or None")
    state = _Fetch(store, compute, batch, None if timeout is None else time.monotonic() + timeout)
    pool = concurrent.futures.ThreadPoolExecutor(LOADERS, thread_name_prefix="kvpatch-fetch")
    try:
        state.start(pool, requests)
        while state.loads or state.missing or state.joined:
            state.take_loads()
            if state.missing:
                state.compute_missing()
            elif state.joined and not state.loads:
                # Others are waited for last: by then this thread computes nothing that they could wait for.
                state.take_joined()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running = [load for load in state.submitted if not load.cancelled()]
        concurrent.futures.wait(running, state.seconds_left())  # one that hangs is left to end by itself
    return [state.results[request] for request in requests]


class _Flight(NamedTuple):
    """A chunk that one thread computes; the future holds None if that failed."""

    thread: int
    landed: concurrent.futures.Future[Chunk | None]


_flights: dict[Hashable, _Flight] = {}
_flights_lock = threading.Lock()


def _forget_flights() -> None:
    """Forgets, in a forked process, chunks that threads of its parent compute."""
    global _flights_lock
    _flights_lock = threading.Lock()
    _flights.clear()


os.register_at_fork(after_in_child=_forget_flights)


class _Fetch:
    """State of one call of `fetch`: each request is being loaded, missing, computed by another thread, or done."""

    def __init__(self, store: ChunkStore, compute: Compute, batch: int | None, deadline: float | None):
        self.store, self.compute, self.batch, self.deadline = store, compute, batch, deadline
        self.loads: dict[Request, concurrent.futures.Future[Fetched | None]] = {}
        self.submitted: list[concurrent.futures.Future[Fetched | None]] = []
        self.missing: collections.deque[Request] = collections.deque()
        self.joined: dict[Request, _Flight] = {}
        self.results: dict[Request, Fetched] = {}

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline, at least 0; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def start(self, pool: concurrent.futures.ThreadPoolExecutor, requests: Sequence[Request]) -> None:
        """Submits the loads of what a store may have."""
        for request in dict.fromkeys(requests):
            if any(store.may_have(**request.names) for store, _ in self._stores(request)):
                self.loads[request] = pool.submit(self._load, request)
            else:
                self.missing.append(request)
        self.submitted = list(self.loads.values())

    def _stores(self, request: Request) -> list[tuple[ChunkStore, Source]]:
        stores: list[tuple[ChunkStore, Source]] = [(self.store, "store")]
        return stores if request.shared is None else [*stores, (request.shared, "shared")]

    def _load(self, request: Request) -> Fetched | None:
        """Loads a chunk; None if no store can provide it."""
        for store, source in self._stores(request):
            try:
                chunk = store.get(**request.names)
            except (StoreError, OSError):
                if store.objects.closed:
                    raise
                store.objects.counters["fetch_errors"] += 1
                continue
            if chunk is not None:
                return Fetched(chunk, source)
        return None

    def take_loads(self) -> None:
        """Takes the results of loads; waits for one, until the deadline, unless there is something to compute."""
        timeout = 0 if self.missing else self.seconds_left()
        if self.loads:
            concurrent.futures.wait(self.loads.values(), timeout, concurrent.futures.FIRST_COMPLETED)
        is_late = self.seconds_left() == 0
        for request, load in list(self.loads.items()):
            if load.done() or is_late:
                del self.loads[request]
                result = load.result() if load.done() else None
                if result is not None:
                    self.results[request] = result
                else:
                    load.cancel()
                    self.missing.append(request)

    def compute_missing(self) -> None:
        """Computes the next batch of misses and queues their puts, except those that another thread computes."""
        flights: dict[Request, _Flight] = {}
        try:
            while self.missing and (self.batch is None or len(flights) < self.batch):
                self._lead_or_join(self.missing.popleft(), flights)
            requests = [request for request in flights if not self._was_stored_meanwhile(request)]
            chunks = self._computed(requests) if requests else []
            for request, chunk in zip(requests, chunks, strict=True):
                ack = self._put(request, chunk)  # before it lands: whoever comes later finds it in the store
                self.results[request] = Fetched(chunk, "computed", ack)
                flights[request].landed.set_result(chunk)
        finally:
            with _flights_lock:
                for request in flights:
                    del _flights[self._key(request)]
            for flight in flights.values():
                if not flight.landed.done():
                    flight.landed.set_result(None)

    def _key(self, request: Request) -> Hashable:
        return self.store.objects.root, self.store.objects.tenant, request

    def _lead_or_join(self, request: Request, flights: dict[Request, _Flight]) -> None:
        """Adds the flight of a request that nobody computes, or notes that of another thread."""
        with _flights_lock:
            flight = _flights.get(self._key(request))
            if flight is None:
                flight = _Flight(threading.get_ident(), concurrent.futures.Future())
                flights[request] = _flights[self._key(request)] = flight
            elif flight.thread == threading.get_ident():
                raise StoreError("fetch: got a call from within `compute` of the same chunk; expected no fetch there")
            else:
                self.joined[request] = flight

    def _was_stored_meanwhile(self, request: Request) -> bool:
        """Loads a chunk that another thread computed since this one missed it."""
        if self.seconds_left() == 0 or not self.store.contains(**request.names):
            return False
        result = self._load(request)
        if result is not None:
            self.results[request] = result
        return result is not None

    def _computed(self, requests: Sequence[Request]) -> list[Chunk]:
        """Computes chunks, in their encodings. Raises StoreError, without ids, because it may be logged."""
        try:
            chunks = list(self.compute([Miss(request, self.store) for request in requests]))
        except Exception as error:
            raise StoreError(
                f"fetch: got {type(error).__name__} (the cause) from computing {len(requests)} chunks; expected chunks"
            ) from error

        count = sum(_is_of(chunk, request) for chunk, request in zip(chunks, requests, strict=False))
        if len(chunks) != len(requests) or count < len(requests):
            raise StoreError(
                f"fetch: got {len(chunks)} computed chunks, {count} of them as requested; expected {len(requests)}"
            )
        encodings = [request.encoding for request in requests]
        return [
            chunk if word in (None, chunk.encoding) else encode_chunk(chunk, word)
            for chunk, word in zip(chunks, encodings, strict=True)
        ]

    def _put(self, request: Request, chunk: Chunk) -> Ack | None:
        """Queues the put of a computed chunk, unless it has expired; a failure does not keep it from being used."""
        ttl = None if request.expires is None else request.expires - time.time()
        if ttl is not None and ttl <= 0:
            return None
        try:
            return self.store.put_async(chunk, ttl=ttl)
        except (StoreError, ValueError) as error:
            ack: Ack = concurrent.futures.Future()
            ack.set_exception(error)
            return ack

    def take_joined(self) -> None:
        """Waits for one chunk that another thread computes; if that fails, it is missing again."""
        request, flight = self.joined.popitem()
        chunk = flight.landed.result()
        if chunk is None:
            self.missing.append(request)
        else:
            self.results[request] = Fetched(chunk, "joined")


def _is_of(chunk: Any, request: Request) -> bool:
    """Returns whether a computed chunk is the requested one, encoded so or not at all."""
    if not isinstance(chunk, Chunk) or chunk.encoding not in (None, request.encoding):
        return False
    return (chunk.id, chunk.backbone, chunk.lead) == (request.id, request.backbone, request.lead)
