"""A power cut at any moment: what was acknowledged is there, what was deleted stays away, and no bytes are wrong.

Each scenario is recorded once. Then what the disk may hold is built for a cut at every point of it, a store is opened
on that, and everything that the scenario has ever named is read.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_log import FileLog
from power_cut import DiskState, disk_states
from store_cases import BACKBONE, chunk_of, file_of, patch_of, same, same_chunk

from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.io import files

SEEDS = range(1, 4)
LOST = -1
"""Effect of an operation that may evict: the object or nothing."""
SECRET = b"the secret of the names"
Effects = dict[str, int | None]
"""What an operation makes of the objects, "kv:id", "patch:id" or "text:name": seed of the content, None, LOST."""


# --------------------------------------------------------------------------------------------------------- contract


def seed_of(store: ChunkStore, key: str) -> int | None:
    """The seed of the content that a store has of an object; None if it has none. Fails for any other content."""
    kind, _, id = key.partition(":")
    if kind == "text":
        found = StaticLibrary(store, quota=1 << 20).get("TEXT", id)
        return None if found is None else int(found.content)
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


def allowed(first: Effects, state: DiskState) -> dict[str, set[int | None]]:
    """What each object may be after a cut: what the last acknowledged operation made it, or a later one that began.

    Operations are in the order in which they began.
    """
    begun = {event.inode: event.what for event in state.words if event.kind == "begin"}
    ended = {event.inode for event in state.words if event.kind == "end"}
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
      damaged: ids whose file is damaged from the beginning.
      remote: whether there is a remote store, which is not cut.
    """

    act: Callable[[ChunkStore, FileLog], None]
    first: Effects
    damaged: tuple[str, ...] = ()
    remote: bool = False


@dataclasses.dataclass(frozen=True)
class Disks:
    """Folders of a test: the disk that is cut, the remote store and the source of snapshots."""

    base: Path

    @property
    def root(self) -> Path:
        return self.base / "disk" / "store"

    @property
    def snapshot(self) -> Path:
        return self.base / "snapshot"


def remote_at(path: Path) -> KeyValueStore:
    return KeyValueStore({"driver": "file", "path": f"{path}/"})


def open_store(root: Path, remote: Path | None = None, **more: Any) -> ChunkStore:
    beside = None if remote is None else remote_at(remote)
    return ChunkStore(root, secret=SECRET, remote=beside, **({"budget": Budget(host=0)} | more))


def record(base: Path, scenario: Scenario, **planted: Any) -> FileLog:
    """Runs a scenario with a record of its changes."""
    disks, beside = Disks(base), base / "remote" if scenario.remote else None
    disks.root.parent.mkdir(parents=True)
    if beside is not None:
        beside.mkdir()
    with open_store(disks.root, beside) as store:
        for key, seed in scenario.first.items():
            kind, _, id = key.partition(":")
            if seed is not None:
                put_any(store, kind, id, seed)
        for id in scenario.damaged:
            store.put(chunk_of(id, 1))
            flip_last_byte(file_of(store, chunk_of(id, 1)))
    log = FileLog(disks.root.parent, beside, **planted)
    with log.recording(), open_store(disks.root, beside) as store:
        scenario.act(store, log)
    return log


def put_any(store: ChunkStore, kind: str, id: str, seed: int) -> None:
    if kind == "kv":
        store.put(chunk_of(id, seed))
    elif kind == "patch":
        store.put_patches([patch_of(chunk_of(id, 1), seed=seed)])
    else:
        StaticLibrary(store, quota=1 << 20).put(id, str(seed))


def flip_last_byte(path: Path) -> None:
    """Damages a file; a second time mends it."""
    fd = os.open(path, os.O_RDWR)
    end = os.fstat(fd).st_size - 1
    os.pwrite(fd, bytes([os.pread(fd, 1, end)[0] ^ 1]), end)
    os.fsync(fd)
    os.close(fd)


def check(base: Path, scenario: Scenario, state: DiskState) -> None:
    """Opens a store on what the cut left, and reads everything. The store must take new puts and deletions too."""
    base.mkdir()
    beside = base / "remote" if scenario.remote else None
    state.build(base / "disk", beside)
    root, expected = Disks(base).root, allowed(scenario.first, state)
    try:
        with open_store(root, beside) as store:
            for key, seeds in expected.items():
                found = seed_of(store, key)
                assert found in seeds, f"{key}: got {found}; expected one of {seeds}"
            assert store.counters["quarantined"] <= len(scenario.damaged), "a file under its name is not whole"
            store.collect()
            assert os.listdir(root / "tmp") == []
            for id in ("new", "afterwards"):
                store.put(chunk_of(id, 3))
                assert seed_of(store, f"kv:{id}") == 3
                store.delete(id, BACKBONE)
                assert seed_of(store, f"kv:{id}") is None
    except Exception as error:
        error.add_note(f"after a cut at event {state.point} that left {sorted(path for path, _ in state.numbers())}")
        raise
    finally:
        shutil.rmtree(base)


