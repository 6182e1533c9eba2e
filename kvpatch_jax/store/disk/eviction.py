"""Eviction from the disk: expired objects first, then objects that can be derived again, then the least recently used.

Patches and smaller encodings of all chunks are evicted before any canonical, and a canonical with a stored encoder
output (an eighth of its bytes, and sufficient to form it again) before one without. A smaller encoding of a chunk whose
unreduced canonical (behind the same lead) is not stored is a canonical as any other: nothing else has its content. A
chunk's last canonical is evicted together with the chunk's patches, whatever they were formed on.

The index proposes, and the file decides: an object that was used since the index was told so is not taken, and the
index corrected, so that the order is by last use whatever the index knows. Nothing is synced: what comes back after a
crash of the machine is listed again.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from ...errors import StoreBusyError, StoreFullError
from ..format.expiry import expiry_test
from ..io.files import typed_errors, written
from .directory import DirectoryEntry, remove_objects, unlink_if
from .disk import Disk
from .index import Changes, IndexedObject
from .shard import Shard, locked_shards
from .verified_reads import header_expiry

SLACK = 0.05
"""Share of the budget that the background's eviction frees beyond the need."""
_UNUSUAL = 0.25
"""Share of the budget by which the index must exceed it to be compared with the files."""
_PAGE, _SHORT_PAGE = 64, 8
"""Objects that the index is asked for at a time; at first, and after one that was not where it should be."""
_ROUNDS = 3
"""Number of times that a root is gone through if objects change in the meantime."""


def make_room(
    disk: Disk,
    budget: int,
    need: int,
    pinned: Callable[[str], bool],
    below: str = "obj",
    counted: str = "obj",
    *,
    background: Callable[[], bool] | None = None,
    reservation: int | None = None,
) -> int:
    """Evicts until `need` more bytes fit within `budget`, beside those that others have reserved before.

    Several processes may do so at once.

    Args:
      reservation: the caller's (`Index.reserve`); None: those of all others count.
      background: if nobody waits for it, returns whether to go on. Then it frees `SLACK` more. A put itself frees no
        more than it needs, so that none waits for many removals.
      pinned: returns whether a chunk must not be evicted.
      below: the folder to which the budget applies, "obj" or a tenant's.
      counted: the folder whose evictions are counted.

    Returns:
      The bytes of the remaining objects.

    Raises:
      StoreFullError: the rest is pinned, or `need` is larger than the budget.
    """
    audited = False
    with typed_errors("store: evict"):
        for round_ in range(_ROUNDS):
            if round_:  # perhaps the index does not know all that is there
                disk.index.refresh(below)
            total = disk.index.claimed(below, reservation)
            if total + need <= budget:
                return total
            if need > budget:
                break
            # No put leads there: the budget is a new one, or the index is wrong, and nothing may go for that.
            if total - budget > _UNUSUAL * budget and not audited:
                disk.index.audit(below)
                audited, total = True, disk.index.claimed(below, reservation)
                if total + need <= budget:
                    return total
            total = _evict(disk, total, budget - need, pinned, below, counted, background, reservation)
            if total + need <= budget or not (background is None or background()):
                return total
    raise StoreFullError(
        f"store: got {need} bytes for a budget of {budget}, of what is stored too little may go; expected room "
        "within the budget"
    )


def _evict(
    disk: Disk,
    total: int,
    allowed: int,
    pinned: Callable[[str], bool],
    below: str,
    counted: str,
    background: Callable[[], bool] | None,
    reservation: int | None,
) -> int:
    """Removes objects in order until the rest is below `allowed`. Returns the bytes of the rest."""
    target = allowed if background is None else allowed - int(SLACK * allowed)
    moved: list[IndexedObject] = []
    for one, expired in _in_order(disk, below, moved):
        if total <= target or not (background is None or background()):
            break
        if pinned(one.chunk):
            continue
        went = _take(disk, one, expired=expired)
        if not went:  # its row was wrong, and is corrected, or another process is busy with it
            moved.append(one)
            total = disk.index.claimed(below, reservation)
        for gone in went:
            total -= gone.size
            if gone.path.startswith(f"{counted}/"):  # a tenant's counts must not reveal others' evictions
                disk.counters.add("disk_evicted_expired" if expired else "disk_evicted_budget")
    return total


