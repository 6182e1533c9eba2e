"""Named resources: what a user uploads (static library), and references that the operator maintains (dynamic library).

MPIC, section 3.1. A static library belongs to its tenant and changes only by its tenant. A dynamic library has
versions: whoever reads one keeps it until letting go, while others already see the next.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ...chunk import AnyArray, Chunk
from ...content import fingerprint_of, names_of
from ...errors import InputError, LibraryFullError, StoreReadOnlyError
from ..format.expiry import Seconds, checked_ttl, expires_at
from ..format.naming import Name
from ..format.objects import file_size
from ..io.files import NotRegularError, open_regular, try_lock, typed, typed_errors
from ..store import ChunkStore
from .entries import LibraryEntry, Resource, Shelf, as_content, entry_blob, kind_of, withdrawn_blob
from .references import Kind, Reference, check_name


def _reference(name: str, content: Any, chunk: Chunk | None, kind: Kind | None) -> tuple[Reference, Any]:
    content = None if content is None else as_content(content, kind)
    if kind is None:
        kind = "IMAGE" if content is None else kind_of(content)
    return Reference(*check_name(kind, name)), content


class StaticLibrary:
    """Files that one tenant uploads, by name: images, text, token ids, or whole chunks. Durable like the store.

    Args:
      store: the tenant's; chunks go into it, and entries beside it, in the same directory.
      quota: bytes of all entries, the chunks that were put with them included; by default the store's
        `Budget.library`, which also bounds what a restore brings.
      ttl: seconds that entries live unless `put` says otherwise; None keeps them.

    Raises:
      StoreError: the directory cannot be made. InputError: no quota, one below 1, or a ttl that is no finite
        number above 0.
    """

    def __init__(self, store: ChunkStore, *, quota: int | None = None, ttl: Seconds | None = None):
        quota = store.budget.library if quota is None else quota
        if quota is None:
            raise InputError(
                "static library: no quota, and its store has no Budget(library=...); expected quota=BYTES, or a store "
                "with that budget"
            )
        if quota < 1:
            raise InputError(f"static library: quota {quota}; expected bytes above 0")
        self.store, self.quota, self._ttl = store, quota, checked_ttl(ttl, "static library")
        self._shelf = Shelf(store, "static")

    def put(
        self,
        name: str,
        content: Any = None,
        *,
        chunk: Chunk | None = None,
        kind: Kind | None = None,
        ttl: Seconds | None = None,
        vector: Float[AnyArray, " D"] | None = None,
    ) -> Reference:
        """Puts a file under a name, durably when this returns, in place of what had this kind and name.

        Args:
          content: text, an encoded image or other file (bytes, or its `pathlib.Path`), pixels (an array or PIL image),
            or token ids. A str that names a file is refused unless `kind` is TEXT.
          chunk: its canonical, where it was computed already; goes into the store. Without content it cannot be
            computed again after it was evicted.
          kind: told from the content by default, IMAGE where there is only a chunk.
          ttl: seconds it lives, the chunk too.
          vector: what a retriever finds it by (`pooled`).

        Returns:
          How a prompt names it.

        Raises:
          LibraryFullError: it does not fit the quota; nothing changed. InputError, DtypeError, NotFiniteError: content,
          name or vector that cannot be kept. As `ChunkStore.put` otherwise.
        """
        reference, content = _reference(name, content, chunk, kind)
        ttl = self._ttl if ttl is None else ttl
        expires = expires_at(self.store.clock(), ttl, str(reference))
        blob = entry_blob(reference, content, chunk, vector, {}, expires)
        own = self._shelf.name(reference.kind, reference.name)
        with self._shelf.changing():
            before, used = self._shelf.room(own)
            need = file_size(blob, own.file) + (0 if chunk is None else chunk.nbytes)
            if used + need > self.quota:
                raise LibraryFullError(
                    f"{reference}: {need} bytes, {used} of {self.quota} are taken; expected room within the quota"
                )
            if chunk is not None:
                self.store.put(chunk, ttl=ttl)
            self._shelf.put(own, blob)
            if before is not None:
                self._shelf.release(before.chunk)
        return reference

    @property
    def used(self) -> int:
        """Bytes of all entries that have not expired."""
        return self._shelf.nbytes

    def get(self, kind: str, name: str) -> Resource | None:
        """A file, verified; None where there is none, or where it was damaged. Raises InputError as `put`."""
        return self._shelf.read(self._shelf.name(*check_name(kind, name)))

    def entries(self) -> list[LibraryEntry]:
        """What is there, by kind and name. Contents are not read."""
        return sorted(self._shelf.listed(), key=lambda entry: str(entry.reference))

    def vectors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(reference, vector) of every entry that has one: what a retriever is filled with."""
        return _vectors(self._shelf, self.entries())

    def delete(self, kind: str, name: str, backbones: Sequence[str] = ()) -> bool:
        """Deletes a file, and the chunk that was put with it where no other entry has it. Whether there was one.

        Args:
          backbones: fingerprints of models whose chunks of this content, computed since, are deleted too.

        Raises:
          StoreReadOnlyError, StoreIOError.
        """
        own, wanted = self._shelf.name(*check_name(kind, name)), names_of(backbones, "library: backbones")
        for backbone in wanted:
            fingerprint_of(backbone, "library: backbones")
        with self._shelf.changing():
            self._shelf.purge(own)
            listed = self._shelf.at(own)
            if listed is None:
                return False
            resource = self._shelf.read(own) if backbones else None
            gone = self._shelf.remove(listed)
            if resource is not None and resource.content is not None:
                for backbone in wanted:
                    self.store.delete(resource.content_id(backbone), backbone)
        return gone

    def collect(self) -> int:
        """Takes expired entries off the disk (`put` does so too). How many."""
        with self._shelf.changing():
            return self._shelf.remove_expired()


