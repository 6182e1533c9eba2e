"""Revisits: the published table is that of its rows, baselines count what they say, and a replay's promises hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from evals.results.tables import markdown_table
from evals.traces import revisits
from evals.trained import MAIN, shipped
from models import load

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_published_rows():
    found = json.loads((DOCS / "revisits.json").read_text())
    page = (DOCS / "experiments" / "revisits.md").read_text()
    shown = page.split("<!-- revisits -->")[1].split("<!-- /revisits -->")[0]
    assert shown.strip() == markdown_table(*revisits.table(found)).strip()


def test_published_rows_lose_nothing_where_nothing_bounds_a_loss():
    found = json.loads((DOCS / "revisits.json").read_text())
    rows = {(row["way"], row["visit"]): row for row in found["rows"]}
    for visit in revisits.VISITS:
        for way in ("no prefills stored", "default"):
            assert rows[way, visit]["most"] == 0
    again = rows["default", "same trace"]
    assert (again["hits"], again["tokens"]) == (again["revisits"], 0)


def test_baselines_prefill_what_their_prefixes_do_not_have():
    visit = revisits.Visit("a", (0, 1, 2, 3, 1), ("",) * 5)
    caches: dict[str, set[tuple[int, ...]]] = {}
    rows = {row["way"]: row["tokens"] for row in revisits._baselines(visit, [1, 10, 100, 1000], 2, caches)}
    # (0) (0 1) (0 1 2) (0 2 3) (0 3 1), as a whole each time.
    assert rows["re-prefill"] == 1 + 11 + 111 + 1101 + 1011
    # The pinned image is known; what follows a chunk that left is not.
    assert rows["prefix cache, one leaves at a time"] == 1 + 10 + 100 + 1100 + 1010
    # (0) (0 1) (0 1 2) (0 1 2 3) (0 1 2 3 1): nothing leaves before there are four.
    assert rows["prefix cache, evicting 4 to 2"] == 1 + 10 + 100 + 1000 + 10

    # A cache that outlives the visit knows all of it; one that does not begins anew.
    again = {row["way"]: row["tokens"] for row in revisits._baselines(visit, [1, 10, 100, 1000], 2, caches)}
    assert again["the same, kept over visits"] == again["the same evicting 4 to 2, kept over visits"] == 0
    assert again["prefix cache, one leaves at a time"] == rows["prefix cache, one leaves at a time"]


@pytest.mark.slow
def test_a_small_replay_reuses_exactly_what_is_the_same():
    backbone: Any = load(shipped(MAIN), dtype="float32")
    found = revisits.run(backbone, images=4, window=2, steps=4)
    rows = {(row["way"], row["visit"]): row for row in found["rows"]}
    again = rows["default", "same trace"]
    assert (again["hits"], again["tokens"], again["most"]) == (8, 0, 0.0)
    for visit in revisits.VISITS:
        assert rows["certificate that learns", visit]["most"] == 0.0
