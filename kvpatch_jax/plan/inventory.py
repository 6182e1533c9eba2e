"""Inventory of the canonicals and patches that plans may use, in memory or in a store."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from ..backbone import Backbone
from ..cache import Antecedent, Chunk, Patch, content_of
from ..core import KVLayout
from ..errors import PlanError
from ..patching import update_patch
from ..window import Entry, PatchNote, PatchStore, asked_behind, chain_digest, chain_of, stored
from .operating_points import Point


class AvailablePatch(NamedTuple):
    """A patch that a plan may use.

    Attributes:
      note: what a window needs to know of it.
      point: "stored", "orbit" or "update".
      patch: the patch itself if it is in memory; None if the executor reads it from its store.
    """

    note: PatchNote
    point: Point
    patch: Patch | None = None


@runtime_checkable
class CanonicalIndex(Protocol):
    """A store that reports whether it has a canonical without reading it, such as `ChunkStore`."""

    def contains(self, id: str, backbone: str, *, lead: str | None = None) -> bool:
        """Returns whether the canonical is stored or is being written."""
        ...


class PatchInventory:
    """Canonicals and patches of one backbone.

        inventory = PatchInventory.of(store, backbone)  # looked up in the store on demand
        inventory.add(chunk, patch)                     # in memory, in addition
        inventory.fold(patch, correction)               # a stored patch corrected for another antecedent: "update"

    Patches that a store returned are remembered. A miss is looked up again next time, except between `freeze` and
    `thaw`.
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
        self._in_memory = False
        self._chunks: dict[str, Chunk] = {}
        self._contents: dict[str, set[str | None]] = {}

        # Three indexes of the same patches: by digest; by the chain digest of what they were formed behind; and those
        # that may also serve behind other chains (orbit patches, unknown contents).
        self._by_digest: dict[str, dict[str, AvailablePatch]] = {}
        self._by_chain: dict[tuple[str, str], list[AvailablePatch]] = {}
        self._of_any_chain: dict[str, list[AvailablePatch]] = {}
        self._misses: set[tuple[str, str]] | None = None

    @classmethod
    def of(cls, store: PatchStore | None, backbone: Backbone, *, lead: str | None = None) -> "PatchInventory":
        """Returns the inventory of a store for a backbone.

        Args:
          store: None: nothing, until something is added.
          lead: digest of what canonicals were prefilled behind (`Executor.lead`).
        """
        if not all(hasattr(backbone, name) for name in ("fingerprint", "layout")):
            raise PlanError(f"inventory.backbone: got {backbone!r:.80}; expected a Backbone, as models.load returns")
        if store is not None and not isinstance(store, PatchStore):
            raise PlanError(f"inventory.store: got {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")

        inventory = cls(backbone.fingerprint, store, backbone.layout)
        inventory._lead = lead
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
                self._chunks[item.id] = item
                self._in_memory = True
            elif isinstance(item, Entry):
                self._contents.setdefault(item.id, set()).add(item.content)
            elif isinstance(item, Patch):
                self._check_backbone(item.metadata.backbone, f"patch of {item.metadata.chunk!r:.80}")
                note = PatchNote.of(item)
                self._index(AvailablePatch(note, "orbit" if note.orbit else "stored", item))
            elif isinstance(item, PatchNote):
                self._index(AvailablePatch(item, "orbit" if item.orbit else "stored"))
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
        available = AvailablePatch(PatchNote.of(updated), "update", updated)
        self._index(available)
        return available

    def forget(self, id: str) -> None:
        """Removes everything that is known of a chunk. Its store is asked again."""
        self._contents.pop(id, None)
        self._chunks.pop(id, None)
        self._of_any_chain.pop(id, None)
        self._by_digest.pop(id, None)
        self._by_chain = {key: patches for key, patches in self._by_chain.items() if key[0] != id}

    def freeze(self) -> None:
        """Remembers misses from now on, so that the store is not asked twice for a patch that it does not have."""
        self._misses = set()

    def thaw(self) -> None:
        """Discards remembered misses, and remembers none from now on."""
        self._misses = None

    # ------------------------------------------------------------------------------------------------ queries

    def canonical(self, entry: Entry) -> bool:
        """Returns whether an entry's canonical is available."""
        # An unknown content (None) on either side matches: nothing contradicts it.
        contents = self._contents.get(entry.id)
        if contents is not None and (entry.content in contents or None in contents or entry.content is None):
            return True

        if self._store is None:
            return False
        if isinstance(self._store, CanonicalIndex):
            return self._store.contains(entry.id, self.backbone, lead=self._lead)
        chunk = stored(self._store, entry.id, self.backbone, self._lead)
        return chunk is not None and (None in (entry.content, chunk.content) or entry.content == chunk.content)

    @property
    def in_memory(self) -> bool:
        """Whether anything is in memory, which an executor must be given (`Plan.provide`)."""
        return self._in_memory

    def chunk(self, id: str) -> Chunk | None:
        """Returns a canonical that is in memory."""
        return self._chunks.get(id)

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
        if self._of_any_chain.get(entry.id):
            patches = [*patches, *self._matching_in_full(entry, antecedent())]
        if not patches and self._store is not None and (entry.id, target) not in (self._misses or ()):
            patches = self._look_up(entry, target, antecedent())

        content = entry.content
        return [patch for patch in patches if None in (content, patch.note.content) or patch.note.content == content]

    def stale(self, entry: Entry, target: str) -> list[AvailablePatch]:
        """Returns an entry's known patches of its canonical that were formed behind another chain."""
        known = self._by_digest.get(entry.id, {}).values()
        return [
            patch for patch in known if chain_of(self.backbone, patch.note) != target and patch.note.base == "canonical"
        ]

    # ------------------------------------------------------------------------------------------------ internals

    def _index(self, available: AvailablePatch) -> None:
        note = available.note
        of_chunk = self._by_digest.setdefault(note.chunk, {})
        if note.digest in of_chunk:
            return

        of_chunk[note.digest] = available
        self._in_memory = self._in_memory or available.patch is not None
        self._by_chain.setdefault((note.chunk, chain_of(self.backbone, note)), []).append(available)
        if note.orbit or any(member.content is None for member in note.antecedent.members):
            self._of_any_chain.setdefault(note.chunk, []).append(available)

    def _matching_in_full(self, entry: Entry, antecedent: Antecedent) -> list[AvailablePatch]:
        """Returns the valid patches of `_of_any_chain` whose own chain is another one."""
        chain, matches = None, []
        for available in self._of_any_chain[entry.id]:
            note = available.note
            if len(note.antecedent.members) != len(antecedent.members):  # a cheap test first
                continue
            if note.antecedent.difference(antecedent, note.orbit) is not None:
                continue

            # A patch of this very chain was found by its digest already.
            chain = chain or chain_digest(self.backbone, antecedent)
            if chain_of(self.backbone, note) != chain:
                matches.append(available)

        return matches

    def _look_up(self, entry: Entry, target: str, antecedent: Antecedent) -> list[AvailablePatch]:
        """Returns the store's patches for this antecedent, and orbit patches for any order of it."""
        assert self._store is not None
        assert self._layout is not None
        key = asked_behind(antecedent, entry.id, entry.content, self._layout, self.backbone, self._lead)
        patches = [*self._store.get_patches(key)]
        if antecedent.ids:
            patches += self._store.get_patches(dataclasses.replace(key, orbit=True))

        notes = [PatchNote.of(patch) for patch in patches]
        available = [AvailablePatch(note, "orbit" if note.orbit else "stored") for note in notes]
        for patch in available:
            self._index(patch)
        if not available and self._misses is not None:
            self._misses.add((entry.id, target))
        return available

    def _check_backbone(self, backbone: str, what: str) -> None:
        if backbone != self.backbone:
            raise PlanError(f"inventory: got {what} of backbone {backbone[:16]!r}; expected {self.backbone[:16]!r}")
