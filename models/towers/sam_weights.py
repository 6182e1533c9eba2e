"""Where SAM's tensors go, named as transformers writes them or (`own`) as SAM's own code does.

`prefix` is the part's place in the file, `path` its place in the model.
"""

from ..checkpoints import ParamPath, TensorEntry, module_entries
from .sam import SamConfig
from .weights import CONVOLUTION, TIMM, patch_entries

_OWN = TIMM | {"mlp.inner": "mlp.lin1", "mlp.outer": "mlp.lin2"}
_NAMES = _OWN | {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}


def sam_encoder_entries(config: SamConfig, prefix: str, path: ParamPath, own: bool = False) -> list[TensorEntry]:
    """Maps the encoder up to its last layer."""
    layer, place = f"{prefix}.{'blocks' if own else 'layers'}.{{layer}}", (*path, "blocks", "{layer}")
    table = (1, config.side, config.side, config.width)
    shape = (config.width, config.channels, config.patch, config.patch)
    return [
        *patch_entries(f"{prefix}.patch_embed.{'proj' if own else 'projection'}", path, *shape),
        *module_entries(layer, (*place, "block"), _OWN if own else _NAMES),
        TensorEntry(f"{prefix}.pos_embed", (*path, "position_embedding"), file_shape=table),
        TensorEntry(f"{layer}.attn.rel_pos_h", (*place, "rows")),
        TensorEntry(f"{layer}.attn.rel_pos_w", (*place, "columns")),
    ]


def sam_neck_entries(config: SamConfig, prefix: str, path: ParamPath, own: bool = False) -> list[TensorEntry]:
    """Maps a neck; in SAM's own code its parts are numbered."""
    narrow, narrow_norm, mix, mix_norm = "0123" if own else ("conv1", "layer_norm1", "conv2", "layer_norm2")
    shape = (config.neck, config.width, 1, 1)
    return [
        TensorEntry(f"{prefix}.{narrow}.weight", (*path, "narrow", "kernel"), (1, 2, 3, 0), file_shape=shape),
        TensorEntry(f"{prefix}.{mix}.weight", (*path, "mix", "kernel"), CONVOLUTION),
        *module_entries(prefix, path, {"narrow_norm": narrow_norm, "mix_norm": mix_norm}),
    ]


def sam_downsampling_entries(first: str, second: str, path: ParamPath) -> list[TensorEntry]:
    """Maps the two convolutions behind the neck, by their names."""
    names = {"first": first, "second": second}
    return [TensorEntry(f"{name}.weight", (*path, part, "kernel"), CONVOLUTION) for part, name in names.items()]
