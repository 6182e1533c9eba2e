"""Plans: held against every other choice there is, against executors, and against what must be refused."""
# pyright: reportArgumentType=false

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_drill import Drill
from window_oracle import added

import kvpatch_jax as kvp
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import CertificateError, PlanError, WindowError
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, Goal, PatchInventory, RankChoice, Rates, plan
from kvpatch_jax.window import Costs, Drop, Entry, PatchNote, Rotate, Window

BACKBONE = "f" * 64
COSTS = Costs(BACKBONE, 4, 512, 256, 32, ForwardCosts((7, 9, 7, 9), (3, 5, 3, 5), (0, 12, 0, 12), 11))
KINDS = ("Fetch", "Rotate", "Copy", "ApplyPatch", "Prefill", "Recompute")
DEVICES = DeviceCosts("a desk", "2026-11-22", {kind: Rates(1e-4, 2e-7, 3e-9) for kind in KINDS}, "invented")
RANKS = (2, 4, 8)


def entry(number: int, tokens: int = 5) -> Entry:
    return Entry(f"c{number}", f"content {number}", tokens + number % 3, tokens + number % 3, "chunk", True, "text")


def note(own: Entry, front: list[Entry], rank: int = 4, orbit: bool = False) -> PatchNote:
    behind = Antecedent(tuple(Member(each.id, each.content) for each in front))
    behind = behind.sorted() if orbit else behind
    digest = f"{own.id}.{rank}.{orbit}.{len(front)}"
    return PatchNote(digest, own.id, own.content, "canonical", behind, None, orbit, rank, 40 * rank, 6 * rank)


def certificate(
    bounds: dict[tuple[str, int], list[float]], flips: float = 0.01, backbone: str = BACKBONE
) -> Certificate:
    """Rows of these bounds, for 0, 1, … other approximate chunks."""
    rows = tuple(
        CertifiedLoss(
            point, rank, behind, promise, kl / 3, kl / 4, kl / 2, kl, 0.95, 0.9, 1.0, 0.5, flips / 2, flips, 40
        )
        for (point, rank), known in bounds.items()
        for behind, kl in enumerate(known)
        for promise in ("forget", "remember")
    )
    texts = ("invented", "2026-11-22", 0.95, 10, 10, 12, 999, "texts", "questions", True)
    return Certificate(backbone, *texts, rows, RankChoice(4, "invented"))


def filled(count: int, **options: Any) -> Window:
    window = Window.empty(COSTS, **options)
    for number in range(count):
        window, _ = window.append(entry(number))
    return window


def stocked(entries: list[Entry], ranks: dict[str, list[int]], bare: set[str]) -> PatchInventory:
    stock = PatchInventory(BACKBONE)
    for place, each in enumerate(entries):
        stock.add(*(note(each, entries[:place], rank) for rank in ranks.get(each.id, [])))
        if each.id in bare or ranks.get(each.id):
            stock.add(each)
    return stock


# ------------------------------------------------------------------------------------------------ the best there is

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
def test_nothing_that_is_allowed_is_cheaper_or_truer(data: st.DataObject):
    """Against all choices of up to five pieces, bounded as the certificate itself bounds them."""
    entries = [entry(number, data.draw(st.integers(1, 60))) for number in range(data.draw(st.integers(1, 5)))]
    ids = [each.id for each in entries]
    ranks = {id: data.draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=2)) for id in ids}
    stock = stocked(entries, ranks, set(data.draw(st.lists(st.sampled_from(ids), unique=True))))
    known = data.draw(st.dictionaries(st.sampled_from([("bare", 0), *(("stored", rank) for rank in RANKS)]), rows))
    signed = certificate(known) if known else None
    bound = lambda choice: 0.0 if not approximate(choice) else None if signed is None else together(signed, choice)
    choices = [
        (choice, bound(choice), sum(way[2] for way in choice), sum(way[3] for way in choice))
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
            assert chunk.point in ("leading", "prefill", "fresh", "encoded", "survivor")
        if chunk.kl != 0.0:
            assert chunk.fidelity != "exact"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), promise=st.sampled_from(["remember", "forget"]))
