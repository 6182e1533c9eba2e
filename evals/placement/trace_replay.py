"""Orders, patches to keep and patches to give up over a whole trace: online, and offline with the trace known.

A trace is a sequence of requests, each of them a session and the pieces that it wants to read. A session's pool holds
what its last request left there exact. One store for all holds canonicals and patches under a budget of bytes.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Costs, Entry, Prefill, Promise

from .piece_order import Cost, Front, Order, OrderProblem, PartialPlacement, cheapest, walk
from .window_placement import Price, flops_of, note_of, placing

StoredItem = tuple[str, tuple[str, ...]]
"""A stored patch: of a chunk, by its id, and of those in front, in order. Right behind the lead it is the canonical."""
Admit = Literal["always", "again", "room", "useful"]
Evict = Literal["first in", "least recent", "farthest"]


class WindowRequest(NamedTuple):
    """What one session wants to read: texts that lead, then pieces in order of arrival.

    A session that was forked begins with what its `parent` holds.
    """

    session: str
    pieces: tuple[Entry, ...]
    parent: str | None = None

    @property
    def lead(self) -> int:
        """How many texts stand in front of the first chunk."""
        return next((at for at, entry in enumerate(self.pieces) if entry.kind == "chunk"), len(self.pieces))

    @property
    def free(self) -> tuple[bool, ...]:
        """Which pieces may move."""
        return tuple(entry.order_free for entry in self.pieces)

    @property
    def lead_ids(self) -> tuple[str, ...]:
        """Ids of these texts: what canonicals are formed behind."""
        return tuple(entry.id for entry in self.pieces[: self.lead])

    @property
    def lead_tokens(self) -> int:
        """Tokens of these texts."""
        return sum(entry.tokens for entry in self.pieces[: self.lead])


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a trace is replayed under.

    Attributes:
      costs: of the backbone.
      budget: bytes of the store; None for no bound.
      rank: of patches.
      price: of edits: FLOPs by default.
      promise: as a window's.
      channels: of the KV, each of which has factors of its own.
    """

    costs: Costs
    budget: int | None = None
    rank: int = 32
    price: Price = flops_of
    promise: Promise = "forget"
    channels: int = 2

    @functools.cached_property
    def forward(self):
        """What a forward over tokens behind others costs."""

        @functools.cache
        def forward(tokens: int, behind: int) -> Cost:
            return self.price((Prefill("", behind, **self.costs.prefill(tokens, behind)),))

        return forward

    @functools.cached_property
    def patch_price(self):
        """What placing a chunk of so many tokens costs, with its patch and (True) without."""

        @functools.cache
        def placed(tokens: int, bare: bool) -> Cost:
            entry = Entry("chunk", None, tokens, tokens)
            return self.price(placing(self.costs, entry, None if bare else self._note(entry)))

        return placed

    def _note(self, entry: Entry):
        flops = self.rank * self.costs.kv_bytes  # two for each of the numbers of two bytes that a rank adds to
        return note_of(entry, (), rank=self.rank, nbytes=self.patch_bytes(entry.tokens), flops=flops)

    def patch_bytes(self, tokens: int) -> int:
        """Bytes of a patch's factors in two bytes: for each rank as many as tokens, and a token's KV."""
        return self.rank * (2 * self.channels * self.costs.layers * tokens + self.costs.kv_bytes)

    def bytes_of(self, item: StoredItem, entry: Entry, lead: tuple[str, ...]) -> int:
        """Bytes of a stored item: of the canonical, or of a patch beside it."""
        return self.costs.kv_bytes * entry.tokens if item[1] == lead else self.patch_bytes(entry.tokens)


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a trace is served.

    Attributes:
      order: "arrival", or "cheapest" of what may move.
      admit: patches that are stored: "always" all that are at hand; "again" those of chunks and fronts that were wanted
        before; "room" all while there is room, then these; "useful" those that will be wanted again (the future is
        known).
      invest: when what a patch serves in front of a piece that runs is to run too, so that its patch can be stored:
        "always", "never", or where such a patch was wanted "again".
      evict: what leaves a full store: what came first, what was used least recently, or what is wanted again last (the
        future is known).
    """

    order: Literal["arrival", "cheapest"] = "cheapest"
    admit: Admit = "room"
    evict: Evict = "least recent"
    invest: Literal["always", "again", "never"] = "again"


ARRIVAL = Policy("arrival", evict="first in")
LEAST_RECENT = Policy("arrival")
ONLINE = Policy()
OFFLINE = Policy("arrival", "useful", "farthest")
"""Over given orders."""


class ServedWindow(NamedTuple):
    """How one request was served.

    Attributes:
      order: numbers of its pieces. front: what those that ran found in front of them.
      forming: cost of forwards over pieces, canonicals included. placing: of stored patches.
      canonicals: the part of `forming` that chunks alone took.
      exact, survivors, patched, approximate: tokens by how truly they are served; patched by the patch of that very
        antecedent.
      stored: bytes in the store behind it.
    """

    order: Order
    front: Front
    forming: Cost
    placing: Cost
    canonicals: Cost
    exact: int
    survivors: int
    patched: int
    approximate: int
    stored: int


class PoolContents(NamedTuple):
    """What a session's pool holds: ids in order, and how many of these are exact."""

    ids: tuple[str, ...] = ()
    exact: int = 0


