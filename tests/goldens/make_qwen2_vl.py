"""Make the Qwen2-VL goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_qwen2_vl.py`. It rewrites `qwen2_vl/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
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

THETA, SECTIONS = 30.0, [2, 3, 3]  # a low base, so that every axis matters in a small image
VISION = {
    "depth": 3,
    "embed_dim": 32,
    "hidden_size": 64,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
CASES = {"text": [], "one_image": [(24, 40)], "two_images": [(24, 40), (40, 16)]}


def write_release() -> None:
    """`config_release.json` as the released checkpoints have it: flat, `in_chans` and `spatial_patch_size`."""
    release = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **TEXT,
        **TOP,
        "vision_token_id": 305,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 3,
        "rope_theta": THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": SECTIONS},
        "torch_dtype": "float32",
        "vision_config": {key: value for key, value in VISION.items() if key != "in_channels"}
        | {"in_chans": 3, "spatial_patch_size": 4},
    }
    (HERE / "qwen2_vl" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def make_case(case: str, model, recorder: LayerRecorder, processor, sizes: list) -> None:
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
        arrays["image_grid_thw"] = inputs["image_grid_thw"].numpy().astype("int32")
    if case == "one_image":
        arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1] + int(delta), 3)
    save("qwen2_vl", case, arrays)


def make_video(model, recorder: LayerRecorder) -> None:
    """Five temporal patches of one merged column, so that time is the largest extent; positions by the authors' rule.

    transformers from 5.3 on lets the next text follow the height and width alone.
    """
    grid = torch.tensor([[5, 4, 2]])
    count = int(grid.prod())
    pixels = draw_pixels("video", count, 3 * 2 * 4 * 4)
    input_ids = tokens_of([4, (count // 4,), 5], pad=VIDEO)
    positions, _ = model.model.get_rope_index(input_ids, 2 * (input_ids == VIDEO).int(), None, grid)
    after = 5 + count // 4
    positions[:, :, after:] += positions[:, :, :after].max() + 1 - positions[0, 0, after]
    model.model.rope_deltas = None
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grid}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    arrays["vision_features"] = arrays["vision_features"][0]
    arrays |= {"pixel_values": pixels, "video_grid_thw": grid.numpy().astype("int32")}
    save("qwen2_vl", "video", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTIONS}
    config = Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=VISION, **TOP)
    with torch.no_grad():
        model = build_model("qwen2_vl", config, Qwen2VLForConditionalGeneration)
        write_release()
        settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        processor = Qwen2VLImageProcessorPil(**settings, min_pixels=256, max_pixels=4096)
        processor.save_pretrained(HERE / "qwen2_vl")
        recorder = LayerRecorder(model.model.language_model, {"vision_features": [model.model.visual.merger]})
        for case, sizes in CASES.items():
            make_case(case, model, recorder, processor, sizes)
        make_video(model, recorder)


if __name__ == "__main__":
    main()
