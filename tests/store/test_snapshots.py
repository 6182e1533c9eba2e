"""A snapshot, Orbax item or export restores what was saved, bit for bit, under its new names, or nothing at all."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, StoreCorruptError, StoreError
from kvpatch_jax.store import ChunkStore, StoreCollector, StoreItem, make_durable
from kvpatch_jax.store.__main__ import main
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.snapshot import load_snapshot, save_snapshot
from tests.store.store_cases import KEY, MODEL, chunk_of, expires_of, file_of, flip, patch_for, same, same_chunk

MODEL_STATE = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3)}
OUTPUT = np.ones((4, 6), np.float32)
HALF = chunk_of("bf16", 3, dtype=ml_dtypes.bfloat16)


def filled(root: Path, tenant: str = "one", **options: Any) -> ChunkStore:
    """A store with every kind of object: canonicals, also in few bits, encoder outputs, a patch, an entry."""
    store = ChunkStore(root, tenant=tenant, **options)
    chunk = chunk_of(encoder=OUTPUT)
    store.put(chunk)
    store.put(chunk, encoding="k4v4")
    store.put(HALF)
    store.put_patches([patch_for(chunk=chunk_of())])
    store.put_encoder("empty", MODEL, OUTPUT[:0])
    put_entry(store, 1)
    return store


def put_entry(store: ChunkStore, version: int, text: str = "body") -> None:
    body = {"library": "dynamic", "fields": ["HOTEL"], "version": version, "text": text}
    store.objects.put([(store.names.entry("dynamic", "HOTEL", version=version), Encoded("entry", body, {}))])


def names_of(store: ChunkStore) -> set[str]:
    return set(store.objects.with_prefix(""))


def expect_filled(store: ChunkStore) -> None:
    restored, patch = store.get("B", MODEL, encoder=True), patch_for(chunk=chunk_of())
    assert same_chunk(restored, chunk_of())
    assert restored is not None
    assert same(restored.encoder, OUTPUT)
    assert same_chunk(store.get("B", MODEL, encoding="k4v4"), kvp.encode_chunk(chunk_of(), "k4v4"))
    assert same_chunk(store.get("bf16", MODEL), HALF)
    (back,) = store.get_patches(patch.metadata)
    assert same(back.factors, patch.factors)
    assert same(store.get_encoder("empty", MODEL), OUTPUT[:0])
    assert len(names_of(store)) == 7


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / "data").glob("*/*"))


@pytest.mark.parametrize(("tenant", "links"), [("one", True), ("another", False)])
def test_a_tenant_is_restored_under_the_names_of_another_root(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tenant: str, links: bool
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with filled(folder / "root") as store, ChunkStore(folder / "other", tenant=tenant) as other:
        saved = store.save(folder / "snapshot")
        files = [path.stat() for path in files_of(folder / "snapshot")]
        assert (saved.objects, saved.nbytes) == (7, sum(file.st_size for file in files))
        assert {file.st_nlink for file in files} == {1 + links}
        assert other.restore(folder / "snapshot").objects == 7
        expect_filled(other)
        assert not names_of(other) & names_of(store)
        assert other.restore(folder / "snapshot").skipped == 7
        store.put(chunk_of("B", 9))  # the files of the snapshot are its own
        assert other.restore(folder / "snapshot").skipped == 7


def test_what_was_deleted_comes_back_and_ids_choose(folder: Path):
    with filled(folder / "root") as store, ChunkStore(folder / "other") as other:
        store.put_async(chunk_of("queued", 9))
        store.save(folder / "snapshot")
        store.save(folder / "part", ids=["bf16"])
        assert len(files_of(folder / "part")) == 1
        assert other.restore(folder / "snapshot", ids=["bf16", "unknown"]).objects == 1
        assert same_chunk(other.get("bf16", MODEL), HALF)
        for id in ("B", "bf16", "empty", "queued"):
            assert store.delete(id, MODEL)
        store.restore(folder / "snapshot")
        assert same_chunk(store.get("queued", MODEL), chunk_of("queued", 9))
        store.delete("queued", MODEL)
        expect_filled(store)


def test_what_is_replaced_meanwhile_is_saved_in_its_later_version(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with ChunkStore(folder / "root") as store, ChunkStore(folder / "other") as other:
        store.put(chunk_of("lost"))
        files_of(folder / "root")[0].unlink()
        store.put_many([chunk_of("A", 1), chunk_of("B", 2), chunk_of("C", 3)])
        link = os.link

        def slow(*arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(os, "link", link)
            store.put_many([chunk_of("A", 11), chunk_of("B", 12)])
            store.delete("C", MODEL)
            link(*arguments, **options)

        monkeypatch.setattr(os, "link", slow)
        saved = store.save(folder / "snapshot")
        assert (saved.objects, saved.skipped) == (2, 2)
        other.restore(folder / "snapshot")
        assert same_chunk(other.get("A", MODEL), chunk_of("A", 11))
        assert same_chunk(other.get("B", MODEL), chunk_of("B", 12))


def test_damage_is_listed_and_nothing_is_added(folder: Path):
    with filled(folder / "root") as store, ChunkStore(folder / "other", tenant="one") as other:
        store.save(folder / "snapshot")
        first, second, third, fourth, *_ = files_of(folder / "snapshot")
        flip(first)
        flip(second, 40)
        contents = third.read_bytes(), fourth.read_bytes()
        for path, content in zip((fourth, third), contents, strict=True):
            path.unlink()
            path.write_bytes(content)
        with pytest.raises(StoreCorruptError, match="4 of 7 objects") as caught:
            other.restore(folder / "snapshot")
        assert len(caught.value.bad) == 4
        assert not names_of(other)
        assert store.verify() == []

        store.save(folder / "listed")
        for name in ("snapshot.json", "index.sqlite"):  # an unfinished or changed list
            path = folder / "listed" / name
            content = path.read_bytes()
            for damaged in (content[:-1], content.replace(b"e", b"f"), b""):
                path.write_bytes(damaged)
                with pytest.raises(StoreCorruptError, match="finished and unchanged"):
                    other.restore(folder / "listed")
            path.unlink()
            with pytest.raises(StoreCorruptError, match="No such file"):
                other.restore(folder / "listed")
            path.write_bytes(content)
        with pytest.raises(InputError):
            store.save(folder / "listed")
        assert not names_of(other)
        assert other.restore(folder / "listed").objects == 7


def test_what_the_store_has_stays_unless_it_is_damaged(folder: Path):
    with filled(folder / "root") as store, ChunkStore(folder / "other", tenant="one") as other:
        put_entry(store, 2)
        store.save(folder / "snapshot")
        newer = chunk_of("B", 17)
        other.put_many([newer, HALF])
        put_entry(other, 7, "theirs")
        flip(file_of(other.objects, other.names.canonical(MODEL, "bf16")))
        assert other.restore(folder / "snapshot").skipped == 3  # the chunk, and two versions of an entry
        assert same_chunk(other.get("B", MODEL), newer)
        assert same_chunk(other.get("bf16", MODEL), HALF)
        versions = [name for name in names_of(other) if "/e." in name]
        assert versions == [other.names.entry("dynamic", "HOTEL", version=7)]


def test_a_restore_that_fails_on_the_way_takes_back_what_it_added(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with ChunkStore(folder / "root") as store, ChunkStore(folder / "other", root_budget=30_000) as other:
        store.put_many([chunk_of(f"B{number}", number, tokens=2) for number in range(130)])
        store.save(folder / "snapshot")
        other.put(chunk_of("mine"))
        with pytest.raises(StoreError, match="at most the budget"):
            other.restore(folder / "snapshot")
        fsync, calls = os.fsync, []

        def failing(fd: int) -> None:
            calls.append(fd)
            if len(calls) > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(fd)

        with ChunkStore(folder / "other", root_budget="1 GB"), monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(StoreError, match="No space left"):
                other.restore(folder / "snapshot")
        assert names_of(other) == {other.names.canonical(MODEL, "mine")}
        assert len(files_of(folder / "other")) == 1
        other.restore(folder / "snapshot")
        assert len(names_of(other)) == 131


def test_expiry_is_restored_and_what_has_expired_stays_out(folder: Path):
    with ChunkStore(folder / "root") as store, ChunkStore(folder / "other") as other:
        store.put(chunk_of("brief"), ttl=1e-6)
        store.put(chunk_of("long"), ttl=3600.0)
        assert store.save(folder / "snapshot").objects == 1
        other.restore(folder / "snapshot")
        assert expires_of(other)[0] in expires_of(store)


def test_encrypted_objects_come_back_with_their_key_alone(folder: Path):
    with filled(folder / "root", key=KEY) as store:
        store.save(folder / "snapshot")
        for id in ("B", "bf16", "empty"):
            store.delete(id, MODEL)
        store.restore(folder / "snapshot")
        expect_filled(store)
    with ChunkStore(folder / "plain", tenant="one") as plain, ChunkStore(folder / "k", key=b"x" * 32) as other:
        for target, key in ((plain, None), (plain, b"y" * 32), (other, None), (other, b"y" * 32)):
            with pytest.raises(StoreError, match="key"):
                target.restore(folder / "snapshot", key=key)
            assert not names_of(target)
        for target in (plain, other):
            target.restore(folder / "snapshot", key=KEY)
            expect_filled(target)
            assert target.verify() == []


def test_a_root_is_saved_and_becomes_a_new_root(folder: Path):
    with filled(folder / "root") as store, ChunkStore(folder / "root", tenant="two", key=KEY) as two:
        two.put(chunk_of("theirs"))
        with pytest.raises(StoreCorruptError, match="finished and unchanged"):
            two.restore(folder / "root")
        save_snapshot(folder / "root", folder / "snapshot")
        store.delete("B", MODEL)
        store.restore(folder / "snapshot")  # of the same secret
        expect_filled(store)
    assert load_snapshot(folder / "snapshot", folder / "new").objects == 8
    with (
        ChunkStore(folder / "new", tenant="one") as store,
        ChunkStore(folder / "new", tenant="two", key=KEY) as two,
    ):
        assert store.objects.index.rebuilt == 0
        expect_filled(store)
        assert same_chunk(two.get("theirs", MODEL), chunk_of("theirs"))
        assert store.usage().count == 6
        with pytest.raises(InputError):
            load_snapshot(folder / "snapshot", folder / "new")
    flip(files_of(folder / "snapshot")[0])
    with pytest.raises(StoreCorruptError, match="1 of 8 objects"):
        load_snapshot(folder / "snapshot", folder / "third")
    assert not list(folder.glob("third*"))
    with (
        ChunkStore(folder / "stranger", tenant="one") as other,
        pytest.raises(StoreCorruptError, match="nothing of this tenant"),
    ):
        other.restore(folder / "snapshot")


# ------------------------------------------------------------------------------------------------------------- Orbax


@pytest.mark.parametrize("arrays", [False, True])
def test_a_store_is_saved_and_loaded_beside_a_model(folder: Path, arrays: bool):
    from orbax.checkpoint import v1 as ocp

    with filled(folder / "root") as store, ChunkStore(folder / "other") as other, ChunkStore(folder / "few") as few:
        path = str(folder / "checkpoint")
        ocp.save_checkpointables(path, {"chunk_store": StoreItem(store, arrays=arrays), "model": MODEL_STATE})
        make_durable(path)
        loaded = ocp.load_checkpointables(path, {"chunk_store": StoreItem(other), "model": MODEL_STATE})
        assert same(loaded["model"]["weights"], MODEL_STATE["weights"])
        expect_filled(other)
        ocp.load_checkpointables(path, {"chunk_store": StoreItem(few, ids=["bf16"])})
        assert names_of(few) == {few.names.canonical(MODEL, "bf16")}
        path = str(folder / "part")
        ocp.save_checkpointables(path, {"chunk_store": StoreItem(store, arrays=True, ids=["bf16"])})
        item = StoreItem(placement=jax.devices()[0])
        ocp.load_checkpointables(path, {"chunk_store": item})
        (chunk,) = item.contents
        assert isinstance(chunk, kvp.Chunk)
        assert same_chunk(chunk, HALF)
        assert all(isinstance(value, jax.Array) for value in chunk.kv.values())


def test_changed_arrays_are_refused(folder: Path):
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array_options.saving.use_compression = False
    chunk = chunk_of(tokens=64)
    with context:
        ocp.save_checkpointables(str(folder / "checkpoint"), {"chunk_store": StoreItem(contents=[chunk])})
    needle, count = np.asarray(chunk.kv["k"]).tobytes()[:64], 0
    for path in (folder / "checkpoint").rglob("*"):
        if path.is_file() and needle in (raw := path.read_bytes()):
            flip(path, raw.index(needle))
            count += 1
    assert count == 1
    with ChunkStore(folder / "root") as store:
        for item in (StoreItem(), StoreItem(store)):
            with pytest.raises(StoreCorruptError, match="other bits"):
                ocp.load_checkpointables(str(folder / "checkpoint"), {"chunk_store": item})
        assert not names_of(store)
    with pytest.raises(StoreError, match="No such file"):
        make_durable(folder / "nothing")


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def root(folder: Path) -> Path:
    """Two tenants; the second encrypts."""
    (folder / "key").write_bytes(KEY)
    with (
        ChunkStore(folder / "root", tenant="one") as one,
        ChunkStore(folder / "root", tenant="two", key=KEY) as two,
    ):
        for number in range(3):
            one.put_encoder(f"B{number}", MODEL, OUTPUT)
        two.put_encoder("B", MODEL, OUTPUT)
        two.put_encoder("brief", MODEL, OUTPUT, ttl=1e-6)
    return folder / "root"


def test_objects_are_listed_counted_verified_and_moved(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def call(command: str, *options: str) -> tuple[int, list]:
        status = main([command, *options, str(root), "--json"])
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setattr("kvpatch_jax.store.objects.PAGE", 2)
    status, rows = call("ls")
    assert (status, len(rows), len({(row["tenant"], row["name"]) for row in rows})) == (0, 5, 5)
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in (root / "data").glob("*/*"))
    assert sum(row["expires"] is not None for row in rows) == 1
    _, mine = call("ls", "--tenant=one")
    with ChunkStore(root, tenant="one") as store:
        assert {row["name"] for row in mine} == {store.names.encoder(MODEL, f"B{number}") for number in range(3)}
    (total,), (part,) = call("stat")[1], call("stat", "--tenant=one")[1]
    assert (total["objects"], part["objects"], total["outbox"]) == (5, 3, 0)
    assert part["bytes"] == sum(row["bytes"] for row in mine)
    assert [(row["kind"], row["objects"]) for row in part["usage"]] == [("encoder", 3)]
    assert call("verify") == (0, [{"good": 3, "encrypted": 2, "damaged": 0, "unreadable": 0, "names": []}])
    assert call("collect") == (0, [{"deleted": 1}])

    # A tenant and a root become new roots.
    key, snapshots = f"--key-file={root.parent / 'key'}", [str(root.parent / name) for name in ("tenant", "complete")]
    assert call("verify", "--tenant=two", key)[1][0]["good"] == 1
    assert call("export", "--tenant=two", key, snapshots[0])[1][0]["objects"] == 1
    assert call("export", snapshots[1])[1][0]["objects"] == 4
    assert main(["import", snapshots[1], f"{root}1"]) == 0
    assert main(["import", snapshots[0], f"{root}2", "--tenant=third", key]) == 0
    with ChunkStore(f"{root}1", tenant="one") as one, ChunkStore(f"{root}2", tenant="third", key=KEY) as third:
        assert same(one.get_encoder("B2", MODEL), OUTPUT)
        assert same(third.get_encoder("B", MODEL), OUTPUT)
    assert main(["import", snapshots[0], f"{root}2", "--tenant=third"]) == 2
    capsys.readouterr()

    # The exit status reports damage, which stays until its deletion is asked for.
    with ChunkStore(root, tenant="one") as one, ChunkStore(root, tenant="two", key=KEY) as two:
        paths = [file_of(store.objects, store.names.encoder(MODEL, id)) for store, id in ((one, "B0"), (two, "B"))]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    status, (report,) = call("verify")
    assert (status, report["good"], report["damaged"], len(report["names"])) == (1, 2, 2, 2)
    assert all(path.exists() for path in paths)
    assert call("verify", "--delete")[0] == 1
    assert not any(path.exists() for path in paths)
    assert call("verify")[0] == 0
    assert call("stat")[1][0]["objects"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        "ls ROOT --unknown",
        "ls ROOT/nothing",
        "verify ROOT --tenant=two --key-file=ROOT/nothing",
        "export ROOT ROOT",
    ],
)
def test_a_wrong_call_ends_with_one_line(root: Path, arguments: str, capsys: pytest.CaptureFixture[str]):
    before = sorted(root.iterdir())
    try:
        status = main(arguments.replace("ROOT", str(root)).split())
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("error: ")
    assert sorted(root.iterdir()) == before


def test_prometheus_gets_all_counters_of_a_store(root: Path):
    prometheus_client = pytest.importorskip("prometheus_client")
    with ChunkStore(root, tenant="one") as store:
        registry = prometheus_client.CollectorRegistry()
        registry.register(StoreCollector(lambda: {"acme": store.statistics()}))
        store.get_encoder("B0", MODEL)
        store.get_encoder("unknown", MODEL)
        page = prometheus_client.generate_latest(registry).decode().splitlines()
        counts = store.statistics().counts
        for count, value in counts.items():
            assert f'kvpatch_store_{count}_total{{store="acme"}} {float(value)}' in page
        assert (counts["disk_hits"], counts["misses"]) == (1, 1)
        assert f'kvpatch_store_disk_bytes{{store="acme"}} {float(store.usage().bytes)}' in page
