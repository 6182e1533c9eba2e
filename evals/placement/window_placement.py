"""Which chunks a window takes in and in which order, so that stored patches stay valid. Kamera App. E."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvpatch_jax.cache import EXACT, Antecedent, Member, Patch, brief
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import ApplyPatch, Copy, Costs, Edit, Entry, Fetch, PatchNote, Prefill, Window

from .piece_order import BEAM, EXHAUSTIVE, Cost, Forward, Front, OrderProblem, PartialPlacement, cheapest

Price = Callable[[Sequence[Edit]], Cost]
"""What edits cost, such as `DeviceCosts.seconds`."""


def flops_of(edits: Sequence[Edit]) -> Cost:
    """Adds up the FLOPs of edits."""
    return sum(edit.flops for edit in edits)


@dataclasses.dataclass(frozen=True)
class StoredPatches:
    """What is stored, as far as placing has to know it.

    Attributes:
      notes: of patches, each served behind its very antecedent alone (an orbit patch: behind any order of it).
      canonicals: ids of chunks whose canonical was formed behind the window's lead: right behind it they are exact.
    """

    notes: tuple[PatchNote, ...] = ()
    canonicals: frozenset[str] = frozenset()

    @classmethod
    def of(cls, patches: Iterable[Patch | PatchNote] = (), canonicals: Iterable[str] = ()) -> "StoredPatches":
        """Takes down what a store has.

        Raises:
          WindowError: a patch that no window serves, as `PatchNote.of`.
        """
        return cls(tuple(PatchNote.of(patch) for patch in patches), frozenset(canonicals))

    @functools.cached_property
    def of_chunk(self) -> dict[str, list[PatchNote]]:
        """The notes by their chunk's id: of canonicals, formed behind what was served exactly."""
        found: dict[str, list[PatchNote]] = {}
        for note in self.notes:
            if note.base == "canonical" and note.antecedent.exact:
                found.setdefault(note.chunk, []).append(note)
        return found


NOTHING = StoredPatches()


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which chunks come into a window, in which order, and how each is served there.

    Attributes:
      order: entries behind the lead, from the front.
      left_out: chunks that there is no room for.
      kept: ids of pieces whose KV stays right. patched: that a stored patch serves, or right behind the lead their
        canonical. formed: that run through the model.
      cost: of serving them, in the unit of the prices (FLOPs, where none were given).
      exhaustive: whether nothing cheaper exists; else it was looked for, not proved.
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
        """The ids of `order`."""
        return tuple(entry.id for entry in self.order)


def place(
    window: Window,
    wanted: Sequence[Entry],
    stored: StoredPatches = NOTHING,
    *,
    tokens: int | None = None,
    bytes: int | None = None,
    worth: Mapping[str, Cost] | None = None,
    price: Price = flops_of,
    front: Front = "exact",
    prefer: Sequence[str] = (),
    exhaustive: int = EXHAUSTIVE,
    beam: int = BEAM,
) -> Placement:
    """Chooses which chunks to take in behind a window's lead, and their order, at the least cost of forming. App. E.

    Only order-free chunks are left out or moved: the others are all taken in and keep their place among the pieces. A
    piece of the window stays where its KV is right in the new order (exact, or where the window remembers a survivor);
    a stored patch serves a chunk behind its very antecedent; all else runs through the model. Behind survivors no
    stored patch is looked for: one leaves, and what is behind it, where that is cheaper.

    Args:
      window: as it stands: its lead stays, and what is not wanted leaves.
      wanted: what shall be read, in order of arrival, without the lead.
      stored: what the store has.
      tokens, bytes: of the whole window, lead included, at most.
      worth: by id, what leaving a chunk out costs, in the unit of the prices; a chunk that is not named costs nothing.
        None: as many chunks come in as fit, whatever they cost.
      price: of edits; their FLOPs by default, `DeviceCosts.seconds` for seconds.
      front: "exact": what is formed is formed behind exact KV and can be stored and served again, so that pieces which
        a patch serves in front of it run too. "served": it runs alone, behind whatever serves the others.
      prefer: ids, those that shall stand in front first, where that costs nothing.
      exhaustive, beam: as `cheapest` takes them.

    Raises:
      InputError: an id twice or one of the lead, a negative budget, or a budget that what must be there exceeds.
    """
    lead = window.pieces[: window.lead]
    _check_wanted(window, wanted)
    room = _room(window, tokens, bytes)
    forward = _forward(window.costs, price)
    pinned = [piece.entry for piece in lead]

    best: tuple[tuple[Cost, Cost], PartialPlacement, bool, list[Entry], list[Entry]] | None = None
    every = True
    for lost, left in _left_out(pinned, wanted, room, worth, exhaustive):
        if best is not None and lost >= best[0]:
            break
        entries = [*pinned, *(entry for entry in wanted if entry not in left)]
        numbered = _numbered(window, entries, stored, price)
        rank = {id: place for place, id in enumerate(prefer)}
        liked = sorted(range(len(entries)), key=lambda each: (rank.get(entries[each].id, len(rank)), each))
        laid, proved = cheapest(numbered, forward, front, prefer=liked, exhaustive=exhaustive, beam=beam)
        every = every and proved
        total = (lost[0], lost[1] + laid.cost)
        if best is None or total < best[0]:
            best = total, laid, proved, entries, list(left)
    assert best is not None
    _, laid, _, entries, left = best
    movable = sum(entry.order_free for entry in wanted)
    return _placement(laid, entries, left, len(lead), every and (room is None or movable <= exhaustive))


