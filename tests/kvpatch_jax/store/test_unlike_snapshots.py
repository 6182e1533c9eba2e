"""Canonicals of hybrid models and of layers of unlike kinds as arrays: through checkpoints and stores, and forged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from array_cases import export_arrays, import_arrays, load_arrays, save_arrays
from store_cases import BACKBONE, same_chunk
from test_unlike_stored import drawn as drawn_unlike
from transition_cases import LAYOUTS
from transition_cases import drawn as drawn_hybrid

from kvpatch_jax.cache import Chunk, encode_chunk
from kvpatch_jax.patching import form_patch
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.snapshots.array_entries import (
    ArrayEntry,
    blob_of_entry,
    check_about,
    chunk_of_entry,
    entry_of,
    entry_of_chunk,
)

NAMES = ("unlike", *LAYOUTS)
WORDS = (None, "k4v4", "k8v8")


def made(name: str, word: str | None = None) -> Chunk:
    """Draws a canonical, and encodes it."""
    if name == "unlike":
        chunk = drawn_unlike()
    else:
        kv = drawn_hybrid(LAYOUTS[name], rows=np.float32)
        kv["map"] *= np.float32(0.1) ** np.arange(kv["map"].shape[0])[:, None, None, None]
        chunk = Chunk(kv, np.arange(7, dtype=np.float32), 7, 6, "B", LAYOUTS[name], BACKBONE)
    return chunk if word is None else encode_chunk(chunk, word)


def same_layouts(found: Chunk | None, chunk: Chunk) -> bool:
    """Compares canonicals bit for bit."""
    assert found is not None
    values = [(found.kv[name], chunk.kv[name]) for name in chunk.layout.names]
    for one, other in values:
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            if (a.dtype, a.shape) != (b.dtype, b.shape) or np.asarray(a).tobytes() != np.asarray(b).tobytes():
                return False
    return (found.content, found.layout, found.length) == (chunk.content, chunk.layout, chunk.length)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_entry_of_a_chunk_is_that_of_its_object(name: str, word: str | None):
    """Arrays are stacked over the layers that keep a channel; the object and the chunk come back bit for bit."""
    chunk = made(name, word)
    blob = chunk_blob(chunk)
    part = "kv" if word is None else f"kv.{chunk.encoding}"
    entry, other = entry_of_chunk(chunk), entry_of(blob, part)
    assert entry.about == other.about
    check_about(entry.about)
    for array, value in other.host.items():
        np.testing.assert_array_equal(entry.host[array], value)
    for channel in chunk.layout.channels if word is None else ():
        assert entry.host[f"layers.{channel.name}"].shape[0] == chunk.layout.depth(channel.name)

    again = blob_of_entry(other)
    assert list(again.arrays) == list(blob.arrays)
    for leaf, value in blob.arrays.items():
        np.testing.assert_array_equal(again.arrays[leaf], value)
    encoding, found = chunk_of_entry(ArrayEntry(json.loads(json.dumps(entry.about)), entry.arrays))
    assert encoding == chunk.encoding
    assert same_layouts(found, chunk)


@pytest.mark.parametrize("name", ["unlike", "matrix, tail"])
def test_chunks_go_through_a_checkpoint_with_and_without_a_store(tmp_path: Path, name: str):
    """Contents are saved and loaded, on the host and on a device; a store gives and takes them."""
    chunks = [made(name, word) for word in WORDS[: 2 if name == "unlike" else 3]]
    delta = {channel: np.asarray(value) + np.float32(0.1) for channel, value in chunks[0].kv.items()}
    patch = form_patch(chunks[0], delta, 2, ("A",), method="exact")
    save_arrays(tmp_path / "arrays", chunks, [patch])
    for placement in (None, jax.devices()[0]):
        loaded = load_arrays(tmp_path / "arrays", placement)
        found = {chunk.encoding: chunk for chunk in loaded.chunks}
        assert set(found) == {chunk.encoding for chunk in chunks}
        for chunk in chunks:
            own = found[chunk.encoding]
            assert same_layouts(own, chunk)
            value: Any = own.kv["map" if chunk.layout.parts else "k"]
            if chunk.encoding is None:
                assert isinstance(value, np.ndarray if placement is None else jax.Array)
        assert [one.metadata for one in loaded.patches] == [patch.metadata]

    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        assert import_arrays(tmp_path / "arrays", store).objects == len(chunks) + 1
        store.put(dataclasses.replace(chunks[0], id="C"), encoding="int8")
        exported = export_arrays(store, tmp_path / "export")
        assert exported.objects == len(chunks) + 2
        reduced = store.get("C", BACKBONE, encoding="int8")
        assert reduced is not None
    with ChunkStore(tmp_path / "other", tenant="other", budget=Budget(host=0)) as store:
        assert import_arrays(tmp_path / "export", store).objects == len(chunks) + 2
        for chunk in chunks:
            assert same_layouts(store.get("B", BACKBONE, encoding=chunk.encoding), chunk)
        assert same_chunk(store.get("C", BACKBONE, encoding="int8"), reduced)
    ((word, own),) = load_arrays(tmp_path / "export").reduced
    assert word == "int8"
    assert same_chunk(own, reduced)
