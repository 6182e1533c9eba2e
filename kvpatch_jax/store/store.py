"""The chunk store: one tenant's canonicals, patches and encoder outputs in memory, on disk and in a remote store."""

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..cache import Chunk, Patch, PatchMetadata, trusted
from ..core import AnyArray, KVLayout, PackedArray, PhaseFreeKV, is_packed
from ..errors import InputError
from ..patching import Basis
from ..utils.kinds import all_of, expect_kind
from ..utils.sizes import Size
from .codec import (
    decode_chunk_object,
    decode_encoder,
    encode_chunk_object,
    encode_encoder,
    encode_patch_object,
)
from .files import Encoded, Stored
from .names import Encoding, PatchKey
from .objects import Objects, Usage
from .patches import extend_bases, find_basis, find_patches, put_basis
from .queue import Ack
from .snapshot import Summary, load_snapshot, save_snapshot

if TYPE_CHECKING:
    from .remote import Lease, Remote

Placement = jax.Device | Sharding
"""Where arrays of KV go: a device, or a sharding of [L, T, K, H]."""

_readers = concurrent.futures.ThreadPoolExecutor(8, "kvpatch-read")


def _new_readers() -> None:
    global _readers
    _readers = concurrent.futures.ThreadPoolExecutor(8, "kvpatch-read")


os.register_at_fork(after_in_child=_new_readers)  # the parent's threads do not exist there


class Statistics(NamedTuple):
    """Events since a store was opened (`counts`), and what there is now (`gauges`), by name."""

    counts: Mapping[str, int]
    gauges: Mapping[str, int | float]


