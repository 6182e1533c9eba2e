"""`Window`: what a model reads, as an immutable value. Operations return windows; an executor brings their KV."""

import dataclasses
import functools
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ..backbone import Backbone
from ..cache import (
    BARE_WAYS,
    SURVIVOR_WAYS,
    UNKNOWN_WAYS,
    Antecedent,
    Identities,
    Likeness,
    Ways,
    brief,
    contents_differ,
    fingerprint_of,
    identity,
    likeness_keys,
    merged,
    slides,
)
from ..errors import PatchMismatchError, SessionError, StalePatchError
from ..utils.kinds import all_of
from .entry import LIMIT, Entry, PatchNote, is_count

Promise = Literal["remember", "forget"]
Fidelity = Literal["exact", "survivor", "approximate"]
Method = Literal["prefill", "leading", "restored", "patch", "bare"]

MOST_GONE = 512
"""Evicted chunks that can be recalled. Beyond that the oldest is forgotten, which bounds the cost of a step."""


class Piece(NamedTuple):
    """An entry at its place, and the KV that serves it.

    Attributes:
      start: where its positions count from, one number for all axes.
      method: how the KV is made: by a forward behind what precedes it ("prefill"); by its canonical at the front of the
        window, which equals that forward ("leading"); by a stored prefill; by a patch; by its canonical alone ("bare").
      made: identity of the KV.
      seen: identities that it was conditioned on; of KV that is approximate, those that it stands behind.
      ways: the approximations that the KV went through. None: the KV that the model itself computes.
      source: digest of the patch, or identity under which the stored prefill is kept.
      base: identity of the KV that a removal patch is added to; None: added to the canonical.
    """

    entry: Entry
    start: int
    method: Method
    made: str
    seen: Identities = ()
    ways: Ways = ()
    source: str | None = None
    base: str | None = None

    @property
    def id(self) -> str:
        """Id of the entry."""
        return self.entry.id

    @property
    def end(self) -> int:
        """Start of a piece right behind it."""
        return self.start + self.entry.span


class Service(NamedTuple):
    """How a piece is to be served.

    Attributes:
      method: a `Method`, or "keep": as it is.
      patch: of "patch".
      allow_stale: accepts a patch that was formed behind something else.
      stored: of "restored": identity of the stored prefill; None: that of a forward here.
      likeness: what the history of a stored prefill shares with the place; None: it is the very same, or unknown.
    """

    method: Method | Literal["keep"]
    patch: PatchNote | None = None
    allow_stale: bool = False
    stored: str | None = None
    likeness: Likeness | None = None


KEEP, PREFILL, BARE = Service("keep"), Service("prefill"), Service("bare")


class Standing(NamedTuple):
    """What a window says of one piece, derived from identities.

    Attributes:
      front: identities of the KV in front of it. target: those that the window promises in front of it.
      promised: identity of the KV that the window promises in its place.
      fidelity: as `Window.fidelity` defines.
      ways: what makes it differ from the promise; none: it does not.
    """

    front: Identities
    target: Identities
    promised: str
    fidelity: Fidelity
    ways: Ways


