"""The run on an accelerator, here with tiny shapes on a CPU: rows, faults, restarts, report, exit status."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.bench import accelerator, accelerator_numerics, accelerator_tasks, accelerator_timings
from evals.bench.device_timing import OverSets, ThroughPool, seconds_of
from pallas_kernels import rotate_patch, splice

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole tiny run by the one command, as a newcomer would give it."""
    out = tmp_path_factory.mktemp("accelerator")
    folder = out / "bin"
    folder.mkdir()
    # Not a symbolic link, which would lose the virtual environment's packages.
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o700)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    command = [str(ROOT / "evals" / "bench" / "accelerator.sh"), str(out / "found"), "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return out / "found", done


@pytest.mark.slow
def test_xla_is_right_and_a_missing_kernel_is_skipped_with_its_reason():
    rows = [accelerator_tasks.make_row(task) for task in accelerator_numerics.numerics(True, "xla")]
    assert {row["verdict"] for row in rows} == {"pass"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32", *accelerator_numerics.NARROW}
    assert {row["operation"] for row in rows} >= {
        "rotate_patch",
        "splice",
        "splice, scattered",
        "block_product",
        "factorise",
    }
    refused = [accelerator_tasks.make_row(task) for task in accelerator_numerics.scattered(True, "kernel")]
    assert refused
    assert all("the platform is 'cpu'" in row["skipped"] for row in refused)
    wrong = [{"key": "rotate_patch xla"} | rows[0] | {"verdict": "FAIL"}, {"key": "b", "exception": "a\nValueError: c"}]
    assert accelerator.judge({"numerics": {"rows": rows}}) == []
    judged = accelerator.judge({"numerics": {"rows": rows + wrong}})
    assert judged == ["numerics: rotate_patch xla: FAIL", "numerics: b: ValueError: c"]


@pytest.mark.slow
def test_a_misplaced_row_is_named(monkeypatch):
    made = [accelerator_tasks.make_row(task) for task in list(accelerator_numerics.scattered(True, "xla"))[:2]]
    assert [row["verdict"] for row in made] == ["pass", "pass"]
    right = accelerator_numerics.splice
    torn = lambda pool, *arguments, **plan: right(pool, *arguments, **plan).at[:, :, 60, :, 8:16].set(5)
    monkeypatch.setattr(accelerator_numerics, "splice", torn)
    made = [accelerator_tasks.make_row(task) for task in list(accelerator_numerics.scattered(True, "xla"))[:2]]
    assert [row["verdict"] for row in made] == ["FAIL", "FAIL"]
    assert made[0]["first wrong"] == "token 3 column 8: 5.0; 8 in all"


@pytest.mark.slow
def test_products_of_blocks_are_held_against_float64(monkeypatch):
    made = lambda which: [
        accelerator_tasks.make_row(task)
        for task in accelerator_numerics.numerics(True, which)
        if task.key.startswith("block_product")
    ]
    assert [row["verdict"] for row in made("xla")] == ["pass", "pass"]
    assert all("the platform is 'cpu'" in row["skipped"] for row in made("kernel"))
    right = accelerator_numerics.block_product
    wrong = lambda x, stack, which, used, **plan: right(x, stack, which.at[5].set((which[5] + 1) % 5), used, **plan)
    monkeypatch.setattr(accelerator_numerics, "block_product", wrong)
    assert [row["verdict"] for row in made("xla")] == ["FAIL", "FAIL"]


def test_task_names_are_unique_and_no_task_is_run_twice():
    for which in ("kernel", "xla"):
        keys = [task.key for task in accelerator_numerics.numerics(False, which)]
        assert len(keys) == len(set(keys))
        scattered = {task.key for task in accelerator_numerics.scattered(False, which)}
        assert scattered.isdisjoint(keys) is (which == "kernel")
        timed = [task.key for task in accelerator_timings.bandwidth(False, which)]
        assert len(timed) == len(set(timed))


FAULTY = """
import os, sys, time
from pathlib import Path
from evals.bench import accelerator_tasks
from evals.bench.accelerator_tasks import Task
NOTES = []
def fault(): os._exit(7)
def hang(): time.sleep(600)
def wrong(): raise ArithmeticError("one row only")
def tasks(tiny, which):
    for key, run in (("a", dict), ("b", fault), ("c", hang), ("d", wrong), ("e", dict)):
        yield Task(key, run)
module = sys.modules["evals.bench.faulty"] = sys.modules["__main__"]
accelerator_tasks.PARTS["numerics"] = accelerator_tasks.BenchPart("faulty", "tasks")
accelerator_tasks.work("numerics", Path(sys.argv[1]), True)
"""


class LeapingClock:
    """For the task that hangs an hour passes between two looks at the clock; for the others, real time."""

    def __init__(self, out: Path) -> None:
        self.out, self.ahead, self.real = out, 0.0, time.monotonic

    def monotonic(self) -> float:
        if accelerator_tasks.open_task(accelerator_tasks.read(self.out), "numerics") == "c":
            self.ahead += 3600
        return self.real() + self.ahead


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """The part "numerics" with one task that ends its process, one that hangs and one that raises."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start = subprocess.Popen
    command = [sys.executable, str(tmp_path / "faulty.py"), str(tmp_path / "out")]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(command, **options))
    part = accelerator.PARTS["numerics"]
    monkeypatch.setitem(accelerator.PARTS, "numerics", part._replace(limit=600.0))
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(time, "monotonic", LeapingClock(out).monotonic)
    return out


@pytest.mark.slow
def test_a_fault_a_hang_and_an_exception_cost_one_row_each(faulty, capsys):
    assert accelerator.main([f"--out={faulty}", "--part=numerics", "--limit=1e9"]) == 1
    rows = accelerator.gather(accelerator_tasks.read(faulty))["numerics"]
    assert [row["key"] for row in rows["rows"]] == ["a", "b", "c", "d", "e"]
    assert rows["finished"]
    assert set(rows["rows"][0]) == set(rows["rows"][4]) == {"key"}
    assert rows["rows"][1]["exception"] == "the process ended with status 7"
    assert rows["rows"][2]["exception"] == "no new row for 600 seconds, killed"
    assert 'raise ArithmeticError("one row only")' in rows["rows"][3]["exception"]
    printed = capsys.readouterr().out
    assert "- numerics: d: ArithmeticError: one row only" in printed
    before = (faulty / "rows.jsonl").read_bytes()
    assert accelerator.main([f"--out={faulty}", "--part=numerics", "--limit=1e9"]) == 1
    assert (faulty / "rows.jsonl").read_bytes() == before
    assert "numerics: is there already" in capsys.readouterr().out


def test_a_run_out_of_time_loses_no_row_and_the_next_run_resumes(faulty, capsys):
    begin = time.monotonic()
    assert accelerator.run_part("numerics", faulty, True, begin) == (
        "numerics: out of time; the same command resumes from here"
    )
    assert not accelerator_tasks.finished_keys(accelerator_tasks.read(faulty), "numerics")
    for key in "abc":
        accelerator_tasks.append(faulty, {"part": "numerics", "key": key})
    with (faulty / "rows.jsonl").open("a") as file:
        file.write('{"part": "numerics", "ke')  # killed while writing
    assert accelerator.main([f"--out={faulty}", "--part=numerics"]) == 1
    rows = accelerator.gather(accelerator_tasks.read(faulty))["numerics"]["rows"]
    assert [row["key"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert accelerator.main([f"--out={faulty}", "--part=torch", "--limit=1"]) == 1
    assert "torch: not run, the 1 seconds are over" in capsys.readouterr().out


def test_ratios_of_two_parts_are_in_the_report():
    row = {"operation": "rotate_patch", "implementation": "gpu", "case": "a", "microseconds": 10.0}
    found = {
        "bandwidth": {"tiny": False, "rows": [row, {"key": "b", "skipped": "too narrow"}]},
        "bandwidth_xla": {"tiny": False, "rows": [row | {"microseconds": 20.0}]},
        "torch": {"tiny": False, "rows": [row | {"microseconds": 15.0}]},
        "factorise": {"tiny": False, "rows": [{"case": "randomised", "microseconds": 5.0}]},
    }
    text = accelerator.report(accelerator.with_comparisons(found), ["torch: stopped"])
    assert "| rotate_patch | gpu | a | 10 | 2 | 1.5 |  |" in text
    assert "| randomised | 5 |" in text
    assert "too narrow" in text
    assert text.endswith("- torch: stopped\n")


@pytest.mark.slow
def test_every_part_is_written_by_the_one_command(whole):
    out, done = whole
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results.pop("wrong") == []
    assert list(results) == list(accelerator.PARTS)
    assert all(result["finished"] and result["rows"] for result in results.values())
    assert all(row["microseconds"] > 0 for row in results["bandwidth_xla"]["rows"])
    assert all("skipped" in row for row in results["bandwidth"]["rows"])
    assert [row["case"] for row in results["factorise"]["rows"]] == ["randomised", "full SVD"]
    text = (out / "accelerator.md").read_text()
    assert all(f"## {name}" in text for name in accelerator.PARTS)
    assert "Nothing went wrong." in text


def test_errors_are_units_in_the_last_place_and_nan_is_wrong():
    exact = np.array([[1.0, 0.5], [3.0, -2.0]])
    assert accelerator_numerics.units(exact, exact) == 0
    assert accelerator_numerics.units(exact + np.array([[0, 2.0**-7], [0, 0]]), exact) == 1
    assert accelerator_numerics.units(exact * np.nan, exact) == np.inf


@pytest.mark.slow
def test_float64_answers_agree_with_the_xla_path_and_bytes_are_counted():
    case = accelerator_tasks.cases(True)[1]
    given = accelerator_tasks.draw(case, jax.random.key(0), "float32")
    found = accelerator_timings.separate(given, case.shape.layout, "xla")
    exact = accelerator_numerics.expected(given, [0, 1], case.shape.layout)
    np.testing.assert_allclose(found, exact, atol=2e-5)
    np.testing.assert_allclose(accelerator_timings.unfused(given, case.shape.layout), exact, atol=2e-5)
    x, u, v, tables = 2 * 12 * 2 * 16, 2 * 12 * 4, 2 * 4 * 32, 12 * 8
    assert case.sizes == (2, 12, 2, 16)
    assert case.rank == 4
    bare = case._replace(rank=0)
    assert accelerator_timings.moved_bytes(bare) == 2 * 2 * x + 2 * tables * 4
    assert accelerator_timings.moved_bytes(case) == 2 * 2 * x + 2 * (u + v) + 2 * tables * 4


@pytest.mark.parametrize("operation", ["rotate_patch", "splice"])
def test_a_timed_program_is_handed_its_inputs_and_makes_every_result(operation: str):
    """XLA folds what a program closes over, and leaves out what nobody asks for: such a timing is of nothing."""
    # One layer: a loop over several counts as one turn in the compiler's analysis.
    shape = accelerator_tasks.SMALL[0]._replace(leading=(1,))
    case, count = accelerator_tasks.KernelCase(shape, shape.tokens, 4), 3
    sets = [accelerator_tasks.draw(case, key) for key in jax.random.split(jax.random.key(0), count)]
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    if operation == "rotate_patch":
        program = OverSets(lambda chunk: rotate_patch(**chunk, layout=shape.layout), sets)
        compiled = program.jitted.lower(program.sets).compile()
        found, results = program(), size([chunk["x"] for chunk in sets])
        assert not bool((found[0] == found[1]).all())
    else:
        first = jnp.arange(shape.tokens, dtype=jnp.int32)
        placed = [chunk | {"slots": first + index * shape.tokens} for index, chunk in enumerate(sets)]
        pool = jnp.ones((1, count * shape.tokens, 1, shape.heads, shape.width), jnp.bfloat16)
        program = ThroughPool(
            lambda pool, chunk: splice(pool, **chunk, layout=shape.layout), lambda: jnp.ones_like(pool), placed
        )
        compiled, results = program.jitted.lower(pool, program.sets).compile(), pool.nbytes
        flat = program().reshape(1, -1, shape.heads, shape.width)
        assert all(not bool((flat[:, chunk["slots"]] == 1).all()) for chunk in placed)
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None
    assert costs is not None
    assert memory.argument_size_in_bytes >= size(program.sets)
    assert memory.output_size_in_bytes >= results
    assert costs["flops"] >= 2 * case.rank * sum(chunk["x"].size for chunk in sets)


def test_a_program_is_queued_several_times_and_its_seconds_are_of_one_call():
    runs = []
    taken = seconds_of(lambda: runs.append(0) or jnp.zeros(3), calls=10, repeats=3)
    assert len(taken) == 3
    assert len(runs) == 4 * 5
    assert all(0 < seconds < 0.01 for seconds in taken)
