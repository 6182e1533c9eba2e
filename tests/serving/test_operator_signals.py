"""Operators get right signals: counts, events of exact blocks alone, and resets that leave nothing to serve."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

import dataclasses
import functools
import json
from types import SimpleNamespace

import pytest
from serving_hooks import ask, engine_of, stand_in
from serving_sides import PAGE, TOKENS, matched_of, output_of, request_of, served

from kvpatch_jax.serving.vllm import PromptSegment, segments_of
from kvpatch_jax.serving.vllm.events import BlockEvents, BlocksRemoved, BlocksStored
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.metrics import METRICS

LEADING = {"kvpatch": {"segments": [8], "save": False}}
BLOCKS = tuple(range(8))
ENDINGS = {"counter": "_total", "gauge": ""}


@pytest.fixture
def engine(connector, tmp_path):
    with engine_of(connector, tmp_path) as engine:
        yield engine


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


def hashed(name="request", params=LEADING, tokens=TOKENS, salt=None, images=(), hashes=None):
    """Returns a request whose blocks are hashed as an engine hashes them: each with all those in front."""
    hashes = hashes or [f"{salt} {images} {tokens[:end]}" for end in range(PAGE, len(tokens) + 1, PAGE)]
    positions = [(image, SimpleNamespace(offset=offset, length=length)) for image, offset, length in images]
    features = [SimpleNamespace(identifier=image, mm_position=position) for image, position in positions]
    return request_of(name, params, tokens, block_hashes=hashes, cache_salt=salt, mm_features=features)


# -------------------------------------------------------------------------------------------------------------- events


@pytest.fixture
def collected() -> BlockEvents:
    collected = BlockEvents(PAGE)
    collected.enabled = True
    return collected


def steps_of(*ends, exact=10, point="near"):
    """Steps of a plan; the one at the place `exact` is approximate."""
    steps = [SimpleNamespace(segment=PromptSegment("id", 0, end), exact=True, point="restored") for end in ends]
    for step in steps[exact : exact + 1]:
        step.exact, step.point = False, point
    return steps


def test_blocks_are_announced_as_far_as_a_plan_is_exact_and_withdrawn_when_they_are_gone(collected):
    """A survivor says nothing of the exact chunk in its place, which other requests can load."""
    request, nothing = hashed(), (None,) * 4
    hashes = tuple(request.block_hashes)
    for steps, expected in (
        (steps_of(8, 18), [BlocksStored(hashes[:4], None, tuple(TOKENS[:16]), PAGE, nothing)]),
        (steps_of(8, 18), []),
        (steps_of(8, 18, 24), [BlocksStored(hashes[4:6], hashes[3], tuple(TOKENS[16:24]), PAGE, nothing[:2])]),
        (steps_of(8, 12, 24, exact=1, point="survivor"), []),
        (steps_of(8, 12, 24, exact=1), [BlocksRemoved(hashes[2:6])]),
        ([], [BlocksRemoved(hashes[:2])]),
    ):
        collected.note_plan(request, None, steps)
        assert collected.take() == expected


def test_images_and_salts_are_announced_with_what_vllm_hashes_of_them(collected):
    """`generate_block_hash_extra_keys` of vLLM 0.32: images from each block's start, then the first block's salt."""
    request = hashed(salt="acme", images=(("cat", 2, 7), ("dog", 9, 2)))
    collected.note_plan(request, "acme", steps_of(16))
    (stored,) = collected.take()
    assert stored.extra_keys == ((("cat", 2), "acme"), (("cat", -2),), (("cat", -6), ("dog", 1)), None)
    assert stored.hashes == tuple(request.block_hashes[:4])


def test_what_a_router_could_not_use_is_not_announced(collected):
    """Approximate, less than a block, salted by the plan, hashed in other units; or nobody listens."""
    for request, steps, enabled in (
        (hashed(), steps_of(PAGE - 1), True),
        (hashed(salt="kvpatch-1234"), steps_of(8), True),
        (hashed(hashes=["other units"] * 3), steps_of(8), True),
        (hashed(), steps_of(8), False),
    ):
        collected.enabled = enabled
        collected.note_plan(request, None, steps)
        assert collected.take() == []


def test_blocks_of_exact_chunks_reach_the_engines_events(engine, kinds):
    request = hashed()
    hashes = [f"converted {block}" for block in request.block_hashes[:2]]
    assert ask(engine, request).count == 8
    stored = kinds.BlockStored(hashes, None, TOKENS[:8], PAGE, None, "STORAGE", None, [None, None])
    assert engine.scheduler.take_events() == [stored]
    side, segment = engine.scheduler.scheduler_side, segments_of("tiny", TOKENS, ends=[8])[0]
    side.stores.of("default").delete(segment.id, "tiny")
    assert ask(engine, hashed("gone")).count == 0
    assert engine.scheduler.take_events() == [kinds.BlockRemoved(hashes, "STORAGE")]


# -------------------------------------------------------------------------------------------------------------- resets


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


def test_operators_hooks_fail_softly(engine, monkeypatch):
    """Also those of the other role, in any order, and after the end."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.scheduler_side, "reset", lambda: 1 / 0)
        assert engine.scheduler.reset_cache() is False
        patch.setattr(engine.scheduler.scheduler_side.metrics, "take", lambda *_: 1 / 0)
        assert engine.scheduler.get_kv_connector_stats() is None
    assert (engine.worker.reset_cache(), engine.worker.take_events()) == (False, [])
    assert ask(engine, request_of("request", LEADING)).count == 8
    assert engine.scheduler.get_kv_connector_stats().data["counts"]["hook_failures"]["reset_cache"] == 1
    failures, early = engine.scheduler.failures.copy(), request_of("early", LEADING)
    engine.scheduler.on_new_request(early)
    assert engine.scheduler.reset_cache() is True
    assert engine.scheduler.request_finished(early, [])[1]["kvpatch"]["served"] == []
    assert engine.scheduler.request_finished(early, []) == (False, None), "it is forgotten"
    engine.scheduler.shutdown()
    engine.worker.shutdown()
    assert engine.scheduler.get_kv_connector_stats().data["gauges"]["open_tenants"] == {"": 0}
    assert engine.scheduler.failures == failures


