"""Tokens grouped by expert: every implementation against a loop over tokens, what it costs, and who was chosen."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, KernelUnavailableError
from kvpatch_jax.models import Buckets, ModelBackbone, load
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.grouped import (
    IMPLEMENTATIONS,
    ExpertWeights,
    choose_implementation,
    mix_experts,
)
from kvpatch_jax.models.decoder.moe import Experts
from kvpatch_jax.utils.traced_flops import traced_flops
from pallas_kernels import targeting
from pallas_kernels.block_product import gpu as block_product_gpu
from tests.goldens.load import write_checkpoint
from tests.shared.arrays import placed
from tests.shared.examples import examples
from tests.shared.tolerances import FUNCTION, assert_within, rounding_bound

EXPERTS, WIDTH, INNER, TOKENS, CHOSEN = 6, 5, 4, 12, 2


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layers() -> ExpertWeights:
    """Three layers of experts."""
    shapes = ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
    return ExpertWeights(*(placed(numbers(3, EXPERTS, *shape, seed=seed)) for seed, shape in enumerate(shapes)))


LAYERS = layers()


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


def routings(tokens: int = TOKENS, experts: int = EXPERTS, beyond: int = 0) -> st.SearchStrategy[np.ndarray]:
    """Which experts tokens choose, none twice by one token: by chance, or all alike. `beyond`: also numbers of none."""
    token = st.permutations(range(-beyond, experts + beyond)).map(lambda order: order[:CHOSEN])
    alike = token.map(lambda one: [one] * tokens)
    return st.one_of(alike, st.lists(token, min_size=tokens, max_size=tokens)).map(
        lambda rows: np.array(rows, np.int32)
    )


@pytest.fixture(scope="module")
def programs():
    """Each implementation, compiled once, over one layer of a stack; blocks of 4 rows, looked at and not."""
    made = {}
    kinds = [(name, False) for name in IMPLEMENTATIONS if name != "hopper"] + [("blockwise", True)]
    for name, skip in kinds:
        options = {"implementation": name, "skip": skip}
        mix = lambda x, index, weights, layer, options=options: mix_experts(
            x, index, weights, LAYERS, jax.nn.silu, layer=layer, **options
        )
        made[name, skip] = jax.jit(mix)
    return made


@pytest.mark.nightly
@given(index=routings(beyond=1), layer=st.integers(0, 2), seed=st.integers(0, 9))
def test_every_implementation_equals_a_loop_over_tokens(programs, index, layer, seed):
    x, weights = numbers(TOKENS, WIDTH, seed=seed), np.abs(numbers(TOKENS, CHOSEN, seed=seed + 1))
    stack = ExpertWeights(*(part[layer] for part in LAYERS))
    expected, bound = looped(x, index, weights, stack), looped_bound(x, index, weights, stack)
    for name, program in programs.items():
        with jax.default_matmul_precision("highest"):
            found = program(x, index, weights, layer)
        assert found.dtype == jnp.float32
        assert_within(found, expected, bound, name)


HOPPER = {"experts": 4, "width": 64, "inner": 64, "tokens": 70}
"""What the kernel takes: 16 bits and multiples of 64. One expert's tokens may need two blocks."""


@pytest.fixture(scope="module")
def by_kernel():
    """The Hopper kernel, interpreted, over the second of two layers: program, tokens and that layer in float32."""
    experts, width, inner, tokens = HOPPER.values()
    shapes = ((width, inner), (width, inner), (inner, width))
    drawn = (numbers(2, experts, *shape, seed=seed) for seed, shape in enumerate(shapes))
    stack = ExpertWeights(*(placed(part / 8, jnp.bfloat16) for part in drawn))
    x = placed(numbers(tokens, width, seed=9), jnp.bfloat16)
    mix = lambda index, weights: mix_experts(x, index, weights, stack, jax.nn.silu, layer=1, implementation="hopper")
    return jax.jit(mix), np.asarray(x, np.float32), jax.tree.map(lambda part: np.asarray(part[1], np.float32), stack)


@pytest.mark.nightly
@examples(3)
@given(index=routings(HOPPER["tokens"], HOPPER["experts"], beyond=1), seed=st.integers(0, 9))
def test_the_hopper_kernel_equals_a_loop_over_tokens(by_kernel, index, seed):
    """Numbers of no expert are left out, as each device of a mesh leaves out the others'."""
    program, x, one = by_kernel
    weights = np.abs(numbers(HOPPER["tokens"], CHOSEN, seed=seed))
    with targeting("gpu", plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
        found = program(index, weights)
    expected = looped(x, index, weights, one)
    assert found.dtype == jnp.float32
    assert np.abs(found - expected).max() <= 2**-7 * max(np.abs(expected).max(), 1)


@pytest.mark.nightly
def test_derivatives_are_those_of_the_dense_form():
    x, index = numbers(TOKENS, WIDTH), np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 2) % 3 + 3], 1)
    index[index[:, 0] == index[:, 1], 1] = 0
    index = placed(index, jnp.int32)
    one = ExpertWeights(*(placed(part[0]) for part in LAYERS))

    def loss(x, weights, stack, name):
        return jnp.sum(jnp.sin(mix_experts(x, index, weights, stack, jax.nn.silu, implementation=name)))

    slopes = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    with jax.default_matmul_precision("highest"):
        found, expected = (
            slopes(x, np.abs(numbers(TOKENS, CHOSEN, seed=1)), one, name) for name in ("blockwise", "dense")
        )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=5e-6), found, expected)


