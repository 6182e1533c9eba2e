"""A small Llama with random weights, as a directory that the engine loads. It shows the plumbing, no quality."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 256, 128, 3, 2, 256


class Kind(NamedTuple):
    """A form that released models have.

    Attributes:
      dtype: that the engine computes and caches in. family: "llama" or "qwen3" (norms of q and k).
      devices: that share the heads, by tensor parallelism.
    """

    head_dim: int = 128
    dtype: str = "float32"
    kv_heads: int = 1
    rope: dict[str, Any] | None = None
    family: str = "llama"
    devices: int = 1


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,  # of 8192, so that prompts of a hundred tokens see all of it
}
KINDS = {
    "128": Kind(),
    "llama3": Kind(64, "bfloat16", rope=LLAMA3),
    "qwen3": Kind(dtype="bfloat16", kv_heads=2, family="qwen3"),
    "split": Kind(kv_heads=2, devices=2),
    "repeated": Kind(64, "bfloat16", devices=2),
}
"""By name; llama3 as released ones are, with Llama 3.2's heads and rope. Of the last two
one has a head on each device; the other has its only one on both, where each fills it up to a packing of two."""


def write(folder: Path, kind: Kind) -> Path:
    """Writes `config.json` and weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    head_dim, kv_heads = kind.head_dim, kind.kv_heads
    config = {
        "architectures": [f"{kind.family.title()}ForCausalLM"],
        "model_type": kind.family,
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
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
    matrix = lambda *shape: (random.standard_normal(shape) / np.sqrt(shape[-1]) * 1.2).astype(np.float32)
    ones = np.ones(WIDTH, np.float32)
    weights = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, WIDTH) * 2,
    }
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        weights |= {
            f"{own}input_layernorm.weight": ones,
            f"{own}post_attention_layernorm.weight": ones,
            f"{own}self_attn.q_proj.weight": matrix(HEADS * head_dim, WIDTH),
            f"{own}self_attn.k_proj.weight": matrix(kv_heads * head_dim, WIDTH),
            f"{own}self_attn.v_proj.weight": matrix(kv_heads * head_dim, WIDTH),
            f"{own}self_attn.o_proj.weight": matrix(WIDTH, HEADS * head_dim),
            f"{own}mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"{own}mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"{own}mlp.down_proj.weight": matrix(WIDTH, INNER),
        }
        for name in ("q_norm", "k_norm") if kind.family == "qwen3" else ():
            weights[f"{own}self_attn.{name}.weight"] = random.uniform(0.5, 2, head_dim).astype(np.float32)
    weights = {name: value.astype(jnp.dtype(kind.dtype)) for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
