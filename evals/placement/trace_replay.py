"""Replay of a whole trace: orders of windows, patches to store and patches to evict, with the future known or not.

A trace is a sequence of requests, each by a session for the pieces that it reads. A session's pool holds what its last
request left there exact. One store for all sessions holds canonicals and patches under a budget of bytes.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Costs, Entry, Promise

from .piece_order import Cost, Forward, Front, Order, OrderProblem, PartialPlacement, cheapest, walk
from .window_placement import Price, flops_of, forward_price, note_of, placing

StoredItem = tuple[str, tuple[str, ...]]
"""A stored patch: of a chunk, by its id, and of those in front, in order. Right behind the lead it is the canonical."""
Admit = Literal["always", "again", "room", "useful"]
Evict = Literal["first in", "least recent", "farthest"]


class WindowRequest(NamedTuple):
    """What one session reads: leading texts, then pieces in order of arrival.

    A forked session starts with what its `parent` holds.
    """

    session: str
    pieces: tuple[Entry, ...]
    parent: str | None = None

    @property
    def lead(self) -> int:
        """Number of texts in front of the first chunk."""
        return next((at for at, entry in enumerate(self.pieces) if entry.kind == "chunk"), len(self.pieces))

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the pieces."""
        return tuple(entry.id for entry in self.pieces)

    @property
    def by_id(self) -> dict[str, Entry]:
        """The pieces by their ids."""
        return {entry.id: entry for entry in self.pieces}

    @property
    def arrival(self) -> Order:
        """The order in which they arrived."""
        return tuple(range(len(self.pieces)))

    def ids_of(self, order: Sequence[int]) -> tuple[str, ...]:
        """Returns the ids of pieces in an order, or of some of them."""
        return tuple(self.pieces[piece].id for piece in order)

    def movable(self, order: Sequence[int]) -> list[int]:
        """Returns which pieces of an order may move, as they stand in it."""
        return [piece for piece in order if self.pieces[piece].order_free]

    @property
    def free(self) -> tuple[bool, ...]:
        """Which pieces may move."""
        return tuple(entry.order_free for entry in self.pieces)

    @property
    def lead_ids(self) -> tuple[str, ...]:
        """Ids of these texts: what canonicals are formed behind."""
        return self.ids[: self.lead]

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(entry.tokens for entry in self.pieces)

    @property
    def lead_tokens(self) -> int:
        """Tokens of these texts."""
        return sum(entry.tokens for entry in self.pieces[: self.lead])


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of a replay.

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
    def forward(self) -> Forward:
        """Cost of a forward over tokens behind others, as a function."""
        return forward_price(self.costs, self.price)

    @functools.cached_property
    def patch_price(self) -> Callable[[int, bool], Cost]:
        """Cost of placing a chunk of so many tokens, with its patch or (True) without, as a function."""

        @functools.cache
        def placed(tokens: int, bare: bool) -> Cost:
            entry, flops = Entry("chunk", None, tokens, tokens), self.rank * self.costs.kv_bytes
            # Two operations for each of the numbers of two bytes that a rank adds to.
            note = note_of(entry, (), rank=self.rank, nbytes=self.patch_bytes(tokens), flops=flops)
            return self.price(placing(self.costs, entry, None if bare else note))

        return placed

    def patch_bytes(self, tokens: int) -> int:
        """Returns the bytes of a patch's factors in bfloat16: for each rank one number a token, and one token's KV."""
        return self.rank * (2 * self.channels * self.costs.layers * tokens + self.costs.kv_bytes)

    def bytes_of(self, item: StoredItem, entry: Entry, lead: tuple[str, ...]) -> int:
        """Returns the bytes of a stored item: of the canonical, or of a patch beside it."""
        return self.costs.kv_bytes * entry.tokens if item[1] == lead else self.patch_bytes(entry.tokens)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Policy of a replay.

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
    """Result of one request.

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
    """Contents of a session's pool: ids in order, and how many of these are exact."""

    ids: tuple[str, ...] = ()
    exact: int = 0


