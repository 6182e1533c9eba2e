"""The chunk store beside raw files, safetensors and Orbax, on the disk that holds --out.

Both sides of a pair are timed in turns, so that a busy spell of the machine or its disk hits both alike; only the
ratios of neighbouring turns are judged. A bar of `at least` is on the ratio theirs / ours (above 1 ours is faster), one
of `at most` on ours / theirs. What is prepared before a call, and deleted after it, is not timed. Reads are warm: from
the system's page cache, never from the store's own memory, which is switched off.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from safetensors import numpy as safetensors

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore

from ..results.environment import environment
from ..results.tables import markdown_table
from . import fetch, orbax_side, store_data, store_growth
from .store_data import BACKBONE
from .timing import Turns, stopwatch, take_turns

LEAST_REPEATS = 7
"""Turns of every pair: the extremes of seven ratios hold their median with 98 %."""
NO_DISK = ("tmpfs", "ramfs", "devtmpfs")

Row = dict[str, Any]
Sense = Literal["at least", "at most"]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every section needs: a folder on the disk, an open store in it, a large chunk, patches."""

    folder: Path
    store: ChunkStore
    chunk: kvp.Chunk
    patches: Sequence[kvp.Patch]
    sizes: store_data.StoreSizes
    repeats: int
    seed: int

    def turns(self, sides: Mapping[str, Callable[[], float]]) -> Turns:
        """Times each side in turns, after one turn that does not count."""
        return take_turns(sides, self.repeats, warm_ups=1)


# ------------------------------------------------------------------------------------------------------------- rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Finds the closest two of the values that hold the median with 95 % (binomial), or the extremes."""
    ordered, count = sorted(values), len(values)
    skip = 0
    while 2 * sum(math.comb(count, i) for i in range(skip + 2)) <= 0.05 * 2**count:
        skip += 1
    return ordered[skip], ordered[count - 1 - skip]


def row_of(metric: str, against: str, turns: Turns, sense: Sense = "at least", bar: float | None = None) -> Row:
    """Makes a row of a pair. Without a bar it is there to be seen, and passes nothing."""
    pairs = zip(turns["ours"], turns["theirs"], strict=True)
    ratios = [theirs / ours if sense == "at least" else ours / theirs for ours, theirs in pairs]
    row = {"metric": metric, "against": against, "unit": "ratio", "sense": sense}
    row |= {side: statistics.median(seconds) for side, seconds in turns.items()}
    return _judged(row, ratios, bar) | {"all": turns}


def _judged(row: Row, values: Sequence[float], bar: float | None) -> Row:
    value, (low, high) = statistics.median(values), interval(values)
    row = row | {"value": value, "low": low, "high": high}
    if bar is None:
        return row
    return row | {"bar": bar, "passed": value >= bar if row["sense"] == "at least" else value <= bar}


# --------------------------------------------------------------------------------------------------------- one side


