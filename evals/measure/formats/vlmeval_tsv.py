"""VLMEvalKit's TSV: one image or several, a question, options A, B, … or none.

Fields by VLMEvalKit's docs/en/Development.md and `ImageBaseDataset`: index, image (base64, or the index of the row
whose image it is, where it is at most 64 characters; a list of images is written as Python writes it), image_path,
question, hint, A, B, C, …, answer, category. The prompt is that of `ImageMCQDataset.build_prompt`.
"""

import ast
import string
from collections.abc import Iterable, Iterator
from typing import Any

from kvpatch_jax.errors import ImageError, InputError

from ..data_files import DataFolder, base64_bytes
from ..items import Item, Piece, Refusal
from ..records import Record
from .reader import Reader

_LONGEST_INDEX = 64


def _read(records: Iterable[Record], files: DataFolder) -> Iterator[Item | Refusal]:
    rows: dict[str, Record] = {}
    for record in records:
        try:
            # Cells that hold images are not kept: rows that others refer to are read again.
            rows[record.name("index")] = Record({}, record.where, record.reload)
            yield _item(record, rows, files)
        except (InputError, ImageError) as error:
            yield Refusal(record.where, str(error))


def _item(record: Record, rows: dict[str, Record], files: DataFolder) -> Item:
    identity = record.name("index")
    letters = [letter for letter in string.ascii_uppercase if record.get(letter) is not None]
    if letters != list(string.ascii_uppercase[: len(letters)]):
        raise InputError(f"{letters[-1]}: got options {', '.join(letters)}; expected letters without a gap")
    options = tuple(record.name(letter) for letter in letters)
    answer = record.name("answer").strip()
    if options and answer not in letters:
        raise InputError(f"answer: got {answer!r:.80}; expected one of {', '.join(letters)}")

    hint = f"Hint: {record.name('hint')}\n" if record.get("hint") is not None else ""
    question = f"{hint}Question: {record.name('question')}\n"
    if options:
        listed = "".join(f"{letter}. {option}\n" for letter, option in zip(letters, options, strict=True))
        question += f"Options:\n{listed}"
        if files.options.instruct:
            question += "Please select the correct answer from the options above.\n"
    category = record.get("category")
    return Item(
        id=identity,
        cluster=identity,
        pieces=tuple(_images(record, rows, files)),
        question=question,
        answers=(answer,),
        kind=category if isinstance(category, str) else "",
        rule="vlmeval_option" if options else "exact_match",
        options=options,
        where=record.where,
    )


def _images(record: Record, rows: dict[str, Record], files: DataFolder) -> list[Piece]:
    if record.get("image") is None:
        names = _listed(record["image_path"], "image_path")
        paths = [files.image(name, f"image_path[{number}]") for number, name in enumerate(names)]
        return [Piece(path, f"image {number}") for number, path in enumerate(paths, 1)]

    value = record["image"]
    if isinstance(value, str) and len(value) <= _LONGEST_INDEX:
        if value not in rows or value == record.get("index"):
            raise InputError(f"image: got {value!r:.80}; expected base64, or the index of an earlier row")
        record = rows[value]
        value = record.reload()["image"]
    count = len(_listed(value, "image"))
    read_again = record.reload

    def reader(number: int) -> Any:
        return lambda: base64_bytes(_listed(read_again()["image"], "image")[number], f"image[{number}]")

    return [
        Piece(files.stored(reader(number), f"image[{number}]", record.where), f"image {number + 1}")
        for number in range(count)
    ]


def _listed(value: Any, field: str) -> list[str]:
    """Returns the texts of a cell that holds one, or a list as Python writes it."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise InputError(f"{field}: got {value!r:.60} ({error}); expected a list of texts") from error
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(text, str) for text in values):
        raise InputError(f"{field}: got {value!r:.60}; expected a text or a list of texts")
    return values


def _fits(record: Record) -> bool:
    fields = set(record.values)
    return {"index", "question", "answer"} <= fields and bool({"image", "image_path"} & fields)


READER = Reader(name="vlmeval_tsv", fits=_fits, read=_read, chunk_rule="Every image of a row is a piece.")
