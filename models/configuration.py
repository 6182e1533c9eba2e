"""Reading Hugging Face configurations: ropes with their scaling, decoders, latent attention, experts.

Released files say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both are read. Source: transformers'
`modeling_rope_utils` and configuration classes.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.rope import Rope
from kvpatch_jax.scaling import Scaling

from .attention import LatentConfig
from .decoder import DecoderConfig
from .moe import ExpertConfig

Raw = Mapping[str, Any]
Regime = str | int | None

_KINDS = {"default": None, "mrope": None, "su": "longrope"}
_WITH_KV = ("full_attention", "sliding_attention")


def need(raw: Raw, *names: str) -> Any:
    """The value of the first of these keys that is there and not null.

    Raises:
      ConfigError: none of them is.
    """
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise ConfigError(f"config.json has no {' or '.join(map(repr, names))}; expected it for {raw.get('architectures')}")


def read_rope(
    raw: Raw,
    dim: int,
    *,
    angles: str,
    regime: Regime = None,
    partial: float = 1.0,
    cached: str = "half",
    order: str = "blocked",
    theta: float | None = 1e4,
) -> Rope:
    """The rope of a text configuration.

    Args:
      raw: the text part of `config.json`.
      dim: head width; the part that rotates follows from `partial_rotary_factor` (`partial` where it is absent).
      regime: for longrope "short" (the default) or "long"; for dynamic a sequence length (the model's own by default).
      cached: "half" or "pairs", of the cached keys. order: of M-RoPE sections, where the configuration has them.
      theta: what an absent base means; None refuses.

    Raises:
      ConfigError: a scaling that is not known, or a regime for a rope whose frequencies do not depend on length.
    """
    table = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = table.get("partial_rotary_factor", raw.get("partial_rotary_factor", partial))
    rotary = int(dim * (partial if share is None else share))
    base = table.get("rope_theta") or raw.get("rope_theta") or theta
    if base is None:
        raise ConfigError(f"config.json has no 'rope_theta'; expected it for {raw.get('architectures')}")
    sections = table.get("mrope_section")
    return Rope(
        float(base),
        rotary,
        cached=cached,  # type: ignore[arg-type]
        sections=None if sections is None else tuple(sections),
        order=order,  # type: ignore[arg-type]
        width=None if rotary == dim else dim,
        scaling=read_scaling(raw, table, regime),
        angles=angles,  # type: ignore[arg-type]
    )


def read_scaling(raw: Raw, table: Raw, regime: Regime) -> Scaling | None:
    """The scaling that `rope_parameters` (or `rope_scaling`) asks for, pinned to one regime."""
    name = table.get("rope_type", table.get("type", "default"))
    kind = _KINDS.get(name, name)
    if regime is not None and kind not in ("longrope", "dynamic"):
        raise ConfigError(f"regime {regime!r} for rope type {name!r}, which has one; expected None")
    if kind is None:
        return None
    longest = raw.get("max_position_embeddings")
    original = raw.get("original_max_position_embeddings") or table.get("original_max_position_embeddings") or longest
    factor = table.get("factor") or (longest / original if longest and original else 1.0)
    common: dict[str, Any] = {"factor": factor, "original": original, "attention_factor": table.get("attention_factor")}
    if kind == "linear":
        return Scaling("linear", factor)
    if kind == "llama3":
        bands = {name: need(table, name) for name in ("low_freq_factor", "high_freq_factor")}
        return Scaling("llama3", **common | {"attention_factor": None}, **bands)
    if kind == "yarn":
        optional = {name: table[name] for name in ("mscale", "mscale_all_dim", "truncate") if name in table}
        fast, slow = float(table.get("beta_fast") or 32), float(table.get("beta_slow") or 1)
        return Scaling("yarn", **common, beta_fast=fast, beta_slow=slow, **optional)
    if kind == "longrope":
        factors: dict[str, Any] = {name: tuple(need(table, name)) for name in ("short_factor", "long_factor")}
        return Scaling("longrope", **common, **factors, regime=_longrope_regime(regime))
    if kind == "dynamic":
        if isinstance(regime, str):
            raise ConfigError(f"regime {regime!r} for a dynamic rope; expected a sequence length")
        return Scaling("dynamic", factor, longest, length=regime or longest)
    raise ConfigError(f"rope type {name!r} is not known; expected default, linear, llama3, yarn, longrope or dynamic")


def _longrope_regime(regime: Regime) -> Any:
    if regime not in (None, "short", "long"):
        raise ConfigError(f"regime {regime!r} for longrope; expected 'short' or 'long'")
    return regime or "short"


def check_layer_kinds(raw: Raw) -> None:
    """Refuses a configuration with layers that keep no KV.

    Raises:
      ConfigError: it names the first such layer and its kind.
    """
    for key in ("layer_types", "layers_block_type"):
        for layer, kind in enumerate(raw.get(key) or ()):
            if kind not in (*_WITH_KV, "attention"):
                raise ConfigError(f"layer {layer} is {kind!r}, which keeps no KV; expected one of {_WITH_KV}")
    if raw.get("linear_attn_config"):
        raise ConfigError("config.json has 'linear_attn_config': linear attention keeps no KV; expected none")


def read_window(raw: Raw, default: bool) -> int | None:
    """How many keys may be attended over at most: the sliding window, or None where there is none.

    `default` is what an absent `use_sliding_window` means.
    """
    kinds = raw.get("layer_types")
    sliding = raw.get("use_sliding_window", default) if not kinds else "sliding_attention" in kinds
    return raw.get("sliding_window") if sliding else None


def read_decoder(raw: Raw, rope: Rope, **switches: Any) -> DecoderConfig:
    """A decoder from the text part of `config.json`, its rope and what the family adds.

    Raises:
      ConfigError: a key that is missing, or a value that no decoder is built for.
    """
    check_layer_kinds(raw)
    heads, width = need(raw, "num_attention_heads"), need(raw, "hidden_size")
    shared = {
        "vocabulary": need(raw, "vocab_size"),
        "width": width,
        "layers": need(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "intermediate": need(raw, "intermediate_size"),
        "norm_epsilon": raw.get("rms_norm_eps", 1e-6),
        "activation": raw.get("hidden_act", "silu"),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": read_dtype(raw),
    }
    return DecoderConfig(rope=rope, **shared | switches)


def read_dtype(raw: Raw) -> str:
    """ "float32" where none is given."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def read_latent(raw: Raw, rope: Rope, reads_pairs: bool) -> LatentConfig:
    """Latent attention; YaRN's `mscale_all_dim` enters the softmax scale squared (DeepSeek-V3's own rule)."""
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


def read_softmax_experts(raw: Raw) -> ExpertConfig:
    """Qwen3-MoE's experts: softmax, top-k, renormalised where the configuration says so; no shared expert.

    Raises:
      ConfigError: layers of two kinds that alternate.
    """
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"mlp_only_layers {raw.get('mlp_only_layers')!r}, decoder_sparse_step {raw.get('decoder_sparse_step')!r}: "
            "expected experts in every layer"
        )
    return ExpertConfig(
        experts=need(raw, "num_experts", "num_local_experts"),
        chosen=need(raw, "num_experts_per_tok"),
        intermediate=need(raw, "moe_intermediate_size"),
        router="softmax",
        renormalise=bool(raw.get("norm_topk_prob", True)),
    )


