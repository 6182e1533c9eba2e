"""Traces: replayed against a simulation of their own, and scheduled against everything that could be done."""

import itertools
from typing import Any

import numpy as np
import pytest

from evals.placement import (
    ARRIVAL,
    LEAST_RECENT,
    OFFLINE,
    ONLINE,
    Policy,
    Terms,
    WindowRequest,
    optimum,
    replay,
    schedule,
    total,
)
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Entry
from tests.evals.test_placement import COSTS, LEAD, chunk


def trace(
    rng: np.random.Generator, count: int, size: int, names: str = "abcd", sessions: int = 1
) -> list[WindowRequest]:
    """Requests for some chunks each, in whatever order."""
    sizes = {name: int(rng.integers(20, 60)) for name in names}
    found = []
    for _ in range(count):
        chosen = rng.permutation(list(names))[:size]
        pieces = (LEAD, *(chunk(str(name), sizes[str(name)]) for name in chosen))
        found.append(WindowRequest(f"session {rng.integers(sessions)}", pieces))
    return found


def forward(tokens: int, behind: int) -> int:
    return COSTS.prefill(tokens, behind)["flops"]


def by_hand(requests: list[WindowRequest], terms: Terms) -> float:
    """The least cost over every order, every way of running and every set of items kept, without any shortcut."""
    patch = lambda entry: terms.patch_price(entry.tokens, False)
    bare = lambda entry: terms.patch_price(entry.tokens, True)
    size = {entry.id: entry for request in requests for entry in request.pieces}

    def bytes_of(items) -> int:
        return sum(
            COSTS.kv_bytes * size[id].tokens if front == ("lead",) else terms.patch_bytes(size[id].tokens)
            for id, front in items
        )

    def from_here(at: int, pools: dict[str, tuple[str, ...]], store: frozenset[Any]) -> float:
        if at == len(requests):
            return 0.0
        request, least = requests[at], np.inf
        free = request.pieces[1:]
        for moved in itertools.permutations(free):
            line = [request.pieces[0], *moved]
            ids = [entry.id for entry in line]
            held = pools.get(request.session, ())
            kept = 0
            while kept < min(len(ids), len(held)) and ids[kept] == held[kept]:
                kept += 1
            for way in itertools.product(("run", "stored"), repeat=len(line) - kept):
                cost, exact, fine = 0.0, kept, True
                for place, how in enumerate(way, kept):
                    entry, front = line[place], tuple(ids[:place])
                    behind = sum(each.tokens for each in line[:place])
                    if how == "run":
                        cost += forward(entry.tokens, behind)
                        exact = place + 1 if exact == place else exact
                    elif (entry.id, front) in store and (entry.id, ("lead",)) in store:
                        first = front == ("lead",) and exact == place
                        cost += bare(entry) if front == ("lead",) else patch(entry)
                        fine = fine and (front != ("lead",) or first)
                        exact = place + 1 if first else exact
                    else:
                        fine = False
                if not fine:
                    continue
                at_hand = {(id, tuple(ids[:place])) for place, id in enumerate(ids[:exact]) if place}
                for more in subsets(at_hand):
                    alone = {id for id, _ in more if (id, ("lead",)) not in store}
                    canonical = sum(forward(size[id].tokens, LEAD.tokens) for id in alone if id != ids[1] or exact < 2)
                    have = store | more | {(id, ("lead",)) for id, _ in more}
                    for left in subsets(have) if terms.budget is not None and bytes_of(have) > terms.budget else [have]:
                        if terms.budget is not None and bytes_of(left) > terms.budget:
                            continue
                        then = from_here(at + 1, pools | {request.session: tuple(ids[:exact])}, frozenset(left))
                        least = min(least, cost + canonical + then)
        return least

    return from_here(0, {}, frozenset())


def subsets(items) -> list[set[Any]]:
    items = sorted(items)
    return [set(chosen) for count in range(len(items) + 1) for chosen in itertools.combinations(items, count)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("count", "size", "budget"), [(3, 2, None), (3, 2, 70_000)])
