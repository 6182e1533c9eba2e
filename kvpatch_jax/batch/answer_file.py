"""The file of a batch's answers: JSONL, a header and a line for each item, after which a run continues."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of

FORMAT, VERSION = "kvpatch_jax.answers", 1
Line = dict[str, Any]


def shard_path(out: str | os.PathLike[str], index: int, count: int) -> Path:
    """Returns the file of one shard: `out` itself if there is one shard, else its name with the shard's numbers."""
    path = path_of(out, "answers", InputError)
    return path if count == 1 else path.with_name(f"{path.stem}.{index:05d}-of-{count:05d}{path.suffix}")


def open_answers(path: Path, header: Line, digests: Mapping[int, str]) -> tuple[BinaryIO, dict[int, Line]]:
    """Opens a file of answers for appending, or creates it. Only one run may write to it.

    A last line that a killed run left unfinished is cut off.

    Args:
      header: of this run: all that answers depend on.
      digests: of its items, by index.

    Returns:
      The file, and the lines that it has, by the index of the item.

    Raises:
      InputError: answers of other items or options, another run that writes there, another kind of file, or one that
      cannot be written. The file is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise InputError(f"answers: got {str(path)!r:.200}, which cannot be written: {error}") from error
    try:
        _lock(file, path)
        return file, _resume(file, path, {"format": FORMAT, "version": VERSION, **header}, digests)
    except BaseException:
        file.close()
        raise


def append(file: BinaryIO, *lines: Line) -> None:
    """Appends lines, which are durable when this returns."""
    file.write(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))
    file.flush()
    os.fsync(file.fileno())


def _resume(file: BinaryIO, path: Path, header: Line, digests: Mapping[int, str]) -> dict[int, Line]:
    """Returns the lines of an earlier run, or writes the header of a new file."""
    # A killed run may have left half a line, or half a header.
    file.seek(0)
    content = file.read()
    complete = content[: content.rfind(b"\n") + 1]
    if not complete:
        if not json.dumps(header).encode().startswith(content):
            raise InputError(f"answers: got {str(path)!r:.200}, which is no file of answers; expected another out")
        file.truncate(0)
        append(file, header)
        return {}

    earlier, *lines = _lines(path, complete)
    _expect_header(path, earlier, header)
    done = dict[int, Line]()
    for number, line in enumerate(lines, 2):
        index, digest = line.get("item"), line.get("digest")
        # An item that failed may be there again.
        repeated = index in done and "error" not in done[index]
        if not isinstance(index, int) or digests.get(index) != digest or repeated:
            raise InputError(
                f"answers: {str(path)!r:.200}, line {number}: got item {index!r:.40} of digest {digest!r:.40}; "
                "expected each of this shard's items once, as it is now"
            )
        done[index] = line
    file.truncate(len(complete))
    return done


def _lock(file: BinaryIO, path: Path) -> None:
    """Locks the file against other runs, if the system has such locks. The lock ends with the process."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found = f"{str(path)!r:.200}, which another run is writing"
            raise InputError(f"answers: got {found}; expected one run alone") from None


def _lines(path: Path, content: bytes) -> list[Line]:
    """Parses the complete lines of a file."""
    lines = enumerate(content.split(b"\n")[:-1], 1)
    return [strict_json.object_of(line, f"answers: {str(path)!r:.200}, line {n}", InputError) for n, line in lines]


def _expect_header(path: Path, header: Line, expected: Line) -> None:
    """Raises InputError unless a file's header is the expected one."""
    for name in [name for name in expected if header.get(name) != expected[name]]:
        found = f"has answers of {name} {header.get(name)!r:.80}, not of {expected[name]!r:.80}"
        if name in ("format", "version"):
            found = f"is no file of answers, version {VERSION}"
        raise InputError(f"answers: got {str(path)!r:.200}, which {found}; expected one of this batch")


def read_answers(*paths: str | os.PathLike[str]) -> list[Line]:
    """Reads the answers of all shards of a batch, in the order of its items.

    Raises:
      InputError: files of different batches, a missing shard or item, or another kind of file.
    """
    if not paths:
        raise InputError("read_answers: got no files; expected those of all shards")

    expected: Line = {"format": FORMAT, "version": VERSION}
    answers: dict[int, Line] = {}
    for path in [path_of(path, "answers", InputError) for path in paths]:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"answers: got {str(path)!r:.200}, which cannot be read: {error}") from error
        header, *lines = _lines(path, content) or [{}]
        _expect_header(path, header, expected)
        # Shards of one batch have everything in common but their numbers. An item that failed may be there twice.
        expected = {name: value for name, value in header.items() if name != "shard"}
        answers |= {line["item"]: line for line in lines}

    missing = [index for index in range(expected["items"]) if index not in answers]
    if missing:
        raise InputError(
            f"answers: got files in which {len(missing)} of {expected['items']} items are missing, the first is "
            f"{missing[0]}; expected the files of all shards, finished"
        )
    return [answers[index] for index in sorted(answers)]
