"""Keeping the disk within its budget: what expired goes first, then what can be derived, then the least recently used.

Of all chunks, patches and smaller encodings go before any canonical, and a canonical whose encoder output is there (an
eighth of its bytes, and enough to make it again) before one that stands alone. A canonical takes its patches along.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable

from ..errors import StoreFullError
from .disk import Disk, Entry
from .files import locked, typed_errors

SLACK = 0.05
"""Share of the budget that an eviction frees beyond what is asked, so that the next put need not evict again."""


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What goes together: its turn (lower first), when it was last used, its objects."""

    turn: int
    used: float
    entries: tuple[Entry, ...]


def make_room(
    disk: Disk, budget: int, need: int, pinned: Callable[[str], bool], below: str = "obj", counted: str = "obj"
) -> int:
    """Evicts until `need` bytes fit within `budget`, over all that is on the disk. One process at a time.

    Args:
      below: the folder that the budget is for. counted: the folder whose evictions are counted.

    Returns:
      Bytes of what is there now.

    Raises:
      StoreFullError: what is left is pinned, or `need` is larger than the budget; nothing was evicted then.
    """
    with typed_errors("store: evict"), locked(f"{disk.root}/evict.lock", shared=False):
        entries = disk.scan(below)
        total = sum(entry.size for entry in entries)
        if total + need <= budget:
            return total
        units = sorted(_units(disk, entries, pinned), key=lambda unit: (unit.turn, unit.used))
        free = {entry for unit in units for entry in unit.entries}
        loose = sum(entry.size for entry in free)
        if total - loose + need > budget:
            raise StoreFullError(
                f"store: {need} bytes do not fit into {budget}, of what is there too little may go; "
                "expected room within the budget"
            )
        return _evict(disk, units, total, budget - need, counted)


def _evict(disk: Disk, units: Iterable[_Unit], total: int, allowed: int, counted: str) -> int:
    target = allowed - int(SLACK * allowed)
    gone: set[Entry] = set()
    for unit in units:
        if total <= target:
            break
        for entry in unit.entries:
            if entry not in gone:
                gone.add(entry)
                disk.delete(entry.path, entry.inode)
                total -= entry.size
                if entry.path.startswith(f"{counted}/"):  # a tenant's counts tell nothing of others
                    disk.counters.add("disk_evicted_expired" if unit.turn == 0 else "disk_evicted_budget")
    return total


def _units(disk: Disk, entries: list[Entry], pinned: Callable[[str], bool]) -> list[_Unit]:
    chunks: dict[str, dict[str, Entry]] = collections.defaultdict(dict)
    for entry in entries:
        chunks[entry.chunk][entry.part] = entry
    units: list[_Unit] = []
    for chunk, parts in chunks.items():
        if not pinned(chunk):
            units += _units_of(disk, parts)
    return units


def _units_of(disk: Disk, parts: dict[str, Entry]) -> list[_Unit]:
    patches = tuple(entry for part, entry in parts.items() if part.startswith("p."))
    units: list[_Unit] = []
    for part, entry in parts.items():
        canonical = part.partition(".")[0] == "kv"
        derived = part.startswith("p.") or (part.startswith("kv.") and "kv" in parts)
        turn = 1 if derived else 2 if canonical and "enc" in parts else 3
        expires = disk.expires(entry.path)
        turn = 0 if expires is not None and disk.clock() >= expires else turn
        with_patches = canonical and not derived
        units.append(_Unit(turn, entry.used, (entry, *patches) if with_patches else (entry,)))
    return units


def collect(disk: Disk, below: str = "obj", libraries: str | None = None) -> int:
    """Deletes what expired (a canonical takes its patches along) and what dead writers left. How many objects.

    Args:
      below: a tenant's folder, for that tenant's alone.
      libraries: a folder of libraries whose expired entries go too.
    """
    with typed_errors("store: collect"), locked(f"{disk.root}/evict.lock", shared=False):
        entries = disk.scan(below) + ([] if libraries is None else disk.scan(libraries))
        units = _units(disk, entries, lambda _: False)
        gone = {entry for unit in units if unit.turn == 0 for entry in unit.entries}
        deleted = sum(disk.delete(entry.path, entry.inode) for entry in gone)
    disk.counters.add("disk_evicted_expired", deleted)
    return deleted + disk.sweep(below.removeprefix("obj").removeprefix("/"))
