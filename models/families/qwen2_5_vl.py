"""Qwen2.5-VL: configuration, weight map and the assembled backbone (vision tower and decoder).

Source: transformers' Qwen2_5_VLForConditionalGeneration, whose released and newer configuration keys are both read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import Regime, need, read_axial_theta, read_decoder, read_rope, read_window
from ..decoder.known_keys import DEFAULTS, ONLY, complete
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionConfig, get_rope_positions
from ..inputs.qwen_images import ImageConfig, preprocess_images
from ..towers.qwen2_5 import Qwen25VisionConfig, Qwen25VisionTower, plan_patches
from ..towers.weights import qwen2_5_vision_entries
from . import namings
from .family import Family, Shapes, Vision
from .image_family import check_output_width, one_size, packed_plan, pads_between_ends, text_part, vision_part, whole
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
    """The whole backbone: both towers and the token ids that stand for images."""

    text: DecoderConfig
    vision: Qwen25VisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    end_tokens: tuple[int, ...] = ()
    tokens_per_second: int = 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], angles: str = "float32", regime: Regime = None) -> "Qwen25VLConfig":
        """Reads `config.json`: nested (`text_config`) or flat text fields, `rope_parameters` or `rope_scaling`.

        Raises:
          ConfigError: a key that is not known, or has a value this port does not know.
        """
        model = whole(raw, "qwen2_5_vl", DEFAULTS[TEXT] | ONLY[TEXT])
        nested = raw.get("text_config") is not None
        kinds = (TEXT, "qwen2_5_vl") if nested else ()
        part = text_part(model if nested else {**model, "text_config": raw}, raw, kinds)
        text = complete(part, TEXT, TEXT_TABLE, drop=DEFAULTS["qwen2_5_vl"])
        if need(text, "hidden_act") != "silu":
            raise ConfigError(f"hidden_act: got {text['hidden_act']!r} for Qwen2.5-VL; expected 'silu'")

        rope = read_rope(text, read_head_dim(text), angles=angles, regime=regime, sections=SECTIONS)
        decoder = read_decoder(text, rope, attention_bias=True, **read_window(text))
        vision = vision_part(model, "qwen2_5_vl_vision", "qwen2_5_vl")
        return cls(
            text=decoder,
            vision=_vision(vision, decoder),
            image_token=need(model, "image_token_id"),
            video_token=need(model, "video_token_id"),
            vision_start_token=need(model, "vision_start_token_id"),
            vision_end_token=need(model, "vision_end_token_id"),
            end_tokens=_end_tokens(text.get("eos_token_id")),
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


def _end_tokens(given: Any) -> tuple[int, ...]:
    """Returns what `eos_token_id` names: a token, several, or none."""
    tokens = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if any(type(token) is not int for token in tokens):
        raise ConfigError(f"eos_token_id: got {given!r}; expected a token id or a list of them")
    return tokens


def _rope_entry(rope: Rope) -> dict[str, Any]:
    """Returns `rope_scaling` as `read_rope` reads it back."""
    table: dict[str, Any] = {"type": "mrope", "mrope_section": list(rope.sections or ())}
    if rope.scaling is None:
        return table

    kept = {name: value for name, value in dataclasses.asdict(rope.scaling).items() if name in _SCALING_FIELDS}
    more = {} if rope.scaling.kind == "dynamic" else {"original_max_position_embeddings": rope.scaling.original}
    return (
        table
        | {"type": rope.scaling.kind}
        | {name: value for name, value in (kept | more).items() if value is not None}
    )


def _vision(raw: Mapping[str, Any], text: DecoderConfig) -> Qwen25VisionConfig:
    patch = raw.get("spatial_patch_size") if raw.get("patch_size") is None else raw["patch_size"]
    config = Qwen25VisionConfig(
        depth=need(raw, "depth"),
        width=need(raw, "hidden_size"),
        heads=need(raw, "num_heads"),
        intermediate=need(raw, "intermediate_size"),
        output_width=need(raw, "out_hidden_size"),
        patch=one_size({"patch_size": patch}, "patch_size"),
        merge=need(raw, "spatial_merge_size"),
        temporal=one_size(raw, "temporal_patch_size"),
        window=need(raw, "window_size"),
        full_layers=tuple(need(raw, "fullatt_block_indexes")),
        channels=raw.get("in_chans") or raw["in_channels"],
        activation=need(raw, "hidden_act"),
        theta=read_axial_theta(raw),
        dtype=text.dtype,
    )
    check_output_width(config.output_width, text)
    return config


class Qwen25VL(nnx.Module):
    """Tower and decoder with their parameters."""

    def __init__(self, config: Qwen25VLConfig, rngs: nnx.Rngs):
        self.visual = Qwen25VisionTower(config.vision, rngs)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "P F"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features, n = 1."""
        return self.visual(pixel_values, **plan)[None]


def _positions(config: Qwen25VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionConfig(config.image_token, config.video_token, config.vision.merge, config.tokens_per_second)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, arrays.get("second_per_grid_ts"), rule)[0]


def _entries(config: Qwen25VLConfig, shapes: Shapes) -> list[TensorEntry]:
    return decoder_entries(config.text) + qwen2_5_vision_entries(config.vision, "visual")


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=Qwen25VLConfig.from_dict,
    module=Qwen25VL,
    entries=_entries,
    positions=_positions,
    vision=Vision(
        ImageConfig.from_directory,
        preprocess_images,
        pads_between_ends,
        packed_plan(plan_patches),
        fills=lambda config: {"windows": 1, "frames": 1},
    ),
    model_type="qwen2_5_vl",
    namings=namings.QWEN2_5_VL,
)
