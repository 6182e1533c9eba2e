"""Text towers by their `model_type`: what tells Llama, Mistral, Qwen, GLM, Phi-3, Gemma and DeepSeek apart.

A reader takes the text part of `config.json`, as `parsed.parse` completes it, and gives a decoder's configuration.
Sources: transformers' modeling files of these model types.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig, LayerKind, LinearConfig
from ..decoder.hf_config import (
    Raw,
    Regime,
    need,
    read_decoder,
    read_deepseek_experts,
    read_latent,
    read_rope,
    read_softmax_experts,
    read_window,
)
from .gemma_text import read_gemma3, read_gemma4

ReadText = Callable[[Raw, str, Regime], DecoderConfig]

SECTIONS = {
    "qwen2_vl_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen2_5_omni_text": (16, 24, 24),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_omni_moe_text": (24, 20, 20),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_5_moe_text": (11, 11, 10),
    "glm4v_text": (8, 12, 12),
    "glm4v_moe_text": (8, 12, 12),
}
"""Of M-RoPE, where the configuration names none."""
_HYBRID = ("full_attention", "linear_attention")


def read_head_dim(raw: Raw) -> int:
    """Returns the width of a head, from the configuration or the model's width."""
    width = raw.get("head_dim") or need(raw, "hidden_size") // need(raw, "num_attention_heads")
    if width < 1:
        raise ConfigError(f"head_dim: got {width}; expected a positive whole number: hidden_size / num_attention_heads")
    return width


def read_llama(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Llama 2 and 3.1, Mistral (version 0.1 has a sliding window) and Phi-3."""
    # One switch for query, key, value and output.
    bias = raw.get("attention_bias", False)
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    window = None if raw["model_type"] == "llama" else raw["sliding_window"]
    switches = {"attention_bias": bias, "output_bias": bias, "mlp_bias": raw.get("mlp_bias", False)}
    return read_decoder(raw, rope, window=window, **switches)


def read_qwen2(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Qwen2 and 2.5, and Qwen2-VL's, 2.5-VL's and 2.5-Omni's: biases on query, key and value."""
    sections = SECTIONS.get(raw["model_type"])
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime, sections=sections)
    return read_decoder(raw, rope, attention_bias=True, **read_window(raw))


