"""Bounds on rounding errors hold for sums in any order, and catch one rounding to 16 bits."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_within, mean_bound, rounding_bound

COUNT = 24


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), power=st.integers(-20, 20))
def test_products_summed_in_any_order_are_within_the_bound(seed, power):
    rng = np.random.default_rng(seed)
    left, right = (rng.normal(size=COUNT).astype(np.float32) for _ in range(2))
    left *= np.float32(2.0**power)
    terms = left.astype(np.float64) * right
    bound = rounding_bound(np.abs(terms).sum(), COUNT)
    for order in (np.arange(COUNT), np.argsort(terms), np.argsort(-np.abs(terms)), rng.permutation(COUNT)):
        total = np.float32(0)
        for number in order:
            total += left[number] * right[number]
        assert_within(total, terms.sum(), bound)
    assert_within((left * right).reshape(-1, 8).sum(1).sum(), terms.sum(), bound, "in lanes")


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(1e-7, 1e-2))
def test_a_mean_with_weights_that_are_off_is_within_the_bound(seed, share):
    rng = np.random.default_rng(seed)
    weights, values = rng.dirichlet(np.full(COUNT, 0.3)), rng.normal(size=(COUNT, 3)) * 100
    errors = share * rng.random(COUNT)
    moved = weights * np.exp(errors * rng.choice([-1, 1], COUNT))
    found = moved @ values / moved.sum()
    assert_within(found, weights @ values, mean_bound(weights, values, errors) * (1 + 1e-6))


def test_sixteen_bits_nan_and_other_shapes_are_refused():
    terms = np.random.default_rng(0).normal(size=(50, COUNT))
    expected, bound = terms.sum(1), rounding_bound(np.abs(terms).sum(1), COUNT)
    rounded = terms.copy()
    rounded[:, 0] = rounded[:, 0].astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="of 50 elements are beyond their bound"):
        assert_within(rounded.sum(1), expected, bound)
    assert (np.abs(rounded.sum(1) - expected) > bound).mean() > 0.9
    with pytest.raises(AssertionError, match="50 of 50 elements"):
        assert_within(np.full(50, np.nan), expected, bound)
    with pytest.raises(AssertionError, match="one row"):
        assert_within(expected[:1], expected, bound, "one row")
