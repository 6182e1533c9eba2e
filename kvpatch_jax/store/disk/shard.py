"""Shards: the folders that hold objects. A shard is locked while a name in it changes.

The lock is the folder's own (`flock`), so that it costs no file, and one tenant's processes cannot hold up another's.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from ..io.files import folder
from ..io.folders import close, made_folder, open_folder
from ..io.locks import SECONDS, lock, unlock


class Shard(NamedTuple):
    """A locked folder below a root.

    Attributes:
      path: its path below the root.
      fd: the open folder.
      before: its modification time in nanoseconds when it was locked; every change of a name in it sets another one.
      place: its device and inode.
    """

    root: str
    path: str
    fd: int
    before: int
    place: tuple[int, int]

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this folder: its tenant may be deleted in the meantime."""
        try:
            there = os.stat(f"{self.root}/{self.path}", follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self.place

    @property
    def mtime_ns(self) -> int:
        """Modification time of the folder now, in nanoseconds."""
        return os.fstat(self.fd).st_mtime_ns


@contextlib.contextmanager
def locked_shards(
    root: str,
    paths: Iterable[str],
    *,
    make: bool = False,
    seconds: float = SECONDS,
    note: Callable[[str], object] | None = None,
) -> Iterator[dict[str, Shard]]:
    """Locks folders below a root, sorted, so that two groups of them cannot wait for each other. Yields them by path.

    Args:
      make: creates missing folders durably.
      seconds: how long each lock is tried.
      note: counts locks that are not free (`locks.lock`).

    Raises:
      StoreBusyError: another process holds one.
      FileNotFoundError, NotADirectoryError: one does not exist. OSError: another error.
    """
    shards = lock_shards(root, sorted(set(paths)), make=make, seconds=seconds, note=note)
    try:
        yield shards
    finally:
        release(shards.values())


def lock_shards(
    root: str,
    paths: Collection[str],
    *,
    make: bool = False,
    seconds: float = SECONDS,
    note: Callable[[str], object] | None = None,
) -> dict[str, Shard]:
    """Locks folders as `locked_shards`, in the order given, until `release`."""
    shards: dict[str, Shard] = {}
    try:
        for path in paths:
            while path not in shards:
                try:
                    fd = open_folder(root, path)
                except FileNotFoundError:
                    if not make:
                        raise
                    fd = made_folder(root, path)
                try:
                    lock(fd, f"{root}/{path}", seconds=seconds, note=note)
                    stat = os.fstat(fd)
                except BaseException:
                    close(fd)
                    raise
                shard = Shard(root, path, fd, stat.st_mtime_ns, (stat.st_dev, stat.st_ino))
                if shard.in_place:
                    shards[path] = shard
                else:  # its tenant was deleted before it was locked
                    release([shard])
    except BaseException:
        release(shards.values())
        raise
    return shards


def release(shards: Iterable[Shard]) -> None:
    """Unlocks and closes folders."""
    for shard in shards:
        unlock(shard.fd)
        close(shard.fd)


def folders_in(root: str, below: str) -> dict[str, int]:
    """Maps the folders that may hold objects below one, obj/tenant/backbone/xx, to their times in nanoseconds."""
    found: dict[str, int] = {}
    waiting = [below]
    while waiting:
        current = waiting.pop()
        depth = current.count("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, current) as fd:
            if depth == 3:
                found[current] = os.fstat(fd).st_mtime_ns
                continue
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if depth < 2:
                        waiting.append(f"{current}/{entry.name}")
                    else:
                        found[f"{current}/{entry.name}"] = entry.stat(follow_symlinks=False).st_mtime_ns
    return found
