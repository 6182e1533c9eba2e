"""Make the Kimi-VL goldens with transformers' Kimi_K25 (5.23) and torch: on images the two are the same function.

Run it in an environment that has them: `python tests/goldens/make_kimi_vl.py`. It rewrites `kimi_vl/`: what
transformers writes (`config.json`, `shapes.json`) and the same model under Kimi-VL's released names
(`config_release.json`).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import numpy as np
import torch
from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from vlm_golden import (
    END,
    HERE,
    IMAGE,
    START,
    TEXT,
    VIDEO,
    LayerRecorder,
    build_model,
    draw_pixels,
    run_cases,
    tokens_of,
)

LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_interleave": True,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
VISION = {
    "patch_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "hidden_act": "gelu_pytorch_tanh",
}
GRIDS = {"text": [], "one_image": [(1, 4, 6)], "two_images": [(1, 4, 6), (1, 8, 2)]}


def write_release(text: dict) -> None:
    """`config_release.json` as Kimi-VL-A3B has it."""
    release = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "ignore_index": -100,
        "media_placeholder_token_id": IMAGE,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": {
            **{name: value for name, value in text.items() if name != "rope_interleave"},
            "model_type": "deepseek_v3",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_theta": 100.0,
            "rope_scaling": None,
            "torch_dtype": "float32",
        },
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "merge_kernel_size": [2, 2],
            "init_pos_emb_height": 5,
            "init_pos_emb_width": 5,
            "torch_dtype": "float32",
        },
    }
    (HERE / "kimi_vl" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, **LATENT, **EXPERTS}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = Kimi_K25Config(
        text_config=DeepseekV3Config(**text, rope_parameters=rope),
        vision_config=Kimi_K25VisionConfig(**VISION, pos_emb_height=5, pos_emb_width=5, merge_kernel_size=(2, 2)),
        projection_hidden_size=32,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        model = build_model("kimi_vl", config, Kimi_K25ForConditionalGeneration, save_original_format=False)
        write_release(text)
        settings = {"patch_size": 4, "merge_kernel_size": [2, 2], "in_token_limit": 64, "pad_input": True}
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "KimiVLImageProcessor"}
        (HERE / "kimi_vl" / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        inner = model.model
        vision = {"vision_blocks": inner.vision_tower.layers, "vision_features": [inner.mm_projector]}
        cases = {}
        for case, grids in GRIDS.items():
            count = sum(int(np.prod(grid)) for grid in grids)
            inputs = {}
            if grids:
                inputs = {"pixel_values": torch.tensor(draw_pixels(case, count, 3, 4, 4))}
                inputs |= {"image_grid_thw": torch.tensor(grids)}
            cases[case] = (tokens_of([5, *[(int(np.prod(grid)) // 4,) for grid in grids], 4]), inputs, {})
        run_cases("kimi_vl", model, LayerRecorder(inner.language_model, vision, None), cases, ("ckv", "kpe"))


if __name__ == "__main__":
    main()
