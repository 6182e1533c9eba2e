"""File format of certificates: JSON with one row a line and a digest. Files are read as if a stranger wrote them."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..errors import CertificateError
from ..utils import strict_json
from ..utils.atomic_files import replace

FORMAT = "kvpatch certificate"
VERSION = 1
MAX_BYTES = 4 << 20
"""Size of the largest file that is read."""
NEWER_FIELDS = ("spans", "modalities")
"""Fields that older files lack. They are omitted while unknown, so that older certificates keep their digest."""
_TABLES = ("rows", "plans")


def body_of(certificate: Any) -> dict[str, Any]:
    """Returns everything that a certificate states, as JSON values. Rows are dictionaries."""
    body = {field.name: getattr(certificate, field.name) for field in dataclasses.fields(certificate)}
    body = {name: value for name, value in body.items() if name not in NEWER_FIELDS or value is not None}
    for name in _TABLES:
        body[name] = [dict(vars(row)) for row in body[name]]
    return body | {"recommended": dict(certificate.recommended._asdict())}


def digest_of(body: dict[str, Any]) -> str:
    """Digests a body: 32 hexadecimal digits.

    Raises:
      CertificateError: a string that UTF-8 cannot encode.
    """
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    except ValueError as error:
        raise CertificateError(f"certificate: got {error!s:.120}; expected finite numbers and UTF-8 strings") from None


def text_of(certificate: Any) -> str:
    """Returns a certificate as JSON. Tables are lists of rows, the first of which names the columns."""
    lines = []
    for name, value in body_of(certificate).items():
        text = json.dumps(value, ensure_ascii=False)
        if name in _TABLES:
            columns = list(value[0]) if value else []
            rows = [columns, *([row[column] for column in columns] for row in value)] if value else []
            text = "[" + ",".join(f"\n   {json.dumps(row)}" for row in rows) + "]"
        lines.append(f"  {json.dumps(name)}: {text}")

    head = {"format": FORMAT, "version": VERSION, "digest": certificate.digest}
    first = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    return "{\n" + first + ' "certificate": {\n' + ",\n".join(lines) + "\n }\n}\n"


def parsed(text: Any) -> dict[str, Any]:
    """Returns the body of a certificate's JSON, rows as dictionaries. The digest is checked, the values are not.

    Raises:
      CertificateError: malformed JSON, another version, or damage.
    """
    if not isinstance(text, str | bytes):
        raise CertificateError(f"certificate: got a {type(text).__name__}; expected JSON")

    try:
        saved = strict_json.loads(text)
    except ValueError as error:
        raise CertificateError(f"certificate: got {error!s:.120}; expected JSON of Certificate.to_json") from None

    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise CertificateError(f"certificate: got JSON of {_kind_of(saved)}; expected that of Certificate.to_json")

    version = saved.get("version")
    if version != VERSION or type(version) is not int:
        raise CertificateError(f"certificate.version: got {version!r:.80}; expected {VERSION}")

    check_names(saved, ("format", "version", "digest", "certificate"), "certificate")
    body = saved["certificate"]
    if not isinstance(body, dict):
        raise CertificateError(f"certificate: got contents as {_kind_of(body)}; expected an object")

    for name in _TABLES:
        body[name] = _rows(body.get(name), name)
    if (digest := digest_of(body)) != saved["digest"]:
        raise CertificateError(f"certificate.digest: got {saved['digest']!r:.80}; expected {digest}: it is damaged")
    return body


def _rows(table: Any, name: str) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries."""
    what = f"certificate.{name}"
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise CertificateError(f"{what}: got {_kind_of(table)}; expected a list of lists")
    if not table:
        return []

    columns, *rows = table
    if not all(isinstance(column, str) for column in columns) or len(set(columns)) != len(columns):
        raise CertificateError(f"{what}: got columns {columns!r:.80}; expected distinct names")
    if any(len(row) != len(columns) for row in rows):
        raise CertificateError(f"{what}: got rows of unequal lengths; expected {len(columns)} values in each")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def built[Row](make: Callable[..., Row], values: Any) -> Row:
    """Makes a dataclass or named tuple from a dictionary with exactly its fields.

    Raises:
      CertificateError: other names, or what the row's own checks refuse.
    """
    kind: Any = make
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    if not isinstance(values, dict):
        raise CertificateError(f"certificate: got a {kind.__name__} as {_kind_of(values)}; expected an object")
    check_names(values, names, kind.__name__)
    return make(**values)


def check_names(values: dict[str, Any], names: Collection[str], what: str) -> None:
    """Refuses a dictionary with other keys. Raises CertificateError."""
    if difference := sorted(set(values) ^ set(names)):
        raise CertificateError(f"{what}: got {difference!s:.80} missing or unknown; expected {', '.join(names)}")


def read(path: Path) -> bytes:
    """Reads a file.

    Raises:
      CertificateError: the file is missing, not regular, too large or not readable.
    """
    try:
        # O_NONBLOCK, because opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise CertificateError(
                    f"{path}: got no regular file of at most {MAX_BYTES} bytes; expected a certificate"
                )
            return file.read(MAX_BYTES)
    except CertificateError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CertificateError(
            f"{path}: got {reason}; expected a certificate, as `python -m evals.certify` makes it"
        ) from error


def write(path: Path, text: str) -> Path:
    """Writes a file, atomically.

    Raises:
      CertificateError: it cannot be written.
    """
    try:
        replace(path, text.encode())
    except OSError as error:
        raise CertificateError(f"{path}: got {error.strerror}; expected a file that can be written") from error
    return path


def _kind_of(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
