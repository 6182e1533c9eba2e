"""What Qwen2.5-Omni and Qwen3-Omni share: their thinkers' configuration, model, positions, sounds and videos.

A thinker is a vision tower, an audio encoder and a decoder. Full releases hold a talker and a vocoder beside it, whose
tensors are not read. Source: transformers' Qwen2_5OmniThinkerForConditionalGeneration and
Qwen3OmniMoeThinkerForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..inputs.positions import PositionRule, get_rope_positions
from ..inputs.processors import Reader, Settings
from ..inputs.sounds import process_whisper, whisper_settings
from ..inputs.texts import texts_of
from ..inputs.video_frames import FPS
from ..inputs.videos import process_qwen2_videos
from ..towers.qwen_audio import FILLS, AudioConfig, plan_audio
from .config_file import ConfigFile
from .family import VIDEO_SOUNDS, Family, Medium
from .image_family import TowerModel, qwen_written
from .parsed import Table
from .qwen3_vl import QwenConfig

MARKS = {"vision_start_token": 151652, "vision_end_token": 151653, "audio_end_token": None}
"""Ids that the classes do not name, where `config.json` leaves them out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniConfig(QwenConfig):
    """A thinker: its towers, its decoder, and the ids that stand for images, videos and audio.

    `tokens_per_second` are positions per second of video.
    """

    audio: AudioConfig
    audio_token: int
    audio_start_token: int
    audio_end_token: int | None
    tokens_per_second: int | float

    def __post_init__(self) -> None:
        if self.audio.output_width != self.text.width:
            raise ConfigError(
                f"audio output_dim: got {self.audio.output_width}; expected the text width {self.text.width}"
            )


def read_thinker(
    file: ConfigFile, thinker: Family, read_tower: Callable[[Mapping[str, Any], DecoderConfig], Any]
) -> OmniConfig:
    """Reads `config.json` of a thinker, or of a full release that has one inside, with the release's dtype."""
    inside = file.raw.get("thinker_config")
    if inside is not None:
        typed = {name: file.raw[name] for name in ("dtype", "torch_dtype") if file.raw.get(name) is not None}
        raw = typed | dict(inside) | {"architectures": [thinker.architecture]}
        file = dataclasses.replace(file, family=thinker, raw=raw, model=file.model["thinker_config"])
    model, text = file.model, file.text()
    return file.config(
        OmniConfig,
        text,
        vision=read_tower(file.part("vision_config"), text),
        audio=_read_audio(file.part("audio_config"), text.dtype),
        **file.tokens("image_token", "video_token", "audio_token", "audio_start_token"),
        **{name: model.get(f"{name}_id", token) for name, token in MARKS.items()},
        tokens_per_second=need(model, "position_id_per_seconds"),
    )


def _read_audio(raw: Table, dtype: str) -> AudioConfig:
    """Reads the audio part of a thinker's configuration."""
    chunk = 2 * raw["n_window"]
    return AudioConfig(
        mels=raw["num_mel_bins"],
        depth=raw["encoder_layers"],
        width=raw["d_model"],
        heads=raw["encoder_attention_heads"],
        intermediate=raw["encoder_ffn_dim"],
        output_width=raw["output_dim"],
        chunk=chunk,
        positions=raw["max_source_positions"],
        attention_chunks=raw["n_window_infer"] // chunk if "n_window_infer" in raw else 1,
        downsampling=raw.get("downsample_hidden_size", 0),
        activation=raw["activation_function"],
        dtype=dtype,
    )


class OmniModel(TowerModel):
    """Vision tower, audio encoder and decoder with their parameters."""

    def __init__(
        self,
        tower: Callable[[Any, nnx.Rngs], Any],
        audio: Callable[[AudioConfig, nnx.Rngs], Any],
        config: OmniConfig,
        rngs: nnx.Rngs,
    ):
        super().__init__(tower, config, rngs)
        self.audio = audio(config.audio, rngs)

    def encode_audio(self, inputs: Float[Array, "C F M"], plan: Mapping[str, Array]) -> Float[Array, "one E D"]:
        """Returns the features of sounds, which `plan_audio` cut into chunks."""
        return self.audio(inputs, **plan)[None]


