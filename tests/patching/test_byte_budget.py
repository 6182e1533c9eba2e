"""A byte budget is never exceeded, and buys the directions that hold most of the deficit or whose errors cost most."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.core import RaggedFactors
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import (
    LEAST_DIRECTIONS,
    ByteBudget,
    InformationWeights,
    calibrate_sensitivity,
    parse_size,
)
from kvpatch_jax.patching.byte_budget import choose_directions
from tests.shared.arrays import placed
from tests.shared.operator_cases import (
    LAYOUTS,
    chunk_of,
    conditioned_of,
    correction_of,
    deficit_of,
    kv_of,
    placed_in_float64,
)

CHUNK = chunk_of("gqa", length=20)
A = ("A",)


def conditioned(chunk: kvp.Chunk = CHUNK, seed: int = 5) -> dict:
    """A deficit of full rank whose directions fall off at another rate in every layer."""
    rng, found = np.random.default_rng(seed), {}
    for channel in chunk.layout.channels:
        value, F = np.asarray(chunk.kv[channel.name]), channel.features
        size = np.exp(-np.arange(F) * rng.uniform(0.05, 0.6, (chunk.layout.layers, 1)))
        noise = rng.standard_normal((chunk.layout.layers, chunk.tokens, F)) * size[:, None]
        found[channel.name] = placed(value + noise.reshape(value.shape).astype(value.dtype))
    return found


@pytest.mark.parametrize("costs", [(3, 3), (5, 1)])
@pytest.mark.parametrize("budget", [0, 9, 13, 100])
def test_the_greedy_choice_is_the_best_of_all(costs, budget):
    """Against every choice of ranks there is; of unequal costs against those that leave out nothing that fits."""
    cost, choices = dict(zip("kv", costs, strict=True)), list(itertools.product(range(3), repeat=4))
    bytes_of = lambda ranks: costs[0] * sum(ranks[:2]) + costs[1] * sum(ranks[2:])
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values = {name: -np.sort(-rng.exponential(size=(2, 2)), axis=1) for name in "kv"}
        chosen = choose_directions(values, cost, budget)
        ranks = tuple(int(rank) for name in "kv" for rank in chosen[name])
        sums = np.cumsum(np.pad(np.concatenate([*values.values()]) ** 2, [(0, 0), (1, 0)]), axis=1)
        energy = {choice: sum(sums[layer, rank] for layer, rank in enumerate(choice)) for choice in choices}
        assert bytes_of(ranks) <= budget
        for layer in range(4):
            larger = tuple(rank + (layer == place) for place, rank in enumerate(ranks))
            assert bytes_of(larger) > budget or max(larger) > 2
        if costs[0] == costs[1]:
            best = max(value for choice, value in energy.items() if bytes_of(choice) <= budget)
            assert energy[ranks] >= best - 1e-12


def test_the_error_is_what_was_left_out_and_below_that_of_one_rank():
    kv = conditioned()
    values = {name: np.linalg.svd(delta, compute_uv=False) for name, delta in deficit_of(CHUNK, kv).items()}
    even = kvp.form_patch(CHUNK, kv, 4, A, method="exact")
    budget = ByteBudget(even.nbytes + 3 * 2 * 20, relative=0)  # and the table of rows
    patch = kvp.form_patch(CHUNK, kv, budget, A, dtype="float32", dense=False)
    dropped = 0.0
    for name, own in patch.factors.items():
        assert isinstance(own, RaggedFactors)
        for layer, rank in enumerate(own.ranks):
            dropped += float((values[name][layer, rank:] ** 2).sum())
            norms = np.linalg.norm(np.asarray(own.u), axis=1)[np.asarray(own.rows)[layer, :rank]]
            assert (np.diff(norms) <= 0).all()
    have = correction_of(patch, CHUNK.length)
    left = sum(np.square(delta - have.get(name, 0.0)).sum() for name, delta in deficit_of(CHUNK, kv).items())
    np.testing.assert_allclose(left, dropped, rtol=1e-4)
    one_rank = sum(float((values[name][:, 4:] ** 2).sum()) for name in values)
    assert dropped < 0.85 * one_rank
    assert len({own.ranks for own in patch.factors.values()}) > 1


def test_relative_shares_make_up_for_layers_of_other_sizes():
    """A layer whose deficit is 100 times as large gets no more directions; by energy it gets all of them."""
    kv = conditioned()
    sizes = np.array([1.0, 100.0, 1.0], np.float32).reshape(3, 1, 1, 1)
    base = {name: np.asarray(value) for name, value in CHUNK.kv.items()}
    large = {name: placed(base[name] + sizes * (np.asarray(value) - base[name])) for name, value in kv.items()}
    by_energy, between, by_share, even = (
        kvp.form_patch(CHUNK, own, ByteBudget(4000, relative=power), A, dtype="float32", dense=False)
        for own, power in ((large, 0), (large, 0.5), (large, 1), (kv, 1))
    )
    assert by_energy.factors["k"].ranks[0] < by_share.factors["k"].ranks[0]
    assert by_energy.factors["k"].ranks[0] <= between.factors["k"].ranks[0] <= by_share.factors["k"].ranks[0]
    ranks = [{name: own.ranks for name, own in patch.factors.items()} for patch in (by_share, even)]
    assert ranks[0] == ranks[1]
    assert max(patch.nbytes for patch in (by_energy, between, by_share)) <= 4000


DIRECTION = {("gqa", "float32"): 4 * (24 + 32), ("gqa", "int8"): 24 + 32 + 8, ("mla", "int4"): 12 + 16 + 2 * 2}
"""Bytes of one direction of the widest channel: 24 tokens and 32 features, and scales."""


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gqa", "float32"), ("mla", "int4"), pytest.param("gqa", "int8", marks=pytest.mark.nightly)]
)
def test_bytes_never_exceed_the_budget_and_none_are_left_for_another_direction(kind, dtype):
    chunk = chunk_of(kind, length=21)
    kv = conditioned(chunk)
    for nbytes in (400, 777, 1111):
        patch = kvp.form_patch(chunk, kv, ByteBudget(nbytes), A, dtype=dtype)
        assert patch.nbytes <= nbytes
        # A row of the table comes with each direction.
        assert patch.nbytes > nbytes - DIRECTION[kind, dtype] - 2 * chunk.layout.layers


def test_a_budget_that_holds_the_deficit_restores_it():
    kv = conditioned_of(CHUNK, rank=2)
    # The rounding of float32 has energy too, so the rank is bounded.
    patch = kvp.truncate(kvp.form_patch(CHUNK, kv, ByteBudget(1 << 20), A, dtype="float32"), 2)
    assert {own.ranks for own in patch.factors.values()} == {(2,) * CHUNK.layout.layers}
    found = kvp.apply_patch(CHUNK, patch, 7, A)
    for name, value in placed_in_float64(CHUNK.layout, kv, CHUNK.local, 7).items():
        np.testing.assert_allclose(found[name][:, :20], value[:, :20], atol=1e-4)
    # Where there is none, no factors are needed.
    nothing = kvp.form_patch(CHUNK, dict(CHUNK.kv), ByteBudget(1000), A)
    assert (dict(nothing.factors), nothing.nbytes, nothing.predicted) == ({}, 0, 0)


def test_a_budget_is_spent_in_four_bits_by_default():
    kv = conditioned()
    found, wanted = (kvp.form_patch(CHUNK, kv, ByteBudget(1000), A, **more) for more in ({}, {"dtype": "int4"}))
    assert found.factors["k"].u.bits == 4
    assert found.ranks == wanted.ranks
    assert kvp.form_patch(CHUNK, kv, 4, A).factors["k"][0].dtype == np.float32


def test_a_share_is_of_the_chunk_in_16_bits_and_has_a_floor():
    share = 3 * 2 * 32 * 2 * 20
    assert ByteBudget.share(CHUNK, 0.25, 0.1) == ByteBudget(share // 4, 0.1)
    assert (parse_size("15 %", "patch"), parse_size("12 kB", "patch")) == ((0.15, True), (12_000, False))
    kv = conditioned()
    assert kvp.form_patch(CHUNK, kv, "20 %", A, dense=False).nbytes <= 0.2 * share
    floor = kvp.form_patch(CHUNK, kv, "0.0001 %", A, dense=False)
    # As many on average, spent where they are needed most.
    ranks = [rank for own in floor.factors.values() for rank in own.ranks]
    assert LEAST_DIRECTIONS - 0.5 <= np.mean(ranks) <= LEAST_DIRECTIONS


def weights_of(chunk: kvp.Chunk) -> InformationWeights:
    """Weights from 0.1 to 10."""
    rng, layout = np.random.default_rng(3), chunk.layout
    shapes = {channel.name: (layout.layers, channel.features) for channel in layout.channels}
    weights = {name: (10 ** rng.uniform(-1, 1, shape)).astype(np.float32) for name, shape in shapes.items()}
    return InformationWeights(weights, layout, chunk.backbone)


@pytest.mark.parametrize("kind", ["gqa", pytest.param("mla", marks=pytest.mark.nightly)])
def test_a_budget_is_spent_where_errors_count(kind):
    """What is left is what the singular values of Δ·W left out, and less than without weights."""
    chunk = chunk_of(kind, length=20)
    kv, weights, budget = conditioned_of(chunk, rank=12), weights_of(chunk), ByteBudget(2500, relative=0)
    patch = kvp.form_patch(chunk, kv, budget, A, weights=weights, dtype="float32", dense=False)
    plain = kvp.form_patch(chunk, kv, budget, A, dtype="float32", dense=False)
    assert patch.nbytes <= 2500
    dropped = energy = other = 0.0
    have, without = (correction_of(own, chunk.length) for own in (patch, plain))
    for name, delta in deficit_of(chunk, kv).items():
        W = weights.weights[name].astype(np.float64)[:, None]
        for layer, own in enumerate(np.linalg.svd(delta * W, compute_uv=False)):
            dropped += (own[patch.factors[name].ranks[layer] :] ** 2).sum()
        energy += np.square((delta - have[name]) * W).sum()
        other += np.square((delta - without.get(name, 0.0)) * W).sum()
    np.testing.assert_allclose(energy, dropped, rtol=1e-4)
    assert energy < 0.95 * other


SLOPES = {
    "k": np.array([[1, -0.2, 0.6, 0.9], [0.3, 0.1, -0.5, 0.8]]),
    "v": np.array([[1e-6, 2, 0.5, 1], [0.1, 0.3, 0.2, 0.4]]),
}
SCORE = jax.jit(lambda kv: sum(jnp.einsum("lbtkh,lh->b", kv[name], slope) for name, slope in SLOPES.items()))


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
            kv = {name: np.full((2, rows, count, 1, 4), 0.1, np.float32) for name in "kv"}
            return Output(np.zeros((rows, 1, 2)), kv, {})
        score = SCORE({name: context[name] for name in SLOPES})
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


def test_what_no_budget_and_no_weights_can_form_is_refused(unchecked):
    kv, layout, weights = conditioned(), LAYOUTS["gqa"], weights_of(CHUNK)
    batch = dataclasses.replace(CHUNK, kv=kv_of(layout, 24, batch=(2,)), content=None)
    other = dataclasses.replace(CHUNK, backbone="b")
    for error, call in (
        (InputError, lambda: ByteBudget(0)),
        (InputError, lambda: ByteBudget.share(CHUNK, 0)),
        (InputError, lambda: kvp.form_patch(CHUNK, kv, ByteBudget(30), A)),
        (ShapeError, lambda: kvp.form_patch(batch, dict(batch.kv), ByteBudget(600), A)),
        (InputError, lambda: kvp.form_patch(CHUNK, kv, 2, A, weights=weights)),
        (PatchMismatchError, lambda: kvp.form_patch(other, kv, ByteBudget(2000), A, weights=weights)),
    ):
        with pytest.raises(error, match="got"):
            call()
