"""Asynchronous puts: a queue bounded in bytes, one writing thread, small objects committed in groups.

A second thread sets the futures, so that a callback may wait for other writes.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ...errors import StoreClosedError
from ..format.naming import Name
from ..format.objects import Blob
from ..io.thread_pool import register_fork_guard

Put = Callable[[Sequence[tuple[Name, Blob]]], object]
Ack = concurrent.futures.Future[None]


@runtime_checkable
class Revisions(Protocol):
    """Interface of the source of revisions: `TenantDisk`."""

    def begin(self, name: Name) -> int:
        """Returns the revision of a write that begins now."""
        ...

    def revision(self, name: Name) -> int:
        """Returns the latest revision of a name."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """A queued write with its revision, the function that encodes its object, and its future."""

    name: Name
    revision: int
    make: Callable[[], Blob] = dataclasses.field(repr=False)
    nbytes: int
    future: concurrent.futures.Future[None]
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @functools.cached_property
    def _blob(self) -> Blob:
        return dataclasses.replace(self.make(), revision=self.revision)

    def blob(self) -> Blob:
        """Encodes the object once, for the writer and for readers of the queue."""
        with self.lock:
            return self._blob


class Writer:
    """Writes queued objects in order. A future is done when its object is durable, or holds the error.

    Args:
      put: writes a group durably, or raises.
      revisions: revisions of names. A queued write gets its own when it is queued, and is not read from the queue once
        its name has a later one.
      room: bytes that may wait; `add` waits until there is room. A larger object is queued alone.
      small: bytes up to which objects are committed together.
      group: largest number of objects per commit.
      patience: seconds for which a small object waits for others.

    Attributes:
      newest: the newest queued job by the path of its object, until it is durable or failed.
    """

    def __init__(
        self,
        put: Put,
        revisions: Revisions,
        room: int = 256 << 20,
        small: int = 4 << 20,
        group: int = 64,
        patience: float = 0.005,
    ):
        self._put, self._revisions = put, revisions
        self._room, self._small, self._group, self._patience = room, small, group, patience
        self._jobs: collections.deque[_Job] = collections.deque()
        self.newest: dict[str, _Job] = {}
        self._bytes = self._busy = 0
        self._batch: list[_Job] = []
        # Jobs whose futures are not set yet.
        self._outcomes: collections.deque[tuple[_Job, BaseException | None]] = collections.deque()
        self._errors: list[BaseException] = []
        self._closed = self._ended = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        register_fork_guard(self)

    def forked(self) -> None:
        """Empties the queue in a forked process. The parent writes the queued objects; futures here raise an error."""
        orphans = [*(job for job, _ in self._outcomes), *self._batch, *self._jobs]
        self._jobs, self._outcomes, self._batch, self._errors = collections.deque(), collections.deque(), [], []
        self.newest = {}
        self._bytes = self._busy = 0
        self._changed, self._threads = threading.Condition(), []
        for job in orphans:
            if not job.future.done():
                job.future.set_exception(
                    StoreClosedError("store: got a put before this process was forked; expected its parent to write it")
                )

    def add(self, name: Name, make: Callable[[], Blob], nbytes: int) -> concurrent.futures.Future[None]:
        """Queues an object; `make` encodes it, on the writer's thread.

        Raises:
          StoreClosedError: after `close`.
        """
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a queued object cannot be cancelled
        revision = self._revisions.begin(name)

        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + nbytes <= self._room)
            if self._closed:  # perhaps while it waited
                raise StoreClosedError("store: got a put after close; expected an open store")
            self._jobs.append(job := _Job(name, revision, make, nbytes, future))
            self.newest[name.path] = job
            self._bytes += nbytes
            if not self._threads:
                for run, word in ((self._run, "writer"), (self._acknowledge, "acknowledge")):
                    self._threads.append(threading.Thread(target=run, name=f"kvpatch-{word}", daemon=True))
                    self._threads[-1].start()
                atexit.register(self.close)  # queued objects are written before the interpreter ends
            self._changed.notify_all()
        return future

    def has(self, name: Name) -> bool:
        """Returns whether an object of that name is queued, not yet durable, and its name has no later revision."""
        return self._waiting(name.path) is not None

    def waiting(self, name: Name) -> Blob | None:
        """Returns the newest queued object of a name, as `has`; None also if it cannot be encoded."""
        job = self._waiting(name.path)
        with contextlib.suppress(Exception):  # its future has the error
            return None if job is None else job.blob()
        return None

    def waiting_paths(self, prefix: str) -> list[str]:
        """Returns the paths of queued objects, as `has`, with a prefix."""
        with self._changed:
            paths = [path for path in self.newest if path.startswith(prefix)]
        return [path for path in paths if self._waiting(path) is not None]

    def _waiting(self, path: str) -> _Job | None:
        job = self.newest.get(path)
        return None if job is None or self._revisions.revision(job.name) > job.revision else job

    def _end(self, jobs: Sequence[_Job]) -> None:
        """Removes finished jobs from the queue's index, before their futures are set."""
        with self._changed:
            for job in jobs:
                if self.newest.get(job.name.path) is job:  # a later put of the name may wait
                    del self.newest[job.name.path]

    def flush(self) -> None:
        """Waits until every queued object is durable and acknowledged; within a callback of a future only durable.

        Raises:
          StoreError: the first failure since the last `flush`, even if its future was read; others are in its notes.
        """
        with self._changed:
            # A callback cannot wait for its own future, which counts as unacknowledged until the callback returns.
            in_callback = threading.current_thread() in self._threads
            self._changed.wait_for(lambda: not (self._jobs or self._busy) and (in_callback or not self._outcomes))
            errors, self._errors = self._errors, []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also failed: {other}")
            raise errors[0]

    def close(self) -> None:
        """Writes the queued objects and ends the threads. Idempotent. Raises as `flush`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may close the store
                thread.join()
        if self._threads:
            atexit.unregister(self.close)
        self.flush()

    def _run(self) -> None:
        while batch := self._next():
            outcomes = self._written(batch)
            with self._changed:
                self._errors += [error for _, error in outcomes if error is not None]
                self._outcomes += outcomes
                self._bytes -= sum(job.nbytes for job in batch)
                self._busy, self._batch = 0, []
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _acknowledge(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outcomes or self._ended)
                if not self._outcomes:
                    return
                job, error = self._outcomes[0]

            # Without the lock, because callbacks may use the store; removed after them, because `flush` waits for them.
            job.future.set_result(None) if error is None else job.future.set_exception(error)
            with self._changed:
                self._outcomes.popleft()
                self._changed.notify_all()

    def _next(self) -> list[_Job]:
        """Waits for the next group, or one large object; empty once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            deadline = time.monotonic() + self._patience
            while self._may_grow() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            batch = self._ready()
            for _ in batch:
                self._jobs.popleft()
            self._busy, self._batch = len(batch), batch
            return batch

    def _may_grow(self) -> bool:
        """Returns whether every queued job belongs to one group of small objects that has room for more."""
        small = bool(self._jobs) and self._jobs[0].nbytes <= self._small
        return small and len(self._ready()) == len(self._jobs) < self._group and not self._closed

    def _ready(self) -> list[_Job]:
        batch: list[_Job] = []
        for job in self._jobs:
            if len(batch) == self._group or (batch and job.nbytes > self._small):
                break
            batch.append(job)
            if job.nbytes > self._small:
                break
        return batch

    def _written(self, batch: list[_Job]) -> list[tuple[_Job, BaseException | None]]:
        """Writes a group. Returns each job with its error or None."""
        try:
            self._put([(job.name, job.blob()) for job in batch])
        except BaseException as error:
            if len(batch) > 1:
                # Alone, so that one bad object does not fail the others.
                outcomes = []
                for job in batch:
                    outcomes += self._written([job])
                return outcomes
            self._end(batch)
            return [(batch[0], error)]

        # Readers find it on the disk from now on.
        self._end(batch)
        return [(job, None) for job in batch]


def joined(acks: Sequence[Ack]) -> Ack:
    """Returns a future that is done when all are, with the first error."""
    both: Ack = concurrent.futures.Future()
    both.set_running_or_notify_cancel()
    left = [len(acks)]
    lock = threading.Lock()

    def done(_: Ack) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        error = next((ack.exception() for ack in acks if ack.exception() is not None), None)
        both.set_exception(error) if error is not None else both.set_result(None)

    for ack in acks:
        ack.add_done_callback(done)
    return both
