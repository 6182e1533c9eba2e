"""Log-mel features of audio, by the rule of transformers' `WhisperFeatureExtractor`, with NumPy."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import read_table
from .qwen_images import CONFIG_FILE
from .video_frames import PROCESSOR_FILE

FREQUENCIES = 8000.0
"""Hertz up to which the filters reach, whatever the sampling rate is."""


@dataclasses.dataclass(frozen=True)
class MelConfig:
    """How audio becomes features; the fields of `preprocessor_config.json`.

    Attributes:
      feature_size: mel bins.
      sampling_rate: samples per second.
      hop_length: samples per frame.
      n_fft: samples that a frame's spectrum is of.
      chunk_length: seconds that audio is padded or cut to, where a family does so.
    """

    feature_size: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    n_fft: int = 400
    chunk_length: int = 30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name}: got {value!r}; expected a positive whole number")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "MelConfig":
        """Reads the JSON of `preprocessor_config.json`.

        Raises:
          ConfigError: a field of the wrong kind, or a setting that is not built (dither, another padding value).
        """
        for name in ("dither", "padding_value"):
            if fields.get(name):
                raise ConfigError(f"{name}: got {fields[name]!r}; expected 0")
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields})

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> "MelConfig":
        """Reads the settings of a Hugging Face directory: from `processor_config.json` where it has them, else from
        `preprocessor_config.json`.

        Raises:
          ConfigError: a field of the wrong kind.
        """
        root = Path(directory)
        found = read_table(root / PROCESSOR_FILE).get("feature_extractor")
        return cls.from_dict(found if isinstance(found, Mapping) else read_table(root / CONFIG_FILE))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the settings beside those of images in `preprocessor_config.json`. Returns its path."""
        path = Path(directory) / CONFIG_FILE
        fields = read_table(path) | dataclasses.asdict(self)
        fields |= {"feature_extractor_type": "WhisperFeatureExtractor", "return_attention_mask": True}
        path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def log_mel(wave: Float[np.ndarray, " samples"], config: MelConfig, padded: bool) -> Float32[np.ndarray, "bins frames"]:
    """Computes the log-mel features of one waveform, mono, at the settings' sampling rate.

    Args:
      wave: samples in −1 … 1.
      padded: the audio is cut to `chunk_length` and followed by silence, and its last frame may be a part of a hop
        (Qwen2.5-Omni); else it is mirrored at its end, and a part of a hop is left out (Qwen3-Omni).

    Returns:
      float32 [bins, frames]: powers' logarithms within 8 decades of the largest, shifted and scaled as Whisper does.

    Raises:
      InputError: no samples, too few to be mirrored, or samples that are not finite.
    """
    wave = np.asarray(wave, np.float32)
    half, hop = config.n_fft // 2, config.hop_length
    wave = wave[: config.chunk_length * config.sampling_rate] if padded else wave
    if not wave.size or not np.isfinite(wave).all():
        raise InputError(f"audio: got {wave.size} samples, or some that are not finite; expected finite samples")
    if not padded and len(wave) <= half:
        raise InputError(f"audio: got {len(wave)} samples; expected more than {half}, to mirror them at the ends")

    # Every frame that holds some of the audio counts for the largest power, also those that are not returned.
    frames = -(-len(wave) // hop) if padded else len(wave) // hop
    reached = (
        min(-(-(len(wave) + half) // hop), config.chunk_length * config.sampling_rate // hop) if padded else frames
    )
    if padded:
        wave = np.pad(wave, (0, reached * hop + config.n_fft - len(wave)))
    signal = np.concatenate([wave[half:0:-1], wave, wave[-2 : -half - 2 : -1]])

    windows = np.lib.stride_tricks.sliding_window_view(signal, config.n_fft)[::hop][:reached]
    places = np.arange(config.n_fft, dtype=np.float64)
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * places / config.n_fft)).astype(np.float32)
    power = np.abs(np.fft.rfft(windows * hann)) ** 2

    logs = np.log10(np.maximum(power @ mel_filters(config), np.float32(1e-10)))
    logs = np.maximum(logs, logs.max() - np.float32(8))
    return np.ascontiguousarray(((logs + np.float32(4)) / np.float32(4)).T[:, :frames])


@functools.lru_cache(maxsize=8)
def mel_filters(config: MelConfig) -> Float32[np.ndarray, "frequencies bins"]:
    """Returns Slaney's triangular filters, each of area 1, as librosa and transformers make them."""

    def to_hertz(mels: np.ndarray) -> np.ndarray:
        # Linear below 1000 Hz (15 mels), logarithmic above.
        return np.where(mels < 15, 200 * mels / 3, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)))

    highest = 15 + 27 / np.log(6.4) * np.log(FREQUENCIES / 1000)
    edges = to_hertz(np.linspace(0, highest, config.feature_size + 2))
    bins = np.linspace(0, config.sampling_rate // 2, config.n_fft // 2 + 1)
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    filters = filters.astype(np.float32)
    filters.flags.writeable = False
    return filters
