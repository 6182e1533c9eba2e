"""Stores of an engine's tenants, opened when they are first asked for, and what a plan looks up in them."""

import collections
import threading
from collections.abc import Sequence

from ...chunk import Chunk
from ...errors import StoreClosedError
from ...patch_metadata import Patch
from ...store import ChunkStore
from ...store.format.naming import Served
from ...window.entry import PatchNote
from .messages import Piece
from .planning import Step, StockedPatch
from .settings import Settings

MOST_TENANTS = 64
"""Stores that are kept open; the one that was not asked for longest is let go of, by its last user."""


class Stores:
    """One tenant's store for each name. Any number of threads may ask."""

    def __init__(self, settings: Settings):
        """Opens nothing yet."""
        self.settings = settings
        self._open: collections.OrderedDict[str, ChunkStore] = collections.OrderedDict()
        self._lock, self._closed = threading.Lock(), False

    def of(self, tenant: str) -> ChunkStore:
        """The store of a tenant. Raises as `ChunkStore`; StoreClosedError after `close`."""
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
        return found

    def _expect_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"stores of {self.settings.store}: used after close; expected them open")

    def close(self) -> None:
        """Closes all of them, and opens no more."""
        with self._lock:
            self._closed = True
            for store in self._open.values():
                store.close()
            self._open.clear()

    def has(self, tenant: str, id: str) -> bool:
        """Whether a canonical is there, or will be. It is not read."""
        return self.of(tenant).contains(id, self.settings.backbone)

    def served(self, tenant: str, id: str, front: tuple[str, ...]) -> list[tuple[StockedPatch, Patch]]:
        """A chunk's patches that were formed behind exactly these, with their notes."""
        found = self.of(tenant).get_patches(Served(chunk=id, backbone=self.settings.backbone, antecedent=front))
        notes = [(PatchNote.of(patch), patch) for patch in found]
        return [(StockedPatch(note.digest, note.rank), patch) for note, patch in notes if note.rank]

    def formed(self, tenant: str, id: str, front: tuple[str, ...]) -> bool:
        """Whether nothing is to be formed of a chunk behind these: a canonical of a first one, a patch of any other."""
        return bool(self.served(tenant, id, front)) if front else self.has(tenant, id)


class Looked:
    """What one tenant's store has, as `planning.Stored`: what is said to be there was read, verified and is held.

    So nothing that is planned can be gone, or turn out damaged, once the engine has counted on it.
    """

    def __init__(self, stores: Stores, tenant: str):
        """Holds nothing yet."""
        self._stores, self._tenant = stores, tenant
        self._chunks: dict[str, Chunk | None] = {}
        self._patches: dict[str, Patch] = {}

    def has_canonical(self, id: str) -> bool:
        """Whether the store has a canonical, undamaged."""
        if id not in self._chunks:
            self._chunks[id] = self._stores.of(self._tenant).get(id, self._stores.settings.backbone)
        return self._chunks[id] is not None

    def patches(self, id: str, front: tuple[str, ...]) -> list[StockedPatch]:
        """The store's patches of a chunk behind these."""
        found = self._stores.served(self._tenant, id, front)
        self._patches |= {stocked.digest: patch for stocked, patch in found}
        return [stocked for stocked, _ in found]

    def held(self, steps: Sequence[Step]) -> tuple[Piece, ...]:
        """What steps place, in order."""
        pieces = []
        for step in steps:
            chunk = self._chunks[step.segment.id]
            assert chunk is not None
            pieces.append(Piece(step, chunk, None if step.patch is None else self._patches[step.patch]))
        return tuple(pieces)
