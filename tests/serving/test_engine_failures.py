"""A store, hook or client that fails or hangs costs a request its reuse at most, and no engine waits for it."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import errno
import functools
import os
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from serving_hooks import BLOCKS, ask, engine_of
from serving_sides import LAYOUT, TOKENS, matched_of, output_of, request_of, rows_of_kv, served, sides_of, true_kv

from kvpatch_jax.errors import StoreError
from kvpatch_jax.serving.vllm import segments_of
from kvpatch_jax.serving.vllm.config import PATIENCE
from kvpatch_jax.serving.vllm.messages import SaveCommand, StepCommands
from kvpatch_jax.serving.vllm.scheduler_side import AHEAD, READERS
from kvpatch_jax.serving.vllm.stores import Stores
from kvpatch_jax.store import ChunkStore

PLAN = {"kvpatch": {"segments": [8, 18], "reuse": "blind", "save": False}}


@pytest.fixture(scope="module")
def opened(connector, tmp_path_factory):
    with engine_of(connector, tmp_path_factory.mktemp("boundary")) as engine:
        yield engine


@pytest.fixture
def engine(opened):
    opened.scheduler.failures.clear()
    return opened


def assert_serves(engine):
    """Asserts that a leading chunk is served as a prefill computes it, and a request that asks for nothing is plain."""
    answer = ask(engine, request_of("leading", {"kvpatch": {"segments": [8], "save": False}}))
    assert (answer.count, answer.invalid) == (8, set())
    np.testing.assert_allclose(answer.loaded, rows_of_kv(true_kv(TOKENS))[:, :8], rtol=1e-5, atol=1e-5)
    plain = ask(engine, request_of("plain", None))
    assert (plain.count, plain.report, plain.salt) == (0, None, None)


# ------------------------------------------------------------------------------------------------------------- clients

NESTED = functools.reduce(lambda inner, _: [inner], range(5000), [])
SEGMENTS = {"segments": [8]}
HOSTILE = [PLAN, {"kvpatch": SEGMENTS}, 10**30, "text", [1], {"kvpatch": 1.5}, {"kvpatch": {"segments": [8, 40]}}]
HOSTILE += [{"kvpatch": SEGMENTS | {"reuse": NESTED}}, {"kvpatch": SEGMENTS | {"kl": 10**400}}, {"kvpatch": {"": {}}}]
HOSTILE += [{"kvpatch": SEGMENTS | {"agent": "x" * 10**6}}, {"kvpatch": SEGMENTS | {"save": None}}]


@pytest.mark.parametrize("params", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_is_kept_of_a_request_whatever_it_asks_for(engine, params):
    request = request_of("fuzzed", params, TOKENS[:24])
    scheduler, side = engine.scheduler, engine.scheduler.scheduler_side
    scheduler.on_new_request(request)
    while (count := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        scheduler.build_connector_meta(output_of({}, {}, {}))
    assert 0 <= count < 24
    scheduler.request_finished(request, [])
    assert side.finish(request) is None
    assert (side.take_promised(), side.reading) == (StepCommands(), (0, 0))


def test_requests_that_cannot_be_planned_are_left_unchanged(tmp_path):
    with sides_of(tmp_path, allow=["exact"]) as sides:
        for params, more in (
            *((None, {}), ({"kvpatch": False}, {}), ({"kvpatch": {"segments": [30]}}, {})),
            *(({"kvpatch": {}}, {"lora_request": object()}), ({"kvpatch": {}}, {"prompt_token_ids": None})),
            ({"kvpatch": {"segments": [8], "reuse": "blind"}}, {}),
        ):
            request = request_of("name", params, **more)
            sides.scheduler.add_request(request)
            assert matched_of(sides.scheduler, request) == 0
            assert (request.block_hashes, sides.scheduler.finish(request)) == (["early"], None)
        assert sides.scheduler.build_commands(output_of({"name": 30}, {"name": 0}, {})) == StepCommands()
        assert sides.scheduler.counts["refused"] == 2, "an end beyond the prompt, and a goal"


# --------------------------------------------------------------------------------------------------------------- hooks

HOOKS = {
    "add_request": "on_new_request",
    "match": "get_num_new_matched_tokens",
    "order_load": "update_state_after_alloc",
    "build_commands": "build_connector_meta",
    "finish": "request_finished",
}


@pytest.mark.parametrize("work", HOOKS)
def test_a_scheduler_fault_costs_only_one_requests_reuse(engine, work, monkeypatch, caplog):
    """Counted by its type and logged once; a promise to the engine is kept, or its blocks are reported as lost."""
    failures = engine.scheduler.failures
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.scheduler_side, work, lambda *_: 1 / 0)
        answers = [ask(engine, request_of(f"turn {turn}", PLAN)) for turn in range(2)]
    for answer in answers:
        if work in ("add_request", "match"):
            assert (answer.count, answer.invalid, answer.report, answer.salt) == (0, set(), None, None)
        elif work == "order_load":
            assert (answer.count, answer.invalid, answer.report) == (18, set(BLOCKS[:5]), None)
        else:
            assert (answer.count, answer.invalid) == (18, set())
            assert answer.loaded.any(), "what was promised is loaded all the same"
    kind = f"{HOOKS[work]}: ZeroDivisionError"
    assert failures[kind] >= 2
    assert caplog.text.count(f"kvpatch: {kind}") == 1
    assert_serves(engine)


def test_a_fault_restores_the_salt_until_blocks_were_given(engine, monkeypatch):
    """The engine looked into its cache with the plan's salt, so it is asked to look again. Once it has blocks that may
    be approximate, the salt stays: no request without it may find what is behind them.
    """
    scheduler, request = engine.scheduler, request_of("salted", PLAN)
    side, match = scheduler.scheduler_side, scheduler.scheduler_side.match

    def failing(request, computed):
        count = match(request, computed)
        return count if count is None else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(side, "match", failing)
        scheduler.on_new_request(request)
        while not scheduler.failures:
            assert scheduler.get_num_new_matched_tokens(request, 0)[0] is None
            scheduler.build_connector_meta(output_of({}, {}, {}))
    assert (request.cache_salt, request.block_hashes) == (None, ["with None"])
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    with monkeypatch.context() as patch:
        patch.setattr(side, "order_load", lambda *_: 1 / 0)
        assert ask(engine, request_of("given", PLAN)).salt.startswith("kvpatch-")
    assert_serves(engine)


@pytest.mark.parametrize("hook", ["load", "save"])
def test_a_worker_fault_is_reported_by_its_blocks(connector, tmp_path, hook, monkeypatch):
    """What was promised and may not have been written is not read by any forward."""
    plan = {"kvpatch": {"segments": [8 if hook == "load" else 9], "save": hook == "save"}}
    with engine_of(connector, tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.worker_side, hook, lambda commands: 1 / 0)
            answer = ask(engine, request_of("request", plan))
        if hook == "load":
            assert (answer.count, answer.invalid) == (8, set(BLOCKS[:2]))
            assert (answer.report["failed"], answer.report["served"]) == (True, [])
            assert ask(engine, request_of("again", plan)).count == 0, "that chunk is not planned again"
        else:
            assert (answer.count, answer.invalid) == (0, set())
            assert_serves(engine)
        kind = f"{'start_load_kv' if hook == 'load' else 'wait_for_save'}: ZeroDivisionError"
        assert engine.worker.failures[kind] == 1


# -------------------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize(("read", "count", "counted"), [("canonical", 0, "unread"), ("has_patch", 8, "unsaved")])
def test_whatever_reading_raises_costs_a_prefill_or_what_would_be_formed(sides, monkeypatch, read, count, counted):
    def fails(*_):
        raise StoreError("on purpose")

    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    monkeypatch.setattr(Stores, read, fails)
    assert served(sides, "request", {"segments": [8, 18]}).count == count
    counts = sides.scheduler.counts
    assert {kind: counts[kind] for kind in ("unread", "unsaved")} == {"unread": 0, "unsaved": 0, counted: 1}


def test_a_store_that_fails_costs_no_answer(sides, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "on purpose")

    served(sides, "first", {"segments": [8]})
    monkeypatch.setattr(os, "fsync", full)
    expected = rows_of_kv(true_kv(TOKENS[4:]))
    for turn in range(3):
        answer = served(sides, f"turn {turn}", {"segments": [8, 18]}, TOKENS[4:])
        assert not answer.failed
        np.testing.assert_allclose(answer.loaded[:, : answer.count], expected[:, : answer.count], rtol=1e-5, atol=1e-5)
    assert sides.worker.former.counts["failed"] > 0
    assert sides.scheduler.reading == (0, 0)


LEADING = {"kvpatch": {"segments": [8]}}
PATCHED = {"kvpatch": {"segments": [8, 18], "reuse": "patched"}}
EARLY_BLOCKS = tuple(range(8))
TOKEN_BYTES = LAYOUT.bytes_per_token("float32")


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


@pytest.fixture
def writing(hang):
    return hang(ChunkStore, "put")


def added(scheduler, name, params=LEADING, **changes):
    request = request_of(name, params, **changes)
    scheduler.add_request(request)
    return request


def placed(scheduler, name, params=PATCHED):
    """Returns a request whose load was commanded."""
    request = added(scheduler, name, params)
    scheduler.order_load(request, EARLY_BLOCKS, matched_of(scheduler, request))
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    return request


# ------------------------------------------------------------------------------------------------------------- reading


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
    hanging = [added(scheduler, str(number), PATCHED) for number in range(READERS)]
    wait_until(lambda: len(gate.threads) == READERS)
    now[0] += PATIENCE
    assert [matched_of(scheduler, request) for request in hanging] == [0] * READERS
    later = [added(scheduler, f"later {number}") for number in range(3 * AHEAD)]
    assert [scheduler.match(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert later[0].block_hashes == ["early"]
    output = output_of({"0": 30}, {"0": 0}, {"0": EARLY_BLOCKS})
    assert scheduler.build_commands(output) == StepCommands(), "nothing is formed for that store either"
    assert scheduler.reading == (0, 0)
    assert scheduler.finish(hanging[0])["kvpatch"]["why"] == "its chunks could not be read"
    gate.set()
    names = map(str, range(1000, 2000))  # until a thread has ended its read
    wait_until(lambda: matched_of(scheduler, added(scheduler, next(names))) == 8)


def test_the_number_of_requests_with_chunks_in_memory_is_limited(scheduler, wait_until):
    """The next one is read when one was placed or is gone, and then nothing of that one is kept."""
    requests = [added(scheduler, str(number), mark=threading.Event()) for number in range(AHEAD + 2)]
    assert [matched_of(scheduler, request) for request in requests[:AHEAD]] == [8] * AHEAD
    assert [scheduler.match(request, 0) for request in requests[AHEAD:]] == [None, None]
    scheduler.order_load(requests[0], EARLY_BLOCKS, 8)
    scheduler.take_promised()
    assert matched_of(scheduler, requests[AHEAD]) == 8
    assert scheduler.match(requests[AHEAD + 1], 0) is None
    last = requests.pop(1)
    released = weakref.ref(last.mark)
    scheduler.finish(last)
    del last.update_block_hashes, last  # the stand-in's method is a cycle
    assert matched_of(scheduler, requests[AHEAD]) == 8
    wait_until(lambda: released() is None)


def test_the_engines_thread_accesses_no_store(sides, scheduler, monkeypatch):
    engine, calls = threading.current_thread(), []
    for name in ("of", "has_canonical", "canonical", "has_patch", "prefills"):
        method = getattr(Stores, name)

        def noting(self, *args, method=method, name=name):
            calls.append((name, threading.current_thread() is engine))
            return method(self, *args)

        monkeypatch.setattr(Stores, name, noting)
    served(sides, "exact", {"segments": [8, 18]})
    request = placed(scheduler, "preempted")
    assert matched_of(scheduler, request) == 18
    scheduler.mark_failed({0})
    scheduler.finish(request)
    assert calls
    assert not [name for name, is_engine in calls if is_engine]


def test_a_preempted_request_is_read_and_salted_again(sides, scheduler):
    """What the store has lost since is computed, without the salt; earlier tokens stay in the answer."""
    request = placed(scheduler, "name")
    salt = request.cache_salt
    assert scheduler.match(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.match(request, 0) is None
    assert (matched_of(scheduler, request), request.cache_salt) == (18, salt)
    scheduler.order_load(request, EARLY_BLOCKS, 10)
    assert scheduler.build_commands(output_of({}, {}, {})).loads[0].first == 8
    scheduler.order_load(request, tuple(range(8, 16)), 0)
    scheduler.mark_failed(set(EARLY_BLOCKS))  # of the allocations before this one
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        sides.worker.stores.of("default").delete(segment.id, "tiny")
    assert (matched_of(scheduler, request), request.cache_salt) == (0, None)
    scheduler.order_load(request, EARLY_BLOCKS, 0)
    report = scheduler.finish(request)["kvpatch"]
    assert (report["matched"], report["failed"], report["exact"], report["kl"]) == (0, False, False, None)
    assert report["why"] == "chunk 1 of 2 is not stored"


# ------------------------------------------------------------------------------------------------------------- forming


def save(sides, end, first=0, blocks=EARLY_BLOCKS):
    """Saves the leading chunk of a prompt; returns the growth of the device's memory in bytes."""
    tokens = [first, *TOKENS]
    sides.pool.prefill(f"{first} {end}", tokens, EARLY_BLOCKS)
    command = SaveCommand(f"{first} {end}", "default", segments_of("tiny", tokens, ends=[end]), (0,), blocks)
    before = sum(array.nbytes for array in jax.live_arrays())
    sides.worker.save(StepCommands(saves=(command,)))
    return sum(array.nbytes for array in jax.live_arrays()) - before