# ------------------------------------------------------------------------------------------------------------- metrics


def test_counts_of_both_sides_reach_the_servers_page(engine, connector):
    prometheus_client = pytest.importorskip("prometheus_client")
    ask(engine, request_of("request", LEADING))
    engine.scheduler.scheduler_side.counts.update({"unfit: LayoutError": 2, "unfit: WeightsError": 1, "unsaved": 1})
    engine.scheduler.failures.update({"discard: OSError": 2, "discard: KeyError": 1})
    engine.worker.worker_side.counts["unsaved"] += 4
    stats = engine.scheduler.get_kv_connector_stats()
    stats.aggregate(engine.worker.get_kv_connector_stats())
    assert json.loads(json.dumps(stats.data)) == stats.data, "plain data, which goes to the server's process"
    assert engine.scheduler.get_kv_connector_stats() is None, "each count is sent once"

    registry = prometheus_client.CollectorRegistry()
    kinds = {
        name: functools.partial(getattr(prometheus_client, name), registry=registry) for name in ("Counter", "Gauge")
    }
    page = connector.KVPatchConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    page.observe(connector.KVPatchConnector.build_kv_connector_stats(stats.data).data, 0)
    page.observe({"counts": 7}, 0)  # logged, and the server goes on
    page.observe({"counts": {"requests": {"exact": 2}}}, 1)
    for name, word, count, number in (
        *(("requests", "exact", 3, 0), ("requests", "exact", 2, 1)),
        ("requests", "blind", 0, 0),  # there from the start, so that a first increase is one
        *(("saved_tokens", "leading", 8, 0), ("formed", "canonicals", 2, 0), ("formed", "unsaved", 5, 0)),
        *(("unfit_chunks", "", 3, 0), ("hook_failures", "discard", 3, 0), ("open_tenants", "", 1, 0)),
        ("refusals", "not_stored", 2, 0),
    ):
        metric = METRICS[name]
        labels = {"engine": str(number)} | ({metric.label: word} if word else {})
        assert registry.get_sample_value(f"vllm:kvpatch_{name}{ENDINGS[metric.kind]}", labels) == count, (name, word)
