"""The file of a batch's answers: JSONL, a header and a line for each item, after which a run continues."""

import contextlib
import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of
from ..utils.kinds import is_whole

FORMAT = {"format": "kvpatch_jax.answers", "version": 1}
Line = dict[str, Any]


def shard_path(out: str | os.PathLike[str], index: int, count: int) -> Path:
    """Returns the file of one shard: `out` itself if there is one shard, else its name with the shard's numbers."""
    path = path_of(out, "answers", InputError)
    return path if count == 1 else path.with_name(f"{path.stem}.{index:05d}-of-{count:05d}{path.suffix}")


def open_answers(path: Path, header: Mapping[str, Any], items: Set[int]) -> tuple[BinaryIO, dict[int, Line]]:
    """Opens a file of answers for appending, or creates it. Only one run may write to it.

    A last line that a killed run left unfinished is cut off.

    Args:
      header: of this run: all that answers depend on.
      items: indices of its items.

    Returns:
      The file, and the lines that it has, by the index of the item.

    Raises:
      InputError: answers of other items or options, another run that writes there, another kind of file, or one that
      cannot be written. The file is unchanged.
    """
    header = {**FORMAT, **header}
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+b"))
        except OSError as error:
            raise InputError(f"answers: got {str(path)!r:.200}, which cannot be written: {error}") from error
        # The lock ends with the process. Not every system has such locks.
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                shown = f"{str(path)!r:.200}, which another run is writing"
                raise InputError(f"answers: got {shown}; expected one run alone") from None

        # A killed run may have left half a line, or half a header.
        file.seek(0)
        content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        lines: list[Line] = []
        if complete or not json.dumps(header).encode().startswith(content):
            _, lines = _parsed(path, complete, header)
        for number, line in enumerate(lines, 2):
            if line["item"] not in items:
                shown = f"{str(path)!r:.200}, line {number}: got item {line['item']!r:.40}"
                raise InputError(f"answers: {shown}; expected one of this shard")
        file.truncate(len(complete))
        if not complete:
            append(file, header)
        stack.pop_all()
        return file, {line["item"]: line for line in lines}


def append(file: BinaryIO, line: Line) -> None:
    """Appends a line, which is durable when this returns."""
    file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def read_answers(*paths: str | os.PathLike[str]) -> list[Line]:
    """Reads the answers of all shards of a batch, in the order of its items.

    Raises:
      InputError: files of different batches, a missing shard or item, or another kind of file.
    """
    if not paths:
        raise InputError("read_answers: got no files; expected those of all shards")

    expected, answers = FORMAT, dict[int, Line]()
    for path in [path_of(path, "answers", InputError) for path in paths]:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"answers: got {str(path)!r:.200}, which cannot be read: {error}") from error
        header, lines = _parsed(path, content, expected)
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


def _parsed(path: Path, content: bytes, expected: Mapping[str, Any]) -> tuple[Line, list[Line]]:
    """Parses the complete lines of a file. Raises InputError unless its header is the expected one."""
    where = f"answers: {str(path)!r:.200}, line"
    lines = content.split(b"\n")[:-1]
    header, *rest = [strict_json.object_of(line, f"{where} {n}") for n, line in enumerate(lines, 1)] or [{}]
    for name in [name for name in expected if header.get(name) != expected[name]]:
        shown = f"answers of {name} {header.get(name)!r:.80}, not of {expected[name]!r:.80}"
        raise InputError(f"answers: got {str(path)!r:.200}, which has {shown}; expected one of this batch")
    count: Any = header.get("items")
    if not is_whole(count, 0):
        raise InputError(f"{where} 1: got items {count!r:.40}; expected their number")
    for number, index in enumerate([line.get("item") for line in rest], 2):
        if not is_whole(index, 0) or index >= count:
            raise InputError(f"{where} {number}: got item {index!r:.40}; expected an index below {count}")
    return header, rest
