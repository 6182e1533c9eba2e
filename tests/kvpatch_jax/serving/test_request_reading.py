"""Requests whose chunks are read in the background: what hooks answer meanwhile, and what a failing store costs."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import threading
import time

import pytest
from serving_sides import TOKENS, let_plan, matched_of, output_of, request_of, served, sides_of

from kvpatch_jax.errors import StoreClosedError, StoreIOError
from kvpatch_jax.serving.vllm import ConnectorConfig, segments_of
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.shared_stores import MAX_TENANTS
from kvpatch_jax.serving.vllm.stores import Stores
from kvpatch_jax.store import ChunkStore


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


class Gate(threading.Event):
    """An event that reads wait for, and the threads that came to it."""

    def __init__(self):
        super().__init__()
        self.waiting = set()

    def pass_by(self):
        """Waits for it, for at most a minute."""
        self.waiting.add(threading.get_ident())
        assert self.wait(60)


@pytest.fixture
def clock(monkeypatch):
    """The time that requests wait by: it stands still, and `clock[0]` moves it."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def held(sides, monkeypatch):
    """A store whose reads wait for `held.set()`; a leading chunk and a patch behind it are in it."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "patch", {"segments": [8, 18]})
    gate, get = Gate(), ChunkStore.get
    monkeypatch.setattr(ChunkStore, "get", lambda *args, **options: (gate.pass_by(), get(*args, **options))[-1])
    yield gate
    gate.set()


def test_other_requests_are_served_while_chunks_are_read(sides, held):
    """The engine asks, is told to ask again, goes on; nothing waits for the store. Then the request is salted first."""
    scheduler, plan = sides.scheduler, {"kvpatch": {"segments": [8, 18], "policy": "blind"}}
    slow, plain = request_of("slow", plan), request_of("plain", None)
    began = time.monotonic()
    scheduler.add_request(slow)
    scheduler.add_request(plain)
    assert scheduler.match(slow, 0) is None
    assert scheduler.match(plain, 0) == 0
    assert scheduler.build_commands(output_of({"plain": 30}, {"plain": 0}, {})) == StepCommands()
    assert time.monotonic() - began < 30, "the gate would have held it for 60 s"
    assert slow.cache_salt is None
    held.set()
    while scheduler.match(slow, 0) is None and slow.cache_salt is None:
        time.sleep(0.001)
    assert slow.block_hashes == [f"with {slow.cache_salt}"]
    assert scheduler.match(slow, 4) == 14


def test_cache_hits_found_without_the_salt_are_not_counted(sides, held):
    """A plan that becomes ready between the engine's look into its cache and its question: asked again, once."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.add_request(request)
    while request.cache_salt is None:
        assert scheduler.match(request, 12) is None, "12 tokens of a plain request are no longer its own"
    assert scheduler.match(request, 0) == 18
    leading = request_of("leading", {"kvpatch": {"segments": [8, 18]}})
    scheduler.add_request(leading)
    assert matched_of(scheduler, leading, 4) == 4
    assert leading.block_hashes == ["early"], "no salt: nothing is to be looked up again"


def test_a_store_that_hangs_costs_only_a_prefill(sides, held, clock):
    scheduler = sides.scheduler
    request = request_of("late", {"kvpatch": {"segments": [8]}})
    scheduler.add_request(request)
    assert scheduler.match(request, 0) is None
    clock[0] += scheduler.config.patience
    assert matched_of(scheduler, request) == 0
    assert scheduler.counts["unread"] == 1
    assert request.block_hashes == ["early"]
    output = output_of({"late": 30}, {"late": 0}, {"late": tuple(range(8))})
    assert scheduler.build_commands(output) == StepCommands(), "that store is not asked for anything else either"
    assert scheduler.finish(request)["kvpatch"]["why"] == "its chunks could not be read"


