"""Roots of older libraries are read unchanged; older libraries leave what is new as it is, also on one root at once."""

import json
import os
import random
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_cases import few_bit_patch, ragged_patch, same_leaves, same_packed
from store_cases import BACKBONE, PYTHON, chunk_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, rotate_key
from kvpatch_jax.store.cli.main import main
from tests.goldens import make_store as golden

OLDER = ("1b3a6d7e", "ac517fb6")
"""The last commits without encodings, and without revisions (format 2 of objects)."""
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
from kvpatch_jax.store import Budget, ChunkStore, PatchKey, save_snapshot
from kvpatch_jax.store.cli.main import main

root, other = sys.argv[1:]
with ChunkStore(root, budget=Budget(host=0)) as store:
    found = {"plain": store.get("B", "tiny") is not None, "stream": store.stream("B", "tiny") is not None}
    found["patches"] = len(store.get_patches(PatchKey("B", "tiny", ("A",))))
    found["count"] = store.patch_count("B", "tiny")
    found["collected"] = store.collect()
    found["restored"] = len(store.restore_quarantined().restored)
    found["quarantined"] = store.counters["quarantined"]
    found["newer"] = store.counters["newer"]
found["codes"] = [main([word, "--root=" + root, "--json"]) for word in ("verify", "ls", "gc")]
found["kept"] = main(["gc", "--root=" + root, "--budget=1GB"])
summary = save_snapshot(root, other + "/snapshot", tenant="default")
found["snapshot"] = [summary.objects, summary.newer, summary.damaged]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=OLDER)
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archived(request.param, tmp_path_factory.mktemp("older"))


def archived(commit: str, folder: Path) -> Path:
    """The library of a commit, with its tests' cases."""
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", commit, "kvpatch_jax", "pallas_kernels", "tests/kvpatch_jax/store"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip(f"commit {commit} is not in this clone")
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def environment_of(library: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(library), str(library / "tests/kvpatch_jax/store")])
    return os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_an_older_library_misses_what_is_new_and_leaves_it(tmp_path: Path, older: Path):
    root, chunk = tmp_path / "root", chunk_of(tokens=40)
    packed = kvp.encode_chunk(chunk, "k4v4")
    with ChunkStore(root, budget=Budget(host=0)) as store:
        store.put_many([chunk, packed])
        patches = [patch_of(chunk), few_bit_patch(packed), few_bit_patch(chunk, "int4"), ragged_patch(chunk)]
        store.put_patches(patches)
    before = files_of(root)
    assert len(before) == 6

    command = [PYTHON, "-c", PROGRAM, str(root), str(tmp_path)]
    done = subprocess.run(command, env=environment_of(older), cwd=older, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    verified, found = json.loads(lines[0]), json.loads(lines[-1])
    assert (found["plain"], found["stream"], found["patches"], found["count"]) == (False, False, 0, 4)
    assert found["newer"] >= 3
    assert (found["quarantined"], found["restored"], found["collected"], found["kept"]) == (0, 0, 0, 0)
    assert found["codes"] == [0, 0, 0]
    assert (verified["good"], verified["bad"], verified["left"], verified["unreadable"]) == (0, [], [], [])
    assert len(verified["newer"]) == 6
    assert found["snapshot"] == [0, 6, 0]
    assert files_of(root) == before  # the quarantine's files too, of which there are none
    with ChunkStore(root, budget=Budget(host=0)) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk)
        assert same_packed(store.get("B", BACKBONE, encoding="k4v4"), packed)
        for patch in patches:
            stored = store.get_patches(patch.metadata)
            assert any(one.metadata == patch.metadata and same_leaves(one.factors, patch.factors) for one in stored)


# --------------------------------------------------------------------------------------- two releases on one root

