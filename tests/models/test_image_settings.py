"""Image settings of checkpoints as transformers' processors follow them; images of odd kinds and shapes."""

import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from kvpatch_jax.cache import decoded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.families.family import Vision
from kvpatch_jax.models.families.registry import FAMILIES
from kvpatch_jax.models.inputs.images import PictureConfig, process_clip
from kvpatch_jax.models.inputs.qwen_images import CONFIG_FILE
from tests.goldens.load import GOLDENS, write_checkpoint

with np.load(GOLDENS / "clip_options.npz") as file:
    GOLD = {name: file[name] for name in file.files}
CASES = sorted({name.split(".")[0] for name in GOLD})
PLAIN = {name: family for name, family in FAMILIES.items() if family.vision and not name.startswith(("Qwen", "Glm"))}


def vision_of(architecture: str) -> Vision:
    vision = PLAIN[architecture].vision
    assert vision is not None
    return vision


@pytest.mark.parametrize("case", CASES)
def test_clip_settings_equal_transformers(case, tmp_path):
    """Left-out resizing and cropping, exact sizes, crops larger than the image, LLaVA's own padding to a square."""
    (tmp_path / CONFIG_FILE).write_text(str(GOLD[f"{case}.settings"]))
    settings = vision_of("LlavaForConditionalGeneration").settings(tmp_path)
    found = process_clip([GOLD[f"{case}.image"]], settings)["pixel_values"]
    np.testing.assert_array_equal(found, GOLD[f"{case}.pixel_values"])


def test_images_that_come_out_in_several_sizes_are_refused():
    options = json.loads(str(GOLD["no_crop.settings"])) | {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
    }
    images = [np.zeros((16, 16, 3), np.uint8), np.zeros((16, 32, 3), np.uint8)]
    with pytest.raises(InputError, match="expected one size"):
        process_clip(images, PictureConfig.from_dict(options))


@pytest.mark.parametrize(
    ("architecture", "option"),
    [
        ("InternVLForConditionalGeneration", "do_resize"),
        ("DeepseekVLForConditionalGeneration", "do_pad"),
        ("SmolVLMForConditionalGeneration", "do_resize"),
        ("KimiVLForConditionalGeneration", "do_resize"),
    ],
)
def test_a_step_that_cannot_be_left_out_is_refused(architecture, option, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps({option: False}))
    with pytest.raises(ConfigError, match=f"{option} False, which is not built; expected True"):
        vision_of(architecture).settings(tmp_path)


@pytest.mark.parametrize("architecture", PLAIN)
def test_no_images_and_slivers_are_refused(architecture, tmp_path, unchecked):
    vision, sizes = vision_of(architecture), {"size": 16, "crop_size": 16, "image_grid_pinpoints": [[16, 32]]}
    sizes |= {"candidate_resolutions": [[16, 32]]}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(sizes))
    settings = vision.settings(tmp_path)
    with pytest.raises(InputError, match="images: got none; expected at least one"):
        vision.process([], settings)
    with pytest.raises(InputError, match="image 0: got 1×20000 pixels; expected sides within a ratio of 200"):
        vision.process([np.zeros((1, 20000, 3), np.uint8)], settings)


# ------------------------------------------------------------------------------------------- transparency, 16 bits


def test_transparency_is_laid_over_white_however_an_image_comes(tmp_path):
    """One rule, the processors': as a file, a PIL image or an array, in `prepare` and in `chat`."""
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[..., 0], pixels[:8, :, 3] = 200, 255
    path, directory = tmp_path / "clear.png", write_checkpoint("llava", tmp_path / "llava")
    Image.fromarray(pixels, "RGBA").save(path)
    white = np.full((8, 16, 3), 255, np.uint8)
    for source in (path, Image.open(path), pixels):
        np.testing.assert_array_equal(decoded(source)[8:], white)
    gold = json.loads((GOLDENS / "chat.json").read_text())["families"]["llava"]
    (directory / "tokenizer.json").write_text(json.dumps(gold["tokenizer"]))
    (directory / "chat_template.jinja").write_text(gold["template"])
    backbone = load(directory)
    said = lambda image: [{"role": "user", "content": [{"type": "image", "image": image}]}]
    expected = backbone.prepare([path])["pixel_values"]
    for image in (path, str(path), pixels, Image.open(path)):
        np.testing.assert_array_equal(backbone.chat(said(image))["pixel_values"], expected)


def png16(values: np.ndarray, colour: int) -> bytes:
    """A PNG with 16 bits a value; colour 0 is grey, 2 RGB."""
    part = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


def test_sixteen_bits_a_value(tmp_path):
    """Colour keeps the upper eight bits, as Pillow reads it for the processors; grey would be clipped: refused."""
    grey = (np.arange(64).reshape(8, 8) * 1000).astype(np.uint16)
    colour = np.stack([grey, grey // 2, grey // 3], axis=-1)
    (tmp_path / "grey.png").write_bytes(png16(grey, 0))
    (tmp_path / "colour.png").write_bytes(png16(colour.reshape(8, -1, 3), 2))
    np.testing.assert_array_equal(decoded(tmp_path / "colour.png"), (colour >> 8).astype(np.uint8))
    with pytest.raises(InputError, match=r"mode I;16 .*; expected pixels of at most 8 bits a value"):
        decoded(tmp_path / "grey.png")
