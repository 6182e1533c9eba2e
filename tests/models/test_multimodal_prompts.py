"""Prompts with images and videos have the tokens, pixels, times and positions that transformers gives them."""

import functools
import json
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.positions import PositionRule, get_rope_positions
from kvpatch_jax.models.inputs.videos import kimi_time, number_words
from kvpatch_jax.window import Entry
from tests.goldens.load import (
    GOLDENS,
    drawn_inputs,
    golden_arrays,
    golden_chat,
    golden_images,
    golden_prompt,
    write_chatting,
    write_checkpoint,
)
from tests.goldens.redraw import bits, draw_frames
from tests.goldens.table import AUDIO, FAMILIES, IMAGE, VIDEO
from tests.models.conftest import blank_features
from tests.models.glm_settings import GLM_FRAMES, KINDS, SETTINGS, VIDEO_FILE, glm_settings
from tests.shared.tolerances import assert_close_to_largest
from tests.shared.window_oracle import BUCKETS

START, END, AUDIO_START = 303, 304, 306
OMNI = PositionRule(IMAGE, VIDEO, 2, 2, AUDIO, (START, AUDIO_START))
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if row.positions])
def test_positions_equal_transformers(tiny, loaded, family):
    """Of mixtures whose towers do not run: features are given in their place. By transformers' rule for videos."""
    plain = loaded(family, video_rule="hf5") if family == "qwen2_5_vl" else tiny(family)
    backbone = plain.with_buckets(BUCKETS)
    for case in FAMILIES[family].positions:
        arrays = golden_arrays(family, case)
        ids, expected = arrays.pop("input_ids").astype(np.int32)[None], arrays.pop("position_ids")
        features = blank_features(backbone, ids)
        positions = backbone.embed(ids, features=features, **drawn_inputs(family, case), **arrays).positions[0]
        assert np.array_equal(positions, expected), case


def test_a_prompt_in_parts_has_the_ids_and_positions_of_transformers(tiny):
    """Two images between runs of token ids."""
    backbone, images = tiny("qwen2_5_vl"), golden_images("qwen2_5_vl", "two_images")
    gold = golden_prompt(backbone, "qwen2_5_vl", "two_images")
    gold |= {"position_ids": golden_arrays("qwen2_5_vl", "two_images")["position_ids"][None]}
    ids = gold["input_ids"][0].tolist()
    marks = [place for place, token in enumerate(ids) if token in (303, 304)]
    parts = [ids[: marks[0]], images[0], ids[marks[1] + 1 : marks[2]], images[1], ids[marks[3] + 1 :]]
    prompt = backbone.prepare([part for part in parts if len(part)])
    for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw"):
        assert np.array_equal(prompt[name], gold[name]), name


@pytest.mark.parametrize(("rule", "after"), [("max", 5), ("hf5", 2)])
def test_a_video_stands_at_its_seconds(rule, after):
    ids = np.array([1, *[VIDEO] * 3, 3], np.int32)
    settings = PositionRule(IMAGE, VIDEO, 2, rate=3, video_rule=rule)
    positions = get_rope_positions(ids, None, np.array([[3, 2, 2]]), np.array([0.5]), settings)
    assert positions[:, 0].tolist() == [0, 1, 2, 4, after]  # 0, 1.5 and 3 positions, truncated


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([AUDIO_START, AUDIO, AUDIO, 307], {"sounds": [3]}, "got 2 placeholders 305 from index 1; expected 3"),
        ([START, IMAGE], {"images": np.array([[1, 3, 4]])}, "multiple of the merge size"),
        ([START, IMAGE], {"images": np.array([[1, 4, 4]])}, "image: got 1 placeholders 301 from index 1; expected 4"),
    ],
)
def test_sizes_and_placeholders_must_match(ids, sizes, message):
    arrays: dict[str, Any] = {"images": None, "videos": None, "seconds": None, "sounds": []} | sizes
    with pytest.raises(InputError, match=message):
        get_rope_positions(np.array(ids, np.int32), rule=OMNI, **arrays)


