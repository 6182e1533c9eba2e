"""Deficit statistics on deficits whose shape is known."""

import jax.numpy as jnp
import numpy as np

from kvpatch_jax.core import deficit
from tests.shared.arrays import placed


def known() -> dict:
    """Two layers: zero, and three equal directions on tokens 0-2, all in head 0."""
    value = np.zeros((2, 8, 2, 4), np.float32)
    for token in range(3):
        value[1, token, 0, token] = 2.0
    return {"k": placed(value)}


def test_depth_rank_and_spread_of_a_known_deficit():
    delta = known()
    assert deficit.e90(delta)["k"].tolist() == [0, 3]
    np.testing.assert_allclose(deficit.energy_curve(delta)["k"][1, :3], [1 / 3, 2 / 3, 1], atol=1e-6)
    np.testing.assert_allclose(deficit.token_spread(delta)["k"], [0, 3 / 8], atol=1e-6)
    reference = {"k": jnp.ones((2, 8, 2, 4))}
    np.testing.assert_allclose(deficit.relative_norm(delta, reference)["k"], [0, np.sqrt(12 / 64)], atol=1e-6)
