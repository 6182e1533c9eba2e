"""Chunks are read in the background: the engine's thread waits for no store, whatever that does."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import errno
import os
import shutil
import threading
import time

import numpy as np
import pytest
from serving_sides import TOKENS, matched_of, output_of, report_of, request_of, served, true_kv

from kvpatch_jax.errors import StoreError
from kvpatch_jax.plan import choose
from kvpatch_jax.serving.vllm import plan, segments_of
from kvpatch_jax.serving.vllm.config import PATIENCE
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.scheduler_side import AHEAD, READERS
from kvpatch_jax.serving.vllm.stores import Stores
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.window import StoredPrefills

LEADING = {"kvpatch": {"segments": [8]}}
PATCHED = {"kvpatch": {"segments": [8, 18], "reuse": "patched"}}
BLOCKS = tuple(range(8))


@pytest.fixture
def scheduler(sides):
    """The scheduler's side, with the canonicals of two chunks and a patch of the second stored."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "patch", {"segments": [8, 18]})
    return sides.scheduler


@pytest.fixture
def gate(scheduler, hang):
    return hang(ChunkStore, "get")


def added(scheduler, name, params=LEADING, **changes):
    request = request_of(name, params, **changes)
    scheduler.add_request(request)
    return request


def placed(scheduler, name, params=PATCHED):
    """Returns a request whose load was commanded."""
    request = added(scheduler, name, params)
    scheduler.order_load(request, BLOCKS, matched_of(scheduler, request))
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    return request


def test_other_requests_are_served_while_chunks_are_read(scheduler, gate):
    """The engine is told to ask again, and goes on. Then the request is salted before it is matched."""
    slow, plain = added(scheduler, "slow", PATCHED), added(scheduler, "plain", None)
    assert (scheduler.match(slow, 0), scheduler.match(plain, 0)) == (None, 0)
    assert scheduler.build_commands(output_of({"plain": 30}, {"plain": 0}, {})) == StepCommands()
    assert slow.cache_salt is None
    gate.set()
    while slow.cache_salt is None:
        assert scheduler.match(slow, 12) is None, "12 tokens of a plain request are not this one's"
    assert slow.block_hashes == [f"with {slow.cache_salt}"]
    assert scheduler.match(slow, 4) == 14


def test_a_store_that_hangs_costs_only_a_prefill(scheduler, gate, wait_until, monkeypatch):
    """The first requests wait for the patience, later ones not at all; until the store answers again."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hanging = [added(scheduler, str(number)) for number in range(READERS)]
    wait_until(lambda: len(gate.threads) == READERS)
    now[0] += PATIENCE
    assert [matched_of(scheduler, request) for request in hanging] == [0] * READERS
    later = [added(scheduler, f"later {number}") for number in range(3 * AHEAD)]
    assert [scheduler.match(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert later[0].block_hashes == ["early"]
    output = output_of({"0": 30}, {"0": 0}, {"0": BLOCKS})
    assert scheduler.build_commands(output) == StepCommands(), "nothing is formed for that store either"
    assert scheduler.finish(hanging[0])["kvpatch"]["why"] == "its chunks could not be read"
    gate.set()
    names = map(str, range(1000, 2000))  # until a thread has ended its read
    wait_until(lambda: matched_of(scheduler, added(scheduler, next(names))) == 8)


def test_the_number_of_requests_with_chunks_in_memory_is_limited(scheduler):
    """The next one is read when one was placed or is gone."""
    requests = [added(scheduler, str(number)) for number in range(AHEAD + 2)]
    assert [matched_of(scheduler, request) for request in requests[:AHEAD]] == [8] * AHEAD
    assert [scheduler.match(request, 0) for request in requests[AHEAD:]] == [None, None]
    scheduler.order_load(requests[0], BLOCKS, 8)
    scheduler.take_promised()
    assert matched_of(scheduler, requests[AHEAD]) == 8
    assert scheduler.match(requests[AHEAD + 1], 0) is None
    scheduler.finish(requests[1])
    assert matched_of(scheduler, requests[AHEAD + 1]) == 8


@pytest.mark.parametrize(("read", "count", "counted"), [("canonical", 0, "unread"), ("has_patch", 8, "unsaved")])
def test_whatever_reading_raises_costs_only_a_prefill_or_what_would_be_formed(
    sides, scheduler, monkeypatch, read, count, counted
):
    def fails(*_):
        raise StoreError("on purpose")

    monkeypatch.setattr(Stores, read, fails)
    assert served(sides, "request", {"segments": [8, 18]}).count == count
    assert {kind: scheduler.counts[kind] for kind in ("unread", "unsaved")} == {"unread": 0, "unsaved": 0, counted: 1}


@pytest.mark.parametrize("fault", ["the disk is full", "the directory is gone"])
def test_a_store_that_fails_costs_no_answer(sides, scheduler, tmp_path, monkeypatch, fault):
    def full(*_):
        raise OSError(errno.ENOSPC, "on purpose")

    if fault == "the disk is full":
        monkeypatch.setattr(os, "fsync", full)
    else:
        sides.worker.stores.of("default").flush()
        shutil.rmtree(tmp_path / "store")
    expected = np.concatenate([true_kv(TOKENS[4:])[name][:, :, 0] for name in "kv"], axis=-1)
    for turn in range(3):
        answer = served(sides, f"turn {turn}", {"segments": [8, 18]}, TOKENS[4:])
        assert not answer.failed
        np.testing.assert_allclose(answer.loaded[:, : answer.count], expected[:, : answer.count], rtol=1e-5, atol=1e-5)
    sides.worker.former.flush()
    # A directory that is gone may be made again by what is written next.
    assert sides.worker.former.counts["failed"] > 0 or fault == "the directory is gone"
    assert scheduler.reading == (0, 0)


def test_the_engines_thread_accesses_no_store(sides, scheduler, monkeypatch):
    engine, calls = threading.current_thread(), []
    for name in ("of", "has_canonical", "canonical", "has_patch", "prefills"):
        method = getattr(Stores, name)

        def noting(self, *args, method=method, name=name):
            calls.append((name, threading.current_thread() is engine))
            return method(self, *args)

        monkeypatch.setattr(Stores, name, noting)
    for name, options in (("exact", {}), ("patched", {"reuse": "patched"}), ("unsaved", {"save": False})):
        report_of(sides, served(sides, name, {"segments": [8, 18], **options}))
    request = placed(scheduler, "preempted")
    assert matched_of(scheduler, request) == 18
    scheduler.order_load(request, BLOCKS, 18)
    scheduler.take_promised()
    scheduler.mark_failed({0})
    scheduler.finish(request)
    assert calls
    assert not [name for name, is_engine in calls if is_engine]


def test_chunks_of_two_concurrent_requests_are_formed_once(sides):
    requests = [added(sides.scheduler, name) for name in "ab"]
    blocks = {"a": BLOCKS, "b": tuple(range(8, 16))}
    for request in requests:
        assert matched_of(sides.scheduler, request) == 0
        sides.scheduler.order_load(request, blocks[request.request_id], 0)
        sides.pool.prefill(request.request_id, TOKENS, blocks[request.request_id])
    sides.worker.save(sides.scheduler.build_commands(output_of({"a": 30, "b": 30}, {"a": 0, "b": 0}, blocks)))
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 1, "known": 1}


def test_a_request_that_reads_no_cache_is_formed_and_not_served(scheduler):
    """Its prompt's log-probabilities are asked for, so that all of it is computed."""
    request = added(scheduler, "name", {"kvpatch": {"segments": [9]}}, skip_reading_prefix_cache=True)
    assert scheduler.match(request, 0) == 0
    scheduler.order_load(request, BLOCKS, 0)
    for _ in range(100):
        assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    (save,) = scheduler.build_commands(output_of({"name": 30}, {"name": 0}, {"name": BLOCKS})).saves
    report = scheduler.finish(request)["kvpatch"]
    assert (save.wanted, report["served"], report["why"]) == ((0,), [], "the request reads no cache")


