"""What lies ready of chunks: canonicals and patches, in a store or in memory, as a plan looks them up."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from ..backbone import Backbone
from ..cache import Antecedent, Chunk, Patch, content_of
from ..core import KVLayout
from ..errors import PlanError
from ..patching import update_patch
from ..window import Entry, PatchNote, PatchStore, asked_behind, chain_digest, chain_of, stored
from .operating_points import Point


class AvailablePatch(NamedTuple):
    """A patch that lies ready.

    Attributes:
      note: what a window needs to know of it.
      point: "stored", "orbit" or "update".
      patch: where it is in memory, and is given to an executor; None where the executor's store has it.
    """

    note: PatchNote
    point: Point
    patch: Patch | None = None


@runtime_checkable
class CanonicalIndex(Protocol):
    """A store that tells whether it has a canonical without reading it, as `ChunkStore` does."""

    def contains(self, id: str, backbone: str, *, lead: str | None = None) -> bool:
        """Whether it has, or will have."""
        ...


class PatchInventory:
    """Canonicals and patches of one backbone.

        stock = Stock.of(store, backbone)          # what the store has, looked up when it is asked for
        stock.add(chunk, patch)                    # what is in memory beside it
        stock.fold(patch, correction)              # a stored patch, brought to another antecedent: "update"

    What was found is remembered; what was not is asked for again, or, between `freeze` and `thaw`, is not.
    """

    def __init__(self, backbone: str, store: PatchStore | None = None, layout: KVLayout | None = None):
        """Holds nothing yet.

        Args:
          backbone: its fingerprint. store, layout: where more is found, and the layout that it is asked for.
        """
        if not isinstance(backbone, str):
            raise PlanError(f"stock: backbone {backbone!r:.80}; expected a fingerprint (`Stock.of` takes the backbone)")
        self.backbone, self._store, self._layout = backbone, store, layout
        self._lead: str | None = None
        self._gives = False
        self._contents: dict[str, set[str | None]] = {}
        self._chunks: dict[str, Chunk] = {}
        self._serving: dict[tuple[str, str], list[AvailablePatch]] = {}
        self._others: dict[str, list[AvailablePatch]] = {}
        self._known: dict[str, dict[str, AvailablePatch]] = {}
        self._missed: set[tuple[str, str]] | None = None

    @classmethod
    def of(cls, store: PatchStore | None, backbone: Backbone, *, lead: str | None = None) -> "PatchInventory":
        """What a store has of a backbone; None: nothing, until something is added.

        Args:
          lead: digest of what canonicals were prefilled behind (`Executor.lead`).
        """
        if not all(hasattr(backbone, word) for word in ("fingerprint", "layout")):
            raise PlanError(f"stock: backbone {backbone!r:.80}; expected what models.load gives")
        if store is not None and not isinstance(store, PatchStore):
            raise PlanError(f"stock: store {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")
        made = cls(backbone.fingerprint, store, backbone.layout)
        made._lead = lead
        return made

    # ------------------------------------------------------------------------------------------- filling

    def add(self, *things: Chunk | Patch | PatchNote | Entry) -> None:
        """Adds what lies ready: chunks and patches in memory; notes of patches, and entries, of what a store has.

        Raises:
          PlanError: anything else, or of another backbone. WindowError: a patch that no window serves by.
        """
        for thing in things:
            if isinstance(thing, Chunk):
                self._expect_own(thing.backbone, f"chunk {thing.id!r:.80}")
                self._contents.setdefault(thing.id, set()).add(content_of(thing))
                self._chunks[thing.id] = thing
                self._gives = True
            elif isinstance(thing, Entry):
                self._contents.setdefault(thing.id, set()).add(thing.content)
            elif isinstance(thing, Patch):
                self._expect_own(thing.metadata.backbone, f"patch of {thing.metadata.chunk!r:.80}")
                note = PatchNote.of(thing)
                self._take(AvailablePatch(note, "orbit" if note.orbit else "stored", thing))
            elif isinstance(thing, PatchNote):
                self._take(AvailablePatch(thing, "orbit" if thing.orbit else "stored"))
            else:
                raise PlanError(f"stock: a {type(thing).__name__}; expected a Chunk, Patch, PatchNote or Entry")

    def fold(self, patch: Patch, correction: Patch) -> AvailablePatch:
        """Adds a stored patch with a correction folded in, which serves behind the correction's antecedent: "update".

        Raises:
          As `update_patch`.
        """
        updated = update_patch(patch, correction)
        stocked = AvailablePatch(PatchNote.of(updated), "update", updated)
        self._take(stocked)
        return stocked

    def forget(self, id: str) -> None:
        """Lets go of all that is known of a chunk; what its store has is found again."""
        self._contents.pop(id, None)
        self._chunks.pop(id, None)
        self._others.pop(id, None)
        self._known.pop(id, None)
        self._serving = {key: found for key, found in self._serving.items() if key[0] != id}

    def freeze(self) -> None:
        """From now on a patch that was not found is not asked for again."""
        self._missed = set()

    def thaw(self) -> None:
        """From now on the store is asked again."""
        self._missed = None

    # ------------------------------------------------------------------------------------------- asking

    def canonical(self, entry: Entry) -> bool:
        """Whether an entry's canonical lies ready."""
        contents = self._contents.get(entry.id)
        if contents is not None and (entry.content in contents or None in contents or entry.content is None):
            return True
        if self._store is None:
            return False
        if isinstance(self._store, CanonicalIndex):
            return self._store.contains(entry.id, self.backbone, lead=self._lead)
        found = stored(self._store, entry.id, self.backbone, self._lead)
        return found is not None and (None in (entry.content, found.content) or entry.content == found.content)

    @property
    def in_memory(self) -> bool:
        """Whether anything that it has is in memory, and would be given to an executor."""
        return self._gives

    def chunk(self, id: str) -> Chunk | None:
        """A canonical that is in memory."""
        return self._chunks.get(id)

    def note(self, id: str, digest: str) -> AvailablePatch | None:
        """A chunk's patch of this digest, where it was met."""
        return self._known.get(id, {}).get(digest)

    def serving(self, entry: Entry, target: str, antecedent: Callable[[], Antecedent]) -> list[AvailablePatch]:
        """Patches that may serve an entry behind what stands in front of it.

        Args:
          target: the chain digest of that. antecedent: gives it in full, where the digest does not settle it.
        """
        found = self._serving.get((entry.id, target), ())
        if self._others.get(entry.id):
            found = [*found, *self._in_full(entry, antecedent())]
        if not found and self._store is not None and (entry.id, target) not in (self._missed or ()):
            found = self._stored(entry, target, antecedent())
        if not found:
            return []
        content = entry.content
        return [each for each in found if None in (content, each.note.content) or each.note.content == content]

    def stale(self, entry: Entry, target: str) -> list[AvailablePatch]:
        """Patches of an entry that were formed behind something else, so far as they were met."""
        known = self._known.get(entry.id, {}).values()
        return [
            each for each in known if chain_of(self.backbone, each.note) != target and each.note.base == "canonical"
        ]

    # ------------------------------------------------------------------------------------------- inside

    def _take(self, stocked: AvailablePatch) -> None:
        note = stocked.note
        known = self._known.setdefault(note.chunk, {})
        if note.digest in known:
            return
        known[note.digest] = stocked
        self._gives = self._gives or stocked.patch is not None
        key = note.chunk, chain_of(self.backbone, note)
        self._serving.setdefault(key, []).append(stocked)
        if note.orbit or any(member.content is None for member in note.antecedent.members):
            self._others.setdefault(note.chunk, []).append(stocked)

    def _in_full(self, entry: Entry, antecedent: Antecedent) -> Iterable[AvailablePatch]:
        """Those whose antecedent the chain digest does not settle: any order, or unknown contents."""
        chain = None
        for each in self._others[entry.id]:
            if len(each.note.antecedent.members) != len(antecedent.members):
                continue
            if each.note.antecedent.difference(antecedent, each.note.orbit) is None:
                chain = chain or chain_digest(self.backbone, antecedent)
                if chain_of(self.backbone, each.note) != chain:  # or it was found by that
                    yield each

    def _stored(self, entry: Entry, target: str, antecedent: Antecedent) -> list[AvailablePatch]:
        """What the store has behind this antecedent, and behind any order of it."""
        assert self._store is not None
        assert self._layout is not None
        asked = asked_behind(antecedent, entry.id, entry.content, self._layout, self.backbone, self._lead)
        found = self._store.get_patches(asked)
        if antecedent.ids:
            found = [*found, *self._store.get_patches(dataclasses.replace(asked, orbit=True))]
        made = [AvailablePatch(note, "orbit" if note.orbit else "stored") for note in map(PatchNote.of, found)]
        for each in made:
            self._take(each)
        if not made and self._missed is not None:
            self._missed.add((entry.id, target))
        return made

    def _expect_own(self, backbone: str, what: str) -> None:
        if backbone != self.backbone:
            raise PlanError(f"stock: {what} of backbone {backbone[:16]!r}; expected {self.backbone[:16]!r}")
