"""Chunks are read in the background: the engine's thread waits for no store, whatever that does."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import threading
import time

import pytest
from serving_sides import TOKENS, matched_of, output_of, report_of, request_of, served, sides_of

from kvpatch_jax.errors import StoreIOError
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
def sides(tmp_path):
    """Both sides, with the canonicals of two chunks and a patch of the second stored."""
    with sides_of(tmp_path) as sides:
        served(sides, "first", {"segments": [8]})
        served(sides, "second", {"segments": [10]}, TOKENS[8:])
        served(sides, "patch", {"segments": [8, 18]})
        yield sides


@pytest.fixture
def gate(sides, monkeypatch):
    """An event that reads of chunks wait for; `gate.threads` are those that have come to it."""
    event, get = threading.Event(), ChunkStore.get
    event.threads = set()

    def waiting(*args, **options):
        event.threads.add(threading.get_ident())
        assert event.wait(60)
        return get(*args, **options)

    monkeypatch.setattr(ChunkStore, "get", waiting)
    yield event
    event.set()


@pytest.fixture
def clock(monkeypatch):
    """The time that requests wait by: it stands still, and `clock[0]` moves it."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def placed(scheduler, name, params=PATCHED, **changes):
    """Returns a request whose load was commanded."""
    request = request_of(name, params, **changes)
    scheduler.add_request(request)
    scheduler.order_load(request, BLOCKS, matched_of(scheduler, request))
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    return request


def delete_all(sides):
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        sides.worker.stores.of("default").delete(segment.id, "tiny")


def test_other_requests_are_served_while_chunks_are_read(sides, gate):
    """The engine is told to ask again, and goes on. Then the request is salted before it is matched."""
    scheduler, slow, plain = sides.scheduler, request_of("slow", PATCHED), request_of("plain", None)
    scheduler.add_request(slow)
    scheduler.add_request(plain)
    assert (scheduler.match(slow, 0), scheduler.match(plain, 0)) == (None, 0)
    assert scheduler.build_commands(output_of({"plain": 30}, {"plain": 0}, {})) == StepCommands()
    assert slow.cache_salt is None
    gate.set()
    while slow.cache_salt is None:
        assert scheduler.match(slow, 12) is None, "12 tokens of a plain request are not this one's"
    assert slow.block_hashes == [f"with {slow.cache_salt}"]
    assert scheduler.match(slow, 4) == 14


