"""Decoders from the text part of `config.json`, as transformers' configuration classes complete it.

Source: transformers' `modeling_rope_utils` and the modeling files of each family.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.core import Rope, Scaling
from kvpatch_jax.errors import ConfigError

from .config import DecoderConfig, ExpertConfig, LatentConfig

Raw = Mapping[str, Any]
Regime = str | int | None

_KINDS = {"default": None, "mrope": None, "su": "longrope"}
_SCALED = ("linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
    "interleaved", "factor", "attention_factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor",
)  # fmt: skip


def need(raw: Raw, *names: str) -> Any:
    """Returns the value of the first of these keys that is there and not null.

    Raises:
      ConfigError: none of them is.
    """
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise ConfigError(f"config.json: got no {' or '.join(map(repr, names))}; expected it for {raw.get('model_type')}")


def read_rope(
    raw: Raw,
    dim: int,
    *,
    angles: str,
    regime: Regime = None,
    cached: str = "half",
    order: str = "blocked",
    sections: tuple[int, ...] | None = None,
) -> Rope:
    """Reads the rope of a text configuration from its `rope_parameters`.

    Args:
      raw: the text part of `config.json`.
      dim: head width, of which `partial_rotary_factor` rotates.
      regime: for longrope "short" (the default) or "long"; for dynamic a sequence length (the model's own by default).
      cached: "half" or "pairs", of the cached keys. order: of M-RoPE sections, where the configuration has them.
      sections: what absent M-RoPE sections mean.

    Raises:
      ConfigError: a scaling or a key of it that is not known or no number, or a regime for a rope whose frequencies do
        not depend on length.
    """
    table = check_rope(need(raw, "rope_parameters"))
    share = table.get("partial_rotary_factor")
    rotary = int(dim * (1.0 if share is None else share))
    found = table.get("mrope_section", sections)
    return Rope(
        float(need(table, "rope_theta")),
        rotary,
        cached=cached,  # type: ignore[arg-type]
        sections=None if found is None else tuple(found),
        order=order,  # type: ignore[arg-type]
        width=None if rotary == dim else dim,
        scaling=read_scaling(raw, table, regime),
        angles=angles,  # type: ignore[arg-type]
    )


def check_rope(table: Any) -> Raw:
    """Returns `rope_parameters`.

    Raises:
      ConfigError: no table, a key that is not known, or an entry that is neither a number, a switch nor a name.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"rope_parameters: got {table!r:.60}; expected a table")
    for key, value in table.items():
        if value is None:
            continue
        if key not in _ROPE_KEYS:
            raise ConfigError(f"rope_parameters: got {key!r}: {value!r:.60}; expected one of {sorted(_ROPE_KEYS)}")
        numbers = value if isinstance(value, list | tuple) else [value]
        named = key in ("rope_type", "type") and isinstance(value, str)
        if not named and not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ConfigError(f"rope_parameters: got {key} {value!r:.60}; expected a number")
    return table


def read_axial_theta(raw: Raw) -> float:
    """Returns the base of a vision tower's two-dimensional rope.

    Raises:
      ConfigError: a rope of another kind.
    """
    table = check_rope(need(raw, "rope_parameters"))
    kind, others = table.get("rope_type", "axial"), sorted(set(table) - {"rope_type", "type", "rope_theta"})
    if kind not in ("axial", "default") or others:
        raise ConfigError(f"vision rope: got type {kind!r} with {others}; expected 'axial' with 'rope_theta' alone")
    return float(need(table, "rope_theta"))


def read_scaling(raw: Raw, table: Raw, regime: Regime) -> Scaling | None:
    """Returns the scaling that `rope_parameters` asks for, pinned to one regime; None for a plain rope.

    Raises:
      ConfigError: a kind that is not known, a factor that is missing, or a regime that the kind has not.
    """
    name = table.get("rope_type", "default")
    kind = _KINDS.get(name, name)
    if kind is not None and kind not in _SCALED:
        raise ConfigError(f"rope type: got {name!r}; expected default, {', '.join(_SCALED)}")
    if regime is not None and kind not in ("longrope", "dynamic"):
        raise ConfigError(f"regime: got {regime!r} for rope type {name!r}, which has one; expected None")
    if kind is None:
        return None

    # A null factor of YaRN and longrope is derived.
    factor, longest = table.get("factor"), raw.get("max_position_embeddings")
    original = table.get("original_max_position_embeddings") or longest
    if factor is None and kind not in ("longrope", "yarn"):
        raise ConfigError(f"rope type {name!r}: got no 'factor'; expected a number")
    if factor is None:
        factor = longest / original if longest and original else 1.0

    # Each kind has the fields that its formula reads, and no others.
    if kind == "linear":
        return Scaling("linear", factor)
    if kind == "dynamic":
        if isinstance(regime, str):
            raise ConfigError(f"regime: got {regime!r} for a dynamic rope; expected a sequence length")
        # Of this kind alone the original length is the longest that the model was trained on.
        return Scaling("dynamic", factor, longest, length=regime or longest)
    if kind == "llama3":
        bands = {band: need(table, band) for band in ("low_freq_factor", "high_freq_factor")}
        return Scaling("llama3", factor, original, **bands)
    if kind == "yarn":
        return Scaling(
            "yarn",
            factor,
            original,
            attention_factor=table.get("attention_factor"),
            beta_fast=float(table.get("beta_fast") or 32),
            beta_slow=float(table.get("beta_slow") or 1),
            **{field: table[field] for field in ("mscale", "mscale_all_dim", "truncate") if field in table},
        )
    if regime not in (None, "short", "long"):
        raise ConfigError(f"regime: got {regime!r} for longrope; expected 'short' or 'long'")
    return Scaling(
        "longrope",
        factor,
        original,
        attention_factor=table.get("attention_factor"),
        short_factor=tuple(need(table, "short_factor")),
        long_factor=tuple(need(table, "long_factor")),
        regime="long" if regime == "long" else "short",
    )