class ChunkStore:
    """Content-addressed objects of one tenant. Any number of threads, processes and tenants may share a root.

    Acknowledged puts survive a crash, until the object is evicted, expires or is deleted. Every byte that `get` returns
    was verified when it was read; a damaged object is a miss until the next put replaces it.

    Args:
      root: directory on a local file system, created if it does not exist. `~` is the user's home.
      tenant: owner of the objects. Names of different tenants' objects cannot be related without the store's secret.
      root_budget: bytes of all tenants' objects on the disk, such as "50 GB", for every process from now on; None
        leaves it as it is, at first without a bound. The least recently used objects leave, of tenants that hold more
        than is theirs.
      share: likewise the bytes that this tenant may have; other tenants' puts take none of them. Without one, a tenant
        may have what is free, and others take nothing while it holds no more than an equal part of what shares leave.
      memory: bytes of decoded objects that this process keeps, for all tenants of the root together.
      ttl: default time to live of objects in seconds; None keeps them.
      key: encrypts objects on the disk and in the remote store; objects that are not encrypted are then refused. 32
        bytes or more, from which each tenant's key is derived; never written anywhere. Needs the extra `encryption`.
      secret: key of the names, 16 bytes or more; by default one that is generated with the root and kept in it.
        Machines that share a remote store need the same.
      remote: URL of a store that machines share, such as "s3://bucket/prefix", or what `open_remote` returns. Puts and
        deletions are sent to it in the background; what the disk lacks is read from it.

    Raises:
      StoreError: the root cannot be created, or is no store of this format.
      InputError: an argument has another type, the tenant is empty, the key or secret too short.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tenant: str = "default",
        root_budget: Size | None = None,
        share: Size | None = None,
        memory: Size = "2 GB",
        ttl: float | int | None = None,
        key: bytes | None = None,
        secret: bytes | None = None,
        remote: "str | Remote | None" = None,
    ):
        expect_kind(root, str | os.PathLike, "store: root", "a directory's name", InputError)
        if isinstance(remote, str):
            from .remote import open_remote

            remote = open_remote(remote)
        limits: dict[str, Any] = {"root_budget": root_budget, "share": share, "memory": memory}
        self.objects = Objects(root, tenant, **limits, ttl=ttl, key=key, secret=secret, remote=remote)
        self.names = self.objects.names

    def __repr__(self) -> str:
        return f"ChunkStore({self.objects.root!r}{', closed' if self.objects.closed else ''})"

    def __enter__(self) -> "ChunkStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- chunks

    def put(self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: float | int | None = None) -> None:
        """Stores a canonical durably; its encoder output, if any, as an object of its own.

        Args:
          encoding: few bits to keep kv in, such as "k4v4" (`KVEncoding`): an object separate from the unreduced one.
            None: as the chunk is.
          ttl: time to live in seconds.

        Raises:
          StoreError: nothing was stored.
          ShapeError: objects cannot hold the dtype.
          InputError: the encoding is unknown; the chunk is encoded otherwise, or was decoded.
          StoreError: after `close`.
        """
        self.put_many([chunk], encoding=encoding, ttl=ttl)

    def put_many(
        self, chunks: Sequence[Chunk], *, encoding: Encoding | None = None, ttl: float | int | None = None
    ) -> None:
        """Stores canonicals durably in one transaction: all, or on an error none. All are in memory at once."""
        writes = []
        for chunk in all_of(Chunk, chunks, "store"):
            writes += [(name, make()) for name, make, _ in self._jobs_of(chunk, encoding)]
        self.objects.put(writes, expires=self.objects.expiry(ttl))

    def put_async(
        self, chunk: Chunk, *, encoding: Encoding | None = None, ttl: float | int | None = None
    ) -> concurrent.futures.Future[bool]:
        """Queues a `put`. The future is done when the chunk is durable, or holds the error.

        It is also done, with False, when a later put or deletion of its name takes its place. The arrays must not
        change until then. Waits while the queue is full. `flush` and `close` raise the errors of failed puts.
        """
        expect_kind(chunk, Chunk, "chunk", "a Chunk")
        expires = self.objects.expiry(ttl)
        acks = [self.objects.put_async(*job, expires=expires) for job in self._jobs_of(chunk, encoding)]
        return acks[0] if len(acks) == 1 else _joined(acks)

    def get(
        self,
        id: str,
        backbone: str,
        *,
        encoding: Encoding | None = None,
        placement: Placement | Mapping[str, Placement] | None = None,
        encoder: bool = False,
        lead: str | None = None,
    ) -> Chunk | None:
        """Reads and verifies a canonical; None if there is none, or it is damaged.

        Args:
          backbone: fingerprint of the model that will use it.
          encoding: encoding of the object to read; its kv stay packed, and are decoded where they are used.
          placement: a sharding or device for kv [L, T, K, H], or one per channel; by default read-only host arrays. Of
            packed kv, codes and scales are placed, partitioned by layers alone.
          encoder: whether to also read the encoder output, if there is one.
          lead: digest of the lead behind which it was prefilled (`Chunk.lead`); None: prefilled alone.

        Raises:
          StoreError: the object is encrypted with another key, or not encrypted.
        """
        chunk = self.objects.get(self.names.canonical(backbone, id, encoding, lead), decode_chunk_object)
        if chunk is None:
            return None
        if encoder:
            chunk = trusted(chunk, encoder=self.get_encoder(id, backbone))
        return chunk if placement is None else placed(chunk, placement)

    def get_many(self, ids: Sequence[str], backbone: str, **options: Any) -> list[Chunk | None]:
        """Reads several canonicals at once, as `get` with its options, each None if there is none."""
        self.objects.expect_open()
        get = functools.partial(self.get, backbone=backbone, **options)
        return list(_readers.map(get, all_of(str, ids, "store.get_many")))

    def prefetch(
        self, ids: Sequence[str], backbone: str, *, encoding: Encoding | None = None, lead: str | None = None
    ) -> concurrent.futures.Future[int]:
        """Starts loading canonicals: from the remote store to the disk, and into memory.

        Returns:
          A future of how many there are. What fails is a miss.
        """
        self.objects.expect_open()
        ids = list(dict.fromkeys(all_of(str, ids, "store.prefetch")))
        results = [_readers.submit(self.get, id, backbone, encoding=encoding, lead=lead) for id in ids]
        count: concurrent.futures.Future[int] = concurrent.futures.Future()
        count.set_running_or_notify_cancel()

        def note(_: object) -> None:
            count.set_result(sum(result.exception() is None and result.result() is not None for result in results))

        if not results:
            count.set_result(0)
        _when_all_done(results, note)
        return count

    def contains(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Returns whether what `get` reads is on the disk or queued. It is not opened, so `get` may still be None."""
        return self.objects.contains(self.names.canonical(backbone, id, encoding, lead))

    def may_have(self, id: str, backbone: str, *, encoding: Encoding | None = None, lead: str | None = None) -> bool:
        """Returns whether `get` may succeed: the object is on the disk or queued, or there is a remote store."""
        self.objects.expect_open()
        return self.objects.remote is not None or self.contains(id, backbone, encoding=encoding, lead=lead)

    def delete(self, id: str, backbone: str) -> bool:
        """Deletes a chunk with all its encodings, patches and encoder output; from the remote store in the background.

        Puts that began before, queued ones too, are then without effect, in every process of this machine.

        Returns:
          Whether there was anything to delete.
        """
        return self.objects.delete(self.names.chunk(backbone, id))

    def lease(self, id: str, backbone: str, seconds: float | int = 60.0) -> "Lease | None":
        """Takes a chunk's lease: whoever has it forms the chunk, once for all machines that share the remote store.

        Without a remote store, once for all processes that share the root.

        Args:
          seconds: how long it lasts unless it is renewed or released; a `Lease` is a context manager.

        Returns:
          The lease; None: another one has it. Then wait, and read the chunk.

        Raises:
          StoreError: the remote store or the disk failed.
        """
        from .remote import take_lease

        self.objects.expect_open()
        return take_lease(self.objects, self.names.chunk(backbone, id), seconds)

    # ------------------------------------------------------------------------------------ encoder outputs, patches

    def put_encoder(self, id: str, backbone: str, output: AnyArray, *, ttl: float | int | None = None) -> None:
        """Stores an encoder output, [T, D] or any shape, under a chunk's id. Raises as `put`."""
        write = self.names.encoder(backbone, id), encode_encoder(id, backbone, output)
        self.objects.put([write], expires=self.objects.expiry(ttl))

    def get_encoder(
        self, id: str, backbone: str, *, tier: Literal["here", "remote"] | None = None
    ) -> np.ndarray | None:
        """Reads an encoder output as a read-only host array; None if there is none.

        Args:
          tier: "here" does not ask the remote store; "remote" reads its version, which another machine may have written
            since, and keeps no copy. None: the nearest.
        """
        name = self.names.encoder(backbone, id)
        if tier == "remote":
            return self.objects.get_remote(name, decode_encoder)
        return self.objects.get(name, decode_encoder, remote=tier is None)

    def amend_encoder(
        self, id: str, backbone: str, amend: Callable[[list[np.ndarray]], AnyArray], *, ttl: float | int | None = None
    ) -> None:
        """Replaces an encoder output by one that is made of what is stored, here and in the remote store.

        No write in between is lost, of this machine's processes or of others that the remote store orders.

        Args:
          amend: makes the new output of the old ones: none, one, or the one here and the remote store's. It may be
            called several times.
        """

        def make(stored: list[Stored]) -> Encoded:
            return encode_encoder(id, backbone, amend([decode_encoder(copy) for copy in stored]))

        self.objects.amend(self.names.encoder(backbone, id), make, expires=self.objects.expiry(ttl))

    def put_patches(self, patches: Sequence[Patch], *, ttl: float | int | None = None) -> None:
        """Stores patches durably in one transaction. Extends the life of a basis that would expire before them.

        Raises:
          InputError: a patch's basis is not stored. StoreError, ShapeError: as `put`.
        """
        patches, expires = all_of(Patch, patches, "store"), self.objects.expiry(ttl)
        extend_bases(self.objects, patches, expires)
        self.objects.put([(self.names.patch(patch), encode_patch_object(patch)) for patch in patches], expires=expires)

    def put_patch_async(self, patch: Patch, *, ttl: float | int | None = None) -> concurrent.futures.Future[bool]:
        """Queues a patch, as `put_async` a chunk. Patches that are queued close together are committed together."""
        expires = self.objects.expiry(ttl)
        (patch,) = all_of(Patch, [patch], "store")
        extend_bases(self.objects, [patch], expires)
        make = functools.partial(encode_patch_object, patch)
        return self.objects.put_async(self.names.patch(patch), make, patch.nbytes, expires=expires)

    def get_patches(self, served: PatchKey | PatchMetadata) -> list[Patch]:
        """Reads every stored patch that serves this chunk, antecedent and base, largest first.

        Patches may have any ranks, layers and dtypes, and an orbit patch any order of its antecedent. Left out are
        patches of another content than `served.content` or, if that is None, than the chunk's stored canonicals; and
        patches whose antecedent was served in another way or has other contents (those of `served`, or else of the
        stored canonicals). If it is unknown which of several contents is meant, none of them is returned. Factors are
        on the default device.

        Raises:
          InputError: `served` is of another type.
        """
        self.objects.expect_open()
        if not isinstance(served, PatchKey | PatchMetadata):
            raise InputError(
                f"store.get_patches: got {served!r:.80}; expected PatchKey(chunk.id, chunk.backbone, antecedent), or a "
                "patch's metadata"
            )
        key = served if isinstance(served, PatchKey) else PatchKey.of(served)
        return find_patches(self.objects, key)

    def patch_count(self, id: str, backbone: str) -> int:
        """Counts a chunk's patches on this machine, behind any antecedent, without reading them."""
        return len(self.objects.with_prefix(f"{self.names.chunk(backbone, id)}/p.", remote=False))

    def put_basis(self, basis: Basis, *, ttl: float | int | None = None) -> None:
        """Stores a basis that patches share, under its digest, before the patches that name it. Raises as `put`.

        A stored basis never gets a shorter life: patches may use it.
        """
        expect_kind(basis, Basis, "store.put_basis", "a Basis")
        put_basis(self.objects, basis, self.objects.expiry(ttl))

    def get_basis(self, digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        """Reads a basis; None if there is none whose content matches the digest."""
        self.objects.expect_open()
        if not isinstance(layout, KVLayout) or not isinstance(digest, str):
            raise InputError(
                f"store.get_basis: got {digest!r:.80}, layout {layout!r:.40}; expected a digest and a KVLayout"
            )
        return find_basis(self.objects, digest, layout, backbone)

    # -------------------------------------------------------------------------------------------------- operating

    def delete_tenant(self) -> None:
        """Deletes everything of this tenant, queued puts too; from the remote store in the background."""
        self.objects.delete_tenant()

    def usage(self) -> Usage:
        """Returns the bytes and the number of this tenant's objects on the disk, without libraries' entries."""
        self.objects.expect_open()
        return self.objects.usage()

    def statistics(self) -> Statistics:
        """Returns counts of this store object's events, and the bytes and objects there are now."""
        return Statistics(dict(sorted(self.objects.counters.items())), self.objects.gauges())

    def verify(self, delete: bool = False) -> list[str]:
        """Reads all objects of the tenant. Returns the keyed names of damaged ones, and deletes these if asked.

        Raises:
          StoreError: objects are encrypted with another key.
          StoreCorruptError: the index is damaged; the next opening makes it again.
        """
        self.objects.expect_open()
        return self.objects.damaged(delete)

    def collect(self) -> int:
        """Deletes what has expired in the root, and the files of dead writers. Returns how many there were."""
        self.objects.expect_open()
        return self.objects.index.collect()

    def save(self, directory: str | os.PathLike[str], *, ids: Collection[str] | None = None) -> Summary:
        """Saves this tenant's objects, queued ones too, as a snapshot; see `snapshot.save_snapshot`.

        Args:
          ids: of the chunks to save, with their encoder outputs and patches; None: everything.
        """
        expect_kind(directory, str | os.PathLike, "store.save: directory", "a directory's name", InputError)
        return save_snapshot(self.objects, directory, ids=ids)

    def restore(
        self, directory: str | os.PathLike[str], *, key: bytes | None = None, ids: Collection[str] | None = None
    ) -> Summary:
        """Adds the objects of a snapshot that are not stored, after all were verified; see `snapshot.load_snapshot`.

        Args:
          key: the key of encrypted objects that were saved from a root of another secret.
          ids: of the chunks to restore, with their encoder outputs and patches; None: everything.
        """
        expect_kind(directory, str | os.PathLike, "store.restore: directory", "a directory's name", InputError)
        return load_snapshot(directory, self.objects, key=key, ids=ids)

    def flush(self) -> None:
        """Waits for asynchronous puts, and until the remote store has everything.

        Raises:
          StoreError: the first error of a put since the last `flush`, with the others in its notes; or the remote store
            does not answer. What it lacks is sent later, by this process or another.
        """
        self.objects.flush()

    def close(self) -> None:
        """Writes queued puts and closes the store, without waiting for a remote one. Idempotent. Raises as `flush`."""
        self.objects.close()

    def _jobs_of(self, chunk: Chunk, encoding: Encoding | None) -> list[tuple[str, Callable[[], Encoded], int]]:
        """Returns name, encoder and bytes of a chunk's objects: the canonical comes last, and implies the others."""
        for value in chunk.kv.values():
            if not getattr(value, "is_fully_addressable", True):
                raise InputError(
                    "store: got kv that others have a part of; expected all of it here, or StoreItem(contents=)"
                )
        jobs: list[tuple[str, Callable[[], Encoded], int]] = []
        if chunk.encoder is not None:
            make = functools.partial(encode_encoder, chunk.id, chunk.backbone, chunk.encoder)
            jobs.append((self.names.encoder(chunk.backbone, chunk.id), make, chunk.encoder.nbytes))
        word = chunk.encoding if encoding is None else encoding
        name = self.names.canonical(chunk.backbone, chunk.id, word, chunk.lead)
        return [*jobs, (name, functools.partial(encode_chunk_object, chunk, encoding), chunk.nbytes)]


def placed(chunk: Chunk, placement: Placement | Mapping[str, Placement]) -> Chunk:
    """Places a chunk's kv on devices, as `ChunkStore.get` does; each process of a mesh places its part."""
    kv = {}
    for name, value in chunk.kv.items():
        target = placement.get(name) if isinstance(placement, Mapping) else placement
        expect_kind(
            target, jax.Device | Sharding, f"store: placement of {name!r}", "a device or a sharding", InputError
        )
        kv[name] = _placed(value, target)
    return trusted(chunk, kv=PhaseFreeKV(kv))


def _placed(value: Any, target: Placement) -> Any:
    if is_packed(value):
        leaves: PackedArray = value
        return jax.tree.map(functools.partial(_placed, target=packed_target(target)), leaves)
    if isinstance(target, Sharding):
        return jax.make_array_from_callback(value.shape, target, lambda index: value[index])
    return jax.device_put(value, target)


def packed_target(target: Placement) -> Placement:
    """Returns where the leaves of packed KV go: they are partitioned by layers alone."""
    is_named = isinstance(target, NamedSharding)
    return NamedSharding(target.mesh, PartitionSpec(*target.spec[:1])) if is_named else target


def _joined(acks: Sequence[Ack]) -> Ack:
    """Returns a future that is done when all are: with the first error, or whether all took place."""
    joined: Ack = concurrent.futures.Future()
    joined.set_running_or_notify_cancel()

    def note(_: object) -> None:
        errors = [error for ack in acks if (error := ack.exception()) is not None]
        if errors:
            joined.set_exception(errors[0])
        else:
            joined.set_result(all(ack.result() for ack in acks))

    _when_all_done(acks, note)
    return joined


def _when_all_done(futures: Sequence[concurrent.futures.Future[Any]], note: Callable[[object], None]) -> None:
    """Calls `note` once, when all futures are done."""
    pending = len(futures)
    lock = threading.Lock()

    def count(done: object) -> None:
        nonlocal pending
        with lock:
            pending -= 1
            last = pending == 0
        if last:
            note(done)

    for future in futures:
        future.add_done_callback(count)