def test_plans_after_plans_hold_what_they_say(data: st.DataObject, promise: str):
    """Windows that slide, reorder and recall, some pieces by patches: totals, words, and what was bounded before."""
    entries = [entry(number) for number in range(6)]
    window, known = filled(3, promise=promise), {}
    signed = certificate(
        {("stored", 4): [0.1] * 8, ("orbit", 4): [0.2] * 8, ("bare", 0): [0.9] * 8, ("survivor", 0): [0.3] * 8}
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
        planned = plan(window, chosen, Goal(kl=highest), stored=stock, certificate=signed, costs=DEVICES, known=known)
        assert [piece.entry for piece in planned.window.pieces] == front
        assert planned.kl is not None
        assert planned.kl <= (highest or 0.0)
        check_totals(planned)
        assert len(planned.explain().splitlines()) == 1 + len(front)
        if planned.kl == 0.0 and promise == "remember":
            assert planned.as_promised
        window, known = planned.window, planned.known


# ------------------------------------------------------------------------------------------------------ executors


def test_plans_run_on_executors_and_cost_what_they_said():
    """Recalled by a patch, bare, by a forward; turned; a new one: against plain prefills, and the ledger."""
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2", "c3", "c4"):
        drill.append(id)
    drill.evict("c1", "c2", "c3")
    window, model = drill.window, drill.model
    stock = PatchInventory.of(None, drill.backbone)
    front = [piece.entry for piece in window.pieces]
    wanted = [*front, *(drill.make(id) for id in ("c1", "c2", "c5"))]

    exact = plan(window, wanted, stored=stock, executor=drill.paged)
    assert [chunk.point for chunk in exact.chunks] == ["leading", "survivor", "prefill", "prefill", "prefill"]
    assert exact.kl == 0.0
    patch = drill.patch("c1")
    stock.add(patch, drill.chunks["c1"], drill.chunks["c2"])
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0), "Recompute": Rates(1.0)})
    planned = plan(window, wanted, stored=stock, uncertified=True, costs=quick)
    assert [chunk.point for chunk in planned.chunks] == ["leading", "survivor", "stored", "prefill", "prefill"]
    assert planned.kl is None
    blind = plan(window, wanted, Goal(seconds=1.5), stored=stock, uncertified=True, costs=quick)
    assert [chunk.point for chunk in blind.chunks] == ["leading", "survivor", "stored", "bare", "prefill"]

    for executor in drill.executors:
        executor.forget("c1")  # what the stock has in memory is given again
        executor.provide("c1", tokens=drill.tokens["c1"])
        blind.provide(executor)
    place = len(model.parts)
    model.place("c1", drill.tokens["c1"], place, added(drill.chunks["c1"], patch))
    model.place(
        "c2", drill.tokens["c2"], place + 1, {k: np.asarray(v)[:, None] for k, v in drill.chunks["c2"].kv.items()}
    )
    model.place("c5", drill.tokens["c5"], place + 2)
    drill.do((blind.window, blind.edits))
    drill.ask()

    # The same window, in another order, with one that left and one that is served by a forward again.
    entries = {piece.id: piece.entry for piece in drill.window.pieces}
    order = [entries[id] for id in ("c0", "c5", "c1", "c4")]
    turned = plan(drill.window, order, stored=stock, executor=drill.paged, known=blind.known)
    assert [chunk.point for chunk in turned.chunks] == ["leading", "prefill", "prefill", "prefill"]
    model.remove("c2")
    parts = {part.id: part for part in model.parts}
    model.parts = [parts["c0"]]
    model.close()
    for place, id in enumerate(("c5", "c1", "c4"), 1):
        model.place(id, drill.tokens[id], place)
    drill.do((turned.window, turned.edits))
    drill.ask()
    assert drill.window.as_promised


