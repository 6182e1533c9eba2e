"""Libraries: what is put comes back, quotas, expiry, deletion; versions while they are read; other processes."""
# pyright: reportArgumentType=false

import concurrent.futures
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError, StoreError
from kvpatch_jax.store import ChunkStore, DynamicLibrary, HeldReference, StaticLibrary, open_remote
from kvpatch_jax.store.libraries import ENTRY_BYTES

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MODEL = "tiny"
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def chunk_of(id: str = "B", seed: int = 0, tokens: int = 8) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    kv = {name: rng.standard_normal((3, tokens, 2, 16)).astype(np.float32) for name in LAYOUT.names}
    return kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, id, LAYOUT, MODEL)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store") as store:
        yield store


def opened(library: DynamicLibrary, kind: str, name: str, version: int | None = None) -> HeldReference:
    held = library.open(kind, name, version)
    assert held is not None
    return held


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def damage(store: ChunkStore, name: str, offset: int) -> None:
    """Flips a bit of an object's file: in its header, or with a negative offset in its leaves."""
    (file,) = store.objects.index.row("SELECT file FROM objects WHERE name = ?", name) or ("",)
    path = Path(store.objects.root, "data", file)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def version_count(store: ChunkStore, name: str) -> int:
    entry = store.names.entry("dynamic", "TEXT", name, version=1).partition("/")[0]
    return len(store.objects.with_prefix(f"{entry}/"))


# -------------------------------------------------------------------------------------------------------- static


@pytest.mark.parametrize("key", [None, bytes(32)])
@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        ("text ü", "TEXT", "text ü"),
        (PIXELS, "IMAGE", PIXELS),
        (jnp.asarray(PIXELS), "IMAGE", PIXELS),
        (png(PIXELS), "IMAGE", png(PIXELS)),
        (b"%PDF-", "FILE", b"%PDF-"),
        ([1, 2, 2**40], "TOKENS", (1, 2, 2**40)),
        (np.array([1, 2, 3]), "TOKENS", np.array([1, 2, 3])),
        (np.ones((2, 3), np.float32), "IMAGE", np.ones((2, 3), np.float32)),
    ],
)
def test_contents_come_back(tmp_path: Path, key, content, kind, expected):
    with ChunkStore(tmp_path, key=key) as store:
        reference = StaticLibrary(store, quota="1 MB").put("a name", content, vector=np.array([0.25, 2]))
        assert str(reference) == f"{kind}#{{a name}}"
    with ChunkStore(tmp_path, key=key) as store:
        library = StaticLibrary(store, quota=1)
        resource = library.get(kind, "a name")
        assert resource is not None
        assert type(resource.content) is type(expected)
        assert np.array_equal(resource.content, expected)
        assert resource.chunk_id(MODEL) == chunk_id(MODEL, content)
        assert library.get("TEXT" if kind != "TEXT" else "IMAGE", "a name") is None
        ((name, vector),) = library.vectors()
        assert (name, vector.dtype, vector.tolist()) == (str(reference), np.float32, [0.25, 2])
        if kind == "IMAGE" and isinstance(content, bytes):
            assert np.array_equal(resource.item, PIXELS)
        if kind == "TOKENS":
            assert resource.item == list(map(int, content))


def test_a_file_is_read_from_its_path(store, tmp_path):
    (tmp_path / "a.png").write_bytes(png(PIXELS))
    library = StaticLibrary(store, quota="1 MB")
    assert library.put("photo", tmp_path / "a.png").kind == "IMAGE"
    resource = library.get("IMAGE", "photo")
    assert resource is not None
    assert resource.content == png(PIXELS)
    with pytest.raises(InputError, match="readable file"):
        library.put("photo", tmp_path / "missing.png")
    with pytest.raises(InputError, match="file's name"):
        library.put("photo", "a.png")
    assert library.put("photo", "a.png", kind="TEXT").kind == "TEXT"


def test_a_quota_holds_and_replacing_counts_once(store):
    library = StaticLibrary(store, quota=2 * ENTRY_BYTES + 12_000)
    library.put("A", b"x" * 9000)
    library.put("A", b"y" * 9000)
    assert [entry.nbytes for entry in library.entries()] == [ENTRY_BYTES + 9000]
    with pytest.raises(StoreError, match=r"got 10024 bytes; 10024 of 14048 are taken"):
        library.put("B", b"z" * 9000)
    with pytest.raises(StoreError, match="within the quota"):
        library.put("C", "small", chunk=chunk_of(tokens=200))
    with pytest.raises(StoreError, match="within the quota"):
        library.put("A", b"z" * 90_000)
    assert not store.contains("B", MODEL)  # not the chunk either
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#A"]
    resource = library.get("FILE", "A")
    assert resource is not None
    assert resource.content == b"y" * 9000
    library.put("B", b"z" * 3000)  # exactly the rest
    assert library.delete("FILE", "A")
    assert not library.delete("FILE", "A")
    library.put("C", b"z" * 9000)


