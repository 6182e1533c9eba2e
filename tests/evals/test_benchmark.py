"""Rows of benchmarks, their bars and tables, the files written from them, and the command line's list of benchmarks."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from evals.bench.benchmark import Benchmark, comparison_row, measured_row, median_interval, rows_table
from evals.bench.calls import entered
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.sizes import size_of

ROOT = Path(__file__).parents[2]


def test_ratios_are_of_neighbours_and_judged_by_their_sense():
    samples = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 1.0, 4.0]}
    faster = comparison_row("a", samples, at_least=1.0)
    assert (faster["value"], faster["low"], faster["high"], faster["passed"]) == (1.0, 0.5, 2.0, True)
    assert not comparison_row("a", samples, at_least=1.01)["passed"]
    shorter = comparison_row("a", {"ours": [1.0], "theirs": [4.0]}, at_most=0.25)
    assert (shorter["value"], shorter["passed"]) == (0.25, True)
    assert not comparison_row("a", {"ours": [1.0], "theirs": [3.9]}, at_most=0.25)["passed"]
    assert "passed" not in comparison_row("a", samples)
    assert comparison_row("a", {"ours": [1.0], "theirs": [4.0]}, sense="at most")["value"] == 0.25


def test_sides_are_medians_or_rates_and_one_side_alone_is_not_judged():
    samples = {"ours": [1.0, 4.0, 2.0], "theirs": [4.0, 4.0, 8.0]}
    seconds = comparison_row("a", samples)
    assert (seconds["ours"], seconds["theirs"]) == (2.0, 4.0)
    rates = comparison_row("a", samples, items=8)
    assert (rates["ours"], rates["theirs"], rates["value"]) == (4.0, 2.0, 4.0)
    alone = comparison_row("a", {"ours": [2.0]}, at_least=1.0, items=8, valid=True, size="tiny")
    assert alone == {"metric": "a", "size": "tiny", "ours": 4.0, "seconds": {"ours": [2.0]}}


def test_a_row_that_computes_something_else_never_passes():
    samples = {"ours": [1.0], "theirs": [4.0]}
    assert comparison_row("a", samples, at_least=1.0)["passed"]
    assert not comparison_row("a", samples, at_least=1.0, valid=False)["passed"]


def test_a_row_is_judged_by_its_statistic():
    values = [1.0, 3.0, 2.0]
    assert measured_row("a", values, at_most=2.0)["passed"]
    worst = measured_row("a", values, at_most=2.0, statistic=max)
    assert (worst["value"], worst["low"], worst["high"], worst["passed"]) == (3.0, 1.0, 3.0, False)
    assert measured_row("a", values, value=9.0)["value"] == 9.0
    assert measured_row("a", [0.5] * 4, statistic=statistics.fmean, arm="b")["arm"] == "b"


@pytest.mark.parametrize(("count", "skipped"), [(2, 0), (5, 0), (7, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_intervals_are_those_of_the_binomial(count: int, skipped: int):
    """Of 9 values, the second smallest and second largest hold the median with 1 - 2 (1 + 9) / 2^9 = 96 %."""
    assert median_interval([float(value) for value in range(count)]) == (skipped, count - 1 - skipped)


def test_a_table_shows_labels_sides_bars_and_how_many_rows_pass():
    samples = {"ours": [0.5, 0.5], "theirs": [1.0, 2.0]}
    rows = [
        comparison_row("put", samples, at_least=2.0, arm="disk"),
        measured_row("open", [0.3], at_most=0.25, unit=" s", arm="disk"),
        measured_row("seen", [1.0]),
    ]
    lines = rows_table(rows, ("arm",)).splitlines()
    assert lines[0] == "| metric | arm | ours | theirs | value | from … to | bar | within |"
    assert lines[2] == "| put | disk | 0.5 | 1.5 | 3× | 2 to 4 | at least 2× | yes |"
    assert lines[3] == "| open | disk |  |  | 0.3 s |  | at most 0.25 s | no |"
    assert lines[4] == "| seen |  |  |  | 1 |  |  |  |"
    assert lines[-1] == "1 of 2 rows within their bars"


def test_files_are_written_and_a_preview_says_so(tmp_path):
    benchmark = Benchmark("toy", dict, draw=lambda result, path: path.write_bytes(b"figure"))
    result = {"config": {"quick": True}, "rows": [measured_row("a", [1.0])]}
    benchmark.write(result, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "bench_toy.json").read_text()) == result
    assert "not a measurement" in (tmp_path / "new" / "bench_toy.md").read_text()
    assert (tmp_path / "new" / "bench_toy.png").read_bytes() == b"figure"


@pytest.mark.slow
def test_every_benchmark_takes_flags_that_exist():
    code = """
import inspect, json
from absl import flags
from evals.bench import __main__ as main
taken = {name: list(inspect.signature(own.run).parameters) for name, own in main.BENCHMARKS.items()}
assert all(flag.replace("_", "-") in flags.FLAGS for own in taken.values() for flag in own), taken
assert all(f"  {name} " in main.__doc__ for name in main.BENCHMARKS), main.__doc__
print(json.dumps(taken))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert set(taken) >= {"store", "kernels", "patch", "window", "sessions", "backbones", "sizes", "costs", "needs"}
    assert taken["store"] == ["repeats", "seed", "out", "quick"]


def test_what_a_call_enters_are_functions_of_ours_and_their_files():
    def call():
        assert size_of("1 MiB", "test", refused=InputError) == 1 << 20
        return json.dumps([1])

    functions, files = entered(call)
    assert 1 <= functions <= 3
    assert files == 1
    assert entered(lambda: json.dumps([1])) == (0, 0)
