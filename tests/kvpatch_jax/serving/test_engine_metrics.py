"""What the connector counts: of requests as an engine serves them, on the server's page, and under hostile words."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import functools
import json
import threading

import prometheus_client
import pytest
from engine_page import Page
from serving_hooks import ask, engine_of, imported_connector
from serving_sides import TOKENS, request_of, served, sides_of

from kvpatch_jax.serving.vllm.engine_metrics import (
    MAX_WORDS,
    PREFIX,
    EngineMetrics,
    collect_scheduler,
    collect_worker,
    flattened,
    merged,
    reason_of,
)


def sent(payload):
    """As the engine sends it to the server's process: the same, of plain data."""
    assert json.loads(json.dumps(payload)) == payload
    return payload


def taken(sides):
    """What both sides have counted, as the engine puts it together."""
    return sent(merged(collect_worker(sides.worker, {}), collect_scheduler(sides.scheduler, {})))


# ----------------------------------------------------------------------------------------------------------- counting


def test_what_an_engine_serves_is_counted_by_policy_point_and_outcome(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "alone", {"segments": [10]}, TOKENS[8:])
        served(sides, "whole", {"segments": [8, 18]})
        page = Page()
        page.recorder.observe(taken(sides))
        assert page.value("requests", "exact") == 2
        assert page.value("formed", "canonicals") == 2
        assert page.value("formed", "patches") == 1
        assert page.value("refusals", "not_stored") == 2
        assert page.value("served_chunks", "leading") == 0, "there from the start, so that its first increase is one"

        served(sides, "exact", {"segments": [8, 18], "save": False})
        served(sides, "approximate", {"segments": [8, 18], "policy": "blind", "save": False})
        page.recorder.observe(taken(sides))
        assert page.value("requests", "blind") == 1
        assert [page.value("served_chunks", point) for point in ("leading", "stored", "bare")] == [2, 1, 0]
        assert [page.value("saved_tokens", point) for point in ("leading", "stored")] == [16, 10]
        assert page.value("refusals", "not_stored_exactly") == 1
        assert page.value("formed", "canonicals") == 2, "as before: only what is new is sent"
        assert page.value("forming_jobs") == page.value("forming_bytes") == 0
        assert page.value("tier_bytes", "host") == sides.scheduler.stores.shared.memory.nbytes > 0
        assert page.value("tier_limit_bytes", "host") == 1 << 30
        assert page.value("open_tenants") == 1


def test_tokens_that_the_engine_has_are_not_counted_as_saved(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "forms", {"segments": [8]})
        served(sides, "own", {"segments": [8], "save": False}, computed=4)
        counts = taken(sides)["counts"]
        assert counts["saved_tokens"] == {"leading": 4}
        assert counts["served_chunks"] == {"leading": 1}


@pytest.mark.usefixtures("unchecked")
def test_refusals_are_counted_by_reason(tmp_path):
    with sides_of(tmp_path, uncertified=False) as sides:
        scheduler = sides.scheduler
        cases = {
            "invalid_request": request_of("invalid", {"kvpatch": {"policy": "often"}}),
            "blind_not_allowed": request_of("blind", {"kvpatch": {"policy": "blind"}}),
            "lora": request_of("lora", {"kvpatch": {"segments": [8]}}, lora_request=object()),
            "embeddings": request_of("embeddings", {"kvpatch": {"segments": [8]}}, prompt_embeds=object()),
        }
        for reason, request in cases.items():
            scheduler.add_request(request)
            assert scheduler.metrics.take({}, {})["counts"]["refusals"] == {reason: 1}
        outside = request_of("outside", {"kvpatch": {"segments": [10**6]}})
        scheduler.add_request(outside)
        assert scheduler.metrics.take({}, {})["counts"] == {
            "refusals": {"invalid_request": 1},
            "requests": {"invalid": 1},
        }
        scheduler.add_request(request_of("plain", None))
        assert scheduler.metrics.take({}, {}) == {}, "it asked for nothing"


