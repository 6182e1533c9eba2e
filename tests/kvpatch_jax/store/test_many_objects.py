"""Many objects: what keeps a root in order looks at them from outside, and opens few."""

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_cases import BACKBONE, ManualClock, chunk_of, file_of, patch_of

from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.io import folders

NO_MEMORY = Budget(host=0)
MANY = 60
YEAR = 365 * 24 * 3600.0


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
OPENED = {(1000, "encrypted"), (1e200, "plain")}


@pytest.mark.parametrize(
    ("ttl", "key"),
    [
        pytest.param(ttl, key, marks=() if (ttl, name) in OPENED else pytest.mark.slow, id=f"{ttl}-{name}")
        for ttl in (None, 1000, 1e-3 * 2**40, 1e200)
        for name, key in (("plain", None), ("encrypted", KEY))
    ],
)
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


@pytest.mark.parametrize("ttl", [0.001, 0.271, 10, 1e6 + 0.271, 86_400.000271, 2 * YEAR])
def test_objects_expire_exactly_at_their_time(tmp_path: Path, ttl: float):
    clock = ManualClock(1_800_000_000.271)
    with ChunkStore(tmp_path, budget=NO_MEMORY, clock=clock) as store:
        store.put(chunk_of(), ttl=ttl)
        ends = clock.now + ttl
        clock.now = ends - 1e-4
        assert store.collect() == 0
        assert store.get("B", BACKBONE) is not None
        clock.now = ends
        assert store.collect() == 1


def test_an_evicting_put_opens_only_the_files_that_it_writes(tmp_path: Path):
    with ChunkStore(tmp_path, budget=NO_MEMORY) as store:
        fill(store)
        size = file_of(store, chunk_of("B0")).stat().st_size
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=MANY * size)) as store, opening() as opens:
        for number in range(10):
            store.put(chunk_of(f"C{number}", number))
        assert store.counters["disk_evicted_budget"] >= 10
    assert opens == []


def test_the_most_recently_used_object_is_evicted_last(tmp_path: Path):
    """However long things live: the time of last change, which shows it, is no time of use."""
    clock = ManualClock(1.8e9)
    with ChunkStore(tmp_path, budget=NO_MEMORY, clock=clock) as store:
        for number in range(6):
            store.put(chunk_of(f"B{number}", number), ttl=[None, YEAR, 10][number % 3])
        for number in (0, 1, 2):
            assert store.get(f"B{number}", BACKBONE) is not None
        size = file_of(store, chunk_of("B0")).stat().st_size
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=5 * size), clock=clock) as store:
        store.put(chunk_of("C"))
        assert [store.contains(f"B{number}", BACKBONE) for number in range(6)] == [True] * 3 + [False] * 2 + [True]


@pytest.mark.parametrize("times", ["now", "old", "zero", "next century"])
def test_the_header_counts_and_a_wrong_look_is_set_right(tmp_path: Path, times: str):
    """Files of older versions, and copies without their times, look as they like; but nothing lives that has expired
    and looks so, nothing goes that has not, and the next look opens nothing."""
    clock = ManualClock(1.8e9)
    at = {"now": 1.8e9, "old": 1e9, "zero": 0.0, "next century": 4.5e9}[times]
    with ChunkStore(tmp_path, budget=NO_MEMORY, clock=clock) as store:
        fill(store, 5)
        store.put(chunk_of("long"), ttl=1000)
        store.put(chunk_of("brief"), ttl=10)
        for path in tmp_path.rglob("*.safetensors"):
            os.utime(path, (1.8e9, at))
        clock.now += 20
        assert store.collect() == (times != "next century")
        assert store.get("brief", BACKBONE) is None
        assert all(store.contains(id, BACKBONE) for id in ["long", *(f"B{number}" for number in range(5))])
        with opening() as opens:
            assert store.collect() == 0
        assert opens == []
        clock.now += 1000
        assert store.collect() == (times != "next century")


