"""`Runtime`: one executor with its pool, a store and what is formed in the background, for one session or for many.

A session keeps a window, names and counts; everything that touches arrays goes through its runtime.
"""

import collections
import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

import jax

from ..answers import Sampling, TextPiece
from ..backbone import Backbone, Tokens
from ..cache import brief
from ..core import Buckets
from ..errors import PoolError, ReuseWarning, SessionError
from ..patching import Rank
from ..plan import Goal
from ..utils.compiling import keep_compiled
from ..window import Executor, PatchFormer, PatchStore, Step, Window
from .guard import Guard

FIRST_PAGES = 256
"""Pages of a new pool without a fixed size."""
PREFILLS = 1 << 30
"""Bytes of prefills that a runtime adds to its store."""


class AnswerOptions(NamedTuple):
    """Options of one answer: the most tokens, how they are chosen with which seed, and ids that end it.

    Without a `key` answers are greedy; a `stop` of None means the backbone's own stop tokens.
    """

    steps: int
    sampling: Sampling = Sampling()
    key: int | None = None
    stop: tuple[int, ...] | None = None


class InlineScheduler:
    """Scheduler of one session and its forks: every job runs at once, on the calling thread.

    A scheduler is the order of access to an executor. `BatchScheduler` is the other one, with these four methods.
    """

    def __init__(self, executor: Executor, grows: bool):
        """Takes an executor; `grows`: its pool is enlarged where a job finds no room."""
        self._executor, self._grows, self._lock = executor, grows, threading.RLock()

    def do[Result](self, job: Callable[[], Result], window: Window | None = None) -> Result:
        """Runs a job that has the executor to itself, and returns its result. A job that finds no room may run again.

        Args:
          window: that the job brings; None of jobs that need no room.

        Raises:
          What the job raises. PoolError: no room.
        """
        with self._lock:
            try:
                return job()
            except PoolError as error:
                if error.lost or not self._grows or window is None:
                    raise
            # Doubled at least, because programs are compiled again for every size.
            have, size = self._executor.slots.pages, self._executor.slots.page_size
            pages = sum(-(-piece.entry.tokens // size) for piece in window.pieces)
            self._executor.enlarge(max(2 * have, have + pages))
            # Outside of the handler, so that the first error is not the context of a second one.
            return job()

    def answer(
        self, window: Window, tokens: Tokens, length: int, options: AnswerOptions
    ) -> Generator[TextPiece, None, None]:
        """Yields the tokens of an answer, decoded on the thread that reads. `close` ends the work."""
        steps, sampling, key, stop = options
        with self._lock:
            stream = self._executor.stream(window, tokens, steps, length, sampling=sampling, key=key, stop=stop)
            # With the first token, the window's KV is in the answer's own cache. The pool may change from then on.
            first = next(stream, None)
        if first is not None:
            yield first
            yield from stream

    def drop(self, branch: str) -> None:
        """Ends the answers about a branch. Here they have caches of their own, and continue."""

    def close(self) -> None:
        """Ends all answers. Idempotent."""


class Runtime:
    """What sessions run on. Sessions and their forks may share one; every access to the executor goes through `do`.

    Attributes:
      backbone, store, executor: the model, the store or None, and the pool with its windows.
      former: stores prefills and forms patches in the background. None without a store.
      scheduler: the order of access.
      private: whether it was opened for one session and its forks, the last of which closes it.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        pages: int | None = None,
        page_size: int = 16,
        dtype: jax.typing.DTypeLike | None = None,
        rank: Rank | str | None = None,
        encoding: str | None = None,
        schedule: Callable[[Executor], Any] | None = None,
        **options: Any,
    ):
        """Allocates the pool. With a store, prefills are stored and patches formed in the background.

        Args:
          pages: of the pool. None: 256 at first; it grows when a window finds no room, and programs are compiled again.
          dtype: of the pool. None: the dtype that the backbone computes in, bfloat16 if it does not say.
          rank: of the patches that are formed; 0 forms none. None: as of `SessionConfig`, from
            the first session that may serve them.
          encoding: of canonicals (`SessionConfig.encoding`); None: as they were prefilled.
          schedule: makes the scheduler of many sessions; None: of one session, inline.
          options: of `Executor`.
        """
        keep_compiled()
        # A loop sees images of many sizes.
        if getattr(backbone, "buckets", Buckets()) is None:
            backbone = cast("Any", backbone).with_buckets(Buckets())
        if dtype is None:
            text = getattr(getattr(backbone, "config", None), "text", None)
            dtype = getattr(text, "dtype", None) or "bfloat16"
        options |= {"store": store, "encoding": encoding}
        self.executor = Executor(backbone, pages or FIRST_PAGES, page_size, dtype, **options)
        self.backbone, self.store = backbone, store
        self.private = schedule is None
        self.scheduler: Any = (
            InlineScheduler(self.executor, pages is None) if schedule is None else schedule(self.executor)
        )
        self.former: PatchFormer | None = None
        if store is not None:
            self.former = PatchFormer(backbone, store, rank, prefill_bytes=PREFILLS, encoding=encoding)
            self.former.watch(self.executor)
        self._guards = dict[tuple[Goal, float], Guard]()
        self._users, self._closed, self._process = 0, False, os.getpid()
        self._lock = threading.Lock()
        self._providers: collections.Counter[str] = collections.Counter()
        # Branches whose KV was lost with a pool.
        self._lost = set[str]()

    # -------------------------------------------------------------------------------------------------------- windows

    def do[Result](self, job: Callable[[], Result], window: Window | None = None) -> Result:
        """Runs a job that has the executor to itself. As `InlineScheduler.do`.

        Raises:
          SessionError: after `close`, and in a forked process. As the job.
        """
        self.check_open()
        return self.scheduler.do(job, window)

    def run(self, window: Window) -> Step:
        """Brings the KV of a window. Raises as `Executor.run`, with nothing changed."""

        def job() -> Step:
            self._check_pool(window.branch)
            return self.executor.run(window)

        return self.do(job, window)

    def reprefill(self, window: Window) -> Window:
        """Brings a window again in a new pool, after the old one was lost. Returns it as it is served then."""

        def job() -> Window:
            # The first of several branches renews the pool for all of them.
            if self.executor.lost:
                self._lost.update(self.executor.branches)
                self.executor.renew()
            if window.branch not in self._lost:
                return window
            self.executor.release(window.branch)
            again = window.anew()
            self.executor.run(again)
            self._lost.discard(window.branch)
            return again

        return self.do(job, window)

    def answer(self, window: Window, tokens: Tokens, length: int, options: AnswerOptions) -> Any:
        """Continues a question after a window. Returns an iterator of `TextPiece`, whose `close` ends the work.

        From the first token on, later changes of the window do not change the answer.

        Args:
          window: brought as by `run`, if it is not there.
          tokens, length: the question, at positions from 0, and how many of its tokens count.

        Raises:
          As `run`, and `Executor.stream`.
        """

        def job() -> Any:
            self._check_pool(window.branch)
            return self.scheduler.answer(window, tokens, length, options)

        # Nothing is to be done, unless an interrupt of the caller has left another window there.
        self.run(window)
        return self.do(job)

    def release(self, branch: str) -> None:
        """Releases all KV of a branch, and ends the answers about it."""
        if not self._closed:
            self.scheduler.drop(branch)
        # A closed scheduler has no thread, and nobody else uses the executor.
        with contextlib.suppress(SessionError):
            self.scheduler.do(lambda: self.executor.release(branch))
        self._lost.discard(branch)

    def _check_pool(self, branch: str) -> None:
        """Raises PoolError for a branch whose KV, or whose parent's, was lost with a pool."""
        self.executor.check_pool()
        if branch not in self.executor.branches and branch not in self._lost:
            branch = branch.rpartition("/")[0]
        if branch in self._lost:
            found = f"session: got branch {brief(branch)!r}, whose pool was lost"
            raise PoolError(f"{found}; expected `reprefill`", lost=True)

    # --------------------------------------------------------------------------------------------------------- tokens

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """Provides a piece's tokens, of which the first `length` count. `forget` undoes one call."""

        def job() -> None:
            # A session and its forks provide the same tokens; the executor keeps them until the last one lets go.
            if not self._providers[id]:
                self.executor.provide(id, tokens=tokens, length=length, content=content)
            self._providers[id] += 1

        self.do(job)

    def forget(self, id: str) -> None:
        """Releases a piece's tokens, once as often as they were provided."""

        def job() -> None:
            self._providers[id] -= 1
            if self._providers[id] <= 0:
                del self._providers[id]
                self.executor.forget(id)

        with contextlib.suppress(SessionError):
            self.do(job)

    def guard(self, goal: Goal, share: float) -> Guard:
        """Returns the guard of all sessions that have this goal, and this share of audited answers."""
        with self._lock:
            return self._guards.setdefault((goal, share), Guard(goal, share))

    # ------------------------------------------------------------------------------------------------------------ end

    def check_open(self) -> None:
        """Raises SessionError after `close`, and in a forked process, which has no thread of the scheduler."""
        if os.getpid() != self._process:
            raise SessionError("session: got used in a process that was forked off; expected its own")
        if self._closed:
            raise SessionError("session: got used after its runtime was closed; expected it open")

    def acquire(self, users: int = 1) -> int:
        """Registers an open session, or with -1 unregisters one. Returns how many there are."""
        with self._lock:
            self._users += users
            return self._users

    def close(self) -> None:
        """Ends answers, finishes what is formed in the background, then stops, and warns of what failed. Idempotent."""
        if os.getpid() != self._process:
            return
        was_open, self._closed = not self._closed, True
        self.scheduler.close()
        if self.former is not None:
            self.former.close()
            if was_open and (failed := self.former.done.failed):
                last = " ".join(str(self.former.errors[-1]).split())
                message = f"reuse: {failed} pieces were not stored, or got no patch; the last one: {last:.300}"
                warnings.warn(message, ReuseWarning, stacklevel=2)
