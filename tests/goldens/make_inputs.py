"""Makes the goldens of what processors make of messages, images, videos and sounds. See README.md beside this file.

Run it in an environment with transformers, torch, torchvision and PyAV: `python -m tests.goldens.make_inputs`. It
rewrites `chat.json`, `videos/`, and in the families' folders what README.md names. Settings are those of these folders;
Kimi-K2.5's alone runs.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import string
from types import SimpleNamespace
from typing import Any, NamedTuple

import av
import numpy as np
import torch
import transformers as hf
import transformers.models.smolvlm.processing_smolvlm as smolvlm_texts
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.video_utils import VideoMetadata

from tests.goldens.load import GOLDENS, golden_shapes
from tests.goldens.redraw import bits, digest, draw_frames, draw_image, draw_waves, redraw_all
from tests.goldens.table import AUDIO, AUDIO_END, AUDIO_START, END, IMAGE, START, VIDEO

VIDEO_START, VIDEO_END = AUDIO_START, AUDIO_END
"""GLM-4V's, in the places of marks of sounds."""
# num2words is not at hand; the numbers of frames that are asked for, in its words.
smolvlm_texts.num2words = {4: "four", 5: "five"}.__getitem__

# ------------------------------------------------------------------------------------------------- two images in a chat

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

# Special tokens that a family's processor asks its tokenizer for by name.
NAMED = {
    "deepseek_vl": {"image_token": "<image_placeholder>"},
    "gemma3": dict(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>"),
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>"}
    | {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    "kimi_vl": {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
}


def chat_image(number: int) -> Image.Image:
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


def settings_of(family: str) -> dict[str, Any]:
    """The tiny image settings the family's own goldens were made with."""
    settings = json.loads((GOLDENS / family / "preprocessor_config.json").read_text())
    return {name: value for name, value in settings.items() if not name.endswith("_type")}


CHAT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def wrap(tokenizer: Tokenizer, names: dict[str, str]) -> Any:
    """transformers' tokenizer around one of characters; processors ask it for special tokens by these names."""
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=names, **CHAT_TOKENS)


TURN_MARKS = {"<|im_start|>": 310, "<|im_end|>": 311}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_MARKS = {"<|image_pad|>": 301, "<|video_pad|>": 302, "<|vision_start|>": 303, "<|vision_end|>": 304, **TURN_MARKS}
INTERN_MARKS = {"<IMG_CONTEXT>": 301, "<img>": 303, "</img>": 304, "<video>": 305, **TURN_MARKS}
SMOL_MARKS = {"<image>": 301, "<fake_token_around_image>": 303, "<global-img>": 304, "<end_of_utterance>": 305}
SMOL_MARKS |= TURN_MARKS | {f"<row_{row}_col_{column}>": 309 + 2 * row + column for row in (1, 2) for column in (1, 2)}
GEMMA_MARKS = {"<image_soft_token>": 301, "<start_of_image>": 303, "<end_of_image>": 304}
# As Gemma's tokenizer joins newlines: those around an image with those of the text.
GEMMA_MARKS |= {"\n\n": 312, "\n\n\n": 313, **TURN_MARKS}
GLM_MARKS = {"<|image|>": IMAGE, "<|video|>": VIDEO, "<|begin_of_image|>": START, "<|end_of_image|>": END}
GLM_MARKS |= {"<|begin_of_video|>": VIDEO_START, "<|end_of_video|>": VIDEO_END, **TURN_MARKS}
GEMMA4_NAMES = dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
GEMMA4_NAMES |= dict(audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>")
GEMMA4_MARKS = {"<|video|>": VIDEO, **TURN_MARKS}
GEMMA4_MARKS |= dict(zip(GEMMA4_NAMES.values(), (IMAGE, START, END, AUDIO, AUDIO_START, AUDIO_END), strict=True))
GEMMA4_PIXELS = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}
CLIP_FORM = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def gemma4_processor(tokenizer: Tokenizer, template: str) -> Any:
    """Gemma 4's processor around a tokenizer of characters, which is asked for marks by name."""
    videos = hf.Gemma4VideoProcessor(**GEMMA4_PIXELS, num_frames=2)
    hears = Gemma4AudioFeatureExtractor(feature_size=16, return_attention_mask=True)
    images = hf.Gemma4ImageProcessorPil(**GEMMA4_PIXELS)
    return hf.Gemma4Processor(hears, images, wrap(tokenizer, GEMMA4_NAMES), videos, chat_template=template)


class Form(NamedTuple):
    """A family's processor, its options, those for images and videos, and what a template writes for an image."""

    processor: type
    options: dict[str, Any]
    images: type
    videos: type | None
    image: str
    template: str
    marks: dict[str, int]


PLACEHOLDER = "<image_placeholder>"
GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
# The tokenizer has numbers of its own for the ends of rows.
MISTRAL_MARKS = {"[IMG]": IMAGE, "[IMG_BREAK]": 305, "[IMG_END]": 306, **TURN_MARKS}
FORMS = {
    "llava": Form(hf.LlavaProcessor, CLIP_FORM, hf.CLIPImageProcessorPil, None, "<image>", TURNS, {"<image>": IMAGE}),
    "llava_next": Form(
        hf.LlavaNextProcessor, CLIP_FORM, hf.LlavaNextImageProcessorPil, None, "<image>", TURNS, {"<image>": IMAGE}
    ),
    "qwen2_5_vl": Form(
        hf.Qwen2_5_VLProcessor, {}, hf.Qwen2VLImageProcessorPil, hf.Qwen2VLVideoProcessor,
        QWEN_IMAGE, CHATML, QWEN_MARKS,
    ),
    "deepseek_vl": Form(
        hf.DeepseekVLProcessor, {"num_image_tokens": 16}, hf.DeepseekVLImageProcessorPil, None,
        PLACEHOLDER, TURNS, {PLACEHOLDER: IMAGE},
    ),
    "internvl": Form(
        hf.InternVLProcessor, {"image_seq_length": 4}, hf.GotOcr2ImageProcessorPil, hf.InternVLVideoProcessor,
        "<IMG_CONTEXT>\n", CHATML, INTERN_MARKS,
    ),
    "smolvlm": Form(
        hf.SmolVLMProcessor, {"image_seq_len": 4}, hf.SmolVLMImageProcessorPil, hf.SmolVLMVideoProcessor,
        "<image>", CHATML, SMOL_MARKS,
    ),
    "gemma3": Form(
        hf.Gemma3Processor, {"image_seq_length": 9}, hf.Gemma3ImageProcessorPil, None,
        "<start_of_image>", CHATML, GEMMA_MARKS,
    ),
    "glm4v": Form(
        hf.Glm4vProcessor, {}, hf.Glm4vImageProcessorPil, hf.Glm4vVideoProcessor, GLM_IMAGE, CHATML, GLM_MARKS
    ),
    "mistral3": Form(
        hf.PixtralProcessor, {"patch_size": 4, "spatial_merge_size": 2}, hf.PixtralImageProcessorPil, None,
        "[IMG]", CHATML, MISTRAL_MARKS,
    ),
}  # fmt: skip
CASES = (*FORMS, "gemma4")
BESIDE = ("glm4v", "gemma4", "mistral3")
"""Families whose conversation lies in their own folder, and whose tokenizers add nothing; Qwen's neither."""


def make_chat(family: str) -> dict:
    """The text and token ids that a processor makes of a conversation with two images."""
    form = FORMS.get(family) or Form(hf.Gemma4Processor, {}, type, None, "<|image|>", CHATML, GEMMA4_MARKS)
    template = form.template.replace("IMAGE", form.image)
    tokenizer = build_tokenizer(form.marks, starts=family not in ("qwen2_5_vl", *BESIDE))
    wrapped = wrap(tokenizer, NAMED.get(family, {}))
    if family == "gemma4":
        processor = gemma4_processor(tokenizer, template)
    else:
        videos = {} if form.videos is None else {"video_processor": form.videos()}
        images = form.images(**settings_of(family))
        processor = form.processor(images, tokenizer=wrapped, chat_template=template, **videos, **form.options)
    numbers = iter(range(len(SIZES)))
    fill = lambda part: {**part, "image": chat_image(next(numbers))} if part["type"] == "image" else part
    shown = [{**message, "content": [fill(part) for part in message["content"]]} for message in MESSAGES]
    render = {"chat_template": template, "add_generation_prompt": True}
    text = wrapped.apply_chat_template(MESSAGES, tokenize=False, **render)
    ids = processor.apply_chat_template(shown, tokenize=True, return_dict=True, **render)["input_ids"]
    return {
        "template": template,
        "special_tokens": CHAT_TOKENS,
        "tokenizer": json.loads(tokenizer.to_str()),
        "text": text,
        "input_ids": np.asarray(ids[0]).tolist(),
    }


# ------------------------------------------------------------------------------------------------- a chat with videos

VIDEO_CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
KIMI_MARKS = {"<|media_pad|>": 301, "<|kimi_k25_video_placeholder|>": 302, "<|media_begin|>": 303}
KIMI_MARKS |= {"<|media_end|>": 304, "<|media_content|>": 305, **TURN_MARKS}
KIMI = {"patch_size": 4, "merge_size": 2, "size": {"max_height": 512, "max_width": 512}, "max_patches": 64}
KIMI_IMAGE = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
QWEN3 = FORMS["qwen2_5_vl"]._replace(processor=hf.Qwen3VLProcessor, videos=hf.Qwen3VLVideoProcessor)
# Forms of families with videos, and what the template writes for one.
VIDEOS = {
    "qwen2_5_vl": (FORMS["qwen2_5_vl"], QWEN_IMAGE.replace("image", "video")),
    "qwen3_vl": (QWEN3, QWEN_IMAGE.replace("image", "video")),
    "internvl": (FORMS["internvl"], "<video>\n"),
    "smolvlm": (FORMS["smolvlm"], "<video>"),
    "kimi_vl": (
        Form(Kimi_K25Processor, {}, Kimi_K25ImageProcessor, Kimi_K25VideoProcessor, KIMI_IMAGE, "", KIMI_MARKS),
        "<|kimi_k25_video_placeholder|>\n",
    ),
}
SHAPES = {"first": (5, 22, 41, 2.5), "second": (8, 33, 18, 4.0)}
"""Videos: frames, height, width, frames per second. Of the second every other frame is sampled."""
EVEN = ("smolvlm", "internvl")
# What is sampled of how many frames at which rate: (frames, rate, fps, number of frames).
SAMPLED = [
    *((count, rate, fps, None) for count in (7, 30, 301) for rate in (2.0, 29.97) for fps in (0.5, 2, 3.7)),
    *((count, 25.0, None, number) for count in (30, 301) for number in (2, 5, 8)),
    *((3000, 24.0, fps, None) for fps in (1, 2)),
]


def video_processors(family: str):
    """The family's processor with its tiny settings and a tokenizer of characters, and its video processor."""
    form, video = VIDEOS[family]
    template = VIDEO_CHATML.replace("IMAGE", form.image).replace("VIDEO", video)
    known, sampled = KIMI if family == "kimi_vl" else settings_of(family), {}
    if family == "smolvlm":
        template, sampled = smolvlm_texts.DEFAULT_CHAT_TEMPLATE, {"num_frames": 64, "fps": 1}
    built = build_tokenizer(form.marks, starts=False)
    assert form.videos is not None
    video_processor = form.videos(**known, **sampled)
    parts = {"tokenizer": wrap(built, NAMED.get(family, {})), "video_processor": video_processor}
    processor = form.processor(form.images(**known), **parts, chat_template=template, **form.options)
    return processor, video_processor, json.loads(built.to_str()), template


def metadata(name: str) -> VideoMetadata:
    count, height, width, rate = SHAPES[name]
    return VideoMetadata(count, rate, width, height, None, None, list(range(count)))


def video_messages(family: str) -> list[dict]:
    """An image between two videos; SmolVLM's processor takes videos alone."""
    image = [] if family == "smolvlm" else [{"type": "image"}, {"type": "text", "text": ", "}]
    content = [{"type": "video"}, {"type": "text", "text": " then "}, *image, {"type": "video"}]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What moves?"}]}]


def make_videos(family: str) -> None:
    processor, _, tokenizer, template = video_processors(family)
    text = processor.tokenizer.apply_chat_template(
        video_messages(family), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    frames = {name: draw_frames(name, *shape[:3]) for name, shape in SHAPES.items()}
    image = draw_frames("image", 1, 20, 41)[0]
    # Two processors want videos of one number of frames, so both are of the first four.
    if family in EVEN:
        frames = {name: value[:4] for name, value in frames.items()}
    else:
        frames["second"] = frames["second"][::2]
    known = [metadata(name) for name in SHAPES]
    for name, own in zip(SHAPES, known, strict=True):
        step = 1 if name == "first" or family in EVEN else 2
        own.frames_indices = list(range(0, step * len(frames[name]), step))
    given = (
        {}
        if family == "smolvlm"
        else {"images": [torch.tensor(image).permute(2, 0, 1)] if family == "kimi_vl" else [image]}
    )
    inputs = processor(
        text=[text],
        videos=list(frames.values()),
        video_metadata=known,
        do_sample_frames=False,
        return_tensors="pt",
        **given,
    )
    out = {"text": text, "template": template, "tokenizer": tokenizer, "special_tokens": CHAT_TOKENS}
    out |= {"messages": video_messages(family), "input_ids": inputs["input_ids"][0].tolist()}
    if "second_per_grid_ts" in inputs:
        out["second_per_grid_ts"] = np.asarray(inputs["second_per_grid_ts"], np.float32).tolist()
    names = ("video_grid_thw", "image_grid_thw", "num_patches", "num_chunks_per_video")
    out |= {name: np.asarray(inputs[name]).tolist() for name in names if name in inputs}
    pixels = {name: inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs}
    out["pixels"] = {name: [list(value.shape), bits(value.numpy())] for name, value in pixels.items()}
    (GOLDENS / "videos" / f"{family}.json").write_text(json.dumps(out) + "\n")
    if family == "kimi_vl":
        np.savez_compressed(GOLDENS / "videos" / f"{family}.npz", **kimi_forward(inputs))


def kimi_forward(inputs: Any) -> dict[str, np.ndarray]:
    """What Kimi-K2.5 computes of the prompt, some rows: of `make.py` no case has its videos."""
    folder = GOLDENS / "kimi_vl"
    model = hf.AutoModelForImageTextToText.from_config(
        hf.AutoConfig.from_pretrained(folder), attn_implementation="eager"
    )
    drawn = redraw_all(golden_shapes("kimi_vl"))
    report = model.eval().load_state_dict(
        {name: torch.from_numpy(value) for name, value in drawn.items()}, strict=False
    )
    assert not report.unexpected_keys, report
    inner = model.model

    # transformers' own call fails for grids of several frames (it splits their features as if there were no mean over
    # them) and for grids of unequal numbers of them, so each goes through the tower by itself.
    def features(pixel_values_videos, video_grid_thw, **kwargs):
        parts = torch.split(pixel_values_videos, video_grid_thw.prod(-1).tolist())
        outs = [inner.vision_tower(part, grid_thw=grid[None]) for part, grid in zip(parts, video_grid_thw, strict=True)]
        outs[0].pooler_output = [inner.mm_projector(out.pooler_output).squeeze(1) for out in outs]
        return outs[0]

    inner.get_video_features = features
    embedded = []
    inner.language_model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: embedded.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    names = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    given = {name: inputs[name] for name in names if name in inputs}
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], **given).logits[0].numpy()
    pads = np.flatnonzero(np.isin(inputs["input_ids"][0].numpy(), (IMAGE, VIDEO)))
    rows = np.unique([0, len(logits) // 2, len(logits) - 1, *pads[:: max(len(pads) // 8, 1)]]).astype(np.int32)
    return {"rows": rows, "inputs_embeds": embedded[0][0].numpy()[rows], "logits": logits[rows]}


def sampling() -> dict[str, list]:
    """Frame numbers that each family's video processor chooses; null where it refuses."""
    out = {}
    for family in VIDEOS:
        video_processor, found = video_processors(family)[1], []
        for count, rate, fps, number in SAMPLED:
            known = VideoMetadata(count, rate, 64, 48, count / rate)
            try:
                indices = video_processor.sample_frames(known, num_frames=number, fps=fps)
                found.append(np.asarray(indices).astype(int).tolist())
            except (ValueError, TypeError, ZeroDivisionError):
                found.append(None)
        out[family] = found
    return out


# ------------------------------------------------------------------------------------------------ GLM-4V and Gemma 4


def make_glm_frames() -> None:
    """What the two video processors make of frames: their numbers, pixels, and the prompt's text."""
    metadata = lambda count, rate: VideoMetadata(
        total_num_frames=count, fps=rate, duration=count / rate, frames_indices=list(range(count))
    )
    streams = [(1, 25.0), (5, 1.0), (90, 30.0), (300, 29.97), (1000, 24.0), (4000, 12.5), (9000, 25.0), (400, 0.1)]
    found = {"streams": np.array(streams)}
    for name, kind in (("old", hf.Glm4vVideoProcessor), ("new", hf.Glm46VVideoProcessor)):
        numbers = [kind().sample_frames(metadata(*stream), fps=None) for stream in streams]
        found |= {f"{name}.{index}": np.asarray(row, np.int32) for index, row in enumerate(numbers)}
    rates = [hf.Glm4vVideoProcessor().sample_frames(metadata(*stream), fps=0.7) for stream in streams]
    found |= {f"rate.{index}": np.asarray(row, np.int32) for index, row in enumerate(rates)}

    frames = np.stack([draw_image(f"frame {number}", 24, 40) for number in range(5)])
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor = hf.Glm4vVideoProcessor(**settings, size={"shortest_edge": 1024, "longest_edge": 1600})
    out = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    found |= {"frames": frames, "pixel_values": out["pixel_values_videos"].numpy()}
    found |= {"grid": out["video_grid_thw"].numpy().astype(np.int32)}
    shown = VideoMetadata(total_num_frames=5, fps=1.5, duration=5 / 1.5, frames_indices=list(range(5)))
    inputs = {"video_grid_thw": out["video_grid_thw"], "video_metadata": [shown]}
    for name, kind in (("old", hf.Glm4vProcessor), ("new", hf.Glm46VProcessor)):
        fake = SimpleNamespace(video_processor=processor, image_token="<|image|>")
        fake.replace_frame_token_id = lambda seconds, num_image_tokens, kind=kind, fake=fake: (
            kind.replace_frame_token_id(fake, seconds, num_image_tokens=num_image_tokens)
        )
        found[f"text.{name}"] = np.array(kind.replace_video_token(fake, inputs, 0))
    np.savez_compressed(GOLDENS / "glm4v" / "frames.npz", **found)


TALK = "Hear <|audio|> and see <|video|> and <|image|> now"


def make_gemma4() -> None:
    """`frames.npz`: a video's pixels; `media.json`: a text with a sound, a video and an image by the processor."""
    processor = gemma4_processor(build_tokenizer(GEMMA4_MARKS, starts=False), "")
    frames, image = draw_frames("gemma4 video", 7, 24, 40), draw_image("image 0", 20, 41)
    known = [VideoMetadata(total_num_frames=7, fps=0.1, frames_indices=list(range(7)))]
    shown = {"videos": [torch.from_numpy(frames).permute(0, 3, 1, 2)], "video_metadata": known}
    out = processor.video_processor(**shown, return_metadata=True, return_tensors="pt")
    found = {name: out[name].numpy().astype(np.int32) for name in ("video_position_ids", "num_frames_per_video")}
    found["digest.pixel_values_videos"] = digest(out["pixel_values_videos"].numpy())
    found["video_timestamps"] = np.asarray(out["video_metadata"][0].timestamps)
    np.savez_compressed(GOLDENS / "gemma4" / "frames.npz", **found)
    given = {"images": [[Image.fromarray(image)]], "audio": [draw_waves()[1]], "return_tensors": "np"}
    out = processor(text=[TALK], **shown, **given)
    kept = {"text": TALK, "input_ids": np.asarray(out["input_ids"])[0].tolist()}
    (GOLDENS / "gemma4" / "media.json").write_text(json.dumps(kept) + "\n")


# ------------------------------------------------------------------------------------------------ Qwen's Omni families

OMNI_TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% elif part['type'] == 'audio' %}AUDIO
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
CONVERSATION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}, {"type": "video"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A page."}]},
    {"role": "user", "content": [{"type": "text", "text": " And that? "}, {"type": "audio"}]},
]
SAMPLES = 23200  # of both sounds: of unequal ones Qwen3-Omni's processor would pad the shorter
FPS = 4  # of the video's file and of what is shown of it


def write_video() -> tuple[np.ndarray, np.ndarray]:
    """`omni.mkv`, lossless: twelve frames of 16 x 24 pixels and 1.45 seconds of sound. Returns both."""
    frames = np.stack([draw_image(f"frame {number}", 16, 24) for number in range(12)])
    times = np.arange(SAMPLES) / 16000
    samples = np.round(3000 * np.sin(2 * np.pi * 330 * times) * (times % 0.5)).astype(np.int16)
    with av.open(GOLDENS / "omni.mkv", "w") as file:
        video, sound = file.add_stream("ffv1", rate=FPS), file.add_stream("flac", rate=16000, layout="mono")
        video.width, video.height, video.pix_fmt = 24, 16, "bgr0"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            file.mux(video.encode(frame))
        file.mux(video.encode())
        part = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        part.sample_rate, part.pts = 16000, 0
        file.mux(sound.encode(part))
        file.mux(sound.encode())
    return frames, (samples / 2**15).astype(np.float32)


def make_conversation(folder: str, kind: type, version: int) -> None:
    """`chat.json` and `chat.npz`: messages with an image, a video with its sound and a sound, by the processors."""
    # Positions need no parameters.
    with torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(GOLDENS / folder))
    frames, heard = write_video()
    names = {3: ("audio_pad", "image_pad", "video_pad", "vision_start", "vision_end", "audio_start", "audio_end")}
    names[2] = ("AUDIO", "IMAGE", "VIDEO", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    tokens = [f"<|{name}|>" for name in names[version]]
    marks = dict(zip(tokens, (AUDIO, IMAGE, VIDEO, START, END, AUDIO_START, AUDIO_END), strict=True))
    words = ("audio", "image", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    audio, image, video, *edges = tokens
    tokenizer = build_tokenizer({**marks, **TURN_MARKS}, starts=False)
    called = {f"{word}_token": token for word, token in zip(words, tokens, strict=True)}
    wrapped = wrap(tokenizer, called)
    template = OMNI_TEMPLATE.replace("AUDIO", edges[2] + audio + edges[3])
    template = template.replace("IMAGE", edges[0] + image + edges[1]).replace("VIDEO", edges[0] + video + edges[1])

    settings = settings_of(folder)
    names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    known = {name: settings[name] for name in names}
    size = {"shortest_edge": 256, "longest_edge": 4096}
    processor = {2: hf.Qwen2_5OmniProcessor, 3: hf.Qwen3OmniMoeProcessor}[version](
        hf.Qwen2VLImageProcessorPil(**known, size=size),
        hf.Qwen2VLVideoProcessor(**known, size=size, do_sample_frames=False),
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=4, return_attention_mask=True),
        wrapped,
    )
    picture, times = draw_image("chat", 20, 41), np.arange(SAMPLES) / 16000
    sound = (0.2 * np.sin(2 * np.pi * 500 * times)).astype(np.float32)
    text = wrapped.apply_chat_template(CONVERSATION, tokenize=False, chat_template=template, add_generation_prompt=True)
    # As the processors split what they are given: a video as one array of frames, a sound for each slot.
    out = processor(
        text=[text], images=[Image.fromarray(picture)], videos=[frames], audio=[heard, sound],
        audio_from_video_indices=[0, None], load_audio_from_video=True, return_tensors="pt",
        position_id_per_seconds=model.config.position_id_per_seconds,
        videos_kwargs={"fps": float(FPS), "do_sample_frames": False, "size": size},
    )  # fmt: skip
    mask = out["feature_attention_mask"]
    seconds = torch.as_tensor(out["video_second_per_grid"])
    positions, _ = model.get_rope_index(
        out["input_ids"], out["image_grid_thw"], out["video_grid_thw"], torch.ones_like(out["input_ids"]), True,
        mask.sum(1), seconds,
    )  # fmt: skip
    longest = int(mask.sum(1).max())
    arrays = {
        "input_ids": out["input_ids"][0].numpy().astype(np.int32),
        "position_ids": positions[:, 0].T.numpy(),
        "image": picture,
        "input_features": out["input_features"].numpy()[:, :, :longest],
        "feature_attention_mask": mask.numpy()[:, :longest].astype(np.int32),
        "second_per_grid_ts": seconds.numpy(),
    }
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        arrays[name] = out[name].numpy()
    np.savez_compressed(GOLDENS / folder / "chat.npz", **arrays)
    kept = {"text": text, "template": template, "tokenizer": json.loads(tokenizer.to_str()), "messages": CONVERSATION}
    (GOLDENS / folder / "chat.json").write_text(json.dumps(kept) + "\n")
    videos = {**known, "min_pixels": 256, "max_pixels": 4096, "fps": float(FPS)}
    (GOLDENS / folder / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    families = {family: make_chat(family) for family in CASES}
    for family in BESIDE:
        (GOLDENS / family / "chat.json").write_text(json.dumps(families.pop(family)) + "\n")
    out = {"messages": MESSAGES, "sizes": SIZES, "families": families}
    (GOLDENS / "chat.json").write_text(json.dumps(out) + "\n")
    for family in VIDEOS:
        make_videos(family)
    (GOLDENS / "videos" / "sampling.json").write_text(json.dumps({"sampled": SAMPLED, "families": sampling()}) + "\n")
    make_glm_frames()
    make_gemma4()
    make_conversation("qwen2_5_omni", Qwen2_5OmniThinkerForConditionalGeneration, 2)
    make_conversation("qwen3_omni", Qwen3OmniMoeThinkerForConditionalGeneration, 3)


if __name__ == "__main__":
    main()