def test_a_quota_holds_for_threads_that_put_at_once(store):
    quota = 10 * (ENTRY_BYTES + 100)

    def put(number: int) -> bool:
        try:
            StaticLibrary(store, quota=quota).put(f"file {number}", b"x" * 100)
        except StoreError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(16))) == len(StaticLibrary(store, quota=1).entries()) == 10


def test_entries_expire_and_give_their_room_back(store):
    library = StaticLibrary(store, quota=ENTRY_BYTES + 20_000, ttl=0.5)
    library.put("A", b"x" * 2000, chunk=chunk_of())
    assert library.get("FILE", "A") is not None
    time.sleep(0.6)
    assert library.get("FILE", "A") is None
    assert store.get("B", MODEL) is None
    assert library.entries() == []
    StaticLibrary(store, quota=library.quota).put("B", b"x" * 20_000)
    assert store.collect() >= 1
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#B"]
    with pytest.raises(InputError, match="ttl"):
        StaticLibrary(store, quota=1, ttl=0.0)


def test_chunks_go_with_their_last_entry(store):
    library = StaticLibrary(store, quota="1 MB")
    library.put("A", "one", chunk=chunk_of())
    StaticLibrary(store, quota="1 MB", ttl=0.2).put("B", "two", chunk=chunk_of())  # the first keeps it
    DynamicLibrary(store).publish("C", "three", chunk=chunk_of())
    time.sleep(0.3)
    library.delete("TEXT", "A")
    assert store.contains("B", MODEL)
    DynamicLibrary(store).withdraw("TEXT", "C")
    assert not store.contains("B", MODEL)
    library.put("A", "one", chunk=chunk_of())
    library.put("A", "another")
    assert not store.contains("B", MODEL)
    library.put("A", chunk=chunk_of(), kind="TEXT")
    library.put("A", chunk=chunk_of(), kind="TEXT")
    assert store.contains("B", MODEL)


def test_entries_are_neither_evicted_nor_counted_in_budgets(tmp_path: Path):
    with ChunkStore(tmp_path, root_budget=60_000) as store:
        library = StaticLibrary(store, quota="1 MB")
        library.put("A", b"x" * 100_000)
        DynamicLibrary(store).publish("B", b"y" * 100_000)
        for number in range(20):
            store.put(chunk_of(f"c{number}", number))
        assert not store.contains("c0", MODEL)
        assert store.contains("c19", MODEL)
        assert store.usage().bytes <= 60_000
        assert library.get("FILE", "A") is not None
        with pytest.raises(StoreError, match="at most the root budget"):
            library.put("C", "x", chunk=chunk_of(tokens=200))
        assert library.get("TEXT", "C") is None


@pytest.mark.parametrize("offset", [40, 300, -1])
def test_a_damaged_entry_is_a_miss_until_it_is_put_again(tmp_path: Path, offset):
    with ChunkStore(tmp_path, memory=0) as store:
        library = StaticLibrary(store, quota="1 MB")
        library.put("A", b"text" * 16)
        damage(store, store.names.entry("static", "FILE", "A"), offset)
        assert library.get("FILE", "A") is None
        if offset > 0:
            assert StaticLibrary(store, quota="1 MB").entries() == []
        library.put("A", b"text" * 16)
        assert library.get("FILE", "A") is not None
        assert len(StaticLibrary(store, quota="1 MB").entries()) == 1


@pytest.mark.usefixtures("unchecked")
def test_contents_that_cannot_be_stored_are_refused(store):
    library = StaticLibrary(store, quota="1 MB")
    for wrong in (None, object(), [], [1.5], "", b"", np.empty((0, 3), np.uint8)):
        with pytest.raises(InputError):
            library.put("A", wrong)
    with pytest.raises(InputError, match="expected IMAGE"):
        library.put("A", "text", kind="IMAGE")
    with pytest.raises(InputError, match="kind"):
        library.put("A", "text", kind="VIDEO")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="name"):
        library.put("a{b", "text")
    with pytest.raises(ShapeError, match="dtype complex64"):
        library.put("A", np.ones((2, 2), np.complex64), kind="FILE")
    with pytest.raises(NotFiniteError):
        library.put("A", "text", vector=np.array([np.nan]))
    with pytest.raises(InputError, match="quota"):
        StaticLibrary(store, quota=0)
    assert library.entries() == []
    assert library.put("A", "text", kind="FILE").kind == "FILE"


def test_libraries_are_deleted_with_their_tenant(store):
    library, dynamic = StaticLibrary(store, quota="1 MB"), DynamicLibrary(store)
    library.put("A", "one", chunk=chunk_of())
    dynamic.publish("A", "two")
    store.delete_tenant()
    assert library.get("TEXT", "A") is None
    assert dynamic.open("TEXT", "A") is None
    assert library.entries() == dynamic.entries() == []
    library.put("A", "again")
    assert library.get("TEXT", "A") is not None
    assert dynamic.publish("A", "again").version == 1