class Shelf:
    """A store in memory."""

    def __init__(self):
        self.chunks, self.patches = {}, []

    def get(self, id: str, backbone: str, *, lead: str | None = None) -> kvp.Chunk | None:
        return self.chunks.get(id)

    def put(self, chunk: kvp.Chunk) -> None:
        self.chunks[chunk.id] = chunk

    def put_patches(self, patches: list[kvp.Patch]) -> None:
        self.patches += patches

    def get_patches(self, served: Any) -> list[kvp.Patch]:
        same = [each for each in self.patches if each.metadata.chunk == served.chunk]
        same = [each for each in same if each.metadata.orbit == served.orbit]
        return [each for each in same if each.metadata.behind.difference(served.behind, served.orbit) is None]


def test_a_store_is_asked_and_its_patches_are_fetched():
    """Orbit patches too, and what is fetched is counted as it was predicted."""
    drill = Drill("gqa", host=False, store=None)
    for id in ("c0", "c1", "c2", "c4"):
        drill.append(id)
    drill.evict("c4")
    shelf = Shelf()
    drill.paged.store = shelf
    made = drill.patch("c4")
    wanted = [piece.entry for piece in drill.window.pieces] + [drill.make("c4")]
    orbit = kvp.Patch(
        made.factors,
        dataclasses.replace(
            made.metadata,
            orbit=True,
            antecedent=made.metadata.behind.sorted().ids,
            members=made.metadata.behind.sorted().members,
        ),
    )
    stock = PatchInventory.of(shelf, drill.backbone)
    stock.freeze()
    assert plan(drill.window, wanted, stored=stock, uncertified=True).chunks[-1].point == "prefill"
    shelf.put_patches([orbit])
    shelf.put(drill.chunks["c4"])
    assert plan(drill.window, wanted, stored=stock, uncertified=True).chunks[-1].point == "prefill"
    stock.thaw()
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0)})
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick, executor=drill.paged)
    assert planned.chunks[-1].point == "orbit"
    assert planned.chunks[-1].patch == PatchNote.of(orbit).digest
    drill.paged.forget("c4")
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick, executor=drill.paged)
    planned.provide(drill.paged)
    place = len(drill.model.parts)
    drill.model.place("c4", drill.tokens["c4"], place, added(drill.chunks["c4"], orbit))
    drill.do((planned.window, planned.edits))
    assert [type(edit).__name__ for edit in planned.edits] == ["Fetch", "Fetch", "ApplyPatch"]


def test_an_updated_patch_serves_behind_the_changed_antecedent():
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    old = drill.patch("c2")
    drill.evict("c2")
    drill.replace("c1", "c4")
    start = drill.window.next_start
    out = drill.model.run(drill.make("c2") and drill.tokens["c2"], start).kv
    conditioned = {name: np.asarray(value)[:, 0] for name, value in out.items()}
    correction = kvp.correction_patch(drill.chunks["c2"], old, conditioned, 4, drill.window.target())
    stock = PatchInventory.of(None, drill.backbone)
    stock.add(drill.chunks["c2"], old)
    wanted = [*(piece.entry for piece in drill.window.pieces), drill.make("c2")]
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0)})
    assert plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick).chunks[-1].point == "prefill"
    folded = stock.fold(old, correction)
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick)
    assert planned.chunks[-1].point == "update"
    for executor in drill.executors:
        planned.provide(executor)
    assert folded.patch is not None
    drill.model.place("c2", drill.tokens["c2"], 2, added(drill.chunks["c2"], folded.patch))
    drill.do((planned.window, planned.edits))


# ------------------------------------------------------------------------------------------------- what is refused


