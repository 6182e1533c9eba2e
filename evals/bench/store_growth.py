"""Keeping order among ever more objects: eviction, collection, listing, libraries; and groups beside a busy writer.

Every number is of one root that grows. A put that evicts is timed with those behind it that need not: a hundred in all,
where an eviction makes room for a twentieth of what is there, so that this tells rather too much.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.audit import listing
from kvpatch_jax.store.format.codec import chunk_blob

from . import store_data
from .store_data import BACKBONE
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

Measured = Iterator[tuple[str, int, list[float]]]
"""What was measured, how many objects there were, seconds of each repeat."""


def small_chunk(seed: int) -> kvp.Chunk:
    """Draws a canonical whose file is little more than its header."""
    return store_data.chunk_of(store_data.StoreSizes(layers=1, tokens=1, heads=1, width=8), seed)


def growing(root: Path, counts: Sequence[int], repeats: int, seed: int) -> Measured:
    """Times a root at several numbers of objects."""
    small, numbers = small_chunk(seed), itertools.count()
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
            turns: list[float] = []
            for _ in range(repeats):
                fill(count)
                turns.append(_evicting(root, small, numbers))
            yield EVICTING, count, turns


def _evicting(root: Path, small: kvp.Chunk, numbers: Iterator[int]) -> float:
    """Seconds of a put, of which the first has to evict."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        there = sum(entry.size for entry in store.disk.scan())
    with ChunkStore(root, budget=Budget(host=0, disk=there)) as store:
        chunks = [dataclasses.replace(small, id=f"small{next(numbers)}") for _ in range(_PUTS)]

        def put() -> None:
            for chunk in chunks:
                store.put(chunk)

        return stopwatch(put) / len(chunks)


def library_puts(root: Path, entries: int, repeats: int) -> Measured:
    """Times a library of many entries: a put by who has looked at it before; and the first look of a new process."""
    with ChunkStore(root, budget=Budget(host=0)) as store:
        library = StaticLibrary(store, quota=1 << 40)
        for number in range(entries):
            library.put(f"N{number}", f"text {number}")
        again = lambda number: stopwatch(lambda: library.put(f"N{number % entries}", "another text"))
        yield LIBRARY, entries, [again(7919 * turn) for turn in range(repeats)]
        new = lambda: StaticLibrary(store, quota=1 << 40)
        yield "library, the first look", entries, [stopwatch(lambda: new().used) for _ in range(repeats)]


def rows(
    folder: Path, sizes: store_data.StoreSizes, repeats: int, seed: int
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yields each measurement as a row without its judgement, and its seconds."""
    measured = itertools.chain(
        growing(folder / "growing", sizes.growth, repeats, seed),
        library_puts(folder / "library", sizes.entries, repeats),
    )
    for what, count, seconds in measured:
        things = "entries" if what.startswith("library") else "objects"
        row = {"metric": f"{what}, at {count} {things}", "against": "", "unit": "seconds", "sense": "at most"}
        row |= {"ours": statistics.median(seconds), "what": what, "objects": count, "all": {"ours": seconds}}
        yield row, seconds


# ------------------------------------------------------------------------------------------------- a busy writer


@contextlib.contextmanager
def busy_writer(path: Path) -> Iterator[None]:
    """Lets another process write 64 MB after 64 MB to the same disk, each synced, until this is left."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, os.fspath(path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()  # it has begun
            yield
        finally:
            writer.kill()
    path.unlink()


def beside_a_writer(
    folder: Path, put: Callable[[], float], raw: Callable[[], float], turns: Callable[..., Mapping[str, list[float]]]
) -> Mapping[str, list[float]]:
    """Times a grouped put and a raw write of one in turns, both beside a busy writer."""
    with busy_writer(folder / "busy"):
        return turns({"ours": put, "theirs": raw})


# ------------------------------------------------------------------------------------------------------ a picture


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws how times grow with the number of objects, with the bars that they are held to."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, what in enumerate((EVICTING, COLLECT, LISTED)):
        own = [row for row in result["rows"] if row.get("what") == what]
        counts = [row["objects"] for row in own]
        middle, low, high = (np.array([row[name] for row in own]) for name in ("value", "low", "high"))
        axes.errorbar(
            counts, middle, [middle - low, high - middle], label=what, marker="o", capsize=3, color=f"C{number}"
        )
        if what in BARS:
            axes.axhline(BARS[what], color=f"C{number}", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="objects in the root", ylabel="seconds (dotted: what is allowed)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
