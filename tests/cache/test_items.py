"""An item of a prompt has one id for what it shows, however it is given, and what is no item is refused."""
# pyright: reportArgumentType=false

import base64
import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Text, Video
from kvpatch_jax.cache import (
    AnimatedImageWarning,
    chunk_id,
    content_items,
    decoded,
    expect_small,
    medium_of,
    one_form,
    part_item,
    part_name,
    sort_of,
    unit_items,
)
from kvpatch_jax.cache.inputs import looks_like_a_file
from kvpatch_jax.errors import InputError

RNG = np.random.default_rng(5)
PAGE, FRAMES = (RNG.integers(0, 256, shape, np.uint8) for shape in ((32, 48, 3), (4, 16, 24, 3)))
SAMPLES = np.linspace(-1, 1, 50, dtype=np.float32)
ORIENTATION = 0x0112
Image: Any = None
TURNS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1), 99: (1, 1)}
"""For each EXIF orientation, in which direction stored rows and columns are read; 5 to 8 then swap the two."""


@pytest.fixture(autouse=True, scope="module")
def pillow():
    global Image
    Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the pixels PAGE."""
    Image.fromarray(PAGE).save(tmp_path / "page.png")
    return tmp_path / "page.png"


def id_of(item: object) -> str:
    return chunk_id("model", item)


# ------------------------------------------------------------------------------------------------------------ images


def file_of(image, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def over_white(image) -> np.ndarray:
    """Pillow's own compositing."""
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.array(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))


def forms(image, tmp_path: Path, form: str = "PNG", **options) -> list:
    """An image's file, its bytes, and the PIL images that `Image.open` gives and a copy of one."""
    path = tmp_path / f"image.{form.lower()}"
    path.write_bytes(file_of(image, form, **options))
    return [path, path.read_bytes(), Image.open(path), Image.open(path).copy()]


def test_colours_under_full_transparency_are_no_part_of_an_image(tmp_path):
    opacity = np.where(RNG.random(PAGE.shape[:2]) < 0.5, 0, RNG.integers(1, 256, PAGE.shape[:2]))
    first = np.dstack([PAGE, opacity]).astype(np.uint8)
    second = first.copy()
    second[first[..., 3] == 0, :3] = 7
    given = [first, second, Image.fromarray(first, "RGBA"), *forms(Image.fromarray(second, "RGBA"), tmp_path)]
    expected = id_of(over_white(Image.fromarray(first, "RGBA")))
    assert {id_of(image) for image in given} == {expected}
    second[..., :3] ^= 1
    assert id_of(second) != expected


def test_palettes_greys_and_colours_with_transparency():
    """As an index of a palette, an opacity for each, a channel beside grey, and one colour of an image without one."""
    palette, grey = Image.fromarray(PAGE).quantize(8), Image.fromarray(PAGE[..., 0])
    layer = Image.fromarray(np.dstack([PAGE, PAGE[..., 0]]), "RGBA")
    files = [file_of(palette, transparency=2), file_of(palette, transparency=bytes(range(0, 240, 30)))]
    files += [file_of(grey, transparency=int(PAGE[0, 0, 0])), file_of(layer.convert("LA")), file_of(layer)]
    files.append(file_of(Image.fromarray(PAGE), transparency=tuple(map(int, PAGE[0, 0]))))
    for file in files:
        opened = Image.open(io.BytesIO(file))
        for given in (file, opened):
            np.testing.assert_array_equal(decoded(given), over_white(opened))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_photo_is_turned_as_its_file_says_however_it_is_opened(tmp_path, form):
    image = Image.fromarray(PAGE)
    stored = np.array(Image.open(io.BytesIO(file_of(image, form))))
    for orientation, (down, right) in TURNS.items():
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        photos, shown = forms(image, tmp_path, form, exif=exif), stored[::down, ::right]
        expected = np.ascontiguousarray(shown.transpose(1, 0, 2) if 5 <= orientation <= 8 else shown)
        for photo in [*photos, Image.open(io.BytesIO(photos[1])).convert("RGB")]:
            np.testing.assert_array_equal(decoded(photo), expected)
        assert {id_of(photo) for photo in photos} == {id_of(expected)}
    # Turned before it is laid over white; a PIL image of the caller's is not changed.
    palette = image.quantize(8)
    exif[ORIENTATION] = 6
    expected = np.rot90(over_white(Image.open(io.BytesIO(file_of(palette, transparency=3)))), -1)
    for photo in forms(palette, tmp_path, exif=exif, transparency=3):
        np.testing.assert_array_equal(decoded(photo), expected)
        if isinstance(photo, Image.Image):
            assert (photo.size, photo.getexif()[ORIENTATION]) == ((48, 32), 6)


