"""SmolVLM2: SigLIP with bucketised positions, pixel shuffle, one linear map, Llama.

Source: transformers' SmolVLMForConditionalGeneration and SmolVLMProcessor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.cache import ImageSource
from kvpatch_jax.errors import InputError

from ..checkpoints import TensorEntry, module_entries
from ..decoder.weights import decoder_entries
from ..inputs.pictures import HALVES
from ..inputs.processors import Settings, own_settings, process_images, processor
from ..inputs.videos import SMOLVLM_TEMPLATE, process_smolvlm_videos, smolvlm_options, smolvlm_texts
from ..towers.vit import bucket_positions
from ..towers.weights import clip_entries
from .config_file import ConfigFile
from .family import Family, Medium, Run, Shapes, Vision
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, join_tiles, read_vit, tile_fills, tile_plan

EDGE = "<fake_token_around_image>"
ARCHITECTURE = "SmolVLMForConditionalGeneration"


def _read(file: ConfigFile) -> ViTModelConfig:
    text, vision = file.text("llama"), file.part("vision_config")
    tower = read_vit(vision, "smolvlm_vision", final_norm="applied", dtype=text.dtype)
    glue = GlueConfig("linear", file.model["scale_factor"])
    return file.config(ViTModelConfig, text, vision=tower, glue=glue, **file.tokens("image_token"))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    entries = decoder_entries(config.text, prefix="model.text_model.")
    entries += clip_entries(config.vision, "model.vision_model")
    return entries + module_entries("model.connector", (), {"projector": "modality_projection.proj"})


def _plan(config: ViTModelConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Plans tiles; those that are all zero only fill up a batch, and the others must be whole."""
    pixel_values = arrays.get("pixel_values")
    if pixel_values is None:
        return None

    # No pixel of an image is zero: with means of one half it would be the value 127.5.
    flat = np.asarray(pixel_values).reshape(-1, *np.shape(pixel_values)[-3:])
    real = np.flatnonzero((flat != 0).any(axis=(1, 2, 3)))
    mask = arrays.get("pixel_attention_mask")
    if mask is not None and not np.asarray(mask).reshape(len(flat), -1)[real].all():
        raise InputError("pixel_attention_mask: got one that leaves out parts of a tile; expected whole tiles")

    plan = tile_plan(config, input_ids, arrays, real)
    assert plan is not None
    # By the fraction of the grid, as transformers buckets them, and not by the patches' own order.
    positions = bucket_positions(config.vision.side, config.vision.side, config.vision.side)
    return {**plan, "positions": np.tile(positions, (len(flat), 1))}


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns tiles row by row behind their names, then the whole image; without a tokenizer the placeholders alone."""
    rows, columns = (int(arrays[name][index]) for name in ("tile_rows", "tile_columns"))
    pads = [config.image_token] * config.tile_tokens
    if tokenizer is None:
        return pads * (rows * columns + 1)

    edge, ids = EDGE, []

    def encode(text):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    # The text around tiles is the processor's, to the newline.
    for row in range(rows):
        for column in range(columns):
            newline = "\n" if row and not column else ""
            ids += [*encode(f"{newline}{edge}<row_{row + 1}_col_{column + 1}>"), *pads]

    return [*ids, *encode(("\n\n" if rows else "") + f"{edge}<global-img>"), *pads, *encode(edge)]


def _video_tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns frames behind their times, and in front of all of them what is said of the video."""
    first = int(np.sum(arrays["video_frames"][:index]))
    times = arrays["video_timestamps"][first : first + int(arrays["video_frames"][index])]
    run: list[int | str] = []
    for text in smolvlm_texts(times.tolist(), float(arrays["video_durations"][index])):
        edge = EDGE if run else ""
        run += [f"{edge}{text}{EDGE}<global-img>", *[config.image_token] * config.tile_tokens]
    # Two newlines that are no token together: so they are tokenized in front of a word.
    return [*run, f"{EDGE}\n", "\n"]


def _tile_counts(arrays: Mapping[str, Any]) -> list[int]:
    grids = zip(arrays["tile_rows"], arrays["tile_columns"], strict=True)
    return [int(rows) * int(columns) + 1 for rows, columns in grids]


def _written(config: ViTModelConfig, tokenizer: Any) -> tuple[str, str, str]:
    return "<video>", "", ""


_VIDEO_SETTINGS = own_settings(
    "video",
    smolvlm_options,
    image_mean=HALVES,
    image_std=HALVES,
    resample=1,
    size={"longest_edge": 4 * 364},
    max_image_size={"longest_edge": 364},
    fps=1,
    num_frames=64,
)


def _process(images: Sequence[ImageSource], settings: Settings) -> dict[str, np.ndarray]:
    """Returns `pixel_values` [1,tiles of all images,3,S,S], `tile_rows` and `tile_columns` [n] (0: one tile)."""
    made = process_images(images, settings, return_row_col_info=True)
    return {
        "pixel_values": made["pixel_values"],
        "tile_rows": made["rows"].reshape(-1),
        "tile_columns": made["cols"].reshape(-1),
    }


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=ViTModel,
    entries=_entries,
    vision=Vision(processor("smolvlm.SmolVLM", "idefics3.Idefics3"), _process, _tokens, _plan, tile_fills),
    video=Medium(
        _VIDEO_SETTINGS,
        process_smolvlm_videos,
        _video_tokens,
        _written,
        SMOLVLM_TEMPLATE,
    ),
    join=join_tiles(1, _tile_counts),
    model_type="smolvlm",
)
