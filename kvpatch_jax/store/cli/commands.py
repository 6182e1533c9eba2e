"""Subcommands of `python -m kvpatch_jax.store`, in the table `COMMANDS`. Flags and printing are in `main`."""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import InputError, StoreVersionError
from ..disk.budget import Budget
from ..disk.disk import Disk
from ..disk.eviction import collect, make_room
from ..disk.key_check import check_key
from ..disk.partial_exports import sweep_unfinished
from ..disk.root_config import names_secret, read_secret
from ..format.buffers import Buffers
from ..format.encryption import AesGcm
from ..format.naming import ObjectNames, is_object, name_at
from ..key_rotation import rotate_key
from ..libraries.dynamic import drop_old_versions
from ..remotes.remote_store import RemoteStore
from ..remotes.tensorstore_adapter import KeyValueStore
from ..remotes.urls import open_remote
from ..snapshots.manifest import Progress, Summary
from ..snapshots.orbax_item import StoreItem, make_durable
from ..snapshots.restore import load_snapshot
from ..snapshots.save import save_snapshot
from ..store import ChunkStore
from ..tenants import delete_tenant, finish
from ..tiers.remote_tier import RemoteReader
from .audit import ALL, ObjectInfo, ObjectProgress, listing, names_in, totals, verify


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    `progress` and `byte_progress` show the progress over objects and bytes; `ask` asks the user a question.
    """

    root: str
    progress: ObjectProgress
    byte_progress: Progress
    ask: Callable[[str], str]
    tenant: str | None = None
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    key: bytes | None = dataclasses.field(default=None, repr=False)
    remote: str | None = None
    budget: int | None = None
    yes: bool = False
    directory: str | None = None
    copy: bool = False
    arrays: bool = False
    library_quota: int | None = None
    old_key: bytes | None = dataclasses.field(default=None, repr=False)
    new_key: bytes | None = dataclasses.field(default=None, repr=False)
    deep: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a command.

    Attributes:
      result: the result as JSON.
      lines: the result as text.
      good: whether there was no problem.
      remarks: messages for stderr.
      rows: name in the JSON, and further rows as JSON and text, produced on demand.
    """

    result: dict[str, Any]
    lines: list[str]
    good: bool = True
    remarks: tuple[str, ...] = ()
    rows: tuple[str, Iterator[tuple[dict[str, Any], str]]] | None = None


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: its help and its function."""

    help: str
    run: Callable[[Options], Outcome]


# ------------------------------------------------------------------------------------------------------------ opening


def _disk(options: Options) -> Disk:
    """Opens the disk of an existing root, with the tenant's key if there is one."""
    if not os.path.isdir(f"{options.root}/obj"):
        raise InputError(f"store {options.root}: got no store there; expected a directory with obj/")
    if options.key is None:
        return Disk(options.root)
    if options.tenant is None:
        raise InputError("--key-file: got a key without a tenant; expected --tenant too")
    buffers = Buffers(wipe=True)
    disk = Disk(options.root, buffers=buffers, encryption=AesGcm(options.key, options.tenant, buffers))
    check_key(disk.root, _names(options, disk).space, disk.encryption.check)
    return disk


def _names(options: Options, disk: Disk) -> ObjectNames:
    if not options.tenant:
        raise InputError("got no tenant; expected --tenant")
    given = options.secret
    return ObjectNames(options.tenant, read_secret(disk.root) if given is None else names_secret(disk.root, given))


def _below(options: Options, disk: Disk) -> tuple[str, str]:
    """Returns the folders of chunks and of libraries for a command: one tenant's, or the whole root's."""
    if options.tenant is None:
        return ALL
    names = _names(options, disk)
    return names.space, names.libraries


def _has_tenant(options: Options, disk: Disk) -> bool:
    """Returns whether the root has anything of the tenant, or no tenant was given."""
    if options.tenant is None:
        return True
    below = _below(options, disk)
    own = f"{below[0].partition('/')[2]}."
    if any(os.path.isdir(f"{disk.root}/{path}") for path in below):
        return True
    return any(names_in(disk, path, own) for path in ("quarantine", "deleted", "tmp"))


def _about_tenant(command: Callable[[Options], Outcome]) -> Callable[[Options], Outcome]:
    """Wraps a command to warn if the root has nothing of its tenant, whose name may be misspelt."""

    def checked(options: Options) -> Outcome:
        known = _has_tenant(options, _disk(options))  # before the command, which may delete all of it
        outcome = command(options)
        return outcome if known else dataclasses.replace(outcome, good=False, remarks=(_unknown(options),))

    return checked


def _unknown(options: Options) -> str:
    return (
        f"tenant {options.tenant!r}: nothing of it in {options.root}; expected a tenant that put something there "
        "(under the secret that names were made with)"
    )


# ----------------------------------------------------------------------------------------------------------- commands


