"""Prefill over a mesh axis: chunks apart with selected tokens recomputed, beside one device.

Cases of four devices run in a program of their own (`parallel_cases.py`), whose results are asserted here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.backbone import LayerAttention
from kvpatch_jax.repair import Reading, attention_scores
from models.attention import Mask
from models.parallel import readouts
from models.parallel.prefill import lay_out

ROOT = Path(__file__).parents[2]
BAR = 1e-5
DEFAULT = ("gqa", "refusals")
SLOW = ("mla", "mrope", "several", "budgets")


def findings(names: tuple[str, ...]) -> dict[str, Any]:
    """What the program found, with four devices on the host."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    program = [sys.executable, "-m", "tests.models.parallel_cases", *names]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def facts():
    """What the default cases found."""
    return findings(DEFAULT)


@pytest.fixture(scope="module")
def slow_facts():
    """What the slow cases found."""
    return findings(SLOW)


def check_equal(found: dict[str, Any]) -> None:
    """Selection is the same, and all results are within the bar."""
    assert found.get("same_tokens", True)
    assert {"logits"} < found["errors"].keys()
    worst = max(found["errors"], key=found["errors"].__getitem__)
    assert found["errors"][worst] <= BAR, f"{worst}: off by {found['errors'][worst]:.2e}"


# ---------------------------------------------------------------------------------------------- on four devices


@pytest.mark.slow
def test_grouped_heads_over_devices_answer_as_one_device(facts):
    check_equal(facts["gqa"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("axis", "ConfigError: mesh: got axes ('chunks',); expected one called 'tensor'"),
        ("window", "ConfigError: backbone: got a sliding window of 4 tokens; expected full attention"),
        ("sum", "InputError: chunks: got lengths (9, 11, 12, 9); expected a multiple of 4 of them"),
        ("number", "InputError: chunks: got lengths (20, 20); expected a multiple of 4"),
        ("empty", "InputError: chunks: got lengths (0, 20, 12, 8); expected"),
        ("few", "InputError: tokens: got 3; expected at least one for each of 4 devices"),
        ("ratio", "InputError: ratio: got 1.2; expected 0 to 1"),
        ("rows", "ShapeError: question: got 2 rows; expected the context's 1"),
    ],
)
def test_bad_input_is_refused(facts, call, message):
    assert facts["refusals"][call].startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mla", "mrope", "several"])
def test_latents_images_and_several_chunks_over_devices_answer_as_one_device(slow_facts, case):
    check_equal(slow_facts[case])


@pytest.mark.slow
def test_budgets_at_their_ends_leave_the_cache_or_prefill_it_again(slow_facts):
    found = slow_facts["budgets"]
    check_equal(found["nothing"])
    assert found["untouched"]
    assert found["everything"] <= BAR


@pytest.mark.slow
def test_only_chosen_tokens_change_and_a_prepared_cache_gives_the_same(slow_facts):
    found = slow_facts["budgets"]
    assert found["others_keep_their_bits"]
    assert found["chosen_change"]
    assert found["first_chunk_keeps_its_bits"]
    assert found["prepared"] <= BAR


# ----------------------------------------------------------------------------------------------- on one device


@pytest.mark.parametrize("reading", get_args(Reading))
def test_scores_are_the_reductions_of_paper_and_code(reading):
    rng = np.random.default_rng(3)
    B, T, N, K, H, S = 2, 3, 4, 2, 8, 10
    query, keys = rng.standard_normal((B, T, N, H)), rng.standard_normal((B, S, K, H))
    allowed = np.broadcast_to(np.arange(S) <= S - T + np.arange(T)[:, None], (B, 1, T, S))
    heads = jnp.asarray(keys, jnp.float32)
    seen = LayerAttention(jnp.asarray(query, jnp.float32), heads, jnp.asarray(allowed), 0.5)
    found = attention_scores(seen, reading, S - T)

    # Query head n reads KV head n // 2.
    weights = np.einsum("BTNH,BSNH->BNTS", query, np.repeat(keys, N // K, axis=2)) * 0.5
    weights = np.where(allowed, np.exp(weights), 0)
    weights = (weights / weights.sum(-1, keepdims=True))[..., : S - T]
    expected = {
        "mass": weights.mean(1).sum(1),
        "norm": np.sqrt((weights.mean(1) ** 2).sum(1)),
        "head_norm": np.sqrt((weights**2).sum((1, 2))),
        "entropy": -(weights.mean(1) * np.log(weights.mean(1) + 1e-10)).sum(1),
        "head_entropy": -(weights * np.log(weights + 1e-10)).sum((1, 2)),
    }[reading]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_layout_gives_every_token_one_place():
    for chunks in ((3, 5, 2, 4), (1, 2, 3, 1, 2, 2, 2, 1)):
        layout = lay_out(14, 4, chunks)
        assert layout.index[layout.live].tolist() == list(range(14))
        assert layout.numbers[layout.live].tolist() == np.repeat(np.arange(len(chunks)), chunks).tolist()
        places = np.arange(len(layout.index)) % layout.size
        assert np.array_equal(places < np.repeat(layout.lengths, layout.size), layout.numbers >= 0)


def test_queries_taken_in_blocks_read_the_same(monkeypatch):
    rng = np.random.default_rng(4)
    query, key, value = (
        jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((2, 37, 4, 8), (2, 29, 2, 8), (2, 29, 2, 5))
    )
    # Some queries see nothing.
    mask = Mask(causal=True, query_places=jnp.asarray(rng.integers(-1, 29, (2, 37)), jnp.int32))
    whole = readouts.readout(query, key, value, mask, 0.3)
    monkeypatch.setattr(readouts, "DENSE_SCORES", 29)
    blocks = readouts.readout(query, key, value, mask, 0.3)
    for found, expected in zip(blocks, whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.isneginf(np.asarray(whole[1])).any()
