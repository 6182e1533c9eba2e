"""Snapshots: by link and by copy, of one tenant or all; verified on the way in, all or nothing; nothing of others."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import BACKBONE, chunk_of, file_of, patch_of, same_chunk

from kvpatch_jax.errors import InputError, StoreFullError, StoreIOError, StoreKeyError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, PatchKey, load_snapshot, save_snapshot

SERVED = PatchKey("B", BACKBONE, ("A",))
KEY = b"one key of the store, 32 bytes at least"


def filled(root: Path, tenant: str = "one", **more) -> ChunkStore:
    """A canonical, its encoder output, a reduced one and a patch."""
    store = ChunkStore(root, tenant=tenant, budget=Budget(host=0), **more)
    chunk = chunk_of(encoder=np.ones((4, 6), np.float32))
    store.put(chunk)
    store.put(chunk, encoding="int8")
    store.put_patches([patch_of(chunk)])
    return store


def serves_all(root: Path, tenant: str = "one", **more) -> bool:
    with ChunkStore(root, tenant=tenant, budget=Budget(host=0), **more) as store:
        reduced = store.get("B", BACKBONE, encoding="int8")
        encoder = store.get_encoder("B", BACKBONE)
        return (
            same_chunk(store.get("B", BACKBONE), chunk_of())
            and reduced is not None
            and encoder is not None
            and encoder.shape == (4, 6)
            and len(store.get_patches(SERVED)) == 1
        )


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects_below(folder: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in files_below(folder).items() if name.endswith(".safetensors")}


def test_links_share_the_file_and_copies_do_not(tmp_path: Path):
    with filled(tmp_path / "store") as store:
        linked, copied = tmp_path / "linked", tmp_path / "copied"
        assert save_snapshot(tmp_path / "store", linked, tenant="one").objects == 4
        assert save_snapshot(tmp_path / "store", copied, tenant="one", copy=True).objects == 4
        file = file_of(store, chunk_of())
        inside = file.relative_to(tmp_path / "store")
        assert (linked / inside).samefile(file)
        assert not (copied / inside).samefile(file)
        assert (copied / inside).stat().st_mtime_ns == file.stat().st_mtime_ns
        assert objects_below(linked) == objects_below(copied) == objects_below(tmp_path / "store")
        store.delete("B", BACKBONE)
    for snapshot in (linked, copied):
        assert load_snapshot(snapshot, tmp_path / "store", tenant="one").objects == 4
        assert serves_all(tmp_path / "store")
        shutil.rmtree(tmp_path / "store" / "obj")


def test_a_tenant_is_restored_into_a_root_with_another_secret(tmp_path: Path):
    """Its objects get that root's names, and may be called by another tenant's name."""
    filled(tmp_path / "store").close()
    save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
    filled(tmp_path / "other", tenant="two").close()
    for tenant in ("one", "three"):
        assert load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant=tenant).objects == 4
        assert serves_all(tmp_path / "other", tenant)
    again = load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="one")
    assert (again.objects, again.skipped) == (0, 4)
    assert not set(objects_below(tmp_path / "other")) & set(objects_below(tmp_path / "store"))


def test_a_whole_store_is_restored_into_a_new_root_or_one_with_its_secret(tmp_path: Path):
    for tenant in ("one", "two"):
        filled(tmp_path / "store", tenant).close()
    snapshot = tmp_path / "snapshot"
    assert save_snapshot(tmp_path / "store", snapshot).objects == 8
    assert load_snapshot(snapshot, tmp_path / "new").objects == 8
    assert load_snapshot(snapshot, tmp_path / "store").skipped == 8
    assert serves_all(tmp_path / "new", "one")
    assert serves_all(tmp_path / "new", "two")
    filled(tmp_path / "other").close()
    with pytest.raises(StoreSnapshotError, match="another secret"):
        load_snapshot(snapshot, tmp_path / "other")
    assert load_snapshot(snapshot, tmp_path / "other", tenant="two").objects == 4
    assert serves_all(tmp_path / "other", "two")


def test_encrypted_objects_stay_encrypted(tmp_path: Path):
    """Made without the key; under the same names restored without it; under others only with it."""
    filled(tmp_path / "store", key=KEY).close()
    snapshot, whole = tmp_path / "snapshot", tmp_path / "whole"
    assert save_snapshot(tmp_path / "store", snapshot, tenant="one").objects == 4
    assert save_snapshot(tmp_path / "store", whole, copy=True).objects == 4
    assert BACKBONE.encode() not in b"".join(files_below(snapshot).values())
    assert load_snapshot(whole, tmp_path / "same").objects == 4
    assert serves_all(tmp_path / "same", key=KEY)
    with pytest.raises(StoreKeyError):
        serves_all(tmp_path / "same")
    for key in (None, b"another key of at least 32 bytes"):
        with pytest.raises(StoreKeyError):
            load_snapshot(snapshot, tmp_path / "other", tenant="one", key=key)
        assert objects_below(tmp_path / "other") == {}
    with pytest.raises(StoreKeyError):  # keys are per tenant
        load_snapshot(snapshot, tmp_path / "third", tenant="two", key=KEY)
    assert load_snapshot(snapshot, tmp_path / "third", tenant="one", key=KEY).objects == 4
    assert serves_all(tmp_path / "third", key=KEY)
    assert not set(objects_below(tmp_path / "third").values()) & set(objects_below(tmp_path / "store").values())


def test_a_tenants_snapshot_contains_no_objects_of_other_tenants(tmp_path: Path):
    filled(tmp_path / "store", "one").close()
    with ChunkStore(tmp_path / "store", tenant="two") as other:
        other.put(chunk_of("somebody-elses", 5))
        hidden = [Path(other.names.space).name, file_of(other, chunk_of("somebody-elses")).name[:64]]
    secret = json.loads((tmp_path / "store" / "STORE.json").read_text())["secret"]
    save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="one")
    everything = b"\0".join(name.encode() + raw for name, raw in files_below(tmp_path / "snapshot").items())
    assert len(secret) == 64
    assert b"somebody-elses" not in everything
    for word in (secret, *hidden):
        assert word.encode() not in everything
        assert bytes.fromhex(word) not in everything
    with pytest.raises(InputError, match="tenant None"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenant's snapshot of four objects. Read only."""
    folder = tmp_path_factory.mktemp("kept")
    filled(folder / "store").close()
    save_snapshot(folder / "store", folder / "snapshot", tenant="one", copy=True)
    return folder / "snapshot"


