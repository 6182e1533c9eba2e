"""Chunks that a window takes in, and their order, chosen so that stored patches stay valid. Kamera App. E."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvpatch_jax.cache import EXACT, Antecedent, Member, Patch, brief
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import ApplyPatch, Copy, Costs, Edit, Entry, Fetch, PatchNote, Prefill, Window

from .piece_order import BEAM, EXHAUSTIVE, Cost, Forward, Front, OrderProblem, PartialPlacement, cheapest

Price = Callable[[Sequence[Edit]], Cost]
"""Cost of edits, such as `DeviceCosts.seconds`."""
Worth = Mapping[str, Cost]
"""Cost of leaving a chunk out, by id, in the unit of the prices."""


def flops_of(edits: Sequence[Edit]) -> Cost:
    """Returns the FLOPs of edits."""
    return sum(edit.flops for edit in edits)


@dataclasses.dataclass(frozen=True)
class StoredPatches:
    """Stored patches and canonicals, as far as a placement needs to know them.

    Attributes:
      notes: of patches, each valid behind exactly its antecedent (an orbit patch: behind any order of it).
      canonicals: ids of chunks whose canonical was formed behind the window's lead: right behind it they are exact.
    """

    notes: tuple[PatchNote, ...] = ()
    canonicals: frozenset[str] = frozenset()

    @classmethod
    def of(cls, patches: Iterable[Patch | PatchNote] = (), canonicals: Iterable[str] = ()) -> "StoredPatches":
        """Describes the contents of a store.

        Raises:
          WindowError: a patch that no window can use, as `PatchNote.of`.
        """
        return cls(tuple(PatchNote.of(patch) for patch in patches), frozenset(canonicals))

    @functools.cached_property
    def of_chunk(self) -> dict[str, list[PatchNote]]:
        """Notes by their chunk's id: of patches of canonicals, formed behind pieces that were served exactly."""
        notes: dict[str, list[PatchNote]] = {}
        for note in self.notes:
            if note.base == "canonical" and note.antecedent.exact:
                notes.setdefault(note.chunk, []).append(note)
        return notes


NOTHING = StoredPatches()


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """Options of `place`.

    Attributes:
      price: of edits; FLOPs by default, `DeviceCosts.seconds` for seconds.
      front: "exact": what runs is computed behind exact KV, so that its patch can be stored and used again; pieces in
        front that a patch serves therefore run too. "served": it runs alone, behind whatever serves the others.
      prefer: ids that come first where that costs nothing.
      exhaustive: number of movable pieces up to which the search is exact; beyond, a beam of `beam` sets.
    """

    price: Price = flops_of
    front: Front = "exact"
    prefer: Sequence[str] = ()
    exhaustive: int = EXHAUSTIVE
    beam: int = BEAM