def test_the_implementation_follows_from_platform_and_sizes():
    assert choose_implementation(4096 * 8, 128, 8) == "blockwise"
    assert choose_implementation(20, 4, 2) == "dense"
    with targeting("tpu"):
        assert choose_implementation(4096 * 8, 128, 8) == "ragged"
        assert choose_implementation(8, 128, 8) == "blockwise"


def test_over_a_mesh_each_device_runs_the_hopper_kernel():
    """Traced, not run: three products, of which each device has its own experts."""
    config = ExpertConfig(experts=8, chosen=2, intermediate=64, router="softmax", renormalise=True)
    experts = nnx.eval_shape(lambda: Experts(config, 64, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(experts)
    run = lambda state, x: nnx.merge(graph, state)(x)
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), targeting("gpu"):
        made = str(jax.make_jaxpr(run)(state, jax.ShapeDtypeStruct((1, 200, 64), jnp.bfloat16)))
    assert made.count("name=block_product") == 3
    assert "shard_map" in made


def test_unknown_implementation_is_refused():
    one = jnp.ones((1, 1))
    with pytest.raises(KernelUnavailableError, match="'megablox'; expected one of"):
        mix_experts(one, one.astype(int), one, LAYERS, jax.nn.silu, implementation="megablox")


@pytest.mark.nightly
def test_router_load_is_what_each_layer_chose(tmp_path):
    """The tiny DeepSeek-V3 has a dense layer below; 11 tokens are padded to 16, and not counted."""
    backbone = load(write_checkpoint("deepseek_v3", tmp_path / "mixture"), buckets=Buckets())
    tokens, config = backbone.embed(np.arange(3, 14)[None]), backbone.config.text
    found, experts = np.asarray(backbone.router_load(tokens)), config.experts
    assert found.dtype == np.int32
    assert found.shape == (config.layers - config.dense_layers, experts.experts)
    assert (found.sum(1) == 11 * experts.chosen).all()

    seen, choose = [], Experts.choose

    def spy(self, x):
        index, weights = choose(self, x)
        jax.debug.callback(lambda index: seen.append(np.asarray(index)), index, ordered=True)
        return index, weights

    decoder = nnx.merge(backbone.programs.graph, backbone.programs.state).decoder
    mask = jnp.tril(jnp.ones((11, 11), bool))[None, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "choose", spy)
        run = jax.jit(lambda hidden: decoder.run(hidden, jnp.arange(11)[None], mask).hidden)
        jax.block_until_ready(run(tokens.embeddings))
        jax.effects_barrier()
    recounted = [np.bincount(index.reshape(-1), minlength=experts.experts) for index in seen]
    assert np.array_equal(recounted, found)


def test_router_load_of_a_model_without_experts_is_refused():
    family, text = SimpleNamespace(architecture="LlamaForCausalLM"), SimpleNamespace(experts=None)
    dense: Any = SimpleNamespace(config=SimpleNamespace(text=text), family=family)
    with pytest.raises(InputError, match="LlamaForCausalLM, which has no experts"):
        ModelBackbone.router_load(dense, Tokens(jnp.zeros((1, 2, 4)), np.zeros((1, 2), np.int32)))


# --------------------------------------------------------------------------------------- the shape of Qwen3-30B-A3B

MODEL = {"layers": 48, "experts": 128, "chosen": 8, "width": 2048, "inner": 768}


def shapes_of_30b(tokens: int, layers: int = MODEL["layers"]) -> tuple[Any, ...]:
    """x, index, weights, stack and the layer, as shapes."""
    spec = jax.ShapeDtypeStruct
    experts, chosen, width, inner = (MODEL[name] for name in ("experts", "chosen", "width", "inner"))
    into, out = (layers, experts, width, inner), (layers, experts, inner, width)
    parts: Any = [spec(shape, jnp.bfloat16) for shape in (into, into, out)]
    stack = ExpertWeights(*parts)
    pairs = spec((tokens, chosen), jnp.int32), spec((tokens, chosen), jnp.float32)
    return spec((tokens, width), jnp.bfloat16), *pairs, stack, spec((), jnp.int32)


def mix_30b(x: Any, index: Any, weights: Any, stack: ExpertWeights, layer: Any) -> Any:
    return mix_experts(x, index, weights, stack, jax.nn.silu, layer=layer)


@pytest.mark.parametrize("tokens", [1, 16, 1024, 4096, 16384, 65536])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_arithmetic_is_that_of_the_active_experts(tokens, platform):
    """From the jaxpr, trips of loops included. The share of the dense form would be 16."""
    active = 2 * 3 * tokens * MODEL["chosen"] * MODEL["width"] * MODEL["inner"]
    if platform == "gpu" and not block_product_gpu.COUNTED:
        pytest.skip("kernels say what they cost since jax 0.12")
    with targeting(platform):
        counted = traced_flops(mix_30b, *shapes_of_30b(tokens))
    assert active <= counted <= (1.3 if tokens >= 4096 or tokens == 1 else 2) * active


@pytest.mark.parametrize(("tokens", "most"), [(1, 20), (4096, 60)])
def test_temporaries_hold_no_layers_experts(tokens, most):
    """MiB by the compiler; the experts of one layer are 1152 MiB, one expert 9."""
    compiled = jax.jit(mix_30b).lower(*shapes_of_30b(tokens)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= most * 2**20
    if tokens == 1:  # a loop of 8 trips, whose body the compiler counts once: one expert, copied and read
        cost: Any = compiled.cost_analysis()
        assert cost["bytes accessed"] <= 6 * 3 * 2 * MODEL["width"] * MODEL["inner"]
