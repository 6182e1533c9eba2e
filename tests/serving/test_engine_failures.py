"""No failure of a store, a hook or a client's parameters fails a request: the engine prefills it, and serves others."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import errno
import functools
import os

import numpy as np
import pytest
from serving_hooks import BLOCKS, ask, engine_of
from serving_sides import TOKENS, matched_of, output_of, request_of, rows_of_kv, served, sides_of, true_kv

from kvpatch_jax.errors import StoreError
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.stores import Stores

PLAN = {"kvpatch": {"segments": [8, 18], "reuse": "blind", "save": False}}


@pytest.fixture(scope="module")
def engine(connector, tmp_path_factory):
    with engine_of(connector, tmp_path_factory.mktemp("boundary")) as engine:
        yield engine


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
    failures.clear()
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
    failures.clear()


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
    scheduler.failures.clear()


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
