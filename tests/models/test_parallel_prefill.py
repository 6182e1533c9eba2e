"""Chunks prefilled apart over devices, with chosen tokens recomputed, answer as one device does.

What needs four devices is in `parallel_cases.py`, run in a process of its own.
"""

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.models.attention import Mask
from kvpatch_jax.models.parallel import prefill_chunks_apart, read_question, readouts, spread_backbone
from kvpatch_jax.models.parallel.prefill import lay_out
from kvpatch_jax.models.random_weights import random_backbone
from tests.models.parallel_cases import SMALL, check, sequence
from tests.shared.arrays import placed


@pytest.mark.usefixtures("highest_precision")
def test_chunks_of_one_device_answer_as_its_joined_caches():
    check(random_backbone(SMALL), 2, (10, 10, 10, 10), jax.devices()[:1])


@pytest.mark.nightly
def test_chunks_of_four_devices_answer_as_on_one(run_over_devices):
    run_over_devices("parallel_cases.py", 4, "nightly")


def test_bad_input_is_refused(unchecked):
    for tokens, chunks, message in (
        (40, (9, 11, 12, 9), "a multiple of 4 of them, each at least 1, that add up to 40"),
        (40, (0, 20, 12, 8), "each at least 1"),
        (3, None, "at least one for each of 4 devices"),
    ):
        with pytest.raises(InputError, match=f"got .*; expected .*{message}"):
            lay_out(tokens, 4, chunks)
    backbone, devices = random_backbone(SMALL), jax.devices()[:1]
    windowed = random_backbone(SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0})
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, 2, (10, 10, 10, 10))
    with pytest.raises(ConfigError, match="got a sliding window of 4 tokens; expected full attention"):
        spread_backbone(windowed)
    cache = prefill_chunks_apart(over, context, (10, 10, 10, 10))
    with pytest.raises(ShapeError, match="expected 39 tokens"):
        prefill_chunks_apart(over, context.take(0, 39), kv=cache.gather())
    with pytest.raises(InputError, match=r"ratio: got 1.2; expected 0 to 1"):
        read_question(over, cache, question, ratio=1.2)
    with pytest.raises(ShapeError, match="question: got 1 rows; expected the context's 2"):
        read_question(over, cache, sequence(backbone, 1, (20, 20))[1], ratio=0.1)


def test_queries_taken_in_blocks_read_the_same(monkeypatch):
    """What a part of the keys adds to a mean, and the logarithm of its weights, against float64."""
    rng, scale = np.random.default_rng(4), 0.3
    shapes = (2, 37, 4, 8), (2, 29, 2, 8), (2, 29, 2, 5)
    query, key, value = (placed(rng.standard_normal(shape, np.float32)) for shape in shapes)
    places = rng.integers(-1, 29, (2, 37)).astype(np.int32)  # some queries see nothing
    scores = np.einsum("BTNH,BSNH->BTNS", query, np.repeat(key, 2, axis=2)).astype(np.float64) * scale
    scores = np.where((np.arange(29) <= places[..., None])[:, :, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        logarithms = np.log(np.exp(scores).sum(-1))
    empty = np.isneginf(logarithms)
    weights = np.exp(scores - np.where(empty, 0, logarithms)[..., None])
    mixed = np.einsum("BTNS,BSNW->BTNW", weights, np.repeat(value, 2, axis=2))
    for most in (29 * 5, 2**20):
        monkeypatch.setattr(readouts, "DENSE_SCORES", most)
        run = jax.jit(readouts.readout, static_argnums=4)
        output, weight = run(query, key, value, Mask(causal=True, query_places=places), scale)
        np.testing.assert_allclose(np.asarray(output)[~empty], mixed[~empty], atol=2e-6)
        np.testing.assert_allclose(np.asarray(weight).reshape(empty.shape), logarithms, atol=2e-6)
    assert empty.any()
