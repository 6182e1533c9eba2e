"""Make the InternVL goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_internvl.py`. It rewrites `internvl/` and
`internvl_6b/` (InternViT-6B's kind of tower before Llama).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import torch
from PIL import Image
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    Qwen2Config,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [16, 16],
    "patch_size": [4, 4],
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "use_qk_norm": False,
}
SIX = {**VISION, "num_hidden_layers": 2, "attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True}
FAMILIES = {"internvl": (VISION, Qwen2Config), "internvl_6b": (SIX, LlamaConfig)}
TOP = {
    "image_token_id": IMAGE,
    "image_seq_length": 4,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}


def write_release(family: str, vision: dict, kind: str) -> None:
    """`config_release.json` as InternVL3's -hf checkpoints have it: `rope_theta` and a dynamic `rope_scaling`."""
    scaling = {"factor": 2.0, "rope_type": "dynamic"}
    release = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        **{name: value for name, value in TOP.items() if name != "tie_word_embeddings"},
        "text_config": {**TEXT, "model_type": kind, "rope_theta": 100.0, "rope_scaling": scaling},
        "vision_config": {"model_type": "internvl_vision", **vision},
        "torch_dtype": "float32",
    }
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def make(family: str) -> None:
    vision, text_class = FAMILIES[family]
    text = text_class(**TEXT, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    config = InternVLConfig(vision_config=InternVLVisionConfig(**vision), text_config=text, **TOP)
    model = build_model(family, config, InternVLForConditionalGeneration)
    write_release(family, vision, text.model_type)
    processor = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor.save_pretrained(HERE / family)
    inner = model.model
    modules = {"vision_blocks": inner.vision_tower.encoder.layer, "vision_features": [inner.multi_modal_projector]}
    cases = {}
    for case, sizes in SIZES.items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
        kept = {f"image.{index}": image for index, image in enumerate(images)}
        inputs, parts = {}, [5, 4]
        if images:
            out = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
            inputs, kept = {"pixel_values": out["pixel_values"]}, kept | {"num_patches": out["num_patches"]}
            parts = [5, *[(4 * int(count),) for count in out["num_patches"]], 4]
        cases[case] = (tokens_of(parts), inputs, kept)
    run_cases(family, model, LayerRecorder(inner.language_model, modules), cases)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for family in FAMILIES:
            make(family)


if __name__ == "__main__":
    main()