def _in_order(disk: Disk, below: str, moved: list[IndexedObject]) -> Iterator[tuple[IndexedObject, bool]]:
    """Yields objects in their order of eviction, with whether they have expired as far as the index knows.

    Args:
      moved: receives objects whose place turned out to be another one: they come again there.
    """
    for one in disk.index.expired(below, disk.clock()):
        yield one, True
    last, seen, size = None, set[tuple[str, float]](), _SHORT_PAGE
    while page := disk.index.victims(below, last, (_SHORT_PAGE if moved else size) + len(seen)):
        moved.clear()
        size = _PAGE
        fresh = [one for one in page if (one.path, one.used) not in seen]
        if not fresh:
            return
        for one in fresh:
            if last is None or (one.turn, one.used) != (last.turn, last.used):
                last, seen = one, set()
            seen.add((one.path, one.used))
            yield one, False
            if moved:  # perhaps to a place before the next one
                break


def _take(disk: Disk, one: IndexedObject, *, expired: bool) -> list[IndexedObject]:
    """Removes an object, and with a chunk's last canonical its patches, if the files agree. Returns what was removed.

    Expiry is read from the header. An object that is not the listed one any more, or was used since, stays. One in a
    shard that another process holds stays too.
    """
    above, _, file = one.path.rpartition("/")
    changes, went = Changes(), list[IndexedObject]()
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError, StoreBusyError),
        locked_shards(disk.root, [above], seconds=0.0) as shards,
    ):
        shard = shards[above]
        try:
            if not (_has_expired(disk, shard, one) if expired else _is_unused(disk, shard, one)):
                return []
            # Patches first: a canonical stays as long as one of its patches does.
            kept = False
            for patch in _patches_to_go(disk, one):
                if (expired or _is_unused(disk, shard, patch)) and unlink_if(shard, os.path.basename(patch.path)):
                    went.append(patch)
                else:
                    kept |= disk.holds(patch.path)
            if not kept and unlink_if(shard, file):
                went.append(one)
        finally:
            changes.removed += [gone.path for gone in went]
            disk.index.record([shard], changes)
    return went


def _patches_to_go(disk: Disk, one: IndexedObject) -> list[IndexedObject]:
    """Lists a chunk's patches if an object is its last canonical: their names do not say on which they were formed."""
    if one.part.partition(".")[0] != "kv":
        return []
    above, _, file = one.path.rpartition("/")
    key = file.partition(".")[0]
    parts = disk.index.known_in_folder(above, f"{key}.")
    if any(other.part.startswith("kv") and other.path != one.path for other in parts):
        return []
    return [other for other in parts if other.part.startswith("p.")]


def _is_unused(disk: Disk, shard: Shard, one: IndexedObject) -> bool:
    """Returns whether a file is the one that the index has, and was not used since. Corrects the index otherwise."""
    try:
        stat = os.stat(os.path.basename(one.path), dir_fd=shard.fd, follow_symlinks=False)
    except FileNotFoundError:
        disk.index.forget(one.path)
        return False
    if written(stat) != one.written:
        disk.index.see(one.path, stat)
        return False
    used = disk.recent_use.last(one.path, stat.st_atime)
    if used > one.used:
        disk.index.correct(one, used=used)
        return False
    return True


def _has_expired(disk: Disk, shard: Shard, one: IndexedObject) -> bool:
    """Returns whether an object has expired, by its header. Corrects the index if it has not."""
    file = os.path.basename(one.path)
    try:
        os.stat(file, dir_fd=shard.fd, follow_symlinks=False)
    except FileNotFoundError:
        disk.index.forget(one.path)
        return False
    expires = header_expiry(shard.fd, file)
    if expires is not None and disk.clock() >= expires:
        return True
    disk.index.see(one.path, os.stat(file, dir_fd=shard.fd, follow_symlinks=False), expires)
    return False


def collect(disk: Disk, below: str = "obj", libraries: str | None = None) -> int:
    """Deletes expired objects (a canonical with its patches) and files of dead writers. Returns their number.

    Args:
      below: a tenant's folder restricts it to that tenant.
      libraries: a folder of libraries whose expired entries are also deleted.
    """
    with typed_errors("store: collect"):
        disk.index.refresh(below)
        deleted = 0
        for one in disk.index.expired(below, disk.clock()):
            deleted += len(_take(disk, one, expired=True))
        late = {
            entry.path: disk.has_expired for entry in ([] if libraries is None else _expired_entries(disk, libraries))
        }
        deleted += len(remove_objects(disk.root, disk.index, late))
        disk.index.forget_ghosts()

    disk.counters.add("disk_evicted_expired", deleted)
    return deleted + disk.sweep(below.removeprefix("obj").removeprefix("/"))


def _expired_entries(disk: Disk, libraries: str) -> list[DirectoryEntry]:
    """Lists entries of libraries whose modification time says that they have expired."""
    look = expiry_test(disk.clock())
    return [entry for entry in disk.scan(libraries) if look(entry.mtime_ns)]
