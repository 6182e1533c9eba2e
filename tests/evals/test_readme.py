"""What the README and the results say of the run is written from its rows."""

import json
import re
from pathlib import Path

import pytest

from evals import small_task
from evals.report import documents
from evals.results.rows import Rows
from evals.trained import CONTROL, MAIN, shipped

ROOT = Path(__file__).parents[2]


def test_readme_shows_cells_of_the_results():
    """The README's table is part of the results page's: no figure stands in it alone."""
    table = r"^\| way of reuse .*?\n\n"
    shown, whole = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in found.group().splitlines() if line]
        for path in (ROOT / documents.README, ROOT / documents.RESULTS)
        if (found := re.search(table, path.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    )
    columns = [whole[0].index(name) for name in shown[0]]
    lines = {row[0]: [row[column] for column in columns] for row in whole}
    assert shown == [lines[row[0]] for row in shown]
    assert len(shown) >= 8


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


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
    before, after = (" ".join(documents.section(rows, documents.RESULTS).split()) for rows in (kept, turned))
    for wrong, right in (
        ("fails where the order decides", "does as well as the order's own"),
        ("is worse than none", "is no worse than none"),
        ("is not enough", "is enough"),
        ("still answer from the legend", "no longer answer from the legend"),
        ("loses less on chain", "loses no less on chain"),
        ("but only", "alone (re-prefill: 0.900), and"),
    ):
        assert wrong in before
        assert right in after
        assert wrong not in after


def test_sentences_over_the_pages_marks_agree_with_the_rows(kept):
    """What is said of "images survive", of seeds and of the task's limits, beside what is generated."""
    rows = Rows(kept)
    text, results = ((ROOT / page).read_text("utf-8") for page in documents.PAGES)
    assert "Questions that need the bill *and* a list fail without a patch" in text
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
    said = " ".join(results.split())
    for column, kind in ((0, "chain"), (2, "aggregate")):
        blind = [seed[column][1] for seed in seeds]
        assert f"of {kind} questions {blind[0]:.3f}, {blind[1]:.3f}, {blind[2]:.3f}, the patch" in said
    assert seeds[0][0][1] == min(seed[0][1] for seed in seeds)
    assert len(models) == 7
    assert sum(model[0][1] > 0.5 for model in models.values()) == 3
    assert max(model[2][1] for model in models.values()) < 0.17
    assert small_task.SINGLE_ON_PAGE + small_task.DOUBLE_ON_PAGE == 12
    for name in (MAIN, CONTROL):
        assert json.loads((shipped(name) / "training.json").read_text())["recipe"]["auxiliary"] > 0
