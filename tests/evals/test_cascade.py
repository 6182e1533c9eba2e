"""Cascades against every choice of what to rebuild, and every order of it; windows say what is right then."""

import itertools
from typing import Any

import numpy as np
import pytest

from evals.placement import Dependent, Front, StoredPatches, carried_out, cascade, dependents, note_of, rebuild
from kvpatch_jax.errors import InputError, StalePatchError
from kvpatch_jax.window import Entry, PatchNote, Promise, Window
from tests.evals.test_placement import COSTS, LEAD, chunk, patch_behind, started


def changed(rng: np.random.Generator, promise: Promise) -> tuple[Window, list[PatchNote]]:
    """A window into whose front a chunk came, of pieces served in every way, and what is stored."""
    names = ["a", "b", "c", "d"]
    window = started(promise=promise)
    placed: list[Entry] = []
    for name in names:
        entry = chunk(name, int(rng.integers(3, 20)))
        how = int(rng.integers(0, 3))
        note = patch_behind(entry, *placed) if how == 1 else None
        window, _ = window.append(entry, "patch" if note else "bare" if how == 2 else "prefill", note)
        placed.append(entry)
    at = int(rng.integers(0, 3))
    other = chunk("x", int(rng.integers(3, 20)))
    window, _ = window.replace(names[at], other) if rng.random() < 0.5 else window.insert(other, names[at])
    now = [piece.entry for piece in window.pieces[1:]]
    notes = [patch_behind(entry, *now[:place]) for place, entry in enumerate(now) if place and rng.random() < 0.4]
    notes += [patch_behind(now[-1], *now[-2::-1], orbit=True)] * bool(rng.random() < 0.3)
    return window, notes


def wrong(window: Window, id: str, notes: list[PatchNote]) -> bool:
    """Whether a piece is served otherwise than it would have to be, as windows themselves check it."""
    piece = window.piece(id)
    if piece.fidelity == "exact" or (window.promise == "remember" and piece.fidelity == "survivor"):
        return False
    if piece.state.kind != "patched":
        return True
    for note in [*notes, patch_behind(piece.entry, *(p.entry for p in window.pieces[1 : window.index(id)]))]:
        if note.digest == piece.state.patch:
            try:
                window.bare(id)[0].condition(id, note)
                return False
            except StalePatchError:
                return True
    return True


def every_choice(window: Window, notes: list[PatchNote], losses: dict[str, float], bound: float, front: Front) -> float:
    """The least FLOPs over every way of leaving, patching or running each piece, from the front."""
    ids = [piece.id for piece in window.pieces[1:]]
    ways = [["leave", "run", *(note for note in notes if note.chunk == id)] for id in ids]
    found = []
    for chosen in itertools.product(*ways):
        there, flops, fine = window, 0, True
        for id, how in zip(ids, chosen, strict=True):
            if how == "leave":
                continue
            before = there.piece(id).fidelity
            if how == "run":
                there, edits = there.recompute(id)
                fine = fine and before != "exact"
            else:
                assert isinstance(how, PatchNote)
                try:
                    there, edits = there.condition(id, how)
                except StalePatchError:
                    fine = False
                    break
            flops += sum(edit.flops for edit in edits)
        if not fine:
            continue
        ran = {id for id, how in zip(ids, chosen, strict=True) if how == "run"}
        if front == "exact" and any(there.fidelity(id) == "approximate" for id in ran):
            continue
        if front == "exact" and there.promise == "forget" and any(there.fidelity(id) != "exact" for id in ran):
            continue
        left = sum(losses[id] for id in ids if id not in ran and wrong(there, id, notes))
        if left <= bound + 1e-12:
            found.append(flops)
    return min(found)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("promise", ["forget", "remember"])