def test_no_request_waits_while_every_reader_hangs(sides, held, clock):
    """The first ones wait for as long as a store may take, those that come then not at all; until it answers again."""
    scheduler = sides.scheduler
    ask = lambda name: request_of(name, {"kvpatch": {"segments": [8]}})
    hanging = [ask(str(number)) for number in range(scheduler.config.readers)]
    for request in hanging:
        scheduler.add_request(request)
    while len(held.waiting) < len(hanging):
        time.sleep(0.001)
    clock[0] += scheduler.config.patience
    assert [matched_of(scheduler, request) for request in hanging] == [0] * len(hanging)
    later = [ask(f"later {number}") for number in range(3 * scheduler.config.ahead)]
    for request in later:
        scheduler.add_request(request)
    assert [scheduler.match(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert scheduler.counts["unread"] == len(hanging) + len(later)
    assert scheduler.finish(later[0])["kvpatch"]["why"] == "its chunks could not be read"
    held.set()
    for number in range(1000):  # until a thread has ended what it hung at
        after = ask(f"after {number}")
        scheduler.add_request(after)
        if matched_of(scheduler, after) == 8:
            break
        time.sleep(0.001)
    else:
        pytest.fail("no request is read again")


def test_requests_abandoned_while_read_do_not_block_others(sides, held):
    """Readers at work for nobody are no readers that hang: others wait for them."""
    scheduler = sides.scheduler
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(4)]
    for request in requests:
        scheduler.add_request(request)
    for request in requests[:3]:
        scheduler.finish(request)
    assert scheduler.match(requests[3], 0) is None
    held.set()
    assert matched_of(scheduler, requests[3]) == 8


def test_a_store_that_hangs_while_opening_blocks_no_other(tmp_path, monkeypatch):
    """Neither another tenant's nor closing; what was opened behind that is not used."""
    hang, begun, errors = threading.Event(), threading.Event(), []
    opened = ChunkStore.__init__

    def opening(self, root, *, tenant, **options):
        if tenant == "bad":
            begun.set()
            hang.wait(60)
        opened(self, root, tenant=tenant, **options)

    def asks():
        try:
            own.of("bad")
        except StoreClosedError as error:
            errors.append(error)

    monkeypatch.setattr(ChunkStore, "__init__", opening)
    own = Stores(ConnectorConfig(store=str(tmp_path), backbone="tiny"))
    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    begun.wait(60)
    assert not own.has_canonical("good", "0" * 64)
    own.close()
    hang.set()
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(StoreClosedError, match="after close"):
        own.of("good")


def test_a_store_in_use_is_not_closed_for_other_tenants(tmp_path):
    own = Stores(ConnectorConfig(store=str(tmp_path), backbone="tiny"))
    one = own.of("one")
    assert own.of("two") is own.of("two")
    for number in range(MAX_TENANTS - 1):
        own.of(f"another {number}")
    assert one.get("0" * 64, "tiny") is None
    assert own.of("one") is not one, "it was let go of"
    own.close()


def test_a_request_is_served_if_it_is_unknown_what_to_form(sides, held, monkeypatch):
    held.set()
    monkeypatch.setattr(Stores, "is_formed", lambda *_: (_ for _ in ()).throw(StoreIOError("on purpose")))
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18]}})
    scheduler.add_request(request)
    assert matched_of(scheduler, request) == 8
    assert (scheduler.counts["unsaved"], scheduler.counts["unread"]) == (1, 0)


def test_the_engines_thread_accesses_no_store(sides, monkeypatch):
    """Whatever the scheduler is asked: stores are looked into on threads of their own."""
    asked = []
    engine = threading.current_thread()
    for name in ("of", "has_canonical", "patches_behind", "is_formed"):
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
    scheduler.order_load(request, tuple(range(8)), 18)
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    scheduler.mark_failed({0})
    assert matched_of(scheduler, request) == 0
    scheduler.finish(request)
    reads_none = request_of("reads no cache", {"kvpatch": ask}, skip_reading_prefix_cache=True)
    abandoned = request_of("abandoned", {"kvpatch": ask})
    for own in (reads_none, abandoned):
        scheduler.add_request(own)
        scheduler.finish(own)
    monkeypatch.setattr(ChunkStore, "get", lambda *_, **__: 1 / 0)
    unread = request_of("unread", {"kvpatch": ask})
    scheduler.add_request(unread)
    assert matched_of(scheduler, unread) == 0
    scheduler.order_load(unread, tuple(range(8)), 0)
    blocks = {"unread": tuple(range(8))}
    assert scheduler.build_commands(output_of({"unread": 30}, {"unread": 0}, blocks)) == StepCommands()
    scheduler.finish(unread)
    assert {name for name, _ in asked} == {"of", "has_canonical", "patches_behind", "is_formed"}
    assert not [name for name, in_loop in asked if in_loop]


def test_a_chunk_of_two_concurrent_requests_is_formed_once(sides):
    """Both were planned before either was prefilled."""
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(2)]
    for request in requests:
        sides.scheduler.add_request(request)
    blocks = {"0": tuple(range(8)), "1": tuple(range(8, 16))}
    for request in requests:
        assert matched_of(sides.scheduler, request) == 0
        sides.scheduler.order_load(request, blocks[request.request_id], 0)
        sides.pool.prefill(request.request_id, TOKENS, blocks[request.request_id])
    orders = sides.scheduler.build_commands(output_of({"0": 30, "1": 30}, {"0": 0, "1": 0}, blocks))
    assert [save.wanted for save in orders.saves] == [(0,), (0,)]
    sides.worker.save(orders)
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 1, "known": 1}


def test_chunks_are_formed_from_a_request_that_reads_no_cache(sides):
    """Its prompt's log-probabilities are asked for, so that all of it is computed, and exactly."""
    blocks, request = tuple(range(8)), request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.add_request(request)
    assert sides.scheduler.match(request, 0) == 0, "it is not asked again"
    sides.scheduler.order_load(request, blocks, 0)
    let_plan(sides.scheduler)
    sides.pool.prefill("own", TOKENS, blocks)
    (save,) = sides.scheduler.build_commands(output_of({"own": 30}, {"own": 0}, {"own": blocks})).saves
    assert save.wanted == (0,)
    assert sides.scheduler.finish(request)["kvpatch"]["why"] == "the request reads no cache"


