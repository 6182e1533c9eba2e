"""Sessions whose processes are killed go on where they were saved, with the same answers."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("session_killed.py")


def run(folder: Path, kills: int, seed: int) -> tuple[int, dict[str, set[str]]]:
    """How many were killed, and everything that was answered, by step."""
    command = [sys.executable, str(PROGRAM), str(folder), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *log = done.stdout.splitlines()
    answers: dict[str, set[str]] = {}
    for line in log:
        step, _, said = line.partition(" ")
        answers.setdefault(step, set()).add(said)
    return int(first.split()[0]), answers


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 20])
def test_sessions_killed_in_the_middle_restore_with_the_same_answers(kills: int, tmp_path: Path):
    _, expected = run(tmp_path / "whole", 0, 0)
    assert all(len(said) == 1 for said in expected.values())
    died = 0
    for seed in range(20):
        deaths, answers = run(tmp_path / f"killed {seed}", min(kills - died, 3), seed)
        assert answers == expected
        died += deaths
        if died >= kills:
            break
    assert died >= kills
