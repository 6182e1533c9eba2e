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

from kvpatch_jax.errors import StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from kvpatch_jax.store import Budget, ChunkStore, LocalAdapter, RemoteStore
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk.root_limits import set_limits

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


def link_to_an_index(path: Path) -> None:
    """Of SQLite, in due form, outside."""
    target = path.parent.parent / "outside" / "index"
    other_schema(target)
    path.symlink_to(target)


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
    "absent": replaced(lambda path: None),
    "empty": replaced(lambda path: path.write_bytes(b"")),
    "random bytes": replaced(lambda path: path.write_bytes(NOISE)),
    "cut short": cut,
    "torn": torn,
    "other tables": replaced(other_schema),
    "a trigger": sql("CREATE TRIGGER t AFTER INSERT ON objects BEGIN DELETE FROM objects; END"),
    "a view": sql("CREATE VIEW v AS SELECT * FROM objects"),
    "another form of a table": sql("ALTER TABLE folders ADD COLUMN more TEXT"),
    "a link": replaced(link_outside),
    "a link to SQLite": replaced(link_to_an_index),
    "a FIFO": replaced(fifo),
    "a socket": replaced(listening),
    "a directory": replaced(directory),
    "a link as log": replaced(link_outside, "-wal"),
    "a FIFO as log": replaced(fifo, "-wal"),
    "a directory as log": replaced(directory, "-wal"),
    "noise as log": replaced(lambda path: path.write_bytes(NOISE), "-wal"),
    "a link as shared memory": replaced(link_outside, "-shm"),
    "a FIFO as shared memory": replaced(fifo, "-shm"),
    "noise as shared memory": replaced(lambda path: path.write_bytes(NOISE[: 1 << 15]), "-shm"),
    "files outside": outside_rows,
    "absent objects": absent_rows,
    "sizes as text": sql("UPDATE objects SET size = 'large'"),
    "sizes below zero": sql("UPDATE objects SET size = -1"),
    "sizes beyond all disks": sql("UPDATE objects SET size = ?", 1 << 55),
    "sums beyond all disks": sql("UPDATE usage SET bytes = ?", 1 << 60),
    "sums as text": sql("UPDATE usage SET bytes = 'many'"),
    "sums below zero": sql("UPDATE usage SET bytes = -5, objects = -1"),
    "names as bytes": sql("UPDATE objects SET file = CAST(file AS BLOB)"),
    "folders as bytes": sql("UPDATE folders SET path = CAST(path AS BLOB)"),
    "long names": sql("UPDATE objects SET file = file || ?", "x" * (1 << 20)),
    "no names": sql("UPDATE objects SET file = '../../../../outside/aa/precious.safetensors' || file"),
    "other tenants": sql("UPDATE objects SET tenant = 'x'"),
    "expired all": sql("UPDATE objects SET expires = 1.0"),
    "never used": sql("UPDATE objects SET used = -1e308, turn = 1"),
    "infinite revisions": sql("UPDATE objects SET revision = 9223372036854775807"),
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


@pytest.mark.parametrize("what", ["sums beyond all disks", "absent objects", "sizes beyond all disks"])
def test_nothing_is_evicted_for_sizes_that_only_the_index_has(root: Path, what: str):
    """The budget has room for twice of what is there."""
    held = objects(root)
    INDEXES[what](root)
    with ChunkStore(root, budget=Budget(host=0, disk=2 * sum(held.values()))) as store:
        store.put(chunk_of("new", 9))
        store.put(chunk_of("newer", 10))
    assert set(held) < set(objects(root))


def test_notes_of_evictions_in_the_future_forbid_no_put(root: Path):
    with ChunkStore(root) as store:
        name = store.names.canonical(BACKBONE, "new")
    for since in (1 << 62, "text", -1):
        sql("INSERT OR REPLACE INTO ghosts VALUES(?, ?, ?)", name.path, since, since)(root)
        with ChunkStore(root, budget=Budget(host=0)) as store:
            store.put(chunk_of("new", 9))
            assert same_chunk(store.get("new", BACKBONE), chunk_of("new", 9))
            store.delete("new", BACKBONE)


