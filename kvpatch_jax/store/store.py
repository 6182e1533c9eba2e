"""The chunk store: one tenant's canonicals, patches and encoder outputs, over device, host, disk and remote tiers."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import get_args

import numpy as np

from ..cache import Chunk, Patch, PatchMetadata, check_is_chunk
from ..core import AnyArray, KVLayout
from ..errors import InputError, StoreReadOnlyError
from ..patching import Basis, check_in_basis
from ..utils.atomic_files import path_of
from ..utils.kinds import all_of, expect_kind
from ..utils.sizes import Size, size_of
from .antecedent_match import serving
from .disk.budget import Budget, budget_of
from .disk.quarantine import QuarantineRestore, purge, restore
from .disk.tenant_disk import TenantDisk
from .format.bases import basis_blobs, basis_id, basis_of, completed
from .format.codec import chunk_blob, chunk_of, encoder_blob, encoder_of, patch_blob, patch_parts, with_encoder
from .format.expiry import Seconds, checked_ttl, expires_at, is_before, later
from .format.naming import Encoding, Name, ObjectNames, PatchKey, part_of
from .format.objects import Blob
from .io.per_root import shared
from .metrics import Statistics
from .tenants import DeletionReport, delete_tenant
from .tiers.device_placement import LayerStream, Placement
from .tiers.memory import CANONICAL, DERIVED, ENCODER, CacheEntry, Policy
from .tiers.reader import TieredReader
from .tiers.remote import RemoteStore
from .tiers.remote_tier import RemoteTier
from .tiers.write_order import Write, WriteOrder
from .tiers.writer import Ack, Writer, joined


class ChunkStore:
    """Content-addressed objects of one tenant. Any number of threads, processes and tenants may share a root.

    What `put` acknowledged survives a crash, until it is evicted, expires or is deleted. What `get` returns was
    verified when it was read; a damaged object is moved to quarantine and is a miss. Memory tiers hold copies of what
    the disk holds, and nothing that it no longer does.

    Args:
      root: directory; made where it is not there. `~` is the user's folder.
      tenant: whose objects; other tenants' have other names, which cannot be told without the store's secret.
      budget: bytes per tier; a size alone, such as "10 GB", is the disk's.
      ttl: seconds that objects live unless `put` says otherwise; None keeps them.
      policy: which copies stay in memory, "lru" or "slru". The disk is LRU.
      secret: of the names; by default one that is made with the store and kept in it (readable by its owner only).
      remote: a store where objects are put too, and read from when the disk has none.
      key: encrypts objects on the disk and in the remote store; unencrypted ones are then not read. At least 32 bytes,
        from which each tenant's key is derived; never written anywhere. Needs the extra `encryption`.
      wipe: whether host buffers are overwritten when they are freed; None: where there is a key.
      queue: bytes that asynchronous puts may hold at a time, as a number or such as "64 MiB".
      clock: seconds since the epoch.

    Raises:
      StoreError: the root cannot be made or is not a store. InputError: an argument of another kind; an empty tenant, a
        short key, another `secret` than the root keeps, or a ttl that is no finite number above 0 (so do puts).
      StoreKeyError: the tenant's objects are encrypted and `key` is not theirs.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tenant: str = "default",
        budget: Budget | Size | None = None,
        ttl: Seconds | None = None,
        policy: Policy = "lru",
        secret: bytes | None = None,
        remote: RemoteStore | None = None,
        key: bytes | None = None,
        wipe: bool | None = None,
        queue: Size = 256 << 20,
        clock: Callable[[], float] = time.time,
    ):
        self._ttl = checked_ttl(ttl, "store")
        if policy not in get_args(Policy):
            raise InputError(f"store: policy {policy!r:.80}; expected one of {get_args(Policy)}")
        expect_kind(remote, (RemoteStore, NoneType), "store: remote", "a KeyValueStore, or None")
        expect_kind(wipe, (bool, NoneType), "store: wipe", "True, False or None")
        expect_kind(clock, Callable, "store: clock", "a function that returns seconds since the epoch")
        room, budgets = size_of(queue, "store: queue"), budget_of(budget, "store: budget")
        path = path_of(root, "store: root", InputError, "a directory's name")
        self.tenant_disk = TenantDisk(path, tenant, budget=budgets, secret=secret, key=key, wipe=wipe, clock=clock)
        self.disk, self.budget, self.counters = (
            self.tenant_disk.disk,
            self.tenant_disk.budget,
            self.tenant_disk.counters,
        )
        self._remote = None if remote is None else RemoteTier(remote, self.counters, self.disk.encryption)
        self.order = shared(WriteOrder, self.disk.root)
        self._writer = Writer(self._commit, self.order, room)
        self._reader = TieredReader(self.tenant_disk, self._writer, self._remote, self.order, policy)

    @property
    def names(self) -> ObjectNames:
        """What this tenant's objects are called."""
        return self.tenant_disk.names

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
        self.put_many([chunk], encoding=encoding, ttl=ttl)

    def put_many(
        self, chunks: Sequence[Chunk], *, encoding: Encoding | None = None, ttl: Seconds | None = None
    ) -> None:
        """Stores canonicals in commits of 64 objects, durable when this returns: for many small ones. Raises as `put`.

        Where it raises none is acknowledged, and none is there in part; the error says how many of the first are there
        whole. Their objects are in memory at once.
        """
        self.tenant_disk.expect_open()
        with self.counters.timed("put", "disk"):
            jobs = [job for chunk in all_of(Chunk, chunks, "store") for job in self._jobs_of(chunk, encoding, ttl)]
            self._put([(name, make()) for name, make, _ in jobs])

    def put_async(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: Seconds | None = None) -> Ack:
        """Queues a `put`; the future is done when the chunk is durable, or holds the error.

        Also where a later put or deletion of its name takes its place. A callback must not wait for another future. The
        arrays must not change until then. Waits while the queue is full. `flush` and `close` raise what failed.
        """
        self.tenant_disk.expect_open()
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
        lead: str | None = None,
    ) -> Chunk | None:
        """Reads a canonical, every byte verified when it came from the disk; None where there is none.

        Args:
          backbone: the fingerprint of the model that will use it.
          encoding: the object to read; its numbers come back in the dtype they had.
          placement: a sharding or device for kv [L, T, K, H], or one per channel; by default read-only host arrays.
          encoder: whether to read the encoder output too, if it is there.
          lead: what the canonical was prefilled behind (`Chunk.lead`); None for one that was prefilled alone.

        Raises:
          StoreKeyError: the object is encrypted under another key. It is left as it is.
        """
        self.tenant_disk.expect_open()
        name = self.names.canonical(backbone, id, encoding, lead)
        if placement is None:
            held = self._reader.load(name, chunk_of, CANONICAL)
        else:
            held = self._reader.load_placed(name, placement)
        if held is None or not encoder:
            return None if held is None else held.value
        return with_encoder(held.value, self.get_encoder(id, backbone))

    def stream(
        self,
        id: str,
        backbone: str,
        *,
        encoding: Encoding | None = None,
        placement: Placement | None = None,
        lead: str | None = None,
    ) -> LayerStream | None:
        """Opens a canonical for reading layer by layer, so that layer 0 is used while later ones are read.

        Queued, from the disk, or from the remote store; then the disk keeps a copy once all of it was read, if nobody
        wrote or deleted it since this was called. None: a miss.

        Args:
          placement: a sharding or device for one layer's [T, K, H], or one per channel.
          lead: as `get`.

        Raises:
          StoreKeyError: as `get`.
        """
        self.tenant_disk.expect_open()
        return self._reader.stream(self.names.canonical(backbone, id, encoding, lead), placement)

    def contains(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Whether the disk has an object of that name, or will. It is not read, and so may yet turn out a miss."""
        name = self.names.canonical(backbone, id, encoding, lead)
        return self._writer.has(name) or self.tenant_disk.exists(name)

    def may_have(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Whether reading a canonical is worth trying: `contains` says so, or there is a remote store to ask.

        Raises:
          StoreClosedError.
        """
        self.tenant_disk.expect_open()
        return self._remote is not None or self.contains(id, backbone, encoding=encoding, lead=lead)

    def delete(self, id: str, backbone: str) -> bool:
        """Deletes a chunk with all its encodings, patches and encoder output, in quarantine too. Whether there was any.

        What this process has queued of it is not written any more, and what it is writing is waited for.

        Raises:
          StoreReadOnlyError, StoreIOError.
        """
        self.tenant_disk.expect_open()
        name = self.names.canonical(backbone, id)
        beginning = f"{name.folder}/{name.chunk}."
        with self.order.turn_to_delete(beginning) as place:
            self._reader.drop_chunk(name.chunk_key)
            try:
                if self._remote is not None:  # first, so that nothing comes back from there
                    self._remote.delete(beginning)
            finally:
                with contextlib.suppress(StoreReadOnlyError):  # where nobody writes a copy either
                    self.disk.note_deletion()
                # Canonicals first: whoever looks for one must not find it after part of the chunk is gone.
                entries = sorted(self.disk.of_chunk(name), key=lambda entry: entry.part.partition(".")[0] != "kv")
                gone = any([self.disk.delete(entry.path) for entry in entries])
                gone = self.order.outdate(beginning, place) or gone  # or what is queued would come back
                purge(self.disk.root, name.tenant, name.chunk)
        return gone

    # -------------------------------------------------------------------------------- encoder outputs, patches

    def put_encoder(self, id: str, backbone: str, output: AnyArray, *, ttl: Seconds | None = None) -> None:
        """Stores a tower's output, [T, D] or any shape, under a chunk's id or an `encoder_id`. Raises as `put`."""
        self.tenant_disk.expect_open()
        with self.counters.timed("put", "disk"):
            self._put([(self.names.encoder(backbone, id), encoder_blob(id, backbone, output, self._expiry(ttl)))])

    def get_encoder(self, id: str, backbone: str) -> np.ndarray | None:
        """Reads a tower's output as a read-only host array; None where there is none."""
        self.tenant_disk.expect_open()
        held = self._encoder_entry(id, backbone)
        return None if held is None else held.value

    def put_patches(self, patches: Sequence[Patch], *, ttl: Seconds | None = None) -> None:
        """Stores patches, durable when this returns, in commits as `put_many`. Raises as that does.

        A basis that would expire before them is made to live longer.
        """
        self.tenant_disk.expect_open()
        with self.counters.timed("put", "disk"):
            each, expires = all_of(Patch, patches, "store"), self._expiry(ttl)
            bases = self._bases_to_keep(each, expires)
            self._put([*bases, *((self.names.patch(patch), patch_blob(patch, expires)) for patch in each)])

    def put_patch_async(self, patch: Patch, *, ttl: Seconds | None = None) -> Ack:
        """Queues a patch, as `put_async` does a chunk; patches queued close together are committed together."""
        self.tenant_disk.expect_open()
        (patch,), began, expires = all_of(Patch, [patch], "store"), time.perf_counter(), self._expiry(ttl)
        bases = self._bases_to_keep([patch], expires)
        acks = [self._writer.add(name, lambda blob=blob: blob, blob.nbytes) for name, blob in bases]
        make = functools.partial(patch_blob, patch, expires)
        acks.append(self._writer.add(self.names.patch(patch), make, patch.nbytes))
        return self._timed(acks[0] if len(acks) == 1 else joined(acks), began)

    def get_patches(self, served: PatchKey | PatchMetadata) -> list[Patch]:
        """Reads every stored patch that serves this chunk, antecedent, base and frame, largest first.

        They may have any ranks, layers and dtypes, and an orbit patch any order of its antecedent. Left out are patches
        of another content than `served.content`, or, where that is None, than the chunk's stored or queued canonicals;
        and those formed behind an antecedent served otherwise, or of other contents (`served` says them, or else the
        stored canonicals do). Where nothing says which of several contents is meant, none of them is given.
        Factors are on the default device.

        Raises:
          InputError: what is neither.
        """
        self.tenant_disk.expect_open()
        if not isinstance(served, PatchKey | PatchMetadata):
            raise InputError(
                f"store: get_patches of {served!r:.80}; expected what they are to serve: PatchKey(chunk.id, "
                "chunk.backbone, antecedent), or a patch's metadata"
            )
        names = self._reader.names_beginning(self.names.patches(served))
        loaded = [self._reader.load(name, patch_parts, DERIVED) for name in names]
        found = [held.value for held in loaded if held is not None]
        canonical = lambda id: self.names.canonical(served.backbone, id, lead=served.lead)
        stored = lambda id: self._reader.contents(canonical(id))
        serves = serving([metadata for _, metadata in found], served, stored)
        found = [own for own, does in zip(found, serves, strict=True) if does]
        if any(metadata.content is not None for _, metadata in found):
            if served.content is not None:
                wanted: set[str | None] = {served.content}
            else:
                wanted = self._reader.contents(canonical(served.chunk))
            # A canonical that does not say its content may have any: the patch is checked where it is applied.
            if wanted and None not in wanted:
                found = [(own, metadata) for own, metadata in found if metadata.content in (None, *wanted)]
        return sorted(completed(found, self.get_basis), key=lambda patch: -patch.nbytes)

    def patch_count(self, id: str, backbone: str) -> int:
        """Counts a chunk's patches on the disk, whatever they were formed behind. None is read.

        Raises:
          StoreClosedError.
        """
        self.tenant_disk.expect_open()
        parts = [part_of(entry.path) for entry in self.disk.of_chunk(self.names.canonical(backbone, id))]
        return sum(part.startswith("p.") for part in parts)

    def put_basis(self, basis: Basis, *, ttl: Seconds | None = None) -> None:
        """Stores a basis that patches share, under its digest, before the patches that name it. Raises as `put`.

        One that is there keeps its life if that is longer: patches may be in it.
        """
        self.tenant_disk.expect_open()
        if not isinstance(basis, Basis):
            raise InputError(f"store: a {type(basis).__name__}; expected a Basis")
        expires = self._expiry(ttl)
        with self.counters.timed("put", "disk"):
            self._put(self._basis_objects(basis, later(expires, self._basis_expires(basis))))

    def get_basis(self, digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        """Reads a basis; None where there is none whose bits are those that the digest names."""
        if not isinstance(layout, KVLayout) or not isinstance(digest, str):
            raise InputError(f"store: basis {digest!r:.80} of layout {layout!r:.40}; expected a digest and a KVLayout")
        outputs = {name: self.get_encoder(basis_id(digest, name), backbone) for name in layout.names}
        return basis_of(digest, layout, backbone, outputs)

    # ----------------------------------------------------------------------------------------------- keeping

    @contextlib.contextmanager
    def pin(self, id: str, backbone: str) -> Iterator[None]:
        """Keeps a chunk, with all that belongs to it, from eviction by this store object. Pins of one chunk add up.

        Not from expiry, `delete`, or another process's eviction: its reader then has a miss.
        """
        with self.tenant_disk.pin(self.names.canonical(backbone, id).chunk_key):
            yield

    def collect(self) -> int:
        """Deletes this tenant's expired objects, leftovers of dead writers, unfinished snapshots and old quarantined
        files; in the remote store too, where each object's header is read and what fails is left.

        Returns:
          How many objects expired or were left over.

        Raises:
          StoreError.
        """
        self.tenant_disk.expect_open()
        gone = self.tenant_disk.collect()
        return gone + (0 if self._remote is None else self._remote.collect(f"{self.names.space}/"))

    def restore_quarantined(self) -> QuarantineRestore:
        """Reads again what of this tenant is in quarantine, and puts back what verifies where nothing has its name.

        For when it was a reader that was at fault. What still does not verify stays in quarantine. Raises StoreError.
        """
        self.tenant_disk.expect_open()
        self.tenant_disk.forget_usage()
        return restore(self.disk.root, self.names.tenant_name)

    def delete_tenant(self) -> DeletionReport:
        """Deletes everything of this tenant, in every tier, quarantine and the remote store; see `tenants`.

        Queued puts are written first. The store remains usable. Other store objects of the tenant serve nothing of it
        from then on, and free their memory when they next look. Raises StoreError, and what `flush` raises, when done.
        """
        self.tenant_disk.expect_open()
        try:
            self._writer.flush()
        finally:
            self._reader.clear()
            self.tenant_disk.forget_usage()
            beginning = f"{self.names.space}/"
            with self.order.turn_to_delete(beginning) as place:
                deleted = delete_tenant(self.disk, self.names, None if self._remote is None else self._remote.remote)
                self.order.outdate(beginning, place)
        return deleted

    def statistics(self) -> Statistics:
        """Returns counts, latencies and bytes held, of this store object alone; `prometheus_text` formats them."""
        pool = self.disk.buffers.idle_bytes
        held = {"device": self._reader.device.nbytes, "host": self._reader.host.nbytes, "pool": pool}
        return Statistics(self.counters.read(), self.counters.latencies(), held)

    def flush(self) -> None:
        """Waits for asynchronous puts. Raises the first that failed since the last `flush`, the others in its notes."""
        self._writer.flush()

    def close(self) -> None:
        """Writes queued puts and frees memory. Raises as `flush`. Closing twice is allowed."""
        self.tenant_disk.close()
        self._reader.clear()
        self._writer.close()

    def __repr__(self) -> str:
        return f"ChunkStore({self.disk.root!r}{', closed' if self.tenant_disk.closed else ''})"

    def __enter__(self) -> "ChunkStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _bases_to_keep(self, patches: Sequence[Patch], expires: float | None) -> list[tuple[Name, Blob]]:
        """Refuses patches in a basis that is not stored, and patches that are not in the basis they name.

        Returns:
          The objects of bases that would expire before the patches do, expiring after them.
        """
        bases: dict[str, Basis] = {}
        for patch in patches:
            metadata = patch.metadata
            if metadata.basis is None:
                continue
            basis = self.get_basis(metadata.basis, metadata.layout, metadata.backbone)
            if basis is None:
                raise InputError(f"store: a patch in basis {metadata.basis}; expected it stored first, by put_basis")
            check_in_basis(patch, basis)
            bases[basis.digest] = basis

        # An eighth longer than need be, or each of many patches with the same ttl would have its basis written again.
        until = None if expires is None else expires + (expires - self.tenant_disk.clock()) / 8
        short = [basis for basis in bases.values() if is_before(self._basis_expires(basis), expires)]
        return [named for basis in short for named in self._basis_objects(basis, until)]

    def _basis_objects(self, basis: Basis, expires: float | None) -> list[tuple[Name, Blob]]:
        return [(self.names.encoder(basis.backbone, id), blob) for id, blob in basis_blobs(basis, expires)]

    def _basis_expires(self, basis: Basis) -> float | None:
        """When the first of a basis's objects expires; 0 where one is not there."""
        first: float | None = None
        for channel in basis.directions:
            held = self._encoder_entry(basis_id(basis.digest, channel), basis.backbone)
            own = 0.0 if held is None else held.expires
            first = own if is_before(own, first) else first
        return first

    def _encoder_entry(self, id: str, backbone: str) -> CacheEntry[np.ndarray] | None:
        return self._reader.load(self.names.encoder(backbone, id), encoder_of, ENCODER)

    def _expiry(self, ttl: Seconds | None) -> float | None:
        return expires_at(self.tenant_disk.clock(), self._ttl if ttl is None else ttl, "store")

    def _jobs_of(
        self, chunk: Chunk, encoding: Encoding | None, ttl: Seconds | None
    ) -> list[tuple[Name, Callable[[], Blob], int]]:
        check_is_chunk(chunk)
        expires = self._expiry(ttl)
        if not all(getattr(value, "is_fully_addressable", True) for value in chunk.kv.values()):
            raise InputError("store: kv of which other processes have a part; expected all here (or save_arrays)")
        name = self.names.canonical(chunk.backbone, chunk.id, encoding, chunk.lead)
        jobs = [(name, functools.partial(chunk_blob, chunk, encoding, expires), chunk.nbytes)]
        if chunk.encoder is not None:
            make = functools.partial(encoder_blob, chunk.id, chunk.backbone, chunk.encoder, expires)
            jobs.insert(0, (self.names.encoder(chunk.backbone, chunk.id), make, chunk.encoder.nbytes))
        return jobs

    def _timed(self, ack: Ack, began: float) -> Ack:
        def note(done: Ack) -> None:
            if done.exception() is None:
                self.counters.observe("put", "disk", time.perf_counter() - began)

        ack.add_done_callback(note)
        return ack

    def _put(self, blobs: Sequence[tuple[Name, Blob]]) -> None:
        self._commit([(self.order.begin(name), blob) for name, blob in blobs])

    def _commit(self, blobs: Sequence[tuple[Write, Blob]]) -> None:
        """Writes objects to the disk and the remote store, but for those of whose names there are newer ones."""
        with self.order.turn([write for write, _ in blobs]) as writes:
            each = [(write.name, blob) for write, blob in blobs if write in writes]
            items = [(name, self.tenant_disk.sealed(name, blob)) for name, blob in each]
            if not items:
                return
            self.tenant_disk.put(items)
            for name, _ in items:
                self._reader.replaced(name)
            if self._remote is not None:
                with self.counters.timed("commit", "remote"):
                    self._remote.put(items)
