"""Benchmarks at their quick sizes: every suite runs, what is timed is checked before, and a wrong side is refused."""

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from evals.bench import accelerator, backbones, batch, costs, first_steps, kernels, operators, roofline, store, window
from evals.bench.benchmark import (
    Benchmark,
    BenchOptions,
    Sides,
    ThroughPool,
    interleave,
    measure,
    median_interval,
    over_sets,
    table,
    timed,
    wrong_rows,
)
from evals.bench.shapes import tiny_config, tiny_models
from kvpatch_jax.errors import ConfigError, InputError
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


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_loop_over_ten_sizes_compiles_sixteen_programs_at_most(steps: int):
    """Everything counted: tower, embedding, prefill, placing, rotation, answers, checksums, the pool."""
    figures = first_steps.loop(steps)
    assert 0 < figures["programs"] <= 16, figures["names"]
    assert 0 < figures["padding"] < 0.5


@pytest.mark.nightly
def test_rates_are_written_where_plans_read_them(tmp_path):
    measure(next(costs.suite(QUICK._replace(out=str(tmp_path)))), 1)
    read = DeviceCosts.read(tmp_path / "device_costs.json")
    assert read.measured
    assert set(read.kinds) == {"prefill", "rotate", "copy", "patch", "fetch"}


# ------------------------------------------------------------------------------------------ the measurement itself


def sides_of(**errors):
    ran = []
    calls = {name: functools.partial(lambda name: ran.append(name) or 1.0, name) for name in errors}
    return ran, Sides(calls, lambda: errors)


def test_a_wrong_side_is_refused_before_anything_of_it_is_timed():
    ran, sides = sides_of(ours=0.5, wrong=1.5, undefined=math.nan)
    rows, notes = measure(Benchmark("suite.work", "case", lambda: sides), 3)
    assert set(ran) == {"ours"}
    assert {row["arm"] for row in rows if row["metric"] == "seconds"} == {"ours"}
    assert len(notes) == 2
    assert all("WRONG" in note for note in notes)
    assert wrong_rows(rows) == ["suite.work case: wrong", "suite.work case: undefined"]
    assert wrong_rows([row | {"value": None} for row in rows if row["arm"] == "undefined"]) != []


def test_others_are_divided_by_the_first_side_turn_by_turn():
    turns = {"ours": itertools.count(1.0), "theirs": itertools.count(10.0, 10.0)}
    calls = {name: functools.partial(next, counter) for name, counter in turns.items()}
    rows, _ = measure(Benchmark("suite.work", "case", lambda: Sides(calls, moved=10**9)), 3)
    found = {(row["arm"], row["metric"]): row["value"] for row in rows}
    assert found["ours", "seconds"] == 3
    assert found["theirs", "over first"] == 10
    assert found["ours", "GB/s"] == pytest.approx(1 / 3)
    assert ("ours", "over first") not in found


def test_measurements_alternate():
    seen = []
    calls = {name: lambda name=name: seen.append(name) or 1.0 for name in "ab"}
    assert interleave(calls, 2) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert seen == ["a", "b"] * 3
    clock, ran, prepared = itertools.count(0.0, 0.5), [], []
    prepare, tick = lambda: prepared.append(0), lambda: next(clock)
    measured = timed(lambda: ran.append(0), before=prepare, runs=3, calls=2, clock=tick)()
    # Half a second, in three runs with two calls each.
    assert (measured, len(ran), len(prepared)) == (0.5 / 6, 3, 1)


def test_an_interval_of_a_median_holds_the_values_that_the_binomial_says():
    assert median_interval([3.0, 1.0, 2.0])[:3] == (2.0, 1.0, 3.0)
    assert median_interval([float(value) for value in range(9)])[1:3] == (1, 7)


def test_a_compiled_program_keeps_every_result_and_hands_its_pool_on():
    sets = [jnp.float32(number) for number in range(3)]
    assert [float(value) for value in over_sets(lambda value: value + 1, sets)()] == [1, 2, 3]
    program = ThroughPool(lambda pool, value: pool + value, jnp.zeros(()), sets)
    program()
    assert float(program()) == 6


# --------------------------------------------------------------------------------------------------------- kernels


WRONG = {
    # Eight columns of one token are wrong, as where a row comes from another place of a tile.
    "rotate_patch": lambda right: lambda **chunk: right(**chunk).at[..., 4, :, 8:16].set(5),
    "splice": lambda right: lambda pool, **chunk: right(pool, **chunk).at[:, :, ::3, :, 8:16].set(5),
    # A slot that was not named is written.
    "splice elsewhere": lambda right: lambda pool, **chunk: right(pool, **chunk).at[-1, -1].add(1),
    "block_product": lambda right: lambda x, stack, expert, used, **_: right(x, stack, (expert + 1) % 5, used),
    "factorise": lambda right: lambda value, rank: right(value.at[..., 0].set(0), rank),
}


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_refused(monkeypatch, wrong):
    operation = wrong.partition(" ")[0]
    benchmark = next(benchmark for benchmark in kernels.suite(QUICK) if benchmark.name.startswith(operation))
    monkeypatch.setattr(kernels, operation, WRONG[wrong](getattr(kernels, operation)))
    rows, notes = measure(benchmark, 1)
    assert len(wrong_rows(rows)) == 1
    assert any("not timed" in note for note in notes)


# ----------------------------------------------------------------------------------------------------- accelerator


