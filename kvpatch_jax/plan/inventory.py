"""What a store has of the chunks of one backbone: canonicals, patches and stored prefills."""

from collections.abc import Mapping
from typing import Any

from ..backbone import Backbone
from ..cache import Antecedent, Likeness, Patch, contents_differ
from ..core import KVLayout
from ..errors import InputError
from ..window import Encodings, Entry, PatchNote, PatchStore, StoredPrefills, stored, stored_patches


class Inventory:
    """The stock of one backbone's chunks in a store, looked up on demand.

        inventory = Inventory.of(store, backbone)

    Attributes:
      backbone: its fingerprint.
      prefills: the stored prefills; None without a store that keeps them.
      encodings: of canonicals that it offers, and of those whose patches it does (`Executor.sources.encodings`).
    """

    def __init__(
        self,
        store: PatchStore | None,
        backbone: str,
        layout: KVLayout | None,
        prefills: StoredPrefills | None = None,
        encodings: Encodings = (None,),
    ):
        """Names what will be looked up in a store, of a backbone's fingerprint and layout."""
        self.backbone, self.prefills, self.encodings = backbone, prefills, encodings
        self._store, self._layout = store, layout
        self._notes: dict[tuple[str, str], list[PatchNote]] = {}
        self._patches: dict[str, Patch] = {}

    @classmethod
    def of(cls, store: PatchStore | None, backbone: Backbone, **options: Any) -> "Inventory":
        """Returns the inventory of a store for a backbone.

        Args:
          store: None: nothing.
          options: the attributes `prefills` and `encodings`.

        Raises:
          InputError: no backbone, or no store.
        """
        if not all(hasattr(backbone, name) for name in ("fingerprint", "layout")):
            raise InputError(f"inventory.backbone: got {backbone!r:.80}; expected a Backbone, as models.load returns")
        if store is not None and not isinstance(store, PatchStore):
            raise InputError(f"inventory.store: got {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")
        return cls(store, backbone.fingerprint, backbone.layout, **options)

    def canonical(self, entry: Entry, leading: bool = False) -> bool:
        """Returns whether an entry's canonical is stored; with `leading`, as it was prefilled."""
        return self.encoding(entry, (None,) if leading else self.encodings) is not None

    def encoding(self, entry: Entry, encodings: Encodings) -> tuple[str | None] | None:
        """Returns, in a tuple, the first of these encodings in which the store has an entry's canonical, or None."""
        # A `ChunkStore` knows without reading. Other stores may not.
        contains = getattr(self._store, "contains", None)
        for word in encodings:
            if contains is None:
                chunk = stored(self._store, entry.id, self.backbone, (word,))
                has = chunk is not None and not contents_differ(entry.content, chunk.content)
            else:
                has = contains(entry.id, self.backbone, **({} if word is None else {"encoding": word}))
            if has:
                return (word,)
        return None

    def patches(self, entry: Entry, target: Antecedent) -> list[PatchNote]:
        """Returns the patches that are valid for an entry behind an antecedent, and orbit patches for its orders."""
        key = entry.id, target.digest
        if key not in self._notes:
            orbits = (False, True) if target.ids else (False,)
            self._notes[key], words = [], self.encodings
            assert self._layout is not None
            for patch in stored_patches(self._store, entry, target, self._layout, self.backbone, words, orbits):
                if not contents_differ(entry.content, patch.metadata.chunk.content):
                    note = PatchNote.of(patch)
                    self._notes[key].append(note)
                    self._patches[note.digest] = patch
        return self._notes[key]

    def patch(self, digest: str) -> Patch:
        """Returns a patch that `patches` has noted."""
        return self._patches[digest]

    def prefill(self, entry: Entry, made: str) -> bool:
        """Returns whether an entry's prefill of this identity is stored."""
        return self.prefills is not None and self.prefills.may_have(entry.id, made)

    def alike(self, entry: Entry, keys: Mapping[Likeness, str]) -> Mapping[Likeness, str]:
        """Returns the identities of an entry's stored prefills that share these keys with a place."""
        return {} if self.prefills is None else self.prefills.alike(entry.id, keys)
