"""A chat template of our own with the constructs that Qwen3.5's is made of: texts, images, videos, tools and thoughts.

The released one is a program of others and not here. What ours must give is written by hand.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import Video
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.models.inputs.chat import ChatTemplate
from tests.goldens.load import GOLDENS, write_checkpoint

TEMPLATE = r"""
{%- set marks = {'image': '<|image_pad|>', 'video': '<|video_pad|>'} -%}
{%- set shown = namespace(count=0) -%}
{%- macro words(said, alone=false) -%}
  {%- if said is string -%}
    {{ said }}
  {%- elif said is mapping or (said and said is not iterable) -%}
    {{ raise_exception('words of no kind') }}
  {%- else -%}
    {%- for part in ([] if said is none or said is undefined else said) -%}
      {%- set kind = 'image' if 'image' in part or part.type == 'image' else part.type -%}
      {%- if 'text' in part -%}
        {{ part.text }}
      {%- elif alone or kind not in marks -%}
        {{ raise_exception('no ' ~ kind ~ ' may stand here') }}
      {%- else -%}
        {%- set shown.count = shown.count + 1 -%}
        {{ '#' ~ shown.count ~ ' ' if number_media else '' }}<|vision_start|>{{ marks[kind] }}<|vision_end|>
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro called(tool) -%}
  {%- set tool = tool.function if tool.function is defined else tool -%}
  {{ '[' + tool.name }}
  {%- for name, value in tool.arguments|items if tool.arguments is defined -%}
    {{ ' ' + name + '=' }}{{ value | string if value is string or value is number else value | tojson | safe }}
  {%- endfor -%}
  ]
{%- endmacro -%}
{%- macro turn(role, said) -%}
{{ '<|im_start|>' ~ role ~ '\n' ~ said ~ '<|im_end|>\n' }}
{%- endmacro -%}
{%- if not messages -%}
  {{ raise_exception('nothing was said') }}
{%- endif -%}
{%- set rules = words(messages[0].content, alone=true)|trim if messages[0].role == 'system' else '' -%}
{%- if tools and tools is iterable and tools is not mapping -%}
  {%- set listed = namespace(lines='TOOLS') -%}
  {%- for tool in tools -%}
    {%- set listed.lines = listed.lines ~ '\n' ~ tool|tojson -%}
  {%- endfor -%}
  {{ turn('system', listed.lines ~ ('\n' ~ rules if rules else '')) }}
{%- elif rules -%}
  {{ turn('system', rules) }}
{%- endif -%}
{%- set question = namespace(place=none) -%}
{%- for message in messages[::-1] -%}
  {%- set said = words(message.content)|trim -%}
  {%- set answered = said.startswith('<answer>') and said.endswith('</answer>') -%}
  {%- if question.place is none and message.role == 'user' and not answered -%}
    {%- set question.place = messages|length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if question.place is none -%}
  {{ raise_exception('nothing was asked') }}
{%- endif -%}
{%- set shown.count = 0 -%}
{%- for message in messages -%}
  {%- set said = words(message.content)|trim -%}
  {%- if message.role == 'user' -%}
    {{ turn('user', said) }}
  {%- elif message.role == 'assistant' -%}
    {%- set pieces = said.split('</think>') -%}
    {%- set thought = pieces[0].split('<think>')[-1].lstrip('\n').rstrip('\n') if pieces[1:] else '' -%}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else thought -%}
    {%- set thought = '<think>\n' ~ thought ~ '\n</think>\n\n' if loop.index0 > question.place else '' -%}
    {%- set calls = namespace(made='') -%}
    {%- for tool in message.tool_calls or [] -%}
      {%- set calls.made = calls.made ~ called(tool) -%}
    {%- endfor -%}
    {{ turn('assistant', thought ~ pieces[-1].lstrip('\n') ~ calls.made) }}
  {%- elif message.role == 'tool' -%}
    {{ '<|im_start|>user' if loop.previtem and loop.previtem.role != 'tool' else '' }}
    {{- '\n<answer>' + said + '</answer>' }}
    {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
  {%- elif message.role != 'system' or not loop.first -%}
    {{ raise_exception('a ' ~ message.role ~ ' who may not speak here') }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\n<think>\n' }}
  {{- '\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif -%}
"""
CHAT = ChatTemplate(TEMPLATE)
PAGE = np.full((16, 24, 3), 90, np.uint8)
FILM = Video(np.arange(4, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 16, 16, 3), np.uint8), rate=2.0)
IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
SEEN = [
    {"role": "system", "content": [{"type": "text", "text": " Be short. "}]},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": PAGE},
            {"type": "text", "text": "A page, a film: "},
            {"type": "video", "video": FILM},
            {"type": "image", "image": PAGE},
            {"type": "text", "text": " What & why? "},
        ],
    },
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"é": ["<a>", 1]}}}
CALL = {"name": "look", "arguments": {"at": "x&y", "boxes": [{"é": 1}, "<b>"], "deep": True}}
USED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "<think>\n\nFirst I look.\n\n</think>\n\nI look.",
        "tool_calls": [{"type": "function", "function": CALL}, {"name": "rest"}],
    },
    {"role": "tool", "content": [{"type": "text", "text": "a page"}]},
    {"role": "tool", "content": "done"},
]
CALLED = (
    'I look.[look at=x&y boxes=[{"é": 1}, "<b>"] deep=True][rest]<|im_end|>\n'
    "<|im_start|>user\n<answer>a page</answer>\n<answer>done</answer><|im_end|>\n"
)


@pytest.mark.parametrize(
    ("variables", "first", "film", "second", "opened"),
    [
        ({}, "", "", "", "<think>\n"),
        ({"enable_thinking": True}, "", "", "", "<think>\n"),
        ({"enable_thinking": False}, "", "", "", "<think>\n\n</think>\n\n"),
        ({"number_media": True}, "#1 ", "#2 ", "#3 ", "<think>\n"),
    ],
)
def test_images_and_videos_stand_where_the_message_has_them(variables, first, film, second, opened):
    asked = f"{first}{IMAGE}A page, a film: {film}{VIDEO}{second}{IMAGE} What & why?"
    front = f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
    assert CHAT.render(SEEN, **variables) == f"{front}<|im_start|>assistant\n{opened}"
    assert CHAT.render(SEEN, add_generation_prompt=False, **variables) == front


def test_tools_their_calls_and_their_answers():
    """Thoughts since the last question stay, earlier ones go; answers of tools are no question."""
    tools = '<|im_start|>system\nTOOLS\n{"type": "function", "function": {"name": "look", "parameters": '
    tools += '{"é": ["<a>", 1]}}}'
    since = "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<think>\nFirst I look.\n</think>\n\n" + CALLED
    assert CHAT.render(USED, False, tools=[TOOL]) == f"{tools}<|im_end|>\n{since}"
    later = [
        {"role": "system", "content": "Be short."},
        *USED,
        {"role": "assistant", "content": None, "reasoning_content": "So?"},
    ]
    thought = "<|im_start|>assistant\n<think>\nSo?\n</think>\n\n<|im_end|>\n"
    assert CHAT.render(later, False, tools=[TOOL]) == f"{tools}\nBe short.<|im_end|>\n{since}{thought}"
    again = "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
    before = "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n" + CALLED
    assert CHAT.render([*later[1:], {"role": "user", "content": "Well?"}], False) == f"{before}{again}"


# ------------------------------------------------------------------------------------------------ prompts of a model


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> ModelBackbone:
    """The tiny Qwen3.5 with Qwen2.5-VL's test tokenizer and the template."""
    directory: Path = write_checkpoint("qwen3_5", tmp_path_factory.mktemp("thinking"))
    tokenizer = json.loads((GOLDENS / "chat.json").read_text())["families"]["qwen2_5_vl"]["tokenizer"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load(directory)


def test_a_prompt_has_a_token_for_each_piece_of_an_image_and_of_a_frame(backbone):
    """Two frames of a video are one temporal patch, behind the middle of their times."""
    prompt = backbone.chat(SEEN, enable_thinking=False)
    counts = [int(np.prod(grid)) // 4 for grid in prompt["image_grid_thw"]]
    (film,) = prompt["video_grid_thw"].tolist()
    assert film[0] == 2
    first, second = (f"<|vision_start|>{count * '<|image_pad|>'}<|vision_end|>" for count in counts)
    pads = f"<|vision_start|>{film[1] * film[2] // 4 * '<|video_pad|>'}<|vision_end|>"
    frames = f"<0.2 seconds>{pads}<1.2 seconds>{pads}"
    expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"
    expected += f"{first}A page, a film: {frames}{second} What & why?<|im_end|>\n"
    expected += "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert backbone.text(prompt["input_ids"][0]) == expected
    assert prompt["position_ids"].shape == (1, prompt["input_ids"].shape[1], 3)
