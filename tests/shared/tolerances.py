"""How far float32 may be from float64: bounds that follow from the arithmetic and hold on every machine."""

from typing import Any

import numpy as np
from jaxtyping import Float

HALF_STEP = 2.0**-24
"""Largest relative error of one rounding to float32."""
FUNCTION = 8
"""Roundings that one elementary function (exp, tanh) counts for: libraries keep it within 4 units in the last place."""

Array = Float[np.ndarray, "..."]


def rounding_bound(magnitudes: Any, roundings: int) -> Array:
    """Bounds the error of sums that are computed in float32, element by element.

    A term that goes through n operations comes out multiplied by a factor within n u / (1 - n u) of 1, u being the half
    step (Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). So a sum is off by at most that share of
    the sum of its terms' magnitudes, in whichever order it is added and whether products and sums are fused or not:
    that order and fusion are what machines differ in.

    Args:
      magnitudes: sums of the absolute values of the terms, in float64.
      roundings: the most operations that a term goes through. A sum of n products counts n, each function `FUNCTION`.
    """
    share = roundings * HALF_STEP
    return np.asarray(magnitudes, np.float64) * (share / (1 - share))


def mean_bound(weights: Array, values: Array, errors: Array) -> Array:
    """Bounds the error of a weighted mean whose weights are off by factors up to exp(± errors).

    With exact weights p, factors exp(e) and o = sum p v, the mean is off by sum p (exp(e) - 1) (v - o) / sum p exp(e),
    because the sum of p (v - o) is 0: a weight's error counts by how far its value is from the mean.

    Args:
      weights: [keys], of sum 1. values: [keys, width]. errors: [keys], of the weights' logarithms.
    """
    apart = np.abs(values - weights @ values)
    return (weights * np.expm1(errors)) @ apart / (weights @ np.exp(-errors))


def assert_within(found: Any, expected: Any, bound: Any, what: object = "") -> None:
    """Asserts that no element of `found` is further from `expected` than its own bound."""
    assert np.shape(found) == np.shape(expected) == np.shape(bound), what
    error = np.abs(np.asarray(found, np.float64) - expected)
    beyond = ~(error <= bound)  # NaN is beyond every bound
    if beyond.any():
        worst = np.unravel_index(np.argmax(np.where(beyond, error - bound, -np.inf)), error.shape)
        one, other, most, off = (np.asarray(values)[worst] for values in (found, expected, bound, error))
        raise AssertionError(
            f"{what}: {int(beyond.sum())} of {error.size} elements are beyond their bound; at "
            f"{[int(place) for place in worst]} got {one}; expected {other} within {most:.1e}, off by {off:.1e}"
        )


def assert_close_to_largest(found: Any, expected: Any, what: object = "", *, bar: float) -> None:
    """Asserts that no element is further from `expected` than this share of the largest magnitude in it."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= bar, f"{what}: off by {error:.2e} of the largest magnitude"
