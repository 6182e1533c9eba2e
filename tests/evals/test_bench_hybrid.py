"""The suite of hybrid models: its counts against ledgers and arithmetic of our own, on a tiny random model."""

import json
from typing import Any

import numpy as np
import pytest

from evals.bench import hybrid
from evals.bench.checkpoints import GOLDENS
from evals.bench.hybrid_loop import (
    VARIANTS,
    HybridLoopSizes,
    SnapshotCache,
    counted_flops,
    hybrid_workload,
    measure_hybrid_loop,
    window_of,
)
from evals.bench.hybrid_shapes import decoder_of

SIZES = HybridLoopSizes(images=4, window=3, image_tokens=8, question_tokens=4, lead_tokens=4)
RAW = json.loads((GOLDENS / "qwen3_5" / "config.json").read_text())


@pytest.fixture(scope="module")
def loop() -> dict[str, Any]:
    workload = hybrid_workload(RAW, "tiny", SIZES, 0)
    return measure_hybrid_loop(workload, SIZES) | {"costs": workload.plain.forward_costs}


@pytest.mark.slow
def test_what_ran_is_what_is_counted(loop: dict[str, Any]):
    for way, flops in loop["counted"].items():
        if way != "bar":
            assert [step[way]["flops"] for step in loop["steps"]] == flops, way


def test_counts_are_those_of_forwards_and_compositions():
    """Three steps of a window of two, token by token, pair by pair and head by head."""
    layers, heads, keys, values, token, pair, logit = 3, 2, 5, 7, 100, 10, 1000
    decoder = decoder_of("Qwen3.5-0.8B")
    layout = decoder.layout.__class__.gqa(4, 1, 256, decoder.layout.rope)
    layout = layout.with_transitions(range(layers), heads, keys, values, tail=(3, 11))
    costs = hybrid.forward_costs(decoder)._replace(token=(token,), pair=(pair,), window=(0,), logit=logit)
    sizes = HybridLoopSizes(images=3, window=2, image_tokens=8, question_tokens=4, lead_tokens=4)
    found = counted_flops(costs, layout, sizes)

    def forward(tokens: int, behind: int) -> int:
        return token * tokens + pair * sum(behind + number + 1 for number in range(tokens)) + logit

    whole = [forward(4 + 8 + 4, 0), forward(4 + 16 + 4, 0), forward(4 + 16 + 4, 0)]
    assert found["re-prefill"] == whole
    assert found["snapshots"] == [whole[0], forward(8 + 4, 12), forward(16 + 4, 4)]
    new = [forward(8, 4) + forward(4, 12), *[forward(8, 12) + forward(4, 20)] * 2]
    assert found["bar"] == new
    compose = layers * heads * 2 * keys * keys * (keys + values)
    rotate = 3 * 64 * 8  # a quarter of a key's 256 numbers, of one layer and head
    assert found["window"] == [new[0] + compose, new[1] + 2 * compose, new[2] + 3 * compose + rotate]


@pytest.mark.slow
def test_a_growing_window_answers_as_a_prefill_does(loop: dict[str, Any]):
    assert max(step["kl"] for step in loop["steps"][: SIZES.window]) < 1e-9
    assert set(loop["variants"]) == set(VARIANTS)
    # Behind a slide ours is no re-prefill, or nothing was shown.
    assert loop["steps"][-1]["kl"] > 1e-9
    for name, step in loop["variants"].items():
        assert step["re-prefill"]["flops"] > step["snapshots"]["flops"] > step["window"]["flops"], name
        assert step["window"]["flops"] >= step["bar"]


def test_snapshots_serve_what_stands_in_front_of_the_change():
    cache = SnapshotCache()
    assert cache.hit(["lead", "a"]) == 0
    assert cache.hit(["lead", "a", "b"]) == 2
    assert cache.hit(["lead", "b", "c"]) == 1
    assert cache.hit(["lead", "c", "b"]) == 1
    assert cache.hit(["lead", "b", "a"]) == 2
    assert cache.hit(["b", "c"]) == 0
    assert [list(window_of(number, 2)) for number in range(3)] == [[0], [0, 1], [1, 2]]


def test_rows_judge_the_whole_loop(tmp_path):
    way = lambda seconds, flops: {"seconds": seconds, "flops": flops}
    step = lambda factor: {
        "window": way(1.0, 10),
        "re-prefill": way(factor, 10 * factor),
        "snapshots": way(1.0, 10),
        "kl": 0.0,
        "flip": 0.0,
    }
    loop = {"steps": [step(1.0), step(4.0), step(7.0)], "variants": {"reordered": step(5.0) | {"bar": 8}}}
    rows = {row["metric"]: row for row in hybrid.loop_rows(loop, {"backbone": "tiny", "window": 1})}
    whole = rows["loop: FLOPs of re-prefill over ours"]
    assert (whole["value"], whole["passed"], whole["low"], whole["high"]) == (4.0, True, 1.0, 7.0)
    assert rows["sliding: time of re-prefill over ours"]["value"] == 5.5
    assert rows["reordered: FLOPs over running what is new"]["value"] == pytest.approx(1.25)
    result = {"config": {"window": 1, "backbone": "tiny"}, "loop": loop, "counted": hybrid.counted_loops()}
    result["rows"] = hybrid.rows_of(result)
    hybrid.BENCHMARK.write(result, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
    assert np.isfinite([row["value"] for row in result["rows"]]).all()
