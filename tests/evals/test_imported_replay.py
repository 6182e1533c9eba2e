"""Imported traces through a model: what is exact is exact, and what ran is what the prices say."""

import json

import numpy as np
import pytest

from evals.traces.cheapest import imported
from evals.traces.imported_replay import PRICED, agreement, agreement_table, mode_table, replay_imported, tables
from evals.traces.replay_run import BATCHED, MODES, PLACEHOLDER, PREFILL, PREFIX, WINDOW
from evals.traces.window_tracker import TraceSizes
from evals.trained import MAIN, shipped
from models import load

STEPS, KEEP = 6, 2


def test_scaled_numbers_are_rounded_and_never_nothing():
    sizes = TraceSizes({"screen": (1200, 40), "word": (3, 3)}, {"what?": 95}).scaled(64)
    assert sizes == TraceSizes({"screen": (19, 19), "word": (1, 1)}, {"what?": 1})


def test_of_equally_cheap_modes_the_first_counts_and_shares_agree_step_by_step():
    ran = {"a": [1, 5, 2], "b": [1, 4, 3]}
    record = {"kind": "k", "ways": {mode: {"each": {"flops": own}} for mode, own in ran.items()}}
    record["priced"] = {"a": [1, 4, 2], "b": [2, 5, 4]}
    found = agreement(record)
    assert found["replayed"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
    assert found["priced"] == {"a": 1.0, "b": 0.0}
    assert found["steps"] == pytest.approx(2 / 3)
    assert found["ratios"] == {"a": pytest.approx(8 / 7), "b": pytest.approx(8 / 11)}
    assert agreement_table([record])[1][-1] == ["k", "the same mode", "66.7", "", ""]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_every_mode_replays_an_imported_trace_at_the_price_of_its_steps(number, tmp_path):
    backbone = load(shipped(MAIN), dtype="float32")
    found = replay_imported(imported(tmp_path, STEPS)[number], backbone, window=KEEP)
    ways = found["ways"]
    assert list(ways) == list(MODES)
    assert found["asks"] == STEPS
    # Re-prefill and prefix cache show the window, batched ways more: each is exact for what it shows.
    for name in (PREFILL, PREFIX, BATCHED, PLACEHOLDER):
        assert abs(ways[name]["own_kl"]) < 1e-6, name
    assert max(map(abs, ways[PREFIX]["forget_kls"])) < 1e-6
    # A window keeps to its promise, which is to remember.
    assert max(map(abs, ways[WINDOW]["kls"])) < 1e-6
    assert max(ways[PREFILL]["kls"]) > 1e-6
    for mode in PRICED:
        np.testing.assert_array_equal(ways[mode]["each"]["flops"], found["priced"][mode], mode)
    assert agreement(found)["steps"] == 1
    assert sum(row["compiled"] for row in ways.values()) > ways[PREFIX]["compiled"]
    content = json.loads(json.dumps({"records": [found]}, allow_nan=False))
    assert len(mode_table(content["records"])[1]) == len(MODES)
    assert tables(content).count(found["kind"]) == len(MODES) + len(PRICED) + 1
