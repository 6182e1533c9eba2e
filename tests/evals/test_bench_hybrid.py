"""The suite of hybrid models: its counts against ledgers and arithmetic of our own, on a tiny random model."""

import json
from typing import Any

import numpy as np
import pytest

from evals.bench import hybrid, hybrid_bytes, hybrid_page, hybrid_sizes
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


def test_bytes_of_a_chunk_are_rows_and_a_constant():
    rows = {row["model"]: row for row in hybrid_bytes.describe_bytes((100, 200))}
    nine = rows["Qwen3.5-9B"]
    # 8 full layers of 4 heads of 256, keys and values; 24 linear layers of 32 heads of 128 × 128.
    row_bytes, matrix, tail = 2 * 2 * 8 * 4 * 256, 24 * 32 * 128 * 128, 24 * 3 * (2 * 16 + 32) * 128
    assert nine["row_bytes"] == row_bytes == 32 * 1024
    expected = {
        "float32": 4 * (2 * matrix + tail),
        "bfloat16": 2 * (2 * matrix + tail),
        "bfloat16, map of rank 8": 2 * (matrix + tail + 24 * 32 * 8 * 256),
        "bfloat16, no map": 2 * (matrix + tail),
    }
    assert nine["transition_bytes"] == expected
    for form, own in expected.items():
        assert nine["chunk_bytes"][form] == [own + 100 * row_bytes, own + 200 * row_bytes]
        even, beside = nine["even_length"][form], nine["beside_row_bytes"]
        assert own + even * row_bytes <= even * beside
        assert own + (even - 1) * row_bytes > (even - 1) * beside
    assert nine["beside_row_bytes"] == 2 * 2 * 36 * 8 * 128


@pytest.mark.slow
def test_prefills_behind_a_composed_context_are_described():
    short, long = hybrid_sizes.describe_prefills(RAW, (16, 32), keys=48, chunk=8)
    assert short["flops"] < long["flops"] < 2.5 * short["flops"]
    assert 0 < short["temporaries"] <= long["temporaries"]
    assert long["scores"] == 4 * 4 * 32 * 80


def test_compositions_are_counted_product_by_product():
    layout = decoder_of("Qwen3.5-0.8B").layout
    one, two = hybrid_sizes.describe_compositions(layout, (2, 3))
    assert one["flops"] == 18 * 16 * 2 * 128**2 * 256
    assert two["flops"] == 2 * one["flops"]
    # Of full chunks the last tail alone is read.
    matrices, tail = 4 * 18 * 16 * 2 * 128**2, 4 * 18 * 3 * 3 * 16 * 128
    assert two["arguments"] == 3 * matrices + tail
    assert two["results"] >= matrices + tail


def test_the_page_shows_the_run_that_is_kept_and_what_follows_from_layouts():
    root = hybrid_page.ROOT
    kept = json.loads((root / hybrid_page.KEPT).read_text(encoding="utf-8"))
    page = (root / hybrid_page.PAGE).read_text(encoding="utf-8")
    for mark, text in hybrid_page.sections(kept).items():
        assert f"<!-- {mark} -->\n\n{text}\n\n<!-- /{mark} -->" in page, mark
    # What needs no run is as the code has it now.
    assert kept["bytes"] == hybrid_bytes.describe_bytes()
    assert kept["counted"] == hybrid.counted_loops()
    assert kept["rows"] == json.loads(json.dumps(hybrid.rows_of(kept)))
    assert all(row["passed"] for row in kept["rows"] if "passed" in row)


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
    result = {"config": {"window": 1, "backbone": "tiny"}, "loop": loop, "prefills": [], "compositions": []}
    result |= {"counted": hybrid.counted_loops(), "bytes": hybrid_bytes.describe_bytes()}
    result["rows"] = hybrid.rows_of(result)
    hybrid.BENCHMARK.write(result, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    assert np.isfinite([row["value"] for row in result["rows"]]).all()
