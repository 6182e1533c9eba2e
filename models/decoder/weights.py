"""Where a decoder's tensors go, for families that name them as Llama does: file name → parameter path."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from kvpatch_jax.errors import WeightsError

from ..checkpoints import ParamPath, Part, TensorEntry
from .config import DecoderConfig, LayerKind, LinearConfig

TRANSPOSE = (1, 0)
FusedExperts = Literal["no", "rows", "columns"]

NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
"""Our names of a layer's norms to Llama's and, of those behind attention and MLP, GLM-4-0414's."""

TOKEN_MAPS = {"token_gate": "per_layer_input_gate", "token_output": "per_layer_projection"}
"""What Gemma 4 calls the maps of what a layer takes of each token."""

BESIDE_NORMS = {
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "mlp_inner_norm": "post_feedforward_layernorm_1",
}
"""What Gemma 4 calls the norms of a layer with experts beside its MLP."""

_LAYOUTS = {"no": "one tensor per expert", "rows": "fused as [E, 2I, D]", "columns": "fused as [E, D, 2I]"}


def linear_entries(
    name: str, path: ParamPath, *, bias: bool = True, stack: bool = False, offset: int = 0
) -> list[TensorEntry]:
    """Returns the kernel (and bias) of a linear map called `name`; in the file kernels are [out, in]."""
    entries = [TensorEntry(f"{name}.weight", (*path, "kernel"), permute=TRANSPOSE, stack=stack, offset=offset)]
    return [*entries, TensorEntry(f"{name}.bias", (*path, "bias"), stack=stack, offset=offset)] if bias else entries


def fused_entries(
    name: str, path: ParamPath, parts: dict[str, int], *, bias: bool = False, offset: int = 0
) -> list[TensorEntry]:
    """Returns linear maps (name → rows) that lie one behind the other in one tensor of the file."""
    entries, start, size = [], 0, sum(parts.values())
    for part, rows in parts.items():
        piece = Part(start, start + rows, size)
        kernel, start = (*path, part, "kernel"), start + rows
        entries.append(TensorEntry(f"{name}.weight", kernel, permute=TRANSPOSE, stack=True, part=piece, offset=offset))
        if bias:
            entries.append(TensorEntry(f"{name}.bias", (*path, part, "bias"), stack=True, part=piece, offset=offset))
    return entries


