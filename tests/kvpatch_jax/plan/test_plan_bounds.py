"""What a plan may keep, patch or take bare, and what a certificate bounds of it."""
# pyright: reportArgumentType=false

import dataclasses
from typing import Any

import pytest

from kvpatch_jax.errors import CertificateError, PlanError, WindowError
from kvpatch_jax.plan import Certificate, DeviceCosts, Goal, PatchInventory, Plan, Rates, plan
from kvpatch_jax.window import Entry, PatchNote, Window
from tests.kvpatch_jax.plan.plan_cases import BACKBONE, COSTS, DEVICES, certificate, entry, filled, note


def points(planned: Plan) -> list[str]:
    return [chunk.point for chunk in planned.chunks]


def test_uncertified_options_need_permission():
    entries = [entry(number, 50) for number in range(4)]
    window, _ = plan_and_window(entries[:2])
    inventory = PatchInventory(BACKBONE)
    inventory.add(*entries, note(entries[2], entries[:2]), note(entries[3], [entries[1]]))

    def ask(goal: Goal | None = None, **options: Any) -> Plan:
        return plan(window, entries, goal, stored=inventory, costs=DEVICES, **options)

    planned = ask()
    assert points(planned) == ["leading", "leading", "prefill", "prefill"]
    assert "not bare: uncertified" in planned.explain()
    assert points(ask(uncertified=True)) == ["leading", "leading", "stored", "prefill"]
    assert points(ask(Goal(kl=9.0), uncertified=True)) == ["leading", "leading", "prefill", "prefill"]

    least = ask(uncertified=True).seconds
    with pytest.raises(CertificateError, match=r"evals.certify"):
        ask(Goal(seconds=least))
    assert points(ask(Goal(seconds=least), uncertified=True)) == ["leading", "leading", "stored", "prefill"]
    both = ask(Goal(seconds=least * 0.6), uncertified=True)
    assert points(both)[3] == "bare"
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
    with pytest.raises(PlanError, match="inventory of backbone"):
        plan(window, entries, stored=PatchInventory("e" * 64))
    with pytest.raises(WindowError, match="twice"):
        plan(window, [*entries, entries[0]], stored=inventory)


def plan_and_window(entries: list[Entry]) -> tuple[Window, Any]:
    planned = plan(Window.empty(COSTS), entries, stored=PatchInventory(BACKBONE), costs=DEVICES)
    return planned.window, planned


def test_a_patch_that_became_stale_in_the_window_is_not_kept():
    """An image is put in front of one that a patch serves: nothing says how far that is off, so it is run again."""
    entries = [entry(number, 50) for number in range(4)]
    inventory = PatchInventory(BACKBONE)
    inventory.add(*entries, note(entries[2], entries[:2]))
    signed = certificate({("stored", 4): [0.2] * 4})

    def ask(window: Window, wanted: list[Entry], **options: Any) -> Plan:
        goal = Goal(kl=0.5)
        return plan(window, wanted, goal, stored=inventory, costs=DEVICES, certificate=signed, **options)

    first = ask(Window.empty(COSTS), entries[:3])
    assert points(first) == ["prefill", "prefill", "stored"]
    again = ask(first.window, entries[:3])
    assert again.edits == ()
    assert points(again) == ["leading", "leading", "stored"]
    assert again.kl == first.kl == 0.2
    between = ask(first.window, [entries[0], entries[1], entries[3], entries[2]])
    assert points(between) == ["leading", "leading", "prefill", "prefill"]

    behind = ask(first.window, entries)  # prefilled behind what is approximate
    assert behind.chunks[-1].fidelity == "approximate"
    assert behind.chunks[-1].kl == behind.kl == 0.2
    without = [entries[0], entries[1], entries[3]]  # what it was made behind has left
    read = Window.from_json(behind.window.to_json(), backbone=BACKBONE)
    for window in (behind.window, read, behind.window.fork("side")[0]):
        later = ask(window, without)
        assert (later.chunks[-1].point, later.kl) == ("kept", 0.2)


def test_a_certificate_bounds_no_window_whose_first_tokens_have_left():
    """Survivors of a slide lose far more where nothing is pinned, and certificates are measured with a lead."""
    signed = certificate({("survivor", 1): [0.3] * 4})
    for lead, point in ((1, "survivor"), (0, "prefill")):
        window, _ = filled(4, promise="forget", lead=lead).evict("c1" if lead else "c0")
        entries = [piece.entry for piece in window.pieces]
        planned = plan(
            window, entries, Goal(kl=0.5), stored=PatchInventory(BACKBONE), costs=DEVICES, certificate=signed
        )
        assert planned.chunks[-1].point == point
        assert planned.beyond == (None if lead else "window whose first tokens have left; certified with them pinned")


