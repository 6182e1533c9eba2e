"""Deletion of a tenant: its directories are renamed atomically, and then removed."""

import contextlib
import dataclasses
import os
import time

from .disk.disk import Disk
from .disk.outbox import Outbox
from .disk.partial_exports import WHOLE, sweep_unfinished
from .disk.quarantine import purge
from .disk.revisions import CLOCK, Tombstones, revision_in
from .format.naming import ObjectNames
from .io.files import folder, remove, rename, typed_errors
from .remotes.remote_store import RemoteStore
from .tiers.remote_tier import delete_below

_ROUNDS = 16
"""Times that a directory is moved away, at most, while others go on putting into it."""
_TICK = 100_000_000
"""Nanoseconds by which a file system's clock may be behind."""


@dataclasses.dataclass(frozen=True)
class DeletionReport:
    """Counts of a deletion: objects and bytes on the disk, objects in quarantine, objects of the remote store."""

    objects: int
    nbytes: int
    quarantined: int
    remote: int


def delete_tenant(disk: Disk, names: ObjectNames, remote: RemoteStore | None = None) -> DeletionReport:
    """Deletes a tenant's objects in the remote store, on the disk and in quarantine, and files of unfinished writes.

    The tenant's directories (libraries, then chunks) are renamed first, so that after a crash each is visible whole or
    not at all. The next call, or `finish`, removes the rest. Idempotent. Other tenants are not affected. A put of the
    same tenant by another process may follow the deletion, and is then stored (`ChunkStore.delete_tenant` waits for
    those of its own process).

    Raises:
      StoreReadOnlyError, StoreIOError: some of it could not be deleted; the rest was.
    """
    tenant = names.tenant_name

    remote_count = 0
    try:
        # The remote store comes first, or readers could copy objects back from there.
        if remote is not None:
            remote_count = delete_below(remote, f"{names.space}/")
    finally:
        entries = [*disk.scan(names.space), *disk.scan(names.libraries)]
        with typed_errors("store: delete a tenant"):
            for _ in range(_ROUNDS):
                # First, so that puts which began before cannot bring anything back.
                revision, since = CLOCK.next(), time.time_ns()
                Tombstones(disk.root, names).put_tenant(revision)
                # Libraries first: nobody may find an entry whose chunk is gone.
                away = [_rename_away(disk, space, tenant) for space in (names.libraries, names.space)]
                # What was put in between is gone too, and other tiers must know that it is.
                if not any(_has_later(disk, name, revision, since) for name in away if name is not None):
                    break
            Outbox(disk.root, tenant).clear()
            disk.index.refresh(names.space)
            quarantined = len(purge(disk.root, tenant))
        disk.sweep(f"{tenant}.")
        for scope in (tenant, WHOLE):  # a snapshot of the whole store has the tenant's objects too
            sweep_unfinished(disk.root, scope)
        finish(disk, f"{tenant}.")
    return DeletionReport(len(entries), sum(entry.size for entry in entries), quarantined, remote_count)


def _rename_away(disk: Disk, space: str, tenant: str) -> str | None:
    """Moves a tenant's directory to the deleted ones. Returns its name there; None if there was none."""
    above, _, name = space.rpartition("/")
    gone = f"{tenant}.{os.getpid()}-{time.time_ns()}"
    with (
        folder(disk.root, "deleted", make=True) as target,
        contextlib.suppress(FileNotFoundError),
        folder(disk.root, above) as source,
    ):
        rename(source, name, target, gone)
        os.fsync(source)
        os.fsync(target)
        return gone
    return None


def _has_later(disk: Disk, name: str, revision: int, since: int) -> bool:
    """Returns whether a deleted directory holds an object that was put after a revision, and so since a time (ns)."""
    with contextlib.suppress(FileNotFoundError), folder(disk.root, "deleted") as above:
        for _, _, files, fd in os.fwalk(name, dir_fd=above):
            for file in files:
                with contextlib.suppress(OSError):  # another process removes the directory
                    # A file's change time is that of the rename which gave it its name.
                    is_new = os.stat(file, dir_fd=fd, follow_symlinks=False).st_ctime_ns >= since - _TICK
                    if is_new and revision_in(fd, file) > revision:
                        return True
    return False


def finish(disk: Disk, tenant: str = "") -> int:
    """Removes directories of interrupted deletions, of all tenants or of one by its keyed name.

    Returns:
      The number of removed directories.

    Raises:
      StoreReadOnlyError, StoreIOError: one could not be removed.
    """
    count = 0
    with (
        typed_errors("store: delete a tenant"),
        contextlib.suppress(FileNotFoundError),
        folder(disk.root, "deleted") as fd,
    ):
        for name in os.listdir(fd):
            if name.startswith(tenant):
                with contextlib.suppress(FileNotFoundError):  # another process removes it too
                    remove(fd, name)
                    count += 1
        if count:
            os.fsync(fd)
    return count
