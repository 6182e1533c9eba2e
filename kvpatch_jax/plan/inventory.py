"""Inventory of the canonicals, patches and stored prefills that plans may use, in memory or in a store."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from ..backbone import Backbone
from ..cache import Antecedent, Chunk, Identities, Patch, Ways, content_of, contents_differ
from ..core import KVLayout
from ..errors import PlanError
from ..patching import update_patch
from ..window import Encodings, Entry, PatchNote, PatchStore, StoredPrefills, stored, stored_patches


class AvailablePatch(NamedTuple):
    """A patch that a plan may use.

    Attributes:
      note: what a window needs to know of it.
      patch: the patch itself if it is in memory; None if the executor reads it from its store.
      encoding: of the canonical that it is added to, as a word.
    """

    note: PatchNote
    patch: Patch | None = None
    encoding: str | None = None

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
      encodings: of canonicals that it offers, and of those whose patches it does (`Executor.sources.encodings`).
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
        self.chunks: dict[str, Chunk] = {}
        self.prefills: StoredPrefills | None = None
        self.encodings: Encodings = (None,)
        self._store, self._layout = store, layout
        self._contents: dict[str, set[str | None]] = {}
        # The same patches by chunk and digest, and by chunk and the KV that they were formed behind. Those that may
        # serve behind other KV too (orbit patches, unknown contents) are compared in full.
        self._by_digest: dict[tuple[str, str], AvailablePatch] = {}
        self._by_front: dict[tuple[str, Identities], list[AvailablePatch]] = {}
        self._of_other_fronts: dict[str, list[AvailablePatch]] = {}

    @classmethod
    def of(
        cls,
        store: PatchStore | None,
        backbone: Backbone,
        *,
        prefills: StoredPrefills | None = None,
        encodings: Encodings = (None,),
    ) -> "PatchInventory":
        """Returns the inventory of a store for a backbone.

        Args:
          store: None: nothing, until something is added.
          prefills, encodings: see the attributes.
        """
        if not all(hasattr(backbone, name) for name in ("fingerprint", "layout")):
            raise PlanError(f"inventory.backbone: got {backbone!r:.80}; expected a Backbone, as models.load returns")
        if store is not None and not isinstance(store, PatchStore):
            raise PlanError(f"inventory.store: got {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")
        inventory = cls(backbone.fingerprint, store, backbone.layout)
        inventory.prefills, inventory.encodings = prefills, encodings
        return inventory

    # ------------------------------------------------------------------------------------------------------ contents

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
            elif isinstance(item, Entry):
                self._contents.setdefault(item.id, set()).add(item.content)
            elif isinstance(item, Patch):
                self._check_backbone(item.metadata.backbone, f"patch of {item.metadata.chunk!r:.80}")
                self._index(AvailablePatch(PatchNote.of(item), item, item.metadata.encoding))
            elif isinstance(item, PatchNote):
                self._index(AvailablePatch(item))
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
        note = dataclasses.replace(PatchNote.of(updated), updated=True)
        return self._index(AvailablePatch(note, updated, updated.metadata.encoding))

    # ------------------------------------------------------------------------------------------------------- queries

    def canonical(self, entry: Entry) -> bool:
        """Returns whether an entry's canonical is available."""
        # An unknown content (None) on either side matches: nothing contradicts it.
        contents = self._contents.get(entry.id, ())
        known = any(not contents_differ(entry.content, content) for content in contents)
        return known or self.stored_canonical(entry, self.encodings)

    def stored_canonical(self, entry: Entry, encodings: Encodings) -> bool:
        """Returns whether the store has an entry's canonical in one of these encodings."""
        # A `ChunkStore` knows without reading. Other stores may not.
        contains = getattr(self._store, "contains", None)
        for word in encodings:
            if contains is not None:
                options = {} if word is None else {"encoding": word}
                if contains(entry.id, self.backbone, **options):
                    return True
            else:
                chunk = stored(self._store, entry.id, self.backbone, (word,))
                if chunk is not None and not contents_differ(entry.content, chunk.content):
                    return True
        return False

    def serving(self, entry: Entry, antecedent: Antecedent) -> list[AvailablePatch]:
        """Returns the patches that are valid for an entry behind what is promised in front of it (`Window.target`)."""
        return self.patches(entry, antecedent.identities, lambda: antecedent)

    def patches(self, entry: Entry, target: Identities, antecedent: Callable[[], Antecedent]) -> list[AvailablePatch]:
        """Returns the same as `serving`, and builds the antecedent only where its identities do not decide."""
        patches = self._by_front.get((entry.id, target), [])
        others = [
            patch
            for patch in self._of_other_fronts.get(entry.id, [])
            if len(patch.note.antecedent.members) == len(target) and patch.note.antecedent.identities != target
        ]
        full = antecedent() if others or (not patches and self._store is not None) else None
        if full is not None:
            differs = [patch.note.antecedent.difference(full, patch.note.orbit) for patch in others]
            patches = [*patches, *(patch for patch, reason in zip(others, differs, strict=True) if reason is None)]
            if not patches and self._store is not None:
                patches = self._stored_patches(entry, full)
        return [patch for patch in patches if not contents_differ(entry.content, patch.note.content)]

    def _stored_patches(self, entry: Entry, antecedent: Antecedent) -> list[AvailablePatch]:
        """Looks up the store's patches behind an antecedent, and orbit patches for any order of it."""
        assert self._layout is not None
        orbits = (False, True) if antecedent.ids else (False,)
        patches = stored_patches(self._store, entry, antecedent, self._layout, self.backbone, self.encodings, orbits)
        available = [AvailablePatch(PatchNote.of(patch), None, patch.metadata.encoding) for patch in patches]
        return [self._index(patch) for patch in available]

    def _index(self, patch: AvailablePatch) -> AvailablePatch:
        """Enters a patch into the indexes, unless one of its digest is there. Returns that."""
        note = patch.note
        key, antecedent = (note.chunk, note.digest), note.antecedent
        if key not in self._by_digest:
            self._by_digest[key] = patch
            self._by_front.setdefault((note.chunk, antecedent.identities), []).append(patch)
            if note.orbit or any(member.content is None for member in antecedent.members):
                self._of_other_fronts.setdefault(note.chunk, []).append(patch)
        return self._by_digest[key]

    def _check_backbone(self, backbone: str, what: str) -> None:
        if backbone != self.backbone:
            raise PlanError(f"inventory: got {what} of backbone {backbone[:16]!r}; expected {self.backbone[:16]!r}")
