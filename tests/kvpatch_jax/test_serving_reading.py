"""Chunks are read while the engine goes on: what it is told meanwhile, and what a store that hangs or fails costs."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
from serving_sides import TOKENS, matched_of, output_of, request_of, served, sides_of

from kvpatch_jax.errors import StoreClosedError, StoreIOError
from kvpatch_jax.serving.vllm import ConnectorConfig, segments_of, stores
from kvpatch_jax.serving.vllm import prefetcher as ahead
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.prefetcher import Prefetcher
from kvpatch_jax.serving.vllm.stores import StoreCatalog, Stores


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


@pytest.fixture
def held(sides, monkeypatch):
    """A store whose reads wait for `held.set()`; a leading chunk and a patch behind it are in it."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "patch", {"segments": [8, 18]})
    gate, read = threading.Event(), StoreCatalog.has_canonical
    monkeypatch.setattr(StoreCatalog, "has_canonical", lambda self, id: gate.wait(60) and read(self, id))
    yield gate
    gate.set()


def test_while_a_requests_chunks_are_read_others_are_served(sides, held):
    """The engine asks, is told to ask again, goes on; nothing waits for the store. Then the request is salted first."""
    scheduler, plan = sides.scheduler, {"kvpatch": {"segments": [8, 18], "policy": "blind"}}
    slow, plain = request_of("slow", plan), request_of("plain", None)
    began = time.monotonic()
    scheduler.arrived(slow)
    scheduler.arrived(plain)
    assert scheduler.matched(slow, 0) is None
    assert scheduler.matched(plain, 0) == 0
    assert scheduler.orders(output_of({"plain": 30}, {"plain": 0}, {})) == StepCommands()
    assert time.monotonic() - began < 30, "the gate would have held it for 60 s"
    assert slow.cache_salt is None
    held.set()
    while scheduler.matched(slow, 0) is None and slow.cache_salt is None:
        time.sleep(0.001)
    assert slow.block_hashes == [f"with {slow.cache_salt}"]
    assert scheduler.matched(slow, 4) == 14


