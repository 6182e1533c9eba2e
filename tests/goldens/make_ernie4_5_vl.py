"""Make the Ernie-4.5-VL goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_ernie4_5_vl.py`. It rewrites `ernie4_5_vl/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
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

FAMILY = "ernie4_5_vl"
THETA, SECTIONS = 30.0, [3, 3, 2]  # height, width, time; a low base, so that every axis matters in a small image
VIDEO_START, VIDEO_END = 305, 306
EXPERTS = {"moe_intermediate_size": [24, 16], "moe_k": 3, "moe_num_experts": 8, "moe_num_shared_experts": 2}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "hidden_act": "quick_gelu",
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_merge_size": 2,
    "rms_norm_eps": 1e-6,
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}
CASES = {"text": [], "one_image": [(24, 40)], "two_images": [(24, 40), (40, 16)]}


def write_release() -> None:
    """`config_release.json` as the authors' releases have it: flat, with lists of what both sets of experts have."""
    text = {key: value for key, value in TEXT.items() if key not in ("pad_token_id", "hidden_act")}
    release = {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_moe_vl",
        **text,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "rope_theta": THETA,
        "rope_3d": True,
        "freq_allocation": SECTIONS[-1],
        "head_dim": 16,
        "im_patch_id": IMAGE,
        **{name: token for name, token in TOP.items() if name != "image_token_id"},
        **EXPERTS,
        "moe_num_experts": [8, 8],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [2, 2],
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "moe_gate": "topk",
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_bias": False,
        "torch_dtype": "float32",
        "vision_config": {
            "model_type": "DFNRope_vision_transformer",
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 32,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 2,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
    }
    (HERE / FAMILY / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def kinds_of(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Token types as the processor makes them: placeholders alone for positions, start and end too for experts."""
    images = torch.isin(input_ids, torch.tensor([IMAGE, START, END])).int()
    videos = torch.isin(input_ids, torch.tensor([VIDEO, VIDEO_START, VIDEO_END])).int()
    return {"moe_mm_token_type_ids": images + 2 * videos}


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
    arrays, cache = prefill(model, recorder, input_ids, positions, **kinds_of(input_ids), **inputs)
    arrays |= {f"image.{index}": image for index, image in enumerate(images)}
    if images:
        arrays["vision_features"] = arrays["vision_features"][0]
        arrays["pixel_values"] = inputs["pixel_values"].numpy()
        arrays["image_grid_thw"] = inputs["image_grid_thw"].numpy().astype("int32")
    if case == "one_image":
        arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1] + int(delta), 3)
    save(FAMILY, case, arrays)


def make_video(model, recorder: LayerRecorder) -> None:
    """Six frames of one merged column, so that time is the largest extent; positions by the authors' rule.

    transformers lets the next text follow the height and width alone.
    """
    grid = torch.tensor([[6, 4, 2]])
    count = int(grid.prod())
    pixels = draw_pixels("video", count, 3 * 4 * 4)
    input_ids = tokens_of([4, (count // 8,), 5], VIDEO_START, VIDEO_END, VIDEO)
    positions, _ = model.model.get_rope_index(input_ids, 2 * (input_ids == VIDEO).int(), None, grid)
    after = 5 + count // 8
    own = positions.clone()
    positions[:, :, after:] += positions[:, :, :after].max() + 1 - positions[0, 0, after]
    model.model.rope_deltas = None
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grid, **kinds_of(input_ids)}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    arrays["vision_features"] = arrays["vision_features"][0]
    arrays |= {"pixel_values": pixels, "video_grid_thw": grid.numpy().astype("int32")}
    arrays["position_ids_hf5"] = own[:, 0].T.numpy().astype(np.int32)
    save(FAMILY, "video", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTIONS}
    text = {**TEXT, **EXPERTS, "tie_word_embeddings": True, "rope_parameters": rope}
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=VISION, **TOP, tie_word_embeddings=True)
    with torch.no_grad():
        model = build_model(FAMILY, config, Ernie4_5_VLMoeForConditionalGeneration)
        write_release()
        processor = Ernie4_5_VLMoeImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096}
        )
        processor.save_pretrained(HERE / FAMILY)
        recorder = LayerRecorder(model.model.language_model, {"vision_features": [model.model.resampler_model]})
        for case, sizes in CASES.items():
            make_case(case, model, recorder, processor, sizes)
        make_video(model, recorder)


if __name__ == "__main__":
    main()
