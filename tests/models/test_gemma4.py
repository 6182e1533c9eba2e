"""Gemma 4 beside what all families share: videos, sounds, prompts of all three, budgets, refusals."""

import json
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Audio, Video
from kvpatch_jax.models import load
from kvpatch_jax.models.families.registry import FAMILIES
from tests.goldens.load import GOLDENS, golden_arrays, golden_images, write_chatting
from tests.goldens.redraw import digest, draw_frames, standard_values

FAMILY: Any = FAMILIES["Gemma4ForConditionalGeneration"]
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load(write_chatting("gemma4", tmp_path_factory.mktemp("small")), angles="float32")


def waves():
    """The golden's sounds, computed again."""
    found = []
    for number, seconds in enumerate((0.93, 0.31)):
        size = int(seconds * 16000)
        times = np.arange(size) / 16000
        noise = standard_values(f"gemma4 sound {number}", size)
        found.append((0.3 * np.sin(2 * np.pi * (300 + 900 * times) * times) + 0.05 * noise).astype(np.float32))
    return found


@pytest.mark.nightly
def test_only_layers_that_slide_let_an_image_see_itself(golden):
    """Without what is ahead the full layer's input, and so everything, differs; of a causal model nothing is ahead."""
    mixture, _, _, tokens = given = golden("gemma4_moe", "one_image")
    pads = np.flatnonzero(given.ids[0] == 301)
    assert mixture.config.text.ahead_in_windows
    assert np.asarray(tokens.ahead)[0, pads].tolist() == list(range(len(pads)))[::-1]
    causal = mixture.prefill(tokens._replace(ahead=None), logits="all").logits
    seen = mixture.prefill(tokens, logits="all").logits
    assert np.abs(np.asarray(seen - causal)).max() > 1e-2 * np.abs(np.asarray(seen)).max()


# ------------------------------------------------------------------------------------------------- host side


def test_frames_become_transformers_pixels():
    """torchvision's resize, rescaling and patches, bit for bit (`frames.npz`, of transformers' video processor)."""
    gold, frames = golden_arrays("gemma4", "frames"), draw_frames("gemma4 video", 7, 24, 40)
    found = FAMILY.video.process([Video(frames, rate=0.1, frames=2)], FAMILY.video.settings(GOLDENS / "gemma4"))
    np.testing.assert_array_equal(digest(found["pixel_values_videos"]), gold["digest.pixel_values_videos"])
    for name in ("video_position_ids", "num_frames_per_video", "video_timestamps"):
        np.testing.assert_array_equal(found[name], gold[name], name)


def test_sounds_become_transformers_features():
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    extractor = Gemma4AudioFeatureExtractor(feature_size=16, return_attention_mask=True)
    gold = extractor(waves(), sampling_rate=16000, return_tensors="np")
    settings = FAMILY.audio.settings(GOLDENS / "gemma4")
    found = FAMILY.audio.process([Audio(wave, rate=16000) for wave in waves()], settings)
    np.testing.assert_array_equal(found["input_features_mask"], np.asarray(gold["input_features_mask"], bool))
    assert found["input_features"].dtype == np.float32
    assert np.abs(found["input_features"] - gold["input_features"]).max() <= 1e-5


# --------------------------------------------------------------------------------------------------- prompts


def talk(small, **more):
    """The golden's conversation as items."""
    image = golden_images("gemma4", "one_image")[0]
    video = Video(draw_frames("gemma4 video", 7, 24, 40), rate=0.1, frames=2)
    sound = Audio(waves()[1], rate=16000)
    return ["Hear ", sound, " and see ", video, " and ", image, " now"]


@pytest.mark.nightly
def test_a_prompt_of_all_media_is_the_processors(small):
    said = json.loads((GOLDENS / "gemma4" / "media.json").read_text())
    prompt = small.prepare(talk(small))
    assert prompt["input_ids"][0].tolist() == said["input_ids"]
    tokens = small.embed(**prompt)
    assert tokens.embeddings.shape[:2] == prompt["input_ids"].shape
    features = small.encode(**prompt)
    np.testing.assert_array_equal(small.embed(**prompt, features=features).embeddings, tokens.embeddings)


def test_a_chat_with_a_sound_and_a_video(small):
    """What the template writes once becomes the processor's runs."""
    _, sound, _, video, *_ = talk(small)
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}{% endfor %}{% endfor %}"
    )
    object.__setattr__(small.chat_template, "source", template)
    content = [{"type": "audio", "audio": sound}, {"type": "video", "video": video}, {"type": "text", "text": "?"}]
    prompt = small.chat([{"role": "user", "content": content}])
    expected = small.prepare([sound, video, "?"])
    np.testing.assert_array_equal(prompt["input_ids"], expected["input_ids"])
