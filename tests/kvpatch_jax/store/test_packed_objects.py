"""Files of canonicals in few bits: bit for bit, as another reader reads them, and refused where they contradict."""

import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from packed_cases import arranged_leaves, encoded, numbers_in, raw_leaves, same_packed
from store_cases import AXES, LAYOUT, MLA, chunk_of, same

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding
from kvpatch_jax.errors import StoreCorruptError
from kvpatch_jax.store.format.codec import canonical_of, chunk_blob
from kvpatch_jax.store.format.codec import chunk_of as decoded
from kvpatch_jax.store.format.header import parse_header
from kvpatch_jax.store.format.objects import Blob, blob_bytes

NAME = "a.kv.k4v4g32.safetensors"
WORDS = ["k4v4", "k3v2g16", "k8v5gall", "k6v7g5", "k1v1g32"]


@pytest.mark.parametrize("layout", [LAYOUT, MLA, AXES], ids=["gqa", "mla", "axes"])
def test_packed_chunks_come_back_bit_for_bit(layout):
    word = "k3v2g16"
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        chunk = encoded(word, layout=layout, dtype=dtype, lead="lead", hidden={1: np.ones((70, 5), np.float32)})
        found = decoded(*arranged_leaves(blob_bytes(chunk_blob(chunk), NAME)))
        assert same_packed(found, chunk)
        assert found.nbytes == chunk.nbytes == KVEncoding.of(word).nbytes(layout, 70)
        for name in layout.names:
            assert same(found.kv[name], chunk.kv[name])


def test_planes_and_scales_are_views_of_the_file():
    _, arrays = arranged_leaves(blob_bytes(chunk_blob(encoded()), NAME))
    body, _ = arranged_leaves(blob_bytes(chunk_blob(encoded()), NAME))
    found = decoded(body, arrays)
    for leaf in jax.tree.leaves(dict(found.kv)):
        assert any(np.shares_memory(leaf, array) for array in arrays.values())
        assert not leaf.flags.writeable


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_another_reader_decodes_the_same_numbers(word, tokens):
    """NumPy, byte by byte, knows neither JAX nor the library's unpacking."""
    encoding = KVEncoding.of(word)
    plain = chunk_of(tokens=tokens, length=tokens, seed=4)
    chunk = kvp.encode_chunk(plain, word)
    body, leaves = raw_leaves(blob_bytes(chunk_blob(chunk), NAME))
    assert body["encoding"] == str(encoding)
    for name, bits, axis in (("k", encoding.keys, -2), ("v", encoding.values, -1)):
        ours = np.asarray(chunk.kv[name])
        for layer in range(3):
            group = min(encoding.group or 10**6, tokens if axis == -2 else 32)
            assert body["groups"][name] == group
            numbers = numbers_in(leaves, f"layer.{layer}.{name}", bits, group, axis, 32)
            # One rounding to float32 of a product and a sum.
            error = np.abs(numbers.reshape(tokens, 2, 16) - ours[layer])
            assert (error <= 2.0**-22 * np.maximum(1.0, np.abs(ours[layer]))).all()
            # And it is the source, up to half a step of its group (a bfloat16 step is up to 2^-7 wider).
            source = np.asarray(plain.kv[name])[layer].reshape(tokens, 32)
            spread = source.max() - source.min()
            assert np.abs(numbers - source).max() <= (spread / (2**bits - 1) / 2) * (1 + 2**-5)


@pytest.mark.parametrize("part", ["nibbles", "scale", "least"])
def test_a_damaged_byte_of_any_leaf_is_caught(part):
    data = blob_bytes(chunk_blob(encoded()), NAME)
    header = parse_header(data[: 8 + int.from_bytes(data[:8], "little")], len(data))
    for leaf in (f"layer.0.k.{part}", f"layer.2.v.{part}"):
        for at in (header.leaves[leaf].offset, header.leaves[leaf].offset + header.leaves[leaf].nbytes - 1):
            for bit in (1, 128):
                damaged = bytearray(data)
                damaged[at] ^= bit
                with pytest.raises(StoreCorruptError):
                    arranged_leaves(bytes(damaged))


# ----------------------------------------------------------------------------------------------------- forgeries


def without(arrays: dict[str, Any], leaf: str) -> dict[str, Any]:
    return {name: value for name, value in arrays.items() if name != leaf}


def wider(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array[:, :1]], 1)


def resized(leaf: str, change: Any):
    return lambda body, arrays: (body, arrays | {leaf: change(arrays[leaf])})


FORGERIES: dict[str, Any] = {
    "no scale": lambda body, arrays: (body, without(arrays, "layer.1.k.scale")),
    "wider plane": resized("layer.1.k.nibbles", wider),
    "plane of other bits": resized("layer.0.k.nibbles", lambda array: array[:, :8]),
    "plane of another dtype": resized("layer.0.k.nibbles", lambda array: array.astype(np.int8)),
    "plane of three axes": resized("layer.0.k.nibbles", lambda array: array[None]),
    "scale of more groups": resized("layer.0.v.scale", wider),
    "bits that are more": lambda body, arrays: (body | {"encoding": "k8v4g32"}, arrays),
    "another group": lambda body, arrays: (body | {"groups": {"k": 16, "v": 32}}, arrays),
    "a huge group": lambda body, arrays: (body | {"encoding": "k4v4gall", "groups": {"k": 1 << 40, "v": 32}}, arrays),
    "group true": lambda body, arrays: (body | {"groups": {"k": True, "v": 32}}, arrays),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_file_is_refused_and_allocates_nothing(case):
    blob = chunk_blob(encoded())
    body, arrays = FORGERIES[case](dict(blob.body), dict(blob.arrays))
    body, arrays = arranged_leaves(blob_bytes(Blob("kv", body, arrays), NAME))  # all checksums are right
    tracemalloc.start()
    with pytest.raises(StoreCorruptError):
        canonical_of("kv.k4v4g32")(body, arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("word", ["k9v4g32", "k4v4", "nf4g64", "K4V4G32", "k4v4g032", "int8"])
def test_an_unknown_word_is_a_later_versions(word):
    blob = chunk_blob(encoded())
    with pytest.raises(StoreCorruptError):
        decoded({**blob.body, "encoding": word}, blob.arrays)
    with pytest.raises(StoreCorruptError):
        decoded({**blob.body, "rotation": "hadamard"}, blob.arrays)
    with pytest.raises(StoreCorruptError):
        decoded(blob.body, {**blob.arrays, "layer.0.k.outliers": np.zeros(3, np.uint8)})
