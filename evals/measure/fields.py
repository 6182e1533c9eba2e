"""Data sets by field maps: small TOML files that say which column is the question, the images, the answers.

    data = read(Path("mp_docvqa/val.json"))
    data.items, data.refusals

A map is recognised by the columns of the first record (`evals/measure/fields/*.toml`), or named. A record that differs
is refused with its line and column, and the rest goes on. Nothing is downloaded.
"""

import ast
import dataclasses
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import ImageError, InputError

from ..harness.files import IMAGE_SUFFIXES
from .episodes import Steps, step_items
from .items import DataSet, Item, Piece, Refusal
from .media import MediaFolder
from .records import DataRecord, data_files, filled, lookup, read_records
from .scoring import LETTERS, SCORERS

FOLDER = Path(__file__).with_name("fields")
DESCRIBE = "Describe what is shown."
"""Asked of a bare folder of images and PDFs; what re-prefill answers is right."""
LOOSE = 8
"""Images of one context of a bare folder, where they lie loose."""

_BORDERS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s+"), re.compile(r"\s+"))
"""Between paragraphs, lines, sentences, words: the first that divides a text is taken."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of pieces, one of the first four.

    Attributes:
      media: columns of images, documents or videos, by name, bytes or base64; the first that a record has. "page_*"
        stands for numbered columns.
      texts: a column with a text, or a list of texts, of objects or of lists.
      mixed: a column with a list of {"image": name} and {"text": text}.
      marked: a column with a text that has `mark` in the places of the images in the column `images`.
      names: patterns of a file's name. form: of an entry of `texts`, {0} or {title} being its parts.
      label: of its pieces. characters: of a piece of a marked text at most.
      video: whether a folder is one of frames. rows: whether a value may be the id of an earlier record.
    """

    media: Sequence[str] = ()
    texts: str = ""
    mixed: str = ""
    marked: str = ""
    images: str = ""
    mark: str = "<image>"
    names: Sequence[str] = ("{}",)
    form: str = "{}"
    label: str = "text"
    characters: int = 2000
    video: bool = False
    rows: bool = False


@dataclasses.dataclass(frozen=True)
class FieldMap:
    """Which columns of a record are what. Texts are templates: {column}, {a.b} or {a.0} for what lies deeper.

    Attributes:
      name: of its file. about: the data set and its source. piece: one sentence: what a piece is.
      has, lacks: columns that records have, and have not. only: all that they may have, unless it is empty.
      requires: columns with the one value that is read. literal: columns with lists as Python writes them.
      folders: in or beside the data's, where a release has its images. frames: sampled of a video.
      id, cluster, kind: as of `Item`; {file} is the stem of the file.
      question: lines; one of which a column is missing is left out. {options} are the lettered options.
      answers: columns with right answers. scorer: a key of `SCORERS`; with options it is "choice".
      options: a column with a list, or columns of one each. option_images: a column with images as options.
      sources: of the pieces, one behind the other. steps: of an episode, in place of question and sources.
    """

    name: str
    about: str
    piece: str
    has: Sequence[str]
    lacks: Sequence[str] = ()
    only: Sequence[str] = ()
    requires: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    literal: Sequence[str] = ()
    folders: Sequence[str] = ("images",)
    frames: int | None = None
    id: str = "{id}"
    cluster: str = ""
    kind: str = ""
    question: Sequence[str] = ("{question}", "{options}")
    answers: Sequence[str] = ("answer",)
    scorer: str = "exact_match"
    options: Sequence[str] = ()
    option_images: str = ""
    sources: Sequence[Source] = ()
    steps: Steps | None = None

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Tells whether a record has this map's columns."""
        known = not self.only or set(values) <= set(self.only)
        return known and set(self.has) <= set(values) and not set(self.lacks) & set(values)


def read_map(path: Path) -> FieldMap:
    """Reads a map. Raises InputError for a file that is no TOML, or has unknown names."""
    try:
        table: dict[str, Any] = {"name": path.stem, **tomllib.loads(path.read_text())}
        sources = tuple(Source(**source) for source in table.pop("sources", ()))
        steps = Steps(**table.pop("steps")) if "steps" in table else None
        return FieldMap(**table, sources=sources, steps=steps)
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"--fields: got {path} ({error}); expected TOML as evals/measure/fields has it") from error