def read_qwen3(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Qwen3, Qwen3-VL's and 3-Omni's: norms on query and key heads before rotation, experts in every layer where
    there are any. M-RoPE sections are interleaved.
    """
    kind, bias = raw["model_type"], raw["attention_bias"]
    rope = read_rope(
        raw, read_head_dim(raw), angles=angles, regime=regime, order="interleaved", sections=SECTIONS.get(kind)
    )
    # Qwen3-VL's router renormalises whatever the configuration says.
    renormalise = kind == "qwen3_vl_moe_text" or raw.get("norm_topk_prob", False)
    # Where all layers have experts, all of them slide, or none.
    window = {"window": raw["sliding_window"] if kind == "qwen3_moe" else None} if "moe" in kind else read_window(raw)
    return read_decoder(
        raw,
        rope,
        head_dim=rope.head_width,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=read_softmax_experts(raw, renormalise) if "moe" in kind else None,
        **window,
    )


def read_glm(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads GLM-4 and GLM-4.1V: part of a head rotates, in pairs; all but the first have norms after attention and
    MLP.
    """
    kind, head_dim = raw["model_type"], read_head_dim(raw)
    rope = read_rope(raw, head_dim, angles=angles, regime=regime, cached="pairs", sections=SECTIONS.get(kind))
    bias, post_norms = raw.get("attention_bias", True) or kind == "glm4v_text", kind != "glm"
    return read_decoder(raw, rope, head_dim=head_dim, attention_bias=bias, post_norms=post_norms)


def read_glm_moe(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads GLM-4.5V's: half of a head rotates, in halves, and DeepSeek-V3's experts."""
    if raw.get("use_qk_norm"):
        raise ConfigError("use_qk_norm: got true, which is not built for GLM-4.5V; expected false")
    head_dim, sections = read_head_dim(raw), SECTIONS[raw["model_type"]]
    rope = read_rope(raw, head_dim, angles=angles, regime=regime, sections=sections)
    experts = read_deepseek_experts(raw, "sigmoid")
    return read_decoder(raw, rope, head_dim=head_dim, attention_bias=raw["attention_bias"], experts=experts)


def read_deepseek(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads DeepSeek-V2 (caches rotary pairs side by side), V3 and Kimi (read pairs, cache halves)."""
    second, bias = raw["model_type"] == "deepseek_v2", raw["attention_bias"]
    if raw.get("mlp_bias"):
        raise ConfigError("mlp_bias: got true, which is not built for DeepSeek; expected false")
    # A trap: both versions read pairs that lie side by side. V3 writes all first members, then all second ones, so its
    # cached keys rotate in halves. A wrong choice shows only where a key moves.
    cached = "pairs" if second else "half"
    rope = read_rope(raw, need(raw, "qk_rope_head_dim"), angles=angles, regime=regime, cached=cached)
    return read_decoder(
        raw,
        rope,
        attention_bias=bias,
        output_bias=bias,
        latent=read_latent(raw, rope, reads_pairs=not second and raw["rope_interleave"]),
        experts=read_deepseek_experts(raw, "softmax" if second else "sigmoid"),
    )


def read_hybrid(raw: Raw, angles: str, regime: Regime = None, axes: bool = True) -> DecoderConfig:
    """Reads Qwen3-Next, or the text part of Qwen3.5: linear attention, with full attention every so many layers.

    With `axes` Qwen3.5 has M-RoPE. A model of texts alone has none: its tokens stand at one position on every axis, so
    that sections, which its configuration may have, are one plain rope.

    Raises:
      ConfigError: layers of other kinds, or of one kind alone; layers without experts among others.
    """
    kind, kinds, heads = raw["model_type"], raw["layer_types"], need(raw, "num_attention_heads")
    if set(kinds) != set(_HYBRID):
        raise ConfigError(f"layer_types: got {sorted(set(kinds))}; expected both of {_HYBRID}")
    head_dim, bias = read_head_dim(raw), raw["attention_bias"]
    sections = SECTIONS.get(kind)
    rope = read_rope(raw, head_dim, angles=angles, regime=regime, order="interleaved", sections=sections)
    if not axes or sections is None:
        rope = dataclasses.replace(rope, sections=None)
    linear = LinearConfig(
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key_width=raw["linear_key_head_dim"],
        value_width=raw["linear_value_head_dim"],
        convolution=raw["linear_conv_kernel_dim"],
        fused=kind == "qwen3_next",
    )
    full = LayerKind("", rope, head_dim, raw["num_key_value_heads"] or heads)
    experts, inner = None, {}
    if raw.get("num_experts") is not None or raw.get("num_local_experts") is not None:
        experts = dataclasses.replace(
            read_softmax_experts(raw, raw["norm_topk_prob"] if kind == "qwen3_next" else True),
            shared=need(raw, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        # Every layer has experts where any has, so that no width of an MLP is needed.
        inner = {"intermediate": experts.intermediate}
    return read_decoder(
        raw,
        rope,
        kinds=(full, dataclasses.replace(full, name="linear", linear=linear)),
        kind_of=tuple(_HYBRID.index(layer) for layer in kinds),
        head_dim=head_dim,
        attention_bias=bias,
        output_bias=bias,
        attention_gate=True,
        qk_norm=True,
        norm_weight="offset",
        experts=experts,
        **inner,
    )


def read_deepseek_ocr(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads DeepSeek-OCR-2's: DeepSeek-V2's experts, Llama's attention.

    Raises:
      ConfigError: dense layers that are not the lowest.
    """
    kinds, bias = list(need(raw, "mlp_layer_types")), raw["attention_bias"]
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (raw["num_hidden_layers"] - dense):
        raise ConfigError(f"mlp_layer_types: got {kinds!r:.80}; expected 'dense' below 'sparse' in every layer")
    experts = read_deepseek_experts({**raw, "first_k_dense_replace": dense}, "softmax") if "sparse" in kinds else None
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    return read_decoder(raw, rope, attention_bias=bias, output_bias=bias, mlp_bias=raw["mlp_bias"], experts=experts)


def _read_ministral3(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    raise ConfigError(
        "text_config: got type 'ministral3', whose queries are scaled by their position beyond the original length, so "
        "that KV formed at one place is not that of another; expected 'mistral'"
    )


READERS: dict[str, ReadText] = {
    **dict.fromkeys(("llama", "mistral", "phi3"), read_llama),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), read_qwen2),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), read_qwen3),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), read_hybrid),
    **dict.fromkeys(("glm", "glm4", "glm4v_text"), read_glm),
    "glm4v_moe_text": read_glm_moe,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), read_deepseek),
    "deepseek_ocr2_text": read_deepseek_ocr,
    "gemma3_text": read_gemma3,
    "gemma4_text": read_gemma4,
    "ministral3": _read_ministral3,
}
"""What reads each text tower, by its `model_type`."""

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Those whose layers have the names of Llama's in files, so that one family takes any of them."""


def read_text(raw: Raw, angles: str, regime: Regime = None, kinds: tuple[str, ...] = ()) -> DecoderConfig:
    """Reads a text tower by its `model_type`, one of `kinds` where there are some.

    Raises:
      ConfigError: one that is not built.
    """
    kind: Any = raw.get("model_type")
    if kind not in READERS or (kinds and kind not in (*kinds, "ministral3")):
        raise ConfigError(f"text_config: got type {kind!r}; expected one of {sorted(kinds or READERS)}")
    return READERS[kind](raw, angles, regime)
