"""One process of a loaded store: what it reads and writes, all of it checked against the shared log.

The values of a write say which write it was, and every other number in them follows from that.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.errors import InputError, StoreError
from kvpatch_jax.store import Budget, ChunkStore, PatchKey

from .store_load_log import DELETE, FAILED_DELETE, FAILED_PUT, PUT, LoadLog

BACKBONE = "load"
HEADS, WIDTH = 2, 64
LAYOUT = kvp.KVLayout.gqa(1, HEADS, WIDTH, kvp.Rope(1e4, WIDTH))
SIZES = 5
_NOTED = 20


@dataclasses.dataclass(frozen=True)
class LoadTenant:
    """One tenant of the load.

    Attributes:
      name: its name.
      root: the store's directory.
      first: number of its first name in the log. Its chunks come first, then a patch of each.
      chunks: chunks that it has.
      budget: bytes of the tenant's objects; `shared`: of the whole root. None: no limit, and nothing may be lost.
      key: encrypts its objects.
      remote: URL of a remote store.
    """

    name: str
    root: str
    first: int
    chunks: int
    budget: int | None = None
    shared: int | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    remote: str | None = None

    @property
    def evictable(self) -> bool:
        """Whether objects may be evicted."""
        return self.budget is not None or self.shared is not None

    def open(self, host: int = 0) -> ChunkStore:
        """Opens the tenant's store."""
        remote = None
        if self.remote is not None:
            remote = importlib.import_module("kvpatch_jax.store").open_remote(self.remote)
        budget = Budget(host=host, disk=self.shared, tenant=self.budget)
        return ChunkStore(self.root, tenant=self.name, budget=budget, key=self.key, remote=remote, queue="8 MiB")


@dataclasses.dataclass
class LoadCounts:
    """What a process did and found; added over processes.

    Attributes:
      calls: calls by operation.
      reads: reads that were checked: hits and misses by operation.
      wrong: wrong reads by kind.
      failures: failed calls by operation and error.
      longest: seconds of the longest call by operation.
      store: counters of the store objects.
      examples: texts of the first wrong reads and of unexpected errors.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reads: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    longest: dict[str, float] = dataclasses.field(default_factory=dict)
    store: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "LoadCounts") -> None:
        """Adds another process's counts."""
        for word in ("calls", "reads", "wrong", "failures", "store"):
            getattr(self, word).update(getattr(other, word))
        for operation, seconds in other.longest.items():
            self.longest[operation] = max(seconds, self.longest.get(operation, 0.0))
        self.examples += other.examples

    def as_json(self) -> dict[str, Any]:
        """Returns the counts as plain dictionaries."""
        words = ("calls", "reads", "wrong", "failures", "longest", "store")
        return {word: dict(getattr(self, word)) for word in words} | {"examples": self.examples}


# ------------------------------------------------------------------------------------------------------------ values


def tokens_of(chunk: int) -> int:
    """Returns how many tokens a chunk has, 16 to 256: a KiB each. Few sizes, for each is compiled for."""
    return 16 << chunk % SIZES


def pattern(name: int, number: int, size: int) -> np.ndarray:
    """Makes the float32 [size] of a write: its name, its number, then whole numbers that follow from both."""
    values = ((np.arange(size) * 31 + number * 17 + name * 7) % 1009).astype(np.float32)
    values[:2] = name, number
    return values


def number_in(name: int, arrays: list[np.ndarray]) -> int:
    """Returns the number of the write that arrays are of; -1 if they are of none."""
    flat = [np.asarray(array, np.float32).reshape(-1) for array in arrays]
    number = int(flat[0][1])
    if number < 1 or not all(np.array_equal(values, pattern(name, number, values.size)) for values in flat):
        return -1
    return number


def chunk_of_write(name: int, number: int, chunk: int) -> kvp.Chunk:
    """Makes the chunk that a write stores."""
    tokens = tokens_of(chunk)
    values = pattern(name, number, tokens * HEADS * WIDTH).reshape(1, tokens, HEADS, WIDTH)
    kv = dict.fromkeys(LAYOUT.names, values)
    return kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, f"chunk{chunk}", LAYOUT, BACKBONE)


