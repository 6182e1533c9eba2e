"""The chunk store beside raw files, safetensors, Orbax, SQLite, diskcache and LMDB, on the disk that holds --out.

Reads are warm: from the system's page cache, never from the store's own memory, which is switched off. All writes are
durable when they return. What is prepared before a call is not timed.
"""

import dataclasses
import functools
import itertools
import os
import random
import sqlite3
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp
from safetensors import numpy as safetensors

import kvpatch_jax as kvp
from kvpatch_jax.store import ChunkStore

from .benchmark import Benchmark, BenchOptions, Sides, timed

BACKBONE = "benchmark"
BATCH = 20
"""Small objects that are put, or read, in one measurement."""


class StoreSizes(NamedTuple):
    """A canonical [layers, tokens, heads, width] in bfloat16."""

    layers: int
    tokens: int
    heads: int
    width: int


SIZES = {
    "50 kB": StoreSizes(4, 24, 4, 32),
    "1 MB": StoreSizes(8, 128, 8, 32),
    "16 MB": StoreSizes(16, 512, 8, 64),
}
SMALL = StoreSizes(layers=1, tokens=4, heads=2, width=32)
"""A chunk of one KiB."""


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the comparisons: a large chunk; small objects among many."""
    place = Path(options.out or ".").resolve()
    place.mkdir(parents=True, exist_ok=True)
    for what, prepare in (("put", _puts), ("get", _gets)):
        for name, sizes in list(SIZES.items())[: 1 if options.quick else None]:
            yield Benchmark(f"store.{what}", name, functools.partial(prepare, place, sizes, options.seed))
    for count, large in ((20, False),) if options.quick else ((1_000, False), (10_000, True), (100_000, True)):
        for what in ("get", "put", "evicting put"):
            prepare = functools.partial(_small_objects, place, count, what)
            yield Benchmark(f"store.small {what}", f"1 KiB among {count}", prepare, large)


def scratch(place: Path, owner: Any) -> Path:
    """Makes a folder that is removed with the object that owns it."""
    folder = tempfile.TemporaryDirectory(prefix="bench-store-", dir=place)
    weakref.finalize(owner, folder.cleanup)
    return Path(folder.name)


def chunk_of(sizes: StoreSizes, seed: int = 0, id: str = "large") -> kvp.Chunk:
    """Draws a canonical of bfloat16 host arrays."""
    layout = kvp.KVLayout.gqa(sizes.layers, sizes.heads, sizes.width, kvp.Rope(1e4, sizes.width))
    rng = np.random.default_rng(seed)
    kv = {name: rng.standard_normal(sizes, np.float32).astype(jnp.bfloat16) for name in layout.names}
    return kvp.Chunk(kv, np.arange(sizes.tokens, dtype=np.float32), sizes.tokens, sizes.tokens, id, layout, BACKBONE)


def bits(arrays: Mapping[str, Any]) -> bytes:
    """Joins the bytes of arrays, by their names."""
    return b"".join(np.asarray(arrays[name]).tobytes() for name in sorted(arrays))


def same(stored: Mapping[str, Any], arrays: Mapping[str, Any]) -> float:
    """Measures whether what was read is what was written: 0, or infinity."""
    return 0.0 if bits(stored) == bits(arrays) else float("inf")


def raw_write(path: Path, data: bytes) -> None:
    """Writes a file and syncs it."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def durable_file(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file, syncs it, gives it its name and syncs the folder: what a careful user does."""
    part = path.with_suffix(".part")
    safetensors.save_file(dict(arrays), part)
    for name in (part, path.parent):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        if name == part:
            part.rename(path)


def read_kv(store: ChunkStore, id: str, **options: Any) -> Mapping[str, Any]:
    """Reads a chunk's arrays; a miss, which would be fast, reads as nothing."""
    stored = store.get(id, BACKBONE, **options)
    return {} if stored is None else dict(stored.kv)


# --------------------------------------------------------------------------------------------------- large objects


