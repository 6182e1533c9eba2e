"""What a later version of the library wrote is a miss here, and is left as it is."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from store_cases import BACKBONE, chunk_of, file_of, name_of, patch_of, same, same_chunk

from kvpatch_jax.errors import StoreError, StoreSnapshotError, StoreVersionError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    DynamicLibrary,
    KeyValueStore,
    StaticLibrary,
    load_snapshot,
    save_snapshot,
)
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk.eviction import make_room
from kvpatch_jax.store.format.header import PAGE
from kvpatch_jax.store.snapshots.manifest import read_list, write_list

KEY = b"k" * 32
CHUNK = chunk_of()
PATCH = patch_of(CHUNK)

type Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Changes an object's header and its body, in place."""


def rewritten(raw: bytes, change: Change) -> bytes:
    """An object with another header, whose checksum is right."""
    end = 8 + int.from_bytes(raw[:8], "little")
    tree = json.loads(raw[8:end])
    body = json.loads(tree["__metadata__"]["body"])
    change(tree, body)
    tree["__metadata__"]["body"] = json.dumps(body)
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    new, at = len(text).to_bytes(8, "little") + text, 8 + len(b'{"__metadata__":{"header_crc":"')
    blank = new[:at] + b"0" * 8 + new[at + 8 :]
    return new[:at] + b"%08x" % zlib.crc32(blank) + new[at + 8 :] + raw[end:]


def version(tree: dict[str, Any], body: dict[str, Any]) -> None:
    """A later version, whose objects only its own readers understand."""
    tree["__metadata__"].update(version="3", reader="3")


def readable(tree: dict[str, Any], body: dict[str, Any]) -> None:
    """A later version, whose objects this one understands: only metadata are new."""
    first, *rest = tree["__metadata__"].items()
    fields = dict([first, ("early", "a field"), *rest, ("late", "another")]) | {"version": "3"}
    tree["__metadata__"] = fields


def inside(*way: str, **fields: Any) -> Change:
    """Adds or replaces fields somewhere in a body."""

    def change(tree: dict[str, Any], body: dict[str, Any]) -> None:
        for word in way:
            body = body[word]
        body.update(fields)

    return change


def dtype(tree: dict[str, Any], body: dict[str, Any]) -> None:
    leaf = next(name for name in tree if name not in ("__metadata__", "local"))
    tree[leaf]["dtype"] = "F8_E8M0"


def leaf(tree: dict[str, Any], body: dict[str, Any]) -> None:
    renamed = {"local.extra" if name == "local" else name: entry for name, entry in tree.items()}
    renamed["__metadata__"]["crc"] = renamed["__metadata__"]["crc"].replace("local=", "local.extra=")
    tree.clear()
    tree.update(renamed)


COMMON: dict[str, Change] = {
    "version": version,
    "required feature": lambda tree, body: tree["__metadata__"].update(requires="sparse leaves"),
    "dtype": dtype,
    "body": inside(compression="zstd"),
}
CANONICAL = COMMON | {
    "layout": inside("layout", shared_layers=[0, 1]),
    "rope": inside("layout", "rope", base_per_layer=[1.0]),
    "word of the rope": inside("layout", "rope", cached="interleaved"),
    "kind of layout": inside("layout", kind="latent-2"),
    "dtype of a channel": inside("dtypes", k="float4_e2m1fn"),
    "leaf": leaf,
}
CONDITIONED = COMMON | {
    "metadata": inside("stamp", temperature=0.5),
    "frame": inside("stamp", frame="rotated twice"),
    "base": inside("stamp", base="merged"),
    "member": inside("stamp", members=[["A", None, "exact", "another field"]]),
    "form": inside("forms", k=["u", "w", "v"]),
    "layout": inside("stamp", "layout", shared_layers=[0, 1]),
}
CASES = [("kv", name) for name in CANONICAL] + [("patch", name) for name in CONDITIONED]
CASES += [("encoder", name) for name in COMMON]


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


