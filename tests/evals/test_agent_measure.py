"""An agent's loop on a user's screenshots: tokens that each method computes, answers, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evals.measure import agent, job
from kvpatch_jax.errors import InputError
from tests.goldens.load import write_checkpoint

ROOT = Path(__file__).parents[2]
MODEL, SCREENSHOTS = ROOT / "evals/trained/documents/qwen2_5_vl", ROOT / "docs/pictures/screenshots"
TOKENS = [30, 30, 30, 74]
"""Of the screenshots: three of 56 × 392 pixels and one of 252 × 224, a token for 28 × 28, and one on either side."""
EXACT = 1e-9
"""Most nats between two ways to compute the same in float32."""


def request(data: Path, model: Path = MODEL, keep: int = 2) -> job.Request:
    return job.Request(str(model), str(data), keep=keep, answer_tokens=2)


def computed(windows: list[list[int]]) -> dict[str, list[int]]:
    """Counts tokens by hand: the new screenshot; what follows the longest known front; all."""
    counts: dict[str, list[int]] = {method: [] for method in agent.METHODS}
    for number, window in enumerate(windows):
        known = 0
        while any(window[: known + 1] == earlier[: known + 1] for earlier in windows[:number]) and known < len(window):
            known += 1
        counts["session"].append(TOKENS[window[-1]])
        counts["prefix cache"].append(sum(TOKENS[image] for image in window[known:]))
        counts["re-prefill"].append(sum(TOKENS[image] for image in window))
    return counts


def check(folder: Path, windows: list[list[int]], exact: int) -> None:
    """Checks agent.json: tokens of every step, and the first steps, which nothing has left, answered as re-prefill."""
    steps = json.loads((folder / "agent.json").read_text())["steps"]
    assert [step["op"] for step in steps] == ["add"] * 4 + ["recall"]
    for method, counts in computed(windows).items():
        figures = [step["methods"][method] for step in steps]
        assert [figure["computed"] for figure in figures] == counts, method
        assert all(figure["seconds"] > 0 and figure["bytes"] > 0 for figure in figures)
        certain = figures[:exact] if method == "session" else figures
        assert all(figure["kl"] < EXACT and figure["same"] for figure in certain), method


def test_the_program_on_the_shipped_model(tmp_path: Path):
    """Two screenshots after the pinned one; the fifth step recalls the one that left."""
    flags = [f"--model={MODEL}", f"--data={SCREENSHOTS}", "--keep=2", "--answer_tokens=2", f"--out={tmp_path}"]
    command = [sys.executable, "-m", "evals.measure", "--agent", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    check(tmp_path, [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 1]], exact=3)
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("pass ")]) == 10
    table = {line.split("  ")[0]: line.split() for line in lines if line.startswith(agent.METHODS)}
    assert [table[method][len(method.split())] for method in agent.METHODS] == ["194", "298", "448"]
    assert table["re-prefill"][-3:] == ["5", "of", "5"]


@pytest.mark.nightly
def test_a_prefix_cache_knows_every_earlier_window(tmp_path: Path):
    """With one screenshot after the pinned one, the recall shows an earlier window again: nothing is computed."""
    agent.measure(request(SCREENSHOTS, keep=1), None, None, tmp_path, "")
    windows = [[0], [0, 1], [0, 2], [0, 3], [0, 2]]
    assert computed(windows)["prefix cache"][-1] == 0
    check(tmp_path, windows, exact=2)


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "few").mkdir()
    for shot in sorted(SCREENSHOTS.glob("*.png"))[:3]:
        shutil.copy(shot, tmp_path / "few")
    text = write_checkpoint("qwen2", tmp_path / "text")
    for asked, message in (
        (request(tmp_path / "nowhere"), "--data: got 'nowhere', which is no file"),
        (request(tmp_path / "empty"), "--data: got 'empty' without images"),
        (request(tmp_path / "few"), "--data: got 3 screenshots; expected at least 4"),
        (request(SCREENSHOTS, text), "--model: got text, which does not see images"),
    ):
        with pytest.raises(InputError, match=message):
            agent.measure(asked, None, None, tmp_path / "out", "")
    with pytest.raises(InputError, match="nonesuch"):
        agent.measure(request(SCREENSHOTS), None, "nonesuch", tmp_path / "out", "")
    assert not (tmp_path / "out").exists()
