"""A trace known in advance: orders and patches to keep by local search, and the exact optimum where it can be found."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Entry

from .piece_order import Cost, Front, Order, filled, walk
from .trace_replay import (
    ARRIVAL,
    OFFLINE,
    ONLINE,
    PoolContents,
    ServedWindow,
    StoredItem,
    Terms,
    WindowRequest,
    after,
    at_hand,
    held_by,
    order_problem,
    replay,
    total,
)

FRONTS: tuple[Front, ...] = ("exact", "served")
NEAR, ALL_ORDERS, ALIGNED = 6, 4, 12
"""Other requests that an order is taken over from; movable pieces up to which every order is tried; chunks, of those
wanted most, that are moved in the one order of all."""
STATES = 50_000
"""States of the exact optimum that are followed behind one request at most."""


class OfflineSchedule(NamedTuple):
    """A whole trace, scheduled.

    Attributes:
      orders: of each request's pieces. fronts: what those that run find in front.
      refused: ids of chunks that are never stored.
      served: as `replay` counts it. rounds: of improvement, the last one without any.
    """

    orders: tuple[Order, ...]
    fronts: tuple[Front, ...]
    refused: frozenset[str]
    served: tuple[ServedWindow, ...]
    rounds: int

    @property
    def cost(self) -> Cost:
        """Of forming and placing."""
        return total(self.served)


def schedule(
    requests: Sequence[WindowRequest], terms: Terms, rounds: int = 4, tries: int | None = None
) -> OfflineSchedule:
    """Chooses orders and patches to keep for a trace that is known, by local search.

    It starts from what arrived, from what an online replay chose and from one order of all chunks that every request
    follows; then, request by request and for two of them together, takes orders of others over, and stops storing
    chunks whose canonical does not pay. From what that finds it starts again with some requests drawn anew.

    Args:
      rounds: of improvement at most.
      tries: how often it starts again; None: more often where the trace is short.
    """
    search = _Search(requests, terms)
    starts = sorted(search.starts(), key=search.cost)
    tries = max(0, 24 - len(requests)) if tries is None else tries
    random = np.random.default_rng(0)
    best, done = search.improved(starts[0], rounds)
    others: list[_Choice | None] = [*starts[1 : 1 + tries // 4], *[None] * tries]
    for start in others:
        found, more = search.improved(search.shaken(best, random) if start is None else start, rounds)
        if search.cost(found) < search.cost(best):
            best, done = found, more
    return OfflineSchedule(*best, search.served(best), done)


class _Choice(NamedTuple):
    """What a schedule decides; as `OfflineSchedule` has it."""

    orders: tuple[Order, ...]
    fronts: tuple[Front, ...]
    refused: frozenset[str] = frozenset()


class _Search:
    """Local search over one trace."""

    def __init__(self, requests: Sequence[WindowRequest], terms: Terms):
        self.requests, self.terms = requests, terms
        often: Counter[str] = Counter()
        for request in requests:
            often.update(entry.id for entry in request.pieces if entry.kind == "chunk")
        self.chunks = [id for id, _ in often.most_common()]
        self._costs: dict[_Choice, Cost] = {}

    def served(self, choice: _Choice) -> tuple[ServedWindow, ...]:
        """Serves the trace as chosen."""
        orders, fronts, refused = choice
        return tuple(replay(self.requests, self.terms, OFFLINE, orders=orders, fronts=fronts, refused=refused))

    def cost(self, choice: _Choice) -> Cost:
        """Returns what that takes."""
        if choice not in self._costs:
            self._costs[choice] = total(self.served(choice))
        return self._costs[choice]

    def starts(self) -> list[_Choice]:
        """Lists schedules to start from: orders of arrival, of online replays, and one order of all chunks."""
        arrival = tuple(request.arrival for request in self.requests)
        every, found = list[tuple[Front, ...]](), list[_Choice]()
        for front in FRONTS:
            fronts: tuple[Front, ...] = (front,) * len(self.requests)
            every.append(fronts)
            found.append(_Choice(arrival, fronts))
        for policy in (ONLINE, dataclasses.replace(ONLINE, admit="always")):
            served = replay(self.requests, self.terms, policy)
            found.append(_Choice(tuple(window.order for window in served), tuple(window.front for window in served)))

        # One order of all chunks that every request follows: the best that moving one at a time finds.
        for fronts in every:
            line = self.chunks
            best = _Choice(tuple(_following(request, line) for request in self.requests), fronts)
            for id in self.chunks[:ALIGNED]:
                rest = [other for other in line if other != id]
                for place in range(min(len(line), ALIGNED)):
                    moved = [*rest[:place], id, *rest[place:]]
                    choice = _Choice(tuple(_following(request, moved) for request in self.requests), fronts)
                    if self.cost(choice) < self.cost(best):
                        best, line = choice, moved
            found.append(best)

        return found

    def improved(self, choice: _Choice, rounds: int) -> tuple[_Choice, int]:
        """Returns the schedule after so many rounds of improvement, or fewer where the last one found none."""
        for done in range(1, rounds + 1):
            before = choice
            for id in self.chunks:
                choice = min(choice, choice._replace(refused=choice.refused ^ {id}), key=self.cost)
            for at in range(len(self.requests)):
                for moved in self._neighbours(choice, at):
                    choice = min(choice, moved, key=self.cost)
            if choice == before:
                return choice, done

        return choice, rounds

    def _neighbours(self, choice: _Choice, at: int) -> Iterator[_Choice]:
        """Yields schedules that serve one request otherwise, or it and another that it shares most with."""
        orders, fronts = choice.orders, choice.fronts
        other: Front = "served" if fronts[at] == "exact" else "exact"
        yield choice._replace(fronts=(*fronts[:at], other, *fronts[at + 1 :]))
        for order in _other_orders(self.requests, orders, at):
            yield choice._replace(orders=(*orders[:at], order, *orders[at + 1 :]))

        names = set(self.requests[at].ids_of(self.requests[at].movable(orders[at])))
        for near in range(at + 1, min(at + 1 + NEAR, len(orders))):
            shared = names.intersection(self.requests[near].ids)
            common = [id for id in self.chunks if id in shared]
            if len(common) > 1:
                moved = list(orders)
                for place in (at, near):
                    request = self.requests[place]
                    moved[place] = _following(request, [*common, *request.ids_of(orders[place])])
                yield choice._replace(orders=tuple(moved))

    def shaken(self, choice: _Choice, random: np.random.Generator) -> _Choice:
        """Returns the schedule with some requests drawn anew."""
        orders: list[Order] = list(choice.orders)
        fronts: list[Front] = list(choice.fronts)
        for _ in range(max(2, len(orders) // 4)):
            at = int(random.integers(len(orders)))
            request = self.requests[at]
            free = request.movable(orders[at])
            orders[at] = filled(request.free, [free[int(place)] for place in random.permutation(len(free))])
            fronts[at] = FRONTS[int(random.integers(2))]

        refused = frozenset(id for id in choice.refused if random.random() < 0.5)
        return _Choice(tuple(orders), tuple(fronts), refused)


def _following(request: WindowRequest, line: Sequence[str]) -> Order:
    """Returns the order of a request whose movable pieces stand as in a line; those that it lacks come last."""
    rank: dict[str, int] = {}
    for place, id in enumerate(line):
        rank.setdefault(id, place)
    free = request.movable(request.arrival)
    return filled(request.free, sorted(free, key=lambda place: rank.get(request.pieces[place].id, len(line))))


def _other_orders(requests: Sequence[WindowRequest], orders: Sequence[Order], at: int) -> Iterator[Order]:
    """Yields other orders of one request: all where few may move; else as other requests have their common pieces."""
    request = requests[at]
    free = request.movable(orders[at])
    if len(free) < 2:
        return
    if len(free) <= ALL_ORDERS:
        yield from (filled(request.free, moved) for moved in itertools.permutations(free) if list(moved) != free)
        return

    number = {request.pieces[piece].id: piece for piece in free}

    def distance(other: int) -> tuple[int, int]:
        shared = sum(id in number for id in requests[other].ids)
        return -shared, abs(other - at)

    tried = {tuple(free)}
    for other in sorted((other for other in range(len(requests)) if other != at), key=distance)[:NEAR]:
        common = [number[id] for id in requests[other].ids_of(orders[other]) if id in number]
        moved = (*common, *(piece for piece in free if piece not in common))
        if moved not in tried:
            tried.add(moved)
            yield filled(request.free, moved)


# ----------------------------------------------------------------------------------------------------- the optimum


class _State(NamedTuple):
    """What a trace's cost from here depends on."""

    residents: tuple[tuple[str, PoolContents], ...]
    items: frozenset[StoredItem]


