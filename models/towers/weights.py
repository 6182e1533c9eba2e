"""Where the vision towers' tensors go: file name → parameter path, permutation. One function per tower or glue.

`prefix` is the tower's place in the file, `path` its place in the model.
"""

from collections.abc import Mapping

from ..checkpoints import ParamPath, TensorEntry
from ..decoder.weights import linear_entries
from .moonvit import MoonViTConfig
from .qwen2 import Qwen2VisionConfig
from .qwen2_5 import Qwen25VisionConfig
from .qwen3 import Qwen3VisionConfig
from .qwen_audio import AudioConfig
from .vit import ViTConfig

# A convolution whose stride is its kernel is a linear map of flattened patches.
CONV2D = (1, 2, 3, 0)  # [out, in, row, column] to [in · row · column, out]
CONV3D = (1, 2, 3, 4, 0)
NORM = ("weight", "bias")

CLIP_NAMES = {
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "mlp.inner": "mlp.fc1",
    "mlp.outer": "mlp.fc2",
}
"""Our block's names to CLIP's and SigLIP's."""

INTERN_NAMES = {
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "output": "attention.projection_layer",
    "mlp.inner": "mlp.fc1",
    "mlp.outer": "mlp.fc2",
}
"""Our block's names to InternViT's, as transformers writes them."""
QK_NORMS = {"query_norm": "attention.q_norm", "key_norm": "attention.k_norm"}
"""Those of the norms that InternViT-6B has on query and key."""


def norm_entries(name: str, path: ParamPath, *, stack: bool = False, bias: bool = True) -> list[TensorEntry]:
    """Returns a layer norm's weight and bias; an RMS norm has no bias."""
    parts = NORM if bias else ("weight",)
    return [TensorEntry(f"{name}.{part}", (*path, part), stack=stack) for part in parts]


def block_entries(
    name: str,
    path: ParamPath,
    names: Mapping[str, str],
    *,
    qkv_bias: bool = True,
    key_bias: bool = True,
    stack: bool = True,
    norm_bias: bool = True,
) -> list[TensorEntry]:
    """Returns a stack of `PlainBlock` (or, with `stack=False`, one by one, `path` holding `{layer}` too); `name` holds
    `{layer}`, `names` says what the file calls our parts.
    """
    entries: list[TensorEntry] = []
    for ours, theirs in names.items():
        place = (*path, *ours.split("."))
        if ours.endswith("_norm"):
            bias = norm_bias and ours not in QK_NORMS
            entries += norm_entries(f"{name}.{theirs}", place, stack=stack, bias=bias)
        else:
            bias = (qkv_bias or ours not in ("query", "key", "value", "qkv")) and (key_bias or ours != "key")
            entries += linear_entries(f"{name}.{theirs}", place, bias=bias, stack=stack)

    return entries