def test_stale_and_uncertified_reuse_is_refused_unless_told_otherwise():
    entries = [entry(number, 50) for number in range(4)]
    window, _ = plan_and_window(entries[:2])
    stock = PatchInventory(BACKBONE)
    stock.add(*entries, note(entries[2], entries[:2]), note(entries[3], [entries[1]]))
    wanted = entries
    points = lambda planned: [chunk.point for chunk in planned.chunks]
    ask = lambda goal=None, **options: plan(window, wanted, goal, stored=stock, costs=DEVICES, **options)

    planned = ask()
    assert points(planned) == ["leading", "leading", "prefill", "prefill"]
    assert "not bare: uncertified" in planned.explain()
    assert points(ask(uncertified=True)) == ["leading", "leading", "stored", "prefill"]
    assert points(ask(allow_stale=True)) == ["leading", "leading", "prefill", "prefill"]
    assert points(ask(uncertified=True, allow_stale=True)) == ["leading", "leading", "stored", "prefill"]
    assert points(ask(Goal(kl=9.0), uncertified=True)) == ["leading", "leading", "prefill", "prefill"]

    least = ask(uncertified=True).seconds
    with pytest.raises(CertificateError, match=r"evals.certify"):
        ask(Goal(seconds=least))
    assert points(ask(Goal(seconds=least), uncertified=True)) == ["leading", "leading", "stored", "prefill"]
    both = ask(Goal(seconds=least * 0.6), uncertified=True, allow_stale=True)
    assert points(both)[3] in ("stored", "bare")
    assert both.kl is None
    with pytest.raises(PlanError, match="expected at least"):
        ask(Goal(seconds=0.0), uncertified=True)
    with pytest.raises(PlanError, match="expected at least"):
        ask(Goal(bytes=1), uncertified=True)

    signed = certificate({("stored", 4): [0.2, 0.3]})
    assert points(ask(certificate=signed)) == points(planned)
    assert points(ask(Goal(kl=0.25), certificate=signed)) == points(planned)  # one is prefilled behind it
    held = ask(Goal(kl=0.3), certificate=signed)
    assert points(held) == ["leading", "leading", "stored", "prefill"]
    assert (held.kl, held.flips) == (0.3, 0.01)
    assert [chunk.fidelity for chunk in held.chunks] == ["exact", "exact", "approximate", "approximate"]
    assert points(ask(Goal(kl=0.3, flips=0.001), certificate=signed)) == points(planned)
    with pytest.raises(PlanError, match="or KL ≤"):
        ask(Goal(kl=0.1, seconds=held.seconds), certificate=signed)
    with pytest.raises(CertificateError, match="backbone"):
        ask(certificate=certificate({("stored", 4): [0.2]}, backbone="e" * 64))
    with pytest.raises(PlanError, match="stock of backbone"):
        plan(window, wanted, stored=PatchInventory("e" * 64))
    with pytest.raises(WindowError, match="twice"):
        plan(window, [*wanted, wanted[0]], stored=stock)


def plan_and_window(entries: list[Entry]) -> tuple[Window, Any]:
    planned = plan(Window.empty(COSTS), entries, stored=PatchInventory(BACKBONE), costs=DEVICES)
    return planned.window, planned


def test_a_patch_that_went_stale_in_the_window_is_not_kept():
    """An image is put in front of one that a patch serves: nothing says how far that is off, so it is run again."""
    entries = [entry(number, 50) for number in range(4)]
    stock = PatchInventory(BACKBONE)
    stock.add(*entries, note(entries[2], entries[:2]))
    signed = certificate({("stored", 4): [0.2] * 4})
    ask = lambda window, wanted, **options: plan(
        window, wanted, Goal(kl=0.5), stored=stock, costs=DEVICES, certificate=signed, **options
    )
    first = ask(Window.empty(COSTS), entries[:3])
    assert [chunk.point for chunk in first.chunks] == ["prefill", "prefill", "stored"]
    again = ask(first.window, entries[:3])
    assert again.edits == ()
    assert [chunk.point for chunk in again.chunks] == ["leading", "leading", "stored"]
    assert again.kl == first.kl == 0.2
    between = ask(first.window, [entries[0], entries[1], entries[3], entries[2]])
    assert [chunk.point for chunk in between.chunks] == ["leading", "leading", "prefill", "prefill"]

    behind = ask(first.window, entries)  # prefilled behind what is approximate
    assert behind.chunks[-1].fidelity == "approximate"
    assert behind.chunks[-1].kl == behind.kl == 0.2
    without = [entries[0], entries[1], entries[3]]  # what it was made behind has left
    assert ask(behind.window, without, known=behind.known).chunks[-1].point == "kept"
    assert ask(behind.window, without).chunks[-1].point == "prefill"


