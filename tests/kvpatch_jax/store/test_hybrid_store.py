"""Canonicals and patches of hybrid models in a store: under their own shapes and dtypes, and with hostile headers."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportOptionalIterable=false, reportOperatorIssue=false

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from store_cases import BACKBONE, file_of, rewritten, same, same_chunk
from transition_cases import LAYOUT as HYBRID
from transition_cases import drawn

import kvpatch_jax as kvp
from kvpatch_jax.cache import antecedent_of, encode_chunk, patch_digest
from kvpatch_jax.core import RaggedFactors, is_packed
from kvpatch_jax.errors import LayoutError, ShapeError, StoreCorruptError, StoreError
from kvpatch_jax.patching.factors import metadata_of
from kvpatch_jax.store import Budget, ChunkStore, load_snapshot, save_snapshot
from kvpatch_jax.store.format.codec import chunk_blob, chunk_of
from kvpatch_jax.store.format.layout_codec import layout_body, layout_of
from kvpatch_jax.store.format.patch_codec import patch_blob, patch_parts
from tests.arrays import placed

PARTS = ("map", "state", "tail")


def made(layout: kvp.KVLayout = HYBRID, rows: Any = jnp.bfloat16, id: str = "B") -> kvp.Chunk:
    local = np.arange(7, dtype=np.float32)
    return kvp.Chunk(drawn(layout, rows=rows), local, 7, 6, id, layout, BACKBONE)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


@pytest.mark.parametrize("encoding", [None, "int8"])
def test_a_chunk_comes_back_whole_and_layer_by_layer(store: ChunkStore, encoding: str | None):
    chunk = made()
    store.put(chunk, **({} if encoding is None else {"encoding": encoding}))
    found = store.get("B", BACKBONE, encoding=encoding)
    assert found.layout == HYBRID
    assert (found.tokens, found.length) == (7, 6)
    assert found.content == chunk.content
    if encoding is None:
        assert same_chunk(found, chunk)
    elif encoding == "k4v4":
        assert same_chunk(found, encode_chunk(chunk, encoding))
    for name in PARTS:
        assert found.kv[name].dtype == (jnp.bfloat16 if encoding == "k4v4" else np.float32)
        # Whatever rows are kept in, a transition has bfloat16 at least.
        wanted = chunk.kv[name] if encoding is None else chunk.kv[name].astype(jnp.bfloat16)
        assert (np.asarray(found.kv[name], np.float32) == np.asarray(wanted, np.float32)).all()

    stream = store.stream("B", BACKBONE, encoding=encoding)
    layers = {layer: {name: np.asarray(value) for name, value in values.items()} for layer, values in stream}
    kept = {layer: sorted(values) for layer, values in layers.items()}
    assert kept == {layer: ["k", "v"] if layer in (2, 4) else sorted(PARTS) for layer in range(5)}
    for name in HYBRID.names:
        rows = np.stack([layers[layer][name] for layer in HYBRID.layers_of(name)])
        assert same(rows, np.asarray(found.kv[name]))
    # Through memory alone, without a file.
    blob = chunk_blob(chunk, encoding)
    assert same_chunk(chunk_of(json.loads(json.dumps(blob.body)), blob.arrays), found)


def patches_of(chunk: kvp.Chunk) -> list[kvp.Patch]:
    """Patches of rows alone, of the transition alone, of both, and with a rank for each layer, in 16 bits."""
    rng = np.random.default_rng(3)

    def normal(*shape: int):
        return placed(rng.normal(size=shape), np.float32)

    rows = {name: (normal(2, 7, 2), normal(2, 2, 16)) for name in "kv"}
    apart = {"map": (normal(3, 6, 1), normal(3, 1, 18)), "tail": normal(3, 3, 1, 10)}
    both = {"k": normal(2, 7, 2, 8), "state": (normal(3, 6, 1), normal(3, 1, 12))}
    ragged = {"state": RaggedFactors(normal(3, 6), normal(3, 12), placed([[0, 1], [3, 3], [2, 3]], np.int16))}
    patches = []
    for name, factors in (("A", rows), ("C", apart), ("D", both)):
        patches.append(kvp.Patch(factors, metadata_of(chunk, "canonical", antecedent_of((name,)))))
    return [*patches, kvp.Patch(ragged, metadata_of(chunk, "canonical", antecedent_of(("E",))))]


@pytest.mark.slow
def test_patches_of_rows_of_the_transition_or_of_both_come_back(store: ChunkStore):
    chunk = made(rows=np.float32)
    store.put(chunk)
    for patch in patches_of(chunk):
        store.put_patches([patch])
        (found,) = store.get_patches(patch.metadata)
        assert found.metadata == patch.metadata
        assert found.ranks == patch.ranks
        assert found.tokens == patch.tokens
        assert patch_digest(found) == patch_digest(patch)
        for one, other in zip(jax.tree.leaves(found.factors), jax.tree.leaves(dict(patch.factors)), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()


def test_a_snapshot_restores_what_was_saved(store: ChunkStore, tmp_path: Path):
    chunk = made()
    store.put(chunk)
    store.put(chunk, encoding="k4v4")
    save_snapshot(tmp_path / "root", tmp_path / "snapshot")
    load_snapshot(tmp_path / "snapshot", tmp_path / "other")
    with ChunkStore(tmp_path / "other") as other:
        assert same_chunk(other.get("B", BACKBONE), chunk)
        assert is_packed(other.get("B", BACKBONE, encoding="k4v4").kv["k"])


# ------------------------------------------------------------------------------------------------------- headers


def changed(raw: bytes, place: int, **fields: Any) -> bytes:
    def change(tree: dict[str, Any], body: dict[str, Any]) -> None:
        body["layout"]["channels"][place] |= fields

    return rewritten(raw, change)


HOSTILE: list[Any] = [None, True, 0, -1, 5, 7, 2**40, 10**30, 1.5, 6.0, "", "6", [], [6], {}]


def test_hostile_rows_are_misses_and_nothing_is_decoded(store: ChunkStore):
    chunk = made()
    store.put(chunk)
    path = file_of(store, chunk)
    good = path.read_bytes()

    def refused(raw: bytes) -> None:
        path.write_bytes(raw)
        assert store.get("B", BACKBONE) is None
        for kept in path.parent.rglob("*"):
            if kept.is_file() and kept != path:
                kept.unlink()

    for value in HOSTILE:
        refused(changed(good, 3, rows=value))
    refused(changed(good, 4, rows=2**40))
    refused(changed(good, 2, rows=2**40, width=2**40))
    # Rows of a channel of tokens, a part's name on one, a name of none on a part, and parts in another order.
    refused(changed(good, 0, rows=7))
    refused(changed(good, 0, name="state"))
    refused(changed(good, 3, name="states"))

    def reordered(tree: dict[str, Any], body: dict[str, Any]) -> None:
        body["layout"]["channels"].reverse()

    refused(rewritten(good, reordered))
    path.write_bytes(good)
    assert same_chunk(store.get("B", BACKBONE), chunk)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.sampled_from(("rows", "name", "heads", "width", "rotary", "layers")), VALUES)
def test_any_value_of_a_channels_field_is_decoded_or_refused(place: int, field: str, value: Any):
    body = json.loads(json.dumps(layout_body(HYBRID)))
    body["channels"][place][field] = value
    try:
        found = layout_of(body)
    except (StoreError, LayoutError, TypeError, LookupError, ValueError, AttributeError):
        return
    assert json.loads(json.dumps(layout_body(found))) == body


def test_bodies_that_contradict_their_arrays_are_refused():
    blob = chunk_blob(made())
    body = json.loads(json.dumps(blob.body))
    for arrays in (
        {name: value for name, value in blob.arrays.items() if not name.endswith(".tail")},
        blob.arrays | {"layer.3.state": np.zeros((6, 2, 4), np.float32)},
        blob.arrays | {"layer.0.map": blob.arrays["layer.0.map"][:5]},
        blob.arrays | {"layer.0.k": blob.arrays["layer.2.k"]},
        blob.arrays | {"layer.0.map.scale": np.ones((1, 3, 6), np.float32)},
    ):
        with pytest.raises(StoreError):
            chunk_of(body, arrays)
    patch = patch_blob(patches_of(made())[2])
    fields = json.loads(json.dumps(patch.body))
    fields["stamp"]["layout"]["channels"][3]["rows"] = 2**40
    fields["stamp"]["layout"]["channels"][2] |= {"rows": 1, "width": 1}
    with pytest.raises((StoreCorruptError, ShapeError, LayoutError)):
        patch_parts(fields, patch.arrays)
