"""Queued puts of one store: encoded and committed in groups by a thread, readable until then."""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import StoreError
from ..utils.background import start_thread
from . import forks
from .files import Encoded

GROUP = 64
"""Puts that one transaction commits at most."""

Ack = concurrent.futures.Future[bool]
"""Done when the object is durable (False: a later write or deletion has its name), or holds the error."""


@dataclasses.dataclass(eq=False)
class Job:
    """One queued put."""

    name: str
    make: Callable[[], Encoded]
    nbytes: int
    expires: float | int | None
    ticket: int = 0
    acks: list[Ack] = dataclasses.field(default_factory=list)
    encoded: Encoded | None = None


class PutQueue:
    """Queue of puts, bounded in bytes; `add` waits while it is full.

    Args:
      commit: writes jobs durably; returns the number of each, 0 if it did not take place.
      ticket: returns the number of a write that begins now.
      limit: bytes that wait at a time; one object may be larger.

    Attributes:
      nbytes: of the puts that are queued or being written.
    """

    def __init__(self, commit: Callable[[Sequence[Job]], list[int]], ticket: Callable[[], int], limit: int):
        self._commit, self._ticket, self._limit = commit, ticket, limit
        self.forked()
        forks.register(self)

    def forked(self) -> None:
        """Begins empty: the parent process writes what it has queued."""
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._running: dict[str, Job] = {}
        self.nbytes, self._closing, self._thread = 0, False, None
        self._deadline = float("inf")
        self._errors: list[Exception] = []
        self._changed = threading.Condition()

    def add(self, job: Job) -> Ack:
        """Queues a put, in place of one of the same name that waits, whose future is then done with this one's."""
        ack: Ack = concurrent.futures.Future()
        ack.set_running_or_notify_cancel()  # cannot be cancelled
        with self._changed:
            while self.nbytes and self.nbytes + job.nbytes > self._limit and not self._closing:
                self._changed.wait()
            if self._closing:
                raise StoreError("store: got a put after close; expected an open store")
            job.ticket = self._ticket()
            replaced = self._jobs.pop(job.name, None)
            if replaced is not None:
                self.nbytes -= replaced.nbytes
                job.acks += replaced.acks
            job.acks.append(ack)
            self._jobs[job.name] = job
            self.nbytes += job.nbytes
            if self._thread is None:
                self._thread = start_thread(self._work, self._end, "kvpatch-put")
            self._changed.notify_all()
        return ack

    def find(self, name: str) -> Job | None:
        """Returns the put of this name that is queued or being written, None if there is none."""
        with self._changed:
            return self._jobs.get(name) or self._running.get(name)

    def with_prefix(self, prefix: str) -> list[str]:
        """Lists the names of queued puts with a prefix."""
        with self._changed:
            names = [*self._jobs, *self._running]
        return [name for name in names if name.startswith(prefix)]

    def drop(self, prefix: str) -> bool:
        """Drops waiting puts whose names have this prefix; their futures hold False."""
        with self._changed:
            dropped = [self._jobs.pop(name) for name in list(self._jobs) if name.startswith(prefix)]
            self.nbytes -= sum(job.nbytes for job in dropped)
            self._changed.notify_all()
        for job in dropped:
            _resolve(job, False)
        return bool(dropped)

    def flush(self) -> None:
        """Waits until nothing is queued, and raises the first error since the last call, the others in its notes."""
        with self._changed:
            while self._jobs or self._running:
                self._changed.wait()
            errors, self._errors = self._errors, []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"{type(other).__name__}: {other}")
            raise errors[0]

    def close(self) -> None:
        """Writes what is queued and takes nothing more. Raises as `flush`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.flush()

    def _end(self, deadline: float) -> None:
        self._closing, self._deadline = True, deadline
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs or time.monotonic() > self._deadline:
                    self._thread = None
                    return
                jobs = [self._jobs.popitem(last=False)[1] for _ in range(min(GROUP, len(self._jobs)))]
                self._running = {job.name: job for job in jobs}
            self._write(jobs)
            with self._changed:
                self._running = {}
                self.nbytes -= sum(job.nbytes for job in jobs)
                self._changed.notify_all()

    def _write(self, jobs: Sequence[Job]) -> None:
        """Commits a group; one that fails is tried again job by job, so that each future holds its own error."""
        try:
            for job in jobs:
                encoded_of(job)
            results = self._commit(jobs)
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._write([job])
                return
            self._errors.append(error)
            for ack in jobs[0].acks:
                ack.set_exception(error)
            return
        with self._changed:
            for job, seq in zip(jobs, results, strict=True):
                if seq and (later := self._jobs.get(job.name)) is not None:
                    later.ticket = max(later.ticket, seq)  # it was queued behind this one, whose write precedes it
        for job, seq in zip(jobs, results, strict=True):
            _resolve(job, bool(seq))


def encoded_of(job: Job) -> Encoded:
    """Encodes a put's object, once."""
    if job.encoded is None:
        job.encoded = job.make()
    return job.encoded


def _resolve(job: Job, result: bool) -> None:
    for ack in job.acks:
        ack.set_result(result)
