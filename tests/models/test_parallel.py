"""Prefill over a mesh axis: chunks apart with selected tokens recomputed, beside one device.

Cases of four devices run in a program of their own (`parallel_cases.py`), whose results are asserted here.
"""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.backbone import LayerAttention
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.models.attention import Mask
from kvpatch_jax.models.parallel import prefill_chunks_apart, read_question, readouts, spread_backbone
from kvpatch_jax.models.parallel.prefill import lay_out
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.repair import Reading, attention_scores
from tests.models.parallel_cases import SMALL, sequence
from tests.models.test_sharding import findings

BAR = 1e-5
CASES = ("gqa", "mla", "mrope", "several", "budgets")


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What the program found, with four devices on the host."""
    return findings("parallel_cases", *CASES, devices=4)


def check_equal(result: dict[str, Any]) -> None:
    """Selection is the same, and all results are within the bar."""
    assert result["same_tokens"]
    assert {"logits"} < result["errors"].keys()
    worst = max(result["errors"], key=result["errors"].__getitem__)
    assert result["errors"][worst] <= BAR, f"{worst}: off by {result['errors'][worst]:.2e}"


# ---------------------------------------------------------------------------------------------- on four devices


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES[:-1])
def test_heads_latents_images_and_several_chunks_over_devices_answer_as_one_device(facts, case):
    check_equal(facts[case])


@pytest.mark.nightly
def test_only_chosen_tokens_change_and_all_of_them_are_a_prefill(facts):
    budgets = facts["budgets"]
    check_equal(budgets["nothing"])
    assert budgets["untouched"]
    assert budgets["everything"] <= BAR
    assert budgets["others_keep_their_bits"]
    assert budgets["chosen_change"]
    assert budgets["prepared"] <= BAR  # of KV that was available


# ----------------------------------------------------------------------------------------------- on one device


@pytest.mark.parametrize(
    ("tokens", "chunks", "message"),
    [
        (40, (9, 11, 12, 9), "a multiple of 4 of them, each at least 1, that add up to 40"),
        (40, (20, 20), "a multiple of 4"),
        (40, (0, 20, 12, 8), "each at least 1"),
        (3, None, "at least one for each of 4 devices"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(tokens, chunks, message):
    with pytest.raises(InputError, match=f"got .*; expected .*{message}"):
        lay_out(tokens, 4, chunks)


def test_bad_input_is_refused(unchecked):
    backbone, devices = random_backbone(SMALL), jax.devices()[:1]
    windowed = random_backbone(SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0})
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, 1, (20, 20))
    with pytest.raises(ConfigError, match="got a sliding window of 4 tokens; expected full attention"):
        spread_backbone(windowed)
    cache = prefill_chunks_apart(over, context)
    with pytest.raises(ShapeError, match="expected 39 tokens"):
        prefill_chunks_apart(over, context.take(0, 39), kv=cache.gather())
    with pytest.raises(InputError, match=r"ratio: got 1.2; expected 0 to 1"):
        read_question(over, cache, question, ratio=1.2)
    with pytest.raises(ShapeError, match="question: got 2 rows; expected the context's 1"):
        read_question(over, cache, sequence(backbone, 2, (20, 20))[1], ratio=0.1)


@pytest.mark.parametrize("reading", get_args(Reading))
def test_scores_are_the_reductions_of_paper_and_code(reading):
    rng = np.random.default_rng(3)
    B, T, N, K, H, S = 2, 3, 4, 2, 8, 10
    query, keys = rng.standard_normal((B, T, N, H)), rng.standard_normal((B, S, K, H))
    allowed = np.broadcast_to(np.arange(S) <= S - T + np.arange(T)[:, None], (B, 1, T, S))
    heads = jnp.asarray(keys, jnp.float32)
    seen = LayerAttention(jnp.asarray(query, jnp.float32), heads, jnp.asarray(allowed), 0.5)
    scores = attention_scores(seen, reading, S - T)

    # Query head n reads KV head n // 2.
    weights = np.einsum("BTNH,BSNH->BNTS", query, np.repeat(keys, N // K, axis=2)) * 0.5
    weights = np.where(allowed, np.exp(weights), 0)
    weights = (weights / weights.sum(-1, keepdims=True))[..., : S - T]
    expected = {
        "mass": weights.mean(1).sum(1),
        "norm": np.sqrt((weights.mean(1) ** 2).sum(1)),
        "head_norm": np.sqrt((weights**2).sum((1, 2))),
    }[reading]
    np.testing.assert_allclose(scores, expected, rtol=2e-6)


def test_queries_taken_in_blocks_read_the_same(monkeypatch):
    rng = np.random.default_rng(4)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((2, 37, 4, 8), (2, 29, 2, 8), (2, 29, 2, 5))
    )
    # Some queries see nothing.
    mask = Mask(causal=True, query_places=jnp.asarray(rng.integers(-1, 29, (2, 37)), jnp.int32))
    dense = readouts.readout(query, key, value, mask, 0.3)
    for scores in (29, 29 * 5):
        monkeypatch.setattr(readouts, "DENSE_SCORES", scores)
        for block, expected in zip(readouts.readout(query, key, value, mask, 0.3), dense, strict=True):
            np.testing.assert_allclose(block, expected, atol=2e-6)
    assert np.isneginf(np.asarray(dense[1])).any()
