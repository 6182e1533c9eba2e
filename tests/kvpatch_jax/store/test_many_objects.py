"""Many objects: what keeps a root in order looks at them from outside, and opens few."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_cases import BACKBONE, ManualClock, chunk_of, file_of

from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.io import folders

NO_MEMORY = Budget(host=0)
MANY = 60


@contextlib.contextmanager
def opening(what: str = ".safetensors") -> Iterator[list[str]]:
    """The files that are opened inside."""
    opens: list[str] = []
    system = os.open

    def noted(path, *arguments, **more):
        if str(path).endswith(what):
            opens.append(str(path))
        return system(path, *arguments, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", noted)
        patched.setattr(folders, "_call", lambda: None)  # name by name, and not by a call that is not in `os`
        yield opens


def fill(store: ChunkStore, count: int = MANY, **more) -> None:
    for number in range(count):
        store.put_async(chunk_of(f"B{number}", number), **more)
    store.flush()


KEY = b"one key of the store, 32 bytes at least"


@pytest.mark.parametrize(("ttl", "key"), [(1000, KEY), (1e200, None)], ids=["encrypted", "plain"])
def test_nothing_is_opened_to_find_that_nothing_expired(tmp_path: Path, key: bytes | None, ttl: float | None):
    clock = ManualClock(1.8e9)
    with ChunkStore(tmp_path, budget=NO_MEMORY, key=key, clock=clock) as store:
        fill(store, ttl=ttl)
        with opening() as opens:
            assert store.collect() == 0
        assert opens == []


def test_only_expired_objects_are_opened(tmp_path: Path):
    clock = ManualClock(1.8e9)
    with ChunkStore(tmp_path, budget=NO_MEMORY, clock=clock) as store:
        fill(store)
        for number in range(5):
            store.put(chunk_of(f"C{number}", number), ttl=10)
        clock.now += 11
        with opening() as opens:
            assert store.collect() == 5
        assert {Path(path).name.partition(".")[0] for path in opens} == {
            store.names.canonical(BACKBONE, f"C{number}").chunk for number in range(5)
        }
        assert all(store.contains(f"B{number}", BACKBONE) for number in range(MANY))


def test_an_evicting_put_opens_only_the_files_that_it_writes(tmp_path: Path):
    with ChunkStore(tmp_path, budget=NO_MEMORY) as store:
        fill(store)
        size = file_of(store, chunk_of("B0")).stat().st_size
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=MANY * size)) as store, opening() as opens:
        for number in range(10):
            store.put(chunk_of(f"C{number}", number))
        assert store.counters["disk_evicted_budget"] >= 10
    assert opens == []


# ---------------------------------------------------------------------------------------------------------- libraries


@pytest.fixture
def library(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY) as store:
        library = StaticLibrary(store, quota=1 << 24)
        for number in range(MANY):
            library.put(f"N{number}", f"text {number}")
        yield library


CHANGES: dict[str, Callable[[StaticLibrary], object]] = {
    "replace": lambda library: library.put("N7", "m" * 5000),
    "delete": lambda library: library.delete("TEXT", "N7"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_library_sees_changes_by_another_library_object(library: StaticLibrary, change: str):
    _ = library.used, library.entries()
    with ChunkStore(library.store.disk.root, budget=NO_MEMORY) as store:
        other = StaticLibrary(store, quota=1 << 24)
        CHANGES[change](other)
    with ChunkStore(library.store.disk.root, budget=NO_MEMORY) as store:
        fresh = StaticLibrary(store, quota=1 << 24)
        assert library.used == fresh.used
        assert library.entries() == fresh.entries()


# ---------------------------------------------------------------------------------------------------------- listing


@pytest.mark.parametrize("form", ["lines", "json"])
def test_ls_shows_each_object_when_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str):
    with ChunkStore(tmp_path, budget=NO_MEMORY) as store:
        fill(store, 8)
    events: list[str] = []
    shown: list[str] = []
    system = os.pread

    def noted(fd, *arguments):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            events.append("read")
        return system(fd, *arguments)

    monkeypatch.setattr(os, "pread", noted)

    def show(text: str = "", **_: object) -> None:
        events.append("shown")
        shown.append(text + _.get("end", "\n"))  # pyright: ignore

    monkeypatch.setattr("builtins.print", show)
    flags = ["--json"] if form == "json" else []
    assert main(["ls", f"--root={tmp_path}", *flags]) == 0
    reads = [number for number, event in enumerate(events) if event == "read"]
    assert len(reads) == 8
    assert all(after - before == 2 for before, after in itertools.pairwise(reads))
    text = "".join(shown)
    if form == "json":
        found = json.loads(text)["objects"]
        assert [one["path"] for one in found] == sorted(one["path"] for one in found)
        assert len(found) == 8
    else:
        assert text.count("\n") == 9
