"""Images become, bit for bit, what transformers' processors make by a directory's settings; bad ones are refused."""

import io
import json

import numpy as np
import pytest

from kvpatch_jax.cache import decoded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import FAMILIES
from kvpatch_jax.models.inputs.processors import CONFIG_FILE, PROCESSOR_FILE, process_images
from tests.goldens.load import GOLDENS
from tests.goldens.redraw import standard_values

VISIONS = {name: family.vision for name, family in FAMILIES.items() if family.vision is not None}
QWEN = "Qwen2_5_VLForConditionalGeneration"


def settings_of(directory, architecture=QWEN, **options):
    (directory / CONFIG_FILE).write_text(json.dumps(options))
    return VISIONS[architecture].settings(directory)


def tiny():
    return VISIONS[QWEN].settings(GOLDENS / "qwen2_5_vl")


def picture(height, width, channels=3):
    values = standard_values("picture", height * width * channels).reshape(height, width, channels)
    return np.clip(128 + 60 * values, 0, 255).astype(np.uint8)


def stored(pixels, form="PNG", **options):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


MODES = ("L", "1", "P", "CMYK", "YCbCr", "HSV")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (23, 37), (300, 500), (31, 6), (3, 3), (1, 40), *MODES])
def test_pixels_are_transformers_bit_for_bit(shape, own, tmp_path):
    """Of a file, of its bytes and of a PIL image, with a directory's settings and the class's own."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = Image.fromarray(picture(24, 40)).convert(shape) if shape in MODES else Image.fromarray(picture(*shape))
    settings = settings_of(tmp_path, do_resize=True) if own else tiny()
    theirs = Qwen2VLImageProcessorPil() if own else Qwen2VLImageProcessorPil.from_pretrained(GOLDENS / "qwen2_5_vl")
    expected = theirs([image.convert("RGB")], return_tensors="np", input_data_format="channels_last")
    path = tmp_path / "image.tiff"
    image.save(path) if image.mode != "HSV" else image.convert("RGB").save(path)
    for source in (path, path.read_bytes(), image):
        out = process_images([source], settings)
        for name, kind in (("pixel_values", np.float32), ("image_grid_thw", np.int32)):
            np.testing.assert_array_equal(out[name], expected[name])
            assert out[name].dtype == kind


SIDES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        ("CLIP", {}, (15, 33)),
        ("CLIP", {"do_resize": False}, (9, 33)),
        ("CLIP", {"size": {"shortest_edge": 13}}, (15, 33)),
        ("Llava", {"do_pad": True}, (15, 34)),
        ("Llava", {}, (31, 15)),
        ("Siglip", {"size": {"height": 16, "width": 16}}, (31, 15)),
    ],
)
def test_settings_and_class_are_those_that_a_directory_names(kind, options, size, tmp_path):
    """Left-out steps, exact sizes, crops larger than the image, LLaVA's own padding to a square."""
    import transformers
    from PIL import Image

    own = {**SIDES, **options} if kind != "Siglip" else options
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**own)
    expected = theirs([Image.fromarray(picture(*size))], return_tensors="np")["pixel_values"]
    named = {f"{kind}ImageProcessor", f"{kind}ImageProcessorFast"}
    for name in named:
        settings = settings_of(tmp_path, "LlavaForConditionalGeneration", **own, image_processor_type=name)
        np.testing.assert_array_equal(process_images([picture(*size)], settings)["pixel_values"], expected)


def test_processor_config_counts_before_preprocessor_config(tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_processor": {"patch_size": 4}}))
    assert settings_of(tmp_path, patch_size=8)["patch_size"] == 4


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (QWEN, {"patch_size": "14"}),
        ("Gemma4ForConditionalGeneration", {"max_soft_tokens": 77}),
        ("Phi3VForCausalLM", {"crop_size": 0}),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(architecture, options, tmp_path):
    """When they are read, or with the first image."""
    with pytest.raises((ConfigError, InputError), match=r"got|fails"):
        VISIONS[architecture].process([picture(30, 20)], settings_of(tmp_path, architecture, **options))


def test_a_folder_without_readable_settings_is_refused(tmp_path):
    for content, message in ((None, "got no such file"), ("{", "is not JSON"), ("[]", "got a list")):
        if content is not None:
            (tmp_path / CONFIG_FILE).write_text(content)
        with pytest.raises(ConfigError, match=message):
            VISIONS[QWEN].settings(tmp_path)


@pytest.mark.parametrize("architecture", [QWEN, "LlavaForConditionalGeneration"])
def test_no_images_slivers_and_sizes_that_do_not_stack_are_refused(architecture, tmp_path):
    options = {"do_resize": True} if architecture == QWEN else SIDES | {"do_center_crop": False}
    settings, vision = settings_of(tmp_path, architecture, **options), VISIONS[architecture]
    with pytest.raises(InputError, match="images: got none; expected at least one"):
        vision.process([], settings)
    with pytest.raises(InputError, match="image 0: got 1×20000 pixels; expected sides within a ratio of 200"):
        vision.process([np.zeros((1, 20000, 3), np.uint8)], settings)
    if architecture != QWEN:
        with pytest.raises(InputError, match="CLIPImageProcessorPil fails"):
            process_images([picture(16, 16), picture(16, 32)], settings)


def cut_short(form, share, **options):
    content = stored(picture(64, 64), form, **options)
    return content[: int(share * len(content))]


# Pillow turns 16-bit greys to white when asked for RGB, and transformers lets it.
BAD = {
    "empty": (lambda: np.zeros((0, 8, 3), np.uint8), r"got uint8 \[0, 8, .\]; expected .* not empty"),
    "float32": (lambda: np.zeros((8, 8, 3), np.float32), r"got float32 \[8, 8, 3\]; expected uint8"),
    "number": (lambda: 7, "got a int; expected a path, a PIL image or a uint8 array"),
    "text": (lambda: b"not an image", "got no image that can be read"),
    "jpeg": (lambda: cut_short("JPEG", 0.5, quality=95), "got no image that can be read"),
    "png": (lambda: cut_short("PNG", 0.6), "got no image that can be read"),
    "16 bits": (lambda: stored(np.full((16, 16), 40000, np.uint16)), "got mode I;16 .*; expected pixels of at most 8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_images_are_named(kind, tmp_path):
    source, message = BAD[kind][0](), BAD[kind][1]
    with pytest.raises(InputError, match=f"image 1: {message}"):
        process_images([picture(16, 16), source], tiny())
    if isinstance(source, bytes):
        (tmp_path / "image.png").write_bytes(source)
        with pytest.raises(InputError, match=rf"image\.png: {message}"):
            process_images([tmp_path / "image.png"], tiny())


def test_the_orientation_is_applied():
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned, plain = (stored(picture(24, 40), "JPEG", quality=95, exif=tag) for tag in (exif, b""))
    np.testing.assert_array_equal(decoded(turned), np.rot90(decoded(plain), -1))


def test_transparency_is_laid_over_white_however_an_image_comes(tmp_path):
    """One rule, the processors': as a file, a PIL image or an array."""
    from PIL import Image

    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[..., 0], pixels[:8, :, 3] = 200, 255
    Image.fromarray(pixels, "RGBA").save(tmp_path / "clear.png")
    expected = process_images([tmp_path / "clear.png"], tiny())["pixel_values"]
    for source in (tmp_path / "clear.png", Image.open(tmp_path / "clear.png"), pixels):
        np.testing.assert_array_equal(decoded(source)[8:], np.full((8, 16, 3), 255, np.uint8))
        np.testing.assert_array_equal(process_images([source], tiny())["pixel_values"], expected)
