"""Saved sessions: window, names, inputs, and KV as it is in the pool, in one file of safetensors format.

A file is written beside its place and moved there in one step, so that a killed process leaves the old file or the new
one. Whatever is read is checked: a digest over all contents reveals damage, and the pool checks shapes and types.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ..backbone import Backbone
from ..cache import Audio, Text, Video, sort_of
from ..errors import PoolError, PoolLostError, SessionError, WindowError
from ..utils.atomic_files import path_of, replace
from ..window import SIDES, PatchStore, PieceSnapshot, Window, placed, taken
from .piece_registry import PieceRecord, PieceRegistry, RuntimeRefCount
from .runtime import Runtime
from .session_config import Keep, SessionConfig, check_keep
from .session_input import SessionInput

FORMAT, VERSION = "kvpatch session", 2
SAVED_OPTIONS = ("around", "chat", "placeholder", "uncertified", "largest_image", "memory", "encoding", "canonicals")
"""Options in the file."""
GIVEN_OPTIONS = ("certificate", "goal", "costs", "linker", "retriever", "rank", "pages")
"""Options that a restore takes, because the file does not have them."""
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedSession:
    """Contents of the file.

    Attributes:
      window: of `Window.to_json`.
      settings: name, `keep`, and the options that are JSON.
      pool: dtype and page size.
      used: names and ids that were given out last, the oldest first.
      pieces: in the window or evicted from it: id, name, and the items of its input, None if that was discarded.
      kept: snapshots of the window's pieces, in order. None: without KV.
    """

    window: str
    settings: Mapping[str, Any]
    pool: Mapping[str, Any]
    used: tuple[str, ...]
    pieces: tuple[tuple[str, str, tuple[Any, ...] | None], ...]
    kept: list[PieceSnapshot] | None


def save(path: str | os.PathLike[str], registry: PieceRegistry, keep: Keep, kv: bool) -> None:
    """Writes a session in place of an existing file, as a whole or not at all.

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

    arrays: Arrays = {}
    pieces = []
    for number, (id, record) in enumerate(registry.records.items()):
        items: list[dict[str, Any]] = []
        for place, item in enumerate(() if record.input is None else record.input.items):
            if isinstance(item, str):
                items.append({"text": str(item)})
            elif isinstance(item, list):
                items.append({"tokens": item})
            else:
                name, kind = f"item.{number}.{place}", sort_of(item)
                entry: dict[str, Any] = {kind: name}
                if isinstance(item, Video | Audio):
                    entry |= {"options": item.options, "encoded": isinstance(item.source, bytes)}
                    item = item.source
                arrays[name] = np.frombuffer(item, np.uint8) if isinstance(item, bytes) else item
                items.append(entry)
        pieces.append({"id": id, "name": record.name, "items": None if record.input is None else items})

    kept = None if snapshots is None else len(snapshots)
    for number, snapshot in enumerate(snapshots or ()):
        arrays[f"local.{number}"] = np.asarray(snapshot.local)
        for side, channels in snapshot.rows.items():
            arrays |= {f"kept.{number}.{side}.{channel}": value for channel, value in channels.items()}

    settings = {name: getattr(registry.config, name) for name in SAVED_OPTIONS}
    settings |= {"name": registry.name, "keep": keep}
    used = list(registry.used_names)
    window = registry.window.to_json()
    text = json.dumps(
        {"window": window, "settings": settings, "pool": pool, "used": used, "pieces": pieces, "kept": kept}
    )
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    meta = {"format": FORMAT, "version": str(VERSION), "digest": _digest(text, arrays), "session": text}
    # Not every version of safetensors reads a file without arrays.
    content = safetensors.numpy.save({**arrays, "end": np.zeros(1, np.uint8)}, meta)

    try:
        replace(path_of(path, "session", SessionError), content)
    except OSError as error:
        message = f"session: got {str(path)!r:.200}, which cannot be written: {error}; expected a file's place"
        raise SessionError(message) from error


def read(path: str | os.PathLike[str]) -> SavedSession:
    """Reads a file that `save` wrote.

    Raises:
      SessionError: no such file, no session, another version, or damage.
    """
    path = path_of(path, "session", SessionError)
    found = f"session: got {str(path)!r:.200}"
    if not os.path.isfile(path):
        raise SessionError(f"{found}, which is no file; expected what Session.save wrote")

    try:
        content = path.read_bytes()
        arrays = safetensors.numpy.load(content)
        # The library does not return the metadata of bytes.
        length = int.from_bytes(content[:8], "little")
        meta = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        meta = {key: value for key, value in meta.items() if isinstance(value, str)}
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise SessionError(f"{found}: {error!s:.200}; expected what Session.save wrote") from error

    arrays.pop("end", None)
    if meta.get("format") != FORMAT or meta.get("version") != str(VERSION):
        kind = f"format {meta.get('format')!r:.40}, version {meta.get('version')!r:.20}"
        raise SessionError(f"{found} of {kind}; expected {FORMAT!r}, version {VERSION}")

    text = meta.get("session", "")
    if _digest(text, arrays) != meta.get("digest"):
        raise SessionError(f"{found}, which is damaged; expected contents of digest {meta.get('digest')!r:.40}")

    # A foreign program may have written the digest too, so every field may be missing or of another type.
    try:
        return _parsed(json.loads(text), arrays)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise SessionError(f"{found}: {type(error).__name__} {error!s:.200}; expected a session's fields") from error


