"""A small Llama with random weights, as a directory that the engine loads. It shows the plumbing, no quality."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

VOCABULARY, WIDTH, HEADS, INNER = 256, 128, 2, 256


class Kind(NamedTuple):
    """A form that released models have; `dtype` is that of the engine's KV too."""

    head_dim: int = 128
    dtype: str = "float32"
    kv_heads: int = 2
    layers: int = 3
    rope: dict[str, Any] | None = None


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,  # of 8192, so that prompts of a hundred tokens reach all of it
}
KINDS = {
    "wide": Kind(),
    "llama3": Kind(64, "bfloat16", kv_heads=1, rope=LLAMA3),
    "shallow": Kind(64, kv_heads=1, layers=1, rope=LLAMA3),
}
"""By name: pages with keys and values in turns; pages with both side by side; and these in one layer, where KV depends
on a token and its position alone."""


def write(folder: Path, kind: Kind) -> Path:
    """Writes `config.json` and weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": kind.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kind.kv_heads,
        "head_dim": kind.head_dim,
        "intermediate_size": INNER,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": kind.rope,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": kind.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1]) * 1.2).astype(np.float32)

    norm, heads, kv_heads = np.ones(WIDTH, np.float32), HEADS * kind.head_dim, kind.kv_heads * kind.head_dim
    weights = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        "model.norm.weight": norm,
        "lm_head.weight": matrix(VOCABULARY, WIDTH) * 2,
    }
    for layer in range(kind.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": norm,
            f"{prefix}post_attention_layernorm.weight": norm,
            f"{prefix}self_attn.q_proj.weight": matrix(heads, WIDTH),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_heads, WIDTH),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_heads, WIDTH),
            f"{prefix}self_attn.o_proj.weight": matrix(WIDTH, heads),
            f"{prefix}mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"{prefix}mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"{prefix}mlp.down_proj.weight": matrix(WIDTH, INNER),
        }
    weights = {name: value.astype(jnp.dtype(kind.dtype)) for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