def test_faults_are_counted(tmp_path, monkeypatch):
    with sides_of(tmp_path) as sides:
        served(sides, "forms", {"segments": [8]})
        taken(sides)
        served(sides, "cannot be placed", {"segments": [8]}, lacking=0)
        monkeypatch.setattr(sides.worker.former, "_form", lambda *_: 1 / 0)
        served(sides, "not formed", {"segments": [9]})
        payload = merged(
            collect_worker(sides.worker, {"wait_for_save: OSError": 2, "wait_for_save: KeyError": 1}),
            collect_scheduler(sides.scheduler, {"discard: OSError": 1}),
        )
        assert payload["counts"]["failed_loads"] == {"": 1}
        assert payload["counts"]["formed"] == {"failed": 1}
        assert payload["counts"]["hook_failures"] == {"wait_for_save": 3, "discard": 1}


def test_what_waits_to_be_formed_is_shown(tmp_path, monkeypatch):
    with sides_of(tmp_path) as sides:
        hold, begun = threading.Event(), threading.Event()
        form = sides.worker.former._form

        def held(*given):
            begun.set()
            hold.wait(60)
            form(*given)

        monkeypatch.setattr(sides.worker.former, "_form", held)
        monkeypatch.setattr(sides.worker.former, "flush", lambda: begun.wait(60))
        served(sides, "first", {"segments": [8]})
        served(sides, "second", {"segments": [9]})
        gauges = taken(sides)["gauges"]
        assert gauges["forming_jobs"] == {"": 2}
        tokens = 17 * sides.worker.layout.bytes_per_token(sides.pool.kv_caches[0].dtype)
        assert gauges["forming_bytes"] == {"": tokens}
        hold.set()
        sides.worker.former._queue.flush()
        assert taken(sides)["gauges"]["forming_bytes"] == {"": 0}


def test_requests_that_wait_for_a_read_are_shown(tmp_path, monkeypatch):
    with sides_of(tmp_path, readers=1) as sides:
        served(sides, "forms", {"segments": [8]})
        hold = threading.Event()
        plan = sides.scheduler._plan
        monkeypatch.setattr(sides.scheduler, "_plan", lambda state: (hold.wait(60), plan(state))[1])
        for number in range(3):
            sides.scheduler.add_request(request_of(str(number), {"kvpatch": {"segments": [8]}}))
        while sides.scheduler.reading != (2, 1):
            assert sum(sides.scheduler.reading) == 3
        assert taken(sides)["gauges"]["reading_requests"] == {"wait": 2, "held": 1}
        hold.set()


# -------------------------------------------------------------------------------------------------- words and payloads


def test_reasons_of_plans_have_words():
    assert reason_of("chunk 2 of 3 is not certified within 0.02 nats: it has 9 tokens") == "beyond_certificate"
    assert reason_of("chunk 2 of 3 is not certified within 0.02 nats") == "not_certified"
    assert reason_of("somebody rewrote this") == "other"


def test_labels_have_few_words_whatever_is_counted():
    metrics = EngineMetrics()
    for number in range(1000):
        metrics.add("served_chunks", f"point {number}")
        metrics.take({"hook_failures": {f"hook {number}": 1}}, {})
    metrics.add("served_chunks", "leading")
    words = set()
    for number in range(1000):
        metrics.add("served_chunks", f"point {number}")
        words |= set(metrics.take({}, {})["counts"]["served_chunks"])
    assert len(words) <= MAX_WORDS + 1
    assert {"other", "leading"} <= words


def test_no_label_is_of_a_tenant_or_a_request(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "request-1234", {"segments": [8], "tenant": "acme"})
        served(sides, "request-5678", {"segments": [8], "tenant": "acme"})
        text = json.dumps(taken(sides))
        assert "acme" not in text
        assert "request-" not in text


def test_counts_add_up_and_gauges_are_the_latest():
    first = {"counts": {"requests": {"exact": 1}}, "gauges": {"forming_jobs": {"": 3}}}
    second = {
        "counts": {"requests": {"exact": 2, "blind": 1}, "failed_loads": {"": 1}},
        "gauges": {"forming_jobs": {"": 1}},
    }
    before = json.dumps(first), json.dumps(second)
    result = merged(first, second)
    assert result["counts"] == {"requests": {"exact": 3, "blind": 1}, "failed_loads": {"": 1}}
    assert result["gauges"] == {"forming_jobs": {"": 1}}
    assert (json.dumps(first), json.dumps(second)) == before
    assert merged({}, second) == second == merged(second, {})
    assert flattened(result) == {
        "kvpatch requests exact": 3,
        "kvpatch requests blind": 1,
        "kvpatch failed_loads": 1,
        "kvpatch forming_jobs": 1,
    }


