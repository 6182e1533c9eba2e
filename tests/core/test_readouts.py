"""Readouts of segments merge to attention over their union, and what nobody reads spoils nothing."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.core import attention_with_lse, merge_readouts
from kvpatch_jax.errors import ShapeError
from tests.shared.arrays import placed
from tests.shared.examples import examples

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)))
GRADIENTS = jax.jit(jax.grad(lambda q, k, v, mask: attention_with_lse(q, k, v, mask)[0].sum(), argnums=(0, 1, 2)))


def changed(value: np.ndarray, place: tuple, number: float) -> np.ndarray:
    """A copy with one number changed."""
    copy = value.copy()
    copy[place] = number
    return copy


def empty(width: int, o: float = 0.0, lse: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """The readout of a segment that nothing reads."""
    return np.full((2, 5, 4, width), o, np.float32), np.full((2, 5, 4), lse, np.float32)


def softmax_attention(mask: np.ndarray, scale: float = 8**-0.5) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (K, V))
    scores = np.einsum("btnh,bsnh->btns", Q.astype(np.float64), keys) * scale
    weights = np.exp(scores) * mask[:, :, None]
    lse = np.log(weights.sum(-1))
    return np.einsum("btns,bsne->btne", weights / weights.sum(-1, keepdims=True), values), lse


def close(found, wanted, atol: float = 2e-6) -> None:
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, atol=atol)


@pytest.mark.parametrize("shape", [(12,), (2, 1, 12), (2, 5, 12)])
def test_a_readout_is_softmax_attention_with_any_mask(shape: tuple[int, ...]):
    mask = np.random.default_rng(3).random(shape) > 0.4
    expected = np.broadcast_to(mask, (2, 5, 12))
    close(attention_with_lse(Q, K, V, placed(mask)), softmax_attention(expected))


def test_a_readout_without_a_mask_reads_all_by_a_scale_that_may_be_traced():
    everything = np.ones((2, 5, 12), bool)
    close(attention_with_lse(Q, K, V), softmax_attention(everything))
    scaled = jax.jit(lambda scale: attention_with_lse(Q, K, V, scale=scale))(0.3)
    close(scaled, softmax_attention(everything, 0.3))


@examples(4)
@given(cuts=st.lists(st.integers(1, 11), unique=True, max_size=4).map(sorted), masked=st.booleans())
def test_merging_a_split_is_the_union(cuts: list[int], masked: bool):
    mask = placed(np.random.default_rng(1).random((2, 5, 12)) > 0.4) if masked else None
    edges = [0, *cuts, 12]
    parts = [
        attention_with_lse(Q, K[:, a:b], V[:, a:b], None if mask is None else mask[..., a:b])
        for a, b in itertools.pairwise(edges)
    ]
    o, lse = merge_readouts(*reversed(parts), empty(6))
    whole, whole_lse = attention_with_lse(Q, K, V, mask)
    np.testing.assert_allclose(o, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


@pytest.mark.parametrize(("lse", "o"), [(np.inf, np.nan), (-np.inf, 0.0)])
def test_empty_readouts_of_any_engine_add_nothing(lse: float, o: float):
    readout, nothing = attention_with_lse(Q, K, V), empty(6, o, lse)
    for order in ((readout, nothing), (nothing, readout), (nothing, readout, nothing)):
        close(merge_readouts(*order), readout, 1e-6)
    value, mass = merge_readouts(nothing, nothing)
    assert not value.any()
    assert (mass == -jnp.inf).all()
    gradient = jax.grad(lambda x: merge_readouts((x, readout[1]), nothing)[0].sum())(readout[0])
    np.testing.assert_allclose(gradient, 1.0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_masked_does_not_reach_a_readout_nor_its_derivative(bad: float):
    mask, k, v = np.arange(12) < 7, changed(K, (slice(None), 9), bad), changed(V, (slice(None), 9), bad)
    close(attention_with_lse(Q, k, v, placed(mask)), softmax_attention(np.broadcast_to(mask, (2, 5, 12))))
    assert all(np.isfinite(gradient).all() for gradient in GRADIENTS(Q, k, v, placed(mask)))
    # A bad slot reaches those queries that read it: query heads 2 and 3 read KV head 1.
    causal, spoilt = np.arange(12) <= np.array([3, 11, 8, 9, 0])[:, None], np.zeros((2, 5, 4), bool)
    spoilt[0, [1, 3], 2:] = True
    o, lse = attention_with_lse(Q, K, changed(V, (0, 9, 1), bad), placed(causal))
    for found in (np.isnan(o).all(-1), np.isnan(o).any(-1), np.isnan(lse)):
        np.testing.assert_array_equal(found, spoilt)
    # A query that reads nothing is empty.
    mask = placed(np.zeros(12, bool))
    o, lse = attention_with_lse(Q, K, V, mask)
    assert not o.any()
    assert (lse == -jnp.inf).all()
    assert all(np.isfinite(gradient).all() for gradient in GRADIENTS(Q, K, V, mask))


def test_readouts_that_do_not_fit_are_refused(unchecked):
    for message, call in (
        ("multiple of query heads", lambda: attention_with_lse(Q[:, :, :3], K, V)),
        ("mask: got float32; expected an array of bool", lambda: attention_with_lse(Q, K, V, np.zeros(12, "f4"))),
        ("expected", lambda: merge_readouts(empty(6), empty(7))),
    ):
        with pytest.raises(ShapeError, match=message):
            call()
