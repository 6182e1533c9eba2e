"""Programs of a hybrid at the shape of Qwen3.5-9B, by the compiler for CPUs: nothing is allocated and nothing runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import KVLayout, fold
from kvpatch_jax.utils.traced_flops import traced_flops
from models.decoding import Forward
from models.families.family import abstract, placeholders, with_dtype

from .hybrid_shapes import HYBRIDS, config_of

MODEL = "Qwen3.5-9B"
CHUNK, KEYS, LENGTHS = 256, 10240, (1280, 2560, 5120)
"""Tokens run at a time, tokens of the context, and tokens of the prompts."""
COMPOSED = (8, 32)
"""Transitions that are composed."""
SPEC: Any = jax.ShapeDtypeStruct


def describe_prefills(
    raw: dict[str, Any] | None = None, lengths: Sequence[int] = LENGTHS, keys: int = KEYS, chunk: int = CHUNK
) -> list[dict[str, Any]]:
    """Compiles prefills behind a composed context, chunk by chunk; bfloat16.

    Returns:
      For each length {"tokens", "keys", "flops" by the trace, "temporaries": bytes beside arguments and results,
      "results": bytes, "scores": bytes that one layer's [N, T, S + T] in float32 would take}.
    """
    config = with_dtype(config_of(HYBRIDS[MODEL] if raw is None else raw), "bfloat16")
    text, layout = config.text, config.text.layout
    forward = Forward(abstract(config), placeholders(config), layout, None)
    context = {}
    for channel in layout.channels:
        shape = (layout.depth(channel.name), 1, channel.rows or keys, channel.heads, channel.width)
        context[channel.name] = SPEC(shape, jnp.bfloat16 if channel.rows is None else jnp.float32)

    def run(state: Any, tokens: Tokens, context: Any, rows: Any) -> Any:
        return forward.prefill.__wrapped__(state, tokens, context, None, rows, start_layer=0, hidden_at=(), chunk=chunk)

    described = []
    for length in lengths:
        tokens = Tokens(SPEC((1, length, text.width), jnp.bfloat16), SPEC((1, length, 3), jnp.int32))
        arguments = (forward.state, tokens, context, SPEC((1, 1), jnp.int32))
        memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        described.append(
            {
                "tokens": length,
                "keys": keys,
                "flops": traced_flops(run, *arguments),
                "temporaries": memory.temp_size_in_bytes,
                "results": memory.output_size_in_bytes,
                "scores": 4 * text.heads * length * (keys + length),
            }
        )
    return described


def describe_compositions(layout: KVLayout, counts: Sequence[int] = COMPOSED) -> list[dict[str, int]]:
    """Compiles the composition of this many transitions, float32.

    Returns:
      For each {"transitions", "flops" by the trace, "arguments", "temporaries" and "results" in bytes}.
    """
    one = {}
    for channel in layout.parts:
        shape = (layout.depth(channel.name), channel.rows or 0, channel.heads, channel.width)
        one[channel.name] = SPEC(shape, jnp.float32)
    described = []
    for count in counts:
        memory = jax.jit(fold).lower([one] * count).compile().memory_analysis()
        assert memory is not None
        described.append(
            {
                "transitions": count,
                "flops": traced_flops(fold, [one] * count),
                "arguments": memory.argument_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "results": memory.output_size_in_bytes,
            }
        )
    return described