def omni_positions(fractional: bool) -> Callable[[OmniConfig, np.ndarray, Mapping[str, Any]], np.ndarray]:
    """Returns the rule of positions of a family: Qwen3-Omni's times are fractional, Qwen2.5-Omni's truncated."""

    def positions(config: OmniConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
        frames = np.asarray(arrays.get("feature_attention_mask", np.zeros((0, 0)))).sum(axis=1)
        rule = PositionRule(
            config.image_token,
            config.video_token,
            config.vision.merge,
            config.tokens_per_second,
            config.audio_token,
            (config.vision_start_token, config.audio_start_token),
            fractional,
        )
        grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
        seconds = np.asarray(arrays.get("second_per_grid_ts", ()), np.float32)
        sounds = [config.audio.tokens(int(count)) for count in frames]
        return get_rope_positions(input_ids, *grids, seconds, rule, sounds)

    return positions


def plan_sounds(config: OmniConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """Returns what the audio encoder takes of a prompt; None without sounds.

    Raises:
      InputError: features and mask of other shapes, or placeholders that are not as many as the sounds ask for.
    """
    features, mask = arrays.get("input_features"), arrays.get("feature_attention_mask")
    if features is None and mask is None:
        return None
    shapes, mels = (
        (np.shape(() if features is None else features), np.shape(() if mask is None else mask)),
        config.audio.mels,
    )
    if len(shapes[0]) != 3 or shapes[0][1] != mels or shapes[1] != (shapes[0][0], shapes[0][2]):
        raise InputError(
            f"input_features, feature_attention_mask: got shapes {shapes[0]} and {shapes[1]}; expected "
            f"[sounds, {mels}, frames] and [sounds, frames]"
        )
    if not shapes[0][0]:
        return None

    mask = np.asarray(mask)
    expected = sum(config.audio.tokens(int(frames)) for frames in mask.sum(axis=1))
    found = int((input_ids == config.audio_token).sum())
    if found != expected:
        raise InputError(f"input_ids: got {found} audio placeholders; expected {expected} for the sounds given")
    return plan_audio(config.audio, np.asarray(features), mask)


def sound_medium(padded: bool) -> Medium:
    """Returns what a family does with sounds; `padded` as `log_mel` takes it."""

    def tokens(config: OmniConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
        before, after = _sound_marks(config)
        count = config.audio.tokens(int(arrays["feature_attention_mask"][index].sum()))
        return [*before, *[config.audio_token] * count, *after]

    def written(config: OmniConfig, tokenizer: Any) -> tuple[str, str, str]:
        before, after = _sound_marks(config)
        pad, start, end = texts_of(tokenizer, [config.audio_token, *before, *after])
        return pad, start, end

    process = functools.partial(process_whisper, padded=padded)
    return Medium(whisper_settings, process, tokens, written, plan=plan_sounds, fills=lambda config: FILLS)


def _sound_marks(config: OmniConfig) -> tuple[list[int], list[int]]:
    """Returns the ids before and after a sound."""
    if config.audio_end_token is None:
        raise InputError(
            "audio: got a configuration without audio_end_token_id; expected one, or token ids of a prompt"
        )
    return [config.audio_start_token], [config.audio_end_token]


def video_medium(settings: Reader, interleaved: Callable[..., np.ndarray]) -> Medium:
    """Returns what a family does with videos.

    Args:
      interleaved: (seconds at which each of a video's tokens is shown, tokens of its sound, positions per second) →
        True for tokens of the video, in the order of both.
    """

    def process(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
        arrays, temporal = process_qwen2_videos(videos, settings), settings["temporal_patch_size"]
        # As the authors' processors count: by the rate that was asked for, not by that of the frames that were found.
        seconds = arrays["second_per_grid_ts"].astype(np.float64)
        for number, video in enumerate(videos):
            given = video.rate is not None or video.timestamps is not None
            if video.frames is None and (video.fps is not None or not given):
                seconds[number] = temporal / (video.fps or settings["fps"] or FPS)
        return arrays | {"second_per_grid_ts": seconds}

    def tokens(config: OmniConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
        time, height, width = (int(size) for size in arrays["video_grid_thw"][index])
        frame = height * width // config.vision.merge**2
        start, end, sound = [config.vision_start_token], [config.vision_end_token], arrays[VIDEO_SOUNDS][index]
        if sound is None:
            return [*start, *[config.video_token] * (time * frame), *end]

        before, after = _sound_marks(config)
        count = config.audio.tokens(int(arrays["feature_attention_mask"][sound].sum()))
        shown = np.repeat(np.arange(time), frame) * float(arrays["second_per_grid_ts"][index])
        mixed = interleaved(shown, count, config.tokens_per_second)
        return [*start, *before, *np.where(mixed, config.video_token, config.audio_token).tolist(), *after, *end]

    return Medium(settings, process, tokens, qwen_written)
