"""What sessions run on: one executor with its pool, a store, and how edits and answers get there.

A session keeps a window, names and counts; everything that touches arrays goes through its runtime. `PrivateRuntime` is
the runtime of one session and its forks. `Sessions` has one that many sessions share.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from ..backbone import Backbone, Tokens
from ..errors import PoolError, PoolLostError
from ..patching import Rank
from ..sampling import Sampling, TextPiece
from ..window import Edit, Ledger, PagedExecutor, PatchFormer, PatchStore, Window
from .argument_checks import float_dtype

FIRST_PAGES = 256
"""Pages that a pool begins with which was given no size."""
PAGE_SIZE = 16
RANK = 16
"""Of patches that are formed behind the back, where nobody says another one."""


@runtime_checkable
class Runtime(Protocol):
    """What a session runs on.

    `run` and `answer` may wait for others and must not be called by whoever holds the lock; everything else that
    touches `executor` happens under it.
    """

    @property
    def backbone(self) -> Backbone:
        """Who reads the windows."""
        ...

    @property
    def executor(self) -> PagedExecutor:
        """Its pool, sources and ledger: to be touched under `locked` alone."""
        ...

    @property
    def store(self) -> PatchStore | None:
        """Where canonicals and patches are kept, or None."""
        ...

    @property
    def former(self) -> PatchFormer | None:
        """Who forms patches of its prefills, or None."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps everybody else off the executor."""
        ...

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """Gives the tokens of a piece, of which the first `length` count; held until as many calls of `forget`."""
        ...

    def forget(self, id: str) -> None:
        """Lets go of what was given of a piece, with the last of those who gave it."""
        ...

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window. Raises as `PagedExecutor.run`; then all is as it was."""
        ...

    def anew(self, window: Window) -> Window:
        """Places a window again where the pool was lost, and begins another one; returns it as it is served then."""
        ...

    def answer(
        self,
        window: Window,
        tokens: Tokens,
        length: int,
        steps: int,
        sampling: Sampling,
        key: int | None,
        stop: Sequence[int] | None,
    ) -> Iterator[TextPiece]:
        """Continues a question behind a window, token by token; closing the iterator ends the work.

        Once the first token is there the answer is what it is behind this window, whatever is run afterwards.

        Args:
          window: whose edits were run. tokens: the question, at positions from 0, of which `length` count.
          steps: tokens at most. key: for a temperature above 0. stop: ids that end it; None: the backbone's own.

        Raises:
          As `Executor.stream`.
        """
        ...

    def release(self, branch: str) -> None:
        """Lets go of all that a branch holds."""
        ...

    def close(self) -> None:
        """Forms what waits, and ends. Closing twice is allowed."""
        ...


class PrivateRuntime:
    """The runtime of one session and its forks: everything runs at once, on the thread that asks for it.

    Attributes:
      backbone, executor, store, former: as `Runtime` has them.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        dtype: jax.typing.DTypeLike | None = None,
        rank: Rank | None = None,
        **options: Any,
    ):
        """Allocates the pool, and has a store's patches formed behind the back.

        Args:
          pages: of the pool; None: it begins with 256 and is enlarged where a run finds no room, which compiles for
            the new size.
          dtype: of the pool; None: the one that the backbone computes in.
          rank: of the patches that are formed; 0 forms none. None: 16, from the first session on that may serve them.
          options: of `PagedExecutor`.
        """
        self.backbone, self.store = backbone, store
        self._lock = threading.RLock()
        self._grows = pages is None
        self._given: collections.Counter[str] = collections.Counter()
        dtype = float_dtype(dtype_of(backbone) if dtype is None else dtype, "session")
        self.executor = PagedExecutor(backbone, pages or FIRST_PAGES, page_size, dtype, store=store, **options)
        self.former: PatchFormer | None = None
        if store is not None:
            self.former = PatchFormer(backbone, store, rank)
            self.former.watch(self.executor)

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps everybody else off the executor."""
        return self._lock

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """See `Runtime.provide`."""
        with self._lock:
            if not self._given[id]:
                self.executor.provide(id, tokens=tokens, length=length, content=content)
            self._given[id] += 1

    def forget(self, id: str) -> None:
        """See `Runtime.forget`."""
        with self._lock:
            self._given[id] -= 1
            if self._given[id] <= 0:
                del self._given[id]
                self.executor.forget(id)

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """See `Runtime.run`."""
        with self._lock:
            try:
                return self.executor.run(window, edits)
            except PoolLostError:
                raise
            except PoolError:
                if not self.make_room(window):
                    raise
            # No error of the first try hangs on to what it saw.
            return self.executor.run(window, edits)

    def make_room(self, window: Window) -> bool:
        """Enlarges a pool that was given no size, so that every piece of a window finds room once more.

        Returns:
          Whether it did.
        """
        with self._lock:
            if not self._grows:
                return False
            books = self.executor.books.allocator
            more = sum(-(-piece.entry.tokens // books.page_size) for piece in window.pieces)
            self.executor.enlarge(max(2 * books.pages, books.pages + more))
            return True

    def anew(self, window: Window) -> Window:
        """See `Runtime.anew`."""
        with self._lock:
            if self.executor.lost:
                self.executor.renew()
            if self.executor.current(window.branch) == window.pieces:
                return window
            there, edits = window.anew()
            self.run(there, edits)
            return there

    def answer(
        self,
        window: Window,
        tokens: Tokens,
        length: int,
        steps: int,
        sampling: Sampling,
        key: int | None,
        stop: Sequence[int] | None,
    ) -> Iterator[TextPiece]:
        """See `Runtime.answer`."""
        with self._lock:
            how: dict[str, Any] = {"sampling": sampling, "key": key, "stop": stop}
            stream = self.executor.stream(window, tokens, steps, length, **how)
            # With the first token the window's KV is in the answer's own cache; the pool may change from then on.
            first = next(stream, None)
        if first is not None:
            yield first
            yield from stream

    def release(self, branch: str) -> None:
        """See `Runtime.release`."""
        with self._lock:
            self.executor.release(branch)

    def close(self) -> None:
        """See `Runtime.close`."""
        if self.former is not None:
            self.former.close()


def dtype_of(backbone: Backbone) -> Any:
    """The dtype that a backbone computes in, bfloat16 where it does not say."""
    text = getattr(getattr(backbone, "config", None), "text", None)
    return getattr(text, "dtype", None) or "bfloat16"
