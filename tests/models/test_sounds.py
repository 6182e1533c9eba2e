"""Sounds: samples of WAV files and other formats, at another rate, and the features that towers take."""

import io
import json
import wave
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Audio
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.models.inputs.sounds import log_mel, read_sound, resampled, whisper_settings
from tests.goldens.redraw import standard_values


def whisper(**options):
    sizes = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 30}
    return Settings.of(sizes | options, "audio")


def wav(samples: np.ndarray, rate: int, width: int = 2) -> bytes:
    """A WAV file of whole numbers [samples, channels] in `width` bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(
            b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in samples.reshape(-1))
        )
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_a_wav_file(width):
    """Both channels' mean, as fractions of the format's range."""
    numbers = np.round(np.linspace(-0.9, 0.9, 40)[:, None] * 2 ** (8 * width - 1) * np.array([1, 0.5]))
    expected = (numbers / 2 ** (8 * width - 1)).mean(axis=1)
    found = read_sound(Audio(wav(numbers + (128 if width == 1 else 0), 16000, width)), 16000)
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("rate", [0, 1, 999, 768_001, 2**32 - 5])
def test_a_rate_that_no_sound_has_is_refused_before_it_takes_room(rate):
    """A header may say anything: at the largest rate 34 GB would be asked for, at the least 16 000 numbers a sample."""
    content = bytearray(wav(np.zeros((400, 1)), 16000, 2))
    content[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(InputError, match=rf"got {rate} samples per second; expected 1000 to 768000"):
        read_sound(Audio(bytes(content)), 16000)


def test_another_format_is_read_by_pyav():
    import av

    samples = (np.sin(np.arange(4096) / 20) * 20000).astype(np.int16)
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    np.testing.assert_allclose(read_sound(Audio(file.getvalue()), 16000), samples / 2**15, atol=1e-7)
    with pytest.raises(InputError, match="cannot be decoded"):
        read_sound(Audio(b"no sound at all"), 16000)


@pytest.mark.parametrize(("own", "rate"), [(44100, 16000), (8000, 16000), (16000, 24000), (16000, 16000)])
def test_a_tone_keeps_its_frequency_at_another_rate(own, rate):
    """Away from its ends, where there is silence beside it, a tone is that of the other rate to 1e-6."""
    tone = lambda frequency, at: np.sin(2 * np.pi * frequency * np.arange(at) / at).astype(np.float32)
    found = resampled(tone(440, own), own, rate)
    assert found.shape == (rate,)
    inner = slice(rate // 10, -rate // 10)
    np.testing.assert_allclose(found[inner], tone(440, rate)[inner], atol=1e-5)
    if rate < own:
        assert np.abs(resampled(tone(9000, own), own, rate)[inner]).max() < 1e-3


# ----------------------------------------------------------------------------------------------------------- features


def sine(name, samples):
    times = np.arange(samples) / 16000
    noisy = 0.3 * np.sin(2 * np.pi * 440 * times) + 0.02 * standard_values(f"mel {name}", samples)
    return (noisy * (times < 0.2)).astype(np.float32)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("samples", [4837, 3200])
def test_log_mel_is_transformers(samples, padded):
    """Within 2e-5 of values between −1 and 2: what its own transforms by NumPy and by PyTorch are apart."""
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    how: dict[str, Any] = {"padding": "max_length"} if padded else {"padding": True, "truncation": False}
    extractor, wave = WhisperFeatureExtractor(feature_size=128, chunk_length=2), sine("short", samples)
    out = extractor(wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np", **how)
    expected = out["input_features"][0, :, : int(out["attention_mask"].sum())]
    found = log_mel(wave, whisper(feature_size=128, chunk_length=2), padded)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-5


def test_sounds_that_have_no_features_are_refused(tmp_path):
    for samples in (b"", np.full(500, np.nan, np.float32)):
        with pytest.raises(InputError, match=r"cannot be decoded|not finite"):
            read_sound(Audio(samples, None if isinstance(samples, bytes) else 16000), 16000)
    with pytest.raises(InputError, match="expected more than 200"):
        log_mel(np.zeros(200, np.float32), whisper(), padded=False)
    assert log_mel(np.zeros(200, np.float32), whisper(), padded=True).shape == (80, 2)
    for options, message in (({"dither": 0.1}, r"dither: got 0\.1"), ({"hop_length": 0}, "hop_length: got 0")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
        with pytest.raises(ConfigError, match=message):
            whisper_settings(tmp_path)


def test_audio_beyond_the_settings_length_is_cut():
    config = whisper(feature_size=20, chunk_length=1)
    samples = sine("long", 20000) + np.float32(0.01)
    assert log_mel(samples, config, padded=True).shape == (20, 100)
    assert log_mel(samples, config, padded=False).shape == (20, 125)
