"""Placement against every order, every way of serving each piece, as windows themselves take and cost it."""

import itertools
from typing import Any

import numpy as np
import pytest

from evals.placement import Front, StoredPatches, note_of, place
from evals.placement.piece_order import OrderProblem, cheapest, walk
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.errors import InputError, StalePatchError
from kvpatch_jax.window import Costs, Entry, PatchNote, Prefill, Promise, Window

COSTS = Costs("a backbone", 4, 512, 256, 128, ForwardCosts((1000,) * 4, (7,) * 4, (0,) * 4, 10))
LEAD = Entry("lead", "system", 5, 5, "text")


def chunk(name: str, tokens: int = 10, free: bool = True) -> Entry:
    return Entry(name, f"shows {name}", tokens, tokens, order_free=free)


def started(*entries: Entry, promise: Promise = "forget") -> Window:
    """A window in which everything was prefilled in its turn."""
    window = Window.empty(COSTS, lead=1, promise=promise)
    for entry in (LEAD, *entries):
        window, _ = window.append(entry)
    return window


def patch_behind(entry: Entry, *front: Entry, orbit: bool = False) -> PatchNote:
    return note_of(entry, (LEAD, *front), rank=2, nbytes=64, flops=3, orbit=orbit)


def least_by_trying(window: Window, wanted: list[Entry], notes: list[PatchNote], front: Front) -> float:
    """The least FLOPs over all orders, kept pieces and ways of serving; windows say what a patch may serve."""
    found = []
    places = [at for at, entry in enumerate(wanted) if entry.order_free]
    for moved in itertools.permutations([wanted[at] for at in places]):
        order = list(wanted)
        for at, entry in zip(places, moved, strict=True):
            order[at] = entry
        for kept in range(len(order) + 1):
            if any(entry.id not in window for entry in order[:kept]):
                break
            if [window.index(entry.id) for entry in order[:kept]] != sorted(window.index(e.id) for e in order[:kept]):
                break
            gone = [p.id for p in window.pieces[1:] if p.entry not in order[:kept]]
            left, _ = window.evict(*gone)
            ways = [[None, *(note for note in notes if note.chunk == entry.id)] for entry in order[kept:]]
            for way in itertools.product(*ways):
                cost = cost_of(left, order[kept:], way, front)
                if cost is not None:
                    found.append(cost)
    return min(found)


def cost_of(window: Window, entries: list[Entry], way: tuple[PatchNote | None, ...], front: Front) -> int | None:
    """FLOPs of forwards and patches; None where something is served otherwise than promised."""
    flops = 0
    evicted = {piece.id for piece in window.evicted}
    for entry, note in zip(entries, way, strict=True):
        placed: Any = entry.id if entry.id in evicted else entry
        operation = window.recall if entry.id in evicted else window.append
        try:
            window, edits = operation(placed, "prefill" if note is None else "patch", note)
        except StalePatchError:
            return None
        flops += sum(edit.flops for edit in edits)
        if note is None and front == "exact" and entry.kind == "chunk":
            # What it saw must be what it would be held against: no piece in front may be served by a patch.
            if window.promise == "forget" and window.fidelity(entry.id) != "exact":
                return None
            if window.fidelity(entry.id) == "approximate":
                return None
    allowed = {"exact"} if window.promise == "forget" else {"exact", "survivor"}
    if front == "served":
        allowed.add("approximate")
    kept = [piece for piece in window.pieces if piece.id not in {entry.id for entry in entries}]
    if any(piece.fidelity not in allowed - {"approximate"} for piece in kept):
        return None
    return flops


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("promise", ["forget", "remember"])
@pytest.mark.parametrize("front", ["exact", "served"])
@pytest.mark.parametrize(("cases", "size"), [(5, 3), pytest.param(12, 4, marks=pytest.mark.slow)])
def test_no_order_and_no_mode_of_serving_is_cheaper(promise: Promise, front: Front, cases: int, size: int):
    rng = np.random.default_rng(5)
    names = ["a", "b", "c", "d", "e"]
    for number in range(cases):
        sizes = {name: int(rng.integers(3, 12)) for name in names}
        every = [chunk(name, sizes[name], free=bool(rng.random() < 0.8)) for name in names]
        held = [every[int(place)] for place in rng.permutation(5)[: rng.integers(0, 4)]]
        wanted = [every[int(place)] for place in rng.permutation(5)[:size]]
        notes = []
        for _ in range(8):
            count = int(rng.integers(1, len(wanted) + 1))
            line = [wanted[int(place)] for place in rng.permutation(len(wanted))[:count]]
            notes.append(patch_behind(line[-1], *line[:-1], orbit=bool(rng.random() < 0.3)))
        window = started(*held, promise=promise)

        found = place(window, wanted, StoredPatches.of(notes), front=front)
        assert found.exhaustive
        assert found.cost == least_by_trying(window, wanted, notes, front), (number, held, wanted)
        fixed = [(at, entry) for at, entry in enumerate(wanted) if not entry.order_free]
        assert [(at, found.order[at]) for at, _ in fixed] == fixed
        assert sorted(found.ids) == sorted([*found.kept, *found.patched, *found.formed])