def _parsed(body: Any, arrays: Arrays) -> SavedSession:
    """Returns the contents of a file. Raises what unexpected fields lead to."""
    pieces = []
    for fields in body["pieces"]:
        items: tuple[Any, ...] | None = None
        if fields["items"] is not None:
            items = ()
            for item in fields["items"]:
                if "text" in item:
                    items += (Text(_text(item["text"])),)
                elif "tokens" in item:
                    items += ([int(token) for token in item["tokens"]],)
                elif "image" in item:
                    items += (arrays[item["image"]],)
                else:
                    made, name = (Video, item["video"]) if "video" in item else (Audio, item["audio"])
                    source = arrays[name].tobytes() if item["encoded"] else arrays[name]
                    items += (made(source, **item["options"]),)
        pieces.append((_text(fields["id"]), _text(fields["name"]), items))

    # Names of arrays are "kept.NUMBER.SIDE.CHANNEL".
    def rows(number: int) -> dict[str, dict[str, np.ndarray]]:
        sides: dict[str, dict[str, np.ndarray]] = {side: {} for side in SIDES}
        prefix = f"kept.{number}."
        for name, value in arrays.items():
            if name.startswith(prefix):
                side, _, channel = name.removeprefix(prefix).partition(".")
                sides[side][channel] = value
        return sides

    kept, count = None, body["kept"]
    if count is not None:
        kept = [PieceSnapshot(arrays[f"local.{number}"], rows(number)) for number in range(int(count))]
    used = tuple(_text(name) for name in body["used"])
    return SavedSession(_text(body["window"]), dict(body["settings"]), dict(body["pool"]), used, tuple(pieces), kept)


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value


# ----------------------------------------------------------------------------------------------------- restoring


def restore(
    path: str | os.PathLike[str],
    backbone: Backbone,
    store: PatchStore | None,
    runtime: Runtime | None,
    branch: str,
    options: Mapping[str, Any],
) -> tuple[PieceRegistry, Keep]:
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

    saved = read(path)
    window = Window.from_json(saved.window, backbone=backbone).renamed(branch)
    settings = saved.settings
    _check_settings(settings)
    saved_options: dict[str, Any] = {name: settings[name] for name in SAVED_OPTIONS}
    saved_options["around"] = tuple(settings["around"])
    config = SessionConfig(**options, **saved_options)
    config.check_backbone(backbone)

    private = runtime is None
    if runtime is not None:
        config.check_runtime(runtime)
    else:
        dtype, page_size = saved.pool.get("dtype"), saved.pool.get("page_size")
        whole = isinstance(page_size, int) and 1 <= page_size <= 1 << 20
        if dtype not in ("float32", "bfloat16", "float16") or not whole:
            found = f"dtype {dtype!r:.40} and page_size {page_size!r:.40}"
            raise SessionError(f"session.pool: got {found}; expected what Session.save wrote")
        config = dataclasses.replace(config, dtype=dtype, page_size=page_size)
        runtime = config.private_runtime(backbone, store)

    users, empty = RuntimeRefCount(runtime, private), Window.empty(window.costs, branch=branch)
    registry = PieceRegistry(settings["name"], users, empty, config)
    try:
        _restore_pieces(registry, window, saved)
    except BaseException:
        registry.release()
        raise

    return registry, _keep_of(settings.get("keep"))


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises SessionError for a saved option that is missing or invalid."""

    def is_count(name: str, least: int) -> bool:
        value = settings.get(name)
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    around = settings.get("around")
    pair = isinstance(around, list) and len(around) == 2
    valid = {
        "keep": _is_keep(settings.get("keep")),
        "placeholder": isinstance(settings.get("placeholder", 0), str | None),
        "chat": isinstance(settings.get("chat"), bool),
        "around": pair and all(isinstance(text, str) for text in around or ()),
        "uncertified": isinstance(settings.get("uncertified"), bool),
        "largest_image": is_count("largest_image", 1),
        "memory": is_count("memory", 0),
        "encoding": isinstance(settings.get("encoding", 0), str | None),
        "canonicals": is_count("canonicals", 0),
        "name": isinstance(settings.get("name"), str) and bool(settings["name"]),
    }
    for name, right in valid.items():
        if not right:
            raise SessionError(f"session.{name}: got {settings.get(name)!r:.80}; expected what Session.save wrote")


def _keep_of(value: Any) -> Any:
    """Returns a `keep` as it was saved: in JSON a pair is a list."""
    return tuple(value) if isinstance(value, list) else value


def _is_keep(value: Any) -> bool:
    """Returns whether a saved `keep` is one."""
    try:
        check_keep(_keep_of(value))
    except (SessionError, TypeError):
        return False
    return True


def _restore_pieces(registry: PieceRegistry, window: Window, saved: SavedSession) -> None:
    """Restores the records of a saved session, and the KV of its window."""
    # The file is consistent with its digest, but a foreign program may have written it.
    entries = {piece.entry.id: piece.entry for piece in (*window.pieces, *window.evicted)}
    for id, name, items in saved.pieces:
        if id not in entries:
            raise SessionError(f"session.pieces: got {id!r:.80}; expected only pieces of the saved window")
        entry, content = entries[id], None
        if items is not None:
            content = SessionInput(items, entry.content or entry.id, entry.kind == "text")
        registry.records[id], registry.ids[name] = PieceRecord(entry, name, content), id

    if missing := sorted(set(entries) - set(registry.records)):
        raise SessionError(f"session.pieces: got none for {missing[0]!r:.80}; expected all of the saved window")
    registry.used_names = dict.fromkeys(saved.used, 1)

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
