"""The array core under vmap, grad and batches."""
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import ops
from tests.shared.arrays import placed
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, local_of

LAYOUT = LAYOUTS["gqa"]
PLAN = ops.FormPlan(ranks=(("k", 4), ("v", 4)), method="exact")


def stacked(lengths=(24, 17)) -> tuple[dict, dict, list]:
    stack = lambda *x: placed(np.stack(x))
    chunks = [chunk_of("gqa", seed=seed, length=length) for seed, length in enumerate(lengths)]
    conditioned = [conditioned_of(chunk, seed=9 + i) for i, chunk in enumerate(chunks)]
    return (
        jax.tree.map(stack, *[dict(c.kv) for c in chunks]),
        jax.tree.map(stack, *conditioned),
        chunks,
    )


@pytest.mark.nightly
def test_vmap_over_chunks_of_unequal_length():
    kv, conditioned, chunks = stacked()
    lengths, starts = jnp.array([24, 17]), jnp.array([5, 900_000], jnp.int32)
    local = placed(chunks[0].local)
    key = jax.random.key(0)

    @jax.jit
    def one(conditioned, kv, length, start):
        factors = ops.form(conditioned, kv, length, key, plan=PLAN)
        return ops.apply(LAYOUT, kv, factors, local, start), factors

    both, factors = jax.jit(jax.vmap(one))(conditioned, kv, lengths, starts)
    assert not np.asarray(factors["k"][0])[1, :, 17:].any()
    for index in range(2):
        pick = lambda tree, index=index: jax.tree.map(lambda x: x[index], tree)
        alone, _ = one(pick(conditioned), pick(kv), lengths[index], starts[index])
        np.testing.assert_allclose(both["k"][index], alone["k"], atol=2e-5)


def test_batches_between_layers_and_tokens():
    kv, conditioned, chunks = stacked()
    inner = lambda tree: {name: placed(np.moveaxis(value, 0, 1)) for name, value in tree.items()}
    form = jax.jit(ops.form, static_argnames=("plan",))
    apply = jax.jit(functools.partial(ops.apply, LAYOUT))
    local, key = placed(chunks[0].local), jax.random.key(0)
    start = jnp.array([5, 70], jnp.int32)
    plan = ops.FormPlan(ranks=(("k", 4), ("v", 4)), method="exact")
    factors = form(inner(conditioned), inner(kv), jnp.array([24, 17]), key, plan=plan)
    found = apply(inner(kv), factors, jnp.stack([local, local]), start)
    one, other = ({name: np.asarray(value)[1] for name, value in tree.items()} for tree in (kv, conditioned))
    other = form(other, one, 17, key, plan=plan)
    alone = apply(one, other, local, start[1])
    np.testing.assert_allclose(found["k"][:, 1], alone["k"], atol=2e-5)


@pytest.mark.nightly
def test_gradients_reach_keys_and_factors():
    chunk = chunk_of("gqa")
    factors = ops.form(conditioned_of(chunk), dict(chunk.kv), 24, jax.random.key(0), plan=PLAN)

    def loss(kv, factors):
        out = ops.apply(LAYOUT, kv, factors, placed(chunk.local), jnp.int32(9))
        return sum(jnp.square(value).sum() for value in out.values())

    for gradient in jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(dict(chunk.kv), factors)):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0


def test_merge_is_the_best_of_the_sum():
    rng = np.random.default_rng(0)
    draw = lambda *s: placed(rng.standard_normal(s), jnp.float32)
    u1, v1, u2, v2 = draw(2, 20, 3), draw(2, 3, 12), draw(2, 20, 4), draw(2, 4, 12)
    total = u1 @ v1 + u2 @ v2
    u, v = ops.merge_factors((u1, v1), (u2, v2), 7)
    np.testing.assert_allclose(u @ v, total, atol=2e-5)
    u, v = ops.merge_factors((u1, v1), (u2, v2), 3)
    left, s, right = np.linalg.svd(np.asarray(total))
    np.testing.assert_allclose(u @ v, (left[..., :3] * s[:, None, :3]) @ right[:, :3], atol=5e-5)


def test_accumulate_masks_padding():
    kv, other = kv_of(LAYOUT, 6), kv_of(LAYOUT, 6, 1)
    zero = {name: jnp.zeros_like(value) for name, value in kv.items()}
    total = ops.accumulate(ops.accumulate(zero, other, kv, 4), other, kv, 4)
    np.testing.assert_allclose(total["k"][:, :4], 2 * (other["k"] - kv["k"])[:, :4], rtol=1e-6)
    assert not total["k"][:, 4:].any()
    assert local_of(LAYOUT, 6).shape == (6,)


@jax.jit
def energy_and_gradient(conditioned, base, length):
    """The squared sum of a formed patch's correction."""
    plan = ops.FormPlan(ranks=(("k", 4), ("v", 2)))

    def energy(conditioned):
        factors = ops.form(conditioned, base, length, jax.random.key(0), plan=plan)
        return sum((value**2).sum() for value in ops.correction(LAYOUT, factors).values())

    return jax.value_and_grad(energy)(conditioned)


@pytest.mark.parametrize("case", ["zero", "padded", "one token"])
def test_form_can_be_differentiated_where_the_deficit_is_zero_or_padded(case: str):
    layout = LAYOUTS["gqa"]
    base = kv_of(layout, 24)
    conditioned = base if case == "zero" else kv_of(layout, 24, seed=1)
    length = {"zero": 24, "padded": 9, "one token": 1}[case]
    value, gradient = energy_and_gradient(conditioned, base, np.int32(length))
    assert np.isfinite(value)
    for name, own in gradient.items():
        own = np.asarray(own)
        assert np.isfinite(own).all()
        assert not own[:, length:].any()
        assert (case == "zero") or own[:, :length].any(), name
