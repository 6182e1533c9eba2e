"""Videos in sessions, saved sessions, batches and request caches: what they serve is what the whole prompt computes."""

import functools

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from tests.goldens.load import write_chatting
from tests.goldens.redraw import draw_frames

FRAMES = draw_frames("first", 6, 22, 41)
IMAGE = draw_frames("image", 1, 20, 41)[0]

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """`loaded(family, video_rule)`: the tiny backbone with the video golden's tokenizer, kept for the module."""

    @functools.cache
    def make(family, video_rule=None):
        directory = write_chatting(family, tmp_path_factory.mktemp(family), videos=True)
        return load(directory, video_rule=video_rule)

    return make


def answer_to(backbone, items, question, steps=6):
    """Greedy continuation of the whole prompt, computed at once."""
    prompt = backbone.prepare([*items, question])
    return np.asarray(backbone.generate(backbone.embed(**prompt), steps))[0].tolist()


CASES = [
    ("qwen2_5_vl", None),
    pytest.param("qwen2_5_vl", "hf5", marks=pytest.mark.nightly),
    *(pytest.param(name, None, marks=pytest.mark.nightly) for name in ("qwen3_vl", "smolvlm", "internvl", "kimi_vl")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "rule"), CASES)
def test_a_session_lays_videos_out_as_the_whole_prompt_does(loaded, family, rule, tmp_path):
    """A video and an image, one after the other and then a question: the places of all are those of one prompt; the
    first chunk is exact, so a session of it alone answers as the whole prompt; a saved session answers as before.
    """
    backbone, video = loaded(family, rule), Video(FRAMES, rate=2.0)
    lone = kvp.Session(backbone, chat=False)
    lone.add(video)
    expected = answer_to(backbone, [video], "What?")
    assert list(lone.ask("What?", steps=6).ids) == expected

    session = kvp.Session(backbone, chat=False)
    session.add(video)
    session.add(IMAGE)
    entries = [piece.entry for piece in session.window.pieces]
    assert [entry.modality for entry in entries] == ["video", "image"]
    whole = backbone.prepare([video, IMAGE, [5, 6]])
    assert sum(entry.tokens for entry in entries) == whole["input_ids"].shape[1] - 2
    places = np.asarray(whole["position_ids"][0])
    assert session.window.next_start == places[-2:].min()
    assert sum(entry.span for entry in entries) == places[-2:].min()

    said = session.ask("What?", steps=6).ids
    session.save(tmp_path / "session")
    again = kvp.Session.restore(tmp_path / "session", backbone)
    assert again.ask("What?", steps=6).ids == said
    assert [piece.entry for piece in again.window.pieces] == entries


def test_one_content_is_one_chunk(loaded, tmp_path):
    backbone = loaded("qwen2_5_vl")
    session = kvp.Session(backbone, chat=False)
    first = session.add(Video(FRAMES, rate=2))
    assert session.add(Video(FRAMES.copy(), rate=2.0)) == f"{first}#2"
    assert not session.add(Video(FRAMES, rate=1)).startswith(first)
    large = np.broadcast_to(np.zeros(1, np.uint8), (2, 4096, 4096, 3))
    with pytest.raises(InputError, match="got 100663296 bytes; expected at most 67108864"):
        session.add(Video(large, rate=2))


def test_what_a_backbone_does_not_take_leaves_the_session_as_it_was(loaded):
    session = kvp.Session(loaded("qwen2_5_vl"), chat=False)
    with pytest.raises(InputError, match="audios: got some for Qwen2_5_VLForConditionalGeneration, which takes none"):
        session.add(Audio(np.zeros(9, np.float32), 16000))
    assert len(session.ids) == 0


@pytest.mark.nightly
def test_a_batch_names_videos_in_json(loaded, tmp_path):
    """A folder of frames with their rate, beside an image; the answer is that of the whole prompt."""
    from PIL import Image

    backbone = loaded("qwen2_5_vl")
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(FRAMES):
        Image.fromarray(frame).save(tmp_path / "clip" / f"{number}.png")
    clip = {"video": str(tmp_path / "clip"), "rate": 2}
    lines = [
        {"front": [clip], "question": {"text": "What?"}, "steps": 5},
        {"front": [Video(FRAMES, rate=2.0)], "question": "What?", "steps": 5},
        {"front": [{**clip, "speed": 2}], "question": "What?"},
        {"front": [{"video": str(tmp_path / "missing.mp4")}], "question": "What?"},
        {"front": [clip, IMAGE], "question": "What?", "steps": 2},
    ]
    kvp.answer_batch(backbone, None, lines, out=tmp_path / "answers.jsonl")
    answers = kvp.batch.read_answers(tmp_path / "answers.jsonl")
    expected = answer_to(backbone, [Video(FRAMES, rate=2.0)], "What?", 5)
    assert answers[0]["ids"] == answers[1]["ids"] == expected
    assert "with the fields ['rate', 'speed', 'video']; expected" in answers[2]["message"]
    assert "no readable file" in answers[3]["message"]
    assert len(answers[4]["ids"]) == 2
