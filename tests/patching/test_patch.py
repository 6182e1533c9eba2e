"""Patches: forming, applying, metadata, orbit, removal, update, and smaller forms."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import (
    InputError,
    LayoutError,
    NotFiniteError,
    PatchMismatchError,
    ShapeError,
    StalePatchError,
)
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

A = ("A1", "A2")


def error(found: dict, expected: dict) -> float:
    widen = lambda x: np.asarray(jnp.asarray(x).astype(jnp.float32))
    return max(float(np.abs(widen(found[name]) - widen(expected[name])).max()) for name in expected)


METHODS = [
    *((name, "randomised") for name in LAYOUTS),
    *(pytest.param(name, "exact", marks=[] if name == "mla" else [pytest.mark.nightly]) for name in LAYOUTS),
]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_restores_a_low_rank_deficit_anywhere(name: str, method: str):
    chunk = chunk_of(name)
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, 4, A, method=method)
    assert all(rank == 4 for rank in patch.ranks.values())
    for start in (0, 20):
        found = kvp.apply_patch(chunk, patch, start, A)
        assert error(found, kvp.to_engine(chunk.layout, conditioned, chunk.local, start)) < 2e-5


def test_no_patch_is_one_rotation_bit_for_bit():
    for dtype in (jnp.float32, jnp.bfloat16):
        for name in LAYOUTS:
            chunk = chunk_of(name, dtype=dtype)
            empty = kvp.form_patch(chunk, conditioned_of(chunk), {}, A)
            turned = kvp.to_engine(chunk.layout, chunk.kv, chunk.local, 20)
            for patch in (None, empty):
                found = kvp.apply_patch(chunk, patch, 20, A)
                assert all((found[c] == turned[c]).all() and found[c].dtype == dtype for c in chunk.layout.names)


def test_a_removal_patch_is_applied_inside_a_program():
    chunk = chunk_of("gqa")
    first, second = conditioned_of(chunk, seed=1), conditioned_of(chunk, seed=2)
    removal = kvp.removal_patch(chunk, second, first, 4, ["B"], ["A", "B"])
    serve = lambda base: kvp.apply_patch(chunk, removal, 3, ["B"], base=base, base_antecedent=["A", "B"])
    found, wanted = jax.jit(serve)(dict(first)), serve(first)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6)


def test_bfloat16_patch_stays_within_one_unit_of_recompute():
    chunk = chunk_of("gqa", tokens=48)
    conditioned = conditioned_of(chunk)
    exact = np.asarray(kvp.to_engine(chunk.layout, conditioned, chunk.local, 1000)["k"])
    small = dataclasses.replace(chunk, kv={name: value.astype(jnp.bfloat16) for name, value in chunk.kv.items()})
    patch = kvp.form_patch(small, conditioned, 8, A)
    found = np.asarray(kvp.apply_patch(small, patch, 1000, A)["k"].astype(jnp.float32))
    recompute = np.asarray(jnp.asarray(exact).astype(jnp.bfloat16).astype(jnp.float32))
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact).max(-1))) - 7)
    assert (np.abs(found - exact).max(-1) <= np.abs(recompute - exact).max(-1) + ulp).all()


def test_bytes_are_the_papers():
    layout = kvp.KVLayout.gqa(1, 4, 128, kvp.Rope(1e6, 128))
    kv = kv_of(layout, 480)
    chunk = kvp.Chunk(kv, np.arange(480, dtype=np.float32), 480, 480, "B", layout, "tiny")
    patch = kvp.form_patch(chunk, kv_of(layout, 480, 1), 16, A)
    assert patch.nbytes == 31 * layout.bytes_per_token(jnp.float32)


def test_channels_ranks_and_dense():
    chunk = chunk_of("mla")
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, {"ckv": 4, "kpe": 16}, A)
    assert patch.ranks == {"ckv": 4, "kpe": None}
    only = kvp.form_patch(chunk, conditioned, {"kpe": 4, "ckv": 0}, A)
    assert only.ranks == {"ckv": 0, "kpe": 4}
    found = kvp.apply_patch(chunk, only, 5, A)
    assert (found["ckv"] == chunk.kv["ckv"]).all()
    full = kvp.apply_patch(chunk, patch, 5, A)
    assert error(full, kvp.to_engine(chunk.layout, conditioned, chunk.local, 5)) < 2e-5


@pytest.mark.nightly
def test_padding_changes_nothing():
    chunk = chunk_of("gqa", tokens=20)
    conditioned = conditioned_of(chunk)
    wide = chunk.pad(32)
    pad = lambda value: jnp.pad(value, [(0, 0), (0, 12), (0, 0), (0, 0)], constant_values=3.0)
    wide_conditioned = {name: pad(value) for name, value in conditioned.items()}
    for method in ("randomised", "exact"):
        narrow = kvp.form_patch(chunk, conditioned, 3, A, method=method)
        padded = kvp.form_patch(wide, wide_conditioned, 3, A, method=method)
        assert not padded.factors["k"][0][:, 20:].any()
        found = kvp.apply_patch(wide, padded, 5, A)
        expected = kvp.apply_patch(chunk, narrow, 5, A)
        assert error({name: value[:, :20] for name, value in found.items()}, expected) < (
            5e-3 if method == "randomised" else 1e-4
        )


def test_orbit_is_the_mean_of_the_orderings():
    chunk = chunk_of("gqa")
    first, second = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    acc = kvp.accumulate(None, first, chunk, A)
    acc = kvp.accumulate(acc, second, chunk, A[::-1])
    patch = kvp.orbit_patch(acc, 4)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    for ordering in (A, A[::-1]):
        found = kvp.apply_patch(chunk, patch, 3, ordering)
        assert error(found, kvp.to_engine(chunk.layout, mean, chunk.local, 3)) < 2e-5
    with pytest.raises(StalePatchError, match="A3"):
        kvp.apply_patch(chunk, patch, 3, ("A1", "A3"))
    with pytest.raises(PatchMismatchError, match="A3"):
        kvp.accumulate(acc, second, chunk, ("A1", "A3"))
    with pytest.raises(PatchMismatchError, match="B5"):
        kvp.accumulate(acc, second, chunk_of("gqa", seed=5), A)
    with pytest.raises(InputError, match="rank 0"):
        kvp.orbit_patch(acc, 0)


def test_removal_adds_to_the_conditioned():
    chunk = chunk_of("gqa")
    conditioned, target = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    patch = kvp.removal_patch(chunk, target, conditioned, 4, ("A2",), A)
    found = kvp.apply_patch(chunk, patch, 3, ("A2",), base=conditioned, base_antecedent=A)
    assert error(found, kvp.to_engine(chunk.layout, target, chunk.local, 3)) < 2e-5
    with pytest.raises(PatchMismatchError, match="'conditioned'; expected 'canonical'"):
        kvp.apply_patch(chunk, patch, 3, ("A2",))
    with pytest.raises(StalePatchError, match="base"):
        kvp.apply_patch(chunk, patch, 3, ("A2",), base=conditioned, base_antecedent=("A9",))


def test_update_follows_a_changed_antecedent():
    chunk = chunk_of("gqa")
    old, new = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    patch = kvp.form_patch(chunk, old, 4, A)
    correction = kvp.correction_patch(chunk, patch, new, 4, ("A1", "A3"))
    updated = kvp.update_patch(patch, correction)
    assert (updated.ranks, updated.metadata.antecedent.ids) == ({"k": 4, "v": 4}, ("A1", "A3"))
    found = kvp.apply_patch(chunk, updated, 3, ("A1", "A3"))
    assert error(found, kvp.to_engine(chunk.layout, new, chunk.local, 3)) < 5e-5
    with pytest.raises(PatchMismatchError, match="'patched'"):
        kvp.apply_patch(chunk, correction, 3, ("A1", "A3"))
    with pytest.raises(InputError, match="rank 9"):
        kvp.update_patch(patch, correction, 9)
    with pytest.raises(PatchMismatchError, match="correction"):
        kvp.update_patch(updated, correction)


def test_a_truncated_patch_is_the_one_of_lower_rank():
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, 6, A, method="exact")
    short = kvp.truncate(patch, 3)
    own = kvp.form_patch(chunk, conditioned, 3, A, method="exact")
    applied = lambda patch: kvp.apply_patch(chunk, patch, 3, A)
    assert error(applied(short), applied(own)) < 1e-5
    for dtype, bar in ((jnp.bfloat16, 0.03), (jnp.int8, 0.05)):
        small = kvp.quantise(patch, dtype)
        assert small.nbytes < 0.6 * patch.nbytes
        assert 0 < error(applied(small), applied(patch)) < bar
        assert error(applied(kvp.truncate(small, 3)), applied(short)) < bar
    deep = kvp.keep_layers(patch, (1, 2))
    assert deep.nbytes * 3 == patch.nbytes * 2
    found, bare, full = applied(deep), applied(None), applied(patch)
    np.testing.assert_array_equal(found["k"][0], bare["k"][0])
    np.testing.assert_allclose(found["k"][1:], full["k"][1:], atol=1e-6)
    formed = kvp.form_patch(chunk, conditioned, 6, A, method="exact", layers=(1, 2))
    assert error(applied(formed), found) < 1e-5


def test_refuses_a_patch_that_does_not_belong():
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, A)
    apply = lambda chunk, patch, antecedent=A, **more: kvp.apply_patch(chunk, patch, 3, antecedent, **more)
    with pytest.raises(StalePatchError, match=r"A2.*A1"):
        apply(chunk, patch, A[::-1])
    assert apply(chunk, patch, A[::-1], allow_stale=True)["k"].shape == chunk.kv["k"].shape
    with pytest.raises(PatchMismatchError, match="id 'B0'; expected 'B1'"):
        apply(chunk_of("gqa", seed=1), patch, allow_stale=True)
    with pytest.raises(PatchMismatchError, match="backbone 'tiny'; expected 'other'"):
        apply(chunk_of("gqa", backbone="other"), patch)
    with pytest.raises(PatchMismatchError, match="layout"):
        apply(chunk_of("blocked"), patch)
    with pytest.raises(PatchMismatchError, match="base"):
        apply(chunk, patch, base=chunk.kv)
    with pytest.raises(ShapeError, match="24 tokens"):
        apply(chunk.pad(30), patch)
    with pytest.raises(LayoutError, match="expected \\['k', 'v'\\]"):
        apply(chunk, patch, base=kv_of(LAYOUTS["mla"], 24))


def test_refuses_bad_ranks_and_input(unchecked):
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    form = lambda rank=4, conditioned=conditioned, **more: kvp.form_patch(chunk, conditioned, rank, A, **more)
    for rank in (0, -1, {"k": -1}):
        with pytest.raises(InputError, match="expected at least 1"):
            form(rank)
    with pytest.raises(LayoutError, match="'q'"):
        form({"q": 2})
    with pytest.raises(NotFiniteError, match="'v'"):
        form(conditioned=conditioned | {"v": conditioned["v"].at[0, 0, 0, 0].set(jnp.nan)})
    patch = form()
    (u, v), metadata = patch.factors["v"], patch.metadata
    with pytest.raises(NotFiniteError, match=r"'v'\]: got 1 values that are NaN"):
        kvp.Patch({**patch.factors, "v": (u, v.at[0, 0, 0].set(jnp.inf))}, metadata)  # pyright: ignore[reportAttributeAccessIssue]
    for factors, words in (([u, v], "factors: got a list"), ({"k": ([1.0], v)}, r"factors\['k'\]: got a float")):
        with pytest.raises(InputError, match=words):
            kvp.Patch(factors, metadata)
    with pytest.raises(ShapeError, match="expected the chunk's"):
        form(conditioned={name: value[:, :9] for name, value in conditioned.items()})
    with pytest.raises(InputError, match="layers"):
        form(layers=(3,))
    with pytest.raises(InputError, match="method"):
        form(method="svd")
    for size in ("12 %%", "twelve kB", "0 kB", "0 %", 2.5):
        with pytest.raises(kvp.errors.KVPatchError, match=r"rank|budget"):
            form(size)
    for dtype in ("int32", "int1", "int9"):
        with pytest.raises(InputError, match=dtype):
            form(dtype=dtype)
        with pytest.raises(InputError, match=dtype):
            form(kvp.patching.ByteBudget(4096), dtype=dtype)
    patch = form()
    with pytest.raises(InputError, match="rank 5"):
        kvp.truncate(patch, 5)
    with pytest.raises(InputError, match="layers"):
        kvp.keep_layers(patch, (7,))
    with pytest.raises(InputError, match="int16"):
        kvp.quantise(patch, jnp.int16)
