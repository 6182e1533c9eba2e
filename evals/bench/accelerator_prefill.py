"""Prefill of a 7B text decoder with random weights, on an accelerator: what a chunk costs without reuse."""

import functools
import importlib.util
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from .accelerator_tasks import Row, Task, spread
from .device_timing import seconds_of

TOKENS = 1024
NEEDED = 24 * 2**30
"""Bytes of device memory that drawing the bfloat16 weights and the prefill take."""
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

    # Imported here, because these packages may be missing.
    from models import FAMILIES
    from models.families.family import with_dtype

    from .checkpoints import SEVEN_BILLION, filled_backbone, prompt, qwen2_config

    raw = (
        qwen2_config(32, 64, heads=4, layers=2, kv_heads=2, vocabulary=320, tie_word_embeddings=False)
        if tiny
        else SEVEN_BILLION
    )
    config = with_dtype(FAMILIES[raw["architectures"][0]].config(raw, "exact", None), "bfloat16")
    drawn = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    numbers = itertools.count()
    backbone = filled_backbone(config, lambda name, shape: drawn(jax.random.key(next(numbers)), shape))

    tokens = 16 if tiny else TOKENS
    embedded = backbone.embed(prompt(tokens))
    seconds = seconds_of(lambda: backbone.prefill(embedded), 1, 3 if tiny else 10)
    return {"case": f"{tokens} tokens"} | spread(seconds)
