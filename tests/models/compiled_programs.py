"""Programs of released models at their real sizes, as shapes: what the compiler says they need, nothing allocated."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax import models
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Paged
from kvpatch_jax.models.attention import using
from kvpatch_jax.models.decoder.grouped import ExpertWeights, mix_experts
from kvpatch_jax.models.decoding import Forward
from kvpatch_jax.models.families.family import abstract, placeholders
from kvpatch_jax.models.towers.packed import plan_patches
from tests.models.released_configs import RELEASED

GIB = 2**30
TWELVE_MEGAPIXELS = (214, 286)
"""Rows and columns of patches of 14 pixels: 2996 × 4004 pixels, 61 204 patches."""
EXPERTS_30B = {"layers": 48, "experts": 128, "chosen": 8, "width": 2048, "inner": 768}
"""Of Qwen3-30B-A3B."""


class Program(NamedTuple):
    """A function, the shapes of its arguments, and which of these it is given for good."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


@functools.cache
def forward_of(name: str, layers: int | None) -> tuple[Any, Forward]:
    """Configuration and programs of a released model, with as many language layers or its own number."""
    raw = RELEASED[name].config
    raw = raw if layers is None else {**raw, "num_hidden_layers": layers}
    config = models.FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    return config, Forward(abstract(config), placeholders(config), config.text.layout, None)


def prefill_program(
    tokens: int, chunk: int | None = None, *, layers: int | None = None, implementation: tuple[str, ...] = ()
) -> Program:
    """A causal prefill of Qwen2.5-VL-7B in bf16 that gives the last token's logits."""
    config, forward = forward_of("Qwen/Qwen2.5-VL-7B-Instruct", layers)
    shape: Any = jax.ShapeDtypeStruct
    prompt = Tokens(shape((1, tokens, config.text.width), jnp.bfloat16), shape((1, tokens, 3), jnp.int32))

    def run(state: Any, prompt: Tokens, rows: Any) -> Any:
        with using(*implementation):
            return forward.prefill.__wrapped__(
                state, prompt, None, None, rows, start_layer=0, hidden_at=(), chunk=chunk
            )

    return Program(run, (forward.state, prompt, shape((1, 1), jnp.int32)))


def paged_programs(keys: int, pool_slots: int, *, layers: int, page_size: int = 64) -> dict[str, Program]:
    """Qwen2.5-VL-7B in bf16 behind so many keys in pages of a pool: a prefill of 512 tokens, and a step.

    The step's pool is its third argument, and donated.
    """
    config, forward = forward_of("Qwen/Qwen2.5-VL-7B-Instruct", layers)
    shape: Any = jax.ShapeDtypeStruct
    layout, pages = config.text.layout, keys // page_size
    prompt = lambda tokens: Tokens(
        shape((1, tokens, config.text.width), jnp.bfloat16), shape((1, tokens, 3), jnp.int32)
    )
    pool = {
        channel.name: shape((layers, pool_slots // page_size, page_size, channel.heads, channel.width), jnp.bfloat16)
        for channel in layout.channels
    }
    paged = Paged(pool, shape((1, pages), jnp.int32), shape((1, keys), bool), shape((1, keys), jnp.int32))
    unit = shape((1, 1), jnp.int32)

    def prefill(state: Any, prompt: Tokens, paged: Paged, rows: Any) -> Any:
        return forward.prefill.__wrapped__(state, prompt, paged, None, rows, start_layer=0, hidden_at=())

    def step(state: Any, prompt: Tokens, pool: Any, paged: Paged, slots: Any) -> Any:
        return forward.recompute_in_pages.__wrapped__(
            state, prompt, pool, paged, slots, (slots, slots), None, None, None
        )

    return {
        "prefill": Program(prefill, (forward.state, prompt(512), paged, unit)),
        "step": Program(step, (forward.state, prompt(1), pool, paged._replace(pool={}), unit), (2,)),
    }


def tower_program(name: str, grid: tuple[int, int], implementation: tuple[str, ...] = ()) -> Program:
    """The tower and projector of a model over one image of this grid of patches."""
    config, forward = forward_of(name, None)
    plan = plan_patches(config.vision, np.array([[1, *grid]]))
    arrays = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in plan.items()}

    def run(state: Any, pixels: Any, plan: Any) -> Any:
        with using(*implementation):
            return forward.encode.__wrapped__(state, pixels, plan)

    patches, side = grid[0] * grid[1], config.vision.patch
    flat = not name.startswith("moonshotai")
    shape = (patches, config.vision.features) if flat else (patches, config.vision.channels, side, side)
    return Program(run, (forward.state, jax.ShapeDtypeStruct(shape, jnp.float32), arrays))


def mix_30b(x: Any, index: Any, weights: Any, stack: ExpertWeights, layer: Any) -> Any:
    """Mixes tokens' experts in the implementation that is best where it is traced."""
    return mix_experts(x, index, weights, stack, jax.nn.silu, layer=layer)


def experts_program(tokens: int, layers: int = EXPERTS_30B["layers"]) -> Program:
    """The experts of so many tokens in one layer of a stack."""
    spec: Any = jax.ShapeDtypeStruct
    experts, chosen, width, inner = (EXPERTS_30B[name] for name in ("experts", "chosen", "width", "inner"))
    into, out = (layers, experts, width, inner), (layers, experts, inner, width)
    stack = ExpertWeights(*(spec(shape, jnp.bfloat16) for shape in (into, into, out)))
    pairs = spec((tokens, chosen), jnp.int32), spec((tokens, chosen), jnp.float32)
    return Program(mix_30b, (spec((tokens, width), jnp.bfloat16), *pairs, stack, spec((), jnp.int32)))


def temporaries(compiled: jax.stages.Compiled) -> float:
    """GiB that a program needs beside its arguments and results, by the compiler's own analysis."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes / GIB


def compiled_here(program: Program) -> jax.stages.Compiled:
    """A program compiled for this process's devices."""
    return jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments).compile()


def pool_copies(compiled: jax.stages.Compiled, pool_slots: int) -> list[str]:
    """Instructions that make another array of all of a pool's slots: copies, converted ones included."""
    pattern = re.compile(
        rf"= \w+\[\d+,(?:{pool_slots}|{pool_slots // 64},64),4,128\]\S* (copy|convert|transpose|concatenate)\("
    )
    return [line.strip() for line in (compiled.as_text() or "").splitlines() if pattern.search(line)]