class _Line:
    """Pieces from the front, one after the other: what stands in front of the next one.

    Attributes:
      standings: of the pieces, from the front.
      front: identities of their KV.
      absorbed: ways of the approximate ones, which a prefill behind them goes through.
      remembered, prefilled: identities that a window promises which remembers, and one which forgets.
      target: those that this one promises.
      exact: whether all are.
    """

    def __init__(self, promise: Promise, pieces: Iterable[Piece] = ()):
        self.remembers = promise == "remember"
        self.standings: list[Standing] = []
        self.chunks: list[tuple[str, str | None]] = []
        self.front: Identities = ()
        self.remembered: Identities = ()
        self.prefilled: Identities = ()
        self.absorbed: Ways = ()
        self.exact = True
        for piece in pieces:
            self.add(piece)

    @property
    def target(self) -> Identities:
        return self.remembered if self.remembers else self.prefilled

    def add(self, piece: Piece) -> None:
        target, key, pure = self.target, piece.entry.key, not piece.ways
        prefilled = identity(key, "prefill", self.prefilled)
        # It has seen everything that is promised in front of it, in this order; the rest has left.
        survives = pure and slides(piece.seen, self.remembered) is not None
        remembered = piece.made if survives else identity(key, "prefill", self.remembered)
        promised = remembered if self.remembers else prefilled

        self.exact = self.exact and pure and piece.made == prefilled
        fidelity: Fidelity = "exact" if self.exact else "survivor" if survives else "approximate"
        if piece.method == "bare" or (pure and piece.made == promised):
            ways = piece.ways
        elif pure:
            ways = SURVIVOR_WAYS if survives else UNKNOWN_WAYS
        else:
            # What a bound was measured on stands behind everything that is promised in front of it.
            there = piece.seen == target or (self.remembers and slides(piece.seen, target) is not None)
            ways = piece.ways if there else UNKNOWN_WAYS

        self.standings.append(Standing(self.front, target, promised, fidelity, ways))
        self.chunks.append((piece.entry.id, piece.entry.content))
        if fidelity == "approximate":
            # What is as promised may still have seen other KV than what is in front of it.
            self.absorbed = merged(self.absorbed, ways or UNKNOWN_WAYS)
        self.front, self.remembered = (*self.front, piece.made), (*self.remembered, remembered)
        self.prefilled = (*self.prefilled, prefilled)