def test_an_encrypted_library_reveals_nothing(tmp_path: Path):
    with ChunkStore(tmp_path, key=bytes(32)) as store:
        library, dynamic = StaticLibrary(store, quota="1 MB"), DynamicLibrary(store)
        library.put("LOUVRE2025", "a secret text", chunk=chunk_of())
        dynamic.publish("HOTEL01", "another secret", vector=np.array([1.0, 2.0]))
        assert [str(entry.reference) for entry in library.entries()] == ["TEXT#LOUVRE2025"]
        assert [reference for reference, _ in dynamic.vectors()] == ["TEXT#HOTEL01"]
    written = b"".join(path.read_bytes() + str(path).encode() for path in tmp_path.rglob("*") if path.is_file())
    assert all(word not in written for word in (b"LOUVRE2025", b"HOTEL01", b"secret text", b"another secret"))
    with ChunkStore(tmp_path, key=b"x" * 32) as store, pytest.raises(StoreError, match="another key"):
        StaticLibrary(store, quota="1 MB").get("TEXT", "LOUVRE2025")


# ------------------------------------------------------------------------------------------------------- dynamic


def test_versions_stay_while_they_are_held(store):
    library = DynamicLibrary(store)
    first = library.publish("A", "one", chunk=chunk_of("c1", 1))
    assert str(first) == "TEXT#A@1"
    held = opened(library, "TEXT", "A")
    library.publish("A", "two", chunk=chunk_of("c2", 2))
    library.publish("A", "three", chunk=chunk_of("c3", 3))
    assert library.open("TEXT", "A", 2) is None  # nobody held it
    assert not store.contains("c2", MODEL)
    assert held.resource.content == "one"
    assert store.contains("c1", MODEL)
    with opened(library, "TEXT", "A") as current, opened(library, "TEXT", "A", 1) as before:
        assert (current.content, before.content) == ("three", "one")
    assert version_count(store, "A") == 2
    held.close()
    held.close()
    assert library.open("TEXT", "A", 1) is None
    assert version_count(store, "A") == 1
    assert (store.contains("c1", MODEL), store.contains("c3", MODEL)) == (False, True)


def test_withdrawing_leaves_readers_alone(store):
    library = DynamicLibrary(store)
    library.publish("A", "one")
    library.publish("B", "other", kind="FILE", vector=np.array([1.0]))
    held = opened(library, "TEXT", "A")
    assert library.withdraw("TEXT", "A")
    assert not library.withdraw("TEXT", "A")
    assert not library.withdraw("TEXT", "never")
    assert library.open("TEXT", "A") is None
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#B@1"]
    assert [name for name, _ in library.vectors()] == ["FILE#B"]
    assert held.resource.content == "one"
    held.close()
    assert library.publish("A", "again").version == 3
    assert version_count(store, "A") == 1


def test_each_of_many_publishers_makes_a_version_of_its_own(store):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(DynamicLibrary(store).publish, "A", "text") for _ in range(16)]
    assert sorted(future.result().version or 0 for future in futures) == list(range(1, 17))
    assert version_count(store, "A") == 1


def test_machines_that_share_a_remote_store_share_the_libraries(tmp_path: Path):
    options = {"remote": open_remote("memory://"), "secret": b"the same on all machines"}
    with ChunkStore(tmp_path / "a", **options) as here, ChunkStore(tmp_path / "b", **options) as there:
        first, second = DynamicLibrary(here), DynamicLibrary(there)
        assert first.publish("A", "one", chunk=chunk_of("c1")).version == 1
        held = opened(second, "TEXT", "A")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            futures = [pool.submit(library.publish, "A", "text") for library in (first, second) * 4]
        assert sorted(future.result().version or 0 for future in futures) == list(range(2, 10))
        assert held.resource.content == "one"
        second.publish("A", "last")
        with opened(first, "TEXT", "A") as resource:
            assert (resource.content, resource.reference.version) == ("last", 10)
        held.close()
        here.flush()
        there.flush()
        assert [name[-2:] for name in here.objects.with_prefix(first._prefix(resource.reference))] == ["10"]
        assert second.withdraw("TEXT", "A")
        assert first.open("TEXT", "A") is None

        StaticLibrary(here, quota="1 MB").put("A", "a file")
        here.flush()
        library = StaticLibrary(there, quota="1 MB")
        assert library.get("TEXT", "A") is not None
        assert library.delete("TEXT", "A")
        there.flush()
        assert library.get("TEXT", "A") is None


CHILD = """
import sys
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.libraries import DynamicLibrary
with ChunkStore(sys.argv[1]) as store:
    library = DynamicLibrary(store)
    held = library.open("TEXT", "A")
    print(held.resource.content, flush=True)
    for line in sys.stdin:
        with library.open("TEXT", "A") as current:
            print(held.resource.content, current.content, library.open("TEXT", "A", 1) is not None, flush=True)
"""


def test_another_process_holds_its_version_until_it_dies(store):
    library = DynamicLibrary(store)
    library.publish("A", "one", chunk=chunk_of("c1"))
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, store.objects.root],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "one\n"
        library.publish("A", "two")
        assert library.collect() == 0
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "one two True\n"
        child.kill()
        child.wait()
    assert store.contains("c1", MODEL)
    assert library.collect() == 1
    assert not store.contains("c1", MODEL)
    assert version_count(store, "A") == 1
