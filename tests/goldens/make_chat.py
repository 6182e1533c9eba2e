"""Make the chat goldens with transformers (5.23): what its processors make of messages with images.

Run it in an environment that has transformers, tokenizers, jinja2 and Pillow: `python tests/goldens/make_chat.py`, with
names of families to make these alone. It rewrites `chat.json`: per family the template, the tokenizer, the messages,
the rendered text and the token ids.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessorPil,
    DeepseekVLImageProcessorPil,
    DeepseekVLProcessor,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    InternVLProcessor,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
)
from transformers.processing_utils import ProcessorMixin

ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # video processors need torchvision; none is used
HERE = Path(__file__).parent
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part %}IMAGE{% elif 'text' in part %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TURNS = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message['role']) }}{% endif %}
    {%- if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}
    {%- for part in message['content'] if part['type'] == 'image' %}IMAGE
{% endfor %}
    {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}
    {%- if message['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% else %} {% endif %}
{%- endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}
"""
SIZES = [(20, 41), (33, 18)]
MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A page, in two parts."}]},
    {"role": "user", "content": [{"type": "text", "text": " And that? "}, {"type": "image"}]},
]
CLIP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}

# Families whose released tokenizers add nothing of their own.
PLAIN = ("qwen2_5_vl",)

# Special tokens that a family's processor asks its tokenizer for by name.
NAMED = {
    "deepseek_vl": {"image_token": "<image_placeholder>"},
    "gemma3": {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}


def draw_image(number: int) -> Image.Image:
    height, width = SIZES[number]
    pixels = np.random.default_rng(100 + number).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def build_tokenizer(specials: dict[str, int], starts: bool) -> Tokenizer:
    """One token per character (ids from 2), with these special tokens at these ids.

    With `starts` it puts `<s>` in front of what it encodes, as Llama's does, unless told not to.
    """
    characters = sorted({*string.printable, "Ġ", "Ċ"})
    vocabulary = {"<s>": 0, "</s>": 1, **{c: 2 + n for n, c in enumerate(characters)}, **specials}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *specials])
    if starts:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def settings_of(family: str) -> dict:
    """The tiny image settings the family's own goldens were made with."""
    return json.loads((HERE / family / "preprocessor_config.json").read_text())


def pil(kind, family: str):
    known = {name: value for name, value in settings_of(family).items() if not name.endswith("_type")}
    return kind(**known)


def with_images() -> list[dict]:
    """The messages with their images in place."""
    numbers = iter(range(len(SIZES)))
    fill = lambda part: {**part, "image": draw_image(next(numbers))} if part["type"] == "image" else part
    return [{**message, "content": [fill(part) for part in message["content"]]} for message in MESSAGES]


def run(family: str, processor, tokenizer: Tokenizer, template: str, tokens: dict) -> dict:
    if family == "smolvlm":
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)  # SmolVLM's asks it, images or not
    render = {"chat_template": template, "add_generation_prompt": True}
    text = processor.tokenizer.apply_chat_template(MESSAGES, tokenize=False, **render)
    ids = processor.apply_chat_template(with_images(), tokenize=True, return_dict=True, **render)["input_ids"]
    return {
        "template": template,
        "special_tokens": tokens,
        "tokenizer": json.loads(tokenizer.to_str()),
        "text": text,
        "input_ids": np.asarray(ids[0]).tolist(),
    }


