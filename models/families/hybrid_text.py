"""Hybrid text towers: linear attention by the gated delta rule, with full attention every so many layers.

Source: transformers' Qwen3NextForCausalLM and Qwen3_5TextModel (of Qwen3_5ForCausalLM and of the whole model).
"""

import dataclasses
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig, ExpertConfig, LayerKind, LinearConfig
from ..decoder.hf_config import Raw, Regime, need, read_decoder, read_rope, read_softmax_experts
from ..decoder.known_keys import complete

PARTIAL = 0.25
"""Of a head what rotates, where the configuration says nothing."""
_ORDER = ("full_attention", "linear_attention")


def read_hybrid(
    raw: Raw, angles: str, regime: Regime = None, kind: str = "qwen3_next", sections: tuple[int, ...] | None = None
) -> DecoderConfig:
    """Reads Qwen3-Next (`kind` "qwen3_next"), or the text part of Qwen3.5, dense or with experts.

    `sections` are M-RoPE's default; they are interleaved. None is for a model of texts alone: its tokens stand at one
    position on every axis, so that sections, which its configuration may have, are one plain rope.

    Raises:
      ConfigError: layers of other kinds, or of one kind alone; layers without experts among others.
    """
    raw = complete(raw, kind, "the text part of config.json")
    layers, every = need(raw, "num_hidden_layers"), raw["full_attention_interval"]
    types = raw["layer_types"] or [_ORDER[(layer + 1) % every != 0] for layer in range(layers)]
    for layer, found in enumerate(types):
        if found not in _ORDER:
            raise ConfigError(f"layer {layer}: got {found!r}, which is not built for {kind}; expected one of {_ORDER}")
    if len(types) != layers or len(set(types)) != 2:
        raise ConfigError(
            f"layer_types: got {sorted(set(types))} in {len(types)} layers; expected both of {_ORDER} in {layers}"
        )

    head_dim, bias = need(raw, "head_dim"), raw["attention_bias"]
    more: dict[str, Any] = {"order": "interleaved", "sections": sections, "partial": PARTIAL}
    rope = read_rope(raw, head_dim, angles=angles, regime=regime, **more)
    if sections is None:
        rope = dataclasses.replace(rope, sections=None)
    linear = LinearConfig(
        key_heads=need(raw, "linear_num_key_heads"),
        value_heads=need(raw, "linear_num_value_heads"),
        key_width=need(raw, "linear_key_head_dim"),
        value_width=need(raw, "linear_value_head_dim"),
        convolution=need(raw, "linear_conv_kernel_dim"),
        fused=kind == "qwen3_next",
    )
    full = LayerKind("", rope, head_dim, raw["num_key_value_heads"] or need(raw, "num_attention_heads"))
    experts = None if raw.get("num_experts") is None else _read_experts(raw)
    # Every layer has experts where any has, so that no width of an MLP is needed.
    inner = {} if experts is None else {"intermediate_size": experts.intermediate}
    return read_decoder(
        {**raw, "layer_types": None, **inner},
        rope,
        kinds=(full, dataclasses.replace(full, name="linear", linear=linear)),
        kind_of=tuple(_ORDER.index(found) for found in types),
        head_dim=head_dim,
        attention_bias=bias,
        output_bias=bias,
        attention_gate=True,
        qk_norm=True,
        norm_weight="offset",
        experts=experts,
    )


def _read_experts(raw: Raw) -> ExpertConfig:
    """Reads experts with one that every token takes, times a number of its own."""
    experts = read_softmax_experts({"norm_topk_prob": True, **raw})
    return dataclasses.replace(experts, shared=need(raw, "shared_expert_intermediate_size"), shared_gate=True)
