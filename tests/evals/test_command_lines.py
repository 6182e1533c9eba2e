"""A name that there is not ends a program in one plain line, which says the names that there are."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "flag", "known"),
    [
        ("evals.run", "--config=nope", "expected a TOML file"),
        pytest.param("evals.train", "--backbone=nope", "kimi_vl", marks=pytest.mark.slow),
        pytest.param("evals.certify", "--model=nope", "documents/qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("evals.bench", "--suite=nope", "operators", marks=pytest.mark.slow),
    ],
)
def test_an_unknown_name_ends_in_one_line(tmp_path, program, flag, known):
    command = [sys.executable, "-m", program, flag, f"--out={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line]
    assert len(said) == 1, done.stderr
    assert "'nope'" in said[0]
    assert known in said[0]
    assert not (tmp_path / "out").exists()
