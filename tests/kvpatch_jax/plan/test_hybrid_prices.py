"""Prices of a hybrid model's plans: what is composed in front of forwards, and what patches add to transitions."""

import dataclasses
from collections.abc import Collection

import pytest

from kvpatch_jax.plan import DeviceCosts, Goal, PatchInventory, Plan, Rates, plan
from kvpatch_jax.window import Compose, Costs, Prefill, Window
from tests.kvpatch_jax.plan.plan_cases import BACKBONE, COSTS, DEVICES, certificate, entry, note

HYBRID = dataclasses.replace(COSTS, transition_bytes=1000, composing=70)
"""A transition has 1000 bytes; composing two of them takes 70 FLOPs."""
ENTRIES = [entry(number) for number in range(4)]
NOTES = [dataclasses.replace(note(own, ENTRIES[:place]), transition_flops=13) for place, own in enumerate(ENTRIES)]


SLOW = DeviceCosts("a desk", "2026-11-22", dict(DEVICES.kinds) | {"Prefill": Rates(1.0, 2e-7, 3e-9)}, "invented")
"""Forwards take so long that every patch is cheaper."""


def planned(costs: Costs, served: Collection[int] = (), devices: DeviceCosts = SLOW) -> Plan:
    """A plan of four chunks, of which these have a patch."""
    stock = PatchInventory(BACKBONE)
    for place in served:
        stock.add(NOTES[place], ENTRIES[place])
    signed = certificate({("stored", 4): [0.1] * 4})
    return plan(Window.empty(costs), ENTRIES, Goal(kl=1.0), stored=stock, certificate=signed, costs=devices)


def test_a_forward_reads_what_is_composed_of_the_pieces_in_front():
    """Each of these is read and the composition written; so many products as there are pieces behind the first."""
    made, plain = planned(HYBRID), planned(COSTS)
    kinds = [type(edit) for edit in made.edits]
    assert kinds == [Prefill, *[Compose, Prefill] * 3]
    composed = [(edit.id, edit.pieces, edit.bytes, edit.flops) for edit in made.edits if isinstance(edit, Compose)]
    assert composed == [("c1", 1, 2000, 0), ("c2", 2, 3000, 70), ("c3", 3, 4000, 140)]
    assert made.flops - plain.flops == 210
    assert made.bytes - plain.bytes == 9000 + 1000 + 3 * 2000  # forwards write one transition, and read one
    launch, flop, byte = SLOW.kinds["ApplyPatch"]
    seconds = 3 * launch + 210 * flop + 9000 * byte + 7000 * SLOW.kinds["Prefill"].byte
    assert made.seconds - plain.seconds == pytest.approx(seconds, rel=1e-9)
    assert_totals(made)


def test_a_patch_adds_to_a_transition_whatever_the_tokens():
    """Nothing is composed in front of what is placed."""
    made, plain = planned(HYBRID, {1, 3}), planned(COSTS, {1, 3})
    assert [chunk.point for chunk in made.chunks] == [chunk.point for chunk in plain.chunks]
    assert [chunk.point for chunk in made.chunks] == ["prefill", "stored", "prefill", "stored"]
    added = [first.flops - second.flops for first, second in zip(made.chunks, plain.chunks, strict=True)]
    assert added == [0, 0, 70, 0]  # 13 FLOPs are the note's own, whatever the model
    for place in (1, 3):
        copied, own = COSTS.copy(ENTRIES[place].tokens)["flops"], NOTES[place].flops * ENTRIES[place].tokens
        assert made.chunks[place].flops == copied + own + 13
    assert [edit.id for edit in made.edits if isinstance(edit, Compose)] == ["c2"]
    assert_totals(made)


def test_measured_rates_of_compositions_count_where_there_are_any():
    rates = dict(DEVICES.kinds) | {"Compose": Rates(1.0, 0.0, 0.0)}
    made = planned(HYBRID, devices=DeviceCosts("a desk", "2026-11-22", rates, "invented"))
    assert made.seconds == pytest.approx(3, rel=0.1)
    assert_totals(made)


def assert_totals(made: Plan) -> None:
    assert made.bytes == sum(chunk.bytes for chunk in made.chunks)
    assert made.flops == sum(chunk.flops for chunk in made.chunks)
    assert made.seconds == pytest.approx(sum(chunk.seconds for chunk in made.chunks), rel=1e-9)
