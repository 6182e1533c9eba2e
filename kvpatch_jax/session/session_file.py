"""The file of a saved session: window, inputs and KV as they are in the pool, in safetensors format.

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

from ..cache import Text
from ..errors import SessionError
from ..utils.atomic_files import path_of, replace
from ..window import SIDES, PieceSnapshot

FORMAT, VERSION = "kvpatch session", 1
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedPiece:
    """Piece of a saved session: its name, and its input, or None if that was discarded."""

    id: str
    name: str
    items: tuple[Any, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class SavedSession:
    """Contents of the file.

    Attributes:
      window: of `Window.to_json`.
      settings: name, `keep`, and the options that are JSON.
      pool: dtype and page size.
      used: names and ids that were given out last, the oldest first.
      pieces: in the window or evicted from it.
      kept: snapshots of the window's pieces, in order. None: without KV.
    """

    window: str
    settings: Mapping[str, Any]
    pool: Mapping[str, Any]
    used: tuple[str, ...]
    pieces: tuple[SavedPiece, ...]
    kept: list[PieceSnapshot] | None


def write(saved: SavedSession, path: str | os.PathLike[str]) -> None:
    """Writes a session in place of an existing file, as a whole or not at all.

    Raises:
      SessionError: a file that cannot be written.
    """
    arrays: Arrays = {}
    body: dict[str, Any] = {
        "window": saved.window,
        "settings": dict(saved.settings),
        "pool": dict(saved.pool),
        "used": list(saved.used),
        "pieces": [],
        "kept": None,
    }

    for number, piece in enumerate(saved.pieces):
        items = None
        if piece.items is not None:
            items = []
            for place, item in enumerate(piece.items):
                if isinstance(item, str):
                    items.append({"text": str(item)})
                elif isinstance(item, list):
                    items.append({"tokens": item})
                else:
                    arrays[f"item.{number}.{place}"] = item
                    items.append({"image": f"item.{number}.{place}"})

        body["pieces"].append({"id": piece.id, "name": piece.name, "items": items})

    if saved.kept is not None:
        body["kept"] = []
        for number, kept in enumerate(saved.kept):
            aside = None
            arrays[f"local.{number}"] = np.asarray(kept.local)
            _put_rows(f"kept.{number}", kept.rows, arrays)
            if kept.aside is not None:
                aside = list(kept.aside[:3])
                _put_rows(f"aside.{number}", kept.aside[3], arrays)
            body["kept"].append({"turns": kept.turns, "patch": kept.patch, "aside": aside})

    text = json.dumps(body)
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    meta = {"format": FORMAT, "version": str(VERSION), "digest": _digest(text, arrays), "session": text}
    # Not every version of safetensors reads a file without arrays.
    content = safetensors.numpy.save({**arrays, "end": np.zeros(1, np.uint8)}, meta)

    try:
        replace(path_of(path, "session:", SessionError), content)
    except OSError as error:
        message = f"session: got {str(path)!r:.200}, which cannot be written: {error}; expected a file's place"
        raise SessionError(message) from error


def read(path: str | os.PathLike[str]) -> SavedSession:
    """Reads a session.

    Raises:
      SessionError: no such file, no session, another version, or damage.
    """
    path = path_of(path, "session:", SessionError)
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

    try:
        body = json.loads(text)
        kept = None
        if body["kept"] is not None:
            kept = [_read_snapshot(number, fields, arrays) for number, fields in enumerate(body["kept"])]
        return SavedSession(
            window=_text(body["window"]),
            settings=dict(body["settings"]),
            pool=dict(body["pool"]),
            used=tuple(_text(name) for name in body["used"]),
            pieces=tuple(_read_piece(fields, arrays) for fields in body["pieces"]),
            kept=kept,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise SessionError(f"{found}: {type(error).__name__} {error!s:.200}; expected a session's fields") from error


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _put_rows(prefix: str, rows: Mapping[str, Mapping[str, np.ndarray]], arrays: Arrays) -> None:
    for side, channels in rows.items():
        for channel, value in channels.items():
            arrays[f"{prefix}.{side}.{channel}"] = value


def _read_rows(prefix: str, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
    rows: dict[str, dict[str, np.ndarray]] = {side: {} for side in SIDES}
    for name, value in arrays.items():
        if name.startswith(f"{prefix}."):
            side, _, channel = name.removeprefix(f"{prefix}.").partition(".")
            rows[side][channel] = value
    return rows


def _read_piece(fields: Any, arrays: Arrays) -> SavedPiece:
    items: tuple[Any, ...] | None = None
    if fields["items"] is not None:
        items = ()
        for item in fields["items"]:
            if "text" in item:
                items = (*items, Text(_text(item["text"])))
            elif "tokens" in item:
                items = (*items, [int(token) for token in item["tokens"]])
            else:
                items = (*items, arrays[item["image"]])

    return SavedPiece(_text(fields["id"]), _text(fields["name"]), items)


def _read_snapshot(number: int, fields: Any, arrays: Arrays) -> PieceSnapshot:
    aside = None
    if fields["aside"] is not None:
        start, turns, patch = fields["aside"]
        aside = int(start), int(turns), patch, _read_rows(f"aside.{number}", arrays)
    rows = _read_rows(f"kept.{number}", arrays)
    return PieceSnapshot(int(fields["turns"]), fields["patch"], arrays[f"local.{number}"], rows, aside)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value
