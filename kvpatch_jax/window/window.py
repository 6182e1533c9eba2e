"""`Window`: the pieces, how they change, how one of them is served otherwise, forks, and JSON."""

import dataclasses
import secrets

from ..backbone import Backbone
from ..cache import Patch
from ..errors import WindowError
from . import window_json
from .costs import Costs
from .edits import Copy, Drop, Edits, Recompute, in_order
from .entry import BARE, FRESH, PatchNote, PieceState, PlacedPiece, short_digest
from .window_operations import WindowOperations
from .window_state import Gaps, Promise


@dataclasses.dataclass(frozen=True, repr=False)
class Window(WindowOperations):
    """What a model is to read: chunks and texts at their places, and how each of them is served. An immutable value.

    It holds no arrays; an executor holds them, and runs the edits that every operation returns beside the new window.

        window = Window.empty(backbone)
        window, edits = window.append(Entry.of_tokens("system", tokens))
        window, edits = window.append(Entry.of(chunk))
        window, edits = window.slide(keep=4)

    Attributes are those of `WindowPieces`.
    """

    @classmethod
    def empty(
        cls,
        costs: Costs | Backbone,
        *,
        lead: int | None = None,
        promise: Promise = "remember",
        gaps: Gaps = "close",
        store: str | None = None,
        branch: str = "",
    ) -> "Window":
        """Makes a window without pieces.

        Args:
          costs: of the backbone that reads it, or that backbone (then of KV in bfloat16).
          lead: how many pieces at the front are pinned; None: the texts in front of the first chunk, or where there are
            none that chunk. Without a lead (0) what the model leans on, the first tokens, may leave: `sink_left`.
          promise, gaps, store: see the attributes.
          branch: its name, where several windows that are no forks of one another lie in one pool; no slash in it.

        Raises:
          WindowError: another word, a negative lead, or a branch that is no name.
        """
        if not isinstance(costs, Costs) and not hasattr(costs, "forward_costs"):
            raise WindowError(f"window: costs {costs!r:.80}; expected Costs, or a Backbone")
        costs = costs if isinstance(costs, Costs) else Costs.of(costs)
        if lead is not None and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 0):
            raise WindowError(f"window: lead {lead!r:.80}; expected how many pieces are pinned, or None")
        if promise not in ("remember", "forget") or gaps not in ("close", "keep"):
            found = f"promise {promise!r:.80}, gaps {gaps!r:.80}"
            raise WindowError(f"window: {found}; expected 'remember' or 'forget', and 'close' or 'keep'")
        window = cls(costs, lead=lead or 0, lead_settled=lead is not None, promise=promise, gaps=gaps, store=store)
        return window.renamed(branch)

    def to_json(self) -> str:
        """Writes the window as JSON, which says for which backbone and store it is."""
        return window_json.write(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, backbone: str | Backbone, store: str | None = None) -> "Window":
        """Reads a window that `to_json` wrote. What it says is checked, but not by whom it was written.

        Args:
          backbone: the one that will read the window, or its fingerprint.
          store: the name of the store that its chunks are in, as the window was given it.

        Raises:
          WindowError: a window of another backbone, store or version; damage; or JSON that is no window.
        """
        fingerprint = backbone if isinstance(backbone, str) else backbone.fingerprint
        return cls(**window_json.read(text, fingerprint, store))

    # ---------------------------------------------------------------------------------------- how one is served

    def bare(self, id: str) -> "tuple[Window, Edits]":
        """Serves a chunk by its canonical alone, until `condition` switches back. Kamera App. E.

        Raises:
          WindowError: a text, or a piece that is not in the window.
        """
        index = self._chunk(id, "bare")
        piece = self.pieces[index]
        if piece.state.kind == "bare":
            return self, ()
        there = self._served(index, piece._replace(state=BARE, aside=piece.state))
        return there, (Copy(id, "canonical", None, **self.costs.copy(piece.entry.tokens)),)

    def condition(
        self,
        id: str,
        patch: Patch | PatchNote | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> "tuple[Window, Edits]":
        """Switches a bare chunk back to the very state it had; or serves a chunk by a patch from now on. Kamera App. E.

        Args:
          patch: formed behind the chunk's `target`: of its canonical, or a removal patch of the conditioned KV that the
            window serves it by.
          fetched, allow_stale: as `append`.

        Raises:
          WindowError: a text, a piece that is not in the window, or a bare chunk that was never conditioned, without a
          patch. StalePatchError, PatchMismatchError: a patch that does not belong here.
        """
        index = self._chunk(id, "condition")
        piece = self.pieces[index]
        if patch is not None:
            note = PatchNote.of(patch)
            self._check_base(note, piece.aside or piece.state, id)
            there = self._served(index, piece._replace(state=note.state(), aside=None))
            there._check_patch(note, there.pieces[index], allow_stale)
            return there, () if piece.state == note.state() else in_order(there._placing(index, fetched))
        if piece.state.kind != "bare":
            return self, ()
        if piece.aside is None:
            raise WindowError(f"condition: chunk {id!r:.80} was placed bare; expected a patch, or `recompute`")
        there = self._served(index, piece._replace(state=piece.aside, aside=None))
        if piece.aside.kind == "conditioned":
            return there, (Copy(id, "conditioned", None, **self.costs.copy(piece.entry.tokens)),)
        return there, in_order(there._placing(index, fetched=True))

    def recompute(self, id: str, start_layer: int = 0) -> "tuple[Window, Edits]":
        """Runs a piece again behind what stands in front of it, from a layer up. Kamera App. D, the cheapest refresh.

        From layer 0 it is a prefill in place; where that makes another one of it than those behind have seen, they are
        approximate. From above, the layers below keep what they were: it is approximate itself.

        Raises:
          WindowError: a layer that the backbone does not have, or a piece that is not in the window.
        """
        index, layers = self.index(id), self.costs.layers
        if not isinstance(start_layer, int) or isinstance(start_layer, bool) or not 0 <= start_layer < layers:
            raise WindowError(f"recompute: start_layer {start_layer!r:.80}; expected a layer from 0 to {layers - 1}")
        piece, behind = self.pieces[index], self.behind(id)
        changed = piece.run_again(self.clock + 1)
        if start_layer:
            told = short_digest(f"recompute {start_layer} {piece.state.digest} {piece.front}")
            changed = changed._replace(state=PieceState("conditioned", told), aside=None)
        there = self._served(index, changed, clock=self.clock + 1)
        costs = self.costs.prefill(piece.entry.tokens, behind, start_layer)
        return there, (Recompute(id, start_layer, behind, **costs),)

    def anew(self) -> "tuple[Window, Edits]":
        """Serves the same pieces from an empty pool, of what was given and stored: where a pool was lost.

        What was conditioned, with a removal patch or without, is prefilled behind what stands in front of it now:
        survivors forget what has left. Bare and patched chunks stay so; `bare` keeps what was patched aside, no more.
        """
        pieces, clock = [], self.clock + 1
        for piece in self.pieces:
            state, aside = piece.state, piece.aside
            if state.kind == "conditioned" or state.base == "conditioned":
                state = FRESH
            if aside is not None and (aside.kind == "conditioned" or aside.base == "conditioned"):
                aside = None
            pieces.append(piece._replace(state=state, aside=aside, born=clock))
        there = self._with(pieces, 0, clock=clock)
        return there, in_order([edit for index in range(len(pieces)) for edit in there._placing(index, fetched=False)])

    def _served(self, index: int, piece: PlacedPiece, **changes: int) -> "Window":
        return self._with([*self.pieces[:index], piece, *self.pieces[index + 1 :]], index, **changes)

    # ------------------------------------------------------------------------------------------------- branches

    def renamed(self, branch: str) -> "Window":
        """Begins the same window under another name, a fork of none: one that was read back, say, beside others.

        An executor holds nothing under the new name: `anew` places the pieces.

        Raises:
          WindowError: no name, or one with a slash, which those of forks alone have.
        """
        if not isinstance(branch, str) or "/" in branch:
            raise WindowError(f"window: branch {branch!r:.80}; expected a name without a slash")
        return dataclasses.replace(self, branch=branch, origin=None, joined=())

    def fork(self, name: str | None = None) -> "tuple[Window, Edits]":
        """Starts a branch that shares all KV with this window until it changes a piece. Kamera App. E.

        Args:
          name: of the branch, behind its parent's and a slash; drawn at random when None.

        Raises:
          WindowError: an empty name, one with a slash, or that of a branch that was joined, which no other could be.
        """
        name = secrets.token_hex(4) if name is None else name
        if not isinstance(name, str) or not name or "/" in name:
            raise WindowError(f"fork: name {name!r:.80}; expected one without a slash")
        branch = f"{self.branch}/{name}"
        if branch in self.joined:
            raise WindowError(f"fork: branch {branch!r} was joined already; expected another name")
        there = dataclasses.replace(self, branch=branch, origin=self.digest, joined=())
        return there, tuple(Copy(piece.entry.id, "shared", self.branch) for piece in self.pieces)

    def join(self, branch: "Window") -> "tuple[Window, Edits]":
        """Takes over what a branch did since it was forked from this very window: the branch that is committed.

        What both hold alike stays; the rest is dropped here and shared with the branch.

        Raises:
          WindowError: a branch of another window, one that was joined already, or this window moved on since the fork.
        """
        if not isinstance(branch, Window):
            raise WindowError(f"join: a {type(branch).__name__}; expected a Window that `fork` made")
        if branch.branch in self.joined:
            raise WindowError(f"join: branch {branch.branch!r} was joined already; expected another")
        if branch.origin is None or branch.branch.rpartition("/")[0] != self.branch or branch.costs != self.costs:
            raise WindowError(f"join: branch {branch.branch!r}; expected a fork of {self.branch!r}")
        if branch.origin != self.digest:
            raise WindowError(
                f"join: branch {branch.branch!r} was forked from window {branch.origin}; expected {self.digest}, which "
                "this one is: it changed since the fork, or is another"
            )
        there = dataclasses.replace(
            branch, branch=self.branch, origin=self.origin, joined=(*self.joined, branch.branch)
        )
        own, theirs = set(self.pieces), set(branch.pieces)
        drops = [Drop(piece.entry.id) for piece in self.pieces if piece not in theirs]
        shared = [Copy(piece.entry.id, "shared", branch.branch) for piece in branch.pieces if piece not in own]
        return there, in_order([*drops, *shared])