@dataclasses.dataclass(frozen=True, repr=False)
class Window:
    """What a model reads: chunks and texts at their places, and how each of them is served. An immutable value.

        window = Window.empty(backbone)
        window = window.append(Entry.of_tokens("system", tokens))
        window = window.append(Entry.of(chunk))
        window = window.slide(keep=4)

    Operations that take ids raise `SessionError` for one that is not in the window, or a piece of the lead that would
    move. `Executor.run(window)` brings the KV there.

    Attributes:
      backbone: fingerprint of the model that reads it.
      pieces: what is placed, from the front, right behind one another.
      evicted: chunks that left and can be recalled, in the order in which they left; at most `MOST_GONE`.
      lead: how many pieces at the front are pinned: they never leave and never move.
      promise: what the window is measured against: "remember" (the model where each token saw what the window had when
        it came in) or "forget" (a prefill of the window as it is).
      branch: "", or the name that it began under; a fork's is its parent's, a slash and its own name.
    """

    backbone: str
    pieces: tuple[Piece, ...] = ()
    evicted: tuple[Entry, ...] = ()
    lead: int = 1
    promise: Promise = "remember"
    branch: str = ""

    @classmethod
    def empty(
        cls, backbone: Backbone | str, *, lead: int = 1, promise: Promise = "remember", branch: str = ""
    ) -> "Window":
        """Makes a window without pieces.

        Args:
          backbone: that reads it, or its fingerprint.
          lead: how many pieces at the front are pinned. Without a lead (0) the first tokens, which serve as attention
            sinks, may leave: `sink_left`.
          promise: see the attributes.
          branch: its name, if several windows that are no forks of one another share one pool; without a slash.

        Raises:
          SessionError: an invalid promise, lead or branch.
        """
        if not isinstance(backbone, str) and not hasattr(backbone, "fingerprint"):
            raise SessionError(f"window.backbone: got {backbone!r:.80}; expected a Backbone, or its fingerprint")
        fingerprint = fingerprint_of(backbone if isinstance(backbone, str) else backbone.fingerprint, "window")
        if not is_count(lead, 0):
            raise SessionError(f"window.lead: got {lead!r:.80}; expected an integer >= 0")
        if promise not in ("remember", "forget"):
            raise SessionError(f"window.promise: got {promise!r:.80}; expected 'remember' or 'forget'")
        return cls(fingerprint, lead=lead, promise=promise).renamed(branch)

    # ------------------------------------------------------------------------------------------------ enter and leave

    def append(self, entry: Entry, service: Service = PREFILL) -> "Window":
        """Places an entry behind all others.

        Args:
          service: by a forward, by a patch formed behind `target()`, by its canonical alone, by a stored prefill.

        Raises:
          SessionError: an id that is in the window or was evicted (`recall` brings it back), a text that is not
          prefilled, or positions beyond 2**30. StalePatchError, PatchMismatchError: a patch that does not belong here.
        """
        return self._entered(self._new(entry), service)

    def insert(self, entry: Entry, before: str, service: Service = PREFILL) -> "Window":
        """Places an entry in front of another, else as `append`. What follows moves, and has not seen it."""
        return self._entered(self._new(entry), service, before)

    def recall(self, id: str, service: Service = PREFILL, *, before: str | None = None) -> "Window":
        """Brings an evicted chunk back, behind all others or in front of one, else as `append`.

        Raises:
          SessionError: a chunk that was not evicted from this window.
        """
        entry = next((entry for entry in self.evicted if entry.id == id), None)
        if entry is None:
            state = "in the window" if id in self else "unknown"
            gone = tuple(brief(other.id) for other in self.evicted[-8:])
            raise SessionError(
                f"recall.id: got {_shown(id)}, which is {state}; expected an evicted one, such as {gone}"
            )
        return self._entered(entry, service, before)

    def replace(self, id: str, entry: Entry, service: Service = PREFILL) -> "Window":
        """Puts an entry in the place of another, which leaves, else as `append`. What follows has not seen it.

        Args:
          id: of what leaves, which may be the new entry's too.
        """
        index = self.index(id)
        if not isinstance(entry, Entry) or entry.id != id:
            self._new(entry)
        entries = [piece.entry for piece in self.pieces]
        entries[index] = entry
        return self.arranged(entries, {entry.id: service}, {entry.id})

    def evict(self, *ids: str) -> "Window":
        """Takes pieces out. Chunks can be recalled; texts cannot.

        Raises:
          SessionError: one named twice.
        """
        leaving = {self.index(id) for id in ids}
        if len(leaving) != len(ids):
            raise SessionError(f"evict.ids: got {tuple(map(brief, ids))}; expected each once")
        return self.arranged([piece.entry for index, piece in enumerate(self.pieces) if index not in leaving])

    def slide(self, keep: int) -> "Window":
        """Evicts all but the last `keep` chunks behind the lead, each with the texts that follow it.

        Raises:
          SessionError: `keep` is not an integer >= 0.
        """
        if not is_count(keep, 0):
            raise SessionError(f"slide.keep: got {keep!r:.80}; expected an integer >= 0")
        movable = range(min(self.lead, len(self.pieces)), len(self.pieces))
        chunks = [index for index in movable if self.pieces[index].entry.kind == "chunk"]
        if len(chunks) <= keep:
            return self
        # Texts in front of the first chunk are instructions, and stay.
        cut = chunks[-keep] if keep else len(self.pieces)
        return self.arranged([piece.entry for piece in (*self.pieces[: chunks[0]], *self.pieces[cut:])])

    # ---------------------------------------------------------------------------------------- move and serve otherwise

    def reorder(self, order: Sequence[str]) -> "Window":
        """Puts order-free chunks into another order; all others keep theirs and their place among the pieces.

        They keep their KV, rotated; `serve` then serves them otherwise, such as by an orbit patch.

        Args:
          order: ids: the places of those that are named are filled in this order.

        Raises:
          SessionError: a piece that would move and is no order-free chunk, or is named twice.
        """
        ids = all_of(str, order, "order")
        places, entries = [self.index(id) for id in ids], [piece.entry for piece in self.pieces]
        if len(set(ids)) != len(ids):
            raise SessionError(f"reorder.order: got {tuple(map(brief, ids))}; expected each once")
        for old, new in zip(places, sorted(places), strict=True):
            entries[new] = self.pieces[old].entry
        return self.arranged(entries)

    def serve(self, services: Mapping[str, Service]) -> "Window":
        """Serves pieces otherwise in their places: prefilled again, bare, patched, restored. Kamera App. E.

        Raises:
          SessionError: a text that is not prefilled. StalePatchError, PatchMismatchError: as `append`.
        """
        for id in services:
            self.index(id)
        return self.arranged([piece.entry for piece in self.pieces], services)

    def arranged(
        self,
        entries: Sequence[Entry],
        services: Mapping[str, Service] | None = None,
        renewed: Collection[str] = (),
    ) -> "Window":
        """Holds these entries, in this order, and no others; pieces that stay are served as they are unless said.

        Args:
          entries: everything that is to be there, what is pinned in front included. An entry that is in the window or
            was evicted from it is that piece; another one of the same id replaces it.
          services: by id. New entries without one are prefilled.
          renewed: ids of entries that come in anew, also where the window has the very same.

        Raises:
          SessionError: an entry named twice; what is pinned missing or elsewhere; chunks in another order that are not
          order-free; an id that was evicted as another entry; positions beyond 2**30. Else as `append`.
        """
        services, before = services or {}, {piece.id: piece for piece in self.pieces}
        present = self._check_entries(entries)
        stay = dict[str, Piece]()
        for entry in entries:
            old = before.get(entry.id)
            # Most are the very same object, and comparing fields takes longer.
            if old is not None and entry.id not in renewed and (old.entry is entry or old.entry == entry):
                stay[entry.id] = old
        for old, new in zip([piece for piece in self.pieces if piece.id in stay], stay.values(), strict=True):
            if old is not new and not new.entry.order_free:
                raise SessionError(
                    f"window: got {brief(new.id)!r} moved; expected it in its order: it is not order-free"
                )

        line, pieces, start = _Line(self.promise), list[Piece](), 0
        for entry in entries:
            old = stay.get(entry.id)
            piece = _served(line, entry, start, old, services.get(entry.id, PREFILL if old is None else KEEP))
            line.add(piece)
            pieces.append(piece)
            start = piece.end
        if start >= LIMIT:
            raise SessionError(f"window: got positions to {start}; expected them below 2**30")

        evicted = [entry for entry in self.evicted if entry.id not in present]
        evicted += [piece.entry for piece in self.pieces if piece.id not in present and piece.entry.kind == "chunk"]
        return dataclasses.replace(self, pieces=tuple(pieces), evicted=tuple(evicted[-MOST_GONE:]))

    def anew(self) -> "Window":
        """Returns the window as it can be made again after its pool was lost.

        What was conditioned, with a removal patch or without, is prefilled behind what precedes it now: survivors
        forget what has left. Bare and patched chunks stay so.
        """
        line, pieces = _Line(self.promise), list[Piece]()
        for piece in self.pieces:
            # KV that a forward made was only in the pool. A patch belongs to what it stands for, whatever precedes it.
            lost = piece.method in ("prefill", "leading", "restored") or piece.base is not None
            pieces.append(_served(line, piece.entry, piece.start, None, PREFILL) if lost else piece)
            line.add(pieces[-1])
        return dataclasses.replace(self, pieces=tuple(pieces))

    # ------------------------------------------------------------------------------------------------------- branches

    def renamed(self, branch: str) -> "Window":
        """Returns the same window under another name. An executor holds nothing under the new name.

        Raises:
          SessionError: not a string, or one with a slash, which only names of forks have.
        """
        if not isinstance(branch, str) or "/" in branch:
            raise SessionError(f"window.branch: got {branch!r:.80}; expected a name without a slash")
        return dataclasses.replace(self, branch=branch)

    def fork(self, name: str | None = None) -> "Window":
        """Starts a branch, which shares all KV with this window until it changes a piece. Kamera App. E.

        Args:
          name: of the branch, behind its parent's and a slash; random if None.

        Raises:
          SessionError: an empty name, or one with a slash.
        """
        name = secrets.token_hex(4) if name is None else name
        if not isinstance(name, str) or not name or "/" in name:
            raise SessionError(f"fork.name: got {name!r:.80}; expected a name without a slash")
        return dataclasses.replace(self, branch=f"{self.branch}/{name}")

    # -------------------------------------------------------------------------------------------------------- queries

    @functools.cached_property
    def _line(self) -> _Line:
        return _Line(self.promise, self.pieces)

    @property
    def standings(self) -> Sequence[Standing]:
        """What is derived of every piece, from the front."""
        return self._line.standings

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Index of every piece from the front, by id."""
        return {piece.entry.id: index for index, piece in enumerate(self.pieces)}

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the pieces, from the front."""
        return tuple(self.places)

    @property
    def gone(self) -> tuple[str, ...]:
        """Ids of the evicted chunks, the oldest first."""
        return tuple(entry.id for entry in self.evicted)

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self.places

    def __len__(self) -> int:
        return len(self.pieces)

    def __bool__(self) -> bool:
        # An empty window is a window: without this its length would make it false.
        return True

    @property
    def next_start(self) -> int:
        """Where what is appended is placed."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all pieces."""
        return sum(piece.entry.tokens for piece in self.pieces)

    @property
    def sink_left(self) -> bool:
        """Whether the tokens that the first piece was made behind have left, and the attention sink with them.

        KV that is kept then differs far more from a prefill than otherwise. A pinned lead prevents it.
        """
        first = self.pieces[:1]
        return bool(first) and first[0].method == "prefill" and self.standings[0].fidelity != "exact"

    @property
    def as_promised(self) -> bool:
        """Whether the KV of every piece is what the window promises there."""
        return not any(standing.ways for standing in self.standings)

    def index(self, id: str) -> int:
        """Returns the index of a piece from the front."""
        if id in self:
            return self.places[id]
        # The last pieces are shown, of which the id is most likely a misspelling.
        state, ids = "evicted" if id in self.gone else "not in the window", tuple(map(brief, self.ids[-8:]))
        raise SessionError(f"window.id: got {_shown(id)}, which is {state}; expected one of its pieces, such as {ids}")

    def piece(self, id: str) -> Piece:
        """Returns a piece."""
        return self.pieces[self.index(id)]

    def standing(self, id: str) -> Standing:
        """Returns what the window says of a piece."""
        return self.standings[self.index(id)]

    def fidelity(self, id: str) -> Fidelity:
        """Returns how faithfully a piece is served.

        "exact": its KV is that of a prefill of this window as it is, and everything in front is exact too.

        "survivor": it was prefilled behind exact pieces and survivors, and everything that is promised in front of it
        now was in front of it then, with the same KV, in this order; the rest has left. Each of its tokens attended to
        what its window had then, right behind one another: it remembers what has left. That is one forward of the
        history under a mask (banded: no token sees a chunk that had left by then) where chunks left from the front. A
        chunk that left from between others, as every one does behind a lead, brought those closer together, which no
        one forward has.

        "approximate": anything else: patched, bare or restored from another history; behind something that it has not
        seen, until that leaves: inserted, recalled, replaced, moved, or prefilled again after something in front of it
        had left, which gives other KV; prefilled behind a piece that was approximate, for as long as that KV lives.

        The words do not depend on the window's promise; `as_promised` does. A window that remembers promises exact
        pieces and survivors as they are, and a prefill in the place of all others; one that forgets promises a prefill
        of itself.
        """
        return self.standing(id).fidelity

    def antecedent(self, id: str | None = None) -> Antecedent:
        """Returns what precedes a piece, or what will be appended, as it is served: what a prefill there is behind."""
        front = self._place(id).front
        return Antecedent.at(self._line.chunks[: len(front)], front)

    def target(self, id: str | None = None) -> Antecedent:
        """Returns what a patch must have been formed behind to serve a piece there, or one that will be appended.

        Those in front as the window promises them.
        """
        target = self._place(id).target
        return Antecedent.at(self._line.chunks[: len(target)], target)

    def prefilled(self, entry: Entry, id: str | None = None) -> str:
        """Returns the identity that an entry's KV would have, prefilled in front of a piece or behind all."""
        return identity(entry.key, "prefill", self._place(id).front)

    def likeness(self, id: str | None = None) -> dict[Likeness, str]:
        """Returns the keys under which prefills of like histories are stored, of a piece or of what will be appended.

        Nothing at the front of a window.
        """
        front = self._place(id).front
        return likeness_keys(front[: self.lead], self.pieces[len(front) - 1].entry.key) if front else {}

    def _place(self, id: str | None) -> Standing | _Line:
        """Returns what precedes a piece, or (None) what will be appended."""
        return self._line if id is None else self.standing(id)

    def __repr__(self) -> str:
        # The whole window can be long, so pieces are only counted here.
        name = f"branch {self.branch!r}, " if self.branch else ""
        counts = f"{len(self.pieces)} pieces, {self.tokens} tokens, {len(self.evicted)} evicted"
        return f"Window({name}{counts}, next at {self.next_start}, {self.promise}, lead {self.lead})"

    def __str__(self) -> str:
        # One line for each piece: positions, kind, id, and what is special about it.
        lines, width = [repr(self)], len(str(self.next_start))
        for index, (piece, standing) in enumerate(zip(self.pieces, self.standings, strict=True)):
            entry, marks = piece.entry, [standing.fidelity]
            marks += ["lead"] if index < self.lead else []
            marks += [piece.method] if piece.method in ("bare", "patch", "restored") else []
            marks += ["order-free"] if entry.order_free else []
            place = f"{piece.start:>{width}}–{piece.end - 1:<{width}}"
            lines.append(f"  {place}  {entry.kind:<5}  {brief(entry.id)!r}: {entry.tokens} tokens, {', '.join(marks)}")
        return "\n".join(lines)

    # --------------------------------------------------------------------------------------------------------- inside

    def _entered(self, entry: Entry, service: Service, before: str | None = None) -> "Window":
        """Places an entry in front of a piece, or behind all."""
        entries = [piece.entry for piece in self.pieces]
        entries.insert(len(entries) if before is None else self.index(before), entry)
        return self.arranged(entries, {entry.id: service})

    def _new(self, entry: Any) -> Entry:
        """Returns an entry that the window does not know yet."""
        if not isinstance(entry, Entry):
            raise SessionError(f"window: got a {type(entry).__name__}; expected an Entry, such as Entry.of(chunk)")
        state = "is in the window" if entry.id in self else "was evicted" if entry.id in self.gone else None
        if state is not None:
            raise SessionError(f"window.entry: got {_shown(entry.id)}, which {state}; expected a new id, or `recall`")
        return entry

    def _check_entries(self, entries: Sequence[Entry]) -> dict[str, Entry]:
        """Returns the entries by id; refuses one named twice, pinned ones elsewhere, and others of an evicted id."""
        present = {entry.id: entry for entry in entries}
        if len(present) != len(entries):
            twice, _ = Counter(entry.id for entry in entries).most_common(1)[0]
            raise SessionError(f"window: got {brief(twice)!r} twice; expected each once")
        pinned = [piece.entry for piece in self.pieces[: self.lead]]
        if list(entries[: len(pinned)]) != pinned:
            names = tuple(brief(entry.id) for entry in pinned)
            raise SessionError(
                f"window: got other entries in front; expected {names}, which are pinned there (`lead=` says how many)"
            )
        # An id that was evicted comes back as the same entry, or its patches and stored KV would be another's.
        for entry in self.evicted:
            if present.get(entry.id, entry) != entry:
                raise SessionError(f"window: got {brief(entry.id)!r}, evicted as {entry}; expected that, or another id")
        return present