def shelf(store: ChunkStore) -> dict[str, tuple[Path, Callable[[], object]]]:
    """One object of each kind, with what reads it."""
    store.put(CHUNK)
    store.put_encoder("B", BACKBONE, np.ones((3, 7), np.float32))
    store.put_patches([PATCH])
    root = Path(store.disk.root)
    return {
        "kv": (file_of(store, CHUNK), lambda: store.get("B", BACKBONE)),
        "patch": (root / store.names.patch(PATCH).path, lambda: store.get_patches(PATCH.metadata) or None),
        "encoder": (root / store.names.encoder(BACKBONE, "B").path, lambda: store.get_encoder("B", BACKBONE)),
    }


def files_of(root: Path) -> dict[str, bytes]:
    """Every object and entry of a root, its quarantine included."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


@pytest.mark.parametrize("kind", ["kv", "patch", "encoder"])
def test_an_object_of_a_later_version_that_this_one_understands_is_read(store: ChunkStore, kind: str, capsys):
    path, read = shelf(store)[kind]
    good = read()
    path.write_bytes(rewritten(path.read_bytes(), readable))
    before = files_of(Path(store.disk.root))
    found = read()
    if kind == "kv":
        assert same_chunk(found, good)  # pyright: ignore[reportArgumentType]
        stream = store.stream("B", BACKBONE)
        assert stream is not None
        assert [layer for layer, _ in stream] == [0, 1, 2]
    elif kind == "patch":
        assert [patch.metadata for patch in found] == [PATCH.metadata]  # pyright: ignore
    else:
        assert same(found, np.ones((3, 7), np.float32))
    assert store.counters["newer"] == 0
    assert store.collect() == 0
    assert main(["verify", f"--root={store.disk.root}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["good"] == 3
    assert files_of(Path(store.disk.root)) == before


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_what_a_library_and_a_remote_store_hold_of_such_a_version_is_read(tmp_path: Path, key: bytes | None):
    remote = KeyValueStore({"driver": "file", "path": f"{tmp_path}/remote/"})
    more: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote, "key": key, "budget": Budget(host=0)}
    more["write_behind"] = False
    with ChunkStore(tmp_path / "one", **more) as one:
        one.put(CHUNK)
        StaticLibrary(one, quota=1 << 20).put("NAME", "a text", kind="TEXT")
        for path in [*(tmp_path / "one").rglob("*.entry.safetensors"), *(tmp_path / "one").rglob("*.floor")]:
            path.write_bytes(rewritten(path.read_bytes(), readable))
        path = tmp_path / "remote" / name_of(one, CHUNK).path
        path.write_bytes(raw := rewritten(path.read_bytes(), readable))
        found = StaticLibrary(one, quota=1 << 20).get("TEXT", "NAME")
        assert found is not None
        assert found.content == "a text"
    with ChunkStore(tmp_path / "two", **more) as two:
        assert same_chunk(two.get("B", BACKBONE), CHUNK)
        assert path.read_bytes() == raw
        # The copy on the disk is of this version: it has the content, not what only the later version knows.
        copy = file_of(two, CHUNK).read_bytes()
        assert b'"version":"2"' in copy
        assert copy[-1000:] == raw[-1000:]
        assert same_chunk(two.get("B", BACKBONE), CHUNK)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_newer_object_is_a_miss_and_stays(store: ChunkStore, kind: str, case: str, capsys):
    changes = {"kv": CANONICAL, "patch": CONDITIONED, "encoder": COMMON}[kind]
    path, read = shelf(store)[kind]
    path.write_bytes(rewritten(path.read_bytes(), changes[case]))
    before = files_of(Path(store.disk.root))

    assert read() is None
    assert store.counters["newer"] > 0
    assert store.stream("B", BACKBONE) is None or kind != "kv"
    assert store.collect() == 0
    assert main(["verify", f"--root={store.disk.root}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], found["bad"], found["newer"]) == (2, [], [str(path.relative_to(store.disk.root))])
    assert main(["gc", f"--root={store.disk.root}"]) == 0
    assert main(["ls", f"--root={store.disk.root}"]) == 0
    assert files_of(Path(store.disk.root)) == before


def test_damage_of_a_newer_object_is_damage(store: ChunkStore):
    """A flip in its header is no other version: the checksum of the header is the same in all versions."""
    path, read = shelf(store)["kv"]
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"version":"2"') + 11] ^= 1  # "3"
    path.write_bytes(raw)
    assert read() is None
    assert not path.exists()
    assert store.counters["newer"] == 0


def test_a_newer_object_is_evicted_as_any_other(tmp_path: Path):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        store.put(CHUNK)
        path = file_of(store, CHUNK)
        path.write_bytes(rewritten(path.read_bytes(), version))
        size = path.stat().st_size
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=int(size * 1.5))) as store:
        store.put(chunk_of("C"))
        assert not path.exists()
        assert same_chunk(store.get("C", BACKBONE), chunk_of("C"))


def test_a_newer_object_counts_for_budgets_and_stays_where_it_fits(tmp_path: Path, capsys):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        for id in ("B", "C"):
            store.put(chunk_of(id))
        path, other = file_of(store, CHUNK), file_of(store, chunk_of("C"))
        path.write_bytes(raw := rewritten(path.read_bytes(), version))
        sizes = path.stat().st_size + other.stat().st_size
        assert make_room(store.disk, sizes, 0, lambda chunk: False) == sizes
        os.utime(path)  # used last
        make_room(store.disk, sizes - 1, 0, lambda chunk: False)
        assert not other.exists()
    assert path.read_bytes() == raw
    assert main(["stat", f"--root={tmp_path}", "--json", "--deep"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objects"], found["bytes"], found["newer"], found["unreadable"]) == (1, len(raw), 1, 0)


def test_the_times_of_a_newer_objects_file_do_not_expire_it(store: ChunkStore):
    """The header decides, and this version cannot read it."""
    path, read = shelf(store)["kv"]
    store.put(CHUNK, ttl=1e-6)
    path.write_bytes(rewritten(path.read_bytes(), version))
    os.utime(path, ns=(10**18, 10**18))
    before = files_of(Path(store.disk.root))
    assert store.collect() == 0
    assert read() is None
    assert files_of(Path(store.disk.root)) == before


def test_neither_examination_nor_quarantine_takes_a_newer_object(store: ChunkStore):
    path, _ = shelf(store)["kv"]
    good = path.read_bytes()
    path.write_bytes(raw := rewritten(good, version))
    before = files_of(Path(store.disk.root))
    with pytest.raises(StoreVersionError):
        store.disk.examine(name_of(store, CHUNK))
    assert files_of(Path(store.disk.root)) == before

    # One that an older library moved to quarantine stays there, and is neither damaged nor put back.
    path.write_bytes(good)
    status = path.stat()
    assert store.disk.quarantine(
        name_of(store, CHUNK), (status.st_ino, status.st_ctime_ns, status.st_size), "a test", certain=True
    )
    (aside,) = (path for path in Path(store.disk.root, "quarantine").iterdir() if path.suffix == ".safetensors")
    aside.write_bytes(raw)
    found = store.restore_quarantined()
    assert (len(found.newer), found.damaged, found.restored) == (1, [], [])
    assert aside.read_bytes() == raw


def test_deleting_a_chunk_deletes_what_is_newer_of_it_too(store: ChunkStore):
    for path, _ in shelf(store).values():
        path.write_bytes(rewritten(path.read_bytes(), version))
    assert store.delete("B", BACKBONE)
    assert files_of(Path(store.disk.root)) == {}


def test_a_put_replaces_a_newer_object(store: ChunkStore):
    path, read = shelf(store)["kv"]
    path.write_bytes(rewritten(path.read_bytes(), version))
    assert read() is None
    store.put(CHUNK)
    assert same_chunk(store.get("B", BACKBONE), CHUNK)


def test_a_newer_remote_object_is_a_miss_and_stays(tmp_path: Path, capsys):
    spec = {"driver": "file", "path": f"{tmp_path}/remote/"}
    for case, change in (CANONICAL | {"newer": version}).items():
        remote = KeyValueStore(spec)
        more: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote, "budget": Budget(host=0)}
        more["write_behind"] = False
        with ChunkStore(tmp_path / case, **more) as one, ChunkStore(tmp_path / f"{case} too", **more) as two:
            one.put(CHUNK)
            path = tmp_path / "remote" / name_of(one, CHUNK).path
            raw = rewritten(path.read_bytes(), change)
            path.write_bytes(raw)
            assert two.get("B", BACKBONE) is None, case
            assert two.stream("B", BACKBONE) is None, case
            assert two.counters["remote_damaged"] == 0
            two.collect()
            assert main(["gc", f"--root={two.disk.root}", f"--remote={json.dumps(spec)}"]) == 0
            assert main(["verify", f"--root={two.disk.root}", f"--remote={json.dumps(spec)}", "--yes"]) == 0
            assert path.read_bytes() == raw, case
    capsys.readouterr()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_remote_copy_does_not_replace_a_newer_object(tmp_path: Path, key: bytes | None):
    remote = KeyValueStore({"driver": "memory", "path": "store/"}, context=tensorstore.Context())
    with ChunkStore(tmp_path, remote=remote, write_behind=False, key=key, budget=Budget(host=0)) as store:
        store.put(CHUNK)
        path = file_of(store, CHUNK)
        raw = rewritten(path.read_bytes(), version if key is None else inside(sealed=2))
        path.write_bytes(raw)
        assert same_chunk(store.get("B", BACKBONE), CHUNK)
        assert path.read_bytes() == raw


def test_a_sealed_object_of_a_newer_encryption_is_a_miss_and_stays(tmp_path: Path):
    with ChunkStore(tmp_path, key=KEY, budget=Budget(host=0)) as store:
        store.put(CHUNK)
        path = file_of(store, CHUNK)
        good = path.read_bytes()
        for change in (inside(sealed=2), inside(cipher="another")):
            raw = rewritten(good, change)
            path.write_bytes(raw)
            assert store.get("B", BACKBONE) is None
            assert path.read_bytes() == raw


# ------------------------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize(
    "change",
    [version, inside(license="MIT"), inside(content="video"), inside(kind="VIDEO")],
    ids=["version", "field", "content", "kind"],
)
def test_a_newer_entry_is_a_miss_and_stays(store: ChunkStore, change: Change, capsys):
    static, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
    static.put("NAME", "a text", kind="TEXT")
    for content in ("one", "two"):
        dynamic.publish("NAME", content, kind="TEXT")
    root = Path(store.disk.root)
    for path in (root / "lib").rglob("*.safetensors"):
        path.write_bytes(rewritten(path.read_bytes(), change))
    before = files_of(root)
    static, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
    assert static.get("TEXT", "NAME") is None
    assert static.entries() == []
    assert dynamic.open("TEXT", "NAME") is None
    assert dynamic.entries() == []
    assert static.collect() == 0
    assert main(["verify", f"--root={root}", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["newer"]) == len(before)
    assert files_of(root) == before


def test_a_library_with_a_newer_floor_is_neither_read_nor_changed(tmp_path: Path):
    with ChunkStore(tmp_path, key=KEY) as store:
        StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
        (floor,) = tmp_path.rglob("*.floor")
    raw = rewritten(floor.read_bytes(), version)
    floor.write_bytes(raw)
    with ChunkStore(tmp_path, key=KEY) as store:
        library = StaticLibrary(store, quota=1 << 20)
        with pytest.raises(StoreVersionError):
            library.get("TEXT", "NAME")
        with pytest.raises(StoreVersionError):
            library.put("NAME", "another text", kind="TEXT")
    assert floor.read_bytes() == raw


# ------------------------------------------------------------------------------------------- snapshots, settings


def later_version(tree: dict[str, Any], body: dict[str, Any]) -> None:
    tree["__metadata__"].update(version="900", reader="900")


@pytest.mark.parametrize("change", [later_version, inside(compression="zstd")], ids=["version", "body"])
@pytest.mark.parametrize("copy", [False, True], ids=["linked", "copied"])
def test_a_snapshot_carries_newer_objects_and_a_restore_leaves_them(
    store: ChunkStore, tmp_path: Path, change: Change, copy: bool
):
    path, _ = shelf(store)["kv"]
    root = Path(store.disk.root)
    raw = rewritten(path.read_bytes(), change)
    path.write_bytes(raw)
    before = files_of(root)
    found = save_snapshot(root, tmp_path / "snapshot", tenant="default", copy=copy)
    assert (found.objects, found.newer, found.damaged) == (3, 0, 0)
    assert files_of(tmp_path / "snapshot") == files_of(root) == before

    # Under the same names, byte for byte, as a miss that stays.
    secret = store.names.secret
    found = load_snapshot(tmp_path / "snapshot", tmp_path / "into", tenant="default", secret=secret, copy=copy)
    assert (found.objects, found.newer, found.skipped) == (3, 0, 0)
    assert files_of(tmp_path / "into") == before
    with ChunkStore(tmp_path / "into", secret=secret, budget=Budget(host=0)) as into:
        assert into.get("B", BACKBONE) is None
        assert into.counters["newer"] > 0
        assert into.get_encoder("B", BACKBONE) is not None
    assert files_of(tmp_path / "into") == before
    assert load_snapshot(tmp_path / "snapshot", root, tenant="default").skipped == 3
    assert files_of(root) == before

    # Under other names only what this version can name: a body with more fields is written again with all of them.
    found = load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="default")
    assert (found.objects, found.newer, found.skipped) == ((2, 1, 0) if change is later_version else (3, 0, 0))
    assert raw not in files_of(tmp_path / "other").values()
    with ChunkStore(tmp_path / "other", budget=Budget(host=0)) as other:
        assert other.get("B", BACKBONE) is None
        assert other.get_encoder("B", BACKBONE) is not None


@pytest.mark.parametrize("word", ["objects", "newer"])
def test_a_newer_object_of_a_snapshot_is_verified(store: ChunkStore, tmp_path: Path, word: str):
    """By the whole file's checksum, where the snapshot says that it is newer; otherwise only its header can be."""
    path, _ = shelf(store)["kv"]
    path.write_bytes(rewritten(path.read_bytes(), later_version))
    name, root = str(path.relative_to(store.disk.root)), tmp_path / "into"
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default", copy=True)
    brought = tmp_path / "snapshot" / name
    good = brought.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    if word == "objects":  # as the later version itself lists it
        listed = read_list(str(tmp_path / "snapshot" / "MANIFEST"))
        listed["objects"].append([name, len(good), f"{zlib.crc32(good[:end]):08x}"])
        listed["newer"] = []
        (tmp_path / "snapshot" / "MANIFEST").unlink()
        write_list(str(tmp_path / "snapshot" / "MANIFEST"), listed)
    more: dict[str, Any] = {"tenant": "default", "secret": store.names.secret}
    found = load_snapshot(tmp_path / "snapshot", root, **more)
    assert (found.objects, found.newer) == ((2, 1) if word == "objects" else (3, 0))

    for at in (end - 5, len(good) - 1) if word == "newer" else (end - 5,):
        raw = bytearray(good)
        raw[at] ^= 1
        brought.unlink()
        brought.write_bytes(raw)
        with pytest.raises(StoreSnapshotError) as caught:
            load_snapshot(tmp_path / "snapshot", tmp_path / "no", **more)
        assert len(caught.value.bad) == 1
        assert files_of(tmp_path / "no") == {}
        assert load_snapshot(tmp_path / "snapshot", tmp_path / f"some{at}", skip_damaged=True, **more).damaged == 1


def test_a_restore_leaves_newer_entries_out_where_they_must_be_counted(store: ChunkStore, tmp_path: Path):
    StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
    (path,) = Path(store.disk.root, "lib").rglob("*.entry.safetensors")
    path.write_bytes(rewritten(path.read_bytes(), later_version))
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    more: dict[str, Any] = {"tenant": "default", "secret": store.names.secret}
    for name, budget, expected in (("free", None, (1, 0)), ("counted", Budget(library=1 << 20), (0, 1))):
        found = load_snapshot(tmp_path / "snapshot", tmp_path / name, budget=budget, **more)
        assert (found.objects, found.newer) == expected


def test_a_root_with_newer_settings_is_not_opened_and_stays(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        store.put(CHUNK)
    text = json.dumps({"version": 3, "secrets": ["another form"]})
    for name in ("STORE.json", "STORE.copy.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(StoreVersionError):
        ChunkStore(tmp_path)
    (tmp_path / "STORE.copy.json").unlink()
    with pytest.raises(StoreError):
        ChunkStore(tmp_path)
    assert (tmp_path / "STORE.json").read_text() == text
    assert not (tmp_path / "STORE.copy.json").exists()
