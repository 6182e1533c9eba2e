"""Where the towers' tensors go: tables from our names to the files', one per tower, and what has axes of its own.

`prefix` is the tower's place in the file, `path` its place in the model. Tables list all that any
configuration has.
"""

from collections.abc import Mapping

from ..checkpoints import ParamPath, TensorEntry, module_entries
from .packed import PackedConfig
from .qwen_audio import AudioConfig
from .vit import ViTConfig

VISUAL = ("visual",)
CONVOLUTION = (2, 3, 1, 0)
"""[out, in, row, column] as [row, column, in, out]."""


def blocks(stem: str, names: Mapping[str, str]) -> dict[str, str]:
    """Returns a table of a stack of blocks, which the file calls `stem` and a number."""
    return {f"blocks.{ours}": f"{stem}.{{layer}}.{theirs}" for ours, theirs in names.items()}


def _attention(place: str, output: str) -> dict[str, str]:
    return {
        "query": f"{place}.q_proj",
        "key": f"{place}.k_proj",
        "value": f"{place}.v_proj",
        "output": f"{place}.{output}",
    }


TIMM = {
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv": "attn.qkv",
    "output": "attn.proj",
    "mlp.inner": "mlp.fc1",
    "mlp.outer": "mlp.fc2",
}
"""Our block's names to timm's."""
_CLIP = _attention("self_attn", "out_proj") | {
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "mlp.inner": "mlp.fc1",
    "mlp.outer": "mlp.fc2",
}
_INTERN = _attention("attention", "projection_layer") | {
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "query_norm": "attention.q_norm",
    "key_norm": "attention.k_norm",
    "mlp.inner": "mlp.fc1",
    "mlp.outer": "mlp.fc2",
}
_GATED = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
QWEN2 = blocks("blocks", TIMM | _GATED | {part: f"attn.{part[0]}" for part in ("query", "key", "value")}) | {
    "merger.norm": "merger.ln_q",
    "merger.mlp.inner": "merger.mlp.0",
    "merger.mlp.outer": "merger.mlp.2",
}
"""Qwen2-VL's and Qwen2.5-VL's, and Qwen2.5-Omni's, which has three matrices for query, key and value."""
QWEN3 = blocks("blocks", TIMM | {"mlp.inner": "mlp.linear_fc1", "mlp.outer": "mlp.linear_fc2"})
GLM4V = blocks("blocks", TIMM | _GATED) | {
    "embedding_norm": "post_conv_layernorm",
    "final_norm": "post_layernorm",
    "merger.project": "merger.proj",
    "merger.norm": "merger.post_projection_norm",
    **{f"merger.mlp.{part}": f"merger.{part}_proj" for part in ("gate", "up", "down")},
}
PIXTRAL = {"embedding_norm": "ln_pre"} | blocks(
    "transformer.layers",
    {f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    | _attention("attention", "o_proj")
    | {"attention_norm": "attention_norm", "mlp_norm": "ffn_norm"},
)
CLIP = {"pre_norm": "pre_layrnorm", "final_norm": "post_layernorm"} | blocks("encoder.layers", _CLIP)
"""CLIP (`pre_layrnorm` as the files spell it) and SigLIP."""
INTERN_VIT = blocks("encoder.layer", _INTERN)
MOONVIT = {"final_norm": "final_layernorm"} | blocks("layers", TIMM | _attention("attn", "proj"))
"""As transformers writes it; `MOONVIT_RELEASED` as its authors do."""
MOONVIT_RELEASED = {"final_norm": "encoder.final_layernorm"} | blocks(
    "encoder.blocks",
    {"attention_norm": "norm0", "mlp_norm": "norm1", "qkv": "wqkv", "output": "wo"}
    | {"mlp.inner": "mlp.fc0", "mlp.outer": "mlp.fc1"},
)
QWEN_AUDIO = {"final_norm": "ln_post"} | blocks(
    "layers",
    _CLIP
    | {
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "mlp.inner": "fc1",
        "mlp.outer": "fc2",
    },
)
QWEN2_5_AUDIO = QWEN_AUDIO | {"output": "proj"}
QWEN3_AUDIO = QWEN_AUDIO | {"joined": "conv_out", "inner": "proj1", "outer": "proj2"}


def patch_entries(name: str, path: ParamPath, *shape: int) -> list[TensorEntry]:
    """Maps a convolution whose stride is its kernel, [out, in, …], as a linear map of flattened patches."""
    order = (*range(1, len(shape)), 0)
    place = (*path, "patch_embedding")
    weight = TensorEntry(f"{name}.weight", (*place, "kernel"), order, file_shape=shape)
    return [weight, TensorEntry(f"{name}.bias", (*place, "bias"))]


def qwen_vision_entries(
    config: PackedConfig, prefix: str, names: Mapping[str, str] = QWEN2, path: ParamPath = VISUAL
) -> list[TensorEntry]:
    """Maps the tower of a Qwen family (`names` is its table) and its merger."""
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    return patch_entries(f"{prefix}.patch_embed.proj", path, *shape) + module_entries(prefix, path, names)


def glm4v_vision_entries(config: PackedConfig, prefix: str) -> list[TensorEntry]:
    """Maps GLM-4V's tower with its merger."""
    square = (config.output_width, config.width, config.merge, config.merge)
    joined, place = f"{prefix}.downsample", (*VISUAL, "merger", "joined")
    return [
        *qwen_vision_entries(config, prefix, GLM4V),
        TensorEntry(f"{prefix}.embeddings.position_embedding.weight", (*VISUAL, "position_embedding")),
        # [out, in, row, column] to [row · column · in, out]
        TensorEntry(f"{joined}.weight", (*place, "kernel"), CONVOLUTION, file_shape=square),
        TensorEntry(f"{joined}.bias", (*place, "bias")),
    ]


def pixtral_entries(config: PackedConfig, prefix: str, glue: str) -> list[TensorEntry]:
    """Maps Pixtral's tower and its projector, `glue`."""
    shape = (config.width, config.channels, config.patch, config.patch)
    merger = (*VISUAL, "merger")
    return [
        *patch_entries(f"{prefix}.patch_conv", VISUAL, *shape),
        *module_entries(prefix, VISUAL, PIXTRAL),
        *projector_entries(f"{glue}.linear_1", f"{glue}.linear_2", f"{glue}.norm", merger),
        *module_entries(glue, merger, {"joined": "patch_merger.merging_layer"}),
    ]


QWEN3_VL_MERGERS = ("deepstack_merger_list", "norm", "linear_fc1", "linear_fc2")
QWEN3_OMNI_MERGERS = ("merger_list", "ln_q", "mlp.0", "mlp.2")


def qwen3_vision_entries(
    config: PackedConfig, prefix: str, mergers: tuple[str, str, str, str] = QWEN3_VL_MERGERS
) -> list[TensorEntry]:
    """Maps Qwen3-VL's tower with its main and deepstack mergers.

    `mergers` are the names of the deepstack mergers, and of a merger's norm, inner and outer map.
    """
    deepstack, *parts = mergers
    names = dict(QWEN3)
    for theirs, ours in zip(parts, ("norm", "mlp.inner", "mlp.outer"), strict=True):
        names |= {f"merger.{ours}": f"merger.{theirs}", f"deepstack.{ours}": f"{deepstack}.{{layer}}.{theirs}"}
    table = TensorEntry(f"{prefix}.pos_embed.weight", (*VISUAL, "position_embedding"))
    return [*qwen_vision_entries(config, prefix, names), table]


def vit_entries(
    config: ViTConfig, names: Mapping[str, str], patch: str, prefix: str, path: ParamPath = VISUAL
) -> list[TensorEntry]:
    """Maps a plain vision transformer but for its tables: `patch` is the name of its patches' map."""
    shape = (config.width, config.channels, config.patch, config.patch)
    return patch_entries(f"{prefix}.{patch}", path, *shape) + module_entries(prefix, path, names)


def clip_entries(config: ViTConfig, prefix: str, path: ParamPath = VISUAL) -> list[TensorEntry]:
    """Maps CLIP or SigLIP."""
    return [
        *vit_entries(config, CLIP, "embeddings.patch_embedding", prefix, path),
        TensorEntry(f"{prefix}.embeddings.position_embedding.weight", (*path, "position_embedding")),
        TensorEntry(f"{prefix}.embeddings.class_embedding", (*path, "class_embedding")),
    ]


def intern_vit_entries(config: ViTConfig, prefix: str, path: ParamPath = VISUAL) -> list[TensorEntry]:
    """Maps InternViT as transformers' InternVL writes it."""
    layer, tables = f"{prefix}.encoder.layer.{{layer}}", f"{prefix}.embeddings"
    token, table = (1, 1, config.width), (1, config.tokens, config.width)
    return [
        *vit_entries(config, INTERN_VIT, "embeddings.patch_embeddings.projection", prefix, path),
        TensorEntry(f"{tables}.cls_token", (*path, "class_embedding"), file_shape=token),
        TensorEntry(f"{tables}.position_embeddings", (*path, "position_embedding"), file_shape=table),
        TensorEntry(f"{layer}.lambda_1", (*path, "blocks", "attention_scale")),
        TensorEntry(f"{layer}.lambda_2", (*path, "blocks", "mlp_scale")),
    ]


def moonvit_entries(
    config: PackedConfig, prefix: str, projector: tuple[str, str, str], released: bool
) -> list[TensorEntry]:
    """Maps MoonViT and its projector, in the authors' names or (`released` False) in transformers'.

    `projector` are the names of it, of its inner and of its outer map.
    """
    glue, inner, outer = projector
    table = (config.positions, config.positions, config.width)
    name = "pos_emb.weight" if released else "pos_emb.position_embeddings"
    shape = (config.width, config.channels, config.patch, config.patch)
    return [
        *patch_entries(f"{prefix}.patch_embed.proj", VISUAL, *shape),
        *module_entries(prefix, VISUAL, MOONVIT_RELEASED if released else MOONVIT),
        TensorEntry(f"{prefix}.patch_embed.{name}", (*VISUAL, "position_embedding"), file_shape=table),
        *projector_entries(f"{glue}.{inner}", f"{glue}.{outer}", f"{glue}.pre_norm", (*VISUAL, "merger")),
    ]


def projector_entries(
    inner: str, outer: str, norm: str = "norm", path: ParamPath = ("projector",)
) -> list[TensorEntry]:
    """Maps a `Projector`: names of its two linear maps, and of its layer norm."""
    return module_entries("", path, {"norm": norm, "mlp.inner": inner, "mlp.outer": outer})


def qwen_audio_entries(config: AudioConfig, prefix: str, path: ParamPath = ("audio",)) -> list[TensorEntry]:
    """Maps the audio encoder of Qwen2.5-Omni or Qwen3-Omni."""
    entries = module_entries(prefix, path, QWEN3_AUDIO if config.downsampling else QWEN2_5_AUDIO)
    # [out, in, mel bin, frame] to [frame, mel bin, in, out]; Qwen2.5-Omni's have no mel bins.
    order, stem = ((3, 2, 1, 0), "conv2d") if config.downsampling else ((2, 1, 0), "conv")
    for number, part in enumerate(("first", "second", "third"), start=1):
        entries.append(TensorEntry(f"{prefix}.{stem}{number}.weight", (*path, part, "kernel"), order))
        entries.append(TensorEntry(f"{prefix}.{stem}{number}.bias", (*path, part, "bias")))
    return entries