def _shown(id: Any) -> str:
    return repr(brief(id)) if isinstance(id, str) else f"{id!r:.80}"


# ------------------------------------------------------------------------------------------------ how it is served


def _served(line: _Line, entry: Entry, start: int, old: Piece | None, service: Service) -> Piece:
    """Returns an entry in its place, served so. `old` is the piece that it is in the window already."""
    _check_service(line, entry, old, service)
    method, note, key = service.method, service.patch, entry.key
    if method == "keep":
        assert old is not None
        return old if old.start == start else old._replace(start=start)

    if method == "bare":
        return Piece(entry, start, "bare", identity(key, "bare"), line.target, BARE_WAYS)
    if note is not None:
        return _patched(line, entry, start, old, note, service.allow_stale)

    # What a forward here would compute.
    made = identity(key, "prefill", line.front)
    stored = service.stored or made
    if method == "restored" and stored != made:
        # Behind approximate pieces, a prefill behind what they stand for is what the window promises.
        if stored == identity(key, "prefill", line.target):
            return Piece(entry, start, "restored", stored, line.target, (), stored)
        ways = UNKNOWN_WAYS if service.likeness is None else ((service.likeness, 0),)
        return Piece(entry, start, "restored", identity(key, f"restored {stored}"), line.target, ways, stored)
    if old is not None and old.made == made and old.ways == line.absorbed:
        return old._replace(start=start)
    seen = line.target if line.absorbed else line.front
    source = stored if method == "restored" else None
    return Piece(entry, start, method, made, seen, line.absorbed, source)


