"""Factors that are best as queries read them, and weights that are what queries read, wherever they stand."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

import kvpatch_jax as kvp
from kvpatch_jax.core import FormPlan
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import ReadingWeights, calibrate_sensitivity, calibrate_weights
from kvpatch_jax.patching.reading_weights import factorise_weighted
from tests.kvpatch_jax.repair.splices import text_tokens, tiny_backbone

A = ("A",)


def weights_of(chunk: kvp.Chunk, seed: int = 3) -> ReadingWeights:
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
    return ReadingWeights(found, chunk.layout, chunk.backbone)


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


@pytest.mark.parametrize("kind", ["gqa", "mha", "mla"])
def test_the_weighted_error_is_the_least_there_is(kind):
    """Against the singular values of Δ·W (Eckart and Young), and below what plain factors leave."""
    chunk = chunk_of(kind, length=20)
    kv, weights = conditioned_of(chunk, rank=12, size=2.0), weights_of(chunk)
    plain = kvp.form_patch(chunk, kv, 3, A, method="exact")
    patch = kvp.form_patch(chunk, kv, 3, A, method="exact", weights=weights)
    have, other = corrections(chunk, patch), corrections(chunk, plain)
    for name, delta in deltas(chunk, kv).items():
        for layer, matrix in enumerate(delta):
            W = weights.weights[name][layer].astype(np.float64)
            least = np.sqrt((np.linalg.svd(matrix * W, compute_uv=False)[3:] ** 2).sum())
            np.testing.assert_allclose(np.linalg.norm((matrix - have[name][layer]) * W), least, rtol=1e-4)
            assert np.linalg.norm((matrix - other[name][layer]) * W) > 1.05 * least


def test_equal_weights_give_the_plain_factors():
    chunk = chunk_of("gqa", length=20)
    kv = conditioned_of(chunk, rank=12)
    equal = ReadingWeights.equal(chunk.layout, chunk.backbone)
    budget = kvp.ByteBudget(2000)
    for rank, more in ((3, {"method": "exact"}), (budget, {})):
        found = corrections(chunk, kvp.form_patch(chunk, kv, rank, A, weights=equal, **more))
        for name, wanted in corrections(chunk, kvp.form_patch(chunk, kv, rank, A, **more)).items():
            np.testing.assert_allclose(found[name], wanted, atol=1e-5)


def test_a_budget_is_spent_where_queries_read():
    chunk = chunk_of("gqa", length=20)
    kv, weights = conditioned_of(chunk, rank=12), weights_of(chunk)
    patch = kvp.form_patch(chunk, kv, kvp.ByteBudget(2500), A, weights=weights, dtype="float32")
    assert patch.nbytes <= 2500
    dropped = energy = 0.0
    have = corrections(chunk, patch)
    for name, delta in deltas(chunk, kv).items():
        for layer, matrix in enumerate(delta):
            W = weights.weights[name][layer].astype(np.float64)
            dropped += (np.linalg.svd(matrix * W, compute_uv=False)[patch.factors[name].ranks[layer] :] ** 2).sum()
            energy += np.square((matrix - have[name][layer]) * W).sum()
    np.testing.assert_allclose(energy, dropped, rtol=1e-4)


@pytest.mark.parametrize("more", [{"layers": [0, 2]}, {"dtype": "int4"}])
def test_weights_go_with_the_other_options(more):
    chunk = chunk_of("gqa", length=20)
    kv = conditioned_of(chunk, rank=2)
    patch = kvp.form_patch(chunk, kv, 4, A, method="exact", weights=weights_of(chunk), **more)
    found = kvp.apply_patch(kvp.Placed(chunk, patch, 0, A))
    wanted = kvp.to_engine(chunk.layout, kv, chunk.local, 0)
    layers, close = more.get("layers", [0, 1, 2]), {"atol": 0.3 if "dtype" in more else 2e-4}
    for name in wanted:
        np.testing.assert_allclose(found[name][layers, :20], wanted[name][layers, :20], **close)


def test_a_batch_and_a_dense_channel_have_weights():
    chunk = chunk_of("gqa")
    fields = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(kvp.Chunk)}
    batch = kvp.Chunk(**fields | {"kv": kv_of(chunk.layout, 24, batch=(2,)), "content": None})
    kv, weights = kv_of(chunk.layout, 24, seed=4, batch=(2,)), weights_of(chunk)
    patch = kvp.form_patch(batch, kv, {"k": 3, "v": 24}, A, method="exact", weights=weights)
    W = weights.weights["k"].astype(np.float64)
    for row in range(2):
        delta = np.asarray(kv["k"] - batch.kv["k"], np.float64)[:, row].reshape(3, 24, 32)
        u, v = (np.asarray(leaf, np.float64)[:, row] for leaf in patch.factors["k"])
        least = [
            np.sqrt((np.linalg.svd(own * w, compute_uv=False)[3:] ** 2).sum()) for own, w in zip(delta, W, strict=True)
        ]
        np.testing.assert_allclose(np.linalg.norm((delta - u @ v) * W[:, None], axis=(1, 2)), least, rtol=1e-4)
    np.testing.assert_array_equal(patch.factors["v"], kv["v"] - batch.kv["v"])


def test_other_patches_are_formed_by_weights_too():
    chunk = chunk_of("gqa", length=20)
    kv, weights = conditioned_of(chunk, rank=12), weights_of(chunk)
    own = corrections(chunk, kvp.form_patch(chunk, kv, 3, A, method="exact", weights=weights))
    orbit = kvp.orbit_patch(kvp.accumulate(None, kv, chunk, A), 3, method="exact", weights=weights)
    removal = kvp.removal_patch(chunk, kv, dict(chunk.kv), 3, A, (), method="exact", weights=weights)
    budget = kvp.removal_patch(
        chunk, kv, dict(chunk.kv), kvp.ByteBudget(9000, most=3), A, (), weights=weights, dtype="float32"
    )
    for patch in (orbit, removal, budget):
        for name, value in corrections(chunk, patch).items():
            np.testing.assert_allclose(value, own[name], atol=1e-4)


def raw_queries(layer):
    return layer.query


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_calibrated_weights_are_what_queries_read(kind):
    """Against root mean squares in NumPy of the queries themselves."""
    backbone = tiny_backbone(kind)
    layout = backbone.layout
    ids = np.random.default_rng(0).integers(0, 200, (2, 12))
    tokens = text_tokens(backbone, ids)
    weights = calibrate_weights(backbone, [tokens])
    first, rest = tokens.take(0, 6), tokens.take(6, 12)
    context = kvp.to_engine(layout, backbone.prefill(first).kv, first.positions, 0)
    queries = np.asarray(backbone.attention(rest, context, layers=range(layout.layers), reduce=raw_queries), np.float64)
    name = "k" if kind == "gqa" else "kpe"
    channel = layout.channel(name)
    own = queries[..., -channel.width :]
    groups = own.reshape(*own.shape[:3], channel.heads, -1, channel.width)
    square = (groups**2).mean(axis=(1, 2, 4))
    R = channel.rotary
    pairs = (square[..., : R // 2] + square[..., R // 2 : R]) / 2
    square[..., : R // 2], square[..., R // 2 : R] = pairs, pairs
    square = square.reshape(layout.layers, -1)
    square /= square.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(weights.weights[name], np.sqrt(square), rtol=1e-4)
    if kind == "gqa":
        np.testing.assert_array_equal(weights.weights["v"], 1)
    else:
        latent = (queries[..., : -channel.width] ** 2).mean(axis=(1, 2, 3))
        wanted = np.sqrt((latent / latent.mean(axis=1, keepdims=True) + 1) / 2)
        np.testing.assert_allclose(weights.weights["ckv"], wanted, rtol=1e-4)


def test_calibrated_weights_do_not_depend_on_position():
    backbone = tiny_backbone()
    tokens = text_tokens(backbone, np.arange(20, 34)[None])
    here, there = (calibrate_weights(backbone, [own]) for own in (tokens, tokens.shift(1000)))
    for name, value in here.weights.items():
        np.testing.assert_allclose(value, there.weights[name], rtol=2e-3)
    # Prompts count by their tokens.
    twice = calibrate_weights(backbone, [tokens, tokens])
    np.testing.assert_allclose(twice.weights["k"], here.weights["k"], rtol=1e-5)


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


def test_weights_are_kept_as_plain_arrays(tmp_path):
    chunk = chunk_of("gqa")
    weights = weights_of(chunk)
    np.savez(tmp_path / "weights.npz", **weights.arrays())
    with np.load(tmp_path / "weights.npz") as file:
        again = ReadingWeights(dict(file), chunk.layout, chunk.backbone)
    assert again.digest == weights.digest != weights_of(chunk, seed=4).digest
    assert dataclasses.replace(again, backbone="another").digest != weights.digest


def test_what_are_no_weights_is_refused(unchecked):
    chunk, layout = chunk_of("gqa"), LAYOUTS["gqa"]
    kv, good = conditioned_of(chunk), weights_of(chunk)
    arrays, backbone = good.arrays(), tiny_backbone()
    uneven = arrays["k"].copy()
    uneven[0, 0] *= 2
    for error, call in (
        (ShapeError, lambda: ReadingWeights({"k": arrays["k"]}, layout, "tiny")),
        (ShapeError, lambda: ReadingWeights({**arrays, "v": arrays["v"][:2]}, layout, "tiny")),
        (InputError, lambda: ReadingWeights({**arrays, "v": arrays["v"] * 0}, layout, "tiny")),
        (InputError, lambda: ReadingWeights({**arrays, "k": uneven}, layout, "tiny")),
        (InputError, lambda: ReadingWeights(arrays, layout, "")),
        (InputError, lambda: kvp.form_patch(chunk, kv, 2, A, weights=arrays)),
        (InputError, lambda: kvp.form_patch(chunk, kv, 2, A, weights=good, frame="engine", start=3)),
        (PatchMismatchError, lambda: kvp.form_patch(dataclasses.replace(chunk, backbone="b"), kv, 2, A, weights=good)),
        (InputError, lambda: calibrate_weights(backbone, [])),
        (InputError, lambda: calibrate_sensitivity(backbone, [])),
        (
            InputError,
            lambda: calibrate_sensitivity(backbone, [text_tokens(backbone, np.zeros((1, 4), int))], samples=0),
        ),
        (ShapeError, lambda: calibrate_sensitivity(backbone, [text_tokens(backbone, np.zeros((1, 1), int))])),
        (InputError, lambda: calibrate_weights("backbone", [[1, 2]])),
        (ShapeError, lambda: calibrate_weights(backbone, [[[1]]])),
    ):
        with pytest.raises(error, match="got"):
            call()


def test_gradients_of_weighted_factors_are_finite():
    chunk = chunk_of("gqa", length=20)
    delta = {name: value - chunk.kv[name] for name, value in conditioned_of(chunk, rank=12).items()}
    weights = {name: jnp.asarray(value) for name, value in weights_of(chunk).weights.items()}
    plan = FormPlan(ranks=(("k", 3), ("v", 3)), method="exact")

    @jax.jit
    def loss(delta):
        factors = factorise_weighted(delta, weights, jax.random.key(0), jnp.int32(20), plan=plan)
        return sum(jnp.sum(jnp.square(u @ v)) for u, v in factors.values())

    gradients = jax.grad(loss)(delta)
    assert all(np.isfinite(np.asarray(value)).all() and np.asarray(value).any() for value in gradients.values())
