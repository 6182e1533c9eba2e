"""Libraries: what is put comes back, quotas, expiry, deletion; versions while they are read; other processes."""

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of, same, same_chunk

from kvpatch_jax.errors import DtypeError, InputError, LibraryFullError, NotFiniteError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, HeldReference, StaticLibrary, chunk_id

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        yield store


def opened(library: DynamicLibrary, kind: str, name: str, version: int | None = None) -> HeldReference:
    held = library.open(kind, name, version)
    assert held is not None
    return held


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


# -------------------------------------------------------------------------------------------------------- static


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("text ü", "TEXT"),
        (PIXELS, "IMAGE"),
        (png(PIXELS), "IMAGE"),
        (b"%PDF-", "FILE"),
        ([1, 2, 3], "TOKENS"),
        (np.array([1, 2, 3]), "TOKENS"),
        (np.ones((2, 3), np.float32), "IMAGE"),
    ],
)
def test_contents_come_back(store, content, kind):
    library = StaticLibrary(store, quota=1 << 20)
    reference = library.put("a name", content)
    assert str(reference) == f"{kind}#{{a name}}"
    again = StaticLibrary(store, quota=1).get(kind, "a name")
    assert again is not None
    assert (
        same(again.content, content) if isinstance(content, np.ndarray) else again.content in (content, tuple(content))
    )
    assert again.chunk_id(BACKBONE) == chunk_id(BACKBONE, content)
    other = "TEXT" if kind != "TEXT" else "IMAGE"
    assert library.get(other, "a name") is None
    if kind == "IMAGE" and isinstance(content, bytes):
        assert same(np.asarray(again.item), PIXELS)
    if kind == "TOKENS":
        assert again.item == [1, 2, 3]


def test_a_quota_holds_and_replacing_counts_once(store):
    library = StaticLibrary(store, quota=20_000)
    library.put("A", b"x" * 9000)
    used = library.used
    library.put("A", b"y" * 9000)
    assert library.used == used
    with pytest.raises(LibraryFullError, match="of 20000 are taken; expected room within the quota"):
        library.put("B", b"z" * 9000)
    with pytest.raises(LibraryFullError):
        library.put("C", "small", chunk=chunk_of(tokens=200))
    assert store.get("B", BACKBONE) is None  # not the chunk either
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#A"]
    found = library.get("FILE", "A")
    assert found is not None
    assert found.content == b"y" * 9000
    assert library.delete("FILE", "A")
    assert not library.delete("FILE", "A")
    library.put("B", b"z" * 9000)


def test_entries_expire_and_give_their_room_back(store):
    now = [1e9]
    store.disk.clock = lambda: now[0]
    library = StaticLibrary(store, quota=30_000, ttl=100)
    library.put("A", b"x" * 9000, chunk=chunk_of())
    now[0] += 99
    assert library.get("FILE", "A") is not None
    now[0] += 2
    assert library.get("FILE", "A") is None
    assert store.get("B", BACKBONE) is None
    assert library.entries() == []
    library.put("B", b"x" * 12_000, ttl=5)
    entry = store.names.entry("static", "FILE", "B")
    assert [path.name for path in Path(store.disk.root, store.names.libraries).rglob("*.entry.*")] == [entry.file]
    now[0] += 6
    now[0] -= 3  # a clock that jumps back serves what was not yet collected
    assert library.get("FILE", "B") is not None
    now[0] += 3
    assert library.collect() == 1
    assert library.collect() == 0
    with pytest.raises(InputError, match="ttl"):
        library.put("A", "x", ttl=0)


