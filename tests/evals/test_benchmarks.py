"""A benchmark times only sides that compute the same, resumes, and counts the work that runs."""

import functools
import importlib.util
import itertools
import json
import math
from pathlib import Path
from unittest import mock

import jax
import pytest

from evals.bench import accelerator, batch, costs, first_steps, kernels, operators, real_model, store, window
from evals.bench.benchmark import Benchmark, BenchOptions, Sides, measure, table, wrong_rows
from kvpatch_jax.plan import DeviceCosts
from pallas_kernels import _dispatch

ROOT = Path(__file__).parents[2]
QUICK = BenchOptions(quick=True)
COUNTED = {
    "kernels": (kernels, {"rotate_patch, several heads", "splice, one head, patched, 4 bits", "factorise"}),
    "operators": (operators, {"operators.place", "operators.overhead", "operators.patch"}),
    "store": (store, {"store.put", "store.get", "store.small get", "store.small evicting put"}),
    "window": (window, {"window.step"}),
    "batch": (batch, {"batch.answers"}),
    "costs": (costs, {"costs.rates"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COUNTED)
def test_a_suite_runs_and_every_side_is_right(tmp_path, name):
    module, probes = COUNTED[name]
    rows = []
    for benchmark in module.suite(QUICK._replace(out=str(tmp_path))):
        rows += measure(benchmark, 2)[0]
    assert probes <= {row["probe"] for row in rows}
    assert wrong_rows(rows) == []
    assert all(row["value"] > 0 for row in rows if row["metric"] == "seconds")
    assert table(rows).count("\n") == 1 + len({(row["probe"], row["model"], row["arm"]) for row in rows})
    if name == "costs":  # where plans read them
        read = DeviceCosts.read(tmp_path / "device_costs.json")
        assert read.measured
        assert set(read.kinds) == {"prefill", "rotate", "copy", "patch", "fetch"}


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [12, 50])
def test_a_loop_over_ten_sizes_compiles_sixteen_programs_at_most(steps: int):
    """Everything counted: tower, embedding, prefill, placing, rotation, answers, checksums, the pool."""
    figures = first_steps.loop(steps)
    assert 0 < figures["programs"] <= 16, figures["names"]
    assert 0 < figures["padding"] < 0.5


def test_a_wrong_side_is_refused_before_anything_of_it_is_timed():
    ran, errors = [], {"ours": 0.5, "wrong": 1.5, "undefined": math.nan}
    calls = {name: functools.partial(lambda name: ran.append(name) or 1.0, name) for name in errors}
    rows, notes = measure(Benchmark("suite.work", "case", lambda: Sides(calls, lambda: errors)), 3)
    assert set(ran) == {row["arm"] for row in rows if row["metric"] == "seconds"} == {"ours"}
    assert ["WRONG" in note for note in notes] == [True, True]
    assert wrong_rows(rows) == ["suite.work case: wrong", "suite.work case: undefined"]
    assert wrong_rows([row | {"value": None} for row in rows if row["arm"] == "undefined"]) != []


def test_others_are_divided_by_the_first_side_turn_by_turn():
    turns = {"ours": itertools.count(1.0), "theirs": itertools.count(10.0, 10.0)}
    calls = {name: functools.partial(next, counter) for name, counter in turns.items()}
    rows, _ = measure(Benchmark("suite.work", "case", lambda: Sides(calls, moved=10**9)), 3)
    values = {(row["arm"], row["metric"]): row["value"] for row in rows}
    assert values["ours", "seconds"] == 3
    assert values["theirs", "over first"] == 10
    assert values["ours", "GB/s"] == pytest.approx(1 / 3)
    assert ("ours", "over first") not in values


def line_of(case, low, error=0.5):
    rows = [{"probe": case, "model": "", "arm": "gpu", "metric": "error", "value": error, "low": error, "high": error}]
    gain = {"arm": "xla", "metric": "over first", "value": low + 1, "low": low, "high": low + 2}
    rows += [rows[0] | gain] * bool(low)
    return {"key": f"{case} {low}", "probe": case, "stage": "times", "rows": rows}


def test_dispatch_reads_the_least_of_what_a_kernel_gained_and_nothing_of_a_wrong_one(tmp_path, monkeypatch):
    lines = [line_of("right", 1.5), line_of("right", 1.2), line_of("wrong", 2.0), line_of("wrong", 0.0, error=7.0)]
    lines += [{"key": "e", "environment": {"device": "A GPU"}}, line_of("died", 3.0)]
    lines += [{"key": "d", "probe": "died", "stage": "times", "failed": "status -11"}]
    for name in ("lines.jsonl", "tiny-lines.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        accelerator.write_results(file)
    monkeypatch.setattr(_dispatch, "RESULTS", tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert _dispatch.measured.__wrapped__("A GPU") == {"right": 1.2, "wrong": 0.0, "died": 0.0}
    assert _dispatch.measured.__wrapped__("another GPU") == {}

    # A run that ends while it writes leaves the results that were there.
    before = {path: path.read_text() for path in tmp_path.glob("*.json")}
    with file.open("a") as more:
        more.write(json.dumps(line_of("later", 4.0)) + "\n")
    monkeypatch.setattr(accelerator.os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        accelerator.write_results(file)
    assert {path: path.read_text() for path in tmp_path.glob("*.json")} == before


GRID, TOKENS = (58, 92), 46 * 29 + 2
"""1280 × 800 pixels are resized to 1288 × 812: 92 × 58 patches of 14 pixels, four of them a token, and two more."""


def test_flops_are_two_for_each_weight_and_token_and_four_for_each_width_and_pair():
    """Of Qwen2.5-VL-3B. Biases and norms, which are no matrix products, are 2 ‰ of the weights at most."""
    assert real_model.screenshot() == (GRID, TOKENS)
    leaves = jax.tree_util.tree_leaves_with_path(real_model.model()[1].state)
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}
    decoder = sum(size for name, size in sizes.items() if "decoder" in name and "embed" not in name)
    pairs = TOKENS * (16 + 3 * TOKENS) + TOKENS * (TOKENS + 1) // 2
    session = 2 * decoder * TOKENS + 4 * 36 * 2048 * pairs
    cells = [row.split(" | ") for row in real_model.flops_table().splitlines() if row.startswith("| session")]
    assert float(cells[0][2]) == pytest.approx(session / 1e12, abs=0.06)

    # The merger runs once for four patches; 28 of 32 blocks see windows of 64 patches.
    patches = GRID[0] * GRID[1]
    tower = sum(size for name, size in sizes.items() if "decoder" not in name)
    merger = 5120 * 5120 + 5120 * 2048
    seen = 28 * 64 + 4 * patches
    expected = 2 * patches * (tower - merger + merger / 4 + 2 * 1280 * seen)
    assert real_model.tower_flops() == pytest.approx(expected, rel=2e-3)


@pytest.mark.device
@pytest.mark.parametrize(("device", "needs"), [("H100, 80 GiB", "jax_cuda13_plugin"), ("v5e, 16 GiB", "libtpu")])
def test_a_session_s_programs_fit_their_device(device: str, needs: str):
    if importlib.util.find_spec(needs) is None:
        pytest.skip("no compiler")
    tokens, kind = real_model.screenshot()[1], real_model.DEVICES[device]
    programs = [real_model.tower(), real_model.behind(3 * tokens, tokens), real_model.behind(4 * tokens, 32, True)]
    assert all(real_model.working_bytes(kind, program) < 2 << 30 for program in programs)
