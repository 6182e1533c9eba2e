"""Where Qwen2.5-VL's tensors go: file name → parameter path, permutation."""

from typing import Any

from .decoder_weights import decoder_entries
from .decoder_weights import linear_entries as _linear
from .vision_qwen2_5 import VisionConfig
from .weights import Entry


def _visual(config: VisionConfig) -> list[Entry]:
    blocks, path = "visual.blocks.{layer}", ("visual", "blocks")
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    entries = [
        Entry(
            "visual.patch_embed.proj.weight", ("visual", "patch_embedding", "kernel"), (1, 2, 3, 4, 0), file_shape=shape
        ),
        Entry("visual.merger.ln_q.weight", ("visual", "merger_norm", "weight")),
        Entry(f"{blocks}.norm1.weight", (*path, "attention_norm", "weight"), stack=True),
        Entry(f"{blocks}.norm2.weight", (*path, "mlp_norm", "weight"), stack=True),
    ]
    entries += _linear("visual.merger.mlp.0", ("visual", "merger_in"), bias=True, stack=False)
    entries += _linear("visual.merger.mlp.2", ("visual", "merger_out"), bias=True, stack=False)
    entries += _linear(f"{blocks}.attn.qkv", (*path, "qkv"), bias=True)
    entries += _linear(f"{blocks}.attn.proj", (*path, "output"), bias=True)
    for part in ("gate", "up", "down"):
        entries += _linear(f"{blocks}.mlp.{part}_proj", (*path, "mlp", part), bias=True)
    return entries


def weight_map(config: Any) -> list[Entry]:
    """The whole map for a `Qwen25VLConfig`."""
    return decoder_entries(config.text) + _visual(config.vision)
