"""Index of a library's entries in memory. A refresh reads only folders that have changed."""

import collections
import dataclasses
import os
import threading
import time
from collections.abc import Callable

from ..disk.directory import DirectoryEntry
from ..disk.disk import Disk
from ..io.files import Identity, typed_errors
from .entries import LibraryEntry

_TICK, _COARSE = 10**8, 3 * 10**9
"""Nanoseconds within which two changes of a folder may have the same time; the longer one for file systems with whole
seconds."""


@dataclasses.dataclass(frozen=True)
class CachedEntry:
    """A file as it was last read; `entry` is None if it had expired or could not be read."""

    file: Identity
    expires: float | None
    entry: LibraryEntry | None


@dataclasses.dataclass
class _Folder:
    """A folder as it was last read: its identity, whether any later change must alter that, its files by path."""

    mark: Identity
    settled: bool
    entries: dict[str, CachedEntry]


class FolderIndex:
    """Index of the entries below a folder of folders by path, with sums over them. Thread-safe.

    Args:
      disk: the disk.
      folder: the folder.
      look: reads a file's header.
    """

    def __init__(self, disk: Disk, folder: str, look: Callable[[DirectoryEntry], CachedEntry]):
        self._disk, self._folder, self._look = disk, folder, look
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self._nbytes = 0
        self._chunks: collections.Counter[tuple[str, str]] = collections.Counter()
        self._expiring: dict[str, float] = {}
        self._entries: dict[str, CachedEntry] = {}

    def refresh(self) -> dict[str, CachedEntry]:
        """Reads changed folders. Returns a copy of all entries by path. Raises StoreError."""
        with self._lock:
            self._refresh()
            return dict(self._entries)

    def look(self, path: str = "") -> tuple[CachedEntry | None, int, dict[str, float]]:
        """Refreshes the index. Returns one entry, the bytes of all, and expiry times by path. Raises StoreError."""
        with self._lock:
            self._refresh()
            return self._entries.get(path), self._nbytes, dict(self._expiring)

    def has_chunk(self, chunk: tuple[str, str]) -> bool:
        """Refreshes the index. Returns whether any entry was put with a chunk. Raises StoreError."""
        with self._lock:
            self._refresh()
            return self._chunks[chunk] > 0

    def _refresh(self) -> None:
        now, there = time.time_ns(), set[str]()
        with typed_errors("library: list"):
            for path, stat in self._subfolders():
                there.add(path)
                mark, known = (stat.st_ino, stat.st_ctime_ns, stat.st_mtime_ns), self._folders.get(path)
                if known is None or known.mark != mark or not known.settled:
                    # Within a tick of its last change, a folder may change again without another time.
                    tick = _TICK if stat.st_mtime_ns % 10**6 else _COARSE
                    self._read(path, mark, now - stat.st_mtime_ns > tick)

        for path in self._folders.keys() - there:
            for gone in self._folders.pop(path).entries:
                self._forget(gone)

    def _subfolders(self) -> list[tuple[str, os.stat_result]]:
        found: list[tuple[str, os.stat_result]] = []
        try:
            with os.scandir(f"{self._disk.root}/{self._folder}") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        found.append((f"{self._folder}/{entry.name}", entry.stat(follow_symlinks=False)))
        except FileNotFoundError:  # the tenant was deleted
            return []
        return found

    def _read(self, path: str, mark: Identity, settled: bool) -> None:
        before = self._folders[path].entries if path in self._folders else {}

        now: dict[str, CachedEntry] = {}
        for entry in self._disk.scan(path):
            seen = before.get(entry.path)
            if seen is None or seen.file != entry.file or seen.entry is None:  # None: it may be readable by now
                seen = self._look(entry)
                self._forget(entry.path)
                self._note(entry.path, seen)
            now[entry.path] = seen

        for gone in before.keys() - now.keys():
            self._forget(gone)
        readable = all(seen.entry is not None for seen in now.values())
        self._folders[path] = _Folder(mark, settled and readable, now)

    def _note(self, path: str, seen: CachedEntry) -> None:
        self._entries[path] = seen
        if seen.expires is not None:
            self._expiring[path] = seen.expires
        if seen.entry is not None:
            self._nbytes += seen.entry.nbytes
            if seen.entry.chunk is not None:
                self._chunks[seen.entry.chunk] += 1

    def _forget(self, path: str) -> None:
        seen = self._entries.pop(path, None)
        self._expiring.pop(path, None)
        if seen is not None and seen.entry is not None:
            self._nbytes -= seen.entry.nbytes
            if seen.entry.chunk is not None:
                self._chunks[seen.entry.chunk] -= 1
