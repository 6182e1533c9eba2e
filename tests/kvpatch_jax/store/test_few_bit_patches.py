"""Patches in few bits, and with a rank for each layer, as objects; and patches of encoded bases."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from packed_cases import arranged_leaves, few_bit_patch, numbers_in, ragged_patch, raw_leaves, same_leaves
from store_cases import BACKBONE, chunk_of, patch_of

import kvpatch_jax as kvp
from kvpatch_jax.core import RaggedFactors
from kvpatch_jax.errors import StoreCorruptError
from kvpatch_jax.store import Budget, ChunkStore, PatchKey
from kvpatch_jax.store.format.naming import ObjectNames
from kvpatch_jax.store.format.objects import blob_bytes
from kvpatch_jax.store.format.patch_codec import patch_blob, patch_parts
from kvpatch_jax.store.format.patch_codec import patch_of as patch_back

NAME = "a.p.safetensors"
CHUNK = chunk_of(tokens=40)
PACKED = kvp.encode_chunk(CHUNK, "k4v4")
NAMES = ObjectNames("default", b"a secret of sixteen")


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        yield store


def dense(dtype: str = "int4") -> kvp.Patch:
    rng = np.random.default_rng(2)
    factors: Any = {"v": jnp.asarray(rng.standard_normal((3, 40, 2, 16)), jnp.float32)}
    return kvp.quantise(kvp.Patch(factors, patch_of(CHUNK).metadata), dtype)


CASES = {
    **{dtype: few_bit_patch(CHUNK, dtype) for dtype in ("int2", "int3", "int4", "int5g16", "int6g7", "int7gall")},
    "of an encoded base": few_bit_patch(PACKED),
    "rank 5": few_bit_patch(CHUNK, "int3", rank=5),
    "dense": dense(),
    "dense of three bits": dense("int3"),
    "ragged": ragged_patch(CHUNK),
    "ragged in bfloat16": ragged_patch(CHUNK, "bfloat16"),
    "ragged in int8": ragged_patch(CHUNK, "int8"),
    "ragged in few bits": ragged_patch(CHUNK, "int4"),
    "ragged of an encoded base": ragged_patch(PACKED, "int3"),
    "truncated": kvp.truncate(few_bit_patch(CHUNK, rank=5), {"k": 3, "v": 2}),
    "ragged and truncated": kvp.truncate(ragged_patch(CHUNK, "int4"), {"k": 2, "v": 1}),
    "fewer layers": kvp.keep_layers(ragged_patch(CHUNK, "int4"), [0, 2]),
    "padded": few_bit_patch(CHUNK).pad(50),
    "ragged and padded": ragged_patch(CHUNK, "int4").pad(50),
}


def through_a_file(patch: kvp.Patch) -> kvp.Patch:
    return patch_back(patch_parts(*arranged_leaves(blob_bytes(patch_blob(patch), NAME))))


@pytest.mark.parametrize("case", CASES)
def test_patches_come_back_bit_for_bit(case, store: ChunkStore):
    patch = CASES[case]
    found = through_a_file(patch)
    assert found.metadata == patch.metadata
    assert same_leaves(found.factors, patch.factors)
    assert found.ranks == patch.ranks
    assert found.nbytes == patch.nbytes == patch_blob(patch).nbytes
    store.put_patches([patch])
    (stored,) = store.get_patches(patch.metadata)
    assert same_leaves(stored.factors, patch.factors)


@pytest.mark.parametrize("dtype", ["int2", "int3", "int6g7", "int7gall"])
def test_another_reader_decodes_the_same_factors(dtype):
    patch = few_bit_patch(CHUNK, dtype)
    body, leaves = raw_leaves(blob_bytes(patch_blob(patch), NAME))
    for name in ("k", "v"):
        for part, value in zip("uv", patch.factors[name], strict=True):  # pyright: ignore
            form, ours = body["packed"][f"{name}.{part}"], np.asarray(value)
            for layer in range(3):
                one = {}
                for leaf, (word, shape, raw) in leaves.items():
                    step = len(raw) // shape[0]
                    one[leaf] = (word, shape[1:], raw[layer * step : (layer + 1) * step])
                words = (form["bits"], form["group"], form["axis"], form["columns"])
                numbers = numbers_in(one, f"{name}.{part}", *words)
                # A product of a bfloat16 and a small whole number, rounded to the dtype of the factors.
                wanted = numbers.astype(np.float32).astype(ours.dtype).astype(np.float64)
                assert (wanted == ours[layer].astype(np.float64)).all()


# -------------------------------------------------------------------------------------------- names and lookup


def test_an_encoding_is_part_of_what_is_looked_for(store: ChunkStore):
    plain, packed, wider = patch_of(CHUNK), few_bit_patch(PACKED), few_bit_patch(CHUNK, encoding="k8v8g32")
    store.put_patches([plain, packed, wider])
    store.put_patch_async(ragged_patch(PACKED)).result(timeout=300)

    def found(encoding: Any) -> list[Any]:
        key = PatchKey("B", BACKBONE, ("A",), encoding=encoding)
        return [(type(patch.factors["k"]), patch.metadata.encoding) for patch in store.get_patches(key)]

    assert found(None) == [(tuple, None)]
    assert found("k4v4") == found("k4v4g32") == [(RaggedFactors, "k4v4g32"), (tuple, "k4v4g32")]
    assert found("k8v8") == [(tuple, "k8v8g32")]
    assert found("k4v4g64") == []
    assert [patch.metadata for patch in store.get_patches(packed.metadata)] == [packed.metadata] * 2
    assert store.patch_count("B", BACKBONE) == 4
    assert PatchKey("B", BACKBONE, (), encoding="k4v4") == PatchKey("B", BACKBONE, (), encoding="k4v4g32")


# ------------------------------------------------------------------------------------------------------ forgeries


def form(**fields: Any) -> Any:
    def change(body: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict, dict]:
        packed = {leaf: own | (fields if leaf == "k.u" else {}) for leaf, own in body["packed"].items()}
        return body | {"packed": packed}, arrays

    return change


def part(**leaves: Any) -> Any:
    """Replaces leaves; None removes one."""

    def change(body: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict, dict]:
        named = {name.replace("__", "."): value for name, value in leaves.items()}
        changed = {name: named[name](value) if named.get(name) else value for name, value in arrays.items()}
        return body, {name: value for name, value in changed.items() if named.get(name, value) is not None}

    return change


FORGED: dict[str, Any] = {
    "bits above": form(bits=9),
    "a huge group": form(group=1 << 40),
    "columns beyond the bytes": form(columns=1 << 40),
    "another axis": form(axis=-1),
    "bits by word": form(bits="4"),
    "no scale": part(k__u__scale=None),
    "scale in float32": part(k__u__scale=lambda array: array.astype(np.float32)),
    "forms as a list": lambda body, arrays: (body | {"packed": ["k.u"]}, arrays),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_forms_are_refused(case):
    blob = patch_blob(few_bit_patch(CHUNK, "int4"))
    body, arrays = FORGED[case](json.loads(json.dumps(blob.body)), dict(blob.arrays))
    with pytest.raises(StoreCorruptError):
        patch_parts(body, arrays)


RAGGED: dict[str, Any] = {
    "rows beyond": part(k__rows=lambda array: array + 1),
    "rows of another dtype": part(k__rows=lambda array: array.astype(np.int64)),
    "no rows": part(k__rows=None),
    "fewer directions": part(k__u=lambda array: array[:3]),
    "u of more axes": part(k__u=lambda array: array[None]),
    "rows alone": lambda body, arrays: (body | {"forms": body["forms"] | {"k": ["rows"]}}, arrays),
}


@pytest.mark.parametrize("case", RAGGED)
def test_forged_ranks_are_refused(case):
    blob = patch_blob(ragged_patch(CHUNK))
    body, arrays = RAGGED[case](dict(blob.body), dict(blob.arrays))
    with pytest.raises(StoreCorruptError):
        patch_parts(body, arrays)
    assert isinstance(patch_parts(blob.body, blob.arrays)[0]["k"], RaggedFactors)