def _placement(
    laid: PartialPlacement, entries: Sequence[Entry], left: Sequence[Entry], lead: int, every: bool
) -> Placement:
    ids = [entries[piece].id for piece in laid.order]
    missed = {entries[piece].id for piece in laid.misses}
    formed = []
    for place, id in enumerate(ids[laid.kept :], laid.kept):
        if (place < laid.ran and laid.order[place] != laid.led) or id in missed:
            formed.append(id)
    return Placement(
        order=tuple(entries[piece] for piece in laid.order[lead:]),
        left_out=tuple(left),
        kept=tuple(ids[lead : laid.kept]),
        patched=tuple(id for id in ids[laid.kept :] if id not in formed),
        formed=tuple(formed),
        cost=laid.cost,
        exhaustive=every,
    )


def _check_wanted(window: Window, wanted: Sequence[Entry]) -> None:
    seen = {piece.entry.id for piece in window.pieces[: window.lead]}
    for entry in wanted:
        if not isinstance(entry, Entry):
            raise InputError(f"place: a {type(entry).__name__}; expected entries")
        if entry.id in seen:
            raise InputError(f"place: {brief(entry.id)!r} is in the lead, or wanted twice; expected each once")
        seen.add(entry.id)


def _room(window: Window, tokens: int | None, bytes: int | None) -> int | None:
    """Tokens that the window may have; None without a budget."""
    found = None
    for word, value, each in (("tokens", tokens, 1), ("bytes", bytes, window.costs.kv_bytes)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"place: {word} {value!r:.80}; expected how many at most, or None")
        found = value // each if found is None else min(found, value // each)
    return found


def _forward(costs: Costs, price: Price) -> Forward:
    @functools.cache
    def forward(tokens: int, behind: int) -> Cost:
        return price((Prefill("", behind, **costs.prefill(tokens, behind)),))

    return forward


def _left_out(
    pinned: Sequence[Entry],
    wanted: Sequence[Entry],
    room: int | None,
    worth: Mapping[str, Cost] | None,
    exhaustive: int,
) -> Iterator[tuple[tuple[Cost, Cost], tuple[Entry, ...]]]:
    """What may be left out so that the rest fits, with what that costs; the cheapest first.

    Raises:
      InputError: what must be there does not fit.
    """
    free = [entry for entry in wanted if entry.order_free]
    size = sum(entry.tokens for entry in (*pinned, *wanted))
    least = size - sum(entry.tokens for entry in free)
    if room is not None and least > room:
        raise InputError(f"place: room for {room} tokens; expected at least the {least} of what must be there")

    def lost(left: Sequence[Entry]) -> tuple[Cost, Cost]:
        return (len(left), 0.0) if worth is None else (0.0, sum(worth.get(entry.id, 0.0) for entry in left))

    if room is None and worth is None:
        yield (0, 0.0), ()
        return

    over = 0 if room is None else size - room
    if len(free) <= exhaustive:
        every = (left for count in range(len(free) + 1) for left in itertools.combinations(free, count))
        fitting = [(lost(left), left) for left in every if sum(entry.tokens for entry in left) >= over]
        yield from sorted(fitting, key=lambda each: each[0])
        return
    left = _greedily(free, over, worth)
    yield lost(left), left