@dataclasses.dataclass
class SimulatedStore:
    """The store during a replay.

    Attributes:
      terms: of the replay.
      items: bytes by chunk and the pieces in front; right behind the lead that is the canonical.
      entries: of chunks.
      arrived, used: number of each item in order of arrival, and the request that last used it.
      bytes: of all items.
    """

    terms: Terms
    items: dict[str, dict[tuple[str, ...], int]] = dataclasses.field(default_factory=dict)
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    arrived: dict[StoredItem, int] = dataclasses.field(default_factory=dict)
    used: dict[StoredItem, Cost] = dataclasses.field(default_factory=dict)
    bytes: int = 0

    def put(self, item: StoredItem, entry: Entry, lead: tuple[str, ...]) -> None:
        """Stores an item."""
        size = self.terms.bytes_of(item, entry, lead)
        self.items.setdefault(item[0], {})[item[1]] = size
        self.entries[item[0]] = entry
        self.arrived.setdefault(item, len(self.arrived))
        self.bytes += size

    def drop(self, item: StoredItem, lead: tuple[str, ...]) -> None:
        """Removes an item. A canonical takes its patches with it, and the last patch its canonical."""
        of_chunk = self.items[item[0]]
        for front in list(of_chunk) if item[1] == lead else [item[1]]:
            self.bytes -= of_chunk.pop(front)
        if set(of_chunk) == {lead}:
            self.bytes -= of_chunk.pop(lead)
        if not of_chunk:
            del self.items[item[0]]

    def has_room(self, request: WindowRequest, items: set[StoredItem]) -> bool:
        """Returns whether items of a request, with their canonicals, fit without removing anything."""
        if self.terms.budget is None:
            return True
        lead, size, entries = request.lead_ids, 0, request.by_id
        for id, front in items | {(id, lead) for id, _ in items}:
            if front not in self.items.get(id, {}):
                size += self.terms.bytes_of((id, front), entries[id], lead)
        return self.bytes + size <= self.terms.budget