def survives(base: Path, scenario: Scenario, most: int, **planted: Any) -> int:
    """Checks every state of a scenario. Returns their number."""
    log, count = record(base / "recorded", scenario, **planted), 0
    for count, state in enumerate(disk_states(log, most), 1):
        check(base / f"state{count}", scenario, state)
    return count


# -------------------------------------------------------------------------------------------------------- scenarios


def put(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"kv:new": 1}):
        store.put(chunk_of("new", 1))


def replace(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"kv:old": 2}):
        store.put(chunk_of("old", 2))


def put_many(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"kv:new": 1, "kv:old": 2, "kv:more": 1}):
        store.put_many([chunk_of("new", 1), chunk_of("old", 2), chunk_of("more", 1)])


def put_async(store: ChunkStore, log: FileLog) -> None:
    """Two that are queued, one of them again, and `flush`."""
    first, second = log.begin({"kv:new": 1}), log.begin({"kv:old": 2})
    store.put_async(chunk_of("new", 1))
    store.put_async(chunk_of("old", 2))
    third = log.begin({"kv:new": 2})
    store.put_async(chunk_of("new", 2))
    store.flush()
    for number in (first, second, third):
        log.end(number)


def put_after_queued(store: ChunkStore, log: FileLog) -> None:
    """A put that replaces a queued one of its name, which may be written before, and not after."""
    first = log.begin({"kv:new": 1})
    ack = store.put_async(chunk_of("new", 1))
    with log.operation({"kv:new": 2}):
        store.put(chunk_of("new", 2))
    ack.result()
    log.end(first)


def put_patches(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"patch:old": 2, "patch:new": 1}):
        store.put_patches([patch_of(chunk_of("old", 1), seed=2), patch_of(chunk_of("new", 1), seed=1)])


def delete(store: ChunkStore, log: FileLog) -> None:
    """With its patch; and then the name is used again."""
    with log.operation({"kv:old": None, "patch:old": None}):
        store.delete("old", BACKBONE)
    with log.operation({"kv:old": 3}):
        store.put(chunk_of("old", 3))


def delete_tenant(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"kv:old": None, "patch:old": None, "kv:other": None, "text:entry": None}):
        store.delete_tenant()
    with log.operation({"kv:other": 2}):
        store.put(chunk_of("other", 2))


def evict(store: ChunkStore, log: FileLog) -> None:
    """A put into a budget that has room for it and one more."""
    path = file_of(store, chunk_of("old", 1))
    size = path.stat().st_size
    os.utime(path, ns=(10**9, path.stat().st_mtime_ns))
    effects = {"kv:old": LOST, "patch:old": LOST, "kv:other": LOST, "kv:new": 1}
    budget = Budget(host=0, disk=int(2.5 * size))
    with open_store(Path(store.disk.root), budget=budget) as small, log.operation(effects):
        small.put(chunk_of("new", 1))
        assert small.counters["disk_evicted_budget"] > 0


def collect(store: ChunkStore, log: FileLog) -> None:
    """An object that has expired, and one that lives."""
    with log.operation({"kv:lasting": 2}):
        store.put(chunk_of("lasting", 2), ttl=1e6)
    with open_store(Path(store.disk.root), clock=lambda: 1.0) as early, log.operation({"kv:brief": None}):
        early.put(chunk_of("brief", 1), ttl=1)
    with log.operation({"kv:brief": None}):
        assert store.collect() == 1


def quarantine(store: ChunkStore, log: FileLog) -> None:
    """A damaged object is read, found whole again and put back."""
    with log.operation({"kv:damaged": None}):
        assert store.get("damaged", BACKBONE) is None
    begun = log.begin({"kv:damaged": 1})
    (path,) = Path(store.disk.root, "quarantine").glob("*.safetensors")
    flip_last_byte(path)
    assert len(store.restore_quarantined().restored) == 1
    log.end(begun)


def repair(store: ChunkStore, log: FileLog) -> None:
    """A damaged object is read, and formed and put again."""
    with log.operation({"kv:damaged": None}):
        assert store.get("damaged", BACKBONE) is None
    with log.operation({"kv:damaged": 2}):
        store.put(chunk_of("damaged", 2))


