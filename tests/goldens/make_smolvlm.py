"""Make the SmolVLM goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_smolvlm.py`. It rewrites `smolvlm/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import numpy as np
import torch
from PIL import Image
from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, draw_image, run_cases, tokens_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TOP = {"image_token_id": IMAGE, "scale_factor": 3, "tie_word_embeddings": False}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}


def buckets() -> dict[str, np.ndarray]:
    """Position ids of full and partial grids at the released sides, as SmolVLMVisionEmbeddings buckets them."""
    out = {}
    for side, height, width in ((27, 27, 27), (27, 27, 20), (32, 32, 32), (32, 17, 32), (6, 6, 6), (6, 5, 3)):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        place = lambda count, edges=boundaries: torch.bucketize(
            torch.clamp(torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count)), max=1 - 1e-6),
            edges,
            right=True,
        )
        ids = place(height)[:, None] * side + place(width)[None]
        out[f"{side}.{height}.{width}"] = ids.reshape(-1).numpy().astype(np.int32)
    return out


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = SmolVLMConfig(
        vision_config=SmolVLMVisionConfig(**VISION), text_config=LlamaConfig(**text, rope_parameters=rope), **TOP
    )
    with torch.no_grad():
        model = build_model("smolvlm", config, SmolVLMForConditionalGeneration)
        release = {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            **TOP,
            "text_config": {**text, "model_type": "llama", "rope_theta": 100.0, "rope_scaling": None},
            "vision_config": {"model_type": "smolvlm_vision", **VISION, "max_image_size": {"longest_edge": 24}},
            "torch_dtype": "float32",
        }
        (HERE / "smolvlm" / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
        processor = SmolVLMImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 24})
        processor.save_pretrained(HERE / "smolvlm")
        inner = model.model
        vision = {"vision_features": [inner.connector]}
        cases = {}
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            inputs, parts = {}, [5, 4]
            if images:
                pictures = [Image.fromarray(image) for image in images]
                out = processor(images=[pictures], return_tensors="pt", return_row_col_info=True)
                inputs = {name: out[name] for name in ("pixel_values", "pixel_attention_mask")}
                kept |= {"tile_rows": np.array(out["rows"][0]), "tile_columns": np.array(out["cols"][0])}
                parts = [5, *[part for _ in range(out["pixel_values"].shape[1]) for part in ((4,), 1)], 3]
            cases[case] = (tokens_of(parts), inputs, kept)
        run_cases("smolvlm", model, LayerRecorder(inner.text_model, vision, heads=4), cases)
    np.savez_compressed(HERE / "smolvlm" / "buckets.npz", **buckets())


if __name__ == "__main__":
    main()