def test_what_was_looked_up_without_a_salt_is_not_counted(sides, held):
    """A plan that becomes ready between the engine's look into its cache and its question: asked again, once."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.arrived(request)
    while not scheduler._ahead.is_ready("own"):
        time.sleep(0.001)
    assert scheduler.matched(request, 16) is None, "16 tokens of a plain request are no longer its own"
    assert scheduler.matched(request, 0) == 18
    leading = request_of("leading", {"kvpatch": {"segments": [8, 18]}})
    scheduler.arrived(leading)
    while not scheduler._ahead.is_ready("leading"):
        time.sleep(0.001)
    assert scheduler.matched(leading, 4) == 4, "no salt: nothing is to be looked up again"


def test_a_store_that_does_not_answer_costs_a_plain_prefill(sides, held):
    scheduler = sides.scheduler
    scheduler._ahead.patience = 0.05
    request = request_of("late", {"kvpatch": {"segments": [8]}})
    scheduler.arrived(request)
    assert scheduler.matched(request, 0) is None
    assert matched_of(scheduler, request) == 0
    assert scheduler.counts["unread"] == 1
    assert request.block_hashes == ["early"]
    output = output_of({"late": 30}, {"late": 0}, {"late": tuple(range(8))})
    assert scheduler.orders(output) == StepCommands(), "that store is not asked for anything else either"
    assert scheduler.finished(request)["kvpatch"]["why"] == "its chunks could not be read"


def test_where_every_reader_hangs_nobody_waits_for_them(sides, held):
    """The first ones wait for as long as a store may take, those that come then not at all; until it answers again."""
    scheduler = sides.scheduler
    ask = lambda name: request_of(name, {"kvpatch": {"segments": [8]}})
    patience, scheduler._ahead.patience = scheduler._ahead.patience, 0.2
    hanging = [ask(str(number)) for number in range(scheduler.settings.readers)]
    for request in hanging:
        scheduler.arrived(request)
    assert [matched_of(scheduler, request) for request in hanging] == [0] * len(hanging)
    scheduler._ahead.patience = patience
    while not scheduler._ahead.stuck:
        time.sleep(0.001)
    later = [ask(f"later {number}") for number in range(3 * scheduler.settings.ahead)]
    for request in later:
        scheduler.arrived(request)
    assert [scheduler.matched(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert scheduler.counts["unread"] == len(hanging) + len(later)
    assert scheduler.finished(later[0])["kvpatch"]["why"] == "its chunks could not be read"
    held.set()
    while scheduler._ahead.stuck:
        time.sleep(0.001)
    after = ask("after")
    scheduler.arrived(after)
    assert matched_of(scheduler, after) == 8


def test_requests_that_are_abandoned_while_they_are_read_hang_nobody_else(sides, held):
    """Readers at work for nobody are no readers that hang: others wait for them."""
    scheduler = sides.scheduler
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(4)]
    for request in requests:
        scheduler.arrived(request)
    for request in requests[:3]:
        scheduler.finished(request)
    assert scheduler.matched(requests[3], 0) is None
    held.set()
    assert matched_of(scheduler, requests[3]) == 8


@pytest.fixture
def reading():
    """One thread that reads, for one request at once of eight held; the clock that it looks at."""
    made = Prefetcher(1, 8, 0.5)
    yield made
    made.close()


def test_patience_counts_waiting(reading, monkeypatch):
    """Two at once and one thread: the second is over as long behind its coming as the first, however late it began.

    Its thread is none that hangs yet, so that a third one is waited for.
    """
    clock, gates = [0.0], {name: threading.Event() for name in "ab"}
    monkeypatch.setattr(ahead.time, "monotonic", lambda: clock[0])
    for name, gate in gates.items():
        reading.add(name, lambda gate=gate: gate.wait(60))
    clock[0] = 0.4
    assert reading.ready() == []
    gates["a"].set()
    while reading._waiting:
        time.sleep(0.001)
    assert reading.take("a")
    clock[0] = 0.6
    reading.add("c", lambda: "c")
    assert (reading.ready(), reading.stuck) == (["b"], False)
    with pytest.raises(TimeoutError, match=r"was not read within 0\.5 s"):
        reading.take("b")
    clock[0] = 0.91
    assert reading.stuck
    assert reading.is_ready("c")
    gates["b"].set()
    while reading._waiting or reading._running:
        time.sleep(0.001)
    assert reading.take("c") == "c", "it was read after all"


def test_where_what_was_read_is_not_placed_the_next_is_given_up():
    """The engine has no room for eight requests: a ninth is served plainly in time, and no thread was at fault."""
    reading, most = Prefetcher(2, 8, 0.05), 8
    for number in range(most):
        reading.add(str(number), lambda: "made")
    while not all(reading.is_ready(str(number)) for number in range(most)):
        time.sleep(0.001)
    reading.add("ninth", lambda: "made")
    began = time.monotonic()
    while "ninth" not in reading.ready(0.01):
        assert time.monotonic() - began < 60
    assert not reading.stuck
    with pytest.raises(TimeoutError, match=r"was not read within 0\.05 s"):
        reading.take("ninth")
    reading.let_go("ninth")
    assert [reading.take(str(number)) for number in range(most)] == ["made"] * most, "they are held as long as need be"
    for number in range(most):
        reading.let_go(str(number))
    reading.add("tenth", lambda: "tenth")
    while not reading.ready(1.0):
        pass
    assert reading.take("tenth") == "tenth"
    reading.close()


def test_of_two_requests_of_one_id_the_newer_ones_work_is_taken():
    """Added again while the older is at work, which ends last."""
    reading, begun, go = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
    reading.add("own", lambda: (begun.set(), go.wait(60), "old")[-1])
    begun.wait(60)
    reading.add("own", lambda: "new")
    while not reading.ready(1.0):
        pass
    go.set()
    while reading._running:
        time.sleep(0.001)
    assert reading.take("own") == "new"
    reading.close()


def test_where_all_hang_nothing_is_kept_of_who_was_let_go(reading):
    """Else every request that comes leaves its prompt behind, until the store answers."""

    class Prompt:
        def read(self):
            return None

    hang = threading.Event()
    reading.patience = 0.01
    reading.add("hangs", lambda: hang.wait(60))
    while not reading.stuck:
        time.sleep(0.001)
    left = []
    for number in range(100):
        prompt = Prompt()
        left.append(weakref.ref(prompt))
        reading.add(str(number), prompt.read)
        del prompt
        with pytest.raises(TimeoutError):
            reading.take(str(number))
        reading.let_go(str(number))
    gc.collect()
    assert not [own for own in left if own() is not None]
    hang.set()


def test_an_id_that_is_used_again_gets_what_is_new(reading):
    reading.add("own", lambda: "old")
    while not reading.ready(1.0):
        pass
    reading.add("own", lambda: "new")
    while not reading.ready(1.0):
        pass
    assert reading.take("own") == "new"


def test_a_thread_that_cannot_be_started_costs_one_request(reading, monkeypatch):
    def refuses(**_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(ahead.threading, "Thread", refuses)
        with pytest.raises(RuntimeError, match="new thread"):
            reading.add("first", lambda: "first")
    reading.let_go("first")
    reading.add("second", lambda: "second")
    while not reading.ready(1.0):
        pass
    assert reading.take("second") == "second"


def test_what_waits_when_it_is_closed_is_not_begun():
    before = set(threading.enumerate())
    reading, hang, first, begun = Prefetcher(1, 8, 60.0), threading.Event(), threading.Event(), []
    reading.add("first", lambda: (first.set(), hang.wait(60)))
    first.wait(60)
    (thread,) = set(threading.enumerate()) - before
    reading.add("second", lambda: begun.append(1))
    reading.close()
    hang.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not begun


def test_a_store_that_hangs_while_it_is_opened_holds_up_no_other(tmp_path, monkeypatch):
    """Neither another tenant's nor closing; what was opened behind that is not used."""
    hang, begun, errors = threading.Event(), threading.Event(), []
    opened = stores.ChunkStore

    def opening(root, *, tenant):
        if tenant == "bad":
            begun.set()
            hang.wait(60)
        return opened(root, tenant=tenant)

    def asks():
        try:
            own.of("bad")
        except StoreClosedError as error:
            errors.append(error)

    monkeypatch.setattr(stores, "ChunkStore", opening)
    own = Stores(ConnectorConfig(store=str(tmp_path), backbone="tiny"))
    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    begun.wait(60)
    assert not own.has("good", "0" * 64)
    own.close()
    hang.set()
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(StoreClosedError, match="after close"):
        own.of("good")


