"""What a store must hold after anything that may happen to it, and scenarios of operations that try it.

Objects have seeds of their content. Each operation says what it makes of them, when it begins and when it was
acknowledged; afterwards each object must be what the last acknowledged operation made it, or what one made it that
began later and may have been interrupted.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from store_cases import BACKBONE, chunk_of, file_of, patch_of, same, same_chunk

from kvpatch_jax.errors import StoreIOError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, StaticLibrary, load_snapshot, save_snapshot

SEEDS = range(1, 4)
LOST = -1
"""Effect of an operation that may evict: the object or nothing."""
SECRET = b"the secret of the names"
Effects = Mapping[str, int | None]
"""What an operation makes of the objects, "kv:id", "patch:id" or "text:name": seed of the content, None, LOST."""


class Words:
    """A record of operations that begin and are acknowledged.

    Attributes:
      failing: whether calls fail, so that an operation may have no result.
    """

    failing = False

    def begin(self, what: Effects) -> int:
        """Notes that an operation begins. Returns its number."""
        raise NotImplementedError

    def end(self, number: int) -> None:
        """Notes that an operation was acknowledged."""
        raise NotImplementedError

    @contextlib.contextmanager
    def operation(self, what: Effects) -> Iterator[None]:
        """An operation, which is acknowledged at its end."""
        number = self.begin(what)
        yield
        self.end(number)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What the test does itself; its calls do not fail."""
        yield


# --------------------------------------------------------------------------------------------------------- contract


def seed_of(store: ChunkStore, key: str) -> int | None:
    """The seed of the content that a store has of an object; None if it has none. Fails for any other content."""
    kind, _, id = key.partition(":")
    if kind == "text":
        found = StaticLibrary(store, quota=1 << 20).get("TEXT", id)
        return None if found is None else int(str(found.content))
    if kind == "patch":
        patches = store.get_patches(patch_of(chunk_of(id, 1)).metadata)
        arrays = [np.asarray(patch.factors["k"][0]) for patch in patches]  # pyright: ignore
        seeds = [patch_seed(id, array) for array in arrays]
        assert len(seeds) < 2, f"{key}: {seeds}"
        return seeds[0] if seeds else None
    chunk = store.get(id, BACKBONE)
    stream = store.stream(id, BACKBONE)
    assert (chunk is None) == (stream is None), f"{key}: read whole, and not by layers, or the reverse"
    if chunk is None or stream is None:
        return None
    assert same_chunk(stream.chunk(lambda *_: None), chunk), f"{key}: by layers something else"
    (seed,) = (seed for seed in SEEDS if same_chunk(chunk, chunk_of(id, seed)))
    return seed


def patch_seed(id: str, array: np.ndarray) -> int:
    """The seed of a patch's factors."""
    factors = {seed: patch_of(chunk_of(id, 1), seed=seed).factors["k"][0] for seed in SEEDS}  # pyright: ignore
    (seed,) = (seed for seed, factor in factors.items() if same(array, factor))
    return seed