def test_a_certificate_bounds_no_window_whose_first_tokens_have_left():
    """Survivors of a slide lose far more where nothing is pinned, and certificates are measured with a lead."""
    signed = certificate({("survivor", 0): [0.3] * 4})
    for lead, point in ((1, "survivor"), (0, "prefill")):
        window, _ = filled(4, promise="forget", lead=lead).evict("c1" if lead else "c0")
        entries = [piece.entry for piece in window.pieces]
        planned = plan(
            window, entries, Goal(kl=0.5), stored=PatchInventory(BACKBONE), costs=DEVICES, certificate=signed
        )
        assert planned.chunks[-1].point == point
        assert planned.beyond == (None if lead else "window whose first tokens have left; certified with them pinned")


def test_what_was_made_behind_something_approximate_is_never_as_promised():
    """Not when that has left, nor through a fork, nor read back from JSON."""
    window = filled(3)
    window, _ = window.insert(entry(7), "c1")  # c1 and c2 have not seen it
    window, _ = window.append(entry(3))
    window, _ = window.append(entry(4))
    for id in ("c7", "c2", "c1"):
        window, _ = window.evict(id)
    read = Window.from_json(window.to_json(), backbone=BACKBONE)
    for each in (window, window.fork("side")[0], read):
        assert [each.fidelity(id) for id in each.ids] == ["exact", "approximate", "approximate"]
        entries = [piece.entry for piece in each.pieces]
        planned = plan(each, entries, stored=PatchInventory(BACKBONE), costs=DEVICES)
        assert [chunk.point for chunk in planned.chunks] == ["leading", "prefill", "prefill"]
        assert planned.window.as_promised
        kept = plan(each, entries, stored=PatchInventory(BACKBONE), costs=DEVICES, uncertified=True)
        assert (kept.kl, kept.as_promised) == (None, False)
        assert [chunk.point for chunk in kept.chunks] == ["leading", "kept", "kept"]
        assert [chunk.kl for chunk in kept.chunks] == [0, None, None]


def test_a_survivor_is_run_again_where_one_in_front_of_it_becomes_another():
    """What it saw there remembered a chunk that has left, and would not any more."""
    window, _ = filled(4).evict("c1")
    window, _ = window.condition("c2", note(entry(2), [entry(0)]), allow_stale=True)
    assert window.fidelity("c3") == "survivor", "its KV is its own"
    entries = [piece.entry for piece in window.pieces]
    planned = plan(window, entries, stored=PatchInventory(BACKBONE), costs=DEVICES)
    assert [chunk.point for chunk in planned.chunks] == ["leading", "prefill", "prefill"]
    assert planned.as_promised
    assert planned.window.as_promised
    assert window.recompute("c2")[0].fidelity("c3") == "approximate"


def test_a_patch_is_aimed_at_the_survivor_that_a_bare_piece_goes_back_to():
    """Not at a prefill of it: the plan restores it, and a patch formed behind the prefill would be refused."""
    kept, _ = filled(3).evict("c1")
    window, _ = kept.bare("c2")
    assert window.target() == kept.target()
    entries = [entry(0), entry(2), entry(3)]
    behind = PatchNote("behind the survivor", "c3", "content 3", "canonical", kept.target(), None, False, 4, 40, 6)
    signed = certificate({("stored", 4): [0.2] * 4})
    for patch, point in ((note(entry(3), entries[:2]), "prefill"), (behind, "stored")):
        stock = PatchInventory(BACKBONE)
        stock.add(entries[2], patch)
        slow = DeviceCosts("slow", None, {"Prefill": Rates(flop=1.0), "Recompute": Rates(flop=1.0)})
        planned = plan(window, entries, Goal(kl=0.5), stored=stock, costs=slow, certificate=signed)
        assert [chunk.point for chunk in planned.chunks] == ["leading", "survivor", point]


