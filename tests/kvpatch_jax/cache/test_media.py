"""Videos and sounds as items: their kinds, forms, ids and refusals, and the samples of sounds."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvpatch_jax import Audio, Video
from kvpatch_jax.cache import chunk_id, expect_small, medium_of, one_form, sort_of
from kvpatch_jax.errors import InputError
from models.inputs.sound import read_sound, resampled
from tests.goldens.redraw import draw_frames

FRAMES = draw_frames("media", 4, 16, 24)


def id_of(item) -> str:
    return chunk_id("model", item)


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


def test_a_path_is_what_its_suffix_says():
    assert sort_of(Path("a/clip.MP4")) == "video"
    assert sort_of(Path("said.wav")) == "audio"
    assert sort_of(Path("page.png")) == "image"
    assert sort_of(Video(FRAMES, rate=1)) == "video"
    assert sort_of(Audio(np.zeros(3, np.float32), 16000)) == "audio"
    assert medium_of(FRAMES) is None


def test_an_id_is_of_pixels_times_and_sampling():
    own = id_of(Video(FRAMES, rate=2))
    assert id_of(Video(FRAMES.copy(), rate=2.0)) == own
    assert id_of(Video(list(FRAMES), rate=2)) == own
    others = [
        Video(FRAMES, rate=4),
        Video(FRAMES, timestamps=[0, 0.5, 1, 1.5]),
        Video(FRAMES, timestamps=[0, 0.5, 1, 1.6]),
        Video(FRAMES, rate=2, fps=1),
        Video(FRAMES, rate=2, frames=2),
        Video(FRAMES[:3], rate=2),
        Video(FRAMES[:, :, ::-1], rate=2),
        FRAMES,
    ]
    ids = [id_of(other) for other in others]
    assert len({own, *ids}) == len(others) + 1


def test_an_id_of_a_file_is_of_its_bytes(tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"one")
    (tmp_path / "other.mkv").write_bytes(b"one")
    (tmp_path / "third.mp4").write_bytes(b"two")
    paths = [tmp_path / name for name in ("clip.mp4", "other.mkv", "third.mp4")]
    ids = [id_of(path) for path in paths]
    assert ids[0] == ids[1] == id_of(Video(paths[0])) == id_of(Video(b"one")) != ids[2]
    assert id_of(Video(b"one", fps=1)) != ids[0]
    assert id_of(b"one") != ids[0] != id_of(Audio(b"one"))


def test_an_id_of_a_sound_is_of_samples_and_rate():
    samples = np.linspace(-1, 1, 50, dtype=np.float32)
    own = id_of(Audio(samples, 16000))
    assert id_of(Audio(samples.astype(np.float64), 16000)) == own
    assert own not in (id_of(Audio(samples, 8000)), id_of(Audio(samples[:-1], 16000)), id_of(samples))


def test_reading_keeps_nothing_of_the_callers(tmp_path):
    frames = FRAMES.copy()
    video = one_form(Video(frames, rate=2))
    frames[:] = 0
    assert np.array_equal(video.source, FRAMES)
    Image.fromarray(FRAMES[0]).save(tmp_path / "b.png")
    Image.fromarray(FRAMES[1]).save(tmp_path / "a.png")
    folder = one_form(Video(tmp_path, timestamps=[0, 1]))
    assert np.array_equal(folder.source, FRAMES[[1, 0]])
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"one")
    read = one_form(path)
    path.write_bytes(b"two")
    assert read.source == b"one"
    samples = np.ones(4, np.float32)
    audio = one_form(Audio(samples, 8000))
    samples[:] = 0
    assert audio.source.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Video(FRAMES, rate=0), "video: rate: got 0; expected a positive number"),
        (lambda: Video(FRAMES, rate=1, frames=-1), "video: frames: got -1; expected a positive whole number"),
        (lambda: Video(FRAMES, rate=float("nan")), "video: rate: got nan"),
        (lambda: Video(FRAMES, rate=1, timestamps=[0, 1, 2, 3]), "both rate and timestamps"),
        (lambda: Video(FRAMES, rate=1, fps=1, frames=2), "both fps and frames"),
        (lambda: Video(FRAMES, timestamps=[0, 2, 1, 3]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[-1, 0, 1, 3]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[0, 1]).read(), "got 2 timestamps; expected one for each of 4 frames"),
        (lambda: Video(FRAMES).read(), "frames without their times; expected rate= or timestamps="),
        (lambda: Video(b"file", rate=2).read(), "a file with rate or timestamps"),
        (lambda: Video(FRAMES[0], rate=2).read(), r"frames of shape \[16, 24, 3\]"),
        (lambda: Video([FRAMES[0], FRAMES[0][:8]], rate=2).read(), "frames of sizes"),
        (lambda: Video([], rate=2).read(), "a list without frames"),
        (lambda: Video(Path("missing.mp4")).read(), "no readable file"),
        (lambda: Audio(np.zeros((2, 2), np.float32), 8000), r"float32 \[2, 2\]; expected floats \[samples\]"),
        (lambda: Audio(np.zeros(3, np.int16), 8000), "expected floats"),
        (lambda: Audio(np.zeros(3, np.float32)), "got rate None; expected one with an array"),
        (lambda: Audio(b"x", 8000), "got rate 8000; expected one with an array, and none with a file"),
        (lambda: Audio("said.wav"), "got a str; expected a path"),
        (lambda: Audio(np.full(3, np.inf, np.float32), 8000).read(), "not finite"),
        (lambda: expect_small(Video(FRAMES, rate=1), 100), "got 4608 bytes; expected at most 100"),
        (lambda: expect_small(Video(b"12345"), 4), "got 5 bytes; expected at most 4"),
        (lambda: expect_small(Audio(Path("missing.wav")), 4), "no such file"),
    ],
)
def test_what_is_no_video_or_sound_is_refused(make, message, unchecked: None):
    with pytest.raises(InputError, match=message):
        make()


# ------------------------------------------------------------------------------------------------------------- samples


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


def test_whole_numbers_of_eight_bytes_are_read_by_pyav():
    content = bytearray(wav(np.zeros((400, 1)), 16000, 4))
    content[32:36] = (8).to_bytes(2, "little") + (64).to_bytes(2, "little")
    assert len(read_sound(Audio(bytes(content)), 16000)) == 200


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