def test_kv_conditioned_on_approximate_pieces_is_never_as_promised():
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
        assert points(planned) == ["leading", "prefill", "prefill"]
        assert planned.window.as_promised
        kept = plan(each, entries, stored=PatchInventory(BACKBONE), costs=DEVICES, uncertified=True)
        assert (kept.kl, kept.as_promised) == (None, False)
        assert points(kept) == ["leading", "kept", "kept"]
        assert [chunk.kl for chunk in kept.chunks] == [0, None, None]


def test_a_survivor_is_recomputed_if_a_piece_in_front_of_it_changes():
    """What it saw there remembered a chunk that has left, and would not any more."""
    window, _ = filled(4).evict("c1")
    window, _ = window.condition("c2", note(entry(2), [entry(0)]), allow_stale=True)
    assert window.fidelity("c3") == "approximate", "it has seen c2 as it remembered c1"
    entries = [piece.entry for piece in window.pieces]
    planned = plan(window, entries, stored=PatchInventory(BACKBONE), costs=DEVICES)
    assert points(planned) == ["leading", "prefill", "prefill"]
    assert planned.as_promised
    assert planned.window.as_promised
    assert window.recompute("c2")[0].fidelity("c3") == "approximate"


def test_a_certificate_bounds_no_window_beyond_the_measured_ones():
    entries = [entry(number) for number in range(5)]
    inventory = PatchInventory(BACKBONE)
    for place, each in enumerate(entries):
        inventory.add(each, note(each, entries[:place]))
    signed = dataclasses.replace(certificate({("stored", 4): [0.2] * 5}), spans=(5, 7), modalities=("text",))
    slow = DeviceCosts("slow", None, {"Prefill": Rates(flop=1.0), "Recompute": Rates(flop=1.0)})

    def ask(signed: Certificate, **more: Any) -> Plan:
        goal, window = Goal(kl=0.5, **more), Window.empty(COSTS)
        return plan(window, entries, goal, stored=inventory, costs=slow, certificate=signed)

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


def test_ways_do_not_bound_a_piece_behind_other_pieces():
    """Prefilled behind a patch, it lost what that lost; of what it has not seen, or should have forgotten, more."""
    entries = [entry(number, 50) for number in range(5)]
    inventory = PatchInventory(BACKBONE)
    inventory.add(*entries, note(entries[1], entries[:1]))
    signed = certificate({("stored", 4): [0.2] * 5})

    def ask(window: Window, wanted: list[Entry], **options: Any) -> Plan:
        goal = Goal(kl=0.5)
        return plan(window, wanted, goal, stored=inventory, costs=DEVICES, certificate=signed, **options)

    for promise, without in (("remember", 0.2), ("forget", 0.0)):
        first = ask(Window.empty(COSTS, promise=promise), entries[:3])
        assert points(first) == ["prefill", "stored", "prefill"]
        again = ask(first.window, entries[:3])
        assert points(again) == ["leading", "stored", "kept"]
        assert again.kl == 0.2
        between = ask(first.window, [*entries[:2], entries[3], entries[2]])
        assert points(between) == ["leading", "stored", "prefill", "prefill"]
        assert ask(first.window, [entries[0], entries[2]]).kl == without


def test_a_patch_is_kept_only_if_no_piece_in_front_of_it_changes():
    """The worse one is run again, and forgets what has left: the better one was formed behind what remembered it."""
    window = filled(2)
    inventory = PatchInventory(BACKBONE)
    for number, rank in ((2, 2), (3, 8)):
        front = window.target()
        patch = PatchNote(f"{number}", f"c{number}", f"content {number}", "canonical", front, None, False, rank, 9, 9)
        window, _ = window.append(entry(number), patch=patch)
    window, _ = window.evict("c1")
    signed = certificate({("stored", 2): [0.5] * 4, ("stored", 8): [0.05] * 4})
    entries = [piece.entry for piece in window.pieces]
    for most, expected in ((0.5, ["leading", "stored", "stored"]), (0.1, ["leading", "prefill", "prefill"])):
        planned = plan(window, entries, Goal(kl=most), stored=inventory, costs=DEVICES, certificate=signed)
        assert points(planned) == expected


def test_points_name_how_pieces_are_served():
    entries = [entry(number, 50) for number in range(3)]
    fresh = plan(Window.empty(COSTS), entries, stored=PatchInventory(BACKBONE), costs=DEVICES, forming=True)
    assert points(fresh) == ["prefill", "fresh", "fresh"]
    text = Entry("said", None, 4, 4)
    told = plan(fresh.window, [*entries, text], stored=PatchInventory(BACKBONE), costs=DEVICES)
    assert told.chunks[-1].point == "prefill"
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
        certificate=certificate({("survivor", 1): [0.4] * 3}),
    )
    assert points(kept) == ["leading", "survivor", "survivor"]
    assert kept.kl == 0.4
