"""Where SAM's tensors go, named as transformers writes them or as SAM's own code does: file name → parameter path,
permutation.

`prefix` is the part's place in the file, `path` its place in the model.
"""

from ..checkpoints import ParamPath, TensorEntry
from .sam import SamConfig
from .weights import CONV2D, block_entries, norm_entries

CONVOLUTION = (2, 3, 1, 0)  # [out, in, row, column] to [row, column, in, out]
_NAMES = {
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "qkv": "attn.qkv",
    "output": "attn.proj",
    "mlp.inner": "mlp.lin1",
    "mlp.outer": "mlp.lin2",
}
_OWN_NAMES = _NAMES | {"attention_norm": "norm1", "mlp_norm": "norm2"}


def sam_encoder_entries(config: SamConfig, prefix: str, path: ParamPath, own: bool = False) -> list[TensorEntry]:
    """Maps the encoder up to its last layer; `own` says that the names are those of SAM's own code."""
    patch, layer, place = f"{prefix}.patch_embed.projection", f"{prefix}.layers.{{layer}}", (*path, "blocks", "{layer}")
    if own:
        patch, layer = f"{prefix}.patch_embed.proj", f"{prefix}.blocks.{{layer}}"
    shape = (config.width, config.channels, config.patch, config.patch)
    entries = [
        TensorEntry(f"{patch}.weight", (*path, "patch_embedding", "kernel"), CONV2D, file_shape=shape),
        TensorEntry(f"{patch}.bias", (*path, "patch_embedding", "bias")),
        *block_entries(layer, (*place, "block"), _OWN_NAMES if own else _NAMES, qkv_bias=config.qkv_bias, stack=False),
    ]
    if config.positions:
        table = (1, config.side, config.side, config.width)
        entries.append(TensorEntry(f"{prefix}.pos_embed", (*path, "position_embedding"), file_shape=table))
    if config.relative:
        entries.append(TensorEntry(f"{layer}.attn.rel_pos_h", (*place, "rows")))
        entries.append(TensorEntry(f"{layer}.attn.rel_pos_w", (*place, "columns")))
    return entries


def sam_neck_entries(config: SamConfig, prefix: str, path: ParamPath, own: bool = False) -> list[TensorEntry]:
    """Maps a neck; in SAM's own code its parts are numbered."""
    narrow, narrow_norm, mix, mix_norm = "0123" if own else ("conv1", "layer_norm1", "conv2", "layer_norm2")
    shape = (config.neck, config.width, 1, 1)
    return [
        TensorEntry(f"{prefix}.{narrow}.weight", (*path, "narrow", "kernel"), CONV2D, file_shape=shape),
        *norm_entries(f"{prefix}.{narrow_norm}", (*path, "narrow_norm")),
        TensorEntry(f"{prefix}.{mix}.weight", (*path, "mix", "kernel"), CONVOLUTION),
        *norm_entries(f"{prefix}.{mix_norm}", (*path, "mix_norm")),
    ]


def sam_downsampling_entries(first: str, second: str, path: ParamPath) -> list[TensorEntry]:
    """Maps the two convolutions behind the neck, by their names."""
    return [
        TensorEntry(f"{name}.weight", (*path, part, "kernel"), CONVOLUTION)
        for name, part in ((first, "first"), (second, "second"))
    ]
