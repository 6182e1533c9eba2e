"""What the version before revisions wrote (format 1 of objects) is read bit for bit: roots, snapshots, exports, KEY."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packed_cases import same_leaves, same_packed
from store_cases import same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.errors import StoreKeyError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot, rotate_key
from kvpatch_jax.store.cli.main import main
from tests.goldens import make_store as golden

KEYS = {"default": None, "sealed": golden.KEY}


@pytest.fixture
def before(tmp_path: Path) -> Path:
    with zipfile.ZipFile(golden.REVISIONS) as archive:
        archive.extractall(tmp_path / "before")
    return tmp_path / "before"


def opened(root: Path, tenant: str, key: bytes | None = None) -> ChunkStore:
    return ChunkStore(root, tenant=tenant, key=key or KEYS[tenant], budget=Budget(host=0))


def expect_all(store: ChunkStore) -> None:
    """Everything of `make_store.write_revisions`."""
    found = store.get("B", golden.BACKBONE, encoder=True)
    assert same_chunk(found, golden.CHUNK)
    assert found is not None
    assert found.encoder is not None
    assert same(found.encoder, np.asarray(golden.CHUNK.encoder))
    assert same_chunk(store.get("B", golden.BACKBONE, lead=golden.LEAD), golden.BEHIND)
    assert same_packed(store.get("B", golden.BACKBONE, encoding="k4v4"), kvp.encode_chunk(golden.CHUNK, "k4v4"))
    assert store.get("B", golden.BACKBONE, encoding="int8") is not None
    for patch in golden.PATCHES:
        stored = store.get_patches(patch.metadata)
        assert sum(same_leaves(one.factors, patch.factors) for one in stored) == 1
    text = StaticLibrary(store, quota=1 << 20).get("TEXT", "NAME")
    reference = DynamicLibrary(store).open("TEXT", "NAME")
    assert text is not None
    assert reference is not None
    assert (text.content, reference.resource.content) == ("a text", "two")
    assert store.counters["quarantined"] == store.counters["newer"] == store.counters["unsealed"] == 0


def objects_of(root: Path) -> dict[str, bytes]:
    paths = [*root.rglob("*.safetensors"), *root.rglob("*.floor")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("tenant", KEYS)
def test_a_root_is_read_and_left(before: Path, tenant: str, capsys):
    root = before / "root"
    objects = objects_of(root)
    assert all(b'"version":"1"' in raw for raw in objects.values())
    with opened(root, tenant) as store:
        expect_all(store)
        assert store.collect() == 0
    assert objects_of(root) == objects
    assert main(["verify", f"--root={root}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], found["unopened"], found["bad"], found["newer"]) == (10, 10, [], [])


@pytest.mark.parametrize("tenant", KEYS)
def test_what_is_put_again_is_of_this_version(before: Path, tenant: str):
    root = before / "root"
    with opened(root, tenant) as store:
        golden.put_all(store)
        StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
        expect_all(store)
        space, libraries = store.names.space, store.names.libraries
    own = [raw for path, raw in objects_of(root).items() if path.startswith((space, libraries))]
    assert sum(b'"version":"2"' in raw for raw in own) >= 8


def test_its_bare_key_is_upgraded_and_can_be_rotated(before: Path):
    root = before / "root"
    (check,) = root.rglob("KEY")
    copy = check.with_name("KEY.copy")
    assert len(check.read_bytes()) == 32
    with pytest.raises(StoreKeyError):
        opened(root, "sealed", b"o" * 32)
    assert len(check.read_bytes()) == 32
    good = copy.read_bytes()
    opened(root, "sealed").close()
    assert check.read_bytes() == copy.read_bytes() == good
    report = rotate_key(root, "sealed", old=golden.KEY, new=b"n" * 32)
    assert (report.objects, report.finished) == (12, True)
    with opened(root, "sealed", b"n" * 32) as store:
        expect_all(store)


@pytest.mark.parametrize(("tenant", "directory"), [("default", "snapshot"), ("sealed", "sealed_snapshot")])
def test_a_snapshot_is_restored(before: Path, tmp_path: Path, tenant: str, directory: str):
    found = load_snapshot(before / directory, tmp_path / "new", tenant=tenant, key=KEYS[tenant])
    assert (found.objects, found.damaged) == (10, 0)
    with opened(tmp_path / "new", tenant) as store:
        expect_all(store)


def test_an_export_is_imported(before: Path, tmp_path: Path):
    with opened(tmp_path / "new", "default") as store:
        assert load_snapshot(before / "export", tmp_path / "new", tenant="default").damaged == 0
        expect_all(store)