def field_maps() -> list[FieldMap]:
    """Reads the maps that ship."""
    return [read_map(path) for path in sorted(FOLDER.glob("*.toml"))]


def help_text() -> str:
    """Lists the maps and the scorers, a line each."""
    lines = [f"{fields.name:16} {fields.about}" for fields in field_maps()]
    return "\n".join([*lines, "", "scorers", *(f"{name:16} {scorer.source}" for name, scorer in SCORERS.items())])


# ------------------------------------------------------------------------------------------------------ reading


def read(
    path: Path,
    fields: str | None = None,
    *,
    media: Path | None = None,
    keep: int | None = None,
    limit: int = 0,
    seed: int = 0,
) -> DataSet:
    """Reads a data set: a file, a folder of files of one format, or a bare folder of images and PDFs.

    Args:
      fields: a map's name or file; None: the one that the first record fits.
      media: folder of the images, where it is not the data's own. keep: screenshots that stay in an episode's prompt;
        None: all. limit, seed: a sample of so many records, and its seed; 0: all.

    Raises:
      InputError: there is no such path or map, nothing can be read, or no map fits.
    """
    path = Path(path)
    files = data_files(path)
    entries = functools.partial(_records, path, files) if files else functools.partial(_bare_records, path)
    chosen = _map_of(fields, path, entries())
    folder = MediaFolder(files[0].parent if files else path, chosen.folders, media, chosen.frames)

    # A sample is drawn first, so that the images of other records are not looked at.
    total = sum(1 for _ in entries())
    drawn = set(np.random.default_rng(seed).permutation(total)[: limit or None].tolist())
    shared = any(source.rows for source in chosen.sources)
    items, refusals = dict[str, Item](), list[Refusal]()
    for number, entry in enumerate(entries()):
        if number not in drawn and not shared:
            continue
        if isinstance(entry, Refusal):
            refusals += [entry] if number in drawn else []
            continue
        try:
            record_items = {item.id: item for item in _items(entry, chosen, folder, keep)}
            if taken := sorted(items.keys() & record_items.keys()):
                raise InputError(f"id: got {taken[0]!r:.80}, as {items[taken[0]].where} has; expected another")
            items |= record_items if number in drawn else {}
        except (InputError, ImageError) as error:
            refusals += [Refusal(entry.where, str(error))] if number in drawn else []
        except (TypeError, ValueError, AttributeError) as error:
            reason = f"record: got {error}; expected columns of the kinds that the map {chosen.name} has"
            refusals += [Refusal(entry.where, reason)] if number in drawn else []
    return DataSet(chosen.name, path, chosen.piece, list(items.values()), refusals, folder)


def _records(path: Path, files: Sequence[Path]) -> Iterator[DataRecord | Refusal]:
    """Yields the records of all files; of a file that ends damaged, a refusal at its end."""
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
    maps = field_maps()
    if name is not None:
        return {fields.name: fields for fields in maps}.get(name) or read_map(Path(name))
    fitting = [fields for fields in maps if fields.fits(entry.values)]
    if len(fitting) != 1:
        names = ", ".join(fields.name for fields in fitting) or "none"
        columns = ", ".join(list(entry.values)[:12])
        raise InputError(
            f"{entry.where}: got columns {columns}, which fit {names} of the maps "
            f"{', '.join(fields.name for fields in maps)}; expected --fields=FILE, a map of this data"
        )
    return fitting[0]


# -------------------------------------------------------------------------------------------------------- items


