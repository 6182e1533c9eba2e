"""Prompts that come again, grow, slide and change their order are stored and served with no client's help."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import os

import numpy as np
import pytest
from prompts import (
    CERTIFIED,
    LEAD,
    PAGES,
    PATCHED,
    QUESTION,
    REMEMBER,
    SIZE,
    asked,
    assert_page,
    bounds,
    certificate_of,
    points,
)
from serving_sides import LAYOUT, served, sides_of

from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.store.memory import memory_of


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as sides:
        yield sides


def test_a_prompt_that_comes_again_is_exact_in_all_its_chunks(sides):
    asked(sides, "first", [0, 1, 2])
    assert sides.worker.former.counts["prefills"] == 3
    answer, report = asked(sides, "again", [0, 1, 2])
    assert (answer.count, report["exact"], report["kl"]) == (len(LEAD) + 3 * SIZE, True, 0.0)
    assert answer.request.cache_salt is None, "it may share blocks with what the engine computes"
    assert points(report) == ["leading", "restored", "restored", "restored"]
    for index in range(3):
        assert_page(answer, index, [0, 1, 2], index)
    assert not answer.orders.saves, "all of it is stored"


def test_an_exact_prefix_outlives_the_engine_and_serves_another(tmp_path):
    with sides_of(tmp_path) as sides:
        asked(sides, "first", [0, 1])
    with sides_of(tmp_path) as one, sides_of(tmp_path) as other:
        for sides, page in ((one, 2), (other, 3)):
            answer, report = asked(sides, "again", [0, 1, page])
            assert (answer.count, report["exact"]) == (len(LEAD) + 2 * SIZE, True)


def test_exact_requests_are_served_nothing_behind_other_chunks(sides):
    asked(sides, "first", [0, 1, 2])
    _, report = asked(sides, "other", [1, 2])
    assert (points(report), report["why"]) == (["leading"], "chunk 2 of 3 is not stored behind those in front of it")


def test_every_chunk_is_a_base_behind_the_same_neighbour_and_lead(sides):
    asked(sides, "first", [0, 1, 2, 3])
    asked(sides, "lone", [1, 5])
    answer, report = asked(sides, "second", [1, 2, 3], **PATCHED)
    assert (points(report), report["exact"]) == (["leading", "restored", "near", "near"], False)
    assert answer.request.cache_salt.startswith("kvpatch-")
    assert_page(answer, 0, [1, 5], 0)
    assert_page(answer, 1, [0, 1, 2, 3], 2)
    assert_page(answer, 2, [0, 1, 2, 3], 3)
    assert not answer.orders.saves or not answer.orders.saves[0].prefills, "nothing is formed behind approximate chunks"
    tokens = [*PAGES[7], *PAGES[0], *PAGES[1], *QUESTION]
    answer = served(sides, "other lead", {"segments": [5, 10, 15], **PATCHED}, tokens, tuple(range(3, 19)))
    assert answer.count == 0


def test_bases_serve_certified_requests_within_their_bounds(sides):
    for name, pages in (("first", [0, 1, 2]), ("second", [3, 1, 2]), ("lone", [1, 5])):
        asked(sides, name, pages)
    _, report = asked(sides, "uncertified", [1, 2], **CERTIFIED, save=False)
    assert points(report) == ["leading", "restored"]
    sides.scheduler.certificate = certificate_of([*bounds("near", 0.04), *bounds("mean", 0.01)])
    _, report = asked(sides, "within", [1, 2], **CERTIFIED, save=False)
    assert (points(report), report["kl"]) == (["leading", "restored", "mean"], 0.01)
    sides.scheduler.certificate = certificate_of([*bounds("near", 0.04), *bounds("mean", 0.04)])
    _, report = asked(sides, "beyond", [1, 2], **CERTIFIED, kl=0.03, save=False)
    assert points(report) == ["leading", "restored"]
    assert "is not certified within 0.03 nats" in report["why"]


def test_a_damaged_prefill_gives_way_to_the_next_best_and_is_stored_again(tmp_path):
    with sides_of(tmp_path) as sides:
        asked(sides, "first", [0, 1, 2])
        store = sides.scheduler.stores.of("default")
        prefills = sides.scheduler.stores.prefills("default", np.dtype("float32"))
        answer, _ = asked(sides, "again", [0, 1, 2])
        step = answer.orders.loads[0].payloads[2].step
        name = store.names.canonical("tiny", step.segment.id, lead=prefills.lead(step.identity))
        path = tmp_path / "store" / "data" / store.objects.index.row("SELECT file FROM objects WHERE name = ?", name)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with sides_of(tmp_path) as sides:
        memory_of(os.path.realpath(tmp_path / "store"), 1 << 30).clear()
        assert points(asked(sides, "after", [0, 1, 2])[1]) == ["leading", "restored"]
        assert points(asked(sides, "then", [0, 1, 2])[1]) == ["leading", "restored", "restored", "restored"]


# --------------------------------------------------------------------------------------------------- survivors


@pytest.mark.parametrize("options", [REMEMBER, {**REMEMBER, "reuse": "exact"}], ids=["certified", "exact"])
def test_a_sliding_window_prefills_new_chunks_alone(sides, options):
    """Each page keeps the KV that it had when it came, rotated to where it stands now."""
    asked(sides, "turn 0", [0, 1, 2], **options)
    histories = {page: ([0, 1, 2], page) for page in range(3)}
    for turn in range(1, 5):
        window = [turn, turn + 1, turn + 2]
        answer, report = asked(sides, f"turn {turn}", window, **options)
        assert points(report) == ["leading", "survivor", "survivor"], "all but the new page"
        assert (report["promise"], report["exact"], report["kl"]) == ("remember", False, 0.0)
        for index, page in enumerate(window[:2]):
            assert_page(answer, index, *histories[page])
        histories[turn + 2] = (window, 2)
    assert sides.worker.former.counts["survivors"] == len(sides.scheduler.stores.survivors) == 7


@pytest.mark.parametrize(
    ("first", "second", "ways"),
    [
        ([0, 1, 2, 3], [0, 2, 3, 4], ["restored", "survivor", "survivor"]),
        ([0, 1, 2], [1, 0, 2], ["survivor"]),
        ([0, 1, 2], [0, 5, 1, 2], ["restored"]),
        ([0, 1, 0, 2], [1, 0, 2], ["survivor"]),
        ([5, 3, 4, 3], [3, 4, 3], ["survivor", "survivor", "survivor"]),
    ],
    ids=["one has left", "another order", "inserted", "which of two has left", "twice"],
)
def test_a_chunk_survives_where_all_in_front_was_there_in_its_order(sides, first, second, ways):
    asked(sides, "first", first, **REMEMBER)
    _, report = asked(sides, "second", second, **REMEMBER)
    assert points(report) == ["leading", *ways]


@pytest.mark.parametrize("change", [{"agent": "another"}, {"salt": "another"}, {"promise": "forget"}])
def test_survivors_serve_no_one_else(sides, change):
    asked(sides, "first", [0, 1, 2], agent="one", **REMEMBER)
    _, report = asked(sides, "second", [1, 2], **{**REMEMBER, "agent": "one", **change})
    assert points(report)[:2] in ([], ["leading"])


def test_exact_requests_leave_and_get_no_survivors(sides):
    asked(sides, "first", [0, 1, 2])
    assert len(sides.scheduler.stores.survivors) == 0
    asked(sides, "second", [0, 1, 2], **REMEMBER)
    assert points(asked(sides, "third", [1, 2])[1]) == ["leading"]


def test_survivors_of_forgetting_requests_are_bounded_by_the_certificate(sides):
    sides.scheduler.certificate = certificate_of(bounds("survivor", 0.02, rank=8))
    asked(sides, "first", [0, 1, 2], **CERTIFIED)
    _, report = asked(sides, "second", [1, 2, 3], **CERTIFIED)
    assert (points(report), report["kl"]) == (["leading", "survivor", "survivor"], 0.02)
    sides.scheduler.certificate = certificate_of(bounds("survivor", 0.06, rank=8))
    assert points(asked(sides, "third", [2, 3, 4], **CERTIFIED)[1]) == ["leading"]


def test_a_chunk_prefilled_behind_approximate_ones_keeps_their_bound(sides):
    """A window that remembers promises its survivors, but not what was computed behind other approximate chunks."""
    for name, pages in (("base", [0, 1, 2]), ("lone", [1, 5])):
        asked(sides, name, pages)
    sides.scheduler.certificate = certificate_of([*bounds("near", 0.03), *bounds("near", 0.03, "remember")])
    _, report = asked(sides, "first", [1, 2, 3], **REMEMBER)
    assert (points(report), report["kl"]) == (["leading", "restored", "near"], 0.03)
    _, report = asked(sides, "second", [3, 4], **REMEMBER)
    assert (points(report), report["kl"]) == (["leading", "survivor"], 0.03), "the bound is inherited"


def test_survivors_stay_within_their_bytes(tmp_path):
    page = SIZE * LAYOUT.bytes_per_token("float32")
    with sides_of(tmp_path, survivors=2 * page) as sides:
        asked(sides, "first", [0, 1, 2, 3], **REMEMBER)
        assert (len(sides.scheduler.stores.survivors), sides.scheduler.stores.survivors.nbytes) == (2, 2 * page)
    with sides_of(tmp_path / "none", survivors=0) as sides:
        assert not asked(sides, "first", [0, 1], **REMEMBER)[0].orders.saves[0].survivors


# ------------------------------------------------------------------------------------------- salts and admission


def test_a_request_that_the_engine_has_keeps_its_salt(sides):
    """The engine's blocks are exact, and another salt would hide them."""
    for name, pages in (("first", [0, 1, 2, 3]), ("lone", [1, 5])):
        asked(sides, name, pages, **PATCHED)
    answer, report = asked(sides, "second", [1, 2], computed=16, **PATCHED)
    assert (answer.request.cache_salt, points(report)) == (None, ["leading"])
    assert report["why"] == "the engine has as much of it in its own cache"
    answer, report = asked(sides, "third", [1, 2, 3], computed=4, **PATCHED)
    assert answer.request.cache_salt is not None
    assert len(points(report)) == 4


