"""Positions and log-mel features of Qwen2.5-Omni and Qwen3-Omni, as transformers computes them."""

import functools

import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.inputs.mel import MelConfig, log_mel, mel_filters
from kvpatch_jax.models.inputs.omni_positions import OmniPositionConfig, get_omni_positions
from kvpatch_jax.models.towers.qwen_audio import AudioConfig
from tests.goldens.load import GOLDENS, golden_arrays
from tests.goldens.redraw import standard_values

FAMILIES = ("qwen2_5_omni", "qwen3_omni")
MIXTURES = ("images", "audio", "seconds", "fps", "with_audio", "with_long_audio", "wide")
IMAGE, VIDEO, AUDIO, START, AUDIO_START = 301, 302, 305, 303, 306


def rule(family):
    three = family == "qwen3_omni"
    return OmniPositionConfig(IMAGE, VIDEO, AUDIO, START, AUDIO_START, 2, 13 if three else 25, three)


def encoder(family):
    sizes = functools.partial(AudioConfig, 128, 1, 32, 2, 8, 8)
    return sizes(100, 1500, downsampling=4) if family == "qwen3_omni" else sizes(200, 1500)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_transformers_to_the_bit(family, name):
    """Fractional ones too; a frame wider than the sound is long is overtaken by the text behind, as there."""
    gold = {
        key.partition(".")[2]: value for key, value in golden_arrays(family, "positions").items() if f"{name}." in key
    }
    sounds = [encoder(family).tokens(int(frames)) for frames in gold["frames"]]
    sizes = (gold["images"], gold["videos"], gold["seconds"], sounds)
    positions, delta = get_omni_positions(gold["input_ids"].astype(np.int32), *sizes, rule(family))
    assert np.array_equal(positions, gold["positions"])
    assert delta == gold["delta"]
    assert positions.dtype == (np.float32 if family == "qwen3_omni" else np.int32)


def test_sizes_and_placeholders_must_match():
    none = np.zeros((0, 3), np.int32)
    find = lambda ids, sounds, images=none: get_omni_positions(
        np.array(ids, np.int32), images, none, np.zeros(0, np.float32), sounds, rule("qwen3_omni")
    )
    with pytest.raises(InputError, match="placeholders for audio at index 1"):
        find([AUDIO_START, AUDIO], [])
    with pytest.raises(InputError, match="got 2 placeholders 305 from index 1; expected 3"):
        find([AUDIO_START, AUDIO, AUDIO, 307], [3])
    with pytest.raises(InputError, match="audio: got sizes of 1 more"):
        find([1, 2], [3])
    with pytest.raises(InputError, match="multiple of the merge size"):
        find([START, IMAGE], [], np.array([[1, 3, 4]], np.int32))


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_those_of_the_convolutions(family):
    """By stepping over the frames as the convolutions do, in place of the authors' formula."""
    config = encoder(family)
    for frames in (1, 2, 3, 4, 7, 50, 99, 100, 101, 199, 200, 201, 333, 1000):
        count = 0
        for start in range(0, frames, config.chunk):
            places = list(range(start, min(start + config.chunk, frames)))
            for _ in range(3 if family == "qwen3_omni" else 1):
                places = places[::2]
            count += len(places)
        assert config.tokens(frames) == (count if family == "qwen3_omni" else count // 2)


def wave(name, samples):
    times = np.arange(samples) / 16000
    noisy = 0.3 * np.sin(2 * np.pi * 440 * times) + 0.02 * standard_values(f"mel {name}", samples)
    return (noisy * (times < 0.2)).astype(np.float32)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["short", "even"])
def test_log_mel_is_transformers(name, padded):
    """Within 2e-5 of values between −1 and 2: what its float32 transforms by torch are off by themselves."""
    with np.load(GOLDENS / "mel.npz") as file:
        gold, samples = file[f"{name}.{'padded' if padded else 'alone'}"], int(file[f"{name}.samples"])
    found = log_mel(wave(name, samples), MelConfig(feature_size=128, chunk_length=2), padded)
    assert found.dtype == np.float32
    assert found.shape == gold.shape
    assert np.abs(found - gold).max() <= 2e-5


@pytest.mark.parametrize("padded", [True, False])
def test_log_mel_is_whispers_rule_in_float64(padded):
    """An independent transcription: frame by frame, by the definition of the transform."""
    config, samples = MelConfig(feature_size=20, chunk_length=1), wave("definition", 1234)
    signal = np.concatenate([samples, np.zeros(16000 - 1234)]) if padded else samples.astype(np.float64)
    signal = np.pad(signal, 200, mode="reflect")
    hann = np.sin(np.pi * np.arange(400) / 400) ** 2
    turns = np.exp(-2j * np.pi * np.outer(np.arange(201), np.arange(400)) / 400)
    count = (len(signal) - 400) // 160
    power = np.stack([np.abs(turns @ (signal[160 * n : 160 * n + 400] * hann)) ** 2 for n in range(count)])
    logs = np.log10(np.maximum(power @ mel_filters(config), 1e-10))
    expected = (np.maximum(logs, logs.max() - 8) + 4) / 4
    found = log_mel(samples, config, padded)
    assert found.shape[1] == (8 if padded else 7)
    assert np.abs(found.T - expected[: found.shape[1]]).max() <= 2e-5


def test_filters_are_triangles_of_area_one():
    filters = mel_filters(MelConfig(feature_size=128))
    assert filters.shape == (201, 128)
    peaks = filters.argmax(axis=0)
    assert (np.diff(peaks) >= 0).all()
    # Over 40 Hz a bin; the widest filters span many of them, so that sums are close to areas.
    assert np.abs(filters[:, -20:].sum(axis=0) * 40 - 1).max() < 0.05


def test_sounds_that_have_no_features_are_refused():
    config = MelConfig()
    for samples in (np.zeros(0, np.float32), np.full(500, np.nan, np.float32)):
        with pytest.raises(InputError, match="expected finite samples"):
            log_mel(samples, config, padded=True)
    with pytest.raises(InputError, match="expected more than 200"):
        log_mel(np.zeros(200, np.float32), config, padded=False)
    assert log_mel(np.zeros(200, np.float32), config, padded=True).shape == (80, 2)
    with pytest.raises(ConfigError, match=r"dither: got 0\.1"):
        MelConfig.from_dict({"dither": 0.1})
    with pytest.raises(ConfigError, match="hop_length: got 0"):
        MelConfig.from_dict({"hop_length": 0})


def test_audio_beyond_the_settings_length_is_cut():
    config = MelConfig(feature_size=20, chunk_length=1)
    samples = wave("long", 20000) + np.float32(0.01)
    assert log_mel(samples, config, padded=True).shape == (20, 100)
    assert log_mel(samples, config, padded=False).shape == (20, 125)
