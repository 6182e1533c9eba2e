"""Certificates as files: JSON with a row a line, digested, and read back as from a stranger."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CertificateError
from ..utils import strict_json
from ..utils.atomic_files import replace

FORMAT = "kvpatch certificate"
VERSION = 1
LARGEST = 4 << 20
"""Bytes of a file; a larger one is not read."""
_COLUMNS = ("rows", "plans")
NEWER = ("spans", "modalities")
"""What older files do not say; what a certificate does not know is left out."""


def body_of(certificate: Any) -> dict[str, Any]:
    """All that a certificate says, as JSON has it."""
    body = {field.name: getattr(certificate, field.name) for field in dataclasses.fields(certificate)}
    for word in _COLUMNS:
        body[word] = [_fields(row) for row in body[word]]
    body = {word: value for word, value in body.items() if word not in NEWER or value is not None}
    return body | {"recommended": dict(certificate.recommended._asdict())}


def _fields(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def digest_of(body: dict[str, Any]) -> str:
    """Digests a body: 32 hexadecimal digits.

    Raises:
      CertificateError: texts that UTF-8 cannot hold.
    """
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    except ValueError as error:
        raise CertificateError(f"certificate: {error!s:.120}; expected finite numbers and texts of UTF-8") from None


def text_of(certificate: Any) -> str:
    """A certificate as JSON: tables are lists of values below the names of their columns."""
    body = body_of(certificate)
    lines = []
    for word, value in body.items():
        shown = json.dumps(value, ensure_ascii=False)
        if word in _COLUMNS:
            names = list(value[0]) if value else []
            rows = [names, *([row[name] for name in names] for row in value)] if value else []
            shown = "[" + ",".join(f"\n   {json.dumps(row)}" for row in rows) + "]"
        lines.append(f"  {json.dumps(word)}: {shown}")
    head = {"format": FORMAT, "version": VERSION, "digest": certificate.digest}
    first = "".join(f" {json.dumps(word)}: {json.dumps(value)},\n" for word, value in head.items())
    return "{\n" + first + ' "certificate": {\n' + ",\n".join(lines) + "\n }\n}\n"


def parsed(text: Any) -> dict[str, Any]:
    """The body of a certificate's JSON, tables as lists of dictionaries; digested, its values not looked at.

    Raises:
      CertificateError: no such JSON, another version, or damage.
    """
    saved = _loaded(text)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise CertificateError(f"certificate: JSON of {_kind_of(saved)}; expected what Certificate.to_json gave")
    if saved.get("version") != VERSION or type(saved.get("version")) is not int:
        raise CertificateError(f"certificate: version {saved.get('version')!r:.80}; expected {VERSION}")
    check_names(saved, ("format", "version", "digest", "certificate"), "certificate")
    body = saved["certificate"]
    if not isinstance(body, dict):
        raise CertificateError(f"certificate: contents as {_kind_of(body)}; expected a table")
    for word in _COLUMNS:
        body[word] = _table(body.get(word), word)
    if (found := digest_of(body)) != saved["digest"]:
        raise CertificateError(
            f"certificate: contents of digest {found}; expected {saved['digest']!r:.80}: it is damaged"
        )

    return body


def built[Made](make: Callable[..., Made], given: Any) -> Made:
    """A row from a dictionary that names its fields, all of them and no other.

    Raises:
      CertificateError: other names, or what the row refuses.
    """
    own: Any = make
    names = own._fields if hasattr(own, "_fields") else [field.name for field in dataclasses.fields(own)]
    if not isinstance(given, dict):
        raise CertificateError(f"certificate: a row as {_kind_of(given)}; expected a table")
    check_names(given, names, f"row of {own.__name__}")
    return make(**given)


def read(path: Path) -> bytes:
    """A file's bytes.

    Raises:
      CertificateError: one that is not there, is no regular file, is too large, or cannot be read.
    """
    try:
        # Not waiting: a pipe under this name would be waited for.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
                raise CertificateError(f"{path}: no regular file of at most {LARGEST} bytes; expected a certificate")
            return file.read(LARGEST)
    except (OSError, ValueError) as error:
        if isinstance(error, CertificateError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise CertificateError(
            f"{path}: {reason}; expected a certificate, which `python -m evals.certify` makes"
        ) from error


def write(path: Path, text: str) -> Path:
    """Writes a file, whole or not at all.

    Raises:
      CertificateError: it cannot be written.
    """
    try:
        replace(path, text.encode())
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}; expected a file that can be written") from error
    return path


def _loaded(text: Any) -> Any:
    if not isinstance(text, str | bytes):
        raise CertificateError(f"certificate: a {type(text).__name__}; expected JSON")
    try:
        return strict_json.loads(text)
    except ValueError as error:
        raise CertificateError(f"certificate: {error!s:.120}; expected JSON as Certificate.to_json gives it") from None


def _table(given: Any, what: str) -> list[dict[str, Any]]:
    """Rows of values below the names of their columns, as dictionaries."""
    if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
        raise CertificateError(f"certificate: {what} as {_kind_of(given)}; expected a list of lists")
    if not given:
        return []
    names, *rows = given
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise CertificateError(f"certificate: columns of {what} {names!r:.80}; expected distinct names")
    if any(len(row) != len(names) for row in rows):
        raise CertificateError(f"certificate: {what} of unequal lengths; expected {len(names)} values in each")
    return [dict(zip(names, row, strict=True)) for row in rows]


def check_names(table: dict[str, Any], names: Any, what: str) -> None:
    """Refuses a table without exactly these names. Raises CertificateError."""
    if set(table) != set(names):
        found = sorted(set(table) ^ set(names))
        raise CertificateError(f"{what}: {found!s:.80} missing or unknown; expected {', '.join(names)}")


def _kind_of(given: Any) -> str:
    return "nothing" if given is None else f"a {type(given).__name__}"
