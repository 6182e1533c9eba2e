"""Where Qwen2.5-VL's tensors go: file name → parameter path, permutation."""

from typing import Any

from .vision_qwen2_5 import VisionConfig
from .weights import Entry

TRANSPOSE = (1, 0)


def _linear(name: str, path: tuple[str, ...], *, bias: bool, stack: bool = True) -> list[Entry]:
    entries = [Entry(f"{name}.weight", (*path, "kernel"), permute=TRANSPOSE, stack=stack)]
    return [*entries, Entry(f"{name}.bias", (*path, "bias"), stack=stack)] if bias else entries


def _decoder(tied: bool) -> list[Entry]:
    layers, path = "model.layers.{layer}", ("decoder", "layers")
    entries = [
        Entry("model.embed_tokens.weight", ("decoder", "embedding")),
        Entry("model.norm.weight", ("decoder", "norm", "weight")),
        Entry(f"{layers}.input_layernorm.weight", (*path, "input_norm", "weight"), stack=True),
        Entry(f"{layers}.post_attention_layernorm.weight", (*path, "mlp_norm", "weight"), stack=True),
    ]
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        entries += _linear(f"{layers}.self_attn.{theirs}_proj", (*path, "attention", ours), bias=True)
    entries += _linear(f"{layers}.self_attn.o_proj", (*path, "attention", "output"), bias=False)
    for part in ("gate", "up", "down"):
        entries += _linear(f"{layers}.mlp.{part}_proj", (*path, "mlp", part), bias=False)
    return entries if tied else entries + _linear("lm_head", ("decoder", "head"), bias=False, stack=False)


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
    return _decoder(config.text.tied_embeddings) + _visual(config.vision)
