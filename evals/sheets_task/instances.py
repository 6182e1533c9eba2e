"""The small backbone of the sheets task: Qwen2.5-VL's architecture, a cell of an image one token."""

import functools
from typing import Any

from kvpatch_jax.rope import Rope
from models.decoder.config import DecoderConfig
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.qwen_images import ImageConfig
from models.towers.qwen2_5 import Qwen25VisionConfig

from ..small_task.instances import Instance
from . import task
from .task import VOCABULARY

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 64


@functools.cache
def instance() -> Instance:
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
