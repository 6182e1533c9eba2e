"""Hybrid canonicals whose maps are in factors: the same bits from a store as in memory, and hostile files refused."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalContextManager=false

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from packed_cases import arranged_leaves
from store_cases import BACKBONE, file_of, rewritten, same
from transition_cases import LAYOUT, LAYOUTS, drawn

import kvpatch_jax as kvp
from kvpatch_jax.cache import decode_chunk, encode_chunk
from kvpatch_jax.core import EncodedMap, KVEncoding, is_packed
from kvpatch_jax.errors import InputError, StoreCorruptError
from kvpatch_jax.patching import Placed, apply_patch, form_patch
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.format.codec import chunk_blob, chunk_of
from kvpatch_jax.store.format.objects import blob_bytes

WORD = "k4v4g32m0_05"
NAME = f"a.kv.{WORD}.safetensors"


def made(layout: kvp.KVLayout = LAYOUT, scale: float = 1.0, id: str = "B", seed: int = 0) -> kvp.Chunk:
    """A canonical of whose map's first layer one head is dropped and one of rank 1; `scale` is of all heads."""
    kv = drawn(layout, seed, rows=jnp.bfloat16)
    map_ = kv["map"] * np.float32(scale)
    map_[0, :, 1] *= 1e-3
    if map_.shape[-1] > 1:
        map_[0, :, 2] = np.outer(np.arange(6), np.ones(6)) / 20
    kv["map"] = map_
    return kvp.Chunk(kv, np.arange(7, dtype=np.float32), 7, 6, id, layout, BACKBONE)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


@pytest.mark.parametrize("name", ["matrix, tail", "row"])
def test_a_chunk_comes_back_bit_for_bit(store: ChunkStore, name: str):
    chunk = made(LAYOUTS[name])
    store.put(chunk, encoding="k4v4m0.05")
    found, few = store.get("B", BACKBONE, encoding=WORD), encode_chunk(chunk, WORD)
    ranks = few.kv["map"].ranks
    assert ranks[0].tolist() == ([6, 0, 1] if name == "matrix, tail" else [6, 0, 6])
    assert (found.encoding, found.content, found.layout) == (WORD, chunk.content, chunk.layout)
    assert isinstance(found.kv["map"], EncodedMap)
    assert same(found.kv["map"].ranks, ranks)
    assert same(found.kv["map"].factors, few.kv["map"].factors)
    for name in few.kv:
        assert same(np.asarray(found.kv[name]), np.asarray(few.kv[name]))
    assert found.nbytes == few.nbytes < KVEncoding.of(WORD).nbytes(chunk.layout, 7)

    # Layer by layer, as a stream decodes them; and as it keeps them.
    with store.stream("B", BACKBONE, encoding=WORD) as stream:
        layers: dict[int, Any] = {}
        whole = stream.chunk(lambda layer, values: layers.update({layer: values}))
    rows = np.stack([np.asarray(layers[layer]["map"]) for layer in (0, 1, 3)])
    assert same(rows, np.asarray(few.kv["map"]))
    assert same(whole.kv["map"].factors, few.kv["map"].factors)
    # What is found can be put again, and decoded kv cannot: their codes are lost.
    store.put(found)
    with pytest.raises(InputError, match="decoded from"):
        store.put(decode_chunk(found))
    assert decode_chunk(found).kv["map"].dtype == np.float32
    assert store.get("B", BACKBONE, encoding="k4v4") is None


