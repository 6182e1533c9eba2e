"""Saving a session, and going on from what was saved."""

import os
from typing import Any, TypeVar

from ..backbone import Backbone
from ..errors import PoolError, PoolLostError, SessionError, WindowError
from ..window import PatchStore, Window, placed, taken
from . import session_file
from .names import UsedNames
from .piece_registry import PieceRecord, RuntimeRefCount
from .reuse_planner import ReusePlanner, check_certificate
from .runtime import PrivateRuntime, Runtime
from .session_input import SessionInput

R = TypeVar("R", bound="Restoring")

WRITTEN = ("keep", "around", "chat", "uncertified", "largest_image", "memory", "name")
"""What of a session's settings is saved; what holds objects (certificate, linker, …) is given again."""


class Restoring(ReusePlanner):
    """Sessions that outlive their process."""

    def save(self, path: str | os.PathLike[str], *, kv: bool = True) -> None:
        """Writes the session to a file, in place of what is there, whole or not at all.

        In it are the window, names, what was given of each piece (pixels, texts, token ids; of what has left as long as
        that is kept), and the KV of the window as it lies in the pool: what remembers can be made again of nothing
        else. The store is not in it.

        Args:
          kv: False leaves the KV out: a session that is restored then prefills its window, and forgets what has left.

        Raises:
          SessionClosedError. SessionError: a file that cannot be written.
        """
        with self._lock:
            self._expect_open()
            window, executor = self._window, self.runtime.executor
            with self.runtime.locked():
                kept = taken(executor, window) if kv else None
                size = executor.books.allocator.page_size
            pieces = tuple(
                session_file.SavedPiece(id, known.name, None if known.thing is None else known.thing.items)
                for id, known in self._known.items()
            )
            settings = {word: getattr(self, word) for word in WRITTEN}
            pool = {"dtype": str(executor.dtype), "page_size": size}
            session_file.write(
                session_file.SavedSession(window.to_json(), settings, pool, tuple(self._used), pieces, kept), path
            )

    @classmethod
    def restore(
        cls: type[R],
        path: str | os.PathLike[str],
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        runtime: Runtime | None = None,
        branch: str = "",
        rank: Any = None,
        pages: int | None = None,
        certificate: Any = None,
        goal: Any = None,
        costs: Any = None,
        linker: Any = None,
        retriever: Any = None,
    ) -> R:
        """Goes on from a session that was saved, in this process or another: answers are the same, bit for bit.

        A fork goes on as a session of its own. What was given of a piece is embedded when it is needed again.

        Args:
          backbone: the one that it was saved with. store: where its canonicals and patches are; another one, or none,
            costs forwards and changes no answer.
          runtime, branch, rank, pages, certificate, goal, costs, linker, retriever: as of a new session.

        Raises:
          SessionError: no session, damage, another version, a runtime whose pool has another dtype. WindowError: a
          session of another backbone. PoolError: no room. Nothing is held then.
        """
        saved = session_file.read(path)
        window = Window.from_json(saved.window, backbone=backbone).renamed(branch)
        check_certificate(certificate, goal, backbone.fingerprint)
        owners = (
            RuntimeRefCount(runtime, False) if runtime is not None else _private(backbone, store, rank, pages, saved)
        )
        session = object.__new__(cls)
        how = _settings(saved)
        given = {"certificate": certificate, "goal": goal, "costs": costs, "linker": linker, "retriever": retriever}
        name, keep = how.pop("name"), how.pop("keep")
        try:
            session._set_up(name, owners, Window.empty(window.costs, branch=branch), keep, **how, **given)
        except BaseException:
            if owners.private:
                owners.runtime.close()
            raise
        try:
            session._take_up(window, saved)
        except BaseException:
            session.close()
            raise
        return session

    def _set_up(self, name: str, owners: RuntimeRefCount, window: Window, keep: int | None, **how: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of everything."""
        raise NotImplementedError

    def _take_up(self, window: Window, saved: session_file.SavedSession) -> None:
        """Knows what a saved session knew, and has the runtime hold what it held."""
        entries = {piece.entry.id: piece.entry for piece in (*window.pieces, *window.evicted)}
        for piece in saved.pieces:
            if piece.id not in entries:
                raise SessionError(f"session: piece {piece.id!r:.80} is not in its window; expected one that is")
            entry = entries[piece.id]
            thing = None
            if piece.items is not None:
                thing = SessionInput(piece.items, entry.content or entry.id, entry.kind == "text")
            self._known[piece.id], self._names[piece.name] = PieceRecord(entry, piece.name, thing), piece.id
        if missing := sorted(set(entries) - set(self._known)):
            raise SessionError(f"session: nothing of piece {missing[0]!r:.80}; expected all of its window")
        self._used = UsedNames(saved.used)
        if saved.kept is None:
            window, edits = window.anew()
            for piece in window.pieces:
                self._hold(self._known[piece.entry.id])
            self._run(window, edits)
            return
        executor = self.runtime.executor
        with self.runtime.locked():
            try:
                placed(executor, window, saved.kept)
            except PoolLostError:
                raise
            except PoolError:
                grow = getattr(self.runtime, "make_room", None)
                if grow is None or not grow(window):
                    raise
                placed(executor, window, saved.kept)
            except WindowError as error:
                raise SessionError(f"session: {error}") from error
        self._window = window


def _settings(saved: session_file.SavedSession) -> dict[str, Any]:
    """A saved session's settings, checked.

    Raises:
      SessionError: one that is missing or none.
    """
    found = {"chat": False, **saved.settings}  # which older files do not say
    count = lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1
    around = found.get("around")
    checks = {
        "keep": found.get("keep") is None or count(found["keep"]),
        "chat": isinstance(found["chat"], bool),
        "around": isinstance(around, list) and len(around) == 2 and all(isinstance(each, str) for each in around),
        "uncertified": isinstance(found.get("uncertified"), bool),
        "largest_image": count(found.get("largest_image")),
        "memory": found.get("memory") == 0 or count(found.get("memory")),
        "name": isinstance(found.get("name"), str) and bool(found["name"]),
    }
    for word, right in checks.items():
        if not right:
            raise SessionError(f"session: saved with {word} {found.get(word)!r:.80}; expected what Session.save wrote")
    return {word: found[word] for word in WRITTEN} | {"around": tuple(around or ())}


def _private(
    backbone: Backbone, store: Any, rank: Any, pages: int | None, saved: session_file.SavedSession
) -> RuntimeRefCount:
    """A runtime of the session's own, with a pool as it had."""
    dtype, size = saved.pool.get("dtype"), saved.pool.get("page_size")
    if dtype not in ("float32", "bfloat16", "float16") or not isinstance(size, int) or not 1 <= size <= 1 << 20:
        raise SessionError(f"session: a pool of {dtype!r:.40} in pages of {size!r:.40}; expected one that can be")
    return RuntimeRefCount(PrivateRuntime(backbone, store, pages=pages, page_size=size, dtype=dtype, rank=rank), True)