@_about_tenant
def _ls(options: Options) -> Outcome:
    disk = _disk(options)
    found = listing(disk, _below(options, disk), options.progress)
    heading = f"{'bytes':>14}  {'kind':<18} {'last used':<20}  {'expires':<20} {'':<10} name"
    return Outcome({}, [heading], rows=("objects", ((dataclasses.asdict(one), _line(one)) for one in found)))


def _line(one: ObjectInfo) -> str:
    encrypted = {True: "encrypted", False: "plain", None: "unreadable"}[one.encrypted]
    times = f"{_when(one.used)}  {_when(one.expires):<20}"
    return f"{one.nbytes:>14,}  {one.kind:<18} {times} {encrypted:<10} {one.path}"


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.3g} s"


@_about_tenant
def _stat(options: Options) -> Outcome:
    disk = _disk(options)
    found = totals(disk, _below(options, disk), deep=options.deep)
    lines: list[str] = []
    for key, value in found.items():
        lines.append(f"{key}: {value:,}" if isinstance(value, int) else f"{key}:")
        if isinstance(value, dict):
            lines += [f"  {name}: {sums['objects']:,} objects, {sums['bytes']:,} bytes" for name, sums in value.items()]
    return Outcome(found, lines)


@_about_tenant
def _verify(options: Options) -> Outcome:
    disk = _disk(options)
    below = _below(options, disk)
    found = verify(disk, below, options.progress)
    lines = [f"{found.good} good, {found.nbytes:,} bytes read", f"{found.unopened} encrypted: checksums agree, no key"]
    lines += [f"bad, in quarantine: {path}" for path in found.bad]
    lines += [f"bad, left where it is: {path}" for path in found.left]
    lines += [f"could not be read: {path}" for path in found.unreadable]
    result, good = dataclasses.asdict(found), not (found.bad or found.left or found.unreadable)
    if options.remote is None:
        return Outcome(result, lines, good)

    remote_bad, deleted = _verify_remote(options, _remote(options.remote), f"{below[0]}/")
    lines += [f"bad in the remote store{', deleted' * deleted}: {path}" for path in remote_bad]
    return Outcome(result | {"remote_bad": remote_bad, "remote_deleted": deleted}, lines, good and not remote_bad)


def _verify_remote(options: Options, remote: RemoteStore, prefix: str) -> tuple[list[str], bool]:
    """Verifies every remote object; deletes damaged ones if confirmed. Returns their paths, and whether it deleted."""
    bad: dict[str, bytes] = {}
    for path in filter(is_object, remote.paths(prefix)):
        with contextlib.suppress(StoreVersionError):
            if (version := remote.damaged(name_at(path))) is not None:
                bad[path] = version
    question = f"Delete {len(bad)} objects of the remote store that did not verify twice, for good? Type yes: "
    if not bad or not (options.yes or options.ask(question).strip() == "yes"):
        return list(bad), False
    for path, version in bad.items():
        remote.drop(path, version)
    return list(bad), True


@_about_tenant
def _gc(options: Options) -> Outcome:
    disk = _disk(options)
    below, libraries = _below(options, disk)
    tenant = below.partition("/")[2]
    before, entries = [entry.size for entry in disk.scan(below)], len(disk.scan(libraries))

    finish(disk, tenant)
    collect(disk, below, libraries)
    old_versions = drop_old_versions(disk, libraries)
    left = {"quarantine": disk.collect_quarantine(tenant), "unfinished": sweep_unfinished(disk.root, tenant)}
    if options.remote is not None:
        remote = RemoteReader(_remote(options.remote), disk)
        left["remote"] = remote.collect(f"{below}/")
        left["remote_errors"] = disk.counters["remote_errors"]
    if options.budget is not None:
        make_room(disk, options.budget, 0, lambda chunk: False, below)

    after = [entry.size for entry in disk.scan(below)]
    result = {"objects_before": len(before), "bytes_before": sum(before)}
    result |= {"objects": len(after), "bytes": sum(after), "expired": disk.counters["disk_evicted_expired"]}
    result |= {"evicted": disk.counters["disk_evicted_budget"], "entries_before": entries}
    result |= {"entries": len(disk.scan(libraries)), "old_versions": old_versions, **left}
    return _counts(result)


def _rm_tenant(options: Options) -> Outcome:
    disk = _disk(options)
    names = _names(options, disk)
    question = f"Delete every object of tenant {options.tenant!r} in {disk.root}, for good? Type yes: "
    if not options.yes and options.ask(question).strip() != "yes":
        return Outcome({"deleted": False}, ["nothing was deleted"], good=False)
    remote = None if options.remote is None else _remote(options.remote)
    known = _has_tenant(options, disk)
    deleted = delete_tenant(disk, names, remote)
    some = known or any(dataclasses.asdict(deleted).values())
    result = {"deleted": some, **dataclasses.asdict(deleted)}
    lines = [f"{key}: {value}" for key, value in result.items()]
    return Outcome(result, lines, some, () if some else (_unknown(options),))


