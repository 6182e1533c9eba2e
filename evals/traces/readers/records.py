"""Records of data files: JSON Lines, JSON, TSV and Parquet, told by their content, one record after the other.

Every record knows where it is, for messages, and can be read again, so that images inside a file are not kept in
memory. A line that is no record is a `Refusal`; the lines after it are read all the same.
"""

import csv
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require
from kvpatch_jax.utils.strict_json import loads

from .items import Refusal
from .stored_bytes import LONGEST_LINE, StoredBytes

MOST_COLUMNS = 1000
"""A table with more columns is none of the formats."""
MOST_JSON = 2 << 30
"""Largest JSON file that is read as a whole, in bytes; JSON Lines may be larger."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a data file.

    Attributes:
      values: its fields. where: file and line or number, for messages.
      reload: reads the fields again from the file.
    """

    values: Mapping[str, Any]
    where: str
    reload: Callable[[], Mapping[str, Any]]

    def __getitem__(self, field: str) -> Any:
        """Returns a field's value.

        Raises:
          InputError: the record has no such field.
        """
        if field not in self.values:
            raise InputError(
                f"{field}: got no such field; expected it beside {', '.join(list(self.values)[:12])}"[:400]
            )
        return self.values[field]

    def get(self, field: str) -> Any:
        """Returns a field's value; None without it."""
        return self.values.get(field)

    def text(self, field: str) -> str:
        """Returns a field that is a text and not blank."""
        return text_of(self[field], field)

    def name(self, field: str) -> str:
        """Returns an id or name: a text, or an integer as one."""
        value = self[field]
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return text_of(value, field)

    def list_of(self, field: str) -> list[Any]:
        """Returns a field that is a list."""
        value = self[field]
        if not isinstance(value, list):
            raise InputError(f"{field}: got {value!r:.80}; expected a list")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """Returns a field that is a list of texts, at least one."""
        values = self.list_of(field)
        if not values:
            raise InputError(f"{field}: got an empty list; expected at least one text")
        return tuple(text_of(value, f"{field}[{number}]") for number, value in enumerate(values))

    def mapping(self, field: str) -> "Record":
        """Returns a field that is an object, as a record whose messages name both fields."""
        value = self[field]
        if not isinstance(value, dict):
            raise InputError(f"{field}: got {value!r:.80}; expected an object")
        return Record(value, self.where, lambda: self.reload()[field])


def text_of(value: Any, field: str) -> str:
    """Returns a value that is a text and not blank.

    Raises:
      InputError: it is another value, or blank. The message names the field.
    """
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{field}: got {value!r:.80}; expected a text")
    return value


def read_records(source: StoredBytes) -> Iterator[Record | Refusal]:
    """Reads a file's records, told by its first bytes: Parquet, JSON (an object, or a list), JSON Lines or TSV.

    Of a JSON object whose `data` is a list, as the DocVQA challenge writes them, the records are that list's.

    Raises:
      InputError: the file is empty, too large, or none of these.
    """
    start = source.read(0, 4096)
    if start[:4] == b"PAR1":
        return _parquet_records(source)

    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise InputError(f"{source.name}: got an empty file; expected records")
    if text[:1] == b"[":
        return _json_records(source)
    if text[:1] == b"{":
        # A whole object in the first line makes JSON Lines, also of a single record; but an object with `data` is JSON.
        first = next(line for _, _, line in source.lines() if line.strip())
        try:
            value = loads(first)
        except ValueError:
            # One object over many lines begins with a bare brace or an unfinished member; a damaged line of JSON Lines
            # ends like a whole one.
            return _json_lines(source) if first.rstrip().endswith(b"}") else _json_records(source)
        return _json_records(source) if isinstance(value.get("data"), list) else _json_lines(source)
    if b"\t" in text.split(b"\n", 1)[0] or (len(text) == 4096 and b"\t" in text):
        return _table_records(source)
    raise InputError(f"{source.name}: got {text[:40]!r}; expected JSON Lines, JSON, a table with tabs, or Parquet")


def _refusal(where: str, field: str, error: Exception, expected: str) -> Refusal:
    return Refusal(where, f"{field}: got {str(error)[:200]}; expected {expected}")


