"""Readouts: merging any split equals attention over the union."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.errors import ShapeError
from tests.shared.arrays import placed
from tests.shared.examples import examples

RNG = np.random.default_rng(0)
Q, K, V = (placed(RNG.standard_normal(s), jnp.float32) for s in ((2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)))


def empty(width: int) -> tuple[jax.Array, jax.Array]:
    """The readout of a segment that nothing reads."""
    return jnp.zeros((2, 5, 4, width)), jnp.full((2, 5, 4), -jnp.inf)


def test_is_softmax_attention():
    o, lse = kvp.core.attention_with_lse(Q, K, V)
    keys, values = (np.repeat(np.asarray(x, np.float64), 2, axis=2) for x in (K, V))
    scores = np.einsum("btnh,bsnh->btns", np.asarray(Q, np.float64), keys) / np.sqrt(8)
    weights = np.exp(scores)
    np.testing.assert_allclose(lse, np.log(weights.sum(-1)), atol=2e-6)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(o, np.einsum("btns,bsne->btne", weights, values), atol=2e-6)


@examples(4)
@given(cuts=st.lists(st.integers(1, 11), unique=True, max_size=4).map(sorted), masked=st.booleans())
def test_merging_a_split_is_the_union(cuts: list[int], masked: bool):
    mask = placed(np.random.default_rng(1).random((2, 5, 12)) > 0.4) if masked else None
    edges = [0, *cuts, 12]
    parts = [
        kvp.core.attention_with_lse(Q, K[:, a:b], V[:, a:b], None if mask is None else mask[..., a:b])
        for a, b in itertools.pairwise(edges)
    ]
    o, lse = kvp.core.merge_readouts(*reversed(parts), empty(6))
    whole, whole_lse = kvp.core.attention_with_lse(Q, K, V, mask)
    np.testing.assert_allclose(o, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


def test_empty_is_the_identity_and_never_nan():
    o, lse = kvp.core.merge_readouts(empty(6), empty(6))
    assert not o.any()
    assert (lse == -jnp.inf).all()
    o, lse = kvp.core.attention_with_lse(Q, K, V, jnp.zeros((5, 12), bool))
    assert not o.any()
    assert (lse == -jnp.inf).all()
    gradient = jax.jit(jax.grad(lambda q: kvp.core.attention_with_lse(q, K, V, jnp.zeros((5, 12), bool))[0].sum()))(Q)
    assert np.isfinite(gradient).all()


def test_a_scale_may_be_traced():
    found = jax.jit(lambda scale: kvp.core.attention_with_lse(Q, K, V, scale=scale))(0.3)
    for own, wanted in zip(found, kvp.core.attention_with_lse(Q, K, V, scale=0.3), strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-6)


def test_readouts_that_do_not_fit_are_refused(unchecked):
    with pytest.raises(ShapeError, match="multiple of query heads"):
        kvp.core.attention_with_lse(Q[:, :, :3], K, V)
    with pytest.raises(ShapeError, match="equal tokens and KV heads"):
        kvp.core.attention_with_lse(Q, K, V[..., :1, :])
    for mask, shown in ((np.zeros(12, np.float32), "float32"), (jnp.ones(12, int), "int32"), ([0.0] * 12, "a list")):
        with pytest.raises(ShapeError, match=f"attention: mask: got {shown}; expected an array of bool"):
            kvp.core.attention_with_lse(Q, K, V, mask)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="at least one pair"):
        kvp.core.merge_readouts()
    with pytest.raises(ShapeError, match="expected"):
        kvp.core.merge_readouts(empty(6), empty(7))
