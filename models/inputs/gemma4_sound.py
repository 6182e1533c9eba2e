"""Gemma 4's log-mel features: frames of 20 ms every 10 ms, the first half silence, magnitudes, HTK's mel scale.

Source: transformers' Gemma4AudioFeatureExtractor, whose steps and types of numbers these are.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64

from kvpatch_jax.cache import Audio
from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import read_table
from .qwen_images import CONFIG_FILE
from .sound import read_sound
from .video_frames import PROCESSOR_FILE

LONGEST = 480_000
"""Samples that are heard; what is behind them is left out."""
MULTIPLE = 128
"""Of samples, to which silence fills a sound up."""
_NOT_BUILT = {
    "preemphasis": 0.0,
    "dither": 0.0,
    "padding_value": 0.0,
    "input_scale_factor": 1.0,
    "fft_overdrive": False,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}


@dataclasses.dataclass(frozen=True)
class Gemma4MelConfig:
    """How sounds become features; the fields of transformers' feature extractor.

    Attributes:
      feature_size: mel bins. sampling_rate: samples per second.
      frame_length, hop_length: samples of a frame, and from one to the next.
      min_frequency, max_frequency: Hertz between which the filters reach.
      mel_floor: added to magnitudes before their logarithm.
    """

    feature_size: int = 128
    sampling_rate: int = 16000
    frame_length: int = 320
    hop_length: int = 160
    min_frequency: float = 0.0
    max_frequency: float = 8000.0
    mel_floor: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("feature_size", "sampling_rate", "frame_length", "hop_length"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}: got {value!r}; expected a positive whole number")

    @property
    def spectrum(self) -> int:
        """Samples that a frame's spectrum is of: the next power of two."""
        return 2 ** math.ceil(math.log2(self.frame_length))

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> "Gemma4MelConfig":
        """Reads the settings of a Hugging Face directory: from `processor_config.json` where it has them, else from
        `preprocessor_config.json`.

        Raises:
          ConfigError: a field of the wrong kind, or a step that is not built.
        """
        root = Path(directory)
        found = read_table(root / PROCESSOR_FILE).get("feature_extractor")
        fields = found if isinstance(found, Mapping) else read_table(root / CONFIG_FILE)
        for name, value in _NOT_BUILT.items():
            if fields.get(name) not in (None, value):
                raise ConfigError(f"{name}: got {fields[name]!r}, which is not built; expected {value!r}")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: fields[name] for name in names if fields.get(name) is not None})

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the settings beside the others in `processor_config.json`. Returns its path."""
        path = Path(directory) / PROCESSOR_FILE
        own = dataclasses.asdict(self) | {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        table = read_table(path) | {"feature_extractor": own}
        path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def gemma4_mel(
    wave: Float[np.ndarray, " samples"], config: Gemma4MelConfig
) -> tuple[Float32[np.ndarray, "frames bins"], Bool[np.ndarray, " frames"]]:
    """Computes the log-mel features of one waveform, mono, at the settings' sampling rate.

    Returns:
      features, zeros in frames that reach behind the sound, and which frames do not.

    Raises:
      InputError: no samples, too few for a token, or samples that are not finite.
    """
    wave = np.asarray(wave, np.float32)[:LONGEST]
    if not wave.size or not np.isfinite(wave).all():
        raise InputError(f"audio: got {wave.size} samples, or some that are not finite; expected finite samples")
    half, size, hop = config.frame_length // 2, config.frame_length + 1, config.hop_length
    signal = np.pad(wave, (half, -len(wave) % MULTIPLE))
    if len(signal) < size:
        raise InputError(f"audio: got {len(wave)} samples; expected enough for a frame of {config.frame_length}")

    frames = np.lib.stride_tricks.sliding_window_view(signal, size)[::hop]
    ends = np.arange(len(frames)) * hop + size - 1
    counts = (ends >= half) & (ends < half + len(wave))
    if not counts.any():
        raise InputError(f"audio: got {len(wave)} samples; expected enough for a frame of {config.frame_length}")
    places = np.arange(config.frame_length)
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * places / config.frame_length)).astype(np.float32)
    magnitudes = np.abs(np.fft.rfft(frames[:, :-1] * hann, n=config.spectrum, axis=-1))
    logs = np.log(np.matmul(magnitudes, mel_filters(config)) + np.float64(config.mel_floor)).astype(np.float32)
    return logs * counts[:, None], counts


@functools.lru_cache(maxsize=8)
def mel_filters(config: Gemma4MelConfig) -> Float64[np.ndarray, "frequencies bins"]:
    """Returns triangular filters of height 1, evenly spaced on HTK's mel scale."""

    def to_mel(hertz):
        return 2595.0 * np.log10(1.0 + hertz / 700.0)

    edges = np.linspace(to_mel(config.min_frequency), to_mel(config.max_frequency), config.feature_size + 2)
    edges = 700.0 * (np.power(10, edges / 2595.0) - 1.0)
    bins = np.linspace(0, config.sampling_rate // 2, config.spectrum // 2 + 1)
    steps, slopes = np.diff(edges), edges[None] - bins[:, None]
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / steps[:-1], slopes[:, 2:] / steps[1:]))
    filters.flags.writeable = False
    return filters


def process_gemma4_sounds(sounds: Sequence[Audio], config: Gemma4MelConfig) -> dict[str, Any]:
    """Turns sounds into log-mel features.

    Returns:
      `input_features` float32 [sounds, frames, bins], zeros behind each sound, and `input_features_mask` bool [sounds,
      frames].

    Raises:
      InputError: as `read_sound` and `gemma4_mel`.
    """
    found = []
    for number, sound in enumerate(sounds):
        found.append(gemma4_mel(read_sound(sound, config.sampling_rate, f"audio {number}"), config))
    longest = max(len(mask) for _, mask in found)
    rooms = [(0, longest - len(mask)) for _, mask in found]
    return {
        "input_features": np.stack([np.pad(x, (room, (0, 0))) for (x, _), room in zip(found, rooms, strict=True)]),
        "input_features_mask": np.stack([np.pad(mask, room) for (_, mask), room in zip(found, rooms, strict=True)]),
    }
