"""Versions of one chunk kept together: shared directions, differences, interpolation, and what each is refused for."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax.cache import Member, patch_digest
from kvpatch_jax.errors import InputError, PatchMismatchError, RankError, ShapeError, StalePatchError
from kvpatch_jax.patching import (
    DeficitSum,
    check_in_basis,
    chunk_basis,
    difference_patch,
    extend_basis,
    in_basis,
    interpolate_patches,
    interpolation_weights,
    nearest_patch,
    resolve_difference,
)
from kvpatch_jax.store import ChunkStore, PatchKey

CHUNK = chunk_of("gqa", length=20)
BEHIND = [("A", "B"), ("A", "C"), ("D", "E")]
KVS = [conditioned_of(CHUNK, rank=2, seed=seed) for seed in (1, 2, 3)]
PATCHES = [kvp.form_patch(CHUNK, kv, 2, own, method="exact") for kv, own in zip(KVS, BEHIND, strict=True)]


def applied(patch: kvp.Patch | None, antecedent, chunk: kvp.Chunk = CHUNK, **more) -> dict[str, np.ndarray]:
    """What a patch adds at start 0, real tokens alone."""
    have = kvp.apply_patch(kvp.Placed(chunk, patch, 0, antecedent, **more))
    return {name: np.asarray(value, np.float64)[:, : chunk.length] for name, value in have.items()}


def wanted(kv: dict) -> dict[str, np.ndarray]:
    found = kvp.to_engine(CHUNK.layout, kv, CHUNK.local, 0)
    return {name: np.asarray(value, np.float64)[:, : CHUNK.length] for name, value in found.items()}


def close(found: dict, expected: dict, atol: float = 1e-4) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=atol)


# ------------------------------------------------------------------------------------------------- shared directions


def test_a_chunks_basis_is_found_again_when_an_antecedent_comes():
    """Incremental sums give the basis of all, whose span is that of the stacked deficits in float64."""
    total = DeficitSum(CHUNK.layout, CHUNK.backbone)
    for kv in KVS:
        total = total.add(CHUNK, kv)
    basis = chunk_basis(CHUNK, KVS, 6)
    assert (total.count, total.basis(6).digest) == (3, basis.digest)
    for name, found in basis.directions.items():
        rows = [np.asarray(kv[name] - CHUNK.kv[name], np.float64)[:, :20].reshape(3, 20, 32) for kv in KVS]
        for layer in range(3):
            v = np.linalg.svd(np.concatenate([own[layer] for own in rows]))[2][:6]
            np.testing.assert_allclose(
                v @ np.asarray(found[layer], np.float64).T @ np.asarray(found[layer]), v, atol=1e-4
            )
    for kv, own in zip(KVS, BEHIND, strict=True):
        close(applied(kvp.form_patch(CHUNK, kv, 6, own, basis=basis), own), wanted(kv), 3e-4)


def test_a_basis_grows_and_its_patches_stay_as_they_were():
    first = chunk_basis(CHUNK, KVS[:2], 4)
    old = kvp.form_patch(CHUNK, KVS[0], 4, BEHIND[0], basis=first)
    grown = extend_basis(first, CHUNK, KVS[2], 2)
    assert grown.ranks == {"k": 6, "v": 6}
    for name, value in grown.directions.items():
        np.testing.assert_array_equal(value[:, :4], first.directions[name])
        gram = np.asarray(value, np.float64) @ np.swapaxes(np.asarray(value, np.float64), 1, 2)
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(6), gram.shape), atol=1e-5)
    again = in_basis(old, grown)
    assert again.metadata.basis == grown.digest != first.digest
    check_in_basis(again, grown)
    close(applied(again, BEHIND[0]), applied(old, BEHIND[0]), 2e-5)
    close(applied(kvp.form_patch(CHUNK, KVS[2], 6, BEHIND[2], basis=grown), BEHIND[2]), wanted(KVS[2]), 3e-4)
    # At the features' number a basis is complete.
    full = extend_basis(first, CHUNK, conditioned_of(CHUNK, rank=24, seed=8), 99)
    assert full.ranks == {"k": 28, "v": 28}


def test_patches_of_any_rank_are_put_into_a_basis():
    basis = chunk_basis(CHUNK, KVS, 6)
    ragged = kvp.form_patch(CHUNK, KVS[0], kvp.ByteBudget(10_000, most=2), BEHIND[0], dtype="float32")
    few = kvp.quantise(PATCHES[0], "int6")
    for patch, atol in ((ragged, 3e-4), (PATCHES[0], 3e-4), (few, 0.1)):
        found = in_basis(patch, basis)
        assert found.metadata.basis == basis.digest
        close(applied(found, BEHIND[0]), wanted(KVS[0]), atol)
    assert in_basis(few, basis).factors["k"][0].bits == 6


def test_a_chunks_basis_lies_in_a_store(tmp_path):
    basis = chunk_basis(CHUNK, KVS, 6)
    with ChunkStore(tmp_path, secret=b"0" * 32) as store:
        store.put(CHUNK)
        store.put_basis(basis)
        store.put_patches([in_basis(patch, basis) for patch in PATCHES])
        (found,) = store.get_patches(PatchKey(CHUNK.id, "tiny", BEHIND[1]))
    close(applied(found, BEHIND[1]), wanted(KVS[1]), 3e-4)


# ------------------------------------------------------------------------------------------------------- differences


def test_a_difference_to_the_nearest_patch_is_resolved_to_the_whole():
    near = {name: value + 0.1 * (KVS[2][name] - CHUNK.kv[name]) for name, value in KVS[0].items()}
    difference, nearest = difference_patch(CHUNK, PATCHES, near, 2, ("A", "B", "F"), method="exact")
    assert nearest is PATCHES[0]
    assert difference.metadata.corrects == patch_digest(nearest)
    whole = resolve_difference(nearest, difference)
    assert whole.metadata.behind.ids == ("A", "B", "F")
    close(applied(whole, ("A", "B", "F")), wanted(near), 3e-4)
    with pytest.raises(PatchMismatchError, match="resolve_difference: got"):
        resolve_difference(PATCHES[1], difference)
    with pytest.raises(PatchMismatchError, match="base"):
        applied(difference, ("A", "B", "F"))


def test_a_difference_within_a_budget_to_a_patch_in_few_bits():
    """What the few bits lost is part of the difference."""
    stored = kvp.quantise(PATCHES[0], "int4")
    difference, nearest = difference_patch(CHUNK, [stored], KVS[0], kvp.ByteBudget(20_000), ("A",), dtype="float32")
    close(applied(resolve_difference(nearest, difference), ("A",)), wanted(KVS[0]), 1e-4)
    dense = kvp.form_patch(CHUNK, KVS[0], 24, BEHIND[0])
    assert dense.ranks["k"] is None
    difference, nearest = difference_patch(CHUNK, [dense], KVS[1], 4, ("A",), method="exact")
    close(applied(resolve_difference(nearest, difference), ("A",)), wanted(KVS[1]), 1e-4)


def test_the_nearest_patch_is_that_of_least_divergence():
    assert nearest_patch(PATCHES, ("A", "C")).divergence == 0
    assert nearest_patch(PATCHES, ("D", "F")).patch is PATCHES[2]
    rng = np.random.default_rng(0)
    pooled = {name: rng.standard_normal(8) for name in "ABCDEG"}
    pooled["G"] = pooled["D"] + pooled["E"]
    assert nearest_patch(PATCHES, ("G",), pooled=pooled).patch is PATCHES[2]


# ----------------------------------------------------------------------------------------------------- interpolation


def test_an_interpolated_patch_is_the_weighted_mean():
    weights = [0.5, 0.25, 0.25]
    patch = interpolate_patches(PATCHES, weights)
    mean = {
        name: sum(w * np.asarray(kv[name], np.float64) for w, kv in zip(weights, KVS, strict=True)) for name in "kv"
    }
    mean = {name: jnp.asarray(value, jnp.float32) for name, value in mean.items()}
    close(applied(patch, ("Z",), allow_stale=True), wanted(mean), 2e-4)
    assert patch.ranks == {"k": 6, "v": 6}
    # Reduced, it is as near as its rank allows.
    small = interpolate_patches(PATCHES, weights, 4)
    for name in "kv":
        delta = np.asarray(mean[name] - CHUNK.kv[name], np.float64)[:, :20].reshape(3, 20, 32)
        u, v = (np.asarray(leaf, np.float64) for leaf in small.factors[name])
        least = [np.sqrt((np.linalg.svd(own)[1][4:] ** 2).sum()) for own in delta]
        np.testing.assert_allclose(np.linalg.norm(delta - (u @ v)[:, :20], axis=(1, 2)), least, rtol=1e-3)
    few = interpolate_patches(PATCHES, weights, 4, dtype="int4")
    assert few.nbytes < small.nbytes / 4
    mixed = [PATCHES[0], kvp.form_patch(CHUNK, KVS[1], 24, BEHIND[1]), PATCHES[2]]
    close(applied(interpolate_patches(mixed, weights), (), allow_stale=True), wanted(mean), 2e-4)


def test_an_interpolated_patch_claims_no_antecedent():
    patch = interpolate_patches(PATCHES[:2], [0.5, 0.5])
    (member,) = patch.metadata.behind.members
    assert member.id == "interpolation"
    assert member.state.startswith("interpolated:")
    for antecedent in ((), *BEHIND, ("interpolation",)):
        with pytest.raises(StalePatchError, match="interpolation"):
            kvp.Placed(CHUNK, patch, 0, antecedent)
    # The name is of the patches and their weights, in any order.
    again = interpolate_patches(PATCHES[1::-1], [0.5, 0.5])
    other = interpolate_patches(PATCHES[:2], [0.4, 0.6])
    assert again.metadata.behind == patch.metadata.behind != other.metadata.behind


def test_weights_fall_with_the_divergence():
    weights = interpolation_weights(PATCHES, ("A", "B"), temperature=0.5)
    # Divergences 0, 1/2 and 1 by the share of chunks that are not in both.
    expected = np.exp(-np.array([0, 0.5, 1]) / 0.5)
    np.testing.assert_allclose(weights, expected / expected.sum())
    assert interpolation_weights(PATCHES, ("A", "B"), temperature=1e-9).tolist() == [1, 0, 0]
    alone = interpolate_patches(PATCHES, [1, 0, 0])
    close(applied(alone, (), allow_stale=True), applied(PATCHES[0], BEHIND[0]), 1e-6)


def test_what_does_not_go_together_is_refused(unchecked):
    basis, kv = chunk_basis(CHUNK, KVS, 4), KVS[0]
    other = kvp.form_patch(chunk_of("gqa", seed=5, length=20), kv, 2, ["A"])
    deep, separate = kvp.keep_layers(PATCHES[1], [2]), kvp.form_patch(CHUNK, kv, 2, ["A"], heads="separate")
    encoded = kvp.form_patch(kvp.encode_chunk(CHUNK, "k4v4"), kv, 2, ["A"])
    ranked = kvp.form_patch(CHUNK, kv, 24, ["A"])
    for error, call in (
        (InputError, lambda: interpolate_patches([], [])),
        (InputError, lambda: interpolate_patches(PATCHES, [0.5, 0.5])),
        (InputError, lambda: interpolate_patches(PATCHES[:2], [0.5, 0.6])),
        (InputError, lambda: interpolate_patches(PATCHES[:2], [1.5, -0.5])),
        (InputError, lambda: interpolate_patches(PATCHES[0], [1.0])),
        (PatchMismatchError, lambda: interpolate_patches([PATCHES[0], other], [0.5, 0.5])),
        (PatchMismatchError, lambda: interpolate_patches([PATCHES[0], deep], [0.5, 0.5])),
        (PatchMismatchError, lambda: interpolate_patches([PATCHES[0], encoded], [0.5, 0.5])),
        (PatchMismatchError, lambda: interpolate_patches([separate], [1.0])),
        (RankError, lambda: interpolate_patches(PATCHES[:2], [0.5, 0.5], 0)),
        (InputError, lambda: interpolation_weights([], ["A"])),
        (InputError, lambda: interpolation_weights(PATCHES, ["A"], temperature=0)),
        (InputError, lambda: nearest_patch([], ["A"])),
        (InputError, lambda: difference_patch(CHUNK, [], kv, 2, ["A"])),
        (InputError, lambda: chunk_basis(CHUNK, [], 2)),
        (RankError, lambda: chunk_basis(CHUNK, KVS, 33)),
        (RankError, lambda: extend_basis(basis, CHUNK, kv, 0)),
        (ShapeError, lambda: extend_basis(basis, CHUNK, {name: value[:, :3] for name, value in kv.items()}, 1)),
        (PatchMismatchError, lambda: extend_basis(basis, dataclasses.replace(CHUNK, backbone="b"), kv, 1)),
        (PatchMismatchError, lambda: in_basis(separate, basis)),
        (PatchMismatchError, lambda: in_basis(ranked, basis)),
        (PatchMismatchError, lambda: in_basis(PATCHES[0], dataclasses.replace(basis, backbone="b"))),
        (PatchMismatchError, lambda: DeficitSum(CHUNK.layout, "b").add(CHUNK, kv)),
    ):
        with pytest.raises(error, match="got"):
            call()


def test_members_with_contents_count_for_the_nearest():
    known = [kvp.form_patch(CHUNK, KVS[0], 2, [Member("A", text)]) for text in ("one", "two")]
    assert nearest_patch(known, [Member("A", "two")]).patch is known[1]
