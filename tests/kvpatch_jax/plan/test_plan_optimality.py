"""Plans against every other selection, and their totals over consecutive windows."""
# pyright: reportArgumentType=false

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import CertificateError, PlanError
from kvpatch_jax.plan import Certificate, Goal, PatchInventory, plan
from kvpatch_jax.window import Entry, Window
from tests.kvpatch_jax.plan.plan_cases import BACKBONE, COSTS, DEVICES, RANKS, certificate, entry, filled, note, stocked

rows = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5).map(sorted)


def every_choice(planned: Any, stock: PatchInventory, entries: list[Entry]) -> list[list[Any]]:
    """All ways of serving all pieces, from the stock: (point, rank, seconds, bytes)."""
    menus = []
    for place, each in enumerate(entries):
        behind = sum(other.tokens for other in entries[:place])
        forward = COSTS.prefill(each.tokens, behind)
        own = [("prefill", 0, *priced("Prefill", forward["bytes"], forward["flops"]))]
        copy = COSTS.copy(each.tokens)
        fetch = priced("Fetch", COSTS.kv_bytes * each.tokens, 0)
        if stock.canonical(each):
            bare = priced("Copy", copy["bytes"], copy["flops"])
            own.append(("bare", 0, bare[0] + fetch[0], bare[1] + fetch[1]))
        for rank in RANKS:
            found = stock.note(each.id, f"{each.id}.{rank}.False.{place}")
            if found is not None:
                costs = COSTS.patch(each.tokens, found.note.nbytes, found.note.flops)
                applied, factors = priced("ApplyPatch", **costs), priced("Fetch", found.note.nbytes, 0)
                own.append(("stored", rank, applied[0] + fetch[0] + factors[0], applied[1] + fetch[1] + factors[1]))
        menus.append(own)
    return [list(each) for each in itertools.product(*menus)]


def priced(kind: str, bytes: int, flops: int) -> tuple[float, int]:
    launch, flop, byte = DEVICES.kinds[kind]
    return launch + flops * flop + bytes * byte, bytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_allowed_selection_is_cheaper_or_more_faithful(data: st.DataObject):
    """Against all choices of up to five pieces, bounded as the certificate itself bounds them."""
    entries = [entry(number, data.draw(st.integers(1, 60))) for number in range(data.draw(st.integers(1, 5)))]
    ids = [each.id for each in entries]
    ranks = {id: data.draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=2)) for id in ids}
    stock = stocked(entries, ranks, set(data.draw(st.lists(st.sampled_from(ids), unique=True))))
    known = data.draw(st.dictionaries(st.sampled_from([("bare", 0), *(("stored", rank) for rank in RANKS)]), rows))
    signed = certificate(known) if known else None

    def bound_of(choice: list[Any]) -> float | None:
        if not approximate(choice):
            return 0.0
        return None if signed is None else together(signed, choice)

    choices = [
        (choice, bound_of(choice), sum(way[2] for way in choice), sum(way[3] for way in choice))
        for choice in every_choice(None, stock, entries)
    ]
    goal = Goal(
        kl=data.draw(st.none() | st.floats(0.0, 1.0)),
        seconds=data.draw(st.none() | st.floats(0.0, 2.0 * max(each[2] for each in choices))),
    )
    highest = 0.0 if goal.as_promised else math.inf if goal.kl is None else goal.kl
    allowed = [each for each in choices if each[1] is not None and each[1] <= highest]
    if goal.seconds is not None:
        allowed = [each for each in allowed if each[2] <= goal.seconds]

    window = Window.empty(COSTS)
    if not allowed:
        quickest = min(each[2] for each in choices)
        assert goal.seconds is not None  # without a budget a forward of all always meets the goal
        error = PlanError if quickest > goal.seconds else (PlanError, CertificateError)
        with pytest.raises(error, match="expected at least"):
            plan(window, entries, goal, stored=stock, certificate=signed, costs=DEVICES)
        return
    planned = plan(window, entries, goal, stored=stock, certificate=signed, costs=DEVICES)
    assert planned.kl is not None
    assert planned.kl <= highest
    if goal.seconds is None:
        assert planned.seconds == pytest.approx(min(each[2] for each in allowed), rel=1e-9)
    else:
        assert planned.seconds <= goal.seconds
        assert planned.kl <= min(each[1] for each in allowed)
    served = [(chunk.point, chunk.rank) for chunk in planned.chunks]
    bound = together(signed, served) if approximate(served) else 0.0
    assert bound is not None
    assert planned.kl <= bound + 1e-12
    check_totals(planned)


def approximate(choice: list[Any]) -> bool:
    return any(way[0] != "prefill" for way in choice)


def together(signed: Certificate, choice: list[Any]) -> float | None:
    return signed.together([(way[0], way[1]) for way in choice])


def check_totals(planned: Any) -> None:
    assert planned.bytes == sum(chunk.bytes for chunk in planned.chunks)
    assert planned.flops == sum(chunk.flops for chunk in planned.chunks)
    assert planned.seconds == pytest.approx(sum(chunk.seconds for chunk in planned.chunks), rel=1e-9)
    assert planned.seconds == pytest.approx(planned.devices.seconds(planned.edits), rel=1e-12)
    for chunk, piece in zip(planned.chunks, planned.window.pieces, strict=True):
        assert chunk.entry == piece.entry
        assert chunk.fidelity == planned.window.fidelity(piece.id)
        assert (chunk.patch or None) == piece.state.patch or chunk.point in ("leading", "survivor", "stored")
        if chunk.fidelity == "exact":
            assert chunk.kl == 0.0
            assert chunk.point in ("leading", "prefill", "fresh", "survivor")
        if chunk.kl != 0.0:
            assert chunk.fidelity != "exact"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), promise=st.sampled_from(["remember", "forget"]))
def test_consecutive_plans_keep_their_totals_and_bounds(data: st.DataObject, promise: str):
    """Windows that slide, reorder and recall, some pieces by patches: totals, words, and what was bounded before."""
    entries = [entry(number) for number in range(6)]
    window = filled(3, promise=promise)
    signed = certificate(
        {("stored", 4): [0.1] * 8, ("orbit", 4): [0.2] * 8, ("bare", 0): [0.9] * 8, ("survivor", 1): [0.3] * 8}
    )
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(entries[1:]), unique=True, min_size=1))
        stock = PatchInventory(BACKBONE)
        stock.add(*entries)
        front = [entries[0], *chosen]
        for place, each in enumerate(front):
            if data.draw(st.booleans()):
                stock.add(note(each, front[:place], 4, orbit=data.draw(st.booleans())))
        highest = data.draw(st.sampled_from([None, 0.0, 0.15, 0.25, 1.0]))
        planned = plan(window, chosen, Goal(kl=highest), stored=stock, certificate=signed, costs=DEVICES)
        assert [piece.entry for piece in planned.window.pieces] == front
        assert planned.kl is not None
        assert planned.kl <= (highest or 0.0)
        check_totals(planned)
        assert len(planned.explain().splitlines()) == 1 + len(front)
        if planned.kl == 0.0 and promise == "remember":
            assert planned.as_promised
        window = planned.window
