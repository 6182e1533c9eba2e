"""How a chunk comes in: by a forward, by a patch that lies ready, or as a plan says."""

from collections.abc import Callable
from typing import Any

from ..cache import Antecedent
from ..errors import CertificateError, InputError, PatchMismatchError, SessionError, ShapeError
from ..plan import DEFAULT_KL, AvailablePatch, Certificate, DeviceCosts, Goal, PatchInventory, Plan, Way, plan
from ..window import Edits, Entry, Fetch, PatchNote, Prefill, Recompute, Window, chain_digest
from .piece_registry import PieceRecord, PieceRegistry
from .session_input import thing_of

LOSS = Goal(kl=DEFAULT_KL)
"""What a certificate is asked for where nobody says what an answer may lose."""


class LargestPatchInventory(PatchInventory):
    """What lies ready where nothing vouches for it: of several patches that would serve the largest one, and no
    canonical alone, for what is blind is quicker than all of them.
    """

    def canonical(self, entry: Entry) -> bool:
        """None is offered."""
        return False

    def serving(self, entry: Entry, target: str, antecedent: Callable[[], Antecedent]) -> list[AvailablePatch]:
        """The one patch of the largest rank, behind this very order where there is one."""
        found = super().serving(entry, target, antecedent)
        return sorted(found, key=lambda each: (each.point == "orbit", -each.note.rank))[:1]