def test_a_survivor_is_discarded_if_that_makes_a_patch_valid():
    first, second = chunk("first", 30), chunk("second", 30)
    window = started(chunk("gone"), first, promise="remember")
    stored = StoredPatches.of([patch_behind(first), patch_behind(second, first)])

    found = place(window, [first, second], stored)
    assert (found.kept, found.patched, found.formed) == ((), ("first", "second"), ())
    assert place(window, [first], stored).kept == ("first",)


def test_a_patch_is_valid_behind_its_own_antecedent_only():
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    window = started()
    stored = StoredPatches.of([patch_behind(b), patch_behind(a, b), patch_behind(c, b, a)])
    found = place(window, [a, b, c], stored)
    assert found.ids == ("b", "a", "c")
    assert found.formed == ()
    assert found.patched == ("b", "a", "c")

    other = Entry("b", "shows something else", 10, 10, order_free=True)
    assert place(window, [a, other, c], stored).formed == ("a", "b", "c")
    fixed = [chunk("a", free=False), b, c]
    assert set(place(window, fixed, stored).formed) == {"a", "b", "c"}


def test_an_orbit_patch_is_valid_behind_any_order_of_its_set():
    a, b, c = (chunk(name, free=False) for name in "abc")
    stored = StoredPatches.of([patch_behind(c, b, a, orbit=True)])
    found = place(started(), [a, b, c], stored)
    assert found.formed == ("a", "b")
    assert found.patched == ("c",)


def test_a_patch_behind_a_bare_piece_is_ignored():
    a, b = chunk("a"), chunk("b")
    bare, _ = started(a).bare("a")
    blind = PatchNote("x", "b", b.content, "canonical", bare.antecedent(), None, False, 2, 64, 3)
    assert place(started(), [a, b], StoredPatches.of([blind])).formed == ("a", "b")


def test_a_canonical_formed_behind_the_lead_needs_no_forward_there():
    a, b = chunk("a", 30), chunk("b")
    found = place(started(), [a, b], StoredPatches.of((), ["b"]))
    assert found.ids == ("b", "a")
    assert found.formed == ("a",)
    assert found.patched == ("b",)
    stored = StoredPatches.of([patch_behind(a, b)], ["b"])
    found = place(started(), [a, b], stored)
    assert found.ids == ("b", "a")
    assert found.formed == ()


def test_kept_pieces_cost_nothing_and_stay_in_front():
    a, b, c, d = (chunk(name) for name in "abcd")
    window = started(a, b, c)
    found = place(window, [d, b, a])
    assert found.ids == ("a", "b", "d")
    assert found.kept == ("a", "b")
    assert found.cost == COSTS.prefill(10, 25)["flops"]
    remembering = started(a, b, c, promise="remember")
    assert place(remembering, [d, c, b]).kept == ("b", "c")
    assert place(window, [d, c, b]).kept == ()  # a has left: to a window that forgets they are survivors


def test_a_text_between_patched_pieces_runs_alone():
    a, b = chunk("a", free=False), chunk("b", free=False)
    said = Entry("said", "yes", 4, 4, "text")
    stored = StoredPatches.of([patch_behind(a), patch_behind(b, a, said)])
    found = place(started(), [a, said, b], stored)
    assert found.formed == ("said",)
    assert found.patched == ("a", "b")


