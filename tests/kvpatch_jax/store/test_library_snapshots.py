"""Libraries in snapshots, exports and checkpoints: under the rules of objects, and what is there stays by reference."""

import fcntl
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from array_cases import export_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from library_cases import KEY, PIXELS, WAYS, fill, libraries, opened, shown, travel
from store_cases import BACKBONE, chunk_of, same, same_chunk

from kvpatch_jax.errors import InputError, LibraryFullError, StoreFullError, StoreKeyError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.snapshots.manifest import read_list, write_list

SOME = [way if way in ("link", "arrays") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize("way", SOME)
def test_libraries_travel_with_their_tenant(tmp_path: Path, way: str):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        travel(way, store, other, tmp_path)
        assert shown(other) == shown(store)
        assert len(shown(other)) == 8
        assert same_chunk(other.get("B", BACKBONE), chunk_of())
        files, references = libraries(other)
        assert references.versions("TEXT", "HOTEL")[-1] == 2
        assert references.versions("TEXT", "GONE") == libraries(store)[1].versions("TEXT", "GONE")
        assert references.open("TEXT", "GONE") is None
        assert [same(vector, expected) for (_, vector), expected in
                zip(files.vectors(), [np.array([1, 2], np.float32)], strict=True)] == [True]  # fmt: skip
        assert files.delete("IMAGE", "LOUVRE")
        assert other.get("B", BACKBONE) is None  # the chunk still belongs to its entry
        before = shown(other)
        assert references.publish("HOTEL", "newest").version == 3
        assert {name: value for name, value in shown(other).items() if "HOTEL" not in name} == {
            name: value for name, value in before.items() if "HOTEL" not in name
        }


@pytest.mark.parametrize("way", SOME)
def test_existing_references_stay_in_a_restore(tmp_path: Path, way: str):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        files, references = libraries(other)
        files.put("my notes", "mine")
        references.publish("HOTEL", "mine")
        references.publish("MUSEUM", "of another kind")
        for number in range(3):
            references.publish("GONE", f"here {number}")
        before = shown(other)
        travel(way, store, other, tmp_path)
        after = shown(other)
        assert {name: after[name] for name in before} == before
        assert set(after) - set(before) == {"IMAGE#LOUVRE", "TOKENS#ids", "FILE#report", "IMAGE#bare", "IMAGE#MUSEUM@1"}
        references.withdraw("TEXT", "HOTEL")
        travel(way, store, other, tmp_path / "again")
        assert references.open("TEXT", "HOTEL") is None  # withdrawn stays withdrawn


def test_encrypted_entries_stay_encrypted(tmp_path: Path):
    with opened(tmp_path / "store", key=KEY) as store:
        fill(store)
        expected = shown(store)
    snapshot, whole = tmp_path / "snapshot", tmp_path / "whole"
    save_snapshot(tmp_path / "store", snapshot, tenant="one")
    save_snapshot(tmp_path / "store", whole, copy=True)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert all(word not in written for word in (b"LOUVRE", b"HOTEL", b"my notes", PIXELS.tobytes()))
    load_snapshot(whole, tmp_path / "same")  # without the key: names and bytes stay
    load_snapshot(snapshot, tmp_path / "other", tenant="one", key=KEY)
    for root in ("same", "other"):
        with opened(tmp_path / root, key=KEY) as store:
            assert shown(store) == expected
    for key in (None, b"another key of at least 32 bytes"):
        with pytest.raises(StoreKeyError):
            load_snapshot(snapshot, tmp_path / "third", tenant="one", key=key)
    with pytest.raises(StoreKeyError):  # keys are per tenant
        load_snapshot(snapshot, tmp_path / "third", tenant="two", key=KEY)
    assert not list((tmp_path / "third").rglob("*.safetensors"))
    with pytest.raises(StoreKeyError):  # a quota cannot be kept where sizes cannot be told
        load_snapshot(whole, tmp_path / "fourth", tenant="one", budget=Budget(library=1 << 30))
    assert not list((tmp_path / "fourth").rglob("*.safetensors"))


def test_a_store_with_a_key_encrypts_restored_entries(tmp_path: Path):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other", key=KEY) as other:
        fill(store)
        for way in WAYS[:-1]:
            travel(way, store, other, tmp_path)
            assert shown(other) == shown(store)
            other.delete_tenant()
        travel(WAYS[-1], store, other, tmp_path)
        assert shown(other) == shown(store)
    written = b"".join(path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file())
    assert all(word not in written for word in (b"LOUVRE", b"HOTEL", b"my notes", PIXELS.tobytes()))


QUOTAS = (("link", None), ("orbax", KEY), ("arrays", KEY))
"""Each way once by default, two of them encrypted."""


@pytest.mark.parametrize(
    ("way", "key"),
    [
        pytest.param(way, key, marks=() if (way, key) in QUOTAS else pytest.mark.slow, id=f"{name}-{way}")
        for name, key in (("plain", None), ("encrypted", KEY))
        for way in ("link", "orbax", "arrays")
    ],
)
def test_a_restore_beyond_the_quota_adds_nothing(tmp_path: Path, way: str, key: bytes | None):
    with opened(tmp_path / "store") as store:
        fill(store)
        with opened(tmp_path / "measure", key=key) as measure:
            travel(way, store, measure, tmp_path)
            used = StaticLibrary(measure, quota=1 << 24).used
        for folder in ("exact", "less"):
            (tmp_path / folder).mkdir()
        with opened(tmp_path / "small", key=key, library=used - 1) as small:
            with pytest.raises(LibraryFullError, match=f"of {used - 1} are taken"):
                travel(way, store, small, tmp_path / "less")
            assert not list(Path(small.disk.root).rglob("*.safetensors"))
            assert StaticLibrary(small).quota == used - 1
        with opened(tmp_path / "enough", key=key, library=used) as enough:
            travel(way, store, enough, tmp_path / "exact")
            library = StaticLibrary(enough)
            assert library.used == used
            with pytest.raises(LibraryFullError):
                library.put("more", b"x" * used)
    with pytest.raises(InputError, match="no quota"), opened(tmp_path / "none") as store:
        StaticLibrary(store)


def test_a_quota_is_of_one_tenant(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        fill(store)
    save_snapshot(tmp_path / "store", tmp_path / "whole")
    with pytest.raises(InputError, match="library"):
        load_snapshot(tmp_path / "whole", tmp_path / "other", budget=Budget(library=1 << 30))
    assert not (tmp_path / "other").exists()


def test_a_disk_budget_is_of_chunks_alone(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        StaticLibrary(store, quota=1 << 20).put("A", b"x" * 9000)
        store.put(chunk_of())
        size = sum(entry.size for entry in store.disk.scan())
    save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
    with pytest.raises(StoreFullError):
        load_snapshot(tmp_path / "snapshot", tmp_path / "small", tenant="one", budget=Budget(disk=size - 1))
    assert not list((tmp_path / "small").rglob("*.safetensors"))
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="one", budget=Budget(disk=size)).objects == 2


def test_a_tenants_snapshot_contains_no_entries_of_other_tenants(tmp_path: Path):
    with opened(tmp_path / "store") as one, opened(tmp_path / "store", "two") as two:
        fill(one)
        libraries(two)[0].put("somebody-elses", "not yours")
        libraries(two)[1].publish("somebody-elses", "nor this")
        hidden = [two.names.space.removeprefix("obj/"), *(entry.part for entry in two.disk.scan(two.names.libraries))]
        names = [Path(entry.path).name[:64] for entry in two.disk.scan(two.names.libraries)]
        save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
        export_arrays(one, tmp_path / "export")
        load_snapshot(tmp_path / "snapshot", tmp_path / "store", tenant="two")
        assert shown(two)["TEXT#somebody-elses"] is not None
        assert set(shown(two)) == {*shown(one), "TEXT#somebody-elses", "TEXT#somebody-elses@1"}
    assert len(names) == 2
    for folder in ("snapshot", "export"):
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        everything = b"\0".join(str(path).encode() + path.read_bytes() for path in files)
        for word in (hidden[0], *names, "somebody-elses", "not yours", "nor this"):
            assert word.encode() not in everything


def test_older_snapshots_and_exports_have_no_libraries(tmp_path: Path):
    """As they were made before: only chunks in the list, and no lib/."""
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
        found = read_list(str(tmp_path / "snapshot" / "MANIFEST"))
        found["objects"] = [each for each in found["objects"] if each[0].startswith("obj/")]
        shutil.rmtree(tmp_path / "snapshot" / "lib")
        (tmp_path / "snapshot" / "MANIFEST").unlink()
        write_list(str(tmp_path / "snapshot" / "MANIFEST"), found)
        assert load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="one").objects == 3
        assert shown(other) == {}
        assert same_chunk(other.get("B", BACKBONE), chunk_of())


def test_a_tenant_with_libraries_only(tmp_path: Path):
    """Their key's check value travels too, and a root that has libraries is not a new one."""
    with opened(tmp_path / "store", key=KEY) as store:
        libraries(store)[0].put("A", "text")
    save_snapshot(tmp_path / "store", tmp_path / "whole")
    assert load_snapshot(tmp_path / "whole", tmp_path / "other").objects == 1
    with pytest.raises(StoreKeyError):
        opened(tmp_path / "other")
    with ChunkStore(tmp_path / "outside", tenant="one", secret=b"a secret from outside") as store:
        libraries(store)[0].put("A", "text")
    with pytest.raises(StoreSnapshotError, match="another secret"):
        load_snapshot(tmp_path / "whole", tmp_path / "outside")


def test_an_expired_entry_stays_out_and_makes_room(tmp_path: Path):
    now = [1e9]
    with ChunkStore(tmp_path / "store", tenant="one", clock=lambda: now[0]) as store:
        StaticLibrary(store, quota=1 << 20).put("brief", "old", ttl=10)  # has been expired for long by the day's clock
        StaticLibrary(store, quota=1 << 20).put("long", "here")
        made = save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
        assert (made.objects, made.skipped) == (1, 1)
    with opened(tmp_path / "fresh") as fresh:
        StaticLibrary(fresh, quota=1 << 20).put("brief", "fresh")
    save_snapshot(tmp_path / "fresh", tmp_path / "second", tenant="one")
    assert load_snapshot(tmp_path / "second", tmp_path / "store", tenant="one").objects == 1
    with opened(tmp_path / "store") as store:
        found = StaticLibrary(store, quota=1 << 20).get("TEXT", "brief")
    assert found is not None
    assert found.content == "fresh"


def test_a_damaged_entry_of_the_store_is_mended(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        fill(store)
        expected = shown(store)
        save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one", copy=True)
        for entry in store.disk.scan(store.names.libraries):
            path = Path(store.disk.root, entry.path)
            path.write_bytes(path.read_bytes()[:-1])
        load_snapshot(tmp_path / "snapshot", tmp_path / "store", tenant="one")
        assert shown(store) == expected


def test_a_snapshot_sees_a_library_at_one_moment(tmp_path: Path):
    """While versions are published and dropped, every snapshot has a current one of every reference."""
    stop = threading.Event()
    with opened(tmp_path / "store") as store:
        references = DynamicLibrary(store)
        names = [f"R{number}" for number in range(4)]
        for name in names:
            references.publish(name, "first")

        def publish() -> None:
            while not stop.is_set():
                for name in names:
                    references.publish(name, "next")

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for number in range(10):
                save_snapshot(tmp_path / "store", tmp_path / f"snapshot-{number}", tenant="one")
                load_snapshot(tmp_path / f"snapshot-{number}", tmp_path / f"other-{number}", tenant="one")
                with opened(tmp_path / f"other-{number}") as other:
                    assert len(DynamicLibrary(other).entries()) == len(names)
        finally:
            stop.set()
            thread.join()


def test_a_snapshot_waits_for_library_changes_and_needs_no_write_access(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        fill(store)
        lock = Path(store.disk.root, store.names.libraries, "static", "lock")
        done = threading.Event()

        def save() -> None:
            save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
            done.set()

        lock.chmod(0o400)
        with open(lock, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            thread = threading.Thread(target=save)
            thread.start()
            assert not done.wait(0.2)
        thread.join()
        assert done.is_set()


HISTORY = st.lists(st.tuples(st.sampled_from(["publish", "withdraw"]), st.sampled_from("ABC")), max_size=6)


@settings(max_examples=12, deadline=None)
@given(theirs=HISTORY, ours=HISTORY, key=st.sampled_from([None, KEY]))
def test_a_restore_never_changes_a_reference(tmp_path_factory: pytest.TempPathFactory, theirs, ours, key):
    """And brings every reference that the library has never had as it was, withdrawn ones with their numbers."""
    folder = tmp_path_factory.mktemp("history")
    current: list[dict[str, str | None]] = []
    for root, history in (("store", theirs), ("other", ours)):
        with opened(folder / root, key=key) as store:
            references = DynamicLibrary(store)
            for number, (what, name) in enumerate(history):
                if what == "publish":
                    references.publish(name, f"{root} {number}")
                else:
                    references.withdraw("TEXT", name)
            current.append(current_of(references))
    save_snapshot(folder / "store", folder / "snapshot", tenant="one")
    with opened(folder / "other", key=key) as other:
        references = DynamicLibrary(other)
        here = {name for name in "ABC" if references.versions("TEXT", name)}
        for _ in range(2):
            load_snapshot(folder / "snapshot", folder / "other", tenant="one", key=key)
            expected = {name: current[1 if name in here else 0][name] for name in "ABC"}
            assert current_of(references) == expected
    shutil.rmtree(folder)


def current_of(references: DynamicLibrary) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in "ABC":
        held = references.open("TEXT", name)
        found[name] = None if held is None else f"{held.resource.reference} {held.resource.content}"
        if held is not None:
            held.close()
    return found