def test_a_finished_request_is_not_salted_later(sides, held):
    scheduler = sides.scheduler
    request = request_of("gone", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.add_request(request)
    assert scheduler.finish(request)["kvpatch"]["matched"] == 0
    held.set()
    assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    assert request.cache_salt is None
    assert scheduler.finish(request) is None, "it is forgotten"


def test_a_request_is_served_without_chunks_whatever_reading_raises(sides, monkeypatch):
    monkeypatch.setattr(ChunkStore, "get", lambda *_, **__: 1 / 0)
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    sides.scheduler.add_request(request)
    assert matched_of(sides.scheduler, request) == 0
    assert sides.scheduler.counts["unread"] == 1


def test_the_number_of_requests_with_chunks_in_memory_is_limited(sides, held):
    """They fill memory: the ninth is read when one of eight was placed, or is gone; plans of nothing hold nothing."""
    scheduler, most = sides.scheduler, sides.scheduler.config.ahead
    held.set()
    requests = [request_of(str(number), {"kvpatch": {"segments": [8, 18]}}) for number in range(most + 2)]
    for request in requests:
        scheduler.add_request(request)
    for request in requests[:most]:
        assert matched_of(scheduler, request) == 8
    assert [scheduler.match(request, 0) for request in requests[most:]] == [None, None]
    scheduler.order_load(requests[0], tuple(range(8)), 8)
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    assert matched_of(scheduler, requests[most]) == 8
    assert scheduler.match(requests[most + 1], 0) is None
    scheduler.order_load(requests[1], tuple(range(8)), 0)
    assert matched_of(scheduler, requests[most + 1]) == 8
    plain = [request_of(f"{number} unknown", {"kvpatch": {"segments": [9]}}) for number in range(most + 2)]
    scheduler.add_request(plain[0])
    assert scheduler.match(plain[0], 0) is None
    scheduler.finish(requests[2])
    for request in plain:
        scheduler.add_request(request)
        assert matched_of(scheduler, request) == 0


def test_a_preempted_request_is_read_and_salted_again(sides, held):
    """Its chunks were let go of when they were placed. What the store has lost since is computed, without the salt."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}}, cache_salt="mine")
    scheduler.add_request(request)
    assert matched_of(scheduler, request) == 18
    salt = request.cache_salt
    scheduler.order_load(request, tuple(range(8)), 18)
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    assert scheduler.match(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.match(request, 0) is None
    assert matched_of(scheduler, request) == 18
    assert request.cache_salt == salt
    scheduler.order_load(request, tuple(range(8)), 10)
    assert scheduler.build_commands(output_of({}, {}, {})).loads[0].first == 8

    store = sides.worker.stores.of("default")
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        store.delete(segment.id, "tiny")
    assert matched_of(scheduler, request) == 0
    assert request.cache_salt == "mine"
    assert scheduler.finish(request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"


def test_tokens_of_an_approximate_plan_are_never_reported_as_exact(sides, held):
    """Preempted behind its first tokens; what the store has lost since is computed. Those tokens stay in the answer."""
    held.set()
    scheduler, store = sides.scheduler, sides.worker.stores.of("default")
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    scheduler.add_request(request)
    scheduler.order_load(request, tuple(range(8)), matched_of(scheduler, request))
    assert len(scheduler.build_commands(output_of({}, {}, {})).loads) == 1
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        store.delete(segment.id, "tiny")
    assert matched_of(scheduler, request) == 0
    scheduler.order_load(request, tuple(range(8)), 0)
    told = scheduler.finish(request)["kvpatch"]
    assert (told["exact"], told["kl"]) == (False, None)
    assert (told["matched"], told["served"]) == (0, []), "of the last plan"


def test_a_plan_that_was_never_placed_is_not_reported_as_served(sides, held):
    held.set()
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}})
    sides.scheduler.add_request(request)
    assert matched_of(sides.scheduler, request) == 18
    told = sides.scheduler.finish(request)["kvpatch"]
    assert (told["matched"], told["served"], told["exact"], told["kl"]) == (0, [], True, 0.0)


def test_failed_blocks_of_an_earlier_allocation_do_not_fail_a_request(sides, held):
    """Found whole in the engine's cache, it loads nothing: another's failure in its old blocks is none of its own."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    scheduler.add_request(request)
    scheduler.order_load(request, (3, 4), matched_of(scheduler, request))
    assert scheduler.match(request, 8) == 0
    scheduler.order_load(request, (7, 8), 0)
    scheduler.mark_failed({3, 4})
    assert not scheduler.finish(request)["kvpatch"]["failed"]


def test_a_request_that_reads_no_cache_is_reported_as_not_served(sides):
    """The engine ignores what is matched where a prompt's log-probabilities are asked for."""
    served(sides, "forms", {"segments": [8]})
    request = request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.add_request(request)
    assert matched_of(sides.scheduler, request) == 0
    told = sides.scheduler.finish(request)["kvpatch"]
    assert (told["matched"], told["served"], told["exact"]) == (0, [], True)
