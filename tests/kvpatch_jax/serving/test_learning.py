"""Requests that are prefilled exactly, so that what they leave can be stored: once for each chunk that comes again."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import pytest
from serving_sides import sides_of
from test_natural_traffic import LEAD, REMEMBER, SIZE, asked, certificate_of, points

APPROXIMATE = {"policy": "approximate"}
NEAR = [("near", 0, behind, "forget", 0.01) for behind in range(8)]
FRONT = [2, 0, 1]
"""Pages; another prompt has page 0 in front of page 1 too, but behind page 2."""


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, patch_after=2, survivor_bytes=0) as made:
        made.scheduler.certificate = certificate_of(NEAR)
        asked(made, "first", FRONT)
        asked(made, "second", [3, 0, 1])
        yield made


def test_a_chunk_that_comes_again_behind_an_approximate_one_is_learnt_once(sides):
    whole, known = [3, 0, 1, 5], ["leading", "restored", "restored"]
    found, told = asked(sides, "once", whole, **APPROXIMATE)
    assert (points(told), told["kl"]) == ([*known, "near"], 0.01)
    assert not found.orders.saves, "behind an approximate chunk"

    found, told = asked(sides, "twice", whole, **APPROXIMATE)
    assert (points(told), told["exact"]) == (known, True)
    assert told["why"] == "chunk 5 of 5 is prefilled behind exact ones, to be stored"
    assert found.request.cache_salt is None
    assert found.orders.saves[0].prefills == (3, 4)

    found, told = asked(sides, "again", whole, **APPROXIMATE)
    assert (found.count, told["exact"], told["why"]) == (len(LEAD) + 4 * SIZE, True, "")
    # And behind other fronts it is near, from now on.
    found, told = asked(sides, "other", [2, 0, 1, 5], **APPROXIMATE)
    assert (points(told)[-1], told["kl"], told["why"]) == ("near", 0.01, "")


def test_chunks_that_do_not_come_again_teach_nothing(sides):
    for page in (4, 5, 6, 7):
        found, told = asked(sides, f"with {page}", [3, 0, 1, page], **APPROXIMATE)
        assert points(told) == ["leading", "restored", "restored", "near"], page
        assert not found.orders.saves


@pytest.mark.parametrize("given", [{**APPROXIMATE, "save": False}, {"policy": "blind"}])
def test_requests_that_may_teach_nothing_are_served_as_planned(sides, given):
    for time in range(3):
        _, told = asked(sides, f"{time}", [3, 0, 1, 5], **given)
        assert "to be stored" not in told["why"]
        assert points(told)[-1] == "near"


def test_a_window_that_remembers_goes_on_with_what_it_has(tmp_path):
    with sides_of(tmp_path, patch_after=2) as sides:
        sides.scheduler.certificate = certificate_of([*NEAR, *(("near", 0, n, "remember", 0.01) for n in range(8))])
        asked(sides, "first", FRONT)
        asked(sides, "second", [3, 0, 1])
        for time in range(3):
            _, told = asked(sides, f"{time}", [3, 0, 1, 5], **REMEMBER)
            assert "to be stored" not in told["why"]
