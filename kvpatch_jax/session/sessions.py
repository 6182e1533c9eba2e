"""`Sessions`: many sessions in one process, on one pool and one store."""

import dataclasses
import functools
import os
from typing import Any

from ..backbone import Backbone
from ..core import KVEncoding
from ..errors import InputError
from ..patching import Rank
from ..utils.kinds import is_whole
from ..window import PatchStore, encodings_of
from .batching import BatchScheduler
from .config import Keep, check_backbone, check_rank, float_dtype
from .runtime import Runtime
from .session import Session

LONGEST_TIMEOUT = 1e6


@dataclasses.dataclass(frozen=True)
class SharedStats:
    """Counts of what many sessions do and did. `print` shows a line.

    Attributes:
      growing: answers that are decoded now.
      waiting: calls and questions that wait for their turn or for room.
      free: slots without an owner, of `slots`.
      steps: launches that decoded tokens.
      answers: answers that ended; `cancelled` of them by their readers.
      busy: calls and questions that waited in vain.
    """

    growing: int
    waiting: int
    free: int
    slots: int
    steps: int
    answers: int
    cancelled: int
    busy: int

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in dataclasses.fields(self))


class Sessions:
    """Many sessions in one process, which share one pool, one store, and compiled programs.

    With a backbone of `models.load`, a `ChunkStore` and an image:

        with kvp.Sessions(backbone, store, pages=4096) as sessions:
            session = sessions.open(keep=4)      # on any thread, as many as there are
            session.add(screenshot)
            print(session.ask("What changed?"))

    Calls run one after the other. Answers that are under way at the same time get their next tokens in one launch. When
    the pool is full, or too many questions wait, calls wait for other sessions in FIFO order.

    Attributes:
      backbone, store: of all sessions.
      runtime: what they run on.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        pages: int,
        page_size: int = 16,
        batch: int = 8,
        waiting: int = 64,
        timeout: float | int = 60.0,
        rank: Rank | str | None = None,
        encoding: KVEncoding | str | None = None,
        **options: Any,
    ):
        """Allocates the pool.

        Args:
          backbone: of `models.load`.
          store: of canonicals and patches, or None.
          pages, page_size: of the pool, which does not grow.
          batch: the number of answers that are decoded together.
          waiting: the number of questions that may wait for a place among them.
          timeout: seconds that a call waits for room before it raises PoolError.
          rank, encoding: of what all these sessions form and keep, as of `SessionConfig`.
          options: of `Runtime`, such as `dtype`.

        Raises:
          InputError: an invalid number, backbone, store or encoding. PoolError: no pages, or empty ones. InputError,
          ShapeError: an invalid rank or dtype.
        """
        check_backbone(backbone, store, "sessions")
        check_rank(rank, "sessions", least=0)
        seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        for name, value, valid, expected in (
            ("batch", batch, is_whole(batch, 1), "a number of questions, 1 or more"),
            ("waiting", waiting, is_whole(waiting, 1), "a number of questions, 1 or more"),
            ("timeout", timeout, seconds and 0 <= timeout <= LONGEST_TIMEOUT, f"seconds, 0 to {LONGEST_TIMEOUT:g}"),
        ):
            if not valid:
                raise InputError(f"sessions: got {name} {value!r:.80}; expected {expected}")
        if options.get("dtype") is not None:
            options["dtype"] = float_dtype(options["dtype"], "sessions")
        schedule = functools.partial(BatchScheduler, batch=batch, waiting=waiting, timeout=timeout)
        options |= {"pages": pages, "page_size": page_size, "rank": rank, "encoding": encodings_of(encoding)[0]}
        self.backbone, self.store = backbone, store
        self.runtime = Runtime(backbone, store, schedule=schedule, **options)

    def open(self, keep: Keep = None, **options: Any) -> Session:
        """Opens a session on the shared pool and store. `Session.close` releases its pages.

        Args:
          keep: the number of chunks that stay after the lead. None: all.
          options: of `Session`, except for those of the pool.

        Raises:
          SessionError: it is closed. InputError: an option of the pool. PoolError: no room for its lead. As `Session`.
        """
        return Session(self.backbone, self.store, keep, **self._shared(options))

    def restore(self, path: str | os.PathLike[str], **options: Any) -> Session:
        """Restores a session that `Session.save` wrote, as `Session.restore`, on the shared pool and store."""
        return Session.restore(path, self.backbone, self.store, **self._shared(options))

    def stats(self) -> SharedStats:
        """Returns counts of the present, and so far."""
        scheduler: Any = self.runtime.scheduler
        counts = self.runtime.executor.slots.counts
        return SharedStats(
            growing=len(scheduler.batch.rows),
            waiting=scheduler.waiting,
            free=int((counts == 0).sum()),
            slots=counts.size,
            steps=scheduler.batch.steps,
            answers=scheduler.ended,
            cancelled=scheduler.cancelled,
            busy=scheduler.busy,
        )

    def close(self) -> None:
        """Ends all answers with SessionError, after pending patches were stored. Idempotent."""
        self.runtime.close()

    def _shared(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns a session's options with its runtime."""
        self.runtime.check_open()
        for name in ("pages", "rank", "encoding"):
            if name in options:
                raise InputError(f"sessions.{name}: got {options[name]!r:.80}; expected none: sessions share the pool")
        return {"runtime": self.runtime, **options}

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