PROCESS = """
import contextlib, io, json, random, sys
import numpy as np
from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.main import main
from store_cases import BACKBONE, chunk_of, patch_of, same, same_chunk

root, own, key = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]) or None
store = ChunkStore(root, key=key, budget=Budget(host=0))
VERSIONS = 3


def put(id, number):
    store.put(chunk_of(id, number))


def put_async(id, number):
    store.put_async(chunk_of(id, number)).result()


def get(id, _=None):
    found = store.get(id, BACKBONE)
    if found is None:
        return None
    return next((number for number in range(VERSIONS) if same_chunk(found, chunk_of(id, number))), "wrong")


def put_patch(id, number):
    store.put_patches([patch_of(chunk_of(id), (f"A{number}",), seed=number)])


def get_patch(id, number):
    made = patch_of(chunk_of(id), (f"A{number}",), seed=number)
    found = store.get_patches(made.metadata)
    return all(same(one.factors["k"][0], made.factors["k"][0]) for one in found) and len(found)


def delete(id, _=None):
    return store.delete(id, BACKBONE)


def put_entry(id, number):
    StaticLibrary(store, quota=1 << 30).put(id, str(number), kind="TEXT")


def get_entry(id, _=None):
    found = StaticLibrary(store, quota=1 << 30).get("TEXT", id)
    return None if found is None else int(found.content)


def collect(*_):
    return store.collect()


def evict(_, nbytes):
    with contextlib.redirect_stdout(io.StringIO()):
        return main(["gc", "--root=" + root, f"--budget={nbytes}"])


def quarantined(*_):
    return store.counters["quarantined"]


def many(seed, steps):
    "Random calls. Names of its own have always what was put last; shared ones any of the versions, or nothing."
    rng, last, wrong = random.Random(seed), {}, []
    for step in range(steps):
        id, number = rng.choice([f"{own}{rng.randrange(4)}", f"shared{rng.randrange(3)}"]), rng.randrange(VERSIONS)
        what = rng.choice([put, put_async, get, get, put_patch, get_patch, delete, collect])
        if what is delete and not id.startswith("shared"):
            continue
        found = what(id, number)
        if what in (put, put_async):
            last[id] = number
        if what is get and (found == "wrong" or (id.startswith(own) and found != last.get(id))):
            wrong.append([step, id, found, last.get(id)])
        if what is get_patch and found not in (0, 1):
            wrong.append([step, id, "patch", found])
    return {"last": {id: number for id, number in last.items() if id.startswith(own)}, "wrong": wrong}


for line in sys.stdin:
    what, id, number = json.loads(line)
    print(json.dumps({"answer": globals()[what](id, number)}), flush=True)
"""


class Release:
    """A process of one version of the library, which does what it is told."""

    def __init__(self, library: Path, root: Path, own: str, key: bytes = b""):
        command = [PYTHON, "-c", PROCESS, str(root), own, key.hex()]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.own = own
        self._process = subprocess.Popen(command, env=environment_of(library), cwd=library, **pipes)

    def tell(self, what: str, id: Any = None, number: int | None = None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, id, number]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())["answer"]

    def do(self, what: str, id: Any = None, number: int | None = None) -> Any:
        self.tell(what, id, number)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archived(OLDER[-1], tmp_path_factory.mktemp("before"))


@pytest.fixture(params=[b"", b"k" * 32], ids=["plain", "encrypted"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, before: Path) -> Iterator[tuple[Release, Release]]:
    """The release before and this one, on one root."""
    (tmp_path / "root").mkdir()
    releases = [Release(before, tmp_path / "root", "old", request.param)]
    releases[0].do("collect")  # one after the other: it has made the root, and the other reads its settings
    releases.append(Release(REPOSITORY, tmp_path / "root", "new", request.param))
    yield releases[0], releases[1]
    for release in releases:
        release.close()


def bytes_of(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "obj").rglob("*.safetensors"))