def test_bytes_are_those_of_arrays_and_of_the_file(store: ChunkStore):
    # As long a header as is planned for.
    chunk = dataclasses.replace(made(id="0" * 64), backbone="0" * 64, content="0" * 64)
    gone, worst = dataclasses.replace(chunk, kv={**chunk.kv, "map": 0 * chunk.kv["map"]}), KVEncoding.of("k4v4m0")
    for one, word in ((chunk, WORD), (gone, WORD), (chunk, str(worst))):
        few = encode_chunk(one, word)
        blob = chunk_blob(one, word)
        assert blob.nbytes - 4 * 7 == few.nbytes == sum(np.asarray(value).nbytes for name, value in blob.arrays.items()
                                                        if name != "local")  # fmt: skip
        found = chunk_of(*arranged_leaves(blob_bytes(blob, NAME)))
        assert found.nbytes == few.nbytes
        assert np.array_equal(found.kv["map"], few.kv["map"])
    assert few.nbytes == worst.nbytes(LAYOUT, 7)
    # Nothing of a map that decayed but a rank for each of nine heads.
    nothing = encode_chunk(gone, WORD)
    assert nothing.kv["map"].nbytes == 4 * 9
    assert KVEncoding.of(WORD).nbytes(LAYOUT, 7) - nothing.nbytes == 2 * 3 * 3 * 6 * 6
    assert not np.asarray(nothing.kv["map"]).any()


def test_a_patch_mends_the_decoded_map_and_is_found_by_its_encoding(store: ChunkStore):
    few = encode_chunk(made(), WORD)
    target = {name: np.asarray(value) for name, value in drawn(seed=5).items()}
    target |= {name: target[name].astype(jnp.bfloat16) for name in "kv"}
    patch = form_patch(few, target, {"rows": 99, "transition": 99}, ("A",), method="exact")
    placed = apply_patch(Placed(few, patch, 3, ("A",)))
    for name in ("map", "state", "tail"):
        # Factors have rows' dtype, and a state's sum that of the state: bfloat16.
        error = np.abs(np.asarray(placed[name], np.float64) - target[name]).max()
        assert error <= 2**-6 * np.abs(target[name]).max(), name
    delta = np.asarray(target["map"], np.float64) - np.asarray(few.kv["map"])
    assert np.abs(delta).max() > 0.1
    # The base is what the chunk decodes to, in a store too.
    store.put(few)
    store.put_patches([patch])
    found = store.get("B", BACKBONE, encoding=WORD)
    (again,) = store.get_patches(patch.metadata)
    assert again.metadata.encoding == WORD
    for name, value in apply_patch(Placed(found, again, 3, ("A",))).items():
        assert same(np.asarray(value), np.asarray(placed[name]))
    other = dataclasses.replace(patch.metadata, encoding="k4v4g32")
    assert not store.get_patches(other)


def test_chunks_that_are_not_of_their_word_are_refused():
    few, plain = encode_chunk(made(), WORD), encode_chunk(made(), "k4v4")
    for kv, word in ((few.kv, "k4v4g32"), (plain.kv, WORD), ({**few.kv, "map": plain.kv["map"]}, WORD)):
        chunk = kvp.Chunk(
            {name: kv[name] for name in LAYOUT.names}, few.local, 7, 6, "B", LAYOUT, BACKBONE, encoding=word
        )
        with pytest.raises(InputError, match="whose codes are not those of"):
            chunk_blob(chunk)
    rows = {name: np.asarray(few.kv[name]) for name in LAYOUT.names} | {"map": few.kv["map"]}
    with pytest.raises(InputError, match="a map in factors beside rows as arrays"):
        kvp.Chunk(rows, few.local, 7, 6, "B", LAYOUT, BACKBONE, encoding=WORD)


# ----------------------------------------------------------------------------------------------------- forgeries

RANKS, FACTORS = "layer.0.map.ranks", "layer.0.map.factors"


def set_to(*ranks: int):
    return lambda body, arrays: (body, arrays | {RANKS: np.array(ranks, np.int32)})


def replaced(leaf: str, change: Any):
    return lambda body, arrays: (body, arrays | {leaf: change(arrays[leaf])})


