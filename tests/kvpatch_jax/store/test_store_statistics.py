"""Counters and latencies: what each call adds, and the text that Prometheus reads."""

import math
import re
from pathlib import Path

import jax
import prometheus_client
from prometheus_client.parser import text_string_to_metric_families
from store_cases import BACKBONE, chunk_of, file_of, patch_of

from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, StatisticsCollector, prometheus_text
from kvpatch_jax.store.disk.counters import BOUNDS

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
type Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> tuple[dict[str, str], Samples]:
    """Reads the exposition format strictly: families' types, and samples by name and labels."""
    types: dict[str, str] = {}
    helped: set[str] = set()
    samples: Samples = {}
    *lines, rest = text.split("\n")
    assert rest == "", "every line ends; a page without metrics is empty"
    for line in lines:
        if line.startswith("# "):
            _, word, name, told = line.split(" ", 3)
            assert told
            assert word in ("HELP", "TYPE")
            assert name not in (helped if word == "HELP" else types), "a family that is opened twice"
            helped.add(name) if word == "HELP" else types.update({name: told})
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        family = match[1]
        if family not in types:
            family = re.sub("_(bucket|sum|count)$", "", family)
            assert types[family] == "histogram"
        assert family == list(types)[-1], "samples of one family lie together"
        assert family in helped
        key = (match[1], tuple(sorted(LABEL.findall(match[2] or ""))))  # their order means nothing
        assert key not in samples
        samples[key] = float(match[3])
    return types, samples


def check_histograms(samples: Samples) -> int:
    """Buckets rise, end in +Inf, and agree with the count. How many histograms."""
    series: dict[tuple, list[tuple[float, float]]] = {}
    for (name, labels), value in samples.items():
        if name.endswith("_bucket"):
            key = (name.removesuffix("_bucket"), tuple(pair for pair in labels if pair[0] != "le"))
            series.setdefault(key, []).append((float(dict(labels)["le"]), value))
    for (name, labels), buckets in series.items():
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1] == (math.inf, samples[f"{name}_count", labels])
        assert samples[f"{name}_sum", labels] >= 0
        assert len(buckets) == len(BOUNDS) + 1
    return len(series)


def test_a_store_counts_its_operations(tmp_path: Path):
    remote = KeyValueStore({"driver": "memory"})
    device, budget = jax.devices()[0], Budget(host=1 << 20)
    with ChunkStore(tmp_path, budget=budget, remote=remote, write_behind=False) as store:
        store.put(chunk_of())
        store.put_async(chunk_of("C", 1)).result()
        store.put_patches([patch_of(chunk_of())])
        store.flush()
        for _ in range(2):
            store.get("B", BACKBONE)
            store.get("B", BACKBONE, placement=device)
        store.get("absent", BACKBONE)
        path = file_of(store, chunk_of("C"))
        path.write_bytes(path.read_bytes()[:-1])
        assert store.get("C", BACKBONE) is not None  # from beyond
        store.collect()
        found = store.statistics()
        types, samples = parse(prometheus_text(found))
        size = sum(entry.size for entry in store.disk.scan())
        held = 2 * chunk_of().nbytes
    counts = {key: histogram.count for key, histogram in found.latencies.items()}
    assert counts == {
        ("put", "disk"): 3,
        ("commit", "disk"): 3,
        ("commit", "remote"): 3,
        ("get", "disk"): 1,
        ("get", "host"): 3,
        ("get", "remote"): 1,
        ("get", "none"): 1,
    }
    assert found.held["host"] >= held
    assert check_histograms(samples) == len(counts)
    for (operation, tier), count in counts.items():
        labels = (("operation", operation), ("tier", tier))
        assert samples["kvpatch_store_seconds_count", labels] == count
    hits = {dict(labels)["tier"]: n for (name, labels), n in samples.items() if name == "kvpatch_store_hits_total"}
    assert hits == {"disk": 1, "host": 3, "remote": 1}
    assert samples["kvpatch_store_misses_total", ()] == 1
    assert samples["kvpatch_store_quarantined_total", ()] == 1
    assert samples["kvpatch_store_bytes_total", (("direction", "put"),)] > size
    assert types["kvpatch_store_held_bytes"] == "gauge"
    assert types["kvpatch_store_seconds"] == "histogram"


def test_evictions_are_counted_by_reason(tmp_path: Path):
    one = chunk_of().nbytes
    with ChunkStore(tmp_path, budget=Budget(host=int(1.5 * one) + 8192, disk=4 * (one + 4160))) as store:
        for number in range(8):
            store.put(chunk_of(f"B{number}", number), ttl=1e-6 if number < 2 else None)
            store.get(f"B{number}", BACKBONE)
        store.collect()
        _, samples = parse(prometheus_text(store.statistics(), tenant='a "quoted" \\ name\n', zone="1"))
    evicted = {
        (dict(labels)["tier"], dict(labels)["reason"]): count
        for (name, labels), count in samples.items()
        if name == "kvpatch_store_evictions_total"
    }
    assert evicted["disk", "expired"] == 2
    assert evicted["disk", "budget"] >= 1
    assert evicted["host", "budget"] >= 1
    assert all(dict(labels)["tenant"] == r"a \"quoted\" \\ name\n" for _, labels in samples)


def test_a_registry_serves_all_stores_of_a_page(tmp_path: Path):
    """Each metric is opened once on the page, whatever the number of stores, and Prometheus's own reader takes it."""
    registry = prometheus_client.CollectorRegistry()
    with ChunkStore(tmp_path, tenant="one") as one, ChunkStore(tmp_path, tenant="two") as two:
        stores = {"one": one, "two": two}
        registry.register(StatisticsCollector(lambda: [(s.statistics(), {"tenant": t}) for t, s in stores.items()]))
        for store in stores.values():
            store.put(chunk_of())
        two.get("B", BACKBONE)
        text = prometheus_client.generate_latest(registry).decode()
    _, samples = parse(text)
    assert samples["kvpatch_store_puts_total", (("tenant", "one"),)] == 1
    assert samples["kvpatch_store_hits_total", (("tenant", "two"), ("tier", "disk"))] == 1
    assert ("kvpatch_store_hits_total", (("tenant", "one"), ("tier", "disk"))) not in samples
    read = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert read == {name for name, _ in samples}
