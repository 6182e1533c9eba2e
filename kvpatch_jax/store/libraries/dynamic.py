"""Dynamic library: versioned references that the operator maintains (MPIC, section 3.1).

A reader holds a version until it releases it, while others already see the next one.
"""

import collections
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from ...cache import Chunk
from ...core import AnyArray
from ...errors import StoreReadOnlyError
from ..disk.disk import Disk
from ..disk.tenant_disk import TenantStore
from ..format.naming import Name, name_at
from ..io.files import NotRegularError, open_regular, typed, typed_errors
from ..io.locks import try_lock
from .entries import LibraryEntry, Resource, entry_blob, named_content, withdrawn_blob
from .folder import LibraryFolder, changing, check_library_store
from .references import Kind, Reference, check_name


class HeldReference:
    """Hold on one version of a reference on the disk, until it is closed or its process ends. A context manager."""

    def __init__(self, resource: Resource, stack: contextlib.ExitStack):
        self.resource, self._stack = resource, stack

    def close(self) -> None:
        """Releases the version, and deletes it if it is old and nobody else holds it. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Resource:
        return self.resource

    def __exit__(self, *_: object) -> None:
        self.close()


class DynamicLibrary[Store: TenantStore]:
    """Library of versioned references, published while readers in any process keep the versions that they hold.

    `publish` creates the next version, which every later `open` sees whole. An older version stays on the disk as long
    as a reader holds it, with the chunk that was published with it. Versions count from 1.

    Args:
      store: a store of the operator's own tenant.

    Raises:
      StoreError: the directory cannot be created.
    """

    def __init__(self, store: Store):
        check_library_store(store)
        self.store = store
        self._folder = LibraryFolder(store.tenant_disk, "dynamic")

    def publish(
        self,
        name: str,
        content: Any = None,
        *,
        chunk: Chunk | None = None,
        kind: Kind | None = None,
        metadata: Mapping[str, Any] | None = None,
        vector: Float[AnyArray, " D"] | None = None,
    ) -> Reference:
        """Publishes the next version of a reference durably.

        Args:
          name, content, chunk, kind, vector: as in `StaticLibrary.put`.
          metadata: JSON.

        Returns:
          The reference with its version.

        Raises:
          InputError, StoreError, …: as `StaticLibrary.put`, without a quota; the previous version stays current.
        """
        bare, content = named_content(name, content, chunk, kind)
        with self._folder.changing():
            version = max(self._folder.versions(bare.kind, bare.name), default=0) + 1
            reference = Reference(bare.kind, bare.name, version)
            blob = entry_blob(reference, content, chunk, vector, metadata or {}, None)
            if chunk is not None:  # before its entry: nobody may find an entry without its chunk
                self.store.put(chunk)
            self._folder.put(self._folder.name(bare.kind, bare.name, version), blob)
            self._drop_old(bare.kind, bare.name)
        return reference

    def withdraw(self, kind: str, name: str) -> bool:
        """Withdraws a reference by a new, empty version. Returns whether there was one. Readers keep held versions."""
        kind, name = check_name(kind, name)
        with self._folder.changing():
            self._folder.purge(self._folder.name(kind, name))
            versions = self._folder.versions(kind, name)
            if not versions or self._folder.read(self._folder.name(kind, name, versions[-1])) is None:
                return False
            version = versions[-1] + 1
            blob = withdrawn_blob(Reference(kind, name, version))
            self._folder.put(self._folder.name(kind, name, version), blob)
            self._drop_old(kind, name)
        return True

    def open(self, kind: str, name: str, version: int | None = None) -> HeldReference | None:
        """Opens a version, by default the current one, and holds it until it is closed; None if it does not exist.

        Raises:
          InputError: no reference can have this kind or name.
          StoreIOError: it could not be opened.
        """
        kind, name = check_name(kind, name)
        while True:
            versions = self._folder.versions(kind, name)
            wanted = version if version is not None else max(versions, default=None)
            if wanted is None or wanted not in versions:
                return None
            own = self._folder.name(kind, name, wanted)
            with contextlib.ExitStack() as stack:
                if not self._hold(own, stack):
                    continue  # deleted between the listing and the lock
                resource = self._folder.read(own)
                if resource is not None:
                    if resource.chunk is not None:
                        stack.enter_context(self.store.pin(resource.chunk[1], resource.chunk[0]))

                    # Closed in reverse order: a version can only be deleted once its lock is released.
                    held = contextlib.ExitStack()
                    held.callback(self._release, resource.reference)
                    held.push(stack.pop_all())
                    return HeldReference(resource, held)
            if wanted in self._folder.versions(kind, name):
                return None  # withdrawn, or not readable now; a damaged one is in quarantine, so the next is tried

    def _hold(self, own: Name, stack: contextlib.ExitStack) -> bool:
        """Takes a shared lock on a file, which prevents its deletion. Returns False if it is gone."""
        try:
            fd = stack.enter_context(open_regular(self._folder.disk.root, own.path))
            fcntl.flock(fd, fcntl.LOCK_SH)
            return os.fstat(fd).st_nlink > 0
        except FileNotFoundError:
            return False
        except OSError as error:
            raise typed(error, "library dynamic: open") from error

    def _release(self, reference: Reference) -> None:
        """Deletes old versions after a release. A reader without write permission leaves that to the operator."""
        newest = max(self._folder.versions(reference.kind, reference.name), default=0)
        if newest > (reference.version or 0):
            with contextlib.suppress(StoreReadOnlyError), self._folder.changing():
                self._drop_old(reference.kind, reference.name)

    def _drop_old(self, kind: str, name: str) -> int:
        """Deletes all versions but the newest that nobody holds, under the library's lock. Returns their number."""
        paths = [entry.path for entry in self._folder.disk.of_chunk(self._folder.name(kind, name))]
        return _drop_unheld(self._folder.disk, paths, self._remove)

    def _remove(self, path: str) -> bool:
        listed = self._folder.at(name_at(path))
        return self._folder.disk.delete(path) if listed is None else self._folder.remove(listed, self.store)

    def versions(self, kind: str, name: str) -> list[int]:
        """Lists the versions on the disk, ascending; the last is the current one."""
        return self._folder.versions(*check_name(kind, name))

    def entries(self) -> list[LibraryEntry]:
        """Lists the current version of every reference that was not withdrawn."""
        current = [entry for entry in self._folder.newest().values() if not entry.withdrawn]
        return sorted(current, key=lambda entry: str(entry.reference))

    def vectors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (reference without version, vector) of every current entry that has a vector."""
        return self._folder.vectors(self.entries())

    def collect(self) -> int:
        """Deletes old versions of readers that died. Returns their number."""
        with self._folder.changing():
            names = {(entry.reference.kind, entry.reference.name) for entry in self._folder.listed()}
            return sum(self._drop_old(kind, name) for kind, name in names)


def drop_old_versions(disk: Disk, below: str = "lib") -> int:
    """Deletes old versions of dynamic references that nobody holds, of one tenant or of all.

    Readers that died leave them. Chunks that were published with them stay until they are evicted.

    Args:
      below: folder of a tenant's libraries, or of all.

    Returns:
      The number of deleted versions.

    Raises:
      StoreReadOnlyError, StoreIOError: one could not be deleted.
    """
    dropped = 0
    folders = {os.path.dirname(os.path.dirname(entry.path)) for entry in disk.scan(below)}
    for library in sorted(folder for folder in folders if folder.endswith("/dynamic")):
        with changing(disk.root, library):
            versions: dict[str, list[str]] = collections.defaultdict(list)
            for entry in disk.scan(library):
                versions[entry.chunk].append(entry.path)
            dropped += sum(_drop_unheld(disk, paths, disk.delete) for paths in versions.values())
    return dropped


def _drop_unheld(disk: Disk, paths: Iterable[str], delete: Callable[[str], bool]) -> int:
    """Deletes all versions of one reference but the newest that no reader holds. Returns their number."""
    dropped = 0
    for path in sorted(paths)[:-1]:
        with typed_errors("library dynamic: drop"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                with open_regular(disk.root, path) as fd:
                    dropped += try_lock(fd) and delete(path)
            except NotRegularError:  # nobody can hold it
                dropped += delete(path)
    return dropped
