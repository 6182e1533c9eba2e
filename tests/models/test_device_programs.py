"""Programs of real sizes fit a device's memory, copy no pool and compute the FLOPs that a backbone states.

Devices are compiled for ahead of time: needs the extra `kernels`, no accelerator. The language tower of Qwen2.5-VL-7B
has four layers: temporaries do not depend on their number, and one v5e holds no 7B model.
"""

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.bench.shapes import SHAPES
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.core import Paged
from kvpatch_jax.models.attention import using
from kvpatch_jax.models.decoder.costs import forward_costs
from kvpatch_jax.models.decoder.grouped import ExpertWeights, mix_experts
from kvpatch_jax.models.decoding import Forward
from kvpatch_jax.models.families.family import abstract, placeholders
from kvpatch_jax.models.random_weights import config_of
from kvpatch_jax.utils.traced_flops import traced_flops
from pallas_kernels import targeting
from pallas_kernels.block_product import gpu as block_product_gpu
from tests.models.released_configs import RELEASED
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

# ---------------------------------------------------------------------------------------------------------------- FLOPs


SPEC: Any = jax.ShapeDtypeStruct
QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"
KIMI, LINEAR = "moonshotai/Kimi-VL-A3B-Instruct", ("Qwen3.5-0.8B", "Qwen3.5-35B-A3B")
MORE = ("Qwen/Qwen3-VL-30B-A3B-Instruct", "mistralai/Mistral-7B-v0.1")
ROWS = 8
"""Tokens whose logits are made: one row of bfloat16 would be padded to four."""


def fewer_layers(name: str, layers: int) -> Any:
    """Configuration of a released model with as many language layers."""
    config = config_of(SHAPES[name] if name in SHAPES else RELEASED[name].config)
    fewer = {"kind_of": config.text.kind_of[:layers]} if config.text.kinds else {}
    return dataclasses.replace(config, text=dataclasses.replace(config.text, layers=layers, **fewer))


def model(name: str, layers: int) -> tuple[Any, Forward]:
    """Configuration and programs of a released model, with as many language layers."""
    config = fewer_layers(name, layers)
    return config, Forward(abstract(config), placeholders(config), config.text.layout, None)


def stated_and_traced(name: str, tokens: int, behind: int, layers: int) -> tuple[Any, int, int]:
    """FLOPs of a prefill of eight tokens' logits behind a context, with every pair of query and key computed."""
    config, forward = model(name, layers)
    text, layout = config.text, config.text.layout
    axes = () if text.rope.axes is None else (text.rope.axes,)
    prompt = Tokens(SPEC((1, tokens, text.width), jnp.bfloat16), SPEC((1, tokens, *axes), jnp.int32))
    context = {}
    for channel in layout.channels:
        rows = behind if channel.rows is None else channel.rows
        context[channel.name] = SPEC((layout.depth(channel.name), 1, rows, channel.heads, channel.width), jnp.bfloat16)

    def run(state: Any, prompt: Tokens, context: Any, rows: Any) -> Any:
        with using("dense"):
            return forward.prefill.__wrapped__(
                state, prompt, context, None, rows, start_layer=0, hidden_at=(), chunk=None
            )

    costs = forward_costs(text)
    # The dense form computes masked pairs too. Experts are multiplied without padding on a TPU.
    stated = sum(costs.token) * tokens + sum(costs.pair) * tokens * (tokens + behind) + ROWS * costs.logit
    with targeting("tpu") if text.experts is not None else contextlib.nullcontext():
        traced = traced_flops(run, forward.state, prompt, context, SPEC((1, ROWS), jnp.int32))
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


# ---------------------------------------------------------------------------------------------------- compiled programs


GIB = 2**30
MIB = 2**-10
"""In GiB."""
EXPERTS, CHOSEN, WIDTH, INNER = 128, 8, 2048, 768
"""Of Qwen3-30B-A3B."""
DEVICES = {"h200": ("NVIDIA H200", "jax_cuda13_plugin"), "v5e": ("v5e:2x2", "libtpu")}
"""Names, and the packages that have the compilers."""


def on(device: str, *values: Any) -> Any:
    """A case for a device, skipped where its compiler is not there."""
    absent = importlib.util.find_spec(DEVICES[device][1]) is None
    return pytest.param(device, *values, marks=[pytest.mark.device, pytest.mark.skipif(absent, reason="no compiler")])


class Program(NamedTuple):
    """A function, the shapes of its arguments, and which of these it is given for good."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def compiled_on(device: str, program: Program) -> Any:
    if device == "cpu":
        return jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments).compile()
    from evals.bench.ahead_of_time import compile_for

    return compile_for(DEVICES[device][0], program.function, program.arguments, program.donate)


def temporaries(compiled: Any) -> float:
    """GiB that a program needs beside its arguments and results, by the compiler's own analysis."""
    return compiled.memory_analysis().temp_size_in_bytes / GIB


# ----------------------------------------------------------------------------------------------------- Qwen2.5-VL-7B


def prompt_of(config: Any, tokens: int) -> Tokens:
    return Tokens(SPEC((1, tokens, config.text.width), jnp.bfloat16), SPEC((1, tokens, 3), jnp.int32))


def prefill_program(tokens: int, chunk: int | None = None, implementation: tuple[str, ...] = ()) -> Program:
    """A causal prefill in bf16 that gives the last token's logits."""
    config, forward = model(QWEN, 4)

    def run(state: Any, prompt: Tokens, rows: Any) -> Any:
        with using(*implementation):
            return forward.prefill.__wrapped__(
                state, prompt, None, None, rows, start_layer=0, hidden_at=(), chunk=chunk
            )

    return Program(run, (forward.state, prompt_of(config, tokens), SPEC((1, 1), jnp.int32)))


