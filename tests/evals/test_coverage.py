"""The rows that the page of coverage names, against those that are kept."""

import json
from pathlib import Path

import pytest

from evals.report import coverage

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("suite", ["engine", "documents", "sheets"])
def test_every_row_that_the_page_names_is_there(suite: str):
    file = "tests/serving/results.json" if suite == "engine" else f"docs/{suite}-results.json"
    found = json.loads((ROOT / file).read_text("utf-8"))
    rows = coverage.of_the_engine(found) if suite == "engine" else found["rows"]
    assert coverage.names(suite)
    assert coverage.missing(suite, rows) == []
