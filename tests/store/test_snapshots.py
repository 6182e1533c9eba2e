"""Snapshots and Orbax items: what was saved comes back bit for bit, or nothing, under the names of the store."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, StoreCorruptError, StoreError
from kvpatch_jax.store import ChunkStore, PatchKey
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.orbax_item import StoreItem, make_durable
from kvpatch_jax.store.snapshot import load_snapshot, save_snapshot

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MODEL = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3)}
KEY = b"k" * 32


def chunk_of(id: str = "B", seed: int = 0, tokens: int = 8, dtype: Any = np.float32, **more) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    kv = {name: rng.standard_normal((3, tokens, 2, 16)).astype(dtype) for name in LAYOUT.names}
    return kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, id, LAYOUT, "tiny", **more)


def patch_of(chunk: kvp.Chunk) -> kvp.Patch:
    conditioned = {name: jnp.asarray(value) + 0.1 for name, value in chunk.kv.items()}
    return kvp.form_patch(chunk, conditioned, rank=2, antecedent=("A",))


def same(first, second) -> bool:
    first, second = np.asarray(first), np.asarray(second)
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


def same_chunk(first: kvp.Chunk | None, second: kvp.Chunk) -> bool:
    assert first is not None
    leaves, others = jax.tree.leaves(dict(first.kv)), jax.tree.leaves(dict(second.kv))
    return all(same(*pair) for pair in zip(leaves, others, strict=True))


def filled(root: Path, tenant: str = "one", **options) -> ChunkStore:
    """A store with every kind of object: canonicals, also in few bits, encoder outputs, a patch, an entry."""
    store = ChunkStore(root, tenant=tenant, **options)
    chunk = chunk_of(encoder=np.ones((4, 6), np.float32))
    store.put(chunk)
    store.put(chunk, encoding="k4v4")
    store.put(chunk_of("bf16", 3, dtype=ml_dtypes.bfloat16))
    store.put_patches([patch_of(chunk)])
    store.put_encoder("empty", "tiny", np.zeros((0, 6), np.float32))
    put_entry(store, 1)
    return store


def put_entry(store: ChunkStore, version: int, text: str = "body") -> None:
    body = {"library": "dynamic", "fields": ["HOTEL"], "version": version, "text": text}
    store.objects.put([(store.names.entry("dynamic", "HOTEL", version=version), Encoded("entry", body, {}))])


def names_of(store: ChunkStore) -> set[str]:
    return set(store.objects.with_prefix(""))


def expect_filled(store: ChunkStore) -> None:
    chunk = chunk_of()
    restored = store.get("B", "tiny", encoder=True)
    assert same_chunk(restored, chunk)
    assert restored is not None
    assert same(restored.encoder, np.ones((4, 6), np.float32))
    assert same_chunk(store.get("B", "tiny", encoding="k4v4"), kvp.encode_chunk(chunk, "k4v4"))
    assert same_chunk(store.get("bf16", "tiny"), chunk_of("bf16", 3, dtype=ml_dtypes.bfloat16))
    assert len(store.get_patches(PatchKey("B", "tiny", ("A",)))) == 1
    assert same(store.get_encoder("empty", "tiny"), np.zeros((0, 6), np.float32))
    assert len(names_of(store)) == 7


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / "data").glob("*/*"))


def flip(path: Path, position: int = -100) -> None:
    """Flips a bit of a file, leaving other links to it alone."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.unlink()
    path.write_bytes(raw)


def refuse_links(*_, **__):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize(("tenant", "links"), [("one", True), ("another", False)])
def test_a_tenant_is_restored_under_the_names_of_another_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenant: str, links: bool
):
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other", tenant=tenant) as other:
        saved = store.save(tmp_path / "snapshot")
        files = [path.stat() for path in files_of(tmp_path / "snapshot")]
        assert (saved.objects, saved.nbytes) == (7, sum(file.st_size for file in files))
        assert {file.st_nlink for file in files} == {1 + links}
        restored = other.restore(tmp_path / "snapshot")
        assert restored.objects == 7
        expect_filled(other)
        assert not names_of(other) & names_of(store)
        assert other.restore(tmp_path / "snapshot").skipped == 7


