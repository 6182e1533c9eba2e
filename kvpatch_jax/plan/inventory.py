"""Inventory of the canonicals and patches that plans may use, in memory or in a store."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from ..backbone import Backbone
from ..cache import Antecedent, Chunk, Patch, content_of
from ..core import KVLayout
from ..errors import PlanError
from ..patching import update_patch
from ..window import (
    Encodings,
    Entry,
    PatchNote,
    PatchStore,
    StoredPrefills,
    Ways,
    asked_behind,
    chain_digest,
    chain_of,
    contents_differ,
    stored,
    stored_patches,
)
from .operating_points import Point


class AvailablePatch(NamedTuple):
    """A patch that a plan may use.

    Attributes:
      note: what a window needs to know of it.
      patch: the patch itself if it is in memory; None if the executor reads it from its store.
    """

    note: PatchNote
    patch: Patch | None = None

    @property
    def point(self) -> Point:
        """Its operating point: "stored", "orbit" or "update"."""
        return self.note.point

    @property
    def ways(self) -> Ways:
        """What it makes of a canonical."""
        return ((self.note.point, self.note.rank),)


class PatchInventory:
    """Canonicals and patches of one backbone.

        inventory = PatchInventory.of(store, backbone)  # looked up in the store on demand
        inventory.add(chunk, patch)                     # in memory, in addition
        inventory.fold(patch, correction)               # a stored patch corrected for another antecedent: "update"

    Patches that a store returned are remembered. A miss is looked up again next time.

    Attributes:
      backbone: its fingerprint.
      chunks: the canonicals that are in memory, by id.
      prefills: the stored prefills; None without a store that keeps them.
      in_memory: whether anything is in memory, which an executor must be given (`Plan.provide`).
    """

    def __init__(self, backbone: str, store: PatchStore | None = None, layout: KVLayout | None = None):
        """Creates an inventory without entries.

        Args:
          backbone: its fingerprint.
          store: where patches and canonicals are looked up; None: only what is added.
          layout: of the backbone; the store needs it.
        """
        if not isinstance(backbone, str):
            raise PlanError(
                f"inventory.backbone: got {backbone!r:.80}; expected a fingerprint (PatchInventory.of takes a Backbone)"
            )

        self.backbone = backbone
        self._store = store
        self._layout = layout
        self._lead: str | None = None
        self._encodings: Encodings = (None,)
        self.in_memory = False
        self.prefills: StoredPrefills | None = None
        self.chunks: dict[str, Chunk] = {}
        self._contents: dict[str, set[str | None]] = {}

        # Three indexes of the same patches: by digest; by the chain digest of what they were formed behind; and those
        # that may also serve behind other chains (orbit patches, unknown contents).
        self._by_digest: dict[str, dict[str, AvailablePatch]] = {}
        self._by_chain: dict[tuple[str, str], list[AvailablePatch]] = {}
        self._of_any_chain: dict[str, list[AvailablePatch]] = {}

    @classmethod
    def of(
        cls,
        store: PatchStore | None,
        backbone: Backbone,
        *,
        lead: str | None = None,
        prefills: StoredPrefills | None = None,
        encodings: Encodings = (None,),
    ) -> "PatchInventory":
        """Returns the inventory of a store for a backbone.

        Args:
          store: None: nothing, until something is added.
          lead: digest of what canonicals were prefilled behind (`PagedExecutor.lead`).
          prefills: the stored prefills that it offers. None: none.
          encodings: of canonicals that it offers, and of those whose patches it does (`PagedExecutor.encodings`).
        """
        if not all(hasattr(backbone, name) for name in ("fingerprint", "layout")):
            raise PlanError(f"inventory.backbone: got {backbone!r:.80}; expected a Backbone, as models.load returns")
        if store is not None and not isinstance(store, PatchStore):
            raise PlanError(f"inventory.store: got {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")

        inventory = cls(backbone.fingerprint, store, backbone.layout)
        inventory._lead, inventory._encodings = lead, encodings
        inventory.prefills = prefills
        return inventory

    # ------------------------------------------------------------------------------------------------ contents

    def add(self, *items: Chunk | Patch | PatchNote | Entry) -> None:
        """Adds chunks and patches in memory, and notes of patches and entries of chunks that a store has.

        Raises:
          PlanError: another type, or another backbone. WindowError: a patch that no window can use.
        """
        for item in items:
            if isinstance(item, Chunk):
                self._check_backbone(item.backbone, f"chunk {item.id!r:.80}")
                self._contents.setdefault(item.id, set()).add(content_of(item))
                self.chunks[item.id] = item
                self.in_memory = True
            elif isinstance(item, Entry):
                self._contents.setdefault(item.id, set()).add(item.content)
            elif isinstance(item, Patch):
                self._check_backbone(item.metadata.backbone, f"patch of {item.metadata.chunk!r:.80}")
                note = PatchNote.of(item)
                self._index(note, item)
            elif isinstance(item, PatchNote):
                self._index(item)
            else:
                raise PlanError(
                    f"inventory.add: got a {type(item).__name__}; expected a Chunk, Patch, PatchNote or Entry"
                )

    def fold(self, patch: Patch, correction: Patch) -> AvailablePatch:
        """Adds a stored patch with a correction folded in, which is valid behind the correction's antecedent.

        Raises:
          As `update_patch`.
        """
        updated = update_patch(patch, correction)
        return self._index(dataclasses.replace(PatchNote.of(updated), updated=True), updated)

    # ------------------------------------------------------------------------------------------------ queries

    def canonical(self, entry: Entry) -> bool:
        """Returns whether an entry's canonical is available."""
        # An unknown content (None) on either side matches: nothing contradicts it.
        contents = self._contents.get(entry.id)
        if contents is not None and (entry.content in contents or None in contents or entry.content is None):
            return True

        if self._store is None:
            return False
        # A `ChunkStore` knows without reading. Other stores may not.
        contains = getattr(self._store, "contains", None)
        for word in self._encodings:
            if contains is not None:
                options = {} if word is None else {"encoding": word}
                if contains(entry.id, self.backbone, lead=self._lead, **options):
                    return True
                continue
            chunk = stored(self._store, entry.id, self.backbone, self._lead, word)
            if chunk is not None and not contents_differ(entry.content, chunk.content):
                return True
        return False

    def note(self, id: str, digest: str) -> AvailablePatch | None:
        """Returns a chunk's patch of this digest, if it was added or looked up before."""
        return self._by_digest.get(id, {}).get(digest)

    def serving(self, entry: Entry, target: str, antecedent: Callable[[], Antecedent]) -> list[AvailablePatch]:
        """Returns the patches that are valid for an entry behind the pieces in front of it.

        Args:
          target: the chain digest of those pieces.
          antecedent: returns them in full. Called only where the digest does not decide, because that is slow.
        """
        patches = self._by_chain.get((entry.id, target), [])

        # Patches of any chain are compared in full. Those of this very chain were found by its digest already.
        chain, full = None, antecedent() if self._of_any_chain.get(entry.id) else None
        for available in self._of_any_chain.get(entry.id, []):
            note = available.note
            assert full is not None
            # A cheap test first.
            if len(note.antecedent.members) != len(full.members):
                continue
            if note.antecedent.difference(full, note.orbit) is None:
                chain = chain or chain_digest(self.backbone, full)
                if chain_of(self.backbone, note) != chain:
                    patches = [*patches, available]

        # The store's patches for this antecedent, and orbit patches for any order of it.
        if not patches and self._store is not None:
            assert self._layout is not None
            full = antecedent() if full is None else full
            query = asked_behind(full, entry.id, entry.content, self._layout, self.backbone, self._lead)
            found = list[Patch]()
            for word in self._encodings:
                query = dataclasses.replace(query, encoding=word, orbit=False)
                found += stored_patches(self._store, query)
                if full.ids:
                    found += stored_patches(self._store, dataclasses.replace(query, orbit=True))
            # All notes are made before the first is indexed, because that may refuse a patch.
            notes = [PatchNote.of(patch) for patch in found]
            patches = [self._index(note) for note in notes]

        return [patch for patch in patches if not contents_differ(entry.content, patch.note.content)]

    # ------------------------------------------------------------------------------------------------ internals

    def _index(self, note: PatchNote, patch: Patch | None = None) -> AvailablePatch:
        """Enters a patch into the indexes, unless one of its digest is there. Returns it."""
        available = AvailablePatch(note, patch)
        of_chunk = self._by_digest.setdefault(note.chunk, {})
        if note.digest not in of_chunk:
            of_chunk[note.digest] = available
            self.in_memory = self.in_memory or patch is not None
            self._by_chain.setdefault((note.chunk, chain_of(self.backbone, note)), []).append(available)
            if note.orbit or any(member.content is None for member in note.antecedent.members):
                self._of_any_chain.setdefault(note.chunk, []).append(available)
        return available

    def _check_backbone(self, backbone: str, what: str) -> None:
        if backbone != self.backbone:
            raise PlanError(f"inventory: got {what} of backbone {backbone[:16]!r}; expected {self.backbone[:16]!r}")
