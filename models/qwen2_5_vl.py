"""Qwen2.5-VL: configuration, weight map and the assembled backbone (vision tower and decoder).

Source: transformers' Qwen2_5_VLForConditionalGeneration, whose released and newer configuration keys are both read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.rope import Rope

from .decoder import Decoder, DecoderConfig
from .family import Family, Vision
from .family import abstract as abstract
from .family import parameters as parameters
from .family import with_parameters as with_parameters
from .image_family import check_placeholders, one_kind_of_grid, pads_between_ends, refuse_regime
from .positions import PositionConfig, get_rope_positions
from .preprocessing import ImageConfig, preprocess_images
from .qwen2_5_vl_weights import weight_map
from .vision_common import place_features
from .vision_qwen2_5 import VisionConfig, VisionTower, plan_patches

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class Qwen25VLConfig:
    """The whole backbone: both towers and the token ids that stand for images."""

    text: DecoderConfig
    vision: VisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    end_tokens: tuple[int, ...] = ()
    tokens_per_second: int = 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], angles: str = "float32") -> "Qwen25VLConfig":
        """Read `config.json`: nested (`text_config`) or flat text fields, `rope_parameters` or `rope_scaling`.

        Raises:
          ConfigError: a key that is missing or has a value this port does not know.
        """
        text = {**raw, **raw.get("text_config", {})}
        need = lambda table, *names: _need(table, names)
        if need(text, "hidden_act") != "silu":
            raise ConfigError(f"hidden_act {text['hidden_act']!r} is not known for Qwen2.5-VL; expected 'silu'")
        if text.get("use_sliding_window"):
            raise ConfigError("use_sliding_window=True is not built for Qwen2.5-VL; expected False")
        heads, width = need(text, "num_attention_heads"), need(text, "hidden_size")
        head_dim = text.get("head_dim") or width // heads
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        theta = scaling.get("rope_theta", text.get("rope_theta"))
        sections = scaling.get("mrope_section")
        if theta is None or sections is None:
            raise ConfigError(f"rope_theta {theta!r} and mrope_section {sections!r}: expected both in config.json")
        rope = Rope(float(theta), head_dim, sections=tuple(sections), order="blocked", angles=angles)  # type: ignore[arg-type]
        decoder = DecoderConfig(
            vocabulary=need(text, "vocab_size"),
            width=width,
            layers=need(text, "num_hidden_layers"),
            heads=heads,
            kv_heads=need(text, "num_key_value_heads"),
            head_dim=head_dim,
            intermediate=need(text, "intermediate_size"),
            rope=rope,
            norm_epsilon=text.get("rms_norm_eps", 1e-6),
            attention_bias=True,
            tied_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            dtype=text.get("dtype") or text.get("torch_dtype") or "float32",
        )
        end = text.get("eos_token_id", ())
        return cls(
            text=decoder,
            vision=_vision(need(raw, "vision_config"), decoder),
            image_token=need(raw, "image_token_id"),
            video_token=need(raw, "video_token_id"),
            vision_start_token=need(raw, "vision_start_token_id"),
            vision_end_token=need(raw, "vision_end_token_id"),
            end_tokens=tuple(end) if isinstance(end, list | tuple) else () if end is None else (int(end),),
            tokens_per_second=raw["vision_config"].get("tokens_per_second", 2),
        )

    @property
    def family(self) -> Family:
        """Qwen2.5-VL."""
        return FAMILY

    def to_dict(self) -> dict[str, Any]:
        """`config.json` in the released (flat) form; `from_dict` reads it back."""
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
            "rope_scaling": {"type": "mrope", "mrope_section": list(text.rope.sections or ())},
            "tie_word_embeddings": text.tied_embeddings,
            "use_sliding_window": False,
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
            },
        }


def _need(table: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in table and table[name] is not None:
            return table[name]
    raise ConfigError(f"config.json has no {names[0]!r}; expected it for {ARCHITECTURE}")


def _vision(raw: Mapping[str, Any], text: DecoderConfig) -> VisionConfig:
    config = VisionConfig(
        depth=_need(raw, ("depth",)),
        width=_need(raw, ("hidden_size",)),
        heads=_need(raw, ("num_heads",)),
        intermediate=_need(raw, ("intermediate_size",)),
        output_width=_need(raw, ("out_hidden_size",)),
        patch=_need(raw, ("patch_size", "spatial_patch_size")),
        merge=_need(raw, ("spatial_merge_size",)),
        temporal=_need(raw, ("temporal_patch_size",)),
        window=_need(raw, ("window_size",)),
        full_layers=tuple(_need(raw, ("fullatt_block_indexes",))),
        channels=raw.get("in_channels", raw.get("in_chans", 3)),
        activation=raw.get("hidden_act", "silu"),
        dtype=text.dtype,
    )
    if config.output_width != text.width:
        raise ConfigError(f"vision out_hidden_size {config.output_width}; expected the text width {text.width}")
    return config


class Qwen25VL(nnx.Module):
    """Tower and decoder with their parameters."""

    def __init__(self, config: Qwen25VLConfig, rngs: nnx.Rngs):
        self.visual = VisionTower(config.vision, rngs)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def embed(
        self, input_ids: Int[Array, "B T"], pixel_values: Float[Array, "P F"] | None, plan: Mapping[str, Array] | None
    ) -> Float[Array, "B T D"]:
        """Token embeddings with image features put where the image and video placeholders stand, in order."""
        embeddings = self.decoder.embed(input_ids)
        if pixel_values is None or plan is None:
            return embeddings
        pads = (input_ids == self.config.image_token) | (input_ids == self.config.video_token)
        return place_features(embeddings, self.visual(pixel_values, **plan), pads)


def _position_config(config: Qwen25VLConfig) -> PositionConfig:
    return PositionConfig(config.image_token, config.video_token, config.vision.merge, config.tokens_per_second)


def _positions(config: Qwen25VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, None, _position_config(config))[0]


def _plan(config: Qwen25VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    grids = one_kind_of_grid(arrays)
    if grids is None:
        return None
    plan = plan_patches(config.vision, grids)
    patches, pads = plan["rows"].size, (config.image_token, config.video_token)
    shape = (patches, config.vision.features)
    check_placeholders(input_ids, pads, patches // config.vision.merge**2, arrays.get("pixel_values"), shape)
    return plan


def _read(raw: Mapping[str, Any], angles: str, regime: str | int | None) -> Qwen25VLConfig:
    refuse_regime(regime, ARCHITECTURE)
    return Qwen25VLConfig.from_dict(raw, angles)


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=Qwen25VL,
    entries=lambda config, shapes: weight_map(config),
    positions=_positions,
    vision=Vision(
        ImageConfig.from_directory,
        preprocess_images,
        pads_between_ends,
        _plan,
        fills=lambda config: {"windows": 1, "frames": 1},
    ),
    model_type="qwen2_5_vl",
)
