"""Make the goldens of Qwen3.5, dense and with experts (whole, and text alone), and of Qwen3-Next with transformers
(5.24) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_qwen3_5.py`. It rewrites `qwen3_5/`, `qwen3_5_moe/`,
`qwen3_5_text/`, `qwen3_5_moe_text/` and `qwen3_next/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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
    draw_image,
    draw_pixels,
    tokens_of,
)

SECTIONS = [2, 1, 1]
ROPE = {
    "rope_type": "default",
    "rope_theta": 30.0,  # a low base, so that every axis matters in a small image
    "mrope_section": SECTIONS,
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": KINDS,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
LONG = 150  # the rule goes by blocks of 64 tokens


def release_text(text: dict) -> dict:
    """The text part of a released `config.json`."""
    return {
        **text,
        "attn_output_gate": True,
        "dtype": "float32",
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rope_parameters": ROPE,
    }


def write_release(family: str, architecture: str, text: dict) -> None:
    """`config_release.json` as the released checkpoints have it."""
    release = {
        "architectures": [architecture],
        "model_type": family,
        "language_model_only": False,
        **TOP,
        "text_config": {"model_type": f"{family}_text", **release_text(text)},
        "vision_config": {"model_type": family, "deepstack_visual_indexes": [], **VISION},
    }
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def prefill(model, recorder, input_ids: torch.Tensor, position_ids: torch.Tensor, **extra) -> tuple[dict, Any]:
    """One forward; its arrays, and the cache."""
    recorder.values.clear()
    out = model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **extra)
    cache = out.past_key_values if "past_key_values" in out else out.cache
    arrays = recorder.take()
    arrays |= {"logits": out.logits[0].numpy(), "input_ids": input_ids[0].numpy().astype(np.int32)}
    ids = position_ids[:, 0].T if position_ids.ndim == 3 else position_ids[0]
    arrays["position_ids"] = ids.numpy().astype(np.int32)

    kinds = list(zip(cache.layers, model.config.get_text_config().layer_types, strict=True))
    full = [layer for layer, kind in kinds if kind == "full_attention"]
    linear = [layer for layer, kind in kinds if kind == "linear_attention"]
    arrays["k"] = np.stack([layer.keys[0].transpose(0, 1).numpy() for layer in full])
    arrays["v"] = np.stack([layer.values[0].transpose(0, 1).numpy() for layer in full])
    states = [layer.recurrent_states[0][0].transpose(0, 1) for layer in linear]
    tails = [layer.conv_states[0][0, :, 1:].T[:, None] for layer in linear]
    arrays["state"] = np.stack([state.numpy().copy() for state in states])
    arrays["tail"] = np.stack([tail.numpy().copy() for tail in tails])
    return arrays, cache


def decode(model, cache, logits: np.ndarray, first: int, axes: int, steps: int = 4) -> dict[str, np.ndarray]:
    tokens, positions, rows = [], [], []
    token = int(logits[-1].argmax())
    for step in range(steps):
        shape = (3, 1, 1) if axes == 3 else (1, 1)
        place = torch.full(shape, first + step)
        out = model(input_ids=torch.tensor([[token]]), position_ids=place, cache=cache, use_cache=True)
        tokens.append(token)
        positions.append(first + step)
        rows.append(out.logits[0, -1].numpy())
        token = int(rows[-1].argmax())
    numbers = {"decode_tokens": np.array(tokens, np.int32), "decode_positions": np.array(positions, np.int32)}
    return numbers | {"decode_logits": np.stack(rows)}


def save(family: str, case: str, arrays: dict[str, np.ndarray]) -> None:
    """Write a case: of all but the cache's parts and what the forward is given three rows of tokens."""
    length = len(arrays["input_ids"])
    rows = np.array([0, length // 2, length - 1], np.int32)
    for name in ("hidden", "k", "v", "k_phase_free"):
        arrays[name] = arrays[name][:, rows]
    for name in ("logits", "inputs_embeds"):
        arrays[name] = arrays[name][rows]
    np.savez_compressed(HERE / family / f"{case}.npz", **arrays, rows=rows, embedded=rows)


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
    vision = {"vision_blocks": visual.blocks, "vision_features": [visual.merger]}
    recorder = LayerRecorder(model.model.language_model, vision, "k_norm")
    for case, sizes in cases.items():
        make_case(family, case, model, recorder, processor, sizes)
    if family == "qwen3_5":
        make_video(model, recorder)


def make_case(family: str, case: str, model, recorder: LayerRecorder, processor, sizes: list) -> None:
    images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
    inputs: Any = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt") if images else {}
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]] if images else []
    parts = [5, *[(count,) for count in counts], 4] if images else [LONG]
    input_ids = tokens_of(parts)
    positions = torch.arange(input_ids.shape[1])[None, None].expand(3, 1, -1)
    delta = torch.tensor(0)
    if images:
        given = {"input_ids": input_ids, "mm_token_type_ids": (input_ids == IMAGE).int()}
        positions, delta = model.model.get_rope_index(**given, image_grid_thw=inputs["image_grid_thw"])
    model.model.rope_deltas = None
    arrays, cache = prefill(model, recorder, input_ids, positions, **inputs)
    arrays |= {f"image.{index}": image for index, image in enumerate(images)}
    arrays |= {"rope_delta": np.int32(delta.item())}
    if images:
        arrays["vision_features"] = arrays["vision_features"][0]
        arrays["pixel_values"] = inputs["pixel_values"].numpy()
        arrays["image_grid_thw"] = inputs["image_grid_thw"].numpy().astype(np.int32)
    if case != "one_image":
        arrays.pop("vision_blocks", None)
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
    positions, delta = model.model.get_rope_index(
        input_ids=input_ids, mm_token_type_ids=kinds, video_grid_thw=grids.clone()
    )
    model.model.rope_deltas = None
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grids}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    del arrays["vision_blocks"], arrays["vision_features"]
    arrays |= {"rope_delta": np.int32(delta.item()), "pixel_values": pixels.astype(np.float32)}
    arrays |= {"video_grid_thw": grids.numpy().astype(np.int32)}
    save("qwen3_5", "video", arrays)