def _puts(place: Path, sizes: StoreSizes, seed: int) -> Sides:
    """Prepares a durable put beside raw and safetensors files, and an asynchronous put until it returns."""
    chunk = chunk_of(sizes, seed)
    folder, data = scratch(place, chunk), bits(chunk.kv)
    arrays = {name: np.asarray(value) for name, value in chunk.kv.items()}
    store = ChunkStore(folder / "store", memory=0)

    def gone() -> None:
        store.flush()
        store.delete(chunk.id, BACKBONE)
        (folder / "file").unlink(missing_ok=True)

    def check() -> dict[str, float]:
        store.put(chunk)
        return {"ChunkStore.put": same(read_kv(store, chunk.id), arrays)}

    calls: dict[str, Callable[[], object]] = {
        "ChunkStore.put": lambda: store.put(chunk),
        "put_async returns": lambda: store.put_async(chunk),
        "raw write and sync": lambda: raw_write(folder / "file", data),
        "safetensors, durable": lambda: durable_file(folder / "file", arrays),
    }
    return Sides({name: timed(call, before=gone, wait=id) for name, call in calls.items()}, check, len(data))


def _gets(place: Path, sizes: StoreSizes, seed: int) -> Sides:
    """Prepares a verified get, on the host and on a device, and of one layer, beside raw files, safetensors, Orbax."""
    chunk = chunk_of(sizes, seed)
    folder, data = scratch(place, chunk), bits(chunk.kv)
    arrays = {name: np.asarray(value) for name, value in chunk.kv.items()}
    store, device = ChunkStore(folder / "store", memory=0), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    store.put(chunk)
    raw_write(folder / "raw", data)
    safetensors.save_file(arrays, folder / "file")
    context = ocp.Context()
    context.array_options.saving.use_compression = False  # which reads faster than its default
    with context:
        ocp.save(str(folder / "orbax"), {name: jnp.asarray(value) for name, value in arrays.items()})
    forms = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=device) for name, value in arrays.items()}

    def restore() -> Mapping[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Orbax's own
            return ocp.load(str(folder / "orbax"), forms)

    readers = {
        "ChunkStore.get": lambda: read_kv(store, chunk.id),
        "safetensors": lambda: safetensors.load_file(folder / "file"),
        "ChunkStore.get, on a device": lambda: read_kv(store, chunk.id, placement=device),
        "Orbax, on a device": restore,
    }
    calls = dict(readers) | {"raw read": lambda: (folder / "raw").read_bytes()}

    def check() -> dict[str, float]:
        return {name: same(read(), arrays) for name, read in readers.items()}

    return Sides({name: timed(call, wait=_arrived) for name, call in calls.items()}, check, len(data))


def _arrived(stored: Any) -> None:
    """Waits for arrays of jax; host arrays are there."""
    if isinstance(stored, Mapping):
        jax.block_until_ready(dict(stored))


# --------------------------------------------------------------------------------------------------- small objects


class Keeper(NamedTuple):
    """Where small objects are kept by key: functions that write several in one commit, and that read one."""

    put: Callable[[Sequence[str]], object]
    get: Callable[[str], bytes]


def store_keeper(folder: Path, data: bytes, budget: int | None = None) -> Keeper:
    """Opens a `ChunkStore` without memory."""
    store, small = ChunkStore(folder, root_budget=budget, memory=0), chunk_of(SMALL)

    def put(keys: Sequence[str]) -> None:
        store.put_many([dataclasses.replace(small, id=key) for key in keys])

    return Keeper(put, lambda key: bits(read_kv(store, key)))


def file_keeper(folder: Path, data: bytes) -> Keeper:
    """Keeps a file for each object in 256 folders: written, synced, renamed."""
    for number in range(256):
        (folder / f"{number:02x}").mkdir(parents=True)

    def path(key: str) -> Path:
        return folder / f"{sum(key.encode()) % 256:02x}" / key

    def put(keys: Sequence[str]) -> None:
        for key in keys:
            raw_write(folder / "part", data)
            (folder / "part").rename(path(key))

    return Keeper(put, lambda key: path(key).read_bytes())


def sqlite_keeper(folder: Path, data: bytes) -> Keeper:
    """Opens a table of SQLite with a write-ahead log, synced at every commit."""
    folder.mkdir()
    base = sqlite3.connect(folder / "objects.db")
    for line in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE objects (key PRIMARY KEY, data)"):
        base.execute(line)

    def put(keys: Sequence[str]) -> None:
        with base:
            base.executemany("INSERT INTO objects VALUES (?, ?)", ((key, data) for key in keys))

    return Keeper(put, lambda key: base.execute("SELECT data FROM objects WHERE key = ?", (key,)).fetchone()[0])


def diskcache_keeper(folder: Path, data: bytes) -> Keeper:
    """Opens a `diskcache.Cache`, least recently used, synced at every commit."""
    import diskcache  # pyright: ignore[reportMissingImports]

    options = {"eviction_policy": "least-recently-used", "size_limit": 1 << 50, "sqlite_synchronous": 2}
    cache = diskcache.Cache(str(folder), **options)

    def put(keys: Sequence[str]) -> None:
        with cache.transact():
            for key in keys:
                cache.set(key, data)

    return Keeper(put, lambda key: bytes(cache[key]))  # pyright: ignore[reportArgumentType]


def lmdb_keeper(folder: Path, data: bytes) -> Keeper:
    """Opens an LMDB environment, synced at every commit."""
    import lmdb  # pyright: ignore[reportMissingImports]

    base = lmdb.open(str(folder), map_size=1 << 34)

    def put(keys: Sequence[str]) -> None:
        with base.begin(write=True) as transaction:
            for key in keys:
                transaction.put(key.encode(), data)

    def get(key: str) -> bytes:
        with base.begin() as transaction:
            return transaction.get(key.encode()) or b""

    return Keeper(put, get)


KEEPERS = {
    "ChunkStore": store_keeper,
    "raw files": file_keeper,
    "SQLite": sqlite_keeper,
    "diskcache": diskcache_keeper,
    "LMDB": lmdb_keeper,
}


@functools.cache
def _filled(place: Path, count: int) -> tuple[Path, dict[str, Keeper], dict[str, str]]:
    """Fills every keeper that is installed with `count` objects; they stay for the next comparison."""
    folder, data = scratch(place, _filled), bits(chunk_of(SMALL).kv)
    keepers, notes = {}, {}
    for name, make in KEEPERS.items():
        try:
            keepers[name] = make(folder / name, data)
        except ImportError as missing:
            notes[name] = f"{missing} (extra `bench`)"
            continue
        for keys in itertools.batched((f"small{number:07}" for number in range(count)), 1000):
            keepers[name].put(keys)
    return folder, keepers, notes


def _small_objects(place: Path, count: int, operation: str) -> Sides:
    """Prepares gets or puts of one KiB among `count` objects; of the store also puts that evict."""
    folder, keepers, notes = _filled(place, count)
    data, generator = bits(chunk_of(SMALL).kv), random.Random(0)
    if operation == "evicting put":
        root = folder / "ChunkStore"
        limited = store_keeper(folder / "limited", data, sum(path.stat().st_size for path in root.glob("data/*/*")))
        for keys in itertools.batched((f"small{number:07}" for number in range(count)), 1000):
            limited.put(keys)
        keepers, notes = {"ChunkStore": keepers["ChunkStore"], "ChunkStore, evicting": limited}, {}

    def run(keeper: Keeper) -> None:
        for _ in range(BATCH):
            if operation == "get":
                keeper.get(f"small{generator.randrange(count):07}")
            else:
                keeper.put([f"late{generator.getrandbits(64)}"])

    def check() -> dict[str, float]:
        return {name: 0.0 if keeper.get(f"small{0:07}") == data else np.inf for name, keeper in keepers.items()}

    calls = {name: timed(functools.partial(run, keeper), calls=BATCH, wait=id) for name, keeper in keepers.items()}
    return Sides(calls, check, notes=notes)
