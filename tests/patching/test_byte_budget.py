"""Ranks by layer and channel within a budget of bytes: the best ones, never more bytes, few programs."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import patch_digest
from kvpatch_jax.core import RaggedFactors
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.patching import ByteBudget
from kvpatch_jax.patching.byte_budget import _direction_bytes, choose_directions
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

CHUNK = chunk_of("gqa", length=20)
A = ("A",)


def conditioned(chunk: kvp.Chunk = CHUNK, seed: int = 5) -> dict:
    """A deficit of full rank whose directions fall off at another rate in every layer."""
    rng, found = np.random.default_rng(seed), {}
    for channel in chunk.layout.channels:
        value, F = np.asarray(chunk.kv[channel.name]), channel.features
        size = np.exp(-np.arange(F) * rng.uniform(0.05, 0.6, (chunk.layout.layers, 1)))
        noise = rng.standard_normal((chunk.layout.layers, chunk.tokens, F)) * size[:, None]
        found[channel.name] = jnp.asarray(value + noise.reshape(value.shape).astype(value.dtype))
    return found


def singular(chunk: kvp.Chunk, kv: dict) -> dict[str, np.ndarray]:
    """Of each layer's deficit, padding left out, in float64."""
    found = {}
    for name, value in kv.items():
        delta = np.asarray(value, np.float64) - np.asarray(chunk.kv[name], np.float64)
        found[name] = np.stack([np.linalg.svd(own[: chunk.length].reshape(chunk.length, -1))[1] for own in delta])
    return found


def squared_error(chunk: kvp.Chunk, kv: dict, patch: kvp.Patch) -> float:
    """Of a patch at start 0, before any rotation, against the whole deficit."""
    total = 0.0
    for name, value in kv.items():
        delta = np.asarray(value, np.float64) - np.asarray(chunk.kv[name], np.float64)
        delta = delta[:, : chunk.length].reshape(len(delta), chunk.length, -1)
        own = patch.factors.get(name)
        if own is not None:
            u, v = np.asarray(own.u, np.float64), np.asarray(own.v, np.float64)
            for layer, rows in enumerate(np.asarray(own.rows)):
                rows = rows[rows < len(u)]
                delta[layer] -= u[rows, : chunk.length].T @ v[rows]
        total += float((delta**2).sum())
    return total