FORGERIES: dict[str, Any] = {
    "no ranks": lambda body, arrays: (body, {name: own for name, own in arrays.items() if name != RANKS}),
    "no factors": lambda body, arrays: (body, {name: own for name, own in arrays.items() if name != FACTORS}),
    "ranks of more numbers": set_to(6, 6, 1),
    "ranks of fewer numbers": set_to(0, 0, 1),
    "a negative rank": set_to(6, -1, 2),
    "a rank that is no less than whole": set_to(3, 0, 1),
    "a rank beyond the rows": set_to(7, 0, 1),
    "the greatest rank": set_to(2**31 - 1, 0, 1),
    "ranks of another number of heads": replaced(RANKS, lambda own: own[:2]),
    "ranks of two axes": replaced(RANKS, lambda own: own[None]),
    "ranks of a float": replaced(RANKS, lambda own: own.astype(np.float32)),
    "ranks that are not finite": replaced(RANKS, lambda own: np.full(3, np.nan, np.float32)),
    "too few factors": replaced(FACTORS, lambda own: own[:-1]),
    "too many factors": replaced(FACTORS, lambda own: np.append(own, own)),
    "factors of float32": replaced(FACTORS, lambda own: own.astype(np.float32)),
    "factors of two axes": replaced(FACTORS, lambda own: own[None]),
    "a map decoded to bfloat16": lambda body, arrays: (
        body | {"dtypes": body["dtypes"] | {"map": "bfloat16"}},
        arrays,
    ),
    "another word": lambda body, arrays: (body | {"encoding": "k4v4g32"}, arrays),
    "a word of no error": lambda body, arrays: (body | {"encoding": "k4v4g32m1_5"}, arrays),
    "a word that is not finite": lambda body, arrays: (body | {"encoding": "k4v4g32mnan"}, arrays),
    "a word in another form": lambda body, arrays: (body | {"encoding": "k4v4g32m0.05"}, arrays),
    "a whole map beside it": lambda body, arrays: (body, arrays | {"layer.0.map": np.zeros((6, 3, 6), np.float32)}),
    "another leaf beside it": lambda body, arrays: (body, arrays | {"layer.0.map.scale": np.zeros(3, np.float32)}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(name: str):
    blob = chunk_blob(made(), WORD)
    body, arrays = FORGERIES[name](json.loads(json.dumps(blob.body)), dict(blob.arrays))
    with pytest.raises(StoreCorruptError):
        chunk_of(body, arrays)


def test_a_map_that_a_few_ranks_stand_for_is_not_allocated():
    """Rows that the file's state really has, of a map that would have their square."""
    blob = chunk_blob(made(LAYOUTS["matrix"]), WORD)
    body, arrays = json.loads(json.dumps(blob.body)), dict(blob.arrays)
    wide = 1 << 20
    body["layout"]["channels"][2] |= {"rows": wide, "width": wide, "heads": 1}
    body["layout"]["channels"][3] |= {"rows": wide, "width": 1, "heads": 1}
    for layer in (0, 1, 3):
        arrays[f"layer.{layer}.map.ranks"] = np.zeros(1, np.int32)
        arrays[f"layer.{layer}.map.factors"] = arrays[FACTORS][:0]
        arrays[f"layer.{layer}.state"] = np.zeros((wide, 1, 1), jnp.bfloat16)
    with pytest.raises(StoreCorruptError):
        chunk_of(body, arrays)


def test_a_hostile_file_is_a_miss_and_nothing_else_is_lost(store: ChunkStore):
    chunk = made()
    store.put(chunk)
    store.put(chunk, encoding=WORD)
    (path,) = [path for path in file_of(store, chunk).parent.iterdir() if WORD in path.name]
    good = path.read_bytes()

    def forged(tree: dict[str, Any], body: dict[str, Any]) -> None:
        body["layout"]["channels"][2]["heads"] = 2
        body["layout"]["channels"][3]["heads"] = 2

    def unknown(tree: dict[str, Any], body: dict[str, Any]) -> None:
        body["encoding"] = "k4v4g32n0_05"

    for change in (forged, unknown):
        path.write_bytes(rewritten(good, change))
        assert store.get("B", BACKBONE, encoding=WORD) is None
        assert not is_packed(store.get("B", BACKBONE).kv["k"])
    path.write_bytes(good)
    assert isinstance(store.get("B", BACKBONE, encoding=WORD).kv["map"], EncodedMap)
