"""What a plan may keep, patch or take bare, and what a certificate bounds of it."""

import dataclasses
from typing import Any

import pytest

from kvpatch_jax.plan import Certificate, DeviceCosts, Goal, Plan, Rates
from kvpatch_jax.window import BARE, Entry, PatchNote, Promise, Service, Window, from_json, to_json
from tests.kvpatch_jax.plan.plan_cases import (
    BACKBONE,
    Shelf,
    certificate,
    check_totals,
    entries_of,
    entry,
    filled,
    note,
    planned,
    points,
    stocked,
    within,
)


def test_uncertified_options_need_permission():
    entries = [entry(number, 50) for number in range(4)]
    window = planned(Window.empty(BACKBONE), entries[:2]).window
    stock = stocked(*entries, note(entries[2], entries[:2]), note(entries[3], [entries[1]]))

    def ask(*goal: Goal, **options: Any) -> Plan:
        return planned(window, entries, *goal, stored=stock, **options)

    promised = ["leading", "leading", "prefill", "prefill"]
    assert points(ask()) == promised
    assert "not stored rank 4: uncertified; not bare: uncertified" in ask().explain()
    assert points(ask(Goal("patched"))) == ["leading", "leading", "stored", "prefill"]
    assert points(ask(Goal("blind"))) == ["leading", "leading", "bare", "bare"]
    assert (ask(Goal("patched")).kl, ask().kl) == (None, 0.0)

    signed = certificate({("stored", 4): [0.2, 0.3]})
    assert points(ask(certificate=signed)) == promised
    assert points(ask(within(0.25), certificate=signed)) == promised  # one is prefilled behind it
    bounded = ask(within(0.3), certificate=signed)
    assert points(bounded) == ["leading", "leading", "stored", "prefill"]
    assert bounded.kl == 0.3
    assert [chunk.fidelity for chunk in bounded.chunks] == ["exact", "exact", "approximate", "approximate"]


def test_a_patch_that_became_stale_in_the_window_is_not_kept():
    """An image is put in front of one that a patch serves: nothing says how far that is off, so it is run again."""
    entries = [entry(number, 50) for number in range(4)]
    stock = stocked(*entries, note(entries[2], entries[:2]))
    signed = certificate({("stored", 4): [0.2] * 4})

    def ask(window: Window, chunks: list[Entry]) -> Plan:
        return planned(window, chunks, within(0.5), stored=stock, certificate=signed)

    first = ask(Window.empty(BACKBONE), entries[:3])
    assert points(first) == ["prefill", "prefill", "stored"]
    again = ask(first.window, entries[:3])
    assert again.window == first.window
    assert points(again) == ["leading", "leading", "stored"]
    assert again.kl == first.kl == 0.2
    between = ask(first.window, [entries[0], entries[1], entries[3], entries[2]])
    assert points(between) == ["leading", "leading", "prefill", "prefill"]

    behind = ask(first.window, entries)  # prefilled behind what is approximate
    assert behind.chunks[-1].fidelity == "approximate"
    assert behind.chunks[-1].kl == behind.kl == 0.2
    without = [entries[0], entries[1], entries[3]]  # what it was made behind has left
    for window in (behind.window, from_json(to_json(behind.window), BACKBONE), behind.window.fork("side")):
        later = ask(window, without)
        assert (later.chunks[-1].point, later.kl) == ("kept", 0.2)


def test_a_patch_in_the_window_serves_again_where_it_belongs():
    """The chunks in front come back in the order that it was formed behind: it stays, and nothing is computed."""
    entries = [entry(number, 50) for number in range(3)]
    stock = stocked(*entries, note(entries[2], entries[:2]), note(entries[2], entries[:2], orbit=True))
    signed = certificate({("stored", 4): [0.2] * 4, ("orbit", 4): [0.3] * 4})
    window = Window.empty(BACKBONE, lead=0)
    for chunk in entries[:2]:
        window = window.append(chunk)
    window = window.append(entries[2], Service("patch", note(entries[2], entries[:2], orbit=True)))
    turned = window.reorder(["c1", "c0"]).serve({id: Service("prefill") for id in ("c1", "c0")})
    assert turned.standing("c2").ways == (("", 0),)
    made = planned(turned, entries_of(turned), within(0.3), stored=stock, certificate=signed)
    assert (points(made), made.kl) == (["leading", "leading", "orbit"], 0.3)
    assert made.window.piece("c2").made == window.piece("c2").made


