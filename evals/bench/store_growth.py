"""Keeping order among ever more objects: eviction, collection, listing, libraries; and a busy writer.

Every number is of one root that grows. A put that evicts is timed with those after it that need not: a hundred in all,
where an eviction makes room for a twentieth of what is there, so the figure is rather too large.
"""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.audit import listing
from kvpatch_jax.store.format.codec import chunk_blob

from .benchmark import Row, measured_row
from .store_workload import BACKBONE, SMALL, StoreSizes, chunk_of
from .timing import stopwatch

EVICTING, COLLECT, LISTED, LIBRARY = "evicting put", "collect, nothing expired", "ls, the first row", "library put"
BARS = {EVICTING: 0.1, COLLECT: 1.0, LIBRARY: 0.01}
"""Seconds."""

_PUTS, _GROUP = 100, 500
_WRITER = """
import os, sys
data = os.urandom(1 << 22)
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(16):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    print("wrote", flush=True)
"""


def rows(folder: Path, sizes: StoreSizes, repeats: int, seed: int) -> Iterator[Row]:
    """Yields a row per operation and number of objects."""
    measurements = itertools.chain(
        _growing_root(folder / "growing", sizes.growth, repeats, seed),
        _library_puts(folder / "library", sizes.entries, repeats),
    )
    for operation, count, seconds in measurements:
        kind = "entries" if operation.startswith("library") else "objects"
        labels = {"against": "", "unit": " s", "operation": operation, "objects": count, "seconds": {"ours": seconds}}
        yield measured_row(f"{operation}, at {count} {kind}", seconds, at_most=BARS.get(operation), **labels)


Measured = Iterator[tuple[str, int, list[float]]]
"""The operation, how many objects there were, seconds of each repeat."""


def _growing_root(root: Path, counts: Sequence[int], repeats: int, seed: int) -> Measured:
    """Times a root at several numbers of objects."""
    small, numbers = chunk_of(SMALL, seed), itertools.count()
    with ChunkStore(root, budget=Budget(host=0)) as store:

        def fill(count: int) -> None:
            missing = count - len(store.disk.scan())
            for group in itertools.batched(itertools.islice(numbers, missing), _GROUP):
                chunks = [dataclasses.replace(small, id=f"small{number}") for number in group]
                store.disk.put_group([(store.names.canonical(BACKBONE, c.id), chunk_blob(c)) for c in chunks])

        for count in counts:
            fill(count)
            yield COLLECT, count, [stopwatch(store.collect) for _ in range(repeats)]
            yield LISTED, count, [stopwatch(lambda: next(listing(store.disk))) for _ in range(repeats)]

            # An evicting put removes a twentieth, so that the root is filled again before each.
            seconds: list[float] = []
            for _ in range(repeats):
                fill(count)
                seconds.append(_evicting_put(root, small, numbers))

            yield EVICTING, count, seconds


def _evicting_put(root: Path, small: kvp.Chunk, numbers: Iterator[int]) -> float:
    """Measures seconds of a put, of which the first has to evict."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        nbytes = sum(entry.size for entry in store.disk.scan())
    with ChunkStore(root, budget=Budget(host=0, disk=nbytes)) as store:
        chunks = [dataclasses.replace(small, id=f"small{next(numbers)}") for _ in range(_PUTS)]

        def put() -> None:
            for chunk in chunks:
                store.put(chunk)

        return stopwatch(put) / len(chunks)


def _library_puts(root: Path, entries: int, repeats: int) -> Measured:
    """Times a library of many entries: a put by one that has read it before; and the first read of a new process."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        library = StaticLibrary(store, quota=1 << 40)
        for number in range(entries):
            library.put(f"N{number}", f"text {number}")

        def put_again(number: int) -> float:
            return stopwatch(lambda: library.put(f"N{number % entries}", "another text"))

        yield LIBRARY, entries, [put_again(7919 * turn) for turn in range(repeats)]
        first_look = "library, the first look"
        yield first_look, entries, [stopwatch(lambda: StaticLibrary(store, quota=1 << 40).used) for _ in range(repeats)]


@contextlib.contextmanager
def busy_writer(path: Path) -> Iterator[None]:
    """Runs another process that writes 64 MB after 64 MB to the same disk, each synced, until this is left."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, os.fspath(path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()  # it has begun
            yield
        finally:
            writer.kill()
    path.unlink()


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws how times grow with the number of objects, with their bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()

    for number, operation in enumerate((EVICTING, COLLECT, LISTED)):
        points = [row for row in result["rows"] if row.get("operation") == operation]
        counts = [row["objects"] for row in points]
        middle = [row["value"] for row in points]
        ends = [[row["value"] - row["low"] for row in points], [row["high"] - row["value"] for row in points]]
        axes.errorbar(counts, middle, ends, label=operation, marker="o", capsize=3, color=f"C{number}")
        if operation in BARS:
            axes.axhline(BARS[operation], color=f"C{number}", linestyle=":", linewidth=1)

    axes.set(xscale="log", yscale="log", xlabel="objects in the root", ylabel="seconds (dotted: the bar)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
