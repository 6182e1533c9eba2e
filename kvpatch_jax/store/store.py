"""The chunk store: one tenant's canonicals, patches and encoder outputs, over device, host, disk and remote tiers."""

import collections
import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..chunk import AnyArray, Chunk
from ..errors import InputError, StoreClosedError, StoreCorruptError, StoreError
from ..patch_metadata import Patch, PatchMetadata
from .disk.budget import Budget as Budget
from .disk.disk import Disk, Elsewhere, Found
from .disk.eviction import collect, make_room
from .disk.quarantine import purge
from .disk.root_config import check_key, secret_of
from .disk.unfinished import sweep_unfinished
from .format.buffers import Buffers
from .format.codec import (
    chunk_blob,
    chunk_of,
    content_in,
    encoder_blob,
    memory_of,
    patch_blob,
    patch_of,
    patch_parts,
    with_encoder,
)
from .format.encryption import AesGcm, Plain
from .format.expiry import Seconds, checked_ttl, expires_at
from .format.naming import Encoding, Name, Names, Served
from .format.objects import Blob, file_size
from .io.counters import Counters
from .io.thread_pool import tell_of_forks
from .libraries.version_floor import Floors
from .metrics import Statistics
from .tenants import Deleted, delete_tenant
from .tiers.memory import CANONICAL, DERIVED, ENCODER, CacheEntry, MemoryTier, Policy
from .tiers.placement import LayerStream, Placement, place_chunk, placement_key
from .tiers.remote import Remote
from .tiers.remote_tier import Arriving, Beyond
from .tiers.writer import Ack, Writer, joined

type Build[T] = Callable[[Mapping[str, Any], Any], T]


