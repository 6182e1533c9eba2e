"""A budget that is spent by weights of features, and weights that say what small errors cost."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

import dataclasses

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import InformationWeights, calibrate_sensitivity
from tests.repair.splices import text_tokens, tiny_backbone
from tests.shared.operator_cases import chunk_of, conditioned_of

A = ("A",)


def weights_of(chunk: kvp.Chunk, seed: int = 3) -> InformationWeights:
    """Weights from 0.1 to 10, equal within rotary pairs."""
    rng, found = np.random.default_rng(seed), {}
    for channel in chunk.layout.channels:
        value = 10 ** rng.uniform(-1, 1, (chunk.layout.layers, channel.heads, channel.width))
        R = channel.rotary
        if R and chunk.layout.rope.cached == "half":
            value[..., R // 2 : R] = value[..., : R // 2]
        elif R:
            value[..., 1:R:2] = value[..., 0:R:2]
        found[channel.name] = value.reshape(chunk.layout.layers, -1).astype(np.float32)
    return InformationWeights(found, chunk.layout, chunk.backbone)


def deltas(chunk: kvp.Chunk, kv: dict) -> dict[str, np.ndarray]:
    """Of every layer and channel, padding left out, float64 [L, T, F]."""
    found = {}
    for name, value in kv.items():
        delta = np.asarray(value, np.float64) - np.asarray(chunk.kv[name], np.float64)
        found[name] = delta[:, : chunk.length].reshape(len(delta), chunk.length, -1)
    return found


def corrections(chunk: kvp.Chunk, patch: kvp.Patch) -> dict[str, np.ndarray]:
    """u v of every layer and channel."""
    found = {}
    for name, own in patch.factors.items():
        u, v = own.by_layer() if hasattr(own, "by_layer") else own
        product = np.asarray(u, np.float64) @ np.asarray(v, np.float64)
        found[name] = product[:, : chunk.length]
    return found


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_budget_is_spent_where_errors_count(kind):
    """What is left is what the singular values of Δ·W left out, and less than without weights."""
    chunk = chunk_of(kind, length=20)
    kv, weights = conditioned_of(chunk, rank=12), weights_of(chunk)
    patch = kvp.form_patch(
        chunk, kv, kvp.patching.ByteBudget(2500, relative=0), A, weights=weights, dtype="float32", dense=False
    )
    assert patch.nbytes <= 2500
    dropped = energy = 0.0
    have = corrections(chunk, patch)
    for name, delta in deltas(chunk, kv).items():
        for layer, matrix in enumerate(delta):
            W = weights.weights[name][layer].astype(np.float64)
            dropped += (np.linalg.svd(matrix * W, compute_uv=False)[patch.factors[name].ranks[layer] :] ** 2).sum()
            energy += np.square((matrix - have[name][layer]) * W).sum()
    np.testing.assert_allclose(energy, dropped, rtol=1e-4)
    budget = kvp.patching.ByteBudget(2500)
    plain = corrections(chunk, kvp.form_patch(chunk, kv, budget, A, dtype="float32", dense=False))
    other = 0.0
    for name, delta in deltas(chunk, kv).items():
        missing = delta - plain.get(name, 0.0)
        other += np.square(missing * weights.weights[name].astype(np.float64)[:, None]).sum()
    assert energy < 0.95 * other
    removal = kvp.removal_patch(
        chunk, kv, dict(chunk.kv), kvp.patching.ByteBudget(2500, relative=0), A, (), weights=weights, dtype="float32"
    )
    for name, value in corrections(chunk, removal).items():
        np.testing.assert_allclose(value, have[name], atol=1e-4)


def test_sensitivity_says_what_small_errors_cost():
    """The KL of errors of random signs, in one channel of one layer at a time, goes with the squared weights there.

    Not of a model with routed experts: there the smallest error may choose another expert.
    """
    backbone = tiny_backbone()
    layout, rng = backbone.layout, np.random.default_rng(0)
    tokens = text_tokens(backbone, rng.integers(0, 200, (2, 12)))
    weights = calibrate_sensitivity(backbone, [tokens], samples=24)
    first, rest = tokens.take(0, 6), tokens.take(6, 12)
    kv = {name: np.asarray(value) for name, value in backbone.prefill(first).kv.items()}

    def logs(kv):
        context = kvp.to_engine(layout, kv, first.positions, 0)
        logits = np.asarray(backbone.prefill(rest, context=context, logits="all").logits, np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    whole, ratios = logs(kv), []
    size = 1e-2
    for name in layout.names:
        for layer in range(layout.layers):
            costs = []
            for _ in range(12):
                changed = {other: value.copy() for other, value in kv.items()}
                changed[name][layer] += size * rng.choice([-1, 1], changed[name][layer].shape)
                costs.append((np.exp(whole) * (whole - logs(changed))).sum())
            ratios.append(np.mean(costs) / np.square(weights.weights[name][layer]).sum())
    ratios = np.array(ratios) / np.median(ratios)
    assert (ratios > 0.4).all()
    assert (ratios < 2.5).all()
    # Layers and channels differ by far more than that.
    sums = [np.square(weights.weights[name][layer]).sum() for name in layout.names for layer in range(layout.layers)]
    assert max(sums) > 10 * min(sums)
    together = np.concatenate([value.ravel() for value in weights.weights.values()])
    np.testing.assert_allclose(np.square(together).mean(), 1, rtol=0.02)


def test_what_are_no_weights_is_refused(unchecked):
    chunk = chunk_of("gqa")
    kv, good = conditioned_of(chunk), weights_of(chunk)
    arrays, backbone = dict(good.weights), tiny_backbone()
    other, budget = dataclasses.replace(chunk, backbone="b"), kvp.patching.ByteBudget(2000)
    for error, call in (
        (InputError, lambda: kvp.form_patch(chunk, kv, budget, A, weights=arrays)),
        (InputError, lambda: kvp.form_patch(chunk, kv, 2, A, weights=good)),
        (
            PatchMismatchError,
            lambda: kvp.form_patch(other, kv, budget, A, weights=good),
        ),
        (InputError, lambda: calibrate_sensitivity(backbone, [])),
        (
            InputError,
            lambda: calibrate_sensitivity(backbone, [text_tokens(backbone, np.zeros((1, 4), int))], samples=0),
        ),
        (ShapeError, lambda: calibrate_sensitivity(backbone, [text_tokens(backbone, np.zeros((1, 1), int))])),
    ):
        with pytest.raises(error, match="got"):
            call()
