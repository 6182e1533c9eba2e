"""One store directory: verified reads, quarantine, deletion and listing of objects. `object_writer` writes.

    root/STORE.json      version and secret of the store
    root/obj/…           objects; each exists whole or not at all
    root/tmp/            objects being written, locked by their writer
    root/quarantine/     objects that failed verification
    root/deleted/        tenants being deleted
    root/index.sqlite    a cache of what the directories say (`index`)

The directory alone says what is stored. Names change under the lock of their folder (`shard`).
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from ..format.naming import Name
from ..format.objects import Blob
from ..io.files import folder
from .directory import DirectoryEntry, NameState, Still, files_of, name_state, remove_objects, scan
from .index import IndexedObject, object_of
from .object_writer import ObjectWriter, Only, PutResult
from .revisions import revision_in
from .verified_reads import VerifiedReads, header_expiry


class Disk(VerifiedReads):
    """Files of a root. Any number of threads and processes may use one root at once.

    Args:
      root: the store's directory, created if it does not exist.
      counters: counts reads and writes.
      buffers: host memory for reads.
      clock: returns seconds since the epoch; used for expiry only.
      encryption: decrypts reads. Objects to be written are encrypted already.
      quarantine: bytes of quarantined objects per tenant; None: no limit.
      mapped: whether `get` maps large files in place of copying them (`mapping`).

    Raises:
      StoreReadOnlyError, StoreFullError, StoreIOError: the directory cannot be created.
    """

    def __init__(self, root: str, *arguments: Any, **options: Any):
        super().__init__(root, *arguments, **options)
        self.writer = ObjectWriter(self.root, self.encryption.check, self.index)
        self.writer.note = self.index.note = self.counters.add

    # ----------------------------------------------------------------------------------------------- writing

    def put(self, name: Name, blob: Blob) -> int:
        """Writes one object durably. Returns the bytes of its file."""
        return self.put_group([(name, blob)]).nbytes

    def put_group(
        self, items: Sequence[tuple[Name, Blob]], only: Only = "later", since: int | None = None
    ) -> PutResult:
        """Writes several objects durably and counts them, as `ObjectWriter.put`."""
        result = self.writer.put(items, only, since)
        late = len(result.outdated)
        self.counters.add("puts", len(items) - late, put_bytes=result.nbytes, outdated=late)
        return result

    def name_state(self, name: Name) -> NameState:
        """Returns the state of a name, by which a later write or deletion is recognised."""
        return name_state(self.root, name)

    def revision(self, name: Name) -> int:
        """Returns the latest revision of a name: its object's, or that of its chunk's deletion; 0: neither."""
        known = self.own_revision(name)
        gone = 0 if self.writer.tombstones is None else self.writer.tombstones.of(name)
        return max(gone, known, 0)

    def own_revision(self, name: Name) -> int:
        """Returns the revision of a name's object, expired or not; -1: there is none, or it is damaged."""
        try:  # most often there is no such file
            os.stat(f"{self.root}/{name.path}", follow_symlinks=False)
            with folder(self.root, name.folder) as fd:
                return revision_in(fd, name.file)
        except OSError:
            return -1

    def sweep(self, tenant: str = "") -> int:
        """Removes files of dead writers from tmp/, as `ObjectWriter.sweep`. Returns their number."""
        return self.writer.sweep(tenant)

    def delete(self, path: str, still: Still | None = None) -> bool:
        """Removes one object durably, if `still` (called with its path) allows it. Returns whether it was removed.

        Raises:
          StoreReadOnlyError, StoreIOError: it could not be removed.
        """
        return bool(remove_objects(self.root, self.index, {path: still}))

    # ---------------------------------------------------------------------------------------------- listing

    def scan(self, below: str = "obj") -> list[DirectoryEntry]:
        """Lists every object below a folder, unordered, as `directory.scan`. Raises StoreError."""
        return scan(self.root, below)

    def of_chunk(self, name: Name, part: str = "") -> list[IndexedObject]:
        """Lists every object of a chunk: canonicals in any encoding, encoder output, patches. Raises StoreError.

        Args:
          part: beginning of the parts to list, such as "kv" or "p."; "" lists all.
        """
        if name.kind != "entry":
            return self.index.in_folder(name.folder, f"{name.chunk}.{part}")
        found: list[IndexedObject] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self.root, name.folder) as fd:
            for file in files_of(fd, name):
                found.append(object_of(f"{name.folder}/{file}", os.stat(file, dir_fd=fd, follow_symlinks=False)))
        return found

    def holds(self, path: str) -> bool:
        """Returns whether there is a file of an object's path."""
        return os.path.lexists(f"{self.root}/{path}")

    def has_expired(self, fd: int, file: str) -> bool:
        """Returns whether the object in a file of an open directory has expired, by its header."""
        expires = header_expiry(fd, file)
        return expires is not None and self.clock() >= expires
