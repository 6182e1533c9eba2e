"""The small backbones of the sheets task, in a real family's own architecture each; a cell of an image is one token."""

import functools
from typing import Any

from kvpatch_jax.core import Rope
from models import FAMILIES
from models.decoder.config import DecoderConfig
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.qwen_images import ImageConfig
from models.towers.qwen2_5 import Qwen25VisionConfig

from ..small_task import instances as small
from ..small_task.instances import Instance
from . import task
from .task import VOCABULARY

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 64


@functools.cache
def qwen2_5_vl() -> Instance:
    """Makes configuration and image settings: four layers of width 128, K and V of 2 × 64 each."""
    # One patch is one cell, and attends to itself alone.
    vision = Qwen25VisionConfig(
        depth=2,
        width=96,
        heads=2,
        intermediate=192,
        output_width=WIDTH,
        patch=task.CELL_PIXELS,
        merge=1,
        temporal=task.TEMPORAL,
        window=task.CELL_PIXELS,
        full_layers=(),
    )
    return instance_of(vision, VOCABULARY)


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


def instance_of(vision: Qwen25VisionConfig, vocabulary: Any, mean: float = 0.5, deviation: float = 0.5) -> Instance:
    """Makes the small backbone with another tower, for tokens of another vocabulary; images are never resized."""
    text = DecoderConfig(
        vocabulary=len(vocabulary),
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate=256,
        rope=Rope(1e4, HEAD_DIM, sections=(1, 9, 22), order="blocked", angles="exact"),
        attention_bias=True,
    )
    config = Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token=vocabulary.image,
        video_token=vocabulary.video,
        vision_start_token=vocabulary.vision_start,
        vision_end_token=vocabulary.vision_end,
        end_tokens=(vocabulary.end,),
    )
    images = ImageConfig(
        patch_size=vision.patch,
        merge_size=vision.merge,
        temporal_patch_size=vision.temporal,
        min_pixels=vision.patch**2,
        max_pixels=1_000_000,
        image_mean=(mean, mean, mean),
        image_std=(deviation, deviation, deviation),
    )
    return Instance(config, images)
