"""Qwen2.5-VL: configuration, weight map and the assembled backbone (vision tower and decoder).

Source: transformers' Qwen2_5_VLForConditionalGeneration, whose released and newer configuration keys are both read.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need, read_decoder, read_rope, read_window
from ..decoder.known_keys import DEFAULTS, ONLY, complete
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionConfig, VideoRule, get_rope_positions
from ..inputs.qwen_images import ImageConfig
from ..inputs.qwen_videos import process_qwen2_videos
from ..inputs.video_frames import VideoConfig
from ..towers.qwen2_5 import Qwen25VisionConfig, Qwen25VisionTower, plan_patches
from ..towers.weights import QWEN2_5, qwen_vision_entries
from .family import Family, Medium, Run
from .image_family import (
    TowerModel,
    one_size,
    qwen_tower_sizes,
    qwen_vision,
    qwen_written,
    text_part,
    vision_part,
    whole,
)
from .text_families import TEXT_TABLE, read_head_dim

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
TEXT = "qwen2_5_vl_text"
_WINDOW_KINDS = {True: "sliding_attention", False: "full_attention"}
SECTIONS = (16, 24, 24)
"""Of M-RoPE, where the configuration names none."""
_SCALING_FIELDS = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale"),
    *("mscale_all_dim", "short_factor", "long_factor", "attention_factor"),
)


@dataclasses.dataclass(frozen=True)
class Qwen25VLConfig:
    """The whole backbone: both towers and the token ids that stand for images and videos.

    `video_rule` says where text behind a video goes on (`inputs/positions.py`); no file has it.
    """

    text: DecoderConfig
    vision: Qwen25VisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    end_tokens: tuple[int, ...] = ()
    tokens_per_second: int = 2
    video_rule: VideoRule = "max"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], angles: str = "float32", regime: Regime = None) -> "Qwen25VLConfig":
        """Reads `config.json`: nested (`text_config`) or flat text fields, `rope_parameters` or `rope_scaling`.

        Raises:
          ConfigError: a key that is not known, or has a value this port does not know.
        """
        # Flat text fields may stand at the top level, which is then the text part as well.
        model = whole(raw, "qwen2_5_vl", DEFAULTS[TEXT] | ONLY[TEXT])
        nested = raw.get("text_config") is not None
        kinds = (TEXT, "qwen2_5_vl") if nested else ()
        part = text_part(model if nested else {**model, "text_config": raw}, raw, kinds)
        text = complete(part, TEXT, TEXT_TABLE, drop=DEFAULTS["qwen2_5_vl"])
        if need(text, "hidden_act") != "silu":
            raise ConfigError(f"hidden_act: got {text['hidden_act']!r} for Qwen2.5-VL; expected 'silu'")

        rope = read_rope(text, read_head_dim(text), angles=angles, regime=regime, sections=SECTIONS)
        decoder = read_decoder(text, rope, attention_bias=True, **read_window(text))

        # Released files call the patch `spatial_patch_size` and the channels `in_chans`.
        vision = vision_part(model, "qwen2_5_vl_vision", "qwen2_5_vl")
        patch = vision.get("spatial_patch_size") if vision.get("patch_size") is None else vision["patch_size"]
        tower = Qwen25VisionConfig(
            **qwen_tower_sizes(vision, decoder),
            patch=one_size({"patch_size": patch}, "patch_size"),
            window=need(vision, "window_size"),
            full_layers=tuple(need(vision, "fullatt_block_indexes")),
            channels=vision.get("in_chans") or vision["in_channels"],
        )

        # One token, several, or none.
        end = text.get("eos_token_id")
        end_tokens = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
        if any(type(token) is not int for token in end_tokens):
            raise ConfigError(f"eos_token_id: got {end!r}; expected a token id or a list of them")
        return cls(
            text=decoder,
            vision=tower,
            image_token=need(model, "image_token_id"),
            video_token=need(model, "video_token_id"),
            vision_start_token=need(model, "vision_start_token_id"),
            vision_end_token=need(model, "vision_end_token_id"),
            end_tokens=end_tokens,
            tokens_per_second=need(vision, "tokens_per_second"),
        )

    @property
    def family(self) -> Family:
        """Qwen2.5-VL."""
        return FAMILY

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` in the released (flat) form; `from_dict` reads it back.

        Written from the fields and not, as other families do it, from the file that was read: fingerprints of stored
        chunks are taken over this form.
        """
        text, vision = self.text, self.vision
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen2_5_vl",
            "vocab_size": text.vocabulary,
            "hidden_size": text.width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "intermediate_size": text.intermediate,
            "hidden_act": text.activation,
            "rms_norm_eps": text.norm_epsilon,
            "rope_theta": text.rope.theta,
            "rope_scaling": _rope_entry(text.rope),
            "tie_word_embeddings": text.tied_embeddings,
            "use_sliding_window": text.window is not None,
            "torch_dtype": text.dtype,
            "image_token_id": self.image_token,
            "video_token_id": self.video_token,
            "vision_start_token_id": self.vision_start_token,
            "vision_end_token_id": self.vision_end_token,
            "eos_token_id": list(self.end_tokens),
            "vision_config": {
                "depth": vision.depth,
                "hidden_size": vision.width,
                "num_heads": vision.heads,
                "intermediate_size": vision.intermediate,
                "out_hidden_size": vision.output_width,
                "hidden_act": vision.activation,
                "in_chans": vision.channels,
                "patch_size": vision.patch,
                "spatial_patch_size": vision.patch,
                "spatial_merge_size": vision.merge,
                "temporal_patch_size": vision.temporal,
                "window_size": vision.window,
                "fullatt_block_indexes": list(vision.full_layers),
                "tokens_per_second": self.tokens_per_second,
                **({} if vision.theta == 1e4 else {"rope_theta": vision.theta}),
            },
            **self._lengths(),
        }

    def _lengths(self) -> dict[str, Any]:
        """Returns what is written only where it counts, so that fingerprints of plain models stay as they were."""
        scaling, window = self.text.rope.scaling, self.text.window
        found: dict[str, Any] = {}
        if scaling is not None and scaling.kind == "dynamic":
            found |= {"max_position_embeddings": scaling.original}
        if window is not None:
            found |= {"sliding_window": window, "max_window_layers": 0}
        if self.text.window_layers is not None:
            kinds = [_WINDOW_KINDS[self.text.slides(layer)] for layer in range(self.text.layers)]
            found |= {"layer_types": kinds}
        return found


