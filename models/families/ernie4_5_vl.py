"""Ernie-4.5-VL: configurations, weight map and the assembled backbone.

Source: transformers' Ernie4_5_VLMoeForConditionalGeneration. Tokens of images choose among experts of their own: the
placeholders, and the start and end around them. Which they are follows from the ids alone, so that an image's KV
depends on nothing but the image. The authors' releases say the same in a flat `config.json`, which is read as the
nested one; their tensors have the names that transformers writes.

Videos are read as arrays (`pixel_values_videos` and `video_grid_thw`) and not made from files or frames: that would
draw each frame's time into its pixels, in the letters of a font file, which is not built.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig, ExpertConfig
from ..decoder.hf_config import Raw, Regime, need, read_axial_theta, read_decoder, read_rope, rope_table
from ..decoder.known_keys import complete
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionConfig, VideoRule, get_rope_positions
from ..inputs.qwen_images import ImageConfig, read_settings
from ..towers.ernie import FRAMES, ErnieVisionConfig, ErnieVisionTower, ernie_vision_entries, plan_patches
from . import namings
from .family import Family, Shapes, pixels_of, placeholders
from .image_family import (
    TowerModel,
    check_placeholders,
    freeze,
    grids_of,
    one_size,
    qwen_vision,
    text_part,
    thaw,
    vision_part,
    whole,
)
from .text_families import TEXT_TABLE, read_head_dim

ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"
MODEL, TEXT, VISION = "ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_vl_moe_vision"
AUTHORS = "ernie4_5_moe_vl"
"""What the authors' releases call themselves in `model_type`."""
SECTIONS = (22, 22, 20)
"""Of M-RoPE: height, width and time, where the configuration names none."""
INNER = (1536, 512)
"""Widths of experts of texts and of images, where the configuration names none."""
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}
"""Of the image processor, where the file says nothing."""


@dataclasses.dataclass(frozen=True)
class Ernie45VLConfig:
    """The whole backbone: both towers and the token ids that stand for images and videos.

    `raw` is config.json as it was read, an authors' one as transformers has it; `video_rule` says where text behind a
    video goes on (`inputs/positions.py`).
    """

    text: DecoderConfig
    vision: ErnieVisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    raw: str
    video_rule: VideoRule = "max"

    @property
    def family(self) -> Family:
        """Ernie-4.5-VL."""
        return FAMILY

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, ARCHITECTURE, self.text.dtype)


def read_ernie_rope(text: Raw, angles: str, regime: Regime) -> Rope:
    """Reads the rope: pairs side by side; height and width take turns, and time has the last frequencies.

    Raises:
      ConfigError: sections that are not three numbers, or a scaled rope, which transformers refuses too.
    """
    table = rope_table(text)
    given = table.get("mrope_section", SECTIONS)
    if len(given) != 3:
        raise ConfigError(f"mrope_section: got {given!r:.80}; expected numbers for height, width and time")
    height, width, time = given
    turned = {**text, "rope_scaling": None, "rope_parameters": {**table, "mrope_section": [time, height, width]}}
    width, order = read_head_dim(text), "time_last"
    rope = read_rope(turned, width, angles=angles, regime=regime, cached="pairs", order=order)
    if rope.scaling is not None:
        raise ConfigError(f"rope type: got {rope.scaling.kind!r} for Ernie-4.5-VL; expected 'default'")
    return rope


def _pair(value: Any, end: str) -> Sequence[int]:
    """Returns where the experts of texts and of images begin or end."""
    numbers = value if isinstance(value, list | tuple) else ()
    if not numbers or not all(isinstance(number, int) for number in numbers):
        raise ConfigError(f"moe_layer_{end}_index: got {value!r:.80}; expected one for texts and one for images")
    return numbers


def _read_experts(text: Raw, image_tokens: tuple[int, ...]) -> ExpertConfig:
    """Reads both sets of experts.

    Raises:
      ConfigError: layers with experts below ones without, or widths that are not two.
    """
    layers, inner = need(text, "num_hidden_layers"), text["moe_intermediate_size"] or INNER
    kinds = text["mlp_layer_types"] or ["dense"] + ["sparse"] * (layers - 1)
    dense = sum(kind == "dense" for kind in kinds)
    if list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(f"mlp_layer_types: got {kinds!s:.80}; expected 'dense' layers, and {layers} in all")
    if not isinstance(inner, list | tuple) or len(inner) != 2:
        raise ConfigError(f"moe_intermediate_size: got {inner!r:.80}; expected one for texts and one for images")

    experts = need(text, "moe_num_experts")
    if isinstance(experts, list | tuple):
        raise ConfigError(f"moe_num_experts: got {experts!r:.80}; expected a number, of texts and as many of images")
    router: dict[str, Any] = {"experts": experts, "chosen": need(text, "moe_k")}
    router |= {"router": "softmax", "renormalise": True, "corrected": True}
    return ExpertConfig(
        **router,
        intermediate=inner[0],
        shared=inner[0] * (text["moe_num_shared_experts"] or 0),
        dense_layers=dense,
        images=ExpertConfig(**router, intermediate=inner[1]),
        image_tokens=image_tokens,
    )