def raw_write(path: Path, *parts: bytes | np.ndarray) -> None:
    """Writes a new file and syncs it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, target: np.ndarray) -> None:
    """Reads a whole file into memory that is there already."""
    fd = os.open(path, os.O_RDONLY)
    try:
        view, offset = memoryview(target), 0
        while view:
            count = os.preadv(fd, [view], offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(fd)


def timed_write(path: Path, write: Callable[[Path], object]) -> float:
    """Times writing a new file, which is then removed."""
    try:
        return stopwatch(lambda: write(path))
    finally:
        path.unlink()


def found(value: Any) -> Any:
    """Returns the value, which must be there: a miss would be fast."""
    if not value:
        raise InputError("benchmark: the store misses what was put; expected a hit")
    return value


# --------------------------------------------------------------------------------------------------------- sections


def puts(bench: Bench) -> Iterator[Row]:
    """Times a durable put of a large chunk beside a raw write and both ways of safetensors; and an asynchronous one."""
    store, chunk, path = bench.store, bench.chunk, bench.folder / "raw"
    leaves = store_data.leaves_of(chunk)
    data = np.concatenate([leaf.reshape(-1).view(np.uint8) for leaf in leaves.values()])

    def save_file(path: Path) -> None:
        safetensors.save_file(leaves, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def ours() -> float:
        store.delete(chunk.id, BACKBONE)
        return stopwatch(lambda: store.put(chunk))

    def asynchronous() -> float:
        store.delete(chunk.id, BACKBONE)
        seconds = stopwatch(lambda: store.put_async(chunk))
        store.flush()
        return seconds

    raw = lambda: timed_write(path, lambda path: raw_write(path, data))
    joined = lambda: timed_write(path, lambda path: raw_write(path, safetensors.save(leaves)))
    yield row_of("durable put", "raw write and sync", bench.turns({"ours": ours, "theirs": raw}), bar=0.6)
    yield row_of("durable put", "safetensors save and sync", bench.turns({"ours": ours, "theirs": joined}), bar=1.5)
    separate = lambda: timed_write(path, save_file)
    yield row_of("durable put", "safetensors save_file and sync", bench.turns({"ours": ours, "theirs": separate}))
    turns = bench.turns({"ours": asynchronous, "theirs": ours})
    yield row_of("asynchronous put returns", "durable put", turns, "at most", 0.5)


def gets(bench: Bench) -> Iterator[Row]:
    """Times a verified get of a large chunk: beside a raw read into the same memory, and, on a device, beside Orbax."""
    store, chunk = bench.store, bench.chunk
    store.put(chunk)
    data = np.concatenate([np.asarray(value).reshape(-1).view(np.uint8) for value in chunk.kv.values()])
    raw_write(bench.folder / "raw", data)
    get = lambda: stopwatch(lambda: found(store.get(chunk.id, BACKBONE)))
    raw = lambda: stopwatch(lambda: raw_read(bench.folder / "raw", data))
    yield row_of("verified get", "raw read, pooled", bench.turns({"ours": get, "theirs": raw}), bar=0.4)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = lambda: jax.block_until_ready(dict(found(store.get(chunk.id, BACKBONE, placement=device)).kv))
    forms = {"Orbax, leaf by leaf": (store_data.leaves_of(chunk), 4.0), "Orbax, layers stacked": (dict(chunk.kv), None)}
    for number, (against, (arrays, bar)) in enumerate(forms.items()):
        path = bench.folder / f"orbax{number}"
        orbax_side.save(path, arrays)
        theirs = lambda path=path, arrays=arrays: stopwatch(lambda: orbax_side.restore(path, arrays, device))
        turns = bench.turns({"ours": lambda: stopwatch(placed), "theirs": theirs})
        yield row_of("verified get on a device", against, turns, bar=bar)
    layer = lambda: stopwatch(lambda: found(one_layer(store, chunk)))
    yield row_of("one layer, verified", "verified get", bench.turns({"ours": layer, "theirs": get}), "at most", 0.1)
    (bench.folder / "raw").unlink()


def one_layer(store: ChunkStore, chunk: kvp.Chunk) -> Mapping[str, Any]:
    """Reads the middle layer alone."""
    with found(store.stream(chunk.id, BACKBONE)) as stream:
        return stream.layer(chunk.layout.layers // 2)


def patches(bench: Bench) -> Iterator[Row]:
    """Times patches of a megabyte: one commit each, and one for all, per patch, beside a raw file each."""
    store, some = bench.store, bench.patches[: max(4, bench.sizes.group // 4)]
    # Bytes that no disk can leave out: not zeros, and not the same in every block.
    data = np.zeros(some[0].nbytes, np.uint8)
    data[:] = np.arange(len(data)) % 251

    def clear() -> None:
        store.delete(bench.chunk.id, BACKBONE)

    def each() -> float:
        clear()
        return stopwatch(lambda: [store.put_patches([patch]) for patch in some]) / len(some)

    def grouped() -> float:
        clear()
        return stopwatch(lambda: store.put_patches(bench.patches)) / len(bench.patches)

    def raw() -> float:
        paths = [bench.folder / f"raw{number}" for number in range(len(some))]
        seconds = stopwatch(lambda: [raw_write(path, data) for path in paths]) / len(paths)
        for path in paths:
            path.unlink()
        return seconds

    against = "raw write and sync of one"
    yield row_of("patch put", against, bench.turns({"ours": each, "theirs": raw}), "at most", 2.5)
    yield row_of("patch put, grouped", against, bench.turns({"ours": grouped, "theirs": raw}), "at most", 0.6)
    turns = store_growth.beside_a_writer(bench.folder, grouped, raw, bench.turns)
    yield row_of("patch put, grouped, beside a busy writer", f"{against}, beside it too", dict(turns), "at most")
    clear()


def opening(bench: Bench) -> Iterator[Row]:
    """Times opening a store of many objects, and finding them all as the first eviction does."""
    root, count = bench.folder / "many", bench.sizes.objects
    small = store_data.chunk_of(store_data.StoreSizes(layers=1, tokens=1, heads=1, width=8), bench.seed)
    with ChunkStore(root, budget=Budget(host=0)) as store:
        for number in range(count):
            store.put_async(dataclasses.replace(small, id=f"small{number}"))

    def opened() -> None:
        with ChunkStore(root, budget=Budget(disk=1 << 40)) as store:
            if len(store.disk.scan()) != count:
                raise InputError(f"benchmark: not all of {count} objects are there; expected what was put")

    seconds = bench.turns({"ours": lambda: stopwatch(opened)})
    row = {"metric": f"opening {count} objects", "against": "", "unit": "seconds", "sense": "at most"}
    yield _judged(row | {"ours": statistics.median(seconds["ours"])}, seconds["ours"], 0.25) | {"all": seconds}


def growth(bench: Bench) -> Iterator[Row]:
    """Times keeping order among ever more objects, and in a library of many entries."""
    for row, seconds in store_growth.rows(bench.folder, bench.sizes, bench.repeats, bench.seed):
        yield _judged(row, seconds, store_growth.BARS.get(row["what"]))


def sharded(bench: Bench) -> Iterator[Row]:
    """Times reading a large chunk into shards by heads over eight host devices, in a process of its own."""
    folder = bench.folder / "sharded"
    folder.mkdir()
    sizes = json.dumps(dataclasses.asdict(bench.sizes))
    program = [sys.executable, "-m", "evals.bench.store_sharded", str(folder), sizes, str(bench.repeats)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run([*program, str(bench.seed)], env=variables, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"benchmark: the process on eight devices failed; expected turns\n{done.stderr[-2000:]}")
    turns = json.loads(done.stdout.splitlines()[-1])
    yield row_of("get over heads on 8 devices", "Orbax, layers stacked", turns, bar=3.0)


def fetching(bench: Bench) -> Iterator[Row]:
    """Times one fetch that loads half and computes half, from the page cache and with simulated latency."""
    against = {"fetch_over_longer": "the longer half alone", "fetch_over_sum": "one half after the other"}
    for row in fetch.rows(bench.repeats, bench.folder):
        if row["metric"] in against:
            names = {"metric": f"fetch of both halves, {row['arm']}", "against": against[row["metric"]]}
            kept = {"unit": "ratio", "sense": "at most"} | {name: row[name] for name in ("value", "low", "high")}
            bar = {"bar": row["at_most"], "passed": row["value"] <= row["at_most"]} if "at_most" in row else {}
            yield names | kept | bar | {"all": {}}


SECTIONS: tuple[Callable[[Bench], Iterator[Row]], ...] = (puts, gets, patches, opening, growth, sharded, fetching)


# -------------------------------------------------------------------------------------------------------------- run


def file_system(folder: Path) -> str:
    """Finds the kind of file system that holds a folder; "unknown" where the system does not say."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        own = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
        return max(own)[1] if own else "unknown"
    return "unknown"


