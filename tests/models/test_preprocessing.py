"""Image preprocessing against transformers' Qwen2VLImageProcessorPil, arrays against files, and bad images."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from kvpatch_jax.cache import decoded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.inputs.qwen_images import (
    ImageConfig,
    glm_image_config,
    normalise,
    patchify,
    preprocess_images,
    smart_resize,
)
from tests.goldens.load import GOLDENS, golden_arrays
from tests.goldens.redraw import standard_values

ARRAYS = golden_arrays("qwen2_5_vl", "preprocessing")
NAMES = sorted(name.removesuffix(".png") for name in ARRAYS if name.endswith(".png"))
TINY = ImageConfig.from_directory(GOLDENS / "qwen2_5_vl")


def picture(height: int, width: int, channels: int = 3) -> np.ndarray:
    values = standard_values("picture", height * width * channels).reshape(height, width, channels)
    return np.clip(128 + 60 * values, 0, 255).astype(np.uint8)


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("kind", ["file", "pil"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers_bit_for_bit(tmp_path: Path, name: str, kind: str) -> None:
    config = ImageConfig() if name == "default" else TINY
    path = tmp_path / "image.png"
    path.write_bytes(ARRAYS[f"{name}.png"].tobytes())
    with Image.open(path) as image:
        out = preprocess_images([path if kind == "file" else image], config)
    assert same_bits(out["pixel_values"], ARRAYS[f"{name}.pixel_values"])
    assert np.array_equal(out["image_grid_thw"], ARRAYS[f"{name}.grid"])


def test_smart_resize_equals_transformers() -> None:
    resized = [smart_resize(height, width, ImageConfig()) for height, width in ARRAYS["sizes"].tolist()]
    assert np.array_equal(resized, ARRAYS["resized"])


def test_glms_areas_count_both_frames_of_a_patch(tmp_path) -> None:
    """The class's own settings; small images are made larger first."""
    (tmp_path / "preprocessor_config.json").write_text("{}")
    gold, config = golden_arrays("glm4v", "sizes"), glm_image_config(tmp_path)
    resized = [smart_resize(height, width, config) for height, width in gold["sizes"].tolist()]
    assert np.array_equal(resized, gold["resized"])
    config.save(tmp_path)
    assert glm_image_config(tmp_path) == config


def test_several_images_are_concatenated() -> None:
    case = golden_arrays("qwen2_5_vl", "two_images")
    out = preprocess_images([case["image.0"], case["image.1"]], TINY)
    assert same_bits(out["pixel_values"], case["pixel_values"])
    assert np.array_equal(out["image_grid_thw"], case["image_grid_thw"])


def test_no_images_give_empty_arrays() -> None:
    out = preprocess_images([], TINY)
    assert out["pixel_values"].shape == (0, 96)
    assert out["image_grid_thw"].shape == (0, 3)


@pytest.mark.parametrize("size", [(24, 40), (23, 37)])
def test_arrays_and_files_give_the_same_pixels(tmp_path: Path, size: tuple[int, int]) -> None:
    array = picture(*size)
    Image.fromarray(array).save(tmp_path / "image.png")
    sources = [array, Image.fromarray(array), tmp_path / "image.png"]
    first, *others = [preprocess_images([source], TINY)["pixel_values"] for source in sources]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("channels", [1, 4])
def test_arrays_of_other_channel_counts(channels: int) -> None:
    array = picture(24, 40, channels)
    image = Image.fromarray(array[..., 0] if channels == 1 else array)
    assert np.array_equal(decoded(array), decoded(image))
    assert np.array_equal(decoded(array[..., 0]), decoded(Image.fromarray(array[..., 0])))


def test_rendered_batches_train_on_what_files_give(tmp_path: Path) -> None:
    batch = np.stack([picture(24, 40), picture(24, 40)[::-1]])
    patches = patchify(normalise(batch, TINY), TINY)
    for number, array in enumerate(batch):
        path = tmp_path / f"{number}.png"
        Image.fromarray(array).save(path)
        assert same_bits(np.ascontiguousarray(patches[number]), preprocess_images([path], TINY)["pixel_values"])


def test_patchify_under_jit() -> None:
    batch = normalise(picture(16, 24)[None], TINY)
    traced = jax.jit(lambda images: patchify(images, TINY))(batch)
    assert np.array_equal(traced, patchify(batch, TINY))


