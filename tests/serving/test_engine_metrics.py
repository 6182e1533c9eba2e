"""What the connector counts, on the server's page and on the dashboard: fixed names and few words, of no tenant."""
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import json
import re
from collections import Counter
from importlib.resources import files
from types import SimpleNamespace

import prometheus_client

from kvpatch_jax.serving.vllm.metrics import (
    METRICS,
    PREFIX,
    EngineMetrics,
    PrometheusRecorder,
    collect_scheduler,
    collect_worker,
    flattened,
    merged,
    reason_of,
)
from tests.shared.dashboards import check_panels

ENDINGS = {"counter": "_total", "gauge": ""}
EXPORTED = {f"{PREFIX}{name}{ENDINGS[metric.kind]}": metric for name, metric in METRICS.items()}


def page_of(*payloads, engines=(0, 1)):
    """Returns a function that reads a value from a server's page, to which its engines have sent payloads in turn."""
    registry = prometheus_client.CollectorRegistry()
    kinds = [
        functools.partial(kind, registry=registry) for kind in (prometheus_client.Counter, prometheus_client.Gauge)
    ]
    recorder = PrometheusRecorder(*kinds, ["engine"], {number: [str(number)] for number in engines})
    for number, payload in enumerate(payloads):
        recorder.observe(payload, number)

    def value(name, word="", engine=0):
        labels = {"engine": str(engine)} | ({METRICS[name].label: word} if word else {})
        return registry.get_sample_value(f"{PREFIX}{name}{ENDINGS[METRICS[name].kind]}", labels)

    return value


def test_what_both_sides_count_is_on_the_page():
    survivors, store = SimpleNamespace(nbytes=5), SimpleNamespace(memory=1 << 30)
    scheduler = SimpleNamespace(
        stores=SimpleNamespace(host_bytes=7, tenants=2, survivors=survivors),
        config=SimpleNamespace(store=store),
        reading=(2, 1),
        counts=Counter({"failed": 1, "unfit: LayoutError": 2, "unfit: WeightsError": 1, "unsaved": 1}),
        metrics=EngineMetrics(),
    )
    former = SimpleNamespace(counts=Counter(canonicals=2, failed=1), jobs=3, held_bytes=9)
    worker = SimpleNamespace(former=former, counts=Counter(unsaved=4), metrics=EngineMetrics())
    scheduler.metrics.add("requests", "certified")
    for number in range(100):
        scheduler.metrics.add("refusals", f"reason {number}")
    steps = []
    for place, point in enumerate(["leading", "near", "near"]):
        steps.append(SimpleNamespace(point=point, segment=SimpleNamespace(begin=8 * place, end=8 * place + 8)))
    scheduler.metrics.add_served(steps, 12)
    payload = merged(
        collect_worker(worker, {"wait_for_save: OSError": 2, "wait_for_save: KeyError": 1}),
        collect_scheduler(scheduler, {"discard: OSError": 1}),
    )
    assert json.loads(json.dumps(payload)) == payload, "plain data, which goes to the server's process"
    value = page_of(payload)
    for name, words in {
        "requests": {"certified": 1, "exact": 0},  # there from the start, so that a first increase is one
        "refusals": {"other": 100},
        "served_chunks": {"leading": 0, "near": 2},
        "saved_tokens": {"near": 12},
        "formed": {"canonicals": 2, "failed": 1, "unsaved": 5},
        "hook_failures": {"wait_for_save": 3, "discard": 1},
        "reading_requests": {"wait": 2, "held": 1},
    }.items():
        assert {word: value(name, word) for word in words} == words
    numbers = {"failed_loads": 1, "unfit_chunks": 3, "forming_jobs": 3, "forming_bytes": 9, "host_bytes": 7}
    numbers |= {"host_limit_bytes": 1 << 30, "survivor_bytes": 5, "open_tenants": 2}
    assert {name: value(name) for name in numbers} == numbers
    assert collect_worker(worker, {"wait_for_save: OSError": 3}) == {}, "nothing has changed since"
    former.counts["canonicals"] += 1
    assert collect_worker(worker, {})["counts"] == {"formed": {"canonicals": 1}}


def test_names_and_words_are_fixed():
    """Operators' alerts name them."""
    points = "leading restored stored orbit survivor mean near bare"
    words = {
        "requests": "exact certified patched blind invalid",
        "served_chunks": points,
        "saved_tokens": points,
        "refusals": "not_stored_exactly not_stored beyond_certificate not_certified learning other_weights "
        "reads_no_cache unread cached not_allowed invalid_request lora embeddings other",
        "formed": "canonicals prefills patches survivors known refused failed over_budget dropped unsaved",
        "hook_failures": "",
        "reading_requests": "wait held",
    }
    assert PREFIX == "vllm:kvpatch_"
    assert {name: " ".join(metric.words) for name, metric in METRICS.items() if metric.label} == words


def test_reasons_of_plans_and_refusals_have_words():
    reasons = {
        "chunk 2 of 3 is not stored behind those in front of it": "not_stored_exactly",
        "chunk 2 of 3 is not stored": "not_stored",
        "chunk 2 of 3 is not certified within 0.02 nats: it has 9 tokens": "beyond_certificate",
        "chunk 2 of 3 is not certified within 0.02 nats": "not_certified",
        "kv_transfer_params.kvpatch.reuse: got 'blind', which the operator does not allow; expected": "not_allowed",
        "kv_transfer_params: got 7; expected a mapping": "invalid_request",
        "cache_salt: got 201 characters": "invalid_request",
        "somebody rewrote this": "other",
    }
    assert {why: reason_of(why) for why in reasons} == reasons


def test_counts_add_up_and_gauges_are_the_latest():
    first = {"counts": {"requests": {"exact": 1}}, "gauges": {"forming_jobs": {"": 3}}}
    second = {"counts": {"requests": {"exact": 2}, "failed_loads": {"": 1}}, "gauges": {"forming_jobs": {"": 1}}}
    before = json.dumps(first)
    names = {"kvpatch requests exact": 3, "kvpatch failed_loads": 1, "kvpatch forming_jobs": 1}
    assert flattened(merged(first, second)) == names
    assert json.dumps(first) == before
    assert merged({}, second) == second == merged(second, {})


def test_engines_of_one_server_are_told_apart_and_unknown_metrics_are_skipped():
    value = page_of(
        {"gauges": {"forming_jobs": {"": 4}, "requests": {"exact": 9}, "new": {"": 1}}},
        {"counts": {"requests": {"exact": 2}, "of a later version": {"x": 1}}},
    )
    assert [value("requests", "exact", engine) for engine in (0, 1)] == [0, 2]
    assert value("forming_jobs") == 4


def test_the_dashboard_asks_for_the_metrics_that_exist_all_of_them_and_no_others():
    dashboard = json.loads(files("kvpatch_jax.serving.vllm").joinpath("dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    labels = []
    for query in queries:
        ((used, name),) = re.findall(r"by \(([^)]*)\) \((?:rate\()?([\w:]+)", query)
        assert set(re.split(r", *", used)) <= {"engine", EXPORTED[name].label}, query
        assert ("rate(" in query) == (EXPORTED[name].kind == "counter"), query
        labels.append(name)
    assert set(labels) == set(EXPORTED)
    check_panels(dashboard)
