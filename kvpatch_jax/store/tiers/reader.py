"""Looking an object up: in memory, among queued writes, on the disk, in the remote store, in this order."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from ...cache import Chunk
from ...errors import StoreCorruptError, StoreError, StoreVersionError
from ..disk.directory import NameState
from ..disk.tenant_disk import TenantDisk
from ..format.codec import chunk_of, content_in, memory_of
from ..format.naming import Name, part_of, unreduced_part
from ..format.objects import Blob, VerifiedObject, planned_header
from .device_placement import LayerStream, Placement, place_chunk, placement_key
from .memory import CANONICAL, CacheEntry, MemoryTier, Policy
from .remote_tier import PendingObject, RemoteTier
from .write_order import Write, WriteOrder
from .writer import Writer

type Build[T] = Callable[[Mapping[str, Any], Any], T]
"""Makes the value of an object's body and leaves."""

_NOT_A_CHUNK = (StoreError, KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What `LayerStream` raises for the header of a body that does not make a chunk."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """A look-up that may end in a copy of a remote object on the disk, and the state of its name before it began."""

    write: Write
    before: NameState
    remote: RemoteTier


class TieredReader:
    """Reads one tenant's objects and keeps copies in memory: host arrays, and chunks placed on devices.

    Args:
      writer: whose queued objects are read before the disk's.
      remote: read after the disk, which then keeps a copy; None: there is none.
      order: of the root's writes; no copy is kept of what was written or deleted since it was looked for.
      policy: of both memory tiers, whose budgets are the tenant's.
    """

    def __init__(
        self, tenant_disk: TenantDisk, writer: Writer, remote: RemoteTier | None, order: WriteOrder, policy: Policy
    ):
        self._tenant_disk, self._disk, self._writer, self._remote = tenant_disk, tenant_disk.disk, writer, remote
        self._order = order
        self._counters, budget = tenant_disk.counters, tenant_disk.budget
        common = (policy, tenant_disk.pinned, tenant_disk.counters, tenant_disk.clock)
        self.host: MemoryTier[Any] = MemoryTier("host", budget.host, *common)
        self.device: MemoryTier[Chunk] = MemoryTier("device", budget.device, *common)

    # ---------------------------------------------------------------------------------------------- memory

    def replaced(self, name: Name) -> None:
        """Drops the copies of an object that was written anew."""
        self.host.drop(name.path)
        if name.kind == "kv":
            self.device.drop_chunk(name.chunk_key)

    def drop_chunk(self, chunk: str) -> None:
        """Drops the copies of everything that belongs to a chunk, by its key."""
        self.host.drop_chunk(chunk)
        self.device.drop_chunk(chunk)

    def clear(self) -> None:
        """Drops all copies, and cached headers."""
        self.host.clear()
        self.device.clear()
        self._disk.forget()

    # --------------------------------------------------------------------------------------------- reading

    def load[T](self, name: Name, build: Build[T], rank: int) -> CacheEntry[T] | None:
        """Reads an object as `build` makes it, and keeps that in the host tier under `rank`; None: a miss.

        Raises:
          StoreKeyError: the object is encrypted under another key.
        """
        began, tier = time.perf_counter(), "none"
        if (blob := self._writer.waiting(name)) is not None:
            own = None
            if not self._has_expired(blob):
                own = CacheEntry(build(blob.body, blob.arrays), blob.nbytes, rank, name.chunk_key, blob.expires)
            self._answered("none" if own is None else "host", began)
            return own

        held: CacheEntry[T] | None = self._remembered(self.host, name.path, name)
        if held is not None:
            self._answered("host", began)
            return held

        with self._copying(name) as copy:
            found = self._disk.get(name)
            if found is not None:
                tier = "disk"
            elif copy is not None and (found := self._from_remote(copy)) is not None:
                tier = "remote"
        held = None if found is None else self._built(name, found, build, rank)
        if held is not None:
            self.host.put(name.path, held)
        self._answered("none" if held is None else tier, began)
        return held

    def load_placed(self, name: Name, placement: Placement) -> CacheEntry[Chunk] | None:
        """Reads a canonical onto devices, and keeps it in the device tier. Otherwise as `load`."""
        began, key = time.perf_counter(), (name.path, placement_key(placement))
        # What is queued is newer than what the disk has, and with it the device.
        held: CacheEntry[Chunk] | None = None if self._writer.has(name) else self._remembered(self.device, key, name)
        if held is not None:
            self._answered("device", began)
            return held
        host = self.load(name, chunk_of, CANONICAL)
        if host is None:
            return None
        placed = place_chunk(host.value, placement)
        held = dataclasses.replace(host, value=placed, nbytes=placed.nbytes)
        if host.version is not None:  # it is on the disk, which says for how long this may be served
            self.device.put(key, held)
        return held

    def stream(self, name: Name, placement: Placement | None) -> LayerStream | None:
        """Opens a canonical for reading layer by layer, queued, from the disk or the remote store; None: a miss."""
        stream, tier, held = None, "disk", contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            if (queued := self._writer.waiting(name)) is not None:
                tier, opening = "host", None
                if not self._has_expired(queued):
                    opening = planned_header(queued, name.file), queued.some
            else:
                copy = stack.enter_context(self._copying(name))
                opening = stack.enter_context(self._disk.reading(name))
                if opening is None and copy is not None and (arriving := copy.remote.open(name)) is not None:
                    opening, tier = (arriving.header, arriving.read), "remote"
                    stack.callback(self._keep, copy, arriving)
            with contextlib.suppress(*_NOT_A_CHUNK):
                stream = None if opening is None else LayerStream(*opening, placement, held)
            if stream is not None:
                held.push(stack.pop_all())
        self._counters.add("misses" if stream is None else f"{tier}_hits")
        return stream

    def names_beginning(self, prefix: Name) -> list[Name]:
        """Lists the objects whose files begin as `prefix.file` does: on the disk, queued, in the remote store.

        A listing that fails counts as empty.
        """
        try:
            paths = {entry.path for entry in self._disk.of_chunk(prefix)}
        except StoreError:
            self._counters.add("read_errors")
            paths = set()
        paths |= set(self._writer.waiting_paths(prefix.path))
        if self._remote is not None:
            paths |= set(self._remote.paths(prefix.path))
        files = sorted(path.rpartition("/")[2] for path in paths if path.startswith(prefix.path))
        return [dataclasses.replace(prefix, file=file) for file in files]

    def contents(self, canonical: Name) -> set[str | None]:
        """Reads the content digests that a chunk's canonicals of one lead state; None where one has none.

        Queued or on the disk, in any encoding. What cannot be read states nothing.
        """
        paths = set(self._writer.waiting_paths(f"{canonical.chunk_key}.kv"))
        with contextlib.suppress(StoreError):
            paths |= {entry.path for entry in self._disk.of_chunk(canonical)}
        whole = unreduced_part(part_of(canonical.path))
        paths = {path for path in paths if unreduced_part(part_of(path)) == whole}
        found = set[str | None]()
        for path in paths:
            name = dataclasses.replace(canonical, file=path.rpartition("/")[2])
            waiting = self._writer.waiting(name)  # which the disk will have
            if waiting is not None:
                found.add(content_in(waiting.body))
                continue
            with contextlib.suppress(StoreError), self._disk.reading(name) as opened:
                if opened is not None:
                    found.add(content_in(opened[0].body))
        return found

    # ---------------------------------------------------------------------------------------------- inside

    def _has_expired(self, blob: Blob) -> bool:
        return blob.expires is not None and self._tenant_disk.clock() >= blob.expires

    def _remembered(self, tier: MemoryTier[Any], key: Hashable, name: Name) -> CacheEntry[Any] | None:
        """A tier's copy, if the disk has the same version: another process may have replaced or deleted it."""
        held = tier.get(key)
        version = None if held is None else self._disk.is_current(name, held.version)
        if held is None or version is None:
            tier.drop(key)
            return None
        if version is not held.version:
            tier.note_version(key, held, version)
        return held

    def _answered(self, tier: str, began: float) -> None:
        self._counters.add("misses" if tier == "none" else f"{tier}_hits")
        self._counters.observe("get", tier, time.perf_counter() - began)

    def _built[T](self, name: Name, found: VerifiedObject, build: Build[T], rank: int) -> CacheEntry[T] | None:
        header = found.header
        try:
            value = build(header.body, found.arrays)
        except StoreVersionError:
            self._counters.add("newer")
            return None
        except (StoreCorruptError, KeyError) as error:  # every byte verified, and yet not what its name says
            if found.file is None:
                return None
            value = self._disk.build_again(name, found.file, error, lambda header, arrays: build(header.body, arrays))
            if value is None:
                return None
        nbytes = max(header.size, memory_of(value))  # a reduced encoding is held as wide as it was
        return CacheEntry(value, nbytes, rank, name.chunk_key, header.expires, found.version)

    @contextlib.contextmanager
    def _copying(self, name: Name) -> Iterator[_Copy | None]:
        """Begins looking for an object that the remote store may have; None where there is no such store."""
        if self._remote is None:
            yield None
            return
        write = self._order.copy(name)
        try:
            yield _Copy(write, self._disk.name_state(name), self._remote)
        finally:
            self._order.end(write)

    def _from_remote(self, copy: _Copy) -> VerifiedObject | None:
        arriving = copy.remote.open(copy.write.name)
        arrays = None if arriving is None else arriving.whole()
        if arriving is None or arrays is None:
            return None
        self._keep(copy, arriving)
        return VerifiedObject(arriving.header, arrays)

    def _keep(self, copy: _Copy, arriving: PendingObject) -> None:
        """Writes a remote object to the disk, if every leaf of it has come, there is room, and nothing newer is.

        What a later version of the library put there stays, too.
        """
        if (blob := arriving.blob) is None or self._disk.is_newer(copy.write.name):
            return
        with self._order.turn_to_copy(copy.write) as may:
            if may:
                try:
                    self._tenant_disk.copy(copy.write.name, blob, copy.before)
                except StoreError:
                    self._counters.add("promotion_errors")
