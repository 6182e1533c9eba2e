"""One tenant's disk, which `ChunkStore`, its libraries and its snapshots share below the memory tiers.

`Disk` handles files of all tenants; this module adds one tenant's names, encryption, pins and budgets.
"""

import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ...cache import Chunk
from ...errors import StoreBusyError, StoreClosedError, StoreError, StoreFullError
from ..format.buffers import Buffers
from ..format.encryption import AesGcm, Plain, decrypted
from ..format.expiry import Seconds
from ..format.naming import Name, ObjectNames
from ..format.objects import Blob, blob_of, file_size, read_leaves
from ..io.files import typed_errors
from ..io.locks import SECONDS
from ..io.per_root import shared
from .budget import Budget
from .counters import Counters
from .directory import files_of, reading, unlink_if
from .disk import Disk
from .eviction import collect, make_room
from .evictor import HIGH, SMALL, Evictor
from .index import Changes
from .key_check import check_key
from .object_writer import LinkSource, Only
from .outbox import Outbox
from .partial_exports import sweep_unfinished
from .revisions import CLOCK, GONE, RETENTION, Tombstones, revision_in, tombstones_in
from .root_config import names_secret
from .shard import locked_shards
from .shared_budget import note_budget, shared_budget


class TenantDisk:
    """Access to one tenant's objects on a root's disk. Thread-safe.

    Args:
      root, tenant, budget, secret, key, wipe, clock: as for `ChunkStore`.
      whole_root: whether `budget.disk` is the operator's for the whole root, whatever the tenants' budgets are.

    Attributes:
      disk: the root's files; reads decrypt with this tenant's key.
      names: names of the tenant's objects.
      budget: budgets of the tiers.
      counters: counts of this object's reads and writes.
      closed: whether `close` was called.

    Raises:
      StoreError: the root cannot be created or is not a store.
      InputError: the tenant is empty, the key too short, or the secret not the root's.
      StoreKeyError: the tenant's objects are encrypted with another key.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tenant: str = "default",
        *,
        budget: Budget | None = None,
        secret: bytes | None = None,
        key: bytes | None = None,
        wipe: bool | None = None,
        clock: Callable[[], float] = time.time,
        whole_root: bool = False,
    ):
        self.budget = Budget() if budget is None else budget
        self.counters = Counters()
        buffers = Buffers(wipe=key is not None if wipe is None else wipe)
        encryption = Plain() if key is None else AesGcm(key, tenant, buffers)
        self.disk = Disk(os.fspath(root), self.counters, buffers, clock, encryption, self.budget.quarantine)
        self.names = ObjectNames(tenant, names_secret(self.disk.root, secret))
        self.tombstones = self.disk.writer.tombstones = Tombstones(self.disk.root, self.names)
        check_key(self.disk.root, self.names.space, encryption.check)

        self._pins: collections.Counter[str] = collections.Counter()
        # The whole root's budget: the tenants' notes are read before anything is evicted for it.
        self._whole_root = whole_root
        self._shared: int | None = self.budget.disk if whole_root else None
        self._budget_noted = self._asked = whole_root
        self._indexed = False
        self.evictor = shared(Evictor, self.disk.root)
        self.closed = False

    def close(self) -> None:
        """Refuses further calls, drops cached headers and frees idle buffers."""
        self.closed = True
        self.disk.forget()
        self.evictor.leave(self.disk)
        self.disk.index.close()  # other stores of the root open it again
        self.disk.buffers.close()

    def expect_open(self) -> None:
        """Raises StoreClosedError after `close`."""
        if self.closed:
            raise StoreClosedError(f"store {self.disk.root}: got a call after close; expected an open store")

    def clock(self) -> float:
        """Returns seconds since the epoch."""
        return self.disk.clock()

    def exists(self, name: Name) -> bool:
        """Returns whether the disk has a file of that name, without opening it."""
        return os.path.exists(f"{self.disk.root}/{name.path}")

    # ------------------------------------------------------------------------------------------------ writing

    def sealed(self, name: Name, blob: Blob) -> Blob:
        """Encrypts an object if the tenant has a key; otherwise returns it unchanged."""
        return self.disk.encryption.sealed(blob, name.file)

    def begin(self, name: Name, *, again: bool = False) -> int:
        """Returns the revision of a write of a name that begins now, after all that is known of the name.

        Args:
          again: whether the index is asked for what was evicted too, because the first attempt did not take place.
        """
        return CLOCK.next(self.revision(name) if again else self.disk.revision(name))

    def revision(self, name: Name) -> int:
        """Returns the latest revision of a name, also of what was evicted since; 0: none."""
        return max(self.disk.revision(name), self.disk.index.evicted(name.path)[1])

    def put(self, items: Sequence[tuple[Name, Blob]], only: Only = "later") -> list[Name]:
        """Writes objects durably, encrypted if there is a key, and evicts others for them. Raises as `ChunkStore.put`.

        Returns:
          The names that were not written, because something later has replaced the write since it began.
        """
        if self.disk.encryption.check is not None:
            items = [(name, self.sealed(name, blob)) for name, blob in items]
        with self.room(lambda: sum(file_size(blob, name.file) for name, blob in items)):
            began = time.perf_counter()
            outdated = self.disk.put_group(items, only).outdated
        self.counters.observe("commit", "disk", time.perf_counter() - began)
        return outdated

    def keep(self, name: Name, blob: Blob, since: int) -> None:
        """Writes a copy of a stored object, encrypted as it is, whose read began at `since` (ns). Raises as `put`."""
        with self.room(lambda: file_size(blob, name.file)):
            result = self.disk.put_group([(name, blob)], "copy", since)
        self.counters.add("promotions", int(result.nbytes > 0))

    def delete_chunk(self, name: Name) -> tuple[bool, int]:
        """Deletes all objects of a chunk durably, and forbids writes that began before.

        Returns:
          Whether there were any, and the revision of the deletion; 0 if nothing can be stored.

        Raises:
          StoreReadOnlyError, StoreFullError, StoreIOError: not everything was deleted.
        """
        with typed_errors("store: delete"):
            if not os.path.isdir(f"{self.disk.root}/{name.folder}") and not os.access(self.disk.root, os.W_OK):
                return False, 0
            with locked_shards(self.disk.root, [name.folder], make=True, note=self.counters.add) as shards:
                shard = shards[name.folder]
                files = files_of(shard.fd, name)
                # What the index has no revision of is looked at: a clock may have been set back since it was put.
                rows = self.disk.index.known_in_folder(name.folder, f"{name.chunk}.")
                known = {os.path.basename(one.path): one.revision for one in rows}
                for file in files:
                    known[file] = known.get(file) or revision_in(shard.fd, file)
                changes = Changes(evicted=False)
                try:
                    # Canonicals come first: nobody may find one when other parts of the chunk are gone.
                    for file in sorted(files, key=lambda file: not file.startswith(f"{name.chunk}.kv")):
                        os.unlink(file, dir_fd=shard.fd)
                        changes.removed.append(f"{name.folder}/{file}")
                    # Last, because on a full disk there is room for it by now.
                    revision = CLOCK.next(max(known.values(), default=0))
                    self.tombstones.put(shard, name.chunk, revision)
                finally:
                    self.disk.index.record([shard], changes)
                os.fsync(shard.fd)
        return bool(files), revision

    def delete_as_of(self, name: Name, revision: int) -> int:
        """Deletes a chunk's objects up to a revision, that of its deletion on another machine. Returns their number.

        Raises:
          StoreError: not everything was deleted.
        """
        if self.tombstones.of(name) >= revision:
            return 0
        with (
            typed_errors("store: delete"),
            locked_shards(self.disk.root, [name.folder], make=True) as shards,
        ):
            shard, changes = shards[name.folder], Changes(evicted=False)
            for file in files_of(shard.fd, name):
                if revision_in(shard.fd, file) <= revision and unlink_if(shard, file):
                    changes.removed.append(f"{name.folder}/{file}")
            self.tombstones.put(shard, name.chunk, revision)
            self.disk.index.record([shard], changes)
            os.fsync(shard.fd)
        return len(changes.removed)

    def add(self, groups: Iterable[Sequence[tuple[Name, Blob | LinkSource]]], need: int, *, copy: bool = False) -> int:
        """Adds imported objects to the disk, all or none, except those whose name exists already.

        Args:
          groups: one commit each; blobs (encrypted here if there is a key), or object files.
          need: total bytes, for which others are evicted first.
          copy: copies files; otherwise they are linked if the file system supports it.

        Returns:
          The number of added objects.

        Raises:
          StoreError: as `ChunkStore.put`; nothing was added.
        """
        self.expect_open()
        # Before anything is evicted: another process may have begun to encrypt since this object was made.
        check_key(self.disk.root, self.names.space, self.disk.encryption.check)
        self.make_room(lambda: need)
        coming = ([(name, self._revived(name, item)) for name, item in group] for group in groups)
        return self.disk.writer.add_all(coming, copy)

    def _revived(self, name: Name, item: Blob | LinkSource) -> Blob | LinkSource:
        """Returns an imported object as it is stored. One that was deleted since it was written gets a new revision.

        An import is the owner's request, so it brings deleted objects back.
        """
        if isinstance(item, LinkSource):
            with reading(item.root, item.path) as (_, header):
                item = item._replace(revision=header.revision)
        gone = 0 if name.kind == "entry" else self.tombstones.of(name)
        if gone >= item.revision and gone:
            if isinstance(item, LinkSource):
                with reading(item.root, item.path) as (fd, header):
                    arrays = read_leaves(fd, header, list(header.leaves), self.disk.buffers)
                    item = blob_of(*decrypted(header, arrays, self.disk.encryption))
            item = dataclasses.replace(item, revision=CLOCK.next(gone))
        return self.sealed(name, item) if isinstance(item, Blob) else item

    def make_room(self, size: Callable[[], int]) -> None:
        """Evicts for bytes that are written later, as `room`."""
        with self.room(size):
            pass

    @contextlib.contextmanager
    def room(self, size: Callable[[], int]) -> Iterator[None]:
        """Context in which `size` more bytes may be written within the budgets, whatever others write meanwhile.

        Evicts if they exceed one; if they come near it, a thread does.

        Raises:
          StoreFullError: there is no room, and others that write will not give any within seconds.
        """
        if not self._budget_noted:
            note_budget(self.disk.root, self.names.space, self.budget.disk)
            self._budget_noted = True
        bounds = self._bounds()
        if not bounds:
            yield
            return
        if not self._indexed:
            self.disk.index.refresh()
            self._indexed = True

        need, until = size(), time.monotonic() + SECONDS
        reservation = self.disk.index.reserve(self.names.tenant_name, need)
        try:
            while True:
                try:
                    self._evict_for(need, bounds, reservation)
                    break
                except StoreFullError:  # perhaps because of what others write at this moment
                    claims = [self.disk.index.claimed(below, reservation) for below in bounds]
                    held = [self.disk.index.usage(below)[1] for below in bounds]
                    if claims == held or time.monotonic() >= until:
                        raise
                time.sleep(0.005)
                bounds = self._bounds()
            yield
        finally:
            self.disk.index.release(reservation)

    def _evict_for(self, need: int, bounds: Mapping[str, int], reservation: int) -> None:
        """Evicts so that a reservation fits within each budget. Raises StoreFullError."""
        for below, budget in bounds.items():
            used = self.disk.index.claimed(below, reservation)
            if used + need > budget:
                if below == "obj" and not self._whole_root:  # others' may have changed
                    self._shared = shared_budget(self.disk.root, self.names.space, self.budget.disk or 0)
                    if self._shared is None or self._shared > budget:
                        self._evict_for(need, self._bounds(), reservation)
                        return
                more = {"below": below, "counted": self.names.space, "reservation": reservation}
                make_room(self.disk, budget, need, self.pinned, **more)
            if used + need > HIGH * budget and need <= budget // SMALL:
                self.evictor.wake(self.disk, below, budget, self.pinned, self.names.space)

    def _bounds(self) -> dict[str, int]:
        """Returns the budgets by folder: the tenant's and the root's, as far as there are any."""
        if self._shared is None and self.budget.disk is not None and not self._asked:
            self._shared = shared_budget(self.disk.root, self.names.space, self.budget.disk)
            self._asked = True
        own, shared = [self.budget.tenant], self._shared
        if shared is None or shared != self.budget.disk:  # else the root's bound is the tenant's too
            own.append(self.budget.disk)
        bounds = [budget for budget in own if budget is not None]
        return ({self.names.space: min(bounds)} if bounds else {}) | ({} if shared is None else {"obj": shared})

    # ------------------------------------------------------------------------------------------------ keeping

    @contextlib.contextmanager
    def pin(self, chunk: str) -> Iterator[None]:
        """Keeps a chunk, by its key (`Name.chunk_key`), from eviction by this object. Pins add up."""
        self._pins[chunk] += 1
        try:
            yield
        finally:
            self._pins[chunk] -= 1
            if not self._pins[chunk]:
                del self._pins[chunk]

    def pinned(self, chunk: str) -> bool:
        """Returns whether a chunk is pinned, by its key."""
        return chunk in self._pins

    def collect(self) -> int:
        """Deletes expired objects, files of dead writers, unfinished snapshots and old quarantined files.

        Returns:
          The number of expired objects and files of dead writers.
        """
        self.forget_usage()
        gone = collect(self.disk, self.names.space)
        self._forget_deletions()
        self.disk.collect_quarantine(self.names.tenant_name)
        sweep_unfinished(self.disk.root, self.names.tenant_name)
        return gone

    def _forget_deletions(self) -> None:
        """Removes tombstones for which nothing older can come any more: old ones, of which the outbox has nothing."""
        with typed_errors("store: collect"):
            waiting = {entry.path for entry in Outbox(self.disk.root, self.names.tenant_name).entries()}
        limit = time.time_ns() - int(RETENTION * 1e9)
        for path in self.disk.index.folders(self.names.space):
            with (
                typed_errors("store: collect"),
                contextlib.suppress(FileNotFoundError, NotADirectoryError, StoreBusyError),
                locked_shards(self.disk.root, [path], seconds=0.0) as shards,
            ):
                shard = shards[path]
                for file, since in tombstones_in(shard.fd):
                    old = since < limit and f"{path}/{file.removesuffix(GONE)}" not in waiting
                    if old or not file.endswith(GONE):  # unfinished: its writer died, for a living one holds the lock
                        os.unlink(file, dir_fd=shard.fd)
                self.disk.index.record([shard], Changes())

    def gauges(self) -> dict[str, float | int]:
        """Returns what the tenant has on the disk as far as the index knows, and the age of the oldest use."""
        gauges: dict[str, float | int] = {}
        with contextlib.suppress(StoreError):
            objects, nbytes = self.disk.index.usage(self.names.space)
            oldest = self.disk.index.oldest(self.names.space)
            gauges = {"disk_objects": objects, "disk_bytes": nbytes}
            if oldest is not None:
                gauges["oldest_use_seconds"] = max(time.time() - oldest, 0.0)
        return gauges

    def forget_usage(self) -> None:
        """Makes the next write look whether others have changed the disk."""
        self._indexed = self._asked = False


@runtime_checkable
class TenantStore(Protocol):
    """Part of `ChunkStore` that libraries and snapshots use, so that they need not import it."""

    tenant_disk: TenantDisk

    def put(self, chunk: Chunk, *, ttl: Seconds | None = None) -> None:
        """Stores a canonical durably."""
        ...

    def delete(self, id: str, backbone: str) -> bool:
        """Deletes a chunk in every tier."""
        ...

    def pin(self, id: str, backbone: str) -> contextlib.AbstractContextManager[None]:
        """Keeps a chunk from eviction."""
        ...

    def flush(self) -> None:
        """Waits for asynchronous puts."""
        ...
