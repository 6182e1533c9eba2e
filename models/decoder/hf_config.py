"""Reading Hugging Face configurations: ropes with their scaling, decoders, latent attention, experts.

Released files say `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both are read. The tables given here
went through `known_keys.complete`, which checks every key and fills in the absent ones. Source: transformers'
`modeling_rope_utils` and configuration classes.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.core import Rope, Scaling
from kvpatch_jax.errors import ConfigError

from .config import DecoderConfig, ExpertConfig, LatentConfig
from .known_keys import passed_over

Raw = Mapping[str, Any]
Regime = str | int | None

_KINDS = {"default": None, "mrope": None, "su": "longrope"}
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section"})
_YARN_KEYS = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
_SCALING_KEYS = {
    None: frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor"}) | _YARN_KEYS,
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
}
"""Of `rope_parameters`, by kind of scaling: what is read."""
_AXES = frozenset({"mrope_interleaved", "interleaved"})
_WITH_KV = ("full_attention", "sliding_attention")


def need(raw: Raw, *names: str) -> Any:
    """Returns the value of the first of these keys that is there and not null.

    Raises:
      ConfigError: none of them is.
    """
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise ConfigError(
        f"config.json: got no {' or '.join(map(repr, names))}; expected it for {raw.get('architectures')}"
    )


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
    sections: tuple[int, ...] | None = None,
) -> Rope:
    """Reads the rope of a text configuration.

    Args:
      raw: the text part of `config.json`.
      dim: head width; the part that rotates follows from `partial_rotary_factor` (`partial` where it is absent).
      regime: for longrope "short" (the default) or "long"; for dynamic a sequence length (the model's own by default).
      cached: "half" or "pairs", of the cached keys. order: of M-RoPE sections, where the configuration has them.
      theta: what an absent base means; None refuses. sections: what absent M-RoPE sections mean.

    Raises:
      ConfigError: a scaling or a key of it that is not known or no number, or a regime for a rope whose frequencies do
        not depend on length.
    """
    table = rope_table(raw)
    share = table.get("partial_rotary_factor", raw.get("partial_rotary_factor", partial))
    rotary = int(dim * (partial if share is None else share))
    # `rope_parameters` has the base inside, `rope_scaling` of released files beside it.
    base = table.get("rope_theta") or raw.get("rope_theta") or theta
    if base is None:
        raise ConfigError(f"config.json: got no 'rope_theta'; expected it for {raw.get('architectures')}")

    found = table.get("mrope_section", sections)
    return Rope(
        float(base),
        rotary,
        cached=cached,  # type: ignore[arg-type]
        sections=None if found is None else tuple(found),
        order=order,  # type: ignore[arg-type]
        width=None if rotary == dim else dim,
        scaling=read_scaling(raw, table, regime),
        angles=angles,  # type: ignore[arg-type]
    )


def rope_table(raw: Raw) -> Raw:
    """Returns `rope_scaling` of released files, or `rope_parameters`; empty where there are neither.

    Raises:
      ConfigError: something else than a table, or entries in it that are not numbers where numbers are expected.
    """
    for name in ("rope_scaling", "rope_parameters"):
        table = raw.get(name)
        if table is None or table == {}:
            continue
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name}: got {table!r}; expected a table")

        # JSON has one type for all numbers, and true and false are whole numbers to Python.
        for key, value in table.items():
            if key in ("mrope_section", "short_factor", "long_factor"):
                fits, wanted = isinstance(value, list | tuple) and all(map(_is_number, value)), "a list of numbers"
            elif key in ("rope_type", "type"):
                fits, wanted = isinstance(value, str), "a text"
            elif key in ("truncate", "mrope_interleaved", "interleaved"):
                fits, wanted = isinstance(value, bool), "true or false"
            else:
                fits, wanted = value is None or _is_number(value), "a number"
            if not fits:
                raise ConfigError(f"{name}: got {key} {value!r}; expected {wanted}")
        return table
    return {}


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool) and math.isfinite(entry)


def read_axial_theta(raw: Raw) -> float:
    """Returns the base of a vision tower's two-dimensional rope.

    Raises:
      ConfigError: a rope of another kind.
    """
    table = rope_table(raw)
    kind = table.get("rope_type", table.get("type", "axial"))
    others = sorted(set(table) - {"rope_type", "type", "rope_theta"})
    if kind not in ("axial", "default") or others:
        raise ConfigError(f"vision rope: got type {kind!r} with {others}; expected 'axial' with 'rope_theta' alone")
    return float(table.get("rope_theta") or raw["rope_theta"])


def read_scaling(raw: Raw, table: Raw, regime: Regime) -> Scaling | None:
    """Returns the scaling that `rope_parameters` (or `rope_scaling`) asks for, pinned to one regime; None for a
    plain rope.

    Raises:
      ConfigError: a kind or a key that is not known, a factor that is missing, or a regime that the kind has not.
    """
    name = table.get("rope_type", table.get("type", "default"))
    kind = _KINDS.get(name, name)
    if kind not in _SCALING_KEYS:
        raise ConfigError(f"rope type: got {name!r}; expected default, linear, llama3, yarn, longrope or dynamic")
    if regime is not None and kind not in ("longrope", "dynamic"):
        raise ConfigError(f"regime: got {regime!r} for rope type {name!r}, which has one; expected None")

    # What may change the frequencies and is not read is refused. A null says nothing; other kinds' keys do nothing.
    every = _ROPE_KEYS | _AXES | {"original_max_position_embeddings"} | frozenset().union(*_SCALING_KEYS.values())
    for key, value in table.items():
        if key not in every and value is not None and not passed_over(key):
            raise ConfigError(
                f"rope type {name!r}: got {key!r}: {value!r}, which is not known; expected one of "
                f"{', '.join(sorted(_SCALING_KEYS[kind] | _ROPE_KEYS))}"
            )
    if kind is None:
        return None

    # transformers derives a factor of YaRN that is null, and fails on one that is absent; of longrope it derives both.
    factor, longest = table.get("factor"), raw.get("max_position_embeddings")
    derived = kind == "longrope" or (kind == "yarn" and "factor" in table)
    name_of_original = "original_max_position_embeddings"
    original = raw.get(name_of_original) or table.get(name_of_original) or longest

    if factor is None and not derived:
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


def check_layer_kinds(raw: Raw, others: tuple[str, ...] = ()) -> None:
    """Refuses a configuration with layers that keep no KV, but for the kinds `others`.

    Raises:
      ConfigError: it names the first such layer and its kind, or a list that is not as long as there are layers.
    """
    for key in ("layer_types", "layers_block_type"):
        kinds = raw.get(key) or ()
        for layer, kind in enumerate(kinds):
            if kind not in (*_WITH_KV, "attention", *others):
                expected = (*_WITH_KV, *others)
                raise ConfigError(f"layer {layer}: got {kind!r}, which keeps no KV; expected one of {expected}")
        if kinds and len(kinds) != need(raw, "num_hidden_layers"):
            raise ConfigError(
                f"{key}: got {len(kinds)} layers; expected num_hidden_layers = {raw['num_hidden_layers']}"
            )
    if raw.get("linear_attn_config"):
        raise ConfigError("config.json: got 'linear_attn_config', and linear attention keeps no KV; expected none")


def read_window(raw: Raw, every_layer: bool = False) -> dict[str, Any]:
    """Returns the sliding window and the layers that slide (None: all of them), by `DecoderConfig`'s names.

    Families that switch it (`use_sliding_window`) slide in the layers from `max_window_layers` on, or in those that
    `layer_types` names; with `every_layer` in all. Where there is no switch, a window is for every layer.

    Raises:
      ConfigError: layers that slide without a window (transformers fails on these).
    """
    kinds, layers = raw.get("layer_types") or (), need(raw, "num_hidden_layers")
    switched = raw.get("use_sliding_window", True)
    window = raw.get("sliding_window") if switched else None
    if "sliding_attention" in kinds and not switched:
        raise ConfigError(
            f"layer_types: got 'sliding_attention' with use_sliding_window {switched!r}; expected true, or "
            "'full_attention' in every layer"
        )
    if window is None or every_layer or "use_sliding_window" not in raw:
        return {"window": window}

    if kinds:
        sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        from_layer = raw.get("max_window_layers")
        sliding = () if from_layer is None else tuple(range(from_layer, layers))

    if len(sliding) == layers:
        return {"window": window}
    return {"window": window, "window_layers": sliding} if sliding else {"window": None}


def read_decoder(raw: Raw, rope: Rope, **switches: Any) -> DecoderConfig:
    """Returns a decoder from the text part of `config.json`, its rope and what the family adds.

    Raises:
      ConfigError: a key that is missing, or a value that no decoder is built for.
    """
    linear = any(kind.linear is not None for kind in switches.get("kinds", ()))
    check_layer_kinds(raw, ("linear_attention",) if linear else ())
    heads, width = need(raw, "num_attention_heads"), need(raw, "hidden_size")
    shared = {
        "vocabulary": need(raw, "vocab_size"),
        "width": width,
        "layers": need(raw, "num_hidden_layers"),
        "heads": heads,
        # Released files of multi-head attention leave both out.
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "intermediate": need(raw, "intermediate_size"),
        "norm_epsilon": need(raw, "rms_norm_eps"),
        "activation": need(raw, "hidden_act"),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": read_dtype(raw),
    }
    return DecoderConfig(rope=rope, **shared | switches)


def read_dtype(raw: Raw) -> str:
    """Reads the dtype; "float32" where none is given."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


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


def read_softmax_experts(raw: Raw) -> ExpertConfig:
    """Reads Qwen3-MoE's experts: softmax, top-k, renormalised where the configuration says so; no shared expert.

    Raises:
      ConfigError: layers of two kinds that alternate.
    """
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"config.json: got mlp_only_layers {raw.get('mlp_only_layers')!r}, decoder_sparse_step "
            f"{raw.get('decoder_sparse_step')!r}; expected experts in every layer"
        )
    return ExpertConfig(
        experts=need(raw, "num_experts"),
        chosen=need(raw, "num_experts_per_tok"),
        intermediate=need(raw, "moe_intermediate_size"),
        router="softmax",
        renormalise=raw["norm_topk_prob"],
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
    if raw.get("scoring_func") not in (None, router):
        raise ConfigError(f"scoring_func: got {raw['scoring_func']!r}; expected {router!r}")

    methods = ("noaux_tc",) if router == "sigmoid" else ("greedy", "group_limited_greedy")
    if raw.get("topk_method") not in (None, *methods):
        raise ConfigError(f"topk_method: got {raw['topk_method']!r}; expected one of {methods}")

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
