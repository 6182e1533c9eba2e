"""Snapshots of libraries that are damaged, forged, or fail halfway: all or nothing, and no library is spoilt."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_cases import fill, libraries, opened

from kvpatch_jax.errors import StoreFullError, StoreSnapshotError
from kvpatch_jax.store import load_snapshot, save_snapshot
from kvpatch_jax.store.snapshots.manifest import write_list


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenant's snapshot. Read only."""
    folder = tmp_path_factory.mktemp("kept")
    with opened(folder / "store") as store:
        fill(store)
    save_snapshot(folder / "store", folder / "snapshot", tenant="one", copy=True)
    return folder / "snapshot"


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_of_an_entry_is_refused_and_nothing_is_added(
    data: st.DataObject, kept: Path, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("damage")
    shutil.copytree(kept, folder / "snapshot")
    entries = sorted((folder / "snapshot" / "lib").rglob("*.safetensors"))
    path = data.draw(st.sampled_from(entries))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "gone", "other"]))
    if kind == "gone":
        path.unlink()
    elif kind == "other":
        shutil.copy(data.draw(st.sampled_from([other for other in entries if other != path])), path)
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw if kind == "flip" else raw[:at])
    with pytest.raises(StoreSnapshotError) as caught:
        load_snapshot(folder / "snapshot", folder / "other", tenant="one")
    assert len(caught.value.bad) == 1
    assert not list((folder / "other").rglob("*.safetensors"))
    left = load_snapshot(folder / "snapshot", folder / "other", tenant="one", skip_damaged=True)
    assert (left.objects, left.damaged) == (len(list(kept.rglob("*.safetensors"))) - 1, 1)
    shutil.rmtree(folder)


def test_a_failed_restore_removes_its_entries(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch):
    total = len(list(kept.rglob("*.safetensors")))
    link = os.link
    for number in range(1, total + 1):
        calls = []

        def full(source: str, target: str, calls=calls, number=number, **more: bool) -> None:
            calls.append(target)
            if len(calls) == number:
                raise OSError(28, "No space left on device")
            link(source, target, **more)

        with opened(tmp_path / "other") as other:
            with monkeypatch.context() as patched:
                patched.setattr(os, "link", full)
                with pytest.raises(StoreFullError):
                    load_snapshot(kept, tmp_path / "other", tenant="one")
            assert not other.disk.scan() + other.disk.scan("lib")
    assert load_snapshot(kept, tmp_path / "other", tenant="one").objects == total


def test_a_list_cannot_lead_out_of_the_libraries(tmp_path: Path):
    with opened(tmp_path / "store") as store:
        fill(store)
        tenant = store.names.libraries
    paths = ["../lock", "static/lock", "other/00/" + "0" * 64 + ".entry.safetensors",
             "static/00/../../x.entry.safetensors", "static/00/" + "0" * 64 + ".v000000001.safetensors",
             "dynamic/00/" + "0" * 64 + ".entry.safetensors", "dynamic/00/" + "0" * 64 + ".v1.safetensors"]  # fmt: skip
    for path in paths:
        folder = tmp_path / "snapshot"
        folder.mkdir()
        listed = {"version": 1, "scope": "tenant", "objects": [[f"{tenant}/{path}", 1, "00000000"]]}
        write_list(str(folder / "MANIFEST"), listed)
        with pytest.raises(StoreSnapshotError, match="path 'lib/"):
            load_snapshot(folder, tmp_path / "other", tenant="one")
        shutil.rmtree(folder)


FORGED = {
    "kind": ["VIDEO", 3, None],
    "name": ["", "a{b", 5],
    "version": [0, -1, 10**9, "1", True],
    "content": ["str", 1],
    "chunk": [[1, 2, 3], ["b", "i"], ["b", "i", -1], "bi9", 7],
    "metadata": [[], None],
    "withdrawn": [0, None],
    "digest": [1],
}


@pytest.mark.parametrize("word", FORGED)
def test_a_forged_entry_cannot_spoil_a_library(tmp_path: Path, word: str):
    """Whole by its checksums, and not what an entry says: a listing of the library would fail over it."""
    from kvpatch_jax.store.disk.directory import reading
    from kvpatch_jax.store.format.objects import Blob, write_blob
    from kvpatch_jax.store.snapshots.manifest import header_crc

    with opened(tmp_path / "store") as store:
        libraries(store)[0].put("A", b"\xff\xfe not text")
        (entry,) = store.disk.scan(store.names.libraries)
        found = store.disk.get(store.names.entry("static", "FILE", "A"))
    assert found is not None
    for value in FORGED[word]:
        folder = tmp_path / "snapshot"
        path = folder / entry.path
        path.parent.mkdir(parents=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        write_blob(fd, Blob("entry", dict(found.header.body) | {word: value}, found.arrays), path.name)
        os.close(fd)
        with reading(str(path.parent), path.name) as (fd, header):
            listed = [entry.path, header.size, f"{header_crc(fd):08x}"]
        write_list(str(folder / "MANIFEST"), {"version": 1, "scope": "tenant", "objects": [listed]})
        with pytest.raises(StoreSnapshotError, match=r"entries say|make an entry"):
            load_snapshot(folder, tmp_path / "other", tenant="one")
        assert not list((tmp_path / "other").rglob("*.safetensors"))
        shutil.rmtree(folder)