def test_what_was_deleted_comes_back(tmp_path: Path):
    with filled(tmp_path / "root") as store:
        store.put_async(chunk_of("queued", 9))
        store.save(tmp_path / "snapshot")
        for id in ("B", "bf16", "empty", "queued"):
            assert store.delete(id, "tiny")
        store.restore(tmp_path / "snapshot")
        assert same_chunk(store.get("queued", "tiny"), chunk_of("queued", 9))
        store.delete("queued", "tiny")
        expect_filled(store)


def test_what_is_replaced_meanwhile_is_saved_in_its_later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ChunkStore(tmp_path / "root") as store, ChunkStore(tmp_path / "other") as other:
        store.put(chunk_of("lost"))
        files_of(tmp_path / "root")[0].unlink()
        store.put_many([chunk_of("A", 1), chunk_of("B", 2), chunk_of("C", 3)])
        link = os.link

        def slow(*arguments, **options):
            monkeypatch.setattr(os, "link", link)
            store.put_many([chunk_of("A", 11), chunk_of("B", 12)])
            store.delete("C", "tiny")
            link(*arguments, **options)

        monkeypatch.setattr(os, "link", slow)
        saved = store.save(tmp_path / "snapshot")
        assert (saved.objects, saved.skipped) == (2, 2)
        other.restore(tmp_path / "snapshot")
        assert same_chunk(other.get("A", "tiny"), chunk_of("A", 11))
        assert same_chunk(other.get("B", "tiny"), chunk_of("B", 12))


def test_a_tenants_snapshot_has_nothing_of_others(tmp_path: Path):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "root", tenant="two") as two:
        two.put(chunk_of("theirs"))
        two.delete("theirs", "tiny")
        two.put(chunk_of("more"))
        store.save(tmp_path / "snapshot")
        assert not (tmp_path / "snapshot" / "secret").exists()
        content = b"".join(path.read_bytes() for path in (tmp_path / "snapshot").rglob("*") if path.is_file())
        for secret in (two.objects.tenant, two.names.chunk("tiny", "theirs"), two.names.chunk("tiny", "more")):
            assert secret.encode() not in content


def test_damage_is_listed_and_nothing_is_added(tmp_path: Path):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other", tenant="one") as other:
        store.save(tmp_path / "snapshot")
        first, second, third, fourth, *_ = files_of(tmp_path / "snapshot")
        flip(first)
        flip(second, 40)
        content, moved = third.read_bytes(), fourth.read_bytes()
        for path, bytes_there in ((third, moved), (fourth, content)):
            path.unlink()
            path.write_bytes(bytes_there)
        with pytest.raises(StoreCorruptError, match="4 of 7 objects") as caught:
            other.restore(tmp_path / "snapshot")
        assert len(caught.value.bad) == 4
        assert not names_of(other)
        assert store.verify() == []


@pytest.mark.parametrize("name", ["snapshot.json", "index.sqlite"])
def test_an_unfinished_or_changed_list_is_refused(tmp_path: Path, name: str):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other") as other:
        store.save(tmp_path / "snapshot")
        path = tmp_path / "snapshot" / name
        content = path.read_bytes()
        for damaged in (content[:-1], content.replace(b"e", b"f"), b""):
            path.write_bytes(damaged)
            with pytest.raises(StoreCorruptError, match="finished and unchanged"):
                other.restore(tmp_path / "snapshot")
        path.unlink()
        with pytest.raises(StoreCorruptError, match="No such file"):
            other.restore(tmp_path / "snapshot")
        assert not names_of(other)
        with pytest.raises(InputError):
            store.save(tmp_path / "snapshot")


