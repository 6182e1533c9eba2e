"""Phi-3-vision: transcriptions of its published rules are the oracle, beside transformers' CLIP and Phi-3.

transformers has no such class. The golden joins its CLIP and its Phi-3 in torch; `embedding` below is written after
`image_embedding_phi3_v.py` once more, in NumPy and float64, and `hd_size`, `chat_ids` after `processing_phi3_v.py`.
"""

import functools
import json
import math
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kvpatch_jax import models
from kvpatch_jax.errors import InputError
from kvpatch_jax.models.families.phi3_v import FAMILY, TOWERS
from kvpatch_jax.models.inputs.pictures import hd_transform, process_phi3_v
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

NAME = "phi3_v"
PLACE = "model.vision_embed_tokens"
WEIGHTS = "model.safetensors"
SIDE, CROPS = 16, 4
close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model. Read only."""
    return write_checkpoint(NAME, tmp_path_factory.mktemp(NAME) / "released")


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> models.ModelBackbone:
    return models.load(checkpoint, angles="float32")


def raw_config(**change: Any) -> dict[str, Any]:
    raw = json.loads((GOLDENS / NAME / "config.json").read_text())
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) and isinstance(raw.get(name), dict) else value
    return raw


# ------------------------------------------------------------------------------------------------- between the towers


def embedding(tensors: dict[str, np.ndarray], found: np.ndarray, size: tuple[int, int], order: str) -> np.ndarray:
    """`Phi3ImageEmbedding.forward` of one image: CLIP's features [tiles, patches, C] to embeddings, in float64."""
    of = {name: tensors[f"{PLACE}.{name}"].astype(np.float64) for name in ("sub_GN", "glb_GN")}
    found, h, w = found.astype(np.float64), size[0] // SIDE, size[1] // SIDE
    side, channels = math.isqrt(found.shape[1]), found.shape[2]
    half = side // 2

    def merged(tile):
        rows = [[tile[row * side + column] for column in range(side)] for row in range(side)]
        out = np.empty((half, half, 4 * channels))
        for row in range(half):
            for column in range(half):
                block = [rows[2 * row + y][2 * column + x] for y in (0, 1) for x in (0, 1)]
                out[row, column] = np.concatenate(block)
        return out

    def with_ends(grid):
        return np.concatenate([np.concatenate([row, of["sub_GN"].reshape(1, -1)]) for row in grid])

    whole = with_ends(merged(found[0]))
    crops = [merged(tile) for tile in found[1 : 1 + h * w]]
    grid = np.concatenate([np.concatenate(crops[row * w : (row + 1) * w], axis=1) for row in range(h)])
    between, crops = of["glb_GN"].reshape(1, -1), with_ends(grid)
    lines = np.concatenate([whole, between, crops] if order == "glb_sub" else [crops, between, whole])
    assert len(lines) == (h * w + 1) * half**2 + 1 + (h + 1) * half

    def linear(x, number):
        weight, bias = (tensors[f"{PLACE}.img_projection.{number}.{part}"] for part in ("weight", "bias"))
        return x @ weight.astype(np.float64).T + bias

    inner = linear(lines, 0)
    return linear(0.5 * inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))), 2)


@pytest.mark.parametrize("order", ["sub_glb", "glb_sub"])
def test_separators_and_order_are_the_published_ones(order, checkpoint, tmp_path):
    """CLIP's features of the golden, through the transcription: transformers' embeddings, and ours in both orders."""
    gold, tensors = golden_arrays(NAME, "one_image"), load_file(checkpoint / WEIGHTS)
    features = gold["vision_blocks"][1][:, 1:]  # hidden_states[-2] of three blocks, without the class token
    expected = embedding(tensors, features, tuple(gold["image_sizes"][0]), order)
    here = gold["input_ids"] == 301
    if order == "sub_glb":
        close(gold["inputs_embeds"][here], expected, "torch's")

    directory = write_checkpoint(NAME, tmp_path / order)
    raw = raw_config(embd_layer={"hd_transform_order": order})
    (directory / "config.json").write_text(json.dumps(raw))
    backbone = models.load(directory)
    found = backbone.encode(gold["input_ids"][None], pixel_values=gold["pixel_values"], image_sizes=gold["image_sizes"])
    assert found is not None
    close(found[0], expected, "ours")


# ------------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("name", ["square", "tall", "wide", "odd"])
def test_crops_are_the_published_ones_bit_for_bit(name):
    """Resized and padded by torchvision, cut and normalised by torch: equal. The small whole image is torch's bicubic
    interpolation, whose sums a processor may round otherwise: within three units in the last place of its largest."""
    gold = golden_arrays(NAME, "preprocessing")
    vision = FAMILY.vision
    assert vision is not None
    out = vision.process([gold[f"{name}.image"]], vision.settings(GOLDENS / NAME))
    np.testing.assert_array_equal(out["image_sizes"], gold[f"{name}.image_sizes"])
    tiles, theirs = out["pixel_values"], gold[f"{name}.pixel_values"]
    np.testing.assert_array_equal(tiles[1:], theirs[1 : len(tiles)])
    assert not theirs[len(tiles) :].any()
    assert np.abs(tiles[0] - theirs[0]).max() <= 3 * np.spacing(np.abs(theirs[0]).max())


