"""Data sets by field maps: small TOML files that say which column is the question, the images, the answers.

    data = read(Path("mp_docvqa/val.json"))
    data.items, data.refusals

A map is recognised by the columns of the first record (`evals/measure/fields/*.toml`), or named. A record that differs
is refused with its line and column, and the rest goes on. Nothing is downloaded.
"""

import ast
import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from .episodes import step_items
from .items import DataSet, Item, Piece, Refusal
from .media import IMAGE_SUFFIXES, MediaFolder
from .records import DataRecord, data_files, filled, lookup, read_records
from .scoring import LETTERS, SCORERS

FOLDER = Path(__file__).with_name("fields")
DESCRIBE = "Describe what is shown."
"""Asked of a bare folder of images and PDFs; what re-prefill answers is right."""
LOOSE = 8
"""Images of one context of a bare folder, where they lie loose."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of pieces: `media` or `texts`.

    Attributes:
      media: columns of images or documents, by name or bytes; the first that a record has. "page_*" stands for numbered
        columns.
      texts: a column with a text, or a list of texts, of objects or of lists; an object {"image": name} is an image.
      names: patterns of a file's name. form: of an entry of `texts`, {0} or {title} being its parts.
    """

    media: Sequence[str] = ()
    texts: str = ""
    names: Sequence[str] = ("{}",)
    form: str = "{}"


@dataclasses.dataclass(frozen=True)
class FieldMap:
    """Which columns of a record are what. Texts are templates: {column}, {a.b} or {a.0} for what lies deeper.

    Attributes:
      name: of its file. about: the data set and its source. piece: one sentence: what a piece is.
      has: columns that records have. only: all that they may have, unless it is empty.
      literal: columns with lists as Python writes them.
      folders: in or beside the data's, where a release has its images.
      id, cluster, kind: as of `Item`.
      question: lines; one of which a column is missing is left out. {options} are the lettered options.
      answers: columns with right answers. scorer: a key of `SCORERS`; with options it is "choice".
      options: a column with a list.
      sources: of the pieces, one behind the other. steps: whether a record is an episode, which has no question and
        no sources.
    """

    name: str
    about: str
    piece: str
    has: Sequence[str]
    only: Sequence[str] = ()
    literal: Sequence[str] = ()
    folders: Sequence[str] = ("images",)
    id: str = "{id}"
    cluster: str = ""
    kind: str = ""
    question: Sequence[str] = ("{question}", "{options}")
    answers: Sequence[str] = ("answer",)
    scorer: str = "exact_match"
    options: str = "options"
    sources: Sequence[Source] = ()
    steps: bool = False

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Tells whether a record has this map's columns."""
        return set(self.has) <= set(values) and (not self.only or set(values) <= set(self.only))


def read_map(path: Path) -> FieldMap:
    """Reads a map. Raises InputError for a file that is no TOML, or has unknown names."""
    try:
        table: dict[str, Any] = {"name": path.stem, **tomllib.loads(path.read_text())}
        sources = tuple(Source(**source) for source in table.pop("sources", ()))
        return FieldMap(**table, sources=sources)
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"--fields: got {path} ({error}); expected TOML as evals/measure/fields has it") from error


def field_maps() -> list[FieldMap]:
    """Reads the maps that ship."""
    return [read_map(path) for path in sorted(FOLDER.glob("*.toml"))]


def help_text() -> str:
    """Lists the maps and the scorers."""
    lines = [f"{fields.name:16} {fields.about}" for fields in field_maps()]
    scorers = [f"{name:16} {(scorer.score.__doc__ or '').splitlines()[0]}" for name, scorer in SCORERS.items()]
    return "\n".join([*lines, "", "scorers", *scorers])


# ------------------------------------------------------------------------------------------------------ reading