def test_patches_are_formed_when_their_antecedent_comes_again(tmp_path):
    with sides_of(tmp_path, store_after=2) as sides:
        served(sides, "alone", {"segments": [SIZE]}, [*PAGES[1], *QUESTION], tuple(range(3, 19)))
        asked(sides, "base", [2, 1])
        assert sides.worker.former.counts["prefills"] == 2
        for times in (1, 2, 3):
            asked(sides, f"time {times}", [3, 2, 1])
            assert sides.worker.former.counts["patches"] == (times >= 2), times


def test_exact_requests_store_few_histories_of_a_chunk_until_one_comes_again(tmp_path):
    stored = []
    with sides_of(tmp_path, store_after=2) as sides:
        for number in (*range(10), 9):
            tokens = [*LEAD, *[1000 + number] * SIZE, *PAGES[0], *QUESTION]
            served(sides, f"{number}", {"segments": [4, 9, 14]}, tokens, tuple(range(3, 19)))
            stored.append(sides.worker.former.counts["prefills"])
    assert stored[-2:] == [10 + 8, 10 + 9], "each neighbour, the page behind eight of them, and where it came again"


def test_nothing_is_kept_of_requests_that_ask_for_that(sides):
    assert asked(sides, "first", [0, 1], save=False, **REMEMBER)[0].orders == StepCommands()
