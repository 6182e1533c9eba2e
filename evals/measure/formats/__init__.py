"""Readers of the formats that public data sets are released in, and of plain JSON Lines, from local files.

    data = read(Path("mm_niah_val/annotations"))
    data.items, data.refusals

A format is recognised by the fields of its records. A record that differs is refused with its line and field, and the
rest goes on. Nothing is downloaded and nothing is written.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvpatch_jax import Video
from kvpatch_jax.errors import InputError

from ..data_files import DataFolder, ReadOptions
from ..episodes import Episode, EpisodeSet, step_items
from ..items import Item, ItemSet, Piece, Refusal, StoredImage
from ..records import Record, read_records
from ..scoring import RULES
from ..stored_bytes import StoredBytes
from . import (
    android_control,
    cua_trace,
    documents,
    mm_niah,
    multihop,
    plain,
    plain_episodes,
    trajectories,
    video_mme,
    vlmeval_tsv,
)
from .reader import Reader

_ALL = (
    mm_niah.READER,
    documents.MMLONGBENCH_DOC,
    documents.SLIDEVQA,
    documents.MP_DOCVQA,
    documents.DOCVQA,
    video_mme.READER,
    vlmeval_tsv.READER,
    multihop.HOTPOTQA,
    multihop.MUSIQUE,
    trajectories.GUI_ODYSSEY,
    android_control.READER,
    cua_trace.READER,
    trajectories.OSWORLD,
    plain.READER,
    plain_episodes.READER,
)
READERS: dict[str, Reader] = {reader.name: reader for reader in _ALL}
"""All formats by their names."""

_DATA_SUFFIXES = (".jsonl", ".json", ".tsv", ".parquet", ".zst", ".gz", ".tfrecord")
_ANNOTATIONS = ("annotations", "data")
"""Folders below a release's own that have its data files."""


def read(path: Path, format: str | None = None, **options: Any) -> ItemSet:
    """Reads a data set: a file, or a folder of files of one format.

    Args:
      path: the file or folder. format: a key of `READERS`; None: recognised by the first record.
      options: fields of `ReadOptions`.

    Raises:
      InputError: there is no such path or format, a file is empty or of no or another kind, or no format fits.
    """
    reader, found = _read(path, format, options)
    items: list[Item] = []
    refusals: list[Refusal] = []
    taken: dict[str, str] = {}
    for entry in found:
        if isinstance(entry, Refusal):
            refusals.append(entry)
            continue
        for item in step_items(entry) if isinstance(entry, Episode) else [entry]:
            if item.id in taken:
                refusals.append(
                    Refusal(item.where, f"id: got {item.id!r:.80}, as {taken[item.id]} has; expected its own")
                )
            else:
                taken[item.id] = item.where
                items.append(item)
    return ItemSet(reader.name, path, items, refusals, reader.chunk_rule, _digest(items, path))


def read_episodes(path: Path, format: str | None = None, **options: Any) -> EpisodeSet:
    """Reads a data set of trajectories, as `read` does, to whole episodes.

    Raises:
      InputError: as `read`; or the format has no episodes.
    """
    reader, found = _read(path, format, options)
    if not reader.episodes:
        names = ", ".join(other.name for other in _ALL if other.episodes)
        raise InputError(f"format: got {reader.name}, which has no episodes; expected one of {names}")
    episodes: dict[str, Episode] = {}
    refusals: list[Refusal] = []
    for entry in found:
        if isinstance(entry, Refusal):
            refusals.append(entry)
        elif isinstance(entry, Episode) and entry.id in episodes:
            refusals.append(Refusal(entry.steps[0].where, f"id: got {entry.id!r:.80} twice; expected its own"))
        elif isinstance(entry, Episode):
            episodes[entry.id] = entry
    return EpisodeSet(reader.name, path, list(episodes.values()), refusals)


def help_text() -> str:
    """Returns a line for each format: its name, what is a piece, and the rules of the library."""
    width = max(len(name) for name in READERS)
    lines = [f"{reader.name:{width}}  {reader.chunk_rule}" for reader in _ALL]
    rules = [f"{name:{width}}  {rule.source}" for name, rule in RULES.items()]
    return "\n".join(["formats", *lines, "", "scoring rules", *rules])