@pytest.mark.parametrize("costs", [(3, 3), (5, 1)])
@pytest.mark.parametrize("budget", [0, 2, 9, 13, 100])
def test_the_greedy_choice_is_the_best_of_all(costs, budget):
    """Against every choice of ranks there is; of unequal costs against those that leave out nothing that fits."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values = {name: -np.sort(-rng.exponential(size=(2, 2)), axis=1) for name in "kv"}
        cost = dict(zip("kv", costs, strict=True))
        found = choose_directions(values, cost, budget)
        kept = {name: np.cumsum(np.pad(values[name] ** 2, [(0, 0), (1, 0)]), axis=1) for name in "kv"}

        def energy(ranks: dict) -> float:
            return sum(float(kept[name][layer, rank]) for name in "kv" for layer, rank in enumerate(ranks[name]))  # noqa: B023

        spent = sum(cost[name] * int(found[name].sum()) for name in "kv")
        assert spent <= budget
        larger = [{**found, name: found[name] + np.eye(2, dtype=int)[layer]} for name in "kv" for layer in range(2)]
        for ranks in larger:
            over = sum(cost[name] * int(ranks[name].sum()) for name in "kv") > budget
            assert over or max(map(max, ranks.values())) > 2
        if costs[0] == costs[1]:
            best = 0.0
            for flat in itertools.product(range(3), repeat=4):
                ranks = {"k": flat[:2], "v": flat[2:]}
                if sum(cost[name] * sum(ranks[name]) for name in "kv") <= budget:
                    best = max(best, energy(ranks))
            assert energy(found) >= best - 1e-12


def test_the_error_is_what_was_left_out_and_below_that_of_one_rank():
    kv = conditioned()
    values = singular(CHUNK, kv)
    even = kvp.form_patch(CHUNK, kv, 3, A, method="exact")
    budget = ByteBudget(even.nbytes + 3 * 2 * 20, relative=0)  # and the table of rows
    patch = kvp.form_patch(CHUNK, kv, budget, A, dtype="float32", dense=False)
    dropped = 0.0
    for name, own in patch.factors.items():
        assert isinstance(own, RaggedFactors)
        for layer, rank in enumerate(own.ranks):
            dropped += float((values[name][layer, rank:] ** 2).sum())
            norms = np.linalg.norm(np.asarray(own.u), axis=1)[np.asarray(own.rows)[layer, :rank]]
            assert (np.diff(norms) <= 0).all()
    np.testing.assert_allclose(squared_error(CHUNK, kv, patch), dropped, rtol=1e-4)
    one_rank = sum(float((values[name][:, 3:] ** 2).sum()) for name in values)
    assert dropped < 0.85 * one_rank
    assert len({own.ranks for own in patch.factors.values()}) > 1


def test_relative_shares_make_up_for_layers_of_other_sizes():
    """A layer whose deficit is 100 times as large gets no more directions; by energy it gets all of them."""
    kv = conditioned()
    sizes = np.array([1.0, 100.0, 1.0]).reshape(3, 1, 1, 1)
    large = {
        name: value + jnp.asarray((sizes - 1) * np.asarray(value - CHUNK.kv[name]), jnp.float32)
        for name, value in kv.items()
    }
    plain, found, wanted = (
        kvp.form_patch(CHUNK, own, ByteBudget(4000, relative=power), A, dtype="float32", dense=False)
        for own, power in ((large, 0), (large, 1), (kv, 1))
    )
    assert plain.factors["k"].ranks[0] < found.factors["k"].ranks[0]
    assert {name: own.ranks for name, own in found.factors.items()} == {
        name: own.ranks for name, own in wanted.factors.items()
    }
    assert max(plain.nbytes, found.nbytes) <= 4000
    between = kvp.form_patch(CHUNK, large, ByteBudget(4000, relative=0.5), A, dtype="float32", dense=False)
    assert plain.factors["k"].ranks[0] <= between.factors["k"].ranks[0] <= found.factors["k"].ranks[0]


@pytest.mark.parametrize(("kind", "dtype"), [("gqa", "float32"), ("gqa", "int8"), ("mla", "int4"), ("gqa", "int6gall")])
def test_bytes_never_exceed_the_budget(kind, dtype):
    chunk = chunk_of(kind, length=21)
    kv = conditioned(chunk)
    for nbytes in (400, 777, 1111):
        patch = kvp.form_patch(chunk, kv, ByteBudget(nbytes), A, dtype=dtype)
        assert patch.nbytes <= nbytes
        # One more direction of the costliest channel, with a row of the table, would not fit.
        most = max(_direction_bytes(chunk.tokens, own.features, dtype) for own in chunk.layout.channels)
        assert patch.nbytes > nbytes - most - 2 * chunk.layout.layers


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gqa", "mla", "interleaved"])
def test_a_patch_within_a_budget_is_applied_and_spliced_like_any_other(kind):
    chunk = chunk_of(kind, length=20)
    kv = conditioned_of(chunk, rank=2)
    start = 7 if chunk.layout.rope.axes is None else np.array([1, 2, 3])
    # The rounding of float32 has energy too, so the rank is bounded.
    patch = kvp.truncate(kvp.form_patch(chunk, kv, ByteBudget(1 << 20), A, dtype="float32"), 2)
    found = kvp.apply_patch(chunk, patch, start, A)
    wanted = kvp.to_engine(chunk.layout, kv, chunk.local, start)
    assert {own.ranks for own in patch.factors.values()} == {(2,) * chunk.layout.layers}
    for name in wanted:
        np.testing.assert_allclose(found[name][:, :20], wanted[name][:, :20], atol=1e-4)
    paged = kvp.pool.make_pool(chunk.layout, 6, 8, jnp.float32)
    paged = kvp.pool.splice(paged, np.arange(24), kvp.Placed(chunk, patch, start, A))
    for name, value in paged.items():
        flat = np.asarray(value).reshape(value.shape[0], -1, *value.shape[3:])[..., : found[name].shape[-1]]
        np.testing.assert_allclose(flat[:, :20], found[name][:, :20], atol=1e-5)


@pytest.mark.nightly
def test_many_budgets_share_programs():
    kv, counts = conditioned(), []
    for nbytes in (1200, 1250, 1300, 1350):
        with compilations() as compiled:
            patch = kvp.form_patch(CHUNK, kv, ByteBudget(nbytes), A, dtype="int4")
            kvp.apply_patch(CHUNK, patch, nbytes, A)
        counts.append((patch.factors["k"].ranks, list(compiled)))
    assert len({rank for rank, _ in counts}) > 1
    assert [compiled for _, compiled in counts[1:]] == [[], [], []]


@pytest.mark.nightly
def test_smaller_patches_of_a_budget():
    kv = conditioned()
    patch = kvp.form_patch(CHUNK, kv, ByteBudget(4000), A, layers=[0, 2], dtype="float32", dense=False)
    assert patch.metadata.layers == (0, 2)
    assert kvp.keep_layers(patch, [2]).nbytes < patch.nbytes
    assert kvp.quantise(patch, "int4").nbytes < patch.nbytes / 4
    assert patch_digest(patch) != patch_digest(kvp.truncate(patch, 1))
    capped = kvp.truncate(kvp.form_patch(CHUNK, kv, ByteBudget(9000), A, dtype="float32", dense=False), 2)
    assert max(capped.ranks.values()) == 2
    removed = kvp.removal_patch(CHUNK, kv, conditioned(seed=6), ByteBudget(2000), ["B"], ["A", "B"], dtype="float32")
    assert removed.nbytes <= 2000
    correction = kvp.correction_patch(CHUNK, kvp.quantise(patch_of(kv), "int4"), conditioned(seed=7), 4, ["C"])
    assert correction.metadata.base == "patched"


def patch_of(kv: dict, **options) -> kvp.Patch:
    return kvp.form_patch(CHUNK, kv, ByteBudget(4000), A, **{"dtype": "float32", **options})


@pytest.mark.nightly
def test_a_correction_is_folded_into_a_patch_with_many_ranks():
    first, second = conditioned_of(CHUNK, rank=2), conditioned_of(CHUNK, rank=2, seed=4)
    patch = patch_of(first)
    correction = kvp.correction_patch(CHUNK, patch, second, 4, ["C"])
    updated = kvp.update_patch(patch, correction, 2)
    found = kvp.apply_patch(CHUNK, updated, 0, ["C"])
    for name, value in kvp.to_engine(CHUNK.layout, second, CHUNK.local, 0).items():
        np.testing.assert_allclose(found[name][:, :20], value[:, :20], atol=1e-4)
    few = kvp.quantise(patch, "int5g16")
    updated = kvp.update_patch(few, kvp.correction_patch(CHUNK, few, second, 4, ["C"], dtype="int5g16"))
    assert (updated.factors["k"].u.bits, updated.factors["k"].u.group) == (5, 16)


def test_a_chunk_without_a_deficit_needs_no_factors():
    patch = kvp.form_patch(CHUNK, dict(CHUNK.kv), ByteBudget(1000), A)
    assert (dict(patch.factors), patch.nbytes) == ({}, 0)


def test_a_budget_is_spent_in_four_bits_unless_told_otherwise():
    kv = conditioned()
    found, wanted = (kvp.form_patch(CHUNK, kv, ByteBudget(2000), A, **more) for more in ({}, {"dtype": "int4"}))
    assert found.factors["k"].u.bits == 4
    assert found.ranks == wanted.ranks
    assert kvp.form_patch(CHUNK, kv, 2, A).factors["k"][0].dtype == np.float32


def test_what_no_budget_can_form_is_refused(unchecked):
    kv, layout = conditioned(), LAYOUTS["gqa"]
    fields = {field.name: getattr(CHUNK, field.name) for field in dataclasses.fields(kvp.Chunk)}
    batch = kvp.Chunk(**fields | {"kv": kv_of(layout, 24, batch=(2,)), "content": None})
    for error, call in (
        (InputError, lambda: ByteBudget(0)),
        (InputError, lambda: ByteBudget(2.5)),
        (InputError, lambda: ByteBudget(10, relative=1.5)),
        (InputError, lambda: ByteBudget(10, relative="all")),
        (InputError, lambda: ByteBudget.share(CHUNK, 0)),
        (InputError, lambda: ByteBudget.share("chunk", 0.1)),
        (InputError, lambda: kvp.form_patch(CHUNK, kv, ByteBudget(30), A)),
        (ShapeError, lambda: kvp.form_patch(batch, dict(batch.kv), ByteBudget(600), A)),
    ):
        with pytest.raises(error, match="got"):
            call()


def test_a_share_is_of_the_chunk_in_16_bits():
    assert ByteBudget.share(CHUNK, 0.25, 0.1) == ByteBudget(3 * 2 * 32 * 2 * 20 // 4, 0.1)