def run_accelerator(out: Path) -> subprocess.CompletedProcess[str]:
    folder = out / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    # Not a symbolic link, which would lose the virtual environment's packages.
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o700)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    program = ["bash", str(ROOT / "evals" / "bench" / "accelerator.sh"), "--tiny", f"--out={out}"]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.nightly
def test_the_accelerator_script_runs_and_resumes_behind_a_benchmark_that_died(tmp_path):
    # As if the evaluation, which takes minutes, had been run.
    file = tmp_path / "tiny-lines.jsonl"
    file.write_text(json.dumps({"key": "evals.run"}) + "\n")
    process = run_accelerator(tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    (written,) = tmp_path.glob("tiny-cpu-*.json")
    results = json.loads(written.read_text())
    assert (results["wrong"], results["kernels"]) == ([], {})
    assert {"splice, several heads, patched", "block_product, several heads"} <= {
        row["probe"] for row in results["rows"]
    }

    # The last benchmark died: its line says so, and the same command measures nothing of it again.
    *lines, last = file.read_text().splitlines()
    key = json.loads(last)["key"]
    failed = {"key": key, "failed": f"{key}: the process ended with status -11"}
    file.write_text("\n".join([*lines, json.dumps(failed)]) + "\n")
    process = run_accelerator(tmp_path)
    assert process.returncode == 1
    assert f"WRONG: {failed['failed']}" in process.stdout
    assert len(file.read_text().splitlines()) == len(lines) + 1


def line_of(case, low, error=0.5):
    rows = [{"probe": case, "model": "", "arm": "gpu", "metric": "error", "value": error, "low": error, "high": error}]
    rows += [rows[0] | {"arm": "xla", "metric": "over first", "value": low + 1, "low": low, "high": low + 2}] * bool(
        low
    )
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


def test_a_program_moves_what_it_reads_and_writes():
    """1 MB is added to itself three times in a loop; a row of 4 kB is cut out and another written in place."""
    text = """
%row (p: f32[256,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[256,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %cut = f32[1,1024]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,1024}
}
%body (t: (f32[256,1024])) -> (f32[256,1024]) {
  %t = (f32[256,1024]{1,0}) parameter(0)
  %e = f32[256,1024]{1,0} get-tuple-element(%t), index=0
  %sum = f32[256,1024]{1,0} add(%e, %e)
  ROOT %r = (f32[256,1024]{1,0}) tuple(%sum)
}
ENTRY %main (x: f32[256,1024], n: s32[]) -> f32[256,1024] {
  %x = f32[256,1024]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %pair = (f32[256,1024]{1,0}) tuple(%x)
  %loop = (f32[256,1024]{1,0}) while(%pair), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[256,1024]{1,0} get-tuple-element(%loop), index=0
  %one = f32[1,1024]{1,0} fusion(%y, %n), kind=kLoop, calls=%row
  ROOT %z = f32[256,1024]{1,0} dynamic-update-slice(%y, %one, %n, %n)
}
"""
    program = roofline.Program(text)
    row, number = 4096, 4
    assert program.moved(program.entry) == 3 * 3 * 256 * row + (2 * row + number) + (2 * row + 2 * number)


def test_the_accelerator_program_runs_where_little_is_installed():
    packages = ["absl", "einops", "jinja2", "matplotlib", "pandas", "safetensors", "tqdm", "xxhash"]
    absent = f"import sys; sys.modules.update(dict.fromkeys({packages}))"
    code = f"{absent}; import evals.bench.accelerator; print(*({{'kvpatch_jax', 'models'}} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout == "\n", process.stderr


# ------------------------------------------------------------------------------------------------------- backbones


@pytest.mark.nightly
def test_ours_alone_has_every_operation():
    chosen = [benchmark for benchmark in backbones.suite(QUICK) if "Qwen2ForCausalLM" in benchmark.case]
    rows, notes = zip(*(measure(benchmark, 1) for benchmark in chosen), strict=True)
    assert [side[0]["probe"] for side in rows] == [f"backbones.{name}" for name in ("prefill", "generate", "load")]
    assert all("our numbers alone" in remarks[0] for remarks in notes)


def test_an_unknown_architecture_is_refused():
    assert len(tiny_models()) > 30
    with pytest.raises(ConfigError, match="GPT2"):
        tiny_config("GPT2LMHeadModel")


def test_sides_that_compute_another_function_differ():
    assert backbones.difference(np.ones((1, 2)), 1.0001 * np.ones((1, 2))) == pytest.approx(1e-4, rel=1e-3)
    assert backbones.difference(np.ones((1, 2)), np.ones((1, 3))) == math.inf


@pytest.mark.parametrize(
    ("body", "message"), [("exit 3", "hello: got ''"), ('read line; echo \'{"error": "no"}\'', "hello: no")]
)
def test_an_interpreter_without_torch_is_refused_in_one_line(tmp_path, body, message):
    with pytest.raises(InputError, match=r"no-python.*torch and transformers"):
        backbones.TransformersWorker(str(tmp_path / "no-python"))
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    with pytest.raises(InputError, match=message):
        backbones.TransformersWorker(str(path))


@pytest.mark.nightly
@pytest.mark.skipif("KVPATCH_TORCH_PYTHON" not in os.environ, reason="no interpreter with torch and transformers")
def test_both_sides_compute_the_same():
    options = QUICK._replace(torch_python=os.environ["KVPATCH_TORCH_PYTHON"])
    rows, _ = measure(next(each for each in backbones.suite(options) if "generate Qwen2" in each.key), 1)
    assert wrong_rows(rows) == []
    assert {row["arm"] for row in rows if row["metric"] == "seconds"} == {"kvpatch_jax", "transformers"}


def test_a_word_that_no_benchmark_has_ends_in_one_line():
    command = [sys.executable, "-m", "evals.bench", "--suite=operators", "--only=nope"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 1
    assert len(process.stderr.splitlines()) == 1
    assert "nope" in process.stderr
