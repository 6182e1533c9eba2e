"""What a chunk shows is stored with it: patches of another version are not served, and files from before are read."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportPrivateUsage=false

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, file_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import PatchMismatchError
from kvpatch_jax.store import ChunkStore, PatchKey

SERVED = PatchKey("B", BACKBONE, ("A",))
KEY = b"k" * 32


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def store(tmp_path, request):
    with ChunkStore(tmp_path / "root", key=request.param) as own:
        yield own


def formed(chunk: kvp.Chunk, **more) -> kvp.Patch:
    conditioned = {name: value + np.float32(1) for name, value in chunk.kv.items()}
    return kvp.form_patch(chunk, conditioned, 2, ("A",), **more)


def test_patches_of_an_older_version_are_not_served(store: ChunkStore):
    first, second = chunk_of(seed=0), chunk_of(seed=1)
    store.put(first)
    store.put_patches([formed(first)])
    assert len(store.get_patches(SERVED)) == 1
    store.put(second)
    assert store.get_patches(SERVED) == []
    key = KEY if store.disk.encryption.check is not None and type(store.disk.encryption).__name__ == "AesGcm" else None
    with ChunkStore(store.disk.root, key=key) as again:
        assert again.get_patches(SERVED) == []
        (old,) = again.get_patches(dataclasses.replace(SERVED, content=first.content))
        assert again.get_patches(dataclasses.replace(SERVED, content=second.content)) == []
    with pytest.raises(PatchMismatchError, match="content"):
        kvp.apply_patch(kvp.Placed(store.get("B", BACKBONE), old, 0, ("A",)))
    store.put_patches([formed(second, dtype=jnp.bfloat16)])
    (found,) = store.get_patches(SERVED)
    kvp.apply_patch(kvp.Placed(store.get("B", BACKBONE), found, 0, ("A",)))


def test_a_queued_canonical_states_the_chunks_content(store: ChunkStore, monkeypatch):
    first, second = chunk_of(seed=0), chunk_of(seed=1)
    store.put(first)
    store.put_patches([formed(first), formed(second, dtype=jnp.bfloat16)])
    go, put = threading.Event(), store.disk.put_group
    monkeypatch.setattr(store.disk, "put_group", lambda items, *more: put(items, *more) if go.wait(300) else None)
    ack = store.put_async(second)
    (found,) = store.get_patches(SERVED)
    go.set()
    ack.result()
    assert found.metadata.content == second.content
    kvp.apply_patch(kvp.Placed(store.get("B", BACKBONE), found, 0, ("A",)))


@pytest.mark.parametrize("encoding", [None, "bfloat16", "int8"])
def test_a_chunks_content_digest_is_stored(store: ChunkStore, encoding):
    chunk = chunk_of(hidden={1: np.ones((9, 4), np.float32)})
    given = dataclasses.replace(chunk, id="C", content="digest of the inputs")
    device = jax.devices()[0]
    for own in (chunk, given):
        store.put(own, encoding=encoding)
        patch = formed(own)
        store.put_patches([patch])
        get = lambda **more: store.get(own.id, BACKBONE, encoding=encoding, **more)  # noqa: B023
        streamed = store.stream(own.id, BACKBONE, encoding=encoding).chunk(lambda *_: None)
        for found in (get(), get(placement=device), get(encoder=True), streamed, get().pad(12)):
            assert found.content == own.content
        (back,) = store.get_patches(dataclasses.replace(SERVED, chunk=own.id))
        assert back.metadata == patch.metadata
        kvp.apply_patch(kvp.Placed(get(), back, 3, ("A",)))
        kvp.apply_patch(kvp.Placed(get().pad(12), back.pad(12), 3, ("A",)))


def test_corrections_and_requested_ranks_are_stored(store: ChunkStore):
    chunk = chunk_of()
    patch = kvp.form_patch(chunk, {n: v + v**2 for n, v in chunk.kv.items()}, {"k": 2, "v": 40}, ("A",))
    changed = {name: value * 2 for name, value in chunk.kv.items()}
    correction = kvp.correction_patch(chunk, patch, changed, 3, ("C",))
    store.put_patches([patch, correction])
    (own,), (change,) = store.get_patches(patch.metadata), store.get_patches(correction.metadata)
    assert own.metadata.asked == (("v", 40),)
    assert (own.metadata, change.metadata) == (patch.metadata, correction.metadata)
    updated = kvp.update_patch(own, change)
    assert updated.metadata.antecedent == ("C",)
    with pytest.raises(PatchMismatchError, match="update"):
        kvp.update_patch(kvp.truncate(own, {"k": 1}), change)


def test_a_damaged_canonical_states_no_content(store: ChunkStore):
    chunk = chunk_of()
    store.put(chunk)
    store.put_patches([formed(chunk)])
    raw = bytearray(file_of(store, chunk).read_bytes())
    raw[40] ^= 1
    file_of(store, chunk).write_bytes(raw)
    assert len(store.get_patches(SERVED)) == 1  # nobody says otherwise, and whoever applies it checks
