"""Runtimes of sessions: one executor with its pool, a store, and the way to both.

A session keeps a window, names and counts; everything that touches arrays goes through its runtime. `PrivateRuntime`
serves one session and its forks, `SharedRuntime` all sessions of a `Sessions`.
"""

import collections
import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from ..backbone import Backbone, Tokens
from ..errors import PoolError, PoolLostError
from ..patching import Rank
from ..sampling import Sampling, TextPiece
from ..window import CanonicalEncoding, Edit, Ledger, PagedExecutor, PatchFormer, PatchStore, Window
from .argument_checks import float_dtype

FIRST_PAGES = 256
"""Pages of a new pool without a fixed size."""
PAGE_SIZE = 16
PREFILLS = 1 << 30
"""Bytes of prefills that a session adds to its store, unless it says otherwise."""
RANK = 16
"""Default rank of patches that are formed in the background."""
Stops = Sequence[int] | None
"""Token ids that end an answer; None for the backbone's own."""


@runtime_checkable
class TokenIterator(Protocol):
    """Iterator over the tokens of an answer."""

    def __iter__(self) -> Iterator[TextPiece]:
        """Returns itself."""
        ...

    def __next__(self) -> TextPiece:
        """Waits for the next token, with the text that it completes."""
        ...

    def close(self) -> None:
        """Ends decoding."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """What a session runs on.

    `run` and `answer` may wait for other sessions and must not be called under `locked`. Everything else that touches
    `executor` must be.
    """

    @property
    def backbone(self) -> Backbone:
        """The model that reads the windows."""
        ...

    @property
    def executor(self) -> PagedExecutor:
        """Pool, sources and ledger. Access it under `locked` only."""
        ...

    @property
    def store(self) -> PatchStore | None:
        """The store of canonicals and patches, or None."""
        ...

    @property
    def former(self) -> PatchFormer | None:
        """Forms patches of the executor's prefills in the background. None without a store."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the lock of the executor."""
        ...

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """Provides a piece's tokens, of which the first `length` count. `forget` undoes one call."""
        ...

    def forget(self, id: str) -> None:
        """Releases a piece's tokens, once as often as they were provided."""
        ...

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window. Raises as `PagedExecutor.run`, with nothing changed."""
        ...

    def reprefill(self, window: Window) -> Window:
        """Prefills a window again in a new pool, after the old one was lost. Returns it as it is served then."""
        ...

    def answer(
        self,
        window: Window,
        tokens: Tokens,
        length: int,
        steps: int,
        sampling: Sampling,
        key: int | None,
        stop: Stops,
    ) -> TokenIterator:
        """Continues a question after a window, token by token. Closing the iterator ends the work.

        From the first token on, later edits do not change the answer.

        Args:
          window: its edits have run.
          tokens, length: the question, at positions from 0, and how many of its tokens count.
          steps: the largest number of tokens.
          key: the seed, for a temperature above 0.
          stop: token ids that end the answer.

        Raises:
          As `PagedExecutor.stream`.
        """
        ...

    def release(self, branch: str) -> None:
        """Releases all KV of a branch."""
        ...

    def close(self) -> None:
        """Forms pending patches, then stops. Idempotent."""
        ...


class ExecutorRuntime:
    """What both runtimes have: an executor, and how often each piece's tokens were provided.

    Attributes:
      backbone, executor, store, former: as of `Runtime`.
    """

    def __init__(self, executor: PagedExecutor, former: PatchFormer | None):
        self.executor, self.former = executor, former
        self.backbone: Backbone = executor.backbone
        self.store: PatchStore | None = executor.store
        self._providers: collections.Counter[str] = collections.Counter()

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the lock of the executor."""
        raise NotImplementedError

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """Implements `Runtime.provide`."""
        # A session and its forks provide the same tokens; the executor keeps them until the last one lets go.
        with self.locked():
            if not self._providers[id]:
                self.executor.provide(id, tokens=tokens, length=length, content=content)
            self._providers[id] += 1

    def forget(self, id: str) -> None:
        """Implements `Runtime.forget`."""
        with self.locked():
            self._providers[id] -= 1
            if self._providers[id] <= 0:
                del self._providers[id]
                self.executor.forget(id)


