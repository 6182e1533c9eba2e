"""Qwen2.5-Omni's and Qwen3-Omni's thinkers: Qwen2.5-VL or Qwen3-VL-MoE beside an audio encoder.

A thinker is a vision tower, an audio encoder and a decoder. Full releases hold a talker and a vocoder beside it, whose
tensors are not read. Source: transformers' Qwen2_5OmniThinkerForConditionalGeneration and
Qwen3OmniMoeThinkerForConditionalGeneration.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.positions import PositionRule, get_rope_positions
from ..inputs.processors import Reader, Settings
from ..inputs.sounds import process_whisper, whisper_settings
from ..inputs.texts import texts_of
from ..inputs.video_frames import FPS
from ..inputs.videos import patch_settings, process_qwen2_videos
from ..towers.packed import PackedTower
from ..towers.qwen_audio import FILLS, AudioConfig, Qwen3AudioTower, Qwen25AudioTower, plan_audio
from ..towers.weights import QWEN3_OMNI_MERGERS, qwen3_vision_entries, qwen_audio_entries, qwen_vision_entries
from .config_file import ConfigFile
from .family import VIDEO_SOUNDS, Family, Medium, Shapes
from .image_family import TowerModel
from .parsed import Table
from .qwen import QwenConfig, qwen_vision, video_written
from .qwen2_vl import read_qwen2_5_tower
from .qwen3_vl import read_qwen3_tower

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


def _read(file: ConfigFile, thinker: str, read_tower: Callable[[Mapping[str, Any], DecoderConfig], Any]) -> OmniConfig:
    """Reads `config.json` of a thinker, or of a full release that has one inside, with the release's dtype."""
    inside = file.raw.get("thinker_config")
    if inside is not None:
        typed = {name: file.raw[name] for name in ("dtype", "torch_dtype") if file.raw.get(name) is not None}
        raw = typed | dict(inside) | {"architectures": [thinker]}
        file = dataclasses.replace(file, family=FAMILIES[thinker], raw=raw, model=file.model["thinker_config"])
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

    def __init__(self, audio: Callable[[AudioConfig, nnx.Rngs], Any], config: OmniConfig, rngs: nnx.Rngs):
        super().__init__(PackedTower, config, rngs)
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

    return Medium(settings, process, tokens, video_written)


SECONDS = 2.0
"""Of a video and of its sound, that follow each other in turn in Qwen2.5-Omni."""


def by_turns(shown: Float[np.ndarray, " n"], sounds: int, rate: int | float) -> Bool[np.ndarray, " both"]:
    """Orders a video's tokens and those of its sound: two seconds of the one, then of the other.

    A turn ends at the first token that is beyond it, at most one turn per token, as in the authors' code.
    """
    size = int(rate * SECONDS)
    turns = []
    for times in (shown * rate, np.arange(sounds)):
        edges = [0]
        for number, time in enumerate(times):
            if time >= len(edges) * size:
                edges.append(number)
        turns.append(np.diff([*edges, len(times)]))
    lengths = itertools.zip_longest(*turns, fillvalue=0)
    return np.concatenate([np.repeat([True, False], pair) for pair in lengths])


def by_time(shown: Float[np.ndarray, " n"], sounds: int, rate: int | float) -> Bool[np.ndarray, " both"]:
    """Orders a video's tokens and those of its sound by time; at the same time the video's come first."""
    times = np.concatenate([shown * rate, np.arange(sounds)])
    return np.argsort(times, kind="stable") < len(shown)


def _entries_2_5(config: OmniConfig, shapes: Shapes) -> list[TensorEntry]:
    vision = qwen_vision_entries(config.vision, "visual")
    return decoder_entries(config.text) + vision + qwen_audio_entries(config.audio, "audio_tower")


def _entries_3(config: OmniConfig, shapes: Shapes) -> list[TensorEntry]:
    decoder = decoder_entries(config.text, fused_experts=expert_layout(config.text, shapes, "model."))
    vision = qwen3_vision_entries(config.vision, "visual", mergers=QWEN3_OMNI_MERGERS)
    return decoder + vision + qwen_audio_entries(config.audio, "audio_tower")


def _families(name: str, model_type: str, read_tower: Callable[..., Any], padded: bool, **parts: Any) -> list[Family]:
    """Returns the families of a thinker alone and of a full release; sounds are `padded` with silence, or mirrored."""
    thinker = f"{name}ThinkerForConditionalGeneration"
    read = functools.partial(_read, thinker=thinker, read_tower=read_tower)
    alone = Family(thinker, read, audio=sound_medium(padded), model_type=f"{model_type}_thinker", **parts)
    return [alone, dataclasses.replace(alone, architecture=f"{name}ForConditionalGeneration", model_type=model_type)]


FAMILIES = {
    family.architecture: family
    for family in (
        *_families(
            "Qwen2_5Omni",
            "qwen2_5_omni",
            functools.partial(read_qwen2_5_tower, fused=False),
            padded=True,
            module=functools.partial(OmniModel, Qwen25AudioTower),
            entries=_entries_2_5,
            positions=omni_positions(fractional=False),
            vision=qwen_vision(),
            video=video_medium(patch_settings(14, 128 * 28 * 28, 768 * 28 * 28), by_turns),
        ),
        *_families(
            "Qwen3OmniMoe",
            "qwen3_omni_moe",
            read_qwen3_tower,
            padded=False,
            module=functools.partial(OmniModel, Qwen3AudioTower),
            entries=_entries_3,
            positions=omni_positions(fractional=True),
            vision=qwen_vision(),
            video=video_medium(patch_settings(16, 128 * 32 * 32, 768 * 32 * 32, halves=True), by_time),
        ),
    )
}
