"""The small backbone of the sheets task: Qwen2.5-VL's architecture, a cell of an image one token."""

import functools

from kvpatch_jax.rope import Rope
from models.decoder.config import DecoderConfig
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.qwen_images import ImageConfig
from models.towers.qwen2_5 import Qwen25VisionConfig

from ..small_task.instances import HALF, Instance
from . import task
from .task import VOCABULARY

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 64


@functools.cache
def instance() -> Instance:
    """Makes configuration and image settings: four layers of width 128, K and V of 2 × 64 each."""
    text = DecoderConfig(
        vocabulary=len(VOCABULARY),
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate=256,
        rope=Rope(1e4, HEAD_DIM, sections=(1, 9, 22), order="blocked", angles="exact"),
        attention_bias=True,
    )
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
    config = Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token=VOCABULARY.image,
        video_token=VOCABULARY.video,
        vision_start_token=VOCABULARY.vision_start,
        vision_end_token=VOCABULARY.vision_end,
        end_tokens=(VOCABULARY.end,),
    )
    images = ImageConfig(
        patch_size=task.CELL_PIXELS,
        merge_size=1,
        temporal_patch_size=task.TEMPORAL,
        min_pixels=task.CELL_PIXELS**2,
        max_pixels=1_000_000,
        image_mean=HALF,
        image_std=HALF,
    )
    return Instance(config, images)