@dataclasses.dataclass
class SimulatedStore:
    """The store while a trace is replayed."""

    terms: Terms
    items: dict[str, dict[tuple[str, ...], int]] = dataclasses.field(default_factory=dict)
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    came: dict[StoredItem, int] = dataclasses.field(default_factory=dict)
    used: dict[StoredItem, Cost] = dataclasses.field(default_factory=dict)
    bytes: int = 0

    def has(self, id: str, front: tuple[str, ...], lead: tuple[str, ...]) -> bool:
        """Whether a chunk can be served behind these: by its canonical and the patch."""
        known = self.items.get(id)
        return known is not None and front in known and lead in known

    def put(self, item: StoredItem, entry: Entry, lead: tuple[str, ...]) -> None:
        """Stores an item."""
        size = self.terms.bytes_of(item, entry, lead)
        self.items.setdefault(item[0], {})[item[1]] = size
        self.entries[item[0]] = entry
        self.came.setdefault(item, len(self.came))
        self.bytes += size

    def drop(self, item: StoredItem, lead: tuple[str, ...]) -> None:
        """Gives an item up; a canonical takes its patches with it."""
        known = self.items[item[0]]
        for front in list(known) if item[1] == lead else [item[1]]:
            self.bytes -= known.pop(front)
        if set(known) == {lead}:  # nothing is left that it is the base of
            self.bytes -= known.pop(lead)
        if not known:
            del self.items[item[0]]


class RequestForecast:
    """When each item is wanted, in a trace whose orders are given."""

    def __init__(self, requests: Sequence[WindowRequest], orders: Sequence[Order]):
        """Takes the orders down."""
        self.wanted: dict[StoredItem, list[int]] = {}
        for at, (request, order) in enumerate(zip(requests, orders, strict=True)):
            ids = [request.pieces[piece].id for piece in order]
            for place, id in enumerate(ids):
                self.wanted.setdefault((id, tuple(ids[:place])), []).append(at)

    def next(self, item: StoredItem, at: int) -> Cost:
        """The next request behind `at` that an item serves."""
        return next((each for each in self.wanted.get(item, ()) if each > at), math.inf)


def replay(
    requests: Sequence[WindowRequest],
    terms: Terms,
    policy: Policy = ONLINE,
    *,
    orders: Sequence[Order] | None = None,
    fronts: Sequence[Front] | None = None,
    refused: frozenset[str] = frozenset(),
) -> list[ServedWindow]:
    """Serves a trace, one request after the other, and counts what forming takes.

    A request sees those in front of it alone, unless the policy knows the future: then `orders` are given.

    Args:
      orders: of each request's pieces, in place of the policy's. fronts: what each finds in front, likewise.
      refused: ids of chunks that are never stored.

    Raises:
      InputError: a policy that knows the future without orders, or orders that are not of these requests.
    """
    if orders is not None and len(orders) != len(requests):
        raise InputError(f"replay: {len(orders)} orders; expected one for each of {len(requests)} requests")
    if orders is None and (policy.admit == "useful" or policy.evict == "farthest"):
        raise InputError(f"replay: {policy}; expected the orders of all requests, which it looks ahead in")
    future = None if orders is None else RequestForecast(requests, orders)
    shelf, residents, seen = SimulatedStore(terms), dict[str, PoolContents](), Counter[str]()
    together: Counter[tuple[str, frozenset[str]]] = Counter()
    served = []
    for at, request in enumerate(requests):
        resident = held_by(request, residents)
        order = None if orders is None else orders[at]
        front = None if fronts is None else fronts[at]
        laid, front = _laid(request, resident, shelf, policy, order, front, seen, together)
        ids = tuple(request.pieces[piece].id for piece in laid.order)
        residents[request.session] = after(request, laid, resident)

        wanted = _admitted(request, laid, policy, at, future, together, shelf)
        canonicals = _store(request, laid, wanted - {(id, ids[: ids.index(id)]) for id in refused & set(ids)}, shelf)
        _touch(request, laid, shelf, at)
        _evict(request, shelf, policy, at, future)
        for place, id in enumerate(ids):
            seen[id] += 1
            together[id, frozenset(ids[:place])] += 1
        served.append(_served(request, laid, front, terms, resident, canonicals, shelf.bytes))
    return served


