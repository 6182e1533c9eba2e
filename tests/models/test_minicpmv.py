"""MiniCPM-V 2.6, 4.0 and 4.5: transcriptions of their published rules are the oracle, beside transformers' parts.

transformers has no such class. The goldens join its SigLIP, its language models and torch's attention in torch; here
`chat_text` and `chat_ids` are written after the authors' `chat` and `processing_minicpmv.py`, with the chat templates
of their releases.
"""

import functools
import hashlib
import json
import string
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np
import pytest
import tokenizers

import kvpatch_jax as kvp
import models
from kvpatch_jax.core import Buckets, to_engine
from kvpatch_jax.errors import ConfigError, InputError
from models.families.minicpmv import ARCHITECTURE
from models.inputs.minicpm_images import minicpmv_settings, process_minicpmv
from models.towers.vit import range_positions
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.goldens.redraw import draw_frames
from tests.tolerances import assert_close_to_largest

NAME = "minicpmv"
RELEASED = {4.5: NAME, 2.6: "minicpmv_2_6", 4.0: "minicpmv_4_0"}
INPUTS = ("pixel_values", "tgt_sizes")
close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> models.ModelBackbone:
    """The tiny 4.5, without a tokenizer. Read only."""
    return models.load(write_checkpoint(NAME, tmp_path_factory.mktemp(NAME) / "released"), angles="float32")


def raw_config(name: str = NAME, **change: Any) -> dict[str, Any]:
    raw = json.loads((GOLDENS / name / "config.json").read_text())
    for key, value in change.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) and isinstance(raw.get(key), dict) else value
    return raw


def read(raw: dict[str, Any]) -> Any:
    return models.FAMILIES[ARCHITECTURE].config(raw, "exact", None)


# -------------------------------------------------------------------------------------------------- language models