def _greedily(free: Sequence[Entry], over: int, worth: Mapping[str, Cost] | None) -> tuple[Entry, ...]:
    """Leaves out what is worth least for its size until the rest fits, then takes back what was left out in vain."""

    def value(entry: Entry) -> float:
        return (1.0 if worth is None else worth.get(entry.id, 0.0)) / entry.tokens

    left: list[Entry] = []
    gone = 0
    for entry in sorted(free, key=value):
        if gone >= over and (worth is None or value(entry) > 0):
            break
        left.append(entry)
        gone += entry.tokens
    for entry in sorted(left, key=value, reverse=True):
        if gone - entry.tokens >= over and value(entry) > 0:
            left.remove(entry)
            gone -= entry.tokens
    return tuple(entry for entry in free if entry in left)


def _numbered(window: Window, entries: Sequence[Entry], stored: StoredPatches, price: Price) -> OrderProblem:
    """The pieces by number; those of the window that are not wanted have numbers beyond."""
    number = {entry.id: place for place, entry in enumerate(entries)}
    held, exact = [], 0
    for place, piece in enumerate(window.pieces):
        if piece.fidelity == "approximate":
            break
        same = piece.entry.id in number and entries[number[piece.entry.id]].key == piece.entry.key
        held.append(number[piece.entry.id] if same else len(entries) + place)
        exact += exact == place and piece.fidelity == EXACT
    ordered: list[dict[tuple[int, ...], Cost]] = [{} for _ in entries]
    sets: list[dict[int, Cost]] = [{} for _ in entries]
    for place, entry in enumerate(entries):
        for note in stored.of_chunk.get(entry.id, ()):
            front = _front(note, entry, entries, number)
            if front is None:
                continue
            cost = price(placing(window.costs, entry, note))
            if note.orbit:
                mask = sum(1 << each for each in front)
                sets[place][mask] = min(cost, sets[place].get(mask, cost))
            else:
                ordered[place][front] = min(cost, ordered[place].get(front, cost))
    leading = {
        place: price(placing(window.costs, entry))
        for place, entry in enumerate(entries)
        if entry.id in stored.canonicals and entry.kind == "chunk"
    }
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
    """The numbers of what a patch was formed behind; None where it is of other content, or something is not wanted."""
    if _other(note.content, entry.content) or any(id not in number for id in note.antecedent.ids):
        return None
    members = note.antecedent.members
    if any(_other(member.content, entries[number[member.id]].content) for member in members):
        return None
    return tuple(number[member.id] for member in members)


def _other(found: str | None, wanted: str | None) -> bool:
    return None not in (found, wanted) and found != wanted


def placing(costs: Costs, entry: Entry, note: PatchNote | None = None) -> tuple[Edit, ...]:
    """Lists the edits that place a stored canonical, with a patch or without."""
    id, tokens = entry.id, entry.tokens
    canonical = Fetch(id, "canonical", None, **costs.fetch(tokens))
    if note is None:
        return canonical, Copy(id, "canonical", None, **costs.copy(tokens))
    fetched = Fetch(id, "patch", note.digest, note.nbytes)
    costs_of_patch = costs.patch(tokens, note.nbytes, note.flops)
    return canonical, fetched, ApplyPatch(id, note.digest, note.rank, note.base, **costs_of_patch)


def note_of(
    entry: Entry, front: Sequence[Entry], *, rank: int, nbytes: int, flops: int, orbit: bool = False
) -> PatchNote:
    """Describes the patch of a chunk behind others that were served exactly, without forming it."""
    antecedent = Antecedent(tuple(Member(each.id, each.content) for each in front))
    antecedent = antecedent.sorted() if orbit else antecedent
    word = "orbit" if orbit else "patch"
    digest = f"{word} {entry.key} {antecedent.digest} {rank}"
    return PatchNote(digest, entry.id, entry.content, "canonical", antecedent, None, orbit, rank, nbytes, flops)