def _laid(
    request: WindowRequest,
    resident: PoolContents,
    shelf: SimulatedStore,
    policy: Policy,
    order: Order | None,
    front: Front | None,
    seen: Counter[str],
    together: Counter[tuple[str, frozenset[str]]],
) -> tuple[PartialPlacement, Front]:
    terms = shelf.terms
    if order is None and policy.order == "arrival":
        order = tuple(range(len(request.pieces)))
    pieces = numbered(request, resident, terms, shelf.items, order)
    often = lambda piece: (-seen[request.pieces[piece].id], piece)
    prefer = sorted(range(len(request.pieces)), key=often)

    def laid(front: Front) -> PartialPlacement:
        if order is not None:
            return walk(pieces, order, terms.forward, front)
        return cheapest(pieces, terms.forward, front, prefer=prefer, exhaustive=7, beam=24)[0]

    if front is None and policy.invest != "again":
        front = "exact" if policy.invest == "always" else "served"
    if front is not None:
        return laid(front), front
    cheap, sound = laid("served"), laid("exact")
    gained = at_hand(request, sound) - at_hand(request, cheap)
    wanted = any(together[id, frozenset(before)] and before not in shelf.items.get(id, {}) for id, before in gained)
    return (sound, "exact") if wanted or sound.cost <= cheap.cost else (cheap, "served")


def numbered(
    request: WindowRequest,
    resident: PoolContents,
    terms: Terms,
    items: dict[str, dict[tuple[str, ...], int]],
    order: Order | None = None,
) -> OrderProblem:
    """The pieces of a request by number, with what a store has for them; for one order alone where it is given."""
    entries = request.pieces
    number = {entry.id: place for place, entry in enumerate(entries)}
    lead = request.lead_ids
    ordered: list[dict[Order, Cost]] = [{} for _ in entries]
    ids = None if order is None else [entries[piece].id for piece in order]
    leading: dict[int, Cost] = {}
    for place in range(len(entries)):
        piece = place if order is None else order[place]
        known = items.get(entries[piece].id)
        if known is None or lead not in known:
            continue
        fronts = known if ids is None else (front for front in (tuple(ids[:place]),) if front in known)
        for front in fronts:
            if front == lead:
                leading[piece] = terms.patch_price(entries[piece].tokens, True)
            elif all(id in number for id in front):
                price = terms.patch_price(entries[piece].tokens, False)
                ordered[piece][tuple(number[id] for id in front)] = price
    return OrderProblem(
        tokens=tuple(entry.tokens for entry in entries),
        free=request.free,
        held=tuple(number.get(id, len(entries) + place) for place, id in enumerate(resident.ids)),
        exact=resident.exact,
        ordered=tuple(ordered),
        lead=request.lead,
        leading=leading,
        promise=terms.promise,
        texts=frozenset(place for place, entry in enumerate(entries) if entry.kind == "text"),
    )


def held_by(request: WindowRequest, residents: dict[str, PoolContents]) -> PoolContents:
    """What the pool holds for a session, or for the one that it was forked from."""
    return residents.get(request.session) or residents.get(request.parent or "") or PoolContents()


def after(request: WindowRequest, laid: PartialPlacement, resident: PoolContents) -> PoolContents:
    """What the pool holds of a request that was served: all from the front that is not served by a patch."""
    ids = tuple(request.pieces[piece].id for piece in laid.order[: laid.ran])
    exact = next((at for at, (id, was) in enumerate(zip(ids, resident.ids, strict=False)) if id != was), len(ids))
    return PoolContents(ids, len(ids) if laid.exact else min(exact, resident.exact))


def at_hand(request: WindowRequest, laid: PartialPlacement) -> set[StoredItem]:
    """Items that could be stored now: of chunks whose exact KV is at hand."""
    ids = tuple(request.pieces[piece].id for piece in laid.order[: laid.ran if laid.exact else 0])
    chunk = {entry.id for entry in request.pieces if entry.kind == "chunk"}
    return {(id, ids[:place]) for place, id in enumerate(ids) if id in chunk}