def test_objects_that_the_index_hides_are_read_and_deleted(root: Path):
    """Their folders' times say that the rows are current."""
    sql("DELETE FROM objects")(root)
    with ChunkStore(root, budget=Budget(host=0)) as store:
        assert same_chunk(store.get("first", BACKBONE), CHUNKS["first"])
        assert store.delete("first", BACKBONE)
        assert store.get("first", BACKBONE) is None
        kept = {store.names.canonical(BACKBONE, name).path for name in ("second", "third")}
    assert set(objects(root)) == kept


def test_an_index_in_a_root_that_cannot_be_written_is_in_memory(root: Path):
    (root / "index.sqlite").unlink()
    (root / "index.sqlite").mkdir()
    with ChunkStore(root, budget=AMPLE) as store:
        store.put(chunk_of("new", 9))
        store.disk.index.refresh()
        assert {one.path: one.size for one in store.disk.index.below("obj")} == objects(root)
    assert list((root / "index.sqlite").iterdir()) == []


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


@pytest.mark.parametrize("make", [fifo, directory, listening, link_outside], ids=lambda make: make.__name__)
def test_irregular_tombstones_cause_no_hang_or_untyped_error(tmp_path: Path, root: Path, make):
    with ChunkStore(root, budget=Budget(host=0)) as store:
        paths = [gone(store, "first"), root / f"{store.names.space}.gone"]
    for path in paths:
        (root.parent / "other").mkdir(exist_ok=True)
        if make is link_outside:
            path.symlink_to(tmp_path / "outside" / "aa" / "precious.safetensors")
        else:
            make(path)
    before = everything(tmp_path / "outside")
    with within(30), ChunkStore(root, budget=Budget(host=0)) as store:
        store.put(CHUNKS["first"])
        assert same_chunk(store.get("first", BACKBONE), CHUNKS["first"])
        with contextlib.suppress(StoreError):
            store.delete("first", BACKBONE)
        assert store.get("first", BACKBONE) is None
        with contextlib.suppress(StoreError):
            store.delete_tenant()
    assert everything(tmp_path / "outside") == before


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


def test_a_deletion_is_sent_by_its_tombstone(tmp_path: Path, root: Path):
    """Also if the outbox's file says something else, or nothing."""
    remote = tmp_path / "remote"
    with ChunkStore(root, remote=remote_at(remote)) as store:
        store.resync()
        assert store.delete("first", BACKBONE)
        store.flush()
        assert not (root / "outbox").exists() or list((root / "outbox").iterdir()) == []
        name = store.names.canonical(BACKBONE, "first")
        assert not [path for path in there(remote) if path.startswith(name.chunk_key)]
        said = json.loads((remote / f"{name.chunk_key}.gone").read_text())["revision"]
        assert said == json.loads(gone(store, "first").read_text())["revision"]


def test_an_outbox_that_is_a_link_is_not_followed(tmp_path: Path, root: Path):
    with ChunkStore(root, remote=remote_at(tmp_path / "remote")) as store:
        store.resync()
    shutil.rmtree(root / "outbox", ignore_errors=True)
    (root / "outbox").symlink_to(tmp_path / "outside" / "aa")
    before = everything(tmp_path / "outside")
    with within(30), ChunkStore(root, remote=remote_at(tmp_path / "remote")) as store:
        for call in (
            lambda: store.put(chunk_of("new", 9)),
            lambda: store.delete("first", BACKBONE),
            store.flush,
            store.delete_tenant,
        ):
            with contextlib.suppress(StoreError):
                call()
    assert everything(tmp_path / "outside") == before


# ---------------------------------------------------------------------------------------------------------- limits

LIMITS = {
    "random bytes": NOISE[:500],
    "nothing": b"",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "other fields": b'{"version": 1, "disk": 5}',
    "text": b'{"version": 1, "disk": "5 GB", "tenant": null, "tenants": {}}',
    "truth": b'{"version": 1, "disk": true, "tenant": null, "tenants": {}}',
    "below zero": b'{"version": 1, "disk": -5, "tenant": null, "tenants": {}}',
    "a fraction": b'{"version": 1, "disk": 1e3, "tenant": null, "tenants": {}}',
    "no number": b'{"version": 1, "disk": NaN, "tenant": null, "tenants": {}}',
    "twice": b'{"version": 1, "disk": 1, "disk": 2, "tenant": null, "tenants": {}}',
    "no share": b'{"version": 1, "disk": null, "tenant": null, "tenants": {"x": null}}',
    "no map": b'{"version": 1, "disk": null, "tenant": null, "tenants": [5]}',
    "version 0": b'{"version": 0, "disk": null, "tenant": null, "tenants": {}}',
    "version true": b'{"version": true, "disk": null, "tenant": null, "tenants": {}}',
    "too many digits": b'{"version": 1, "disk": ' + b"9" * 5000 + b', "tenant": null, "tenants": {}}',
    "too long": b" " * (2 << 20),
}


