"""Make the DeepSeek-VL-7B goldens (SAM beside SigLIP) with transformers (5.23) and torch. See README.md beside this
file.

Run it in an environment that has them: `python tests/goldens/make_deepseek_vl_hybrid.py`. It rewrites
`deepseek_vl_hybrid/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import torch
from PIL import Image
from transformers import (
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    LlamaConfig,
    SamVisionConfig,
    SiglipVisionConfig,
)
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

FAMILY = "deepseek_vl_hybrid"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
# Windows of 3 patches over 8: the last of each row is padded. Layers 1 and 3 see everything.
SAM = {
    "hidden_size": 32,
    "output_channels": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "mlp_dim": 48,
    "window_size": 3,
    "global_attn_indexes": [1, 3],
}
TOP = {"image_token_id": IMAGE, "tie_word_embeddings": False}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}


def write_release(text: dict) -> None:
    """`config_release.json` as the conversion script writes the 7B's: sizes of SAM's class named again, and more."""
    high = {**SAM, "model_type": "sam_vision_model", "mlp_ratio": 4.0, "scale": 16, "num_pos_feats": 128}
    release = {
        "architectures": ["DeepseekVLHybridForConditionalGeneration"],
        "model_type": FAMILY,
        **TOP,
        "text_config": {**text, "model_type": "llama", "rope_theta": 100.0, "rope_scaling": None},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "high_res_vision_config": {**high, "intermediate_size": 3072, "use_rel_pos": True, "use_abs_pos": True},
        "torch_dtype": "float32",
    }
    (HERE / FAMILY / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = DeepseekVLHybridConfig(
        vision_config=SiglipVisionConfig(**VISION),
        high_res_vision_config=SamVisionConfig(**SAM),
        text_config=LlamaConfig(**text, rope_parameters=rope),
        **TOP,
    )
    with torch.no_grad():
        model = build_model(FAMILY, config, DeepseekVLHybridForConditionalGeneration)
        write_release(text)
        halves = [0.5, 0.5, 0.5]
        processor = DeepseekVLHybridImageProcessorPil(
            size={"height": 16, "width": 16},
            high_res_size={"height": 32, "width": 32},
            min_size=4,
            image_mean=halves,
            image_std=halves,
            resample=2,
        )
        processor.save_pretrained(HERE / FAMILY)
        inner = model.model
        vision = {
            "vision_blocks": inner.vision_model.encoder.layers,
            "high_blocks": inner.high_res_vision_model.vision_encoder.layers,
            "vision_features": [inner.aligner],
        }
        cases = {}
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            inputs = {}
            if images:
                inputs = dict(processor(images=[Image.fromarray(image) for image in images], return_tensors="pt"))
            parts = [5, *[part for _ in images for part in ((16,), 2)], 3]
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            cases[case] = (tokens_of(parts, start=None, end=None), inputs, kept)
        run_cases(FAMILY, model, LayerRecorder(inner.language_model, vision, heads=4), cases)


if __name__ == "__main__":
    main()
