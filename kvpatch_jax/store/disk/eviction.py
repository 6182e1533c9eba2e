"""Eviction from the disk: expired objects first, then objects that can be derived again, then the least recently used.

Patches and smaller encodings of all chunks are evicted before any canonical, and a canonical with a stored encoder
output (an eighth of its bytes, and sufficient to form it again) before one without. A smaller encoding of a chunk whose
unreduced canonical (behind the same lead) is not stored is a canonical as any other: nothing else has its content. A
chunk's last canonical is evicted together with the chunk's patches, whatever they were formed on.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from ...errors import StoreFullError
from ..format.expiry import expiry_test
from ..format.naming import unreduced_part
from ..io.files import locked, typed_errors
from .directory import DirectoryEntry, removing, same_file
from .disk import Disk

SLACK = 0.05
"""Share of the budget that an eviction frees beyond the need, so that the next put need not evict again."""
_BATCH, _BATCH_BYTES = 64, 64 << 20
_ROUNDS = 3
"""Number of times that a root is listed if objects change in the meantime."""


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Objects that are evicted together, with their turn (lower first) and the time of their last use."""

    turn: int
    used: float
    entries: tuple[DirectoryEntry, ...]


def make_room(
    disk: Disk, budget: int, need: int, pinned: Callable[[str], bool], below: str = "obj", counted: str = "obj"
) -> int:
    """Evicts until `need` more bytes fit within `budget`. One process at a time.

    Args:
      pinned: returns whether a chunk must not be evicted.
      below: the folder to which the budget applies.
      counted: the folder whose evictions are counted.

    Returns:
      The bytes of the remaining objects.

    Raises:
      StoreFullError: the rest is pinned, or `need` is larger than the budget; nothing was evicted in these cases.
    """
    with typed_errors("store: evict"), locked(f"{disk.root}/evict.lock", shared=False):
        for _ in range(_ROUNDS):  # objects that others use in the meantime stay, so one round may not be enough
            entries = disk.scan(below)
            total = sum(entry.size for entry in entries)
            if total + need <= budget:
                return total
            units = sorted(_units(disk, entries, pinned), key=lambda unit: (unit.turn, unit.used))
            loose = set[DirectoryEntry]().union(*(unit.entries for unit in units))  # units may share patches
            kept = total - sum(entry.size for entry in loose)
            if kept + need > budget:
                break
            total = _evict(disk, units, total, budget - need, counted)
            if total + need <= budget:
                return total
        raise StoreFullError(
            f"store: got {need} bytes for a budget of {budget}, of what is stored too little may go; expected room "
            "within the budget"
        )


def _evict(disk: Disk, units: Iterable[_Unit], total: int, allowed: int, counted: str) -> int:
    """Removes units in order until the rest is below `allowed` by the slack. Returns the bytes of the rest."""
    target = allowed - int(SLACK * allowed)
    waiting, gone = iter(units), set[str]()
    while total > target and (batch := _batch(waiting, total - target)):
        for unit, entry in _take(disk, batch, gone):
            total -= entry.size
            if entry.path.startswith(f"{counted}/"):  # a tenant's counts must not reveal others' evictions
                disk.counters.add("disk_evicted_expired" if unit.turn == 0 else "disk_evicted_budget")
    return total


def _batch(waiting: Iterator[_Unit], missing: int) -> list[_Unit]:
    """Returns the next units to remove under one lock: few, so that others wait briefly, and no more than needed."""
    batch: list[_Unit] = []
    nbytes = 0
    for unit in waiting:
        batch.append(unit)
        nbytes += sum(entry.size for entry in unit.entries)
        if len(batch) == _BATCH or nbytes >= min(missing, _BATCH_BYTES):
            break
    return batch