def test_an_animation_is_read_as_its_first_frame_with_a_warning(tmp_path):
    frames = [Image.fromarray(np.full((16, 24, 3), shade, np.uint8)) for shade in (0, 100, 200)]
    path = tmp_path / "image.gif"
    path.write_bytes(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    with Image.open(path) as image:
        for source in (path, path.read_bytes(), image):
            with pytest.warns(AnimatedImageWarning, match="several frames or pages; reads the first one"):
                assert not decoded(source).any()
        # Whoever chose a frame, or gives one alone, is not warned.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not decoded(image.copy()).any()
            image.seek(2)
            assert decoded(image).min() > 190


def test_what_cannot_be_read_is_refused(tmp_path):
    """Values of more than 8 bits, bytes that only begin like an image, one cut short or of more pixels than memory."""
    size = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    for content in (b"BMW", b"\x89PNG", file_of(Image.fromarray(PAGE))[:100], bomb, tmp_path / "gone.png", tmp_path):
        for call in (decoded, lambda content: expect_small(content, 1000)):
            with pytest.raises(InputError, match="expected"):
                call(content)
    deep = PAGE[..., 0].astype(np.uint16) << 8
    for image in (deep, Image.fromarray(deep), file_of(Image.fromarray(deep)), deep.astype("f4"), PAGE[:0], 7, "a"):
        with pytest.raises(InputError, match=r"expected (uint8|pixels of at most 8 bits|a path)"):
            decoded(image)
    # The size is known before anything is decoded.
    image, path = Image.fromarray(PAGE), tmp_path / "image.png"
    image.save(path)
    assert expect_small(path, PAGE.nbytes + 1000) == PAGE.nbytes
    for source in (path, path.read_bytes(), image, PAGE):
        with pytest.raises(InputError, match="expected at most 2000"):
            expect_small(source, 2000)


# ------------------------------------------------------------------------------------------------------------- items


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


def test_every_item_has_a_sort(backbone):
    video, audio = Video(FRAMES, rate=1), Audio(SAMPLES, 16000)
    items = [Path("a/clip.MP4"), video, Path("said.wav"), audio, Path("page.png"), PAGE, FRAMES, "a text"]
    assert [sort_of(item) for item in items] == ["video"] * 2 + ["audio"] * 2 + ["image"] * 3 + ["text"]
    assert medium_of(video) is video
    assert medium_of(FRAMES) is None
    for ids in ([5, 9, 12], np.array([5, 9, 12]), jnp.array([5, 9, 12])):
        assert backbone.prepare([ids])["input_ids"].tolist() == [[5, 9, 12]]


def test_a_single_item_is_no_sequence_of_items(backbone, unchecked: None):
    for items in (kvp.Text("a b c"), PAGE, jnp.asarray(PAGE), Path("page.png"), b"a", {"a": 1}, 7, []):
        with pytest.raises(InputError, match="expected a sequence of items, at least one"):
            backbone.prepare(items)
    assert backbone.prepare(item for item in [[1], [2]])["input_ids"].tolist() == [[1, 2]]


def test_an_image_has_one_id_however_it_is_given(backbone, path):
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
    for name, frame in (("b.png", FRAMES[0]), ("a.png", FRAMES[1])):
        Image.fromarray(frame).save(tmp_path / name)
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


# ------------------------------------------------------------------------------------------------- parts of messages


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


URL, FILM, SOUND = data_url(b"BM page"), data_url(b"film", "video/mp4"), data_url(b"sound", "audio/wav")
FORMS: list[tuple[Any, Any]] = [
    ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, b"BM page"),
    ({"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}, b"BM page"),
    ({"type": "image", "base64": base64.encodebytes(b"BM page").decode()}, b"BM page"),
    ({"image": PAGE, "text": None}, PAGE),
    ({"type": "video_url", "video_url": {"url": FILM}, "frames": 4}, Video(b"film", frames=4)),
    ({"type": "video", "video": Video(b"film")}, Video(b"film")),
    ({"type": "video", "video": [PAGE, PAGE], "rate": 1}, Video(np.stack([PAGE, PAGE]), rate=1)),
    ({"type": "input_audio", "input_audio": {"data": SOUND.partition(",")[2], "format": "wav"}}, Audio(b"sound")),
    ({"type": "audio_url", "audio_url": {"url": SOUND}}, Audio(b"sound")),
]


def test_a_medium_is_one_item_in_every_form():
    for part, item in FORMS:
        assert chunk_id("model", part_item(part)) == chunk_id("model", item), part


def test_a_file_is_named_in_every_form(tmp_path):
    path = tmp_path / "a page.png"
    for field in ({"path": str(path)}, {"path": path}, {"url": path.as_uri()}, {"image": f"file://{path}"}):
        assert part_item({"type": "image", **field}) == path
    assert part_item({"type": "image", "path": "~/page.png"}) == Path.home() / "page.png"
    assert part_item({"image": "page 3"}) == Path("page 3")
    film = part_item({"type": "video", "video": "clip.mp4", "fps": 2})
    assert (film.source, film.options) == (Path("clip.mp4"), Video(b"", fps=2).options)


def test_a_text_is_a_text_whatever_it_looks_like():
    for part in ({"type": "text", "text": URL}, {"type": "input_text", "text": URL}, {"text": URL}):
        item = part_item(part)
        assert (type(item), item) == (Text, URL)
    assert content_items({"role": "user", "content": "shot.png"}) == ["shot.png"]


def test_a_messages_parts_come_in_their_order():
    text = {"type": "text", "text": "Before"}
    message = {"role": "user", "content": [text, {"type": "image", "image": PAGE}, {"type": "text", "text": "after"}]}
    first, image, last = unit_items(message, "here")
    assert (first, image is PAGE, last) == ("Before", True, "after")
    several = unit_items([message, text, "a text"], "here")
    assert [type(item) for item in several] == [Text, np.ndarray, Text, Text, str]
    call = {"id": "1", "type": "function", "function": {"name": "click", "arguments": '{"x": "é"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert unit_items(answer, "here") == ['{"arguments": "{\\"x\\": \\"é\\"}", "name": "click"}']
    assert content_items(answer) == []
    assert unit_items([5, 6], "here") == [[5, 6]]


def linked(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED: dict[str, Any] = {
    "an address.*fetch it first": linked("https://x.org/a.png"),
    "expected a data URL": linked("file:///etc/a.png"),
    "got data:[^,]*; expected data:image": linked(FILM),
    "damaged base64": linked(URL[:-3]),
    "got a bytes; expected 'image'": linked(data_url(b"no image")),
    r"film\.mp4'; expected 'image'": {"type": "image", "image": "film.mp4"},
    "got a Video; expected 'audio'": {"type": "audio", "audio": Video(b"film")},
    r"expected fields of \['image": {"type": "image"},
    "fields .*path.*; exp": {"image": PAGE, "path": "a.png"},
    "a part of type": {"type": PAGE, "image": PAGE},
}


def test_another_part_and_another_message_are_refused_by_what_is_wrong_with_them():
    for message, part in REFUSED.items():
        with pytest.raises(InputError, match=message) as refused:
            part_item(part, "here")
        assert len(str(refused.value)) < 1000
    for message, reason in (
        ({"content": [[{"type": "text", "text": "nested"}]]}, "here, part 0: got a part of type 'list'"),
        ({"tool_calls": {"name": "click"}}, "tool_calls of type dict"),
        ({"tool_calls": [{"function": {"x": PAGE}}]}, "no JSON"),
    ):
        with pytest.raises(InputError, match=reason):
            unit_items({"role": "user", **message}, "here")


def test_a_part_may_carry_a_name():
    part = {"type": "image", "image": PAGE, "uuid": "page"}
    message = {"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}
    assert part_name(part) == part_name([part]) == part_name(message) == "page"
    assert part_name([part, part]) is None
    assert part_name(PAGE) is part_name("a text") is part_name({"role": "user", "content": "a"}) is None
    for name in ("", 7):
        with pytest.raises(InputError, match="uuid"):
            part_name({**part, "uuid": name})
