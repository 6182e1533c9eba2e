"""Static library: files that one tenant uploads by name, within a quota (MPIC, section 3.1)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ...cache import Chunk, fingerprint_of
from ...core import AnyArray
from ...errors import InputError
from ...utils.kinds import all_of
from ...utils.sizes import Size, size_of
from ..disk.tenant_disk import TenantStore
from ..format.expiry import Seconds, checked_ttl, expires_at
from ..format.objects import file_size
from .entries import LibraryEntry, Resource, entry_blob, named_content
from .folder import LibraryFolder, check_library_store, check_quota
from .references import Kind, Reference, check_name


class StaticLibrary[Store: TenantStore]:
    """Library of files that one tenant uploads by name: images, text, token ids, or chunks. As durable as the store.

    Args:
      store: the tenant's store; it holds the chunks, and the same directory holds the entries.
      quota: bytes of all entries, including the chunks that were put with them, as a number or such as "10 GB"; by
        default the store's `Budget.library`, which also limits restores.
      ttl: default time to live of entries in seconds; None keeps them.

    Raises:
      StoreError: the directory cannot be created.
      InputError: there is no quota, it is below 1, or the ttl is not a finite number above 0.
    """

    def __init__(self, store: Store, *, quota: Size | None = None, ttl: Seconds | None = None):
        check_library_store(store)
        quota = store.tenant_disk.budget.library if quota is None else quota
        if quota is None:
            raise InputError(
                "static library: got no quota, and a store without Budget(library=...); expected quota=BYTES, or a "
                "store with that budget"
            )
        self.store, self.quota = store, size_of(quota, "static library: quota", 1)
        self._ttl = checked_ttl(ttl, "static library")
        self._folder = LibraryFolder(store.tenant_disk, "static")

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
        """Puts a file under a name durably, and replaces an entry with this kind and name.

        Args:
          name: the name.
          content: text, an encoded image or other file (bytes, or its `pathlib.Path`), pixels (an array or PIL image),
            or token ids. A str that looks like a file name is refused unless `kind` is TEXT.
          chunk: its canonical, if it was computed already, for the store. Without content it cannot be computed again
            after eviction.
          kind: by default derived from the content; IMAGE if there is only a chunk.
          ttl: time to live in seconds, of the chunk too.
          vector: vector by which a retriever finds it (`pooled`).

        Returns:
          The reference, as prompts name it.

        Raises:
          LibraryFullError: it exceeds the quota; nothing was changed.
          InputError, DtypeError, NotFiniteError: content, name or vector cannot be stored.
          StoreError: as `ChunkStore.put`.
        """
        reference, content = named_content(name, content, chunk, kind)
        ttl = self._ttl if ttl is None else ttl
        expires = expires_at(self.store.tenant_disk.clock(), ttl, str(reference))
        blob = entry_blob(reference, content, chunk, vector, {}, expires)
        own = self._folder.name(reference.kind, reference.name)

        with self._folder.changing():
            before, used = self._folder.room(own)
            need = file_size(blob, own.file) + (0 if chunk is None else chunk.nbytes)
            check_quota(str(reference), need, used, self.quota)

            if chunk is not None:  # before its entry: nobody may find an entry without its chunk
                self.store.put(chunk, ttl=ttl)
            self._folder.put(own, blob)
            if before is not None:  # after the new entry, which may have the same chunk
                self._folder.delete_unused_chunk(before.chunk, self.store)
        return reference

    @property
    def used(self) -> int:
        """Bytes of all entries that have not expired."""
        return self._folder.nbytes

    def get(self, kind: str, name: str) -> Resource | None:
        """Reads and verifies a file; None if there is none, or it is damaged. Raises InputError as `put`."""
        return self._folder.read(self._folder.name(*check_name(kind, name)))

    def entries(self) -> list[LibraryEntry]:
        """Lists the entries by kind and name, without reading contents."""
        return sorted(self._folder.listed(), key=lambda entry: str(entry.reference))

    def vectors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (reference, vector) of every entry that has a vector, to fill a retriever."""
        return self._folder.vectors(self.entries())

    def delete(self, kind: str, name: str, backbones: Sequence[str] = ()) -> bool:
        """Deletes a file, and its chunk unless another entry has it. Returns whether there was one.

        Args:
          backbones: fingerprints of models whose chunks of this content, computed later, are deleted too.

        Raises:
          StoreReadOnlyError, StoreIOError: it could not be deleted.
        """
        own, wanted = self._folder.name(*check_name(kind, name)), all_of(str, backbones, "library: backbones")
        for backbone in wanted:
            fingerprint_of(backbone, "library: backbones")

        with self._folder.changing():
            self._folder.purge(own)
            listed = self._folder.at(own)
            if listed is None:
                return False
            resource = self._folder.read(own) if backbones else None  # while it is there: its content names the chunks
            gone = self._folder.remove(listed, self.store)
            if resource is not None and resource.content is not None:
                for backbone in wanted:
                    self.store.delete(resource.content_id(backbone), backbone)
        return gone

    def collect(self) -> int:
        """Deletes expired entries (`put` does so too). Returns their number."""
        with self._folder.changing():
            return self._folder.remove_expired()