def test_looks_travel_with_snapshots(tmp_path: Path):
    clock = ManualClock(1.8e9)
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY, clock=clock, tenant="one") as store:
        store.put(chunk_of("brief"), ttl=4e9)  # the snapshot has the system's clock
        store.put(chunk_of("stays"))
        save_snapshot(store.disk.root, tmp_path / "snapshot", copy=True)
    load_snapshot(tmp_path / "snapshot", tmp_path / "same", copy=True)
    load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="one")
    for root in ("same", "other"):
        with ChunkStore(tmp_path / root, budget=NO_MEMORY, clock=clock, tenant="one") as store:
            with opening() as opens:
                assert store.collect() == 0
            assert opens == []


# ---------------------------------------------------------------------------------------------------------- libraries


@pytest.fixture
def library(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY) as store:
        library = StaticLibrary(store, quota=1 << 24)
        for number in range(MANY):
            library.put(f"N{number}", f"text {number}")
        yield library


def folder_of(library: StaticLibrary) -> str:
    return f"{library.store.names.libraries}/static"


def settled(library: StaticLibrary) -> None:
    """The folders look as if nothing had changed for a while."""
    for folder in Path(library.store.disk.root, folder_of(library)).iterdir():
        if folder.is_dir():
            os.utime(folder, ns=(10**18 + 1, 10**18 + 1))


def listing_folders() -> contextlib.AbstractContextManager[list[str]]:
    @contextlib.contextmanager
    def noting() -> Iterator[list[str]]:
        listed: list[str] = []
        system = os.scandir
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "scandir", lambda path: (listed.append(str(path)), system(path))[1])
            yield listed

    return noting()


def test_a_put_reads_only_changed_folders(library: StaticLibrary):
    assert library.used > 0
    settled(library)
    assert library.used > 0
    with opening() as opens, listing_folders() as listed:
        library.put("N0", "other")
        library.put("new", "of anything")
    assert len(opens) <= 4
    assert len([path for path in listed if path.endswith(folder_of(library))]) + 8 >= len(listed)


CHANGES: dict[str, Callable[[StaticLibrary], object]] = {
    "put": lambda library: library.put("M", "m" * 500),
    "replace": lambda library: library.put("N7", "m" * 5000),
    "delete": lambda library: library.delete("TEXT", "N7"),
    "expire": lambda library: library.put("M", "m", ttl=1e-9),
    "damage": lambda library: library.store.disk.quarantine(
        library.store.names.entry("static", "TEXT", "N7"), _identity(library, "N7"), "damaged"
    ),
}


def _identity(library: StaticLibrary, name: str):
    from kvpatch_jax.store.io.files import identity

    path = library.store.names.entry("static", "TEXT", name).path
    return identity(os.stat(Path(library.store.disk.root, path)))


@pytest.mark.parametrize("aged", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "change",
    [name if name in ("replace", "delete") else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES],
)
def test_a_library_sees_changes_by_another_library_object(library: StaticLibrary, change: str, aged: bool):
    _ = library.used, library.entries()
    if aged:
        settled(library)
        _ = library.used, library.entries()
    with ChunkStore(library.store.disk.root, budget=NO_MEMORY) as store:
        other = StaticLibrary(store, quota=1 << 24)
        CHANGES[change](other)
    with ChunkStore(library.store.disk.root, budget=NO_MEMORY) as store:
        fresh = StaticLibrary(store, quota=1 << 24)
        assert library.used == fresh.used
        assert library.entries() == fresh.entries()


def test_an_entry_that_could_not_be_read_is_looked_at_again(library: StaticLibrary, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with ChunkStore(library.store.disk.root, budget=NO_MEMORY) as store:
        late = StaticLibrary(store, quota=1 << 24)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", failing)
            patched.setattr(os, "preadv", failing)
            assert late.entries() == []
        settled(late)
        assert len(late.entries()) == MANY


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


def test_patches_of_many_chunks_go_with_their_own(tmp_path: Path):
    clock = ManualClock(1.8e9)
    with ChunkStore(tmp_path, budget=NO_MEMORY, clock=clock) as store:
        for number in range(4):
            chunk = chunk_of(f"B{number}", number)
            store.put(chunk, ttl=10 if number < 2 else None)
            store.put_patches([patch_of(chunk)])
        clock.now += 20
        with opening() as opens:
            assert store.collect() == 4
        assert len(opens) <= 4 * 2
        left = {number for number in range(4) if store.get_patches(patch_of(chunk_of(f"B{number}")).metadata)}
        assert left == {2, 3}
