"""Canonicals in few bits in every tier: objects of their own, under the word of their encoding."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from packed_cases import few_bit_patch, same_leaves, same_packed
from store_cases import BACKBONE, ManualClock, chunk_of, file_of, name_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding, PackedArray
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, Request, fetch
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.format.objects import file_size

CHUNK = chunk_of(tokens=70)
PACKED = kvp.encode_chunk(CHUNK, "k4v4")
KEY = b"k" * 32


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


# ------------------------------------------------------------------------------------------------- put and get


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("host", [0, 1 << 20])
def test_a_packed_chunk_is_the_same_from_the_queue_the_disk_and_memory(tmp_path: Path, key, host):
    with ChunkStore(tmp_path, budget=Budget(host=host), key=key) as store:
        ack = store.put_async(CHUNK, encoding="k4v4")
        assert same_packed(store.get("B", BACKBONE, encoding="k4v4"), PACKED)
        ack.result(timeout=300)
        for word in ("k4v4", "k4v4g32", KVEncoding(4, 4)):
            assert same_packed(store.get("B", BACKBONE, encoding=word), PACKED)
        assert store.get("B", BACKBONE) is None  # no store gives fewer bits than it was asked for
        assert store.get("B", BACKBONE, encoding="k4v3") is None
        assert store.get("B", BACKBONE, encoding="int8") is None
        assert store.get("B", BACKBONE, encoding="k4v4", lead="another") is None


def test_another_encoding_than_the_chunks_is_refused_before_anything_is_written(store: ChunkStore):
    for encoding in ("k8v8", "k4v4g64", "int8", "unreduced"):
        for put in (store.put, store.put_async):
            with pytest.raises(InputError, match="k4v4g32"):
                put(PACKED, encoding=encoding)
    for put in (store.put, store.put_async):
        with pytest.raises(InputError, match="decoded"):
            put(kvp.decode_chunk(PACKED))
    with pytest.raises(InputError, match="k4v4g32"):
        store.put_many([CHUNK, PACKED], encoding="k8v8")
    assert not list(Path(store.disk.root).rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------- a store's default


def test_a_default_is_put_and_read_first_and_the_unreduced_canonical_after_it(tmp_path: Path):
    with ChunkStore(tmp_path, encoding="k4v4", budget=Budget(host=0)) as store:
        store.put(chunk_of("before", tokens=70), encoding="unreduced")
        assert same_chunk(store.get("before", BACKBONE), chunk_of("before", tokens=70))
        assert store.contains("before", BACKBONE)
        assert store.counters["misses"] == 0

        store.put(CHUNK)
        assert same_packed(store.get("B", BACKBONE), PACKED)
        assert store.get("B", BACKBONE, encoding="unreduced") is None
        assert not store.contains("B", BACKBONE, encoding="unreduced")
        store.put(CHUNK, encoding="unreduced")
        assert same_packed(store.get("B", BACKBONE), PACKED)
        assert same_chunk(store.get("B", BACKBONE, encoding="unreduced"), CHUNK)
        stream = store.stream("B", BACKBONE)
        assert stream is not None
        assert same_packed(stream.chunk(lambda layer, values: None), PACKED)
        whole = store.stream("before", BACKBONE)
        assert whole is not None
        assert same_chunk(whole.chunk(lambda layer, values: None), chunk_of("before", tokens=70))

        misses = store.counters["misses"]
        assert store.get("absent", BACKBONE) is None
        assert store.counters["misses"] == misses + 1
        # A damaged object of the default is a miss, and the other one is read in its place.
        path = file_of(store, CHUNK, "k4v4")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        assert same_chunk(store.get("B", BACKBONE), CHUNK)
        assert store.counters["quarantined"] == 1
        # A chunk in another encoding keeps it.
        store.put(kvp.encode_chunk(CHUNK, "k8v8"))
        assert store.contains("B", BACKBONE, encoding="k8v8")


# -------------------------------------------------------------------------------------------- layers and devices


@pytest.mark.parametrize("queued", [False, True])
def test_a_stream_decodes_one_layer_at_a_time_and_keeps_the_chunk_packed(store: ChunkStore, queued):
    ack = store.put_async(PACKED)
    if not queued:
        ack.result(timeout=300)
    for placement in (None, jax.devices()[0]):
        stream = store.stream("B", BACKBONE, encoding="k4v4", placement=placement)
        assert stream is not None
        with stream:
            assert same(stream.layer(2)["v"], np.asarray(PACKED.kv["v"])[2])
        seen = dict(store.stream("B", BACKBONE, encoding="k4v4", placement=placement) or ())
        assert list(seen) == [0, 1, 2]
        for layer, values in seen.items():
            assert isinstance(values["k"], np.ndarray if placement is None else jax.Array)
            assert all(same(values[name], np.asarray(PACKED.kv[name])[layer]) for name in ("k", "v"))
        stream = store.stream("B", BACKBONE, encoding="k4v4", placement=placement)
        assert stream is not None
        found = stream.chunk(lambda layer, values: None)
        assert same_packed(found, PACKED)
        for value in found.kv.values():
            assert isinstance(value, PackedArray)
            assert isinstance(value.scale, np.ndarray if placement is None else jax.Array)
    ack.result(timeout=300)


# ------------------------------------------------------------------------------------------------------- fetch


def test_fetch_loads_encoded_chunks_and_encodes_computed_ones(store: ChunkStore):
    store.put(chunk_of("kept", 1, tokens=70), encoding="k4v4")
    requests = [Request(id, BACKBONE, encoding="k4v4") for id in ("kept", "made")]
    calls: list[str] = []

    def compute(misses):
        calls.extend(miss.request.id for miss in misses)
        return [chunk_of(miss.request.id, 2, tokens=70) for miss in misses]

    seen: dict[str, list[Any]] = {"kept": [], "made": []}
    for on_layer in (None, lambda request, layer, values: seen[request.id].append(values)):
        got = fetch(store, requests, compute, on_layer=on_layer)
        wanted = [kvp.encode_chunk(chunk_of(id, seed, tokens=70), "k4v4") for id, seed in (("kept", 1), ("made", 2))]
        assert all(same_packed(one.chunk, chunk) for one, chunk in zip(got, wanted, strict=True))
        store.flush()
    assert calls == ["made"]
    for id, chunk in zip(("kept", "made"), wanted, strict=True):
        for layer in range(3):
            assert same(seen[id][layer]["k"], np.asarray(chunk.kv["k"])[layer])

    # Layers of a computed chunk are shown decoded, one by one.
    shown: list[Any] = []
    fetch(store, [Request("new", BACKBONE, encoding="k4v4")], compute, on_layer=lambda *args: shown.append(args[2]))
    new = kvp.encode_chunk(chunk_of("new", 2, tokens=70), "k4v4")
    assert all(same(values["v"], np.asarray(new.kv["v"])[layer]) for layer, values in enumerate(shown))
    assert len(shown) == 3


# ------------------------------------------------------------------------------------------ eviction and expiry


def sizes(store: ChunkStore) -> dict[str, int]:
    return {path.name.partition(".")[2]: path.stat().st_size for path in Path(store.disk.root).rglob("*.safetensors")}


def test_an_encoded_canonical_goes_first_only_where_the_unreduced_one_is_stored(tmp_path: Path):
    """Of "both" the smaller one can be made again; of "alone" it is all there is, though it was used longer ago."""
    clock = ManualClock()
    with ChunkStore(tmp_path, budget=Budget(host=0), clock=clock) as store:
        store.put(chunk_of("alone", tokens=70), encoding="k4v4")
        store.put(chunk_of("alone", tokens=70), encoding="k2v2")
        store.put(chunk_of("both", tokens=70))
        store.put(chunk_of("both", tokens=70), encoding="k4v4")
        total = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    more = chunk_of("more", tokens=9)
    need = file_size(chunk_blob(more), name_of(store, more).file)
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=total + need - 1), clock=clock) as store:
        store.put(more)
        assert store.contains("alone", BACKBONE, encoding="k4v4")
        assert store.contains("alone", BACKBONE, encoding="k2v2")
        assert store.contains("both", BACKBONE)
        assert not store.contains("both", BACKBONE, encoding="k4v4")


# --------------------------------------------------------------------------------- damage, remote tier, programs


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_another_machine_reads_encoded_objects_from_the_remote_store(tmp_path: Path, key):
    remote = KeyValueStore({"driver": "memory", "path": "store/"}, context=tensorstore.Context())
    more: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote, "key": key}
    with (
        ChunkStore(tmp_path / "one", **more) as one,
        ChunkStore(tmp_path / "two", encoding="k4v4", budget=Budget(host=0), **more) as two,
    ):
        one.put(CHUNK, encoding="k4v4")
        one.put(chunk_of("whole"))
        patch = few_bit_patch(PACKED)
        one.put_patches([patch])
        stream = two.stream("B", BACKBONE)
        assert stream is not None
        assert same_packed(stream.chunk(lambda layer, values: None), PACKED)
        assert two.contains("B", BACKBONE)  # a copy that was read whole stays
        assert same_packed(two.get("B", BACKBONE), PACKED)
        assert same_chunk(two.get("whole", BACKBONE), chunk_of("whole"))
        (found,) = two.get_patches(patch.metadata)
        assert same_leaves(found.factors, patch.factors)
        assert two.delete("B", BACKBONE)


def test_a_patch_of_an_encoded_base_applies_to_what_the_store_returns(store: ChunkStore):
    store.put(PACKED)
    store.put(CHUNK)
    patch = patch_of(PACKED, (), encoding=PACKED.encoding)
    store.put_patches([patch])
    (found,) = store.get_patches(patch.metadata)
    chunk = store.get("B", BACKBONE, encoding="k4v4")
    assert chunk is not None
    placed = kvp.apply_patch(kvp.Placed(chunk, found, 3))
    wanted = kvp.apply_patch(kvp.Placed(PACKED, patch, 3))
    assert all(same(placed[name], wanted[name]) for name in ("k", "v"))
    whole = store.get("B", BACKBONE)
    assert whole is not None
    with pytest.raises(kvp.errors.PatchMismatchError, match="encoding"):
        kvp.Placed(whole, found, 3)