def read_deepseek_experts(raw: Raw, router: str) -> ExpertConfig | None:
    """DeepSeek's experts: V2 "softmax" (greedy or limited to groups), V3 and Kimi "sigmoid"; None where there are none.

    Raises:
      ConfigError: a routing that is not built.
    """
    if not raw.get("n_routed_experts"):
        return None
    limited = router == "sigmoid" or raw.get("topk_method") == "group_limited_greedy"
    if raw.get("moe_layer_freq", 1) != 1 or (router == "softmax" and raw.get("norm_topk_prob")):
        raise ConfigError(
            f"moe_layer_freq {raw.get('moe_layer_freq')!r}, norm_topk_prob {raw.get('norm_topk_prob')!r}: expected "
            "experts in every layer from first_k_dense_replace on, and softmax weights as they are"
        )
    if raw.get("scoring_func", router) != router:
        raise ConfigError(f"scoring_func {raw['scoring_func']!r}; expected {router!r}")
    inner = need(raw, "moe_intermediate_size")
    return ExpertConfig(
        experts=raw["n_routed_experts"],
        chosen=need(raw, "num_experts_per_tok"),
        intermediate=inner,
        router=router,  # type: ignore[arg-type]
        renormalise=router == "sigmoid" and bool(raw.get("norm_topk_prob", True)),
        scaling=float(raw.get("routed_scaling_factor", 1.0)),
        groups=(raw.get("n_group") or 1) if limited else 1,
        chosen_groups=(raw.get("topk_group") or 1) if limited else 1,
        shared=inner * (raw.get("n_shared_experts") or 0),
        dense_layers=raw.get("first_k_dense_replace") or 0,
    )