@pytest.mark.slow
def test_two_releases_take_turns_on_one_root(tmp_path: Path, fleet: tuple[Release, Release]):
    """This one reads all; the one before misses what this one wrote, and may replace or delete it."""
    old, new = fleet
    rng = random.Random(1)
    written: dict[str, tuple[str, int]] = {}
    patches: dict[tuple[str, int], str] = {}
    for step in range(240):
        release, id, number = rng.choice([old, new]), f"I{rng.randrange(4)}", rng.randrange(3)
        what = rng.choice(
            ["put", "put_async", "get", "get", "put_patch", "get_patch", "get_patch", "delete", "collect"]
        )
        found = release.do(what, id, number)
        if what in ("put", "put_async"):
            written[id] = (release.own, number)
        elif what == "put_patch":
            patches[id, number] = release.own
        elif what == "delete":
            written.pop(id, None)
            patches = {name: own for name, own in patches.items() if name[0] != id}
        elif what == "collect":
            assert found == 0
        elif what == "get":
            own, there = written.get(id, ("", None))
            assert found == (None if own == "new" and release is old else there), (step, id)
        else:
            own = patches.get((id, number), "")
            assert found == int(own == "old" or (own == "new" and release is new)), (step, id, number)
    assert len({own for own, _ in written.values()}) == 2, "nothing of one of them is left to be read"
    assert (old.do("quarantined"), new.do("quarantined")) == (0, 0)

    for number in range(12):
        release = (old, new)[number % 2]
        release.do("put", f"X{number}", number % 3)
        written[f"X{number}"] = release.own, number % 3

    # Both count what both wrote: within the budget nothing goes, beyond it only as much as has to.
    total = bytes_of(tmp_path / "root")
    files = files_of(tmp_path / "root")
    for release in (old, new):
        assert release.do("evict", None, total) == 0
        assert files_of(tmp_path / "root") == files
    for number, release in enumerate((old, new), 1):
        budget = total * (3 - number) // 3
        assert release.do("evict", None, budget) == 0
        assert 0 < bytes_of(tmp_path / "root") <= budget
    for id, (own, number) in written.items():
        assert new.do("get", id) in (number, None)
        assert old.do("get", id) in ((number, None) if own == "old" else (None,))


@pytest.mark.slow
def test_two_releases_work_on_one_root_at_once(tmp_path: Path, fleet: tuple[Release, Release]):
    old, new = fleet
    for release in fleet:
        release.tell("many", 7, 250)
    ends = [release.answer() for release in fleet]
    assert [end["wrong"] for end in ends] == [[], []]
    assert (old.do("quarantined"), new.do("quarantined")) == (0, 0)
    files = files_of(tmp_path / "root")
    assert [len(end["last"]) for end in ends] == [4, 4]
    for id, number in ends[0]["last"].items():
        assert (old.do("get", id), new.do("get", id)) == (number, number)
    for id, number in ends[1]["last"].items():
        assert (old.do("get", id), new.do("get", id)) == (None, number)
    assert files_of(tmp_path / "root") == files


@pytest.mark.slow
def test_libraries_of_two_releases(tmp_path: Path, fleet: tuple[Release, Release], request: pytest.FixtureRequest):
    """Plain ones are as chunks. An encrypted one has floors, which the release before cannot read: it stops there."""
    old, new = fleet
    old.do("put_entry", "E", 1)
    assert (old.do("get_entry", "E"), new.do("get_entry", "E")) == (1, 1)
    new.do("put_entry", "F", 2)
    new.do("put_entry", "E", 3)
    assert (new.do("get_entry", "E"), new.do("get_entry", "F")) == (3, 2)
    if request.node.callspec.params["fleet"]:
        old.tell("get_entry", "E")
        with pytest.raises(json.JSONDecodeError):  # it ended by StoreVersionError
            old.answer()
    else:
        assert (old.do("get_entry", "E"), old.do("get_entry", "F")) == (None, None)
    assert new.do("get_entry", "E") == 3


@pytest.mark.slow
def test_the_release_before_stops_while_a_key_is_rotated(tmp_path: Path, before: Path):
    """It does not know that there may be two keys, and changes nothing."""
    root, old_key, new_key = tmp_path / "root", b"k" * 32, b"n" * 32
    root.mkdir()
    old = Release(before, root, "old", old_key)
    assert [old.do("put", id, 1) for id in ("B", "C")] == [None, None]

    def stopped(entries: list[Any]) -> Iterator[Any]:
        yield entries[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rotate_key(root, old=old_key, new=new_key, progress=stopped)
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    again = Release(before, root, "old", old_key)
    for process in (old, again):
        process.tell("put", "D", 1)
        with pytest.raises(json.JSONDecodeError):  # it ended by StoreVersionError
            process.answer()
        process.close()
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == files
    assert rotate_key(root, old=old_key, new=new_key).finished
    with ChunkStore(root, key=new_key, budget=Budget(host=0)) as store:
        assert all(same_chunk(store.get(id, BACKBONE), chunk_of(id, 1)) for id in ("B", "C"))
