"""Histories of a chunk, the rows that are made of answers behind them, and the page that shows the rows."""

import json
from typing import Any

import numpy as np
import pytest

from evals.tolerance import bounds, document, rows
from evals.tolerance.contexts import QUICK, specs_of
from evals.tolerance.histories import ALONE, KINDS, LEAD, MEANS, OTHER, OWN, SUM, TRUTH, HistoryPiece, histories
from evals.tolerance.suite import load_backbone, records_of


def names(history: Any) -> str:
    """Writes a history as letters: capitals of its own context, small ones of another's."""
    return "".join("ABCDEFGH"[piece.place] if piece.source == OWN else "abcdefgh"[piece.place] for piece in history)


def test_histories_differ_from_the_truth_in_what_their_names_say():
    found = {kind: history for kind, history in histories(4).items() if history is not None}
    shown = {kind: names(history) for kind, history in found.items()}
    assert shown[TRUTH] == "ABCD"
    assert shown["far differ"] == "abcD"
    assert shown["farthest differs"] == "aBCD"
    assert shown["far missing"] == "D"
    assert shown["farthest missing"] == "BCD"
    assert shown["far moved"] == "BCAD"
    assert shown["ends exchanged"] == "DBCA"
    assert shown["nearest differs"] == "ABCd"
    assert shown["nearest missing"] == "ABC"
    assert shown["all differ"] == "abcd"
    assert shown[LEAD] == ""
    assert histories(4)[ALONE] is None
    assert [piece.served for piece in found["nearest canonical"]] == ["exact"] * 3 + ["canonical"]
    assert {piece.served for piece in found["all patched"]} == {"patched"}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_history_is_listed_twice(count):
    found = list(histories(count).values())
    assert len(found) == len(set(found))
    assert set(histories(count)) <= set(KINDS)
    for kinds in MEANS.values():
        assert set(kinds) & set(histories(count))


def test_nothing_is_far_behind_one_piece():
    with pytest.raises(ValueError, match="got 1 pieces in front; expected 2 or more"):
        histories(1)
    assert HistoryPiece(OTHER, 0).served == "exact"


def record(kind: str, kl: list[float], held_out: bool, form: str = "whole") -> dict[str, Any]:
    labels = {"task": "sheets", "front": 3, "held_out": held_out, "kind": kind, "form": form}
    first = 100 if held_out else 0
    return labels | {"kl": kl, "flips": [0.0] * len(kl), "cluster": [first + number for number in range(len(kl))]}


def test_rows_say_how_far_answers_are_off_and_how_many_hardly_are():
    records = [record(ALONE, [0.4, 0.2], False), record("far differ", [0.1, 0.02], False)]
    found = {(row["arm"], row["metric"]): row["value"] for row in rows.mean_rows(records)}
    assert found["far differ", "kl"] == pytest.approx(0.06)
    assert found["far differ", "within"] == 0.5
    assert found["far differ", "eta"] == pytest.approx(1 - 0.12 / 0.6)
    assert found[ALONE, "eta"] == pytest.approx(0.0)


def test_bounds_are_of_one_half_and_tried_on_the_other():
    calibration, held_out = np.linspace(0, 1, 20), [0.5, 0.99, 1.5, 2.0]
    records = [record("far differ", calibration.tolist(), False), record("far differ", held_out, True)]
    found = {row["metric"]: row["value"] for row in bounds.bound_rows(records)}
    assert 0.9 <= found["bound"] <= 1.0
    assert found["coverage"] in (0.25, 0.5)
    # Nine contexts at least are needed for nine in ten.
    assert bounds.bound_rows([record("far differ", [0.1] * 8, False), record("far differ", held_out, True)]) == []


def test_the_page_shows_the_published_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = (document.ROOT / document.PAGE).read_text()
    assert document.section(kept) in page


@pytest.mark.slow
def test_kv_behind_the_true_history_loses_nothing():
    backbone = load_backbone("qwen2_5_vl")
    spec = next(iter(specs_of("small", QUICK)))
    found = list(records_of(backbone, QUICK, spec))
    assert found[0]["kind"] == TRUTH
    assert max(found[0]["kl"]) == 0
    assert max(max(record["kl"]) for record in found) > 0.01
    # Sums of single deficits are measured beside histories.
    by_kind = {record["kind"]: record["kl"] for record in found}
    assert max(by_kind[SUM]) > 0.01