def test_chunks_go_with_their_last_entry(store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("A", "one", chunk=chunk_of())
    library.put("B", "two", chunk=chunk_of())
    store.put(chunk_of(chunk_id(BACKBONE, "two")))
    library.delete("TEXT", "A")
    assert same_chunk(store.get("B", BACKBONE), chunk_of())
    library.delete("TEXT", "B", backbones=[BACKBONE])
    assert store.get("B", BACKBONE) is None
    assert store.get(chunk_id(BACKBONE, "two"), BACKBONE) is None
    library.put("A", "one", chunk=chunk_of())
    library.put("A", "another")
    assert store.get("B", BACKBONE) is None


def test_a_damaged_entry_is_a_miss(store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("A", "text")
    path = Path(store.disk.root, store.names.entry("static", "TEXT", "A").path)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert library.get("TEXT", "A") is None
    assert store.counters["quarantined"] == 1
    assert library.entries() == []


@pytest.mark.usefixtures("unchecked")
def test_contents_that_cannot_be_stored_are_refused(store):
    library = StaticLibrary(store, quota=1 << 20)
    for wrong in (None, object(), [], [1.5], "", b"", np.empty((0, 3), np.uint8)):
        with pytest.raises(InputError):
            library.put("A", wrong)
    with pytest.raises(InputError, match="expected IMAGE or FILE"):
        library.put("A", "text", kind="IMAGE")
    with pytest.raises(InputError, match="kind"):
        library.put("A", "text", kind="VIDEO")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DtypeError):
        library.put("A", np.ones((2, 2), bool))
    with pytest.raises(NotFiniteError):
        library.put("A", "text", vector=np.array([np.nan]))
    with pytest.raises(InputError, match="metadata"):
        DynamicLibrary(store).publish("A", "text", metadata={"x": float("nan")})
    with pytest.raises(InputError, match="quota"):
        StaticLibrary(store, quota=0)
    assert library.entries() == []
    assert library.put("A", "text", kind="FILE").kind == "FILE"


def test_libraries_are_deleted_with_their_tenant(store):
    library, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
    library.put("A", "one", chunk=chunk_of())
    dynamic.publish("A", "two")
    assert store.delete_tenant().objects == 3
    assert library.get("TEXT", "A") is None
    assert dynamic.open("TEXT", "A") is None
    assert library.entries() == dynamic.entries() == []
    assert not Path(store.disk.root, store.names.libraries).exists()
    library.put("A", "again")
    assert library.get("TEXT", "A") is not None


def test_an_encrypted_library_reveals_nothing(tmp_path: Path):
    with ChunkStore(tmp_path, key=bytes(32)) as store:
        library, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
        library.put("LOUVRE2025", "a secret text", chunk=chunk_of())
        dynamic.publish("HOTEL01", "another secret", vector=np.array([1.0, 2.0]))
        assert [str(entry.reference) for entry in library.entries()] == ["TEXT#LOUVRE2025"]
        found = library.get("TEXT", "LOUVRE2025")
        assert found is not None
        assert found.content == "a secret text"
        assert [reference for reference, _ in dynamic.vectors()] == ["TEXT#HOTEL01"]
    written = b"".join(path.read_bytes() + str(path).encode() for path in tmp_path.rglob("*") if path.is_file())
    assert all(word not in written for word in (b"LOUVRE2025", b"HOTEL01", b"secret text", b"another secret"))


# ------------------------------------------------------------------------------------------------------- dynamic


def test_versions_stay_while_they_are_held(store):
    library = DynamicLibrary(store)
    first = library.publish("A", "one", metadata={"source": "the web", "n": 1}, chunk=chunk_of("c1", 1))
    assert str(first) == "TEXT#A@1"
    held = opened(library, "TEXT", "A")
    library.publish("A", "two", chunk=chunk_of("c2", 2))
    library.publish("A", "three", chunk=chunk_of("c3", 3))
    assert library.versions("TEXT", "A") == [1, 3]  # nobody held the second
    assert store.get("c2", BACKBONE) is None
    assert held.resource.content == "one"
    assert held.resource.metadata == {"source": "the web", "n": 1}
    assert same_chunk(store.get("c1", BACKBONE), chunk_of("c1", 1))
    with opened(library, "TEXT", "A") as now, opened(library, "TEXT", "A", 1) as before:
        assert (now.content, before.content) == ("three", "one")
        assert now.digest != before.digest
    assert library.versions("TEXT", "A") == [1, 3]
    assert library.open("TEXT", "A", 2) is None
    held.close()
    held.close()
    assert library.versions("TEXT", "A") == [3]
    assert store.get("c1", BACKBONE) is None
    assert store.get("c3", BACKBONE) is not None


def test_withdrawing_leaves_readers_alone(store):
    library = DynamicLibrary(store)
    library.publish("A", "one")
    library.publish("B", "other", kind="FILE")
    held = opened(library, "TEXT", "A")
    assert library.withdraw("TEXT", "A")
    assert not library.withdraw("TEXT", "A")
    assert not library.withdraw("TEXT", "never")
    assert library.open("TEXT", "A") is None
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#B@1"]
    assert held.resource.content == "one"
    held.close()
    assert library.publish("A", "again").version == 3
    assert library.versions("TEXT", "A") == [3]


def test_a_damaged_version_is_replaced_by_the_previous_one(store):
    library = DynamicLibrary(store)
    library.publish("A", "one")
    held = opened(library, "TEXT", "A")
    library.publish("A", "two")
    path = Path(store.disk.root, store.names.entry("dynamic", "TEXT", "A", version=2).path)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with opened(library, "TEXT", "A") as found:
        assert found.content == "one"
    held.close()


CHILD = """
import sys, numpy as np
from kvpatch_jax.store import ChunkStore, DynamicLibrary
with ChunkStore(sys.argv[1]) as store:
    library = DynamicLibrary(store)
    held = library.open("TEXT", "A")
    print(held.resource.content, flush=True)
    for line in sys.stdin:
        with library.open("TEXT", "A") as now:
            print(held.resource.content, now.content, library.open("TEXT", "A", 1) is not None, flush=True)
"""


def test_another_process_holds_its_version_until_it_dies(store):
    library = DynamicLibrary(store)
    library.publish("A", "one")
    with subprocess.Popen(
        [PYTHON, "-c", CHILD, store.disk.root],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(),
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "one\n"
        library.publish("A", "two")
        assert library.versions("TEXT", "A") == [1, 2]
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "one two True\n"
        child.kill()
        child.wait()
    assert library.collect() == 1
    assert library.versions("TEXT", "A") == [2]
