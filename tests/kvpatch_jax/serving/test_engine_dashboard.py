"""The connector's dashboard asks for the metrics that exist, all of them and no others."""

import json
import re
from importlib.resources import files

import pytest
from engine_page import Page

from kvpatch_jax.serving.vllm.engine_metrics import METRICS, PREFIX
from tests.dashboards import check_panels

ENDINGS = {"counter": "_total", "gauge": ""}
EXPORTED = {f"{PREFIX}{name}{ENDINGS[metric.kind]}": metric for name, metric in METRICS.items()}


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(files("kvpatch_jax.serving.vllm").joinpath("dashboard.json").read_text())


@pytest.fixture(scope="module")
def queries(dashboard: dict) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_declared_metrics_are_those_that_are_exported():
    page = Page()
    everything: dict = {"counts": {}, "gauges": {}}
    for name, metric in METRICS.items():
        everything["counts" if metric.kind == "counter" else "gauges"][name] = {"x" if metric.label else "": 1}
    page.recorder.observe(everything)
    samples = [sample for family in page.registry.collect() for sample in family.samples]
    names = {sample.name for sample in samples if not sample.name.endswith("_created")}
    assert names == set(EXPORTED)
    assert all(metric.text.endswith(".") for metric in METRICS.values())
    for sample in samples:
        if sample.name in EXPORTED:
            label = EXPORTED[sample.name].label
            assert set(sample.labels) == {"model_name", "engine", *([label] if label else [])}


def test_every_query_is_of_an_exported_metric_and_every_metric_is_queried(queries: list[str]):
    asked = {name for query in queries for name in re.findall(rf"{PREFIX}\w+", query)}
    assert asked == set(EXPORTED)


def test_labels_of_queries_are_those_of_their_metrics(queries: list[str]):
    for query in queries:
        ((used, name),) = re.findall(r"by \(([^)]*)\) \((?:rate\()?([\w:]+)", query)
        assert set(re.split(r", *", used)) <= {"engine", EXPORTED[name].label}, query
        assert query.count("(") == query.count(")")
        assert ("rate(" in query) == (EXPORTED[name].kind == "counter"), query


def test_panels_have_names_and_places_of_their_own(dashboard: dict):
    check_panels(dashboard)
