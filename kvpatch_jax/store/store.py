"""The chunk store: one tenant's canonicals, patches and encoder outputs in host, disk and remote tiers."""

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ..cache import Chunk, Patch, PatchMetadata
from ..core import AnyArray, KVLayout
from ..errors import InputError, StoreIOError
from ..patching import Basis
from ..utils.kinds import all_of, expect_kind
from .disk.quarantine import purge
from .disk.revisions import CLOCK
from .format.codec import canonical_of, chunk_blob, encoder_blob, encoder_of, with_encoder
from .format.expiry import Seconds
from .format.naming import Encoding, Name, PatchKey
from .format.objects import Blob
from .format.patch_codec import patch_blob
from .io.thread_pool import ThreadPool
from .remotes.leases import Lease
from .remotes.local_adapter import LocalAdapter
from .remotes.remote_store import RemoteStore
from .store_base import ATTEMPTS, StoreBase
from .tiers.device_placement import LayerStream, Placement
from .tiers.memory import CANONICAL, ENCODER
from .tiers.writer import Ack, joined

_readers = ThreadPool(8, "kvpatch-read")


class ChunkStore(StoreBase):
    """Content-addressed objects of one tenant. Any number of threads, processes and tenants may share a root.

    Acknowledged puts survive a crash, until the object is evicted, expires or is deleted. Every byte that `get` returns
    was verified when it was read; a damaged object is moved to quarantine and counts as a miss. Memory tiers only hold
    copies of objects that the disk still has.

    Args:
      root: directory, created if it does not exist. `~` is the user's home.
      tenant: owner of the objects. Names of different tenants' objects cannot be related without the store's secret.
      budget: bytes per tier; a size alone, such as "10 GB", is the disk's.
      ttl: default time to live of objects in seconds; None keeps them.
      secret: key of the names; by default one that is generated with the store and kept in it (readable by its owner
        only).
      remote: a store to which objects are also put, and from which they are read if the disk has none (`open_remote`).
      key: encrypts objects on the disk and in the remote store; unencrypted objects are then not read. At least 32
        bytes, from which each tenant's key is derived; never written anywhere. Needs the extra `encryption`.
      wipe: whether host buffers are overwritten when they are freed; None: if there is a key.
      queue: bytes that asynchronous puts may hold at a time, as a number or such as "64 MiB".
      clock: returns seconds since the epoch.
      encoding: of canonicals that are put and read without one, such as "int8" or "k4v4". Then a put makes that object
        alone, and a read tries it first and then the unreduced one; a call's "unreduced" means the canonical as it was
        prefilled. None: calls without an encoding mean that one, and never get fewer bits.
      write_behind: whether a put is acknowledged once it is durable here, and sent to the remote store afterwards, also
        by a later process; otherwise it waits for the remote store, and raises if that does not answer.
      mapped: whether large objects are mapped in place of being copied, so that the processes of a machine share one
        copy in memory, the page cache's. Placing mapped layers on a device copies them.
      host_tier: host tier that the stores of several tenants of the root share, in place of `Budget.host` each.

    Raises:
      StoreError: the root cannot be created or is not a store.
      InputError: an argument has another type; the tenant is empty, the key too short, the `secret` another one than
        the root's, or a ttl (here or of a put) is not a finite number above 0.
      StoreKeyError: the tenant's objects are encrypted with another key.
    """

    # ----------------------------------------------------------------------------------------------- chunks

    def put(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: Seconds | None = None) -> None:
        """Stores a canonical durably; its encoder output, if any, as an object of its own.

        Args:
          encoding: a smaller dtype to store kv in; such an object is separate from the unreduced one. int8 and float8
            have one float32 scale per layer, head and feature. Or few bits, such as "k4v4" (`KVEncoding`), in which kv
            are packed first. None: the store's default, and for a packed chunk (`encode_chunk`) its own.
          ttl: time to live in seconds.

        Raises:
          StoreFullError, StoreReadOnlyError, StoreIOError: the put is not acknowledged.
          DtypeError: objects cannot hold the dtype.
          InputError: the encoding is unknown; the chunk is encoded otherwise, or was decoded.
          StoreClosedError: after `close`.
        """
        self.put_many([chunk], encoding=encoding, ttl=ttl)

    def put_many(
        self, chunks: Sequence[Chunk], *, encoding: Encoding | None = None, ttl: Seconds | None = None
    ) -> None:
        """Stores canonicals durably, in commits of 64 objects, for many small ones. All are in memory at once.

        Raises:
          StoreError, DtypeError: as `put`. No canonical is acknowledged or partly stored; the error says how many of
            the first are stored whole.
        """
        self.tenant_disk.expect_open()
        began = time.perf_counter()
        # All are encoded before the first is written, so that an invalid one leaves nothing.
        blobs = []
        for chunk in all_of(Chunk, chunks, "store"):
            blobs += [(name, make()) for name, make, _ in self._jobs_of(chunk, encoding, ttl)]
        self.put_now(blobs)
        self.counters.observe("put", "disk", time.perf_counter() - began)

    def put_async(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: Seconds | None = None) -> Ack:
        """Queues a `put`. The future is done when the chunk is durable, or holds the error.

        It is also done when a later put or deletion of its name replaces it. The arrays must not change until then. A
        callback of the future must not wait for another future. Waits while the queue is full. `flush` and `close`
        raise the errors of failed puts.
        """
        self.tenant_disk.expect_open()
        began = time.perf_counter()
        acks = [self._writer.add(*job) for job in self._jobs_of(chunk, encoding, ttl)]
        return self.timed(acks[-1] if len(acks) == 1 else joined(acks), began)

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
        """Reads and verifies a canonical; None if there is none.

        Args:
          backbone: fingerprint of the model that will use it.
          encoding: encoding of the object to read. Of a dtype, values are converted back to their original one; few
            bits stay packed, and are decoded where they are used. None: the store's default.
          placement: a sharding or device for kv [L, T, K, H], or one per channel; by default read-only host arrays. Of
            packed kv, codes and scales are placed, partitioned by layers and tokens alone.
          encoder: whether to also read the encoder output, if there is one.
          lead: digest of the lead behind which it was prefilled (`Chunk.lead`); None: prefilled alone.

        Raises:
          StoreKeyError: the object is encrypted with another key. It is left unchanged.
        """
        for name in self._names_to_read(id, backbone, encoding, lead):
            if placement is None:
                entry = self._reader.load(name, canonical_of(name.part), CANONICAL)
            else:
                entry = self._reader.load_placed(name, placement)
            if entry is not None:
                return with_encoder(entry.value, self.get_encoder(id, backbone)) if encoder else entry.value
        return None

    def get_async(self, id: str, backbone: str, **options: Any) -> concurrent.futures.Future[Chunk | None]:
        """Begins a `get` in a thread, with its options. The future holds its result or error."""
        self.tenant_disk.expect_open()
        return _readers.submit(functools.partial(self.get, id, backbone, **options))

    def get_many(self, ids: Sequence[str], backbone: str, **options: Any) -> list[Chunk | None]:
        """Reads several canonicals at once, as `get` with its options, each None if there is none."""
        self.tenant_disk.expect_open()
        wanted = all_of(str, ids, "store.get_many")
        return _readers.run_all(functools.partial(self.get, id, backbone, **options) for id in wanted)

    def prefetch(
        self, ids: Sequence[str], backbone: str, *, encoding: Encoding | None = None, lead: str | None = None
    ) -> concurrent.futures.Future[int]:
        """Begins to bring canonicals nearer: from the remote store to the disk, and into the host tier.

        Returns:
          A future of how many there are. What fails is a miss.
        """
        self.tenant_disk.expect_open()
        wanted = dict.fromkeys(all_of(str, ids, "store.prefetch"))
        asked = [self.get_async(id, backbone, encoding=encoding, lead=lead) for id in wanted]
        found: concurrent.futures.Future[int] = concurrent.futures.Future()
        waiting = [len(asked)]
        lock = threading.Lock()

        def note(_: object) -> None:
            with lock:
                waiting[0] -= 1
                last = not waiting[0]
            if last:
                found.set_result(sum(one.exception() is None and one.result() is not None for one in asked))

        if not asked:
            found.set_result(0)
        for one in asked:
            one.add_done_callback(note)
        return found

    def lease(self, id: str, backbone: str, seconds: float | int = 60.0) -> Lease | None:
        """Takes a chunk's lease: whoever holds it forms the chunk, once for all machines that share the remote store.

        Without a remote store, once for all processes that share the root.

        Args:
          seconds: how long it is held unless it is renewed or released; a `Lease` is a context manager.

        Returns:
          The lease; None: another holds it. Then wait, and read the chunk.

        Raises:
          StoreError: the remote store or the disk failed.
        """
        self.tenant_disk.expect_open()
        if self._remote is None:
            remote = RemoteStore(LocalAdapter(self.disk.root), clock=self.tenant_disk.clock)
        else:
            remote = self._remote.remote
        return remote.lease(self.names.canonical(backbone, id).chunk, seconds)

    def stream(
        self,
        id: str,
        backbone: str,
        *,
        encoding: Encoding | None = None,
        placement: Placement | None = None,
        lead: str | None = None,
    ) -> LayerStream | None:
        """Opens a canonical for reading layer by layer, so that layer 0 can be used while later ones are read.

        It may be queued, on the disk or in the remote store. In the last case the disk keeps a copy once all of it was
        read, unless it was written or deleted since this call. Layers in few bits are decoded, one at a time.

        Args:
          encoding: as `get`.
          placement: a sharding or device for one layer's [T, K, H], or one per channel.
          lead: as `get`.

        Returns:
          The stream; None if there is no such object.

        Raises:
          StoreKeyError: as `get`.
        """
        names = self._names_to_read(id, backbone, encoding, lead)
        return next(filter(None, (self._reader.stream(name, placement) for name in names)), None)

    def contains(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Returns whether what `get` reads is on the disk or queued. It is not opened, so `get` may still be None."""
        return any(map(self._is_here, self._names_of(id, backbone, encoding, lead)))

    def may_have(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Returns whether `get` may succeed: the object is on the disk or queued, or there is a remote store.

        Raises:
          StoreClosedError: after `close`.
        """
        self.tenant_disk.expect_open()
        return self._remote is not None or self.contains(id, backbone, encoding=encoding, lead=lead)

    def delete(self, id: str, backbone: str) -> bool:
        """Deletes a chunk with all its encodings, patches and encoder output, also in quarantine.

        Puts that began before, queued ones too, are then without effect, in every process.

        Returns:
          Whether there was anything to delete.

        Raises:
          StoreReadOnlyError, StoreIOError: not everything was deleted.
        """
        self.tenant_disk.expect_open()
        name = self.names.canonical(backbone, id)
        queued = self._writer.waiting_paths(f"{name.chunk_key}.")
        try:
            deleted, revision = self.tenant_disk.delete_chunk(name)
        finally:
            self._reader.drop_chunk(name.chunk_key)
        purge(self.disk.root, name.tenant, name.chunk)
        if self._remote is not None and revision:
            self._remote.delete(name)
            if not self._write_behind:
                self._remote.sender.flush()
        return deleted or bool(queued)

    # -------------------------------------------------------------------------------- encoder outputs, patches

    def put_encoder(self, id: str, backbone: str, output: AnyArray, *, ttl: Seconds | None = None) -> None:
        """Stores an encoder output, [T, D] or any shape, under a chunk's id or an `encoder_id`. Raises as `put`."""
        self.tenant_disk.expect_open()
        with self.counters.timed("put", "disk"):
            blob = encoder_blob(id, backbone, output, self.expiry(ttl))
            self.put_now([(self.names.encoder(backbone, id), blob)])

    def get_encoder(
        self, id: str, backbone: str, *, tier: Literal["here", "remote"] | None = None
    ) -> np.ndarray | None:
        """Reads an encoder output as a read-only host array; None if there is none.

        Args:
          tier: "here" does not ask the remote store; "remote" reads its version, which another machine may have written
            since, and keeps no copy. None: the nearest.
        """
        self.tenant_disk.expect_open()
        name = self.names.encoder(backbone, id)
        if tier == "remote":
            return self._reader.load_remote(name, encoder_of)[0]
        entry = self._reader.load(name, encoder_of, ENCODER, far=tier is None)
        return None if entry is None else entry.value

    def amend_encoder(
        self, id: str, backbone: str, amend: Callable[[list[np.ndarray]], AnyArray], *, ttl: Seconds | None = None
    ) -> None:
        """Replaces an encoder output by one that is made of what is stored, here and in the remote store.

        No write of this root is lost to another: of two at once the later one amends what the earlier one wrote. What
        another machine sends to the remote store between the look at it and the sending of this write is replaced
        there, until that machine amends it again. A write that could not look takes no place of a later one there.

        Args:
          amend: makes the new output of the old ones: none, one, or the one here and the remote store's. It may be
            called several times.

        Raises:
          StoreError, DtypeError: as `put`.
        """
        self.tenant_disk.expect_open()
        name = self.names.encoder(backbone, id)
        with self.counters.timed("put", "disk"):
            for _ in range(ATTEMPTS):
                # Before the content: what is written in between is noticed.
                own = self.tenant_disk.disk.own_revision(name)
                here = self.get_encoder(id, backbone, tier="here")
                there, known = None, self.tenant_disk.revision(name)
                try:
                    there, latest = self._reader.load_remote(name, encoder_of, strict=True)
                    revision = CLOCK.next(max(known, latest))
                except StoreIOError:  # when this one is sent, what is there by then stays if it is later than known
                    revision = known + 1
                output = amend([copy for copy in (here, there) if copy is not None])
                blob = encoder_blob(id, backbone, output, self.expiry(ttl))
                if not self._commit([(name, dataclasses.replace(blob, revision=revision))], own):
                    return
        raise self.outpaced()

    def put_patches(self, patches: Sequence[Patch], *, ttl: Seconds | None = None) -> None:
        """Stores patches durably, in commits of 64 objects. Extends the life of a basis that would expire before them.

        Raises:
          InputError: a patch's basis is not stored. StoreError, DtypeError: as `put_many`.
        """
        self.tenant_disk.expect_open()
        with self.counters.timed("put", "disk"):
            patches, expires = all_of(Patch, patches, "store"), self.expiry(ttl)
            blobs = self._patches.bases_to_extend(patches, expires)
            blobs += [(self.names.patch(patch), patch_blob(patch, expires)) for patch in patches]
            self.put_now(blobs)

    def put_patch_async(self, patch: Patch, *, ttl: Seconds | None = None) -> Ack:
        """Queues a patch, as `put_async` a chunk. Patches that are queued close together are committed together."""
        self.tenant_disk.expect_open()
        began, expires = time.perf_counter(), self.expiry(ttl)
        (patch,) = all_of(Patch, [patch], "store")
        acks = []
        for name, blob in self._patches.bases_to_extend([patch], expires):
            acks.append(self._writer.add(name, lambda blob=blob: blob, blob.nbytes))
        make = functools.partial(patch_blob, patch, expires)
        acks.append(self._writer.add(self.names.patch(patch), make, patch.nbytes))
        return self.timed(acks[0] if len(acks) == 1 else joined(acks), began)

    def get_patches(self, served: PatchKey | PatchMetadata) -> list[Patch]:
        """Reads every stored patch that serves this chunk, antecedent, base and frame, largest first.

        Patches may have any ranks, layers and dtypes, and an orbit patch any order of its antecedent. Left out are
        patches of another content than `served.content` or, if that is None, than the chunk's stored or queued
        canonicals; and patches whose antecedent was served in another way or has other contents (those of `served`, or
        else of the stored canonicals). If it is unknown which of several contents is meant, none of them is returned.
        Factors are on the default device.

        Raises:
          InputError: `served` is of another type.
        """
        self.tenant_disk.expect_open()
        if not isinstance(served, PatchKey | PatchMetadata):
            raise InputError(
                f"store.get_patches: got {served!r:.80}; expected PatchKey(chunk.id, chunk.backbone, antecedent), or a "
                "patch's metadata"
            )
        return self._patches.find(served)

    def patch_count(self, id: str, backbone: str) -> int:
        """Counts a chunk's patches on the disk, behind any antecedent, without reading them.

        Raises:
          StoreClosedError: after `close`.
        """
        self.tenant_disk.expect_open()
        return self._patches.count(id, backbone)

    def put_basis(self, basis: Basis, *, ttl: Seconds | None = None) -> None:
        """Stores a basis that patches share, under its digest, before the patches that name it. Raises as `put`.

        A stored basis never gets a shorter life: patches may use it.
        """
        self.tenant_disk.expect_open()
        if not isinstance(basis, Basis):
            raise InputError(f"store.put_basis: got a {type(basis).__name__}; expected a Basis")
        expires = self.expiry(ttl)
        with self.counters.timed("put", "disk"):
            blobs = self._patches.basis_objects(basis, expires)
            self.put_now(blobs)

    def get_basis(self, digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        """Reads a basis; None if there is none whose content matches the digest."""
        self.tenant_disk.expect_open()
        if not isinstance(layout, KVLayout) or not isinstance(digest, str):
            raise InputError(
                f"store.get_basis: got {digest!r:.80}, layout {layout!r:.40}; expected a digest and a KVLayout"
            )
        return self._patches.basis(digest, layout, backbone)

    def __enter__(self) -> "ChunkStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _names_of(self, id: str, backbone: str, encoding: Encoding | None, lead: str | None) -> tuple[Name, ...]:
        words = self.encodings.to_get(encoding)
        return tuple([self.names.canonical(backbone, id, word, lead) for word in words])

    def _names_to_read(self, id: str, backbone: str, encoding: Encoding | None, lead: str | None) -> Sequence[Name]:
        """Returns the names to try in order; the last one even if it is not here, so that a miss is counted once."""
        if self.tenant_disk.closed:
            self.tenant_disk.expect_open()  # raises
        if type(id) is str and type(backbone) is str and encoding is None and self.encodings.default is None:
            return self.names.canonicals(backbone, id, (None,), lead)
        *others, last = self._names_of(id, backbone, encoding, lead)
        return [name for name in others if self._remote is not None or self._is_here(name)] + [last]

    def _is_here(self, name: Name) -> bool:
        return self._writer.has(name) or self.tenant_disk.exists(name)

    def _jobs_of(
        self, chunk: Chunk, encoding: Encoding | None, ttl: Seconds | None
    ) -> list[tuple[Name, Callable[[], Blob], int]]:
        """Returns name, encoder and bytes of a chunk's objects: the canonical comes last, and implies the others."""
        expect_kind(chunk, Chunk, "chunk", "a Chunk")
        expires = self.expiry(ttl)

        for value in chunk.kv.values():
            if not getattr(value, "is_fully_addressable", True):
                raise InputError(
                    "store: got kv that others have a part of; expected all of it here, or StoreItem(contents=)"
                )

        jobs: list[tuple[Name, Callable[[], Blob], int]] = []
        if chunk.encoder is not None:
            make = functools.partial(encoder_blob, chunk.id, chunk.backbone, chunk.encoder, expires)
            jobs.append((self.names.encoder(chunk.backbone, chunk.id), make, chunk.encoder.nbytes))
        word = self.encodings.to_put(chunk, encoding)
        name = self.names.canonical(chunk.backbone, chunk.id, word, chunk.lead)
        return [*jobs, (name, functools.partial(chunk_blob, chunk, word, expires), chunk.nbytes)]
