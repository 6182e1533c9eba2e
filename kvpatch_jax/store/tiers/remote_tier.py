"""Remote tier of a `ChunkStore`: concurrent calls, counted failures; a failed read is a miss.

An object that does not verify is read a second time. If it fails again it is a miss and stays: other machines may read
it correctly.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreIOError, StoreVersionError
from ..disk.disk import Disk
from ..disk.outbox import Outbox
from ..disk.shard import locked_shards
from ..disk.tenant_disk import TenantDisk
from ..format.encryption import Read
from ..format.header import Header
from ..format.naming import Name, name_at
from ..format.objects import Blob, blob_of
from ..io.files import typed_errors
from ..io.thread_pool import ThreadPool
from ..remotes.remote_store import RemoteStore
from .remote_sender import RemoteSender

_callers = ThreadPool(8, "kvpatch-remote")


def delete_below(remote: RemoteStore, prefix: str) -> int:
    """Deletes every object whose path begins with a prefix. Returns their number.

    Raises:
      StoreError: some could not be deleted; the others were.
    """
    paths = remote.paths(prefix)
    _callers.run_all(functools.partial(remote.delete, path) for path in paths)
    return len(paths)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingObject:
    """An object of a remote store that is being read.

    Attributes:
      header: its decrypted header.
      read: reads and decrypts adjacent leaves.
      stored: its header as it is stored, encrypted or not.
      kept: the leaves that were read so far, as they are stored.
      since: when the read began, in nanoseconds since the epoch.
    """

    header: Header
    read: Read
    stored: Header
    kept: Mapping[str, np.ndarray]
    since: int

    def whole(self) -> dict[str, np.ndarray] | None:
        """Reads every leaf; None if one is damaged or cannot be read."""
        try:
            return self.read(list(self.header.leaves))
        except (StoreCorruptError, StoreIOError):
            return None

    @property
    def blob(self) -> Blob | None:
        """Content of the object as it is stored, to be written to the disk; None until every leaf was read."""
        if self.kept.keys() != self.stored.leaves.keys():
            return None
        arrays = {name: self.kept[name] for name in self.stored.leaves}
        return blob_of(self.stored, arrays)


class Resync(NamedTuple):
    """Result of `ChunkStore.resync`: objects that were sent, and objects here that were deleted elsewhere."""

    sent: int
    deleted: int


class RemoteReader:
    """Access to the objects of a remote store. Decrypts what it reads.

    Counts failures as `remote_errors`, reads that failed
    verification twice as `remote_damaged`, reads that passed the second time as `unsteady_reads`, and objects of
    another version of the format as `other_format`.
    """

    def __init__(self, remote: RemoteStore, disk: Disk):
        self.remote, self._counters, self._encryption = remote, disk.counters, disk.encryption
        self._tombstones = disk.writer.tombstones

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StoreIOError:
            self._counters.add("remote_errors")
            raise
        except StoreCorruptError:
            self._counters.add("remote_damaged")
            raise
        except StoreVersionError:
            self._counters.add("other_format")
            raise

    def _read_twice[T](self, read: Callable[[], T]) -> T:
        """Reads, and a second time if the first does not verify. Counts and raises errors of `read`."""
        with self._counted():
            try:
                return read()
            except StoreCorruptError:
                result = read()
        self._counters.add("unsteady_reads")
        return result

    def open(self, name: Name, *, strict: bool = False) -> PendingObject | None:
        """Opens an object, whose `read` raises StoreCorruptError and StoreIOError; None if it cannot be read.

        None also if the chunk was deleted here since the object was put.

        Args:
          strict: raises StoreIOError if the service fails.

        Raises:
          StoreKeyError: it is encrypted with another key.
        """
        found, since = None, time.time_ns()
        ignored = (StoreCorruptError, StoreVersionError) if strict else (StoreError,)
        with contextlib.suppress(*ignored), self._counted():
            found = self.remote.open(name, lambda: self._counters.add("unsteady_reads"))
        gone = 0 if self._tombstones is None else self._tombstones.of(name)
        if found is None or 0 < gone >= found.header.revision:
            return None
        kept: dict[str, np.ndarray] = {}

        def noted(names: Sequence[str]) -> dict[str, np.ndarray]:
            arrays = found.read(names)
            kept.update(arrays)
            return arrays

        try:
            opened = self._read_twice(lambda: self._encryption.opened(found.header, noted))
        except (StoreCorruptError, StoreVersionError, StoreIOError):
            return None
        if opened is None:
            self._counters.add("unsealed")
            return None
        header, plain = opened

        def read(names: Sequence[str]) -> dict[str, np.ndarray]:
            try:
                return self._read_twice(lambda: plain(names))
            except StoreCorruptError:
                kept.clear()  # so that no part of it is copied to the disk
                raise

        return PendingObject(header, read, found.header, kept, since)

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix; empty if the service fails."""
        with contextlib.suppress(StoreError), self._counted():
            return self.remote.paths(prefix)
        return []

    def collect(self, prefix: str) -> int:
        """Deletes what expired long enough ago. Returns the number of objects; those that cannot be read stay."""
        with contextlib.suppress(StoreError), self._counted():
            deleted, errors = self.remote.collect(prefix)
            for error in errors:
                with contextlib.suppress(StoreError), self._counted():
                    raise error
            return deleted
        return 0