def test_a_store_that_is_in_use_is_not_closed_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "MOST_TENANTS", 2)
    own = Stores(ConnectorConfig(store=str(tmp_path), backbone="tiny"))
    one = own.of("one")
    assert own.of("two") is own.of("two")
    own.of("three")
    assert one.get("0" * 64, "tiny") is None
    assert own.of("one") is not one, "it was let go of"
    own.close()


def test_where_it_cannot_be_told_what_is_to_be_formed_the_rest_is_served(sides, held, monkeypatch):
    held.set()
    monkeypatch.setattr(Stores, "formed", lambda *_: (_ for _ in ()).throw(StoreIOError("on purpose")))
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18]}})
    scheduler.arrived(request)
    assert matched_of(scheduler, request) == 8
    assert (scheduler.counts["unsaved"], scheduler.counts["unread"]) == (1, 0)


def test_a_process_ends_though_a_read_and_a_write_hang():
    """What was not begun to be formed is dropped, and what is at work waited for no longer than the patience."""
    program = """
import threading
from types import SimpleNamespace
import numpy as np
import kvpatch_jax as kvp
from kvpatch_jax.serving.vllm import ConnectorConfig, PromptSegment
from kvpatch_jax.serving.vllm.prefetcher import Prefetcher
from kvpatch_jax.serving.vllm.forming import ChunkFormer, FormingTask
ahead, reading, writing = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
hang = lambda event: (event.set(), threading.Event().wait())
ahead.add("own", lambda: hang(reading))
layout = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64))
stores = SimpleNamespace(of=lambda tenant: hang(writing))
former = ChunkFormer(ConnectorConfig(store="s", backbone="b", patience=0.1), layout, stores)
for name in "ab":
    former.add([FormingTask("t", PromptSegment(name, 0, 4), (), np.arange(4))], lambda segment: {}, 1)
reading.wait()
writing.wait()
print("at the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "at the end\n")
    said = [line.split(" still runs")[0] for line in done.stderr.splitlines()]
    assert said == ["kvpatch: thread 'kvpatch-ahead-1'", "kvpatch: thread 'chunk-former'"]


def test_what_was_read_is_held_by_its_request_alone():
    class Read:
        pass

    ahead = Prefetcher(1, 2, 60.0)
    ahead.add("own", Read)
    while not ahead.ready(1.0):
        pass
    read = weakref.ref(ahead.take("own"))
    ahead.let_go("own")
    gc.collect()
    assert read() is None, "or it fills memory until something else is read"
    ahead.close()


def test_the_engines_loop_touches_no_store(sides, monkeypatch):
    """Whatever the scheduler is asked: stores are looked into on threads of their own."""
    asked = []
    engine = threading.current_thread()
    for name in ("of", "has", "served", "formed"):
        own = getattr(Stores, name)

        def noting(self, *given, own=own, name=name):
            asked.append((name, threading.current_thread() is engine))
            return own(self, *given)

        monkeypatch.setattr(Stores, name, noting)
    ask = {"segments": [8, 18]}
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "whole", ask)
    served(sides, "exact", ask)
    served(sides, "not saved", ask | {"save": False})
    approximate = served(sides, "approximate", ask | {"policy": "blind"})
    assert approximate.count == 18
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}

    scheduler, request = sides.scheduler, approximate.request
    assert matched_of(scheduler, request) == 18, "it was preempted"
    scheduler.allocated(request, tuple(range(8)), 18)
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    scheduler.failed({0})
    assert matched_of(scheduler, request) == 0
    scheduler.finished(request)
    reads_none = request_of("reads no cache", {"kvpatch": ask}, skip_reading_prefix_cache=True)
    abandoned = request_of("abandoned", {"kvpatch": ask})
    for own in (reads_none, abandoned):
        scheduler.arrived(own)
        scheduler.finished(own)
    monkeypatch.setattr(StoreCatalog, "has_canonical", lambda self, id: 1 / 0)
    unread = request_of("unread", {"kvpatch": ask})
    scheduler.arrived(unread)
    assert matched_of(scheduler, unread) == 0
    scheduler.allocated(unread, tuple(range(8)), 0)
    blocks = {"unread": tuple(range(8))}
    assert scheduler.orders(output_of({"unread": 30}, {"unread": 0}, blocks)) == StepCommands()
    scheduler.finished(unread)
    assert {name for name, _ in asked} == {"of", "has", "served", "formed"}
    assert not [name for name, in_loop in asked if in_loop]


def test_what_two_requests_leave_at_once_is_formed_once(sides):
    """Both were planned before either was prefilled."""
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(2)]
    for request in requests:
        sides.scheduler.arrived(request)
    blocks = {"0": tuple(range(8)), "1": tuple(range(8, 16))}
    for request in requests:
        assert matched_of(sides.scheduler, request) == 0
        sides.scheduler.allocated(request, blocks[request.request_id], 0)
        sides.pool.prefill(request.request_id, TOKENS, blocks[request.request_id])
    orders = sides.scheduler.orders(output_of({"0": 30, "1": 30}, {"0": 0, "1": 0}, blocks))
    assert [save.wanted for save in orders.saves] == [(0,), (0,)]
    sides.worker.save(orders)
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 1, "known": 1}


def test_a_request_that_reads_no_cache_is_formed_of(sides):
    """Its prompt's log-probabilities are asked for, so that all of it is computed, and exactly."""
    blocks, request = tuple(range(8)), request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.arrived(request)
    assert sides.scheduler.matched(request, 0) == 0, "it is not asked again"
    sides.scheduler.allocated(request, blocks, 0)
    while not sides.scheduler._ahead.ready(1.0):
        pass
    assert sides.scheduler.orders(output_of({}, {}, {})) == StepCommands()
    sides.pool.prefill("own", TOKENS, blocks)
    (save,) = sides.scheduler.orders(output_of({"own": 30}, {"own": 0}, {"own": blocks})).saves
    assert save.wanted == (0,)
    assert sides.scheduler.finished(request)["kvpatch"]["why"] == "the request reads no cache"