@pytest.mark.parametrize("device", [on("h200"), on("v5e")])
def test_long_prefills_fit_a_devices_memory(device):
    """16k tokens at once, and 64k in chunks."""
    assert temporaries(compiled_on(device, prefill_program(16384, None, ("xla",)))) < 3
    assert temporaries(compiled_on(device, prefill_program(65536, 2048, ("xla",)))) < 4
    if device == "v5e":  # splash attention is taken unasked
        compiled = compiled_on(device, prefill_program(16384))
        assert temporaries(compiled) < 3
        assert "splash" in (compiled.as_text() or "")


@pytest.mark.parametrize("name", ["prefill", "step"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), on("h200"), on("v5e")])
def test_a_pool_is_read_and_written_where_it_lies(device, name):
    """The layout that attention likes is made of the window's pages, not of the pool. A step's pool is donated."""
    layers, keys, page, slots = 2, 4096, 64, 65536
    config, forward = model(QWEN, layers)
    pool = {
        channel.name: SPEC((layers, slots // page, page, channel.heads, channel.width), jnp.bfloat16)
        for channel in config.text.layout.channels
    }
    paged = Paged(pool, SPEC((1, keys // page), jnp.int32), SPEC((1, keys), bool), SPEC((1, keys), jnp.int32))
    unit = SPEC((1, 1), jnp.int32)

    def prefill(state: Any, prompt: Tokens, paged: Paged, rows: Any) -> Any:
        return forward.prefill.__wrapped__(state, prompt, paged, None, rows, start_layer=0, hidden_at=())

    def step(state: Any, prompt: Tokens, pool: Any, paged: Paged, slots: Any) -> Any:
        return forward.recompute_in_pages.__wrapped__(
            state, prompt, pool, paged, slots, (slots, slots), None, None, None
        )

    program = Program(prefill, (forward.state, prompt_of(config, 512), paged, unit))
    if name == "step":
        program = Program(step, (forward.state, prompt_of(config, 1), pool, paged._replace(pool={}), unit), (2,))
    compiled = compiled_on(device, program)
    # Instructions that make another array of all of a pool's slots: copies, converted ones included.
    another = rf"= \w+\[\d+,(?:{slots}|{slots // page},{page}),4,128\]\S* (copy|convert|transpose|concatenate)\("
    assert not re.search(another, compiled.as_text() or "")
    assert temporaries(compiled) < 0.6
    if name == "step":
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * layers * slots * 4 * 128 * 2


# ------------------------------------------------------------------------------------- the experts of Qwen3-30B-A3B


def experts_program(tokens: int, layers: int = 48) -> Program:
    """The experts of so many tokens in one layer of a stack, in the implementation that is best where it is traced."""

    def mix(x: Any, index: Any, weights: Any, stack: ExpertWeights, layer: Any) -> Any:
        return mix_experts(x, index, weights, stack, jax.nn.silu, layer=layer)

    into, out = (layers, EXPERTS, WIDTH, INNER), (layers, EXPERTS, INNER, WIDTH)
    stack = ExpertWeights(*(SPEC(shape, jnp.bfloat16) for shape in (into, into, out)))
    pairs = SPEC((tokens, CHOSEN), jnp.int32), SPEC((tokens, CHOSEN), jnp.float32)
    return Program(mix, (SPEC((tokens, WIDTH), jnp.bfloat16), *pairs, stack, SPEC((), jnp.int32)))


@pytest.mark.parametrize("tokens", [1, 16, 4096])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_arithmetic_is_that_of_the_active_experts(tokens, platform):
    """From the jaxpr, trips of loops included. The share of the dense form would be 16."""
    active = 2 * 3 * tokens * CHOSEN * WIDTH * INNER
    if platform == "gpu" and not block_product_gpu.COUNTED:
        pytest.skip("kernels say what they cost since jax 0.12")
    program = experts_program(tokens)
    with targeting(platform):
        counted = traced_flops(program.function, *program.arguments)
    assert active <= counted <= (2 if tokens == 16 else 1.3) * active


@pytest.mark.parametrize(
    ("device", "tokens", "most"),
    [
        ("cpu", 1, 20),
        ("cpu", 4096, 60),
        on("v5e", 1, 8),
        on("v5e", 4096, 600),
        on("v5e", 16384, 800),
        on("h200", 1, 20),
        on("h200", 64, 64),
        on("h200", 16384, 300),
    ],
)
def test_temporaries_hold_no_layers_experts(device, tokens, most):
    """MiB by the compiler; the experts of one layer are 1152 MiB, one expert 9."""
    compiled = compiled_on(device, experts_program(tokens, 4 if device == "v5e" else 48))
    assert temporaries(compiled) <= most * MIB
    cost: Any = compiled.cost_analysis()
    # The compiler counts its own grouped kernel, and of a loop over tokens or blocks one trip.
    if tokens == 1 and device != "h200":  # a loop of 8 trips with one expert, copied and read; one block of eight
        assert cost["bytes accessed"] <= (6 if device == "cpu" else 2) * 3 * 2 * WIDTH * INNER
    if tokens > 1 and device == "h200":  # a kernel for each product; every pair's row is held
        assert (compiled.as_text() or "").count('custom_call_target="mosaic_gpu') == 3
    if tokens > 1 and device == "v5e":
        active = 2 * 3 * 4096 * CHOSEN * WIDTH * INNER
        assert active <= cost["flops"] <= 1.3 * active