@pytest.mark.parametrize("config", ["config.json", pytest.param("config_release.json", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [2.6, 4.0])
def test_the_other_releases_equal_transformers_language_models(version, config, tmp_path):
    """Qwen2, and Llama under longrope, behind the same tower and resampler: a sliced image and a small one."""
    name = RELEASED[version]
    gold, backbone = golden_arrays(name, "two_images"), models.load(write_checkpoint(name, tmp_path, config))
    assert backbone.config.version == version
    tokens = backbone.embed(gold["input_ids"][None], **{key: gold[key] for key in INPUTS})
    out = backbone.prefill(tokens, hidden_at=(1, 2), logits="all")
    rows = gold["rows"]
    for layer in range(2):
        close(out.hidden[layer + 1][0, rows], gold["hidden"][layer], f"hidden {layer}")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel in ("k", "v"):
        close(engine[channel][:, 0, rows], gold[channel], channel)
    close(out.logits[0, rows], gold["logits"], "logits")


# ------------------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize("name", ["tiny", "square", "wide", "tall", "odd", "large"])
def test_slices_are_the_published_ones_bit_for_bit(name):
    """Sizes, grids and every pixel of what the authors' rule makes with Pillow, torch and float32 division."""
    gold = golden_arrays(NAME, "preprocessing")
    out = process_minicpmv(list(draw_frames(name, 1, *gold[f"{name}.size"])), minicpmv_settings(GOLDENS / NAME))
    for key in ("tgt_sizes", "slice_grids"):
        np.testing.assert_array_equal(out[key], gold[f"{name}.{key}"])
    pixels = np.ascontiguousarray(out["pixel_values"])
    assert pixels.shape == tuple(gold[f"{name}.shape"])
    assert hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest() == gold[f"{name}.digest"]


@pytest.mark.parametrize("side", [10, 70])
def test_positions_are_those_of_torch(side):
    """Counts of patches of which several shares fall on a boundary, where torch's own roundings decide."""
    gold, seen = golden_arrays(NAME, "preprocessing"), 0
    exact = 0
    for key, expected in gold.items():
        if key.startswith(f"buckets.{side}."):
            count = int(key.rpartition(".")[2])
            np.testing.assert_array_equal(range_positions(1, count, side), expected)
            np.testing.assert_array_equal(range_positions(count, 1, side), expected * side)
            exact += np.array_equal(expected, np.arange(count) * side // count)
            seen += 1
    assert seen == 12
    assert exact < seen, "the exact shares would do"


def test_released_sizes(tmp_path):
    """1024×768 is a whole of 37×28 patches and four slices; nine slices are the most there are."""
    (tmp_path / "preprocessor_config.json").write_text("{}")
    blank = minicpmv_settings(tmp_path)
    out = process_minicpmv([np.zeros((768, 1024, 3), np.uint8), np.zeros((3000, 3000, 3), np.uint8)], blank)
    assert out["slice_grids"].tolist() == [[2, 2], [3, 3]]
    assert out["tgt_sizes"][0].tolist() == [28, 37]
    assert len(out["tgt_sizes"]) == 15
    assert len(out["pixel_values"]) == int(out["tgt_sizes"].prod(axis=1).sum())
    for name, value in (("slice_mode", False), ("use_image_id", False), ("unk", "<pad>")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({name: value}))
        with pytest.raises(ConfigError, match=f"got {name} {value!r}, which is not built"):
            minicpmv_settings(tmp_path)


def test_padding_to_buckets_changes_nothing(backbone, tmp_path):
    """Slices that pad the table see nothing, and their embeddings are cut off."""
    gold = golden_arrays(NAME, "two_images")
    padded = models.load(write_checkpoint(NAME, tmp_path), angles="float32", buckets=Buckets(smallest=16))
    given = {key: gold[key] for key in INPUTS}
    features = padded.encode(gold["input_ids"][None], **given)
    assert features is not None
    assert np.isfinite(features).all()
    assert_close_to_largest(features, backbone.encode(gold["input_ids"][None], **given), bar=1e-6)
    close(features[0], gold["inputs_embeds"][gold["input_ids"] == 301], "embeddings")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tgt_sizes": None}, "tgt_sizes: got"),
        ({"tgt_sizes": np.array([[3, 0]])}, r"tgt_sizes: got \[\[3, 0\]\]; expected rows and columns"),
        ({"tgt_sizes": np.array([[3.0, 4.0]])}, "tgt_sizes: got"),
        ({"tgt_sizes": np.array([[4, 4], [1, 2]])}, "pixel_values: got shape"),
        ({"pixel_values": np.zeros((3, 3, 4, 4), np.float32)}, "pixel_values: got shape"),
        ({"pixel_values": None}, "pixel_values: got shape None"),
    ],
)
def test_slices_that_do_not_match_are_refused(change, message, backbone):
    gold = golden_arrays(NAME, "one_image")
    with pytest.raises(InputError, match=message):
        backbone.embed(gold["input_ids"][None], **({key: gold[key] for key in INPUTS} | change))


# ----------------------------------------------------------------------------------------------------- configuration


def test_what_a_configuration_leaves_out_is_what_the_authors_classes_have():
    """Qwen3's class, the tower of 980 pixels without its last layer, 64 queries."""
    config = read({"architectures": [ARCHITECTURE], "version": 4.5})
    assert (config.vision.side, config.vision.depth, config.vision.width) == (70, 26, 1152)
    assert (config.resampler.queries, config.resampler.heads, config.image_token) == (64, 32, 128244)
    assert (config.text.width, config.text.layers, config.text.qk_norm) == (4096, 32, True)
    sparse = read(
        {"architectures": [ARCHITECTURE], "version": 4.0, "vision_config": {}, "drop_vision_last_layer": False}
    )
    assert (sparse.vision.width, sparse.vision.depth, sparse.image_token) == (768, 12, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": None}, r"got version None of MiniCPM-V; expected one of \[2.6, 4.0, 4.5\]"),
        ({"version": 2.5}, "got version 2.5 of MiniCPM-V"),
        ({"scale_emb": 12}, "'scale_emb': 12, which this library does not know for minicpmv4.5"),
        ({"scale_depth": 1.4}, "'scale_depth': 1.4"),
        ({"dim_model_base": 256}, "'dim_model_base': 256"),
        ({"use_image_id": False}, "use_image_id False, which is not built"),
        ({"slice_mode": False}, "slice_mode False, which is not built"),
        ({"vision_config": {"model_type": "clip"}}, "vision_config: got .*; expected a table of SigLIP's sizes"),
        ({"vision_config": {"hidden_size": 256}}, "a tower and a decoder of one width, 256"),
        ({"hidden_size": 192}, "resampler: got width 192; expected a multiple of a head's 128"),
        ({"query_num": None}, "got no 'query_num'"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(raw_config(**change))


def test_videos_are_refused_by_name(backbone):
    with pytest.raises(InputError, match="videos: got some for MiniCPMV, which takes none"):
        backbone.prepare([kvp.Video(np.zeros((2, 8, 8, 3), np.uint8), rate=1.0)])


# -------------------------------------------------------------------------------------------------------------- chat

MARKS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]
TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    4.0: "{% for message in messages %}" + TURN + "{% endfor %}" + OPEN,
    2.6: (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + TURN + "{% endfor %}" + OPEN
    ),
    4.5: (
        "{%- if messages[0].role == 'system' %}\n"
        "    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n{%- endif %}\n"
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
        '    {%- if ns.multi_step_tool and message.role == "user" %}\n'
        "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n"
        "    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n"
        '    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}\n'
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        '    {%- elif message.role == "assistant" %}\n        {%- set content = message.content %}\n'
        "        {%- set reasoning_content = '' %}\n        {%- if '</think>' in message.content %}\n"
        "            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n')"
        ".split('<think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
        "        {%- if loop.index0 > ns.last_query_index %}\n"
        "            {%- if loop.last or (not loop.last and reasoning_content) %}\n"
        "                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + "
        "'\\n</think>\\n\\n' + content.lstrip('\\n') }}\n            {%- else %}\n"
        "                {{- '<|im_start|>' + message.role + '\\n' + content }}\n            {%- endif %}\n"
        "        {%- else %}\n            {{- '<|im_start|>' + message.role + '\\n' + content }}\n"
        "        {%- endif %}\n        {{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n"
        "    {%- if enable_thinking is defined and enable_thinking is true %}\n"
        "        {{- '<think>\\n' }}\n    {%- endif %}\n{%- endif %}"
    ),
}
"""The releases' own `chat_template`, 4.5's without what it does with tools."""


def build_tokenizer(starts: bool) -> Any:
    """One token per character; with `starts` it puts `<s>` in front of what it encodes, as Llama's does."""
    characters = sorted({*string.printable, "Ġ", "Ċ"})
    specials = ["<|im_start|>", "<|im_end|>", *MARKS]
    vocabulary = {"<s>": 0, **{character: 3 + n for n, character in enumerate(characters)}}
    vocabulary |= {"<unk>": 301, **{mark: 302 + n for n, mark in enumerate(specials)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<unk>", *specials])
    if starts:
        processors = tokenizers.processors
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def chat_text(messages: list[dict], version: float, thinking: bool) -> str:
    """`MiniCPMV.chat`, transcribed: the rendered text, with the authors' marks."""
    copied = []
    for message in messages:
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        lines = ["(<image>./</image>)" if part["type"] == "image" else part["text"] for part in content]
        copied.append({"role": message["role"], "content": "\n".join(lines)})
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATES[version])
    return template.render(messages=copied, add_generation_prompt=True, enable_thinking=thinking)


def chat_ids(tokenizer: Any, text: str, grids: list, queries: int = 3) -> list[int]:
    """`MiniCPMVProcessor._convert_images_texts_to_inputs`, transcribed."""
    chunks = text.split("(<image>./</image>)")
    final = ""
    for index, (columns, rows) in enumerate(grids):
        placeholder = f"<image_id>{index}</image_id>" + "<image>" + "<unk>" * queries + "</image>"
        lines = ["".join(["<slice>" + "<unk>" * queries + "</slice>"] * columns) for _ in range(rows)]
        final += chunks[index] + placeholder + "\n".join(lines)
    return list(tokenizer.encode(final + chunks[-1]).ids)


def conversation(images: list) -> list[dict]:
    picture = lambda number: {"type": "image", "image": images[number]}
    return [
        {"role": "user", "content": [picture(0), picture(1), {"type": "text", "text": "What are these?"}]},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo pages."},
        {"role": "user", "content": [{"type": "text", "text": "And this one:"}, picture(2)]},
    ]


def with_tokenizer(version: float, root: Path) -> tuple[models.ModelBackbone, Any]:
    directory = write_checkpoint(RELEASED[version], root)
    tokenizer = build_tokenizer(starts=version == 4.0)
    tokenizer.save(str(directory / "tokenizer.json"))
    table = {"chat_template": TEMPLATES[version], "bos_token": "<s>" if version == 4.0 else "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(table))
    return models.load(directory), tokenizer


@pytest.mark.parametrize("version", [2.6, 4.0, 4.5])
def test_prompts_are_the_authors(version, tmp_path):
    """Numbered images, slices row by row, a line for each part of a message; saved and loaded again."""
    backbone, tokenizer = with_tokenizer(version, tmp_path / "released")
    images = [draw_frames(f"{number}", 1, *size)[0] for number, size in enumerate([(20, 41), (9, 9), (33, 18)])]
    grids = process_minicpmv(images, backbone.image_config)["slice_grids"].tolist()
    assert [grid != [0, 0] for grid in grids] == [True, False, True]
    for messages, more in (
        (conversation(images), {}),
        ([{"role": "system", "content": "Be brief."}, *conversation(images)], {}),
        (conversation(images), {"enable_thinking": True}),
    ):
        text = chat_text(messages, version, more.get("enable_thinking", False))
        prompt = backbone.chat(messages, **more)
        assert prompt["input_ids"][0].tolist() == chat_ids(tokenizer, text, grids)
    assert backbone.embed(**prompt).embeddings.shape[1] == prompt["input_ids"].shape[1]

    again = models.load(models.save(backbone, tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
    np.testing.assert_array_equal(again.chat(messages, **more)["input_ids"], prompt["input_ids"])


def test_a_tail_of_the_answer_is_written_as_the_release_does(tmp_path):
    """4.5 writes an assistant's last words behind its thought."""
    backbone, _ = with_tokenizer(4.5, tmp_path)
    assert backbone.chat_template is not None
    for answer in ("<think>\nHm.\n</think>\n\nYes", "Yes"):
        messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": answer}]
        expected = chat_text(messages, 4.5, False)
        assert backbone.chat_template.render(messages) == expected
    assert backbone.text(np.array(backbone.chat_frame().between)) == "\n"
    with pytest.raises(InputError, match="tools are not written"):
        backbone.chat([{"role": "user", "content": "Well?"}], tools=[{"name": "f"}])


@pytest.mark.parametrize("version", [4.5, *(pytest.param(number, marks=pytest.mark.slow) for number in (2.6, 4.0))])
@pytest.mark.slow
def test_sessions_answer_about_images(version, tmp_path):
    """The first chunk is exact, so that a session of it answers as the whole prompt does, again after it was saved; an
    image further on follows where the first one ends. A chunk's image is number 0: it was prepared alone.
    """
    backbone, tokenizer = with_tokenizer(version, tmp_path)
    images, question = list(draw_frames("pages", 2, 20, 16)), "What is it?"
    ids = backbone.prepare([images[0]])["input_ids"][0].tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<image_id>0</image_id><image>")

    asked = backbone.prepare([question])["input_ids"][0]
    expected = backbone.generate(backbone.embed(**backbone.prepare([images[0], asked])), 5)[0].tolist()
    with kvp.Session(backbone, chat=False) as session:
        session.add(images[0])
        assert list(session.ask(question, steps=5).ids) == expected
        session.add(images[1])
        assert session.window.next_start == 2 * len(ids)
        said = session.ask(question, steps=5).ids
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as again:
        assert again.ask(question, steps=5).ids == said
