"""Videos of InternVL's own releases: the rule is `load_video` of the model cards of InternVL2 to 3.5, transcribed here.

There is no transformers class for it: frames are chosen by the loop below, resized by Pillow, and named in the prompt
as `video_prefix` has them. transformers' processor for the `-hf` releases chooses, resizes and normalises otherwise.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from kvpatch_jax import Video
from kvpatch_jax.errors import InputError
from models import load, save
from models.inputs.family_videos import sample_internvl_chat
from models.inputs.qwen_images import ImageConfig
from models.inputs.texts import ids_of_text
from models.inputs.video_frames import VIDEO_FILE, Stream, VideoConfig
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.goldens.redraw import draw_frames
from tests.models.test_authors_formats import WEIGHTS, as_opengvlab, chat_config, write

MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
SIDE = 16
QUESTION = "What is this?"


def get_index(max_frame: int, num_segments: int) -> list[int]:
    """The cards' function without bounds, term by term."""
    seg_size = float(max_frame - 0) / num_segments
    return [int(0 + (seg_size / 2) + np.round(seg_size * idx)) for idx in range(num_segments)]


def tiles(frames: np.ndarray) -> np.ndarray:
    """`dynamic_preprocess` with `max_num=1`, `Resize`, `ToTensor` and `Normalize`."""
    out = []
    for frame in frames:
        image = Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        out.append((((np.asarray(image, np.float32) / np.float32(255)) - MEAN) / STD).transpose(2, 0, 1))
    return np.stack(out)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny InternVL as its authors release theirs, with the golden's tokenizer. Read only."""
    root = tmp_path_factory.mktemp("release")
    plain = write_checkpoint("internvl", root / "hf")
    config = chat_config(json.loads((plain / "config.json").read_text()), "Qwen2ForCausalLM")
    directory = write(root / "chat", config, as_opengvlab(load_file(plain / WEIGHTS)))
    tokenizer = json.loads((GOLDENS / "videos" / "internvl.json").read_text())["tokenizer"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize("segments", [1, 2, 7, 8, 32])
def test_frames_are_those_of_the_model_cards(segments):
    """Also of videos with fewer frames than are shown, of which some are shown several times."""
    config = VideoConfig(ImageConfig(), "{}")
    for count in (1, 2, 5, 8, 9, 33, 100, 1001):
        found = sample_internvl_chat(Stream(count, 25.0), None, segments, config)
        assert found.tolist() == get_index(count - 1, segments)
    assert sample_internvl_chat(Stream(100, 25.0), None, None, config).tolist() == get_index(99, 8)
    assert sample_internvl_chat(Stream(100, 25.0), 2.0, None, config).tolist() == get_index(99, 8)


def test_a_frame_is_an_image_of_one_tile(release):
    """Whatever its shape: an image alone of that size has two tiles and a thumbnail."""
    frames = draw_frames("film", 6, 20, 41)
    backbone = load(release)
    shown = backbone.prepare([Video(frames, rate=2.0, frames=3)])
    assert shown["pixel_values"].shape == (3, 3, SIDE, SIDE)
    assert shown["video_frames"].tolist() == [3]
    np.testing.assert_allclose(shown["pixel_values"], tiles(frames[get_index(5, 3)]), atol=1e-6)
    assert len(backbone.prepare([frames[0]])["pixel_values"]) == 3


def test_a_conversation_names_frames_as_the_model_cards_do(release):
    """`video_prefix` in front of the question, each `<image>` as `chat` of the authors' code replaces it."""
    backbone = load(release)
    frames, page = draw_frames("film", 2, 20, 41), draw_frames("page", 1, 16, 16)[0]
    content = [{"type": "video", "video": Video(frames, rate=2.0)}, {"type": "image", "image": page}]
    prompt = backbone.chat([{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}])

    image = "".join(backbone.tokenizer.id_to_token(token) for token in backbone.prepare([page])["input_ids"][0])
    prefix = "".join(f"Frame{i + 1}: <image>\n" for i in range(2))
    assert backbone.chat_template is not None
    system = backbone.chat_template.render([{"role": "user", "content": ""}]).partition("<|im_start|>user")[0]
    text = system + f"<|im_start|>user\n{prefix}<image>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    expected = ids_of_text(backbone.tokenizer, text.replace("<image>", image), None)
    assert prompt["input_ids"][0].tolist() == expected
    np.testing.assert_allclose(prompt["pixel_values"], np.concatenate([tiles(frames), tiles(page[None])]), atol=1e-6)


def test_frames_have_the_features_of_images(release):
    """The towers and positions are those of images: a video is the same prompt as its frames, laid out by hand."""
    backbone, frames = load(release), draw_frames("film", 2, 16, 16)
    parts = ["Frame1: ", frames[0], "\nFrame2: ", frames[1]]
    shown, laid = backbone.prepare([Video(frames, rate=2.0)]), backbone.prepare(parts)
    assert shown["input_ids"].tolist() == laid["input_ids"].tolist()
    first, second = (np.asarray(backbone.embed(**prompt).embeddings) for prompt in (shown, laid))
    assert np.array_equal(first, second)


def test_what_is_saved_keeps_the_authors_rule(release, tmp_path):
    backbone = load(release)
    again = load(save(backbone, tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / VIDEO_FILE).read_text())["frames_as_images"] is True
    assert again.video_config == backbone.video_config
    assert again.fingerprint == backbone.fingerprint
    video = Video(draw_frames("film", 12, 20, 41), rate=4.0, fps=1.0)
    first, second = (one.prepare([video])["pixel_values"] for one in (backbone, again))
    assert np.array_equal(first, second)


def test_no_frames_are_refused(release):
    with pytest.raises(InputError, match="video: got 0 frames to sample; expected 1 or more"):
        load(release).prepare([Video(draw_frames("film", 2, 16, 16), rate=8.0, fps=1.0)])


@pytest.mark.parametrize("family", ["llava_next", "llava", "deepseek_vl"])
def test_families_without_a_rule_say_what_to_give_instead(family, tmp_path):
    """LLaVA-NeXT-Video has one, under another architecture; these releases have none."""
    backbone = load(write_checkpoint(family, tmp_path / family))
    with pytest.raises(InputError, match=r"which takes none; expected its frames as images"):
        backbone.prepare([Video(draw_frames("film", 2, 16, 16), rate=2.0)])
