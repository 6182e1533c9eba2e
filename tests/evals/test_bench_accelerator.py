"""The run on an accelerator, here with tiny shapes on a CPU: parts, restarts, report, exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from evals.bench import accelerator, accelerator_cases, accelerator_numerics, accelerator_timings

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


def test_xla_is_right_and_the_kernel_that_is_not_here_is_left_out_with_its_reason():
    rows = accelerator_numerics.numerics(True)["rows"]
    assert {row["verdict"] for row in rows if row["implementation"] == "xla"} == {"pass"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "int8", "float32"}
    refused = [row for row in rows if row["implementation"] == "gpu"]
    assert refused
    assert all(row["verdict"] == "skipped" and row["reason"] for row in refused)
    wrong = [rows[0] | {"verdict": "FAIL"}]
    assert len(accelerator.judge({"numerics": {"rows": rows}})) == 0
    assert "rotate_patch xla" in accelerator.judge({"numerics": {"rows": rows + wrong}})[0]


def test_ratios_of_two_parts_are_in_the_report():
    row = {"operation": "rotate_patch", "implementation": "gpu", "case": "a", "microseconds": 10.0}
    found = {
        "bandwidth": {"tiny": False, "rows": [row]},
        "torch": {"tiny": False, "rows": [{"operation": "rotate_patch", "case": "a", "microseconds": 15.0}]},
        "factorise": {"tiny": False, "rows": [{"case": "randomised", "microseconds": 5.0}]},
        "prefill": {"tiny": True, "skipped": "too little memory", "rows": [{"case": "b", "microseconds": 50.0}]},
    }
    text = accelerator.report(accelerator.with_comparisons(found), ["prefill: stopped"])
    assert "| rotate_patch | gpu | a | 10 | 1.5 |" in text
    assert "| randomised | 5 | 0.1 |" in text
    assert "Skipped: too little memory" in text
    assert text.endswith("- prefill: stopped\n")


def test_a_part_is_run_once_and_time_that_is_over_is_told(tmp_path, capsys):
    assert accelerator.main([f"--out={tmp_path}", "--tiny", "--part=torch", "--limit=1"]) == 1
    assert "torch: not run, the 1 seconds are over" in capsys.readouterr().out
    accelerator.run_part("torch", tmp_path, True)
    written = (tmp_path / "torch.json").stat().st_mtime_ns
    assert accelerator.main([f"--out={tmp_path}", "--tiny", "--part=torch"]) == 0
    assert (tmp_path / "torch.json").stat().st_mtime_ns == written
    assert "torch: is there already" in capsys.readouterr().out


@pytest.mark.slow
def test_every_part_is_written_by_the_one_command(whole):
    out, done = whole
    assert done.returncode == 0, done.stdout + done.stderr
    results = {name: json.loads((out / f"{name}.json").read_text()) for name in accelerator.PARTS}
    assert all(row["microseconds"] > 0 for row in results["bandwidth"]["rows"] if "skipped" not in row)
    assert [row["case"] for row in results["factorise"]["rows"]] == ["randomised", "full SVD"]
    assert "rows" in results["prefill"]
    text = (out / "accelerator.md").read_text()
    assert all(f"## {name}" in text for name in accelerator.PARTS)
    assert "Nothing went wrong." in text


def test_errors_are_units_in_the_last_place_and_nan_is_wrong():
    exact = np.array([[1.0, 0.5], [3.0, -2.0]])
    assert accelerator_numerics.units(exact, exact) == 0
    assert accelerator_numerics.units(exact + np.array([[0, 2.0**-7], [0, 0]]), exact) == 1
    assert accelerator_numerics.units(exact * np.nan, exact) == np.inf


def test_float64_answers_agree_with_the_xla_path_and_bytes_are_counted():
    case = accelerator_cases.cases(True)[1]
    given = accelerator_cases.draw(case, jax.random.key(0), "float32")
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
