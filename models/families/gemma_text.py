"""Gemma's text towers: layers of two kinds by turns, most of which slide and turn by a rope of their own.

Source: transformers' Gemma3TextModel.
"""

from collections.abc import Mapping

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig, LayerKind
from ..decoder.hf_config import Raw, Regime, need, read_decoder, read_rope
from ..decoder.known_keys import complete

NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""What Gemma calls the norms of a layer that others call otherwise."""
_BASES = {"full_attention": 1e6, "sliding_attention": 1e4}


def read_gemma3(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Gemma 3's text tower: of six layers the last sees all, the others a window, each kind with its own rope."""
    raw = complete(raw, "gemma3_text", "text configuration")
    layers, head_dim = need(raw, "num_hidden_layers"), need(raw, "head_dim")
    every = raw["sliding_window_pattern"] or 6
    types = raw["layer_types"] or [
        "full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in range(layers)
    ]
    if len(types) != layers or not set(types) <= set(_BASES):
        raise ConfigError(
            f"layer_types: got {types!s:.80}; expected one of {sorted(_BASES)} for each of {layers} layers"
        )

    ropes = {kind: _rope(raw, kind, head_dim, angles, regime) for kind in dict.fromkeys(types)}
    heads, window = raw["num_key_value_heads"] or need(raw, "num_attention_heads"), need(raw, "sliding_window")
    kinds = {"full_attention": ("", None), "sliding_attention": ("local", window)}
    found = []
    # The layers that see all come first, for their rope is the layout's; where there is one kind, it needs no name.
    for kind in (kind for kind in kinds if kind in ropes):
        name, reach = kinds[kind]
        found.append(LayerKind(name if len(ropes) == 2 else "", ropes[kind], head_dim, heads, reach))
    order = [kind for kind in kinds if kind in ropes]
    bias = raw["attention_bias"]
    return read_decoder(
        raw | {"hidden_act": raw["hidden_activation"], "layer_types": None},
        found[0].rope,
        kinds=tuple(found),
        kind_of=tuple(order.index(kind) for kind in types),
        qk_norm=True,
        post_norms=True,
        norm_weight="offset",
        attention_bias=bias,
        output_bias=bias,
        attention_scale=need(raw, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=need(raw, "hidden_size") ** 0.5,
        logit_cap=raw["final_logit_softcapping"],
    )


def _rope(raw: Raw, kind: str, head_dim: int, angles: str, regime: Regime) -> Rope:
    """Reads the rope of one kind of layers: from a table of its own, or as released files have both side by side."""
    tables = raw["rope_parameters"] or {}
    if not isinstance(tables, Mapping) or not set(tables) <= set(_BASES):
        raise ConfigError(f"rope_parameters: got {tables!s:.80}; expected a table for each of {sorted(_BASES)}")
    own, scaled = tables.get(kind) or {}, kind == "full_attention"
    if not isinstance(own, Mapping):
        raise ConfigError(f"rope_parameters: got {kind} {own!r:.80}; expected a table")
    if scaled and raw["rope_scaling"]:
        own = {**own, **raw["rope_scaling"]}
    if own.get("rope_type") in ("longrope", "dynamic"):
        raise ConfigError(
            f"{kind}: got rope type {own['rope_type']!r}, which is not built for Gemma 3; expected another"
        )
    base = own.get("rope_theta") or raw["rope_theta" if scaled else "rope_local_base_freq"] or _BASES[kind]
    plain = {**raw, "rope_scaling": None, "rope_theta": base, "rope_parameters": {"rope_type": "default", **own}}
    return read_rope(plain, head_dim, angles=angles, regime=regime)