@dataclasses.dataclass(frozen=True)
class Placement:
    """Chunks that come into a window, in order, and how each is served there.

    Attributes:
      order: entries behind the lead, from the front.
      left_out: chunks that there is no room for.
      kept: ids of pieces whose KV stays right.
      patched: ids of pieces served by a stored patch or, right behind the lead, by their canonical.
      formed: ids of pieces that run through the model.
      cost: of serving them, in the unit of the prices.
      exhaustive: whether nothing cheaper exists; otherwise the search was not complete.
    """

    order: tuple[Entry, ...]
    left_out: tuple[Entry, ...]
    kept: tuple[str, ...]
    patched: tuple[str, ...]
    formed: tuple[str, ...]
    cost: Cost
    exhaustive: bool

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of `order`."""
        return tuple(entry.id for entry in self.order)


def place(
    window: Window,
    wanted: Sequence[Entry],
    stored: StoredPatches = NOTHING,
    *,
    tokens: int | None = None,
    bytes: int | None = None,
    worth: Worth | None = None,
    **options: Any,
) -> Placement:
    """Chooses which chunks to take in behind a window's lead, and their order, at the least cost. Kamera App. E.

    Only order-free chunks are left out or moved; the others all come in and keep their place among the pieces. A piece
    of the window stays if its KV is right in the new order: exact or, if the window remembers, a survivor's. A stored
    patch serves a chunk behind exactly its antecedent; everything else runs through the model. No stored patch is
    considered behind survivors; where it is cheaper, a survivor is discarded together with what follows it.

    Args:
      window: as it is. Its lead stays; pieces that are not wanted leave.
      wanted: what is to be read, in order of arrival, without the lead.
      stored: contents of the store.
      tokens, bytes: limits for the whole window, lead included.
      worth: cost of leaving a chunk out; 0 for chunks not named. None: as many chunks come in as fit.
      options: fields of `PlacementOptions`: price, front, prefer, exhaustive, beam.

    Raises:
      InputError: an id twice or in the lead, a negative limit, or one that the fixed pieces exceed.
    """
    settings = PlacementOptions(**options)
    _check_wanted(window, wanted)
    room = _room(window, tokens, bytes)
    forward = forward_price(window.costs, settings.price)
    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    preference = {id: place for place, id in enumerate(settings.prefer)}

    # Choices of what to leave out come cheapest first; none that is dearer than the best total can win.
    best: tuple[tuple[Cost, Cost], PartialPlacement, list[Entry], tuple[Entry, ...]] | None = None
    all_proved = True

    for loss, left_out in _omissions(pinned, wanted, room, worth, settings.exhaustive):
        if best is not None and loss >= best[0]:
            break

        entries = [*pinned, *(entry for entry in wanted if entry not in left_out)]
        by_preference = sorted(
            range(len(entries)), key=lambda piece: (preference.get(entries[piece].id, len(preference)), piece)
        )
        problem = _order_problem(window, entries, stored, settings.price)
        search = {"prefer": by_preference, "exhaustive": settings.exhaustive, "beam": settings.beam}
        placed, proved = cheapest(problem, forward, settings.front, **search)
        all_proved = all_proved and proved
        total = (loss[0], loss[1] + placed.cost)
        if best is None or total < best[0]:
            best = total, placed, entries, left_out

    assert best is not None
    _, placed, entries, left_out = best
    movable = sum(entry.order_free for entry in wanted)
    proved = all_proved and (room is None or movable <= settings.exhaustive)
    return _placement(placed, entries, left_out, len(pinned), proved)


def _placement(
    placed: PartialPlacement, entries: Sequence[Entry], left_out: Sequence[Entry], lead: int, proved: bool
) -> Placement:
    """Returns the result of a search, with entries for numbers."""
    ids = [entries[piece].id for piece in placed.order]
    formed, patched = [], []
    for place, piece in enumerate(placed.order[placed.kept :], placed.kept):
        ran = place < placed.ran and piece != placed.led  # the canonical served the piece behind the lead
        (formed if ran or piece in placed.misses else patched).append(ids[place])

    return Placement(
        order=tuple(entries[piece] for piece in placed.order[lead:]),
        left_out=tuple(left_out),
        kept=tuple(ids[lead : placed.kept]),
        patched=tuple(patched),
        formed=tuple(formed),
        cost=placed.cost,
        exhaustive=proved,
    )


# ------------------------------------------------------------------------------------------- what may be left out


def _check_wanted(window: Window, wanted: Sequence[Entry]) -> None:
    seen = {piece.entry.id for piece in window.pieces[: window.lead]}
    for entry in wanted:
        if not isinstance(entry, Entry):
            raise InputError(f"place.wanted: got a {type(entry).__name__}; expected entries")
        if entry.id in seen:
            raise InputError(f"place.wanted: got {brief(entry.id)!r} twice, or from the lead; expected it once")
        seen.add(entry.id)


def _room(window: Window, tokens: int | None, bytes: int | None) -> int | None:
    """Returns how many tokens the window may have; None without a limit."""
    limits = []
    for name, limit, size in (("tokens", tokens, 1), ("bytes", bytes, window.costs.kv_bytes)):
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise InputError(f"place.{name}: got {limit!r:.80}; expected an integer >= 0, or None")
        limits.append(limit // size)
    return min(limits, default=None)


def _omissions(
    pinned: Sequence[Entry], wanted: Sequence[Entry], room: int | None, worth: Worth | None, exhaustive: int
) -> Iterator[tuple[tuple[Cost, Cost], tuple[Entry, ...]]]:
    """Yields what may be left out so that the rest fits, with what that costs; the cheapest first.

    Raises:
      InputError: the fixed pieces do not fit.
    """
    free = [entry for entry in wanted if entry.order_free]
    size = sum(entry.tokens for entry in (*pinned, *wanted))
    fixed = size - sum(entry.tokens for entry in free)
    if room is not None and fixed > room:
        raise InputError(f"place: got room for {room} tokens; expected at least {fixed}, of pieces that must be there")
    if room is None and worth is None:
        yield (0, 0.0), ()
        return

    def loss(left_out: Sequence[Entry]) -> tuple[Cost, Cost]:
        if worth is None:
            return len(left_out), 0.0
        return 0.0, sum(worth.get(entry.id, 0.0) for entry in left_out)

    excess = 0 if room is None else size - room
    if len(free) > exhaustive:
        left_out = _greedy_omission(free, excess, worth)
        yield loss(left_out), left_out
        return

    fitting = []
    for count in range(len(free) + 1):
        for left_out in itertools.combinations(free, count):
            if sum(entry.tokens for entry in left_out) >= excess:
                fitting.append((loss(left_out), left_out))

    yield from sorted(fitting, key=lambda choice: choice[0])


def _greedy_omission(free: Sequence[Entry], excess: int, worth: Worth | None) -> tuple[Entry, ...]:
    """Leaves out what is worth least for its size until the rest fits, then restores what need not have gone."""

    def density(entry: Entry) -> float:
        return (1.0 if worth is None else worth.get(entry.id, 0.0)) / entry.tokens

    left_out: list[Entry] = []
    gone = 0

    for entry in sorted(free, key=density):
        if gone >= excess and (worth is None or density(entry) > 0):
            break
        left_out.append(entry)
        gone += entry.tokens

    for entry in sorted(left_out, key=density, reverse=True):
        if gone - entry.tokens >= excess and density(entry) > 0:
            left_out.remove(entry)
            gone -= entry.tokens

    return tuple(entry for entry in free if entry in left_out)


# -------------------------------------------------------------------------------------------------------- pieces


def forward_price(costs: Costs, price: Price) -> Forward:
    """Returns the cost of a forward over tokens behind others, as a function that remembers."""

    @functools.cache
    def forward(tokens: int, behind: int) -> Cost:
        return price((Prefill("", behind, **costs.prefill(tokens, behind)),))

    return forward


def _order_problem(window: Window, entries: Sequence[Entry], stored: StoredPatches, price: Price) -> OrderProblem:
    """Returns the pieces by number. Pieces of the window that are not wanted have numbers beyond those of entries."""
    number = {entry.id: place for place, entry in enumerate(entries)}

    # Pieces of the window that could stay: up to the first approximate one.
    held, exact = [], 0
    for place, piece in enumerate(window.pieces):
        if piece.fidelity == "approximate":
            break
        same = piece.entry.id in number and entries[number[piece.entry.id]].key == piece.entry.key
        held.append(number[piece.entry.id] if same else len(entries) + place)
        exact += exact == place and piece.fidelity == EXACT

    # The cheapest patch behind each order of pieces, and behind each set of them.
    ordered: list[dict[tuple[int, ...], Cost]] = [{} for _ in entries]
    sets: list[dict[int, Cost]] = [{} for _ in entries]
    for place, entry in enumerate(entries):
        for note in stored.of_chunk.get(entry.id, ()):
            front = _front(note, entry, entries, number)
            if front is None:
                continue

            cost = price(placing(window.costs, entry, note))
            if note.orbit:
                mask = sum(1 << piece for piece in front)
                sets[place][mask] = min(cost, sets[place].get(mask, cost))
            else:
                ordered[place][front] = min(cost, ordered[place].get(front, cost))

    leading = {}
    for place, entry in enumerate(entries):
        if entry.id in stored.canonicals and entry.kind == "chunk":
            leading[place] = price(placing(window.costs, entry))

    return OrderProblem(
        tokens=tuple(entry.tokens for entry in entries),
        free=tuple(place >= window.lead and entry.order_free for place, entry in enumerate(entries)),
        held=tuple(held),
        exact=exact,
        ordered=tuple(ordered),
        sets=tuple(sets),
        lead=window.lead,
        leading=leading,
        promise=window.promise,
        texts=frozenset(place for place, entry in enumerate(entries) if entry.kind == "text"),
    )


def _front(
    note: PatchNote, entry: Entry, entries: Sequence[Entry], number: Mapping[str, int]
) -> tuple[int, ...] | None:
    """Returns the numbers of a patch's antecedent; None if contents differ, or a member is not wanted."""
    members = note.antecedent.members
    if contents_differ(note.content, entry.content) or any(member.id not in number for member in members):
        return None
    if any(contents_differ(member.content, entries[number[member.id]].content) for member in members):
        return None
    return tuple(number[member.id] for member in members)


