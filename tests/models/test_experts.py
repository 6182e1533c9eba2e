"""Routed experts equal a sum over tokens and their chosen experts.

What they cost is in `test_device_programs.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError, KernelUnavailableError
from kvpatch_jax.models import Buckets
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.grouped import (
    IMPLEMENTATIONS,
    ExpertWeights,
    choose_implementation,
    mix_experts,
    spread,
)
from kvpatch_jax.models.decoder.moe import choose_experts
from pallas_kernels import targeting
from tests.shared.arrays import placed
from tests.shared.examples import examples
from tests.shared.tolerances import FUNCTION, assert_within, rounding_bound

EXPERTS, WIDTH, INNER, TOKENS, CHOSEN = 6, 5, 4, 12, 2


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn_weights(layers: int, experts: int, width: int, inner: int) -> ExpertWeights:
    """NumPy's."""
    shapes = ((width, inner), (width, inner), (inner, width))
    parts: Any = (numbers(layers, experts, *shape, seed=seed) for seed, shape in enumerate(shapes))
    return ExpertWeights(*parts)


LAYERS: Any = drawn_weights(3, EXPERTS, WIDTH, INNER)


def expected_choice(config: ExpertConfig, logits: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """One token's weights, by sorting, as the papers say it."""
    scores = np.exp(logits) / np.exp(logits).sum() if config.router == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + correction
    groups = np.split(np.arange(config.experts), config.groups)
    best = lambda group: choice[group].max() if config.router == "softmax" else np.sort(choice[group])[-2:].sum()
    open_groups = sorted(groups, key=best)[-config.chosen_groups :]
    chosen = sorted(np.concatenate(open_groups), key=lambda expert: choice[expert])[-config.chosen :]
    weights = np.zeros(config.experts)
    weights[chosen] = scores[chosen]
    return weights / (weights.sum() if config.renormalise else 1) * config.scaling


@pytest.mark.parametrize(
    ("router", "renormalise", "groups", "chosen_groups"),
    [("softmax", True, 1, 1), ("softmax", False, 4, 2), ("sigmoid", False, 1, 1), ("sigmoid", True, 4, 2)],
)
def test_routers_choose_experts_by_their_definition(router, renormalise, groups, chosen_groups):
    """A correction decides who is chosen, and is no part of the weights."""
    config = ExpertConfig(12, 3, 8, router, renormalise, 2.5, groups, chosen_groups)
    rng = np.random.default_rng(0)
    logits, correction = rng.normal(size=(5, 7, 12)), rng.normal(size=12) * (router == "sigmoid")
    choose = jax.jit(lambda logits, correction: spread(*choose_experts(config, logits, correction), config.experts))
    weights = np.asarray(choose(logits.astype(np.float32), correction.astype(np.float32)))
    expected = np.stack([expected_choice(config, token, correction) for token in logits.reshape(-1, 12)])
    np.testing.assert_allclose(weights.reshape(-1, 12), expected, atol=2e-6)
    assert ((weights > 0).sum(-1) == 3).all()


def looped(x: np.ndarray, index: np.ndarray, weights: np.ndarray, stack: ExpertWeights) -> np.ndarray:
    """One token and one of its experts after the other, in float64."""
    gate, up, down = (np.asarray(part, np.float64) for part in stack)
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(index[token], weights[token], strict=True):
            if 0 <= expert < len(gate):
                inner = row @ gate[expert]
                out[token] += weight * ((inner / (1 + np.exp(-inner)) * (row @ up[expert])) @ down[expert])
    return out


def looped_bound(x: np.ndarray, index: np.ndarray, weights: np.ndarray, stack: ExpertWeights) -> np.ndarray:
    """How far float32 may be from `looped`.

    The terms' magnitudes are those of the sums with every factor's absolute value; SiLU is no larger than its argument.
    SiLU's slope is at most 1.1, so a rounding in front of it counts for 2 at most; it is a function, a sum, a quotient
    and a product itself. A term goes through both products with the token, that of the two, the one into the output and
    the weight's.
    """
    gate, up, down = (np.abs(np.asarray(part, np.float64)) for part in stack)
    sizes = np.zeros(x.shape)
    for token, row in enumerate(np.abs(np.asarray(x, np.float64))):
        for expert, weight in zip(index[token], weights[token], strict=True):
            if 0 <= expert < len(gate):
                sizes[token] += abs(weight) * (((row @ gate[expert]) * (row @ up[expert])) @ down[expert])
    return rounding_bound(sizes, 2 * len(gate[0]) + FUNCTION + 3 + len(up[0]) + 1 + len(down[0]) + 1 + index.shape[1])


def routings(tokens: int = TOKENS, experts: int = EXPERTS) -> st.SearchStrategy[np.ndarray]:
    """Which experts tokens choose, none twice by one token: by chance, or all alike; also numbers of no expert."""
    token = st.permutations(range(-1, experts + 1)).map(lambda order: order[:CHOSEN])
    alike = token.map(lambda row: [row] * tokens)
    return st.one_of(alike, st.lists(token, min_size=tokens, max_size=tokens)).map(
        lambda rows: np.array(rows, np.int32)
    )


@pytest.fixture(scope="module")
def programs():
    """Each implementation, compiled once, over one layer of a stack; blocks of 4 rows, looked at and not."""
    stack, jitted = ExpertWeights(*map(placed, LAYERS)), {}
    for name, skip in [*((name, False) for name in IMPLEMENTATIONS if name != "hopper"), ("blockwise", True)]:

        def mix(x, index, weights, layer, name=name, skip=skip):
            return mix_experts(x, index, weights, stack, jax.nn.silu, layer=layer, implementation=name, skip=skip)

        jitted[name, skip] = jax.jit(mix)
    return jitted


@examples(8)
@given(index=routings(), layer=st.integers(0, 2), seed=st.integers(0, 9))
def test_every_implementation_equals_a_loop_over_tokens(programs, index, layer, seed):
    x, weights = numbers(TOKENS, WIDTH, seed=seed), np.abs(numbers(TOKENS, CHOSEN, seed=seed + 1))
    parts: Any = (part[layer] for part in LAYERS)
    stack = ExpertWeights(*parts)
    expected, bound = looped(x, index, weights, stack), looped_bound(x, index, weights, stack)
    for name, program in programs.items():
        with jax.default_matmul_precision("highest"):
            out = program(x, index, weights, layer)
        assert out.dtype == jnp.float32
        assert_within(out, expected, bound, name)


@pytest.mark.nightly
@examples(3)
@given(index=routings(70, 4), seed=st.integers(0, 9))
def test_the_hopper_kernel_equals_a_loop_over_tokens(index, seed):
    """Interpreted, over the second of two layers, in 16 bits; one expert's tokens may need two blocks."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    halves: Any = (placed(part / 8, jnp.bfloat16) for part in drawn_weights(2, 4, 64, 64))
    stack = ExpertWeights(*halves)
    x, weights = placed(numbers(70, 64, seed=9), jnp.bfloat16), np.abs(numbers(70, CHOSEN, seed=seed))
    with targeting("gpu", plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
        chosen = jnp.asarray(index), jnp.asarray(weights)
        out = mix_experts(x, *chosen, stack, jax.nn.silu, layer=1, implementation="hopper")
    layer: Any = [np.asarray(part[1], np.float32) for part in stack]
    expected = looped(np.asarray(x, np.float32), index, weights, layer)
    assert out.dtype == jnp.float32
    assert np.abs(out - expected).max() <= 2**-7 * max(np.abs(expected).max(), 1)


def test_the_implementation_follows_from_platform_and_sizes():
    assert choose_implementation(4096 * 8, 128, 8) == "blockwise"
    assert choose_implementation(20, 4, 2) == "dense"
    with targeting("tpu"):
        assert choose_implementation(4096 * 8, 128, 8) == "ragged"
        assert choose_implementation(8, 128, 8) == "blockwise"
    unit = jnp.ones((1, 1))
    with pytest.raises(KernelUnavailableError, match="'megablox'; expected one of"):
        mix_experts(unit, unit.astype(int), unit, LAYERS, jax.nn.silu, implementation="megablox")


def test_router_load_counts_the_tokens_and_no_padding(tiny):
    """The tiny DeepSeek-V3 has a dense layer below; 11 tokens are padded to 16."""
    backbone = tiny("deepseek_v3")
    tokens, config = backbone.embed(np.arange(3, 14)[None]), backbone.config.text
    load, experts = np.asarray(backbone.with_buckets(Buckets()).router_load(tokens)), config.experts
    assert load.dtype == np.int32
    assert load.shape == (config.layers - config.dense_layers, experts.experts)
    assert (load.sum(1) == 11 * experts.chosen).all()

    # The lowest layer's experts alone, over any input.
    mixture = nnx.merge(backbone.programs.graph, backbone.programs.state).decoder.layers.mlp
    graph, state = nnx.split(mixture)
    lowest = jax.tree.map(lambda leaf: np.asarray(leaf)[0], state)
    x, counted = numbers(1, 9, config.width), np.arange(9)[None] % 3 > 0

    @jax.jit
    def run(state, x, counted):
        layer = nnx.merge(graph, state)
        return layer.choose(x)[0], layer.load(x, counted)

    index, counts = run(lowest, x, counted)
    assert np.array_equal(counts, np.bincount(np.asarray(index)[counted].ravel(), minlength=experts.experts))

    with pytest.raises(InputError, match="LlamaForCausalLM, which has no experts"):
        tiny("llama2").router_load(tokens)