def _json_lines(source: StoredBytes) -> Iterator[Record | Refusal]:
    for number, (start, length, line) in enumerate(source.lines(), 1):
        where = f"{source.name}:{number}"
        if not line.strip():
            continue
        try:
            value = loads(line.decode())
        except UnicodeDecodeError as error:
            yield _refusal(where, "line", error, "UTF-8")
        except ValueError as error:
            yield _refusal(where, "line", error, "one JSON object")
        else:
            if isinstance(value, dict):
                yield Record(value, where, lambda start=start, length=length: json.loads(source.read(start, length)))
            else:
                yield Refusal(where, f"line: got {value!r:.80}; expected one JSON object")


def _json_records(source: StoredBytes) -> Iterator[Record | Refusal]:
    content = source.read(0, MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise InputError(f"{source.name}: got more than {MOST_JSON} bytes of JSON; expected JSON Lines")
    try:
        value = loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{source.name}: got {error}; expected JSON in UTF-8") from error

    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    for number, entry in enumerate(value):
        where = f"{source.name}[{number}]"
        if isinstance(entry, dict):
            yield Record(entry, where, lambda entry=entry: entry)
        else:
            yield Refusal(where, f"entry: got {entry!r:.80}; expected an object")


def _table_records(source: StoredBytes) -> Iterator[Record | Refusal]:
    """Reads a TSV whose cells may be quoted and hold line ends, as pandas writes them. Empty cells are left out."""
    previous = csv.field_size_limit(LONGEST_LINE)
    lines = _Lines(source)
    rows = csv.reader(lines, delimiter="\t")
    try:
        header = next(rows)
        if len(header) > MOST_COLUMNS:
            raise InputError(f"{source.name}:1: got {len(header)} columns; expected at most {MOST_COLUMNS}")
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise InputError(f"{source.name}:1: got column {twice!r:.80} twice; expected distinct names")

        while True:
            number, start = lines.number + 1, lines.end
            where = f"{source.name}:{number}"
            try:
                csv.field_size_limit(LONGEST_LINE)
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield _refusal(where, "row", error, "cells between tabs")
                continue
            if not any(row):
                continue
            if any("\udc80" <= letter <= "\udcff" for cell in row if not cell.isascii() for letter in cell):
                yield Refusal(where, "row: got bytes that are no UTF-8; expected UTF-8")
            elif len(row) != len(header):
                yield Refusal(where, f"row: got {len(row)} cells; expected {len(header)}, as the header has")
            else:
                values = {name: cell for name, cell in zip(header, row, strict=True) if cell}
                yield Record(values, where, _RowAgain(source, header, start, lines.end - start))
    finally:
        csv.field_size_limit(previous)


class _Lines:
    """Lines of a table as texts, ends included, counted while they are taken."""

    def __init__(self, source: StoredBytes):
        self._lines = source.lines()
        self.number = self.end = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        start, length, line = next(self._lines)
        self.number, self.end = self.number + 1, start + length
        return line.decode(errors="surrogateescape") + "\n"


@dataclasses.dataclass(frozen=True)
class _RowAgain:
    """Reads one row of a table again."""

    source: StoredBytes
    header: list[str]
    start: int
    length: int

    def __call__(self) -> Mapping[str, Any]:
        text = self.source.read(self.start, self.length).decode(errors="surrogateescape")
        previous = csv.field_size_limit(LONGEST_LINE)
        try:
            row = next(csv.reader(text.splitlines(keepends=True), delimiter="\t"))
        finally:
            csv.field_size_limit(previous)
        return dict(zip(self.header, row, strict=True))


def _parquet_records(source: StoredBytes) -> Iterator[Record | Refusal]:
    parquet = require("pyarrow.parquet", "pyarrow", "data")
    arrow = require("pyarrow", "pyarrow", "data")
    try:
        file = parquet.ParquetFile(str(source.path))
        rows = _ParquetRows(file)
        count = 0
        for group in range(file.num_row_groups):
            for row in range(file.metadata.row_group(group).num_rows):
                values = {name: value for name, value in rows.read(group, row).items() if value is not None}
                yield Record(values, f"{source.name}[{count}]", functools.partial(rows.read, group, row))
                count += 1
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{source.name}: got damaged Parquet ({error}); expected a whole file") from error


class _ParquetRows:
    """Rows of a Parquet file. The group that was read last is kept: it has pages of many documents."""

    def __init__(self, file: Any):
        self._file = file
        self._group: tuple[int, Any] = (-1, None)

    def read(self, group: int, row: int) -> dict[str, Any]:
        """Reads one row."""
        if self._group[0] != group:
            self._group = (-1, None)
            self._group = (group, self._file.read_row_group(group))
        return self._group[1].slice(row, 1).to_pylist()[0]
