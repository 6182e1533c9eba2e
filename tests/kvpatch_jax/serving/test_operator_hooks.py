"""The engine's hooks for operators: events, reset and the check of versions, in any order and with errors."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from serving_hooks import ask, engine_of, imported_connector
from serving_sides import PAGE, TOKENS, matched_of, output_of, request_of, served, sides_of

from kvpatch_jax.serving.vllm import block_events
from kvpatch_jax.serving.vllm.block_events import BlockEvents, BlocksRemoved, BlocksStored
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.segments import segments_of
from kvpatch_jax.serving.vllm.versions import TRIED, check_versions

ROOT = Path(__file__).parents[3]
LEADING = {"kvpatch": {"segments": [8], "save": False}}
BLIND = {"kvpatch": {"segments": [8, 18], "policy": "blind", "save": False}}


@pytest.fixture(scope="module")
def connector():
    with imported_connector() as module:
        yield module


@pytest.fixture
def engine(connector, tmp_path):
    with engine_of(connector, tmp_path) as made:
        yield made


def hashed(name, params, tokens=TOKENS, **more):
    """A request whose blocks are hashed as an engine hashes them: each with all those in front."""
    request = request_of(name, params, tokens, **more)
    request.block_hashes = [str(tokens[: end + PAGE]) for end in range(0, len(tokens) - PAGE + 1, PAGE)]
    return request


# -------------------------------------------------------------------------------------------------------------- events


class EventsStandIn:
    """What of `vllm.distributed.kv_events` the connector uses."""

    def __init__(self, monkeypatch):
        events, hashing = ModuleType("vllm.distributed.kv_events"), ModuleType("vllm.v1.core.kv_cache_utils")
        fields = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
        events.BlockStored = dataclasses.make_dataclass("BlockStored", fields)
        events.BlockRemoved = dataclasses.make_dataclass("BlockRemoved", ["block_hashes", "medium"])
        events.MEDIUM_STORAGE = "STORAGE"
        hashing.maybe_convert_block_hash = lambda block: f"converted {block}"
        for name in ("vllm.v1", "vllm.v1.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, events.__name__, events)
        monkeypatch.setitem(sys.modules, hashing.__name__, hashing)
        self.stored, self.removed = events.BlockStored, events.BlockRemoved


def test_blocks_of_a_leading_chunk_are_announced_and_withdrawn(engine, monkeypatch):
    kinds = EventsStandIn(monkeypatch)
    side = engine.scheduler.scheduler_side
    side.events.enabled = True
    assert engine.scheduler.take_events() == []
    request = hashed("own", LEADING)
    hashes = [f"converted {block}" for block in request.block_hashes[:2]]
    assert ask(engine, request).count == 8
    (stored,) = engine.scheduler.take_events()
    assert stored == kinds.stored(hashes, None, TOKENS[:8], PAGE, None, "STORAGE", None)
    assert ask(engine, hashed("again", LEADING)).count == 8
    assert engine.scheduler.take_events() == [], "it is known"

    side.stores.of("default").delete(segments_of("tiny", TOKENS, ends=[8])[0].id, "tiny")
    assert ask(engine, hashed("gone", LEADING)).count == 0
    assert engine.scheduler.take_events() == [kinds.removed(hashes, "STORAGE")]


def test_nobody_is_told_unless_the_engine_publishes_events(engine):
    assert ask(engine, hashed("own", LEADING)).count == 8
    assert engine.scheduler.take_events() == []
    assert not engine.scheduler.scheduler_side.events._announced


@pytest.mark.parametrize("enabled", [True, False])
def test_the_engines_setting_says_whether_events_are_collected(connector, tmp_path, enabled):
    with engine_of(connector, tmp_path, events=SimpleNamespace(enable_kv_cache_events=enabled)) as engine:
        assert engine.scheduler.scheduler_side.events.enabled is enabled


def test_what_is_approximate_salted_or_no_text_is_not_announced():
    events = BlockEvents(PAGE)
    events.enabled = True
    text = segments_of("tiny", TOKENS, ends=[8])[0]
    image = text._replace(modality="image")
    exact, approximate = SimpleNamespace(exact=True), SimpleNamespace(exact=False)
    plain = hashed("plain", None)
    events.note_plan(plain, "acme", [text], [approximate])
    events.note_plan(plain, "acme", [image], [exact])
    events.note_plan(hashed("salted", None, cache_salt="mine"), "acme", [text], [exact])
    other_units = hashed("hashed in other units than blocks", None)
    other_units.block_hashes = other_units.block_hashes * 2
    events.note_plan(other_units, "acme", [text], [exact])
    events.note_plan(plain, "acme", [], [])
    short = text._replace(end=PAGE - 1)
    events.note_plan(plain, "acme", [short], [exact])
    assert events.take() == []
    events.note_plan(plain, "acme", [text], [exact])
    assert events.take() == [BlocksStored(tuple(plain.block_hashes[:2]), tuple(TOKENS[:8]), PAGE)]


def test_blocks_are_withdrawn_when_no_tenant_has_them_any_more(monkeypatch):
    events = BlockEvents(PAGE)
    events.enabled = True
    (segment,), request, exact = (
        segments_of("tiny", TOKENS, ends=[8]),
        hashed("own", None),
        [SimpleNamespace(exact=True)],
    )
    hashes = tuple(request.block_hashes[:2])
    for tenant in ("one", "two"):
        events.note_plan(request, tenant, [segment], exact)
    assert [type(event) for event in events.take()] == [BlocksStored, BlocksStored]
    events.note_plan(request, "one", [segment], [])
    assert events.take() == []
    events.note_plan(request, "two", [segment], [])
    events.note_plan(request, "two", [segment], [])
    assert events.take() == [BlocksRemoved(hashes)]

    monkeypatch.setattr(block_events, "MAX_ANNOUNCED", 2)
    for start in range(3):
        tokens = TOKENS[start:]
        events.note_plan(hashed("own", None, tokens), "one", segments_of("tiny", tokens, ends=[8]), exact)
    assert [type(event) for event in events.take()] == [BlocksStored] * 3 + [BlocksRemoved]
    events.clear()
    assert [type(event) for event in events.take()] == [BlocksRemoved] * 2
    assert not events._users


# --------------------------------------------------------------------------------------------------------------- reset


def test_after_a_reset_nothing_that_was_stored_is_served_and_all_goes_on(engine, caplog):
    side = engine.scheduler.scheduler_side
    assert ask(engine, request_of("before", LEADING)).count == 8
    side.certificate = object()
    assert engine.scheduler.reset_cache() is True
    assert "Nothing was deleted" in caplog.text
    assert side.certificate is None, "the weights may be others now"
    found = ask(engine, request_of("after", {"kvpatch": {"segments": [8]}}))
    assert (found.count, found.told["kvpatch"]["why"]) == (0, "chunk 1 of 1 is not stored")
    assert ask(engine, request_of("formed since", LEADING)).count == 8
    assert side.stores.of("default").contains(segments_of("tiny", TOKENS, ends=[8])[0].id, "tiny"), "for other engines"


def test_a_reset_withdraws_events(engine, monkeypatch):
    kinds = EventsStandIn(monkeypatch)
    engine.scheduler.scheduler_side.events.enabled = True
    ask(engine, hashed("own", LEADING))
    engine.scheduler.reset_cache()
    assert [type(event) for event in engine.scheduler.take_events()] == [kinds.stored, kinds.removed]


@pytest.mark.parametrize("moment", ["planned", "matched", "placed"])
def test_a_request_under_way_is_served_nothing_of_before_a_reset(tmp_path, moment):
    """Whatever was read for it is dropped; what was placed stays, with its salt, and is not read again."""
    with sides_of(tmp_path) as sides:
        served(sides, "alone", {"segments": [10]}, TOKENS[8:])
        served(sides, "whole", {"segments": [8, 18]})
        scheduler, request = sides.scheduler, request_of("own", BLIND, cache_salt="mine")
        scheduler.add_request(request)
        if moment != "planned":
            assert matched_of(scheduler, request) == 18
        if moment == "placed":
            scheduler.order_load(request, tuple(range(8)), 18)
            assert len(scheduler.take_promised().loads) == 1
            salt = request.cache_salt
            assert salt != "mine"
        scheduler.reset()
        if moment == "placed":
            assert request.cache_salt == salt, "its blocks are cached under it"
        assert matched_of(scheduler, request) == 0, "also if it was preempted"
        assert request.cache_salt == "mine"
        scheduler.order_load(request, tuple(range(8)), 0)
        assert scheduler.build_commands(output_of({"own": 30}, {"own": 0}, {"own": tuple(range(8))})) == StepCommands()
        told = scheduler.finish(request)["kvpatch"]
        assert (told["matched"], told["exact"]) == (0, moment != "placed")


@pytest.mark.parametrize("matched", [False, True])
def test_nothing_is_formed_of_a_request_that_a_reset_meets(tmp_path, matched):
    """Its tokens may be of two checkpoints; a request that comes later is formed."""
    with sides_of(tmp_path) as sides:
        scheduler, blocks = sides.scheduler, tuple(range(8))
        request = request_of("own", {"kvpatch": {"segments": [8]}})
        scheduler.add_request(request)
        if matched:
            assert matched_of(scheduler, request) == 0
        scheduler.reset()
        assert matched_of(scheduler, request) == 0
        scheduler.order_load(request, blocks, 0)
        assert scheduler.build_commands(output_of({"own": 30}, {"own": 0}, {"own": blocks})) == StepCommands()
        assert len(served(sides, "later", {"segments": [8]}).orders.saves) == 1


def test_a_reset_that_fails_says_so(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.scheduler_side, "reset", lambda: 1 / 0)
        assert engine.scheduler.reset_cache() is False
    assert engine.scheduler.failures["reset_cache: ZeroDivisionError"] == 1
    assert ask(engine, request_of("own", LEADING)).count == 8


# ------------------------------------------------------------------------------------------------------------ versions


def test_the_versions_that_were_tried_are_those_of_the_extra():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert dict(requirement.split("==") for requirement in extra) == {
        name: version for name, version in TRIED.items() if name != "jax"
    }


@pytest.mark.parametrize(
    ("installed", "differing"),
    [
        (TRIED, {}),
        ({**TRIED, "jax": "0.11.2+cuda"}, {}),
        ({**TRIED, "jax": "0.12.0"}, {"jax": "0.12.0"}),
        ({"vllm": "0.33.0", "tpu-inference": "0.32.0", "jax": "0.11.2"}, {"vllm": "0.33.0"}),
        ({"vllm": "0.32.0+cpu", "tpu-inference": "0.32.0", "jax": "0.11.2"}, {}),
        ({"jax": "0.11.2"}, {"vllm": "none", "tpu-inference": "none"}),
    ],
)
def test_other_versions_are_named_with_those_that_were_tried(installed, differing, caplog):
    assert check_versions(dict(installed).get) == differing
    assert len(caplog.records) == bool(differing)
    for name, version in differing.items():
        assert f"{name} {version}" in caplog.text
    if differing:
        assert all(f"{name} {version}" in caplog.text for name, version in TRIED.items())


def test_an_engine_of_other_versions_starts_and_warns_once(connector, tmp_path, caplog):
    with engine_of(connector, tmp_path) as engine:
        assert ask(engine, request_of("own", LEADING)).count == 8
    assert caplog.text.count("tried with vllm-tpu 0.32.0") == 1


# ----------------------------------------------------------------------------------------------------------- any order


def test_hooks_in_any_order_disturb_no_request(engine):
    """Before the first request, between two hooks of one, twice, after the last, and after the end."""
    scheduler, worker = engine.scheduler, engine.worker

    def everything():
        for _ in range(2):
            scheduler.get_kv_connector_stats()
            worker.get_kv_connector_stats()
            assert scheduler.take_events() == []

    everything()
    request = request_of("own", LEADING)
    scheduler.on_new_request(request)
    everything()
    while scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        everything()
        scheduler.build_connector_meta(output_of({}, {}, {}))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (8, False)
    everything()
    assert scheduler.reset_cache() is True
    everything()
    assert scheduler.reset_cache() is True
    while (count := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        scheduler.build_connector_meta(output_of({}, {}, {}))
    assert count == 0
    assert scheduler.request_finished(request, [])[1]["kvpatch"]["served"] == []
    assert scheduler.request_finished(request, []) == (False, None), "it is forgotten"
    everything()
    scheduler.shutdown()
    worker.shutdown()
    everything()
    assert not scheduler.failures
    assert not worker.failures


def test_hooks_of_the_other_role_fail_softly(engine):
    """The engine asks the scheduler's alone; an error there is none of a request's."""
    assert engine.worker.reset_cache() is False
    assert engine.worker.take_events() == []
    assert engine.worker.failures == {"reset_cache: AssertionError": 1, "take_events: AssertionError": 1}