def read(
    path: Path,
    fields: str | None = None,
    *,
    keep: int | None = None,
    limit: int = 0,
    seed: int = 0,
) -> DataSet:
    """Reads a data set: a file, a folder of files of one format, or a bare folder of images and PDFs.

    Args:
      fields: a map's name or file; None: the one that the first record fits.
      keep: screenshots that stay in an episode's prompt; None: all. limit, seed: a sample of so many records, and its
        seed; 0: all.

    Raises:
      InputError: there is no such path or map, nothing can be read, or no map fits.
    """
    path = Path(path)
    files = data_files(path)
    entries = functools.partial(_records, path, files) if files else functools.partial(_bare_records, path)
    chosen = _map_of(fields, path, entries())
    folder = MediaFolder(files[0].parent if files else path, chosen.folders)

    # A sample is drawn first, so that the images of other records are not looked at.
    total = sum(1 for _ in entries())
    drawn = set(np.random.default_rng(seed).permutation(total)[: limit or None].tolist())
    items, refusals = dict[str, Item](), list[Refusal]()
    for entry in (entry for number, entry in enumerate(entries()) if number in drawn):
        if isinstance(entry, Refusal):
            refusals.append(entry)
            continue
        try:
            record_items = {item.id: item for item in _items(entry, chosen, folder, keep)}
            if taken := sorted(items.keys() & record_items.keys()):
                raise InputError(f"id: got {taken[0]!r:.80}, as {items[taken[0]].where} has; expected another")
            items |= record_items
        except InputError as error:
            refusals.append(Refusal(entry.where, str(error)))
        except (TypeError, ValueError, AttributeError, SyntaxError, OSError) as error:
            reason = f"record: got {error}; expected columns of the kinds that the map {chosen.name} has"
            refusals.append(Refusal(entry.where, reason))
    return DataSet(chosen.name, path, chosen.piece, list(items.values()), refusals, folder)


def _records(path: Path, files: Sequence[Path]) -> Iterator[DataRecord | Refusal]:
    """Yields the records of all files; of a file that is damaged, a refusal at its end."""
    for file in files:
        name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
        try:
            yield from read_records(file, name)
        except InputError as error:
            yield Refusal(name, str(error))


def _bare_records(folder: Path) -> Iterator[DataRecord]:
    """Yields a context for each PDF, each folder of images, and each few images that lie loose."""
    entries = sorted(folder.iterdir())
    loose = [entry.name for entry in entries if entry.suffix.lower() in IMAGE_SUFFIXES]
    groups = [loose[first : first + LOOSE] for first in range(0, len(loose), LOOSE)]
    groups += [[entry.name] for entry in entries if entry.is_dir() or entry.suffix.lower() == ".pdf"]
    for names in groups:
        yield DataRecord({"id": names[0], "images": names, "question": DESCRIBE}, names[0])


def _map_of(name: str | None, path: Path, entries: Iterator[DataRecord | Refusal]) -> FieldMap:
    """Returns the map of a name or file, or the one that the first record fits."""
    refused = None
    for entry in entries:
        if isinstance(entry, DataRecord):
            break
        refused = refused or entry
    else:
        reason = f": {refused.where}: {refused.reason}" if refused else ""
        raise InputError(f"--data: got {path}, of which no record can be read{reason}")
    maps = {fields.name: fields for fields in field_maps()}
    if name is not None:
        return maps.get(name) or read_map(Path(name))
    fitting = [fields for fields in maps.values() if fields.fits(entry.values)]
    if len(fitting) != 1:
        fit, columns = ", ".join(fields.name for fields in fitting) or "none", ", ".join(list(entry.values)[:12])
        raise InputError(
            f"{entry.where}: got columns {columns}, which fit {fit} of the maps {', '.join(maps)}; expected "
            "--fields=FILE, a map of this data"
        )
    return fitting[0]


# -------------------------------------------------------------------------------------------------------- items


