"""Factors that do not fit their metadata, ranks beyond a chunk, padding, smaller forms, and how containers print."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import check_factors
from kvpatch_jax.core import is_packed
from kvpatch_jax.errors import InputError, LayoutError, PatchMismatchError, ShapeError
from tests.shared.operator_cases import chunk_of, conditioned_of

A = ("A1", "A2")


def worst(found: dict, wanted: dict) -> float:
    return max(float(np.abs(np.asarray(found[name]) - np.asarray(wanted[name])).max()) for name in wanted)


def form(chunk: kvp.Chunk, rank: int = 4, **more) -> kvp.Patch:
    return kvp.form_patch(chunk, conditioned_of(chunk), rank, A, **more)


# ----------------------------------------------------------------------------------------------------- factors


def test_factors_fit_their_stamp(unchecked):
    patch = form(chunk_of("gqa"))
    u, v = patch.factors["k"]
    dense = jnp.zeros((3, 24, 2, 16))
    for change, words in (
        ({"k": (u[:1], v[:1])}, r"expected \[3"),  # one layer under a metadata of three
        ({"k": (u[:1], v)}, r"expected \[3"),
        ({"k": (u, v[..., :1])}, r"4, 32\]"),
        ({"k": (u[..., :1], v)}, r"v of 'k'"),
        ({"k": (u[:, :1], v)}, "tokens"),
        ({"k": dense[:1]}, r"expected \[3"),
        ({"k": dense[:, :1]}, "tokens"),
        ({"k": dense[..., :1]}, "16"),
        ({"k": (u[0], v[0])}, "shape"),
    ):
        with pytest.raises(ShapeError, match=words):
            check_factors({**patch.factors, **change}, patch.metadata)


def test_channels_and_layers_are_the_layouts():
    patch = form(chunk_of("gqa"))
    with pytest.raises(LayoutError, match="'q'"):
        check_factors({**patch.factors, "q": patch.factors["k"]}, patch.metadata)
    for layers in ((0, 1, 7), (1, 0, 2), ()):
        with pytest.raises(InputError, match="layers"):
            check_factors(patch.factors, dataclasses.replace(patch.metadata, layers=layers))
    with pytest.raises(LayoutError, match="'q'"):
        kvp.truncate(patch, {"q": 2})
    correction = kvp.correction_patch(chunk_of("gqa"), patch, conditioned_of(chunk_of("gqa"), seed=2), 4, ("C",))
    with pytest.raises(LayoutError, match="'q'"):
        kvp.update_patch(patch, correction, {"k": 4, "q": 4})


# ------------------------------------------------------------------------------------------------------- ranks


def test_a_rank_beyond_the_chunk_is_capped():
    chunk = chunk_of("gqa", tokens=14)
    conditioned = conditioned_of(chunk, rank=14)
    patch = kvp.form_patch(chunk, conditioned, 16, A)
    assert patch.ranks == {"k": None, "v": None}
    found = kvp.apply_patch(chunk, patch, 3, A)
    assert worst(found, kvp.to_engine(chunk.layout, conditioned, chunk.local, 3)) < 2e-5
    for rank in (0, -1):
        with pytest.raises(InputError, match="expected at least 1"):
            kvp.form_patch(chunk, conditioned, rank, A)


@pytest.mark.nightly
def test_ranks_are_capped_wherever_patches_are_formed():
    chunk = chunk_of("gqa", tokens=14)
    one, two = conditioned_of(chunk, seed=1), conditioned_of(chunk, seed=2)
    patches = [
        kvp.orbit_patch(kvp.accumulate(None, one, chunk, A), 16),
        kvp.removal_patch(chunk, one, two, 16, A, ("A0",)),
        kvp.correction_patch(chunk, form(chunk), two, 16, ("C",)),
        kvp.form_patch(chunk, one, {"k": 15, "v": 3}, A),
    ]
    assert [patch.ranks["k"] for patch in patches] == [None] * 4  # dense, where factors would not be smaller
    assert [patch.ranks["v"] for patch in patches] == [None] * 3 + [3]
    long = chunk_of("mla", tokens=40)
    assert kvp.form_patch(long, conditioned_of(long), 24, A, dense=False).ranks["kpe"] == 16  # features


# ----------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(("options", "dtype"), [({}, None), ({"rank": 24}, jnp.int8)])
def test_a_patch_is_padded_with_its_chunk(options: dict, dtype):
    chunk = chunk_of("gqa")
    patch = form(chunk, **options)
    patch = patch if dtype is None else kvp.quantise(patch, dtype)
    wide = kvp.apply_patch(chunk.pad(32), patch.pad(32), 3, A)
    narrow = kvp.apply_patch(chunk, patch, 3, A)
    for name in narrow:
        np.testing.assert_allclose(wide[name][:, :24], narrow[name], atol=1e-6)
        assert not wide[name][:, 24:].any()
    assert patch.pad(24).ranks == patch.ranks
    with pytest.raises(ShapeError, match="at least 24"):
        patch.pad(12)
    with pytest.raises(ShapeError, match="24 tokens, batch None; expected the chunk's 32"):
        kvp.apply_patch(chunk.pad(32), patch, 3, A)


# ----------------------------------------------------------------------------------------------- sums, updates


def test_a_chunk_of_one_token_is_not_broadcast():
    chunk = chunk_of("gqa")
    acc = kvp.accumulate(None, conditioned_of(chunk), chunk, A)
    short = chunk_of("gqa", tokens=1)
    with pytest.raises((PatchMismatchError, ShapeError), match="expected"):
        kvp.accumulate(acc, conditioned_of(short, 1), short, A)


@pytest.mark.parametrize("dtype", [jnp.int8])
def test_an_update_keeps_the_patchs_dtype(dtype):
    chunk = chunk_of("gqa", tokens=48)
    new = conditioned_of(chunk, 2, seed=2)
    patch = kvp.quantise(kvp.form_patch(chunk, conditioned_of(chunk, 2), 4, A), dtype)
    correction = kvp.correction_patch(chunk, patch, new, 6, ("C",))
    updated = kvp.update_patch(patch, correction)
    kinds = lambda patch: jax.tree.map(lambda leaf: leaf.dtype, dict(patch.factors))
    assert jax.tree.leaves(kinds(updated)) == jax.tree.leaves(kinds(patch))
    assert jax.tree.structure(kinds(updated)) == jax.tree.structure(kinds(patch))
    assert updated.nbytes == patch.nbytes
    found = kvp.apply_patch(chunk, updated, 3, ("C",))
    wanted = kvp.to_engine(chunk.layout, new, chunk.local, 3)
    size = max(float(np.abs(value).max()) for value in wanted.values())
    assert worst(found, wanted) < 0.05 * size


def test_an_update_keeps_the_dtype_of_channels_that_are_dense_or_were_not_there():
    chunk = chunk_of("gqa")
    patch = kvp.quantise(form(chunk, {"k": 24}), jnp.int8)
    correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), 4, ("C",))
    updated = kvp.update_patch(patch, correction)
    assert is_packed(updated.factors["k"])
    assert all(map(is_packed, updated.factors["v"]))


# ---------------------------------------------------------------------------------------------------- printing
