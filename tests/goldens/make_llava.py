"""Make the LLaVA-1.5 and LLaVA-NeXT goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_llava.py`. It rewrites `llava/` and `llava_next/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
    "hidden_act": "quick_gelu",
}
TOP = {"image_token_index": IMAGE, "projector_hidden_act": "gelu", "tie_word_embeddings": False}
SELECT = {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
SIZES = {"text": [], "one_image": [(15, 33)], "two_images": [(15, 33), (40, 27)]}


def write_release(family: str, architecture: str, text: dict, more: dict) -> None:
    """`config_release.json` as released checkpoints have it: `rope_theta` beside the sizes, no `rope_parameters`."""
    release = {
        "architectures": [architecture],
        "model_type": family,
        "ignore_index": -100,
        **TOP,
        **SELECT,
        **more,
        "text_config": text,
        "vision_config": {"model_type": "clip_vision_model", **VISION, "vocab_size": 320},
        "torch_dtype": "float32",
    }
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def record(model, heads: int) -> LayerRecorder:
    vision = {"vision_features": [model.model.multi_modal_projector]}
    if heads == 4:
        vision["vision_blocks"] = model.model.vision_tower.encoder.layers
    return LayerRecorder(model.model.language_model, vision, "k_proj" if heads == 4 else None, heads)


def make_cases(processor, counts_of) -> dict:
    cases = {}
    for case, sizes in SIZES.items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
        inputs = (
            dict(processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")) if images else {}
        )
        parts = [5, *[part for count in counts_of(inputs) for part in ((count,), 2)], 3] if images else [5, 4]
        kept = {f"image.{index}": image for index, image in enumerate(images)}
        cases[case] = (tokens_of(parts, start=None, end=None), inputs, kept)
    return cases


def next_counts(inputs) -> list[int]:
    """Tokens of each LLaVA-NeXT image, found by the class's own packing."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    counts = []
    for size in inputs["image_sizes"]:
        rows, columns = get_anyres_image_grid_shape(size, PINPOINTS, 16)
        grid = unpad_image(torch.zeros(1, 4 * rows, 4 * columns), size)
        counts.append(16 + grid.shape[1] * (grid.shape[2] + 1))
    return counts


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    text = {**TEXT, "num_key_value_heads": 4}
    with torch.no_grad():
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION),
            text_config=LlamaConfig(**text, **rope),
            **TOP,
            **SELECT,
            image_seq_length=16,
        )
        model = build_model("llava", config, LlavaForConditionalGeneration)
        write_release(
            "llava", "LlavaForConditionalGeneration", {**text, "model_type": "llama", "rope_theta": 100.0}, {}
        )
        processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        processor.save_pretrained(HERE / "llava")
        cases = make_cases(processor, lambda inputs: [16] * len(inputs["pixel_values"]))
        run_cases("llava", model, record(model, heads=4), cases)

        text = {**TEXT, "sliding_window": None}
        config = LlavaNextConfig(
            vision_config=CLIPVisionConfig(**VISION),
            text_config=MistralConfig(**text, **rope),
            **TOP,
            **SELECT,
            image_grid_pinpoints=PINPOINTS,
            use_image_newline_parameter=True,
        )
        model = build_model("llava_next", config, LlavaNextForConditionalGeneration)
        more = {"image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True}
        text = {**text, "model_type": "mistral", "rope_theta": 100.0}
        write_release("llava_next", "LlavaNextForConditionalGeneration", text, more)
        processor = LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS
        )
        processor.save_pretrained(HERE / "llava_next")
        run_cases("llava_next", model, record(model, heads=2), make_cases(processor, next_counts))


if __name__ == "__main__":
    main()
