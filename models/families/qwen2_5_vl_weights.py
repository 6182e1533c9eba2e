"""Where Qwen2.5-VL's tensors go: file name → parameter path, permutation."""

from typing import Any

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries
from ..decoder.weights import linear_entries as _linear
from ..towers.qwen2_5 import VisionConfig


def _visual(config: VisionConfig) -> list[TensorEntry]:
    blocks, path = "visual.blocks.{layer}", ("visual", "blocks")
    shape = (config.width, config.channels, config.temporal, config.patch, config.patch)
    entries = [
        TensorEntry(
            "visual.patch_embed.proj.weight", ("visual", "patch_embedding", "kernel"), (1, 2, 3, 4, 0), file_shape=shape
        ),
        TensorEntry("visual.merger.ln_q.weight", ("visual", "merger_norm", "weight")),
        TensorEntry(f"{blocks}.norm1.weight", (*path, "attention_norm", "weight"), stack=True),
        TensorEntry(f"{blocks}.norm2.weight", (*path, "mlp_norm", "weight"), stack=True),
    ]
    entries += _linear("visual.merger.mlp.0", ("visual", "merger_in"), bias=True, stack=False)
    entries += _linear("visual.merger.mlp.2", ("visual", "merger_out"), bias=True, stack=False)
    entries += _linear(f"{blocks}.attn.qkv", (*path, "qkv"), bias=True)
    entries += _linear(f"{blocks}.attn.proj", (*path, "output"), bias=True)
    for part in ("gate", "up", "down"):
        entries += _linear(f"{blocks}.mlp.{part}_proj", (*path, "mlp", part), bias=True)
    return entries


def weight_map(config: Any) -> list[TensorEntry]:
    """The whole map for a `Qwen25VLConfig`."""
    return decoder_entries(config.text) + _visual(config.vision)