def test_a_certificate_bounds_no_window_whose_first_tokens_have_left():
    """Survivors of a slide lose far more where nothing is pinned, and certificates are measured with a lead."""
    signed = certificate({("survivor", 1): [0.3] * 4})
    for lead, point in ((1, "survivor"), (0, "prefill")):
        window = filled(4, promise="forget", lead=lead).evict("c1" if lead else "c0")
        made = planned(window, entries_of(window), within(0.5), certificate=signed)
        assert made.chunks[-1].point == point
        assert made.beyond == (None if lead else "window whose first tokens have left; certified with them pinned")


def test_kv_conditioned_on_approximate_pieces_is_never_as_promised():
    """Not when that has left, nor through a fork, nor read back from JSON."""
    window = filled(3).insert(entry(7), "c1")  # c1 and c2 have not seen it
    window = window.append(entry(3)).append(entry(4)).evict("c7", "c2", "c1")
    for own in (window, window.fork("side"), from_json(to_json(window), BACKBONE)):
        assert [own.fidelity(id) for id in own.ids] == ["exact", "approximate", "approximate"]
        made = planned(own, entries_of(own))
        assert points(made) == ["leading", "prefill", "prefill"]
        assert made.as_promised
        kept = planned(own, entries_of(own), Goal("patched"))
        assert (kept.kl, kept.as_promised) == (None, False)
        assert points(kept) == ["leading", "kept", "kept"]
        assert [chunk.kl for chunk in kept.chunks] == [0, None, None]


def test_an_approximate_piece_that_comes_to_the_front_is_planned():
    """Its canonical is stored, but a window takes that only of a piece that comes in."""

    class Fronts(Shelf):
        def canonical(self, entry: Entry, leading: bool = False) -> bool:
            return entry in self.items

    window = filled(2, lead=0).serve({"c1": BARE}).evict("c0")
    stock = Fronts(*entries_of(window))
    for goal, point in ((Goal(), "prefill"), (Goal("patched"), "prefill"), (Goal("blind"), "bare")):
        made = planned(window, entries_of(window), goal, stored=stock)
        assert (points(made), made.as_promised) == ([point], point == "prefill")
    signed = certificate({("bare", 0): [0.2]})
    assert points(planned(window, entries_of(window), within(0.1), stored=stock, certificate=signed)) == ["prefill"]


def test_survivors_that_a_plan_restores_are_bounded_by_what_the_window_remembers():
    """The piece in front of it is approximate, so that nothing in the window is a survivor before."""

    class Restoring(Shelf):
        def prefill(self, entry: Entry, made: str) -> bool:
            return entry.id == "c3"

    window = filled(1, lead=0).serve({"c0": BARE}).append(entry(1)).append(entry(2)).evict("c1")
    assert [own.fidelity for own in window.standings] == ["approximate", "approximate"]
    signed = certificate({("bare", 0): [0.1] * 4})
    rows = [
        dataclasses.replace(row, kl_bound=0.3 if row.promise == "remember" else row.kl_bound) for row in signed.rows
    ]
    signed = dataclasses.replace(signed, rows=tuple(rows))
    entries = [*entries_of(window), entry(3)]
    for most, kl in ((0.3, 0.3), (0.2, 0.0)):
        made = planned(window, entries, within(most), stored=Restoring(), certificate=signed)
        assert made.kl == kl
    assert made.as_promised
    kept = planned(window, entries, within(0.3), stored=Restoring(), certificate=signed)
    assert points(kept) == ["bare", "kept", "restored"]
    assert [chunk.kl for chunk in kept.chunks] == [0.3, 0.3, 0.0]


def test_what_stays_is_named_by_what_it_is_behind_pieces_that_are_run_again():
    window = filled(3, promise="forget", lead=0).serve({"c0": BARE})
    made = planned(window, entries_of(window))
    assert points(made) == ["prefill", "leading", "leading"]
    check_totals(made)


def test_a_survivor_is_prefilled_again_if_a_piece_in_front_of_it_changes():
    """What it saw there remembered a chunk that has left, and does not any more."""
    window = filled(4).evict("c1")
    window = window.serve({"c2": Service("patch", note(entry(2), [entry(0)]), allow_stale=True)})
    assert window.fidelity("c3") == "approximate", "it has seen c2 as it remembered c1"
    made = planned(window, entries_of(window))
    assert points(made) == ["leading", "prefill", "prefill"]
    assert made.as_promised


def test_a_survivor_is_kept_only_if_no_survivor_in_front_of_it_is_run_again():
    """It has seen that one as it was; nothing bounds it behind the other."""
    window = filled(3, promise="forget").evict("c1").append(entry(3)).append(entry(4)).evict("c3")
    assert [own.fidelity for own in window.standings] == ["exact", "survivor", "survivor"]
    # The lower bound is that of the last piece alone.
    signed = certificate({("survivor", 1): [0.1, 0.4]})
    for most, expected in ((0.4, ["leading", "survivor", "survivor"]), (0.1, ["leading", "prefill", "prefill"])):
        made = planned(window, entries_of(window), within(most), certificate=signed)
        assert points(made) == expected
        assert (made.kl, made.as_promised) == ((0.4, False) if most == 0.4 else (0.0, True))