def test_nothing_is_sent_if_nothing_has_changed():
    metrics = EngineMetrics()
    totals, gauges = {"failed_loads": {"": 2}}, {"forming_jobs": {"": 0}}
    assert metrics.take(totals, gauges) == {"counts": {"failed_loads": {"": 2}}, "gauges": {"forming_jobs": {"": 0}}}
    assert metrics.take(totals, gauges) == {}
    assert metrics.take({"failed_loads": {"": 1}}, gauges) == {}, "a count that was set back is no increase"
    assert metrics.take({"failed_loads": {"": 3}}, gauges) == {"counts": {"failed_loads": {"": 1}}}


def test_engines_of_one_server_are_told_apart_and_unknown_metrics_are_skipped():
    page = Page(engines=(0, 1))
    page.recorder.observe({"counts": {"requests": {"exact": 2}, "of a later version": {"x": 1}}}, 1)
    page.recorder.observe({"gauges": {"forming_jobs": {"": 4}, "requests": {"exact": 9}, "new": {"": 1}}}, 0)
    assert (page.value("requests", "exact", 0), page.value("requests", "exact", 1)) == (0, 2)
    assert page.value("forming_jobs", engine=0) == 4


# ------------------------------------------------------------------------------------------------------ the connector


@pytest.fixture(scope="module")
def connector():
    with imported_connector() as module:
        yield module


def test_the_engine_s_hooks_carry_the_counts_to_the_page(connector, tmp_path):
    registry, kinds = kinds_of_metrics()
    with engine_of(connector, tmp_path) as engine:
        own = connector.KVPatchConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
        ask(engine, request_of("own", {"kvpatch": {"segments": [8]}}))
        worker, scheduler = (side.get_kv_connector_stats() for side in (engine.worker, engine.scheduler))
        stats = worker.aggregate(scheduler)
        assert not stats.is_empty()
        again = connector.KVPatchConnector.build_kv_connector_stats(sent(stats.to_dict()))
        assert again.reduce()["kvpatch served_chunks leading"] == 1
        own.observe(stats.to_dict())
        labels = {"engine": "0", "point": "leading"}
        assert registry.get_sample_value(f"{PREFIX}served_chunks_total", labels) == 1
        assert engine.scheduler.get_kv_connector_stats() is None, "nothing since"
    stats.reset()
    assert stats.is_empty()
    assert connector.KVPatchConnector.build_kv_connector_stats().is_empty()


def kinds_of_metrics():
    registry = prometheus_client.CollectorRegistry()
    counter = functools.partial(prometheus_client.Counter, registry=registry)
    return registry, {"Counter": counter, "Gauge": functools.partial(prometheus_client.Gauge, registry=registry)}


def test_an_error_while_counting_costs_the_counts_only(connector, tmp_path, monkeypatch, caplog):
    with engine_of(connector, tmp_path) as engine:
        monkeypatch.setattr(engine.scheduler.scheduler_side.stores.shared, "held_bytes", lambda: 1 / 0)
        for _ in range(3):
            assert engine.scheduler.get_kv_connector_stats() is None
        assert engine.scheduler.failures["get_kv_connector_stats: ZeroDivisionError"] == 3
        assert caplog.text.count("get_kv_connector_stats: ZeroDivisionError") == 1
        assert ask(engine, request_of("own", {"kvpatch": {"segments": [8]}})).count == 8


@pytest.mark.parametrize(
    "payload", [{"counts": 7}, {"gauges": {"forming_jobs": 1}}, {"counts": {"requests": {"exact": "x"}}}]
)
def test_a_payload_that_cannot_be_read_does_not_end_the_server(connector, payload, caplog):
    registry, kinds = kinds_of_metrics()
    own = connector.KVPatchConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    for _ in range(2):
        own.observe(payload)
    assert caplog.text.count("metrics could not be recorded") == 1
    own.observe({"counts": {"requests": {"exact": 1}}})
    labels = {"engine": "0", "policy": "exact"}
    assert registry.get_sample_value(f"{PREFIX}requests_total", labels) == 1
