"""Command line for operators: `kvpatch store ls ROOT`. It shows keyed names, never ids."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ..errors import InputError, KVPatchError, StoreCorruptError
from .files import tenant_key
from .index import Index
from .names import Names
from .objects import Objects, listed_rows, verify_objects
from .snapshot import Summary, load_snapshot, save_snapshot


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, without the usage."""
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("kvpatch store", description="Looks after a store's root, which may be in use.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in ("export", "import"):
            command.add_argument("directory", metavar="DIR", help="the snapshot")
        command.add_argument("root", metavar="ROOT", type=os.path.expanduser, help="the store's directory")
        command.add_argument("--tenant", metavar="NAME", help="this tenant alone; by default the root")
        command.add_argument("--key-file", metavar="FILE", help="file with the tenant's encryption key")
        command.add_argument("--secret-file", metavar="FILE", help="file with the names' secret, if not the root's")
        command.add_argument("--json", action="store_true", help="print JSON, for each object one line")
        if name == "verify":
            command.add_argument("--delete", action="store_true", help="delete damaged objects")
    return parser


def _content(path: str | None) -> bytes | None:
    try:
        return None if path is None else pathlib.Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"{path}: got {error.strerror}; expected a file that can be read") from None


@contextlib.contextmanager
def _index(options: argparse.Namespace) -> Iterator[tuple[Index, str | None]]:
    """Opens the index of an existing root. Yields it with the keyed digest of the tenant, if one was named."""
    with contextlib.closing(Index(options.root, create=False)) as index:
        tenant = None
        if options.tenant is not None:
            tenant = Names(options.tenant, _content(options.secret_file) or index.secret).tenant
            if index.row("SELECT 1 FROM objects WHERE tenant = ?", tenant) is None:
                raise InputError(f"tenant {options.tenant!r}: got nothing of it in {options.root}; expected objects")
        yield index, tenant


@contextlib.contextmanager
def _store(options: argparse.Namespace) -> Iterator[Objects | str]:
    """Opens a tenant's objects. Without a tenant, yields the root."""
    if options.tenant is None:
        yield options.root
        return
    keys: dict[str, Any] = {"key": _content(options.key_file), "secret": _content(options.secret_file)}
    with contextlib.closing(Objects(options.root, options.tenant, memory=0, **keys)) as objects:
        yield objects


def _ls(options: argparse.Namespace) -> int:
    with _index(options) as (index, tenant):
        if not options.json:
            print(f"{'bytes':>13}  {'kind':<9}  {'used':<16}  {'expires':<16}  tenant/name")
        for owner, name, kind, size, used, expires, _ in listed_rows(index, tenant):
            row = {"tenant": owner, "name": name, "kind": kind, "bytes": size, "used": used, "expires": expires}
            place = "/".join([options.tenant or _short(owner), *map(_short, name.split("/"))])
            text = f"{size:>13,}  {kind:<9}  {_when(used)}  {_when(expires)}  {place}"
            print(json.dumps(row) if options.json else text)
    return 0


def _short(part: str) -> str:
    """Cuts a digest to what tells it from others on a line; --json has all of it."""
    return f"{part[:8]}…" if len(part) >= 24 else part


def _when(seconds: float | None) -> str:
    if seconds is None:
        return f"{'-':<16}"
    return f"{datetime.datetime.fromtimestamp(min(seconds, 2e11), datetime.UTC):%Y-%m-%dT%H:%M}"


def _stat(options: argparse.Namespace) -> int:
    with _index(options) as (index, tenant):
        where, values = ("1", ()) if tenant is None else ("tenant = ?", (tenant,))
        query = f"SELECT tenant, kind, count, bytes FROM usage WHERE count > 0 AND {where} ORDER BY tenant, kind"
        rows = index.rows(query, *values)
        (waiting,) = index.row(f"SELECT COUNT(*) FROM outbox WHERE {where}", *values) or (0,)
    usage = [dict(zip(("tenant", "kind", "objects", "bytes"), row, strict=True)) for row in rows]
    count, nbytes = sum(row[2] for row in rows), sum(row[3] for row in rows)
    lines = [f"{count:,} objects, {nbytes:,} bytes; {waiting:,} writes wait for the remote store"]
    lines += [f"{owner}  {kind:<7}  {count:>11,} objects  {nbytes:>17,} bytes" for owner, kind, count, nbytes in rows]
    result = {"objects": count, "bytes": nbytes, "outbox": waiting, "usage": usage}
    return _printed(options, result, "\n".join(lines))


def _verify(options: argparse.Namespace) -> int:
    master = _content(options.key_file)
    if master is not None and options.tenant is None:
        raise InputError("--key-file: got a key without a tenant; expected --tenant too")
    names: dict[str, list[str]] = {"good": [], "encrypted": [], "damaged": [], "unreadable": []}
    with _index(options) as (index, tenant):
        try:
            index.check()
        except StoreCorruptError:
            names["damaged"].append("index.sqlite")  # the next opening makes it again
        else:
            key = None if master is None or tenant is None else tenant_key(master, tenant)
            for owner, name, verdict in verify_objects(index, tenant, key, options.delete):
                names[verdict].append(f"{owner}/{name}")
    bad = names["damaged"] + names["unreadable"]
    counts = {verdict: len(listed) for verdict, listed in names.items()}
    lines = [", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()), *bad]
    return _printed(options, counts | {"names": bad}, "\n".join(lines), 1 if bad else 0)


def _collect(options: argparse.Namespace) -> int:
    with _index(options) as (index, _):
        count = index.collect()
    return _printed(options, {"deleted": count}, f"{count:,} expired objects and files of dead writers deleted")


def _export(options: argparse.Namespace) -> int:
    with _index(options), _store(options) as source:  # the index refuses a root or a tenant that is not there
        return _summed(options, save_snapshot(source, options.directory))


def _import(options: argparse.Namespace) -> int:
    with _store(options) as target:
        return _summed(options, load_snapshot(options.directory, target, key=_content(options.key_file)))


def _summed(options: argparse.Namespace, summary: Summary) -> int:
    text = f"{summary.objects:,} objects, {summary.nbytes:,} bytes; {summary.skipped:,} left out"
    return _printed(options, dataclasses.asdict(summary), text)


def _printed(options: argparse.Namespace, result: dict[str, Any], text: str, status: int = 0) -> int:
    print(json.dumps(result) if options.json else text)
    return status


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "ls": (_ls, "list objects: bytes, kind, last use, expiry, keyed name"),
    "stat": (_stat, "count objects and bytes by tenant and kind"),
    "verify": (_verify, "read the index and all objects, and list damaged ones (exit status 1)"),
    "collect": (_collect, "delete what has expired, and what dead writers left"),
    "export": (_export, "save a snapshot of the root, or of a tenant, in a new directory"),
    "import": (_import, "restore a snapshot: a root's into a new ROOT, a tenant's into --tenant of ROOT"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs one command. Returns the exit status: 0, 1 if objects are damaged, 2 if it could not be run."""
    try:
        options = _parser().parse_args(arguments)
        status = COMMANDS[options.command][0](options)
        sys.stdout.flush()
        return status
    except KVPatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads on, as in `ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