class PrivateRuntime(ExecutorRuntime):
    """Runtime of one session and its forks. Everything runs at once, on the calling thread."""

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        dtype: jax.typing.DTypeLike | None = None,
        rank: Rank | None = None,
        prefills: int = 0,
        encoding: CanonicalEncoding | None = None,
        **options: Any,
    ):
        """Allocates the pool. With a store, patches are formed in the background.

        Args:
          pages: of the pool. None: 256 at first; it grows when a run finds no room, and programs are compiled again.
          page_size: tokens of a page.
          dtype: of the pool. None: the dtype that the backbone computes in.
          rank: of the patches that are formed; 0 forms none. None: 16, from the first session that may serve them.
          prefills: bytes of prefills that may be added to the store (`SessionConfig.prefills`).
          encoding: of canonicals (`SessionConfig.encoding`); None: as they were prefilled.
          options: of `PagedExecutor`.
        """
        dtype = float_dtype(dtype_of(backbone) if dtype is None else dtype, "session")
        encoding = CanonicalEncoding() if encoding is None else encoding
        options |= {"store": store, "encodings": encoding.words}
        executor = PagedExecutor(backbone, pages or FIRST_PAGES, page_size, dtype, **options)
        former = None
        if store is not None:
            former = PatchFormer(backbone, store, rank, prefill_bytes=prefills, encoding=encoding)
        super().__init__(executor, former)
        if self.former is not None:
            self.former.watch(executor)
        self._lock, self._grows = threading.RLock(), pages is None

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Implements `Runtime.locked`."""
        # Re-entrant: `reprefill` runs edits while it holds the lock.
        return self._lock

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Implements `Runtime.run`."""
        with self._lock:
            try:
                return self.executor.run(window, edits)
            except PoolLostError:
                raise
            except PoolError:
                if not self.make_room(window):
                    raise
            # Outside of the handler, so that the first error is not the context of a second one.
            return self.executor.run(window, edits)

    def make_room(self, window: Window) -> bool:
        """Enlarges a pool without a fixed size, so that all pieces of a window fit once more.

        Returns:
          Whether the pool was enlarged.
        """
        with self._lock:
            if not self._grows:
                return False
            allocator = self.executor.books.allocator
            more = sum(-(-piece.entry.tokens // allocator.page_size) for piece in window.pieces)
            # Doubled at least, because programs are compiled again for every size.
            self.executor.enlarge(max(2 * allocator.pages, allocator.pages + more))
            return True

    def reprefill(self, window: Window) -> Window:
        """Implements `Runtime.reprefill`."""
        with self._lock:
            # The first of several branches renews the pool for all of them.
            if self.executor.pool.lost:
                self.executor.renew()
            # Another call may have done it meanwhile.
            if self.executor.current.get(window.branch, ()) == window.pieces:
                return window
            again, edits = window.anew()
            self.run(again, edits)
            return again

    def answer(
        self,
        window: Window,
        tokens: Tokens,
        length: int,
        steps: int,
        sampling: Sampling,
        key: int | None,
        stop: Stops,
    ) -> Generator[TextPiece, None, None]:
        """Implements `Runtime.answer`."""
        with self._lock:
            stream = self.executor.stream(window, tokens, steps, length, sampling=sampling, key=key, stop=stop)
            # With the first token, the window's KV is in the answer's own cache. The pool may change from then on.
            first = next(stream, None)
        if first is not None:
            yield first
            yield from stream

    def release(self, branch: str) -> None:
        """Implements `Runtime.release`."""
        with self._lock:
            self.executor.release(branch)

    def close(self) -> None:
        """Implements `Runtime.close`."""
        if self.former is not None:
            self.former.close()


def dtype_of(backbone: Backbone) -> Any:
    """Returns the dtype that a backbone computes in, bfloat16 if it does not say."""
    text = getattr(getattr(backbone, "config", None), "text", None)
    return getattr(text, "dtype", None) or "bfloat16"
