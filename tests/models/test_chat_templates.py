"""A conversation becomes the text and ids that transformers makes of it; a saved template stays the same."""

import functools
import json

import numpy as np
import pytest

from kvpatch_jax.cache import Template
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.inputs.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ChatTemplate
from tests.goldens.load import GOLDENS, write_chatting, write_checkpoint

GOLD = json.loads((GOLDENS / "chat.json").read_text())
FAMILIES = [name for name, gold in GOLD["families"].items() if "special_tokens" in gold]
"""The Omni families' golden is of another conversation, with sounds: `test_sound_inputs.py`."""


DEFAULT = ("qwen2_5_vl", "llava", "gemma4")


def picture(number: int) -> np.ndarray:
    """The image the golden was made with (its pixels do not matter here, its size does)."""
    height, width = GOLD["sizes"][number]
    return np.random.default_rng(100 + number).integers(0, 256, (height, width, 3), np.uint8)


def messages() -> list[dict]:
    """The golden's messages with their images in place."""
    numbers = iter(range(len(GOLD["sizes"])))
    fill = lambda part: {**part, "image": picture(next(numbers))} if part["type"] == "image" else part
    return [{**message, "content": [fill(part) for part in message["content"]]} for message in GOLD["messages"]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """`loaded(family)`: the tiny backbone with the golden's tokenizer and template, kept for the module."""
    return functools.cache(lambda family: load(write_chatting(family, tmp_path_factory.mktemp(family))))


def asked(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "family", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
)
def test_two_images_in_a_conversation_equal_transformers(loaded, family):
    """The same text, the same ids: template, tokenizer, image expansion and all; the positions are those of `embed`."""
    backbone, gold = loaded(family), GOLD["families"][family]
    assert backbone.chat_template.render(messages()) == gold["text"]
    prompt = backbone.chat(messages())
    assert prompt["input_ids"][0].tolist() == gold["input_ids"]
    np.testing.assert_array_equal(backbone.embed(**prompt).positions, prompt["position_ids"])


def test_a_frame_around_images_is_what_chat_makes(loaded):
    backbone, images = loaded("gemma4"), [picture(0), picture(1)]
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "What is this?"}]
    frame = backbone.chat_frame()
    first, second = (backbone.prepare([image])["input_ids"][0].tolist() for image in images)
    ids = [*frame.front, *first, *frame.between, *second, *backbone.ids([frame.before, "What is this?", frame.behind])]
    assert ids == backbone.chat(asked(*content))["input_ids"][0].tolist()


def test_text_alone_needs_no_image_but_a_template(loaded, tmp_path):
    with pytest.raises(InputError, match="without a chat template"):
        load(write_checkpoint("llava", tmp_path)).chat(HELLO)
    backbone = loaded("qwen2_5_vl")
    prompt = backbone.chat([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert set(prompt) == {"input_ids", "position_ids"}
    assert backbone.text(prompt["input_ids"][0]) == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_saved_with_the_backbone(loaded, tmp_path, family):
    """A saved directory renders the same, here and by transformers' AutoTokenizer."""
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    backbone = loaded(family)
    again = load(save(backbone, tmp_path / "saved"))
    np.testing.assert_array_equal(again.chat(messages())["input_ids"], backbone.chat(messages())["input_ids"])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    said = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}]}]
    text = backbone.chat_template.render(said)
    assert theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text, add_special_tokens=False)["input_ids"] == backbone.ids(Template(text))


HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TEMPLATE_FILE, "{{ bos_token }}{{ messages[0].content }}"),
        ("chat_template.json", {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}),
        (TOKENIZER_CONFIG_FILE, {"chat_template": [{"name": "default", "template": "<s>{{ messages[0].content }}"}]}),
    ],
)
def test_every_file_that_may_hold_it(tmp_path, name, content):
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": True, "model_max_length": 7}
    (tmp_path / TOKENIZER_CONFIG_FILE).write_text(json.dumps(tokens))
    merged = {**tokens, **content} if isinstance(content, dict) else content
    (tmp_path / name).write_text(merged if isinstance(merged, str) else json.dumps(merged))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s>hi"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{{ raise_exception('no such role') }}", InputError, "no such role"),
        ("{% if %}", ConfigError, "cannot be used"),
        ("{{ messages.append(1) }}", ConfigError, "cannot be used"),
        ("{{ ''.__class__.__mro__ }}", ConfigError, "cannot be used"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        ChatTemplate(source).render(HELLO)


def test_special_tokens_stand_around_the_whole_prompt(tmp_path):
    """A tokenizer that adds a start token adds it once, in front of the first image, however many texts there are."""
    from tokenizers import processors

    backbone = load(write_chatting("llava", tmp_path))
    backbone.tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    ids = backbone.prepare([picture(0), "one", "two"])["input_ids"][0].tolist()
    encode = lambda text: backbone.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [0, *[301] * 16, *encode("one"), *encode("two"), 1]
    assert backbone.prepare([[5, 6]])["input_ids"][0].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (asked({"type": "image_url", "image_url": {"url": "page.png"}}), "chat, part 0: got 'page.png'.*a data URL"),
        (asked({"type": "video", "video": "film.png"}, {"type": "text", "text": "what?"}), "expected 'video'"),
        (asked({"type": "text"}), "'text' with the fields .*; expected fields of"),
        ({"role": "user", "content": "hello"}, "messages of type dict"),
    ],
)
def test_what_chat_does_not_know_is_refused(loaded, unchecked, messages, message):
    with pytest.raises(InputError, match=message):
        loaded("qwen2_5_vl").chat(messages)


def test_text_outside_the_vocabulary_is_refused(tmp_path):
    """Not taken for `<pad>`; a text that says `<pad>` itself may."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backbone = load(write_checkpoint("qwen2_5_vl", tmp_path))
    backbone.tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "hello": 2, "page": 3}, "<pad>"))
    backbone.tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backbone.chat_template = ChatTemplate("{{ messages[0].content }}")
    assert backbone.prepare(["hello <pad>  page"])["input_ids"].tolist() == [[2, 0, 3]]
    assert backbone.chat([{"role": "user", "content": "page hello"}])["input_ids"].tolist() == [[3, 2]]
    for call in (
        lambda: backbone.prepare([[1, 2], "shot"]),
        lambda: backbone.chat([{"role": "user", "content": "hello shot"}]),
    ):
        with pytest.raises(InputError, match="'shot', which is not in the tokenizer's vocabulary"):
            call()
