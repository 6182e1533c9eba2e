"""Records of data files: JSON Lines, JSON and Parquet."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require
from kvpatch_jax.utils.strict_json import loads

from .items import Refusal


class DataRecord(NamedTuple):
    """One record: its fields, and file and line or number for messages."""

    values: Mapping[str, Any]
    where: str


def data_files(path: Path) -> list[Path]:
    """Lists the data files of a path: itself, or those of a folder, or of its folder annotations or data.

    Raises:
      InputError: it is not there, or a file of another suffix.
    """
    if path.is_file() and path.suffix in READERS:
        return [path]
    if not path.is_dir():
        suffixes = ", ".join(READERS)
        raise InputError(f"--data: got {str(path)!r:.300}; expected a file of {suffixes}, or a folder")
    for folder in (path, path / "annotations", path / "data"):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        files = [entry for entry in entries if entry.is_file() and entry.suffix in READERS]
        if files:
            return files
    return []


def read_records(path: Path, name: str) -> Iterator[DataRecord | Refusal]:
    """Reads a file's records in order; a line that is none is a `Refusal`, and the lines behind it are read.

    Args:
      name: of the file, in messages.

    Raises:
      InputError: the file is damaged. MissingExtraError: Parquet without `data`.
    """
    return READERS[path.suffix](path, name)


def json_objects(path: Path) -> Iterator[DataRecord]:
    """Reads every line of a file of JSON Lines, plain or compressed by gzip.

    Raises:
      InputError: a line that is no JSON object, no such file, or a damaged one.
    """
    try:
        for record in _json_lines(path, path.name):
            if isinstance(record, Refusal):
                raise InputError(f"{record.where}: {record.reason}")
            yield record
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path.name}: got damaged bytes ({error}); expected a whole file") from error


def _json_lines(path: Path, name: str) -> Iterator[DataRecord | Refusal]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}:{number}"
            try:
                value = loads(line.decode("utf-8-sig")) if line.strip() else None
            except ValueError as error:
                yield Refusal(where, f"line: got {str(error)[:200]}; expected one JSON object in UTF-8")
                continue
            if isinstance(value, dict):
                yield DataRecord(value, where)
            elif line.strip():
                yield Refusal(where, f"line: got {value!r:.80}; expected one JSON object")


def _json(path: Path, name: str) -> Iterator[DataRecord | Refusal]:
    """Reads a list of objects, or an object whose `data` is the list, as the DocVQA challenge writes it."""
    try:
        value = loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{name}: got {error}; expected JSON in UTF-8") from error
    value = value.get("data") if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise InputError(f"{name}: got {value!r:.80}; expected a list of objects")
    for number, entry in enumerate(value):
        where = f"{name}[{number}]"
        yield DataRecord(entry, where) if isinstance(entry, dict) else Refusal(where, "entry: expected an object")


def _parquet(path: Path, name: str) -> Iterator[DataRecord | Refusal]:
    parquet, arrow = require("pyarrow.parquet", "pyarrow", "data"), require("pyarrow", "pyarrow", "data")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=16):
            for values in batch.to_pylist():
                yield DataRecord(
                    {key: value for key, value in values.items() if value is not None}, f"{name}[{number}]"
                )
                number += 1
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{name}: got damaged Parquet ({error}); expected a whole file") from error


READERS: dict[str, Callable[[Path, str], Iterator[DataRecord | Refusal]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}
"""Readers by the suffix of a file."""


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
