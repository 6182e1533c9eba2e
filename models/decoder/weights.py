"""Where a decoder's tensors go, for families that name them as Llama does: file name → parameter path."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from kvpatch_jax.errors import WeightsError

from ..checkpoints import TRANSPOSE, ParamPath, Part, TensorEntry, fused_entries, module_entries
from .config import DecoderConfig, ExpertConfig, LayerKind, LinearConfig

FusedExperts = Literal["no", "rows", "columns"]

LAYER = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
    # Gemma 4: norms of a layer with experts beside its MLP, and the maps of what a layer takes of each token.
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "mlp_inner_norm": "post_feedforward_layernorm_1",
    "token_gate": "per_layer_input_gate",
    "token_output": "per_layer_projection",
    "token_norm": "post_per_layer_input_norm",
}
"""Our names of a layer's parts to Llama's, and to GLM-4-0414's and Gemma 4's of those that Llama has not."""

GROUPED = {
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
}
LATENT = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "down": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "up": "kv_b_proj",
    "output": "o_proj",
}
LINEAR = {
    "inputs": "in_proj_qkvz",
    "rates": "in_proj_ba",
    "gate": "in_proj_z",
    "strength": "in_proj_b",
    "decay": "in_proj_a",
    "output": "out_proj",
    "norm": "norm",
}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def decoder_entries(
    config: DecoderConfig,
    *,
    prefix: str = "model.",
    head: str = "lm_head",
    root: ParamPath = ("decoder",),
    fused: tuple[str, ...] = (),
    fused_experts: FusedExperts = "no",
    norms: Mapping[str, str] | None = None,
) -> list[TensorEntry]:
    """Returns every entry of a decoder.

    Args:
      prefix, head: what the tensors' names begin with, and the output head's name.
      root: where the decoder is in the parameters.
      fused: which of "qkv" (`qkv_proj`) and "gate_up" (`gate_up_proj`) are one tensor in the file.
      fused_experts: "no" (a tensor per expert), "rows" (`experts.gate_up_proj` [E, 2I, D], `down_proj` [E, D, I]) or
        "columns" (transposed: [E, D, 2I] and [E, I, D], as Qwen3-VL-MoE was released).
      norms: what the file calls norms of a layer that it calls otherwise than `LAYER`.
    """
    tops = {"norm": "norm", "token_map": "per_layer_model_projection", "token_norm": "per_layer_projection_norm"}
    entries = [
        TensorEntry(f"{prefix}embed_tokens.weight", (*root, "embedding")),
        TensorEntry(f"{prefix}embed_tokens_per_layer.weight", (*root, "token_table")),
        *module_entries(prefix.removesuffix("."), root, tops),
        *module_entries("", root, {"head": head}),
    ]
    for name, layers in config.stacks:
        kind, layer, path = config.layer_kinds[layers[0]], f"{prefix}layers.{{layer}}", (*root, name)
        experts = None if name == "dense_layers" else config.experts
        parts = module_entries(layer, path, LAYER | dict(norms or {}))
        parts.append(TensorEntry(f"{layer}.layer_scalar", (*path, "scale")))
        if kind.linear is not None:
            parts += _linear(kind.linear, f"{layer}.linear_attn", (*path, "attention"))
        else:
            parts += _attention(config, kind, f"{layer}.self_attn", (*path, "attention"), fused)
        if experts is None or experts.beside:
            parts += _mlp(config, kind, f"{layer}.mlp", (*path, "mlp"), fused)
        if experts is not None and experts.beside:
            parts += _experts_beside(experts.intermediate, layer, (*path, "experts"))
        elif experts is not None:
            parts += _experts(experts, f"{layer}.mlp", (*path, "mlp"), fused_experts)
        entries += [dataclasses.replace(entry, numbers=layers) for entry in parts]
    return entries


def expert_layout(
    config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], prefix: str, default: FusedExperts = "no"
) -> FusedExperts:
    """Returns how a file holds its experts, as its first layer of them shows; `default` where it has none of them (or
    is about to be written).

    The two fused layouts are told apart by the shapes of both tensors of a layer. One of the two may be as long as wide
    (2I = D or I = D), never both, so that they always decide.

    Args:
      shapes: of the file's tensors. prefix: as for `decoder_entries`.

    Raises:
      WeightsError: fused tensors of neither layout.
    """
    if config.experts is None:
        return default
    name = f"{prefix}layers.{config.dense_layers}.mlp.experts"
    gate_up, down = shapes.get(f"{name}.gate_up_proj"), shapes.get(f"{name}.down_proj")
    if gate_up is None or down is None:
        return "no" if f"{name}.0.gate_proj.weight" in shapes else default

    count, width, inner = config.experts.experts, config.width, config.experts.intermediate
    layouts: dict[tuple[tuple[int, ...], ...], FusedExperts] = {
        ((count, 2 * inner, width), (count, width, inner)): "rows",
        ((count, width, 2 * inner), (count, inner, width)): "columns",
    }
    if (gate_up, down) not in layouts:
        expected = " or ".join(f"{first} and {second}" for first, second in layouts)
        raise WeightsError(f"{name}: got gate_up_proj {gate_up} and down_proj {down}; expected {expected}")
    return layouts[gate_up, down]


def _attention(
    config: DecoderConfig, kind: LayerKind, name: str, path: ParamPath, fused: tuple[str, ...]
) -> list[TensorEntry]:
    """Returns the entries of grouped-query, multi-head or latent attention."""
    if config.latent is not None:
        query = "q_proj" if config.latent.query_rank is None else "q_b_proj"
        return module_entries(name, path, LATENT | {"query": query})
    if "qkv" not in fused:
        return module_entries(name, path, GROUPED | {part: f"{part[0]}_proj" for part in ("query", "key", "value")})
    heads = {"query": config.heads, "key": kind.kv_heads, "value": kind.kv_heads}
    rows = {part: count * kind.head_dim for part, count in heads.items()}
    return fused_entries(f"{name}.qkv_proj", path, rows) + module_entries(name, path, GROUPED)


def _linear(config: LinearConfig, name: str, path: ParamPath) -> list[TensorEntry]:
    """Returns the entries of linear attention."""
    entries = module_entries(name, path, LINEAR)
    entries += [
        TensorEntry(f"{name}.A_log", (*path, "decay_rate")),
        TensorEntry(f"{name}.dt_bias", (*path, "decay_bias")),
    ]
    if not config.fused:
        entries += fused_entries(f"{name}.in_proj_qkv", path, config.widths)

    # The convolution's weights are one tensor, [C, 1, taps].
    start, size = 0, sum(config.widths.values())
    for part, width in config.widths.items():
        piece, start = Part(start, start + width, size), start + width
        shape = (width, 1, config.convolution)
        entries.append(TensorEntry(f"{name}.conv1d.weight", (*path, f"{part}_taps"), file_shape=shape, part=piece))
    return entries


def _mlp(
    config: DecoderConfig, kind: LayerKind, name: str, path: ParamPath, fused: tuple[str, ...]
) -> list[TensorEntry]:
    if "gate_up" not in fused:
        return module_entries(name, path, MLP)
    inner = kind.intermediate or config.intermediate
    rows = {"gate": inner, "up": inner}
    return fused_entries(f"{name}.gate_up_proj", path, rows) + module_entries(name, path, {"down": "down_proj"})


def _experts_beside(inner: int, layer: str, path: ParamPath) -> list[TensorEntry]:
    """Returns the entries of a mixture beside an MLP: its router and its experts, all in one tensor."""
    return [
        *module_entries(layer, path, {"router": "router.proj"}),
        TensorEntry(f"{layer}.router.scale", (*path, "router_norm", "weight")),
        TensorEntry(f"{layer}.router.per_expert_scale", (*path, "factors")),
        *_fused_experts(f"{layer}.experts", path, inner, "rows"),
    ]


def _experts(experts: ExpertConfig, name: str, path: ParamPath, fused: FusedExperts) -> list[TensorEntry]:
    """Returns the entries of a mixture: its router, its experts and those that every token takes."""
    entries = module_entries(name, path, {"router": "gate", "shared_gate": "shared_expert_gate"})
    entries.append(TensorEntry(f"{name}.gate.e_score_correction_bias", (*path, "correction")))
    shared = "shared_expert" if experts.shared_gate else "shared_experts"
    entries += module_entries(f"{name}.{shared}", (*path, "shared"), MLP)
    if fused != "no":
        return entries + _fused_experts(f"{name}.experts", path, experts.intermediate, fused)
    pattern = f"{name}.experts.{{expert}}"
    return entries + [
        TensorEntry(f"{pattern}.{theirs}.weight", (*path, part), TRANSPOSE) for part, theirs in MLP.items()
    ]


def _fused_experts(name: str, path: ParamPath, inner: int, fused: FusedExperts) -> list[TensorEntry]:
    """Returns the entries of all experts of a layer that are two tensors in the file."""
    # Gate and up are one tensor, one behind the other: by rows as transformers writes them, or by columns as released.
    axis, permute = (1, (0, 2, 1)) if fused == "rows" else (2, None)
    entries = [TensorEntry(f"{name}.down_proj", (*path, "down"), permute)]
    for number, part in enumerate(("gate", "up")):
        piece = Part(number * inner, (number + 1) * inner, 2 * inner, axis)
        entries.append(TensorEntry(f"{name}.gate_up_proj", (*path, part), permute, part=piece))
    return entries
