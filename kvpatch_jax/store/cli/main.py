"""Command line for operators: `python -m kvpatch_jax.store ls --root=DIR`. Needs the extra `operate`."""

import difflib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...errors import InputError, KVPatchError
from ...utils.sizes import size_of
from .commands import COMMANDS, Options, Outcome

_PROGRAM = "python -m kvpatch_jax.store"


def _flags():
    from absl import flags

    values = flags.FlagValues()  # separate, so that `main` can be called twice, and inside other programs

    def text(name, what):
        return flags.DEFINE_string(name, None, what, flag_values=values)

    def truth(name, what):
        return flags.DEFINE_bool(name, False, what, flag_values=values)

    text("root", "The store's directory.")
    text("tenant", "Only this tenant's objects. Without it, the whole root.")
    text("secret-file", "File with the secret of the names, where the store was not opened with its own.")
    text("key-file", "File with the master key, so that verify can open what --tenant has encrypted.")
    text("old-key-file", "rotate-key: private file with the master key until now.")
    text("new-key-file", "rotate-key: private file with the master key from now on.")
    text("directory", "export, import: where the snapshot is to be, or is.")
    text(
        "remote",
        "rm-tenant, gc, verify, resync: a remote store to delete from, or read, too: a URL, or a TensorStore spec as "
        "JSON.",
    )
    text("budget", "gc, import: bytes to evict down to, such as 10GB.")
    truth("deep", "stat: open every object, to count encrypted and unreadable ones too.")
    text("library-quota", "import: bytes that --tenant's static library may have then; more is refused.")
    truth("copy", "export, import: copy files in place of linking them.")
    truth("arrays", "export: Orbax arrays, without secret or encryption, in place of a snapshot.")
    truth("yes", "rm-tenant, verify: do not ask.")
    truth("json", "Print one JSON object.")
    truth("help", "Print this.")
    return values, flags.Error


def _usage(values) -> str:
    rows = "\n".join(f"  {name:<18} {command.help}" for name, command in COMMANDS.items())
    return f"usage: {_PROGRAM} COMMAND --root=DIR [flags]\n\n{rows}\n{values.get_help()}"


def _progress(entries: list[Any]) -> Any:  # as an Iterable, a runtime check would consume it
    """Wraps entries in a progress bar on stderr, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(entries, unit=" objects", file=sys.stderr, disable=None)


class _ByteProgress:
    """Progress bar in bytes, drawn at its first step."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None or self._bar.total != total:  # an import verifies first, then adds
            from tqdm import tqdm

            self.close()
            self._bar = tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, disable=None)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _ask(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _size(values: Any, flag: str, least: int) -> int | None:
    text = values[flag].value
    return None if text is None else size_of(text, f"--{flag}", least)


def _file(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: got {error.strerror}; expected a file that can be read") from error


def _private_file(path: str | None) -> bytes | None:
    """Reads a key. Raises InputError if others than the file's owner may read it."""
    if (
        path is not None
        and os.path.exists(full := os.path.expanduser(path))
        and (mode := os.stat(full).st_mode) & 0o077
    ):
        raise InputError(f"{path}: got mode {mode & 0o777:03o}; expected 600 or 400: a key is its owner's alone")
    return _file(path)


def _lines(outcome: Outcome, as_json: bool) -> Iterator[str]:
    """Formats a command's result; each of many rows as soon as it is available."""
    name, rows = outcome.rows or (None, iter(()))
    if not as_json:
        yield from outcome.lines
        yield from (line for _, line in rows)
    elif name is None:
        yield json.dumps(outcome.result)
    else:
        yield f'{{"{name}": ['
        for number, (row, _) in enumerate(rows):
            yield ", " * (number > 0) + json.dumps(row)
        yield "]}"


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Returns:
      The exit status. 0: no problem; 1: a problem was found (`verify`), nothing was done, or there is nothing of the
      tenant; 2: the command could not be run; 141: the output was closed.
    """
    values, wrong = _flags()
    try:
        names = values([_PROGRAM, *arguments])[1:]
    except wrong as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if values.help:
        return _printed([_usage(values)])
    if wrongly := _wrongly_called(names, values.root):
        print(f"error: {wrongly}\n\n{_usage(values)}", file=sys.stderr)
        return 2

    bar = _ByteProgress()
    try:
        # A shell does not expand the `~` of `--root=~/store`.
        directory = None if values.directory is None else os.path.expanduser(values.directory)
        options = Options(os.path.expanduser(values.root), _progress, bar, _ask, values.tenant,
                          _file(values["secret-file"].value), _file(values["key-file"].value), values.remote,
                          _size(values, "budget", 0), values.yes, directory, values.copy, values.arrays,
                          _size(values, "library-quota", 1), old_key=_private_file(values["old-key-file"].value),
                          new_key=_private_file(values["new-key-file"].value), deep=values.deep)  # fmt: skip
        outcome = COMMANDS[" ".join(names)].run(options)
        for warning in outcome.remarks:
            print(f"warning: {warning}", file=sys.stderr)
        return _printed(_lines(outcome, values.json), 0 if outcome.good else 1)
    except KVPatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        bar.close()


def _wrongly_called(names: Sequence[str], root: str | None) -> str | None:
    """Checks a call before anything is run. Returns the problem, or None."""
    every, command = ", ".join(COMMANDS), " ".join(names)
    if not names:
        return f"no command; expected one of {every}"
    if command not in COMMANDS and names[0] in COMMANDS:
        return f"got {' '.join(map(repr, names[1:]))} after the command; expected flags only"
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        return f"unknown command {command!r}; expected " + (f"{near[0]!r}?" if near else f"one of {every}")
    return None if root else "no root; expected --root=DIR"


def _printed(lines: Iterable[str], status: int = 0) -> int:
    """Prints lines. Returns the status; 128 + SIGPIPE if the output was closed (`ls | head`)."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return 128 + signal.SIGPIPE
    return status
