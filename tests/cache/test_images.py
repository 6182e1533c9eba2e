"""An image has one id for what it shows: laid over white, turned as its file says, however it is given."""
# pyright: reportArgumentType=false

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.cache import AnimatedImageWarning, chunk_id, decoded, expect_small
from kvpatch_jax.errors import InputError

RNG = np.random.default_rng(5)
RGB = RNG.integers(0, 256, (24, 40, 3), np.uint8)
ORIENTATION = 0x0112
Image: Any = None
TURNS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1), 99: (1, 1)}
"""For each EXIF orientation, in which direction stored rows and columns are read; 5 to 8 then swap the two."""


@pytest.fixture(autouse=True, scope="module")
def pillow():
    global Image
    Image = pytest.importorskip("PIL.Image")


def id_of(image) -> str:
    return chunk_id("model", image)


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
    opacity = np.where(RNG.random(RGB.shape[:2]) < 0.5, 0, RNG.integers(1, 256, RGB.shape[:2]))
    first = np.dstack([RGB, opacity]).astype(np.uint8)
    second = first.copy()
    second[first[..., 3] == 0, :3] = 7
    given = [first, second, Image.fromarray(first, "RGBA"), *forms(Image.fromarray(second, "RGBA"), tmp_path)]
    expected = id_of(over_white(Image.fromarray(first, "RGBA")))
    assert {id_of(image) for image in given} == {expected}
    second[..., :3] ^= 1
    assert id_of(second) != expected


def test_palettes_greys_and_colours_with_transparency():
    """As an index of a palette, an opacity for each, a channel beside grey, and one colour of an image without one."""
    palette, grey = Image.fromarray(RGB).quantize(8), Image.fromarray(RGB[..., 0])
    layer = Image.fromarray(np.dstack([RGB, RGB[..., 0]]), "RGBA")
    files = [file_of(palette, transparency=2), file_of(palette, transparency=bytes(range(0, 240, 30)))]
    files += [file_of(grey, transparency=int(RGB[0, 0, 0])), file_of(layer.convert("LA")), file_of(layer)]
    files.append(file_of(Image.fromarray(RGB), transparency=tuple(map(int, RGB[0, 0]))))
    for file in files:
        opened = Image.open(io.BytesIO(file))
        for given in (file, opened):
            np.testing.assert_array_equal(decoded(given), over_white(opened))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_photo_is_turned_as_its_file_says_however_it_is_opened(tmp_path, form):
    image = Image.fromarray(RGB)
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
            assert (photo.size, photo.getexif()[ORIENTATION]) == ((40, 24), 6)


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
    for content in (b"BMW", b"\x89PNG", file_of(Image.fromarray(RGB))[:100], bomb, tmp_path / "gone.png", tmp_path):
        for call in (decoded, lambda content: expect_small(content, 1000)):
            with pytest.raises(InputError, match="expected"):
                call(content)
    deep = RGB[..., 0].astype(np.uint16) << 8
    for image in (deep, Image.fromarray(deep), file_of(Image.fromarray(deep)), deep.astype("f4"), RGB[:0], 7, "a"):
        with pytest.raises(InputError, match=r"expected (uint8|pixels of at most 8 bits|a path)"):
            decoded(image)
    # The size is known before anything is decoded.
    image, path = Image.fromarray(RGB), tmp_path / "image.png"
    image.save(path)
    assert expect_small(path, RGB.nbytes + 1000) == RGB.nbytes
    for source in (path, path.read_bytes(), image, RGB):
        with pytest.raises(InputError, match="expected at most 2000"):
            expect_small(source, 2000)
