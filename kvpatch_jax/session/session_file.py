"""Sessions in files: the window, what was given, and the KV as it lies in the pool, in one safetensors file.

Written beside its place and moved there in one step, so that whoever is killed leaves the old file or the new one.
What is read is checked throughout: a digest over all of it shows damage; sizes and types must be the pool's own.
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
    """A piece that a session knew: its name, and what was given of it (None where it had been let go of)."""

    id: str
    name: str
    items: tuple[Any, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class SavedSession:
    """A session as it is written.

    Attributes:
      window: as `Window.to_json` gives it.
      settings: what of the session's own settings is JSON.
      pool: dtype and page size. used: names and ids that were given out last, the oldest first.
      pieces: in the window or gone from it. kept: of the window's pieces, in order; None: without KV.
    """

    window: str
    settings: Mapping[str, Any]
    pool: Mapping[str, Any]
    used: tuple[str, ...]
    pieces: tuple[SavedPiece, ...]
    kept: list[PieceSnapshot] | None


def write(saved: SavedSession, path: str | os.PathLike[str]) -> None:
    """Writes a session in place of what is there, whole or not at all.

    Raises:
      SessionError: a file that cannot be written.
    """
    arrays: Arrays = {}
    body = {
        "window": saved.window,
        "settings": dict(saved.settings),
        "pool": dict(saved.pool),
        "used": list(saved.used),
        "pieces": [_piece_written(number, piece, arrays) for number, piece in enumerate(saved.pieces)],
        "kept": None,
    }
    if saved.kept is not None:
        body["kept"] = [_kept_written(number, kept, arrays) for number, kept in enumerate(saved.kept)]
    text = json.dumps(body)
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    meta = {"format": FORMAT, "version": str(VERSION), "digest": _digest(text, arrays), "session": text}
    # A file without arrays is none that safetensors reads everywhere.
    content = safetensors.numpy.save({**arrays, "end": np.zeros(1, np.uint8)}, meta)
    try:
        replace(path_of(path, "session:", SessionError), content)
    except OSError as error:
        raise SessionError(
            f"session: {str(path)!r:.200} cannot be written: {error}; expected a file's place"
        ) from error


def read(path: str | os.PathLike[str]) -> SavedSession:
    """Reads a session.

    Raises:
      SessionError: no such file, no session, another version, or damage.
    """
    path = path_of(path, "session:", SessionError)
    name = f"session: {str(path)!r:.200}"
    try:
        if not os.path.isfile(path):
            raise SessionError(f"{name} is no file; expected what Session.save wrote")
        content = path.read_bytes()
        arrays = safetensors.numpy.load(content)
        meta = _metadata(content)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        if isinstance(error, SessionError):
            raise
        raise SessionError(f"{name}: {error!s:.200}; expected what Session.save wrote") from error
    arrays.pop("end", None)
    if meta.get("format") != FORMAT or meta.get("version") != str(VERSION):
        found = f"{meta.get('format')!r:.40}, version {meta.get('version')!r:.20}"
        raise SessionError(f"{name} is {found}; expected {FORMAT!r}, version {VERSION}")
    text = meta.get("session", "")
    if _digest(text, arrays) != meta.get("digest"):
        raise SessionError(f"{name}: contents of another digest; expected {meta.get('digest')!r:.40}: it is damaged")
    try:
        return _parsed(json.loads(text), arrays)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise SessionError(f"{name}: {type(error).__name__} {error!s:.200}; expected a session's fields") from error


def _metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    meta = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return {key: value for key, value in meta.items() if isinstance(value, str)}


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(arrays):
        value = arrays[name]
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ one piece


def _piece_written(number: int, piece: SavedPiece, arrays: Arrays) -> dict[str, Any]:
    if piece.items is None:
        return {"id": piece.id, "name": piece.name, "items": None}
    items = []
    for place, item in enumerate(piece.items):
        if isinstance(item, str):
            items.append({"text": str(item)})
        elif isinstance(item, list):
            items.append({"tokens": item})
        else:
            arrays[f"item.{number}.{place}"] = item
            items.append({"image": f"item.{number}.{place}"})
    return {"id": piece.id, "name": piece.name, "items": items}


def _kept_written(number: int, kept: PieceSnapshot, arrays: Arrays) -> dict[str, Any]:
    arrays[f"local.{number}"] = np.asarray(kept.local)
    written = {"turns": kept.turns, "patch": kept.patch, "aside": None}
    _rows_written(f"kept.{number}", kept.rows, arrays)
    if kept.aside is not None:
        written["aside"] = list(kept.aside[:3])
        _rows_written(f"aside.{number}", kept.aside[3], arrays)
    return written


def _rows_written(prefix: str, rows: Mapping[str, Mapping[str, np.ndarray]], arrays: Arrays) -> None:
    for side, own in rows.items():
        arrays.update({f"{prefix}.{side}.{name}": value for name, value in own.items()})


def _parsed(body: Any, arrays: Arrays) -> SavedSession:
    pieces = tuple(_piece_read(each, arrays) for each in body["pieces"])
    kept = None
    if body["kept"] is not None:
        kept = [_kept_read(number, each, arrays) for number, each in enumerate(body["kept"])]
    used = tuple(_text(each) for each in body["used"])
    return SavedSession(_text(body["window"]), dict(body["settings"]), dict(body["pool"]), used, pieces, kept)


def _piece_read(each: Any, arrays: Arrays) -> SavedPiece:
    items = None
    if each["items"] is not None:
        items = tuple(_item_read(item, arrays) for item in each["items"])
    return SavedPiece(_text(each["id"]), _text(each["name"]), items)


def _item_read(item: Any, arrays: Arrays) -> Any:
    if "text" in item:
        return Text(_text(item["text"]))
    if "tokens" in item:
        return [int(token) for token in item["tokens"]]
    return arrays[item["image"]]


def _kept_read(number: int, each: Any, arrays: Arrays) -> PieceSnapshot:
    aside = None
    if each["aside"] is not None:
        start, turns, patch = each["aside"]
        aside = int(start), int(turns), patch, _rows_read(f"aside.{number}", arrays)
    return PieceSnapshot(
        int(each["turns"]), each["patch"], arrays[f"local.{number}"], _rows_read(f"kept.{number}", arrays), aside
    )


def _rows_read(prefix: str, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {side: {} for side in SIDES}
    for name, value in arrays.items():
        if name.startswith(f"{prefix}."):
            side, _, channel = name.removeprefix(f"{prefix}.").partition(".")
            found[side][channel] = value
    return found


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"a {type(given).__name__} in place of a text")
    return given
