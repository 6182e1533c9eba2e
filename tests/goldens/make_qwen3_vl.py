"""Make the Qwen3-VL and Qwen3-VL-MoE goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_qwen3_vl.py`. It rewrites `qwen3_vl/` and
`qwen3_vl_moe/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
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

THETA, SECTIONS = 30.0, [3, 3, 2]  # a low base, so that every axis matters in a small image
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTIONS, "mrope_interleaved": True}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def write_release(family: str, architecture: str, text: dict) -> None:
    """`config_release.json` as the released checkpoints have it: `rope_theta` and `rope_scaling` in `text_config`."""
    scaling = {"mrope_interleaved": True, "mrope_section": SECTIONS, "rope_type": "default"}
    release = {
        "architectures": [architecture],
        "model_type": family,
        **TOP,
        "text_config": {
            "model_type": f"{family}_text",
            **text,
            "dtype": "float32",
            "rope_scaling": scaling,
            "rope_theta": THETA,
        },
        "vision_config": {"model_type": family, **VISION},
    }
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def make_family(family: str, config_class, model_class, text: dict, cases: dict) -> None:
    config = config_class(text_config={**text, "rope_parameters": ROPE}, vision_config=VISION, **TOP)
    model = build_model(family, config, model_class)
    write_release(family, model_class.__name__, text)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=256,
        max_pixels=4096,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(HERE / family)
    visual = model.model.visual
    vision = {
        "vision_blocks": visual.blocks,
        "vision_features": [visual.merger],
        "deepstack_features": visual.deepstack_merger_list,
    }
    recorder = LayerRecorder(model.model.language_model, vision, "k_norm")
    for case, sizes in cases.items():
        make_case(family, case, model, recorder, processor, sizes)
    if family == "qwen3_vl":
        make_video(model, recorder)


def add_deepstack(arrays: dict, input_ids: torch.Tensor) -> None:
    """`hidden` as it enters the next layer: the model adds deepstack features behind the hooked layers."""
    visual = np.isin(input_ids[0].numpy(), (IMAGE, VIDEO))
    for layer, features in enumerate(arrays.get("deepstack_features", ())):
        arrays["hidden"][layer][visual] += features


def make_case(family: str, case: str, model, recorder: LayerRecorder, processor, sizes: list) -> None:
    images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
    inputs: Any = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt") if images else {}
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]] if images else []
    input_ids = tokens_of([5, *[(count,) for count in counts], 4])
    positions = torch.arange(input_ids.shape[1])[None, None].expand(3, 1, -1)
    delta = torch.tensor(0)
    if images:
        kinds = (input_ids == IMAGE).int()
        positions, delta = model.model.get_rope_index(input_ids, kinds, inputs["image_grid_thw"])
    model.model.rope_deltas = None
    arrays, cache = prefill(model, recorder, input_ids, positions, **inputs)
    add_deepstack(arrays, input_ids)
    arrays |= {f"image.{index}": image for index, image in enumerate(images)}
    arrays |= {"rope_delta": np.int32(delta.item())}
    if images:
        arrays["vision_features"] = arrays["vision_features"][0]  # type: ignore[index]
        arrays["pixel_values"] = inputs["pixel_values"].numpy()
        arrays["image_grid_thw"] = inputs["image_grid_thw"].numpy().astype(np.int32)
    if case == "one_image":
        arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1] + int(delta), 3)
    save(family, case, arrays)


def make_video(model, recorder: LayerRecorder) -> None:
    """Two videos of two temporal patches each: each frame its own run of pads behind a text timestamp."""
    grids = torch.tensor([[2, 4, 4], [2, 2, 4]])
    count = int(grids.prod(-1).sum())
    pixels = draw_pixels("video", count, 3 * 2 * 4 * 4)
    parts = [4]
    for time, height, width in grids.tolist():
        for _ in range(time):
            parts += [2, (height * width // 4,)]
    input_ids = tokens_of([*parts, 5], pad=VIDEO)
    kinds = 2 * (input_ids == VIDEO).int()
    positions, delta = model.model.get_rope_index(input_ids, kinds, None, grids)
    model.model.rope_deltas = None
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grids}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    add_deepstack(arrays, input_ids)
    arrays["vision_features"] = arrays["vision_features"][0]
    arrays |= {"rope_delta": np.int32(delta.item()), "pixel_values": pixels.astype(np.float32)}
    arrays |= {"video_grid_thw": grids.numpy().astype(np.int32)}
    save("qwen3_vl", "video", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "head_dim": 16, "attention_bias": False}
    cases = {"text": [], "one_image": [(24, 40)], "two_images": [(24, 40), (40, 16)]}
    with torch.no_grad():
        make_family("qwen3_vl", Qwen3VLConfig, Qwen3VLForConditionalGeneration, text, cases)
        moe = {**text, **EXPERTS}
        make_family("qwen3_vl_moe", Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, moe, cases)


if __name__ == "__main__":
    main()
