"""Make the Gemma 3 goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_gemma3.py`. It rewrites `gemma3/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import torch
from PIL import Image
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from vlm_golden import END, HERE, IMAGE, START, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
# The window is smaller than an image of nine tokens.
LAYERS = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
TOP = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 9}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {name: value for name, value in (TEXT | LAYERS).items() if name != "hidden_act"}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    }
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**VISION), text_config=Gemma3TextConfig(**text, rope_parameters=ropes), **TOP
    )
    with torch.no_grad():
        model = build_model("gemma3", config, Gemma3ForConditionalGeneration)
        release = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            **TOP,
            "initializer_range": 0.02,
            "eos_token_id": [1, 106],
            "text_config": {
                **text,
                "model_type": "gemma3_text",
                "rope_theta": 2e3,
                "rope_local_base_freq": 1e2,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "cache_implementation": "hybrid",
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "torch_dtype": "float32",
        }
        (HERE / "gemma3" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
        halves = [0.5, 0.5, 0.5]
        processor = Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, image_mean=halves, image_std=halves)
        processor.save_pretrained(HERE / "gemma3")
        inner, cases = model.model, {}
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            # Layers that slide keep all of their keys too, so that every layer's can be compared.
            inputs, parts = {"past_key_values": DynamicCache()}, [5, 4]
            if images:
                out = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
                inputs["pixel_values"] = out["pixel_values"]
                parts = [5, *[part for _ in images for part in ((9,), 1)], 3]
            input_ids = tokens_of(parts)
            inputs["token_type_ids"] = (input_ids == IMAGE).int()
            cases[case] = (input_ids, inputs, kept)
        vision = {"vision_features": [inner.multi_modal_projector]}
        run_cases("gemma3", model, LayerRecorder(inner.language_model, vision, keys=None), cases)


if __name__ == "__main__":
    main()
