"""Canonicals and patches whose layers are of unlike kinds: stored, read back, streamed, and with hostile headers."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from store_cases import BACKBONE, file_of, rewritten, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.cache import encode_chunk
from kvpatch_jax.core import Channel
from kvpatch_jax.errors import LayoutError, StoreCorruptError, StoreError
from kvpatch_jax.patching import form_patch
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.format.layout_codec import layout_body, layout_of

LOCAL = kvp.Rope(30.0, 4, cached="pairs", width=6, scaling=kvp.rope.Scaling("linear", factor=2.0))
UNLIKE = kvp.KVLayout(
    "gqa",
    5,
    (
        Channel("k", 1, 8, 8, layers=(1, 4)),
        Channel("v", 1, 8, layers=(1, 4)),
        Channel("k_local", 2, 6, 4, LOCAL, (0, 2, 3)),
        Channel("v_local", 2, 6, layers=(0, 2, 3)),
    ),
    kvp.Rope(1e4, 8),
)


def drawn(id: str = "B", seed: int = 0, layout: kvp.KVLayout = UNLIKE) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    shapes = {c.name: (layout.depth(c.name), 9, c.heads, c.width) for c in layout.channels}
    kv = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return kvp.Chunk(kv, np.arange(9, dtype=np.float32), 9, 8, id, layout, BACKBONE)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


@pytest.mark.parametrize("encoding", [None, "int8"])
def test_a_chunk_comes_back_whole_and_layer_by_layer(store: ChunkStore, encoding: str | None):
    chunk = drawn()
    store.put(chunk, **({} if encoding is None else {"encoding": encoding}))
    found = store.get("B", BACKBONE, encoding=encoding)
    assert found.layout == UNLIKE
    expected = {name: np.asarray(value) for name, value in chunk.kv.items()}
    if encoding is None:
        assert same_chunk(found, chunk)
    elif encoding == "k8v8":
        expected = {name: np.asarray(value) for name, value in encode_chunk(chunk, "k8v8").kv.items()}
    for name, value in found.kv.items():
        assert np.abs(np.asarray(value) - expected[name]).max() <= 0.05 * np.abs(expected[name]).max()

    stream = store.stream("B", BACKBONE, encoding=encoding)
    assert stream is not None
    layers = {layer: {name: np.asarray(value) for name, value in values.items()} for layer, values in stream}
    kept = {layer: sorted(values) for layer, values in layers.items()}
    assert kept == {layer: ["k", "v"] if layer in (1, 4) else ["k_local", "v_local"] for layer in range(5)}
    for name in UNLIKE.names:
        rows = np.stack([layers[layer][name] for layer in UNLIKE.layers_of(name)])
        assert same(rows, found.kv[name])


def test_a_patch_comes_back(store: ChunkStore):
    chunk = drawn()
    target = {name: np.asarray(value) for name, value in drawn(seed=1).kv.items()}
    patch = form_patch(chunk, target, 2, ("A",), layers=(0, 1, 2), dense=False)
    store.put(chunk)
    store.put_patches([patch])
    (found,) = store.get_patches(patch.metadata)
    assert found.metadata == patch.metadata
    depths = {name: np.shape(u)[0] for name, (u, _) in found.factors.items()}
    assert depths == {"k": 1, "v": 1, "k_local": 2, "v_local": 2}
    for name, pair in patch.factors.items():
        assert all(same(one, other) for one, other in zip(found.factors[name], pair, strict=True))


HOSTILE: list[Any] = [None, True, 0, -1, 1.5, "", "1", [], [4, 1], [1, 1], [1, 9], [-1, 1], [True, 4], [1.0, 4]]
HOSTILE += [{}, {"0": 1}, [[1, 4]], list(range(5)), ["1", "4"], {"theta": 1.0}, [10**30], [None]]


def damaged(raw: bytes, place: int, field: str, value: Any) -> bytes:
    def change(tree: dict[str, Any], body: dict[str, Any]) -> None:
        body["layout"]["channels"][place][field] = value

    return rewritten(raw, change)


@pytest.mark.parametrize("field", ["layers", "rope"])
@pytest.mark.parametrize("place", [0, 2])
def test_hostile_fields_are_typed_errors(store: ChunkStore, place: int, field: str):
    """A field that no version writes is damage, whatever it is; nothing else is raised, and nothing is decoded."""
    chunk = drawn()
    store.put(chunk)
    path = file_of(store, chunk)
    good = path.read_bytes()
    for value in HOSTILE:
        body = json.loads(json.dumps(layout_body(UNLIKE)))
        body["channels"][place][field] = value
        with pytest.raises((StoreCorruptError, LayoutError, TypeError, LookupError, ValueError, AttributeError)):
            layout_of(body)
        path.write_bytes(damaged(good, place, field, value))
        assert store.get("B", BACKBONE) is None
        for kept in path.parent.rglob("*"):
            if kept.is_file() and kept != path:
                kept.unlink()
    path.write_bytes(good)
    assert same_chunk(store.get("B", BACKBONE), chunk)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.sampled_from(("layers", "rope", "rotary", "width")), VALUES)
def test_any_value_of_a_channels_field_is_decoded_or_refused(place: int, field: str, value: Any):
    body = json.loads(json.dumps(layout_body(UNLIKE)))
    body["channels"][place][field] = value
    try:
        found = layout_of(body)
    except (StoreError, LayoutError, TypeError, LookupError, ValueError, AttributeError):
        return
    assert json.loads(json.dumps(layout_body(found))) == body
