"""Fetching: half of the chunks on the disk, half to compute, against the longer of the two alone.

Computing is matrix products on one core, as many as take as long as loading does: overlap has most to win there. A
product takes milliseconds, as a compiled forward pass does and more; one arm has products of a tenth of one, where
handing the interpreter from thread to thread takes most of what overlap wins. Each side is a `fetch` of its own kind
(only hits, only misses, both), asynchronous puts of what was computed included, taken in turns. Loads are warm: read
from the page cache, checksums and all.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, Miss, Request, fetch

from ..results.environment import environment
from .benchmark import Benchmark, Row, measured_row
from .store_workload import StoreSizes, chunk_of
from .timing import Samples, interleave, ratios, stopwatch

SIZES = StoreSizes(layers=28, tokens=256, heads=4, width=128)
LATENCY = 0.06
"""Seconds that every load waits where storage is simulated to be far."""


class FetchArm(NamedTuple):
    """What is timed: chunks of each half, rows of the matrices that are multiplied, seconds that loads wait first."""

    name: str
    half: int
    size: int
    latency: float = 0.0
    bar: float | None = None


ARMS = (
    FetchArm("disk", 16, 512, bar=1.5),
    FetchArm("latency", 4, 512, LATENCY, 1.15),
    FetchArm("short calls", 16, 192),
)


def run(*, repeats: int = 5) -> dict[str, Any]:
    """Times every arm; at least seven repeats."""
    return {"environment": environment(), "rows": list(ratio_rows(max(repeats, 7)))}


def ratio_rows(repeats: int = 7, folder: Path | None = None) -> Iterator[Row]:
    """Yields a fetch of both halves over the longer half alone, and over their sum.

    Args:
      repeats: rounds of each; a warm-up comes first.
      folder: on the disk to use; the system's temporary one by default.
    """
    for arm in ARMS:
        samples = _measure(arm, repeats, folder)
        hits, misses = samples["hits"], samples["misses"]
        longer = [max(pair) for pair in zip(hits, misses, strict=True)]
        total = [sum(pair) for pair in zip(hits, misses, strict=True)]
        metric = f"fetch of both halves, {arm.name}"

        for against, seconds, bar in (
            ("the longer half alone", longer, arm.bar),
            ("one half after the other", total, None),
        ):
            values = ratios(samples["both"], seconds)
            yield measured_row(metric, values, at_most=bar, unit="×", against=against, seconds=samples)


def _measure(arm: FetchArm, repeats: int, folder: Path | None) -> Samples:
    """Times fetches of hits, of misses and of both, in turns."""
    chunks = [chunk_of(SIZES, number, f"c{number}") for number in range(2 * arm.half)]
    requests = [Request(chunk.id, chunk.backbone) for chunk in chunks]
    hits, misses = requests[: arm.half], requests[arm.half :]
    square = np.random.default_rng(0).standard_normal((arm.size, arm.size)).astype(np.float32)

    def refuse(_: Sequence[Miss]) -> list[kvp.Chunk]:
        raise AssertionError("fetch: got a miss; expected everything on the disk")

    with tempfile.TemporaryDirectory(dir=folder) as root, ChunkStore(root, budget=Budget(host=0)) as store:
        for chunk in chunks[: arm.half]:
            store.put(chunk)
        if arm.latency:
            _delay_reads(store, arm.latency)

        def multiply(count: int) -> None:
            for _ in range(count):
                np.matmul(square, square)

        # As many products per chunk as take as long as loading it, which is where overlap has most to win.
        loading = statistics.median(stopwatch(lambda: fetch(store, hits, refuse)) for _ in range(5)) / arm.half
        product = statistics.median(stopwatch(lambda: multiply(20)) for _ in range(9)) / 20
        times = max(1, round(loading / product))
        by_id = {chunk.id: chunk for chunk in chunks}

        def compute(missing: Sequence[Miss]) -> list[kvp.Chunk]:
            multiply(times)
            return [by_id[miss.request.id] for miss in missing]

        def timed_fetch(asked: Sequence[Request]) -> float:
            seconds = stopwatch(lambda: fetch(store, asked, compute))
            # What was computed is deleted again, so that every round misses it again.
            store.flush()
            for request in misses:
                store.delete(request.id, request.backbone)
            return seconds

        both = list(itertools.chain.from_iterable(zip(hits, misses, strict=True)))
        kinds = {"hits": hits, "misses": misses, "both": both}
        sides = {name: lambda asked=asked: timed_fetch(asked) for name, asked in kinds.items()}
        return interleave(sides, repeats, warm_ups=1, pause=0.0)


def _delay_reads(store: ChunkStore, seconds: float) -> None:
    """Simulates storage that answers later: every read of an object waits first."""
    read = store.disk.get

    def get(name: Any) -> Any:
        time.sleep(seconds)
        return read(name)

    store.disk.get = get  # pyright: ignore[reportAttributeAccessIssue]


BENCHMARK = Benchmark("fetch", run, ("against",))
