"""No tenant reads, learns or displaces what is another's, in one root or in files, snapshots and messages."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary
from tests.store.store_cases import KEY, MODEL, SECRET, chunk_of, same, same_chunk

OUTPUT = np.arange(1000, dtype=np.float32)


def put(store: ChunkStore, number: int) -> None:
    store.put_encoder(str(number), MODEL, OUTPUT)


def written_in(folder: Path) -> bytes:
    """Everything on the disk: contents of files, and their names."""
    return b"".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------ what is read


def test_tenants_of_a_root_read_and_delete_what_is_theirs(folder: Path):
    with ChunkStore(folder, tenant="a") as one, ChunkStore(folder, tenant="b") as two:
        one.put(chunk_of("page", 1))
        two.put(chunk_of("page", 2))
        one.put_encoder("only a's", MODEL, OUTPUT)
        for store, seed in ((one, 1), (two, 2)) * 2:  # from the disk, and from memory
            assert same_chunk(store.get("page", MODEL), chunk_of("page", seed))
        assert two.get_encoder("only a's", MODEL) is None
        assert not two.delete("only a's", MODEL)
        assert one.get("page", "another") is None  # a backbone reads its chunks alone
        assert not one.delete("page", "another")
        assert (one.usage().count, two.usage().count) == (2, 1)
        two.delete_tenant()
        assert (one.usage().count, two.usage().count) == (2, 0)
        assert two.get("page", MODEL) is None
        assert same_chunk(one.get("page", MODEL), chunk_of("page", 1))


def test_encrypted_objects_open_with_their_key_alone(folder: Path):
    root = folder / "root"
    with (
        ChunkStore(root, key=KEY) as store,
        ChunkStore(root) as plain,
        ChunkStore(root, key=b"x" * 32) as wrong,
        ChunkStore(root, tenant="other", key=KEY) as other,
    ):
        put(store, 1)
        assert same(store.get_encoder("1", MODEL), OUTPUT)
        for reader, _ in itertools.product((plain, wrong), range(2)):  # the second time memory has it
            with pytest.raises(StoreError, match="key"):
                reader.get_encoder("1", MODEL)
            with pytest.raises(StoreError, match="key"):
                reader.verify(delete=True)
            with pytest.raises(StoreError, match="one that is there, encrypted with another key"):
                put(reader, 1)
        put(store, 1)
        assert same(store.get_encoder("1", MODEL), OUTPUT)
        assert other.get_encoder("1", MODEL) is None
        put(plain, 2)
        with pytest.raises(StoreError, match="not encrypted"):
            store.get_encoder("2", MODEL)
        put(store, 2)
        assert same(store.get_encoder("2", MODEL), OUTPUT)
        assert OUTPUT[500:504].tobytes() not in written_in(root)
    with ChunkStore(root, key=KEY) as store:
        assert same(store.get_encoder("1", MODEL), OUTPUT)


# -------------------------------------------------------------------------------------------------- what is revealed


def test_names_depend_on_the_secret_and_the_tenant(folder: Path):
    roots: list[tuple[str, str, Any]] = [("a", "one", SECRET), ("b", "one", SECRET)]
    roots += [("a", "two", SECRET), ("a", "one", None), ("c", "one", None)]
    names = []
    for root, tenant, secret in roots:
        with ChunkStore(folder / root, tenant=tenant, secret=secret) as store:
            store.put(chunk_of("a private id"))
            names.append(store.objects.with_prefix("")[0])
    assert names[0] == names[1]
    assert len(set(names)) == 4
    written = written_in(folder / "a")
    assert SECRET not in written
    assert b"one/" not in written


def test_an_encrypted_store_reveals_neither_contents_nor_names(folder: Path):
    with ChunkStore(folder, tenant="museum", key=KEY) as store:
        library, dynamic = StaticLibrary(store, quota="1 MB"), DynamicLibrary(store)
        library.put("LOUVRE2025", "a secret text", chunk=chunk_of("a private id"))
        dynamic.publish("HOTEL01", "another secret", vector=np.array([1.0, 2.0]))
        assert [str(entry.reference) for entry in library.entries()] == ["TEXT#LOUVRE2025"]
        assert [reference for reference, _ in dynamic.vectors()] == ["TEXT#HOTEL01"]
    written = written_in(folder)
    words = (b"LOUVRE2025", b"HOTEL01", b"secret text", b"another secret", b"private id", b"museum", KEY)
    assert not [word for word in words if word in written]
    with ChunkStore(folder, tenant="museum", key=b"x" * 32) as store, pytest.raises(StoreError, match="another key"):
        StaticLibrary(store, quota="1 MB").get("TEXT", "LOUVRE2025")


def test_a_tenants_snapshot_has_nothing_of_others(folder: Path):
    with ChunkStore(folder / "root", tenant="one") as store, ChunkStore(folder / "root", tenant="two") as two:
        store.put(chunk_of("page"))
        two.put_many([chunk_of("theirs"), chunk_of("more")])
        two.delete("theirs", MODEL)
        store.save(folder / "snapshot")
        assert not (folder / "snapshot" / "secret").exists()
        content = written_in(folder / "snapshot")
        for name in (two.objects.tenant, two.names.chunk(MODEL, "theirs"), two.names.chunk(MODEL, "more")):
            assert name.encode() not in content


# ------------------------------------------------------------------------------------------------- what is displaced


def test_tenants_take_from_whoever_holds_more_than_is_theirs(folder: Path):
    """A tenant alone fills the root; beside others it keeps an equal part, or its share, whoever writes more."""
    root = folder / "root"
    with ChunkStore(folder / "size") as store:
        put(store, 0)
        size = store.usage().bytes
    budget: Any = {"root_budget": 20 * size, "memory": 0}
    one, two = (ChunkStore(root, tenant=tenant, **budget) for tenant in ("one", "two"))
    for number in range(30):
        put(one, number)
    assert one.usage().count >= 19
    for number in range(30):
        put(two, number)
        # What takes a tenant below its part is one object at most.
        assert one.usage().count >= 9
        assert one.usage().bytes + two.usage().bytes <= 20 * size
    assert two.usage().count >= 9
    assert same(one.get_encoder("29", MODEL), OUTPUT)
    assert one.get_encoder("0", MODEL) is None

    # In turn, each evicts what is its own; a share moves the parts.
    for number in range(100, 110):
        put(one, number)
        put(two, number)
        assert min(one.usage().count, two.usage().count) >= 8
    three = ChunkStore(root, tenant="three", share=14 * size, memory=0)
    for number in range(30):
        put(three, number)
    assert 12 <= three.usage().count <= 14
    for number in range(200, 220):
        put(one, number)
        put(two, number)
    assert three.usage().count >= 12
    assert min(one.usage().count, two.usage().count) >= 1
    assert one.usage().bytes + two.usage().bytes + three.usage().bytes <= 20 * size
    usages = [store.usage() for store in (one, two, three)]
    with pytest.raises(StoreError, match="other tenants' shares stay"):
        one.put_encoder("large", MODEL, np.tile(OUTPUT, 9))
    assert [store.usage() for store in (one, two, three)] == usages
    for store in (one, two, three):
        store.close()