def test_what_the_store_has_stays_unless_it_is_damaged(tmp_path: Path):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other", tenant="one") as other:
        put_entry(store, 2)
        store.save(tmp_path / "snapshot")
        newer = chunk_of("B", 17)
        other.put(newer)
        other.put(chunk_of("bf16", 3, dtype=ml_dtypes.bfloat16))
        put_entry(other, 7, "theirs")
        query, name = "SELECT file FROM objects WHERE name = ?", other.names.canonical("tiny", "bf16")
        flip(tmp_path / "other" / "data" / other.objects.index.rows(query, name)[0][0])
        restored = other.restore(tmp_path / "snapshot")
        assert restored.skipped == 3  # the chunk, and two versions of an entry
        assert same_chunk(other.get("B", "tiny"), newer)
        assert same_chunk(other.get("bf16", "tiny"), chunk_of("bf16", 3, dtype=ml_dtypes.bfloat16))
        versions = [name for name in names_of(other) if "/e." in name]
        assert versions == [other.names.entry("dynamic", "HOTEL", version=7)]


def test_a_restore_that_fails_on_the_way_takes_back_what_it_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ChunkStore(tmp_path / "root") as store, ChunkStore(tmp_path / "other", root_budget=30_000) as other:
        store.put_many([chunk_of(f"B{number}", number, tokens=2) for number in range(130)])
        store.save(tmp_path / "snapshot")
        other.put(chunk_of("mine"))
        with pytest.raises(StoreError, match="at most the budget"):
            other.restore(tmp_path / "snapshot")
        other.objects.index.set_budget("", 10**9)
        fsync, calls = os.fsync, []

        def failing(fd):
            calls.append(fd)
            if len(calls) > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(StoreError, match="No space left"):
                other.restore(tmp_path / "snapshot")
        assert names_of(other) == {other.names.canonical("tiny", "mine")}
        assert len(files_of(tmp_path / "other")) == 1
        other.restore(tmp_path / "snapshot")
        assert len(names_of(other)) == 131


def test_expiry_is_kept_and_what_has_expired_stays_out(tmp_path: Path):
    with ChunkStore(tmp_path / "root") as store, ChunkStore(tmp_path / "other") as other:
        store.put(chunk_of("brief"), ttl=1e-6)
        store.put(chunk_of("long"), ttl=3600.0)
        assert store.save(tmp_path / "snapshot").objects == 1
        other.restore(tmp_path / "snapshot")
        (expires,) = other.objects.index.rows("SELECT expires FROM objects")
        assert expires in store.objects.index.rows("SELECT expires FROM objects")


def test_encrypted_objects_come_back_with_their_key_alone(tmp_path: Path):
    with filled(tmp_path / "root", key=KEY) as store:
        store.save(tmp_path / "snapshot")
        for id in ("B", "bf16", "empty"):
            store.delete(id, "tiny")
        store.restore(tmp_path / "snapshot")
        expect_filled(store)
    with ChunkStore(tmp_path / "plain", tenant="one") as plain, ChunkStore(tmp_path / "k", key=b"x" * 32) as other:
        for target, key in ((plain, None), (plain, b"y" * 32), (other, None), (other, b"y" * 32)):
            with pytest.raises(StoreError, match="key"):
                target.restore(tmp_path / "snapshot", key=key)
            assert not names_of(target)
        plain.restore(tmp_path / "snapshot", key=KEY)
        other.restore(tmp_path / "snapshot", key=KEY)
        expect_filled(plain)
        expect_filled(other)
        assert other.verify() == []


