"""Patches of encoded canonicals: formed, corrected, averaged and compared on the numbers that these decode to."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalMemberAccess=false

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import PackedArray, RaggedFactors
from kvpatch_jax.errors import InputError, PatchMismatchError
from kvpatch_jax.patching.change import dtype_of
from tests.shared.operator_cases import chunk_of, conditioned_of

A, CHANGED = ("A1", "A2"), ("A1", "A3")
RANK = 8


def encoded(word: str = "k3v3g8") -> kvp.Chunk:
    return kvp.encode_chunk(chunk_of("gqa"), word)


def deficit(chunk: kvp.Chunk, conditioned: dict) -> dict[str, np.ndarray]:
    """What a patch has to add to the numbers that the canonical decodes to."""
    return {
        name: np.asarray(value, np.float64) - np.asarray(kvp.cache.decode_chunk(chunk).kv[name], np.float64)
        for name, value in conditioned.items()
    }


def added(patch: kvp.Patch) -> dict[str, np.ndarray]:
    """The dense correction of joint factors, [L, T, K, H], in NumPy."""
    result = {}
    for name, own in patch.factors.items():
        channel = patch.metadata.chunk.layout.channel(name)
        if isinstance(own, RaggedFactors):
            u, v, rows = np.asarray(own.u, np.float64), np.asarray(own.v, np.float64), np.asarray(own.rows)
            layers = []
            for row in rows:
                row = row[row < len(v)]
                layers.append(u[row].T @ v[row])
            product = np.stack(layers)
        elif isinstance(own, tuple):
            product = np.asarray(own[0], np.float64) @ np.asarray(own[1], np.float64)
        else:
            product = np.asarray(own, np.float64)
        result[name] = product.reshape(*product.shape[:2], channel.heads, channel.width)
    return result


def best_error(delta: np.ndarray, rank: int) -> float:
    """The least error that factors of a rank have, over all layers."""
    flat = delta.reshape(*delta.shape[:2], -1)
    return float(np.sqrt((np.linalg.svd(flat, compute_uv=False)[:, rank:] ** 2).sum()))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "int6", "int6gall"])
def test_an_updated_patch_corrects_the_decoded_base_in_its_own_dtype(dtype):
    chunk, conditioned = encoded(), conditioned_of(encoded(), rank=6)
    changed = conditioned_of(encoded(), rank=6, seed=11)
    patch = kvp.form_patch(chunk, conditioned, RANK, A, dtype=dtype, method="exact")
    correction = kvp.correction_patch(chunk, patch, changed, 13, CHANGED, dtype=dtype, method="exact")
    assert correction.metadata.chunk.encoding == patch.metadata.chunk.encoding == "k3v3g8"
    updated = kvp.update_patch(patch, correction)
    assert (updated.metadata.chunk.encoding, updated.metadata.antecedent.ids) == ("k3v3g8", CHANGED)
    assert dtype_of(updated) == dtype_of(patch)
    for name, (u, v) in patch.factors.items():
        for one, other in zip((u, v), updated.factors[name], strict=True):
            assert type(one) is type(other)
            assert one.nbytes == other.nbytes
            if isinstance(one, PackedArray):
                assert (one.bits, one.group, one.axis) == (other.bits, other.group, other.axis)
    rounding = 1e-5 if dtype == "float32" else 0.05
    for name, delta in deficit(chunk, changed).items():
        total = added(patch)[name] + added(correction)[name]
        least = best_error(delta - added(patch)[name], 13)
        assert np.linalg.norm(total - delta) <= 1.001 * least + rounding * np.linalg.norm(delta)
        error = np.linalg.norm(added(updated)[name] - total)
        assert error <= 1.001 * best_error(total, RANK) + rounding * np.linalg.norm(delta)
    kvp.Placed(chunk, updated, 3, CHANGED)
    with pytest.raises(PatchMismatchError, match="encoding"):
        kvp.Placed(chunk_of("gqa"), updated, 3, CHANGED)


@pytest.mark.nightly
def test_an_update_keeps_the_rank_of_each_layer():
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk, 6), 6, A, method="exact", dense=False)
    ranks, factors = (6, 2, 4), {}
    for name, (u, v) in patch.factors.items():
        rows = np.full((3, 6), 12, np.int32)
        rows[0], rows[1, :2], rows[2, :4] = range(6), (6, 7), range(8, 12)
        left = np.concatenate([np.asarray(u)[layer, :, :rank].T for layer, rank in enumerate(ranks)])
        right = np.concatenate([np.asarray(v)[layer, :rank] for layer, rank in enumerate(ranks)])
        factors[name] = RaggedFactors(jnp.asarray(left), jnp.asarray(right), jnp.asarray(rows))
    uneven = kvp.quantise(kvp.Patch(factors, patch.metadata), "int7")
    changed = conditioned_of(chunk, rank=6, seed=11)
    correction = kvp.correction_patch(chunk, uneven, changed, 13, CHANGED, method="exact", dtype="float32")
    updated = kvp.update_patch(uneven, correction)
    for name, own in updated.factors.items():
        assert isinstance(own, RaggedFactors)
        assert own.ranks == ranks
        assert own.u.bits == own.v.bits == 7
        delta = deficit(chunk, changed)[name]
        found = added(updated)[name]
        for layer, rank in enumerate(ranks):
            target = delta[layer : layer + 1]
            error = np.linalg.norm(found[layer] - delta[layer])
            assert error <= 1.001 * best_error(target, rank) + 0.03 * np.linalg.norm(target)
    assert [own.ranks for own in kvp.update_patch(uneven, correction, rank=3).factors.values()] == [(3, 2, 3)] * 2


def test_orders_are_averaged_over_one_base():
    chunk = encoded()
    first, second = conditioned_of(chunk), conditioned_of(chunk, seed=21)
    acc = kvp.accumulate(kvp.accumulate(None, first, chunk, A), second, chunk, A[::-1])
    orbit = kvp.orbit_patch(acc, 24, method="exact", dtype="float32")
    assert orbit.metadata.chunk.encoding == "k3v3g8"
    one, other = deficit(chunk, first), deficit(chunk, second)
    for name, found in added(orbit).items():
        np.testing.assert_allclose(found, (one[name] + other[name]) / 2, atol=1e-4)
    for base in (chunk_of("gqa"), encoded("k8v8")):
        with pytest.raises(PatchMismatchError, match="encoding"):
            kvp.accumulate(acc, first, base, A)


def test_a_canonical_is_known_by_what_it_decodes_to():
    """A survivor that is conditioned on nothing has its canonical's KV, whichever of the two is packed."""
    chunk = encoded()
    alone = dict(kvp.cache.decode_chunk(chunk).kv)
    target = conditioned_of(chunk)
    patch = kvp.removal_patch(chunk, target, alone, 24, ("B",), (), method="exact", dtype="float32")
    assert patch.metadata.base == "canonical"
    for name, found in added(patch).items():
        np.testing.assert_allclose(found, deficit(chunk, target)[name], atol=1e-4)
    with pytest.raises(InputError, match="removal_patch"):
        kvp.removal_patch(chunk, target, alone, 4, ("B",), ("A",))
