"""The engine's hooks for operators: events, metrics, reset and other weights, in any order."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
import functools
from types import SimpleNamespace

import prometheus_client
import pytest
from serving_hooks import ask, stand_in
from serving_sides import PAGE, TOKENS, matched_of, output_of, report_of, request_of, served, sides_of

from kvpatch_jax.serving.vllm import segments_of
from kvpatch_jax.serving.vllm.messages import StepCommands

LEADING = {"kvpatch": {"segments": [8], "save": False}}
BLOCKS = tuple(range(8))


@pytest.fixture
def kinds(monkeypatch):
    """vLLM's kinds of events, stood in for."""
    fields = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    kinds = {"BlockStored": dataclasses.make_dataclass("BlockStored", [*fields, "extra_keys"])}
    kinds["BlockRemoved"] = dataclasses.make_dataclass("BlockRemoved", ["block_hashes", "medium"])
    hashing = {"maybe_convert_block_hash": lambda block: f"converted {block}"}
    stand_in(monkeypatch, vllm__distributed__kv_events=kinds | {"MEDIUM_STORAGE": "STORAGE"})
    stand_in(monkeypatch, vllm__v1__core__kv_cache_utils=hashing)
    return SimpleNamespace(**kinds)


def hashed(name):
    """Returns a request whose blocks are hashed as an engine hashes them: each with all those in front."""
    hashes = [str(TOKENS[:end]) for end in range(PAGE, len(TOKENS) + 1, PAGE)]
    return request_of(name, LEADING, block_hashes=hashes)


def test_blocks_of_exact_chunks_are_announced_and_withdrawn(engine, kinds):
    request = hashed("request")
    hashes = [f"converted {block}" for block in request.block_hashes[:2]]
    assert ask(engine, request).count == 8
    stored = kinds.BlockStored(hashes, None, TOKENS[:8], PAGE, None, "STORAGE", None, [None, None])
    assert engine.scheduler.take_events() == [stored]
    side, segment = engine.scheduler.scheduler_side, segments_of("tiny", TOKENS, ends=[8])[0]
    side.stores.of("default").delete(segment.id, "tiny")
    assert ask(engine, hashed("gone")).count == 0
    assert engine.scheduler.take_events() == [kinds.BlockRemoved(hashes, "STORAGE")]


def test_after_a_reset_nothing_that_was_stored_is_served(engine, kinds):
    side = engine.scheduler.scheduler_side
    assert ask(engine, hashed("before")).count == 8
    side.certificate = object()
    assert engine.scheduler.reset_cache() is True
    assert side.certificate is None, "the weights may be others now"
    assert [type(event) for event in engine.scheduler.take_events()] == [kinds.BlockStored, kinds.BlockRemoved]
    answer = ask(engine, request_of("after", {"kvpatch": {"segments": [8]}}))
    assert (answer.count, answer.report["why"]) == (0, "chunk 1 of 1 is not stored")
    assert ask(engine, request_of("formed since", LEADING)).count == 8


@pytest.mark.parametrize("moment", ["planned", "matched", "placed"])
def test_a_running_request_is_served_and_saves_nothing_of_before_a_reset(sides, moment):
    """What was read for it is dropped; what was placed stays, with its salt."""
    scheduler, request = sides.scheduler, request_of("request", {"kvpatch": {"segments": [8, 18], "reuse": "blind"}})
    for name, tokens, end in (("second", TOKENS[8:], 10), ("first", TOKENS, 8)):
        served(sides, name, {"segments": [end]}, tokens)
    scheduler.add_request(request)
    if moment != "planned":
        assert matched_of(scheduler, request) == 18
    if moment == "placed":
        scheduler.order_load(request, BLOCKS, 18)
        assert len(scheduler.take_promised().loads) == 1
    salt = request.cache_salt
    scheduler.reset()
    assert request.cache_salt == salt, "its blocks are cached under it"
    assert (matched_of(scheduler, request), request.cache_salt) == (0, None)
    scheduler.order_load(request, BLOCKS, 0)
    output = output_of({"request": 30}, {"request": 0}, {"request": BLOCKS})
    assert scheduler.build_commands(output) == StepCommands()
    assert scheduler.finish(request)["kvpatch"]["exact"] == (moment != "placed")
    assert len(served(sides, "later", {"segments": [8]}).orders.saves) == 1


def test_operators_hooks_fail_softly(engine, monkeypatch, caplog):
    """Also those of the other role, which the engine does not call."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.scheduler_side, "reset", lambda: 1 / 0)
        assert engine.scheduler.reset_cache() is False
        patch.setattr(engine.scheduler.scheduler_side.metrics, "take", lambda *_: 1 / 0)
        assert engine.scheduler.get_kv_connector_stats() is None
    assert (engine.worker.reset_cache(), engine.worker.take_events()) == (False, [])
    assert ask(engine, request_of("request", LEADING)).count == 8
    assert engine.scheduler.get_kv_connector_stats().data["counts"]["hook_failures"]["reset_cache"] == 1


def test_counts_of_both_sides_reach_the_servers_page(engine, connector):
    ask(engine, request_of("request", LEADING))
    stats = engine.scheduler.get_kv_connector_stats()
    stats.aggregate(engine.worker.get_kv_connector_stats())
    assert engine.scheduler.get_kv_connector_stats() is None, "each count is sent once"
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        name: functools.partial(getattr(prometheus_client, name), registry=registry) for name in ("Counter", "Gauge")
    }
    prom = connector.KVPatchConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    prom.observe(connector.KVPatchConnector.build_kv_connector_stats(stats.data).data, 0)
    for name, label, word, count in (("served_chunks", "point", "leading", 1), ("formed", "outcome", "canonicals", 2)):
        assert registry.get_sample_value(f"vllm:kvpatch_{name}_total", {"engine": "0", label: word}) == count
    prom.observe({"counts": 7}, 0)  # logged, and the server goes on


def test_an_engine_of_other_weights_is_served_nothing_and_forms_nothing(tmp_path):
    with sides_of(tmp_path, weights="ab" * 16) as sides:
        served(sides, "first", {"segments": [8]})
        assert served(sides, "again", {"segments": [8]}).count == 8
    with sides_of(tmp_path, weights="cd" * 16) as sides:
        answer = served(sides, "other", {"segments": [9]})
        assert (answer.count, answer.orders.saves) == (0, ())
        assert report_of(sides, answer)["why"] == "its chunks are of other weights"


def test_hooks_in_any_order_disturb_no_request(engine):
    """Also after the end."""
    scheduler, worker = engine.scheduler, engine.worker
    request = request_of("request", LEADING)
    scheduler.on_new_request(request)
    while scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        scheduler.get_kv_connector_stats()
        scheduler.build_connector_meta(output_of({}, {}, {}))
    for _ in range(2):
        assert scheduler.reset_cache() is True
        worker.get_kv_connector_stats()
    assert scheduler.request_finished(request, [])[1]["kvpatch"]["served"] == []
    assert scheduler.request_finished(request, []) == (False, None), "it is forgotten"
    scheduler.shutdown()
    worker.shutdown()
    scheduler.get_kv_connector_stats()
    assert not scheduler.failures
    assert not worker.failures