# --------------------------------------------------------------------------------------------------------------- videos


NAMES = ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "kimi_vl"]
EVEN = ("smolvlm", "internvl")
"""Families of whose goldens both videos have four frames."""

FRAMES = draw_frames("first", 6, 22, 41)
PICTURE = draw_frames("image", 1, 20, 41)[0]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """`loaded(family, **options)`: the tiny backbone with the golden's tokenizer and template, kept for the module."""
    root = tmp_path_factory.mktemp("videos")
    write = functools.cache(lambda family: write_chatting(family, root / family, videos=True))
    return functools.cache(lambda family, **options: load(write(family), buckets=BUCKETS, **options))


def videos_of(family: str) -> list[Video]:
    """The golden's videos: frames that are given with their rate, of the second every other one."""
    first, second = draw_frames("first", 5, 22, 41), draw_frames("second", 8, 33, 18)
    if family in EVEN:
        times = np.arange(4)
        return [Video(first[:4], timestamps=times / 2.5), Video(second[:4], timestamps=times / 4)]
    return [Video(first, rate=2.5), Video(second[::2], rate=2.0)]


def messages(family: str) -> list[dict]:
    videos = iter(videos_of(family))
    shown = {"video": lambda: {"video": next(videos)}, "image": lambda: {"image": PICTURE}, "text": dict}
    filled = lambda message: [part | shown[part["type"]]() for part in message["content"]]
    return [message | {"content": filled(message)} for message in golden_chat(family, videos=True)["messages"]]


def expected_ids(family: str) -> list[int]:
    """The golden's ids; of Qwen3-VL without the start and end around all frames of a video.

    transformers 5.23 leaves these, which its template writes; its authors' processor, as ours, takes them out.
    """
    ids = golden_chat(family, videos=True)["input_ids"]
    if family != "qwen3_vl":
        return ids
    around = lambda n: (ids[n] == START and ids[n + 1] not in (IMAGE, VIDEO)) or ids[n] == ids[n - 1] == END
    return [token for place, token in enumerate(ids) if not around(place)]


@pytest.mark.parametrize("family", NAMES)
def test_a_conversation_with_videos_equals_transformers(loaded, family):
    """Token ids, pixels bit for bit, grids and seconds; images and videos in one prompt."""
    backbone, gold = loaded(family), golden_chat(family, videos=True)
    prompt = backbone.chat(messages(family))
    assert prompt["input_ids"][0].tolist() == expected_ids(family)
    for name, (shape, wanted) in gold["pixels"].items():
        assert prompt[name].size == np.prod(shape)
        # transformers has no Pillow processor for Kimi's images; torchvision's normalises in other steps than ours.
        assert bits(prompt[name]) == wanted or (family, name) == ("kimi_vl", "pixel_values"), name
    for name in ("video_grid_thw", "image_grid_thw", "second_per_grid_ts", "num_chunks_per_video"):
        if name in gold:
            assert prompt[name].tolist() == gold[name], name


@pytest.mark.parametrize("name", ["inputs_embeds", pytest.param("logits", marks=pytest.mark.nightly)])
def test_kimis_videos_are_computed_as_transformers_does(loaded, name):
    """`test_parity.py` has the videos of the families with M-RoPE; tiles of others are as those of images."""
    backbone = loaded("kimi_vl", angles="float32")
    tokens = backbone.embed(**backbone.chat(messages("kimi_vl")))
    value = tokens.embeddings if name == "inputs_embeds" else backbone.prefill(tokens, logits="all").logits
    with np.load(GOLDENS / "videos" / "kimi_vl.npz") as gold:
        assert_close_to_largest(np.asarray(value)[0, gold["rows"]], gold[name], bar=2e-4)


