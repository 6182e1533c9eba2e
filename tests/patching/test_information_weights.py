"""Weights measure what small errors cost a model's predictions, and a weighed budget is spent where they cost most."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.errors import InputError, PatchMismatchError
from kvpatch_jax.patching import ByteBudget, InformationWeights, calibrate_sensitivity
from tests.shared.operator_cases import chunk_of, conditioned_of

A = ("A",)


def weights_of(chunk: kvp.Chunk) -> InformationWeights:
    """Weights from 0.1 to 10."""
    rng, layout = np.random.default_rng(3), chunk.layout
    shapes = {channel.name: (layout.layers, channel.features) for channel in layout.channels}
    weights = {name: (10 ** rng.uniform(-1, 1, shape)).astype(np.float32) for name, shape in shapes.items()}
    return InformationWeights(weights, layout, chunk.backbone)


def deltas(chunk: kvp.Chunk, kv: dict) -> dict[str, np.ndarray]:
    """Of every layer and channel, padding left out, float64 [L, T, F]."""
    found = {}
    for name, value in kv.items():
        delta = np.asarray(value, np.float64) - np.asarray(chunk.kv[name], np.float64)
        found[name] = delta[:, : chunk.length].reshape(len(delta), chunk.length, -1)
    return found


def corrections(chunk: kvp.Chunk, patch: kvp.Patch) -> dict[str, np.ndarray]:
    """u v of every layer and channel."""
    pairs = {name: [np.asarray(leaf, np.float64) for leaf in own.by_layer()] for name, own in patch.factors.items()}
    return {name: (u @ v)[:, : chunk.length] for name, (u, v) in pairs.items()}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_budget_is_spent_where_errors_count(kind):
    """What is left is what the singular values of Δ·W left out, and less than without weights."""
    chunk = chunk_of(kind, length=20)
    kv, weights, budget = conditioned_of(chunk, rank=12), weights_of(chunk), ByteBudget(2500, relative=0)
    patch = kvp.form_patch(chunk, kv, budget, A, weights=weights, dtype="float32", dense=False)
    plain = corrections(chunk, kvp.form_patch(chunk, kv, budget, A, dtype="float32", dense=False))
    assert patch.nbytes <= 2500
    dropped = energy = other = 0.0
    have = corrections(chunk, patch)
    for name, delta in deltas(chunk, kv).items():
        W = weights.weights[name].astype(np.float64)[:, None]
        for layer, own in enumerate(np.linalg.svd(delta * W, compute_uv=False)):
            dropped += (own[patch.factors[name].ranks[layer] :] ** 2).sum()
        energy += np.square((delta - have[name]) * W).sum()
        other += np.square((delta - plain.get(name, 0.0)) * W).sum()
    np.testing.assert_allclose(energy, dropped, rtol=1e-4)
    assert energy < 0.95 * other


SLOPES = {
    "k": np.array([[1, -0.2, 0.6, 0.9], [0.3, 0.1, -0.5, 0.8]]),
    "v": np.array([[1e-6, 2, 0.5, 1], [0.1, 0.3, 0.2, 0.4]]),
}


class LinearReader:
    """A model of two words whose logits are linear in the sum of the cached numbers, with engine-frame keys."""

    layout = kvp.KVLayout.gqa(2, 1, 4, kvp.Rope(1e4, 4))
    fingerprint, forward_costs, encode = "linear", None, None

    def prepare(self, items):
        return {"items": items}

    recompute = attention = decode = generate = embed = prepare

    def prefill(self, tokens: Tokens, context: Any = None, **_):
        rows, count = tokens.embeddings.shape[:2]
        if context is None:
            kv = {name: jnp.full((2, rows, count, 1, 4), 0.1) for name in "kv"}
            return Output(jnp.zeros((rows, 1, 2)), kv, {})
        score = sum(jnp.einsum("lbtkh,lh->b", context[name], slope) for name, slope in SLOPES.items())
        logits = jnp.stack([jnp.zeros_like(score), score], axis=-1)
        return Output(jnp.broadcast_to(logits[:, None], (rows, count, 2)), {}, {})


def test_sensitivity_is_the_root_of_fishers_information():
    """Of two words, the gradient for a feature is that of the score times a factor that all features share."""
    model = LinearReader()
    tokens = Tokens(np.zeros((3, 4, 1), np.float32), np.tile(np.arange(4, dtype=np.int32), (3, 1)))
    weights = calibrate_sensitivity(model, [tokens], samples=2)
    squares = {name: slope**2 for name, slope in SLOPES.items()}
    # A rotary pair turns into one another, so both have its mean; the rotation keeps its length.
    squares["k"] = np.tile((squares["k"][:, :2] + squares["k"][:, 2:]) / 2, 2)
    mean = np.mean([*squares.values()])
    for name, square in squares.items():
        # A feature that hardly matters has a tenth of its layer's root mean square.
        least = 0.1 * np.sqrt(square.mean(1, keepdims=True) / mean)
        np.testing.assert_allclose(weights.weights[name], np.maximum(np.sqrt(square / mean), least), rtol=1e-4)
    assert (weights.layout, weights.backbone) == (model.layout, "linear")


def test_weights_of_another_backbone_or_without_a_budget_are_refused(unchecked):
    chunk = chunk_of("gqa")
    kv, good, other = conditioned_of(chunk), weights_of(chunk), dataclasses.replace(chunk, backbone="b")
    for error, call in (
        (InputError, lambda: kvp.form_patch(chunk, kv, 2, A, weights=good)),
        (PatchMismatchError, lambda: kvp.form_patch(other, kv, ByteBudget(2000), A, weights=good)),
    ):
        with pytest.raises(error, match="got"):
            call()
