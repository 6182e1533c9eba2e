"""Gemma 4: a vision tower of any resolution, in the small releases an audio tower, Gemma's text tower.

Where the configuration says so, an image's tokens (and those of a video's frame) see each other whatever their order,
in the layers that slide. Source: transformers' Gemma4ForConditionalGeneration and Gemma4Processor.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need, read_axial_theta
from ..decoder.weights import decoder_entries
from ..inputs.processors import own_settings, process_images, processor
from ..inputs.sounds import gemma4_settings, process_gemma4_sounds
from ..inputs.texts import texts_of
from ..inputs.videos import minutes, process_gemma4_videos
from ..towers.gemma4 import Gemma4VisionConfig, Gemma4VisionTower, gemma4_vision_entries, plan_patches
from ..towers.gemma4_audio import REDUCED, Gemma4AudioConfig, Gemma4AudioTower, gemma4_audio_entries, plan_audio
from .config_file import ConfigFile, FamilyConfig
from .family import Family, Medium, Run, Shapes, Vision, image_runs
from .gemma_text import NORMS
from .image_family import TowerModel, check_placeholders

ARCHITECTURE = "Gemma4ForConditionalGeneration"
_MEDIA = (("pixel_values", "image_position_ids"), ("pixel_values_videos", "video_position_ids"))
"""Pixels and the patches' places, of images and of videos."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(FamilyConfig):
    """The whole backbone.

    Attributes:
      audio, audio_token, audio_edges: None of a release that hears nothing.
      image_edges, audio_edges: the tokens before and behind an image, or a frame, and a sound.
    """

    vision: Gemma4VisionConfig
    audio: Gemma4AudioConfig | None
    image_token: int
    video_token: int
    audio_token: int | None
    image_edges: tuple[int, int]
    audio_edges: tuple[int, int] | None


class Gemma4Model(TowerModel):
    """Vision tower, decoder and, where there is one, audio tower with their parameters."""

    def __init__(self, config: Gemma4Config, rngs: nnx.Rngs):
        super().__init__(Gemma4VisionTower, config, rngs)
        self.audio = None if config.audio is None else Gemma4AudioTower(config.audio, rngs)

    def encode_audio(self, inputs: Float[Array, "F M"], plan: Mapping[str, Array]) -> Float[Array, "one E D"]:
        """Returns the features of sounds, which `plan_audio` laid in a row."""
        assert self.audio is not None
        return self.audio(inputs, **plan)[None]


def _read(file: ConfigFile) -> Gemma4Config:
    text, hears = file.text("gemma4_text"), file.raw.get("audio_config") is not None
    start, end = file.tokens("boi_token", "eoi_token").values()
    before, after = file.tokens("boa_token", "eoa_token").values()
    return file.config(
        Gemma4Config,
        text,
        vision=_read_vision(file, text),
        audio=_read_audio(file.part("audio_config"), text) if hears else None,
        **file.tokens("image_token", "video_token"),
        audio_token=file.tokens("audio_token")["audio_token"] if hears else None,
        image_edges=(start, end),
        audio_edges=(before, after) if hears else None,
    )


def _read_vision(file: ConfigFile, text: DecoderConfig) -> Gemma4VisionConfig:
    vision = file.part("vision_config")
    # The class's own default, twelve heads, is that of one release alone.
    heads, kv_heads = vision["num_attention_heads"], file.raw["vision_config"].get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ConfigError(f"vision num_key_value_heads: got {kv_heads}; expected {heads}, as many as heads")
    if vision["attention_bias"]:
        raise ConfigError("vision attention_bias: got true, which is not built; expected false")
    return Gemma4VisionConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=heads,
        head_dim=need(vision, "head_dim"),
        intermediate=need(vision, "intermediate_size"),
        output_width=text.width,
        patch=vision["patch_size"],
        pool=vision["pooling_kernel_size"],
        positions=vision["position_embedding_size"],
        activation=vision["hidden_activation"],
        theta=read_axial_theta(vision),
        bounded=vision["use_clipped_linears"],
        standardised=vision["standardize"],
        epsilon=vision["rms_norm_eps"],
        dtype=text.dtype,
    )


def _read_audio(raw: Mapping[str, Any], text: DecoderConfig) -> Gemma4AudioConfig:
    left, right, chunk = (raw[f"attention_{name}"] for name in ("context_left", "context_right", "chunk_size"))
    if right or left < 2 or chunk != left - 1:
        raise ConfigError(
            f"audio attention: got chunks of {chunk}, {left} to the left and {right} to the right; expected none to "
            "the right, and one more to the left than a chunk"
        )
    channels = raw["subsampling_conv_channels"]
    if len(channels) != 2 or channels[0] % REDUCED:
        raise ConfigError(
            f"subsampling_conv_channels: got {channels!r}; expected two numbers, the first a multiple of {REDUCED}"
        )
    return Gemma4AudioConfig(
        depth=raw["num_hidden_layers"],
        width=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        output_width=text.width,
        inner_width=raw["output_proj_dims"],
        channels=(channels[0], channels[1]),
        kernel=raw["conv_kernel_size"],
        reach=left - 1,
        cap=raw["attention_logit_cap"],
        share=raw["residual_weight"],
        bound=raw["gradient_clipping"],
        activation=raw["hidden_act"],
        bounded=raw["use_clipped_linears"],
        epsilon=raw["rms_norm_eps"],
        dtype=text.dtype,
    )