def _check_service(line: _Line, entry: Entry, old: Piece | None, service: Service) -> None:
    """Refuses services and options that do not go together."""
    if not isinstance(service, Service):
        raise SessionError(f"window.service: got {service!r:.40} of {_shown(entry.id)}; expected a Service")
    method, what = service.method, f"window.service: got {service.method!r:.40} of {_shown(entry.id)}"
    if method not in ("keep", *get_args(Method)) or (method == "patch") != (service.patch is not None):
        patch = "no patch" if service.patch is None else "a patch"
        raise SessionError(f"{what} with {patch}; expected one of {get_args(Method)}, and a patch of 'patch' alone")
    if entry.kind == "text" and method not in ("keep", "prefill"):
        raise SessionError(f"{what}, which is a text; expected it prefilled")
    if (method == "keep" and old is None) or (method == "leading" and (line.front or old is not None)):
        expected = "a piece of the window" if method == "keep" else "nothing in front of it, and that it comes in"
        raise SessionError(f"{what}; expected {expected}")
    if (service.stored is not None and method != "restored") or (service.likeness and service.stored is None):
        raise SessionError(f"{what} with stored={service.stored!r:.40}; expected an identity, of what is 'restored'")


def _patched(line: _Line, entry: Entry, start: int, old: Piece | None, note: PatchNote, allow_stale: bool) -> Piece:
    """Returns an entry served by a patch."""
    what = f"patch of chunk {_shown(entry.id)}"
    if note.chunk != entry.id or contents_differ(note.content, entry.content):
        raise PatchMismatchError(
            f"{what}: got one of {brief(note.chunk)!r} with content {note.content!r}; expected {entry.content!r}"
        )
    ways: Ways = ((note.point, note.rank),)
    base, old_ways = None, ()
    if note.base != "canonical":
        behind = None if note.base_antecedent is None else note.base_antecedent.identities
        base = None if behind is None else identity(entry.key, "prefill", behind)
        if old is None:
            raise PatchMismatchError(f"{what}: got base {note.base!r}; expected 'canonical' of what comes in")
        if old.made != base:
            raise StalePatchError(f"{what}: got a base of KV {base}; expected {old.made}, which the window holds")
        old_ways = old.ways

    target = line.target
    if note.antecedent.identities != target:
        difference = note.antecedent.difference(Antecedent.at(line.chunks, target), note.orbit)
        if difference is not None and not allow_stale:
            order = "any ordering of " if note.orbit else ""
            raise StalePatchError(f"{what}: got one formed behind {order}{difference}")
        ways = UNKNOWN_WAYS if difference is not None else ways
    ways = UNKNOWN_WAYS if ways == UNKNOWN_WAYS else merged(ways, old_ways)
    made = identity(entry.key, f"patch {note.digest}", () if base is None else (base,))
    return Piece(entry, start, "patch", made, target, ways, note.digest, base)