class HeldReference:
    """One version of a reference, kept on the disk until it is closed or its process ends. A context manager."""

    def __init__(self, resource: Resource, stack: contextlib.ExitStack):
        self.resource, self._stack = resource, stack

    def close(self) -> None:
        """Lets go. An old version that nobody else holds goes then. Closing twice is allowed."""
        self._stack.close()

    def __enter__(self) -> Resource:
        return self.resource

    def __exit__(self, *_: object) -> None:
        self.close()


class DynamicLibrary:
    """References that the operator maintains, versioned; refreshed while readers are in them, also across processes.

    `publish` makes the next version, seen by every later `open` at once and whole. An older version stays on the disk
    as long as somebody holds it, with the chunk that was published with it. Versions count from 1 and go up.

    Args:
      store: the operator's own tenant of a chunk store.

    Raises:
      StoreError: the directory cannot be made.
    """

    def __init__(self, store: ChunkStore):
        self.store = store
        self._shelf = Shelf(store, "dynamic")

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
        """Publishes the next version of a reference, durably when this returns.

        Args:
          content, chunk, kind, vector: as `StaticLibrary.put`.
          metadata: JSON.

        Returns:
          The reference with its version.

        Raises:
          As `StaticLibrary.put`, without a quota; the version before is still the current one then.
        """
        bare, content = _reference(name, content, chunk, kind)
        with self._shelf.changing():
            least = self._shelf.least(bare.kind, bare.name)
            version = max([least, *self._shelf.versions(bare.kind, bare.name)]) + 1
            reference = Reference(bare.kind, bare.name, version)
            blob = entry_blob(reference, content, chunk, vector, metadata or {}, None)
            if chunk is not None:
                self.store.put(chunk)
            self._shelf.put(self._shelf.name(bare.kind, bare.name, version), blob)
            self._drop_old(bare.kind, bare.name)
        return reference

    def withdraw(self, kind: str, name: str) -> bool:
        """Publishes that there is no such reference any more. Whether there was one. Readers keep what they hold."""
        kind, name = check_name(kind, name)
        with self._shelf.changing():
            self._shelf.purge(self._shelf.name(kind, name))
            least, versions = self._shelf.least(kind, name), self._shelf.versions(kind, name)
            if (
                not versions
                or versions[-1] < least
                or self._shelf.read(self._shelf.name(kind, name, versions[-1])) is None
            ):
                return False
            version = versions[-1] + 1
            blob = withdrawn_blob(Reference(kind, name, version))
            self._shelf.put(self._shelf.name(kind, name, version), blob)
            self._drop_old(kind, name)
        return True

    def open(self, kind: str, name: str, version: int | None = None) -> HeldReference | None:
        """A version, by default the current one, held until it is closed; None where it is not there (any more).

        In an encrypted library no version is the current one that is below one that was published or withdrawn.

        Raises:
          InputError: a kind or name that no reference has. StoreIOError.
        """
        kind, name = check_name(kind, name)
        while True:
            least = (
                self._shelf.least(kind, name) if version is None else 0
            )  # first: a version is there before its floor
            versions = self._shelf.versions(kind, name)
            wanted = version if version is not None else max(versions, default=None)
            if wanted is None or wanted not in versions:
                return None
            if wanted < least:
                self.store.counters.add("replayed")
                return None
            own = self._shelf.name(kind, name, wanted)
            with contextlib.ExitStack() as stack:
                if not self._hold(own, stack):
                    continue  # dropped between the look and the hold
                resource = self._shelf.read(own)
                if resource is not None:
                    if resource.chunk is not None:
                        stack.enter_context(self.store.pin(resource.chunk[1], resource.chunk[0]))
                    return self._handed(resource, stack.pop_all())
            if wanted in self._shelf.versions(kind, name):
                return None  # withdrawn, or it cannot be read just now; else it was damaged and is gone

    def _hold(self, own: Name, stack: contextlib.ExitStack) -> bool:
        """Holds a file by a shared lock, which whoever would drop it asks for alone. False: it is gone."""
        try:
            fd = stack.enter_context(open_regular(self.store.disk.root, own.path))
            fcntl.flock(fd, fcntl.LOCK_SH)
            return os.fstat(fd).st_nlink > 0
        except FileNotFoundError:
            return False
        except OSError as error:
            raise typed(error, "library dynamic: open") from error

    def _handed(self, resource: Resource, held: contextlib.ExitStack) -> HeldReference:
        stack = contextlib.ExitStack()
        stack.callback(self._let_go, resource.reference)
        stack.push(held)
        return HeldReference(resource, stack)

    def _let_go(self, reference: Reference) -> None:
        """After the lock is gone: drops an old version. A reader that may not write leaves that to the operator."""
        newest = max(self._shelf.versions(reference.kind, reference.name), default=0)
        if newest > (reference.version or 0):
            with contextlib.suppress(StoreReadOnlyError), self._shelf.changing():
                self._drop_old(reference.kind, reference.name)

    def _drop_old(self, kind: str, name: str) -> int:
        """Drops every version but the newest that nobody holds; under the library's lock. How many."""
        dropped = 0
        for version in self._shelf.versions(kind, name)[:-1]:
            own = self._shelf.name(kind, name, version)
            with (
                typed_errors("library dynamic: drop"),
                contextlib.suppress(FileNotFoundError, NotRegularError),
                open_regular(self.store.disk.root, own.path) as fd,
            ):
                if try_lock(fd):
                    listed = self._shelf.at(own)
                    dropped += self.store.disk.delete(own.path) if listed is None else self._shelf.remove(listed)
        return dropped

    def versions(self, kind: str, name: str) -> list[int]:
        """The versions that are still there, ascending; the last is the current one."""
        return self._shelf.versions(*check_name(kind, name))

    def entries(self) -> list[LibraryEntry]:
        """The current version of every reference that was not withdrawn."""
        current = [entry for entry in self._shelf.newest().values() if not entry.withdrawn]
        return sorted(current, key=lambda entry: str(entry.reference))

    def vectors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(reference without version, vector) of every current entry that has one."""
        return _vectors(self._shelf, self.entries())

    def collect(self) -> int:
        """Drops old versions that nobody holds: those of readers that died. How many."""
        with self._shelf.changing():
            names = {(entry.reference.kind, entry.reference.name) for entry in self._shelf.listed()}
            return sum(self._drop_old(kind, name) for kind, name in names)


def _vectors(shelf: Shelf, entries: Sequence[LibraryEntry]) -> Iterator[tuple[str, np.ndarray]]:
    for entry in entries:
        vector = shelf.vector(entry)
        if vector is not None:
            yield str(Reference(entry.reference.kind, entry.reference.name)), vector
