"""Saving a session to a file, and restoring it."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ..backbone import Backbone
from ..errors import PoolError, PoolLostError, SessionError, WindowError
from ..window import PatchStore, Window, placed, taken
from . import session_file
from .piece_registry import PieceRecord, PieceRegistry, RuntimeRefCount
from .runtime import Runtime
from .session_config import SessionConfig
from .session_input import SessionInput
from .used_names import UsedNames

SAVED_OPTIONS = ("around", "chat", "uncertified", "largest_image", "memory")
"""Options in the file."""
GIVEN_OPTIONS = ("certificate", "goal", "costs", "linker", "retriever", "rank", "pages")
"""Options that a restore takes, because the file does not have them."""


def save(path: str | os.PathLike[str], registry: PieceRegistry, keep: int | None, kv: bool) -> None:
    """Writes a session to a file.

    Args:
      kv: whether to include the window's KV.

    Raises:
      SessionError: a file that cannot be written.
    """
    # Snapshots and page size belong together, so they are taken under one lock.
    executor = registry.runtime.executor
    with registry.runtime.locked():
        snapshots = taken(executor, registry.window) if kv else None
        pool = {"dtype": str(executor.dtype), "page_size": executor.books.allocator.page_size}

    pieces = []
    for id, record in registry.records.items():
        items = None if record.input is None else record.input.items
        pieces.append(session_file.SavedPiece(id, record.name, items))

    options = {name: getattr(registry.config, name) for name in SAVED_OPTIONS}
    session_file.write(
        session_file.SavedSession(
            window=registry.window.to_json(),
            settings=options | {"keep": keep, "name": registry.name},
            pool=pool,
            used=tuple(registry.used_names),
            pieces=tuple(pieces),
            kept=snapshots,
        ),
        path,
    )


def restore(
    path: str | os.PathLike[str],
    backbone: Backbone,
    store: PatchStore | None,
    runtime: Runtime | None,
    branch: str,
    options: Mapping[str, Any],
) -> tuple[PieceRegistry, int | None]:
    """Returns the registry and `keep` of a saved session.

    Args:
      runtime, branch: where its KV goes. None: a private runtime, with a pool as it was saved.
      options: those that are not in the file.

    Raises:
      SessionError: no session, damage, another version, or a runtime whose pool has another dtype. WindowError: a
      session of another backbone. PoolError: no room. Nothing is held then.
    """
    for option in options:
        if option not in GIVEN_OPTIONS:
            raise TypeError(f"restore() got an unexpected keyword argument {option!r}")

    saved = session_file.read(path)
    window = Window.from_json(saved.window, backbone=backbone).renamed(branch)
    name, keep, saved_options = _read_settings(saved)
    config = SessionConfig(**options, **saved_options)
    config.check_backbone(backbone.fingerprint)

    if runtime is not None:
        users = RuntimeRefCount(runtime, private=False)
    else:
        dtype, page_size = saved.pool.get("dtype"), saved.pool.get("page_size")
        whole = isinstance(page_size, int) and 1 <= page_size <= 1 << 20
        if dtype not in ("float32", "bfloat16", "float16") or not whole:
            found = f"dtype {dtype!r:.40} and page_size {page_size!r:.40}"
            raise SessionError(f"session.pool: got {found}; expected what Session.save wrote")
        config = dataclasses.replace(config, dtype=dtype, page_size=page_size)
        users = RuntimeRefCount(config.private_runtime(backbone, store), private=True)

    registry = PieceRegistry(name, users, Window.empty(window.costs, branch=branch), config)
    try:
        _restore_pieces(registry, window, saved)
    except BaseException:
        registry.release()
        raise

    return registry, keep


def _restore_pieces(registry: PieceRegistry, window: Window, saved: session_file.SavedSession) -> None:
    """Restores the records of a saved session, and the KV of its window."""
    # The file is consistent with its digest, but a foreign program may have written it.
    entries = {piece.entry.id: piece.entry for piece in (*window.pieces, *window.evicted)}
    for piece in saved.pieces:
        if piece.id not in entries:
            raise SessionError(f"session.pieces: got {piece.id!r:.80}; expected only pieces of the saved window")
        entry, read = entries[piece.id], None
        if piece.items is not None:
            read = SessionInput(piece.items, entry.content or entry.id, entry.kind == "text")
        registry.records[piece.id] = PieceRecord(entry, piece.name, read)
        registry.ids[piece.name] = piece.id

    if missing := sorted(set(entries) - set(registry.records)):
        raise SessionError(f"session.pieces: got none for {missing[0]!r:.80}; expected all of the saved window")

    registry.used_names = UsedNames(saved.used)

    # Without KV, the window is prefilled.
    if saved.kept is None:
        window, edits = window.anew()
        for piece in window.pieces:
            registry.provide_tokens(registry.records[piece.entry.id])
        registry.run(window, edits)
        return

    runtime = registry.runtime
    with runtime.locked():
        try:
            placed(runtime.executor, window, saved.kept)
        except PoolLostError:
            raise
        except PoolError:
            # Runtimes outside of this library need not have `make_room`.
            make_room = getattr(runtime, "make_room", None)
            if make_room is None or not make_room(window):
                raise
            placed(runtime.executor, window, saved.kept)
        except WindowError as error:
            raise SessionError(f"session: {error}") from error

    registry.window = window


def _read_settings(saved: session_file.SavedSession) -> tuple[str, int | None, dict[str, Any]]:
    """Returns the name, `keep` and the options of a saved session.

    Raises:
      SessionError: an option that is missing or invalid.
    """
    # Files of older versions have no "chat".
    found = {"chat": False, **saved.settings}

    def is_count(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    around = found.get("around")
    pair = isinstance(around, list) and len(around) == 2
    valid = {
        "keep": found.get("keep") is None or is_count(found["keep"], 1),
        "chat": isinstance(found["chat"], bool),
        "around": pair and all(isinstance(text, str) for text in around or ()),
        "uncertified": isinstance(found.get("uncertified"), bool),
        "largest_image": is_count(found.get("largest_image"), 1),
        "memory": is_count(found.get("memory"), 0),
        "name": isinstance(found.get("name"), str) and bool(found["name"]),
    }
    for name, right in valid.items():
        if not right:
            raise SessionError(f"session.{name}: got {found.get(name)!r:.80}; expected what Session.save wrote")

    options = {name: found[name] for name in SAVED_OPTIONS}
    return found["name"], found.get("keep"), options | {"around": tuple(around or ())}
