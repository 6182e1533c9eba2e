"""Records of data files: JSON Lines, JSON, TSV, Parquet and TFRecord, plain or compressed by gzip."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require
from kvpatch_jax.utils.strict_json import loads

from .items import Refusal
from .tfrecord import examples

Stream = io.BufferedIOBase

LONGEST_CELL = 256 << 20
"""Characters of a table's cell: images are base64."""


class DataRecord(NamedTuple):
    """One record: its fields, and file and line or number for messages."""

    values: Mapping[str, Any]
    where: str


def data_files(path: Path) -> list[Path]:
    """Lists the data files of a path: itself, or those of a folder, or of its folder annotations or data.

    Raises:
      InputError: it is not there.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"--data: got {str(path)!r:.300}, which is not there; expected a file or a folder")
    for folder in (path, path / "annotations", path / "data"):
        entries = sorted(entry for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else []
        # Shards of TensorFlow's data sets have no suffix: android_control-00000-of-00020.
        files = [entry for entry in entries if _suffix(entry) in READERS or "-of-" in entry.name]
        if files:
            return files
    return []


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def read_records(path: Path, name: str) -> Iterator[DataRecord | Refusal]:
    """Reads a file's records in order; a line that is none is a `Refusal`, and the lines behind it are read.

    Args:
      name: of the file, in messages.

    Raises:
      InputError: the file is damaged, or not what its suffix says. MissingExtraError: Parquet without `data`.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with cast(Stream, gzip.open(path, "rb") if packed else path.open("rb")) as stream:
            yield from READERS.get(_suffix(path), _tfrecord)(stream, name)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise InputError(f"{name}: got damaged bytes ({error}); expected a whole file") from error


def json_objects(path: Path) -> Iterator[DataRecord]:
    """Reads every line of a file of JSON Lines.

    Raises:
      InputError: a line that is no JSON object, no such file, or a damaged one.
    """
    for record in read_records(path, path.name):
        if isinstance(record, Refusal):
            raise InputError(f"{record.where}: {record.reason}")
        yield record


def _json_lines(stream: Stream, name: str) -> Iterator[DataRecord | Refusal]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield _object(line, f"{name}:{number}")


def _object(line: bytes, where: str) -> DataRecord | Refusal:
    try:
        value = loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return Refusal(where, f"line: got {str(error)[:200]}; expected one JSON object in UTF-8")
    if isinstance(value, dict):
        return DataRecord(value, where)
    return Refusal(where, f"line: got {value!r:.80}; expected one JSON object")


def _json(stream: Stream, name: str) -> Iterator[DataRecord | Refusal]:
    """Reads a list of objects, one object, or an object whose `data` is the list, as the DocVQA challenge writes it."""
    content = stream.read()
    try:
        value = loads(content.decode("utf-8-sig"))
    except ValueError as error:
        # JSON Lines go by .json as well.
        if isinstance(_object(content.strip().split(b"\n", 1)[0], name), DataRecord):
            yield from _json_lines(io.BytesIO(content), name)
            return
        raise InputError(f"{name}: got {error}; expected JSON in UTF-8") from error
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        where = f"{name}[{number}]"
        yield DataRecord(entry, where) if isinstance(entry, dict) else Refusal(where, "entry: expected an object")


def _table(stream: Stream, name: str) -> Iterator[DataRecord | Refusal]:
    """Reads a TSV whose cells may be quoted and hold line ends, as pandas writes them. Empty cells are left out."""
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(cast(Any, stream), "utf-8-sig", errors="replace", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t")
        header = next(rows, [])
        if len(set(header)) != len(header) or not header:
            raise InputError(f"{name}:1: got columns {header!r:.80}; expected distinct names between tabs")
        number = rows.line_num + 1
        for row in rows:
            where, number = f"{name}:{number}", rows.line_num + 1
            if len(row) == len(header) and not any("\ufffd" in cell for cell in row):
                yield DataRecord({column: cell for column, cell in zip(header, row, strict=True) if cell}, where)
            elif any(row):
                yield Refusal(where, f"row: got {len(row)} cells; expected {len(header)} in UTF-8, as the header has")


def _parquet(stream: Stream, name: str) -> Iterator[DataRecord | Refusal]:
    parquet, arrow = require("pyarrow.parquet", "pyarrow", "data"), require("pyarrow", "pyarrow", "data")
    try:
        number = 0
        for batch in parquet.ParquetFile(stream).iter_batches(batch_size=16):
            for values in batch.to_pylist():
                yield DataRecord(
                    {key: value for key, value in values.items() if value is not None}, f"{name}[{number}]"
                )
                number += 1
    except arrow.ArrowException as error:
        raise InputError(f"{name}: got damaged Parquet ({error}); expected a whole file") from error


def _tfrecord(stream: Stream, name: str) -> Iterator[DataRecord | Refusal]:
    for number, values in enumerate(examples(stream, name)):
        yield DataRecord(values, f"{name}[{number}]")


READERS: dict[str, Callable[[Stream, str], Iterator[DataRecord | Refusal]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".tsv": _table,
    ".parquet": _parquet,
    ".tfrecord": _tfrecord,
}
"""Readers by the suffix of a file, without .gz."""


def lookup(values: Mapping[str, Any], column: str) -> Any:
    """Returns what a column holds, "a.b" or "a.0" what lies deeper; None where there is nothing."""
    value: Any = values
    for key in column.split("."):
        if isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def filled(template: str, values: Mapping[str, Any]) -> str | None:
    """Puts the texts and numbers of columns in the places of {column}; None where one is missing or blank."""
    parts = re.split(r"\{([^{}]*)\}", template)
    for place in range(1, len(parts), 2):
        value = lookup(values, parts[place])
        if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
            value = "".join(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            return None
        parts[place] = str(value)
    return "".join(parts)