def damage(data: st.DataObject, folder: Path) -> Path:
    """Changes one file of a snapshot. Which."""
    names = sorted(files_below(folder))
    name = data.draw(st.sampled_from(names))
    path, raw = folder / name, bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(("flip", "cut", "gone", "other")))
    if kind == "gone":
        path.unlink()
    elif kind == "other":
        shutil.copy(folder / data.draw(st.sampled_from([other for other in names if other != name])), path)
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw if kind == "flip" else raw[:at])
    return path


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_refused_and_nothing_is_added(
    data: st.DataObject, snapshot: Path, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("damage")
    shutil.copytree(snapshot, folder / "snapshot")
    path = damage(data, folder / "snapshot")
    (folder / "other").mkdir()
    with pytest.raises(StoreSnapshotError) as caught:
        load_snapshot(folder / "snapshot", folder / "other", tenant="one")
    assert objects_below(folder / "other") == {}
    if path.name != "MANIFEST":
        assert len(caught.value.bad) == 1
        left = load_snapshot(folder / "snapshot", folder / "other", tenant="one", skip_damaged=True)
        assert (left.objects, left.damaged) == (3, 1)
    shutil.rmtree(folder)


def test_damaged_and_expired_objects_stay_out_of_a_snapshot(tmp_path: Path):
    with filled(tmp_path / "store", clock=lambda: 1e9) as store:
        store.put(chunk_of("brief"), ttl=1)  # has been expired for long by the clock of the day
        file = file_of(store, chunk_of())
        raw = bytearray(file.read_bytes())
        raw[5000] ^= 1
        file.write_bytes(raw)
        made = save_snapshot(tmp_path / "store", tmp_path / "copied", tenant="one", copy=True)
        assert (made.objects, made.skipped, made.damaged) == (3, 1, 1)
        assert not file.exists()  # in quarantine
    assert load_snapshot(tmp_path / "copied", tmp_path / "other", tenant="one").objects == 3


def test_a_snapshot_exists_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(tmp_path / "store").close()
    with pytest.raises(StoreIOError):
        save_snapshot(tmp_path / "nothing", tmp_path / "snapshot")
    assert not (tmp_path / "nothing").exists()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(StoreFullError):
        save_snapshot(tmp_path / "store", tmp_path / "snapshot")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    save_snapshot(tmp_path / "store", tmp_path / "snapshot")
    with pytest.raises(InputError, match="name that is free"):
        save_snapshot(tmp_path / "store", tmp_path / "snapshot")


def test_a_manifest_cannot_refer_to_files_outside(tmp_path: Path):
    from kvpatch_jax.store.snapshots.manifest import write_list

    filled(tmp_path / "store").close()
    (tmp_path / "snapshot").mkdir()
    for path in ("../store/STORE.json", "/etc/passwd", "obj/../../x.kv.safetensors"):
        target = tmp_path / "snapshot" / "MANIFEST"
        target.unlink(missing_ok=True)
        write_list(str(target), {"version": 1, "scope": "tenant", "objects": [[path, 1, "00000000"]]})
        with pytest.raises(StoreSnapshotError):
            load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="one")