def _admitted(
    request: WindowRequest,
    laid: PartialPlacement,
    policy: Policy,
    at: int,
    future: RequestForecast | None,
    together: Counter[tuple[str, frozenset[str]]],
    shelf: SimulatedStore,
) -> set[StoredItem]:
    """What a policy stores of what is at hand."""
    found = at_hand(request, laid)
    if policy.admit == "useful":
        assert future is not None
        return {item for item in found if future.next(item, at) < math.inf}
    if policy.admit == "always" or (policy.admit == "room" and _fits(request, found, shelf)):
        return found
    return {(id, front) for id, front in found if together[id, frozenset(front)]}


def _fits(request: WindowRequest, items: set[StoredItem], shelf: SimulatedStore) -> bool:
    """Whether items and their canonicals find room without anything leaving."""
    if shelf.terms.budget is None:
        return True
    lead = request.lead_ids
    entries = {entry.id: entry for entry in request.pieces}
    every = items | {(id, lead) for id, _ in items}
    new = [item for item in every if item[1] not in shelf.items.get(item[0], {})]
    more = sum(shelf.terms.bytes_of(item, entries[item[0]], lead) for item in new)
    return shelf.bytes + more <= shelf.terms.budget


def _store(request: WindowRequest, laid: PartialPlacement, wanted: set[StoredItem], shelf: SimulatedStore) -> Cost:
    """Stores what is new, and the canonicals that it needs; returns what these took."""
    lead = request.lead_ids
    entries = {entry.id: entry for entry in request.pieces}
    before = request.lead_tokens
    ran = {request.pieces[piece].id for piece in laid.order[request.lead : request.lead + 1] if laid.ran > request.lead}
    took = 0.0
    for id, front in sorted(wanted, key=lambda item: len(item[1])):
        known = shelf.items.get(id, {})
        if lead not in known:
            if id not in ran:  # else it ran right behind the lead
                took += shelf.terms.forward(entries[id].tokens, before)
            shelf.put((id, lead), entries[id], lead)
        if front not in shelf.items[id]:
            shelf.put((id, front), entries[id], lead)
    return took


def _touch(request: WindowRequest, laid: PartialPlacement, shelf: SimulatedStore, at: int) -> None:
    """Notes what was used."""
    ids = tuple(request.pieces[piece].id for piece in laid.order)
    for place, id in enumerate(ids):
        for front in {ids[:place], ids[: request.lead]}:
            if front in shelf.items.get(id, {}):
                shelf.used[id, front] = at


def _evict(
    request: WindowRequest, shelf: SimulatedStore, policy: Policy, at: int, future: RequestForecast | None
) -> None:
    """Gives items up until the budget holds."""
    budget, lead = shelf.terms.budget, request.lead_ids
    while budget is not None and shelf.bytes > budget:
        every = [(id, front) for id, known in shelf.items.items() for front in known]
        # A canonical goes with its last patch, or where nothing but canonicals is left.
        loose = [item for item in every if item[1] != lead or len(shelf.items[item[0]]) == 1]
        shelf.drop(min(loose, key=lambda item: _value(item, shelf, policy, at, future)), lead)


def _value(item: StoredItem, shelf: SimulatedStore, policy: Policy, at: int, future: RequestForecast | None) -> Cost:
    """What leaves first has least."""
    if policy.evict == "first in":
        return shelf.came[item]
    if policy.evict == "farthest":
        assert future is not None
        return -future.next(item, at)
    return shelf.used.get(item, -1)


def _served(
    request: WindowRequest,
    laid: PartialPlacement,
    front: Front,
    terms: Terms,
    resident: PoolContents,
    canonicals: Cost,
    stored: int,
) -> ServedWindow:
    """Counts how a request was served."""
    exact = survivors = patched = approximate = 0
    placed: Cost = 0
    if laid.led >= 0:
        placed += terms.patch_price(request.pieces[laid.led].tokens, True)
    now = after(request, laid, resident)
    for place, piece in enumerate(laid.order):
        entry = request.pieces[piece]
        if place < now.exact:
            exact += entry.tokens
        elif place < laid.ran:
            survivors += entry.tokens
        elif piece in laid.misses:
            approximate += entry.tokens
        else:
            patched += entry.tokens
            placed += terms.patch_price(entry.tokens, False)
    forming = laid.cost - placed + canonicals
    return ServedWindow(laid.order, front, forming, placed, canonicals, exact, survivors, patched, approximate, stored)


def total(served: Sequence[ServedWindow]) -> Cost:
    """What forming and placing took in all."""
    return sum(each.forming + each.placing for each in served)