_NOT_A_CHUNK = (StoreError, KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What making a chunk of a body raises that does not make one."""


class ChunkStore:
    """Content-addressed objects of one tenant. Any number of threads, processes and tenants may share a root.

    What `put` acknowledged survives a crash, until it is evicted, expires or is deleted. What `get` returns was
    verified when it was read; a damaged object is moved to quarantine and is a miss. Memory tiers hold copies of what
    the disk holds, and nothing that it no longer does.

    Args:
      root: directory; made where it is not there.
      tenant: whose objects; other tenants' have other names, which cannot be told without the store's secret.
      budget: bytes per tier.
      ttl: seconds that objects live unless `put` says otherwise; None keeps them.
      policy: who stays in memory, "lru" or "slru". The disk is LRU.
      secret: of the names; by default one that is made with the store and kept in it (readable by its owner only).
      remote: where objects are also put, and looked for when the disk has none.
      key: encrypts what is put, on the disk and beyond, and reads nothing that is not: at least 32 bytes, from which
        each tenant's key is derived. Never written anywhere. Needs the extra `encryption`.
      wipe: whether host buffers are overwritten when they are let go; None: where there is a key.
      queue: bytes that asynchronous puts may hold at a time.
      clock: seconds since the epoch.

    Raises:
      StoreError: the root cannot be made or is not a store. InputError: an empty tenant, a short key, or a ttl that is
        no finite number above 0 (so do puts).
      StoreKeyError: the tenant's objects are encrypted and `key` is not theirs.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tenant: str = "default",
        budget: Budget | None = None,
        ttl: Seconds | None = None,
        policy: Policy = "lru",
        secret: bytes | None = None,
        remote: Remote | None = None,
        key: bytes | None = None,
        wipe: bool | None = None,
        queue: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ):
        self.budget = Budget() if budget is None else budget
        self.counters, self.clock = Counters(), clock
        self._ttl = checked_ttl(ttl, "store")
        buffers = Buffers(wipe=key is not None if wipe is None else wipe)
        self._seal = Plain() if key is None else AesGcm(key, tenant, buffers)
        self._remote = None if remote is None else Beyond(remote, self.counters, self._seal)
        self.disk = Disk(os.fspath(root), self.counters, buffers, clock, self._seal, self.budget.quarantine)
        self._names = Names(tenant, secret_of(self.disk.root) if secret is None else secret)
        check_key(self.disk.root, self._names.space, self._seal.check)
        self._pins: collections.Counter[str] = collections.Counter()
        tier = functools.partial(MemoryTier, policy=policy, pinned=self._pinned, counters=self.counters, clock=clock)
        self._host: MemoryTier[Any] = tier("host", self.budget.host)
        self._device: MemoryTier[Chunk] = tier("device", self.budget.device)
        self._used: dict[str, int] = {}
        self._fresh: collections.Counter[str] = collections.Counter()
        self._room = threading.Lock()
        tell_of_forks(self)
        self._closed = False
        self._writer = Writer(self._commit, queue)

    def forked(self) -> None:
        """Lets nobody who is not there hold the lock, in a forked process."""
        self._room = threading.Lock()

    # ----------------------------------------------------------------------------------------------- chunks

    def put(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: Seconds | None = None) -> None:
        """Stores a canonical, durably when this returns; its encoder output as an object of its own.

        Args:
          encoding: a smaller dtype to store kv in: its own object beside the unreduced one. int8 and float8 have one
            float32 scale per layer, head and feature.
          ttl: seconds it lives.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: nothing is acknowledged. DtypeError: a dtype that objects
          do not hold. StoreClosedError.
        """
        self._open()
        with self.counters.timed("put", "disk"):
            self._commit([(name, make()) for name, make, _ in self._jobs_of(chunk, encoding, ttl)])

    def put_async(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: Seconds | None = None) -> Ack:
        """As `put`, behind the caller's back; the future is done when the chunk is durable, or holds the error.

        The arrays must not change until then. Waits while the queue is full. `flush` and `close` raise what failed.
        """
        self._open()
        began = time.perf_counter()
        acks = [self._writer.add(*job) for job in self._jobs_of(chunk, encoding, ttl)]
        return self._timed(acks[-1] if len(acks) == 1 else joined(acks), began)

    def get(
        self,
        id: str,
        backbone: str,
        *,
        encoding: Encoding | None = None,
        placement: Placement | None = None,
        encoder: bool = False,
    ) -> Chunk | None:
        """A canonical, every byte verified when it was read from the disk; None where there is none.

        Args:
          backbone: the fingerprint of the model that will use it.
          encoding: the object to read; its numbers come back in the dtype they had.
          placement: a sharding or device for kv [L, T, K, H], or one per channel; by default read-only host arrays.
          encoder: whether to read the encoder output too, if it is there.

        Raises:
          StoreKeyError: the object is encrypted under another key. It is left as it is.
        """
        self._open()
        name = self._names.canonical(backbone, id, encoding)
        held = self._load(name, chunk_of, CANONICAL) if placement is None else self._from_device(name, placement)
        if held is None or not encoder:
            return None if held is None else held.value
        return with_encoder(held.value, self.get_encoder(id, backbone))

    def stream(
        self, id: str, backbone: str, *, encoding: Encoding | None = None, placement: Placement | None = None
    ) -> LayerStream | None:
        """A canonical layer by layer, so that layer 0 is used while later ones are read; None: a miss.

        From the disk, or from beyond: then the disk has it too when all of it was read.

        Args:
          placement: a sharding or device for one layer's [T, K, H], or one per channel.

        Raises:
          StoreKeyError: as `get`.
        """
        self._open()
        name = self._names.canonical(backbone, id, encoding)
        stream, tier, held = None, "disk", contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            opening = stack.enter_context(self.disk.reading(name))
            if opening is None and (arriving := self._arriving(name)) is not None:
                opening, tier = (arriving.header, arriving.read), "remote"
                stack.callback(self._promote, name, arriving)
            with contextlib.suppress(*_NOT_A_CHUNK):
                stream = None if opening is None else LayerStream(*opening, placement, held)
            if stream is not None:
                held.push(stack.pop_all())
        self.counters.add("misses" if stream is None else f"{tier}_hits")
        return stream

    def contains(self, id: str, backbone: str, *, encoding: Encoding | None = None) -> bool:
        """Whether the disk has an object of that name, or will. It is not read, and so may yet turn out a miss."""
        name = self._names.canonical(backbone, id, encoding)
        return self._writer.has(name) or os.path.exists(f"{self.disk.root}/{name.path}")

    def delete(self, id: str, backbone: str) -> bool:
        """Deletes a chunk with all its encodings, patches and encoder output, in quarantine too. Whether there was any.

        Raises:
          StoreReadOnlyError, StoreIOError.
        """
        self._open()
        name = self._names.canonical(backbone, id)
        self._writer.settle(f"{name.folder}/{name.chunk}.")  # or what waits would come back
        self._host.drop_chunk(_chunk_key(name))
        self._device.drop_chunk(_chunk_key(name))
        try:
            if self._remote is not None:  # first, so that nothing comes back from there
                self._remote.delete(f"{name.folder}/{name.chunk}.")
        finally:
            # Canonicals first: whoever looks for one must not find it after part of the chunk is gone.
            entries = sorted(self.disk.of_chunk(name), key=lambda entry: entry.part.partition(".")[0] != "kv")
            gone = any([self.disk.delete(entry.path) for entry in entries])
            purge(self.disk.root, name.tenant, name.chunk)
        return gone

    # -------------------------------------------------------------------------------- encoder outputs, patches

    def put_encoder(self, id: str, backbone: str, output: AnyArray, *, ttl: Seconds | None = None) -> None:
        """Stores a tower's output, [T, D] or any shape, under a chunk's id or an `encoder_id`. Raises as `put`."""
        self._open()
        with self.counters.timed("put", "disk"):
            self._commit([(self._names.encoder(backbone, id), encoder_blob(id, backbone, output, self._expiry(ttl)))])

    def get_encoder(self, id: str, backbone: str) -> np.ndarray | None:
        """A tower's output, a read-only host array; None where there is none."""
        self._open()
        held = self._load(self._names.encoder(backbone, id), lambda body, arrays: arrays["encoder"], ENCODER)
        return None if held is None else held.value

    def put_patches(self, patches: Sequence[Patch], *, ttl: Seconds | None = None) -> None:
        """Stores patches in one commit, durable when this returns. Raises as `put`; then none is acknowledged."""
        self._open()
        with self.counters.timed("put", "disk"):
            self._commit([(self._names.patch(patch), patch_blob(patch, self._expiry(ttl))) for patch in patches])

    def put_patch_async(self, patch: Patch, *, ttl: Seconds | None = None) -> Ack:
        """As `put_async`: patches that come close together are committed together."""
        self._open()
        make, began = functools.partial(patch_blob, patch, self._expiry(ttl)), time.perf_counter()
        return self._timed(self._writer.add(self._names.patch(patch), make, patch.nbytes), began)

    def get_patches(self, served: Served | PatchMetadata) -> list[Patch]:
        """Every stored patch that serves this chunk, antecedent, base and frame, largest first.

        Whatever their ranks, layers and dtypes; an orbit patch for any order of its antecedent. Not those of another
        content than the chunk has: where `served` does not say which, than its canonicals, stored or on their way.
        Factors are on the default device.
        """
        self._open()
        loaded = [self._load(name, patch_parts, DERIVED) for name in self._beginning(self._names.patches(served))]
        found = [held.value for held in loaded if held is not None]
        if any(metadata.content is not None for _, metadata in found):
            wanted = self._contents(served)
            if wanted and None not in wanted:
                found = [(own, metadata) for own, metadata in found if metadata.content in (None, *wanted)]
        return sorted(map(patch_of, found), key=lambda patch: -patch.nbytes)

    def _contents(self, served: Served | PatchMetadata) -> set[str | None]:
        """What the chunk may show: by who asks, else by its canonicals (`_shown_by`). None where one does not say.

        What cannot be read says nothing: a patch that is served all the same is checked where it is applied.
        """
        if served.content is not None:
            return {served.content}
        canonical = self._names.canonical(served.backbone, served.chunk)
        paths = set(self._writer.waiting_paths(f"{_chunk_key(canonical)}.kv"))
        with contextlib.suppress(StoreError):
            paths |= {entry.path for entry in self.disk.of_chunk(canonical) if entry.part.partition(".")[0] == "kv"}
        return set[str | None]().union(*(self._shown_by(canonical, path) for path in paths))

    def _shown_by(self, canonical: Name, path: str) -> set[str | None]:
        """The content that one of a chunk's canonicals tells of; the one on its way to the disk before the disk's."""
        own = dataclasses.replace(canonical, file=path.rpartition("/")[2])
        waiting = self._writer.waiting(own)
        if waiting is not None:
            return {content_in(waiting.body)}
        with contextlib.suppress(StoreError), self.disk.reading(own) as opened:
            return set() if opened is None else {content_in(opened[0].body)}
        return set()

    def _beginning(self, prefix: Name) -> list[Name]:
        """The objects on the disk or beyond it whose files begin as `prefix.file` does; a failing listing is a miss."""
        try:
            paths = {entry.path for entry in self.disk.of_chunk(prefix)}
        except StoreError:
            self.counters.add("read_errors")
            paths = set()
        paths |= set(self._writer.waiting_paths(prefix.path))
        if self._remote is not None:
            paths |= set(self._remote.paths(prefix.path))
        return [
            dataclasses.replace(prefix, file=path.rpartition("/")[2])
            for path in sorted(paths)
            if path.startswith(prefix.path)
        ]

    # ------------------------------------------------------------------------------- snapshots, checkpoints

    def add(self, groups: Iterable[Sequence[tuple[Name, Blob | Elsewhere]]], need: int, *, copy: bool = False) -> int:
        """Puts objects that come from elsewhere on the disk alone, where there is none of that name: all or none.

        Args:
          groups: each one commit; blobs (encrypted where there is a key), or files that are objects already.
          need: bytes in all, for which room is made first.
          copy: files are copied; else linked where that can be.

        Returns:
          How many were added.

        Raises:
          As `put`; nothing was added then.
        """
        self._open()
        self._note_key()
        self._make_room(lambda: need)
        sealed = lambda name, item: self._seal.sealed(item, name.file) if isinstance(item, Blob) else item
        floors, noted = Floors(self.disk), dict[str, int]()

        def coming() -> Iterator[list[tuple[Name, Blob | Elsewhere]]]:
            for group in groups:
                floors.admit(group, noted)
                yield [(name, sealed(name, item)) for name, item in group]

        added = self.disk.add_all(coming(), copy)
        with self._room:
            self._fresh.update(dict.fromkeys(("obj", self._names.space), need))
        return added

    # ----------------------------------------------------------------------------------------------- keeping

    @contextlib.contextmanager
    def pin(self, id: str, backbone: str) -> Iterator[None]:
        """Keeps a chunk, with all that belongs to it, from eviction by this store object. Pins of one chunk add up.

        Not from expiry, `delete`, or another process's eviction: its reader then has a miss.
        """
        key = _chunk_key(self._names.canonical(backbone, id))
        self._pins[key] += 1
        try:
            yield
        finally:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def collect(self) -> int:
        """Deletes what of this tenant expired, what its dead writers left (snapshots that were not finished too), and
        what has been in its quarantine for too long. How many objects expired or were left. Raises StoreError.

        Beyond the disk too, by a look at each object there; what the remote store fails to do is left there.
        """
        self._open()
        self._used.clear()
        gone = collect(self.disk, self._names.space)
        self.disk.collect_quarantine(self._names.tenant_name)
        sweep_unfinished(self.disk.root, self._names.tenant_name)
        return gone + (0 if self._remote is None else self._remote.collect(f"{self._names.space}/"))

    def delete_tenant(self) -> Deleted:
        """Deletes everything of this tenant, in every tier, quarantine and the remote store; see `tenants`.

        Queued puts are written first. The store may be used on. Other store objects of the tenant let go of their
        memory in their own time, and serve nothing of it. Raises StoreError, and what `flush` raises, when done.
        """
        self._open()
        try:
            self._writer.flush()
        finally:
            self._let_go()
            self._used.clear()
            deleted = delete_tenant(self.disk, self._names, None if self._remote is None else self._remote.remote)
        return deleted

    def statistics(self) -> Statistics:
        """Counts, latencies, and bytes held: of this store object alone. `prometheus_text` makes a page of them."""
        pool = self.disk.buffers.idle_bytes
        held = {"device": self._device.nbytes, "host": self._host.nbytes, "pool": pool}
        return Statistics(self.counters.read(), self.counters.latencies(), held)

    def flush(self) -> None:
        """Waits for asynchronous puts. Raises the first that failed since the last `flush`, the others in its notes."""
        self._writer.flush()

    def close(self) -> None:
        """Finishes asynchronous puts and lets memory go. Raises as `flush`. Closing twice is allowed."""
        self._closed = True
        self._let_go()
        self._writer.close()

    @property
    def names(self) -> Names:
        """What this tenant's objects are called."""
        return self._names

    def __enter__(self) -> "ChunkStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"store {self.disk.root}: used after close; expected an open store")

    def _let_go(self) -> None:
        for tier in (self._host, self._device):
            tier.clear()
        self.disk.forget()

    def _pinned(self, chunk: str) -> bool:
        return chunk in self._pins

    def _expiry(self, ttl: Seconds | None) -> float | None:
        return expires_at(self.clock(), self._ttl if ttl is None else ttl, "store")

    def _jobs_of(
        self, chunk: Chunk, encoding: Encoding | None, ttl: Seconds | None
    ) -> list[tuple[Name, Callable[[], Blob], int]]:
        expires = self._expiry(ttl)
        if not all(getattr(value, "is_fully_addressable", True) for value in chunk.kv.values()):
            raise InputError("store: kv of which other processes have a part; expected all here (or save_arrays)")
        name = self._names.canonical(chunk.backbone, chunk.id, encoding)
        jobs = [(name, functools.partial(chunk_blob, chunk, encoding, expires), chunk.nbytes)]
        if chunk.encoder is not None:
            make = functools.partial(encoder_blob, chunk.id, chunk.backbone, chunk.encoder, expires)
            jobs.insert(0, (self._names.encoder(chunk.backbone, chunk.id), make, chunk.encoder.nbytes))
        return jobs

    def _timed(self, ack: Ack, began: float) -> Ack:
        def note(done: Ack) -> None:
            if done.exception() is None:
                self.counters.observe("put", "disk", time.perf_counter() - began)

        ack.add_done_callback(note)
        return ack

    def _commit(self, blobs: Sequence[tuple[Name, Blob]]) -> None:
        items = [(name, self._seal.sealed(blob, name.file)) for name, blob in blobs]
        self._note_key()
        self._make_room(functools.partial(sum, (file_size(blob, name.file) for name, blob in items)))
        with self.counters.timed("commit", "disk"):
            written = self.disk.put_group(items)
        for name, _ in items:
            self._host.drop(name.path)
            if name.kind == "kv":
                self._device.drop_chunk(_chunk_key(name))
        with self._room:
            self._fresh.update(dict.fromkeys(("obj", self._names.space), written))
        if self._remote is not None:
            with self.counters.timed("commit", "remote"):
                self._remote.put(items)

    def _note_key(self) -> None:
        """Before anything of the tenant is made ready; the disk does it again when nobody can delete the tenant."""
        check_key(self.disk.root, self._names.space, self._seal.check, note=True)

    def _make_room(self, size: Callable[[], int]) -> None:
        """Evicts where this put might not fit: by what was there at the last look, and what was written since."""
        budgets = {self._names.space: self.budget.tenant, "obj": self.budget.disk}
        bounds = {below: budget for below, budget in budgets.items() if budget is not None}
        need = size() if bounds else 0
        for below, budget in bounds.items():
            with self._room:
                used, fresh = self._used.get(below), self._fresh[below]
                known = used is not None and fresh <= budget // 16  # other processes write too: look again
                if not known or (used or 0) + fresh + need > budget:
                    self._used[below] = make_room(self.disk, budget, need, self._pinned, below, self._names.space)
                    self._fresh[below] = 0

    def _load[T](self, name: Name, build: Build[T], rank: int) -> CacheEntry[T] | None:
        """An object from the host tier, the disk or beyond, as `build` makes it."""
        began, tier = time.perf_counter(), "none"
        if (blob := self._writer.waiting(name)) is not None:
            own = self._own_write(name, blob, build, rank)
            self._answered("none" if own is None else "host", began)
            return own
        held: CacheEntry[T] | None = self._remembered(self._host, name.path, name)
        if held is not None:
            self._answered("host", began)
            return held
        found = self.disk.get(name)
        if found is not None:
            tier = "disk"
        elif (found := self._from_remote(name)) is not None:
            tier = "remote"
        held = None if found is None else self._built(name, found, build, rank)
        if held is not None:
            self._host.put(name.path, held)
        self._answered("none" if held is None else tier, began)
        return held

    def _own_write[T](self, name: Name, blob: Blob, build: Build[T], rank: int) -> CacheEntry[T] | None:
        """An object that was put and is not durable yet, as it will be read then; None where it expired."""
        if blob.expires is not None and self.clock() >= blob.expires:
            return None
        return CacheEntry(build(blob.body, blob.arrays), blob.nbytes, rank, _chunk_key(name), blob.expires)

    def _remembered(self, tier: MemoryTier[Any], key: Hashable, name: Name) -> CacheEntry[Any] | None:
        """What a tier holds of an object, if the disk has the same version: another process may have put a new one."""
        held = tier.get(key)
        version = None if held is None else self.disk.is_current(name, held.version)
        if held is None or version is None:
            tier.drop(key)
            return None
        if version is not held.version:
            tier.note_version(key, held, version)
        return held

    def _answered(self, tier: str, began: float) -> None:
        self.counters.add("misses" if tier == "none" else f"{tier}_hits")
        self.counters.observe("get", tier, time.perf_counter() - began)

    def _built[T](self, name: Name, found: Found, build: Build[T], rank: int) -> CacheEntry[T] | None:
        header = found.header
        try:
            value = build(header.body, found.arrays)
        except (StoreCorruptError, KeyError) as error:  # whole, and not what its name says
            if found.file is not None:
                self.disk.quarantine(name, found.file, str(error))
            return None
        nbytes = max(header.size, memory_of(value))  # a reduced encoding is held as wide as it was
        return CacheEntry(value, nbytes, rank, _chunk_key(name), header.expires, found.version)

    def _arriving(self, name: Name) -> Arriving | None:
        return None if self._remote is None else self._remote.open(name)

    def _from_remote(self, name: Name) -> Found | None:
        """An object from beyond, which the disk then has too if there is room for it."""
        arriving = self._arriving(name)
        arrays = None if arriving is None else arriving.whole()
        if arriving is None or arrays is None:
            return None
        self._promote(name, arriving)
        return Found(arriving.header, arrays)

    def _promote(self, name: Name, arriving: Arriving) -> None:
        """Has the disk keep what came from beyond, once all of it has come."""
        blob = arriving.blob
        if blob is None:
            return
        try:
            self._note_key()
            self._make_room(lambda: arriving.stored.size)
            self.disk.put(name, blob)
        except StoreError:
            self.counters.add("promotion_errors")

    def _from_device(self, name: Name, placement: Placement) -> CacheEntry[Chunk] | None:
        began, key = time.perf_counter(), (name.path, placement_key(placement))
        held: CacheEntry[Chunk] | None = self._remembered(self._device, key, name)
        if held is not None:
            self._answered("device", began)
            return held
        host = self._load(name, chunk_of, CANONICAL)
        if host is None:
            return None
        placed = place_chunk(host.value, placement)
        held = dataclasses.replace(host, value=placed, nbytes=placed.nbytes)
        if host.version is not None:  # it is on the disk, which says for how long this may be served
            self._device.put(key, held)
        return held


def _chunk_key(name: Name) -> str:
    return f"{name.folder}/{name.chunk}"
