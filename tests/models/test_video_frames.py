"""A video has the frames that its file shows, upright, at their times, sampled as transformers samples them."""

import fractions
import functools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Video
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.models.inputs.video_frames import Clip, Stream, clips_of
from kvpatch_jax.models.inputs.videos import (
    process_glm_videos,
    sample_evenly,
    sample_glm4,
    sample_glm46,
    sample_internvl,
    sample_qwen2,
    sample_qwen3,
    sample_smolvlm,
)
from tests.goldens.load import GOLDENS, golden_arrays
from tests.goldens.redraw import digest, draw_frames
from tests.models.glm_settings import GLM_FRAMES, KINDS, glm_settings

SAMPLED = json.loads((GOLDENS / "videos" / "sampling.json").read_text())
SAMPLERS = {
    "qwen2_5_vl": sample_qwen2,
    "qwen3_vl": sample_qwen3,
    "internvl": sample_internvl,
    "smolvlm": sample_smolvlm,
    "kimi_vl": sample_evenly,
}


@pytest.mark.parametrize("family", SAMPLERS)
def test_frames_are_sampled_as_transformers_does(family):
    config = Settings.of({"temporal_patch_size": 2} if family == "qwen2_5_vl" else {}, "video")
    for (count, rate, fps, number), expected in zip(SAMPLED["sampled"], SAMPLED["families"][family], strict=True):
        sample = functools.partial(SAMPLERS[family], Stream(count, rate), fps, number, config)
        if expected is None:
            with pytest.raises(InputError, match=r"frames to sample; expected 1 to"):
                sample()
        else:
            assert sample().tolist() == expected, (count, rate, fps, number)


@pytest.mark.parametrize("index", range(len(GLM_FRAMES["streams"])))
def test_glms_frames_are_those_transformers_chooses(index, tmp_path):
    count, rate = GLM_FRAMES["streams"][index]
    config, stream = glm_settings(tmp_path, "new"), Stream(int(count), float(rate))
    assert sample_glm4(stream, None, None, config).tolist() == GLM_FRAMES[f"old.{index}"].tolist()
    assert sample_glm4(stream, 0.7, None, config).tolist() == GLM_FRAMES[f"rate.{index}"].tolist()
    # transformers takes no frame of a video of one.
    expected = GLM_FRAMES[f"new.{index}"].tolist() or [0, 0]
    assert sample_glm46(stream, None, None, config).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_glms_pixels_and_times_equal_transformers(kind, tmp_path):
    """Five frames: the last one again fills the third temporal patch."""
    out = process_glm_videos([Video(GLM_FRAMES["frames"], rate=1.5)], glm_settings(tmp_path, kind))
    np.testing.assert_array_equal(out["pixel_values_videos"], GLM_FRAMES["pixel_values"])
    np.testing.assert_array_equal(out["video_grid_thw"], GLM_FRAMES["grid"])
    np.testing.assert_allclose(out["video_timestamps"], [0, 2 / 1.5, 4 / 1.5])


def test_gemma_4s_pixels_and_times_equal_transformers():
    """torchvision's resize, rescaling and patches, bit for bit (`frames.npz`, of transformers' video processor)."""
    gold, frames = golden_arrays("gemma4", "frames"), draw_frames("gemma4 video", 7, 24, 40)
    video: Any = FAMILIES["Gemma4ForConditionalGeneration"].video
    found = video.process([Video(frames, rate=0.1, frames=2)], video.settings(GOLDENS / "gemma4"))
    np.testing.assert_array_equal(digest(found["pixel_values_videos"]), gold["digest.pixel_values_videos"])
    for name in ("video_position_ids", "num_frames_per_video", "video_timestamps"):
        np.testing.assert_array_equal(found[name], gold[name], name)


# ------------------------------------------------------------------------------------------------------------ files


def film(path: Path, frames: np.ndarray, rate: int, codec: str = "ffv1", seconds: Sequence[float] = ()) -> None:
    """Writes frames at a rate, or each at its time."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"ffv1": "bgr0", "png": "rgb24"}[codec]
        if seconds:
            stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if seconds:
                shown.pts, shown.time_base = round(seconds[number] * 1000), fractions.Fraction(1, 1000)
            container.mux(stream.encode(shown))
        container.mux(stream.encode(None))


def read_clip(video: Video) -> Clip:
    """Every other frame."""
    return clips_of([video], lambda stream, *_: np.arange(0, stream.count, 2), Settings.of({}, "video"))[0]


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


@pytest.mark.parametrize(("name", "codec"), [("film.mkv", "ffv1"), ("film.mov", "png")])
def test_frames_of_a_recording_of_variable_rate_have_its_own_times(tmp_path, name, codec):
    frames, settings = draw_frames("recording", 6, 32, 32), Settings.of({"fps": 2, "temporal_patch_size": 2}, "video")
    film(tmp_path / name, frames, 10, codec, SECONDS)
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


def test_a_file_goes_into_a_prompt(qwen2_5_vl_directory, tmp_path):
    """By its path alone, sampled at two frames a second; the same frames with their times make the same prompt."""
    frames = draw_frames("film", 12, 24, 32)
    film(tmp_path / "film.mkv", frames, 6)
    backbone = load(qwen2_5_vl_directory)
    by_path = backbone.prepare([tmp_path / "film.mkv", [7]])
    given = backbone.prepare([Video(frames[::3], rate=2.0), [7]])
    assert by_path.keys() == given.keys()
    for name, value in given.items():
        assert np.array_equal(by_path[name], value), name
    asked = backbone.prepare([Video(tmp_path / "film.mkv", frames=6), [7]])
    assert asked["video_grid_thw"].tolist() == [[3, *given["video_grid_thw"][0][1:]]]
    assert asked["second_per_grid_ts"].tolist() == pytest.approx([2 / 3])


def test_what_is_no_video_is_refused(tmp_path):
    for content in (b"no video at all", b"RIFF\x00\x00\x00\x00WAVE"):
        with pytest.raises(InputError, match="a file without a video"):
            read_clip(Video(content))
    film(tmp_path / "one.mkv", draw_frames("film", 1, 32, 32), 6)
    settings = Settings.of({"temporal_patch_size": 2}, "video")
    with pytest.raises(InputError, match=r"got 1 frame; expected at least 2, .*pass a single frame as an image"):
        clips_of([Video(tmp_path / "one.mkv")], sample_qwen2, settings)
    with pytest.raises(InputError, match="sound of a file alone"):
        Video(np.zeros((2, 8, 8, 3), np.uint8), rate=1.0, sound=True).read()
