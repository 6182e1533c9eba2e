"""Snapshots of a tenant or of a root: hard links of the object files beside a copy of the index, verified on restore.

    directory/snapshot.json   version, scope (a tenant's keyed digest, or "root"), checksum of the list; written last
    directory/index.sqlite    the list of the objects; of a root its index, without leases
    directory/data/xx/…       the files, unchanged
    directory/secret          of a root, which a new root takes over

A tenant's snapshot has nothing of other tenants, and no secret: its objects get names of the store that takes them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence

import xxhash

from ..errors import InputError, StoreCorruptError, StoreError
from .codec import is_of, name_of
from .files import Encoded, Header, Stored, read_header, read_object, sync_folder, tenant_key, write_synced
from .index import COLUMNS, INSERT, Index, file_errors, kind_of
from .objects import Objects
from .queue import Job

type Path = str | os.PathLike[str]

MANIFEST, LIST = "snapshot.json", "index.sqlite"
_VERSION, _GROUP, _GROUP_BYTES = 1, 64, 64 << 20


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of a snapshot or restore.

    Attributes:
      objects: number of objects saved or added.
      nbytes: bytes of their files.
      skipped: number of objects left out: expired, gone since, damaged, or in a restore there already.
    """

    objects: int
    nbytes: int
    skipped: int = 0


# --------------------------------------------------------------------------------------------------------- saving


def save_snapshot(source: Objects | Path, directory: Path, *, ids: Collection[str] | None = None) -> Summary:
    """Saves a snapshot of a tenant, after its queued puts, or of a whole root. Both may be in use.

    All objects are of one instant, but those replaced since are saved as they are now, and those deleted or evicted
    since are left out. Files are hard links (copies on another file system), which take no space; a failing disk
    damages store and snapshot alike.

    Args:
      source: a tenant's objects, or the directory of a root.
      directory: new or empty. Without its manifest, which is written last, it is no snapshot.
      ids: of a tenant's chunks to save, with their encoder outputs and patches; None: everything.

    Raises:
      InputError: the directory is not empty. StoreError: it cannot be written.
    """
    directory = os.path.abspath(directory)
    _expect_new(directory)
    with contextlib.ExitStack() as stack:
        if isinstance(source, Objects):
            source.queue.flush()
            index, tenant = source.index, source.tenant
            listing = [] if ids is None else source.with_prefix("", remote=False)
            names = {name for name in listing if (stored := source.read(name)) is not None and is_of(stored, ids)}
        else:
            index, tenant = stack.enter_context(contextlib.closing(Index(str(source), create=False))), None
            names = set[str]()
        stack.enter_context(file_errors(f"snapshot {directory}"))
        stack.push(functools.partial(_discard, directory))

        # Copy the index, with what is to be saved, and link the files.
        os.makedirs(f"{directory}/data", 0o700, exist_ok=True)
        os.chmod(directory, 0o700)
        index.rows("VACUUM INTO ?", f"{directory}/{LIST}")
        with contextlib.closing(sqlite3.connect(f"{directory}/{LIST}", isolation_level=None)) as listed:
            listed.execute("PRAGMA journal_mode=OFF")
            listed.execute("BEGIN")
            total = _select(listed, tenant, None if ids is None else names)
            _link_files(index, listed, directory)
            listed.execute("COMMIT")
            listed.execute("VACUUM")  # otherwise the deleted rows' bytes would stay
            count, nbytes = listed.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM objects").fetchone()
        if tenant is None:
            shutil.copy(f"{index.root}/secret", directory)

        # The manifest comes last, when all else is durable.
        sync_tree(directory)
        manifest = {"version": _VERSION, "scope": tenant or "root", "sum": _file_sum(f"{directory}/{LIST}")}
        write_synced(f"{directory}/{MANIFEST}", json.dumps(manifest).encode())
        sync_folder(directory)
    return Summary(count, nbytes, total - count)


def _discard(directory: str, kind: type[BaseException] | None, *_: object) -> None:
    """Removes a directory that an error left unfinished."""
    if kind is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _expect_new(directory: str) -> None:
    if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.listdir(directory)):
        raise InputError(f"snapshot: got {directory}, which exists; expected a new or an empty directory")


def _select(listed: sqlite3.Connection, tenant: str | None, names: Collection[str] | None) -> int:
    """Deletes the rows that are not saved from the copy of an index. Returns the number of objects, expired too."""
    for table in ("leases", "holds"):
        listed.execute(f"DELETE FROM {table}")
    if tenant is not None:
        for table in ("deleted", "outbox", "budgets"):
            listed.execute(f"DELETE FROM {table}")
        for table in ("objects", "usage"):
            listed.execute(f"DELETE FROM {table} WHERE tenant != ?", (tenant,))
    if names is not None:
        others = [row for row in listed.execute("SELECT name FROM objects").fetchall() if row[0] not in names]
        listed.executemany("DELETE FROM objects WHERE name = ?", others)
    (total,) = listed.execute("SELECT COUNT(*) FROM objects").fetchone()
    listed.execute("DELETE FROM objects WHERE expires <= ?", (time.time(),))
    return total