def contents_differ(first: str | None, second: str | None) -> bool:
    """Returns whether two contents contradict each other; an unknown one contradicts nothing."""
    return None not in (first, second) and first != second


def placing(costs: Costs, entry: Entry, note: PatchNote | None = None) -> tuple[Edit, ...]:
    """Returns the edits that place a stored canonical, with a patch or without."""
    id, tokens = entry.id, entry.tokens
    canonical = Fetch(id, "canonical", None, **costs.fetch(tokens))
    if note is None:
        return canonical, Copy(id, "canonical", None, **costs.copy(tokens))
    fetched = Fetch(id, "patch", note.digest, note.nbytes)
    patch_costs = costs.patch(tokens, note.nbytes, note.flops)
    return canonical, fetched, ApplyPatch(id, note.digest, note.rank, note.base, **patch_costs)


def note_of(
    entry: Entry, front: Sequence[Entry], *, rank: int, nbytes: int, flops: int, orbit: bool = False
) -> PatchNote:
    """Returns the note of a chunk's patch behind pieces that are served exactly, without forming it."""
    antecedent = Antecedent(tuple(Member(piece.id, piece.content) for piece in front))
    antecedent = antecedent.sorted() if orbit else antecedent
    word = "orbit" if orbit else "patch"
    digest = f"{word} {entry.key} {antecedent.digest} {rank}"
    return PatchNote(digest, entry.id, entry.content, "canonical", antecedent, None, orbit, rank, nbytes, flops)
