"""Positions of Qwen2.5-Omni and Qwen3-Omni, as transformers computes them."""

import functools

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.models.inputs.omni_positions import OmniPositionConfig, get_omni_positions
from kvpatch_jax.models.towers.qwen_audio import AudioConfig
from tests.goldens.load import golden_arrays

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