def _read(raw: Raw, angles: str, regime: Regime) -> Ernie45VLConfig:
    """Reads `config.json`: transformers' nested one, or the authors' flat one."""
    if raw.get("model_type") == AUTHORS:
        raw = as_nested(raw)
    model = whole(raw, MODEL)
    text = complete(text_part(model, raw, (TEXT, MODEL)), TEXT, TEXT_TABLE)
    vision = vision_part(model, VISION, MODEL)
    ends = [need(model, f"{kind}_{end}_token_id") for kind in ("image", "video") for end in ("start", "end")]
    pads = [need(model, "image_token_id"), need(model, "video_token_id")]
    experts = _read_experts(text, (*pads, *ends))
    decoder = read_decoder(text, read_ernie_rope(text, angles, regime), experts=experts)

    tower = ErnieVisionConfig(
        depth=vision["depth"],
        width=vision["hidden_size"],
        heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        output_width=decoder.width,
        patch=one_size(vision, "patch_size"),
        merge=vision["spatial_merge_size"],
        channels=vision["in_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        norm_epsilon=vision["rms_norm_eps"],
        output_epsilon=decoder.norm_epsilon,
        dtype=decoder.dtype,
    )
    return Ernie45VLConfig(decoder, tower, *pads, *ends[:2], raw=freeze(raw))


def as_nested(raw: Raw) -> dict[str, Any]:
    """Turns the authors' `config.json` into transformers': text fields at the top, lists of what experts of texts and
    of images have, and `freq_allocation`, the frequencies of time.

    Source: transformers' conversion of Ernie-4.5-VL.

    Raises:
      ConfigError: a key that is not known, or has a value that is not built.
    """
    model = complete(raw, AUTHORS)
    tower = complete(need(model, "vision_config"), "DFNRope_vision_transformer", "vision_config")
    experts = need(model, "moe_num_experts")
    if not isinstance(experts, list | tuple) or len(experts) != 2 or experts[0] != experts[1]:
        raise ConfigError(f"moe_num_experts: got {experts!r:.80}; expected two equal numbers, of texts and of images")
    layers, every = need(model, "num_hidden_layers"), model["moe_layer_interval"]
    first, last = (_pair(need(model, f"moe_layer_{end}_index"), end) for end in ("start", "end"))
    sparse = [(layer + 1) % every == 0 and min(first) <= layer <= max(last) for layer in range(layers)]

    time = model["freq_allocation"]
    spatial = (read_head_dim(model) // 2 - time) // 2
    rope = {"rope_type": "default", "rope_theta": model["rope_theta"], "mrope_section": [spatial, spatial, time]}
    kept = ("hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size", "moe_k")
    kept += ("moe_num_shared_experts", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    kept += ("rms_norm_eps", "vocab_size", "tie_word_embeddings", "hidden_act", "use_bias")
    text = {name: model[name] for name in kept if model.get(name) is not None}
    text |= {"model_type": TEXT, "moe_num_experts": experts[0], "rope_parameters": rope}
    text["mlp_layer_types"] = ["sparse" if own else "dense" for own in sparse]

    names = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size", "spatial_merge_size")
    vision = {name: tower[name] for name in names} | {"model_type": VISION, "rms_norm_eps": 1e-6}
    vision["intermediate_size"] = int(tower["hidden_size"] * tower["mlp_ratio"])
    ids = [f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end")]
    top = {name: model[name] for name in (*ids, "video_token_id")}
    top |= {name: raw[name] for name in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id") if raw.get(name)}
    tie = {"tie_word_embeddings": raw["tie_word_embeddings"]} if raw.get("tie_word_embeddings") is not None else {}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL,
        "image_token_id": need(model, "im_patch_id"),
        "text_config": text,
        "vision_config": vision,
        **top,
        **tie,
    }


def _settings(directory: Any) -> ImageConfig:
    # The authors' files name the frames of a pair, which a patch of one frame has no use for.
    return ImageConfig.from_dict({"size": SIZE} | read_settings(directory) | {"temporal_patch_size": 1})


def _positions(config: Ernie45VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionConfig(config.image_token, config.video_token, config.vision.merge, tokens_per_second=1)
    videos = arrays.get("video_grid_thw")
    if videos is not None:
        # Positions count pairs of frames.
        videos = np.asarray(videos) // [FRAMES, 1, 1]
    return get_rope_positions(input_ids, arrays.get("image_grid_thw"), videos, None, rule, config.video_rule)[0]


def _plan(config: Ernie45VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    grids = grids_of(arrays)
    if not len(grids):
        return None
    found = plan_patches(config.vision, grids)
    shape = (found["rows"].size, config.vision.features)
    check_placeholders(input_ids, placeholders(config), found["first"].size, pixels_of(arrays), shape)
    return found


def _entries(config: Ernie45VLConfig, shapes: Shapes) -> list[TensorEntry]:
    tower = ernie_vision_entries("model.vision_model", "model.resampler_model")
    return decoder_entries(config.text, routers="ernie") + tower


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=functools.partial(TowerModel, ErnieVisionTower),
    entries=_entries,
    positions=_positions,
    vision=dataclasses.replace(qwen_vision(plan_patches, "frames", "first", "second", settings=_settings), plan=_plan),
    model_type=MODEL,
    namings=namings.ERNIE4_5_VL,
)
