"""Gemma's text towers: layers of two kinds by turns, most of which slide and turn by a rope of their own.

Source: transformers' Gemma3TextModel and Gemma4TextModel.
"""

import dataclasses

from kvpatch_jax.core import Rope, Scaling
from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig, ExpertConfig, LayerKind
from ..decoder.hf_config import Raw, Regime, need, read_decoder, read_rope

NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""What Gemma calls the norms of a layer that others call otherwise."""
_ORDER = ("full_attention", "sliding_attention")
"""The layers that see all come first, for their rope is the layout's."""


def read_gemma3(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Gemma 3's text tower: of six layers the last sees all, the others a window, each kind with its own rope."""
    if raw["use_bidirectional_attention"]:
        raise ConfigError("use_bidirectional_attention: got true, which is not built for Gemma 3; expected false")
    head_dim, heads = raw["head_dim"], raw["num_key_value_heads"] or raw["num_attention_heads"]
    kinds: list[LayerKind] = []
    for layer in range(raw["num_hidden_layers"]):
        slides = _slides(raw, layer)
        rope = _rope(raw, layer, head_dim, angles, regime)
        if rope.scaling is not None and rope.scaling.kind in ("longrope", "dynamic"):
            raise ConfigError(f"layer {layer}: got rope type {rope.scaling.kind!r}, which is not built for Gemma 3")
        window = need(raw, "sliding_window") if slides else None
        kinds.append(LayerKind("local" if slides else "", rope, head_dim, heads, window))
    return _read(raw, kinds, norm_weight="offset", attention_scale=raw["query_pre_attn_scalar"] ** -0.5)


def read_gemma4(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Gemma 4's text tower: two widths of heads, the upper layers read the KV of lower ones, every layer takes of
    each token a vector of its own, experts stand beside the MLP.
    """
    layers, shared, sees = raw["num_hidden_layers"], raw["num_kv_shared_layers"], raw["use_bidirectional_attention"]
    if sees not in (None, "vision"):
        raise ConfigError(f"use_bidirectional_attention: got {sees!r}, which is not built; expected null or 'vision'")
    experts = None
    if raw["enable_moe_block"]:
        sizes = {"experts": need(raw, "num_experts"), "chosen": need(raw, "top_k_experts")}
        inner = need(raw, "moe_intermediate_size")
        experts = ExpertConfig(**sizes, intermediate=inner, router="softmax", renormalise=True, beside=True)
    return _read(
        raw,
        [_kind4(raw, layer, layer >= layers - shared, angles, regime) for layer in range(layers)],
        value_norm=True,
        norm_weight="wide",
        layer_scale=True,
        attention_scale=1.0,
        per_layer=raw["hidden_size_per_layer_input"] or None,
        per_layer_vocabulary=raw["vocab_size_per_layer_input"],
        blank=raw["pad_token_id"] or 0,
        ahead_in_windows=sees == "vision",
        experts=experts,
    )


def _read(raw: Raw, layers: list[LayerKind], **switches: object) -> DecoderConfig:
    """Returns the decoder of these layers, with what both versions have."""
    # Where there is one kind of KV, it needs no name.
    if len({kind.name for kind in layers}) == 1:
        layers = [dataclasses.replace(kind, name="") for kind in layers]
    kinds = sorted(dict.fromkeys(layers), key=lambda kind: (kind.name, kind.reads))
    return read_decoder(
        raw,
        kinds[0].rope,
        head_dim=kinds[0].head_dim,
        kv_heads=kinds[0].kv_heads,
        kinds=tuple(kinds),
        kind_of=tuple(kinds.index(kind) for kind in layers),
        qk_norm=True,
        post_norms=True,
        attention_bias=raw["attention_bias"],
        output_bias=raw["attention_bias"],
        embedding_scale=raw["hidden_size"] ** 0.5,
        logit_cap=raw["final_logit_softcapping"],
        **switches,
    )


def _slides(raw: Raw, layer: int) -> bool:
    """Returns whether a layer slides."""
    kind = raw["layer_types"][layer]
    if kind not in _ORDER:
        raise ConfigError(f"layer {layer}: got {kind!r}; expected one of {_ORDER}")
    return kind == "sliding_attention"


def _kind4(raw: Raw, layer: int, reads: bool, angles: str, regime: Regime) -> LayerKind:
    """Reads the kind of one layer of Gemma 4."""
    # The class writes the numbers of layers with leading zeros.
    layers = {int(number): own for number, own in (raw.get("per_layer_config") or {}).items()}
    slides, own = _slides(raw, layer), layers.get(layer) or {}
    others = sorted(set(own) - {"head_dim", "num_key_value_heads"})
    if others:
        raise ConfigError(f"per_layer_config: got {others} of layer {layer}; expected head_dim, num_key_value_heads")
    width = own.get("head_dim", raw["head_dim"])
    return LayerKind(
        "local" if slides else "",
        _rope(raw, layer, width, angles, regime),
        width,
        own.get("num_key_value_heads", raw["num_key_value_heads"] or raw["num_attention_heads"]),
        need(raw, "sliding_window") if slides else None,
        reads=reads,
        keys_are_values=raw["attention_k_eq_v"] and not slides,
        intermediate=2 * raw["intermediate_size"] if reads and raw["use_double_wide_mlp"] else None,
    )


def _rope(raw: Raw, layer: int, head_dim: int, angles: str, regime: Regime) -> Rope:
    """Reads the rope of a layer's kind; Gemma 4's "proportional" turns the first frequencies of a whole head."""
    table = need(need(raw, "rope_parameters"), raw["layer_types"][layer])
    if table.get("rope_type") != "proportional":
        return read_rope({**raw, "rope_parameters": table}, head_dim, angles=angles, regime=regime)
    share, factor = (1.0 if table.get(key) is None else table[key] for key in ("partial_rotary_factor", "factor"))
    scaling = Scaling("proportional", factor, share=share)
    return Rope(float(need(table, "rope_theta")), head_dim, scaling=scaling, angles=angles)  # type: ignore[arg-type]