def _items(record: DataRecord, fields: FieldMap, media: MediaFolder, keep: int | None) -> list[Item]:
    """Makes the item of a record, or one for each step of an episode.

    Raises:
      InputError, ImageError: a column that is missing or wrong; the message begins with its name.
    """
    unknown = sorted(set(record.values) - set(fields.only)) if fields.only else []
    if unknown:
        raise InputError(f"{unknown[0]}: got a column of this name; expected one of {', '.join(fields.only)}")
    for column, value in fields.requires.items():
        if lookup(record.values, column) not in (value, None):
            raise InputError(f"{column}: got {lookup(record.values, column)!r:.80}; expected {value!r}")
    values = {**record.values, "file": Path(re.split(r"[:\[]", record.where)[0]).stem}
    values |= {column: _literal(values.get(column), column) for column in fields.literal}
    scorer = filled(fields.scorer, values) or "exact_match"
    if scorer not in SCORERS:
        raise InputError(f"scorer: got {scorer!r:.80}; expected one of {', '.join(SCORERS)}")
    identity = filled(fields.id, values) or record.where
    cluster, kind = filled(fields.cluster, values) or identity, filled(fields.kind, values) or ""
    item = Item(identity, cluster, (), "", _answers(fields, values), scorer, kind, where=record.where)
    if fields.steps is not None:
        return step_items(item, values, fields.steps, media, keep)

    pieces = list[Piece]()
    for source in fields.sources:
        pieces += _pieces(source, values, identity, media)
    if not pieces:
        raise InputError("images: got no images and no texts; expected at least one")
    choices = _choices(fields, values)
    if fields.option_images and (images := lookup(values, fields.option_images)):
        contents = media.read(images, fields.option_images)
        pieces += [Piece(content, f"option {letter}") for content, letter in zip(contents, LETTERS, strict=False)]
        choices = tuple(f"(image of option {letter})" for letter in LETTERS[: len(contents)])
    item = item._replace(pieces=tuple(pieces), question=_question(fields, values, choices), options=choices)
    if choices:
        item = item._replace(scorer="choice", answers=tuple(_letter(answer, choices) for answer in item.answers))
    return [item]


def _literal(value: Any, column: str) -> Any:
    """Reads a list that is written as Python writes it."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(f"{column}: got {value!r:.60} ({error}); expected a list") from error


def _question(fields: FieldMap, values: Mapping[str, Any], choices: Sequence[str]) -> str:
    """Writes a question's lines; images that it shows are named by their places in front of it."""
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, choices, strict=False))
    lines = [filled(line, {**values, "options": listed}) for line in fields.question]
    asked = any("{" in line and filled(line, values) for line in fields.question)
    if not asked:
        raise InputError(f"question: got {values.get('question')!r:.80}; expected a text")
    question = "\n".join(line for line in lines if line is not None)
    for source in fields.sources:
        shown = str(values.get(source.marked, "")).count(source.mark)
        while source.marked and source.mark in question:
            shown += 1
            question = question.replace(source.mark, f"(image {shown})", 1)
    return question


