"""The file of a batch's answers: JSONL, a header and a line for each item, after which a run continues."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace

FORMAT, VERSION = "kvpatch_jax.answers", 1
_SHARED = ("format", "version", "items", "digest", "backbone", "rank", "dtype")
"""Fields of the header that all shards of a batch have in common."""
Line = dict[str, Any]


def shard_path(out: str | os.PathLike[str], index: int, count: int) -> Path:
    """Returns the file of one shard: `out` itself if there is one shard, else its name with the shard's numbers."""
    path = path_of(out, "answers", InputError)
    return path if count == 1 else path.with_name(f"{path.stem}.{index:05d}-of-{count:05d}{path.suffix}")


class AnswerFile:
    """File of answers, open for appending. Only one run may write to it.

    Attributes:
      path: of the file.
      done: the lines of items that were answered before, by index.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], digests: Mapping[int, str], retry: bool):
        """Opens the file or creates it. A last line that a killed run left unfinished is cut off.

        Args:
          header: of this run.
          digests: of its items, by index.
          retry: whether to discard the lines of items that failed.

        Raises:
          InputError: answers of other items, another backbone or rank, another run that writes there, another kind of
          file, or one that cannot be written. The file is unchanged.
        """
        self.path, self.done = path, dict[int, Line]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            found = f"{str(path)!r:.200}, which cannot be written: {error}"
            raise InputError(f"answers: got {found}; expected a file's place") from error

        try:
            _lock(self._file, path)
            self._resume(dict(header), digests, retry)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, header: Line, digests: Mapping[int, str], retry: bool) -> None:
        """Reads the lines of an earlier run into `done`, and writes the header of a new file."""
        # A killed run may have left half a line, or half a header.
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if content and not whole and not json.dumps(header).encode().startswith(content):
            raise InputError(
                f"answers: got {str(self.path)!r:.200}, which is no file of answers; expected another --out"
            )

        lines = whole.split(b"\n")[:-1]
        if lines:
            found = strict_json.object_of(lines[0], f"answers: {str(self.path)!r:.200}, line 1", InputError)
            if found != header:
                mismatch = _difference(found, header)
                raise InputError(f"answers: got {str(self.path)!r:.200}, which {mismatch}; expected another out")

        for number, text in enumerate(lines[1:], 2):
            where = f"answers: {str(self.path)!r:.200}, line {number}"
            line = strict_json.object_of(text, where, InputError)
            index, digest = line.get("item"), line.get("digest")
            if not isinstance(index, int) or digests.get(index) != digest or index in self.done:
                raise InputError(
                    f"{where}: got item {index!r:.40} of digest {digest!r:.40}; expected each of this shard's items "
                    "once, as it is now"
                )
            self.done[index] = line

        # The file is replaced as a whole, so that a kill in between loses no line.
        failed = [index for index, line in self.done.items() if "error" in line]
        if retry and failed:
            for index in failed:
                del self.done[index]
            whole = _encode([header, *self.done.values()])
            replace(self.path, whole)
            # The open file is the one that was replaced.
            self._file.close()
            self._file = self.path.open("a+b")
            _lock(self._file, self.path)
        elif len(whole) != len(content):
            self._file.truncate(len(whole))

        if not whole:
            self.add([header])

    def add(self, lines: Sequence[Line]) -> None:
        """Appends lines, which are durable when this returns."""
        self._file.write(_encode(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file, and so releases its lock."""
        self._file.close()


def _encode(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)


def _lock(file: Any, path: Path) -> None:
    """Locks the file against other runs, if the system has such locks. The lock ends with the process."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"answers: got {str(path)!r:.200}, which another run is writing; expected one run alone"
            ) from None


def _difference(found: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    """Returns how a file's header differs from that of a run."""
    if found.get("format") != FORMAT:
        return "is no file of answers"
    for name, value in header.items():
        if found.get(name) != value:
            return f"has answers of {name} {found.get(name)!r:.80}, not of {value!r:.80}"
    return "has another header"


def read_answers(*paths: str | os.PathLike[str]) -> list[Line]:
    """Reads the answers of all shards of a batch, in the order of its items.

    Raises:
      InputError: files of different batches, a missing shard or item, or another kind of file.
    """
    if not paths:
        raise InputError("read_answers: got no files; expected those of all shards")

    headers: list[Line] = []
    lines: dict[int, Line] = {}
    for path in paths:
        path = path_of(path, "answers", InputError)
        try:
            content = path.read_bytes()
        except OSError as error:
            found = f"{str(path)!r:.200}, which cannot be read: {error}"
            raise InputError(f"answers: got {found}; expected a file of answers") from error

        found = []
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            found.append(strict_json.object_of(line, f"answers: {str(path)!r:.200}, line {number}", InputError))
        if not found or found[0].get("format") != FORMAT or found[0].get("version") != VERSION:
            raise InputError(f"answers: got {str(path)!r:.200}; expected a file of answers, version {VERSION}")
        if headers and any(found[0].get(name) != headers[0].get(name) for name in _SHARED):
            mismatch = _difference(found[0], headers[0])
            raise InputError(f"answers: got {str(path)!r:.200}, which {mismatch}; expected shards of one batch")

        headers.append(found[0])
        for line in found[1:]:
            lines[line["item"]] = line

    missing = [index for index in range(headers[0]["items"]) if index not in lines]
    if missing:
        raise InputError(
            f"answers: got files in which {len(missing)} of {headers[0]['items']} items are missing, the first is "
            f"{missing[0]}; expected the files of all shards, finished"
        )
    return [lines[index] for index in sorted(lines)]
