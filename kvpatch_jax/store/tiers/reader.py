"""Lookup of objects: in memory, among queued writes, on the disk and in the remote store, in this order."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ...cache import Chunk
from ...errors import StoreCorruptError, StoreError
from ..disk.tenant_disk import TenantDisk
from ..format.codec import canonical_of, digest_in
from ..format.host_memory import memory_of
from ..format.naming import Name, part_of, unreduced_part
from ..format.objects import Blob, VerifiedObject, Version, planned_header
from .device_placement import LayerStream, Placement, place_chunk
from .memory import CANONICAL, CacheEntry, MemoryTier
from .remote_tier import PendingObject, RemoteTier
from .shared_host_tier import SharedHostTier, TenantHostTier
from .writer import Writer

type Build[T] = Callable[[Mapping[str, Any], Any], T]
"""Decodes the value of an object from its body and its leaves."""

_NOT_A_CHUNK = (StoreError, KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Exceptions of `LayerStream` for a header whose body describes no chunk."""


class TieredReader:
    """Reads one tenant's objects and caches them in memory.

    Args:
      tenant_disk: the disk, the tenant's budgets and its counters.
      writer: its queued objects are read before the disk's.
      remote: read after the disk, which then keeps a copy; None: no remote store.
      host_tier: host tier that it shares with the readers of other tenants, in place of one of its own.

    Raises:
      InputError: the host tier is of another root.
    """

    def __init__(
        self,
        tenant_disk: TenantDisk,
        writer: Writer,
        remote: RemoteTier | None,
        host_tier: SharedHostTier | None = None,
    ):
        self._tenant_disk, self._disk, self._writer, self._remote = tenant_disk, tenant_disk.disk, writer, remote
        self._counters, budget = tenant_disk.counters, tenant_disk.budget
        common = (tenant_disk.pinned, tenant_disk.counters, tenant_disk.clock)
        self.host: MemoryTier[Any] | TenantHostTier = MemoryTier(budget.host, *common)
        if host_tier is not None:
            root, space = tenant_disk.disk.root, tenant_disk.names.space
            self.host = host_tier.of_tenant(root, space, tenant_disk.pinned, tenant_disk.counters)
        # Idle buffers take what the host tier leaves of its budget. Weakly: buffers in use, which the tier holds, keep
        # their pool alive, and a store that was dropped without closing would never be freed.
        host = weakref.ref(self.host)
        self._disk.buffers.bound_by(lambda: 0 if (tier := host()) is None else tier.room)

    # ---------------------------------------------------------------------------------------------- memory

    def replaced(self, name: Name) -> None:
        """Drops the copies of an object that was written again."""
        self.host.drop(name.path)

    def drop_chunk(self, chunk: str) -> None:
        """Drops the copies of all objects of a chunk, by its key."""
        self.host.drop_chunk(chunk)

    def clear(self) -> None:
        """Drops all copies, and cached headers."""
        self.host.clear()
        self._disk.forget()

    # --------------------------------------------------------------------------------------------- reading

    def load[T](self, name: Name, build: Build[T], rank: int, *, far: bool = True) -> CacheEntry[T] | None:
        """Reads an object and decodes it with `build`; keeps the value in the host tier under `rank`.

        Args:
          far: whether the remote store is asked if there is none here.

        Returns:
          The entry; None if there is no such object, or it has expired or is damaged.

        Raises:
          StoreKeyError: the object is encrypted with another key.
        """
        began = time.perf_counter()

        # A queued write is newer than every copy.
        blob = self._writer.waiting(name) if name.path in self._writer.newest else None
        if blob is not None:
            if self._has_expired(blob):
                self._count_read("none", began)
                return None
            value = build(blob.body, blob.arrays)
            self._count_read("host", began)
            return CacheEntry(value, blob.nbytes, rank, name.chunk_key, blob.expires)

        entry: CacheEntry[T] | None = self._cached(self.host, name.path, name)
        if entry is not None:
            self._count_read("host", began)
            return entry

        tier, found = "disk", self._disk.get(name)
        if found is None and self._remote is not None and self._remote.outbox.bring_back(name):
            found = self._disk.get(name)  # the remote store may have an earlier one
        if found is None and self._remote is not None and far:
            tier, pending = "remote", self._remote.open(name)
            arrays = None if pending is None else pending.whole()
            if pending is not None and arrays is not None:
                self._keep(name, pending)
                found = VerifiedObject(pending.header, arrays)

        entry = None if found is None else self._decoded(name, found, build, rank)
        if entry is not None and self.host.put(name.path, entry):
            self._disk.buffers.trim()
        self._count_read("none" if entry is None else tier, began)
        return entry

    def load_remote[T](self, name: Name, build: Build[T], *, strict: bool = False) -> tuple[T | None, int]:
        """Reads the remote store's version of an object, which may be another one than is here, and keeps no copy.

        Args:
          strict: raises StoreIOError if the service fails.

        Returns:
          The value, None as `load`, and its revision; 0 if there is none, or no remote store.

        Raises:
          StoreKeyError: as `load`.
        """
        pending = None if self._remote is None else self._remote.open(name, strict=strict)
        if pending is None:
            return None, 0
        value, arrays = None, pending.whole()
        with contextlib.suppress(StoreCorruptError, KeyError):
            value = None if arrays is None else build(pending.header.body, arrays)
        return value, pending.header.revision

    def load_placed(self, name: Name, placement: Placement) -> CacheEntry[Chunk] | None:
        """Reads a canonical onto devices. Otherwise as `load`."""
        host = self.load(name, canonical_of(name.part), CANONICAL)
        return None if host is None else dataclasses.replace(host, value=place_chunk(host.value, placement))

    def stream(self, name: Name, placement: Placement | None) -> LayerStream | None:
        """Opens a canonical for reading layer by layer, from the queue, the disk or the remote store; None: a miss."""
        # What was opened stays open as long as the stream, or is closed here if there is no stream.
        stream, tier, owned = None, "disk", contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            queued = self._writer.waiting(name)
            if queued is not None:
                tier, opened = "host", None
                if not self._has_expired(queued):
                    opened = planned_header(queued, name.file), queued.some
            else:
                opened = stack.enter_context(self._disk.reading(name))
                if opened is None and self._remote is not None and self._remote.outbox.bring_back(name):
                    opened = stack.enter_context(self._disk.reading(name))
                pending = None if opened is not None or self._remote is None else self._remote.open(name)
                if pending is not None:
                    opened, tier = (pending.header, pending.read), "remote"
                    stack.callback(self._keep, name, pending)
            with contextlib.suppress(*_NOT_A_CHUNK):
                stream = None if opened is None else LayerStream(*opened, placement, owned)
            if stream is not None:
                owned.push(stack.pop_all())

        self._counters.add("misses" if stream is None else f"{tier}_hits")
        return stream

    def names_beginning(self, prefix: Name) -> list[Name]:
        """Lists the objects whose file names begin with `prefix.file`: on the disk, queued, or in the remote store.

        A listing that fails counts as empty.
        """
        try:
            part = prefix.file.partition(".")[2]
            paths = {entry.path for entry in self._disk.of_chunk(prefix, part)}
        except StoreError:
            self._counters.add("read_errors")
            paths = set()
        paths |= set(self._writer.waiting_paths(prefix.path))
        if self._remote is not None:
            paths |= set(self._remote.paths(prefix.path))
        files = sorted(path.rpartition("/")[2] for path in paths if path.startswith(prefix.path))
        return [dataclasses.replace(prefix, file=file) for file in files]

    def contents(self, canonical: Name) -> set[str | None]:
        """Returns the content digests in the headers of a chunk's canonicals with one lead; None for one without.

        Includes queued objects and every encoding. Unreadable objects are skipped.
        """
        paths = set(self._writer.waiting_paths(f"{canonical.chunk_key}.kv"))
        with contextlib.suppress(StoreError):
            paths |= {entry.path for entry in self._disk.of_chunk(canonical, "kv")}

        unreduced = unreduced_part(canonical.part)

        digests = set[str | None]()
        for path in paths:
            if unreduced_part(part_of(path)) != unreduced:
                continue
            name = dataclasses.replace(canonical, file=path.rpartition("/")[2])
            queued = self._writer.waiting(name)
            if queued is not None:  # it will replace the disk's
                digests.add(digest_in(queued.body, "content"))
                continue
            with contextlib.suppress(StoreError), self._disk.reading(name) as opened:
                if opened is not None:
                    digests.add(digest_in(opened[0].body, "content"))
        return digests

    # ---------------------------------------------------------------------------------------------- inside

    def _has_expired(self, blob: Blob) -> bool:
        return blob.expires is not None and self._tenant_disk.clock() >= blob.expires

    def _cached(self, tier: MemoryTier[Any] | TenantHostTier, key: Hashable, name: Name) -> CacheEntry[Any] | None:
        """Returns a tier's copy if the disk still has that version: another process may have replaced or deleted it."""
        entry = tier.get(key)
        if entry is None:
            return None
        version = self._disk.is_current(name, entry.version)
        if version is None:
            tier.drop(key)
            return None
        if version is not entry.version:
            tier.note_version(key, entry, version)
        return entry

    def _count_read(self, tier: str, began: float) -> None:
        count = "misses" if tier == "none" else f"{tier}_hits"
        self._counters.observe("get", tier, time.perf_counter() - began, count)

    def _decoded[T](self, name: Name, found: VerifiedObject, build: Build[T], rank: int) -> CacheEntry[T] | None:
        """Decodes an object; None if its body is invalid."""
        header = found.header
        try:
            value = build(header.body, found.arrays)
        except (StoreCorruptError, KeyError) as error:  # every byte was verified, and yet the body is invalid
            if found.file is None:
                return None
            value = self._disk.build_again(name, found.file, error, lambda header, arrays: build(header.body, arrays))
            if value is None:
                return None

        nbytes = max(header.size, memory_of(value))  # a dtype's encoding takes its original width in memory
        return CacheEntry(value, nbytes, rank, name.chunk_key, header.expires, Version(found.file, header.crc))

    def _keep(self, name: Name, pending: PendingObject) -> None:
        """Copies a remote object to the disk, if it was read whole, there is room, and nothing later has its name."""
        if pending.blob is not None:
            with contextlib.suppress(StoreError):  # the read itself has succeeded
                self._tenant_disk.keep(name, pending.blob, pending.since)
                return
            self._counters.add("promotion_errors")