def promote(store: ChunkStore, log: FileLog) -> None:
    """From the remote store, whole and by layers; then it is replaced there and here, and deleted."""
    for id in ("far", "further"):
        file_of(store, chunk_of(id, 1)).unlink()  # as eviction by another process
    with log.operation({"kv:far": 1, "kv:further": 1}):
        assert seed_of(store, "kv:far") == 1
        stream = store.stream("further", BACKBONE)
        assert stream is not None
        stream.chunk(lambda *_: None)
    with log.operation({"kv:far": 2}):
        store.put(chunk_of("far", 2))
    with log.operation({"kv:far": None}):
        store.delete("far", BACKBONE)


def restore(store: ChunkStore, log: FileLog) -> None:
    """Of a snapshot that has one object that is here, older, and two that are not."""
    root = Path(store.disk.root)
    snapshot = root.parents[1] / "snapshot"
    with log.operation({"kv:old": 1, "kv:new": 2, "text:entry": 2}):
        load_snapshot(snapshot, root, tenant="default", secret=SECRET)


def library(store: ChunkStore, log: FileLog) -> None:
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
    "put_after_queued": Scenario(put_after_queued, OLD),
    "put_patches": Scenario(put_patches, OLD),
    "delete": Scenario(delete, OLD),
    "delete_tenant": Scenario(delete_tenant, OLD | {"text:entry": 1}),
    "evict": Scenario(evict, OLD),
    "collect": Scenario(collect, OLD),
    "quarantine": Scenario(quarantine, OLD, ("damaged",)),
    "repair": Scenario(repair, OLD, ("damaged",)),
    "promote": Scenario(promote, {"kv:far": 1, "kv:further": 1, "kv:old": 1}, remote=True),
    "restore": Scenario(restore, OLD),
    "library": Scenario(library, {"text:entry": 1}),
}


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores that are opened after a cut have no other one to fear."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(files, "_call", lambda name: None)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder, with a snapshot to restore."""
    with open_store(tmp_path / "source") as source:
        source.put_many([chunk_of("old", 2), chunk_of("new", 2)])
        StaticLibrary(source, quota=1 << 20).put("entry", "2")
    (tmp_path / "recorded").mkdir()
    save_snapshot(tmp_path / "source", tmp_path / "recorded" / "snapshot", tenant="default", secret=SECRET)
    return tmp_path


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("most", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_a_power_cut_loses_nothing_acknowledged(base: Path, name: str, most: int):
    assert survives(base, SCENARIOS[name], most) > 5


def delete_alone(store: ChunkStore, log: FileLog) -> None:
    with log.operation({"kv:old": None, "patch:old": None}):
        store.delete("old", BACKBONE)


PLANTED: dict[str, tuple[Scenario, dict[str, Any], str]] = {
    "the folder of an object is not synced": (
        Scenario(put, OLD),
        {"dropped": lambda kind, path: kind == "folder" and path.startswith("store/obj")},
        "kv:new: got None; expected one of {1}",
    ),
    "a new folder's name is not synced": (
        Scenario(put, {}),
        {"dropped": lambda kind, path: kind == "folder" and path.count("/") == 2},
        "kv:new: got None; expected one of {1}",
    ),
    "the data is not synced": (
        Scenario(replace, OLD),
        {"dropped": lambda kind, path: kind == "file"},
        "kv:old: got None; expected one of|is not whole",
    ),
    "the data of a group is not synced": (
        Scenario(put_many, OLD),
        {"dropped": lambda kind, path: kind == "file"},
        "got None; expected one of|is not whole",
    ),
    "the name is there before the data is synced": (
        Scenario(replace, OLD),
        {"late": True},
        "kv:old: got None; expected one of|is not whole",
    ),
    "a deletion is not synced": (
        Scenario(delete_alone, OLD),
        {"dropped": lambda kind, path: kind == "folder"},
        "old: got 1; expected one of {None}",
    ),
    "the deletion of a tenant is not synced": (
        Scenario(delete_tenant, OLD),
        {"dropped": lambda kind, path: kind == "folder" and path in ("store/obj", "store/deleted", "store/lib")},
        "got 1; expected one of {None}",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(base: Path, bug: str):
    """Each is a sync that the record lacks, or has too late."""
    scenario, planted, message = PLANTED[bug]
    with pytest.raises(AssertionError, match=message):
        survives(base, scenario, 24, **planted)