def qwen2_vision_entries(config: Qwen2VisionConfig, prefix: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps Qwen2-VL's tower and its merger."""
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    names = {"attention_norm": "norm1", "mlp_norm": "norm2", "qkv": "attn.qkv", "output": "attn.proj"}
    names |= {"mlp.inner": "mlp.fc1", "mlp.outer": "mlp.fc2"}
    return [
        TensorEntry(
            f"{prefix}.patch_embed.proj.weight", (*path, "patch_embedding", "kernel"), CONV3D, file_shape=shape
        ),
        *block_entries(f"{prefix}.blocks.{{layer}}", (*path, "blocks"), names),
        *norm_entries(f"{prefix}.merger.ln_q", (*path, "merger_norm")),
        *linear_entries(f"{prefix}.merger.mlp.0", (*path, "merger", "inner")),
        *linear_entries(f"{prefix}.merger.mlp.2", (*path, "merger", "outer")),
    ]


def qwen2_5_vision_entries(config: Qwen25VisionConfig, prefix: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps Qwen2.5-VL's tower and its merger; its norms have no bias."""
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    blocks, place = f"{prefix}.blocks.{{layer}}", (*path, "blocks")
    entries = [
        TensorEntry(
            f"{prefix}.patch_embed.proj.weight", (*path, "patch_embedding", "kernel"), CONV3D, file_shape=shape
        ),
        TensorEntry(f"{prefix}.merger.ln_q.weight", (*path, "merger_norm", "weight")),
        TensorEntry(f"{blocks}.norm1.weight", (*place, "attention_norm", "weight"), stack=True),
        TensorEntry(f"{blocks}.norm2.weight", (*place, "mlp_norm", "weight"), stack=True),
        *linear_entries(f"{prefix}.merger.mlp.0", (*path, "merger_in")),
        *linear_entries(f"{prefix}.merger.mlp.2", (*path, "merger_out")),
        *linear_entries(f"{blocks}.attn.proj", (*place, "output"), stack=True),
    ]
    for part in ("qkv",) if config.fused else ("query", "key", "value"):
        name = part if config.fused else part[0]
        entries += linear_entries(f"{blocks}.attn.{name}", (*place, part), stack=True)
    for part in ("gate", "up", "down"):
        entries += linear_entries(f"{blocks}.mlp.{part}_proj", (*place, "mlp", part), stack=True)
    return entries


QWEN3_VL_MERGERS = ("deepstack_merger_list", "norm", "linear_fc1", "linear_fc2")
QWEN3_OMNI_MERGERS = ("merger_list", "ln_q", "mlp.0", "mlp.2")


def qwen3_vision_entries(
    config: Qwen3VisionConfig,
    prefix: str,
    path: ParamPath = ("visual",),
    mergers: tuple[str, str, str, str] = QWEN3_VL_MERGERS,
) -> list[TensorEntry]:
    """Maps Qwen3-VL's tower with its main and deepstack mergers.

    `mergers` are the names of the deepstack mergers, and of a merger's norm, inner and outer map.
    """
    deepstack, norm, *maps = mergers
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    names = {
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "qkv": "attn.qkv",
        "output": "attn.proj",
        "mlp.inner": "mlp.linear_fc1",
        "mlp.outer": "mlp.linear_fc2",
    }
    entries = [
        TensorEntry(
            f"{prefix}.patch_embed.proj.weight", (*path, "patch_embedding", "kernel"), CONV3D, file_shape=shape
        ),
        TensorEntry(f"{prefix}.patch_embed.proj.bias", (*path, "patch_embedding", "bias")),
        TensorEntry(f"{prefix}.pos_embed.weight", (*path, "position_embedding")),
        *block_entries(f"{prefix}.blocks.{{layer}}", (*path, "blocks"), names),
        *norm_entries(f"{prefix}.merger.{norm}", (*path, "merger_norm")),
    ]
    if config.deepstack_layers:
        entries += norm_entries(f"{prefix}.{deepstack}.{{layer}}.{norm}", (*path, "deepstack_norm"), stack=True)

    for name, part in zip(maps, ("inner", "outer"), strict=True):
        entries += linear_entries(f"{prefix}.merger.{name}", (*path, "merger", part))
        if config.deepstack_layers:
            entries += linear_entries(f"{prefix}.{deepstack}.{{layer}}.{name}", (*path, "deepstack", part), stack=True)

    return entries


def clip_entries(config: ViTConfig, prefix: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps CLIP (class token, `pre_layrnorm` as the files spell it) or SigLIP."""
    shape = (config.width, config.channels, config.patch, config.patch)
    embeddings = f"{prefix}.embeddings"
    entries = [
        TensorEntry(
            f"{embeddings}.patch_embedding.weight", (*path, "patch_embedding", "kernel"), CONV2D, file_shape=shape
        ),
        TensorEntry(f"{embeddings}.position_embedding.weight", (*path, "position_embedding")),
        *block_entries(f"{prefix}.encoder.layers.{{layer}}", (*path, "blocks"), CLIP_NAMES),
    ]

    # What CLIP has and SigLIP has not, and the reverse.
    if config.patch_bias:
        entries.append(TensorEntry(f"{embeddings}.patch_embedding.bias", (*path, "patch_embedding", "bias")))
    if config.class_token:
        entries.append(TensorEntry(f"{embeddings}.class_embedding", (*path, "class_embedding")))
    if config.pre_norm:
        entries += norm_entries(f"{prefix}.pre_layrnorm", (*path, "pre_norm"))
    if config.final_norm != "none":
        entries += norm_entries(f"{prefix}.post_layernorm", (*path, "final_norm"))
    return entries


def intern_vit_entries(config: ViTConfig, prefix: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps InternViT as transformers' InternVL writes it."""
    shape = (config.width, config.channels, config.patch, config.patch)
    embeddings, blocks = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{layer}}"
    patch = f"{embeddings}.patch_embeddings.projection"
    scales = {"attention_scale": "lambda_1", "mlp_scale": "lambda_2"}
    return [
        TensorEntry(f"{patch}.weight", (*path, "patch_embedding", "kernel"), CONV2D, file_shape=shape),
        TensorEntry(f"{patch}.bias", (*path, "patch_embedding", "bias")),
        TensorEntry(f"{embeddings}.cls_token", (*path, "class_embedding"), file_shape=(1, 1, config.width)),
        TensorEntry(
            f"{embeddings}.position_embeddings",
            (*path, "position_embedding"),
            file_shape=(1, config.tokens, config.width),
        ),
        *block_entries(
            blocks,
            (*path, "blocks"),
            INTERN_NAMES | (QK_NORMS if config.qk_norm else {}),
            qkv_bias=config.qkv_bias,
            norm_bias=config.norm_type == "layer_norm",
        ),
        *(TensorEntry(f"{blocks}.{theirs}", (*path, "blocks", ours), stack=True) for ours, theirs in scales.items()),
    ]


def moonvit_entries(
    config: MoonViTConfig,
    prefix: str,
    projector: tuple[str, str, str],
    released: bool,
    path: ParamPath = ("visual",),
) -> list[TensorEntry]:
    """Maps MoonViT and its projector, in the authors' names or (`released` False) in transformers'.

    `projector` are the names of it, of its inner and of its outer map.
    """
    shape = (config.width, config.channels, config.patch, config.patch)
    names = {"attention_norm": "norm1", "mlp_norm": "norm2", "output": "attn.proj", "mlp.inner": "mlp.fc1"}
    names |= {"query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "mlp.outer": "mlp.fc2"}
    blocks, norm, table = "layers", "final_layernorm", "pos_emb.position_embeddings"

    if released:
        names = {"attention_norm": "norm0", "mlp_norm": "norm1", "qkv": "wqkv", "output": "wo"}
        names |= {"mlp.inner": "mlp.fc0", "mlp.outer": "mlp.fc1"}
        blocks, norm, table = "encoder.blocks", "encoder.final_layernorm", "pos_emb.weight"

    patch, side = f"{prefix}.patch_embed", config.positions
    glue, inner, outer = projector
    entries = [
        TensorEntry(f"{patch}.proj.weight", (*path, "patch_embedding", "kernel"), CONV2D, file_shape=shape),
        TensorEntry(f"{patch}.proj.bias", (*path, "patch_embedding", "bias")),
        TensorEntry(f"{patch}.{table}", (*path, "position_embedding"), file_shape=(side, side, config.width)),
        *block_entries(f"{prefix}.{blocks}.{{layer}}", (*path, "blocks"), names),
        *norm_entries(f"{prefix}.{norm}", (*path, "final_norm")),
        *norm_entries(f"{glue}.pre_norm", (*path, "merger_norm")),
        *linear_entries(f"{glue}.{inner}", (*path, "merger", "inner")),
        *linear_entries(f"{glue}.{outer}", (*path, "merger", "outer")),
    ]
    return entries


def projector_entries(
    inner: str, outer: str, *, norm: str | None = None, bias: bool = True, path: ParamPath = ("projector",)
) -> list[TensorEntry]:
    """Returns a `Projector`: names of its two linear maps, and of its layer norm where it has one."""
    entries = norm_entries(norm, (*path, "norm")) if norm else []
    entries += linear_entries(inner, (*path, "mlp", "inner"), bias=bias)
    return entries + linear_entries(outer, (*path, "mlp", "outer"), bias=bias)


def qwen_audio_entries(config: AudioConfig, prefix: str, path: ParamPath = ("audio",)) -> list[TensorEntry]:
    """Maps the audio encoder of Qwen2.5-Omni or Qwen3-Omni."""
    names = CLIP_NAMES | {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
    names |= {"mlp.inner": "fc1", "mlp.outer": "fc2"}
    key_bias = config.block.key_bias
    entries = block_entries(f"{prefix}.layers.{{layer}}", (*path, "blocks"), names, key_bias=key_bias)
    entries += norm_entries(f"{prefix}.ln_post", (*path, "final_norm"))

    # [out, in, mel bin, frame] to [frame, mel bin, in, out]; Qwen2.5-Omni's have no mel bins.
    order, stem = ((3, 2, 1, 0), "conv2d") if config.downsampling else ((2, 1, 0), "conv")
    parts = ("first", "second", "third")[: 3 if config.downsampling else 2]
    for number, part in enumerate(parts, start=1):
        name, place = f"{prefix}.{stem}{number}", (*path, part)
        entries.append(TensorEntry(f"{name}.weight", (*place, "kernel"), order))
        entries.append(TensorEntry(f"{name}.bias", (*place, "bias")))

    if not config.downsampling:
        return entries + linear_entries(f"{prefix}.proj", (*path, "output"))
    entries += linear_entries(f"{prefix}.conv_out", (*path, "joined"), bias=False)
    entries += linear_entries(f"{prefix}.proj1", (*path, "inner"))
    return entries + linear_entries(f"{prefix}.proj2", (*path, "outer"))
