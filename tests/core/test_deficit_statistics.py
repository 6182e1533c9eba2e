"""Depth, rank and spread of a deficit are those that NumPy finds of its tokens, with padding left out."""

import numpy as np

from kvpatch_jax.core import deficit
from tests.shared.arrays import placed

LENGTH = 6


def test_statistics_are_numpys_of_the_tokens_that_are_no_padding():
    rng = np.random.default_rng(0)
    value, reference = (rng.standard_normal((3, 8, 2, 4)).astype(np.float32) for _ in range(2))
    # The first layer absorbed nothing; padding may hold anything.
    value[0, :LENGTH], value[:, LENGTH:] = 0, 1e3
    delta = {"k": placed(value)}
    live, other = (array[:, :LENGTH].astype(np.float64) for array in (value, reference))

    norms = [np.sqrt(np.square(array).sum((1, 2, 3))) for array in (live, other)]
    found = deficit.relative_norm(delta, {"k": placed(reference)}, LENGTH)["k"]
    np.testing.assert_allclose(found, norms[0] / norms[1], rtol=1e-5)

    energy = np.square(np.linalg.svd(live[1:].reshape(2, LENGTH, 8), compute_uv=False))
    curve = np.cumsum(energy, -1) / energy.sum(-1, keepdims=True)
    found = np.asarray(deficit.energy_curve(delta, LENGTH)["k"])
    np.testing.assert_allclose(found[1:, :LENGTH], curve, atol=1e-5)
    assert not found[0].any()
    for share, counted in ((0.9, deficit.e90(delta, LENGTH)), (0.5, deficit.e90(delta, LENGTH, 0.5))):
        assert counted["k"].tolist() == [0, *((curve < share).sum(-1) + 1)]

    tokens = np.sort(np.square(live[1:]).sum((2, 3)))[:, ::-1]
    # The parts of a transition have no tokens.
    spread = deficit.token_spread({**delta, "state": delta["k"]}, LENGTH)
    assert list(spread) == ["k"]
    reached = np.cumsum(tokens, -1) / tokens.sum(-1, keepdims=True) < 0.9
    np.testing.assert_allclose(spread["k"], [0, *((reached.sum(-1) + 1) / LENGTH)])
