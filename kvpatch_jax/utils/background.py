"""Daemon threads that end before the interpreter shuts down.

A daemon thread that runs JAX during interpreter shutdown kills the process: SIGSEGV, or SIGABRT with "exception not
rethrown". Therefore every thread of the library that its caller does not join is started by `start_thread`.
"""

import atexit
import collections
import functools
import logging
import math
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_SECONDS = 5.0
"""Seconds after the program's end during which waiting jobs are still started."""
RUNNING_SECONDS = 60.0
"""Seconds after the program's end during which running jobs are waited for."""

_ends: dict[threading.Thread, tuple[Callable[[float], None], float]] = {}


def start_thread(
    work: Callable[[], object], end: Callable[[float], None], name: str, patience: float = RUNNING_SECONDS
) -> threading.Thread:
    """Starts a daemon thread that runs `work` and is ended when the interpreter exits.

    Args:
      end: called at exit with a deadline of `time.monotonic`. It must return at once, and keep `work` from starting
        anything new after the deadline.
      patience: seconds for which the thread is waited for at exit; choose less if it may hang outside of JAX.

    Raises:
      RuntimeError: the interpreter is exiting, or the system cannot start another thread.
    """

    def run() -> None:
        try:
            work()
        finally:
            _ends.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _register()
    _ends[thread] = end, patience
    try:
        thread.start()
    except BaseException:
        del _ends[thread]
        raise
    return thread


@functools.cache
def _register() -> None:
    # Once, and not on import: exit functions run in reverse order, and this one must precede jax's shutdown of its
    # backends, which is registered by the time of the first thread.
    atexit.register(_end_threads)


def _end_threads() -> None:
    """Ends all threads and joins them, at interpreter exit."""
    begun = time.monotonic()
    # After a fork these are the parent's threads, which do not run here.
    alive = [(thread, *ending) for thread, ending in _ends.copy().items() if thread.is_alive()]
    for _, end, patience in alive:
        # Nothing begins after the thread is no longer waited for: JAX would run while the interpreter is taken down.
        end(begun + min(EXIT_SECONDS, patience))
    for thread, _, patience in alive:
        thread.join(max(0.0, begun + patience - time.monotonic()))
        if thread.is_alive():
            logger.warning("kvpatch: thread %r still runs after %g s; expected it to end", thread.name, patience)


class JobQueue[Job]:
    """Bounded queue of jobs, which one daemon thread runs in order.

    When the interpreter exits, waiting jobs are run for `EXIT_SECONDS` and dropped after that. The running one is
    waited for.

    Args:
      run: called with each job; must not raise.
      pending: number of jobs that may wait.
      drop: called with each job that will not be run.
      name, patience: as `start_thread` takes them.
    """

    def __init__(
        self,
        run: Callable[[Job], None],
        pending: int,
        name: str,
        *,
        drop: Callable[[Job], None] = lambda job: None,
        patience: float = RUNNING_SECONDS,
    ):
        self._run, self._pending, self._name, self._drop, self._patience = run, pending, name, drop, patience
        self._jobs: collections.deque[Job] = collections.deque()
        self._thread: threading.Thread | None = None
        self._running, self._deadline = False, math.inf
        self._changed = threading.Condition()
        self.closed = False

    @property
    def full(self) -> bool:
        """Whether `add` would refuse a job: the queue is full or closed."""
        return self.closed or len(self._jobs) >= self._pending

    @property
    def backlog(self) -> int:
        """Number of jobs that wait or run."""
        return len(self._jobs) + self._running

    @property
    def expired(self) -> bool:
        """Whether the time for running jobs is over. A job of several parts must not start another part then."""
        return time.monotonic() >= self._deadline

    def add(self, job: Job) -> bool:
        """Queues a job; returns False if the queue is full or closed.

        Raises:
          RuntimeError: as `start_thread`.
        """
        with self._changed:
            if self.full:
                return False
            if self._thread is None:
                self._thread = start_thread(self._work, self._end, self._name, self._patience)
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def flush(self) -> None:
        """Waits until no job waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self.backlog)

    def close(self, patience: float | None = None) -> bool:
        """Runs the waiting jobs, then ends the thread. Idempotent.

        Args:
          patience: seconds to wait at most; jobs that have not begun by then are dropped. None: no limit.

        Returns:
          Whether every job has ended.
        """
        self._end(math.inf)
        with self._changed:
            idle = self._changed.wait_for(lambda: not self.backlog, patience)
            if not idle:
                self._deadline = -math.inf
                self._drop_waiting()
        if self._thread is not None:
            self._thread.join(patience if idle else 0)
        return idle

    def _end(self, deadline: float) -> None:
        """Accepts no more jobs, and begins none after the deadline."""
        with self._changed:
            self.closed, self._deadline = True, min(self._deadline, deadline)
            self._changed.notify_all()

    def _drop_waiting(self) -> None:
        while self._jobs:
            self._drop(self._jobs.popleft())
        self._changed.notify_all()

    def _work(self) -> None:
        """Runs jobs in order, until there will be no more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self.closed)
                if self.expired:
                    self._drop_waiting()
                if not self._jobs:
                    return
                job, self._running = self._jobs.popleft(), True
            try:
                self._run(job)
            finally:
                del job  # frees its arrays before the next job is waited for
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
