"""The chunk store beside raw files, safetensors, Orbax, diskcache and LMDB, on the disk that holds --out.

Both sides of a pair are timed in turns and only the ratios of neighbouring turns are judged. What is prepared before a
call, and deleted after it, is not timed. Reads are warm: from the system's page cache, never from the store's own
memory, which is switched off.
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore

from ..harness.environment import environment
from . import store_scale, store_tables
from .benchmark import AT_MOST, Benchmark, Row, comparison_row
from .store_rivals import installed
from .store_workload import (
    BACKBONE,
    QUICK,
    WHOLE,
    StoreSizes,
    busy_writer,
    chunk_of,
    leaves_of,
    patches_of,
    restore_by_orbax,
    save_by_orbax,
)
from .timing import Samples, interleave, stopwatch

LEAST_REPEATS = 7
"""Turns of every pair: the extremes of seven ratios hold their median with 98 %."""
NO_DISK = ("tmpfs", "ramfs", "devtmpfs")
SECTIONS = ("large", "fixed", "scale")


@dataclasses.dataclass(frozen=True)
class StoreCase:
    """What every section needs: a folder on the disk, an open store in it, a large chunk, patches."""

    folder: Path
    store: ChunkStore
    chunk: kvp.Chunk
    patches: Sequence[kvp.Patch]
    sizes: StoreSizes
    repeats: int
    seed: int

    def interleave(self, ours: Callable[[], float], theirs: Callable[[], float]) -> Samples:
        """Times both sides in turns, after one turn that does not count."""
        return interleave({"ours": ours, "theirs": theirs}, self.repeats, warm_ups=1)


def run(
    *,
    repeats: int = LEAST_REPEATS,
    seed: int = 0,
    out: str | None = None,
    quick: bool = False,
    objects: Sequence[str] = (),
    sections: Sequence[str] = SECTIONS,
    fill: str = "direct",
) -> dict[str, Any]:
    """Times everything that the store has a bar for.

    Args:
      repeats: turns of every pair; at least seven, but for `quick`.
      seed: of the data.
      out: a directory on the disk to measure; here by default.
      quick: tiny sizes and two repeats: a preview, not a measurement.
      objects: numbers of small objects, each with the directory that they are in if not `out`: "1000000@/dev/shm". By
        default those of the sizes.
      sections: what is measured: "large" objects; "fixed", small reads, the host tier and libraries; and "scale", what
        depends on the number of objects.
      fill: "direct" fills the store for "scale" by writing object files without syncing them, "put" by puts.

    Raises:
      InputError: `out` is in memory (except for `quick`), a number is no number, a section unknown.
    """
    place = Path(out or ".").resolve()
    place.mkdir(parents=True, exist_ok=True)
    kind = file_system(place)
    if kind in NO_DISK and not quick and not {"large", "fixed"}.isdisjoint(sections):
        raise InputError(f"--out: got {out}, on {kind}; expected a directory on a disk")
    if unknown := set(sections) - set(SECTIONS):
        raise InputError(f"--sections: got {sorted(unknown)}; expected some of {SECTIONS}")

    repeats = 2 if quick else max(repeats, LEAST_REPEATS)
    sizes = QUICK if quick else WHOLE
    wanted = [store_scale.count_and_place(word, place) for word in objects or map(str, sizes.growth)]
    rows: list[Row] = []

    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=place) as name:
        if "large" in sections:
            rows += large_rows(Path(name), sizes, repeats, seed)
        if "fixed" in sections:
            host_entries = {"host_entries": sizes.entries} if quick else {}
            rows += store_scale.fixed_rows(Path(name), repeats, seed, sizes.entries, **host_entries)

    if "scale" in sections:
        for count, folder in wanted:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder) as name:
                options = store_scale.ScaleOptions(
                    Path(name), count, file_system(folder), sizes.patches, repeats, fill == "direct", quick
                )
                rows += store_scale.rows(options)

    config = {"repeats": repeats, "seed": seed, "quick": quick, "file_system": kind, "sizes": dataclasses.asdict(sizes)}
    config |= {"fill": fill, "absent": installed()[1]}
    return {"config": config, "environment": environment(), "rows": rows}


def large_rows(folder: Path, sizes: StoreSizes, repeats: int, seed: int) -> list[Row]:
    """Times large chunks and patches."""
    chunk = chunk_of(sizes, seed)
    rows: list[Row] = []
    with ChunkStore(folder / "store", budget=Budget(host=0)) as store:
        case = StoreCase(folder, store, chunk, patches_of(chunk, sizes, seed), sizes, repeats, seed)
        for section in (put_rows, get_rows, patch_rows, sharded_rows):
            rows += section(case)
        return rows


def file_system(folder: Path) -> str:
    """Returns the kind of file system that holds a folder; "unknown" where the system does not say."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        holding = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
        return max(holding)[1] if holding else "unknown"
    return "unknown"


# --------------------------------------------------------------------------------------------------- raw files


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


def expect_hit(value: Any) -> Any:
    """Returns what was read. Raises InputError for a miss, which would be fast."""
    if not value:
        raise InputError("benchmark: got a miss of what was put; expected a hit")
    return value


def joined_bytes(arrays: Mapping[str, Any]) -> np.ndarray:
    """Joins the bytes of arrays."""
    return np.concatenate([np.asarray(value).reshape(-1).view(np.uint8) for value in arrays.values()])


# ----------------------------------------------------------------------------------------------------- sections


