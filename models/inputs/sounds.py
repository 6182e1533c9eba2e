"""From a sound to features: samples at a family's rate, then the log-mel features of Whisper or of Gemma 4.

WAV is read by the standard library, other files by PyAV. Channels are averaged, and whole numbers divided by their
range, as librosa and soundfile do. Samples at the family's own rate are taken as they are. Others are resampled in the
frequency domain: spectra are cut at the lower of the two Nyquist frequencies, with a taper over the last part of it, as
sinc filters have one. The authors' pipelines resample with soxr, whose taper is another: above nine tenths of that
frequency the two differ.
"""

import functools
import io
import math
import os
import wave
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32

from kvpatch_jax.cache import Audio
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from .processors import Settings, own_settings, read_options

PASSED = 0.91
"""Of the lower Nyquist frequency: what passes whole (soxr's "high quality" has as much)."""
RATES = (1_000, 768_000)
"""Samples per second that a sound may have: a header may say anything, and resampling takes room for what it says."""
GUARD = 0.05
"""Seconds of silence behind a sound, into which the ends of its spectrum's filter wrap around."""


def read_sound(audio: Audio, rate: int, name: str = "audio") -> Float32[np.ndarray, " samples"]:
    """Returns a sound's samples at `rate` samples per second, one channel.

    Raises:
      InputError: a file that is no sound, a rate outside `RATES`, samples that are none or not finite, or as
      `Audio.read`. MissingExtraError: no PyAV, and a file other than WAV of whole numbers.
    """
    audio = audio.read()
    if isinstance(audio.source, bytes):
        samples, own = _wav(audio.source) or _decoded(audio.source, name)
    else:
        assert audio.rate is not None
        samples, own = audio.source, audio.rate
    if not samples.size or not np.isfinite(samples).all():
        raise InputError(f"{name}: got {samples.size} samples, or some that are not finite; expected finite samples")
    if not RATES[0] <= own <= RATES[1]:
        raise InputError(f"{name}: got {own} samples per second; expected {RATES[0]} to {RATES[1]}")
    return resampled(samples, own, rate)


