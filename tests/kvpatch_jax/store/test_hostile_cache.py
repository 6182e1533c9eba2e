"""Somebody else wrote into what a root keeps beside its objects: its index, tombstones, outbox, limits and leases.

Nothing outside is touched, nothing hangs, every failure is a typed error, and no object is lost for what they say.
"""

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of, same_chunk
from test_hostile_roots import directory, everything, fifo, listening, within

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import Budget, ChunkStore, LocalAdapter, RemoteStore
from kvpatch_jax.store.cli.main import main

CHUNKS = {name: chunk_of(name, seed) for seed, name in enumerate(("first", "second", "third"))}
PATCH = patch_of(CHUNKS["first"])
AMPLE = Budget(host=0, disk="1 GB")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chunks, a patch, and an index that knows them. Outside: a file that nobody may touch."""
    root = tmp_path / "root"
    with ChunkStore(root, budget=AMPLE) as store:
        for chunk in CHUNKS.values():
            store.put(chunk)
        store.put_patches([PATCH])
        store.disk.index.refresh()
    outside = tmp_path / "outside" / "aa"
    outside.mkdir(parents=True)
    (outside / "precious.safetensors").write_bytes(b"nobody's business")
    return root


def objects(root: Path) -> dict[str, int]:
    """Sizes by path, as the directories have them."""
    return {str(path.relative_to(root)): path.stat().st_size for path in (root / "obj").rglob("*.safetensors")}


# ---------------------------------------------------------------------------------------------------------- index


def sql(statement: str, *values: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
            connection.execute(statement, values)
            connection.commit()

    return change


def replaced(make: Callable[[Path], object], end: str = "") -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / f"index.sqlite{end}"
        path.unlink(missing_ok=True)
        make(path)

    return change


def link_outside(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside" / "aa" / "precious.safetensors")


def other_schema(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE objects(x); INSERT INTO objects VALUES(1); CREATE TABLE folders(y)")


def cut(root: Path) -> None:
    os.truncate(root / "index.sqlite", os.path.getsize(root / "index.sqlite") // 2)


def torn(root: Path) -> None:
    """Every page but the first is noise."""
    path = root / "index.sqlite"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(np.random.default_rng(0).bytes(size - 4096))


def outside_rows(root: Path) -> None:
    """Rows in due form of a file outside of the root, with its inode, time and size, first in the order of eviction."""
    stat = (root.parent / "outside" / "aa" / "precious.safetensors").stat()
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
        for number, path in enumerate(("obj/../../outside/aa", "../outside/aa", str(root.parent / "outside" / "aa"))):
            connection.execute("INSERT INTO folders VALUES(?, ?, 'x', 1)", (9000 + number, path))
            connection.execute(
                "INSERT INTO objects VALUES(?, 'precious.safetensors', 'x', 'kv', 1, ?, 1, 1.0, 1.0, ?, ?)",
                (9000 + number, stat.st_size, stat.st_ino, stat.st_mtime_ns),
            )
        connection.commit()


def absent_rows(root: Path) -> None:
    """A hundred objects that do not exist, each of a gigabyte."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
        number, tenant = connection.execute("SELECT id, tenant FROM folders").fetchone()
        for value in range(100):
            connection.execute(
                "INSERT INTO objects VALUES(?, ?, ?, 'kv', 3, ?, 1, NULL, 1.0, 1, 1)",
                (number, f"{value:064x}.kv.safetensors", tenant, 1 << 30),
            )
        connection.commit()


