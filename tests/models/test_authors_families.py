"""DeepSeek-VL2, DeepSeek-OCR-2, DeepSeek-VL-7B and Phi-3-vision follow their authors' rules for tiles and prompts."""

import copy
import json
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from kvpatch_jax import models
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.inputs.chat import ChatTemplate
from kvpatch_jax.models.towers.sam import SamBlock, SamConfig
from tests.goldens.load import GOLDENS, golden_chat, golden_config, golden_images, write_checkpoint

VL2: Any = models.FAMILIES["DeepseekVLV2ForCausalLM"]
LARGE = "high_res_pixel_values"
OCR2: Any = models.FAMILIES["DeepseekOcr2ForConditionalGeneration"]

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.mark.parametrize("count", [2, 3])
def test_more_than_two_images_are_not_tiled(count):
    """The authors tile up to two images; of more, each is its view and, once more, its one tile."""
    images = [np.random.default_rng(0).integers(0, 256, (70, 40, 3), np.uint8)] * count
    found = VL2.vision.process(images, VL2.vision.settings(GOLDENS / "deepseek_vl2"))
    assert found["tile_grids"].tolist() == [[2, 2] if count == 2 else [1, 1]] * count
    if count == 3:
        np.testing.assert_array_equal(found["pixel_values_local"], found["pixel_values"])


CONTENT = [{"type": "text", "text": "One: "}, {"type": "image"}, {"type": "text", "text": "What is it? "}]
VL2_CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": CONTENT},
    {"role": "assistant", "content": " A cat. "},
    {"role": "user", "content": "Sure?"},
]
OCR2_CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Free OCR."}]}]


@pytest.mark.parametrize(
    ("family", "messages", "text"),
    [
        # `format_messages_v2`: a question ends where its answer begins, an answer with the end of a sentence.
        (
            VL2,
            VL2_CHAT,
            "<s>Be brief.<|User|>: One: <image>\nWhat is it?\n\n<|Assistant|>:A cat.</s>"
            "<|User|>: Sure?\n\n<|Assistant|>:",
        ),
        # The format "plain": texts one behind the other, an image on a line of its own, no roles.
        (OCR2, OCR2_CHAT, "<s><image>\nFree OCR."),
    ],
)
def test_prompts_are_the_authors(family, messages, text):
    assert ChatTemplate(family.template, (("bos_token", "<s>"), ("eos_token", "</s>"))).render(messages) == text


def test_the_placeholder_is_the_tokenizers(tmp_path):
    """No configuration names it; where neither does, the largest vocabularies' is taken, or it is refused."""
    raw = golden_config("deepseek_vl2")
    del raw["image_token_id"]
    family = VL2
    assert family.amend is not None
    with pytest.raises(ConfigError, match=r"image_token_id: got 128815; expected one of 320 tokens"):
        family.config(family.amend(raw, tmp_path), "exact", None)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": "<image>"}}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: got added tokens of another form"):
        family.amend(raw, tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<image>": 311}))
    assert family.config(family.amend(raw, tmp_path), "exact", None).image_token == 311


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        ("deepseek_vl2", "tile_grids", None, "tile_grids or num_local_patches: got None"),
        ("deepseek_vl2", "tile_grids", np.zeros_like, "expected at least one row and column"),
        ("deepseek_vl2", "pixel_values", lambda pixels: pixels[..., :26, :26], "got 26 pixels a side; expected 30"),
        ("deepseek_ocr2", "pixel_values", lambda pixels: pixels[..., :40, :40], r"a side; expected one of \["),
        ("deepseek_vl_hybrid", LARGE, None, rf"{LARGE}: got shape None; expected \(1, 3, 32, 32\)"),
    ],
)
def test_views_that_do_not_match_are_refused(family, name, change, message, tiny):
    backbone = tiny(family)
    inputs = backbone.prepare([[5], *golden_images(family, "one_image"), [6]])
    inputs = {key: value for key, value in inputs.items() if key != "position_ids" and (key, change) != (name, None)}
    if change is not None:
        inputs[name] = change(np.asarray(inputs[name]))
    with pytest.raises(InputError, match=message):
        backbone.embed(**inputs)


def test_views_without_tiles_have_the_tiles_size(tmp_path):
    root = write_checkpoint("deepseek_ocr2", tmp_path)
    file = root / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"crop_to_patches": False}))
    prompt = models.load(root).prepare([np.zeros((100, 60, 3), np.uint8)])
    assert prompt["pixel_values"].shape == (1, 3, 48, 48)
    assert prompt["num_local_patches"].tolist() == [0]


def test_scores_of_a_large_image_are_made_in_blocks():
    """At the released size a layer that sees everything holds no matrix of 4096 tokens by 4096."""
    config = SamConfig()
    block = nnx.eval_shape(lambda: SamBlock(config, nnx.Rngs(0), windowed=False))
    graph, state = nnx.split(block)
    hidden = jax.ShapeDtypeStruct((1, config.side, config.side, config.width), np.float32)
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, hidden).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    whole = 4 * config.heads * config.side**4
    assert analysis.temp_size_in_bytes < whole / 3


def test_phi_prompts_are_the_authors(tmp_path):
    """Placeholders numbered from 1, each text between them tokenized by itself, start token and all."""
    import tokenizers

    directory = write_checkpoint("phi3_v", tmp_path)
    table = copy.deepcopy(golden_chat("qwen2_5_vl")["tokenizer"])
    marks = {"<|user|>": 312, "<|assistant|>": 313, "<|end|>": 314, "<|system|>": 315}
    table["model"]["vocab"] |= marks
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(table))
    tokenizer.add_special_tokens([*marks])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    backbone = models.load(directory)
    images = [np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8) for size in ((20, 41), (33, 18))]
    messages: list[Any] = [
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
    sizes = backbone.prepare(images)["image_sizes"] // 16
    counts = [int((rows * columns + 1) * 4 + 1 + (rows + 1) * 2) for rows, columns in sizes]
    # `Phi3VProcessor._convert_images_texts_to_inputs`, with the placeholder for its negative ids.
    first, *chunks = (tokenizer.encode(chunk).ids for chunk in re.split(r"<\|image_\d+\|>", text))
    ids = [*first]
    for count, chunk in zip(counts, chunks, strict=True):
        ids += [301] * count + chunk
    assert backbone.chat(messages)["input_ids"][0].tolist() == ids
    # What a user writes is text, whatever it spells.
    messages[0]["content"][1]["text"] = "<|image_9|>"
    assert (backbone.chat(messages[:1])["input_ids"] == 301).sum() == counts[0]
