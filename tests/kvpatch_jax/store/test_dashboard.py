"""The dashboard asks for the metrics that exist and no others, and for all of the store's."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpatch_jax.store import Statistics, prometheus_text
from kvpatch_jax.store.disk.counters import BOUNDS, Histogram
from kvpatch_jax.store.metrics import METRICS
from tests.dashboards import check_panels

ROOT = Path(__file__).parents[3]
NOTED = {"lock_waits", "lock_timeouts", "index_rebuilds"}
"""Counts that are noted by a function which its caller was given."""
COUNTS = {
    "kvpatch_store_hits_total": ("device_hits", "host_hits", "disk_hits", "remote_hits"),
    "kvpatch_store_evictions_total": ("device_evicted_budget", "host_evicted_replaced", "disk_evicted_expired"),
    "kvpatch_store_refused_total": ("device_refused", "host_refused"),
    "kvpatch_store_bytes_total": ("put_bytes", "get_bytes"),
}
"""Counts of metrics with labels; the others have their metric's name."""


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(files("kvpatch_jax.store").joinpath("dashboard.json").read_text())


@pytest.fixture(scope="module")
def queries(dashboard: dict) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def exported() -> dict[str, set[str]]:
    """All metrics of statistics that have each once: labels by sample's name, by Prometheus's own parser."""
    counts: dict[str, int] = {}
    gauges: dict[str, float] = {}
    for name, (kind, _) in METRICS.items():
        own = name.removeprefix("kvpatch_store_").removesuffix("_total")
        if kind == "counter":
            counts |= dict.fromkeys(COUNTS.get(name, (own,)), 1)
        elif kind == "gauge" and own != "held_bytes":
            gauges[own] = 1.5
    histogram = Histogram((1,) * (len(BOUNDS) + 1), 2.0)
    text = prometheus_text(Statistics(counts, {("get", "disk"): histogram}, {"host": 1}, gauges), tenant="t")
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        assert "Of that name in" not in family.documentation
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_declared_metrics_are_those_that_are_exported():
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}
    assert names == set(METRICS)
    assert all(text.endswith(".") for _, text in METRICS.values())


def test_every_query_is_of_an_exported_metric_and_every_metric_is_queried(queries: list[str]):
    asked = {name for query in queries for name in re.findall(r"kvpatch_store_\w+", query)}
    assert asked <= set(exported())
    assert {name.removesuffix("_bucket") for name in asked} == set(METRICS)


def test_labels_of_queries_are_those_of_their_metrics(queries: list[str]):
    labels = exported() | {"vllm:time_to_first_token_seconds_bucket": {"le"}}
    labels |= {"vllm:prompt_tokens_by_source_total": {"source"}}
    for query in queries:
        for used, name in re.findall(r"by \(([^)]*)\) \((?:rate\()?([\w:]+)", query):
            assert set(re.split(r", *", used)) <= labels[name], query
        assert query.count(" by (") == len(re.findall(r"by \(([^)]*)\) \((?:rate\()?([\w:]+)", query))
        assert query.count("(") == query.count(")")


def test_panels_have_names_and_places_of_their_own(dashboard: dict):
    check_panels(dashboard)


def test_every_count_of_the_code_has_a_metric_and_every_metric_is_counted():
    source = "\n".join(path.read_text() for path in (ROOT / "kvpatch_jax/store").rglob("*.py"))
    counted: set[str] = set()
    for call in re.findall(r"counters\.add\((.*)\)", source):
        for prefixed, word in re.findall(r'(f?)"([^"]+)"', re.sub('== "[^"]*"', "", call)):
            counted.add(word if not prefixed else re.sub(r"\{[^}]*\}", "host", word))
        counted |= set(re.findall(r", (\w+)=", call))
    text = prometheus_text(Statistics(dict.fromkeys(counted, 1), {}, {}))
    assert "Of that name in" not in text
    plain = {name for name, (kind, _) in METRICS.items() if kind == "counter" and name not in COUNTS}
    plain = {name.removeprefix("kvpatch_store_").removesuffix("_total") for name in plain}
    assert plain - counted == NOTED
