"""Folder with the entries of one library of one tenant. Readers take no lock; writers hold the library's lock."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import InputError, LibraryFullError, StoreCorruptError, StoreError
from ..disk.directory import DirectoryEntry
from ..disk.quarantine import purge
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..format.header import Header
from ..format.naming import Name, name_at
from ..format.objects import Arrays, Blob
from ..io.files import make_directories, typed_errors
from ..io.locks import locked
from .entries import LibraryEntry, Resource, check_body, check_resource, entry_of_header, resource_of
from .folder_index import CachedEntry, FolderIndex
from .references import Reference


@contextlib.contextmanager
def changing(root: str, folder: str) -> Iterator[None]:
    """Locks the library in a folder for changes, among threads and processes.

    Raises:
      StoreError: it could not be locked.
    """
    _make_folder(root, folder)  # the tenant may have been deleted
    with typed_errors("library: lock"), locked(root, below=f"{folder}/lock", shared=False):
        yield


def _make_folder(root: str, folder: str) -> None:
    if not os.path.isdir(f"{root}/{folder}"):
        with typed_errors("library: open"):
            make_directories(root, folder)


def check_library_store(store: Any) -> None:
    """Raises InputError for anything but a store."""
    if not isinstance(store, TenantStore):
        raise InputError(f"library.store: got {store!r:.80}; expected a ChunkStore")


def check_quota(what: str, coming: int, used: int, quota: int) -> None:
    """Raises LibraryFullError if bytes to be added to a static library exceed its quota."""
    if used + coming > quota:
        raise LibraryFullError(
            f"{what}: got {coming} bytes; {used} of {quota} are taken; expected room within the quota"
        )


class LibraryFolder:
    """Access to the entries of one library.

    Args:
      tenant_disk: the tenant's disk.
      library: "static" or "dynamic"; their entries are independent.
    """

    def __init__(self, tenant_disk: TenantDisk, library: str):
        self.tenant_disk, self.disk, self.library = tenant_disk, tenant_disk.disk, library
        self.folder = os.path.dirname(tenant_disk.names.entry(library).folder)
        _make_folder(self.disk.root, self.folder)
        self._index = FolderIndex(self.disk, self.folder, self._look)

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Locks this library for changes. Raises StoreError."""
        return changing(self.disk.root, self.folder)

    def name(self, kind: str, name: str, version: int | None = None) -> Name:
        """Returns the name of an entry's object."""
        return self.tenant_disk.names.entry(self.library, kind, name, version=version)

    def versions(self, kind: str, name: str) -> list[int]:
        """Returns the versions of a dynamic reference on the disk, ascending."""
        entries = self.disk.of_chunk(self.name(kind, name))
        return sorted(int(entry.part[1:]) for entry in entries if entry.part[1:].isdecimal())

    # ------------------------------------------------------------------------------------------------ reading

    def read(self, name: Name) -> Resource | None:
        """Reads and verifies a resource; None if it is absent, expired, withdrawn, or damaged.

        A damaged one is moved to quarantine.
        """
        found = self.disk.get(name)
        if found is None:
            return None
        header, arrays = found.header, found.arrays
        try:
            _check(header, arrays)
        except StoreCorruptError as error:  # every byte was verified, and yet it is no entry: another program wrote it
            again = None if found.file is None else self.disk.build_again(name, found.file, error, _check)
            if again is None:
                return None
            header, arrays = again

        body, expires = header.body, header.expires
        if body["withdrawn"]:
            return None
        return resource_of(body, arrays, expires)

    def listed(self) -> list[LibraryEntry]:
        """Lists every entry that has not expired, unordered, older versions of dynamic references too.

        Each header is read once.
        """
        now = self.disk.clock()
        entries = [seen.entry for seen in self._index.refresh().values()]
        return [entry for entry in entries if entry is not None and _lives(entry, now)]

    def newest(self) -> dict[tuple[str, str], LibraryEntry]:
        """Maps (kind, name) of every dynamic reference to its newest version."""
        newest: dict[tuple[str, str], LibraryEntry] = {}
        for entry in sorted(self.listed(), key=lambda entry: entry.reference.version or 0):
            newest[entry.reference.kind, entry.reference.name] = entry
        return newest

    def at(self, name: Name) -> LibraryEntry | None:
        """Returns the entry of a name; None if there is none, or it has expired."""
        return self._current(self._index.look(name.path)[0])

    def vectors(self, entries: Iterable[LibraryEntry]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (reference without version, vector [D] float32) of every entry with a vector, without its content."""
        for entry in entries:
            with self.disk.reading(name_at(entry.path), noatime=True) as opening:
                if opening is None or "vector" not in opening[0].leaves:
                    continue
                try:
                    vector = opening[1](["vector"])["vector"]
                except StoreError:
                    continue
            yield str(Reference(entry.reference.kind, entry.reference.name)), vector

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that have not expired."""
        _, nbytes, expiring = self._index.look()
        now = self.disk.clock()
        if all(now < expires for expires in expiring.values()):
            return nbytes
        return sum(entry.nbytes for entry in self.listed())

    # ------------------------------------------------------------------------------------------------ changing

    def room(self, name: Name) -> tuple[LibraryEntry | None, int]:
        """Deletes expired entries. Returns the entry of a name, and the bytes of all other entries."""
        seen, nbytes, expiring = self._index.look(name.path)
        if self._remove_expired(expiring):
            seen, nbytes, _ = self._index.look(name.path)
        entry = self._current(seen)
        return entry, nbytes - (0 if entry is None else entry.nbytes)

    def put(self, name: Name, blob: Blob) -> None:
        """Writes an entry durably, encrypted if the tenant has a key, outside the chunks' budgets.

        Raises:
          StoreError: as `ChunkStore.put`; the previous entry stays.
        """
        self.tenant_disk.expect_open()
        self.disk.put(name, self.disk.encryption.sealed(blob, name.file))

    def remove(self, entry: LibraryEntry, store: TenantStore) -> bool:
        """Deletes an entry, and its chunk as `delete_unused_chunk`. Returns whether the entry existed."""
        gone = self.disk.delete(entry.path)
        self.delete_unused_chunk(entry.chunk, store)
        return gone

    def delete_unused_chunk(self, chunk: tuple[str, str] | None, store: TenantStore) -> None:
        """Deletes a chunk (backbone, id) of an entry, unless another entry of this library has it."""
        if chunk is None:
            return
        # The index only counts, which is fast. The list leaves out expired entries, which keep no chunk.
        if self._index.has_chunk(chunk) and any(entry.chunk == chunk for entry in self.listed()):
            return
        store.delete(chunk[1], chunk[0])

    def purge(self, name: Name) -> None:
        """Deletes quarantined files of an entry, of any version. Raises StoreError."""
        purge(self.disk.root, name.tenant, name.chunk)

    def remove_expired(self) -> int:
        """Deletes expired entries; their chunks expire by themselves. Returns their number."""
        return self._remove_expired(self._index.look()[2])

    # ------------------------------------------------------------------------------------------------ inside

    def _remove_expired(self, expiring: Mapping[str, float]) -> int:
        now = self.disk.clock()
        paths = [path for path, expires in expiring.items() if now >= expires]
        return sum(self.disk.delete(path, self.disk.has_expired) for path in paths)

    def _current(self, seen: CachedEntry | None) -> LibraryEntry | None:
        """Returns the entry of a file, unless it has expired."""
        entry = None if seen is None else seen.entry
        return None if entry is None or not _lives(entry, self.disk.clock()) else entry

    def _look(self, file: DirectoryEntry) -> CachedEntry:
        name = name_at(file.path)
        with self.disk.reading(name, noatime=True) as opening:
            if opening is not None:
                try:
                    return CachedEntry(file.file, opening[0].expires, entry_of_header(opening[0], file.path))
                except StoreCorruptError as error:

                    def describe(header, _):
                        return entry_of_header(header, file.path)

                    entry = self.disk.build_again(name, file.file, error, describe)
                    if entry is not None:
                        return CachedEntry(file.file, entry.expires, entry)
        return CachedEntry(file.file, self.disk.expires(file.path), None)


def _check(header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
    """Returns an entry's header and leaves if they are valid. Raises as `check_body`."""
    check_body(header.body)
    check_resource(header.body, arrays, header.expires)
    return header, arrays


def _lives(entry: LibraryEntry, now: float) -> bool:
    return entry.expires is None or now < entry.expires
