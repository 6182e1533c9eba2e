"""A root that the library before encodings wrote is read unchanged; and that library leaves what is new as it is."""

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_cases import few_bit_patch, ragged_patch, same_leaves, same_packed
from store_cases import BACKBONE, PYTHON, chunk_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, save_snapshot
from kvpatch_jax.store.cli.main import main
from tests.goldens import make_store as golden

OLDER = "1b3a6d7e"
"""The last commit without encodings."""
REPOSITORY = Path(__file__).parents[3]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


def metadata_of(raw: bytes) -> dict[str, str]:
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end])["__metadata__"]


def content_of(raw: bytes) -> tuple[Any, ...]:
    """What an object holds, without what differs between the versions of its header."""
    fields = metadata_of(raw)
    names = ("name", "kind", "expires", "crc", "body")
    return (*(fields[name] for name in names), raw[8 + int.from_bytes(raw[:8], "little") :])


# --------------------------------------------------------------------------------------- what an older one wrote


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with zipfile.ZipFile(golden.ZIP) as archive:
        archive.extractall(tmp_path / "root")
    return tmp_path / "root"


def test_an_older_root_is_read_unchanged(root: Path, capsys):
    before = files_of(root)
    assert len(before) == 7
    with ChunkStore(root, budget=Budget(host=0)) as store:
        found = store.get("B", golden.BACKBONE, encoder=True)
        assert same_chunk(found, golden.CHUNK)
        assert found is not None
        assert (found.content, found.encoding) == (golden.CHUNK.content, None)
        assert found.encoder is not None
        assert same(found.encoder, np.asarray(golden.CHUNK.encoder))
        behind = store.get("B", golden.BACKBONE, lead=golden.LEAD)
        assert same_chunk(behind, golden.BEHIND)

        # int8 by the rule of its format: one float32 scale per feature and head.
        reduced = store.get("B", golden.BACKBONE, encoding="int8")
        assert reduced is not None
        for name, value in golden.CHUNK.kv.items():
            wide = np.asarray(value)
            scale = np.abs(wide).max(1, keepdims=True) / np.float32(127)
            assert same(reduced.kv[name], (np.rint(wide / scale).astype(np.int8).astype(np.float32) * scale))

        for patch in golden.PATCHES:
            stored = store.get_patches(patch.metadata)
            assert all(one.metadata == patch.metadata for one in stored)
            assert sum(same_leaves(one.factors, patch.factors) for one in stored) == 1
        assert store.counters["quarantined"] == store.counters["newer"] == 0

        # The same objects, written today, have the same names, bodies and leaves, in another version of the header.
        store.put(golden.CHUNK)
        store.put(golden.CHUNK, encoding="int8")
        store.put(golden.BEHIND)
        store.put_patches(golden.PATCHES)
        after = files_of(root)
        assert after.keys() == before.keys()
        assert [content_of(after[name]) for name in before] == [content_of(raw) for raw in before.values()]
        assert {metadata_of(raw)["version"] for raw in before.values()} == {"1"}
        assert {metadata_of(raw)["version"] for raw in after.values()} == {"2"}
    assert main(["verify", f"--root={root}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["good"], report["bad"], report["newer"]) == (7, [], [])


def test_an_older_root_takes_encoded_objects_beside_its_own(root: Path):
    before = files_of(root)
    with ChunkStore(root, encoding="k4v4", budget=Budget(host=0)) as store:
        assert same_chunk(store.get("B", golden.BACKBONE), golden.CHUNK)
        store.put(golden.CHUNK)
        assert same_packed(store.get("B", golden.BACKBONE), kvp.encode_chunk(golden.CHUNK, "k4v4"))
        assert same_chunk(store.get("B", golden.BACKBONE, encoding="unreduced"), golden.CHUNK)
    after = files_of(root)
    assert len(after) == 8
    assert [content_of(after[name]) for name in before] == [content_of(raw) for raw in before.values()]


# ----------------------------------------------------------------------------------- an older one meets what is new

PROGRAM = """
import json, sys
import kvpatch_jax
from kvpatch_jax.store import Budget, ChunkStore, PatchKey, load_snapshot, save_snapshot
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.snapshots.arrays import export_arrays

root, other = sys.argv[1:]
assert not hasattr(kvpatch_jax, "encode_chunk")
with ChunkStore(root, budget=Budget(host=0)) as store:
    plain = store.get("B", "tiny")
    found = {"plain": plain is not None, "alone": store.get("alone", "tiny") is not None}
    found["stream"] = store.stream("alone", "tiny") is not None
    found["patches"] = [len(store.get_patches(PatchKey("B", "tiny", (id,)))) for id in ("A", "C", "D")]
    found["count"] = store.patch_count("B", "tiny")
    found["collected"] = store.collect()
    found["restored"] = len(store.restore_quarantined().restored)
    found["quarantined"] = store.counters["quarantined"]
    found["newer"] = store.counters["newer"]
    names = store.names.canonical("tiny", "B")
    listed = [entry.path for entry in store.disk.of_chunk(names)]
    found["listed"] = len(listed)
codes = [main([word, "--root=" + root, "--json"]) for word in ("verify", "ls", "du", "gc") if word != "du"]
summary = save_snapshot(root, other + "/snapshot", tenant="default")
found["snapshot"] = [summary.objects, summary.damaged]
with ChunkStore(root, budget=Budget(host=0)) as store:
    exported = export_arrays(store, other + "/export")
    found["export"] = [exported.objects, exported.skipped]
    store.put(plain)
    found["codes"] = codes
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library before encodings, as it was committed."""
    folder = tmp_path_factory.mktemp("older")
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", OLDER, "kvpatch_jax", "pallas_kernels"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip("the commit is not in this clone")
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def run_older(older: Path, *arguments: str) -> Any:
    environment = os.environ | {"PYTHONPATH": str(older), "JAX_PLATFORMS": "cpu"}
    command = [PYTHON, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, cwd=older, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *reports, last = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return reports, json.loads(last)


@pytest.mark.slow
def test_an_older_library_misses_what_is_new_and_leaves_it(tmp_path: Path, older: Path):
    root, chunk = tmp_path / "root", chunk_of(tokens=40)
    packed = kvp.encode_chunk(chunk, "k4v4")
    alone = kvp.encode_chunk(chunk_of("alone", tokens=40), "k6v3g16")
    with ChunkStore(root, budget=Budget(host=0)) as store:
        store.put_many([chunk, packed, alone])
        patches = [patch_of(chunk), few_bit_patch(packed), few_bit_patch(chunk, "int4"), ragged_patch(chunk)]
        patches += [few_bit_patch(chunk, "int3", antecedent=("C",)), few_bit_patch(packed, "int8", antecedent=("D",))]
        store.put_patches(patches)
    before = files_of(root)
    assert len(before) == 9

    reports, found = run_older(older, str(root), str(tmp_path))
    assert found["plain"] is True
    assert (found["alone"], found["stream"]) == (False, False)
    # Of "A" the plain patch: the int4 and the ragged one of that base are of a later version, and those of an encoded
    # base have other names.
    assert found["patches"] == [1, 0, 0]
    assert found["newer"] >= 3
    assert (found["quarantined"], found["restored"], found["collected"]) == (0, 0, 0)
    assert (found["count"], found["listed"]) == (6, 8)
    assert found["codes"] == [0, 0, 0]
    verified = json.loads(reports[0])
    assert (verified["good"], verified["bad"], verified["left"], verified["unreadable"]) == (2, [], [], [])
    assert len(verified["newer"]) == 7
    assert found["snapshot"] == [9, 0]
    assert files_of(root) == before  # the quarantine's files too, of which there are none

    # What the older one saved without looking inside is whole: this version reads it.
    with ChunkStore(root, budget=Budget(host=0)) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk)
        assert same_packed(store.get("B", BACKBONE, encoding="k4v4"), packed)
        assert same_packed(store.get("alone", BACKBONE, encoding="k6v3g16"), alone)
        for patch in patches:
            stored = store.get_patches(patch.metadata)
            assert any(one.metadata == patch.metadata and same_leaves(one.factors, patch.factors) for one in stored)


@pytest.mark.slow
def test_what_is_not_new_is_written_as_the_older_library_reads_it(tmp_path: Path, older: Path):
    """Beside encoded objects, patches of unencoded bases have no field that it does not know."""
    root, chunk = tmp_path / "root", chunk_of(tokens=40)
    with ChunkStore(root, budget=Budget(host=0)) as store:
        store.put(chunk)
        store.put_patches([patch_of(chunk), kvp.quantise(patch_of(chunk), "int8"), patch_of(chunk, ("C",))])
    _, found = run_older(older, str(root), str(tmp_path))
    assert found["patches"] == [2, 1, 0]
    assert (found["newer"], found["quarantined"], found["snapshot"]) == (0, 0, [4, 0])
    assert found["export"] == [4, 0]
    save_snapshot(root, tmp_path / "again", tenant="default")
