"""`Window`: the operations that change a window. Each returns the new window and the edits that bring its KV there."""

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Unpack

from ..backbone import Backbone
from ..cache import Patch, brief
from ..errors import WindowError
from ..utils.kinds import all_of
from . import window_json
from .costs import Costs
from .edits import Compact, Copy, Edit, Edits, Prefill, Recompute, in_order
from .entry import FRESH, UNKNOWN_WAYS, Entry, How, Likeness, PatchNote, PieceState, short_digest
from .rearrangement import KEEP, PREFILL, ServingChoice, arrange
from .window_state import Promise, WindowState
from .window_steps import (
    PatchOptions,
    check_entering,
    check_new,
    chunk_index,
    composing_edits,
    movable_index,
    placing_edits,
    relinked,
    shown,
    with_piece,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Window(WindowState):
    """What a model reads: chunks and texts at their places, and how each of them is served. An immutable value.

    It holds no arrays; an executor does, and runs the edits that every operation returns beside the new window.
    Operations that take ids raise `WindowError` for one that is not in the window, or a piece of the lead that would
    move.

        window = Window.empty(backbone)
        window, edits = window.append(Entry.of_tokens("system", tokens))
        window, edits = window.append(Entry.of(chunk))
        window, edits = window.slide(keep=4)

    Attributes and queries are those of `WindowState`.
    """

    @classmethod
    def empty(
        cls,
        costs: Costs | Backbone,
        *,
        lead: int | None = None,
        promise: Promise = "remember",
        branch: str = "",
    ) -> "Window":
        """Makes a window without pieces.

        Args:
          costs: of the backbone that reads it, or that backbone (then of KV in bfloat16).
          lead: how many pieces at the front are pinned; None: the texts in front of the first chunk, or without texts
            that chunk. Without a lead (0) the first tokens, which serve as attention sinks, may leave: `sink_left`.
          promise: see the attributes.
          branch: its name, if several windows that are no forks of one another share one pool; without a slash.

        Raises:
          WindowError: an invalid promise, lead or branch.
        """
        if not isinstance(costs, Costs) and not hasattr(costs, "forward_costs"):
            raise WindowError(f"window.costs: got {costs!r:.80}; expected Costs, or a Backbone")

        costs = costs if isinstance(costs, Costs) else Costs.of(costs)
        if lead is not None and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 0):
            raise WindowError(f"window.lead: got {lead!r:.80}; expected an integer >= 0, or None")
        if promise not in ("remember", "forget"):
            raise WindowError(f"window.promise: got {promise!r:.80}; expected 'remember' or 'forget'")
        window = cls(costs, lead=lead or 0, lead_settled=lead is not None, promise=promise)
        return window.renamed(branch)

    def to_json(self) -> str:
        """Writes the window as JSON, with its backbone."""
        return window_json.write(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, backbone: str | Backbone) -> "Window":
        """Reads what `to_json` wrote. The contents are checked, but not who wrote them.

        Args:
          backbone: the one that will read the window, or its fingerprint.

        Raises:
          WindowError: another backbone or version; damage; or JSON that is no window.
        """
        fingerprint = backbone if isinstance(backbone, str) else backbone.fingerprint
        return cls(**window_json.read(text, fingerprint))

    # ------------------------------------------------------------------------------------------- enter and leave

    def append(
        self,
        entry: Entry,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        **options: Unpack[PatchOptions],
    ) -> "tuple[Window, Edits]":
        """Places an entry behind all others.

        Args:
          how: "prefill" runs it behind what precedes it; "patch" places its canonical with a patch; "bare" places the
            canonical alone; "leading" does so at the front of the window, where the canonical is the prefill;
            "restored" places a stored prefill (`StoredPrefills`). None: "patch" if one is given, else "prefill".
          patch: formed behind `target()`.
          options: see `PatchOptions`.

        Raises:
          WindowError: an id that is in the window or was evicted (`recall` brings it back), a text that is not
          prefilled, or positions beyond 2**30. StalePatchError, PatchMismatchError: a patch that does not belong here.
        """
        check_new(self, entry)
        return self._entered(len(self.pieces), entry, how, patch, **options)

    def insert(
        self,
        entry: Entry,
        before: str,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        **options: Unpack[PatchOptions],
    ) -> "tuple[Window, Edits]":
        """Places an entry in front of another, else as `append`. What follows moves, and has not seen it.

        Args:
          before: id of the piece that will follow it.
        """
        check_new(self, entry)
        return self._entered(movable_index(self, before, "insert"), entry, how, patch, **options)

    def recall(
        self,
        id: str,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        *,
        before: str | None = None,
        **options: Unpack[PatchOptions],
    ) -> "tuple[Window, Edits]":
        """Brings an evicted chunk back, behind all others or in front of one, else as `append`.

        Args:
          before: id of the piece that will follow it.

        Raises:
          WindowError: a chunk that was not evicted from this window.
        """
        gone = self.evicted_by_id.get(id) if isinstance(id, str) else None
        if gone is None:
            found = "in the window" if isinstance(id, str) and id in self.places else "unknown"
            evicted = tuple(brief(piece.entry.id) for piece in self.evicted[-8:])
            raise WindowError(
                f"recall.id: got {shown(id)}, which is {found}; expected an evicted one, such as {evicted}"
            )
        index = len(self.pieces) if before is None else movable_index(self, before, "recall")
        return self._entered(index, gone.entry, how, patch, **options)

    def replace(
        self,
        id: str,
        entry: Entry,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        **options: Unpack[PatchOptions],
    ) -> "tuple[Window, Edits]":
        """Puts an entry in the place of another, which leaves, else as `append`. What follows has not seen it.

        Args:
          id: of what leaves, which may be the new entry's too.
        """
        index = movable_index(self, id, "replace")
        if not isinstance(entry, Entry) or entry.id != id:
            check_new(self, entry)

        return self._entered(index, entry, how, patch, True, **options)

    def evict(self, *ids: str) -> "tuple[Window, Edits]":
        """Takes pieces out. Chunks can be recalled; texts cannot.

        Raises:
          WindowError: one named twice.
        """
        indices = [movable_index(self, id, "evict") for id in ids]
        if len(set(indices)) != len(indices):
            raise WindowError(f"evict.ids: got {tuple(map(brief, ids))}; expected each once")
        leaving = set(indices)
        return self._rearranged([piece.entry for index, piece in enumerate(self.pieces) if index not in leaving])

    def slide(self, keep: int) -> "tuple[Window, Edits]":
        """Evicts all but the last `keep` chunks behind the lead, and the texts in front of the first that stays.

        Raises:
          WindowError: `keep` is not an integer >= 0.
        """
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise WindowError(f"slide.keep: got {keep!r:.80}; expected an integer >= 0")

        # Texts behind the lead leave with the chunks behind which they were appended.
        lead = min(self.lead, len(self.pieces))
        chunks = [index for index in range(lead, len(self.pieces)) if self.pieces[index].entry.kind == "chunk"]
        if len(chunks) <= keep:
            return self, ()

        cut = chunks[-keep] if keep else len(self.pieces)
        return self._rearranged([piece.entry for piece in (*self.pieces[:lead], *self.pieces[cut:])])

    # --------------------------------------------------------------------------------------------------- move

    def reorder(
        self,
        order: Sequence[str],
        patches: Mapping[str, Patch | PatchNote] | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> "tuple[Window, Edits]":
        """Puts order-free chunks into another order; all others keep theirs and their place among the pieces.

        A chunk without a patch keeps its KV, rotated, and is exact again only behind what it was made behind.

        Args:
          order: ids: the places of those that are named are filled in this order.
          patches: by id, what moved chunks are served by from now on, such as their orbit patch; formed behind their
            `target`.
          fetched, allow_stale: see `PatchOptions`.

        Raises:
          WindowError: a piece that would move and is no order-free chunk, or is named twice; a patch of a piece that is
          not named. StalePatchError, PatchMismatchError: as `append`.
        """
        ids = all_of(str, order, "order")
        places = [self.index(id) for id in ids]
        if len(set(ids)) != len(ids):
            raise WindowError(f"reorder.order: got {tuple(map(brief, ids))}; expected each once")

        notes = {id: PatchNote.of(patch) for id, patch in (patches or {}).items()}
        if strangers := sorted(set(notes) - set(ids)):
            raise WindowError(f"reorder.patches: got one of {shown(strangers[0])}; expected it of one of {ids}")

        # Fill the places of the named pieces in their new order.
        came_from = list(range(len(self.pieces)))
        for old, new in zip(places, sorted(places), strict=True):
            piece = self.pieces[old]
            if old != new and (old < self.lead or new < self.lead or not piece.entry.order_free):
                what = "pinned" if min(old, new) < self.lead else "not order-free"
                raise WindowError(
                    f"reorder.order: got {shown(piece.entry.id)}, {what}; expected chunks that are order-free"
                )
            came_from[new] = old

        if came_from == sorted(came_from) and not notes:
            return self, ()
        services = {id: ServingChoice("patch", note, allow_stale) for id, note in notes.items()}
        return self._rearranged([self.pieces[old].entry for old in came_from], services, fetched)

    def compact(self) -> "tuple[Window, Edits]":
        """Packs the slots in use, so that only the last page is partly filled."""
        return self, (Compact(self.tokens, **self.costs.compact(self.tokens)),)

    # ------------------------------------------------------------------------------------- serve otherwise in place

    def bare(self, id: str) -> "tuple[Window, Edits]":
        """Serves a chunk by its canonical alone, which the executor must have. Kamera App. E.

        Its KV is overwritten: to go back, do it in a `fork`, or `condition` or `recompute` it.

        Raises:
          WindowError: a text.
        """
        index = chunk_index(self, id, "bare")
        if self.pieces[index].state.kind == "bare":
            return self, ()
        return self._rearranged([each.entry for each in self.pieces], {id: ServingChoice("bare")}, fetched=True)

    def condition(
        self,
        id: str,
        patch: Patch | PatchNote,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> "tuple[Window, Edits]":
        """Serves a chunk by a patch from now on. Kamera App. E.

        Args:
          patch: formed behind the chunk's `target`: of its canonical, or a removal patch of the conditioned KV that the
            window serves it by.
          fetched, allow_stale: see `PatchOptions`.

        Raises:
          WindowError: a text. StalePatchError, PatchMismatchError: a patch that does not belong here.
        """
        chunk_index(self, id, "condition")
        service = ServingChoice("patch", PatchNote.of(patch), allow_stale)
        return self._rearranged([piece.entry for piece in self.pieces], {id: service}, fetched)

    def recompute(self, id: str, start_layer: int = 0) -> "tuple[Window, Edits]":
        """Runs a piece again behind what precedes it, from a layer up. Kamera App. D, the cheapest refresh.

        From layer 0 it is a prefill in place; if its KV changes by that, those behind it, which have seen the old one,
        become approximate. From above, the layers below keep what they were: the piece is approximate itself.

        Raises:
          WindowError: a layer that the backbone does not have.
        """
        index, layers = self.index(id), self.costs.layers
        if not isinstance(start_layer, int) or isinstance(start_layer, bool) or not 0 <= start_layer < layers:
            raise WindowError(f"recompute.start_layer: got {start_layer!r:.80}; expected 0 to {layers - 1}")

        if start_layer == 0:
            return self._rearranged([piece.entry for piece in self.pieces], {id: PREFILL})

        # Mixed layers have no antecedent; the digest is of what they are mixed from.
        piece, behind = self.pieces[index], self.behind(id)
        digest = short_digest(f"recompute {start_layer} {piece.state.digest} {piece.front}")
        mixed = piece._replace(state=PieceState("conditioned", digest, UNKNOWN_WAYS))
        there = with_piece(self, index, mixed, clock=self.clock + 1)
        costs = self.costs.prefill(piece.entry.tokens, behind, start_layer)
        return there, (*composing_edits(self.costs, id, index), Recompute(id, start_layer, behind, **costs))

    def anew(self) -> "tuple[Window, Edits]":
        """Places the same pieces in an empty pool, from what was provided and stored: after the pool was lost.

        What was conditioned, with a removal patch or without, is prefilled behind what precedes it now: survivors
        forget what has left. Bare and patched chunks stay so.
        """
        pieces, clock = [], self.clock + 1
        for piece in self.pieces:
            # Conditioned KV was only in the pool. A patch belongs to what it stands for, whatever those in front are
            # from now on.
            lost = piece.state.kind == "conditioned" or piece.state.base == "conditioned"
            pieces.append(piece._replace(state=FRESH, born=clock) if lost else piece._replace(born=0))

        there = relinked(self, pieces, 0, clock=clock)
        edits, behind = list[Edit](), 0
        for index, piece in enumerate(there.pieces):
            id, tokens = piece.entry.id, piece.entry.tokens
            if piece.state.kind == "conditioned":
                edits += composing_edits(self.costs, id, index)
                edits.append(Prefill(id, behind, **self.costs.prefill(tokens, behind)))
            else:
                edits += placing_edits(self.costs, piece, has_canonical=False, has_patch=False)
            behind += tokens
        return there, in_order(edits)

    def _entered(
        self,
        index: int,
        entry: Entry,
        how: How | None,
        patch: Patch | PatchNote | None,
        instead: bool = False,
        /,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
        behind: str | None = None,
        likeness: Likeness | None = None,
    ) -> "tuple[Window, Edits]":
        """Places an entry at an index, or in place of the piece there if `instead`."""
        note = None if patch is None else PatchNote.of(patch)
        how = check_entering(entry, how, note, behind, likeness)
        entries = [piece.entry for piece in self.pieces]
        entries[index : index + instead] = [entry]
        service = ServingChoice(how, note, allow_stale, behind, likeness)
        return self._rearranged(entries, {entry.id: service}, fetched, {entry.id} if instead else ())

    def _rearranged(
        self,
        entries: Sequence[Entry],
        services: Mapping[str, ServingChoice] | None = None,
        fetched: bool = False,
        renewed: Collection[str] = (),
    ) -> "tuple[Window, Edits]":
        """Holds these entries, some of them served so, the others as they are; `fetched`: everything is at hand."""
        arranged, services = arrange(self, entries, renewed), services or {}
        chosen = [services.get(piece[0].id, KEEP) for piece in arranged.placed]
        return arranged.serve(chosen, (lambda id, patch: True) if fetched else None)

    # ------------------------------------------------------------------------------------------------- branches

    def renamed(self, branch: str) -> "Window":
        """Returns the same window under another name: one that was read from JSON, for example.

        An executor holds nothing under the new name: `anew` places the pieces.

        Raises:
          WindowError: not a string, or one with a slash, which only names of forks have.
        """
        if not isinstance(branch, str) or "/" in branch:
            raise WindowError(f"window.branch: got {branch!r:.80}; expected a name without a slash")
        return dataclasses.replace(self, branch=branch)

    def promising(self, promise: Promise) -> "Window":
        """Returns the same window, compared with something else from now on. No KV changes.

        Raises:
          WindowError: not "remember" or "forget".
        """
        if promise not in ("remember", "forget"):
            raise WindowError(f"window.promise: got {promise!r:.80}; expected 'remember' or 'forget'")
        return relinked(dataclasses.replace(self, promise=promise), self.pieces, 0)

    def fork(self, name: str | None = None) -> "tuple[Window, Edits]":
        """Starts a branch that shares all KV with this window until it changes a piece. Kamera App. E.

        Args:
          name: of the branch, behind its parent's and a slash; random if None.

        Raises:
          WindowError: an empty name, or one with a slash.
        """
        name = secrets.token_hex(4) if name is None else name
        if not isinstance(name, str) or not name or "/" in name:
            raise WindowError(f"fork.name: got {name!r:.80}; expected a name without a slash")
        branch = f"{self.branch}/{name}"
        there = dataclasses.replace(self, branch=branch)
        return there, tuple(Copy(piece.entry.id, "shared", self.branch) for piece in self.pieces)
