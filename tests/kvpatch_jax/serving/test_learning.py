"""Requests are prefilled exactly once, so that a chunk that comes again is stored, within what a tenant has saved."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import pytest
from prompts import CERTIFIED, LEAD, REMEMBER, SIZE, asked, bounds, certificate_of, points
from serving_sides import sides_of

from kvpatch_jax.serving.vllm import admission

KNOWN = ["leading", "restored", "restored"]


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, store_after=2, survivors=0) as sides:
        sides.scheduler.certificate = certificate_of([*bounds("near", 0.01), *bounds("near", 0.01, "remember")])
        asked(sides, "first", [2, 0, 1])
        asked(sides, "second", [3, 0, 1])
        asked(sides, "met", [5])
        yield sides


def test_a_chunk_met_before_behind_an_approximate_one_is_learnt_once(sides):
    answer, report = asked(sides, "miss", [3, 0, 1, 5], **CERTIFIED)
    assert (points(report), report["exact"]) == (KNOWN, True)
    assert report["why"] == "chunk 5 of 5 is prefilled behind exact ones, to be stored"
    assert answer.request.cache_salt is None
    answer, report = asked(sides, "again", [3, 0, 1, 5], **CERTIFIED)
    assert (answer.count, report["exact"], report["why"]) == (len(LEAD) + 4 * SIZE, True, "")
    # It is near behind other chunks from now on.
    _, report = asked(sides, "other", [2, 0, 1, 5], **CERTIFIED)
    assert (points(report)[-1], report["kl"], report["why"]) == ("near", 0.01, "")


def test_a_chunk_that_is_met_for_the_first_time_is_not_learnt(sides):
    for page in (4, 6, 7):
        answer, report = asked(sides, f"with {page}", [3, 0, 1, page], **CERTIFIED)
        assert points(report) == [*KNOWN, "near"], page
        assert not answer.orders.saves


def test_learning_costs_no_more_than_was_saved_and_the_prompts_in_advance(sides, monkeypatch):
    """Each request would prefill three pages for a pair that does not come again; the third one is not allowed to."""
    monkeypatch.setattr(admission, "PROMPTS_IN_ADVANCE", 1)
    asked(sides, "base", [2, 0, 1, 4, 6])
    learnt = []
    for front, last in ((3, 5), (5, 7), (7, 3)):
        asked(sides, f"behind {front}", [front, 0])
        asked(sides, f"met {last}", [last])
        _, report = asked(sides, f"{last}", [front, 0, 1, 4, 6, last], **CERTIFIED)
        learnt.append("to be stored" in report["why"])
    assert learnt == [True, True, False]


@pytest.mark.parametrize("options", [{**CERTIFIED, "save": False}, {"reuse": "patched"}, REMEMBER])
def test_other_requests_are_served_as_planned(sides, options):
    for time in range(3):
        _, report = asked(sides, f"{time}", [3, 0, 1, 5], **options)
        assert "to be stored" not in report["why"]