def _take(disk: Disk, units: Iterable[_Unit], gone: set[str]) -> list[tuple[_Unit, DirectoryEntry]]:
    """Removes units whose files are still as they were listed, each unit whole. Returns the removed objects.

    Expiry is read from the header again. Patches that were used or linked since the listing stay, and so does their
    canonical, until the next round.

    Args:
      gone: paths that were removed before; updated.
    """
    taken: list[tuple[_Unit, DirectoryEntry]] = []
    with removing(disk.root) as removal:
        for unit in units:
            if unit.entries[0].path in gone:
                continue
            first, *along = (entry for entry in unit.entries if entry.path not in gone)
            still = disk.has_expired if unit.turn == 0 else same_file(first.file)
            if not removal.is_there(first.path, still):
                continue
            # Patches first: a canonical stays as long as one of its patches does.
            went = [entry for entry in along if removal.remove(entry.path, same_file(entry.file))]
            if not any(removal.is_there(entry.path) for entry in along) and removal.remove(first.path, still):
                went.append(first)
            gone.update(entry.path for entry in went)
            taken += [(unit, entry) for entry in went]
    return taken


def _units(disk: Disk, entries: Iterable[DirectoryEntry], pinned: Callable[[str], bool]) -> list[_Unit]:
    chunks: dict[str, dict[str, DirectoryEntry]] = collections.defaultdict(dict)
    for entry in entries:
        chunks[entry.chunk][entry.part] = entry

    units: list[_Unit] = []
    for chunk, parts in chunks.items():
        if not pinned(chunk):
            units += _units_of(disk, parts)
    return units


def _units_of(disk: Disk, parts: dict[str, DirectoryEntry]) -> list[_Unit]:
    looked = {part: disk.check_expiry(entry) for part, entry in parts.items()}
    parts = {part: entry for part, (entry, _) in looked.items()}
    patches = tuple(entry for part, entry in parts.items() if part.startswith("p."))

    units: list[_Unit] = []
    canonicals: list[_Unit] = []
    for part, entry in parts.items():
        # Turns: 0 expired, 1 derived from a canonical, 2 can be formed again from the encoder output, 3 others.
        canonical, whole = part.partition(".")[0] == "kv", unreduced_part(part)
        derived = part.startswith("p.") or (canonical and whole != part and whole in parts and not looked[whole][1])
        turn = 1 if derived else 2 if canonical and "enc" in parts else 3
        turn = 0 if looked[part][1] else turn
        unit = _Unit(turn, disk.recent_use.last(entry.path, entry.used), (entry,))
        (canonicals if canonical else units).append(unit)

    # The names of patches do not say on which canonical they were formed, so they go with the last one to go.
    canonicals.sort(key=lambda unit: (unit.turn, unit.used))
    if canonicals:
        last = canonicals.pop()
        units.append(dataclasses.replace(last, entries=(*last.entries, *patches)))
    return units + canonicals


def collect(disk: Disk, below: str = "obj", libraries: str | None = None) -> int:
    """Deletes expired objects (a canonical with its patches) and files of dead writers. Returns their number.

    Args:
      below: a tenant's folder restricts it to that tenant.
      libraries: a folder of libraries whose expired entries are also deleted.
    """
    with typed_errors("store: collect"), locked(f"{disk.root}/evict.lock", shared=False):
        deleted, gone = 0, set[str]()
        for _ in range(_ROUNDS):
            entries = disk.scan(below) + ([] if libraries is None else disk.scan(libraries))
            units = [unit for unit in _expired(disk, entries) if unit.entries[0].path not in gone]
            if not units:
                break
            for start in range(0, len(units), _BATCH):
                deleted += len(_take(disk, units[start : start + _BATCH], gone))

    disk.counters.add("disk_evicted_expired", deleted)
    return deleted + disk.sweep(below.removeprefix("obj").removeprefix("/"))


def _expired(disk: Disk, entries: Iterable[DirectoryEntry]) -> list[_Unit]:
    """Lists expired units. Opens only files of chunks of which a modification time says that an object has expired."""
    look = expiry_test(disk.clock())
    chunks = {entry.chunk for entry in entries if look(entry.mtime_ns)}
    units = _units(disk, [entry for entry in entries if entry.chunk in chunks], lambda _: False) if chunks else []
    return [unit for unit in units if unit.turn == 0]
