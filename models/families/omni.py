"""What Qwen2.5-Omni and Qwen3-Omni share: their thinkers' configuration, model, inputs and plan.

A thinker is a vision tower, an audio encoder and a decoder. Full releases hold a talker and a vocoder beside it, whose
tensors are not read. Source: transformers' Qwen2_5OmniThinkerForConditionalGeneration and
Qwen3OmniMoeThinkerForConditionalGeneration.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import Naming, same
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.known_keys import complete
from ..inputs.mel import MelConfig
from ..inputs.omni_positions import OmniPositionConfig, get_omni_positions
from ..inputs.qwen_images import CONFIG_FILE, ImageConfig, preprocess_images, read_settings
from ..towers.qwen2_5 import Qwen25VisionConfig
from ..towers.qwen3 import Qwen3VisionConfig
from ..towers.qwen_audio import PLAN, SEGMENTS, TOKENS, AudioConfig, plan_audio
from .family import Family, Vision
from .image_family import TowerModel, thaw

MARKS = ("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id")
PARTS = ("model.", "visual.", "audio_tower.", "lm_head.")
NAMINGS = (
    same("as a thinker of its own", *PARTS),
    Naming("as released, the thinker beside a talker", tuple((f"thinker.{part}", part) for part in PARTS)),
    Naming(
        "as transformers' modules (save_original_format=False, state dictionaries of training scripts)",
        (
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
            ("model.audio_tower.", "audio_tower."),
            ("lm_head.", "lm_head."),
        ),
    ),
)
IGNORE = (
    r"talker\..*",
    r"token2wav\..*",
    r"code2wav\..*",
    r"(thinker\.)?(model\.)?audio_tower\.audio_bos_eos_token\..*",
)
"""Tensors of a full release that a thinker does not read. Its forward never reads the audio encoder's own marks."""
INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    *("input_features", "feature_attention_mask"),
)
_ORDER, _HEARD = "order", "heard"


