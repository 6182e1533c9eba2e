"""The programs of the evaluation: help, one line for each mistake, the command of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evals.harness import program

ROOT = Path(__file__).parents[2]
PROGRAMS = ("evals.run", "evals.measure", "evals.certify", "evals.bench", "evals.train")


def run(arguments: list[str], folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("name", [PROGRAMS[0], *(pytest.param(x, marks=pytest.mark.nightly) for x in PROGRAMS[1:])])
def test_help_lists_flags_and_nothing_is_measured(name: str):
    done = run(["-m", name, "--help"])
    assert "--out" in done.stdout
    assert "loading" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "flag", "known"),
    [
        ("evals.run", "--config=nope", "expected a TOML file"),
        pytest.param("evals.train", "--backbone=nope", "kimi_vl", marks=pytest.mark.nightly),
        pytest.param("evals.certify", "--model=nope", "documents/qwen2_5_vl", marks=pytest.mark.nightly),
        pytest.param("evals.bench", "--suite=nope", "operators", marks=pytest.mark.nightly),
    ],
)
def test_an_unknown_name_ends_in_one_line(tmp_path: Path, name: str, flag: str, known: str):
    done = run(["-m", name, flag, f"--out={tmp_path / 'out'}"])
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert "'nope'" in lines[0]
    assert known in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("argument", "message"), [("--nope", "nope"), ("nope", "unexpected argument 'nope'")])
def test_an_unknown_flag_or_argument_is_named(argument: str, message: str):
    done = run(["-m", "evals.run", argument])
    assert done.returncode == 1
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named_before_anything_is_done():
    with pytest.raises(SystemExit, match=r"error: packages no_such_package are not installed; expected the extra"):
        program.start(lambda: pytest.fail("it has begun"), needs=("no_such_package",))


@pytest.mark.parametrize(
    "flags", [["--out=/somewhere", "--shard=0/2"], ["--out", "/somewhere", "--ray", "auto", "--shards=2"]]
)
def test_the_command_of_a_run_names_no_place(monkeypatch: pytest.MonkeyPatch, flags: list[str]):
    monkeypatch.setattr(sys, "argv", ["run.py", "--config=main", *flags, "--set", "n=64"])
    assert program.repeated_command("evals.run") == "python -m evals.run --config=main --set n=64"
