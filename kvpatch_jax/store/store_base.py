"""Tiers of a chunk store: the commit of objects to them, and what keeps a tenant's objects in order."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import NoneType

from ..errors import InputError, StoreIOError
from ..utils.atomic_files import path_of
from ..utils.kinds import expect_kind
from ..utils.sizes import Size, size_of
from .disk.budget import Budget, budget_of
from .disk.object_writer import Only
from .disk.tenant_disk import TenantDisk
from .format.encoding_choice import EncodingChoice
from .format.expiry import Seconds, checked_ttl, expires_at
from .format.naming import Encoding, Name
from .format.objects import Blob
from .metrics import Statistics
from .patch_objects import PatchObjects
from .remotes.remote_store import RemoteStore
from .tenants import DeletionReport, delete_tenant
from .tiers.reader import TieredReader
from .tiers.remote_tier import RemoteTier, Resync
from .tiers.shared_host_tier import SharedHostTier
from .tiers.writer import Ack, Writer

ATTEMPTS = 16
"""Number of times that a put is begun if something later replaces it meanwhile."""


class StoreBase:
    """Tiers of one tenant's store; see `ChunkStore` for the arguments."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tenant: str = "default",
        budget: Budget | Size | None = None,
        ttl: Seconds | None = None,
        secret: bytes | None = None,
        remote: RemoteStore | None = None,
        key: bytes | None = None,
        wipe: bool | None = None,
        queue: Size = 256 << 20,
        clock: Callable[[], float] = time.time,
        encoding: Encoding | None = None,
        write_behind: bool = True,
        mapped: bool = False,
        host_tier: SharedHostTier | None = None,
    ):
        self.encodings = EncodingChoice(encoding)
        self._ttl = checked_ttl(ttl, "store")
        expect_kind(remote, (RemoteStore, NoneType), "store: remote", "a RemoteStore, or None")
        expect_kind(host_tier, (SharedHostTier, NoneType), "store: host_tier", "a SharedHostTier, or None")
        expect_kind(wipe, (bool, NoneType), "store: wipe", "True, False or None")
        expect_kind(write_behind, bool, "store: write_behind", "True or False")
        expect_kind(mapped, bool, "store: mapped", "True or False")
        expect_kind(clock, Callable, "store: clock", "a function that returns seconds since the epoch")
        queue_bytes, budgets = size_of(queue, "store: queue"), budget_of(budget, "store: budget")
        path = path_of(root, "store: root", InputError, "a directory's name")

        # Nothing was created so far: an invalid argument leaves no directory.
        self.tenant_disk = TenantDisk(path, tenant, budget=budgets, secret=secret, key=key, wipe=wipe, clock=clock)
        self.disk, self.names = self.tenant_disk.disk, self.tenant_disk.names
        self.disk.mapped, self._write_behind = mapped, write_behind
        self.budget, self.counters = self.tenant_disk.budget, self.tenant_disk.counters
        self._remote = None if remote is None else RemoteTier(remote, self.tenant_disk)
        self._writer = Writer(self._commit, self.tenant_disk, queue_bytes)
        self._reader = TieredReader(self.tenant_disk, self._writer, self._remote, host_tier)
        self._patches = PatchObjects(self.tenant_disk, self._reader)

    # ----------------------------------------------------------------------------------------------- keeping

    @contextlib.contextmanager
    def pin(self, id: str, backbone: str) -> Iterator[None]:
        """Keeps a chunk and its patches from eviction by this store object. Pins of one chunk add up.

        It may still expire, be deleted, or be evicted by another process; reading it is a miss then.
        """
        with self.tenant_disk.pin(self.names.canonical(backbone, id).chunk_key):
            yield

    def resync(self) -> Resync:
        """Compares this tenant's objects here and in the remote store: sends what it lacks, deletes what it deleted.

        Not needed after an outage, for which the outbox is enough, but after a restore, or a loss of the remote store.

        Raises:
          InputError: there is no remote store. StoreError: it does not answer, or the disk could not be written.
        """
        self.tenant_disk.expect_open()
        if self._remote is None:
            raise InputError("store.resync: got a store without a remote one; expected ChunkStore(remote=...)")
        return self._remote.resync()

    def collect(self) -> int:
        """Deletes this tenant's expired objects, files of dead writers, unfinished snapshots and old quarantined files.

        Expired objects are also deleted from the remote store, where each header is read; failures there are ignored.

        Returns:
          The number of expired objects and files of dead writers.

        Raises:
          StoreError: the disk could not be read or written.
        """
        self.tenant_disk.expect_open()
        deleted = self.tenant_disk.collect()
        return deleted + (0 if self._remote is None else self._remote.collect(f"{self.names.space}/"))

    def delete_tenant(self) -> DeletionReport:
        """Deletes everything of this tenant in every tier, in quarantine and in the remote store; see `tenants`.

        Queued puts are written first. The store remains usable. Other store objects of the tenant return nothing of it
        from then on, and free their memory at their next lookup. Raises StoreError, and afterwards the errors of
        `flush`.
        """
        self.tenant_disk.expect_open()
        try:
            self._writer.flush()
        finally:  # also after a failed put: its error is raised once the tenant is deleted
            if self._remote is not None:
                self._remote.discard()
            self._reader.clear()
            self.tenant_disk.forget_usage()
            report = delete_tenant(self.disk, self.names, None if self._remote is None else self._remote.remote)
            self._reader.clear()
        return report

    def statistics(self) -> Statistics:
        """Returns counts, latencies and bytes held of this store object; `prometheus_text` formats them."""
        pool = self.disk.buffers.idle_bytes
        held = {"host": self._reader.host.nbytes, "pool": pool}
        gauges = self.tenant_disk.gauges()
        if self._remote is not None:
            gauges |= self._remote.gauges()
        return Statistics(self.counters.read(), self.counters.latencies(), held, gauges)

    def flush(self) -> None:
        """Waits for asynchronous puts, and until the remote store has everything.

        Raises:
          StoreError: the first error of a put since the last `flush`, with the others in its notes; or the remote store
            does not answer. What it lacks stays in the outbox, and is sent later, by this process or another.
        """
        self._writer.flush()
        if self._remote is not None:
            self._remote.sender.flush()

    def close(self) -> None:
        """Writes queued puts and frees memory. Idempotent. Raises as `flush`."""
        self.tenant_disk.close()  # first, so that no call fills memory or the queue again
        self._reader.clear()
        try:
            self._writer.close()
            if self._remote is not None:
                self._remote.sender.close()
        finally:
            self.tenant_disk.evictor.leave(self.disk)
            self.disk.index.close()

    def __repr__(self) -> str:
        return f"ChunkStore({self.disk.root!r}{', closed' if self.tenant_disk.closed else ''})"

    # ------------------------------------------------------------------------------------------------ inside

    def expiry(self, ttl: Seconds | None) -> float | None:
        """Returns when an object that is put now expires, in seconds since the epoch; None: never."""
        ttl = self._ttl if ttl is None else ttl
        return None if ttl is None else expires_at(self.tenant_disk.clock(), ttl, "store")

    def timed(self, ack: Ack, began: float) -> Ack:
        """Counts the latency of an asynchronous put that succeeds."""

        def note(done: Ack) -> None:
            if done.exception() is None:
                self.counters.observe("put", "disk", time.perf_counter() - began)

        ack.add_done_callback(note)
        return ack

    def put_now(self, blobs: Sequence[tuple[Name, Blob]]) -> None:
        """Writes objects by writes that begin now. One that something later replaces meanwhile follows that.

        So of two puts at once either may be the last, but none is lost to a copy or a restore.
        """
        for attempt in range(ATTEMPTS):
            begun: list[tuple[Name, Blob]] = []
            for name, blob in blobs:
                revision = self.tenant_disk.begin(name, again=attempt > 0)
                begun.append((name, dataclasses.replace(blob, revision=revision)))
            outdated = {name.path for name in self._commit(begun)}
            blobs = [(name, blob) for name, blob in blobs if name.path in outdated]
            if not blobs:
                return
        raise self.outpaced()

    def outpaced(self) -> StoreIOError:
        """Returns the error of a write that was begun again too often."""
        return StoreIOError(
            f"store: put: got a later write or deletion during each of {ATTEMPTS} attempts; expected time to write"
        )

    def _commit(self, items: Sequence[tuple[Name, Blob]], only: Only = "later") -> list[Name]:
        """Writes objects to the disk, and has them sent. Returns names that others have changed meanwhile.

        Args:
          only: what they may replace, as `ObjectWriter.put`.
        """
        if self._remote is not None:
            self._remote.sender.expect_room(sum(blob.nbytes for _, blob in items))
        # The disk comes first: neither memory nor the remote store may have what it lacks.
        outdated = self.tenant_disk.put(items, only) if items else []
        for name, _ in items:
            self._reader.replaced(name)
        if self._remote is not None and items:
            self._remote.sender.wake()
            if not self._write_behind:
                self._remote.sender.flush()
        return outdated
