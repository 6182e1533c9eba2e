"""Prefill of a 7B text decoder with random weights, on an accelerator: what a chunk costs without reuse."""

import functools
import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._timing import seconds_of

from .accelerator_tasks import Row, Task

TOKENS = 1024
NEEDED = 24 * 2**30
"""Bytes of device memory that drawing the bfloat16 weights and the prefill take."""
SEVEN_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
"""The shape of Qwen2.5-VL-7B's text decoder."""
TINY = SEVEN_BILLION | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


NOTES = ["a 7B text decoder, random weights, bfloat16; embeddings at hand; all KV and logits are made"]


def prefill(tiny: bool, which: str) -> Iterator[Task]:
    """Yields the seconds of a prefill of 1024 tokens, with all KV and logits; or why it was not measured."""
    del which
    yield Task("prefill", functools.partial(_prefilled, tiny))


def _prefilled(tiny: bool) -> Row:
    # What is missing is the row, not an error: everything else runs on a machine with jax and numpy alone.
    missing = [name for name in ("flax", "safetensors", "orbax") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}

    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if not tiny and (memory is None or memory < NEEDED):
        return {"skipped": f"device memory {memory}; expected at least {NEEDED}"}

    backbone = _backbone(TINY if tiny else SEVEN_BILLION)
    tokens = 16 if tiny else TOKENS
    ids = ((np.arange(tokens, dtype=np.int32) * 37 + 11) % 290 + 3)[None]
    embedded = backbone.embed(ids)
    micros = [seconds * 1e6 for seconds in seconds_of(lambda: backbone.prefill(embedded), 1, 3 if tiny else 10)]
    row = {"case": f"{tokens} tokens", "microseconds": statistics.median(micros)}
    return row | {"fastest": min(micros), "slowest": max(micros)}


def _backbone(raw: dict[str, Any]) -> Any:
    """Makes a backbone of this `config.json`, its bfloat16 weights drawn on the device."""
    from models import FAMILIES, ModelBackbone
    from models.checkpoints import flatten_params
    from models.families.family import abstract, parameters, with_dtype

    config = with_dtype(FAMILIES[raw["architectures"][0]].config(raw, "exact", None), "bfloat16")
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    values: dict[str, Any] = {}

    for index, (path, leaf) in enumerate(sorted(flatten_params(parameters(abstract(config))).items())):
        parent = values
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = draw(jax.random.key(index), leaf.shape)

    return ModelBackbone(config, values)