def test_a_certificate_bounds_no_window_beyond_the_measured_ones():
    entries = [entry(number) for number in range(5)]
    stock = stocked(*entries, *(note(chunk, entries[:place]) for place, chunk in enumerate(entries)))
    signed = dataclasses.replace(certificate({("stored", 4): [0.2] * 5}), spans=(5, 7), modalities=("text",))
    slow = DeviceCosts("slow", None, {"prefill": Rates(flop=1.0)})

    def ask(signed: Certificate) -> Plan:
        return planned(Window.empty(BACKBONE), entries, within(0.5), stored=stock, costs=slow, certificate=signed)

    inside = ask(signed)
    assert (inside.kl, inside.beyond, inside.certificate) == (0.2, None, signed.digest)
    assert "stored" in points(inside)
    tokens = sum(chunk.tokens for chunk in entries)
    for smaller, reason in (
        ({"tokens": 20}, f"window of {tokens} tokens; certified up to 20"),
        ({"chunks": 3}, "window of 4 chunks; certified up to 3"),
        ({"spans": (5, 6)}, "chunk that spans 7 positions; certified from 5 to 6"),
        ({"modalities": ("image",)}, "chunk of text; certified of image"),
    ):
        beyond = ask(dataclasses.replace(signed, **smaller))
        assert (beyond.kl, beyond.as_promised, beyond.beyond, beyond.certificate) == (0.0, True, reason, None)
        assert set(points(beyond)) == {"prefill"}
        assert f"uncertified: {reason}" in beyond.explain()
        assert f"uncertified ({reason})" in beyond.explain()


@pytest.mark.parametrize(("promise", "without"), [("remember", 0.2), ("forget", 0.0)])
def test_ways_do_not_bound_a_piece_behind_other_pieces(promise: Promise, without: float):
    """Prefilled behind a patch, it lost what that lost; of what it has not seen, or should have forgotten, more."""
    entries = [entry(number, 50) for number in range(5)]
    stock = stocked(*entries, note(entries[1], entries[:1]))
    signed = certificate({("stored", 4): [0.2] * 5})

    def ask(window: Window, chunks: list[Entry]) -> Plan:
        return planned(window, chunks, within(0.5), stored=stock, certificate=signed)

    first = ask(Window.empty(BACKBONE, promise=promise), entries[:3])
    assert points(first) == ["prefill", "stored", "prefill"]
    again = ask(first.window, entries[:3])
    assert points(again) == ["leading", "stored", "kept"]
    assert again.kl == 0.2
    between = ask(first.window, [*entries[:2], entries[3], entries[2]])
    assert points(between) == ["leading", "stored", "prefill", "prefill"]
    assert ask(first.window, [entries[0], entries[2]]).kl == without


def test_a_patch_is_kept_only_behind_what_it_was_formed_behind():
    """A chunk left: the first patch stands for what saw it, and the second was formed behind just that."""
    window = filled(2)
    for number, rank in ((2, 2), (3, 8)):
        chunk, behind = entry(number), window.target()
        patch = PatchNote(f"{number}", chunk.id, chunk.content, "canonical", behind, None, False, rank, 9, 9)
        window = window.append(chunk, Service("patch", patch))
    window = window.evict("c1")
    signed = certificate({("stored", 2): [0.5] * 4, ("stored", 8): [0.05] * 4})
    for most, expected in ((0.5, ["leading", "stored", "prefill"]), (0.1, ["leading", "prefill", "prefill"])):
        assert points(planned(window, entries_of(window), within(most), certificate=signed)) == expected


def test_points_name_how_pieces_are_served():
    entries = [entry(number, 50) for number in range(3)]
    first = planned(Window.empty(BACKBONE), entries)
    assert points(first) == ["prefill"] * 3
    assert planned(first.window, [*entries, Entry("a text", None, 4, 4, "text")]).chunks[-1].point == "prefill"
    slid = filled(4, promise="forget").evict("c1")
    assert points(planned(slid, entries_of(slid))) == ["leading", "prefill", "prefill"]
    kept = planned(slid, entries_of(slid), within(1.0), certificate=certificate({("survivor", 1): [0.4] * 3}))
    assert points(kept) == ["leading", "survivor", "survivor"]
    assert kept.kl == 0.4