def patch_of_write(name: int, number: int, chunk: int) -> kvp.Patch:
    """Makes the patch that a write stores."""
    u = jnp.asarray(np.ones((1, tokens_of(chunk), 1), np.float32))  # compiles nothing
    v = jnp.asarray(pattern(name, number, HEADS * WIDTH).reshape(1, 1, HEADS * WIDTH))
    metadata = PatchMetadata(f"chunk{chunk}", "canonical", ("lead",), BACKBONE, LAYOUT, (0,))
    return kvp.Patch(dict.fromkeys(LAYOUT.names, (u, v)), metadata)


# ------------------------------------------------------------------------------------------------------------ worker


class LoadWorker:
    """Calls of one process on one tenant's store, chosen at random.

    Args:
      tenant: whose store it is.
      log: of all processes' writes.
      seed: of the choices.
    """

    def __init__(self, tenant: LoadTenant, log: LoadLog, seed: int):
        self._tenant, self._log, self._chosen = tenant, log, random.Random(seed)
        self.counts = LoadCounts()
        self._store = tenant.open(host=(seed % 2) << 20)
        for chunk in range(SIZES):  # compiles what every process compiles once, before any is measured
            chunk_of_write(0, 1, chunk)
            patch_of_write(0, 1, chunk)
        self._operations: dict[str, tuple[float, Callable[[int], object]]] = {
            "get": (46, self._get),
            "get_patches": (14, self._get_patches),
            "put": (13, self._put),
            "put_many": (3, self._put_many),
            "put_async": (10, self._put_async),
            "put_patches": (6, self._put_patch),
            "put_patch_async": (2, self._put_patch_async),
            "delete": (4, self._delete),
            "flush": (1, lambda chunk: self._store.flush()),
            "collect": (1, lambda chunk: self._store.collect()),
        }

    def run(self, until: float, most: int = 1 << 62) -> LoadCounts:
        """Calls the store until a time of the monotonic clock, or so many times. Returns what was counted."""
        names = list(self._operations)
        weights = [weight for weight, _ in self._operations.values()]
        for _ in range(most):
            if time.monotonic() >= until:
                break
            (operation,) = self._chosen.choices(names, weights)
            # Half of the calls are on a tenth of the chunks, where processes meet.
            hot = self._chosen.random() < 0.5
            chunk = self._chosen.randrange(max(1, self._tenant.chunks // 10) if hot else self._tenant.chunks)
            began = time.perf_counter()
            try:
                self._operations[operation][1](chunk)
            except StoreError as error:
                self._note_failure(operation, error)
            seconds = time.perf_counter() - began
            self.counts.calls[operation] += 1
            self.counts.longest[operation] = max(seconds, self.counts.longest.get(operation, 0.0))
        with contextlib.suppress(StoreError):  # each was counted when its future was done
            self._store.close()
        self.counts.store.update(dict(self._store.statistics().counts))
        return self.counts

    def _note_failure(self, operation: str, error: BaseException) -> None:
        self.counts.failures[f"{operation}: {type(error).__name__}"] += 1
        if len(self.counts.examples) < _NOTED:
            self.counts.examples.append(f"{operation}: {str(error)[:300]}")

    def _name(self, chunk: int) -> int:
        return self._tenant.first + chunk

    def _patch_name(self, chunk: int) -> int:
        return self._tenant.first + self._tenant.chunks + chunk

    # ------------------------------------------------------------------------------------------------ reads

    def _get(self, chunk: int) -> None:
        name, began = self._name(chunk), time.monotonic_ns()
        found = self._store.get(f"chunk{chunk}", BACKBONE)
        arrays = None if found is None else [np.asarray(value) for value in found.kv.values()]
        self._judge("get", name, arrays, began)

    def _get_patches(self, chunk: int) -> None:
        name, began = self._patch_name(chunk), time.monotonic_ns()
        found = self._store.get_patches(PatchKey(f"chunk{chunk}", BACKBONE, ("lead",)))
        arrays = [np.asarray(factors[1]) for patch in found for factors in patch.factors.values()]
        self._judge("get_patches", name, arrays or None, began)

    def _judge(self, operation: str, name: int, arrays: list[np.ndarray] | None, began: int) -> None:
        number = None if arrays is None else number_in(name, arrays)
        wrong = "torn" if number == -1 else self._log.judge(name, number, began, evictable=self._tenant.evictable)
        self.counts.reads[f"{operation}: {'miss' if number is None else 'hit'}"] += 1
        if wrong is not None:
            self.counts.wrong[wrong] += 1
            if len(self.counts.examples) < _NOTED:
                self.counts.examples.append(f"{operation} of {self._tenant.name}: {wrong}: name {name}, write {number}")

    # ----------------------------------------------------------------------------------------------- writes

    def _put(self, chunk: int) -> None:
        name = self._name(chunk)
        with self._writing([(name, PUT)]) as (number,):
            self._store.put(chunk_of_write(name, number, chunk))

    def _put_many(self, chunk: int) -> None:
        chunks = sorted({chunk, (chunk + 7) % self._tenant.chunks, (chunk + 12) % self._tenant.chunks})
        names = [self._name(other) for other in chunks]
        with self._writing([(name, PUT) for name in names]) as numbers:
            writes = zip(names, numbers, chunks, strict=True)
            self._store.put_many([chunk_of_write(name, number, other) for name, number, other in writes])

    def _put_patch(self, chunk: int) -> None:
        name = self._patch_name(chunk)
        with self._writing([(name, PUT)]) as (number,):
            self._store.put_patches([patch_of_write(name, number, chunk)])

    def _delete(self, chunk: int) -> None:
        with self._writing([(self._name(chunk), DELETE), (self._patch_name(chunk), DELETE)]):
            self._store.delete(f"chunk{chunk}", BACKBONE)

    @contextlib.contextmanager
    def _writing(self, writes: list[tuple[int, int]]):
        """Notes writes before and after they are made; yields their numbers."""
        numbers = [self._log.begin(name, kind) for name, kind in writes]
        ended: dict[int, int] = {PUT: FAILED_PUT, DELETE: FAILED_DELETE}
        try:
            yield numbers
            ended = {}
        finally:
            for (name, kind), number in zip(writes, numbers, strict=True):
                self._log.end(name, number, ended.get(kind))

    def _put_async(self, chunk: int) -> None:
        name = self._name(chunk)
        number = self._log.begin(name, PUT)
        self._queued(name, number, lambda: self._store.put_async(chunk_of_write(name, number, chunk)))

    def _put_patch_async(self, chunk: int) -> None:
        name = self._patch_name(chunk)
        number = self._log.begin(name, PUT)
        self._queued(name, number, lambda: self._store.put_patch_async(patch_of_write(name, number, chunk)))

    def _queued(self, name: int, number: int, put: Callable[[], Any]) -> None:
        try:
            ack = put()
        except BaseException:
            self._log.end(name, number, FAILED_PUT)
            raise
        ack.add_done_callback(functools.partial(self._acknowledged, name, number))

    def _acknowledged(self, name: int, number: int, ack: Any) -> None:
        error = ack.exception()
        self._log.end(name, number, None if error is None else FAILED_PUT)
        if error is not None:
            self._note_failure("queued put", error)


def work(tenant: LoadTenant, log: LoadLog, seed: int, ready: Barrier, minutes: float, results: Any) -> None:
    """Runs one process of the load, which begins when all are ready, and sends its counts."""
    try:
        worker = LoadWorker(tenant, log, seed)
        ready.wait(600)
        results.put(worker.run(time.monotonic() + 60 * minutes))
    except BaseException as error:
        ready.abort()
        counts = LoadCounts(failures=collections.Counter({f"process: {type(error).__name__}": 1}))
        counts.examples.append(traceback.format_exc()[-2000:])
        results.put(counts)
        if not isinstance(error, InputError | StoreError):
            raise
