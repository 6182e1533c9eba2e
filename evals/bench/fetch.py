"""Fetching: half of the chunks on the disk, half to compute, against the longer of the two alone.

Computing is matrix products on one core, as many as take as long as loading does: overlap has most to win there. A
product takes milliseconds, as a compiled forward pass does and more; one arm has products of a tenth of one, where
handing the interpreter from thread to thread takes most of what overlap wins. Each arm is a `fetch` of its own kind
(only hits, only misses, both), asynchronous puts of what was computed included, taken in turns; each round gives one
ratio. Loads are warm: read from the page cache, checksums and all.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, Miss, Request, fetch

from .timing import spread, stopwatch

LAYOUT = kvp.KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128))
TOKENS = 256
LATENCY = 0.06
"""Seconds that every load waits where storage is simulated to be far."""


class Arm(NamedTuple):
    """What is timed: chunks of each half, rows of the matrices that are multiplied, seconds that loads wait first."""

    name: str
    half: int
    size: int
    latency: float = 0.0
    bar: float | None = None


ARMS = (Arm("disk", 16, 512, bar=1.5), Arm("latency", 4, 512, LATENCY, 1.15), Arm("short calls", 16, 192))


def _chunk(number: int) -> kvp.Chunk:
    rng = np.random.default_rng(number)
    kv = {
        channel.name: rng.standard_normal((LAYOUT.layers, TOKENS, channel.heads, channel.width), np.float32).astype(
            jnp.bfloat16
        )
        for channel in LAYOUT.channels
    }
    return kvp.Chunk(kv, np.arange(TOKENS, dtype=np.float32), TOKENS, TOKENS, f"c{number}", LAYOUT, "bench")


def _product(size: int) -> Callable[[], object]:
    square = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    return lambda: square @ square


class _Far:
    """Storage that answers later: every read of an object waits first."""

    def __init__(self, store: ChunkStore, seconds: float):
        self._get, self._seconds = store.disk.get, seconds
        store.disk.get = self  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, name: Any) -> Any:
        time.sleep(self._seconds)
        return self._get(name)


def _measure(arm: Arm, repeats: int, folder: Path | None) -> list[dict[str, Any]]:
    chunks = [_chunk(number) for number in range(2 * arm.half)]
    requests = [Request(chunk.id, chunk.backbone) for chunk in chunks]
    hits, misses = requests[: arm.half], requests[arm.half :]
    product = _product(arm.size)
    with tempfile.TemporaryDirectory(dir=folder) as root, ChunkStore(root, budget=Budget(host=0)) as store:
        for chunk in chunks[: arm.half]:
            store.put(chunk)
        if arm.latency:
            _Far(store, arm.latency)
        # Both halves take as long then, which is where overlap has most to win.
        times = _calibrated(lambda: fetch(store, hits, _refuse), product, arm.half)
        by_id = {chunk.id: chunk for chunk in chunks}

        def compute(missing: Sequence[Miss]) -> list[kvp.Chunk]:
            for _ in range(times):
                product()
            return [by_id[miss.request.id] for miss in missing]

        arms = {
            "hits": hits,
            "misses": misses,
            "both": [each for pair in zip(hits, misses, strict=True) for each in pair],
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(repeats + 1):
            for name, asked in arms.items():
                taken = stopwatch(lambda asked=asked: fetch(store, asked, compute))
                if round_:
                    seconds[name].append(taken)
                # What was computed is deleted again, so that every round misses it anew.
                store.flush()
                for request in misses:
                    store.delete(request.id, request.backbone)
    return _rows(arm, seconds)


def _refuse(_: Sequence[Miss]) -> list[kvp.Chunk]:
    raise AssertionError("everything is on the disk")


def _calibrated(load: Callable[[], object], product: Callable[[], object], half: int) -> int:
    """Products per chunk, so that computing takes as long as loading."""
    loading = statistics.median(stopwatch(load) for _ in range(5)) / half
    one = statistics.median(stopwatch(lambda: [product() for _ in range(20)]) for _ in range(9)) / 20
    return max(1, round(loading / one))


def _rows(arm: Arm, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    rounds = list(zip(seconds["both"], seconds["hits"], seconds["misses"], strict=True))
    longer = [both / max(hits, misses) for both, hits, misses in rounds]
    apart = [both / (hits + misses) for both, hits, misses in rounds]
    rows: list[dict[str, Any]] = [
        {"metric": "fetch_seconds", "arm": f"{arm.name}.{name}", "value": statistics.median(values), "n": len(values)}
        for name, values in seconds.items()
    ]
    for metric, values in (("fetch_over_longer", longer), ("fetch_over_sum", apart)):
        row = {"metric": metric, "arm": arm.name} | spread(values) | {"n": len(values)}
        if arm.bar and metric == "fetch_over_longer":
            row["at_most"] = arm.bar
        rows.append(row)
    return rows


def rows(repeats: int = 7, folder: Path | None = None) -> list[dict[str, Any]]:
    """Measures ratios of a fetch of both halves to the longer half alone, and to their sum, with what was timed.

    Args:
      repeats: rounds of each; a warm-up comes first.
      folder: on the disk to use; the system's temporary one by default.

    Returns:
      {"metric", "arm", "value", …}: arm "disk" reads from the page cache; in arm "latency" each load waits 60 ms first;
      "short calls" computes in many short ones. `at_most` is the bar.
    """
    return [row for arm in ARMS for row in _measure(arm, repeats, folder)]


if __name__ == "__main__":
    print(json.dumps(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 7), indent=2))