def test_the_video_rule_is_part_of_the_fingerprint_and_of_qwen2_5_vl_alone(loaded):
    own, other = (loaded("qwen2_5_vl", video_rule=rule).fingerprint for rule in ("max", "hf5"))
    assert own == loaded("qwen2_5_vl").fingerprint != other
    with pytest.raises(ConfigError, match="video_rule 'max' for Qwen3VLForConditionalGeneration"):
        loaded("qwen3_vl", video_rule="max")


# ------------------------------------------------------------------------------------------------ GLM-4V and Qwen2-VL


@pytest.mark.parametrize("kind", KINDS)
def test_glms_prompt_says_the_times_as_transformers_does(kind, tmp_path):
    glm_settings(write_chatting("glm4v", tmp_path), kind)
    backbone, video = load(tmp_path), Video(GLM_FRAMES["frames"], rate=1.5)
    expected = f"<|begin_of_video|>{GLM_FRAMES[f'text.{kind}']}<|end_of_video|>"
    prompt = backbone.prepare([[5, 6], video, [7]])
    assert backbone.text(prompt["input_ids"][0, 2:-1]) == expected
    ids, grid = np.array([301] * 8, np.int32), np.array([[1, 4, 4]], np.int32)
    with pytest.raises(InputError, match="got both for GLM-4V, which has one placeholder"):
        backbone.family.positions(backbone.config, ids, {"image_grid_thw": grid, "video_grid_thw": grid})


def test_qwen2_vls_time_axis_counts_temporal_patches(tmp_path):
    """Whatever the rate: two frames a position. The text behind follows the largest axis, or height and width alone."""
    directory = write_checkpoint("qwen2_vl", tmp_path)
    (directory / VIDEO_FILE).write_text(json.dumps(SETTINGS | {"size": {"shortest_edge": 64, "longest_edge": 4096}}))
    video = Video(GLM_FRAMES["frames"][:, :16, :8].repeat(2, axis=0), rate=0.25)
    for rule, after in {"max": 7, "hf5": 4}.items():
        prompt = load(directory, video_rule=rule).prepare([[5], video, [7]])  # pyright: ignore[reportArgumentType]
        assert prompt["video_grid_thw"].tolist() == [[5, 4, 2]]
        time, height, width = prompt["position_ids"][0].T.tolist()
        assert time[:-2] == [0, 1, *np.arange(2, 7).repeat(2)]
        assert height[2:-2] == [2, 3] * 5
        assert width[2:-2] == [2] * 10
        assert time[-2:] == [after, after + 1]


# ------------------------------------------------------------------------------------------------------ in a prompt


@pytest.mark.parametrize("times", [{"rate": 1e-300}, {"timestamps": [0, 1e12, 2e12, 3e12]}])
def test_times_that_are_no_positions_are_refused(loaded, times):
    """As int32 they would have come out as any number."""
    backbone, frames = loaded("qwen2_5_vl"), draw_frames("far", 4, 32, 32)
    with pytest.raises(InputError, match="expected positions below 1073741824"):
        backbone.prepare([Video(frames, **times)])


def test_texts_of_times_and_numbers():
    assert [number_words(number) for number in (0, 13, 20, 64, 100, 101, 120, 999)] == [
        *("zero", "thirteen", "twenty", "sixty-four", "one hundred", "one hundred and one"),
        *("one hundred and twenty", "nine hundred and ninety-nine"),
    ]
    with pytest.raises(InputError, match="1000 frames"):
        number_words(1000)
    assert kimi_time(3661.9996) == "01:01:01.999"
    assert kimi_time(0.5) == "00:00:00.500"