def make_next(text: dict) -> None:
    """Qwen3-Next: a text model, its projections fused key head by key head."""
    rope = {name: value for name, value in ROPE.items() if "mrope" not in name}
    config = Qwen3NextConfig(**text, **EXPERTS, norm_topk_prob=True, rope_parameters=rope)
    model = build_model("qwen3_next", config, Qwen3NextForCausalLM)
    release = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **text,
        **EXPERTS,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 30.0,
        "torch_dtype": "float32",
    }
    (HERE / "qwen3_next" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
    save_text("qwen3_next", model)


def make_text(family: str, config_class, model_class, text: dict) -> None:
    """Qwen3.5 without a tower: the released text part is the whole `config.json`."""
    config = config_class(**text, rope_parameters=ROPE)
    model = build_model(family, config, model_class)
    release = {"architectures": [model_class.__name__], "model_type": family, **release_text(text)}
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
    save_text(family, model)


def save_text(family: str, model) -> None:
    """The one case of a text model."""
    recorder = LayerRecorder(model.model, {}, "k_norm")
    input_ids = tokens_of([LONG])
    arrays, cache = prefill(model, recorder, input_ids, torch.arange(LONG)[None])
    arrays |= decode(model, cache, arrays["logits"], LONG, 1)
    save(family, "text", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32, **LINEAR}
    text |= {"vocab_size": 306}
    cases = {"text": [], "one_image": [(24, 40)], "two_images": [(24, 40), (40, 16)]}
    with torch.no_grad():
        make_family("qwen3_5", Qwen3_5Config, Qwen3_5ForConditionalGeneration, text, cases)
        moe = {name: value for name, value in text.items() if name != "intermediate_size"} | EXPERTS
        few = {case: cases[case] for case in ("text", "one_image")}
        make_family("qwen3_5_moe", Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, moe, few)
        make_text("qwen3_5_text", Qwen3_5TextConfig, Qwen3_5ForCausalLM, text)
        make_text("qwen3_5_moe_text", Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, moe)
        make_next({**text, "num_key_value_heads": 2})


if __name__ == "__main__":
    main()
