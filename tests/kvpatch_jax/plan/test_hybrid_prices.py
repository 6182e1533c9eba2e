"""Prices of a hybrid model's plans: what is composed in front of forwards, and what patches add to transitions."""

import dataclasses
from collections.abc import Collection

import pytest

from kvpatch_jax.plan import DeviceCosts, Goal, Plan, Rates
from kvpatch_jax.window import Costs, Window
from tests.kvpatch_jax.plan.plan_cases import (
    BACKBONE,
    DEVICES,
    PRICES,
    certificate,
    check_totals,
    entry,
    note,
    planned,
    points,
    stocked,
)

HYBRID = dataclasses.replace(PRICES, state_bytes=1000, composing=70)
"""A transition has 1000 bytes; composing two of them takes 70 FLOPs."""
ENTRIES = [entry(number) for number in range(4)]
NOTES = [dataclasses.replace(note(chunk, ENTRIES[:place]), state_flops=13) for place, chunk in enumerate(ENTRIES)]
SLOW = DeviceCosts("a desk", "2026-11-22", dict(DEVICES.kinds) | {"prefill": Rates(1.0, 2e-7, 3e-9)}, "invented")
"""Forwards take so long that every patch is cheaper."""


def served(prices: Costs, patched: Collection[int] = (), devices: DeviceCosts = SLOW) -> Plan:
    """A plan of four chunks, of which these have a patch."""
    stock = stocked(*(NOTES[place] for place in patched), *(ENTRIES[place] for place in patched))
    signed = certificate({("stored", 4): [0.1] * 4})
    goal = Goal(kl=1.0)
    return planned(
        Window.empty(BACKBONE), ENTRIES, goal, stored=stock, certificate=signed, costs=devices, prices=prices
    )


def test_a_forward_reads_what_is_composed_of_the_pieces_in_front():
    """The transition of the last of them is added to the composition of the others, if that is there."""
    made, plain = served(HYBRID), served(PRICES)
    composed = [(action.id, action.bytes, action.flops) for action in made.step if action.kind == "compose"]
    assert composed == [("c0", 2000, 0), ("c1", 3000, 70), ("c2", 3000, 70)]
    assert made.flops - plain.flops == 140
    assert made.bytes - plain.bytes == 8000 + 1000 + 3 * 2000  # forwards write one transition, and read one
    launch, flop, byte = SLOW.kinds["patch"]
    seconds = 3 * launch + 140 * flop + 8000 * byte + 7000 * SLOW.kinds["prefill"].byte
    assert made.seconds - plain.seconds == pytest.approx(seconds, rel=1e-9)
    check_totals(made)


def test_a_patch_adds_to_a_transition_whatever_the_tokens():
    """Nothing is composed in front of what is placed."""
    made, plain = served(HYBRID, {1, 3}), served(PRICES, {1, 3})
    assert points(made) == points(plain) == ["prefill", "stored", "prefill", "stored"]
    added = [first.flops - second.flops for first, second in zip(made.chunks, plain.chunks, strict=True)]
    assert added == [0, 0, 70, 0]  # 13 FLOPs are the note's own, whatever the model
    for place in (1, 3):
        tokens = ENTRIES[place].tokens
        copied, patched = PRICES.copy("", tokens).flops, NOTES[place].flops * tokens
        assert made.chunks[place].flops == copied + patched + 13
    assert [action.id for action in made.step if action.kind == "compose"] == ["c1"]
    check_totals(made)


def test_measured_rates_of_compositions_count_where_there_are_any():
    rates = dict(DEVICES.kinds) | {"compose": Rates(1.0, 0.0, 0.0)}
    made = served(HYBRID, devices=DeviceCosts("a desk", "2026-11-22", rates, "invented"))
    assert made.seconds == pytest.approx(3, rel=0.1)
    check_totals(made)