CHAT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
TURN_MARKS = {"<|im_start|>": 310, "<|im_end|>": 311}
QWEN_MARKS = {"<|image_pad|>": 301, "<|video_pad|>": 302, "<|vision_start|>": 303, "<|vision_end|>": 304, **TURN_MARKS}
INTERN_MARKS = {"<IMG_CONTEXT>": 301, "<img>": 303, "</img>": 304, "<video>": 305, **TURN_MARKS}
SMOL_MARKS = {
    "<image>": 301,
    "<fake_token_around_image>": 303,
    "<global-img>": 304,
    "<end_of_utterance>": 305,
    **TURN_MARKS,
    **{f"<row_{row}_col_{column}>": 309 + 2 * row + column for row in (1, 2) for column in (1, 2)},
}
GEMMA_MARKS = {
    "<image_soft_token>": 301,
    "<start_of_image>": 303,
    "<end_of_image>": 304,
    "\n\n": 312,  # as Gemma's tokenizer joins newlines: those around an image with those of the text
    "\n\n\n": 313,
    **TURN_MARKS,
}
CLIP_FORM = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def tile_processor(processor, images, family: str):
    """LLaVA's two processors count tokens the same way."""
    return lambda tokenizer, template: processor(pil(images, family), tokenizer, chat_template=template, **CLIP_FORM)


# family → (tokenizer, template) → processor; what the template writes for an image; the template; special tokens.
CASES = {
    "llava": (tile_processor(LlavaProcessor, CLIPImageProcessorPil, "llava"), "<image>", TURNS, {"<image>": 301}),
    "llava_next": (
        tile_processor(LlavaNextProcessor, LlavaNextImageProcessorPil, "llava_next"),
        "<image>",
        TURNS,
        {"<image>": 301},
    ),
    "qwen2_5_vl": (
        lambda t, c: Qwen2_5_VLProcessor(pil(Qwen2VLImageProcessorPil, "qwen2_5_vl"), t, chat_template=c),
        "<|vision_start|><|image_pad|><|vision_end|>",
        CHATML,
        QWEN_MARKS,
    ),
    "deepseek_vl": (
        lambda t, c: DeepseekVLProcessor(pil(DeepseekVLImageProcessorPil, "deepseek_vl"), t, c, num_image_tokens=16),
        "<image_placeholder>",
        TURNS,
        {"<image_placeholder>": 301},
    ),
    "internvl": (
        lambda t, c: InternVLProcessor(
            pil(GotOcr2ImageProcessorPil, "internvl"), t, image_seq_length=4, chat_template=c
        ),
        "<IMG_CONTEXT>\n",
        CHATML,
        INTERN_MARKS,
    ),
    "gemma3": (
        lambda t, c: Gemma3Processor(pil(Gemma3ImageProcessorPil, "gemma3"), t, c, image_seq_length=9),
        "<start_of_image>",
        CHATML,
        GEMMA_MARKS,
    ),
    "smolvlm": (
        lambda t, c: SmolVLMProcessor(
            pil(SmolVLMImageProcessorPil, "smolvlm"), t, None, image_seq_len=4, chat_template=c
        ),
        "<image>",
        CHATML,
        SMOL_MARKS,
    ),
}


def write_chat(family: str, make, image: str, specials: dict[str, int]) -> None:
    """Writes `<family>/chat.json`: one more family, whose script has what CASES has of the others.

    `make`: (tokenizer, template) → processor; `image` is what the template writes for an image.
    """
    template, tokenizer = CHATML.replace("IMAGE", image), build_tokenizer(specials, starts=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **CHAT_TOKENS)
    found = run(family, make(wrapped, template), tokenizer, template, CHAT_TOKENS)
    (HERE / family / "chat.json").write_text(json.dumps(found) + "\n")


def make_case(family: str, starts: bool) -> dict:
    """What is stored of one family."""
    make, image, template, specials = CASES[family]
    template, tokenizer = template.replace("IMAGE", image), build_tokenizer(specials, starts)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=NAMED.get(family, {}), **CHAT_TOKENS
    )
    return run(family, make(wrapped, template), tokenizer, template, CHAT_TOKENS)


def main() -> None:
    wanted, kept = sys.argv[1:] or list(CASES), json.loads((HERE / "chat.json").read_text())["families"]
    families = kept | {family: make_case(family, starts=family not in PLAIN) for family in wanted}
    out = {"messages": MESSAGES, "sizes": SIZES, "families": families}
    (HERE / "chat.json").write_text(json.dumps(out, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