class RemoteTier(RemoteReader):
    """Remote tier of one tenant's store: reads, and by the outbox everything that is put or deleted."""

    def __init__(self, remote: RemoteStore, tenant_disk: TenantDisk):
        super().__init__(remote, tenant_disk.disk)
        self._tenant_disk = tenant_disk
        root = tenant_disk.disk.root
        self.outbox = Outbox(root, tenant_disk.names.tenant_name, tenant_disk.tombstones)
        tenant_disk.disk.writer.outbox = self.outbox
        self.sender = RemoteSender(remote, root, self.outbox, self._counters, tenant_disk.budget.disk)

    def delete(self, name: Name) -> None:
        """Has the remote store delete a chunk that was deleted here, durably noted on return. Raises StoreError."""
        with typed_errors("store: delete"):
            self.outbox.add_deletion(name.chunk_key)
        self.sender.wake()

    def discard(self) -> None:
        """Empties the outbox, and waits for what is on its way to the remote store. Raises StoreError."""
        with typed_errors("store: delete a tenant"):
            self.outbox.clear()
        with contextlib.suppress(StoreError):  # it does not answer, so nothing is on its way
            self.sender.flush()

    def gauges(self) -> dict[str, float | int]:
        """Returns how much waits in the outbox, and for how long."""
        entries = self.outbox.entries()
        age = max((time.time() - entry.since for entry in entries), default=0.0)
        nbytes = sum(entry.nbytes for entry in entries)
        return {"outbox_objects": len(entries), "outbox_bytes": nbytes, "outbox_age_seconds": max(age, 0.0)}

    def resync(self) -> Resync:
        """Compares the tenant's objects here and in the remote store, and makes both have what they should.

        Sends what waits and what the remote store lacks, and deletes here what was deleted there. Raises StoreError.
        """
        disk, space = self._tenant_disk.disk, self._tenant_disk.names.space
        self.sender.flush()
        deleted = 0
        for chunk, revision in self.remote.deletions(f"{space}/").items():
            deleted += self._tenant_disk.delete_as_of(name_at(f"{chunk}.kv.safetensors"), revision)

        there, sent = set(self.remote.paths(f"{space}/")), 0
        disk.index.refresh(space)
        with typed_errors("store: resync"):
            for one in disk.index.below(space):
                if one.path not in there:
                    above, _, file = one.path.rpartition("/")
                    with contextlib.suppress(FileNotFoundError), locked_shards(disk.root, [above]) as shards:
                        self.outbox.add(shards[above], file)
                        sent += 1
            if sent:
                self.outbox.sync()
        self.sender.flush()
        return Resync(sent, deleted)