def _items(record: DataRecord, fields: FieldMap, media: MediaFolder, keep: int | None) -> list[Item]:
    """Makes the item of a record, or one for each step of an episode.

    Raises:
      InputError: a column that is missing or wrong; the message begins with its name.
    """
    unknown = sorted(set(record.values) - set(fields.only)) if fields.only else []
    if unknown:
        raise InputError(f"{unknown[0]}: got a column of this name; expected one of {', '.join(fields.only)}")
    written = {column: record.values.get(column) for column in fields.literal}
    literals = {column: ast.literal_eval(value) for column, value in written.items() if isinstance(value, str)}
    values = {**record.values, **literals}
    scorer = filled(fields.scorer, values) or "exact_match"
    if scorer not in SCORERS:
        raise InputError(f"scorer: got {scorer!r:.80}; expected one of {', '.join(SCORERS)}")
    identity = filled(fields.id, values) or record.where
    cluster, kind = filled(fields.cluster, values) or identity, filled(fields.kind, values) or ""
    item = Item(identity, cluster, (), "", _answers(fields, values), scorer, kind, where=record.where)
    if fields.steps:
        return step_items(item, values, media, keep)

    pieces = list[Piece]()
    for source in fields.sources:
        pieces += _pieces(source, values, media)
    if not pieces:
        raise InputError("images: got no images and no texts; expected at least one")
    choices = tuple(str(option) for option in lookup(values, fields.options) or ())
    item = item._replace(pieces=tuple(pieces), question=_question(fields, values, choices), options=choices)
    letters = tuple(LETTERS[: len(choices)])
    if choices and not set(item.answers) <= set(letters):
        raise InputError(
            f"answer: got {', '.join(item.answers)!r:.80}; expected one of the letters {', '.join(letters)}"
        )
    return [item._replace(scorer="choice") if choices else item]


def _question(fields: FieldMap, values: Mapping[str, Any], choices: Sequence[str]) -> str:
    """Writes a question's lines."""
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, choices, strict=False))
    lines = [filled(line, {**values, "options": listed}) for line in fields.question]
    if not any("{" in line and filled(line, values) for line in fields.question):
        raise InputError(f"question: got {values.get('question')!r:.80}; expected a text")
    return "\n".join(line for line in lines if line is not None)


def _answers(fields: FieldMap, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts and numbers of all columns of answers."""
    answers = list[str]()
    for column in fields.answers:
        value = lookup(values, column)
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(entry, bool | dict) or not str(entry).strip():
                raise InputError(f"{column}: got {entry!r:.80}; expected a text or a number")
            answers.append(str(entry))
    return tuple(answers)


# ------------------------------------------------------------------------------------------------------- pieces


def _pieces(source: Source, values: Mapping[str, Any], media: MediaFolder) -> Iterator[Piece]:
    """Yields the pieces of one source; none where the record lacks its column."""
    for column in source.media:
        value = _numbered(values, column)
        if value is not None:
            for number, path in enumerate(media.read(value, column, source.names), 1):
                yield Piece(path, f"image {number}")
            return
    if source.texts:
        yield from _listed_pieces(source, lookup(values, source.texts), media)


def _numbered(values: Mapping[str, Any], column: str) -> Any:
    """Returns a column's value, or of "page_*" those of page_1, page_2, … as a list; None where there is none."""
    if not column.endswith("*"):
        return lookup(values, column)
    stem = column.removesuffix("*")
    numbers = sorted(int(name[len(stem) :]) for name in values if re.fullmatch(rf"{stem}\d+", name))
    return [values[f"{stem}{number}"] for number in numbers] or None


def _listed_pieces(source: Source, entries: Any, media: MediaFolder) -> Iterator[Piece]:
    if isinstance(entries, Mapping):
        # The hub writes a list of objects as an object of lists.
        entries = list(zip(*entries.values(), strict=True))
    for number, entry in enumerate([entries] if isinstance(entries, str) else entries or ()):
        field = f"{source.texts}[{number}]"
        parts: Mapping[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"": entry}
        if set(parts) == {"image"}:
            yield from (Piece(path, f"image {number + 1}") for path in media.read(parts["image"], f"{field}.image"))
            continue
        if isinstance(entry, list | tuple):
            parts = {str(place): part for place, part in enumerate(entry)}
        text = filled(source.form, parts)
        if text is None:
            raise InputError(f"{field}: got {entry!r:.80}; expected a text or an image")
        yield Piece(Text(text), f"text {number + 1}")