def test_a_certificate_bounds_no_window_beyond_those_that_it_was_measured_on():
    entries = [entry(number) for number in range(5)]
    stock = PatchInventory(BACKBONE)
    for place, each in enumerate(entries):
        stock.add(each, note(each, entries[:place]))
    signed = dataclasses.replace(certificate({("stored", 4): [0.2] * 5}), spans=(5, 7), modalities=("text",))
    slow = DeviceCosts("slow", None, {"Prefill": Rates(flop=1.0), "Recompute": Rates(flop=1.0)})
    ask = lambda signed, **more: plan(
        Window.empty(COSTS), entries, Goal(kl=0.5, **more), stored=stock, costs=slow, certificate=signed
    )
    within = ask(signed)
    assert (within.kl, within.beyond, within.certificate) == (0.2, None, signed.digest)
    assert "stored" in {chunk.point for chunk in within.chunks}
    tokens = sum(each.tokens for each in entries)
    for smaller, said in (
        ({"tokens": 20}, f"window of {tokens} tokens; certified up to 20"),
        ({"chunks": 3}, "window of 4 chunks; certified up to 3"),
        ({"spans": (5, 6)}, "chunk that spans 7 positions; certified from 5 to 6"),
        ({"modalities": ("image",)}, "chunk of text; certified of image"),
    ):
        few = dataclasses.replace(signed, **smaller)
        beyond = ask(few)
        assert (beyond.kl, beyond.as_promised, beyond.beyond, beyond.certificate) == (0.0, True, said, None)
        assert {chunk.point for chunk in beyond.chunks} == {"prefill"}
        assert f"uncertified: {said}" in beyond.explain()
        assert f"uncertified ({said})" in beyond.explain()
        with pytest.raises(CertificateError, match=said.split(";")[0]):
            ask(few, seconds=1.0)


def test_what_is_known_of_a_piece_bounds_it_no_longer_where_something_else_stands_in_front():
    """Prefilled behind a patch, it lost what that lost; of what it has not seen, or should have forgotten, more."""
    entries = [entry(number, 50) for number in range(5)]
    stock = PatchInventory(BACKBONE)
    stock.add(*entries, note(entries[1], entries[:1]))
    signed = certificate({("stored", 4): [0.2] * 5})
    for promise, without in (("remember", 0.2), ("forget", 0.0)):
        ask = lambda window, wanted, **options: plan(
            window, wanted, Goal(kl=0.5), stored=stock, costs=DEVICES, certificate=signed, **options
        )
        first = ask(Window.empty(COSTS, promise=promise), entries[:3])
        assert [chunk.point for chunk in first.chunks] == ["prefill", "stored", "prefill"]
        again = ask(first.window, entries[:3], known=first.known)
        assert [chunk.point for chunk in again.chunks] == ["leading", "stored", "kept"]
        assert again.kl == 0.2
        between = ask(first.window, [*entries[:2], entries[3], entries[2]], known=first.known)
        assert [chunk.point for chunk in between.chunks] == ["leading", "stored", "prefill", "prefill"]
        assert ask(first.window, [entries[0], entries[2]], known=first.known).kl == without


