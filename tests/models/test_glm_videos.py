"""GLM-4V's videos against transformers: frames, pixels, times and the prompt's text; images and videos mixed.

And Qwen2-VL's, whose processor is Qwen2.5-VL's, through `prepare`.
"""

import json

import numpy as np
import pytest

from kvpatch_jax import Video
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.families.glm4v import VIDEO_SETTINGS
from kvpatch_jax.models.inputs.chat import TEMPLATE_FILE
from kvpatch_jax.models.inputs.positions import VideoRule
from kvpatch_jax.models.inputs.video_frames import Stream
from kvpatch_jax.models.inputs.videos import process_glm_videos, sample_glm4, sample_glm46
from tests.goldens.load import golden_arrays, golden_chat, write_chatting, write_checkpoint
from tests.shared.tolerances import assert_close_to_largest

GOLD = golden_arrays("glm4v", "frames")
STREAMS = [(int(count), float(rate)) for count, rate in GOLD["streams"]]
SETTINGS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SETTINGS |= {"size": {"shortest_edge": 1024, "longest_edge": 1600}}
VIDEO_FILE = "video_preprocessor_config.json"
KINDS = {"old": "Glm4vVideoProcessor", "new": "Glm46VVideoProcessor"}


def settings(directory, kind):
    text = json.dumps(SETTINGS | {"video_processor_type": KINDS[kind]})
    (directory / VIDEO_FILE).write_text(text)
    return VIDEO_SETTINGS(directory)


@pytest.fixture
def backbone(request, tmp_path):
    """The tiny model with the golden's tokenizer and template, and a video processor of either kind."""
    directory, template = write_chatting("glm4v", tmp_path), golden_chat("glm4v")["template"]
    settings(directory, request.param)
    image = "{%- if part['type'] == 'image'"
    video = (
        "{%- if part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>{% elif part['type'] == 'image'"
    )
    assert image in template
    (directory / TEMPLATE_FILE).write_text(template.replace(image, video))
    return load(directory)


@pytest.mark.parametrize("index", range(len(STREAMS)))
def test_frames_are_those_transformers_chooses(index, tmp_path):
    config, stream = settings(tmp_path, "new"), Stream(*STREAMS[index])
    assert sample_glm4(stream, None, None, config).tolist() == GOLD[f"old.{index}"].tolist()
    assert sample_glm4(stream, 0.7, None, config).tolist() == GOLD[f"rate.{index}"].tolist()
    # transformers takes no frame of a video of one.
    expected = GOLD[f"new.{index}"].tolist() or [0, 0]
    assert sample_glm46(stream, None, None, config).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_times_equal_transformers(kind, tmp_path):
    """Five frames: the last one again fills the third temporal patch."""
    out = process_glm_videos([Video(GOLD["frames"], rate=1.5)], settings(tmp_path, kind))
    np.testing.assert_array_equal(out["pixel_values_videos"], GOLD["pixel_values"])
    np.testing.assert_array_equal(out["video_grid_thw"], GOLD["grid"])
    np.testing.assert_allclose(out["video_timestamps"], [0, 2 / 1.5, 4 / 1.5])


@pytest.mark.parametrize(("backbone", "kind"), [(kind, kind) for kind in KINDS], indirect=["backbone"])
def test_prompt_says_the_times_as_transformers_does(backbone, kind):
    video = Video(GOLD["frames"], rate=1.5)
    expected = f"<|begin_of_video|>{GOLD[f'text.{kind}']}<|end_of_video|>"
    prompt = backbone.prepare([[5, 6], video, [7]])
    assert backbone.text(prompt["input_ids"][0, 2:-1]) == expected
    messages = [{"role": "user", "content": [{"type": "video", "video": video}, {"type": "text", "text": "When?"}]}]
    assert expected in backbone.text(backbone.chat(messages)["input_ids"][0])


@pytest.mark.nightly
@pytest.mark.parametrize("backbone", ["old"], indirect=True)
def test_images_and_videos_keep_the_prompts_order(backbone):
    """Each kind's features are those of its own prompt, whichever comes first: they share one placeholder."""
    items = {"video": Video(GOLD["frames"], rate=1.5), "image": GOLD["frames"][0][:16]}
    alone = {kind: backbone.embed(**backbone.prepare([[5], item])) for kind, item in items.items()}
    for order in (("video", "image"), ("image", "video")):
        prompt = backbone.prepare([[5], *(items[kind] for kind in order)])
        assert set(prompt) == {"input_ids", "position_ids", "pixel_values", "image_grid_thw"}
        found = np.asarray(backbone.embed(**prompt).embeddings[0])
        expected = np.concatenate([np.asarray(alone[order[0]].embeddings[0]), alone[order[1]].embeddings[0, 1:]])
        assert_close_to_largest(found, expected, "embeddings", bar=1e-5)

    ids, grid = np.array([301] * 8, np.int32), np.array([[1, 4, 4]], np.int32)
    arrays = {"image_grid_thw": grid, "video_grid_thw": grid}
    with pytest.raises(InputError, match="got both for GLM-4V, which has one placeholder"):
        backbone.family.positions(backbone.config, ids, arrays)


def test_qwen2_vls_time_axis_counts_temporal_patches(tmp_path):
    """Whatever the rate: two frames a position. The text behind follows the largest axis, or height and width alone."""
    directory = write_checkpoint("qwen2_vl", tmp_path)
    (directory / VIDEO_FILE).write_text(json.dumps(SETTINGS | {"size": {"shortest_edge": 64, "longest_edge": 4096}}))
    video = Video(GOLD["frames"][:, :16, :8].repeat(2, axis=0), rate=0.25)
    rules: tuple[tuple[VideoRule, int], ...] = (("max", 7), ("hf5", 4))
    for rule, after in rules:
        prompt = load(directory, video_rule=rule).prepare([[5], video, [7]])
        assert prompt["video_grid_thw"].tolist() == [[5, 4, 2]]
        time, height, width = prompt["position_ids"][0].T.tolist()
        assert time[:-2] == [0, 1, *np.arange(2, 7).repeat(2)]
        assert height[2:-2] == [2, 3] * 5
        assert width[2:-2] == [2] * 10
        assert time[-2:] == [after, after + 1]
