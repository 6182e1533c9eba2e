"""Make the GLM-4.1V and GLM-4.5V goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_glm4v.py`. It rewrites `glm4v/` and `glm4v_moe/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from make_chat import TURN_MARKS, pil, write_chat
from PIL import Image
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
from transformers.video_utils import VideoMetadata
from vlm_golden import (
    END,
    HERE,
    IMAGE,
    START,
    TEXT,
    VIDEO,
    LayerRecorder,
    build_model,
    decode,
    draw_image,
    draw_pixels,
    prefill,
    save,
    tokens_of,
)

THETA = 30.0  # a low base, so that every axis matters in a small image
VIDEO_START, VIDEO_END = 306, 307
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "image_size": 20,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "rms_norm_eps": 1e-5,
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "head_dim": 32,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
CASES = {"text": [], "one_image": [(24, 40)], "two_images": [(24, 40), (5, 30)]}


def make_family(family: str, config_class, model_class, text: dict, rope: dict, vision: dict, cases: dict) -> None:
    rope = {"rope_type": "default", "rope_theta": THETA, **rope}
    config = config_class(text_config={**text, "rope_parameters": rope}, vision_config=vision, **TOP)
    model = build_model(family, config, model_class)
    write_release(family, model_class.__name__, text, rope, vision)
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    # An image's area counts once for each of the two frames of a patch.
    processor = Glm4vImageProcessorPil(**settings, size={"shortest_edge": 1024, "longest_edge": 1600})
    processor.save_pretrained(HERE / family)
    features = {"vision_features": [model.model.visual.merger]}
    recorder = LayerRecorder(model.model.language_model, features)
    for case, sizes in cases.items():
        make_case(family, case, model, recorder, processor, sizes)
    if family == "glm4v":
        make_video(model, recorder)


def write_release(family: str, architecture: str, text: dict, rope: dict, vision: dict) -> None:
    """`config_release.json` as released: `rope_scaling` beside `rope_theta`; GLM-4.1V's text fields are flat."""
    fields = {**text, "torch_dtype": "float32", "rope_theta": THETA}
    fields |= {"partial_rotary_factor": rope["partial_rotary_factor"]}
    fields |= {"rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]}}
    if family == "glm4v":
        fields |= {"attention_bias": True}
    else:
        more = {"use_qk_norm": False} if family == "glm4v_moe" else {}
        fields = {"text_config": {"model_type": f"{family}_text", **fields, **more, "image_token_id": IMAGE}}
    release = {"architectures": [architecture], "model_type": family, **TOP, **fields, "vision_config": vision}
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def make_case(family: str, case: str, model, recorder: LayerRecorder, processor, sizes: list) -> None:
    images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
    inputs: Any = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt") if images else {}
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]] if images else []
    input_ids = tokens_of([5, *[(count,) for count in counts], 4])
    positions, delta = torch.arange(input_ids.shape[1])[None, None].expand(3, 1, -1), torch.tensor(0)
    if images:
        kinds = (input_ids == IMAGE).int()
        positions, delta = model.model.get_rope_index(input_ids, kinds, inputs["image_grid_thw"])
    model.model.rope_deltas = None
    arrays, cache = prefill(model, recorder, input_ids, positions, **inputs)
    arrays |= {f"image.{index}": image for index, image in enumerate(images)}
    if images:
        arrays["vision_features"] = arrays["vision_features"][0]
        arrays["pixel_values"] = inputs["pixel_values"].numpy()
        arrays["image_grid_thw"] = inputs["image_grid_thw"].numpy().astype(np.int32)
    if case == "one_image":
        arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1] + int(delta), 3)
    save(family, case, arrays)


def make_chat() -> None:
    """A conversation with two images, as `make_chat.py` makes them."""
    marks = {"<|image|>": IMAGE, "<|video|>": VIDEO, "<|begin_of_image|>": START, "<|end_of_image|>": END}
    marks |= {"<|begin_of_video|>": VIDEO_START, "<|end_of_video|>": VIDEO_END, **TURN_MARKS}
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    write_chat("glm4v", lambda tokenizer, template: Glm4vProcessor(
        pil(Glm4vImageProcessorPil, "glm4v"), tokenizer, Glm4vVideoProcessor(), chat_template=template
    ), image, marks)  # fmt: skip


def make_sizes() -> None:
    """What images are resized to by the class's own settings, [n, 2] height and width before and after."""
    sizes = [(height, width) for height in (9, 27, 100, 480, 1365, 4000) for width in (30, 333, 1080, 5000)]
    sizes = [size for size in sizes if max(size) <= 200 * min(size)]
    limits = {"min_pixels": 112 * 112, "max_pixels": 28 * 28 * 15000}
    resized = [smart_resize(2, *size, temporal_factor=2, factor=28, **limits) for size in sizes]
    np.savez_compressed(HERE / "glm4v" / "sizes.npz", sizes=np.int32(sizes), resized=np.int32(resized))


