"""Prompts of the tiny Qwen2.5-VL, and directories that are damaged or incomplete."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from kvpatch_jax.errors import ConfigError, InputError, WeightsError
from kvpatch_jax.models import load
from tests.goldens.load import golden_arrays, golden_images, golden_prompt

FAMILY = "qwen2_5_vl"
WEIGHTS = "model.safetensors"


pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(qwen2_5_vl_directory):
    return load(qwen2_5_vl_directory)


@pytest.fixture(scope="module")
def gold(backbone):
    """Two images: what `embed` takes of the golden, and the images themselves."""
    prompt, images = golden_prompt(backbone, FAMILY, "two_images"), golden_images(FAMILY, "two_images")
    places = golden_arrays(FAMILY, "two_images")["position_ids"][None]
    return prompt | {"position_ids": places} | {f"image.{number}": image for number, image in enumerate(images)}


# ---------------------------------------------------------------------------------------------------- prompts


def test_prepare_two_images_and_token_ids(backbone, gold):
    """The ids and positions of the prompt that transformers was given."""
    ids = gold["input_ids"][0].tolist()
    marks = [place for place, token in enumerate(ids) if token in (303, 304)]
    parts = [ids[: marks[0]], gold["image.0"], ids[marks[1] + 1 : marks[2]], gold["image.1"], ids[marks[3] + 1 :]]
    prompt = backbone.prepare([part for part in parts if len(part)])
    for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw"):
        assert np.array_equal(prompt[name], gold[name]), name


def test_prepare_refuses(backbone, gold, tmp_path):
    with pytest.raises(InputError, match=r"'which page\?'.*tokenizer.json\); expected token ids"):
        backbone.prepare(["which page?"])
    for item in (3.5, {"image": "page.png"}, None, ["one", "two"]):
        with pytest.raises(InputError, match=f"type {type(item).__name__}; expected text, token ids or an image"):
            backbone.prepare([[1], item])
    half = tmp_path / "half.jpeg"
    Image.fromarray(gold["image.0"]).resize((200, 200)).save(half)
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    with pytest.raises(InputError, match=r"half\.jpeg: got no image that can be read"):
        backbone.prepare([[1], half])


def test_embed_refuses_what_does_not_match(backbone, gold):
    ids, places, grid = gold["input_ids"], gold["position_ids"], gold["image_grid_thw"]
    with pytest.raises(InputError, match=r"pixel_values: got shape \(96, 96\); expected \(100, 96\)"):
        backbone.embed(ids, places, gold["pixel_values"][4:], grid)
    with pytest.raises(InputError, match="input_ids: got 25 image placeholders; expected 15"):
        backbone.embed(ids, places, gold["pixel_values"][:60], grid[:1])
    with pytest.raises(InputError, match="2 rows without position_ids"):
        backbone.embed(np.concatenate([ids, ids]))


# ------------------------------------------------------------------------------------------------ directories


def test_the_fingerprint_follows_a_weight(backbone):
    values = jax.tree.map(lambda leaf: leaf, backbone.parameters)
    values["decoder"]["norm"]["weight"] = values["decoder"]["norm"]["weight"].at[3].multiply(1.0001)
    assert backbone.replaced(values).fingerprint != backbone.fingerprint
    assert backbone.replaced(backbone.parameters).fingerprint == backbone.fingerprint


def test_a_directory_without_weights_or_configuration(checkpoint, tmp_path):
    directory = checkpoint(FAMILY)
    (directory / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=WEIGHTS):
        load(directory)
    with pytest.raises(ConfigError, match=r"config\.json: got no such file"):
        load(tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(checkpoint):
    directory = checkpoint(FAMILY)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"architectures": ["OtherForCausalLM"]}))
    message = r"OtherForCausalLM.*expected one of \[.*'Qwen2_5_VLForConditionalGeneration'"
    with pytest.raises(ConfigError, match=message):
        load(directory)