def test_a_store_that_hangs_costs_only_a_prefill(sides, gate, clock):
    """The first requests wait for the patience, later ones not at all; until the store answers again."""
    scheduler = sides.scheduler
    hanging = [request_of(str(number), LEADING) for number in range(READERS)]
    for request in hanging:
        scheduler.add_request(request)
    while len(gate.threads) < READERS:
        time.sleep(0.001)
    clock[0] += PATIENCE
    assert [matched_of(scheduler, request) for request in hanging] == [0] * READERS
    later = [request_of(f"later {number}", LEADING) for number in range(3 * AHEAD)]
    for request in later:
        scheduler.add_request(request)
    assert [scheduler.match(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert later[0].block_hashes == ["early"]
    output = output_of({"0": 30}, {"0": 0}, {"0": BLOCKS})
    assert scheduler.build_commands(output) == StepCommands(), "nothing is formed for that store either"
    assert scheduler.finish(hanging[0])["kvpatch"]["why"] == "its chunks could not be read"
    gate.set()
    for number in range(1000):  # until a thread has ended its read
        request = request_of(f"after {number}", LEADING)
        scheduler.add_request(request)
        if matched_of(scheduler, request) == 8:
            return
        time.sleep(0.001)
    pytest.fail("no request is read again")


def test_the_number_of_requests_with_chunks_in_memory_is_limited(sides):
    """The next one is read when one was placed or is gone."""
    scheduler = sides.scheduler
    requests = [request_of(str(number), LEADING) for number in range(AHEAD + 2)]
    for request in requests:
        scheduler.add_request(request)
    assert [matched_of(scheduler, request) for request in requests[:AHEAD]] == [8] * AHEAD
    assert [scheduler.match(request, 0) for request in requests[AHEAD:]] == [None, None]
    scheduler.order_load(requests[0], BLOCKS, 8)
    scheduler.take_promised()
    assert matched_of(scheduler, requests[AHEAD]) == 8
    assert scheduler.match(requests[AHEAD + 1], 0) is None
    scheduler.finish(requests[1])
    assert matched_of(scheduler, requests[AHEAD + 1]) == 8


def test_whatever_reading_raises_costs_only_a_prefill(sides, monkeypatch):
    monkeypatch.setattr(Stores, "canonical", lambda *_: 1 / 0)
    assert served(sides, "request", {"segments": [8]}).count == 0
    assert sides.scheduler.counts["unread"] == 1


def test_a_prompt_of_damaged_chunks_is_planned_twice_not_once_for_each(tmp_path, monkeypatch):
    """Choosing anew after each one would take a time that grows with the cube of their number."""
    ends, choices = list(range(4, 29, 4)), []
    with sides_of(tmp_path) as sides:
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


def test_a_request_is_served_if_it_is_unknown_what_to_form(sides, monkeypatch):
    def fail(*_):
        raise StoreIOError("on purpose")

    monkeypatch.setattr(Stores, "has_patch", fail)
    assert served(sides, "request", {"segments": [8, 18]}).count == 8
    assert (sides.scheduler.counts["unsaved"], sides.scheduler.counts["unread"]) == (1, 0)


def test_the_engines_thread_accesses_no_store(sides, monkeypatch):
    engine, calls = threading.current_thread(), []
    for name in ("of", "has_canonical", "canonical", "has_patch", "prefills"):
        method = getattr(Stores, name)

        def noting(self, *args, method=method, name=name):
            calls.append((name, threading.current_thread() is engine))
            return method(self, *args)

        monkeypatch.setattr(Stores, name, noting)
    for name, options in (("exact", {}), ("patched", {"reuse": "patched"}), ("unsaved", {"save": False})):
        report_of(sides, served(sides, name, {"segments": [8, 18], **options}))
    request = placed(sides.scheduler, "preempted")
    assert matched_of(sides.scheduler, request) == 18
    sides.scheduler.order_load(request, BLOCKS, 18)
    sides.scheduler.take_promised()
    sides.scheduler.mark_failed({0})
    sides.scheduler.finish(request)
    assert calls
    assert not [name for name, is_engine in calls if is_engine]


def test_chunks_of_two_concurrent_requests_are_formed_once(tmp_path):
    with sides_of(tmp_path) as sides:
        requests = [request_of(str(number), LEADING) for number in range(2)]
        blocks = {"0": BLOCKS, "1": tuple(range(8, 16))}
        for request in requests:
            sides.scheduler.add_request(request)
        for request in requests:
            assert matched_of(sides.scheduler, request) == 0
            sides.scheduler.order_load(request, blocks[request.request_id], 0)
            sides.pool.prefill(request.request_id, TOKENS, blocks[request.request_id])
        sides.worker.save(sides.scheduler.build_commands(output_of({"0": 30, "1": 30}, {"0": 0, "1": 0}, blocks)))
        sides.worker.former.flush()
        assert sides.worker.former.counts == {"canonicals": 1, "known": 1}


def test_a_request_that_reads_no_cache_is_formed_and_not_served(sides):
    """Its prompt's log-probabilities are asked for, so that all of it is computed."""
    request = request_of("name", {"kvpatch": {"segments": [9]}}, skip_reading_prefix_cache=True)
    sides.scheduler.add_request(request)
    assert sides.scheduler.match(request, 0) == 0
    sides.scheduler.order_load(request, BLOCKS, 0)
    for _ in range(100):
        assert sides.scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    (save,) = sides.scheduler.build_commands(output_of({"name": 30}, {"name": 0}, {"name": BLOCKS})).saves
    report = sides.scheduler.finish(request)["kvpatch"]
    assert (save.wanted, report["served"], report["why"]) == ((0,), [], "the request reads no cache")


# ------------------------------------------------------------------------------------- preempted and finished early


def test_a_preempted_request_is_read_and_salted_again(sides):
    """What the store has lost since is computed, without the salt; earlier tokens stay in the answer."""
    scheduler = sides.scheduler
    request = placed(scheduler, "name")
    salt = request.cache_salt
    assert scheduler.match(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.match(request, 0) is None
    assert (matched_of(scheduler, request), request.cache_salt) == (18, salt)
    scheduler.order_load(request, BLOCKS, 10)
    assert scheduler.build_commands(output_of({}, {}, {})).loads[0].first == 8
    delete_all(sides)
    assert (matched_of(scheduler, request), request.cache_salt) == (0, None)
    scheduler.order_load(request, BLOCKS, 0)
    report = scheduler.finish(request)["kvpatch"]
    assert (report["matched"], report["exact"], report["kl"]) == (0, False, None)
    assert report["why"] == "chunk 1 of 2 is not stored"


def test_failed_blocks_of_an_earlier_allocation_do_not_fail_a_request(sides):
    request = placed(sides.scheduler, "name", LEADING)
    assert sides.scheduler.match(request, 8) == 0
    sides.scheduler.order_load(request, (7, 8), 0)
    sides.scheduler.mark_failed({0, 1})
    assert not sides.scheduler.finish(request)["kvpatch"]["failed"]


def test_a_request_that_ends_before_it_is_placed_is_served_nothing(sides, gate):
    scheduler, early, planned = sides.scheduler, request_of("early", PATCHED), request_of("planned", PATCHED)
    scheduler.add_request(early)
    assert scheduler.finish(early)["kvpatch"]["matched"] == 0
    gate.set()
    scheduler.add_request(planned)
    assert matched_of(scheduler, planned) == 18
    report = scheduler.finish(planned)["kvpatch"]
    assert (report["matched"], report["served"], report["exact"], report["kl"]) == (0, [], True, 0.0)
    assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    assert (early.cache_salt, scheduler.finish(early)) == (None, None)