# ------------------------------------------------------------------------------------- preempted and finished early


def test_a_preempted_request_is_read_and_salted_again(sides, scheduler):
    """What the store has lost since is computed, without the salt; earlier tokens stay in the answer."""
    request = placed(scheduler, "name")
    salt = request.cache_salt
    assert scheduler.match(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.match(request, 0) is None
    assert (matched_of(scheduler, request), request.cache_salt) == (18, salt)
    scheduler.order_load(request, BLOCKS, 10)
    assert scheduler.build_commands(output_of({}, {}, {})).loads[0].first == 8
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        sides.worker.stores.of("default").delete(segment.id, "tiny")
    assert (matched_of(scheduler, request), request.cache_salt) == (0, None)
    scheduler.order_load(request, BLOCKS, 0)
    report = scheduler.finish(request)["kvpatch"]
    assert (report["matched"], report["exact"], report["kl"]) == (0, False, None)
    assert report["why"] == "chunk 1 of 2 is not stored"


def test_failed_blocks_of_an_earlier_allocation_do_not_fail_a_request(scheduler):
    request = placed(scheduler, "name", LEADING)
    assert scheduler.match(request, 8) == 0
    scheduler.order_load(request, (7, 8), 0)
    scheduler.mark_failed({0, 1})
    assert not scheduler.finish(request)["kvpatch"]["failed"]


def test_a_request_that_ends_before_it_is_placed_is_served_nothing(scheduler, gate):
    early, planned = added(scheduler, "early", PATCHED), request_of("planned", PATCHED)
    assert scheduler.finish(early)["kvpatch"]["matched"] == 0
    gate.set()
    scheduler.add_request(planned)
    assert matched_of(scheduler, planned) == 18
    report = scheduler.finish(planned)["kvpatch"]
    assert (report["matched"], report["served"], report["exact"], report["kl"]) == (0, [], True, 0.0)
    assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    assert (early.cache_salt, scheduler.finish(early)) == (None, None)


def test_a_prompt_of_damaged_chunks_is_planned_twice_not_once_for_each(sides, monkeypatch):
    """Choosing anew after each one would take a time that grows with the cube of their number."""
    ends, choices = list(range(4, 29, 4)), []
    served(sides, "prompt", {"segments": ends})
    for begin in ends[:-1]:
        served(sides, f"from {begin}", {"segments": [4]}, TOKENS[begin:])

    def counted(*arguments, **options):
        choices.append(choose(*arguments, **options))
        return choices[-1]

    monkeypatch.setattr(StoredPrefills, "get", lambda *_: None)
    monkeypatch.setattr(plan, "choose", counted)
    answer = served(sides, "damaged", {"segments": ends, "reuse": "blind"})
    points = [point for point, _ in report_of(sides, answer)["served"]]
    assert [option.point for option in choices[0].options] == ["leading"] + ["restored"] * 6
    assert points == ["leading"] + ["bare"] * 6
    assert len(choices) == 2
