"""Stores of an engine's tenants, opened when they are first asked for, and what a plan looks up in them."""

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...cache import Chunk, Patch
from ...errors import KVPatchError, StoreClosedError
from ...store import ChunkStore
from ...store.format.naming import PatchKey
from ...window import PatchNote
from .layouts import CacheFormat
from .messages import ChunkPayload
from .request_plan import ChunkStep, StockedPatch
from .segments import PromptSegment
from .settings import ConnectorConfig
from .weights import expect_weights

logger = logging.getLogger(__name__)

MOST_TENANTS = 64
"""Stores that are kept open; the one that was not asked for longest is let go of, by its last user."""


class Stores:
    """One tenant's store for each name. Any number of threads may ask."""

    def __init__(self, settings: ConnectorConfig, weights: str | None = None):
        """Opens nothing yet.

        Args:
          weights: digest of the engine's; a store of others is not to be used. None: the settings' name vouches alone.
        """
        self.settings, self.weights = settings, weights
        self._open: collections.OrderedDict[str, ChunkStore] = collections.OrderedDict()
        self._lock, self._closed = threading.Lock(), False

    def of(self, tenant: str) -> ChunkStore:
        """The store of a tenant, whose chunks under the settings' name are of the engine's weights.

        Raises:
          WeightsError: they are of others. StoreClosedError: after `close`. As `ChunkStore`.
        """
        with self._lock:
            self._expect_open()
            found = self._open.get(tenant)
        # Opened without the lock: a store that hangs holds up no other tenant. Opened twice at once, one is kept.
        made = ChunkStore(self.settings.store, tenant=tenant) if found is None else found
        with self._lock:
            self._expect_open()
            found = self._open.setdefault(tenant, made)
            self._open.move_to_end(tenant)
            if len(self._open) > MOST_TENANTS:
                self._open.popitem(last=False)  # not closed: another thread may be reading it, and nothing is queued
        # Each time: what says so may be evicted, or deleted with its tenant, and is then to be said again.
        if self.weights is not None:
            expect_weights(found, self.settings.backbone, self.weights)
        return found

    def _expect_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"stores of {self.settings.store}: used after close; expected them open")

    def close(self, patience: float | None = None) -> bool:
        """Closes all of them, and opens no more.

        Args:
          patience: seconds to wait at most for what is being written; None: the settings'.

        Returns:
          Whether all were closed in time. What was not is left to end by itself.
        """
        with self._lock:
            self._closed = True
            stores = list(self._open.values())
            self._open.clear()

        # Each on a thread of its own: one that hangs keeps neither the others open nor the process from ending.
        closing = [threading.Thread(target=_close, args=(store,), daemon=True) for store in stores]
        for thread in closing:
            thread.start()
        until = time.monotonic() + (self.settings.patience if patience is None else patience)
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in closing)

    def has(self, tenant: str, id: str) -> bool:
        """Whether a canonical is there, or will be. It is not read."""
        return self.of(tenant).contains(id, self.settings.backbone)

    def served(self, tenant: str, id: str, front: tuple[str, ...]) -> list[tuple[StockedPatch, Patch]]:
        """A chunk's patches that were formed behind exactly these, with their notes."""
        found = self.of(tenant).get_patches(PatchKey(chunk=id, backbone=self.settings.backbone, antecedent=front))
        notes = [(PatchNote.of(patch), patch) for patch in found]
        return [(StockedPatch(note.digest, note.rank), patch) for note, patch in notes if note.rank]

    def formed(self, tenant: str, id: str, front: tuple[str, ...]) -> bool:
        """Whether nothing is to be formed of a chunk behind these: a canonical of a first one, a patch of any other."""
        return bool(self.served(tenant, id, front)) if front else self.has(tenant, id)


def _close(store: ChunkStore) -> None:
    try:
        store.close()
    except (KVPatchError, OSError) as error:
        logger.warning("kvpatch: a store was not closed: %s", error)


class StoreCatalog:
    """What one tenant's store has, as `planning.Stored`: what is said to be there was read, verified and is held.

    So nothing that is planned can be gone, turn out damaged, or not fit the engine's pool, once the engine has counted
    on it.

    Attributes:
      unfit: why chunks and patches that are stored under these names count as not stored.
    """

    def __init__(self, stores: Stores, tenant: str, cache: CacheFormat, segments: Sequence[PromptSegment]):
        """Holds nothing yet.

        Args:
          cache: of the engine. segments: chunks that may be served; it has no other.
        """
        self._stores, self._tenant, self._cache = stores, tenant, cache
        self._lengths = {segment.id: segment.end - segment.begin for segment in segments}
        self._chunks: dict[str, Chunk | None] = {}
        self._patches: dict[str, Patch] = {}
        self.unfit: list[KVPatchError] = []

    def has_canonical(self, id: str) -> bool:
        """Whether the store has a canonical, undamaged, that can be placed in the engine's pool."""
        if id not in self._lengths:
            return False
        if id not in self._chunks:
            chunk = self._stores.of(self._tenant).get(id, self._stores.settings.backbone)
            if chunk is not None and not self._fits(self._cache.check, chunk, self._lengths[id]):
                chunk = None
            self._chunks[id] = chunk
        return self._chunks[id] is not None

    def patches(self, id: str, front: tuple[str, ...]) -> list[StockedPatch]:
        """The store's patches of a chunk behind these, of those that can be added to its canonical."""
        chunk = self._chunks[id]
        assert chunk is not None  # a plan asks for it first
        fitting = []
        for stocked, patch in self._stores.served(self._tenant, id, front):
            if self._fits(self._cache.check_patch, patch, chunk, front):
                self._patches[stocked.digest] = patch
                fitting.append(stocked)
        return fitting

    def _fits(self, check: Callable[..., None], *given: Any) -> bool:
        try:
            check(*given)
        except KVPatchError as error:
            self.unfit.append(error)
            return False
        return True

    def held(self, steps: Sequence[ChunkStep]) -> tuple[ChunkPayload, ...]:
        """What steps place, in order."""
        pieces = []
        for step in steps:
            chunk = self._chunks[step.segment.id]
            assert chunk is not None
            pieces.append(ChunkPayload(step, chunk, None if step.patch is None else self._patches[step.patch]))
        return tuple(pieces)