def _entries(config: Gemma4Config, shapes: Shapes) -> list[TensorEntry]:
    entries = decoder_entries(config.text, prefix="model.language_model.", norms=NORMS)
    entries += gemma4_vision_entries("model.vision_tower", "model.embed_vision")
    if config.audio is not None:
        entries += gemma4_audio_entries("model.audio_tower", "model.embed_audio")
    return entries


def _grids(places: Int[np.ndarray, "n M 2"]) -> Int[np.ndarray, "n 2"]:
    """Returns rows and columns of the patches of each image."""
    return np.asarray(places).max(axis=1)[:, ::-1] + 1


def _plan(config: Gemma4Config, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Plans images, and behind them the frames of videos: their own patches alone, packed."""
    pixels, grids, vision = [], [], config.vision
    for values, places in _MEDIA:
        if arrays.get(values) is None:
            continue
        given, where = np.asarray(arrays[values]), np.asarray(arrays.get(places, ()))
        if given.ndim != 3 or given.shape[2] != vision.features or where.shape != (*given.shape[:2], 2):
            raise InputError(
                f"{values}: got shape {given.shape} and places {where.shape}; expected [images, patches, "
                f"{vision.features}] and [images, patches, 2]"
            )
        own, real = _grids(where), (where >= 0).all(axis=2)
        if (real.sum(axis=1) != own.prod(axis=1)).any() or own.max(initial=0) > vision.positions:
            raise InputError(
                f"{places}: got some that are no whole grid of at most {vision.positions} patches a side; expected "
                "every patch of an image once"
            )
        pixels.append(given[real])
        grids.append(own)
    if not pixels:
        return None

    packed, plan = np.concatenate(pixels), plan_patches(vision, np.concatenate(grids))
    pads = (config.image_token, config.video_token)
    check_placeholders(input_ids, pads, len(plan["merged"]), packed, (None, vision.features))
    return {"inputs": packed, **plan}


def _count(config: Gemma4Config, places: Int[np.ndarray, "M 2"]) -> int:
    return int(np.prod(_grids(places[None])[0])) // config.vision.pool**2


def _tokens(config: Gemma4Config, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    start, end = config.image_edges
    return [start, *[config.image_token] * _count(config, arrays["image_position_ids"][index]), end]


def _video_tokens(config: Gemma4Config, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns each frame between its edges, behind its time."""
    first = int(np.sum(arrays["num_frames_per_video"][:index]))
    run, (start, end) = list[int | str](), config.image_edges
    for frame in range(first, first + int(arrays["num_frames_per_video"][index])):
        pads = [config.video_token] * _count(config, arrays["video_position_ids"][frame])
        time = minutes(float(arrays["video_timestamps"][frame]))
        run += [f"{' ' if run else ''}{time} ", start, *pads, end]
    return run


def _video_written(config: Gemma4Config, tokenizer: Any) -> tuple[str, str, str]:
    return texts_of(tokenizer, [config.video_token])[0], "", ""


def _hears(config: Gemma4Config) -> tuple[int, tuple[int, int]]:
    """Returns the placeholder of sounds and what stands around it; raises InputError of a release without a tower."""
    if config.audio_token is None or config.audio_edges is None:
        raise InputError("audio: got some for a Gemma 4 without audio_config, which hears nothing; expected none")
    return config.audio_token, config.audio_edges


def _audio_tokens(config: Gemma4Config, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    pad, (start, end) = _hears(config)
    return [start, *[pad] * int(arrays["input_features_mask"][index][::2][::2].sum()), end]


def _audio_written(config: Gemma4Config, tokenizer: Any) -> tuple[str, str, str]:
    pad, edges = _hears(config)
    found = texts_of(tokenizer, [pad, *edges])
    return found[0], found[1], found[2]


def _audio_plan(config: Gemma4Config, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    features, mask = arrays.get("input_features"), arrays.get("input_features_mask")
    if features is None and mask is None:
        return None
    pad, _ = _hears(config)
    assert config.audio is not None
    shape, own = np.shape(() if features is None else features), np.shape(() if mask is None else mask)
    if len(shape) != 3 or shape[2] != config.audio.mels or own != shape[:2]:
        raise InputError(
            f"input_features, input_features_mask: got shapes {shape} and {own}; expected [sounds, frames, "
            f"{config.audio.mels}] and [sounds, frames]"
        )
    plan, count = plan_audio(np.asarray(features), np.asarray(mask, bool)), int((input_ids == pad).sum())
    if count != len(plan["tokens"]):
        raise InputError(
            f"input_ids: got {count} audio placeholders; expected {len(plan['tokens'])} for the sounds given"
        )
    return plan


def _ahead(config: Gemma4Config, input_ids: np.ndarray) -> np.ndarray | None:
    return image_runs(config, input_ids) if config.text.ahead_in_windows else None


_VIDEO_SETTINGS = own_settings(
    "video",
    image_mean=(0.0,) * 3,
    image_std=(1.0,) * 3,
    resample=3,
    do_normalize=True,
    num_frames=32,
    max_soft_tokens=70,
    pooling_kernel_size=3,
    patch_size=16,
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=Gemma4Model,
    entries=_entries,
    vision=Vision(
        processor("gemma4.Gemma4"), process_images, _tokens, _plan, fills=lambda config: {"images": 1, "merged": 1}
    ),
    video=Medium(_VIDEO_SETTINGS, process_gemma4_videos, _video_tokens, _video_written),
    audio=Medium(
        gemma4_settings,
        process_gemma4_sounds,
        _audio_tokens,
        _audio_written,
        plan=_audio_plan,
        fills=lambda config: {},
    ),
    model_type="gemma4",
    ahead=_ahead,
)
