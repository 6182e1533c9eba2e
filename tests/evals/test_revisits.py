"""Revisits: visits are what their names say, baselines count what they say, a quick run's promises hold, and the page
shows its rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.harness.tables import markdown_table
from evals.revisits import document
from evals.revisits.baselines import PLACEHOLDER_TOKENS, baselines
from evals.revisits.contents import small_contents
from evals.revisits.plan import FULL, QUICK, RevisitModel, models, parts
from evals.revisits.rows import OTHER, RevisitRows, rows_of
from evals.revisits.served_visit import POINTS
from evals.revisits.suite import load_backbone, run
from evals.revisits.visits import CONTEXTS, FIRST, FORK, PIECES, SAME, SHUFFLED, VISITS, Visit, draw_visits
from evals.revisits.ways import (
    BATCHED,
    DEFAULT,
    KEPT_OVER_VISITS,
    NO_STORE,
    ONE_BY_ONE,
    PLACEHOLDER,
    REPREFILL,
    STORED_WAYS,
    UNBOUNDED,
)
from evals.small_task import VOCABULARY
from evals.trained import MAIN
from kvpatch_jax.errors import InputError


def flops(tokens: int, behind: int) -> int:
    """FLOPs that say what they are of."""
    return tokens * (1000 + behind)


# ------------------------------------------------------------------------------------------------------ visits


@pytest.mark.parametrize(("contexts", "window", "revisits"), [(2, 4, 8), (4, 8, 16), (8, 16, 16)])
def test_nothing_is_revisited_while_it_is_in_the_window(contexts, window, revisits):
    for seed in range(5):
        for visit in draw_visits(contexts, window, revisits, seed):
            assert len(visit.pieces) == contexts * PIECES + revisits
            assert set(visit.pieces[: contexts * PIECES]) == set(range(contexts * PIECES))
            for step, piece in enumerate(visit.pieces):
                assert piece not in visit.pieces[max(step - window, 0) : step]


def test_visits_differ_as_their_names_say():
    visits = {visit.name: visit for visit in draw_visits(4, 8, 16, 0)}
    assert tuple(visits) == VISITS
    assert visits[SAME].pieces == visits[FIRST].pieces
    assert visits[CONTEXTS].pieces != visits[FIRST].pieces
    # Within a context nothing changes.
    for start in range(0, 32, PIECES):
        first = visits[CONTEXTS].pieces[start]
        assert visits[CONTEXTS].pieces[start : start + PIECES] == tuple(range(first, first + PIECES))
    together = sum(b == a + 1 for a, b in zip(visits[SHUFFLED].pieces, visits[SHUFFLED].pieces[1:], strict=False))
    assert together < 12

    # The branch goes back to what its parent goes back to.
    forked = visits[FORK].forked
    assert visits[FORK].pieces[:forked] == visits[FIRST].pieces[:forked]
    assert visits[FORK].pieces[forked:] != visits[FIRST].pieces[forked:]


def test_a_window_that_holds_everything_is_refused():
    with pytest.raises(ValueError, match="got 1 of 4 pieces; expected more pieces"):
        draw_visits(1, 4, 4, 0)
    with pytest.raises(ValueError, match="got 3; expected a multiple of 4"):
        draw_visits(2, 4, 3, 0)


# --------------------------------------------------------------------------------------------------- baselines


def test_baselines_prefill_what_their_prefixes_do_not_have():
    visit, caches, tokens = Visit("a", (0, 1, 2, 0)), dict[str, set[tuple[str, ...]]](), [10, 100, 1000]
    work = {way: found.tokens for way, found in baselines(visit, tokens, 4, 2, flops, caches).items()}
    # (0) (0 1) (1 2) (2 0), as a whole each time.
    assert work[REPREFILL] == 10 + 110 + 1100 + 1010
    assert work[ONE_BY_ONE + UNBOUNDED] == 10 + 100 + 1100 + 1010
    # (0) (0 1) (0 1 2) (0 1 2 0): nothing leaves before there are four.
    assert work[BATCHED + UNBOUNDED] == 10 + 100 + 1000 + 10
    # (0) (0 1) (… 1 2) (… … 2 0): what follows a placeholder is prefilled again, the one before is known.
    assert work[PLACEHOLDER] == 10 + 100 + (PLACEHOLDER_TOKENS + 1100) + (PLACEHOLDER_TOKENS + 1010)

    # A cache that outlives the visit knows all of it; one that does not begins anew.
    again = {way: found.tokens for way, found in baselines(visit, tokens, 4, 2, flops, caches).items()}
    assert again[ONE_BY_ONE + KEPT_OVER_VISITS] == again[BATCHED + KEPT_OVER_VISITS] == 0
    assert again[ONE_BY_ONE + UNBOUNDED] == work[ONE_BY_ONE + UNBOUNDED]


def test_baselines_count_flops_behind_the_lead_and_the_branch_alone():
    whole = baselines(Visit("a", (0, 1)), [10, 100], 4, 2, flops, {})
    assert whole[REPREFILL].flops == 10 * 1004 + 10 * 1004 + 100 * 1014
    forked = baselines(Visit("a", (0, 1), forked=1), [10, 100], 4, 2, flops, {})
    assert forked[REPREFILL].tokens == 110
    # What the parent computed is in the branch's cache.
    assert forked[ONE_BY_ONE + UNBOUNDED].tokens == 100


# -------------------------------------------------------------------------------------------------- contents


@pytest.fixture(scope="module")
def backbone() -> Any:
    return load_backbone(MAIN)


@pytest.mark.slow
def test_questions_are_of_what_stands_together_at_the_end(backbone):
    contents, rng = small_contents(backbone, 2, 0), np.random.default_rng(0)
    words = {number: contents.question(rng, shown) for number, shown in enumerate([(4, 0, 1, 3), (0, 4, 3), (0, 1)])}
    asks = {0: ("fill?", "stripe?"), 1: ("glyph?",), 2: ("fill?", "stripe?")}
    for number, question in words.items():
        assert VOCABULARY.names[question.ids[0]] in asks[number]
        assert question.tokens == 2


def test_all_shipped_models_have_parts():
    listed = models()
    assert len({(model.name, model.task) for model in listed}) == len(listed)
    assert [model.task for model in listed[:5]] == ["small", "sheets", "documents", "prose", "code"]
    assert all(list(parts(FULL, model)) for model in listed)
    for part in parts(FULL, listed[0]):
        assert part.contexts * PIECES == 2 * part.window
    assert list(parts(QUICK, RevisitModel("other", "small", False))) == []


# ------------------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("revisits")


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    return run(folder, [MAIN], plan=QUICK)


@pytest.mark.slow
def test_a_quick_run_loses_nothing_where_nothing_is_approximate(found):
    rows = RevisitRows(found)
    for visit in VISITS:
        row = rows.get("small", 2, DEFAULT, visit)
        assert row is not None
        assert row["largest kl"] == 0

    again = rows.get("small", 2, DEFAULT, SAME)
    assert again is not None
    assert again["hits"] == again["restored"] == again["revisits"] == again["steps"] == 8
    assert (again["forwards"], again["tokens"], again["written"]) == (0, 0, 0)
    assert again["read"] > 0
    truth = rows.get("small", 2, NO_STORE, SAME)
    assert truth is not None
    assert (truth["hits"], truth["forwards"]) == (0, 8)
    assert truth["accuracy"] == again["accuracy"]


@pytest.mark.slow
def test_what_is_run_agrees_with_what_is_counted(found):
    rows = RevisitRows(found)
    for visit in (FIRST, SHUFFLED):
        truth, reprefill = rows.get("small", 2, NO_STORE, visit), rows.get("small", 2, REPREFILL, visit)
        batched, one = rows.get("small", 2, BATCHED, visit), rows.get("small", 2, ONE_BY_ONE, visit)
        assert truth is not None
        assert reprefill is not None
        assert batched is not None
        assert one is not None
        assert truth["tokens"] < batched["tokens"] < one["tokens"] <= reprefill["tokens"]
        # A session that forgets prefills its window again whenever a chunk leaves; a cache may know the prompt.
        known = rows.get("small", 2, ONE_BY_ONE + UNBOUNDED, visit)
        assert known is not None
        assert known["tokens"] <= one["tokens"]
        assert (one["counted"], known["counted"]) == (False, True)


@pytest.mark.slow
def test_hits_are_told_apart_and_add_up(found):
    for row in found["rows"]:
        if row["way"] in STORED_WAYS:
            assert row["hits"] == sum(row[point] for point in POINTS)
            assert row["hits"] + row["forwards"] >= row["steps"]
            assert row["other"] == 0


def test_models_and_windows_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(InputError, match="--models: got \\['nope'\\]; expected all, or some of qwen2_5_vl"):
        run(tmp_path / "out", ["nope"], plan=QUICK)
    with pytest.raises(InputError, match="--windows: got \\[3\\]; expected some of \\[2\\]"):
        run(tmp_path / "out", [MAIN], (3,), QUICK)
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------- rows


def record(visit: str, trace: int, kl: list[float], hits: int) -> dict[str, Any]:
    labels = {"model": "m", "task": "small", "window": 4, "way": DEFAULT, "visit": visit, "trace": trace}
    counts = {"steps": len(kl), "revisits": len(kl), "hits": hits}
    cluster = [1000 * trace + step // 2 for step in range(len(kl))]
    answers = {"kl": kl, "flips": [0.0] * len(kl), "right": [1.0, None] * (len(kl) // 2), "cluster": cluster}
    return labels | answers | {"counts": counts, "points": {"near": hits}}


def test_rows_sum_counts_and_average_answers_over_traces():
    finished = [
        {"records": [record(SHUFFLED, 0, [0.0, 0.1, 0.0, 0.1], 3)]},
        {"records": [record(SHUFFLED, 1, [0.02] * 4, 1), record(FORK, 1, [0.02] * 2, 2)]},
    ]
    rows = {row["visit"]: row for row in rows_of(finished)}
    assert (rows[SHUFFLED]["traces"], rows[SHUFFLED]["hits"], rows[SHUFFLED]["near"]) == (2, 4, 4)
    assert rows[SHUFFLED]["kl"] == pytest.approx(0.035)
    assert rows[SHUFFLED]["within"] == 0.75
    assert rows[SHUFFLED]["largest kl"] == 0.1
    assert rows[SHUFFLED]["kl low"] <= 0.035 <= rows[SHUFFLED]["kl high"]
    assert rows[SHUFFLED]["answers"] == 4
    assert rows[OTHER]["hits"] == 6
    assert (rows[OTHER]["steps"], rows[OTHER]["traces"]) == (10, 2)


# -------------------------------------------------------------------------------------------------------- page


@pytest.mark.slow
def test_the_page_shows_the_published_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = (document.ROOT / document.PAGE).read_text()
    shown = page.split("<!-- revisits -->")[1].split("<!-- /revisits -->")[0]
    assert shown.strip() == document.section(kept).strip()
    title, table = document.tables(kept)[0]
    assert title in page
    assert markdown_table(*table) in page


def test_published_rows_lose_nothing_where_nothing_bounds_a_loss():
    rows = RevisitRows(json.loads((document.ROOT / document.KEPT).read_text()))
    for window in rows.windows:
        for task in ("small", "sheets", "documents"):
            again = rows.get(task, window, DEFAULT, SAME)
            if again is not None:
                assert again["largest kl"] == 0
                assert again["hits"] == again["revisits"]
                assert not again.get("tokens", 0)