def test_a_patch_is_kept_only_where_none_in_front_of_it_becomes_another():
    """The worse one is run again, and forgets what has left: the better one was formed behind what remembered it."""
    window = filled(2)
    stock = PatchInventory(BACKBONE)
    for number, rank in ((2, 2), (3, 8)):
        front = window.target()
        patch = PatchNote(f"{number}", f"c{number}", f"content {number}", "canonical", front, None, False, rank, 9, 9)
        window, _ = window.append(entry(number), patch=patch)
    window, _ = window.evict("c1")
    signed = certificate({("stored", 2): [0.5] * 4, ("stored", 8): [0.05] * 4})
    entries = [piece.entry for piece in window.pieces]
    for most, points in ((0.5, ["leading", "stored", "stored"]), (0.1, ["leading", "prefill", "prefill"])):
        planned = plan(window, entries, Goal(kl=most), stored=stock, costs=DEVICES, certificate=signed)
        assert [chunk.point for chunk in planned.chunks] == points


def test_other_points_have_their_names():
    entries = [entry(number, 50) for number in range(3)]
    fresh = plan(
        Window.empty(COSTS), entries, stored=PatchInventory(BACKBONE), costs=DEVICES, forming=True, encoded={"c2"}
    )
    assert [chunk.point for chunk in fresh.chunks] == ["prefill", "fresh", "encoded"]
    text = Entry("said", None, 4, 4)
    told = plan(fresh.window, [*entries, text], stored=PatchInventory(BACKBONE), costs=DEVICES)
    assert told.chunks[-1].point == "prefill"
    bare, _ = told.window.bare("c2")
    back = plan(bare, [*entries, text], stored=PatchInventory(BACKBONE), costs=DEVICES)
    assert back.chunks[2].fidelity == "exact"
    assert [type(edit).__name__ for edit in back.edits] == ["Copy"]
    assert "→ survivor" in back.menu("c2")[0]
    forgets = filled(4, promise="forget")
    slid, _ = forgets.evict("c1")
    left = [piece.entry for piece in slid.pieces]
    assert [chunk.point for chunk in plan(slid, left, stored=PatchInventory(BACKBONE), costs=DEVICES).chunks] == [
        "leading",
        "prefill",
        "prefill",
    ]
    kept = plan(
        slid,
        left,
        Goal(kl=1.0),
        stored=PatchInventory(BACKBONE),
        costs=DEVICES,
        certificate=certificate({("survivor", 0): [0.4] * 3}),
    )
    assert [chunk.point for chunk in kept.chunks] == ["leading", "survivor", "survivor"]
    assert kept.kl == 0.4


@pytest.mark.parametrize("given", [{"kl": -1.0}, {"seconds": math.nan}, {"bytes": True}, {"flips": "few"}])
@pytest.mark.usefixtures("unchecked")
def test_goals_are_numbers(given: dict[str, Any]):
    with pytest.raises(PlanError, match="expected a number from 0"):
        Goal(**given)


def test_device_costs_are_kept_and_damage_is_noticed(tmp_path: Path):
    path = tmp_path / "costs.json"
    DEVICES.write(path)
    assert DeviceCosts.read(path, device="a desk") == DEVICES
    edits = (Drop("a"), Rotate("a", 0, 1, 100, 10), Rotate("b", 0, 1, 100, 10))
    assert DEVICES.seconds(edits) == pytest.approx(1e-4 + 20 * 2e-7 + 200 * 3e-9)
    with pytest.raises(PlanError, match="of device"):
        DeviceCosts.read(path, device="another")
    with pytest.raises(PlanError, match="No such file"):
        DeviceCosts.read(tmp_path / "none.json")
    text = path.read_text("utf-8")
    for damaged in (
        text[:-9],
        "[]",
        text.replace("0.0001", "0.0002"),
        json.dumps({"format": "x"}),
        text.replace("2e-07", "-2e-07"),
    ):
        path.write_text(damaged)
        with pytest.raises(PlanError):
            DeviceCosts.read(path)
    guess = DeviceCosts.assumed("NVIDIA H200")
    assert not guess.measured
    assert guess.about.startswith("assumed")
    assert (
        "assumed on NVIDIA H200"
        in plan(Window.empty(COSTS), [entry(0)], stored=PatchInventory(BACKBONE), costs=guess).explain()
    )
    with pytest.raises(PlanError, match="expected one of"):
        DeviceCosts("x", None, {"Teleport": Rates()})
