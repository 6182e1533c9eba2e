"""Chunks and patches form from traffic, and serve the next prompts with the rows that their prefills left.

Prompts come again, grow, slide and change their order, with no client's help.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from serving_sides import LAYOUT, report_of, rows_of_kv, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.core import EngineKV
from kvpatch_jax.store.memory import memory_of
from tests.shared.certificates import certificate

LEAD, SIZE = (901, 902, 903, 904), 5
PAGES = [tuple(range(100 * page, 100 * page + SIZE)) for page in range(1, 9)]
QUESTION = (7, 8)
BLOCKS = tuple(range(3, 19))
REMEMBER = {"reuse": "certified", "promise": "remember"}
CERTIFIED = {"reuse": "certified"}
PATCHED = {"reuse": "patched"}


def tokens_of(pages):
    return [*LEAD, *(token for page in pages for token in PAGES[page])]


def asked(sides, name, pages, computed=0, salt=None, **options):
    """Sends a prompt as agents do, a lead, some pages and a question; returns the answer and its report."""
    ends = [len(LEAD) + SIZE * count for count in range(len(pages) + 1)]
    tokens = [*tokens_of(pages), *QUESTION]
    answer = served(sides, name, {"segments": ends, **options}, tokens, BLOCKS, computed, salt=salt)
    assert not answer.failed
    return answer, report_of(sides, answer)


def assert_page(answer, index, pages, place):
    """Asserts that a page of an answer has the rows that a prefill of these pages left at a place, rotated to here."""
    begin, source = (len(LEAD) + SIZE * number for number in (index, place))
    kv = {name: value[:, source : source + SIZE] for name, value in true_kv(tokens_of(pages)).items()}
    local = np.arange(SIZE, dtype=np.float32)
    free = kvp.to_phase_free(LAYOUT, EngineKV(kv), local, source)
    expected = rows_of_kv(kvp.to_engine(LAYOUT, dict(free), local, begin))
    np.testing.assert_allclose(answer.loaded[:, begin : begin + SIZE], expected, rtol=3e-4, atol=3e-4)


def points(report):
    return [point for point, _ in report["served"]]


def certify(sides, **bounds):
    """Bounds points in nats, such as `near=0.04`, behind any number of chunks; survivors after up to 8 slides."""
    losses = {(point, 8 if point == "survivor" else 0): [kl] * 8 for point, kl in bounds.items()}
    sides.scheduler.certificate = certificate(losses, backbone="tiny")


class Scene(NamedTuple):
    """Prompts, as (pages, options), and how the last of them is served; bounds are those of its certificate."""

    prompts: list[tuple[list[int], dict[str, Any]]]
    points: str
    kl: float | None = 0.0
    bounds: Mapping[str, float] = {}
    settings: Mapping[str, Any] = {}
    why: str = ""


def all_of(options, *prompts):
    return [(pages, options) for pages in prompts]


def behind(first, second, points):
    """A window that remembers, and the next one."""
    return Scene(all_of(REMEMBER, first, second), points)


BASES = all_of({}, [0, 1, 2], [3, 1, 2], [1, 5])
LIMITED = {**CERTIFIED, "kl": 0.03, "save": False}
AGENT = {**REMEMBER, "agent": "one"}
LEARNING = {"bounds": {"near": 0.01}, "settings": {"store_after": 2, "survivors": 0}}
MET = all_of({}, [2, 0, 1], [3, 0, 1], [5])  # before the prompt in which page 5 is behind approximate chunks
LEARNT = [*MET, ([3, 0, 1, 5], CERTIFIED)]
KNOWN = "leading restored restored"
SCENES = {
    "exactly behind other chunks": Scene(
        all_of({}, [0, 1, 2], [1, 2]), "leading", why="chunk 2 of 3 is not stored behind those in front of it"
    ),
    "within a bound": Scene([*BASES, ([1, 2], LIMITED)], "leading restored mean", 0.01, {"near": 0.04, "mean": 0.01}),
    "beyond a bound": Scene(
        [*BASES, ([1, 2], LIMITED)], "leading restored", 0.0, {"mean": 0.04}, why="is not certified within 0.03 nats"
    ),
    # A chunk survives where all in front was there in its order.
    "one has left": behind([0, 1, 2, 3], [0, 2, 3, 4], "leading restored survivor survivor"),
    "another order": behind([0, 1, 2], [1, 0, 2], "leading survivor"),
    # Survivors serve no one else.
    "another agent": Scene([([0, 1, 2], AGENT), ([1, 2], REMEMBER)], "leading"),
    "another tenant": Scene([([0, 1, 2], AGENT), ([1, 2], AGENT | {"salt": "another"})], ""),
    "forgetting": Scene(all_of(CERTIFIED, [0, 1, 2], [1, 2, 3]), "leading survivor survivor", 0.02, {"survivor": 0.02}),
    # A window that remembers promises its survivors, but not what was computed behind other approximate chunks.
    "prefilled behind": Scene([*BASES, ([1, 2, 3], REMEMBER)], "leading restored near", 0.03, {"near": 0.03}),
    "inherited": Scene([*BASES[::2], *all_of(REMEMBER, [1, 2, 3], [3, 4])], "leading survivor", 0.03, {"near": 0.03}),
    # A chunk that was met before is prefilled behind exact ones once.
    "learnt": Scene(LEARNT, KNOWN, **LEARNING, why="chunk 5 of 5 is prefilled behind exact ones, to be stored"),
    "near from then on": Scene([*LEARNT, ([2, 0, 1, 5], CERTIFIED)], f"{KNOWN} restored near", 0.01, **LEARNING),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_the_last_of_some_prompts_is_served_by_what_the_others_left(tmp_path, scene):
    with sides_of(tmp_path, **scene.settings) as sides:
        if scene.bounds:
            certify(sides, **scene.bounds)
        for number, (pages, options) in enumerate(scene.prompts):
            answer, report = asked(sides, f"{number}", pages, **options)
        assert (points(report), report["kl"]) == (scene.points.split(), scene.kl)
        assert scene.why in report["why"]
        assert report["exact"] == ({*scene.points.split()} <= {"leading", "restored"})
        salt = scene.prompts[-1][1].get("salt")
        assert (answer.request.cache_salt == salt) == report["exact"], "exact blocks are shared, others are not"


def test_pages_have_the_rows_of_the_prefills_that_they_come_from(sides):
    asked(sides, "first", [0, 1, 2, 3])
    asked(sides, "lone", [1, 5])
    answer, _ = asked(sides, "again", [0, 1, 2, 3])
    assert answer.count == len(LEAD) + 4 * SIZE
    assert not answer.orders.saves, "all of it is stored"
    for index in range(4):
        assert_page(answer, index, [0, 1, 2, 3], index)
    answer, _ = asked(sides, "approximate", [1, 2, 3], **PATCHED)
    for index, (pages, place) in enumerate([([1, 5], 0), ([0, 1, 2, 3], 2), ([0, 1, 2, 3], 3)]):
        assert_page(answer, index, pages, place)
    assert not answer.orders.saves or not answer.orders.saves[0].prefills, "nothing is formed behind approximate chunks"


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


def test_a_request_that_the_engine_has_keeps_its_salt(sides):
    """The engine's blocks are exact, and another salt would hide them."""
    for name, pages in (("first", [0, 1, 2, 3]), ("lone", [1, 5])):
        asked(sides, name, pages, **PATCHED)
    answer, report = asked(sides, "second", [1, 2], computed=10, **PATCHED)
    assert (answer.request.cache_salt, points(report)) == (None, ["leading"])
    assert report["why"] == "the engine has as much of it in its own cache"
    answer, report = asked(sides, "third", [1, 2, 3], computed=4, **PATCHED)
    assert answer.request.cache_salt is not None
    assert len(points(report)) == 4


def test_patches_are_formed_when_their_antecedent_comes_again(tmp_path):
    with sides_of(tmp_path, store_after=2) as sides:
        served(sides, "alone", {"segments": [SIZE]}, [*PAGES[1], *QUESTION], BLOCKS)
        asked(sides, "base", [2, 1])
        assert sides.worker.former.counts["prefills"] == 2
        for times in (1, 2, 3):
            asked(sides, f"time {times}", [3, 2, 1])
            assert sides.worker.former.counts["patches"] == (times >= 2), times
