"""Plans against every other selection, and their totals over consecutive windows."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.plan import Goal
from kvpatch_jax.window import Entry, Promise, Window
from tests.plan.plan_cases import (
    BACKBONE,
    DEVICES,
    PRICES,
    RANKS,
    certificate,
    check_totals,
    entries_of,
    entry,
    filled,
    note,
    planned,
    stocked,
    within,
)

rows = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5).map(sorted)


def seconds(kind: str, bytes: int, flops: int) -> float:
    launch, flop, byte = DEVICES.kinds[kind]
    return launch + flops * flop + bytes * byte


def menu_of(index: int, entries: list[Entry], ranks: Sequence[int], bare: bool) -> list[tuple[str, int, float]]:
    """All ways of serving a piece: (point, rank, seconds)."""
    tokens, behind = entries[index].tokens, sum(other.tokens for other in entries[:index])
    flops = PRICES.forward.flops(tokens, behind) + PRICES.forward.logit
    options = [("prefill", 0, seconds("prefill", PRICES.forward_bytes(tokens, behind), flops))]
    copied, turning = 2 * PRICES.kv_bytes * tokens, 3 * PRICES.rotary * tokens
    fetch = seconds("fetch", PRICES.kv_bytes * tokens, 0)
    if bare or ranks:
        options.append(("bare", 0, seconds("copy", copied, turning) + fetch))
    for rank in ranks:
        patched = seconds("patch", copied + 40 * rank, turning + 6 * rank * tokens)
        options.append(("stored", rank, patched + fetch + seconds("fetch", 40 * rank, 0)))
    return options


@given(data=st.data())
def test_no_allowed_selection_is_quicker(data: st.DataObject):
    """Against all choices of up to five pieces, bounded as the certificate itself bounds them."""
    entries = [entry(number, data.draw(st.integers(1, 60))) for number in range(data.draw(st.integers(1, 5)))]
    stock, menus = stocked(), []
    for index, chunk in enumerate(entries):
        # At the front nothing conditions a chunk.
        ranks = data.draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=2)) if index else []
        bare = data.draw(st.booleans())
        stock.add(*(note(chunk, entries[:index], rank) for rank in ranks), *([chunk] if bare or ranks else []))
        menus.append(menu_of(index, entries, ranks, bare))
    known = data.draw(st.dictionaries(st.sampled_from([("bare", 0), *(("stored", rank) for rank in RANKS)]), rows))
    signed = certificate(known) if known else None
    goal = Goal("certified" if signed else "exact", data.draw(st.floats(0.0, 1.0)))

    allowed = []
    for choice in itertools.product(*menus):
        served = [(point, rank) for point, rank, _ in choice]
        approximate = any(point != "prefill" for point, _ in served)
        bound = (None if signed is None else signed.together(served)) if approximate else 0.0
        if bound is not None and bound <= goal.kl:
            allowed.append(sum(way[2] for way in choice))

    made = planned(Window.empty(BACKBONE), entries, goal, stored=stock, certificate=signed)
    assert made.seconds == pytest.approx(min(allowed), rel=1e-9)
    assert made.kl is not None
    assert made.kl <= goal.kl
    served = [(chunk.point, chunk.rank) for chunk in made.chunks]
    bound = 0.0 if signed is None else signed.together(served)
    assert bound is not None
    assert made.kl <= bound + 1e-12
    check_totals(made)


@given(data=st.data(), promise=st.sampled_from(["remember", "forget"]))
def test_consecutive_plans_keep_their_totals_and_bounds(data: st.DataObject, promise: Promise):
    """Windows that slide, reorder and recall, some pieces by patches: totals, words, and what was bounded before."""
    entries = [entry(number) for number in range(6)]
    window = filled(3, promise=promise)
    losses = {("stored", 4): 0.1, ("orbit", 4): 0.2, ("bare", 0): 0.9, ("survivor", 1): 0.3}
    signed = certificate({way: [bound] * 8 for way, bound in losses.items()})
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(entries[1:]), unique=True, min_size=1))
        stock, front = stocked(*entries), [entries[0], *chosen]
        for place, chunk in enumerate(front):
            if data.draw(st.booleans()):
                stock.add(note(chunk, front[:place], 4, orbit=data.draw(st.booleans())))
        highest = data.draw(st.sampled_from([0.0, 0.15, 0.25, 1.0]))
        made: Any = planned(window, chosen, within(highest), stored=stock, certificate=signed)
        assert entries_of(made.window) == front
        assert made.kl is not None
        assert made.kl <= highest
        check_totals(made)
        assert len(made.explain().splitlines()) == 1 + len(front)
        assert made.as_promised == (made.kl == 0.0 and not any(own.ways for own in made.window.standings))
        # No piece is of unknown loss where the plan states a bound.
        assert all(("", 0) not in own.ways for own in made.window.standings)
        window = made.window