class ReusePlanner(PieceRegistry):
    """What serves the chunks of a session.

    Attributes:
      keep: how many chunks stay behind the lead; None: all.
      certificate, goal, costs: what plans are made by. uncertified: whether stored patches that were formed behind the
        very antecedent are taken where no certificate says what that loses.
    """

    keep: int | None
    largest_image: int
    certificate: Certificate | None
    goal: Goal | None
    costs: DeviceCosts | None
    uncertified: bool
    _ways: dict[str, Way]

    def plan(self, *things: Any) -> Plan:
        """Plans how things would come in now, in this order, behind all others; runs nothing.

        Args:
          things: names of chunks that left, or what `add` takes. None: how the window is served best as it stands.

        Raises:
          As `plan.plan`, and as `add` of what cannot be read.
        """
        self._expect_open()
        with self._lock:
            entries = [self._entry_of(thing) for thing in things]
            window = self._window
            chunks = sum(entry.kind == "chunk" for entry in entries)
            if self.keep is not None and chunks and window.lead_settled:
                window, _ = window.slide(max(self.keep - chunks, 0))
            return self._plan(window, entries)

    def _entry_of(self, thing: Any) -> Entry:
        if isinstance(thing, str) and (thing in self._names or thing in self._known):
            return self._known[self._piece(thing)].entry
        read = thing_of(self.backbone, thing, self.largest_image)
        left = self._left(read, None)
        if left is not None:
            return left.entry
        _, piece_id = self._names_for(read, None)
        kind = "text" if read.textual else "chunk"
        return self._embedded(read).entry(piece_id, read, kind, False)

    # -------------------------------------------------------------------------------------------------- inside

    def _plan(self, stay: Window, entries: list[Entry]) -> Plan:
        """A plan of the pieces that stay and of those that come."""
        goal = LOSS if self.goal is None and self.certificate is not None else self.goal
        stock = LargestPatchInventory if self.uncertified and self.certificate is None else PatchInventory
        return plan(
            self._window,
            [*(piece.entry for piece in stay.pieces), *entries],
            goal,
            stored=stock.of(self.store, self.backbone),
            certificate=self.certificate,
            costs=self.costs,
            uncertified=self.uncertified,
            forming=self.runtime.former is not None and bool(self.runtime.former.rank),
            known=self._ways,
        )

    def _slid(self, entry: Entry) -> tuple[Window, Edits]:
        """The window with room for one chunk more."""
        if self.keep is None or entry.kind == "text" or not self._window.lead_settled:
            return self._window, ()
        return self._window.slide(self.keep - 1)

    def _bring(self, known: PieceRecord) -> None:
        """Has a piece come in, behind all others, and counts how."""
        back = known.entry.id in self._window.evicted_by_id
        met = back or self._stored(known.entry)
        window, edits, planned = self._choose(known.entry, back)
        try:
            self._execute(window, edits, known)
        except (InputError, PatchMismatchError, ShapeError):
            # What lay ready when the choice was made may have been deleted since.
            if not any(isinstance(edit, Fetch) for edit in edits):
                raise
            window, edits, planned = *self._prefilled(*self._slid(known.entry), known.entry, back, leading=False), None
            self._execute(window, edits, known)
        if planned is not None:
            self._ways = planned.known
        if known.entry.kind == "chunk" and met:
            hit = not any(isinstance(edit, Prefill) and edit.id == known.entry.id for edit in edits)
            self._counts.add("hits" if hit else "misses")
            if not hit and self._patches(known.entry):
                self._counts.add("stale")

    def _execute(self, window: Window, edits: Edits, known: PieceRecord) -> None:
        for edit in edits:
            if isinstance(edit, Prefill | Recompute):
                self._hold(known if edit.id == known.entry.id else self._known[edit.id])
        self._run(window, edits)

    def _choose(self, entry: Entry, back: bool) -> tuple[Window, Edits, Plan | None]:
        """What brings an entry in."""
        slid, sliding = self._slid(entry)
        if not self.uncertified and (self.certificate, self.goal) == (None, None):
            leading = self._leads(slid, entry)
            if leading or self._window.promise == "remember":
                return *self._prefilled(slid, sliding, entry, back, leading), None  # what a plan would say
        note = self._serving(slid, entry) if self.uncertified and self.certificate is None else None
        if note is not None:
            change = slid.recall(entry.id, "patch", note) if back else slid.append(entry, "patch", note)
            return change[0], (*sliding, *change[1]), None
        planned = self._plan(slid, [entry])
        return planned.window, planned.edits, planned

    def _leads(self, window: Window, entry: Entry) -> bool:
        """Whether nothing stands in front of what comes in, and the store has its canonical: its prefill there."""
        alone = not len(window) and entry.kind == "chunk" and self.runtime.executor.lead is None
        return alone and self._stored(entry)

    def _prefilled(self, slid: Window, sliding: Edits, entry: Entry, back: bool, leading: bool) -> tuple[Window, Edits]:
        how = "leading" if leading else "prefill"
        window, placing = slid.recall(entry.id, how) if back else slid.append(entry, how)
        return window, (*sliding, *placing)

    def _serving(self, window: Window, entry: Entry) -> PatchNote | None:
        """The stored patch of an entry that was formed behind what it will stand behind; None where there is none."""
        if (
            self.store is None
            or entry.kind == "text"
            or not PatchInventory.of(self.store, self.backbone).canonical(entry)
        ):
            return None
        target = window.target()
        digest = chain_digest(window.backbone, target)
        found = LargestPatchInventory.of(self.store, self.backbone).serving(entry, digest, lambda: target)
        return next((each.note for each in found if each.note.base == "canonical"), None)

    def _stored(self, entry: Entry) -> bool:
        """Whether the store has met an entry, so far as it says without reading."""
        contains = getattr(self.store, "contains", None)
        return contains is not None and contains(entry.id, self.backbone.fingerprint)

    def _patches(self, entry: Entry) -> int:
        """How many patches of an entry the store has, formed behind whatever, so far as it says."""
        count = getattr(self.store, "patch_count", None)
        return 0 if count is None else count(entry.id, self.backbone.fingerprint)


def check_certificate(certificate: Any, goal: Any, backbone: str) -> None:
    """Refuses what is no certificate or goal, or vouches for other weights.

    Raises:
      CertificateError, SessionError: either.
    """
    if certificate is not None and not isinstance(certificate, Certificate):
        raise SessionError(f"session: certificate {certificate!r:.80}; expected Certificate.read(…), or None")
    if certificate is not None and certificate.backbone != backbone:
        raise CertificateError(
            f"session: a certificate of {certificate.model!r:.80}, backbone {certificate.backbone[:16]!r}; expected "
            f"{backbone[:16]!r}, this session's"
        )
    if goal is not None and not isinstance(goal, Goal):
        raise SessionError(f"session: goal {goal!r:.80}; expected a kvpatch_jax.plan.Goal, or None")
