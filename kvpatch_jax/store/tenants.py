"""Deleting a tenant: its directories are renamed away at one moment, and then removed."""

import contextlib
import dataclasses
import os
import time

from .disk.directory import note_deletion
from .disk.disk import Disk
from .disk.partial_exports import WHOLE, sweep_unfinished
from .disk.quarantine import purge
from .format.naming import ObjectNames
from .io.files import folder, locked, remove, rename, typed_errors
from .tiers.remote import RemoteStore
from .tiers.remote_tier import delete_below


@dataclasses.dataclass(frozen=True)
class DeletionReport:
    """What a deletion found: objects and bytes on the disk, objects in quarantine, objects of the remote store."""

    objects: int
    nbytes: int
    quarantined: int
    remote: int


def delete_tenant(disk: Disk, names: ObjectNames, remote: RemoteStore | None = None) -> DeletionReport:
    """Deletes all that a tenant has: remote objects, then those on the disk, in quarantine, and leftovers of dead
    writers and unfinished snapshots.

    The tenant's directories (libraries, then chunks) are renamed away first, so that a crash leaves all or nothing of
    each to be seen; what is left to remove is removed by the next call, or by `finish`. Doing it again is allowed.
    Nothing of other tenants is touched. A put of the same tenant that is under way may come after it: it is then there
    (`ChunkStore.delete_tenant` waits for those of its own process).

    Raises:
      StoreReadOnlyError, StoreIOError: not all of it was deleted; the rest of it was.
    """
    tenant = names.tenant_name
    beyond = 0
    try:
        if remote is not None:  # first, so that nothing comes back from there
            beyond = delete_below(remote, f"{names.space}/")
    finally:
        entries = [*disk.scan(names.space), *disk.scan(names.libraries)]
        with typed_errors("store: delete a tenant"):
            for space in (names.libraries, names.space):
                _rename_away(disk, space, tenant)
            quarantined = len(purge(disk.root, tenant))
        disk.sweep(f"{tenant}.")
        for left in (tenant, WHOLE):  # a whole store's snapshot has the tenant's objects too
            sweep_unfinished(disk.root, left)
        finish(disk, f"{tenant}.")
    return DeletionReport(len(entries), sum(entry.size for entry in entries), quarantined, beyond)


def _rename_away(disk: Disk, space: str, tenant: str) -> None:
    above, _, name = space.rpartition("/")
    with (
        folder(disk.root, "deleted", make=True) as target,
        locked(f"{disk.root}/names.lock", shared=False) as lock,
        contextlib.suppress(FileNotFoundError),
        folder(disk.root, above) as source,
    ):
        note_deletion(lock)
        rename(source, name, target, f"{tenant}.{os.getpid()}-{time.time_ns()}")
        os.fsync(source)
        os.fsync(target)


def finish(disk: Disk, tenant: str = "") -> int:
    """Removes what interrupted deletions left, of one tenant (by its keyed name) or of all.

    Returns:
      How many directories were removed.

    Raises:
      StoreReadOnlyError, StoreIOError.
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