def resampled(samples: Float32[np.ndarray, " n"], own: int, rate: int) -> Float32[np.ndarray, " m"]:
    """Returns samples at another rate: m = ⌈n · rate / own⌉ of them."""
    if own == rate:
        return samples
    divisor = math.gcd(own, rate)
    up, down = rate // divisor, own // divisor
    # A whole number of periods of both rates, so that the new samples lie where they should.
    length = -(-(len(samples) + int(GUARD * own)) // down) * down
    spectrum = np.fft.rfft(samples.astype(np.float64), length)

    target = length // down * up
    kept = min(length, target) // 2 + 1
    place = np.arange(kept) / (min(length, target) / 2)
    taper = 0.5 + 0.5 * np.cos(np.pi * np.clip((place - PASSED) / (1 - PASSED), 0, 1))
    whole = np.fft.irfft(spectrum[:kept] * taper, target) * (target / length)
    return whole[: -(-len(samples) * up // down)].astype(np.float32)


def _wav(content: bytes) -> tuple[np.ndarray, int] | None:
    """Returns samples and rate of a WAV file of whole numbers of 1 to 4 bytes; None for another file."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError):
        return None
    if width > 4:
        return None

    # Little-endian numbers, in the highest bytes of an int32; those of one byte have no sign.
    raw = raw[: raw.size // (width * channels) * width * channels].reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw ^ 0x80 if width == 1 else raw
    values = wide.view("<i4").reshape(-1, channels) / 2.0**31
    return values.mean(axis=1).astype(np.float32), rate


def _decoded(content: bytes, name: str) -> tuple[np.ndarray, int]:
    """Returns samples and rate of a file that PyAV decodes."""
    av = require("av", "av", "video")
    parts = []
    try:
        with av.open(io.BytesIO(content)) as container:
            rate = int(container.streams.audio[0].rate)
            resampler = av.AudioResampler(format="fltp", layout=container.streams.audio[0].layout, rate=rate)
            for frame in container.decode(audio=0):
                parts += [part.to_ndarray() for part in resampler.resample(frame)]
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    except (av.FFmpegError, IndexError) as error:
        raise InputError(f"{name}: got a file that cannot be decoded ({error}); expected a sound") from error
    samples = np.concatenate(parts or [np.zeros((1, 0), np.float32)], axis=1)
    return samples.mean(axis=0).astype(np.float32), rate


whisper_settings = own_settings(
    "audio",
    only={"dither": 0, "padding_value": 0},
    feature_size=80,
    sampling_rate=16000,
    hop_length=160,
    n_fft=400,
    chunk_length=30,
)


def log_mel(
    samples: Float[np.ndarray, " samples"], settings: Settings, padded: bool
) -> Float32[np.ndarray, "bins frames"]:
    """Computes the log-mel features of one waveform, mono, at the settings' sampling rate, as transformers'
    WhisperFeatureExtractor does with PyTorch.

    Args:
      samples: in −1 … 1.
      padded: the audio is cut to `chunk_length` and followed by silence, and its last frame may be a part of a hop
        (Qwen2.5-Omni); else it is mirrored at its end, and a part of a hop is left out (Qwen3-Omni).

    Returns:
      float32 [bins, frames]: powers' logarithms within 8 decades of the largest, shifted and scaled as Whisper does.

    Raises:
      InputError: too few samples to be mirrored.
    """
    size, hop, half = settings["n_fft"], settings["hop_length"], settings["n_fft"] // 2
    longest = settings["chunk_length"] * settings["sampling_rate"]
    samples = np.asarray(samples, np.float32)[: longest if padded else None]
    if not padded and len(samples) <= half:
        raise InputError(f"audio: got {len(samples)} samples; expected more than {half}, to mirror them at the ends")

    # Every frame that holds some of the audio counts for the largest power, also those that are not returned.
    frames = reached = len(samples) // hop
    if padded:
        frames, reached = -(-len(samples) // hop), min(-(-(len(samples) + half) // hop), longest // hop)
        samples = np.pad(samples, (0, reached * hop + size - len(samples)))
    signal = np.pad(samples, half, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(signal, size)[::hop][:reached]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)
    power = np.abs(np.fft.rfft(windows * hann)) ** 2

    filters = _mel_filters(size, settings["feature_size"], settings["sampling_rate"])
    logs = np.log10(np.maximum(power @ filters, np.float32(1e-10)))
    logs = np.maximum(logs, logs.max() - np.float32(8))
    return np.ascontiguousarray(((logs + np.float32(4)) / np.float32(4)).T[:, :frames])


@functools.lru_cache(maxsize=8)
def _mel_filters(size: int, bins: int, rate: int) -> Float32[np.ndarray, "frequencies bins"]:
    make = require("transformers.audio_utils", "transformers").mel_filter_bank
    filters = make(1 + size // 2, bins, 0.0, 8000.0, rate, norm="slaney", mel_scale="slaney")
    return np.asarray(filters, np.float32)


def process_whisper(sounds: Sequence[Audio], settings: Settings, padded: bool) -> dict[str, np.ndarray]:
    """Turns sounds into log-mel features, each as if it were alone (`log_mel` says what `padded` is).

    Returns:
      `input_features` float32 [sounds, bins, frames], padded with zeros, and `feature_attention_mask` int32 [sounds,
      frames].

    Raises:
      InputError: as `read_sound` and `log_mel`.
    """
    rate = settings["sampling_rate"]
    waves = [read_sound(sound, rate, f"audio {number}") for number, sound in enumerate(sounds)]
    found = [log_mel(samples, settings, padded) for samples in waves]
    counts = np.array([features.shape[1] for features in found])
    padded_features = [np.pad(each, ((0, 0), (0, counts.max() - each.shape[1]))) for each in found]
    mask = (np.arange(counts.max()) < counts[:, None]).astype(np.int32)
    return {"input_features": np.stack(padded_features), "feature_attention_mask": mask}


def gemma4_settings(directory: str | os.PathLike[str]) -> Settings:
    """Reads a directory's settings of Gemma 4's features.

    Raises:
      ConfigError: options that transformers' feature extractor does not take, or dither, which makes the same sound
      another one each time.
    """
    options = read_options(directory, "audio")
    if options.get("dither"):
        raise ConfigError(f"audio dither: got {options['dither']!r}, which is not built; expected 0")
    return Settings.of(options, "audio", "gemma4.Gemma4Audio")


def process_gemma4_sounds(sounds: Sequence[Audio], settings: Settings) -> dict[str, np.ndarray]:
    """Turns sounds into log-mel features, each as if it were alone.

    Returns:
      `input_features` float32 [sounds, frames, bins], zeros behind each sound, and `input_features_mask` bool [sounds,
      frames].

    Raises:
      InputError: as `read_sound`; too few samples for a frame.
    """
    extractor, features, masks = settings.built(), [], []
    for number, sound in enumerate(sounds):
        samples = read_sound(sound, extractor.sampling_rate, f"audio {number}")
        if len(samples) <= extractor.frame_length:
            raise InputError(
                f"audio {number}: got {len(samples)} samples; expected enough for a frame of {extractor.frame_length}"
            )
        made = extractor([samples], return_tensors="np")
        features.append(made["input_features"][0])
        masks.append(made["input_features_mask"][0])
    longest = max(map(len, masks))
    rooms = [(0, longest - len(mask)) for mask in masks]
    return {
        "input_features": np.stack([np.pad(x, (room, (0, 0))) for x, room in zip(features, rooms, strict=True)]),
        "input_features_mask": np.stack([np.pad(mask, room) for mask, room in zip(masks, rooms, strict=True)]),
    }