def _rotate_key(options: Options) -> Outcome:
    disk = _disk(options)
    if not _names(options, disk) or options.new_key is None:
        raise InputError("rotate-key: got no new key; expected --new-key-file")
    remote = None if options.remote is None else _remote(options.remote)
    assert options.tenant is not None
    keys = {"old": options.old_key, "new": options.new_key, "secret": options.secret}
    found = rotate_key(disk.root, options.tenant, **keys, remote=remote, progress=options.progress)
    lines = [
        f"{found.objects} objects, {found.nbytes:,} bytes, and {found.remote} of the remote store have the new key"
    ]
    lines += [f"{found.dropped} files of the old key deleted from quarantine"] * bool(found.dropped)
    lines += [f"could not be read, keeps the old key: {path}" for path in found.left]
    lines += ["the old key is still valid: call this again"] * (not found.finished)
    return Outcome(dataclasses.asdict(found), lines, found.finished)


def _remote(text: str) -> RemoteStore:
    """Opens the store of --remote: a URL (`open_remote`), or TensorStore's specification as JSON.

    Raises:
      InputError: it is neither.
      StoreIOError: the store cannot be opened.
    """
    if not text.lstrip().startswith("{"):
        return open_remote(text)
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"--remote: got {text[:80]!r} ({error}); expected JSON such as "
            '{"driver": "file", "path": "/srv/store/"}, or a URL such as gs://bucket/store/'
        ) from None
    return KeyValueStore(spec)


def _resync(options: Options) -> Outcome:
    if options.remote is None or not _has_tenant(options, _disk(options)):
        raise InputError("resync: got no remote store, or a tenant with nothing here; expected --remote and --tenant")
    with ChunkStore(
        options.root,
        tenant=options.tenant or "",
        secret=options.secret,
        key=options.key,
        remote=_remote(options.remote),
    ) as store:
        return _counts(dict(store.resync()._asdict()))


def _export(options: Options) -> Outcome:
    directory = _directory(options)
    if not _has_tenant(options, _disk(options)):
        raise InputError(_unknown(options))
    if options.arrays:
        from orbax.checkpoint import v1 as ocp

        if os.path.lexists(directory):
            raise InputError(f"--directory: got the existing path {directory}; expected a name that is free")
        with _store(options) as store:
            item = StoreItem(store, arrays=True)
            ocp.save_checkpointables(directory, {"chunk_store": item})
        make_durable(directory)
        assert item.summary is not None
        return _done(item.summary)
    more = {"tenant": options.tenant, "secret": options.secret, "copy": options.copy}
    return _done(save_snapshot(options.root, directory, **more, progress=options.byte_progress))


def _import(options: Options) -> Outcome:
    directory = _directory(options)
    more = {"tenant": options.tenant, "secret": options.secret, "key": options.key, "copy": options.copy}
    return _done(
        load_snapshot(directory, options.root, **more, budget=_budget(options), progress=options.byte_progress)
    )


def _budget(options: Options) -> Budget:
    return Budget(disk=options.budget, library=options.library_quota)


def _directory(options: Options) -> str:
    if not options.directory:
        raise InputError("got no directory; expected --directory")
    return options.directory


def _store(options: Options) -> ChunkStore:
    if not options.tenant:
        raise InputError("--arrays: got no tenant; expected --tenant")
    more = {"secret": options.secret, "key": options.key, "budget": _budget(options)}
    return ChunkStore(options.root, tenant=options.tenant, **more)


def _done(summary: Summary) -> Outcome:
    return _counts(dataclasses.asdict(summary), not summary.damaged)


def _counts(result: dict[str, Any], good: bool = True) -> Outcome:
    return Outcome(result, [f"{key}: {value:,}" for key, value in result.items()], good)


COMMANDS: dict[str, Command] = {
    "ls": Command("Lists objects and libraries' entries: bytes, kind, last use, expiry, keyed name.", _ls),
    "stat": Command(
        "Sums: objects and bytes by kind and tenant, quarantine, what is left over; with --deep opens every object.",
        _stat,
    ),
    "resync": Command("Makes --tenant's objects here and in --remote agree.", _resync),
    "verify": Command(
        "Reads every object; damaged ones go to quarantine, and the exit status is 1. With --remote, reads that too, "
        "and deletes what is damaged there; asks unless --yes.",
        _verify,
    ),
    "gc": Command(
        "Deletes what expired, what dead writers, readers and snapshots left, what was in quarantine for long; with "
        "--budget, evicts down to it.",
        _gc,
    ),
    "export": Command(
        "Makes a snapshot of the objects as --directory; with --arrays, an Orbax checkpoint of --tenant.", _export
    ),
    "import": Command("Takes over a snapshot or arrays from --directory, verified.", _import),
    "rotate-key": Command(
        "Encrypts what --tenant has (with --remote, there too) with --new-key-file instead of --old-key-file; without "
        "the latter, what is not encrypted yet. Others may read and write meanwhile. If it was interrupted: again.",
        _rotate_key,
    ),
    "rm-tenant": Command("Deletes all that --tenant has; with --remote, there too.", _rm_tenant),
}
"""Subcommands by name."""