@dataclasses.dataclass(frozen=True)
class OmniConfig:
    """A thinker: its towers, its decoder, and the ids that stand for images, videos and audio.

    Attributes:
      family: Qwen2.5-Omni or Qwen3-Omni.
      tokens_per_second: positions per second of video.
      raw: the thinker's configuration as it was read.
    """

    family: Family
    text: DecoderConfig
    vision: Qwen25VisionConfig | Qwen3VisionConfig
    audio: AudioConfig
    image_token: int
    video_token: int
    audio_token: int
    vision_start_token: int
    vision_end_token: int
    audio_start_token: int
    audio_end_token: int | None
    tokens_per_second: int | float
    raw: str

    def __post_init__(self) -> None:
        if self.audio.output_width != self.text.width:
            raise ConfigError(
                f"audio output_dim: got {self.audio.output_width}; expected the text width {self.text.width}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the thinker's `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.family.architecture, self.text.dtype)


@dataclasses.dataclass(frozen=True)
class OmniSettings:
    """How images and audio become arrays: both are of `preprocessor_config.json`."""

    image: ImageConfig
    audio: MelConfig

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> "OmniSettings":
        """Reads the settings of a Hugging Face directory.

        Raises:
          ConfigError: the file is absent, not JSON, or holds a field of the wrong kind.
        """
        fields = read_settings(directory)
        return cls(ImageConfig.from_dict(fields), MelConfig.from_dict(fields))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes `preprocessor_config.json` as transformers reads it. Returns its path."""
        path = self.image.save(directory)
        fields = json.loads(path.read_text(encoding="utf-8")) | dataclasses.asdict(self.audio)
        fields |= {"feature_extractor_type": "WhisperFeatureExtractor", "return_attention_mask": True}
        Path(directory, CONFIG_FILE).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def thinker_of(raw: Mapping[str, Any], kind: str, thinker: str) -> Mapping[str, Any]:
    """Returns a thinker's configuration: the table itself, or that inside a full release, with the release's dtype.

    Args:
      raw: config.json. kind: the release's `model_type`. thinker: the architecture's name of a thinker.
    """
    if raw.get("thinker_config") is None:
        return raw
    whole = complete(raw, kind)
    typed = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    return typed | dict(whole["thinker_config"]) | {"architectures": [thinker]}


def read_audio(model: Mapping[str, Any], kind: str, dtype: str) -> AudioConfig:
    """Reads the audio part of a thinker's configuration.

    Raises:
      ConfigError: no such part, a key that is not known, or a depth that is said twice and differs.
    """
    part = need(model, "audio_config")
    found = part.get("model_type", kind)
    if found != kind:
        raise ConfigError(f"audio_config: got type {found!r}; expected {kind!r}")
    raw = complete(part, kind, "audio_config")
    depth = raw["encoder_layers"]
    if raw["num_hidden_layers"] not in (None, depth):
        raise ConfigError(f"audio num_hidden_layers: got {raw['num_hidden_layers']}; expected encoder_layers, {depth}")

    chunk = 2 * raw["n_window"]
    return AudioConfig(
        mels=raw["num_mel_bins"],
        depth=depth,
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


def read_marks(model: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the ids of start and end tokens, and the rate of positions, by `OmniConfig`'s names."""
    marks = {name.removesuffix("_id"): model[name] for name in MARKS}
    return marks | {"tokens_per_second": need(model, "position_id_per_seconds")}


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

    def encode(self, pixel_values: Float[Array, " P *patch"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns the features of images, videos and audio in the order of their placeholders, then those of each
        deepstack layer, which are zeros for audio.
        """
        seen = {name: value for name, value in plan.items() if name not in (*PLAN, _ORDER, _HEARD)}
        sound = {name: plan[name] for name in PLAN if name in plan}
        arrays = 1 + len(getattr(self.config.vision, "deepstack_layers", ()))

        def ordered(features: Array) -> Array:
            return jnp.take(features, plan[_ORDER], axis=1, mode="clip")

        if not sound:
            return ordered(super().encode(pixel_values, seen))
        heard = self.audio(**sound)[None]
        heard = ordered(jnp.pad(heard, ((0, arrays - 1), (0, 0), (0, 0))))
        return jnp.where(plan[_HEARD][:, None], heard, ordered(super().encode(pixel_values, seen))) if seen else heard


def omni_vision(plan_patches: Callable[[Any, np.ndarray], dict[str, np.ndarray]], *tables: str) -> Vision:
    """Returns what an Omni family does with images, videos and audio; the arguments as `qwen_vision` takes them."""

    def plan(config: OmniConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        unknown = sorted(set(arrays) - set(INPUTS))
        if unknown:
            raise InputError(f"inputs: got {unknown}; expected some of {', '.join(INPUTS)}")

        # Images first, then videos, as one row of patches.
        grids = [_grids(arrays, name) for name in ("image", "video")]
        merged = config.vision.merge**2
        counts = [int(grid.prod(axis=1).sum()) // merged for grid in grids]
        pixels = [arrays.get("pixel_values"), arrays.get("pixel_values_videos")]
        for kind, grid, rows in zip(("image", "video"), grids, pixels, strict=True):
            shape, expected = (
                np.shape(rows if rows is not None else ()),
                (int(grid.prod(axis=1).sum()), config.vision.features),
            )
            if len(grid) and shape != expected:
                raise InputError(f"{kind} pixels: got shape {shape}; expected {expected} for the grids given")
            if rows is not None and not len(grid):
                raise InputError(f"{kind} pixels: got shape {shape} without {kind}_grid_thw; expected their grids")

        sound = _plan_sound(config.audio, arrays)
        counts.append(sound["features"] if sound else 0)
        if not sum(counts):
            return None

        tokens = (config.image_token, config.video_token, config.audio_token)
        flat = input_ids.reshape(-1)
        places = [np.flatnonzero(flat == token) for token in tokens]
        for kind, here, count in zip(("image", "video", "audio"), places, counts, strict=True):
            if len(here) != count:
                raise InputError(f"input_ids: got {len(here)} {kind} placeholders; expected {count} for what is given")

        # Features are numbered by placeholder: pixels' with the images first, audio's on their own.
        number = np.zeros(flat.size, np.int32)
        for here, first in zip(places, (0, counts[0], 0), strict=True):
            number[here] = first + np.arange(len(here))
        every = np.sort(np.concatenate(places))
        found: dict[str, Any] = {_ORDER: number[every], _HEARD: flat[every] == config.audio_token}
        if sum(counts[:2]):
            found |= plan_patches(config.vision, np.concatenate(grids))
            found["pixel_values"] = np.concatenate([np.asarray(rows) for rows in pixels if rows is not None])
        else:
            found["pixel_values"] = np.zeros((0, config.vision.features), np.float32)
        return found | (sound["plan"] if sound else {})

    def tokens(config: OmniConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
        pads = int(np.prod(arrays["image_grid_thw"][index])) // config.vision.merge**2
        return [config.vision_start_token, *[config.image_token] * pads, config.vision_end_token]

    def process(images: Sequence[Any], settings: OmniSettings) -> dict[str, np.ndarray]:
        return preprocess_images(images, settings.image)

    def fills(config: OmniConfig) -> dict[str, int | str]:
        return dict.fromkeys(tables, 1) | {SEGMENTS: TOKENS}

    return Vision(OmniSettings.from_directory, process, tokens, plan, fills)


def omni_positions(fractional: bool) -> Callable[[OmniConfig, np.ndarray, Mapping[str, Any]], np.ndarray]:
    """Returns the rule of positions of a family: Qwen3-Omni's times are fractional, Qwen2.5-Omni's truncated."""

    def positions(config: OmniConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
        images, videos = (_grids(arrays, kind) for kind in ("image", "video"))
        seconds = arrays.get("second_per_grid_ts")
        seconds = np.zeros(0, np.float32) if seconds is None else np.asarray(seconds, np.float32)
        if len(seconds) != len(videos):
            raise InputError(f"second_per_grid_ts: got {len(seconds)} values; expected one per video ({len(videos)})")
        mask = arrays.get("feature_attention_mask")
        frames = [] if mask is None else np.asarray(mask).sum(axis=1).tolist()
        rule = OmniPositionConfig(
            config.image_token,
            config.video_token,
            config.audio_token,
            config.vision_start_token,
            config.audio_start_token,
            config.vision.merge,
            config.tokens_per_second,
            fractional,
        )
        audio = [config.audio.tokens(int(count)) for count in frames]
        return get_omni_positions(input_ids, images, videos, seconds, audio, rule)[0]

    return positions


def _grids(arrays: Mapping[str, Any], kind: str) -> np.ndarray:
    """Returns (time, height, width) of a prompt's images or videos; no rows where there are none."""
    grids = arrays.get(f"{kind}_grid_thw")
    return np.zeros((0, 3), np.int64) if grids is None else np.asarray(grids, np.int64).reshape(-1, 3)


def _plan_sound(config: AudioConfig, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the audio encoder's arrays and how many features they give; None without audio."""
    features, mask = arrays.get("input_features"), arrays.get("feature_attention_mask")
    if features is None and mask is None:
        return None
    shapes = np.shape(features), np.shape(mask)
    fits = len(shapes[0]) == 3 and shapes[0][1] == config.mels and shapes[1] == (shapes[0][0], shapes[0][2])
    if not fits:
        raise InputError(
            f"input_features, feature_attention_mask: got shapes {shapes[0]} and {shapes[1]}; expected "
            f"[audio, {config.mels}, frames] and [audio, frames]"
        )
    plan = plan_audio(config, np.asarray(features), np.asarray(mask)) if shapes[0][0] else None
    count = sum(config.tokens(int(frames)) for frames in np.asarray(mask).sum(axis=1))
    return None if plan is None else {"plan": plan, "features": count}
