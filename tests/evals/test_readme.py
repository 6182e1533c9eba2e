"""What the README and the results say of the run is written from its rows."""

import json
import re
from pathlib import Path

import pytest

from evals.report import documents

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
