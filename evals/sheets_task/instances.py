"""The small backbones of the sheets task, in a real family's own architecture each; a cell of an image is one token."""

import functools

from models import FAMILIES

from ..small_task import instances as small
from ..small_task.instances import Instance
from . import task
from .task import VOCABULARY

LAYERS = 4


@functools.cache
def qwen2_5_vl() -> Instance:
    """Makes configuration and image settings: four layers of width 128, K and V of 2 × 64 each."""
    # One patch is one cell, and attends to itself alone.
    vision = small.cell_tower(width=96, heads=2, patch=task.CELL_PIXELS, merge=1, temporal=task.TEMPORAL)
    return Instance(small.qwen2_5_vl(vision, LAYERS, VOCABULARY), small.pixels(task.CELL_PIXELS, 1))


@functools.cache
def qwen3_vl() -> Instance:
    """Makes Qwen3-VL's configuration of the same sizes: normalised queries and keys, interleaved M-RoPE.

    Its tower lets all cells of an image see each other; what leaves its first block goes to the first layer as well.
    """
    raw = small.instance("qwen3_vl").config.to_dict()
    text = {**raw["text_config"], "vocab_size": len(VOCABULARY), "num_hidden_layers": LAYERS}
    vision = {**raw["vision_config"], "patch_size": task.CELL_PIXELS, "temporal_patch_size": task.TEMPORAL}
    vision |= {"num_heads": 2, "num_position_embeddings": task.GLYPHS, "deepstack_visual_indexes": [0]}
    ids = {
        "image_token_id": VOCABULARY.image,
        "video_token_id": VOCABULARY.video,
        "vision_start_token_id": VOCABULARY.vision_start,
        "vision_end_token_id": VOCABULARY.vision_end,
        "eos_token_id": VOCABULARY.end,
    }
    (architecture,) = raw["architectures"]
    whole = {**raw, **ids, "text_config": text, "vision_config": vision}
    return Instance(FAMILIES[architecture].config(whole, "exact", None), qwen2_5_vl().images)


LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
"""Sizes of the hybrid's linear attention: keys and values twice as wide as the model, as in the released ones."""


LINEAR_LAYER, FULL_LAYER = "linear_attention", "full_attention"


@functools.cache
def qwen3_5(
    kinds: tuple[str, ...] = (LINEAR_LAYER, LINEAR_LAYER, FULL_LAYER, LINEAR_LAYER), intermediate: int = 256
) -> Instance:
    """Makes Qwen3.5's configuration of Qwen3-VL's sizes here: three layers of linear attention to one full one.

    The released models' full layer is the last of four; here it is the third, and all of a head rotates, not a quarter
    (docs/experiments/hybrids.md). Its tower is Qwen3-VL's, without deepstack.

    Args:
      kinds: of layers, in their order.
    """
    raw = qwen3_vl().config.to_dict()
    text = {name: value for name, value in raw["text_config"].items() if name not in ("rope_theta", "rope_scaling")}
    text |= {**LINEAR, "num_hidden_layers": len(kinds), "layer_types": list(kinds), "intermediate_size": intermediate}
    rotation = {"mrope_section": [12, 10, 10], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_interleaved": True, **rotation}}
    vision = {**raw["vision_config"], "deepstack_visual_indexes": []}
    architecture = "Qwen3_5ForConditionalGeneration"
    whole = {**raw, "architectures": [architecture], "text_config": text, "vision_config": vision}
    return Instance(FAMILIES[architecture].config(whole, "exact", None), qwen2_5_vl().images)