def optimum(requests: Sequence[WindowRequest], terms: Terms, states: int = STATES) -> Cost:
    """Finds the least cost of forming and placing over a trace: every order, everything that could be stored.

    States that are followed: what sessions hold and what is stored, of items that some later request could use. One
    that costs no less than another which holds the same and stores no less is left out.

    Args:
      states: that are followed behind one request at most.

    Raises:
      InputError: more of them: a trace that is too long, or windows that are too large.
    """
    layer: dict[_State, Cost] = {_State((), frozenset()): 0.0}
    bound = min(schedule(requests, terms).cost, total(replay(requests, terms, ARRIVAL)))
    for at, request in enumerate(requests):
        following: dict[_State, Cost] = {}
        later = requests[at + 1 :]
        for state, cost in layer.items():
            for behind, price in _steps(request, state, terms, later):
                if cost + price <= bound * (1 + 1e-12) and cost + price < following.get(behind, math.inf):
                    following[behind] = cost + price

        # Leave out states that another one of no higher cost holds and stores no less than.
        layer, groups = {}, dict[tuple[tuple[str, PoolContents], ...], list[frozenset[StoredItem]]]()
        for state, cost in sorted(following.items(), key=lambda found: (found[1], -len(found[0].items))):
            group = groups.setdefault(state.residents, [])
            if not any(state.items <= items for items in group):
                group.append(state.items)
                layer[state] = cost

        if len(layer) > states:
            raise InputError(f"optimum: got {len(layer)} states behind request {at}; expected at most {states}")

    return min(layer.values())


