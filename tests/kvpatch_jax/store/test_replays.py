"""Files of an encrypted library that were there before, put back by who has no key."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from failing_system import OneFailure
from library_cases import KEY, WAYS, travel

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot, save_snapshot

NAMES = [f"file {number}" for number in range(20)]


def opened(root: Path, key: bytes | None = KEY, **more) -> ChunkStore:
    return ChunkStore(root, tenant="one", key=key, budget=Budget(host=0), **more)


def static(store: ChunkStore) -> StaticLibrary:
    return StaticLibrary(store, quota=1 << 26)


def entries(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (root / "lib").rglob("*.safetensors")}


def floors(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (root / "lib").rglob("*.floor")}


def put_back(files: dict[str, bytes]) -> None:
    for path, raw in files.items():
        Path(f"{path}.new").write_bytes(raw)
        os.replace(f"{path}.new", path)


def shown(library: StaticLibrary) -> dict[str, object]:
    found = {name: library.get("TEXT", name) for name in NAMES}
    return {name: None if resource is None else resource.content for name, resource in found.items()}


def test_an_older_entry_that_was_put_back_is_a_miss(tmp_path: Path):
    with opened(tmp_path) as store:
        library = static(store)
        for name in NAMES:
            library.put(name, f"first {name}")
        before = entries(tmp_path)
        for name in NAMES:
            library.put(name, f"second {name}")
        assert set(shown(library).values()) == {f"second {name}" for name in NAMES}
        after = entries(tmp_path)
        put_back(before)
        for each in (library, static(opened(tmp_path))):  # this process, and one that comes new
            assert set(shown(each).values()) == {None}
            assert each.entries() == []
            assert each.used == 0
        assert store.counters["replayed"] == len(NAMES)
        assert entries(tmp_path) == before  # nothing was moved or destroyed
        put_back(after)
        assert set(shown(static(opened(tmp_path))).values()) == {f"second {name}" for name in NAMES}
        put_back(before)
        library.put(NAMES[0], "third")
        assert shown(library)[NAMES[0]] == "third"


def test_a_deleted_entry_does_not_come_back(tmp_path: Path):
    with opened(tmp_path) as store:
        library = static(store)
        for name in NAMES:
            library.put(name, f"first {name}")
        before = entries(tmp_path)
        for name in NAMES[:12]:
            assert library.delete("TEXT", name)
        put_back(before)
        for each in (library, static(opened(tmp_path))):
            assert [name for name, text in shown(each).items() if text is not None] == NAMES[12:]
            assert len(each.entries()) == len(NAMES) - 12


def test_a_longer_life_does_not_come_back(tmp_path: Path):
    now = [1000.0]
    with opened(tmp_path, clock=lambda: now[0]) as store:
        library = static(store)
        library.put(NAMES[0], "text", ttl=1000)
        before = entries(tmp_path)
        library.put(NAMES[0], "text", ttl=10)
        now[0] = 1011.0
        assert library.get("TEXT", NAMES[0]) is None
        put_back(before)
        assert library.get("TEXT", NAMES[0]) is None
        library.collect()
        put_back(before)
        assert static(opened(tmp_path, clock=lambda: now[0])).get("TEXT", NAMES[0]) is None


def test_a_withdrawn_reference_does_not_come_back(tmp_path: Path):
    with opened(tmp_path) as store:
        library = DynamicLibrary(store)
        library.publish("A", "first")
        first = entries(tmp_path)
        library.publish("A", "second")
        library.withdraw("TEXT", "A")
        for path in entries(tmp_path):
            os.unlink(path)
        put_back(first)
        for each in (library, DynamicLibrary(opened(tmp_path))):
            assert each.versions("TEXT", "A") == [1]
            assert each.open("TEXT", "A") is None
            assert each.entries() == []
            assert not each.withdraw("TEXT", "A")
        assert library.publish("A", "again").version == 4
        held = DynamicLibrary(opened(tmp_path)).open("TEXT", "A")
        assert held is not None
        assert held.resource.content == "again"
        held.close()


@pytest.mark.parametrize(
    "what", ["gone", "another's", *(pytest.param(what, marks=pytest.mark.slow) for what in ("cut", "flipped", "empty"))]
)
def test_a_damaged_floor_loses_nothing(tmp_path: Path, what: str):
    with opened(tmp_path) as store:
        library = static(store)
        for name in NAMES:
            library.put(name, name)
        before = entries(tmp_path)
        library.put(NAMES[0], "later")
        latest = floors(tmp_path)
        assert latest
        for number, (path, raw) in enumerate(latest.items()):
            flipped = bytearray(raw)
            flipped[(number * 997) % len(raw)] ^= 4
            other = list(latest.values())[number - 1]
            new = {"gone": None, "cut": raw[:-1], "flipped": bytes(flipped), "empty": b"", "another's": other}[what]
            os.unlink(path) if new is None else Path(path).write_bytes(new)
        for each in (library, static(opened(tmp_path))):
            assert shown(each) == {name: name for name in NAMES} | {NAMES[0]: "later"}
            assert len(each.entries()) == len(NAMES)
        put_back(before)
        assert shown(library)[NAMES[0]] is None  # who has seen it remembers
        library.put(NAMES[0], "last")
        assert shown(static(opened(tmp_path)))[NAMES[0]] == "last"


def test_whatever_fails_while_putting_an_acknowledged_entry_is_served(tmp_path: Path):
    with opened(tmp_path) as store:
        library = static(store)
        library.put(NAMES[0], "0")
        served, at = "0", 0
        while True:
            failure, text = OneFailure(str(tmp_path), at, errno.ENOSPC), str(at)
            try:
                with failure.installed():
                    library.put(NAMES[0], text)
                served = text
            except StoreError:
                pass
            for each in (library, static(opened(tmp_path))):
                found = each.get("TEXT", NAMES[0])
                assert found is not None, failure.failed
                assert found.content in (served, text)
                served = found.content
            if not failure.failed:
                break
            at += 1
        assert at > 5


@pytest.mark.parametrize(
    "way", [way if way in ("link", "orbax") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_entries_restored_with_the_key_are_readable(tmp_path: Path, way: str):
    with opened(tmp_path / "store") as store, opened(tmp_path / "into") as into:
        library, references = static(store), DynamicLibrary(store)
        for name in NAMES[:5]:
            library.put(name, name)
        references.publish("A", "one")
        references.publish("A", "two")
        for target in (into, store):
            for name in NAMES[:5]:
                static(store).delete("TEXT", name) if target is store else None
            (tmp_path / way).mkdir(exist_ok=True)
            if target is store:
                load_snapshot(tmp_path / "kept", tmp_path / "store", tenant="one", key=KEY)
            else:
                save_snapshot(tmp_path / "store", tmp_path / "kept", tenant="one")
                travel(way, store, target, tmp_path / way)
            for each in (target, opened(Path(target.disk.root))):
                found = shown(static(each))
                assert [found[name] for name in NAMES[:5]] == NAMES[:5], target is store
                held = DynamicLibrary(each).open("TEXT", "A")
                assert held is not None
                assert held.resource.content == "two"
                del held  # not closed, or what it held would be dropped
        assert DynamicLibrary(into).publish("A", "three").version == 3


def test_entries_restored_without_the_key_into_a_new_root_are_readable(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        for name in NAMES:
            static(store).put(name, name)
        static(store).delete("TEXT", NAMES[0])
    save_snapshot(tmp_path / "store", tmp_path / "snapshot")
    load_snapshot(tmp_path / "snapshot", tmp_path / "new")
    with opened(tmp_path / "new") as store:
        assert [name for name, text in shown(static(store)).items() if text == name] == NAMES[1:]
        static(store).put(NAMES[0], "again")
        assert [name for name, text in shown(static(store)).items() if text is not None] == NAMES


def test_a_deleted_tenant_may_start_again(tmp_path: Path):
    with opened(tmp_path) as store:
        library, references = static(store), DynamicLibrary(store)
        for _ in range(3):
            library.put(NAMES[0], "old")
            references.publish("A", "old")
        store.delete_tenant()
        assert library.get("TEXT", NAMES[0]) is None
        with opened(tmp_path) as other:
            static(other).put(NAMES[0], "new")
            DynamicLibrary(other).publish("A", "new")
        found, held = library.get("TEXT", NAMES[0]), references.open("TEXT", "A")
        assert found is not None
        assert found.content == "new"
        assert held is not None
        held.close()


def test_a_whole_folder_that_is_put_back_is_not_detected(tmp_path: Path):
    """As the threat model says: only who has seen the later floor knows."""
    with opened(tmp_path) as store:
        library = static(store)
        library.put(NAMES[0], "first")
        shutil.copytree(tmp_path / "lib", tmp_path / "copy")
        library.put(NAMES[0], "second")
        assert shown(library)[NAMES[0]] == "second"
        shutil.rmtree(tmp_path / "lib")
        shutil.copytree(tmp_path / "copy", tmp_path / "lib")
        assert shown(library)[NAMES[0]] is None
        assert shown(static(opened(tmp_path)))[NAMES[0]] == "first"


def test_without_a_key_there_is_no_floor(tmp_path: Path):
    with opened(tmp_path, key=None) as store:
        static(store).put(NAMES[0], "text")
        DynamicLibrary(store).publish("A", "text")
    assert floors(tmp_path) == {}


@pytest.mark.slow
def test_readers_never_miss_an_entry_that_is_replaced_meanwhile(tmp_path: Path):
    with opened(tmp_path) as store:
        static(store).put(NAMES[0], "-1")
        DynamicLibrary(store).publish("A", "-1")
        done, missed = threading.Event(), []

        def read() -> None:
            with opened(tmp_path) as own:
                library, references = static(own), DynamicLibrary(own)
                while not done.is_set():
                    held = references.open("TEXT", "A")
                    missed.extend([None] if held is None or library.get("TEXT", NAMES[0]) is None else [])
                    if held is not None:
                        held.close()

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(40):
            static(store).put(NAMES[0], str(number))
            DynamicLibrary(store).publish("A", str(number))
        done.set()
        for reader in readers:
            reader.join()
        assert missed == []
