"""The file of a batch's answers: JSONL, a header and a line for each item, which a run goes on from."""

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
Line = dict[str, Any]


def shard_path(out: str | os.PathLike[str], index: int, count: int) -> Path:
    """The file of one shard: `out` itself where there is one, else its name with the shard's numbers."""
    path = path_of(out, "answers", InputError)
    return path if count == 1 else path.with_name(f"{path.stem}.{index:05d}-of-{count:05d}{path.suffix}")


class AnswerFile:
    """Lines that were written whole stay; one that a killed run left in part is cut off."""

    def __init__(self, path: Path, header: Mapping[str, Any], digests: Mapping[int, str], retry: bool):
        """Opens the file, or starts it.

        Args:
          header: of this run. digests: of its items, by index.
          retry: forget the lines of items that failed.

        Raises:
          InputError: answers of other items, another backbone or rank; another run that writes there; a file that is
          none, or cannot be written.
        """
        self.path, self.done = path, dict[int, Line]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise InputError(f"answers {str(path)!r:.200} cannot be written: {error}") from error
        try:
            _lock(self._file, path)
            self._take(header, digests, retry)
        except BaseException:
            self._file.close()
            raise

    def _take(self, header: Mapping[str, Any], digests: Mapping[int, str], retry: bool) -> None:
        """Reads what is there, and cuts off what was not finished."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if content and not whole and not json.dumps(dict(header)).encode().startswith(content):
            raise InputError(f"{str(self.path)!r:.200} is no file of answers; expected another --out")
        lines = whole.split(b"\n")[:-1]
        if lines:
            found = _parsed(lines[0], self.path, 1)
            if found != dict(header):
                raise InputError(f"{str(self.path)!r:.200} {_unlike(found, header)}; expected another out")
        for number, line in enumerate(lines[1:], 2):
            self._check(_parsed(line, self.path, number), digests, number)

        failed = [index for index, line in self.done.items() if "error" in line]
        if retry and failed:
            for index in failed:
                del self.done[index]
            whole = _bytes([dict(header), *self.done.values()])
            replace(self.path, whole)
            self._file.close()
            self._file = self.path.open("a+b")
            _lock(self._file, self.path)
        elif len(whole) != len(content):
            self._file.truncate(len(whole))
        if not whole:
            self.add([dict(header)])

    def _check(self, line: Line, digests: Mapping[int, str], number: int) -> None:
        index = line.get("item")
        if not isinstance(index, int) or digests.get(index) != line.get("digest") or index in self.done:
            raise InputError(
                f"{str(self.path)!r:.200}, line {number}: item {index!r:.40} of digest {line.get('digest')!r:.40}; "
                "expected each of this shard's items once, as it is now"
            )
        self.done[index] = line

    def add(self, lines: Sequence[Line]) -> None:
        """Appends lines, durable when this returns."""
        self._file.write(_bytes(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets others write."""
        self._file.close()


def _bytes(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)


def _lock(file: Any, path: Path) -> None:
    """Keeps other runs off, where the system has locks; they end with the process."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{str(path)!r:.200} is being written by another run; expected one alone") from None


def _parsed(line: bytes, path: Path, number: int) -> Line:
    try:
        found = strict_json.loads(line)
    except ValueError as error:
        raise InputError(f"{str(path)!r:.200}, line {number}: no JSON ({error!s:.80}); expected answers") from None
    if not isinstance(found, dict):
        raise InputError(f"{str(path)!r:.200}, line {number}: a {type(found).__name__}; expected an object")
    return found


def _unlike(found: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    if found.get("format") != FORMAT:
        return "is no file of answers"
    for name, value in header.items():
        if found.get(name) != value:
            return f"has answers of {name} {found.get(name)!r:.80}, not of {value!r:.80}"
    return "has another header"


def read_answers(*paths: str | os.PathLike[str]) -> list[Line]:
    """Reads the answers of all shards of a batch, in the order of its items.

    Raises:
      InputError: files of different batches, a shard or an item that is missing, or a file that is none.
    """
    if not paths:
        raise InputError("read_answers: no files; expected those of all shards")
    heads: list[Line] = []
    lines: dict[int, Line] = {}
    for path in [path_of(each, "answers", InputError) for each in paths]:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"answers {str(path)!r:.200} cannot be read: {error}") from error
        found = [_parsed(line, path, number) for number, line in enumerate(content.split(b"\n")[:-1], 1)]
        if not found or found[0].get("format") != FORMAT or found[0].get("version") != VERSION:
            raise InputError(f"{str(path)!r:.200} is no file of answers of version {VERSION}; expected one")
        if heads and any(found[0].get(name) != heads[0].get(name) for name in _SHARED):
            raise InputError(f"{str(path)!r:.200} {_unlike(found[0], heads[0])}; expected shards of one batch")
        heads.append(found[0])
        for line in found[1:]:
            lines[line["item"]] = line
    missing = [index for index in range(heads[0]["items"]) if index not in lines]
    if missing:
        raise InputError(
            f"answers: {len(missing)} of {heads[0]['items']} items are missing, the first is {missing[0]}; expected "
            "the files of all shards, finished"
        )
    return [lines[index] for index in sorted(lines)]
