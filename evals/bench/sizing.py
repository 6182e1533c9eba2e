"""Sizing against a store: requests are replayed through a real one, with a remote store, beside what was predicted.

Chunks are asked for by popularity, which drifts. What is not found is put. Tiers are far smaller than what is asked
for, so that all of them evict. Requests of the remote store are counted by TensorStore.
"""

import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore
from kvpatch_jax.store.object_bytes import canonical_bytes
from kvpatch_jax.store.reuse import RequestLog
from kvpatch_jax.store.sizing import FleetSize, RequestCosts, TierSettings, Workload, size_fleet

from ..results.environment import environment
from ..results.tables import markdown_table
from .benchmark import Benchmark

LAYOUT = kvp.KVLayout.gqa(4, 2, 32, kvp.Rope(1e4, 32))
BACKBONE = "0" * 64
REQUESTS, QUICK = 4000, 600
TOKENS = (48, 64, 96)
CHUNKS, SKEW, DRIFT = 0.25, 0.9, 0.1
"""Chunks that are asked for at a time over the requests, exponent of their popularity, and new ones over requests."""
DISK, HOST = 0.3, 0.08
"""Budgets over the bytes of all chunks."""
COSTS = RequestCosts()
"""Requests as the adapters' protocol has them."""


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Replays requests, and returns a row for each figure: predicted of the log and of its curve, and measured."""
    log = draw_log(QUICK if quick else REQUESTS, seed)
    sizes = canonical_bytes(LAYOUT, round(float(log.tokens.mean())))
    first = np.unique(log.keys, return_index=True)[1]
    distinct = float(log.tokens[first].sum() / log.tokens.mean() * sizes.file)
    settings = TierSettings(host=int(HOST * distinct), disk=int(DISK * distinct))

    exact = size_fleet(Workload.of_log(log), sizes, settings, costs=COSTS)
    curve = size_fleet(Workload(log.rate, log.revisits()), sizes, settings, costs=COSTS)
    with tempfile.TemporaryDirectory() as folder:
        measured = replay(log, settings, Path(folder))

    count = len(log.keys)
    predicted = [figures(size, count / log.rate) for size in (exact, curve)]
    rows: list[dict[str, Any]] = []
    for name, value in measured.items():
        rows.append({"metric": name, "exact": predicted[0][name], "curve": predicted[1][name], "measured": value})
    config = {"quick": quick, "seed": seed, "requests": count, "chunks": len(first), "bytes": distinct}
    return {"config": config | vars(settings), "environment": environment(), "rows": rows}


def draw_log(count: int, seed: int) -> RequestLog:
    """Draws requests, one a second: chunks by a power law of their rank, and now and then a new one takes a rank."""
    random, ranks = np.random.default_rng(seed), int(count * CHUNKS)
    weights = np.arange(1, ranks + 1) ** -SKEW
    drawn, fresh = random.choice(ranks, count, p=weights / weights.sum()), random.random(count) < DRIFT
    at_rank, lengths, keys = np.arange(ranks), random.choice(TOKENS, ranks + count), np.empty(count, np.int64)
    for number in range(count):
        if fresh[number]:
            at_rank[random.integers(ranks)] = ranks + number
        keys[number] = at_rank[drawn[number]]
    return RequestLog(keys, np.arange(float(count)), lengths[keys])


def figures(size: FleetSize, seconds: float) -> dict[str, float]:
    """Returns the figures of a size that a replay of so many seconds measures."""
    return {
        **{f"hits, {tier}": share for tier, share in size.hits._asdict().items()},
        "disk, bytes": size.disk_bytes,
        "host, bytes": size.host_bytes,
        "sent, bytes": size.sent * seconds,
        "received, bytes": size.received * seconds,
        "remote writes": size.remote_puts * seconds,
        "remote reads": size.remote_gets * seconds,
    }


def replay(log: RequestLog, settings: TierSettings, folder: Path) -> dict[str, float]:
    """Asks a store for every chunk of a log and puts what it does not have. Returns the figures of `figures`."""
    remote = KeyValueStore({"driver": "file", "path": f"{folder}/remote/"})
    budget = Budget(host=settings.host, disk=settings.disk)
    before, disk = _counted(), list[int]()
    with contextlib.closing(ChunkStore(folder / "root", budget=budget, remote=remote)) as store:
        for number, (key, tokens) in enumerate(zip(log.keys, log.tokens, strict=True)):
            chunk = chunk_of(int(key), int(tokens))
            if store.get(chunk.id, BACKBONE) is None:
                store.put(chunk)
            if number > len(log.keys) // 2 and number % 25 == 0:
                disk.append(sum(entry.size for entry in store.disk.scan()))
        counts, host = store.counters.read(), store.statistics().held["host"]
    after = _counted()

    count = len(log.keys)
    hits = {f"hits, {tier}": counts.get(f"{tier}_hits", 0) / count for tier in ("host", "disk", "remote")}
    moved = {name: after[name] - before[name] for name in after}
    return hits | {
        "hits, missed": counts["misses"] / count,
        "disk, bytes": statistics.fmean(disk),
        "host, bytes": host,
        "sent, bytes": moved["bytes_written"],
        "received, bytes": moved["bytes_read"],
        "remote writes": moved["write"],
        "remote reads": moved["read"],
    }


def chunk_of(key: int, tokens: int) -> kvp.Chunk:
    """Makes the chunk of a number."""
    rng = np.random.default_rng(key)
    kv = {}
    for channel in LAYOUT.channels:
        shape = (LAYOUT.layers, tokens, channel.heads, channel.width)
        kv[channel.name] = rng.standard_normal(shape, np.float32).astype("bfloat16")
    return kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, f"{key:064d}", LAYOUT, BACKBONE)


def _counted() -> dict[str, float]:
    """Returns what TensorStore's file driver has counted in this process."""
    found: dict[str, float] = {"read": 0.0, "write": 0.0, "bytes_read": 0.0, "bytes_written": 0.0}
    for metric in tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/"):
        name = metric["name"].rpartition("/")[2]
        if name in found:
            found[name] = float(metric["values"][0]["value"])
    return found


def table(result: dict[str, Any]) -> str:
    """Formats the predictions beside what was measured, as Markdown."""
    lines = []
    for row in result["rows"]:
        form = "{:.3f}" if row["metric"].startswith("hits") else "{:,.0f}"
        cells = [form.format(row[name]) for name in ("exact", "curve", "measured")]
        lines.append([row["metric"], *cells, f"{row['exact'] / max(row['measured'], 1e-9):.2f}"])
    head = ["figure", "predicted, exact log", "predicted, its curve", "measured", "exact over measured"]
    return markdown_table(head, lines) + "\n"


BENCHMARK = Benchmark("sizing", run, table=table)
