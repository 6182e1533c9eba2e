"""Fetching of several chunks: stored ones are loaded while missing ones are computed (MPIC, section 3.2).

Loads run in a few threads, computation in the caller's. A chunk whose load fails is computed. Of several threads that
request one chunk, one loads or computes it and the others wait for it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..cache import Chunk, fingerprint_of
from ..core import AnyArray
from ..errors import FetchError, InputError, StoreClosedError, StoreError
from .disk.directory import NameState
from .format.encoding_choice import UNREDUCED
from .format.naming import Encoding, Name, encoding_word
from .format.packed import layer_in
from .store import Ack, ChunkStore
from .tiers.device_placement import Placement, place_chunk, placement_key

Source = Literal["store", "shared", "computed", "joined"]
"""Origin of a chunk: the store, the request's shared store, computation, or another thread's fetch."""

Load = concurrent.futures.Future[tuple[Chunk, Source] | None]


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
        if self.encoding not in (None, UNREDUCED):
            object.__setattr__(self, "encoding", encoding_word(self.encoding, "request.encoding"))


def _kept_as(request: Request) -> dict[str, Any]:
    return {"encoding": request.encoding, "lead": request.lead}


@dataclasses.dataclass(frozen=True, eq=False)
class Miss:
    """A request whose chunk no store has, as the input of `compute`.

        def compute(misses):
            return [
                kvp.make_chunk(backbone, [miss.item], id=miss.request.id, encoder=miss.encoder()) for miss in misses
            ]

    The chunks are returned in the order of the misses.
    """

    request: Request
    store: ChunkStore

    @property
    def item(self) -> Any:
        """The request's item, or the result of its function."""
        return self.request.item() if callable(self.request.item) else self.request.item

    def encoder(self) -> np.ndarray | None:
        """Reads the encoder output of the chunk, which is evicted later than the canonical; None if there is none.

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
OnLayer = Callable[[Request, int, Mapping[str, AnyArray]], object]


def fetch(
    store: ChunkStore,
    requests: Sequence[Request],
    compute: Compute,
    *,
    batch: int | None = 1,
    placement: Placement | None = None,
    on_layer: OnLayer | None = None,
    threads: int = 2,
    timeout: float | int | None = None,
    keep: bool = True,
) -> list[Fetched]:
    """Loads stored chunks while it computes the others.

    Args:
      store: the tenant's store.
      requests: the requested chunks.
      compute: returns the chunks of some misses, in order; called in the caller's thread. It must not call `fetch`.
      batch: number of misses per call of `compute`; None: all that there are at that time.
      placement: as in `ChunkStore.get`, for computed chunks too.
      on_layer: called with (request, layer, {channel: [T, K, H]}) for every layer of every chunk, in order, as soon as
        it was read: in a loading thread, while later layers are read. If a load fails in between, the layers of the
        computed chunk follow, from 0. Its errors are raised.
      threads: number of loading threads.
      timeout: seconds after which chunks that are not loaded are computed instead. None: no limit.
      keep: whether computed chunks are stored, asynchronously: `Fetched.ack`, `ChunkStore.flush` and `close` report
        errors.

    Returns:
      One result per request, in order; equal requests share theirs.

    Raises:
      FetchError: `compute` raised, or returned other chunks than requested; its error is the cause. Loads have ended by
        then, and chunks computed before are stored.
      StoreClosedError: the store is closed.
      InputError: `threads` or `batch` is below 1.
    """
    if threads < 1 or (batch is not None and batch < 1):
        raise InputError(f"fetch: got threads={threads}, batch={batch}; expected 1 or more")
    deadline = None if timeout is None else time.monotonic() + timeout
    rest = list(dict.fromkeys(requests))
    got: dict[Request, Fetched] = {}
    while rest:
        round_ = _Round(store, compute, batch, placement, on_layer, deadline, keep)
        rest = round_.run(rest, threads)
        got |= round_.got
    return [got[request] for request in requests]


class _Flight:
    """A chunk that one thread loads or computes, and for which others wait."""

    def __init__(self, store: ChunkStore, request: Request) -> None:
        self.owner = threading.get_ident()
        # States of the names, by which a later write or deletion is noticed.
        self._states: list[tuple[ChunkStore, Name, NameState]] = []
        for source in (store, request.shared):
            if source is not None:
                for word in source.encodings.to_get(request.encoding):
                    name = source.names.canonical(request.backbone, request.id, word, request.lead)
                    self._states.append((source, name, source.disk.name_state(name)))
        self.landed: concurrent.futures.Future[Chunk | None] = concurrent.futures.Future()
        self.computing = False

    @property
    def outdated(self) -> bool:
        """Whether the chunk was written or deleted since the start, so that new requests must not use it."""
        return any(not before.allows(source.disk.name_state(name)) for source, name, before in self._states)

    def land(self, chunk: Chunk | None) -> None:
        """Passes the chunk to the waiting threads; None if it failed."""
        self.landed.set_result(chunk)

    def wait(self, deadline: float | None) -> Chunk | None:
        """Waits for the chunk; None if its thread failed, or still loads it at the deadline."""
        with contextlib.suppress(TimeoutError):
            return self.landed.result(_left(deadline))
        # A load may hang, so it is given up. A computation ends, and to repeat it would take longer than to wait.
        return self.landed.result() if self.computing else None


_flights: dict[Hashable, _Flight] = {}
_flights_lock = threading.Lock()


def _forget_flights() -> None:
    """Forgets, in a forked process, chunks that threads of its parent load or compute."""
    global _flights_lock
    _flights_lock = threading.Lock()
    _flights.clear()


os.register_at_fork(after_in_child=_forget_flights)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class _Round:
    """Pass over requests: loads or computes those that no other thread works on, and waits for the others."""

    def __init__(
        self,
        store: ChunkStore,
        compute: Compute,
        batch: int | None,
        placement: Placement | None,
        on_layer: OnLayer | None,
        deadline: float | None,
        keep: bool,
    ):
        self.store, self.compute, self.batch, self.placement = store, compute, batch, placement
        self.on_layer, self.deadline, self.keep = on_layer, deadline, keep
        self.got: dict[Request, Fetched] = {}
        self._led: dict[Request, _Flight] = {}
        self._loads: dict[Request, Load] = {}
        self._late: dict[Request, Load] = {}
        self._submitted: list[Load] = []
        self._missing: collections.deque[Request] = collections.deque()
        self._unsaved: dict[Request, Chunk] = {}

    def run(self, requests: Sequence[Request], threads: int) -> list[Request]:
        """Runs the pass. Returns the requests on which another thread worked and failed."""
        others: dict[Request, _Flight] = {}
        pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="kvpatch-fetch")

        try:
            for request in requests:
                self._join(request, others)
            self._start(pool)
            while self._loads or self._missing:
                self._take(wait=not self._missing)
                self._compute_some()
        finally:
            try:
                self._save()
            finally:
                self._end(pool)

        # Others are waited for last: what this thread leads is done by then, so that two threads cannot wait for each
        # other.
        again: list[Request] = []
        for request, flight in others.items():
            chunk = flight.wait(self.deadline)
            if chunk is None:
                again.append(request)
            else:
                self._show(request, chunk)
                self.got[request] = Fetched(chunk, "joined")
        return again

    # --------------------------------------------------------------------------------------------- single flight

    def _key(self, request: Request) -> Hashable:
        where = None if self.placement is None else placement_key(self.placement)
        return (self.store.disk.root, self.store.names.space, request, where)

    def _join(self, request: Request, others: dict[Request, _Flight]) -> None:
        key, me = self._key(request), threading.get_ident()
        past = self.deadline is not None and time.monotonic() >= self.deadline

        with _flights_lock:
            flight = _flights.get(key)
            if flight is not None and flight.owner == me:
                raise FetchError("fetch: got a call from within `compute` of the same chunk; expected no fetch there")
            hangs = flight is not None and past and not flight.computing
            if flight is None or hangs or flight.outdated:
                flight = _flights[key] = self._led[request] = _Flight(self.store, request)

        if request not in self._led:
            others[request] = flight

    def _land(self, request: Request, chunk: Chunk | None) -> None:
        flight = self._led.pop(request, None)
        if flight is None:
            return
        with _flights_lock:  # another thread may have replaced it, because it was outdated or hung
            if _flights.get(self._key(request)) is flight:
                del _flights[self._key(request)]
        flight.land(chunk)

    # --------------------------------------------------------------------------------------------------- loading

    def _stores(self, request: Request) -> list[tuple[ChunkStore, Source]]:
        own: list[tuple[ChunkStore, Source]] = [(self.store, "store")]
        return own if request.shared is None else [*own, (request.shared, "shared")]

    def _start(self, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        past = self.deadline is not None and time.monotonic() >= self.deadline
        for request in self._led:
            may_be_there = any(
                store.may_have(request.id, request.backbone, **_kept_as(request)) for store, _ in self._stores(request)
            )
            if may_be_there and not past:
                self._loads[request] = pool.submit(self._load, request)
                self._submitted.append(self._loads[request])
            else:
                self._missing.append(request)

    def _load(self, request: Request) -> tuple[Chunk, Source] | None:
        """Loads a chunk, in a loading thread; None if no store can provide it."""
        for store, source in self._stores(request):
            try:
                named = (request.id, request.backbone)
                if self.on_layer is None:
                    chunk = store.get(*named, placement=self.placement, **_kept_as(request))
                else:
                    stream = store.stream(*named, placement=self.placement, **_kept_as(request))
                    show = functools.partial(self._call, request)
                    chunk = None if stream is None else stream.chunk(show)
            except StoreClosedError:
                raise
            except (StoreError, OSError):
                store.counters.add("fetch_errors")
                continue
            if chunk is not None:
                return chunk, source
        return None

    def _call(self, request: Request, layer: int, values: Mapping[str, AnyArray]) -> None:
        assert self.on_layer is not None
        try:
            self.on_layer(request, layer, values)
        except (StoreError, OSError) as error:  # the callback's error must not count as a failed load
            kind = type(error).__name__
            raise FetchError(
                f"fetch: got {kind}, because on_layer failed at layer {layer}; expected it to accept every layer"
            ) from error

    def _show(self, request: Request, chunk: Chunk) -> None:
        """Calls `on_layer` for the layers of a chunk that was not streamed."""
        if self.on_layer is not None:
            for layer in range(chunk.layout.layers):
                self._call(request, layer, layer_in(chunk.layout, chunk.kv, layer))

    def _take(self, wait: bool) -> None:
        """Takes the results of finished loads; with `wait`, waits until one finishes or the deadline passes."""
        if not self._loads:
            return

        timeout = _left(self.deadline) if wait else 0
        concurrent.futures.wait(self._loads.values(), timeout, concurrent.futures.FIRST_COMPLETED)
        past = self.deadline is not None and time.monotonic() >= self.deadline

        for request, load in list(self._loads.items()):
            if load.done():
                del self._loads[request]
                if not self._loaded(request, load):
                    self._missing.append(request)
            elif past:
                del self._loads[request]
                self._missing.append(request)
                if not load.cancel():
                    self._late[request] = load  # it may finish before the request is computed

    def _loaded(self, request: Request, load: Load) -> bool:
        found = load.result()
        if found is None:
            return False
        self.got[request] = Fetched(*found)
        self._land(request, found[0])
        return True

    # ------------------------------------------------------------------------------------------------- computing

    def _compute_some(self) -> None:
        chosen: list[Request] = []
        while self._missing and (self.batch is None or len(chosen) < self.batch):
            request = self._missing.popleft()
            late = self._late.pop(request, None)
            if late is None or not late.done() or not self._loaded(request, late):
                self._led[request].computing = True
                chosen.append(request)

        if not chosen:
            return
        chunks = self._computed([Miss(request, self.store) for request in chosen])
        for request, chunk in zip(chosen, chunks, strict=True):
            self._unsaved[request] = chunk  # first, so that it is stored even if `on_layer` fails
            placed = chunk if self.placement is None else place_chunk(chunk, self.placement)
            self._show(request, placed)
            self.got[request] = Fetched(placed, "computed")
            self._land(request, placed)

    def _computed(self, misses: Sequence[Miss]) -> list[Chunk]:
        try:
            chunks = list(self.compute(misses))
        except Exception as error:
            kind = type(error).__name__
            raise FetchError(
                f"fetch: got an error: computing {len(misses)} of the chunks raised {kind} (the cause); expected chunks"
            ) from error

        wanted = [(miss.request.id, miss.request.backbone, miss.request.lead) for miss in misses]
        found = [
            (chunk.id, chunk.backbone, chunk.lead) if isinstance(chunk, Chunk) else type(chunk).__name__
            for chunk in chunks
        ]
        if found != wanted:  # the message contains no ids, because it may be logged
            right = sum(pair[0] == pair[1] for pair in zip(found, wanted, strict=False))
            raise FetchError(
                f"fetch: got {len(found)} computed chunks, {right} of them as requested; expected {len(wanted)}"
            )
        try:
            return [
                self.store.encodings.served(c, miss.request.encoding) for c, miss in zip(chunks, misses, strict=True)
            ]
        except InputError as error:
            raise FetchError("fetch: got a computed chunk in another encoding; expected the requested one") from error

    def _save(self) -> None:
        """Queues the puts of computed chunks, after the loads, which need the cores and for which the caller waits."""
        for request, chunk in self._unsaved.items() if self.keep else ():
            ttl = None if request.expires is None else request.expires - self.store.tenant_disk.clock()
            if ttl is not None and ttl <= 0:
                continue

            try:
                ack = self.store.put_async(chunk, encoding=request.encoding, ttl=ttl)
            except (StoreError, ValueError) as error:  # the chunk can be used nevertheless
                ack = concurrent.futures.Future()
                ack.set_exception(error)
            if request in self.got:
                self.got[request] = self.got[request]._replace(ack=ack)

    # ---------------------------------------------------------------------------------------------------- ending

    def _end(self, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        """Cancels queued loads, and waits for running ones until the deadline; a load that hangs ends by itself."""
        pool.shutdown(wait=False, cancel_futures=True)
        running = [load for load in self._submitted if not load.cancelled()]
        if not concurrent.futures.wait(running, _left(self.deadline)).not_done:
            pool.shutdown(wait=True)
        for request in list(self._led):
            self._land(request, None)
