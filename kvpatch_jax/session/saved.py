"""Saved sessions: window, names, inputs, and KV as it is in the pool, in one file of safetensors format.

A file is written beside its place and moved there in one step, so that a killed process leaves the old file or the new
one. Whatever is read is checked: a digest over all contents reveals damage, and the pool checks shapes and types.
"""

import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ..backbone import Backbone
from ..cache import Audio, Template, Text, Video, decoded, sort_of
from ..errors import PoolError, SessionError
from ..utils.atomic_files import path_of, replace
from ..utils.kinds import expect_names
from ..window import Entry, PatchStore, Window, from_json, to_json
from .config import Keep, SessionConfig
from .inputs import SessionInput
from .pieces import PieceBook, PieceRecord
from .runtime import Runtime

FORMAT = "kvpatch session 4"
SAVED_OPTIONS = ("reuse", "kl", "audit", "around", "chat", "placeholder", "memory", "encoding")
"""Options in the file."""
GIVEN_OPTIONS = ("certificate", "linker", "retriever", "rank", "pages")
"""Options that a restore takes, because the file does not have them."""
Arrays = dict[str, np.ndarray]


def save(path: str | os.PathLike[str], book: PieceBook, keep: Keep, kv: bool) -> None:
    """Writes a session, with the window's KV if `kv`. Raises SessionError for a file that cannot be written."""
    executor, window, arrays = book.runtime.executor, book.window, Arrays()
    snapshots = book.runtime.do(lambda: executor.snapshot(window)) if kv else []
    for number, snapshot in enumerate(snapshots):
        arrays |= {f"kept.{number}.{name}": value for name, value in snapshot.items()}

    pieces = []
    for number, (id, record) in enumerate(book.records.items()):
        read, fields = record.input, {"id": id, "name": record.name, "items": None, "content": None}
        if read is not None:
            names = [f"item.{number}.{place}" for place in range(len(read.items))]
            items = [_saved_item(item, name, arrays) for item, name in zip(read.items, names, strict=True)]
            fields |= {"items": items, "content": read.content}
        pieces.append(fields)

    settings = {name: getattr(book.config, name) for name in SAVED_OPTIONS} | {"name": book.name, "keep": keep}
    body = {"window": to_json(window), "settings": settings, "used": list(book.used_names), "pieces": pieces, "kv": kv}
    text = json.dumps(body | {"dtype": str(executor.dtype)})
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    # Not every version of safetensors reads a file without arrays.
    meta = {"format": FORMAT, "digest": _digest(text, arrays), "session": text}
    content = safetensors.numpy.save({**arrays, "end": np.zeros(1, np.uint8)}, meta)
    try:
        replace(path_of(path, "session", SessionError), content)
    except OSError as error:
        message = f"session: got {str(path)!r:.200}, which cannot be written: {error}; expected a file's place"
        raise SessionError(message) from error


def _saved_item(item: Any, name: str, arrays: Arrays) -> dict[str, Any]:
    """Returns an item of an input as JSON has it; its array goes to `arrays`."""
    if isinstance(item, str):
        return {"template" if isinstance(item, Template) else "text": str(item)}
    if isinstance(item, list):
        return {"tokens": item}
    saved: dict[str, Any] = {sort_of(item): name}
    if isinstance(item, Video | Audio):
        saved |= {"options": item.options, "encoded": isinstance(item.source, bytes)}
        item = item.source
    arrays[name] = np.frombuffer(item, np.uint8) if isinstance(item, bytes) else np.asarray(item)
    return saved


def _read_item(item: Mapping[str, Any], arrays: Arrays) -> Any:
    if "text" in item:
        return Text(_text(item["text"]))
    if "template" in item:
        return Template(_text(item["template"]))
    if "tokens" in item:
        return [int(token) for token in item["tokens"]]
    if "image" in item:
        return decoded(arrays[item["image"]])
    kind, name = (Video, item["video"]) if "video" in item else (Audio, item["audio"])
    return kind(arrays[name].tobytes() if item["encoded"] else arrays[name], **item["options"])


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


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Arrays]:
    """Reads the fields and arrays of a file that `save` wrote; the digest is checked, the fields are not.

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
        text, digest, form = (str(meta.get(key)) for key in ("session", "digest", "format"))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise SessionError(f"{found}: {error!s:.200}; expected what Session.save wrote") from error
    arrays.pop("end", None)
    if form != FORMAT:
        raise SessionError(f"{found} of format {form!r:.40}; expected {FORMAT!r}")
    if _digest(text, arrays) != digest:
        raise SessionError(f"{found}, which is damaged; expected contents of digest {digest!r:.40}")
    return json.loads(text), arrays


def restore(
    path: str | os.PathLike[str],
    backbone: Backbone,
    store: PatchStore | None,
    runtime: Runtime | None,
    options: Mapping[str, Any],
) -> tuple[PieceBook, Keep]:
    """Returns the book and `keep` of a saved session. Arguments and errors are those of `Session.restore`."""
    expect_names(options, GIVEN_OPTIONS, "restore", SessionError)
    body, arrays = read(path)
    # A foreign program may have written the digest too, so every field may be missing or of another type.
    try:
        window = from_json(_text(body["window"]), backbone.fingerprint).renamed(secrets.token_hex(8))
        settings, name, dtype = dict(body["settings"]), _text(body["settings"]["name"]), _text(body["dtype"])
        keep = tuple(settings["keep"]) if isinstance(settings["keep"], list) else settings["keep"]
        saved_options = {option: settings[option] for option in SAVED_OPTIONS}
        saved_options["around"] = tuple(settings["around"])
        # What a certificate bounded is served exactly where none is given.
        if saved_options["reuse"] == "certified":
            saved_options["reuse"] = None
        config = SessionConfig(**options, **saved_options)
        config.check(backbone, store, runtime, keep, name)
        records, used = _read_records(body, window, arrays), [_text(name) for name in body["used"]]
        kv, snapshots = body["kv"], [Arrays() for _ in window.pieces]
        for key in [key for key in arrays if key.startswith("kept.")]:
            _, number, field = key.split(".", 2)
            snapshots[int(number)][field] = arrays[key]
        opened = runtime or config.runtime(backbone, store, dtype=dtype)
    except (SessionError, PoolError):
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SessionError(f"session: got {type(error).__name__} {error!s:.200}; expected what was saved") from error

    book = PieceBook(name, opened, dataclasses.replace(window, pieces=(), evicted=()), config)
    book.records, book.used_names = records, dict.fromkeys(used, 1)
    book.ids = {record.name: id for id, record in records.items()}
    try:
        if kv:
            book.runtime.do(lambda: book.runtime.executor.restore(window, snapshots))
            book.window = window
        else:
            # Without KV, the window is prefilled.
            book.run("restore", window.anew())
    except BaseException:
        book.release()
        raise
    return book, keep


def _read_records(body: Mapping[str, Any], window: Window, arrays: Arrays) -> dict[str, PieceRecord]:
    """Returns the records of a saved session's pieces, by id."""
    entries: dict[str, Entry] = {piece.id: piece.entry for piece in window.pieces}
    entries |= {entry.id: entry for entry in window.evicted}
    records = {}
    for fields in body["pieces"]:
        id, content = _text(fields["id"]), None
        if fields["items"] is not None:
            items = tuple([_read_item(item, arrays) for item in fields["items"]])
            content = SessionInput(items, _text(fields["content"]), entries[id].kind == "text")
        records[id] = PieceRecord(entries[id], _text(fields["name"]), content)
    if missing := sorted(set(entries) - set(records)):
        raise KeyError(missing[0])
    return records