def put_rows(case: StoreCase) -> Iterator[Row]:
    """Times a durable put of a large chunk beside a raw write and both ways of safetensors; and an asynchronous one."""
    store, chunk, path = case.store, case.chunk, case.folder / "raw"
    leaves = leaves_of(chunk)
    data = joined_bytes(leaves)

    def save_file(path: Path) -> None:
        safetensors.save_file(leaves, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def put() -> float:
        store.delete(chunk.id, BACKBONE)
        return stopwatch(lambda: store.put(chunk))

    def put_async() -> float:
        store.delete(chunk.id, BACKBONE)
        seconds = stopwatch(lambda: store.put_async(chunk))
        store.flush()
        return seconds

    others: dict[str, tuple[Callable[[Path], object], float | None]] = {
        "raw write and sync": (lambda path: raw_write(path, data), 0.6),
        "safetensors save and sync": (lambda path: raw_write(path, safetensors.save(leaves)), 1.5),
        "safetensors save_file and sync": (save_file, None),
    }
    for against, (write, bar) in others.items():
        samples = case.interleave(put, lambda write=write: timed_write(path, write))
        yield comparison_row("durable put", samples, at_least=bar, against=against)

    samples = case.interleave(put_async, put)
    yield comparison_row("asynchronous put returns", samples, at_most=0.5, against="durable put")


def get_rows(case: StoreCase) -> Iterator[Row]:
    """Times a verified get of a large chunk: beside a raw read into the same memory, and, on a device, beside Orbax."""
    store, chunk, raw = case.store, case.chunk, case.folder / "raw"
    store.put(chunk)
    data = joined_bytes(chunk.kv)
    raw_write(raw, data)

    def get() -> float:
        return stopwatch(lambda: expect_hit(store.get(chunk.id, BACKBONE)))

    samples = case.interleave(get, lambda: stopwatch(lambda: raw_read(raw, data)))
    yield comparison_row("verified get", samples, at_least=0.4, against="raw read, pooled")

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def get_on_device() -> float:
        return stopwatch(
            lambda: jax.block_until_ready(dict(expect_hit(store.get(chunk.id, BACKBONE, placement=device)).kv))
        )

    forms = {"Orbax, leaf by leaf": (leaves_of(chunk), 4.0), "Orbax, layers stacked": (dict(chunk.kv), None)}
    for number, (against, (arrays, bar)) in enumerate(forms.items()):
        path = case.folder / f"orbax{number}"
        save_by_orbax(path, arrays)
        restore = functools.partial(restore_by_orbax, path, arrays, device)
        samples = case.interleave(get_on_device, functools.partial(stopwatch, restore))
        yield comparison_row("verified get on a device", samples, at_least=bar, against=against)

    def get_layer() -> object:
        with expect_hit(store.stream(chunk.id, BACKBONE)) as stream:
            return expect_hit(stream.layer(chunk.layout.layers // 2))

    samples = case.interleave(lambda: stopwatch(get_layer), get)
    yield comparison_row("one layer, verified", samples, at_most=0.1, against="verified get")
    raw.unlink()


def patch_rows(case: StoreCase) -> Iterator[Row]:
    """Times patches of a megabyte: one commit each, and one for all, per patch, beside a raw file each."""
    store, few = case.store, case.patches[: max(4, case.sizes.group // 4)]
    # Bytes that no disk can leave out: not zeros, and not the same in every block.
    data = np.zeros(few[0].nbytes, np.uint8)
    data[:] = np.arange(len(data)) % 251

    def put_each() -> float:
        store.delete(case.chunk.id, BACKBONE)
        return stopwatch(lambda: [store.put_patches([patch]) for patch in few]) / len(few)

    def put_group() -> float:
        store.delete(case.chunk.id, BACKBONE)
        return stopwatch(lambda: store.put_patches(case.patches)) / len(case.patches)

    def write_each() -> float:
        paths = [case.folder / f"raw{number}" for number in range(len(few))]
        seconds = stopwatch(lambda: [raw_write(path, data) for path in paths]) / len(paths)
        for path in paths:
            path.unlink()
        return seconds

    against = "raw write and sync of one"
    yield comparison_row("patch put", case.interleave(put_each, write_each), at_most=2.5, against=against)
    yield comparison_row("patch put, grouped", case.interleave(put_group, write_each), at_most=0.6, against=against)
    with busy_writer(case.folder / "busy"):
        samples = case.interleave(put_group, write_each)
    metric = "patch put, grouped, beside a busy writer"
    yield comparison_row(metric, samples, sense=AT_MOST, against=f"{against}, beside it too")
    store.delete(case.chunk.id, BACKBONE)


def sharded_rows(case: StoreCase) -> Iterator[Row]:
    """Times reading a large chunk into shards by heads over eight host devices, in a process of its own."""
    folder = case.folder / "sharded"
    folder.mkdir()
    sizes = json.dumps(dataclasses.asdict(case.sizes))
    program = [sys.executable, "-m", "evals.bench.store_sharded", str(folder), sizes, str(case.repeats)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    done = subprocess.run([*program, str(case.seed)], env=variables, capture_output=True, text=True)
    if done.returncode:
        status, words = done.returncode, done.stderr[-2000:]
        raise InputError(f"store_sharded: got exit status {status}; expected seconds of both sides\n{words}")
    samples = json.loads(done.stdout.splitlines()[-1])
    yield comparison_row("get over heads on 8 devices", samples, at_least=3.0, against="Orbax, layers stacked")


BENCHMARK = Benchmark("store", run, table=store_tables.format_result, draw=store_tables.draw)
