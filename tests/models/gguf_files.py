"""A small writer of GGUF files, and tiny models in them: names and orders as llama.cpp's converter writes them."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Stored = np.ndarray | tuple[int, tuple[int, ...], bytes]
"""Values of a plain type, or a type's number, a shape (slowest axis first) and bytes."""

KINDS = {"float32": 0, "float16": 1, "bfloat16": 30}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HEADS, KV_HEADS, WIDTH, HEAD = 4, 2, 32, 8
BASE: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500.0,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_bytes(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """Writes a file; metadata are texts, whole numbers (uint32), floats (float32), truths and lists of these."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, stored in tensors.items():
        if isinstance(stored, np.ndarray):
            stored = KINDS[stored.dtype.name], stored.shape, stored.tobytes()
        kind, shape, values = stored
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += values + b"\0" * (-len(values) % 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection as llama.cpp wants them: of each head i and i + half side by side."""
    width = len(values) // heads
    out = np.empty_like(values)
    for head in range(heads):
        for pair in range(width // 2):
            out[head * width + 2 * pair] = values[head * width + pair]
            out[head * width + 2 * pair + 1] = values[head * width + width // 2 + pair]
    return out


def converted(tensors: Mapping[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    """Hugging Face's tensors as a GGUF file has them."""
    out: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        module, end = name.rsplit(".", 1)
        # Gemma's norms are stored as what they multiply by.
        if architecture == "gemma3" and module.endswith("norm"):
            value = value + np.float32(1)
        if module in TOP:
            out[f"{TOP[module]}.{end}"] = value
            continue
        _, _, layer, part = module.split(".", 3)
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = in_pairs(value, HEADS if part == "self_attn.q_proj" else KV_HEADS)
        names = GEMMA_NAMES if architecture == "gemma3" else NAMES
        out[f"blk.{layer}.{names[part]}.{end}"] = value
    return out


def tiny_tensors(architecture: str, tied: bool = False, bias: bool = False) -> dict[str, np.ndarray]:
    """A tiny model's tensors by Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (40, WIDTH)
    rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "o": WIDTH}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (size, WIDTH) for name, size in rows.items()}
        if architecture == "gemma3":
            shapes |= {f"{at}.{name}_feedforward_layernorm.weight": (WIDTH,) for name in ("pre", "post")}
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in ("q", "k")}
        if architecture == "qwen2" or bias:
            shapes |= {f"{at}.self_attn.{name}_proj.bias": (rows[name],) for name in ("qkv" if not bias else "qkvo")}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (64, WIDTH) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (WIDTH, 64)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def metadata_of(architecture: str, **more: Any) -> dict[str, Any]:
    """A tiny model's metadata. `more`: entries of the architecture, `__` standing for the dots."""
    own = BASE | {key.replace("__", "."): value for key, value in more.items()}
    named = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "tiny", **named}