def read_window(raw: Raw) -> dict[str, Any]:
    """Returns the sliding window and the layers that slide (None: all of them), by `DecoderConfig`'s names.

    Raises:
      ConfigError: a layer of another kind than these two, or layers that slide without a window.
    """
    kinds, window = raw.get("layer_types") or (), raw.get("sliding_window")
    others = set(kinds) - {"full_attention", "sliding_attention"}
    if others:
        raise ConfigError(f"layer_types: got {sorted(others)}; expected 'full_attention' or 'sliding_attention'")
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if sliding and window is None:
        raise ConfigError(
            "layer_types: got 'sliding_attention' without a sliding_window; expected a window, switched on"
        )
    if window is None or len(sliding) == len(kinds):
        return {"window": window}
    return {"window": window, "window_layers": sliding} if sliding else {"window": None}


def read_decoder(raw: Raw, rope: Rope, **switches: Any) -> DecoderConfig:
    """Returns a decoder from the text part of `config.json`, its rope and what the family adds.

    Raises:
      ConfigError: a key that is missing, or a value that no decoder is built for.
    """
    heads, width = need(raw, "num_attention_heads"), need(raw, "hidden_size")
    shared = {
        "vocabulary": need(raw, "vocab_size"),
        "width": width,
        "layers": need(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "intermediate": raw.get("intermediate_size") or need(raw, "moe_intermediate_size"),
        "norm_epsilon": need(raw, "rms_norm_eps"),
        "activation": need(raw, "hidden_act", "hidden_activation"),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": raw.get("dtype") or "float32",
    }
    return DecoderConfig(rope=rope, **shared | switches)


def read_latent(raw: Raw, rope: Rope, reads_pairs: bool) -> LatentConfig:
    """Reads latent attention; YaRN's `mscale_all_dim` enters the softmax scale squared (DeepSeek-V3's own rule)."""
    scaling, factor = rope.scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim:
        factor = (0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0)) + 1.0) ** 2
    return LatentConfig(
        latent=need(raw, "kv_lora_rank"),
        rope_dim=rope.dim,
        plain_dim=need(raw, "qk_nope_head_dim"),
        value_dim=need(raw, "v_head_dim"),
        query_rank=raw.get("q_lora_rank"),
        reads_pairs=reads_pairs,
        scale_factor=factor,
    )


def read_softmax_experts(raw: Raw, renormalise: bool = True) -> ExpertConfig:
    """Reads Qwen3-MoE's experts: softmax and top-k; no shared expert.

    Raises:
      ConfigError: layers of two kinds that alternate.
    """
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"config.json: got mlp_only_layers {raw.get('mlp_only_layers')!r}, decoder_sparse_step "
            f"{raw.get('decoder_sparse_step')!r}; expected experts in every layer"
        )
    return ExpertConfig(
        experts=need(raw, "num_local_experts", "num_experts"),
        chosen=need(raw, "num_experts_per_tok"),
        intermediate=need(raw, "moe_intermediate_size"),
        router="softmax",
        renormalise=renormalise,
    )


def read_deepseek_experts(raw: Raw, router: str) -> ExpertConfig | None:
    """Reads DeepSeek's experts: V2 "softmax" (greedy or limited to groups), V3 and Kimi "sigmoid"; None where there
    are none.

    Raises:
      ConfigError: a routing that is not built.
    """
    if not raw.get("n_routed_experts"):
        return None

    # Only group-limited routing reads the groups; the files of others name them all the same.
    limited = router == "sigmoid" or raw.get("topk_method") == "group_limited_greedy"
    if raw.get("moe_layer_freq", 1) != 1 or (router == "softmax" and raw.get("norm_topk_prob")):
        raise ConfigError(
            f"config.json: got moe_layer_freq {raw.get('moe_layer_freq')!r}, norm_topk_prob "
            f"{raw.get('norm_topk_prob')!r}; expected experts in every layer from first_k_dense_replace on, and "
            "softmax weights as they are"
        )
    methods = ("noaux_tc",) if router == "sigmoid" else ("greedy", "group_limited_greedy")
    for key, built in (("scoring_func", (router,)), ("topk_method", methods)):
        if raw.get(key) not in (None, *built):
            raise ConfigError(f"{key}: got {raw[key]!r}; expected one of {built}")

    inner = need(raw, "moe_intermediate_size")
    return ExpertConfig(
        experts=raw["n_routed_experts"],
        chosen=need(raw, "num_experts_per_tok"),
        intermediate=inner,
        router=router,  # type: ignore[arg-type]
        renormalise=router == "sigmoid" and raw["norm_topk_prob"],
        scaling=float(raw["routed_scaling_factor"]),
        groups=(raw.get("n_group") or 1) if limited else 1,
        chosen_groups=(raw.get("topk_group") or 1) if limited else 1,
        shared=inner * (raw.get("n_shared_experts") or 0),
        dense_layers=raw.get("first_k_dense_replace") or 0,
    )