def make_frames() -> None:
    """What the two video processors make of frames: their numbers, pixels, and the prompt's text."""
    metadata = lambda count, rate: VideoMetadata(
        total_num_frames=count, fps=rate, duration=count / rate, frames_indices=list(range(count))
    )
    streams = [(1, 25.0), (5, 1.0), (90, 30.0), (300, 29.97), (1000, 24.0), (4000, 12.5), (9000, 25.0), (400, 0.1)]
    found = {"streams": np.array(streams)}
    for name, kind in (("old", Glm4vVideoProcessor), ("new", Glm46VVideoProcessor)):
        numbers = [kind().sample_frames(metadata(*stream), fps=None) for stream in streams]
        found |= {f"{name}.{index}": np.asarray(row, np.int32) for index, row in enumerate(numbers)}
    rates = [Glm4vVideoProcessor().sample_frames(metadata(*stream), fps=0.7) for stream in streams]
    found |= {f"rate.{index}": np.asarray(row, np.int32) for index, row in enumerate(rates)}

    frames = np.stack([draw_image(f"frame {number}", 24, 40) for number in range(5)])
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor = Glm4vVideoProcessor(**settings, size={"shortest_edge": 1024, "longest_edge": 1600})
    out = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    found |= {"frames": frames, "pixel_values": out["pixel_values_videos"].numpy()}
    found |= {"grid": out["video_grid_thw"].numpy().astype(np.int32)}
    shown = VideoMetadata(total_num_frames=5, fps=1.5, duration=5 / 1.5, frames_indices=list(range(5)))
    inputs = {"video_grid_thw": out["video_grid_thw"], "video_metadata": [shown]}
    for name, kind in (("old", Glm4vProcessor), ("new", Glm46VProcessor)):
        fake = SimpleNamespace(video_processor=processor, image_token="<|image|>")
        fake.replace_frame_token_id = lambda seconds, num_image_tokens, kind=kind, fake=fake: (
            kind.replace_frame_token_id(fake, seconds, num_image_tokens=num_image_tokens)
        )
        found[f"text.{name}"] = np.array(kind.replace_video_token(fake, inputs, 0))
    np.savez_compressed(HERE / "glm4v" / "frames.npz", **found)


def make_video(model, recorder: LayerRecorder) -> None:
    """Two videos of two temporal patches each: each frame an image with its own ends, and a text timestamp behind."""
    grids = torch.tensor([[2, 4, 4], [2, 2, 4]])
    count = int(grids.prod(-1).sum())
    pixels = draw_pixels("video", count, 3 * 2 * 4 * 4)
    plain = tokens_of([12])[0].tolist()
    ids, kinds = plain[:4], [0] * 4
    for time, height, width in grids.tolist():
        pads = height * width // 4
        ids, kinds = [*ids, VIDEO_START], [*kinds, 0]
        for _ in range(time):
            ids += [START, *[IMAGE] * pads, END, plain[len(ids) % 12]]
            kinds += [0, *[2] * pads, 0, 0]
        ids, kinds = [*ids, VIDEO_END], [*kinds, 0]
    input_ids, kinds = torch.tensor([[*ids, *plain[7:]]]), torch.tensor([[*kinds, *[0] * 5]])
    positions, _ = model.model.get_rope_index(input_ids, kinds, None, grids)
    model.model.rope_deltas = None
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grids}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    arrays["vision_features"] = arrays["vision_features"][0]
    arrays |= {"pixel_values": pixels, "video_grid_thw": grids.numpy().astype(np.int32)}
    save("glm4v", "video", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (HERE / "glm4v").mkdir(exist_ok=True)
    half = {"partial_rotary_factor": 0.5}
    text = {key: value for key, value in TEXT.items() if key != "tie_word_embeddings"}
    make_sizes()
    make_frames()
    with torch.no_grad():
        rope = {**half, "mrope_section": [1, 1, 2]}
        make_family("glm4v", Glm4vConfig, Glm4vForConditionalGeneration, text, rope, VISION, CASES)
        rope, biased = {**half, "mrope_section": [2, 3, 3]}, {**VISION, "attention_bias": True}
        moe = {**text, **EXPERTS}
        make_family("glm4v_moe", Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, moe, rope, biased, CASES)
    make_chat()


if __name__ == "__main__":
    main()
