"""A token is drawn among those, and with the shares, that float64 and sorting give."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.answers import Draws
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import Sampling
from kvpatch_jax.models.decoding.sampling import REFUSED, choose, choose_rows, draw_of, kept

V, ROWS = 12, 5
GREEDY = Sampling()
CHOOSE: Any = jax.jit(choose)
KEPT: Any = jax.jit(kept)


def chosen(logits, sampling=GREEDY, key: Any = 0, index=0):
    """Of at most `ROWS` rows of at most `V` logits, in one shape, so that there is one program."""
    padded = np.full((ROWS, V), -np.inf, np.float32)
    padded[: len(logits), : logits.shape[1]] = logits
    return np.asarray(CHOOSE(padded, draw_of(sampling, key, ()), index))[: len(logits)]


def shares(logits, sampling: Sampling) -> np.ndarray:
    """What a draw's probabilities should be: by sorting, in float64, ties kept."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    if sampling.top_k is not None:
        weights[weights < np.sort(weights)[::-1][: sampling.top_k][-1]] = 0
    if sampling.top_p < 1:
        order = np.sort(weights)[::-1]
        enough = int(np.argmax(np.cumsum(order) >= sampling.top_p * weights.sum() * (1 - 1e-12)))
        weights[weights < order[enough]] = 0
    return weights / weights.sum()


@given(
    logits=st.lists(st.integers(-12, 12), min_size=V, max_size=V),
    top_p=st.sampled_from([1e-6, 0.1, 0.33, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([None, 1, 2, 5, V, 100]),
    temperature=st.sampled_from([0.37, 1.0, 5.0]),
)
def test_the_tokens_of_a_draw_are_those_of_sorting(logits, top_p, top_k, temperature):
    sampling = Sampling(temperature, top_p, top_k)
    scaled = np.asarray(logits, np.float32) / np.float32(temperature)
    draw = draw_of(sampling, 0, ())
    among = np.asarray(KEPT((scaled - scaled.max())[None], draw.top_p, draw.top_k))[0]
    expected = shares(np.asarray(logits), sampling) > 0
    mass = np.exp(np.sort(scaled.astype(np.float64))[::-1] - scaled.max())
    mass = np.cumsum(mass[: top_k or V]) / mass[: top_k or V].sum()
    if np.abs(mass - top_p).min() > 1e-6 or top_p == 1:  # float32 cannot tell a share that is reached exactly
        assert among.tolist() == expected.tolist()


def test_draws_have_the_shares_of_the_distribution():
    """Of one answer, and of a row among others that draw otherwise."""
    logits: Any = np.array([1.0, 0.2, -1.0, 2.0, -np.inf, 0.2], np.float32)
    pair: Any = np.stack([logits, logits])
    count = 20_000
    many = jax.jit(jax.vmap(lambda draw, index: choose(logits[None], draw, index)[0], (None, 0)))
    beside = jax.jit(jax.vmap(lambda draws, index: choose_rows(pair, draws, index)[1], (None, 0)))
    for sampling in (Sampling(1.0), Sampling(0.5), Sampling(2.0, 0.8), Sampling(1.0, 1.0, 3)):
        expected, draw = shares(logits, sampling), draw_of(sampling, 7, ())
        other = draw_of(Sampling(3.0, 0.5), 5, ())
        both = [(row.temperature, row.top_p, row.top_k, jax.random.key_data(row.key)) for row in (other, draw)]
        draws = Draws._make(np.stack(column) for column in zip(*both, strict=True))
        index = np.arange(count, dtype=np.int32)
        for drawn in (many(draw, index), beside(draws, np.stack([index, index], 1))):
            share = np.bincount(np.asarray(drawn), minlength=len(logits)) / count
            assert (share[expected == 0] == 0).all()
            assert (np.abs(share - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / count)).all()
        # A row in company draws what it draws alone.
        assert np.array_equal(many(draw, index), beside(draws, np.stack([index, index], 1)))


def test_ties_stay_and_the_least_settings_are_greedy():
    logits = np.array([[0.0, 3.0, 3.0, -np.inf], [5.0, -1.0, 2.0, 4.9]], np.float32)
    assert chosen(logits).tolist() == [1, 0]  # greedy: the first of ties
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-6), Sampling(1e-38)):
        drawn = np.stack([chosen(logits, sampling, index=index) for index in range(20)])
        assert set(drawn[:, 1]) == {0}
        assert set(drawn[:, 0]) <= {1, 2}
        assert sampling.temperature == 1e-38 or set(drawn[:, 0]) == {1, 2}  # ties stay, below float32 greedy decides


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_say_nothing_are_refused(temperature):
    logits = np.zeros((ROWS, V), np.float32)
    logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf  # one token alone is a choice
    ids = chosen(logits, Sampling(temperature))
    assert ids[:3].tolist() == [REFUSED] * 3
    assert ids[3] == 0
    assert 0 <= ids[4] < V


def test_rows_and_keys_draw_apart():
    rows = np.random.default_rng(0).standard_normal((1, V)).astype(np.float32).repeat(3, axis=0)
    drawn = np.stack([chosen(rows, Sampling(1.5), key, index) for key in (0, jax.random.key(1)) for index in range(20)])
    assert (drawn[:, 0] != drawn[:, 1]).any()
    assert (drawn[:20] != drawn[20:]).any()


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_sampling_is_refused():
    wrongs: Any = ((-1.0,), (np.nan,), (1.0, 0.0), (1.0, 1.5), (1, 1, 0), ("1",))
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="expected"):
            Sampling(*wrong)
