"""A patch knows how much of blind reuse's readout error it leaves, and one that would not help is refused."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportOptionalOperand=false, reportOperatorIssue=false

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import PackedArray, ops
from kvpatch_jax.errors import WorseThanBlindError
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


@pytest.mark.parametrize(("kind", "tokens", "bar"), [("gqa", 64, 1e-4), ("mla", 24, 0.1)])
def test_errors_are_those_of_attention_by_the_chunks_own_keys(kind: str, tokens: int, bar: float):
    """Against NumPy, layer by layer: patched and blind readouts, relative to those of the conditioned KV."""
    chunk = chunk_of(kind, tokens, length=tokens - 4 * (tokens < 64))
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
    np.testing.assert_allclose(patch.metadata.errors, expected, rtol=bar)
    assert patch.predicted == pytest.approx((patch.metadata.errors[0] / patch.metadata.errors[1]) ** 2)


def test_larger_patches_are_predicted_to_leave_less_and_padding_plays_no_part():
    chunk = chunk_of("gqa", length=20)
    conditioned = conditioned_of(chunk, rank=12)
    form = lambda rank, kv=conditioned: kvp.form_patch(chunk, kv, rank, A, dense=False)
    left = [form(rank).predicted for rank in (1, 4, 12)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-6 < left[0]
    live = np.arange(24)[:, None, None] < 20
    padded = {name: np.where(live, value, np.float32(1e3)) for name, value in conditioned.items()}
    patch = form(4)
    assert form(4, padded).metadata.errors == pytest.approx(patch.metadata.errors)
    for changed in (kvp.truncate(patch, 2), kvp.quantise(patch, "int8"), kvp.patching.keep_layers(patch, (1,))):
        assert changed.predicted is None


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