def hd_size(width: int, height: int, crops: int, side: int = 336) -> tuple[int, int]:
    """`calc_hd_transform_size`, transcribed: (height, width)."""
    transposed = width < height
    if transposed:
        width, height = height, width
    ratio, scale = width / height, 1
    while scale * np.ceil(scale / ratio) <= crops:
        scale += 1
    scale -= 1
    new_width = int(scale * side)
    new_height = int(new_width / ratio)
    padded = int(np.ceil(new_height / side) * side)
    return (new_width, padded) if transposed else (padded, new_width)


@given(st.integers(10, 400), st.integers(10, 400), st.sampled_from([1, 4, 16]))
@settings(max_examples=25, deadline=None)
def test_sizes_are_the_published_ones(width, height, crops):
    image = np.full((height, width, 3), 3, np.uint8)
    found = hd_transform(image, 336, crops, 2)
    rows, columns = found.shape[0] // 336, found.shape[1] // 336
    assert found.shape[:2] == hd_size(width, height, crops)
    assert 1 <= rows * columns <= crops


# ------------------------------------------------------------------------------------------------------ configuration


def released(**change: Any) -> dict[str, Any]:
    """Fields of microsoft/Phi-3-vision-128k-instruct's `config.json`."""
    factors = {"short_factor": [1.05] * 48, "long_factor": [1.03 + number for number in range(48)]}
    raw = {
        "_name_or_path": "Phi-3-vision-128k-instruct",
        "architectures": ["Phi3VForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM"},
        "bos_token_id": 1,
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "img_processor": {
            "image_dim_out": 1024,
            "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "phi3_v",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**factors, "type": "su"},
        "rope_theta": 10000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32064,
        "_attn_implementation": "flash_attention_2",
    }
    return raw | change


def test_the_released_configuration_is_read():
    config = FAMILY.config(released(), "exact", None)
    assert (config.vision.side, config.tile_side, config.vision.layers_run) == (24, 12, 23)
    assert (config.text.rope.scaling.kind, config.text.window, config.whole_first) == ("longrope", 131072, False)
    assert config.image_token == 32044
    assert set(TOWERS) >= {"openai/clip-vit-large-patch14-336"}


# --------------------------------------------------------------------------------------------------------------- chat


def build_tokenizer(specials: dict[str, int], starts: bool) -> Any:
    """One token per character; with `starts` it puts `<s>` in front of what it encodes, as Llama's does."""
    characters = sorted({*string.printable, "Ġ", "Ċ"})
    vocabulary = {"<s>": 0, "</s>": 1, **{character: 2 + n for n, character in enumerate(characters)}, **specials}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], fuse_unk=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *specials])
    if starts:
        processors = tokenizers.processors
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def chat_ids(tokenizer: Any, text: str, counts: list[int]) -> list[int]:
    """`Phi3VProcessor._convert_images_texts_to_inputs`, transcribed, with the placeholder for its negative ids."""
    chunks = [list(tokenizer.encode(chunk).ids) for chunk in re.split(r"<\|image_\d+\|>", text)]
    numbers = [int(mark) for mark in re.findall(r"<\|image_(\d+)\|>", text)]
    ids = list(chunks[0])
    for chunk, number in zip(chunks[1:], numbers, strict=True):
        ids += [301] * counts[number - 1] + chunk
    return ids


@pytest.mark.parametrize("starts", [False])
def test_prompts_are_the_authors(starts, tmp_path):
    """Placeholders numbered from 1, each text between them tokenized by itself, start token and all."""
    directory = write_checkpoint(NAME, tmp_path / "with_tokenizer")
    marks = {"<|user|>": 310, "<|assistant|>": 311, "<|end|>": 312, "<|system|>": 313}
    tokenizer = build_tokenizer(marks, starts)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] + 'x' }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
    backbone = models.load(directory)
    images = [picture(20, 41), picture(33, 18)]
    messages = [
        {"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A page."},
        {"role": "user", "content": [{"type": "image", "image": images[1]}, {"type": "text", "text": "And that?"}]},
    ]
    text = (
        "<|user|>\n<|image_1|>\nWhat is this?<|end|>\n<|assistant|>\nA page.<|end|>\n"
        "<|user|>\n<|image_2|>\nAnd that?<|end|>\n<|assistant|>\n"
    )
    assert backbone.chat_template is not None
    assert backbone.chat_template.render(messages) == text

    sizes = process_phi3_v(images, backbone.image_config)["image_sizes"] // SIDE
    counts = [int((rows * columns + 1) * 4 + 1 + (rows + 1) * 2) for rows, columns in sizes]
    prompt = backbone.chat(messages)
    assert prompt["input_ids"][0].tolist() == chat_ids(tokenizer, text, counts)
    assert backbone.embed(**prompt).embeddings.shape[1] == prompt["input_ids"].shape[1]

    # Both images in one message, as a frame has them.
    if starts:
        with pytest.raises(InputError, match="tokens of its own around every text between images"):
            backbone.chat_frame()
    else:
        frame, asked = backbone.chat_frame(), "And those?"
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": asked}]
        first, second = (backbone.prepare([image])["input_ids"][0].tolist() for image in images)
        laid = [*frame.front, *first, *frame.between, *second]
        laid += backbone.ids(f"{frame.before}{asked}{frame.behind}")
        assert laid == backbone.chat([{"role": "user", "content": content}])["input_ids"][0].tolist()

    again = models.load(models.save(backbone, tmp_path / "saved"))
    np.testing.assert_array_equal(again.chat(messages)["input_ids"], prompt["input_ids"])
    with pytest.raises(InputError, match="got 2 image placeholders; expected 1"):
        backbone.chat(
            [{"role": "user", "content": [messages[0]["content"][0], {"type": "text", "text": "<|image_9|>"}]}]
        )
