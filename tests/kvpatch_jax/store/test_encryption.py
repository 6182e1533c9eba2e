"""Encryption at rest: the store's promises hold, nothing is told without the key, a wrong key harms nothing."""

import os
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from store_cases import AXES, BACKBONE, LAYOUT, MLA, chunk_of, file_of, name_of, patch_of, same, same_chunk

# The same tests, over an encrypted store (the fixtures below).
from kvpatch_jax.errors import StoreCorruptError, StoreKeyError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.format.objects import blob_bytes, read_header

KEY, OTHER = b"k" * 32, b"o" * 32
NO_MEMORY = Budget(host=0)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY, key=KEY) as store:
        yield store


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory):
    with ChunkStore(tmp_path_factory.mktemp("sealed"), budget=NO_MEMORY, key=KEY) as store:
        yield store


@pytest.mark.parametrize("layout", [LAYOUT, MLA, AXES], ids=["gqa", "mla", "axes"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_encrypted_chunks_come_back_bit_for_bit(shelf: ChunkStore, layout, dtype):
    chunk = chunk_of("all", layout=layout, dtype=dtype, hidden={1: np.ones((9, 5), np.float32)})
    shelf.put(chunk)
    found = shelf.get("all", BACKBONE)
    assert same_chunk(found, chunk)
    assert found is not None
    assert found.hidden is not None
    assert same(found.hidden[1], np.ones((9, 5), np.float32))


# ------------------------------------------------------------------------------------------------------- what it tells


def secrets_of(chunk, patch) -> list[bytes]:
    """What must not be found in a root: ids, antecedents, the model, numbers, key."""
    words = [b"cat.png", b"before.png", b"a model of ours"]
    numbers = [np.asarray(chunk.kv["k"])[1, 2], np.asarray(chunk.local), *patch.factors["k"]]
    return [*words, *(np.asarray(value).tobytes()[:64] for value in numbers), KEY, KEY.hex().encode()]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_an_encrypted_root_reveals_nothing_of_its_content(tmp_path: Path, key):
    chunk = chunk_of("cat.png", backbone="a model of ours", encoder=np.arange(64, dtype=np.float32))
    patch = patch_of(chunk, ("before.png",))
    with ChunkStore(tmp_path, key=key) as store:
        store.put(chunk)
        store.put_async(chunk, encoding="int8").result()
        store.put_patches([patch])
        assert store.get("cat.png", "a model of ours", encoder=True) is not None
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        everything = b"".join(str(path).encode() + path.read_bytes() for path in files)
        found = [secret in everything for secret in secrets_of(chunk, patch)]
        assert not any(found) if key else all(found[:-2])  # the search finds them where they are


def test_no_key_and_nonce_come_twice(store: ChunkStore, monkeypatch):
    """Same chunk, other chunks, patches in a group, a retry after a failure: every leaf under its own pair."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    used: list[tuple[bytes, bytes]] = []

    class Recording:
        def __init__(self, key):
            self._key, self._cipher = key, AESGCM(key)

        def encrypt_into(self, nonce, *rest):
            used.append((self._key, nonce))
            return self._cipher.encrypt_into(nonce, *rest)

    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Recording)
    for chunk in (chunk_of(), chunk_of(), chunk_of("C", 1)):
        store.put(chunk)
    store.put_patches([patch_of(chunk_of()), patch_of(chunk_of(), rank=1)])
    bad = patch_of(chunk_of("bad"))
    bad.factors["k"] = (jnp.ones((3, 9, 2), jnp.complex64), bad.factors["k"][1])  # pyright: ignore
    acks = [store.put_patch_async(patch) for patch in (patch_of(chunk_of("D")), bad)]
    assert [ack.exception() is None for ack in acks] == [True, False]
    with pytest.raises(ValueError, match="complex64"):
        store.flush()
    assert len(used) == len(set(used)) > 3 * 8 + 2 * 5


def test_tenants_have_different_keys(tmp_path: Path):
    """Even where one could read the other's files under the right name."""
    with ChunkStore(tmp_path, tenant="one", key=KEY) as one, ChunkStore(tmp_path, tenant="two", key=KEY) as two:
        one.put(chunk_of())
        two.put(chunk_of())
        assert one.disk.encryption.check != two.disk.encryption.check
        file_of(two, chunk_of()).write_bytes(file_of(one, chunk_of()).read_bytes())
        assert two.get("B", BACKBONE) is None
        assert same_chunk(one.get("B", BACKBONE), chunk_of())


# ------------------------------------------------------------------------------------------------------------ forgery


def forge(path: Path, change) -> None:
    """Changes an encrypted object and makes every checksum right again."""
    with path.open("rb") as file:
        header = read_header(file.fileno())
        raw = file.read()
    leaves = {n: np.frombuffer(raw, np.uint8, leaf.nbytes, leaf.offset).copy() for n, leaf in header.leaves.items()}
    fields = {"name": header.name, "expires": header.expires, "body": dict(header.body), "kind": header.kind}
    fields = change(fields, leaves) or fields
    from kvpatch_jax.store.format.objects import Blob

    path.write_bytes(blob_bytes(Blob(fields["kind"], fields["body"], leaves, fields["expires"]), fields["name"]))


def swap(_, leaves) -> None:
    leaves["sealed.2"], leaves["sealed.4"] = leaves["sealed.4"], leaves["sealed.2"]


def flip(_, leaves) -> None:
    leaves["sealed.3"][7] ^= 1


def shorten(_, leaves) -> None:
    leaves["sealed.3"] = leaves["sealed.3"][:-1]


def drop(_, leaves) -> None:
    del leaves["sealed.7"]


def add(_, leaves) -> None:
    leaves["sealed.8"] = leaves["sealed.7"]


def behead(_, leaves) -> None:
    del leaves["sealed.header"]


def resalt(fields, _) -> None:
    fields["body"]["salt"] = "00" * 32


def unsalt(fields, _) -> None:
    del fields["body"]["salt"]


@pytest.mark.parametrize("change", [swap, flip, shorten, drop, add, behead, resalt, unsalt])
def test_forged_objects_with_right_checksums_are_misses(store: ChunkStore, change):
    """Who may write the directory and has no key can destroy, and not forge."""
    chunk = chunk_of()
    for read in (store.get, store.stream):
        store.put(chunk)
        forge(file_of(store, chunk), change)
        try:
            found = read("B", BACKBONE)
            assert found is None or list(found) == []  # pyright: ignore[reportArgumentType]
        except StoreCorruptError:
            assert read == store.stream
        assert not file_of(store, chunk).exists()
        assert store.get("B", BACKBONE) is None
    assert store.counters["quarantined"] >= 2  # a stream reads ahead, and may find two layers bad


def test_an_object_renamed_with_its_header_is_a_miss(store: ChunkStore):
    one, two = chunk_of("B1", 1), chunk_of("B2", 2)
    store.put(one)
    path = file_of(store, two)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_of(store, one).read_bytes())
    forge(path, lambda fields, _: fields | {"name": name_of(store, two).file})
    assert store.get("B2", BACKBONE) is None
    assert store.counters["quarantined"] == 1
    assert same_chunk(store.get("B1", BACKBONE), one)


def test_an_unencrypted_object_is_a_miss_to_a_store_with_a_key(store: ChunkStore):
    """Anyone could have put it there. It stays, and the next put replaces it."""
    chunk = chunk_of()
    store.put(chunk_of("first"))  # from here on, the tenant has a key
    path = file_of(store, chunk)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob_bytes(chunk_blob(chunk_of(seed=9)), path.name))
    assert store.get("B", BACKBONE) is None
    assert store.stream("B", BACKBONE) is None
    assert path.exists()
    assert (store.counters["unsealed"], store.counters["quarantined"]) == (2, 0)
    store.put(chunk)
    assert same_chunk(store.get("B", BACKBONE), chunk)


