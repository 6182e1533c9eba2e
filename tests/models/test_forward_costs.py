"""The FLOPs that a backbone states are those of its programs, and of the tokens that each token sees."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.bench.shapes import SHAPES
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.models.attention import using
from kvpatch_jax.models.decoder.costs import forward_costs
from kvpatch_jax.models.decoding import Forward
from kvpatch_jax.models.families.family import abstract, placeholders
from kvpatch_jax.models.random_weights import config_of
from kvpatch_jax.utils.traced_flops import traced_flops
from pallas_kernels import targeting
from tests.models.released_configs import RELEASED

KIMI, LINEAR = "moonshotai/Kimi-VL-A3B-Instruct", ("Qwen3.5-0.8B", "Qwen3.5-35B-A3B")
MORE = ("Qwen/Qwen3-VL-30B-A3B-Instruct", "mistralai/Mistral-7B-v0.1")
ROWS = 8
"""Tokens whose logits are made: one row of bfloat16 would be padded to four."""


def fewer_layers(name: str, layers: int) -> Any:
    """Configuration of a released model with as many language layers."""
    config = config_of(SHAPES[name] if name in SHAPES else RELEASED[name].config)
    fewer = {"kind_of": config.text.kind_of[:layers]} if config.text.kinds else {}
    return dataclasses.replace(config, text=dataclasses.replace(config.text, layers=layers, **fewer))


def stated_and_traced(name: str, tokens: int, behind: int, layers: int) -> tuple[Any, int, int]:
    """FLOPs of a prefill of eight tokens' logits behind a context, with every pair of query and key computed."""
    config = fewer_layers(name, layers)
    forward = Forward(abstract(config), placeholders(config), config.text.layout, None)
    spec: Any = jax.ShapeDtypeStruct
    text, layout = config.text, config.text.layout
    axes = () if text.rope.axes is None else (text.rope.axes,)
    prompt = Tokens(spec((1, tokens, text.width), jnp.bfloat16), spec((1, tokens, *axes), jnp.int32))
    context = {}
    for channel in layout.channels:
        rows = behind if channel.rows is None else channel.rows
        context[channel.name] = spec((layout.depth(channel.name), 1, rows, channel.heads, channel.width), jnp.bfloat16)

    def run(state: Any, prompt: Tokens, context: Any, rows: Any) -> Any:
        with using("dense"):
            return forward.prefill.__wrapped__(
                state, prompt, context, None, rows, start_layer=0, hidden_at=(), chunk=None
            )

    costs = forward_costs(text)
    # The dense form computes masked pairs too. Experts are multiplied without padding on a TPU.
    stated = sum(costs.token) * tokens + sum(costs.pair) * tokens * (tokens + behind) + ROWS * costs.logit
    with targeting("tpu") if text.experts is not None else contextlib.nullcontext():
        traced = traced_flops(run, forward.state, prompt, context, spec((1, ROWS), jnp.int32))
    return text, stated, traced


@pytest.mark.parametrize(
    ("name", "tokens", "behind", "layers"),
    [
        ("Qwen/Qwen2-0.5B", 1024, 128, 3),
        ("Qwen/Qwen3-VL-8B-Instruct", 1024, 128, 3),
        (KIMI, 300, 50, 2),  # one layer of latent attention and an MLP, and one of experts
        *(pytest.param(name, 1024, 128, 3, marks=pytest.mark.nightly) for name in (KIMI, *MORE)),
    ],
)
def test_flops_are_those_of_the_products(name, tokens, behind, layers):
    _, stated, traced = stated_and_traced(name, tokens, behind, layers)
    assert traced == stated


@pytest.mark.parametrize("name", [LINEAR[0], pytest.param(LINEAR[1], marks=pytest.mark.nightly)])
def test_flops_of_linear_attention_are_those_of_the_products_but_for_blocks(name):
    """The rule counts as it is written; in blocks it multiplies more, as often as its WY form has products."""
    tokens, block = 256, 64
    text, stated, traced = stated_and_traced(name, tokens, 128, layers=4)
    linear = text.kinds[1].linear
    assert [bool(pair) for pair in forward_costs(text).pair] == [False, False, False, True]
    keys, values = linear.key_width, linear.value_width
    # Two rows of scores; the inverse, pair by pair of blocks; what it solves for; what is read of the block.
    inverse = sum(2 * (1 << level) ** 3 * (block // (2 << level)) for level in range(block.bit_length() - 1))
    blocks = 2 * block**2 * keys + inverse + block**2 * (keys + values) + block**2 * values
    # The state of these tokens alone is written beside that behind all, and both are read to be written.
    extra = linear.value_heads * (blocks // block + 2 * keys * values)
    assert traced == stated + 3 * 2 * extra * tokens


def test_layers_that_slide_see_their_window():
    costs = forward_costs(fewer_layers("mistralai/Mistral-7B-v0.1", 2).text)
    assert costs.window == (4096, 4096)
    assert costs.flops(1, 10_000) - sum(costs.token) == sum(costs.pair) * 4096


@given(tokens=st.integers(0, 30), behind=st.integers(0, 30), window=st.integers(0, 40))
def test_pairs_are_counted_one_by_one(tokens, behind, window):
    seen = sum(min(behind + token + 1, window or 10**9) for token in range(tokens))
    assert ForwardCosts((0,), (1,), (window,), 0).flops(tokens, behind) == seen


def test_a_forward_that_starts_at_a_layer_counts_those_above():
    costs = ForwardCosts(token=(1, 10, 100), pair=(2, 20, 200), window=(0, 4, 0), logit=7)
    assert costs.flops(3, 5, start_layer=2) == 300 + 200 * 21
    assert costs.flops(3, 5) == 333 + 202 * 21 + 20 * 12