def run(*, repeats: int = LEAST_REPEATS, seed: int = 0, out: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Times everything that the store has a bar for.

    Args:
      repeats: turns of every pair; at least seven, but for `quick`.
      seed: of the data.
      out: a directory on the disk to measure; here by default.
      quick: tiny sizes and two repeats: shows that it runs, and says nothing about speed.

    Returns:
      {"config", "environment", "rows"}, ready for JSON.

    Raises:
      InputError: `out` is in memory (except for `quick`).
    """
    place = Path(out or ".").resolve()
    place.mkdir(parents=True, exist_ok=True)
    kind = file_system(place)
    if kind in NO_DISK and not quick:
        raise InputError(f"--out={out} is on {kind}; expected a directory on a disk")
    repeats = 2 if quick else max(repeats, LEAST_REPEATS)
    sizes = store_data.QUICK if quick else store_data.WHOLE
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=place) as name:
        chunk = store_data.chunk_of(sizes, seed)
        some = store_data.patches_of(chunk, sizes, seed)
        with ChunkStore(f"{name}/store", budget=Budget(host=0)) as store:
            bench = Bench(Path(name), store, chunk, some, sizes, repeats, seed)
            rows += [row for section in SECTIONS for row in section(bench)]
    config = {"repeats": repeats, "seed": seed, "quick": quick, "file_system": kind, "sizes": dataclasses.asdict(sizes)}
    config |= {"chunk_bytes": chunk.nbytes, "patch_bytes": some[0].nbytes}
    return {"config": config, "environment": environment(), "rows": rows}


_HEADS = ("what", "against", "ours", "theirs", "value", "interval", "bar", "")


def table(result: Mapping[str, Any]) -> str:
    """Formats the rows as Markdown, with what they were measured on and how many are within their bars."""
    config, rows = result["config"], result["rows"]
    judged = [row for row in rows if "passed" in row]
    where = f"{config['repeats']} interleaved repeats, {config['file_system']}, {result['environment']['cores']} cores"
    sizes = f"a chunk of {config['chunk_bytes'] / 1e6:.3g} MB, patches of {config['patch_bytes'] / 1e6:.3g} MB"
    note = " Tiny sizes: these are no measurements." if config["quick"] else ""
    within = f"{sum(row['passed'] for row in judged)} of {len(judged)} rows within their bars"
    text = markdown_table(_HEADS, [_cells(row) for row in rows])
    return f"{text}\n\n{where}; {sizes}; {within}.{note}\n"


def _cells(row: Row) -> tuple[str, ...]:
    times = "×" if row["unit"] == "ratio" else " s"
    side = lambda name: f"{1e3 * row[name]:.3g} ms" if name in row else ""
    span = f"{row['low']:.3g} to {row['high']:.3g}"
    bar = f"{row['sense']} {row['bar']:g}{times}" if "bar" in row else ""
    verdict = "" if "passed" not in row else "yes" if row["passed"] else "no"
    return row["metric"], row["against"], side("ours"), side("theirs"), f"{row['value']:.3g}{times}", span, bar, verdict