@pytest.mark.parametrize("front", ["exact", "served"])
@pytest.mark.parametrize("cases", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_no_cheaper_steps_reach_the_bound(promise: Promise, front: Front, cases: int):
    rng = np.random.default_rng(8)
    for _ in range(cases):
        window, notes = changed(rng, promise)
        losses = {piece.id: float(rng.random()) for piece in window.pieces[1:]}
        stored = StoredPatches.of(notes)
        total = sum(each.loss for each in dependents(window, losses, stored))
        assert total == pytest.approx(sum(losses[id] for id in losses if wrong(window, id, notes)))
        for bound in (0.0, total * 0.4, total):
            found = cascade(window, bound, losses, stored, front=front)
            assert found.minimal
            assert found.cost == every_choice(window, notes, losses, bound, front)
            assert found.left[-1] <= bound + 1e-9

            # It can be carried out, costs what it says, and leaves what it says behind each step.
            there, edits = carried_out(window, found)
            assert sum(edit.flops for edit in edits) == found.cost
            ran = {step.id for step in found.steps if step.how != "stored"}
            done = sum(losses[id] for id in losses if id not in ran and wrong(there, id, notes))
            assert found.left[-1] == pytest.approx(done)
            assert {id for id in losses if id not in ran and wrong(there, id, notes) and losses[id]} == set(
                found.left_as_they_are
            )


def test_stopping_early_anywhere_loses_least():
    """Against every order in which what runs runs from the front, by the loss that is left while steps are paid."""
    rng = np.random.default_rng(2)
    for _ in range(8):
        pieces = []
        for number in range(6):
            place = float(rng.integers(1, 9)) if number >= 3 else None
            loss = 0.0 if rng.random() < 0.2 else float(rng.random())
            pieces.append(Dependent(str(number), loss, float(rng.integers(5, 30)), place))
        found = rebuild(pieces, 0.0)
        assert found.left[0] == pytest.approx(sum(piece.loss for piece in pieces))
        paid = lambda steps: sum(cost * left for cost, left in steps)
        own = paid(zip([step.cost for step in found.steps], found.left[:-1], strict=True))

        chain = [step for step in found.steps if step.how != "stored"]
        assert [step.id for step in chain] == sorted(step.id for step in chain)
        loss = {piece.id: piece.loss for piece in pieces}
        best = np.inf
        for order in itertools.permutations(found.steps):
            if [step.id for step in order if step.how != "stored"] != [step.id for step in chain]:
                continue
            left, spent = found.loss, 0.0
            for step in order:
                spent += step.cost * left
                left -= loss[step.id]
            best = min(best, spent)
        assert own == pytest.approx(best)


def test_steps_for_ten_pieces_equal_the_best_subset():
    rng = np.random.default_rng(4)
    for front in ("exact", "served"):
        pieces = [
            Dependent(
                str(n), float(rng.random()), float(rng.integers(5, 30)), float(rng.integers(1, 40)) if n % 3 else None
            )
            for n in range(10)
        ]
        bound = 0.3 * sum(piece.loss for piece in pieces)
        costs = []
        for mask in range(1 << 10):
            for last in range(-1, 10) if front == "exact" else [-1]:
                cost, left = 0.0, 0.0
                for at, piece in enumerate(pieces):
                    if at <= last:
                        cost += piece.form
                    elif not mask >> at & 1:
                        left += piece.loss
                    elif front == "served":
                        cost += min(piece.form, np.inf if piece.place is None else piece.place)
                    else:
                        cost += np.inf if piece.place is None else piece.place
                if left <= bound:
                    costs.append(cost)
        found = rebuild(pieces, bound, front)
        assert found.minimal
        assert found.cost == pytest.approx(min(costs))


def test_a_chunk_that_returns_at_the_end_has_no_dependents():
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    window, _ = started(a, b, c, promise="remember").evict("a")
    again, _ = window.recall("a")
    assert cascade(again).steps == ()
    front, _ = window.recall("a", before="b")
    assert cascade(front).steps == ()  # b and c were prefilled behind it, there
    other, _ = window.insert(chunk("x"), "b")
    assert [step.id for step in cascade(other).steps] == ["b", "c"]
    share = cascade(other, bound=0.3)
    assert [step.id for step in share.steps] == ["b"]
    assert share.left_as_they_are == ("c",)


def test_a_chunk_that_returns_to_its_place_needs_no_rebuild():
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    window = started(a)
    window, _ = window.append(b, "patch", patch_behind(b, a))
    window, _ = window.append(c, "patch", patch_behind(c, a, b, orbit=True))
    stored = StoredPatches.of([patch_behind(b, a), patch_behind(c, a, b, orbit=True)])
    assert cascade(window, stored=stored).steps == ()
    gone, _ = window.evict("a")
    assert [step.id for step in cascade(gone, stored=stored).steps] == ["b", "c"]
    back, _ = gone.recall("a", "prefill", before="b")
    assert cascade(back, stored=stored).steps == ()
    moved, _ = gone.recall("a", "bare", before="c")  # the set in front of c is the same, the order is not
    assert [step.id for step in cascade(moved, stored=stored).steps] == ["b", "a"]


def test_cascades_of_other_windows_and_invalid_numbers_are_refused(unchecked):
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    window = started(a, b)
    other, _ = window.replace("a", c)
    note = note_of(b, (LEAD, c), rank=2, nbytes=64, flops=3)
    found = cascade(other, stored=StoredPatches.of([note]))
    assert [step.how for step in found.steps] == ["stored"]
    with pytest.raises(StalePatchError):
        carried_out(window, found)
    wrong: tuple[Any, ...] = (-1, float("nan"), True, "0")
    for bound in wrong:
        with pytest.raises(InputError):
            cascade(window, bound)
    with pytest.raises(InputError):
        cascade(window, 0.0, {"nobody": 1.0})
    with pytest.raises(InputError):
        rebuild([Dependent("a", -0.5, 1)])
    assert rebuild([]).steps == ()
    assert COSTS.layers == 4
