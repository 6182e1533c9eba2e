"""Libraries in snapshots, exports and checkpoints: under the rules of objects, and what is there stays by reference."""

from pathlib import Path

import numpy as np
import pytest
from array_cases import export_arrays
from library_cases import KEY, PIXELS, fill, libraries, opened, shown, travel
from store_cases import BACKBONE, chunk_of, same, same_chunk

from kvpatch_jax.errors import InputError, LibraryFullError, StoreKeyError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, load_snapshot, save_snapshot


@pytest.mark.parametrize("way", ["link", "arrays"])
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


def test_existing_references_stay_in_a_restore(tmp_path: Path):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        files, references = libraries(other)
        files.put("my notes", "mine")
        references.publish("HOTEL", "mine")
        references.publish("MUSEUM", "of another kind")
        for number in range(3):
            references.publish("GONE", f"here {number}")
        before = shown(other)
        travel("link", store, other, tmp_path)
        after = shown(other)
        assert {name: after[name] for name in before} == before
        assert set(after) - set(before) == {"IMAGE#LOUVRE", "TOKENS#ids", "FILE#report", "IMAGE#bare", "IMAGE#MUSEUM@1"}
        references.withdraw("TEXT", "HOTEL")
        travel("link", store, other, tmp_path / "again")
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


@pytest.mark.parametrize(("way", "key"), [("link", None), ("orbax", KEY)], ids=["link", "encrypted"])
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
