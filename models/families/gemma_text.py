"""Gemma's text towers: layers of two kinds by turns, most of which slide and turn by a rope of their own.

Source: transformers' Gemma3TextModel and Gemma4TextModel.
"""

import dataclasses
from collections.abc import Mapping

from kvpatch_jax.core import Rope, Scaling
from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig, ExpertConfig, LayerKind
from ..decoder.hf_config import Raw, Regime, need, read_decoder, read_rope, rope_table
from ..decoder.known_keys import complete

NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""What Gemma calls the norms of a layer that others call otherwise."""
_ORDER = ("full_attention", "sliding_attention")
"""The layers that see all come first, for their rope is the layout's."""
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


def read_gemma4(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Gemma 4's text tower: two widths of heads, the upper layers read the KV of lower ones, every layer takes of
    each token a vector of its own, experts stand beside the MLP.
    """
    raw = complete(raw, "gemma4_text", "text configuration")
    layers, shared = need(raw, "num_hidden_layers"), raw["num_kv_shared_layers"]
    types = list(raw["layer_types"] or [_ORDER[(n + 1) % 6 != 0] for n in range(layers)])
    if len(types) != layers or not set(types) <= set(_ORDER) or shared >= layers:
        raise ConfigError(
            f"layer_types: got {types!s:.80}, {shared} shared; expected one of {_ORDER} for each of {layers} layers"
        )
    if raw["use_bidirectional_attention"] not in (None, "vision"):
        raise ConfigError(
            f"use_bidirectional_attention: got {raw['use_bidirectional_attention']!r}, which is not built; expected "
            "null or 'vision'"
        )

    # The last layer sees all, whatever the file says.
    types[-1] = "full_attention"
    kinds, kind_of = list[LayerKind](), []
    for kind in (_kind4(raw, types, layer, angles, regime) for layer in range(layers)):
        kinds += [kind] if kind not in kinds else []
        kind_of.append(kind)
    kinds.sort(key=lambda kind: (kind.name, kind.reads))
    if len({kind.name for kind in kinds}) == 1:
        kinds = [dataclasses.replace(kind, name="") for kind in kinds]
        kind_of = [dataclasses.replace(kind, name="") for kind in kind_of]
    bias, first = raw["attention_bias"], kinds[0]
    return read_decoder(
        raw | {"hidden_act": raw["hidden_activation"], "layer_types": None},
        first.rope,
        head_dim=first.head_dim,
        kv_heads=first.kv_heads,
        kinds=tuple(kinds),
        kind_of=tuple(kinds.index(kind) for kind in kind_of),
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        norm_weight="wide",
        layer_scale=True,
        attention_bias=bias,
        output_bias=bias,
        attention_scale=1.0,
        embedding_scale=need(raw, "hidden_size") ** 0.5,
        logit_cap=raw["final_logit_softcapping"],
        per_layer=raw["hidden_size_per_layer_input"] or None,
        per_layer_vocabulary=need(raw, "vocab_size_per_layer_input"),
        blank=raw["pad_token_id"] or 0,
        ahead_in_windows=raw["use_bidirectional_attention"] == "vision",
        experts=_read_experts4(raw) if raw["enable_moe_block"] else None,
    )


def _read_experts4(raw: Raw) -> ExpertConfig:
    """Reads Gemma 4's experts, which every layer has beside its MLP."""
    return ExpertConfig(
        experts=need(raw, "num_experts"),
        chosen=need(raw, "top_k_experts"),
        intermediate=need(raw, "moe_intermediate_size"),
        router="softmax",
        renormalise=True,
        beside=True,
    )


def _kind4(raw: Raw, types: list[str], layer: int, angles: str, regime: Regime) -> LayerKind:
    """Reads the kind of one layer of Gemma 4."""
    slides, layers = types[layer] == "sliding_attention", len(types)
    width, heads = need(raw, "head_dim"), raw["num_key_value_heads"] or need(raw, "num_attention_heads")
    # Released files say what the layers that see all have; transformers writes it layer by layer.
    own = {} if slides else {"head_dim": need(raw, "global_head_dim")}
    if not slides and raw["attention_k_eq_v"] and raw["num_global_key_value_heads"] is not None:
        own["num_key_value_heads"] = raw["num_global_key_value_heads"]
    if raw["per_layer_config"] is not None:
        own = raw["per_layer_config"].get(str(layer), {})
        if not isinstance(own, Mapping) or not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise ConfigError(
                f"per_layer_config: got {own!s:.80} of layer {layer}; expected head_dim, num_key_value_heads"
            )
    for name, value in own.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"per_layer_config: got {name} {value!r} of layer {layer}; expected a positive whole number"
            )

    width, reads = own.get("head_dim", width), layer >= layers - raw["num_kv_shared_layers"]
    return LayerKind(
        "local" if slides else "",
        _rope4(raw, types[layer], width, angles, regime),
        width,
        own.get("num_key_value_heads", heads),
        need(raw, "sliding_window") if slides else None,
        reads=reads,
        keys_are_values=raw["attention_k_eq_v"] and not slides,
        intermediate=2 * need(raw, "intermediate_size") if reads and raw["use_double_wide_mlp"] else None,
    )


def _rope4(raw: Raw, kind: str, head_dim: int, angles: str, regime: Regime) -> Rope:
    """Reads the rope of one kind of layers of Gemma 4."""
    defaults = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    tables = defaults if raw["rope_parameters"] is None else raw["rope_parameters"]
    if not set(tables) <= set(_ORDER) or not isinstance(tables.get(kind), Mapping):
        raise ConfigError(f"rope_parameters: got {tables!s:.80}; expected a table for {kind}")
    table = rope_table({"rope_parameters": tables[kind]})
    if table.get("rope_type") != "proportional":
        return read_rope({**raw, "rope_parameters": table}, head_dim, angles=angles, regime=regime, theta=None)
    others = sorted(set(table) - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"})
    share, factor = (1.0 if table.get(key) is None else table[key] for key in ("partial_rotary_factor", "factor"))
    if others or not table.get("rope_theta") or not 0 <= share <= 1:
        raise ConfigError(f"{kind}: got rope {table!s:.80}; expected a base and a share from 0 to 1 of 'proportional'")
    scaling = Scaling("proportional", factor, share=share)
    return Rope(float(table["rope_theta"]), head_dim, scaling=scaling, angles=angles)  # type: ignore[arg-type]