# ---------------------------------------------------------------------------------------------------------- wrong keys


@pytest.mark.parametrize("key", [None, OTHER], ids=["none", "other"])
def test_a_wrong_key_is_refused_and_destroys_nothing(store: ChunkStore, key):
    chunk, patch = chunk_of(), patch_of(chunk_of())
    with ChunkStore(store.disk.root, key=key, budget=NO_MEMORY) as wrong:  # opened before there were any objects
        store.put(chunk)
        store.put_patches([patch])
        before = file_of(store, chunk).read_bytes()
        with pytest.raises(StoreKeyError, match="expected the one of this tenant's objects"):
            ChunkStore(store.disk.root, key=key)
        for read in (wrong.get, wrong.stream):
            with pytest.raises(StoreKeyError, match="expected the key that it was put with"):
                read("B", BACKBONE)
        with pytest.raises(StoreKeyError):
            wrong.get_patches(patch.metadata)
        assert wrong.counters["quarantined"] == 0
    assert file_of(store, chunk).read_bytes() == before
    assert same_chunk(store.get("B", BACKBONE), chunk)


# -------------------------------------------------------------------------------------------------------------- beyond


def test_the_remote_store_holds_the_same_encrypted_bytes(tmp_path: Path):
    spec, context = {"driver": "memory", "path": "store/"}, tensorstore.Context()
    remote, service = KeyValueStore(spec, context=context), tensorstore.KvStore.open(spec, context=context).result()
    common = {"budget": NO_MEMORY, "secret": b"shared by the machines", "remote": remote, "write_behind": False}
    chunk = chunk_of()
    with ChunkStore(tmp_path / "one", key=KEY, **common) as one, ChunkStore(tmp_path / "two", key=KEY, **common) as two:
        one.put(chunk)
        path = name_of(one, chunk).path
        stored = bytes(service.read(path).result().value)
        assert stored == file_of(one, chunk).read_bytes()
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert file_of(two, chunk).read_bytes() == stored
        os.unlink(file_of(two, chunk))
        forged = tmp_path / "forged"
        forged.write_bytes(stored)
        forge(forged, flip)
        service.write(path, forged.read_bytes()).result()
        assert two.get("B", BACKBONE) is None
        assert not file_of(two, chunk).exists()
        assert not file_of(two, chunk).exists()
        one.put(chunk)
        with ChunkStore(tmp_path / "three", key=OTHER, **common) as three, pytest.raises(StoreKeyError):
            three.get("B", BACKBONE)
        assert remote.paths(path) == [path]
        service.write(path, blob_bytes(chunk_blob(chunk), Path(path).name)).result()
        assert two.get("B", BACKBONE) is None  # not encrypted: not believed
        assert two.counters["unsealed"] == 1