def _rope_entry(rope: Rope) -> dict[str, Any]:
    """Returns `rope_scaling` as `read_rope` reads it back."""
    table: dict[str, Any] = {"type": "mrope", "mrope_section": list(rope.sections or ())}
    if rope.scaling is None:
        return table

    # The original length of a dynamic rope is the model's own, which `_lengths` writes beside the table.
    kept = {name: value for name, value in dataclasses.asdict(rope.scaling).items() if name in _SCALING_FIELDS}
    more = {} if rope.scaling.kind == "dynamic" else {"original_max_position_embeddings": rope.scaling.original}
    return (
        table
        | {"type": rope.scaling.kind}
        | {name: value for name, value in (kept | more).items() if value is not None}
    )


def _positions(config: Qwen25VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionConfig(config.image_token, config.video_token, config.vision.merge, config.tokens_per_second)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, arrays.get("second_per_grid_ts"), rule, config.video_rule)[0]


def video_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns one run of placeholders between start and end for video `index`."""
    pads = int(np.prod(arrays["video_grid_thw"][index])) // config.vision.merge**2
    return [config.vision_start_token, *[config.video_token] * pads, config.vision_end_token]


VIDEO_SETTINGS = VideoConfig.reader(
    image_mean=ImageConfig.image_mean,
    image_std=ImageConfig.image_std,
    resample=3,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    size={"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
)


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=Qwen25VLConfig.from_dict,
    module=functools.partial(TowerModel, Qwen25VisionTower),
    entries=lambda config, _: decoder_entries(config.text) + qwen_vision_entries(config.vision, QWEN2_5, "visual"),
    positions=_positions,
    vision=qwen_vision(plan_patches, "windows", "frames"),
    video=Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, qwen_written),
    model_type="qwen2_5_vl",
)
