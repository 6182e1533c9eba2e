"""Videos: pixels, times, tokens, positions and the model's numbers equal to transformers', and decoding of files.

The goldens are of conversations with two videos and (but for SmolVLM) an image between them. transformers 5.23 leaves
the start and end that Qwen3-VL's template writes around a video's frames, which its authors' processor (and
transformers before 5) takes out, as ours does; so these two are taken out of the golden's tokens.
"""

import functools
import hashlib
import json
import struct
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Video
from kvpatch_jax.core import Buckets, relocate, to_engine
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.models.inputs.video_frames import Clip, Stream, clips_of
from kvpatch_jax.models.inputs.videos import (
    kimi_time,
    number_words,
    sample_evenly,
    sample_internvl,
    sample_qwen2,
    sample_qwen3,
    sample_smolvlm,
)
from tests.goldens.load import GOLDENS, golden_chat, write_chatting, write_checkpoint
from tests.goldens.redraw import draw_frames
from tests.shared.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)
NAMES = ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "kimi_vl"]
EVEN = ("smolvlm", "internvl")
"""Families of whose goldens both videos have four frames."""
START, END, IMAGE, VIDEO = 303, 304, 301, 302

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(family)`: the tiny checkpoint with the golden's tokenizer and template, kept for the module."""
    return functools.cache(lambda family: write_chatting(family, tmp_path_factory.mktemp(family), videos=True))


def videos_of(family: str) -> list[Video]:
    """The golden's videos: frames that are given with their rate, of the second every other one."""
    first, second = draw_frames("first", 5, 22, 41), draw_frames("second", 8, 33, 18)
    if family in EVEN:
        times = np.arange(4)
        return [Video(first[:4], timestamps=times / 2.5), Video(second[:4], timestamps=times / 4)]
    return [Video(first, rate=2.5), Video(second[::2], rate=2.0)]


def image() -> np.ndarray:
    return draw_frames("image", 1, 20, 41)[0]


def messages(family: str) -> list[dict]:
    videos = iter(videos_of(family))
    shown = {"video": lambda: next(videos), "image": image}

    def filled(part: dict) -> dict:
        return part if part["type"] == "text" else {**part, part["type"]: shown[part["type"]]()}

    return [
        {**message, "content": [filled(part) for part in message["content"]]}
        for message in golden_chat(family, videos=True)["messages"]
    ]


def expected_ids(family: str) -> np.ndarray:
    """The golden's ids; of Qwen3-VL without the start and end around all frames of a video."""
    ids = golden_chat(family, videos=True)["input_ids"]
    if family != "qwen3_vl":
        return np.array(ids, np.int32)
    out = []
    for place, token in enumerate(ids):
        around = token == START and ids[place + 1] not in (IMAGE, VIDEO)
        if not around and not (token == END and ids[place - 1] == END):
            out.append(token)
    return np.array(out, np.int32)


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------------------ the same prompt


@pytest.mark.parametrize("family", NAMES)
def test_a_conversation_with_videos_equals_transformers(checkpoint, family):
    """Token ids, pixels bit for bit, grids and seconds; images and videos in one prompt."""
    backbone, gold = load(checkpoint(family)), golden_chat(family, videos=True)
    prompt = backbone.chat(messages(family))
    assert prompt["input_ids"][0].tolist() == expected_ids(family).tolist()
    for name, (shape, wanted) in gold["pixels"].items():
        assert prompt[name].size == np.prod(shape)
        # transformers has no Pillow processor for Kimi's images; torchvision's normalises in other steps than ours.
        assert digest(prompt[name]) == wanted or (family, name) == ("kimi_vl", "pixel_values"), name
    for name in ("video_grid_thw", "image_grid_thw", "second_per_grid_ts", "num_chunks_per_video"):
        if name in gold:
            assert prompt[name].tolist() == gold[name], name


def test_kimis_videos_are_computed_as_transformers_does(checkpoint):
    """`test_parity.py` has the videos of the families with M-RoPE; tiles of others are as those of images."""
    backbone = load(checkpoint("kimi_vl"), angles="float32")
    with np.load(GOLDENS / "videos" / "kimi_vl.npz") as gold:
        tokens, rows = backbone.embed(**backbone.chat(messages("kimi_vl"))), gold["rows"]
        close(tokens.embeddings[0, rows], gold["inputs_embeds"], "embeddings")
        close(backbone.prefill(tokens, logits="all").logits[0, rows], gold["logits"], "logits")


def test_the_video_rule_is_part_of_the_fingerprint_and_of_qwen2_5_vl_alone(checkpoint):
    own, other = (load(checkpoint("qwen2_5_vl"), video_rule=rule).fingerprint for rule in ("max", "hf5"))
    assert own == load(checkpoint("qwen2_5_vl")).fingerprint != other
    with pytest.raises(ConfigError, match="video_rule 'max' for Qwen3VLForConditionalGeneration"):
        load(checkpoint("qwen3_vl"), video_rule="max")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["kimi_vl"])
def test_padding_to_buckets_changes_no_number(checkpoint, family):
    plain, padded = load(checkpoint(family)), load(checkpoint(family), buckets=Buckets(64, 2))
    prompt = plain.chat(messages(family))
    close(padded.embed(**prompt).embeddings, plain.embed(**prompt).embeddings, "embeddings")
    features = plain.encode(**prompt)
    assert np.array_equal(plain.embed(**prompt, features=features).embeddings, plain.embed(**prompt).embeddings)


@pytest.mark.nightly
@pytest.mark.parametrize("family", NAMES)
def test_images_and_videos_may_stand_in_any_order(checkpoint, family):
    """Features in the order of the placeholders: each as of its own prompt, whatever stands beside it."""
    backbone = load(checkpoint(family))
    first, second = videos_of(family)
    items = [image(), first, image()[:, ::-1], second] if family != "qwen2_5_vl" else [first, image(), second, image()]
    pads = [backbone.config.image_token, getattr(backbone.config, "video_token", None)]

    def features(parts):
        prompt = backbone.prepare(parts)
        embeddings = np.asarray(backbone.embed(**prompt).embeddings[0])
        return embeddings[np.isin(prompt["input_ids"][0], [pad for pad in pads if pad is not None])]

    close(features([items[0], [7, 8], *items[1:]]), np.concatenate([features([item]) for item in items]), family)


# ---------------------------------------------------------------------------------------------------------- the frames

SAMPLED = json.loads((GOLDENS / "videos" / "sampling.json").read_text())
SAMPLERS = {
    "qwen2_5_vl": sample_qwen2,
    "qwen3_vl": sample_qwen3,
    "internvl": sample_internvl,
    "smolvlm": sample_smolvlm,
    "kimi_vl": sample_evenly,
}


@pytest.mark.parametrize("family", NAMES)
def test_frames_are_sampled_as_transformers_does(family):
    config = Settings.of({"temporal_patch_size": 2} if family == "qwen2_5_vl" else {}, "video")
    for (count, rate, fps, number), expected in zip(SAMPLED["sampled"], SAMPLED["families"][family], strict=True):
        sample = functools.partial(SAMPLERS[family], Stream(count, rate), fps, number, config)
        if expected is None:
            with pytest.raises(InputError, match=r"frames to sample; expected 1 to"):
                sample()
        else:
            assert sample().tolist() == expected, (count, rate, fps, number)


def film(path, frames: np.ndarray, rate: int, codec: str = "ffv1") -> None:
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"ffv1": "bgr0", "png": "rgb24"}.get(codec, "yuv420p")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def read_clip(video: Video, steady: bool = False) -> Clip:
    """Every other frame."""
    return clips_of([video], lambda stream, *_: np.arange(0, stream.count, 2), Settings.of({}, "video"), steady)[0]


def test_a_files_frames_are_those_that_were_encoded(tmp_path):
    """Lossless: every value. Number n is shown n / rate seconds after the start."""
    frames = draw_frames("film", 9, 32, 48)
    film(tmp_path / "film.mkv", frames, 6)
    for source in (tmp_path / "film.mkv", (tmp_path / "film.mkv").read_bytes()):
        clip = read_clip(Video(source))
        assert np.array_equal(clip.frames, frames[::2])
        assert clip.timestamps.tolist() == (np.arange(0, 9, 2) / 6).tolist()
        assert clip.rate == pytest.approx(5 / 9 * 6)
        assert clip.duration == pytest.approx(1.5)


@pytest.mark.parametrize(("matrix", "quarters"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_a_film_of_a_turned_phone_is_shown_upright(tmp_path, matrix, quarters):
    """The file's display matrix says it; its pixels lie on their side."""
    frames = draw_frames("phone", 4, 32, 48)
    film(tmp_path / "phone.mov", frames, 6, "png")
    content = bytearray((tmp_path / "phone.mov").read_bytes())
    # The track's header: its name, 40 bytes, then nine numbers of 32 bits, the third column's apart.
    place = content.index(b"tkhd") + 44
    first, second, third, fourth = (value * 65536 for value in matrix)
    content[place : place + 36] = struct.pack(">9i", first, second, 0, third, fourth, 0, 0, 0, 1 << 30)
    clip = read_clip(Video(bytes(content)))
    np.testing.assert_array_equal(clip.frames, np.rot90(frames[::2], quarters, axes=(1, 2)))


SECONDS = [0, 0.1, 0.2, 0.3, 5, 10]


def recording(path, seconds):
    """A film of variable rate, as screens and phones record it."""
    import fractions

    import av

    frames = draw_frames("recording", len(seconds), 32, 32)
    with av.open(str(path), "w") as container:
        codec, pixels = ("png", "rgb24") if path.suffix == ".mov" else ("ffv1", "bgr0")
        stream: Any = container.add_stream(codec, rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 32, pixels
        stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for frame, time in zip(frames, seconds, strict=True):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            shown.pts, shown.time_base = round(time * 1000), fractions.Fraction(1, 1000)
            container.mux(stream.encode(shown))
        container.mux(stream.encode(None))
    return frames


@pytest.mark.parametrize("name", ["film.mkv", "film.mov"])
def test_frames_of_a_recording_of_variable_rate_have_its_own_times(tmp_path, name):
    frames, settings = recording(tmp_path / name, SECONDS), Settings.of({"fps": 2, "temporal_patch_size": 2}, "video")
    whole = clips_of([Video(tmp_path / name)], sample_qwen3, settings)[0]
    np.testing.assert_allclose(whole.timestamps, SECONDS, atol=1e-3)
    np.testing.assert_array_equal(whole.frames, frames)
    # Three frames: those nearest to 0, 6 and 12 seconds.
    some = clips_of([Video(tmp_path / name, frames=3)], sample_qwen3, settings)[0]
    np.testing.assert_allclose(some.timestamps, [0, 5, 10], atol=1e-3)
    # A family that counts one rate sees what a player shows at 0, 2, … 10 seconds.
    even = clips_of([Video(tmp_path / name)], sample_qwen2, settings, steady=True)[0]
    np.testing.assert_allclose(even.timestamps, np.arange(6) * 2, atol=1e-3)
    np.testing.assert_array_equal(even.frames, frames[[0, 3, 3, 4, 4, 5]])


def test_a_video_of_one_frame_is_refused_with_what_to_do(tmp_path):
    film(tmp_path / "one.mkv", draw_frames("film", 1, 32, 32), 6)
    settings = Settings.of({"temporal_patch_size": 2}, "video")
    with pytest.raises(InputError, match=r"got 1 frame; expected at least 2, .*pass a single frame as an image"):
        clips_of([Video(tmp_path / "one.mkv")], sample_qwen2, settings)


def test_a_folder_of_frames_is_a_video(tmp_path):
    from PIL import Image

    frames = draw_frames("folder", 4, 16, 24)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"frame_{number:03d}.png")
    whole = read_clip(Video(tmp_path, rate=2))
    assert np.array_equal(whole.frames, frames)
    assert whole.timestamps.tolist() == [0, 0.5, 1, 1.5]
    fewer = read_clip(Video(tmp_path, rate=2, frames=2))
    assert np.array_equal(fewer.frames, frames[::2])
    assert (fewer.timestamps.tolist(), fewer.rate) == ([0, 1], 1)


def test_a_file_goes_into_a_prompt(checkpoint, tmp_path):
    """By its path alone, sampled at two frames a second; the same frames with their times make the same prompt."""
    frames = draw_frames("film", 12, 24, 32)
    film(tmp_path / "film.mkv", frames, 6)
    backbone = load(checkpoint("qwen2_5_vl"))
    by_path = backbone.prepare([tmp_path / "film.mkv", "?"])
    given = backbone.prepare([Video(frames[::3], rate=2.0), "?"])
    assert by_path.keys() == given.keys()
    for name, value in given.items():
        assert np.array_equal(by_path[name], value), name
    asked = backbone.prepare([Video(tmp_path / "film.mkv", frames=6), "?"])
    assert asked["video_grid_thw"].tolist() == [[3, *given["video_grid_thw"][0][1:]]]
    assert asked["second_per_grid_ts"].tolist() == pytest.approx([2 / 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no video at all", "a file without a video"), (b"RIFF\x00\x00\x00\x00WAVE", "a file without a video")],
)
def test_files_without_a_video_are_refused(content, message):
    with pytest.raises(InputError, match=message):
        read_clip(Video(content))


@pytest.mark.parametrize("times", [{"rate": 1e-300}, {"timestamps": [0, 1e12, 2e12, 3e12]}])
def test_times_that_are_no_positions_are_refused(checkpoint, times):
    """As int32 they would have come out as any number."""
    backbone, frames = load(checkpoint("qwen2_5_vl")), draw_frames("far", 4, 32, 32)
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


# ------------------------------------------------------------------------------------------------------ moving a video


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "kimi_vl"])
def test_relocating_a_video_is_exact(checkpoint, family):
    """Forwards at p and at p + δ have the same phase-free KV (1e-5 of the largest), whether the axes move alike or by
    distances of their own; so has a part of the clip that is moved to where the whole is.
    """
    backbone = load(checkpoint(family))
    tokens = backbone.embed(**backbone.prepare([videos_of(family)[0]]))
    here = backbone.prefill(tokens)
    layout = backbone.layout
    moves = [np.array(37, np.int32), np.array(1000, np.int32)]
    moves += [np.array([20, 0, 0], np.int32)] if np.ndim(tokens.positions) == 3 else []
    for delta in moves:
        places = np.asarray(tokens.positions) + delta
        there = backbone.prefill(tokens._replace(positions=places))
        forward = to_engine(layout, there.kv, places, 0)
        moved = relocate(layout, to_engine(layout, here.kv, tokens.positions, 0), tokens.positions, places)
        for name, value in forward.items():
            assert_close_to_largest(there.kv[name], here.kv[name], f"phase-free {name} at {delta}", bar=1e-5)
            assert_close_to_largest(moved[name], value, f"moved {name} at {delta}", bar=1e-5)
            part = to_engine(
                layout, {own: kv[:, :, 7:19] for own, kv in here.kv.items()}, tokens.positions[:, 7:19], delta
            )
            assert_close_to_largest(part[name], value[:, :, 7:19], f"a part's {name} at {delta}", bar=1e-5)


def test_another_rate_is_another_geometry(checkpoint):
    """Phase-free KV of a video shown at half the rate differs: no shift makes one of the other."""
    backbone = load(checkpoint("qwen2_5_vl"))
    frames, kv = draw_frames("first", 6, 22, 41), []
    for rate in (2.0, 1.0):
        kv.append(backbone.prefill(backbone.embed(**backbone.prepare([Video(frames, rate=rate)]))).kv)
    # The lowest layer's keys know of no position; those above do.
    assert_close_to_largest(kv[0]["k"][0], kv[1]["k"][0], "lowest layer", bar=1e-5)
    assert np.abs(np.asarray(kv[0]["k"][-1] - kv[1]["k"][-1])).max() > 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["max", "hf5"])
def test_chunks_of_a_clip_have_the_positions_of_the_whole(checkpoint, rule):
    """A text, a clip and a text against positions by hand, by either rule; the clip's chunk against the whole."""
    backbone = load(checkpoint("qwen2_5_vl"), video_rule=rule)
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
    from kvpatch_jax import make_chunk
    from kvpatch_jax.window import Entry

    chunk = make_chunk(backbone, [video])
    assert np.array_equal(chunk.local, expected[3:-2] - 3)
    assert chunk.span == expected[-2, 0] - 3
    tokens = backbone.embed(**backbone.prepare([video]))
    assert Entry.of_tokens("clip", tokens, kind="chunk").span == chunk.span


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["max", "hf5"])
def test_an_answer_goes_on_behind_a_video(checkpoint, rule):
    """The first token that is made stands where a text would, by either rule: as of the prompt with that token."""
    backbone = load(checkpoint("qwen2_5_vl"), video_rule=rule)
    prompt = backbone.prepare([Video(draw_frames("first", 6, 22, 41), rate=1.0)])
    made = np.asarray(backbone.generate(backbone.embed(**prompt), 3, stop=()))[0].tolist()
    longer = backbone.prepare([Video(draw_frames("first", 6, 22, 41), rate=1.0), made[:2]])
    logits = backbone.prefill(backbone.embed(**longer), logits="all").logits[0, -3:]
    assert np.argmax(logits, axis=-1).tolist() == made


@pytest.mark.parametrize("family", ["llava_next", "llava", "deepseek_vl"])
def test_families_without_a_rule_say_what_to_give_instead(family, tmp_path):
    """LLaVA-NeXT-Video has one, under another architecture; these releases have none."""
    backbone = load(write_checkpoint(family, tmp_path / family))
    with pytest.raises(InputError, match=r"which takes none; expected its frames as images"):
        backbone.prepare([Video(draw_frames("film", 2, 16, 16), rate=2.0)])