@pytest.mark.parametrize("rule", ["max", pytest.param("hf5", marks=pytest.mark.nightly)])
def test_chunks_of_a_clip_have_the_positions_of_the_whole(loaded, rule):
    """A text, a clip and a text against positions by hand, by either rule; the clip's chunk against the whole."""
    backbone = loaded("qwen2_5_vl", video_rule=rule)
    video = Video(draw_frames("first", 6, 22, 41), rate=1.0)
    whole = backbone.prepare([[5, 6, 7], video, [8, 9]])
    expected = whole["position_ids"][0]
    # By hand: 3 texts, a start at 3, then time 4 + trunc(2 · 2 · i), rows and columns from 4; the text goes on behind
    # the time axis (13), or behind the wider side (4 + 5).
    times, (rows, columns) = np.arange(3) * 4, np.mgrid[:3, :5]
    clip = np.concatenate([np.stack([np.full((3, 5), 4 + t), 4 + rows, 4 + columns], -1).reshape(-1, 3) for t in times])
    goes_on = 13 if rule == "max" else 9
    by_hand = [*([n] * 3 for n in range(4)), *clip.tolist(), *([goes_on + n] * 3 for n in range(3))]
    assert expected.tolist() == by_hand

    # A chunk counts from its own start; its span is where text behind it goes on.
    chunk = kvp.make_chunk(backbone, [video])
    assert np.array_equal(chunk.local, expected[3:-2] - 3)
    assert chunk.span == expected[-2, 0] - 3
    tokens = backbone.embed(**backbone.prepare([video]))
    assert Entry.of_tokens("clip", tokens, kind="chunk").span == chunk.span


def test_families_without_a_rule_say_what_to_give_instead(tiny):
    backbone = tiny("llava")
    with pytest.raises(InputError, match=r"which takes none; expected its frames as images"):
        backbone.prepare([Video(draw_frames("film", 2, 16, 16), rate=2.0)])


# -------------------------------------------------------------------------------------------- in sessions and batches


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "rule"), [("qwen2_5_vl", "hf5"), *((name, None) for name in NAMES)])
def test_a_session_lays_videos_out_as_the_whole_prompt_does(loaded, family, rule):
    """A session of a lone video answers as the whole prompt; places behind a video and an image are the prompt's."""
    backbone, video = loaded(family, video_rule=rule), Video(FRAMES, rate=2.0)
    lone, session = kvp.Session(backbone, chat=False), kvp.Session(backbone, chat=False)
    lone.add(video)
    prompt = backbone.prepare([video, "What?"])
    expected = np.asarray(backbone.generate(backbone.embed(**prompt), 6))[0].tolist()
    assert list(lone.ask("What?", steps=6).ids) == expected

    session.add(video)
    session.add(PICTURE)
    entries = [piece.entry for piece in session.window.pieces]
    assert [entry.modality for entry in entries] == ["video", "image"]
    whole = backbone.prepare([video, PICTURE, [5, 6]])
    start = np.asarray(whole["position_ids"][0])[-2:].min()
    assert sum(entry.tokens for entry in entries) == whole["input_ids"].shape[1] - 2
    assert session.window.next_start == sum(entry.span for entry in entries) == start


@pytest.mark.nightly
def test_a_batch_names_videos_in_json(loaded, tmp_path):
    path = GOLDENS / "omni.mkv"
    clip = {"video": str(path), "frames": 4}
    fronts = [clip, Video(path, frames=4), {**clip, "speed": 2}]
    lines = [{"front": [front], "question": "What?", "steps": 5} for front in fronts]
    kvp.answer_batch(loaded("qwen2_5_vl"), None, lines, out=tmp_path / "answers.jsonl")
    first, second, third = kvp.batch.read_answers(tmp_path / "answers.jsonl")
    assert first["ids"] == second["ids"]
    assert "with the fields ['frames', 'speed', 'video']; expected" in third["message"]


def test_a_session_knows_a_video_by_its_content(loaded):
    session = kvp.Session(loaded("qwen2_5_vl"), chat=False)
    first = session.add(Video(FRAMES, rate=2))
    assert session.add(Video(FRAMES.copy(), rate=2.0)) == f"{first}#2"
    assert not session.add(Video(FRAMES, rate=1)).startswith(first)
    with pytest.raises(InputError, match="audios: got some for Qwen2_5_VLForConditionalGeneration, which takes none"):
        session.add(Audio(np.zeros(9, np.float32), 16000))
    assert len(session.ids) == 3