def _read(path: Path, format: str | None, options: dict[str, Any]) -> tuple[Reader, Iterator[Item | Episode | Refusal]]:
    known = {field.name for field in dataclasses.fields(ReadOptions)}
    if unknown := sorted(set(options) - known):
        raise InputError(f"options: got {unknown[0]!r:.80}; expected some of {', '.join(sorted(known))}")
    if format is not None and format not in READERS:
        raise InputError(f"format: got {format!r:.80}; expected one of {', '.join(READERS)}")
    settings = ReadOptions(**options)
    path = Path(path)
    sources = [StoredBytes(file, file.relative_to(_base(path)).as_posix()) for file in _data_files(path)]
    reader = READERS[format] if format is not None else _recognised(sources)
    files = DataFolder(sources[0].path.parent, settings, reader.beside)
    if reader is android_control.READER:
        found = (entry for source in sources for entry in android_control.read_episodes(source, files))
        return reader, itertools.islice(found, settings.limit)

    refusals: list[Refusal] = []
    records = itertools.islice(_records(sources, refusals), settings.limit)

    def entries() -> Iterator[Item | Episode | Refusal]:
        yield from reader.read(records, files)
        yield from refusals

    return reader, entries()


def _base(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _data_files(path: Path) -> list[Path]:
    """Lists the data files of a path: itself, or those of a folder, or of its folder annotations or data."""
    if not path.exists():
        raise InputError(f"data: got {str(path)!r:.300}, which is not there; expected a file or a folder")
    if not path.is_dir():
        if not path.is_file():
            raise InputError(f"data: got {str(path)!r:.300}, which is no regular file; expected a file or a folder")
        return [path]
    for folder in (path, *(path / name for name in _ANNOTATIONS)):
        if folder.is_dir():
            entries = sorted(entry for entry in folder.iterdir() if entry.is_file())
            found = [
                entry for entry in entries
                if (entry.suffix in _DATA_SUFFIXES and not entry.name.endswith(".meta.json"))
                or entry.name.startswith("android_control-")
            ]  # fmt: skip
            if found:
                return found
    raise InputError(f"data: got folder {str(path)!r:.300} without data files; expected {', '.join(_DATA_SUFFIXES)}")


def _records(sources: Iterable[StoredBytes], refusals: list[Refusal]) -> Iterator[Record]:
    """Yields the records of all files; lines that are none, and files that end damaged, go to `refusals`."""
    for source in sources:
        try:
            for record in read_records(source):
                if isinstance(record, Refusal):
                    refusals.append(record)
                else:
                    yield record
        except InputError as error:
            refusals.append(Refusal(source.name, str(error)))


def _recognised(sources: list[StoredBytes]) -> Reader:
    """Returns the one format that the first record has the fields of."""
    if android_control.is_android_control(sources[0]):
        return android_control.READER
    record = next((entry for entry in read_records(sources[0]) if isinstance(entry, Record)), None)
    if record is None:
        raise InputError(f"{sources[0].name}: got no record that can be read; expected one of {', '.join(READERS)}")
    fitting = [reader for reader in _ALL if reader.fits(record)]
    if len(fitting) != 1:
        names = ", ".join(reader.name for reader in fitting) or "none of them"
        raise InputError(
            f"{record.where}: got fields {', '.join(list(record.values)[:12])}, which fit {names}; expected one of the "
            f"formats {', '.join(READERS)} (name it: format=…)"
        )
    return fitting[0]


def _digest(items: Iterable[Item], path: Path) -> str:
    """Digests all that items consist of but pixels; places of files as they are below the data's folder."""
    base = _base(path)
    digest = hashlib.sha256()
    for item in items:
        fields = [
            item.id,
            item.cluster,
            item.question,
            item.answers,
            item.kind,
            item.rule,
            item.options,
            item.answer_format,
        ]
        content = [*fields, [[piece.label, _named(piece, base)] for piece in item.pieces]]
        digest.update(json.dumps(content, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def _named(piece: Piece, base: Path) -> Any:
    content = piece.content
    if isinstance(content, StoredImage):
        return ["stored", content.name]
    if isinstance(content, Video):
        places = content.source if isinstance(content.source, list) else [content.source]
        return ["video", [_place(place, base) for place in places], content.fps, content.frames, content.rate]
    return ["image", _place(content, base)] if isinstance(content, Path) else ["text", str(content)]


def _place(path: Path, base: Path) -> str:
    """Returns a path from the data's folder or the one above it; its name alone where it is elsewhere."""
    for folder in (base, base.parent):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name