class RequestForecast:
    """Requests that use each item, in a trace whose orders are given."""

    def __init__(self, requests: Sequence[WindowRequest], orders: Sequence[Order]):
        """Indexes the orders."""
        self.uses: dict[StoredItem, list[int]] = {}
        for at, (request, order) in enumerate(zip(requests, orders, strict=True)):
            ids = request.ids_of(order)
            for place, id in enumerate(ids):
                self.uses.setdefault((id, ids[:place]), []).append(at)

    def next(self, item: StoredItem, at: int) -> Cost:
        """Returns the next request after `at` that uses an item; infinity without one."""
        return next((use for use in self.uses.get(item, ()) if use > at), math.inf)


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

    A request depends only on those before it, unless the policy knows the future: then `orders` are given.

    Args:
      orders: of each request's pieces, instead of the policy's. fronts: what runs behind what, likewise.
      refused: ids of chunks that are never stored.

    Raises:
      InputError: a policy that knows the future without orders, or orders of another number of requests.
    """
    if orders is not None and len(orders) != len(requests):
        raise InputError(f"replay.orders: got {len(orders)}; expected one for each of {len(requests)} requests")
    if orders is None and (policy.admit == "useful" or policy.evict == "farthest"):
        raise InputError(f"replay.policy: got {policy} without orders; expected those of all requests, which it reads")

    state, served = _ReplayState(terms, policy, None if orders is None else RequestForecast(requests, orders)), []
    for at, request in enumerate(requests):
        front = None if fronts is None else fronts[at]
        served.append(state.serve(at, request, None if orders is None else orders[at], front, refused))
    return served


class _ReplayState:
    """State of a replay between two requests: the store, all pools, and what was requested so far."""

    def __init__(self, terms: Terms, policy: Policy, forecast: RequestForecast | None):
        self.terms, self.policy, self.forecast = terms, policy, forecast
        self.store = SimulatedStore(terms)
        self.pools: dict[str, PoolContents] = {}
        self.seen: Counter[str] = Counter()
        self.together: Counter[tuple[str, frozenset[str]]] = Counter()  # a piece, and the set in front of it

    def serve(
        self, at: int, request: WindowRequest, order: Order | None, front: Front | None, refused: frozenset[str]
    ) -> ServedWindow:
        """Serves a request, and stores what the policy admits."""
        terms, pool = self.terms, held_by(request, self.pools)
        placed, front = self._placed(request, pool, order, front)
        ids = request.ids_of(placed.order)
        pooled = self.pools[request.session] = after(request, placed, pool)

        # Store, then record uses, then evict: what this request used is the last to leave.
        canonicals = self._store(at, request, placed, refused)
        for place, id in enumerate(ids):
            for used in {ids[:place], ids[: request.lead]}:
                if used in self.store.items.get(id, {}):
                    self.store.used[id, used] = at
        self._evict(at, request.lead_ids)
        for place, id in enumerate(ids):
            self.seen[id] += 1
            self.together[id, frozenset(ids[:place])] += 1

        # Count how truly each token is served, and what placing took; the rest of the cost was forming.
        exact = survivors = patched = approximate = 0
        led = request.pieces[placed.led].tokens if placed.led >= 0 else None
        placing: Cost = 0 if led is None else terms.patch_price(led, True)
        for place, piece in enumerate(placed.order):
            tokens = request.pieces[piece].tokens
            if place < pooled.exact:
                exact += tokens
            elif place < placed.ran:
                survivors += tokens
            elif piece in placed.misses:
                approximate += tokens
            else:
                patched += tokens
                placing += terms.patch_price(tokens, False)

        forming = placed.cost - placing + canonicals
        counts = (exact, survivors, patched, approximate)
        return ServedWindow(placed.order, front, forming, placing, canonicals, *counts, self.store.bytes)

    def _placed(
        self, request: WindowRequest, pool: PoolContents, order: Order | None, front: Front | None
    ) -> tuple[PartialPlacement, Front]:
        """Returns the request's pieces in order, and what those that run find in front of them."""
        policy, terms = self.policy, self.terms
        if order is None and policy.order == "arrival":
            order = request.arrival
        problem = order_problem(request, pool, terms, self.store.items, order)
        by_use = sorted(request.arrival, key=lambda piece: (-self.seen[request.pieces[piece].id], piece))

        def placed(front: Front) -> PartialPlacement:
            if order is not None:
                return walk(problem, order, terms.forward, front)
            return cheapest(problem, terms.forward, front, prefer=by_use, exhaustive=7, beam=24)[0]

        if front is None and policy.invest != "again":
            front = "exact" if policy.invest == "always" else "served"
        if front is not None:
            return placed(front), front

        # Running behind exact KV costs more now and leaves patches: it pays if such a patch was wanted before.
        cheap, sound = placed("served"), placed("exact")
        gained = at_hand(request, sound) - at_hand(request, cheap)
        wanted = [item for item in gained if self.together[item[0], frozenset(item[1])]]
        missing = any(before not in self.store.items.get(id, {}) for id, before in wanted)
        return (sound, "exact") if missing or sound.cost <= cheap.cost else (cheap, "served")

    def _store(self, at: int, request: WindowRequest, placed: PartialPlacement, refused: frozenset[str]) -> Cost:
        """Stores what the policy admits and the canonicals that it needs; returns what forming these took."""
        admit, items = self.policy.admit, at_hand(request, placed)
        if admit == "useful":
            assert self.forecast is not None
            items = {item for item in items if self.forecast.next(item, at) < math.inf}
        elif admit == "again" or (admit == "room" and not self.store.has_room(request, items)):
            items = {item for item in items if self.together[item[0], frozenset(item[1])]}

        lead, cost, entries = request.lead_ids, 0.0, request.by_id
        # What ran right behind the lead is a canonical already.
        leading = placed.order[request.lead : request.lead + 1] if placed.ran > request.lead else ()
        formed = request.ids_of(leading)

        for id, front in sorted(items, key=lambda item: len(item[1])):
            if id in refused:
                continue
            if lead not in self.store.items.get(id, {}):
                if id not in formed:
                    cost += self.terms.forward(entries[id].tokens, request.lead_tokens)
                self.store.put((id, lead), entries[id], lead)
            if front not in self.store.items[id]:
                self.store.put((id, front), entries[id], lead)

        return cost

    def _evict(self, at: int, lead: tuple[str, ...]) -> None:
        """Removes items until the budget holds."""
        store, evict = self.store, self.policy.evict

        def keeps(item: StoredItem) -> Cost:
            if evict == "first in":
                return store.arrived[item]
            if evict == "farthest":
                assert self.forecast is not None
                return -self.forecast.next(item, at)
            return store.used.get(item, -1)

        while self.terms.budget is not None and store.bytes > self.terms.budget:
            # A canonical leaves with its last patch, or where nothing but canonicals is left.
            removable = []
            for id, of_chunk in store.items.items():
                removable += [(id, front) for front in of_chunk if front != lead or len(of_chunk) == 1]
            store.drop(min(removable, key=keeps), lead)


