"""`Sessions`: many sessions in one process, on one pool and one store."""

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Any

import jax

from ..backbone import Backbone
from ..errors import InputError
from ..patching import Rank
from ..window import PagedExecutor, PatchFormer, PatchStore
from .argument_checks import check_backbone, check_rank, float_dtype
from .runtime import PAGE_SIZE, dtype_of
from .session import Session
from .shared_runtime import SharedRuntime


@dataclasses.dataclass(frozen=True)
class SharedStats:
    """What many sessions do and did. `print` shows a line.

    Attributes:
      growing: answers that grow now. waiting: questions that wait for a place or for room. in_line: calls that wait for
        room in the pool, or to ask.
      free: slots that nobody owns, of `slots`.
      steps: launches that made tokens. answers: that ended, `cancelled` ones among them.
      busy: calls that waited in vain. renewed: how often the pool was lost.
      programs: shapes of steps (rows, pages) and of questions (tokens, pages) that were compiled.
    """

    growing: int
    waiting: int
    in_line: int
    free: int
    slots: int
    steps: int
    answers: int
    cancelled: int
    busy: int
    renewed: int
    programs: int

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in dataclasses.fields(self))


class Sessions:
    """Many sessions in one process: they share one pool, one store, and what is compiled.

    With a backbone of `models.load`, a `ChunkStore` and an image:

        with kvp.Sessions(backbone, store, pages=4096) as sessions:
            session = sessions.open(keep=4)      # on any thread, as many as there are
            session.add(screenshot)
            print(session.ask("What changed?"))

    Edits run one after the other; questions that are under way at the same time get their next tokens in one launch.
    Where the pool is full, or as many questions wait as may, calls wait for others, each in its turn.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        pages: int,
        page_size: int = PAGE_SIZE,
        batch: int = 8,
        waiting: int = 64,
        timeout: float = 60.0,
        dtype: jax.typing.DTypeLike | None = None,
        rank: Rank | None = None,
        **options: Any,
    ):
        """Allocates the pool.

        Args:
          store: where canonicals and patches are kept.
          pages, page_size: of the pool, which stays so large.
          batch: answers that grow together. waiting: questions that may wait for a place among them.
          timeout: seconds that a call waits for others before it raises SessionBusyError.
          dtype: of the pool; None: the one that the backbone computes in.
          rank: of the patches that are formed; 0 forms none. None: 16, from the first session on that has a certificate
            or serves without one.
          options: of `PagedExecutor`.

        Raises:
          InputError: numbers, a backbone or a store that are none. PoolError: no pages, or an empty page. RankError,
          DtypeError: what is none.
        """
        check_backbone(backbone, store, "sessions")
        check_rank(rank, "sessions", 0)
        dtype = float_dtype(dtype_of(backbone) if dtype is None else dtype, "sessions")
        executor = PagedExecutor(backbone, pages, page_size, dtype, store=store, **options)
        self.backbone, self.store = backbone, store
        former = None
        if store is not None:
            former = PatchFormer(backbone, store, rank)
        try:
            self.shared = SharedRuntime(executor, former, batch=batch, waiting=waiting, timeout=timeout)
        except BaseException:
            if former is not None:
                former.close()
            raise
        if former is not None:
            former.watch(executor)

    def open(self, keep: int | None = None, **options: Any) -> Session:
        """Opens a session on the shared pool and store; `Session.close` gives its pages back.

        Args:
          keep: how many chunks stay behind the lead; None: all. options: of `Session`, but for those of the pool.

        Raises:
          SessionClosedError. As `Session`; and SessionBusyError: no room for its lead, for as long as a call waits.
        """
        self.shared.check_open()
        _check_own(options)
        return Session(self.backbone, self.store, keep, runtime=self.shared, branch=self.name(), **options)

    def restore(self, path: str | os.PathLike[str], **options: Any) -> Session:
        """Goes on, on the shared pool and store, from a session that `Session.save` wrote.

        Args:
          options: of `Session.restore`, but for those of the pool.

        Raises:
          SessionClosedError. As `Session.restore`; PoolError: no room, for as long as a call waits.
        """
        self.shared.check_open()
        _check_own(options)
        return Session.restore(path, self.backbone, self.store, runtime=self.shared, branch=self.name(), **options)

    @staticmethod
    def name() -> str:
        """A name for a window of its own in the pool: `Window.empty(…, branch=…)`."""
        return secrets.token_hex(8)

    def stats(self) -> SharedStats:
        """What goes on, and went on."""
        shared, driver = self.shared, self.shared.driver
        with shared.locked():
            allocator = shared.executor.books.allocator
            return SharedStats(
                growing=len(driver.batch.rows),
                waiting=len(driver.asks),
                in_line=len(driver.room) + len(driver.door),
                free=int((allocator.counts == 0).sum()),
                slots=allocator.pages * allocator.page_size,
                steps=driver.batch.steps,
                answers=driver.ended,
                cancelled=driver.cancelled,
                busy=driver.busy,
                renewed=shared.renewed,
                programs=len(driver.batch.shapes),
            )

    def close(self) -> None:
        """Ends every answer and every wait with SessionClosedError; sessions that are open take no further call.

        Patches of what was prefilled are formed and stored first. Closing twice is allowed.
        """
        self.shared.close()

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_own(options: Mapping[str, Any]) -> None:
    taken = [word for word in ("runtime", "branch", "pages", "page_size", "dtype", "rank") if word in options]
    if taken:
        raise InputError(
            f"sessions: {taken[0]} {options[taken[0]]!r:.80}; expected none, for all share what they run on"
        )