def allowed(first: Effects, begun: dict[int, Effects], ended: set[int]) -> dict[str, set[int | None]]:
    """What each object may be: what the last acknowledged operation made it, or a later one that began.

    Args:
      first: what was there before.
      begun: effects of the operations by their numbers, in the order in which they began.
      ended: numbers of those that were acknowledged.
    """
    results: dict[str, set[int | None]] = {key: {seed} for key, seed in first.items()}
    for number, effects in sorted(begun.items()):
        for key, seed in effects.items():
            before = results.setdefault(key, {None})
            if seed == LOST:
                before.add(None)
            elif number in ended:
                results[key] = {seed}
            else:
                before.add(seed)
    return results


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is done to a store.

    Attributes:
      act: the operations, each between `log.begin` and `log.end`.
      first: what is there before.
      remote: whether there is a remote store, which is not cut.
    """

    act: Callable[[ChunkStore, Words], None]
    first: Effects
    remote: bool = False


def remote_at(path: Path) -> KeyValueStore:
    return KeyValueStore({"driver": "file", "path": f"{path}/"})


def open_store(root: Path, remote: Path | None = None, **more: Any) -> ChunkStore:
    beside = None if remote is None else remote_at(remote)
    options: dict[str, Any] = {"budget": Budget(host=0)} | more
    return ChunkStore(root, secret=SECRET, remote=beside, **options)


def prepare(root: Path, scenario: "Scenario", remote: Path | None) -> None:
    """Makes the store that a scenario begins with."""
    with open_store(root, remote) as store:
        for key, seed in scenario.first.items():
            kind, _, id = key.partition(":")
            if seed is not None:
                put_any(store, kind, id, seed)


def expect(store: ChunkStore, scenario: "Scenario", expected: dict[str, set[int | None]]) -> None:
    """Fails unless a store has what it may have; it must take new puts and deletions too, and leave nothing."""
    for key, seeds in expected.items():
        found = seed_of(store, key)
        assert found in seeds, f"{key}: got {found}; expected one of {seeds}"
    assert store.counters["quarantined"] == 0, "a file under its name is not whole"
    store.collect()
    assert os.listdir(f"{store.disk.root}/tmp") == []
    for id in ("new", "afterwards"):
        store.put(chunk_of(id, 3))
        assert seed_of(store, f"kv:{id}") == 3
        store.delete(id, BACKBONE)
        assert seed_of(store, f"kv:{id}") is None


def put_any(store: ChunkStore, kind: str, id: str, seed: int) -> None:
    if kind == "kv":
        store.put(chunk_of(id, seed))
    elif kind == "patch":
        store.put_patches([patch_of(chunk_of(id, 1), seed=seed)])
    else:
        StaticLibrary(store, quota=1 << 20).put(id, str(seed))


# -------------------------------------------------------------------------------------------------------- scenarios


def put(store: ChunkStore, log: Words) -> None:
    with log.operation({"kv:new": 1}):
        store.put(chunk_of("new", 1))


def replace(store: ChunkStore, log: Words) -> None:
    with log.operation({"kv:old": 2}):
        store.put(chunk_of("old", 2))


def put_many(store: ChunkStore, log: Words) -> None:
    with log.operation({"kv:new": 1, "kv:old": 2, "kv:more": 1}):
        store.put_many([chunk_of("new", 1), chunk_of("old", 2), chunk_of("more", 1)])


def put_async(store: ChunkStore, log: Words) -> None:
    """Two that are queued, one of them again, and `flush`."""
    first, second = log.begin({"kv:new": 1}), log.begin({"kv:old": 2})
    store.put_async(chunk_of("new", 1))
    store.put_async(chunk_of("old", 2))
    third = log.begin({"kv:new": 2})
    store.put_async(chunk_of("new", 2))
    store.flush()
    for number in (first, second, third):
        log.end(number)


def put_patches(store: ChunkStore, log: Words) -> None:
    with log.operation({"patch:old": 2, "patch:new": 1}):
        store.put_patches([patch_of(chunk_of("old", 1), seed=2), patch_of(chunk_of("new", 1), seed=1)])


def delete(store: ChunkStore, log: Words) -> None:
    """With its patch; and then the name is used again."""
    with log.operation({"kv:old": None, "patch:old": None}):
        store.delete("old", BACKBONE)
    with log.operation({"kv:old": 3}):
        store.put(chunk_of("old", 3))


def delete_tenant(store: ChunkStore, log: Words) -> None:
    with log.operation({"kv:old": None, "patch:old": None, "kv:other": None, "text:entry": None}):
        store.delete_tenant()
    with log.operation({"kv:other": 2}):
        store.put(chunk_of("other", 2))


def evict(store: ChunkStore, log: Words) -> None:
    """A put into a budget that has room for it and one more."""
    with log.aside():
        path = file_of(store, chunk_of("old", 1))
        size = path.stat().st_size
        os.utime(path, ns=(10**9, path.stat().st_mtime_ns))
    effects = {"kv:old": LOST, "patch:old": LOST, "kv:other": LOST, "kv:new": 1}
    budget = Budget(host=0, disk=int(2.5 * size))
    with open_store(Path(store.disk.root), budget=budget) as small, log.operation(effects):
        small.put(chunk_of("new", 1))
        assert small.counters["disk_evicted_budget"] > 0 or log.failing


def collect(store: ChunkStore, log: Words) -> None:
    """An object that has expired, and one that lives."""
    with log.operation({"kv:lasting": 2}):
        store.put(chunk_of("lasting", 2), ttl=1e6)
    with open_store(Path(store.disk.root), clock=lambda: 1.0) as early, log.operation({"kv:brief": None}):
        early.put(chunk_of("brief", 1), ttl=1)
    with log.operation({"kv:brief": None}):
        assert store.collect() == 1 or log.failing


def promote(store: ChunkStore, log: Words) -> None:
    """From the remote store, whole and by layers; then it is replaced there and here, and deleted."""
    with log.aside():
        for id in ("far", "further"):
            file_of(store, chunk_of(id, 1)).unlink()  # as eviction by another process
    with log.operation({"kv:far": 1, "kv:further": 1}):
        found, stream = store.get("far", BACKBONE), store.stream("further", BACKBONE)
        assert same_chunk(found, chunk_of("far", 1)) or (found is None and log.failing)
        assert stream is not None or log.failing
        if stream is not None:
            with contextlib.suppress(StoreIOError) if log.failing else contextlib.nullcontext():
                assert same_chunk(stream.chunk(lambda *_: None), chunk_of("further", 1))
    with log.operation({"kv:far": 2}):
        store.put(chunk_of("far", 2))
    with log.operation({"kv:far": None}):
        store.delete("far", BACKBONE)


def restore(store: ChunkStore, log: Words) -> None:
    """Of a snapshot that has one object that is here, older, and two that are not."""
    root = Path(store.disk.root)
    snapshot = root.parents[1] / "snapshot"
    with log.operation({"kv:old": 1, "kv:new": 2, "text:entry": 2}):
        load_snapshot(snapshot, root, tenant="default", secret=SECRET)


def library(store: ChunkStore, log: Words) -> None:
    """An entry is replaced, one is added, and the first is deleted."""
    entries = StaticLibrary(store, quota=1 << 20)
    with log.operation({"text:entry": 2}):
        entries.put("entry", "2")
    with log.operation({"text:new": 1}):
        entries.put("new", "1")
    with log.operation({"text:entry": None}):
        entries.delete("TEXT", "entry")


OLD: Effects = {"kv:old": 1, "patch:old": 1, "kv:other": 1}
SCENARIOS = {
    "put": Scenario(put, OLD),
    "replace": Scenario(replace, OLD),
    "put_many": Scenario(put_many, OLD),
    "put_async": Scenario(put_async, OLD),
    "put_patches": Scenario(put_patches, OLD),
    "delete": Scenario(delete, OLD),
    "delete_tenant": Scenario(delete_tenant, OLD | {"text:entry": 1}),
    "evict": Scenario(evict, OLD),
    "collect": Scenario(collect, OLD),
    "promote": Scenario(promote, {"kv:far": 1, "kv:further": 1, "kv:old": 1}, remote=True),
    "restore": Scenario(restore, OLD),
    "library": Scenario(library, {"text:entry": 1}),
}


def make_snapshot(base: Path) -> None:
    """Makes `base/snapshot`, which the scenario `restore` expects beside the folder of its root."""
    with open_store(base / "source") as source:
        source.put_many([chunk_of("old", 2), chunk_of("new", 2)])
        StaticLibrary(source, quota=1 << 20).put("entry", "2")
    save_snapshot(base / "source", base / "snapshot", tenant="default", secret=SECRET)