def test_the_optimum_equals_an_exhaustive_search(count: int, size: int, budget: int | None):
    for seed in range(2 if budget is None else 1):
        requests = trace(np.random.default_rng(seed), count, size, "abc", sessions=2)
        terms = Terms(COSTS, budget, rank=2)
        best = optimum(requests, terms)
        assert best == pytest.approx(by_hand(requests, terms), rel=1e-12)
        assert best <= schedule(requests, terms).cost <= 1.2 * best


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("budget", "seeds"), [(150_000, 1), *(pytest.param(each, 8, marks=pytest.mark.slow) for each in (None, 60_000))]
)
def test_offline_is_near_the_optimum_and_online_not_below_it(budget: int | None, seeds: int):
    for seed in range(seeds):
        requests = trace(np.random.default_rng(100 + seed), 4, 3)
        terms = Terms(COSTS, budget, rank=2)
        best = optimum(requests, terms)
        assert best <= schedule(requests, terms).cost <= 1.2 * best
        for policy in (ARRIVAL, LEAST_RECENT, ONLINE, Policy(admit="always"), Policy(invest="always")):
            assert total(replay(requests, terms, policy)) >= best * (1 - 1e-12)


@pytest.mark.usefixtures("unchecked")
def test_a_set_that_recurs_in_another_order_needs_no_forward():
    names = [chunk(name, 40) for name in "abc"]
    others = [chunk(name, 40) for name in "xyz"]
    requests = [
        WindowRequest("one", (LEAD, *names)),
        WindowRequest("two", (LEAD, *names[::-1])),
        WindowRequest("one", (LEAD, *others)),
    ]
    requests.append(WindowRequest("one", (LEAD, names[1], names[0], names[2])))
    terms = Terms(COSTS, rank=2)
    served = replay(requests, terms, Policy(admit="always"))
    lead = forward(LEAD.tokens, 0)
    assert [each.forming for each in served[1::2]] == [lead, 0]
    assert served[3].patched == 80
    assert served[3].exact == LEAD.tokens + 40
    arrived = replay(requests, terms, Policy("arrival", "always"))
    assert arrived[1].forming > 0
    assert arrived[3].forming > 0


@pytest.mark.usefixtures("unchecked")
def test_the_store_stays_within_its_budget_and_patches_have_canonicals():
    requests = trace(np.random.default_rng(3), 12, 3)
    budget = 60_000
    for policy in (ARRIVAL, LEAST_RECENT, ONLINE, Policy(admit="always")):
        served = replay(requests, Terms(COSTS, budget, rank=2), policy)
        assert max(each.stored for each in served) <= budget
        assert sum(each.canonicals for each in served) > 0
    free = replay(requests, Terms(COSTS, rank=2), ONLINE)
    assert free[-1].stored > budget
    assert total(free) < total(replay(requests, Terms(COSTS, 0, rank=2), ONLINE))


@pytest.mark.usefixtures("unchecked")
def test_a_sliding_window_keeps_survivors_if_it_remembers():
    every = [chunk(f"{number}", 20, free=False) for number in range(6)]
    requests = [WindowRequest("one", (LEAD, *every[at : at + 3])) for at in range(4)]
    remember = replay(requests, Terms(COSTS, promise="remember"), ONLINE)
    assert [each.survivors for each in remember] == [0, 60, 60, 60]
    assert all(each.forming - each.canonicals == forward(20, 45) for each in remember[1:])
    forget = replay(requests, Terms(COSTS, promise="forget"), ONLINE)
    assert all(each.survivors == 0 for each in forget)
    assert total(forget) > total(remember)


@pytest.mark.usefixtures("unchecked")
def test_a_fork_starts_with_its_parents_pool():
    a, b, c = (chunk(name, 20) for name in "abc")
    requests = [
        WindowRequest("one", (LEAD, a)),
        WindowRequest("one/x", (LEAD, a, b), "one"),
        WindowRequest("one/y", (LEAD, a, c), "one"),
    ]
    served = replay(requests, Terms(COSTS), Policy("arrival", "again"))
    assert [each.forming for each in served[1:]] == [forward(20, 25)] * 2
    alone = replay([request._replace(parent=None) for request in requests], Terms(COSTS), Policy("arrival", "again"))
    assert alone[1].forming > served[1].forming


def test_invalid_traces_are_refused(unchecked):
    requests = trace(np.random.default_rng(0), 3, 2)
    with pytest.raises(InputError):
        replay(requests, Terms(COSTS), OFFLINE)
    with pytest.raises(InputError):
        replay(requests, Terms(COSTS), ONLINE, orders=[(0, 1, 2)])
    with pytest.raises(InputError):
        optimum(requests, Terms(COSTS), states=0)
    assert replay([], Terms(COSTS)) == []
    assert total([]) == 0
    text = WindowRequest("one", (LEAD, Entry("more", None, 3, 3, "text")))
    assert replay([text], Terms(COSTS))[0].forming == forward(8, 0)