def test_a_root_is_saved_whole_and_becomes_a_new_root(tmp_path: Path):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "root", tenant="two", key=KEY) as two:
        two.put(chunk_of("theirs"))
        with pytest.raises(StoreCorruptError, match="finished and unchanged"):
            two.restore(tmp_path / "root")
        save_snapshot(tmp_path / "root", tmp_path / "snapshot")
        store.delete("B", "tiny")
        store.restore(tmp_path / "snapshot")  # of the same secret
        expect_filled(store)
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "new").objects == 8
    with (
        ChunkStore(tmp_path / "new", tenant="one") as store,
        ChunkStore(tmp_path / "new", tenant="two", key=KEY) as two,
    ):
        assert store.objects.index.rebuilt == 0
        expect_filled(store)
        assert same_chunk(two.get("theirs", "tiny"), chunk_of("theirs"))
        assert store.usage().count == 6
        with pytest.raises(InputError):
            load_snapshot(tmp_path / "snapshot", tmp_path / "new")
    flip(files_of(tmp_path / "snapshot")[0])
    with pytest.raises(StoreCorruptError, match="1 of 8 objects"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "third")
    assert not list(tmp_path.glob("third*"))
    with (
        ChunkStore(tmp_path / "stranger", tenant="one") as other,
        pytest.raises(StoreCorruptError, match="nothing of this tenant"),
    ):
        other.restore(tmp_path / "snapshot")


@pytest.mark.parametrize("arrays", [False, True])
def test_a_store_is_saved_and_loaded_beside_a_model(tmp_path: Path, arrays: bool):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other") as other:
        item = StoreItem(store, arrays=arrays)
        ocp.save_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": item, "model": MODEL})
        make_durable(tmp_path / "checkpoint")
        both = {"chunk_store": StoreItem(other), "model": MODEL}
        loaded = ocp.load_checkpointables(str(tmp_path / "checkpoint"), both)
        assert same(loaded["model"]["weights"], MODEL["weights"])
        expect_filled(other)


@pytest.mark.parametrize("arrays", [False, True])
def test_chunks_are_saved_and_restored_by_their_ids(tmp_path: Path, arrays: bool):
    with filled(tmp_path / "root") as store, ChunkStore(tmp_path / "other") as other:
        store.save(tmp_path / "part", ids=["bf16"])
        assert len(files_of(tmp_path / "part")) == 1
        ocp.save_checkpointables(str(tmp_path / "all"), {"chunk_store": StoreItem(store, arrays=arrays)})
        ocp.load_checkpointables(str(tmp_path / "all"), {"chunk_store": StoreItem(other, ids=["bf16"])})
        assert names_of(other) == {other.names.canonical("tiny", "bf16")}
        ocp.save_checkpointables(str(tmp_path / "few"), {"chunk_store": StoreItem(store, arrays=True, ids=["bf16"])})
        item = StoreItem()
        ocp.load_checkpointables(str(tmp_path / "few"), {"chunk_store": item})
        assert [chunk.id for chunk in item.contents if isinstance(chunk, kvp.Chunk)] == ["bf16"]


def test_changed_arrays_are_refused(tmp_path: Path):
    context = ocp.Context()
    context.array_options.saving.use_compression = False
    chunk = chunk_of(tokens=64)
    with context:
        ocp.save_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": StoreItem(contents=[chunk])})
    needle, count = np.asarray(chunk.kv["k"]).tobytes()[:64], 0
    for path in (tmp_path / "checkpoint").rglob("*"):
        if path.is_file() and needle in (raw := path.read_bytes()):
            flip(path, raw.index(needle))
            count += 1
    assert count == 1
    with ChunkStore(tmp_path / "root") as store:
        for item in (StoreItem(), StoreItem(store)):
            with pytest.raises(StoreCorruptError, match="other bits"):
                ocp.load_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": item})
        assert not names_of(store)
    with pytest.raises(StoreError, match="No such file"):
        make_durable(tmp_path / "nothing")


def test_chunks_travel_from_a_mesh_of_eight_devices_to_smaller_ones(tmp_path: Path):
    program = [sys.executable, str(Path(__file__).parent / "snapshot_meshes.py"), str(tmp_path / "checkpoint")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["resharded", "8"], done.stderr[-3000:]