@pytest.mark.parametrize("worth", [None, {"a": 5e4, "b": 1e6, "c": 2e4, "d": 0.0}])
def test_the_cheapest_chunks_are_left_out_under_a_budget(worth: dict[str, float] | None):
    entries = [chunk("a", 20), chunk("b", 8), chunk("c", 15), chunk("d", 9)]
    stored = StoredPatches.of([patch_behind(entries[2]), patch_behind(entries[0], entries[2])])
    window = started()
    found = place(window, entries, stored, tokens=45, worth=worth)

    tried = []
    for count in range(5):
        for kept in itertools.combinations(entries, count):
            if 5 + sum(entry.tokens for entry in kept) > 45:
                continue
            cost = least_by_trying(window, list(kept), list(stored.notes), "exact") if kept else 0
            left = [entry for entry in entries if entry not in kept]
            lost = (len(left), 0) if worth is None else (0, sum(worth[entry.id] for entry in left))
            tried.append((lost[0], lost[1] + cost))
    lost = (len(found.left_out), 0) if worth is None else (0, sum(worth[entry.id] for entry in found.left_out))
    assert found.exhaustive
    assert (lost[0], lost[1] + found.cost) == min(tried)
    assert 5 + sum(entry.tokens for entry in found.order) <= 45
    assert place(window, entries, stored, bytes=45 * 512, worth=worth) == found


@pytest.mark.usefixtures("unchecked")
def test_the_beam_finds_a_stored_order_of_many_pieces():
    rng = np.random.default_rng(1)
    entries = [chunk(f"{number}", int(rng.integers(5, 20))) for number in range(16)]
    line = [entries[int(each)] for each in rng.permutation(16)]
    stored = StoredPatches.of([patch_behind(entry, *line[:at]) for at, entry in enumerate(line)])
    found = place(started(), entries, stored)
    assert not found.exhaustive
    assert found.formed == ()
    assert found.ids == tuple(entry.id for entry in line)
    window = started(*entries[:8])
    again = place(window, entries[::-1], stored)
    assert again.ids == found.ids
    assert again.kept == ("0",)  # it is what the line begins with, and is there already
    assert again.cost < found.cost


def test_the_beam_is_near_the_exhaustive_search():
    rng = np.random.default_rng(3)
    forward = lambda tokens, behind: tokens * (100 + behind)
    for _ in range(6):
        line = tuple(int(each) for each in rng.permutation(7))
        ordered = [{} for _ in range(7)]
        for _ in range(12):
            other = tuple(int(each) for each in rng.permutation(7))
            for at in range(7):
                if rng.random() < 0.5:
                    ordered[other[at]][other[:at]] = 1.0
        pieces = OrderProblem(
            tuple(int(each) for each in rng.integers(3, 30, 7)), (True,) * 7, line[:3], 3, tuple(ordered)
        )
        best, proved = cheapest(pieces, forward)
        near, looked = cheapest(pieces, forward, exhaustive=0, beam=8)
        assert proved
        assert not looked
        assert best.cost <= near.cost <= 1.2 * best.cost
        assert walk(pieces, near.order, forward).cost == near.cost


@pytest.mark.usefixtures("unchecked")
def test_invalid_requests_are_refused():
    window, a = started(), chunk("a")
    wrong: Any = (([a, a], None), ([LEAD], None), ([a], -1), ([a], 2.5), ([chunk("f", free=False)], 8), (["a"], None))
    for wanted, budget in wrong:
        with pytest.raises(InputError):
            place(window, wanted, tokens=budget)
    assert place(window, []).order == ()
    assert place(window, []).cost == 0


def test_the_given_price_is_minimised():
    """A price by launch puts nothing in the place of FLOPs."""
    a, b, c = chunk("a", 40), chunk("b", 3), chunk("c", 3)
    launches = lambda edits: sum(isinstance(edit, Prefill) for edit in edits) + 1e-9 * sum(e.bytes for e in edits)
    stored = StoredPatches.of([patch_behind(b), patch_behind(c, b)])
    found = place(started(), [a, b, c], stored, price=launches, front="served")
    assert found.formed == ("a",)
    assert 1 <= found.cost < 1.01
