"""Make the DeepSeek-VL (1.3B's kind) goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_deepseek_vl.py`. It rewrites `deepseek_vl/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import torch
from PIL import Image
from transformers import DeepseekVLConfig, DeepseekVLForConditionalGeneration, LlamaConfig, SiglipVisionConfig
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
TOP = {"image_token_id": IMAGE, "tie_word_embeddings": False}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = DeepseekVLConfig(
        vision_config=SiglipVisionConfig(**VISION), text_config=LlamaConfig(**text, rope_parameters=rope), **TOP
    )
    with torch.no_grad():
        model = build_model("deepseek_vl", config, DeepseekVLForConditionalGeneration)
        release = {
            "architectures": ["DeepseekVLForConditionalGeneration"],
            "model_type": "deepseek_vl",
            **TOP,
            "text_config": {**text, "model_type": "llama", "rope_theta": 100.0, "rope_scaling": None},
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "torch_dtype": "float32",
        }
        (HERE / "deepseek_vl" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
        processor = DeepseekVLImageProcessorPil(size={"height": 16, "width": 16}, min_size=4)
        processor.save_pretrained(HERE / "deepseek_vl")
        inner = model.model
        vision = {"vision_blocks": inner.vision_model.encoder.layers, "vision_features": [inner.aligner]}
        cases = {}
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            inputs = {}
            if images:
                inputs = dict(processor(images=[Image.fromarray(image) for image in images], return_tensors="pt"))
            parts = [5, *[part for _ in images for part in ((16,), 2)], 3]
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            cases[case] = (tokens_of(parts, start=None, end=None), inputs, kept)
        run_cases("deepseek_vl", model, LayerRecorder(inner.language_model, vision, heads=4), cases)


if __name__ == "__main__":
    main()
