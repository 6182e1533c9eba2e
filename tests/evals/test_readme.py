"""The code in the documents runs as it is printed."""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import kvpatch_jax as kvp
from evals import small_task
from evals.report import documents
from evals.results.rows import Rows
from evals.trained import CONTROL, MAIN, shipped
from tests.goldens.load import write_checkpoint

ROOT = Path(__file__).parents[2]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(blocks: list[str], name: str, **given: Any) -> dict:
    space = {"__name__": "__main__", **given}
    exec(compile("\n".join(blocks), name, "exec"), space)
    return space


def test_readme_shows_the_example():
    assert python_blocks(ROOT / "README.md")[1] == (ROOT / "docs" / "example.py").read_text("utf-8")


def test_readme_shows_cells_of_the_results():
    """The README's table is the results page's, with fewer columns: no figure stands in one of them alone."""
    table = r"^\| way of reuse .*?\n\n"
    shown, whole = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in found.group().splitlines() if line]
        for path in (ROOT / "README.md", ROOT / "docs" / "results.md")
        if (found := re.search(table, path.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    )
    columns = [whole[0].index(name) for name in shown[0]]
    assert shown == [[row[column] for column in columns] for row in whole]


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads((ROOT / "docs" / "results.json").read_text("utf-8"))


@pytest.mark.parametrize("page", documents.PAGES)
def test_what_the_pages_say_of_the_run_is_written_from_its_rows(kept, page: str):
    assert documents.block(documents.section(kept, page), ROOT / page) == (ROOT / page).read_text("utf-8")


def test_sentences_turn_round_when_the_rows_do(kept):
    """Each shortcut that fell short is said to suffice where its row says so, and the control to lose as much."""
    turned = json.loads(json.dumps(kept))
    for row in turned["rows"]:
        if row["metric"].startswith("accuracy."):
            row["value"] = 0.9
    before, after = (" ".join(documents.section(rows, "README.md").split()) for rows in (kept, turned))
    for wrong, right in (
        ("fails where the order decides", "does as well as the order's own"),
        ("is worse than none", "is no worse than none"),
        ("is not enough", "is enough"),
        ("still answer from the legend", "no longer answer from the legend"),
        ("loses less on chain", "loses no less on chain"),
        ("but only", "alone (computed anew: 0.900), and"),
    ):
        assert wrong in before
        assert right in after
        assert wrong not in after


def test_sentences_over_the_pages_marks_agree_with_the_rows(kept):
    """What is said of "images survive", of seeds and of the task's limits, beside what is generated."""
    rows = Rows(kept)
    text, results = ((ROOT / page).read_text("utf-8") for page in documents.PAGES)
    assert (
        "Questions\nabout one image survive that; questions that need both do not; a thin patch brings them back"
        in text
    )
    for kind in ("page", "legend"):
        assert abs(rows.gap("repair.visible", "blind", kind)) <= 0.01
    for kind in ("chain", "aggregate"):
        assert rows.gap("repair.visible", "blind", kind) < -0.5
        assert rows.gap("repair.visible", "patch.rank=8", kind) >= -0.01

    lines = [
        line.strip("|").split(" | ")
        for line in results.splitlines()
        if re.match(r"\| (?!backbone)\w+ \|.* → .* → ", line)
    ]
    value = lambda cell: [float(word.split()[0]) for word in cell.split(" → ")]
    models = {line[0].strip(): [value(cell) for cell in line[2:6]] for line in lines}
    seeds = [models[name] for name in ("qwen2_5_vl", "qwen2_5_vl_seed1", "qwen2_5_vl_seed2")]
    said = " ".join(text.split())
    for column, kind in ((0, "chain"), (2, "aggregate")):
        blind = [seed[column][1] for seed in seeds]
        assert f"of {kind} questions {blind[0]:.3f}, {blind[1]:.3f}, {blind[2]:.3f}, the patch" in said
    assert "the seed that loses most" in said
    assert seeds[0][0][1] == min(seed[0][1] for seed in seeds)
    assert len(models) == 7
    assert sum(model[0][1] > 0.5 for model in models.values()) == 3
    assert max(model[2][1] for model in models.values()) < 0.17
    assert small_task.SINGLE_ON_PAGE + small_task.DOUBLE_ON_PAGE == 12
    for name in (MAIN, CONTROL):
        assert json.loads((shipped(name) / "training.json").read_text())["recipe"]["auxiliary"] > 0


def test_readmes_first_lines_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The agent's loop, as it is printed, on a tiny model that was written to a directory.

    Answers of one token: longer ones take two more programs for each size of a window, and are in the sessions' tests.
    """
    import models

    monkeypatch.setattr(kvp.Session, "ask", functools.partialmethod(kvp.Session.ask, steps=1))
    monkeypatch.setattr(models, "load", functools.partial(models.load, buckets=models.Buckets(smallest=16, steps=1)))
    directory = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    words = {word: number for number, word in enumerate(["What", "changed", "since", "the", "last", "one?"], 5)}
    tokenizer = Tokenizer(WordLevel({**words, "<unknown>": 4}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(directory / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (28, 28, 3), np.uint8)
        Image.fromarray(pixels).save(f"{number}.png")
    block = python_blocks(ROOT / "README.md")[0]
    assert len(block.split("\n\n")[1].splitlines()) == 5
    space = run([block], "README.md", directory=directory, screenshots=[Path(f"{number}.png") for number in range(6)])
    with space["session"] as session:
        assert capsys.readouterr().out.count("\n") >= 6
        assert (len(session), session.stats().forwards, session.stats().recalled) == (5, 7, 1)


def test_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "README.md")[1:], "README.md")
    said = [line.split() for line in capsys.readouterr().out.splitlines() if " right " in line]
    assert len(said) == 6
    assert space["patch"].nbytes < 0.3 * space["page"].nbytes
    right = lambda column: sum(line[3] == line[column] for line in said)  # ask cell right R blind B patched P
    assert right(7) >= right(5)


@pytest.mark.slow
def test_start_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = [(ROOT / "docs" / "example.py").read_text("utf-8"), *python_blocks(ROOT / "docs" / "start.md")]
    space = run(blocks, "docs/start.md")
    assert space["both_patches"]["k"].shape[0] == 2


@pytest.mark.slow
def test_agents_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "docs" / "guides" / "agents.md"), "docs/guides/agents.md")
    assert str(space["audited"]) == str(space["answer"])
    assert space["audited"].kl < 0.1
    assert space["session"].closed


@pytest.mark.slow
def test_windows_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "docs" / "guides" / "windows.md"), "docs/guides/windows.md")
    assert len(space["window"].pieces) == 4  # the pinned one, two that stayed, the new one
    assert space["answer"].shape == (1, 1)


@pytest.mark.slow
def test_plans_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "docs" / "guides" / "plans.md"), "docs/guides/plans.md")
    assert space["executor"].ledger["ApplyPatch"].launches == 1


@pytest.mark.slow
def test_generation_page_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    space = run(python_blocks(ROOT / "docs" / "guides" / "generation.md"), "docs/guides/generation.md")
    assert space["both"].shape == (2, 4)


def test_certificates_page_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    space = run(python_blocks(ROOT / "docs" / "guides" / "certificates.md"), "docs/guides/certificates.md")
    assert space["alone"] > 0
    assert space["among"] > 0
    assert space["mixed"] > 0


OPERATORS = ROOT / "docs" / "guides" / "operators.md"


def test_operators_page_runs_as_far_as_patches_are_applied():
    """Frames, forming, applying, and what is refused; the rest of the page is read as a program."""
    before, _ = OPERATORS.read_text("utf-8").split("\n## Bytes\n")
    blocks = python_blocks(OPERATORS)
    first = len(re.findall(r"^```python\n", before, re.MULTILINE))
    assert 0 < first < len(blocks)
    space = run(blocks[:first], "docs/guides/operators.md")
    assert space["patch"].ranks == {"k": 12, "v": 12}
    compile("\n".join(blocks[first:]), "docs/guides/operators.md", "exec")


@pytest.mark.slow
def test_operators_page_runs():
    space = run(python_blocks(OPERATORS), "docs/guides/operators.md")
    assert space["kvp"].__name__ == "kvpatch_jax"


def test_commands_of_the_readme():
    text = (ROOT / "README.md").read_text("utf-8").splitlines()
    for extras, what in (("evals", "python -m evals.run"), ("evals,test", "pytest -n auto")):
        assert f"python3 -m venv .venv && .venv/bin/pip install -e '.[{extras}]' && .venv/bin/{what}" in text