@pytest.mark.parametrize("what", LIMITS)
def test_limits_that_cannot_be_read_are_a_typed_error_of_puts_alone(root: Path, what: str):
    """Nothing is put or evicted by limits that nobody knows; what is there is read."""
    (root / "LIMITS.json").write_bytes(LIMITS[what])
    held = objects(root)
    with within(30), ChunkStore(root, budget=Budget(host=0)) as store:
        with pytest.raises(StoreCorruptError, match=r"LIMITS\.json"):
            store.put(chunk_of("new", 9))
        assert same_chunk(store.get("first", BACKBONE), CHUNKS["first"])
        set_limits(root, disk="1 GB")  # an operator mends it, and the same store goes on
        store.put(chunk_of("new", 9))
    assert set(held) < set(objects(root))


@pytest.mark.parametrize("make", [fifo, directory, listening, link_outside], ids=lambda make: make.__name__)
def test_irregular_limits_are_a_typed_error_of_puts_alone(root: Path, make):
    make(root / "LIMITS.json")
    with within(30), ChunkStore(root, budget=Budget(host=0)) as store:
        with pytest.raises(StoreError, match=r"LIMITS\.json"):
            store.put(chunk_of("new", 9))
        assert same_chunk(store.get("first", BACKBONE), CHUNKS["first"])
        assert store.delete("first", BACKBONE)


def test_limits_of_a_later_version_are_not_guessed(root: Path):
    (root / "LIMITS.json").write_text('{"version": 2, "disk": {"soft": 1}}')
    with ChunkStore(root) as store, pytest.raises(StoreVersionError, match=r"LIMITS\.json"):
        store.put(chunk_of("new", 9))


def test_a_share_of_nothing_is_no_share_without_limit(root: Path):
    with ChunkStore(root, tenant="guest") as store:
        set_limits(root, disk="1 GB", tenants={store.names.tenant_name: 1})
        with pytest.raises(StoreFullError):
            store.put(chunk_of("new", 9))
        text = (root / "LIMITS.json").read_text()
        (root / "LIMITS.json").write_text(text.replace(": 1}", ": 0}"))
        with pytest.raises(StoreFullError):
            store.put(chunk_of("new", 9))


# ---------------------------------------------------------------------------------------------------------- leases


@pytest.mark.parametrize("folder", [".tmp", ".locks", "leases"])
def test_folders_of_leases_that_are_links_lead_nowhere(tmp_path: Path, root: Path, folder: str):
    """What is old in a folder of unfinished writes is deleted: not what a link leads to."""
    with ChunkStore(root) as store:
        lease = store.lease("first", BACKBONE)
        assert lease is not None
        assert lease.held
        lease.release()
        assert store.lease("first", BACKBONE) is not None
    old = tmp_path / "outside" / "aa" / "precious.safetensors"
    os.utime(old, (1, 1))
    shutil.rmtree(root / folder)
    (root / folder).symlink_to(tmp_path / "outside" / "aa")
    before = everything(tmp_path / "outside")
    with within(30), ChunkStore(root) as store, contextlib.suppress(StoreError):
        store.lease("second", BACKBONE)
    assert everything(tmp_path / "outside") == before


def test_a_lease_that_others_wrote_is_over_or_held_but_no_error(root: Path):
    with ChunkStore(root) as store:
        assert store.lease("first", BACKBONE) is not None
        (path,) = (root / "leases").iterdir()
        for text in (b"", NOISE[:300], b"[]", b'{"owner": 5}', b'{"owner": "x", "deadline": "soon"}', b"[" * 100_000):
            path.write_bytes(text)
            lease = store.lease("first", BACKBONE)
            assert lease is not None
            lease.release()