def _steps(
    request: WindowRequest, state: _State, terms: Terms, later: Sequence[WindowRequest]
) -> Iterator[tuple[_State, Cost]]:
    """Yields every mode of serving a request: what is held and stored then, and what it takes."""
    residents, lead = dict(state.residents), request.lead_ids
    resident = held_by(request, residents)
    known: dict[str, dict[tuple[str, ...], int]] = {}
    for id, front in state.items:
        known.setdefault(id, {})[front] = 0
    bases = {id for id, front in state.items if front == lead}
    entries, sessions = request.by_id, set[str | None]()
    for following in later:
        entries |= following.by_id
        sessions |= {following.session, following.parent}

    movable = request.movable(request.arrival)
    orders = [filled(request.free, moved) for moved in itertools.permutations(movable)]
    for order, front in itertools.product(orders, FRONTS):
        laid = walk(order_problem(request, resident, terms, known, order), order, terms.forward, front)
        held = residents | {request.session: after(request, laid, resident)}
        residents_then = tuple(sorted((name, pool) for name, pool in held.items() if name in sessions))
        new = {item for item in at_hand(request, laid) if _useful(item, later)}
        first = request.pieces[laid.order[request.lead]].id if laid.ran > request.lead else None
        wanted = sorted({id for id, _ in new} - bases)

        # Which chunks get a canonical; the one right behind the lead ran as such.
        for count in range(len(wanted) + 1):
            for chosen in itertools.combinations(wanted, count):
                price = laid.cost
                for id in chosen:
                    price += terms.forward(entries[id].tokens, request.lead_tokens) if id != first else 0
                have = bases | set(chosen)
                items = {item for item in state.items | new if item[0] in have} | {(id, lead) for id in have}
                useful = {item for item in items if _useful(item, later)}
                for kept in _fitting(useful, terms, entries, lead):
                    yield _State(residents_then, kept), price


def _useful(item: StoredItem, later: Sequence[WindowRequest]) -> bool:
    """Returns whether some later request has the chunk and all that the item was formed behind."""
    wanted = {item[0], *item[1]}
    return any(wanted.issubset(request.ids) for request in later)


def _fitting(
    items: set[StoredItem], terms: Terms, entries: dict[str, Entry], lead: tuple[str, ...]
) -> Iterator[frozenset[StoredItem]]:
    """Yields what of the items can be kept: all if they fit, else every choice that fits, patches with canonicals."""
    size = {item: terms.bytes_of(item, entries[item[0]], lead) for item in items}
    if terms.budget is None or sum(size.values()) <= terms.budget:
        yield frozenset(items)
        return

    for count in range(len(items) + 1):
        for kept in itertools.combinations(sorted(items), count):
            there = set(kept)
            if sum(size[item] for item in kept) <= terms.budget and all((id, lead) in there for id, _ in kept):
                yield frozenset(kept)
