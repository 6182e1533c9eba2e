"""Make the video goldens with transformers (5.23), torch, torchvision and PyAV. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_videos.py`. It rewrites `videos/`. Models and
settings are those of the families' own folders.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers.models.smolvlm.processing_smolvlm as smolvlm_texts
from make_chat import CHAT_TOKENS, INTERN_MARKS, NAMED, QWEN_MARKS, SMOL_MARKS, build_tokenizer, settings_of
from redraw import draw_frames, redraw_all
from safetensors.numpy import save_file
from transformers import (
    AutoModelForImageTextToText,
    GotOcr2ImageProcessorPil,
    InternVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    SmolVLMImageProcessorPil,
)
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata
from vlm_golden import HERE, LayerRecorder

OUT = HERE / "videos"
# num2words is not at hand; the numbers of frames that are asked for, in its words.
smolvlm_texts.num2words = {4: "four", 5: "five"}.__getitem__

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
KIMI_MARKS = {
    "<|media_pad|>": 301,
    "<|kimi_k25_video_placeholder|>": 302,
    "<|media_begin|>": 303,
    "<|media_end|>": 304,
    "<|media_content|>": 305,
    "<|im_start|>": 310,
    "<|im_end|>": 311,
}
KIMI = {"patch_size": 4, "merge_size": 2, "size": {"max_height": 512, "max_width": 512}, "max_patches": 64}
QWEN_VISION = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
# family → image processor, video processor, processor; what the template writes for an image and a video; marks.
FAMILIES = {
    "qwen2_5_vl": (Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor, Qwen2_5_VLProcessor, QWEN_VISION, QWEN_MARKS),
    "qwen3_vl": (Qwen2VLImageProcessorPil, Qwen3VLVideoProcessor, Qwen3VLProcessor, QWEN_VISION, QWEN_MARKS),
    "internvl": (
        GotOcr2ImageProcessorPil,
        InternVLVideoProcessor,
        InternVLProcessor,
        ("<IMG_CONTEXT>\n", "<video>\n"),
        INTERN_MARKS,
    ),
    "smolvlm": (
        SmolVLMImageProcessorPil,
        SmolVLMVideoProcessor,
        SmolVLMProcessor,
        ("<image>", "<video>"),
        SMOL_MARKS,
    ),
    "kimi_vl": (
        Kimi_K25ImageProcessor,
        Kimi_K25VideoProcessor,
        Kimi_K25Processor,
        ("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n", "<|kimi_k25_video_placeholder|>\n"),
        KIMI_MARKS,
    ),
}
SHAPES = {"first": (5, 22, 41, 2.5), "second": (8, 33, 18, 4.0)}
"""Videos: frames, height, width, frames per second. Of the second every other frame is sampled."""
IMAGE = (20, 41)
EVEN = ("smolvlm", "internvl")
# What is sampled of how many frames at which rate: (frames, rate, fps, number of frames).
SAMPLED = [
    *((count, rate, fps, None) for count in (7, 30, 301) for rate in (2.0, 29.97) for fps in (0.5, 2, 3.7)),
    *((count, 25.0, None, number) for count in (30, 301) for number in (2, 5, 8)),
    *((3000, 24.0, fps, None) for fps in (1, 2)),
]


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


def processors(family: str):
    """The family's processor with its tiny settings and a tokenizer of characters, and its video processor."""
    images, videos, kind, (image, video), marks = FAMILIES[family]
    template = DEFAULT_CHAT_TEMPLATE if family == "smolvlm" else CHATML.replace("IMAGE", image).replace("VIDEO", video)
    known = {name: value for name, value in settings_of(family).items() if not name.endswith("_type")}
    known = KIMI if family == "kimi_vl" else known
    named = NAMED.get(family, {})
    if family == "kimi_vl":
        named = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
    built = build_tokenizer(marks, starts=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, extra_special_tokens=named, **CHAT_TOKENS)
    more = {"internvl": {"image_seq_length": 4}, "smolvlm": {"image_seq_len": 4}}.get(family, {})
    if family == "smolvlm":
        known |= {"num_frames": 64, "fps": 1}
    video_processor = videos(**known)
    known = {name: value for name, value in known.items() if name not in ("num_frames", "fps")}
    processor = kind(
        images(**known), tokenizer=tokenizer, video_processor=video_processor, chat_template=template, **more
    )
    return processor, video_processor, json.loads(built.to_str()), template


def metadata(name: str) -> VideoMetadata:
    count, height, width, rate = SHAPES[name]
    return VideoMetadata(count, rate, width, height, None, None, list(range(count)))


def messages(family: str) -> list[dict]:
    """An image between two videos; SmolVLM's processor takes videos alone."""
    image = [] if family == "smolvlm" else [{"type": "image"}, {"type": "text", "text": ", "}]
    content = [{"type": "video"}, {"type": "text", "text": " then "}, *image, {"type": "video"}]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What moves?"}]}]