def order_problem(
    request: WindowRequest,
    pool: PoolContents,
    terms: Terms,
    items: Mapping[str, Mapping[tuple[str, ...], int]],
    order: Order | None = None,
) -> OrderProblem:
    """Returns a request's pieces by number, with what is stored for them; for one order alone if it is given."""
    entries, lead = request.pieces, request.lead_ids
    number = {entry.id: place for place, entry in enumerate(entries)}
    ordered: list[dict[Order, Cost]] = [{} for _ in entries]
    leading: dict[int, Cost] = {}
    ids = None if order is None else request.ids_of(order)

    for place in range(len(entries)):
        piece = place if order is None else order[place]
        tokens, of_chunk = entries[piece].tokens, items.get(entries[piece].id)
        if of_chunk is None or lead not in of_chunk:
            continue

        fronts = list(of_chunk) if ids is None else [ids[:place]]
        for front in fronts:
            if front not in of_chunk:
                continue
            if front == lead:
                leading[piece] = terms.patch_price(tokens, True)
            elif all(id in number for id in front):
                ordered[piece][tuple(number[id] for id in front)] = terms.patch_price(tokens, False)

    return OrderProblem(
        tokens=tuple(entry.tokens for entry in entries),
        free=request.free,
        held=tuple(number.get(id, len(entries) + place) for place, id in enumerate(pool.ids)),
        exact=pool.exact,
        ordered=tuple(ordered),
        lead=request.lead,
        leading=leading,
        promise=terms.promise,
        texts=frozenset(place for place, entry in enumerate(entries) if entry.kind == "text"),
    )


def held_by(request: WindowRequest, pools: Mapping[str, PoolContents]) -> PoolContents:
    """Returns what the pool holds for a session, or for the one that it was forked from."""
    return pools.get(request.session) or pools.get(request.parent or "") or PoolContents()


def after(request: WindowRequest, placed: PartialPlacement, pool: PoolContents) -> PoolContents:
    """Returns what the pool holds after a request: all pieces from the front until a patch serves one."""
    ids = request.ids_of(placed.order[: placed.ran])
    exact = next((at for at, (id, was) in enumerate(zip(ids, pool.ids, strict=False)) if id != was), len(ids))
    return PoolContents(ids, len(ids) if placed.exact else min(exact, pool.exact))


def at_hand(request: WindowRequest, placed: PartialPlacement) -> set[StoredItem]:
    """Returns items that could be stored now: of chunks whose exact KV is there."""
    ids, entries = request.ids_of(placed.order[: placed.ran if placed.exact else 0]), request.by_id
    return {(id, ids[:place]) for place, id in enumerate(ids) if entries[id].kind == "chunk"}


def total(served: Sequence[ServedWindow]) -> Cost:
    """Returns what forming and placing took altogether."""
    return sum(window.forming + window.placing for window in served)
