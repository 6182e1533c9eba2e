"""What a patch knows of itself: its readout error, sizes as shares with a floor, few bits, and refusal."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportOptionalOperand=false, reportOperatorIssue=false

import dataclasses

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import patch_digest
from kvpatch_jax.core import PackedArray, ops
from kvpatch_jax.errors import InputError, WorseThanBlindError
from kvpatch_jax.patching.byte_budget import LEAST_DIRECTIONS
from tests.shared.operator_cases import chunk_of, conditioned_of, kv_of

A = ("A",)


def read(kv: dict, kind: str, queries: np.ndarray, length: int) -> np.ndarray:
    """Attention of queries [P,K,H] over one layer's keys and values, in float64."""
    keys = np.concatenate([kv["ckv"], kv["kpe"]], -1) if kind == "mla" else kv["k"]
    values = kv["ckv"] if kind == "mla" else kv["v"]
    scores = np.einsum("pkh,skh->kps", queries, keys[:length]) / np.sqrt(keys.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kps,ske->pke", weights, values[:length])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_errors_are_those_of_attention_by_the_chunks_own_keys(kind):
    """Against NumPy, layer by layer: patched and blind readouts, relative to those of the conditioned KV."""
    chunk = chunk_of(kind, length=20)
    conditioned = conditioned_of(chunk, rank=9)
    patch = kvp.form_patch(chunk, conditioned, 3, A)

    corrected = ops.correction(chunk.layout, dict(patch.factors))
    expected = np.zeros(2)
    for layer in range(chunk.layout.layers):
        truth = {name: np.asarray(value[layer], np.float64) for name, value in conditioned.items()}
        base = {name: np.asarray(value[layer], np.float64) for name, value in chunk.kv.items()}
        patched = {name: base[name] + np.asarray(corrected[name][layer], np.float64) for name in base}
        keys = np.concatenate([truth["ckv"], truth["kpe"]], -1) if kind == "mla" else truth["k"]
        queries = keys[: chunk.length]
        own = read(truth, kind, queries, chunk.length)
        for place, kv in enumerate((patched, base)):
            expected[place] += np.linalg.norm(read(kv, kind, queries, chunk.length) - own) / np.linalg.norm(own)
    expected /= chunk.layout.layers
    # A chunk of fewer tokens than probes reads some of them twice, which changes the mean a little.
    np.testing.assert_allclose(patch.metadata.errors, expected, rtol=0.1)
    assert patch.predicted == pytest.approx((patch.metadata.errors[0] / patch.metadata.errors[1]) ** 2)


def test_larger_patches_are_predicted_to_leave_less_and_padding_plays_no_part():
    chunk = chunk_of("gqa", length=20)
    conditioned = conditioned_of(chunk, rank=12)
    left = [kvp.form_patch(chunk, conditioned, rank, A, dense=False).predicted for rank in (1, 4, 8, 12)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-6 < left[0]

    padded = {name: np.asarray(value).copy() for name, value in conditioned.items()}
    for value in padded.values():
        value[:, chunk.length :] = 1e3
    again = kvp.form_patch(chunk, padded, 4, A, dense=False)
    assert again.metadata.errors == pytest.approx(kvp.form_patch(chunk, conditioned, 4, A, dense=False).metadata.errors)


def test_a_changed_patch_knows_no_error_and_errors_tell_no_patches_apart():
    chunk = chunk_of("gqa", length=20)
    patch = kvp.form_patch(chunk, conditioned_of(chunk, rank=12), 4, A)
    for changed in (kvp.truncate(patch, 2), kvp.quantise(patch, "int8"), kvp.patching.keep_layers(patch, (1,))):
        assert changed.predicted is None
    unmeasured = kvp.Patch(patch.factors, dataclasses.replace(patch.metadata, errors=None))
    assert unmeasured.metadata == patch.metadata
    assert patch_digest(unmeasured) == patch_digest(patch)


def test_a_patch_that_would_not_help_is_refused():
    """Attention reads the same of tokens in another order, though their deficit is large: one direction only harms."""
    chunk = chunk_of("gqa", length=24)
    moved = {name: np.roll(np.asarray(value), 1, axis=1) for name, value in chunk.kv.items()}
    moved["v"] = moved["v"] + 1e-3
    forced = kvp.form_patch(chunk, moved, {"k": 1}, A, method="exact", force=True)
    assert forced.predicted > 1
    with pytest.raises(WorseThanBlindError, match="force=True"):
        kvp.form_patch(chunk, moved, {"k": 1}, A, method="exact")
    # Nothing was absorbed, so nothing is refused: there is nothing to lose.
    assert kvp.form_patch(chunk, dict(chunk.kv), 2, A).predicted == 0


def test_a_share_has_a_floor_and_text_is_read():
    for length in (2, 3, 24):
        chunk = chunk_of("gqa", length=length)
        patch = kvp.form_patch(chunk, conditioned_of(chunk, rank=12), "1 %", A, dense=False)
        ranks = [rank for own in patch.factors.values() for rank in own.ranks]
        # As many on average, spent where they are needed most.
        assert np.mean(ranks) >= min(LEAST_DIRECTIONS, length) - 0.5
    chunk = chunk_of("gqa", length=24)
    whole = chunk.layout.bytes_per_token() * chunk.length
    assert kvp.form_patch(chunk, kv_of(chunk.layout, 24, seed=7), "40 %", A, dense=False).nbytes <= 0.4 * whole
    floor = kvp.form_patch(chunk, conditioned_of(chunk), "0.0001 %", A)
    least = kvp.patching.ByteBudget.share(chunk, 1e-9, least=LEAST_DIRECTIONS)
    assert floor.nbytes == kvp.form_patch(chunk, conditioned_of(chunk), least, A).nbytes > 0
    with pytest.raises(InputError, match="least"):
        kvp.patching.ByteBudget(100, least=-1)
    for size in ("0 %", "ten %", "-3 %", "%"):
        with pytest.raises(InputError, match="rank"):
            kvp.form_patch(chunk, conditioned_of(chunk), size, A)


def test_few_bits_of_the_deficit_are_kept_where_they_are_smaller_and_closer():
    """A deficit of full rank and many bytes; a thin one stays thin."""
    chunk = chunk_of("gqa", length=24)
    full = kv_of(chunk.layout, chunk.tokens, seed=7)
    packed = kvp.form_patch(chunk, full, "45 %", A)
    factors = kvp.form_patch(chunk, full, "45 %", A, dense=False)
    assert all(isinstance(own, PackedArray) for own in packed.factors.values())
    assert packed.predicted < factors.predicted
    thin = kvp.form_patch(chunk, conditioned_of(chunk, rank=2), "45 %", A)
    assert not any(isinstance(own, PackedArray) for own in thin.factors.values())