def _link_files(index: Index, listed: sqlite3.Connection, directory: str) -> None:
    """Links the files of a list; what was replaced in the meantime gets its new row, what was deleted loses its row."""
    pending = listed.execute("SELECT tenant, name, file FROM objects").fetchall()
    while pending:
        replaced = list[tuple]()
        for tenant, name, file in pending:
            os.makedirs(f"{directory}/data/{file[:2]}", 0o700, exist_ok=True)
            try:
                _link(f"{index.root}/data/{file}", f"{directory}/data/{file}")
            except FileNotFoundError:
                listed.execute("DELETE FROM objects WHERE file = ?", (file,))
                query = f"SELECT {COLUMNS} FROM objects WHERE tenant = ? AND name = ?"
                row = index.row(query, tenant, name)
                if row is not None and row[4] != file:  # otherwise the file is lost, and the object a miss
                    listed.execute(INSERT, row)
                    replaced.append((tenant, name, row[4]))
        pending = replaced


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links, or too many of them
        shutil.copy(source, target, follow_symlinks=False)


def sync_tree(directory: str) -> None:
    """Makes a directory durable: its name, and all names and files below it."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with open(f"{folder}/{name}", "rb") as file:
                os.fsync(file.fileno())
        sync_folder(folder)
    sync_folder(os.path.dirname(directory))


def _file_sum(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


# ------------------------------------------------------------------------------------------------------ restoring


def load_snapshot(
    directory: Path, target: Objects | Path, *, key: bytes | None = None, ids: Collection[str] | None = None
) -> Summary:
    """Restores a snapshot after every byte of it was verified: into a tenant's store, or a root's into a new root.

    Objects that the store has stay, unless they are damaged; so does a library's entry that it has, with all versions.
    Others are written anew, under the store's names, budget and key.

    Args:
      directory: of `save_snapshot`.
      target: a tenant's objects, for a tenant's snapshot or a root's of the same secret; or the directory of a new
        root, for a root's snapshot.
      key: key under which a store of another secret encrypted the objects; those of the same secret open with the
        store's own.
      ids: of the chunks to restore, with their encoder outputs and patches; None: everything.

    Raises:
      StoreCorruptError: it is unfinished or damaged (`bad` lists the objects), or not for this target.
      StoreError: it is encrypted otherwise; it exceeds the budget. As a put. Nothing was added.
    """
    directory = os.path.abspath(directory)
    scope, rows = _listed(directory)
    if not isinstance(target, Objects):
        if scope != "root" or key is not None or ids is not None:
            raise InputError(
                f"snapshot {directory}: got a directory for a tenant's snapshot, or with a key or ids; expected a "
                "tenant's store to load into"
            )
        with file_errors(f"snapshot {directory}"):
            return _restore_root(directory, rows, os.path.abspath(str(target)))

    # Verify all of the tenant's objects, and select those that have not expired.
    tenant = target.tenant if scope == "root" else scope
    rows = [row for row in rows if row[0] == tenant]
    if scope == "root" and not rows:
        raise StoreCorruptError(
            f"snapshot {directory}: got a root's with nothing of this tenant under the store's secret; expected the "
            "same secret (or load it into a new root, and save the tenant's snapshot from there)"
        )
    if key is not None:
        key = tenant_key(key, tenant)
    elif tenant == target.tenant:
        key = target.key
    jobs, expired, ticket = list[Job](), 0, target.index.ticket()
    for path, header, stored, opener in _verified(directory, rows, key):
        if stored is None:
            raise StoreError(f"snapshot {directory}: got encrypted objects; expected their key")
        name = header.name if tenant == target.tenant else name_of(target.names, stored)
        if header.expires is not None and header.expires <= time.time():
            expired += 1
        elif is_of(stored, ids):
            read = functools.partial(_read_again, path, opener)
            jobs.append(Job(name, read, stored.nbytes, header.expires, ticket))
    with file_errors(f"snapshot {directory}"):
        summary = add_objects(target, jobs)
    return dataclasses.replace(summary, skipped=summary.skipped + expired)


def _listed(directory: str) -> tuple[str, list[tuple]]:
    """Verifies manifest and list. Returns the scope, and rows (tenant, name, file, size)."""
    try:
        with open(f"{directory}/{MANIFEST}", encoding="utf-8") as file:
            manifest = json.load(file)
        if manifest["version"] != _VERSION or manifest["sum"] != _file_sum(f"{directory}/{LIST}"):
            raise ValueError("another version, or a list of another checksum")
        uri = f"{pathlib.Path(directory, LIST).as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as listed:
            rows = listed.execute("SELECT tenant, name, file, size FROM objects").fetchall()
        return str(manifest["scope"]), rows
    except (OSError, ValueError, KeyError, TypeError, sqlite3.Error) as error:
        raise StoreCorruptError(
            f"snapshot {directory}: got {str(error)[:300]}; expected a finished and unchanged snapshot"
        ) from error


def _verified(
    directory: str, rows: Sequence[tuple], key: bytes | None
) -> Iterator[tuple[str, Header, Stored | None, bytes | None]]:
    """Verifies the files of rows (tenant, name, file, size): yields path, header, object, and the key that it took.

    Without a key, the checksums of encrypted objects are verified, and the object is None. Damage raises at the end.
    """
    bad = list[str]()
    for tenant, name, file, size in rows:
        path = f"{directory}/data/{file}"
        try:
            header, stored = read_header(path)
            if (header.tenant, header.name, stored.nbytes) != (tenant, name, size):
                raise StoreCorruptError(f"got another object, of {stored.nbytes} bytes; expected {size} bytes")
            opener, stored = key if stored.kind == "sealed" else None, None
            try:
                _, stored = read_object(path, opener)
            except StoreCorruptError:
                raise
            except StoreError:  # of its key: its checksums were verified before
                if opener is not None:
                    raise
            yield path, header, stored, opener
        except (StoreCorruptError, OSError) as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise StoreCorruptError(
            f"snapshot {directory}: got {len(bad)} of {len(rows)} objects that do not verify, the first is "
            f"{bad[0][:300]}; expected all to",
            tuple(bad),
        )


def _read_again(path: str, key: bytes | None) -> Encoded:
    """Reads an object when it is written, so that not all are in memory at once."""
    _, stored = read_object(path, key)
    return Encoded(stored.kind, stored.body, stored.arrays)


def add_objects(objects: Objects, jobs: Sequence[Job]) -> Summary:
    """Adds the objects that a store does not have, in transactions of 64, and takes all back if one fails.

    What others write or delete after the jobs' tickets counts as later, and stays.

    Raises:
      StoreError: they exceed a budget; as `Objects.put`, or reading them failed. Nothing was added.
    """
    index, absent = objects.index, [job for job in jobs if not _is_present(objects, job.name)]
    need = sum(job.nbytes for job in absent if kind_of(job.name) != "entry")
    for (budget,) in index.rows("SELECT bytes FROM budgets WHERE tenant IN ('', ?)", objects.tenant):
        if need > budget:
            raise StoreError(f"store: got {need} bytes to restore; expected at most the budget of {budget}")

    # Entries come last, so that nobody sees one without its chunk, and the newest version of each first.
    absent.sort(key=_order, reverse=True)
    size = _GROUP_BYTES // max([1, *(job.nbytes for job in absent)])
    files, nbytes = list[str](), 0
    try:
        for group in itertools.batched(absent, max(1, min(size, _GROUP))):
            copies = [
                dataclasses.replace(job) for job in group
            ]  # which hold the encoded objects until they are written
            for job, is_stored in zip(group, objects.commit(copies), strict=True):
                if is_stored:
                    files.append(objects.file_of(job.name))
                    nbytes += job.nbytes
    except BaseException:
        with index.write() as transaction:
            for file in files:
                transaction.forget_file(file)
        raise
    return Summary(len(files), nbytes, len(jobs) - len(files))


def _is_present(objects: Objects, name: str) -> bool:
    """Returns whether a store has an object intact, or any version of an entry."""
    names = [name]
    if kind_of(name) == "entry":
        names = objects.with_prefix(name.partition("/")[0] + "/", remote=False)
    return any(objects.read(other) is not None for other in names)


def _order(job: Job) -> tuple[bool, str]:
    return kind_of(job.name) != "entry", job.name


def _restore_root(directory: str, rows: Sequence[tuple], root: str) -> Summary:
    """Copies a root's snapshot beside the new root, then renames it, so that all of the root is there, or nothing."""
    _expect_new(root)
    for _ in _verified(directory, rows, None):
        pass
    unfinished = f"{root}.unfinished-{secrets.token_hex(4)}"
    try:
        shutil.copytree(directory, unfinished, symlinks=True, ignore=shutil.ignore_patterns(MANIFEST))
        sync_tree(unfinished)
        os.rename(unfinished, root)
        sync_folder(os.path.dirname(root))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return Summary(len(rows), sum(size for _, _, _, size in rows))