NOISE = np.random.default_rng(1).bytes(1 << 16)
INDEXES: dict[str, Callable[[Path], None]] = {
    "random bytes": replaced(lambda path: path.write_bytes(NOISE)),
    "torn": torn,
    "other tables": replaced(other_schema),
    "a trigger": sql("CREATE TRIGGER t AFTER INSERT ON objects BEGIN DELETE FROM objects; END"),
    "a link": replaced(link_outside),
    "a FIFO as log": replaced(fifo, "-wal"),
    "files outside": outside_rows,
    "absent objects": absent_rows,
    "sizes beyond all disks": sql("UPDATE objects SET size = ?", 1 << 55),
    "names as bytes": sql("UPDATE objects SET file = CAST(file AS BLOB)"),
    "no names": sql("UPDATE objects SET file = '../../../../outside/aa/precious.safetensors' || file"),
    "other tenants": sql("UPDATE objects SET tenant = 'x'"),
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_others_wrote_costs_nothing_but_time(tmp_path: Path, root: Path, what: str, capsys):
    """Everything is found, listed, counted and deleted as the files say, and nothing is evicted for it."""
    INDEXES[what](root)
    before, held = everything(tmp_path / "outside"), objects(root)
    with within(60):
        with ChunkStore(root, budget=AMPLE) as store:
            store.put(chunk := chunk_of("new", 9))
            assert len(store.get_patches(PATCH.metadata)) <= 1  # a row of another name hides it until `ls`
            assert store.collect() == 0
            for wanted in (*CHUNKS.values(), chunk):
                assert same_chunk(store.get(wanted.id, BACKBONE), wanted), wanted.id
            assert set(held) < set(objects(root))
            assert store.delete("third", BACKBONE)
            assert store.get("third", BACKBONE) is None
            store.put(CHUNKS["third"])  # whatever revision it was said to have
            assert same_chunk(store.get("third", BACKBONE), CHUNKS["third"])
        assert main(["ls", f"--root={root}", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["objects"]
        assert main(["stat", f"--root={root}", "--json"]) == 0
        sums = json.loads(capsys.readouterr().out)
    there = objects(root)
    assert len(there) == 5
    assert {each["path"]: each["nbytes"] for each in listed} == there, listed
    assert (sums["objects"], sums["bytes"]) == (5, sum(there.values())), sums
    assert everything(tmp_path / "outside") == before
    with ChunkStore(root, budget=AMPLE) as store:
        assert len(store.get_patches(PATCH.metadata)) == 1


# ------------------------------------------------------------------------------------------------------ tombstones


def gone(store: ChunkStore, id: str) -> Path:
    name = store.names.canonical(BACKBONE, id)
    return Path(store.disk.root) / f"{name.chunk_key}.gone"


def test_forged_tombstones_neither_forbid_puts_nor_hide_objects(tmp_path: Path, root: Path):
    """Without a signature, another chunk's, another tenant's, of another revision, or of a whole tenant."""
    with ChunkStore(root) as store, ChunkStore(root, tenant="other") as other:
        other.put(CHUNKS["first"])
        other.delete("first", BACKBONE)
        store.put(spare := chunk_of("spare", 8))
        store.delete("spare", BACKBONE)
        true = json.loads(gone(store, "spare").read_bytes())
        late = {"revision": 1 << 62}
        texts = [
            json.dumps(late),
            json.dumps(late | {"signature": true["signature"]}),
            json.dumps(true),
            gone(other, "first").read_text(),
            "[" * 4000,
            "{}",
            '{"revision": true, "signature": null}',
            "x" * 9000,
        ]
        for text in texts:
            for path in (gone(store, "first"), root / f"{store.names.space}.gone"):
                path.write_text(text)
            with ChunkStore(root, budget=Budget(host=0)) as reader:
                assert same_chunk(reader.get("first", BACKBONE), CHUNKS["first"])
                reader.put(CHUNKS["first"])
                assert same_chunk(reader.get("first", BACKBONE), CHUNKS["first"])
        assert store.get("spare", BACKBONE) is None
        store.put(spare)
        assert same_chunk(store.get("spare", BACKBONE), spare)


# ---------------------------------------------------------------------------------------------------------- outbox


def remote_at(path: Path) -> RemoteStore:
    return RemoteStore(LocalAdapter(path))


def there(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in (path / "obj").rglob("*.safetensors")}


def test_an_outbox_that_others_wrote_destroys_nothing_in_the_remote_store(tmp_path: Path, root: Path):
    """Deletions without a signed tombstone, damage, other names, other kinds of files: nothing is deleted or hangs."""
    remote, outbox = tmp_path / "remote", root / "outbox"
    with ChunkStore(root, remote=remote_at(remote)) as store:
        store.resync()
        names = {name: store.names.canonical(BACKBONE, name) for name in CHUNKS}
    whole = there(remote)
    assert len(whole) == 4
    kept = everything(remote / "obj")

    def file(name: str, end: str = ".kv.safetensors") -> Path:
        _, tenant, backbone, _ = names[name].folder.split("/")
        return outbox / f"{tenant}.{backbone}.{names[name].chunk}{end}"

    tenant = names["first"].tenant
    file("first", ".gone").write_text(f"{1 << 62}\n")
    file("second", ".gone").write_text('{"revision": 99999999999999999999}')
    file("first").write_bytes(b"damaged")
    shutil.copy(root / names["first"].path, file("second"))  # under another's name
    os.truncate(file("third"), 1 << 40) if file("third").exists() else file("third").touch()
    for number, make in enumerate((fifo, directory, listening)):
        path = outbox / file("first").name.replace(names["first"].chunk, f"{number:064x}")
        make(path)
    (outbox / file("first", f".p.{'a' * 40}.{'b' * 40}.safetensors").name).symlink_to(root / names["first"].path)
    for name in (f"{tenant}.new-dead", f"{tenant}.../../x.gone", "x", f"{tenant}..gone", "0" * 300):
        with contextlib.suppress(OSError):
            (outbox / name).write_bytes(b"x")

    with within(60), ChunkStore(root, remote=remote_at(remote)) as store:
        with contextlib.suppress(StoreError):
            store.flush()
        store.put(new := chunk_of("new", 9))
        store.flush()
        assert store.statistics().gauges["outbox_objects"] >= 0
    assert there(remote) - whole == {store.names.canonical(BACKBONE, "new").path}
    assert {path: text for path, text in everything(remote / "obj").items() if path in kept} == kept
    with ChunkStore(tmp_path / "elsewhere", secret=secret_of(root), remote=remote_at(remote)) as other:
        for chunk in (*CHUNKS.values(), new):
            assert same_chunk(other.get(chunk.id, BACKBONE), chunk), chunk.id


def secret_of(root: Path) -> bytes:
    return bytes.fromhex(json.loads((root / "STORE.json").read_text())["secret"])


# ---------------------------------------------------------------------------------------------------------- limits

# ---------------------------------------------------------------------------------------------------------- leases
