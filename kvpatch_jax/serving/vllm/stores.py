"""Stores of an engine's tenants, opened when they are first asked for, and what a plan looks up in them."""

import collections

from ...errors import InputError
from ...patch_metadata import Patch
from ...store import ChunkStore
from ...store.format.naming import Served
from ...window.entry import PatchNote
from .planning import StockedPatch
from .settings import Settings

MOST_TENANTS = 64
"""Stores that are open at once; the one that was not asked for longest is closed."""


class Stores:
    """One tenant's store for each name."""

    def __init__(self, settings: Settings):
        """Opens nothing yet."""
        self.settings = settings
        self._open: collections.OrderedDict[str, ChunkStore] = collections.OrderedDict()

    def of(self, tenant: str) -> ChunkStore:
        """The store of a tenant. Raises as `ChunkStore`."""
        if tenant not in self._open:
            self._open[tenant] = ChunkStore(self.settings.store, tenant=tenant)
            if len(self._open) > MOST_TENANTS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(tenant)
        return self._open[tenant]

    def close(self) -> None:
        """Closes all of them."""
        for store in self._open.values():
            store.close()
        self._open.clear()

    def served(self, tenant: str, id: str, front: tuple[str, ...]) -> list[tuple[StockedPatch, Patch]]:
        """A chunk's patches that were formed behind exactly these, with their notes."""
        found = self.of(tenant).get_patches(Served(chunk=id, backbone=self.settings.backbone, antecedent=front))
        notes = [(PatchNote.of(patch), patch) for patch in found]
        return [(StockedPatch(note.digest, note.rank), patch) for note, patch in notes if note.rank]

    def patch(self, tenant: str, id: str, front: tuple[str, ...], digest: str) -> Patch:
        """The patch of this digest.

        Raises:
          InputError: it is not there any more.
        """
        for stocked, patch in self.served(tenant, id, front):
            if stocked.digest == digest:
                return patch
        raise InputError(f"patch {digest} of chunk {id[:12]}… is gone; expected it in the store")


class Looked:
    """What one tenant's store has, as `planning.Stored`. Patches that were found are remembered."""

    def __init__(self, stores: Stores, tenant: str, known: dict[tuple[str, str, tuple[str, ...]], list[StockedPatch]]):
        """Takes what is `known` of all tenants' patches, and adds to it."""
        self._stores, self._tenant, self._known = stores, tenant, known

    def has_canonical(self, id: str) -> bool:
        """Whether the store has a canonical, or will."""
        return self._stores.of(self._tenant).contains(id, self._stores.settings.backbone)

    def patches(self, id: str, front: tuple[str, ...]) -> list[StockedPatch]:
        """The store's patches of a chunk behind these."""
        key = (self._tenant, id, front)
        if key not in self._known:
            found = [stocked for stocked, _ in self._stores.served(self._tenant, id, front)]
            if not found:  # it may come; what was found stays, and is looked for again before it is loaded
                return []
            if len(self._known) >= 4096:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return self._known[key]