def norm_entry(name: str, path: ParamPath, offset: int = 0) -> TensorEntry:
    """Returns the weight of a norm in a stack of layers."""
    return TensorEntry(f"{name}.weight", (*path, "weight"), stack=True, offset=offset)


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
      norms: what the file calls norms of a layer that it calls otherwise than `NORMS`.
    """
    entries = [
        TensorEntry(f"{prefix}embed_tokens.weight", (*root, "embedding")),
        TensorEntry(f"{prefix}norm.weight", (*root, "norm", "weight")),
    ]
    names = {
        ours: theirs for ours, theirs in (NORMS | dict(norms or {})).items() if config.post_norms or "post" not in ours
    }

    # Layers of the upper stack are counted from its first one; `offset` is what the file counts below it.
    for name, layers in config.stacks:
        kind, layer, path = config.layer_kinds[layers[0]], f"{prefix}layers.{{layer}}", (*root, name)
        # Layers that do not follow one another are named by their numbers.
        together = layers == tuple(range(layers[0], layers[0] + len(layers)))
        offset = layers[0] if together else 0
        before = len(entries)
        entries += [norm_entry(f"{layer}.{theirs}", (*path, ours), offset) for ours, theirs in names.items()]
        if kind.linear is not None:
            entries += _linear(kind.linear, f"{layer}.linear_attn", (*path, "attention"), offset)
        elif config.latent is None:
            entries += _grouped(config, kind, f"{layer}.self_attn", (*path, "attention"), fused, offset)
        else:
            entries += _latent(config, f"{layer}.self_attn", (*path, "attention"), fused, offset)
        if config.experts is None or name == "dense_layers" or config.experts.beside:
            inner = kind.intermediate or config.intermediate
            entries += _mlp(config, f"{layer}.mlp", (*path, "mlp"), inner, fused, offset)
        else:
            entries += _experts(config, f"{layer}.mlp", (*path, "mlp"), fused_experts, offset)

        if config.experts is not None and config.experts.beside:
            entries += _experts_beside(config, layer, path, offset)
        if config.layer_scale:
            entries.append(TensorEntry(f"{layer}.layer_scalar", (*path, "scale"), stack=True, offset=offset))
        if config.per_layer is not None:
            for ours, theirs in TOKEN_MAPS.items():
                entries += linear_entries(f"{layer}.{theirs}", (*path, ours), bias=False, stack=True, offset=offset)
            entries.append(norm_entry(f"{layer}.post_per_layer_input_norm", (*path, "token_norm"), offset))
        if not together:
            own = (dataclasses.replace(entry, numbers=layers) for entry in entries[before:])
            entries[before:] = own

    if config.per_layer is not None:
        entries.append(TensorEntry(f"{prefix}embed_tokens_per_layer.weight", (*root, "token_table")))
        entries += linear_entries(f"{prefix}per_layer_model_projection", (*root, "token_map"), bias=False)
        entries.append(TensorEntry(f"{prefix}per_layer_projection_norm.weight", (*root, "token_norm", "weight")))

    if config.tied_embeddings:
        return entries
    return entries + linear_entries(head, (*root, "head"), bias=False)


def expert_layout(
    config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], prefix: str, default: FusedExperts = "no"
) -> FusedExperts:
    """Returns how a file holds its experts; `default` where it has none of them (or is about to be written).

    The two fused layouts are told apart by the shapes of both tensors of a layer. One of the two may be as long as wide
    (2I = D or I = D), never both, so that they always decide.

    Args:
      shapes: of the file's tensors. prefix: as for `decoder_entries`.

    Raises:
      WeightsError: layers of different layouts, or fused tensors of neither.
    """
    experts, found = config.experts, dict[int, FusedExperts]()
    if experts is None:
        return default

    count, width, inner = experts.experts, config.width, experts.intermediate
    layouts: dict[tuple[tuple[int, ...], ...], FusedExperts] = {
        ((count, 2 * inner, width), (count, width, inner)): "rows",
        ((count, width, 2 * inner), (count, inner, width)): "columns",
    }

    for layer in range(config.dense_layers, config.layers):
        name = f"{prefix}layers.{layer}.mlp.experts"
        gate_up, down = shapes.get(f"{name}.gate_up_proj"), shapes.get(f"{name}.down_proj")
        single = f"{name}.0.gate_proj.weight"

        if gate_up is None or down is None:
            found |= {layer: "no"} if single in shapes else {}
        elif single in shapes:
            raise WeightsError(f"{name}: got gate_up_proj and {single}; expected the experts once")
        elif (gate_up, down) not in layouts:
            expected = " or ".join(f"{first} and {second}" for first, second in layouts)
            raise WeightsError(f"{name}: got gate_up_proj {gate_up} and down_proj {down}; expected {expected}")
        else:
            found[layer] = layouts[gate_up, down]

    first = next(iter(found.items()), None)
    other = next((item for item in found.items() if item[1] != (first or item)[1]), None)
    if first is not None and other is not None:
        raise WeightsError(
            f"{prefix}layers.{first[0]}: got experts {_LAYOUTS[first[1]]}, layer {other[0]} {_LAYOUTS[other[1]]}; "
            "expected all layers alike"
        )
    return default if first is None else first[1]


def _grouped(
    config: DecoderConfig, kind: LayerKind, name: str, path: ParamPath, fused: tuple[str, ...], offset: int
) -> list[TensorEntry]:
    """Returns the entries of grouped-query or multi-head attention."""
    bias = config.attention_bias
    widths = {"query": config.heads, "key": kind.kv_heads, "value": kind.kv_heads}
    if kind.reads or kind.keys_are_values:
        widths = {
            part: heads for part, heads in widths.items() if part == "query" or not (kind.reads or part == "value")
        }
    rows = {part: heads * kind.head_dim for part, heads in widths.items()}
    rows["query"] *= 2 if config.attention_gate else 1

    # The order of the rows in a fused tensor is that of `rows`.
    if "qkv" in fused:
        entries = fused_entries(f"{name}.qkv_proj", path, rows, bias=bias, offset=offset)
    else:
        entries = []
        for part in rows:
            entries += linear_entries(f"{name}.{part[0]}_proj", (*path, part), bias=bias, stack=True, offset=offset)

    entries += linear_entries(f"{name}.o_proj", (*path, "output"), bias=config.output_bias, stack=True, offset=offset)
    if config.qk_norm:
        normed = [part for part in ("query", "key") if part in widths]
        entries += [norm_entry(f"{name}.{part[0]}_norm", (*path, f"{part}_norm"), offset) for part in normed]
    return entries


def _linear(config: LinearConfig, name: str, path: ParamPath, offset: int) -> list[TensorEntry]:
    """Returns the entries of linear attention."""
    if config.fused:
        maps = {"in_proj_qkvz": "inputs", "in_proj_ba": "rates"}
        entries = []
    else:
        maps = {"in_proj_z": "gate", "in_proj_b": "strength", "in_proj_a": "decay"}
        entries = fused_entries(f"{name}.in_proj_qkv", path, config.widths, offset=offset)
    for theirs, ours in (maps | {"out_proj": "output"}).items():
        entries += linear_entries(f"{name}.{theirs}", (*path, ours), bias=False, stack=True, offset=offset)

    # The convolution's weights are one tensor, [C, 1, taps].
    start, size = 0, sum(config.widths.values())
    for part, width in config.widths.items():
        piece, start = Part(start, start + width, size), start + width
        shape, own = (width, 1, config.convolution), (*path, f"{part}_taps")
        entries.append(
            TensorEntry(f"{name}.conv1d.weight", own, stack=True, file_shape=shape, part=piece, offset=offset)
        )
    vectors = {"A_log": "decay_rate", "dt_bias": "decay_bias"}
    entries += [
        TensorEntry(f"{name}.{theirs}", (*path, ours), stack=True, offset=offset) for theirs, ours in vectors.items()
    ]
    return [*entries, norm_entry(f"{name}.norm", (*path, "norm"), offset)]


def _latent(
    config: DecoderConfig, name: str, path: ParamPath, fused: tuple[str, ...], offset: int
) -> list[TensorEntry]:
    """Returns the entries of latent attention; only its downward projections may have biases."""
    assert config.latent is not None

    def down(theirs, ours):
        return linear_entries(f"{name}.{theirs}", (*path, ours), bias=config.attention_bias, stack=True, offset=offset)

    def plain(theirs, ours):
        return linear_entries(f"{name}.{theirs}", (*path, ours), bias=False, stack=True, offset=offset)

    if config.latent.query_rank is None:
        entries = plain("q_proj", "query")
    else:
        entries = down("q_a_proj", "query_down") + plain("q_b_proj", "query")
        entries.append(norm_entry(f"{name}.q_a_layernorm", (*path, "query_norm"), offset))

    entries += down("kv_a_proj_with_mqa", "down") + plain("kv_b_proj", "up")
    entries.append(norm_entry(f"{name}.kv_a_layernorm", (*path, "latent_norm"), offset))
    bias = config.output_bias
    return entries + linear_entries(f"{name}.o_proj", (*path, "output"), bias=bias, stack=True, offset=offset)


def _mlp(
    config: DecoderConfig, name: str, path: ParamPath, inner: int, fused: tuple[str, ...], offset: int
) -> list[TensorEntry]:
    bias, parts = config.mlp_bias, ("gate", "up", "down")
    entries: list[TensorEntry] = []
    if "gate_up" in fused:
        entries = fused_entries(f"{name}.gate_up_proj", path, {"gate": inner, "up": inner}, bias=bias, offset=offset)
        parts = ("down",)
    for part in parts:
        entries += linear_entries(f"{name}.{part}_proj", (*path, part), bias=bias, stack=True, offset=offset)
    return entries


def _experts_beside(config: DecoderConfig, layer: str, path: ParamPath, offset: int) -> list[TensorEntry]:
    """Returns the entries of a mixture beside an MLP: its norms, its router and its experts, all in one tensor."""
    assert config.experts is not None
    inner, place = config.experts.intermediate, (*path, "experts")
    entries = [norm_entry(f"{layer}.{theirs}", (*path, ours), offset) for ours, theirs in BESIDE_NORMS.items()]
    entries += linear_entries(f"{layer}.router.proj", (*place, "router"), bias=False, stack=True, offset=offset)
    scales = {"scale": (*place, "router_norm", "weight"), "per_expert_scale": (*place, "factors")}
    entries += [TensorEntry(f"{layer}.router.{name}", own, stack=True, offset=offset) for name, own in scales.items()]
    return entries + _fused_experts(f"{layer}.experts", place, inner, "rows", offset)


def _experts(config: DecoderConfig, name: str, path: ParamPath, fused: FusedExperts, offset: int) -> list[TensorEntry]:
    """Returns the entries of a mixture: its router, its experts and those that every token takes."""
    experts = config.experts
    assert experts is not None
    entries = linear_entries(f"{name}.gate", (*path, "router"), bias=False, stack=True, offset=offset)
    if experts.router == "sigmoid":
        correction = (*path, "correction")
        entries.append(TensorEntry(f"{name}.gate.e_score_correction_bias", correction, stack=True, offset=offset))

    if experts.shared:
        shared = f"{name}.shared_expert" if experts.shared_gate else f"{name}.shared_experts"
        entries += _mlp(config, shared, (*path, "shared"), experts.shared, (), offset)
    if experts.shared_gate:
        gate = (*path, "shared_gate")
        entries += linear_entries(f"{name}.shared_expert_gate", gate, bias=False, stack=True, offset=offset)
    if fused == "no":
        pattern = f"{name}.experts.{{expert}}"
        for part in ("gate", "up", "down"):
            entries.append(
                TensorEntry(f"{pattern}.{part}_proj.weight", (*path, part), TRANSPOSE, stack=True, offset=offset)
            )
        return entries

    return entries + _fused_experts(f"{name}.experts", path, experts.intermediate, fused, offset)


def _fused_experts(name: str, path: ParamPath, inner: int, fused: FusedExperts, offset: int) -> list[TensorEntry]:
    """Returns the entries of all experts of a layer that are two tensors in the file."""
    # Gate and up are one tensor, one behind the other: by rows as transformers writes them, or by columns as released.
    axis, entries = 1 if fused == "rows" else 2, []
    permute = (0, 2, 1) if fused == "rows" else None
    for number, part in enumerate(("gate", "up")):
        piece = Part(number * inner, (number + 1) * inner, 2 * inner, axis)
        entries.append(
            TensorEntry(f"{name}.gate_up_proj", (*path, part), permute, stack=True, part=piece, offset=offset)
        )

    return [*entries, TensorEntry(f"{name}.down_proj", (*path, "down"), permute, stack=True, offset=offset)]
