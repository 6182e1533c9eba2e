"""Shards: the folders that hold objects. A shard is locked while a name in it changes.

The lock is the folder's own (`flock`), so that it costs no file, and one tenant's processes cannot hold up another's.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator

from ..io.files import folder
from ..io.locks import SECONDS, lock, unlock


@dataclasses.dataclass(frozen=True)
class Shard:
    """A locked folder below a root.

    Attributes:
      path: its path below the root.
      fd: the open folder.
      before: its modification time in nanoseconds when it was locked; every change of a name in it sets another one.
    """

    root: str
    path: str
    fd: int
    before: int

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this folder: its tenant may be deleted in the meantime."""
        try:
            there, here = os.stat(f"{self.root}/{self.path}", follow_symlinks=False), os.fstat(self.fd)
        except OSError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

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
    with contextlib.ExitStack() as stack:
        shards: dict[str, Shard] = {}
        for path in sorted(set(paths)):
            shards[path] = stack.enter_context(_locked(root, path, make, seconds, note))
        yield shards


@contextlib.contextmanager
def _locked(root: str, path: str, make: bool, seconds: float, note: Callable[[str], object] | None) -> Iterator[Shard]:
    while True:
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(folder(root, path))
            except FileNotFoundError:
                if not make:
                    raise
                fd = stack.enter_context(folder(root, path, make=True))
            lock(fd, f"{root}/{path}", seconds=seconds, note=note)
            stack.callback(unlock, fd)
            shard = Shard(root, path, fd, os.fstat(fd).st_mtime_ns)
            if shard.in_place:  # else its tenant was deleted before it was locked
                yield shard
                return