def _answers(fields: FieldMap, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts and numbers of all columns of answers; a list of numbers is one answer."""
    answers = list[str]()
    for column in fields.answers:
        value = lookup(values, column)
        texts = isinstance(value, list) and not all(isinstance(entry, int) for entry in value)
        for entry in value if texts else [] if value is None else [value]:
            if isinstance(entry, bool | dict) or not str(entry).strip():
                raise InputError(f"{column}: got {entry!r:.80}; expected a text or a number")
            answers.append(str(entry))
    return tuple(answers)


def _choices(fields: FieldMap, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the options: those of a list, or the columns of one each that a record has."""
    present = [value for column in fields.options if (value := lookup(values, column)) is not None]
    listed = present[0] if len(fields.options) == 1 and present else present
    return tuple(re.sub(r"^[A-Z][.:)]\s*", "", str(option)) for option in listed)


def _letter(answer: str, choices: Sequence[str]) -> str:
    """Returns the letter of an option that is named by its letter, its text, or its number from 0."""
    letters = LETTERS[: len(choices)]
    if answer in choices:
        return letters[choices.index(answer)]
    if answer.isdecimal() and int(answer) < len(choices):
        return letters[int(answer)]
    if answer.strip() not in tuple(letters):
        raise InputError(f"answer: got {answer!r:.80}; expected one of the letters {', '.join(letters)}")
    return answer.strip()


# ------------------------------------------------------------------------------------------------------- pieces


def _pieces(source: Source, values: Mapping[str, Any], identity: str, media: MediaFolder) -> Iterator[Piece]:
    """Yields the pieces of one source; none where the record lacks its column."""
    if source.media:
        columns = ((column, _numbered(values, column)) for column in source.media)
        column, value = next(((column, value) for column, value in columns if value is not None), ("", None))
        if value is None:
            return
        shared = media.rows.get(value) if source.rows and isinstance(value, str) else None
        contents = shared or (media.video if source.video else media.read)(value, column, source.names)
        if source.rows:
            media.rows[identity] = contents
        yield from (Piece(content, f"{source.label} {number}") for number, content in enumerate(contents, 1))
    elif source.marked:
        yield from _marked_pieces(source, values, media)
    else:
        yield from _listed_pieces(source, values, media)


def _numbered(values: Mapping[str, Any], column: str) -> Any:
    """Returns a column's value, or of "page_*" those of page_1, page_2, … as a list; None where there is none."""
    if not column.endswith("*"):
        return lookup(values, column)
    stem = column.removesuffix("*")
    numbers = sorted(int(name[len(stem) :]) for name in values if re.fullmatch(rf"{stem}\d+", name))
    return [values[f"{stem}{number}"] for number in numbers] or None


def _listed_pieces(source: Source, values: Mapping[str, Any], media: MediaFolder) -> Iterator[Piece]:
    column = source.texts or source.mixed
    entries: Any = lookup(values, column)
    if isinstance(entries, Mapping):
        # The hub writes a list of objects as an object of lists.
        entries = list(zip(*entries.values(), strict=True))
    for number, entry in enumerate([entries] if isinstance(entries, str) else entries or ()):
        field = f"{column}[{number}]"
        if source.mixed and isinstance(entry, Mapping) and set(entry) == {"image"}:
            contents = media.read(dict(entry)["image"], f"{field}.image")
            yield from (Piece(content, f"image {number + 1}") for content in contents)
            continue
        parts = entry if isinstance(entry, Mapping) else {"": entry}
        if isinstance(entry, list | tuple):
            parts = {str(place): part for place, part in enumerate(entry)}
        text = filled("{text}" if source.mixed else source.form, parts)
        if text is None:
            raise InputError(f"{field}: got {entry!r:.80}; expected a text{' or an image' * bool(source.mixed)}")
        yield Piece(Text(text), f"{source.label} {number + 1}")


def _marked_pieces(source: Source, values: Mapping[str, Any], media: MediaFolder) -> Iterator[Piece]:
    """Divides a text at its images; those that the question shows stand behind it, since a question is a text."""
    texts, images = str(values.get(source.marked, "")).split(source.mark), list(lookup(values, source.images) or ())
    if len(images) < len(texts) - 1:
        counts = f"got {len(images)} images; expected {len(texts) - 1}"
        raise InputError(f"{source.images}: {counts}, as {source.mark} is written")
    texts += [""] * (len(images) + 1 - len(texts))
    for number, text in enumerate(texts, 1):
        parts = split_text(text, source.characters)
        for place, part in enumerate(parts, 1):
            yield Piece(Text(part), f"text {number}" + (f", part {place}" if len(parts) > 1 else ""))
        if number <= len(images):
            for content in media.read(images[number - 1], f"{source.images}[{number - 1}]", source.names):
                yield Piece(content, f"image {number}")


def split_text(text: str, most: int, border: int = 0) -> list[str]:
    """Divides a text at paragraphs, or lines, sentences, words where a part is longer than `most` characters.

    The pieces joined are the text. Neighbouring short parts make one piece.
    """
    if len(text) <= most:
        return [text] if text else []
    if border == len(_BORDERS):
        return [text[start : start + most] for start in range(0, len(text), most)]
    # Each part keeps the white space behind it.
    edges = [0, *(match.end() for match in _BORDERS[border].finditer(text)), len(text)]
    pieces, joins = list[str](), False
    for start, end in itertools.pairwise(edges):
        # What is left of a long part stays alone, so that the next one begins where it is written to.
        if joins and len(pieces[-1]) + end - start <= most:
            pieces[-1] += text[start:end]
        elif start < end:
            joins = end - start <= most
            pieces += split_text(text[start:end], most, border + 1)
    return pieces
