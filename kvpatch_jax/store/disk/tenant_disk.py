"""One tenant's disk, which `ChunkStore`, its libraries and its snapshots share below the memory tiers.

`Disk` handles files of all tenants; this module adds one tenant's names, encryption, pins and budgets.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from ...cache import Chunk
from ...errors import StoreClosedError, StoreError
from ..format.buffers import Buffers
from ..format.encryption import AesGcm, Plain
from ..format.expiry import Seconds
from ..format.naming import Name, ObjectNames
from ..format.objects import Blob, file_size
from ..io.thread_pool import register_fork_guard
from .budget import Budget
from .counters import Counters
from .directory import NameState
from .disk import Disk
from .eviction import collect, make_room
from .key_check import check_key
from .object_writer import LinkSource
from .partial_exports import sweep_unfinished
from .root_config import names_secret
from .shared_budget import note_budget, shared_budget
from .version_floor import Floors


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
        check_key(self.disk.root, self.names.space, encryption.check)

        self._pins: collections.Counter[str] = collections.Counter()
        # The whole root's budget: the tenants' notes are read before anything is evicted for it.
        self._whole_root = whole_root
        self._shared: int | None = self.budget.disk if whole_root else None
        self._budget_noted = whole_root
        # Per budgeted folder: bytes at the last scan, and bytes written by this process since.
        self._used: dict[str, int] = {}
        self._fresh: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()
        self.closed = False
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._counting = threading.Lock()

    def close(self) -> None:
        """Refuses further calls, drops cached headers and frees idle buffers."""
        self.closed = True
        self.disk.forget()
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

    def put(self, items: Sequence[tuple[Name, Blob]]) -> None:
        """Writes sealed objects durably, and evicts others for them. Raises as `ChunkStore.put`."""
        self.make_room(lambda: sum(file_size(blob, name.file) for name, blob in items))
        try:
            with self.counters.timed("commit", "disk"):
                written = self.disk.put_group(items)
        except StoreError:
            self.forget_usage()  # some of them may have been written
            raise
        self._note_written(written)

    def copy(self, name: Name, blob: Blob, before: NameState) -> None:
        """Writes a copy of an object, as `ObjectWriter.copy`, and evicts others for it."""
        self.make_room(lambda: file_size(blob, name.file))
        self._note_written(self.disk.copy(name, blob, before))

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
        floors, noted = Floors(self.disk), dict[str, int]()

        def coming() -> Iterator[list[tuple[Name, Blob | LinkSource]]]:
            for group in groups:
                floors.admit(group, noted)
                yield [(name, self.sealed(name, item) if isinstance(item, Blob) else item) for name, item in group]

        added = self.disk.writer.add_all(coming(), copy)
        self._note_written(need)
        return added

    def make_room(self, size: Callable[[], int]) -> None:
        """Evicts if `size` more bytes may exceed a budget. Raises StoreFullError.

        The folder is scanned only if the last scan and the bytes written since do not show that they fit.
        """
        if not self._budget_noted:
            note_budget(self.disk.root, self.names.space, self.budget.disk)
            self._budget_noted = True
        bounds = self._bounds()
        need = size() if bounds else 0

        with self._counting:
            if self.budget.disk is not None and any(self._may_exceed(*bound, need) for bound in bounds.items()):
                if not self._whole_root:  # other tenants' budgets may have changed
                    self._shared = shared_budget(self.disk.root, self.names.space, self.budget.disk)
                bounds = self._bounds()
            for below, budget in bounds.items():
                if self._may_exceed(below, budget, need):
                    self._used[below] = make_room(self.disk, budget, need, self.pinned, below, self.names.space)
                    self._fresh[below] = 0

    def _bounds(self) -> dict[str, int]:
        """Returns the budgets by folder: the tenant's and the root's, as far as there are any."""
        own, shared = [self.budget.tenant], self._shared
        if shared is None or shared != self.budget.disk:  # else the root's bound is the tenant's too
            own.append(self.budget.disk)
        bounds = [budget for budget in own if budget is not None]
        return ({self.names.space: min(bounds)} if bounds else {}) | ({} if shared is None else {"obj": shared})

    def _may_exceed(self, below: str, budget: int, need: int) -> bool:
        used, fresh = self._used.get(below), self._fresh[below]
        # Other processes write too: after a sixteenth of the budget, the last scan is too old.
        return used is None or fresh > budget // 16 or used + fresh + need > budget

    def _note_written(self, nbytes: int) -> None:
        with self._counting:
            self._fresh.update(dict.fromkeys(("obj", self.names.space), nbytes))

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
        self.disk.collect_quarantine(self.names.tenant_name)
        sweep_unfinished(self.disk.root, self.names.tenant_name)
        return gone

    def forget_usage(self) -> None:
        """Makes the next write scan the disk for its budget."""
        self._used.clear()


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