def run(family: str) -> None:
    processor, _, tokenizer, template = processors(family)
    text = processor.tokenizer.apply_chat_template(
        messages(family), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    frames = {name: draw_frames(name, *shape[:3]) for name, shape in SHAPES.items()}
    image = draw_frames("image", 1, *IMAGE)[0]
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
    out |= {"messages": messages(family), "input_ids": inputs["input_ids"][0].tolist()}
    if "second_per_grid_ts" in inputs:
        out["second_per_grid_ts"] = np.asarray(inputs["second_per_grid_ts"], np.float32).tolist()
    names = ("video_grid_thw", "image_grid_thw", "num_patches", "num_chunks_per_video")
    out |= {name: np.asarray(inputs[name]).tolist() for name in names if name in inputs}
    pixels = {name: inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs}
    out["pixels"] = {name: [list(value.shape), digest(value.numpy())] for name, value in pixels.items()}
    (OUT / f"{family}.json").write_text(json.dumps(out) + "\n")
    np.savez_compressed(OUT / f"{family}.npz", **forward(family, inputs))
    print(family, inputs["input_ids"].shape, {name: tuple(value.shape) for name, value in pixels.items()})


def load_model(family: str):
    with tempfile.TemporaryDirectory() as directory:
        shapes = json.loads((HERE / family / "shapes.json").read_text())
        (Path(directory) / "config.json").write_text((HERE / family / "config.json").read_text())
        save_file(redraw_all(shapes), Path(directory) / "model.safetensors", metadata={"format": "pt"})
        model, report = AutoModelForImageTextToText.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    return model.eval()


def forward(family: str, inputs) -> dict[str, np.ndarray]:
    """What the model computes of the prompt, at explicit positions; of Qwen2.5-VL under both rules."""
    model = load_model(family)
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    given = {
        name: inputs[name]
        for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
        if name in inputs
    }
    inner = model.model
    language = getattr(inner, "language_model", None) or inner.text_model
    rules = {"": positions}
    if family.startswith("qwen"):
        kinds = (ids == 301).int() + 2 * (ids == 302).int()
        grids = (inputs["image_grid_thw"], inputs["video_grid_thw"])
        if family == "qwen2_5_vl":
            seconds = torch.tensor(np.asarray(inputs["second_per_grid_ts"], np.float32))
            hf5 = inner.get_rope_index(ids, kinds, *grids, seconds)[0]
            rules = {"": by_authors(ids[0].numpy(), hf5), "_hf5": hf5}
        else:
            rules = {"": inner.get_rope_index(ids, kinds, *grids)[0]}
        inner.rope_deltas = None
    if family == "kimi_vl":
        # transformers' own call fails for grids of several frames (it splits their features as if there were no mean
        # over them) and for grids of unequal numbers of them, so each goes through the tower by itself.
        def features(pixel_values_videos, video_grid_thw, **kwargs):
            parts = torch.split(pixel_values_videos, video_grid_thw.prod(-1).tolist())
            outs = [
                inner.vision_tower(part, grid_thw=grid[None]) for part, grid in zip(parts, video_grid_thw, strict=True)
            ]
            outs[0].pooler_output = [inner.mm_projector(out.pooler_output).squeeze(1) for out in outs]
            return outs[0]

        inner.get_video_features = features

    recorder, out = LayerRecorder(language, {}, None), {}
    length = ids.shape[1]
    pads = np.flatnonzero(np.isin(ids[0].numpy(), (301, 302)))
    rows = np.unique([0, length // 2, length - 1, *pads[:: max(len(pads) // 8, 1)]]).astype(np.int32)
    for rule, own in rules.items():
        recorder.values.clear()
        logits = model(input_ids=ids, position_ids=own, **given).logits[0].numpy()
        taken = recorder.take()
        if family == "qwen3_vl":
            # Deepstack features are added behind the layer that was hooked: its output is not the residual.
            taken["hidden"] = taken["hidden"][-1:]
        ids_of = own[:, 0].T if own.ndim == 3 else own[0]
        out |= {
            f"position_ids{rule}": ids_of.numpy().astype(np.int32),
            f"logits{rule}": logits[rows[[0, len(rows) // 2, -1]]],
        }
        out |= {f"hidden{rule}": taken["hidden"][-1, rows], "inputs_embeds": taken["inputs_embeds"][rows]}
    return out | {"rows": rows}


def by_authors(ids: np.ndarray, hf5: torch.Tensor) -> torch.Tensor:
    """Positions by the authors' rule: what stands behind a video is moved past its time axis."""
    positions = hf5.clone()
    video = ids == 302
    for last in np.flatnonzero(video & ~np.append(video[1:], False)):
        first = last
        while video[first - 1]:
            first -= 1
        past = positions[:, 0, first : last + 1].max() + 1
        positions[:, :, last + 1 :] += past - positions[0, 0, last + 1]
    return positions


def sampling() -> dict[str, list]:
    """Frame numbers that each family's video processor chooses; null where it refuses."""
    out = {}
    for family in FAMILIES:
        video_processor, found = processors(family)[1], []
        for count, rate, fps, number in SAMPLED:
            known = VideoMetadata(count, rate, 64, 48, count / rate)
            try:
                indices = video_processor.sample_frames(known, num_frames=number, fps=fps)
                found.append(np.asarray(indices).astype(int).tolist())
            except (ValueError, TypeError, ZeroDivisionError):
                found.append(None)
        out[family] = found
    return out


def main() -> None:
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    with torch.no_grad():
        for family in FAMILIES:
            run(family)
    (OUT / "sampling.json").write_text(json.dumps({"sampled": SAMPLED, "families": sampling()}) + "\n")


if __name__ == "__main__":
    main()
