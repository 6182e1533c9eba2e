"""Items of a prompt are told apart by what they are, have one id however they are given, and are read before use."""
# pyright: reportArgumentType=false

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.cache import chunk_id, expect_small, medium_of, one_form, sort_of
from kvpatch_jax.cache.inputs import looks_like_a_file
from kvpatch_jax.errors import InputError

PAGE = np.random.default_rng(5).integers(0, 256, (32, 48, 3), np.uint8)
FRAMES = np.random.default_rng(6).integers(0, 256, (4, 16, 24, 3), np.uint8)
SAMPLES = np.linspace(-1, 1, 50, dtype=np.float32)


def id_of(item: object) -> str:
    return chunk_id("model", item)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the pixels PAGE."""
    image: Any = pytest.importorskip("PIL.Image")
    image.fromarray(PAGE).save(tmp_path / "page.png")
    return tmp_path / "page.png"


FILES = r"""
shot1.pgn|SHOT.JPEG|bilder/größe.png|请看shot.png|my shot.png|Screen Shot 2024-05-01 at 10.32.11 AM.png| shot.png |HTTP://x
https://example.org/a|s3://bucket/key|file:/x|example.com|data:image/png;base64,iVBO|/tmp/x|./x|~/x|~user/x|C:\x|c:/x
\\host\x|shots/run_1|shots/1|frames/|Qwen/Qwen2.5-VL
""".strip().replace("\n", "|")
TEXTS = r"""
What is in shot.png?|see https://example.org for more|Look at shot.png.|and/or|1/2|2024/05/01|12.5/100|和/或|image/png
The words of this line are more than any name has: shot.png|v1.2|U.S.|e.g.|w5 w6|...|wait...what|.|..|/|~|</think>|3.14
C:|print(x.shape)|\alpha|data:|file \(it
""".strip().replace("\n", "|")


def test_a_str_looks_like_a_file_or_is_a_text():
    texts = [*TEXTS.split("|"), "", "one\nshot.png", "a" * 5000, "x" * 5000 + ".png", "nul\0inside"]
    assert [text for text in texts if looks_like_a_file(text)] == []
    files = [*FILES.split("|"), " shot.png\n", "data:video/mp4;base64,AA\nAA", "data:image/png;base64," + "A" * 10_000]
    assert [text for text in files if not looks_like_a_file(text)] == []


def test_what_looks_like_a_file_is_refused_unless_it_is_a_text(backbone, tmp_path, monkeypatch, unchecked: None):
    """Whether or not a file of that name is there, so that a prompt means the same on every machine."""
    monkeypatch.chdir(tmp_path)
    Path("C6").write_text("")  # a word of the small backbone's vocabulary
    assert backbone.prepare(["C6"])["input_ids"].shape[1] > 0
    for call in (
        lambda text: backbone.prepare([text]),
        lambda text: kvp.make_chunk(backbone, [[1]], lead=[text]),
        lambda text: kvp.conditioned(backbone, [[[1]], [text]]),
        id_of,
    ):
        with pytest.raises(InputError, match=r"pathlib\.Path\(.*kvpatch_jax\.Text\("):
            call("shots/run_1")
    assert sort_of(kvp.Text("shot.png")) == "text"
    assert id_of(kvp.Text("C6")) == id_of("C6") != id_of("C7")


def test_every_item_has_a_sort(backbone, unchecked: None):
    video, audio = Video(FRAMES, rate=1), Audio(SAMPLES, 16000)
    items = [Path("a/clip.MP4"), video, Path("said.wav"), audio, Path("page.png"), PAGE, FRAMES, "a text"]
    assert [sort_of(item) for item in items] == ["video"] * 2 + ["audio"] * 2 + ["image"] * 3 + ["text"]
    assert medium_of(video) is video
    assert medium_of(FRAMES) is None
    for ids in ([5, 9, 12], np.array([5, 9, 12]), jnp.array([5, 9, 12])):
        assert backbone.prepare([ids])["input_ids"].tolist() == [[5, 9, 12]]
    for item in (5, None, {"image": "page.png"}, b"no image", [1.5], [True]):
        with pytest.raises(InputError, match="expected text, token ids or an image"):
            backbone.prepare([item])


def test_a_single_item_is_no_sequence_of_items(backbone, unchecked: None):
    for items in (kvp.Text("a b c"), PAGE, jnp.asarray(PAGE), Path("page.png"), b"a", {"a": 1}, 7, []):
        with pytest.raises(InputError, match="expected a sequence of items, at least one"):
            backbone.prepare(items)
    assert backbone.prepare(item for item in [[1], [2]])["input_ids"].tolist() == [[1, 2]]


# ----------------------------------------------------------------------------------------------------------- ids


def test_an_image_has_one_id_however_it_is_given(backbone, path):
    Image = pytest.importorskip("PIL.Image")
    image, grey = Image.fromarray(PAGE), PAGE[..., 0]
    forms = [jnp.asarray(PAGE), image, path, path.read_bytes(), image.convert("RGBA"), PAGE.copy(order="F")]
    forms += [np.dstack([PAGE, np.full(PAGE.shape[:2], 255, np.uint8)]), Image.open(path)]
    assert {id_of(form) for form in forms} == {id_of(PAGE)}
    assert len({id_of(form) for form in (grey, grey[..., None], Image.fromarray(grey), np.dstack([grey] * 3))}) == 1
    name = lambda *items, **options: kvp.make_chunk(backbone, items, **options).id
    assert name(path) == name(PAGE) == chunk_id(backbone.fingerprint, PAGE) != name(PAGE[::-1].copy())
    assert name("C6", [13]) == chunk_id(backbone.fingerprint, "C6", [13])
    assert name(PAGE, id="page") == "page"


def test_other_content_has_another_id(tmp_path):
    changed = PAGE.copy()
    changed[3, 7, 1] ^= 1
    (tmp_path / "clip.mp4").write_bytes(b"one")
    others = [PAGE, changed, PAGE[:, :, ::-1], PAGE.transpose(1, 0, 2), np.dstack([PAGE, PAGE[..., 0]]), FRAMES]
    others += [Video(FRAMES, rate=rate) for rate in (2, 4)] + [Video(FRAMES[:3], rate=2), Video(FRAMES[::-1], rate=2)]
    others += [Video(FRAMES, timestamps=[0, 0.5, 1, end]) for end in (1.5, 1.6)]
    others += [Video(FRAMES, rate=2, fps=1), Video(FRAMES, rate=2, frames=2)]
    others += [tmp_path / "clip.mp4", Video(b"one", fps=1), Video(b"two"), Audio(b"one"), b"one", SAMPLES]
    others += [Audio(SAMPLES, 16000), Audio(SAMPLES, 8000), Audio(SAMPLES[:-1], 16000), "text", [1, 2], [1, 3]]
    # Bytes that only begin like an image are bytes.
    others += [b"BM", b"BMW is a car", b"\x89PNG"]
    assert len({id_of(other) for other in others}) == len(others)
    assert len({chunk_id(*fields) for fields in (("a", "b"), ("a", "b", "c"), ("a", "bc"), ("ab", "c"))}) == 4
    assert id_of([1, 2]) == id_of((1, 2)) == id_of(np.array([1, 2], np.int64)) != id_of(np.array([1, 2], np.int32))


def test_a_medium_has_one_id_and_keeps_nothing_of_the_callers(tmp_path):
    path, frames, samples = tmp_path / "clip.mkv", FRAMES.copy(), SAMPLES.copy()
    path.write_bytes(b"one")
    assert id_of(Video(FRAMES, rate=2)) == id_of(Video(FRAMES.copy(), rate=2.0)) == id_of(Video(list(FRAMES), rate=2))
    assert id_of(path) == id_of(Video(path)) == id_of(Video(b"one"))
    assert id_of(Audio(SAMPLES.astype(np.float64), 16000)) == id_of(Audio(SAMPLES, 16000))
    video, audio, clip = one_form(Video(frames, rate=2)), one_form(Audio(samples, 8000)), one_form(path)
    frames[:] = samples[:] = 0
    path.write_bytes(b"two")
    assert np.array_equal(video.source, FRAMES)
    assert np.array_equal(audio.source, SAMPLES)
    assert clip.source == b"one"
    path.unlink()
    image: Any = pytest.importorskip("PIL.Image")
    for name, frame in (("b.png", FRAMES[0]), ("a.png", FRAMES[1])):
        image.fromarray(frame).save(tmp_path / name)
    assert np.array_equal(one_form(Video(tmp_path, timestamps=[0, 1])).source, FRAMES[[1, 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Video(FRAMES, rate=0), "video: rate: got 0; expected a positive number"),
        (lambda: Video(FRAMES, timestamps=[0, 2, 1, 3]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[0, 1]).read(), "got 4 frames of .* and 2 timestamps; expected"),
        (lambda: Audio(np.zeros((2, 2), np.float32), 8000), r"float32 \[2, 2\] and .*; expected .* floats \[samples\]"),
        (lambda: Audio(b"x", 8000), "got a bytes and rate 8000; expected a path or bytes without a rate"),
        (lambda: Audio(np.full(3, np.inf, np.float32), 8000).read(), "not finite"),
        (lambda: expect_small(Video(FRAMES, rate=1), 100), "got 4608 bytes; expected at most 100"),
    ],
)
def test_what_is_no_video_or_sound_is_refused(make, message, unchecked: None):
    with pytest.raises(InputError, match=message):
        make()
