"""`Sessions`: many sessions in one process, on one pool and one store."""

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ..backbone import Backbone
from ..errors import InputError
from ..window import CanonicalEncoding, PagedExecutor, PatchFormer, PatchStore
from .argument_checks import check_backbone
from .runtime import dtype_of
from .session import Session
from .session_config import Keep
from .shared_runtime import SharedConfig, SharedRuntime


@dataclasses.dataclass(frozen=True)
class SharedStats:
    """Counts of what many sessions do and did. `print` shows a line.

    Attributes:
      growing: answers that are decoded now.
      waiting: questions that wait for a place or for room.
      in_line: calls that wait for room in the pool, or to ask.
      free: slots without an owner, of `slots`.
      steps: launches that decoded tokens.
      answers: answers that ended; `cancelled` of them by their readers.
      busy: calls that waited in vain.
      renewed: how often the pool was lost.
      programs: compiled shapes, of steps (rows, pages) and of questions (tokens, pages).
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
    """Many sessions in one process, which share one pool, one store, and compiled programs.

    With a backbone of `models.load`, a `ChunkStore` and an image:

        with kvp.Sessions(backbone, store, pages=4096) as sessions:
            session = sessions.open(keep=4)      # on any thread, as many as there are
            session.add(screenshot)
            print(session.ask("What changed?"))

    Edits run one after the other. Answers that are under way at the same time get their next tokens in one launch. When
    the pool is full, or too many questions wait, calls wait for other sessions in FIFO order.

    Attributes:
      backbone, store: of all sessions.
      shared: their runtime.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        config: SharedConfig | None = None,
        **options: Any,
    ):
        """Allocates the pool.

        Args:
          backbone: of `models.load`.
          store: of canonicals and patches, or None.
          config: a `SharedConfig`. None: of the options, of which `pages` is then required.
          options: fields of `config` to override, as in `Sessions(backbone, pages=4096)`; or of `PagedExecutor`.

        Raises:
          InputError: an invalid number, backbone or store. PoolError: no pages, or empty ones. RankError, DtypeError:
          an invalid rank or dtype.
        """
        check_backbone(backbone, store, "sessions")
        if config is not None and not isinstance(config, SharedConfig):
            raise InputError(f"sessions: got config {config!r:.80}; expected a SharedConfig, or None")

        names = [field.name for field in dataclasses.fields(SharedConfig)]
        changes = {name: options.pop(name) for name in names if name in options}
        config = SharedConfig(**changes) if config is None else dataclasses.replace(config, **changes)

        dtype = dtype_of(backbone) if config.dtype is None else config.dtype
        encoding = CanonicalEncoding(config.encoding, int(config.canonicals))
        options |= {"store": store, "encodings": encoding.words}
        executor = PagedExecutor(backbone, config.pages, config.page_size, dtype, **options)
        self.backbone, self.store = backbone, store
        # The former has a thread, which must not outlive a constructor that raises.
        former = None
        if store is not None:
            former = PatchFormer(backbone, store, config.rank, prefill_bytes=int(config.prefills), encoding=encoding)

        try:
            self.shared = SharedRuntime(executor, former, config)
        except BaseException:
            if former is not None:
                former.close()
            raise

        if former is not None:
            former.watch(executor)

    def open(self, keep: Keep = None, **options: Any) -> Session:
        """Opens a session on the shared pool and store. `Session.close` releases its pages.

        Args:
          keep: the number of chunks that stay after the lead. None: all.
          options: of `Session`, except for those of the pool.

        Raises:
          SessionClosedError. As `Session`; and SessionBusyError: no room for its lead within the timeout.
        """
        self.shared.check_open()
        _check_options(options)
        return Session(self.backbone, self.store, keep, runtime=self.shared, branch=self.name(), **options)

    def restore(self, path: str | os.PathLike[str], **options: Any) -> Session:
        """Restores a session that `Session.save` wrote, on the shared pool and store.

        Args:
          options: of `Session.restore`, except for those of the pool.

        Raises:
          SessionClosedError. As `Session.restore`; and PoolError: no room within the timeout.
        """
        self.shared.check_open()
        _check_options(options)
        return Session.restore(path, self.backbone, self.store, runtime=self.shared, branch=self.name(), **options)

    @staticmethod
    def name() -> str:
        """Returns a new name for a branch of the pool: `Window.empty(..., branch=...)`."""
        return secrets.token_hex(8)

    def stats(self) -> SharedStats:
        """Returns counts of the present, and so far."""
        shared, loop = self.shared, self.shared.decode_loop
        with shared.locked():
            allocator = shared.executor.books.allocator
            return SharedStats(
                growing=len(loop.batch.rows),
                waiting=len(loop.requests),
                in_line=len(loop.room) + len(loop.door),
                free=int((allocator.counts == 0).sum()),
                slots=allocator.pages * allocator.page_size,
                steps=loop.batch.steps,
                answers=loop.ended,
                cancelled=loop.cancelled,
                busy=loop.busy,
                renewed=shared.renewed,
                programs=len(loop.batch.shapes),
            )

    def close(self) -> None:
        """Ends all answers and waits with SessionClosedError. Open sessions take no further call.

        Patches of earlier prefills are formed and stored first. Idempotent.
        """
        self.shared.close()

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises InputError for an option of the runtime, which all sessions share."""
    for name in ("runtime", "branch", "pages", "page_size", "dtype", "rank", "encoding", "canonicals"):
        if name in options:
            raise InputError(f"sessions.{name}: got {options[name]!r:.80}; expected none, for sessions share the pool")