def test_jpeg_is_read_and_its_orientation_applied(tmp_path: Path) -> None:
    image = Image.fromarray(picture(24, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    image.save(tmp_path / "plain.jpg", quality=95)
    turned, plain = (decoded(tmp_path / name) for name in ("turned.jpg", "plain.jpg"))
    assert np.array_equal(turned, np.rot90(plain, -1))


def test_jpeg_cut_in_half(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(buffer, "JPEG", quality=95)
    path = tmp_path / "half.jpg"
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(InputError, match=r"half\.jpg: got no image that can be read \(image file is truncated"):
        preprocess_images([path], TINY)


def test_deep_images_are_refused_rather_than_clipped(tmp_path: Path) -> None:
    """Pillow turns 16-bit greys to white when asked for RGB, and transformers lets it."""
    image = Image.fromarray(np.full((16, 16), 40000, np.uint16))
    image.save(tmp_path / "deep.png")
    for source, name in ((image, "image 0"), (tmp_path / "deep.png", r"deep\.png")):
        with pytest.raises(InputError, match=f"{name}: got mode I;16 .*; expected pixels of at most 8 bits"):
            preprocess_images([source], TINY)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_png_that_was_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    stored = ARRAYS["rgb_large.png"].tobytes()
    path = tmp_path / "short.png"
    path.write_bytes(stored[: int(share * len(stored))])
    with pytest.raises(InputError, match=r"short\.png: got no image that can be read"):
        preprocess_images([path], TINY)


def test_lazy_pil_image_cut_short(tmp_path: Path) -> None:
    stored = ARRAYS["rgb_large.png"].tobytes()
    with Image.open(io.BytesIO(stored[: len(stored) // 2])) as image, pytest.raises(InputError, match="image 0"):
        preprocess_images([image], TINY)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    unknown, absent, folder = "cannot identify image file", "No such file", "Is a directory"
    reasons = {"text.png": unknown, "empty.png": unknown, "absent.png": absent, "folder.png": folder}
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=rf"{name}: got no image that can be read \(.*{reason}"):
            preprocess_images([tmp_path / name], TINY)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((0, 8, 3), np.uint8), r"image 0: got uint8 \[0, 8, .\]; expected .* not empty"),
        (np.zeros((0, 8, 4), np.uint8), r"image 0: got uint8 \[0, 8, .\]; expected .* not empty"),
        (Image.new("RGB", (0, 8)), "image 0: got .* 0×8 pixels; expected pixels"),
        (np.zeros((2, 402, 3), np.uint8), "image 0: got 2×402 pixels; expected sides within a ratio of 200"),
        (np.zeros((8, 8, 3), np.float32), r"image 0: got float32 \[8, 8, 3\]; expected uint8"),
        (np.zeros((3, 8, 8), np.uint8), r"image 0: got uint8 \[3, 8, 8\]; expected uint8"),
        (7, "image 0: got a int; expected a path, a PIL image or a uint8 array"),
    ],
)
def test_bad_images_are_named(source: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        preprocess_images([source], TINY)


def test_patchify_wants_multiples() -> None:
    with pytest.raises(InputError, match="images: got 12×16 pixels; expected multiples of 8"):
        patchify(np.zeros((1, 12, 16, 3), np.float32), TINY)
    config = dataclasses.replace(TINY, do_resize=False)
    with pytest.raises(InputError, match="expected multiples of 8 where images are not resized"):
        preprocess_images([picture(12, 16)], config)


def test_steps_can_be_left_out() -> None:
    array = picture(16, 16)
    raw = dataclasses.replace(TINY, do_resize=False, do_rescale=False, do_normalize=False)
    assert np.array_equal(normalise(array, raw), array.astype(np.float32))


def test_configuration_is_read_and_written(tmp_path: Path) -> None:
    assert (TINY.patch_size, TINY.min_pixels, TINY.max_pixels, TINY.factor) == (4, 256, 4096, 8)
    TINY.save(tmp_path)
    assert ImageConfig.from_directory(tmp_path) == TINY
    released = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "image_mean": 0.5}
    config = ImageConfig.from_dict(released | {"size": {"shortest_edge": 1, "longest_edge": 2}})
    assert (config.min_pixels, config.max_pixels, config.image_mean) == (3136, 12845056, (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 0}, "patch_size: got 0"),
        ({"patch_size": "14"}, "patch_size: got '14'"),
        ({"min_pixels": 10, "max_pixels": 5}, "min_pixels: got 10; expected at most max_pixels, 5"),
        ({"image_mean": [0.5]}, "image_mean: got"),
        ({"image_mean": ["a", 0, 0]}, "image_mean: got"),
        ({"image_std": [1, 1, 0]}, "image_std: got"),
        ({"do_resize": 1}, "do_resize: got 1; expected a bool"),
        ([], "got a list"),
    ],
)
def test_an_invalid_configuration_is_refused_by_field(tmp_path: Path, fields: object, message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message):
        ImageConfig.from_directory(tmp_path)


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got no such file"):
        ImageConfig.from_directory(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        ImageConfig.from_directory(tmp_path)
