"""Ways of keeping a window: what each shows, and prices of 200 imported steps against counting by hand."""

import numpy as np
import pytest

from evals.bench.shapes import SHAPES
from evals.traces.cheapest import cheapest, cost_table, figure, imported, shape_costs, share_table
from evals.traces.held_prompts import HeldPrompt, HoldingRule
from evals.traces.step_prices import (
    BATCHED,
    BATCHED_SLIDE,
    LEFT,
    NEVER,
    PLACEHOLDER,
    PREFILL,
    PREFIX,
    PROMPTS,
    SLIDE,
    WAYS,
    bounded,
    questions_of,
    shown_pieces,
    step_prices,
)
from evals.traces.window_tracker import TraceSizes
from kvpatch_jax.errors import TraceError
from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Entry

DEVICES = DeviceCosts.assumed("h100")


def chunk(name):
    return Entry(name, name, 10, 10)


def text(name):
    return Entry(name, name, 2, 2, "text")


def names(pieces):
    return " ".join(piece.id for piece in pieces)


def test_a_held_prompt_shows_what_has_not_left():
    lead, a, b, c, d = text("lead"), chunk("a"), chunk("b"), chunk("c"), chunk("d")
    said = [text(f"t{number}") for number in range(4)]
    windows = [
        [lead, a, said[0]],
        [lead, b, said[1]],
        [lead, c, said[2]],
        [lead, d, said[3]],
    ]
    shown = {
        HoldingRule(None): "lead a t0 b t1 c t2 d t3",
        HoldingRule(2): "lead c t2 d t3",
        HoldingRule(3): "lead d t3",
        HoldingRule(2, texts=True): "lead t0 t1 c t2 d t3",
        HoldingRule(2, texts=True, placeholder=LEFT): "lead left 1 t0 left 2 t1 c t2 d t3",
        HoldingRule(1, texts=True, placeholder=LEFT): "lead left 1 t0 left 2 t1 left 3 t2 d t3",
    }
    for rule, expected in shown.items():
        held = HeldPrompt(rule)
        found = [held.show(window) for window in windows]
        assert names(found[-1]) == expected, rule
        assert all(set(window) <= set(pieces) for window, pieces in zip(windows, found, strict=True))


def test_what_comes_back_enters_a_prompt_again_and_stays_in_a_window():
    a, b = chunk("a"), chunk("b")
    for once, expected in ((False, "a b a"), (True, "a b")):
        held = HeldPrompt(HoldingRule(None, once=once))
        for window in ([a], [a, b], [b, a]):
            found = held.show(window)
        assert names(found) == expected


def test_a_bounded_trace_keeps_the_newest_chunks():
    add = [Event(0, "s", "add", "lead", "lead", tokens=2, span=2, kind="text")]
    for name in "abc":
        add += [Event(0, "s", "add", name, name, tokens=10, span=10), Event(0, "s", "ask", text="?", tokens=1)]
    back = [
        Event(1, "s", "evict", chunk="a"),
        Event(1, "s", "recall", chunk="a"),
        Event(1, "s", "ask", text="?", tokens=1),
    ]
    trace = Trace((*add, *back))
    sizes = TraceSizes.of(trace)
    for keep, expected in (
        (1, ["a", "b", "c", "a"]),
        (2, ["a", "a b", "b c", "c a"]),
        (3, ["a", "a b", "a b c", "a b c"]),
    ):
        asked = questions_of(bounded(trace, keep), sizes)
        assert [names(question.pieces) for question in asked] == [f"lead {shown}" for shown in expected]
    with pytest.raises(TraceError, match="event 1: got 'reorder'"):
        bounded(Trace((add[1], Event(0, "s", "reorder", order=("a",)))), 2)


def test_prices_are_those_counted_by_hand():
    """A lead of 2 tokens, four chunks of 10, a window of one, questions of 1: the tokens and FLOPs of every way."""
    events = [Event(0, "s", "add", "lead", "lead", tokens=2, span=2, kind="text")]
    for name in "abcd":
        events += [Event(0, "s", "add", name, name, tokens=10, span=10), Event(0, "s", "ask", text="?", tokens=1)]
    trace, costs = Trace(tuple(events)), shape_costs("0.5B", SHAPES["Qwen2-0.5B"])
    sizes = TraceSizes.of(trace)
    asked = questions_of(bounded(trace, 1), sizes)
    prices = step_prices(asked, shown_pieces(asked, 1), sizes, costs=costs, devices=DEVICES)
    tokens = {way: [step.tokens for step in steps] for way, steps in prices.items()}
    assert set(tokens) == set(WAYS)
    assert tokens[PREFILL] == [13, 13, 13, 13]
    assert tokens[PREFIX] == tokens[SLIDE] == tokens[NEVER] == [13, 11, 11, 11]
    # Two chunks fit; at the third, the first two leave: only the lead is a prefix.
    assert tokens[BATCHED] == [13, 11, 11, 11]
    # From the second step on a placeholder of 6 tokens takes the place of the chunk before.
    assert tokens[PLACEHOLDER] == [13, 17, 17, 17]
    first = prices[PREFILL][0]
    assert first.flops == costs.run(12, 0) + costs.run(1, 12) + costs.forward.logit
    assert prices[NEVER][3].flops == costs.run(10, 32) + costs.run(1, 42) + costs.forward.logit


def test_costs_of_shapes_are_those_of_their_caches():
    assert shape_costs("0.5B", SHAPES["Qwen2-0.5B"]).kv_bytes == 24 * 2 * 2 * 64 * 2
    assert shape_costs("7B", SHAPES["Qwen2.5-7B"]).turning_bytes == 28 * 4 * 128 * 2
    latent = shape_costs("MLA", SHAPES["Kimi-VL-A3B"])
    assert (latent.kv_bytes, latent.turning_bytes, latent.rotary) == (27 * 576 * 2, 27 * 64 * 2, 27 * 64)


@pytest.mark.slow
def test_200_steps_of_both_formats_are_priced_in_every_way(tmp_path):
    records = cheapest(imported(tmp_path), windows=(2,))
    assert [(record["trace"], record["steps"]) for record in records] == [("computer use", 200)] * 3 + [
        ("mooncake", 200)
    ] * 3
    for record in records:
        for field, ways in (("shares", WAYS), ("exact", PROMPTS)):
            for unit, found in record[field].items():
                assert list(found) == list(ways), unit
                assert sum(found.values()) == pytest.approx(1)
        flops = record["means"]["flops"]
        # One by one, what slides is prefilled again behind a prefix cache and rotated in a window.
        assert flops[SLIDE] <= flops[PREFIX] <= flops[PREFILL]
        assert np.isfinite(list(record["means"]["seconds"].values())).all()
        assert flops[BATCHED_SLIDE] < flops[BATCHED]
    assert len(share_table(records)[1]) == len(cost_table(records)[1]) == 6
    figure(records, tmp_path / "cheapest.png")
    assert (tmp_path / "cheapest.png").stat().st_size > 1000