def test_a_request_that_is_gone_is_not_salted_when_its_chunks_come(sides, held):
    scheduler = sides.scheduler
    request = request_of("gone", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.arrived(request)
    assert scheduler.finished(request)["kvpatch"]["matched"] == 0
    held.set()
    assert scheduler.orders(output_of({}, {}, {})) == StepCommands()
    assert request.cache_salt is None
    assert "gone" not in scheduler._tracked


def test_whatever_reading_raises_the_request_is_served_plainly(sides, monkeypatch):
    monkeypatch.setattr(StoreCatalog, "has_canonical", lambda self, id: 1 / 0)
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    sides.scheduler.arrived(request)
    assert matched_of(sides.scheduler, request) == 0
    assert sides.scheduler.counts["unread"] == 1


def test_chunks_of_few_requests_are_held_at_once(sides, held):
    """They fill memory: the ninth is read when one of eight was placed, or is gone; plans of nothing hold nothing."""
    scheduler, most = sides.scheduler, sides.scheduler.settings.ahead
    held.set()
    requests = [request_of(str(number), {"kvpatch": {"segments": [8, 18]}}) for number in range(most + 2)]
    for request in requests:
        scheduler.arrived(request)
    for request in requests[:most]:
        assert matched_of(scheduler, request) == 8
    assert [scheduler.matched(request, 0) for request in requests[most:]] == [None, None]
    scheduler.allocated(requests[0], tuple(range(8)), 8)
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    assert matched_of(scheduler, requests[most]) == 8
    assert scheduler.matched(requests[most + 1], 0) is None
    scheduler.allocated(requests[1], tuple(range(8)), 0)
    assert matched_of(scheduler, requests[most + 1]) == 8
    plain = [request_of(f"{number} unknown", {"kvpatch": {"segments": [9]}}) for number in range(most + 2)]
    scheduler.arrived(plain[0])
    assert scheduler.matched(plain[0], 0) is None
    scheduler.finished(requests[2])
    for request in plain:
        scheduler.arrived(request)
        assert matched_of(scheduler, request) == 0
    assert sum(len(tracked.planned.pieces) for tracked in scheduler._tracked.values()) == most - 1


def test_what_is_preempted_is_read_and_salted_anew(sides, held):
    """Its chunks were let go of when they were placed. What the store has lost since is computed, without the salt."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}}, cache_salt="mine")
    scheduler.arrived(request)
    assert matched_of(scheduler, request) == 18
    salt = request.cache_salt
    scheduler.allocated(request, tuple(range(8)), 18)
    assert not scheduler._tracked["own"].planned.pieces
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    assert scheduler.matched(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.matched(request, 0) is None
    assert matched_of(scheduler, request) == 18
    assert request.cache_salt == salt
    scheduler.allocated(request, tuple(range(8)), 10)
    assert scheduler.orders(output_of({}, {}, {})).loads[0].first == 8

    store = sides.worker.stores.of("default")
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        store.delete(segment.id, "tiny")
    assert matched_of(scheduler, request) == 0
    assert request.cache_salt == "mine"
    assert scheduler.finished(request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"


def test_tokens_that_come_from_an_approximate_plan_are_never_told_to_be_exact(sides, held):
    """Preempted behind its first tokens; what the store has lost since is computed. Those tokens stay in the answer."""
    held.set()
    scheduler, store = sides.scheduler, sides.worker.stores.of("default")
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.arrived(request)
    scheduler.allocated(request, tuple(range(8)), matched_of(scheduler, request))
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        store.delete(segment.id, "tiny")
    assert matched_of(scheduler, request) == 0
    scheduler.allocated(request, tuple(range(8)), 0)
    told = scheduler.finished(request)["kvpatch"]
    assert (told["exact"], told["kl"]) == (False, None)
    assert (told["matched"], told["served"]) == (0, []), "of the last plan"


def test_what_was_planned_and_never_placed_is_not_told_to_be_served(sides, held):
    held.set()
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    sides.scheduler.arrived(request)
    assert matched_of(sides.scheduler, request) == 18
    told = sides.scheduler.finished(request)["kvpatch"]
    assert (told["matched"], told["served"], told["exact"], told["kl"]) == (0, [], True, 0.0)


def test_blocks_that_a_preempted_request_left_are_no_longer_its_own(sides, held):
    """Found whole in the engine's cache, it loads nothing: another's failure in its old blocks is none of its own."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    scheduler.arrived(request)
    scheduler.allocated(request, (3, 4), matched_of(scheduler, request))
    assert scheduler.matched(request, 8) == 0
    scheduler.allocated(request, (7, 8), 0)
    scheduler.failed({3, 4})
    assert not scheduler.finished(request)["kvpatch"]["failed"]


def test_a_request_that_reads_no_cache_is_told_that_nothing_was_served(sides):
    """The engine ignores what is matched where a prompt's log-probabilities are asked for."""
    served(sides, "forms", {"segments": [8]})
    request = request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.arrived(request)
    assert matched_of(sides.scheduler, request) == 0
    told = sides.scheduler.finished(request)["kvpatch"]
    assert (told["matched"], told["served"], told["exact"]) == (0, [], True)