def test_waiting_prefills_hold_their_rows_within_the_budget(tmp_path, writing, wait_until):
    """A chunk beyond it is not read, and can be formed from a later request."""
    with sides_of(tmp_path, forming={"pending_bytes": 17 * TOKEN_BYTES}) as sides:
        former = sides.worker.former
        save(sides, 8)
        wait_until(lambda: writing.threads)
        assert save(sides, 9, 1) == 9 * TOKEN_BYTES
        assert (save(sides, 9, 2), former.held_bytes) == (0, 17 * TOKEN_BYTES)
        assert former.counts == {"over_budget": 1}
        writing.set()
        former.flush()
        assert (former.counts, former.held_bytes) == ({"over_budget": 1, "canonicals": 2}, 0)
        save(sides, 9, 2)
        former.flush()
        assert former.counts["canonicals"] == 3


def test_closing_finishes_waiting_prefills_and_one_that_cannot_be_read_costs_one_chunk(sides):
    save(sides, 8, blocks=(10**6, *range(1, 8)))  # a block of no pool
    save(sides, 8)
    save(sides, 9)
    sides.worker.close()
    assert (sides.worker.former.counts, sides.worker.former.held_bytes) == ({"failed": 1, "canonicals": 2}, 0)


def test_closing_waits_no_longer_than_the_patience(tmp_path, writing, wait_until):
    """While a write hangs, what was not begun is dropped; the queue is short, too."""
    with sides_of(tmp_path, forming={"patience": 0.2, "pending": 1}, scheduling={"patience": 0.2}) as sides:
        former = sides.worker.former
        save(sides, 8)
        wait_until(lambda: writing.threads)
        save(sides, 9)
        save(sides, 9, 1)
        assert former.counts == {"dropped": 1}, "the queue is full"
        sides.worker.close()
        assert former.counts == {"dropped": 2}
        (thread,) = [thread for thread in threading.enumerate() if thread.ident in writing.threads]
        writing.set()
        thread.join(60)
        assert former.counts["canonicals"] <= 1, "the second is not formed"
        assert former.held_bytes == 0
