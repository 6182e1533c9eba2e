"""Make the DeepSeek-OCR-2 goldens (SAM under a Qwen2 encoder with queries) with transformers (5.23) and torch. See
README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_deepseek_ocr2.py`. It rewrites `deepseek_ocr2/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json

import numpy as np
import torch
from PIL import Image
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, decode, draw_image, line, prefill, tokens_of

FAMILY = "deepseek_ocr2"
# Patches of one pixel and a compression of 4: the query counts that the class fixes (144 and 256) are of images of 48
# and of 64 pixels. Positions are for 64, so those of tiles are interpolated. Windows of 14 do not divide either.
SAM = {
    "hidden_size": 32,
    "output_channels": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 1,
    "mlp_dim": 48,
    "window_size": 14,
    "global_attn_indexes": [1],
    "downsample_channels": [12, 24],
}
ENCODER = {
    "vocab_size": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
TOP = {"image_token_id": IMAGE, "tie_word_embeddings": False}
SIZES = {"text": [], "one_image": [(40, 70)], "two_images": [(20, 41), (60, 50)]}


def write_release(text: dict) -> None:
    """`config_release.json` with ropes as released files of version 4 have them, and keys that say nothing."""
    release = {
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "model_type": FAMILY,
        **TOP,
        "text_config": {**text, "model_type": "deepseek_ocr2_text", "rope_theta": 100.0, "rope_scaling": None},
        "vision_config": {
            "model_type": "deepseek_ocr2_vision",
            "sam_config": {**SAM, "model_type": "deepseek_ocr2_sam_vision_model", "mlp_ratio": 4.0, "scale": 16},
            "encoder_config": {**ENCODER, "model_type": "deepseek_ocr2_encoder", "rope_theta": 1e6},
        },
        "torch_dtype": "float32",
    }
    (HERE / FAMILY / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def save_rows(family: str, case: str, arrays: dict, keep: np.ndarray) -> None:
    """Writes a case: of each token-wise array the tokens `keep`, of logits three (`rows`)."""
    length = len(arrays["input_ids"])
    rows = np.array([0, length // 2, length - 1], np.int32)
    out = arrays | {"logits": arrays["logits"][rows], "rows": rows, "embedded": keep}
    out["inputs_embeds"] = arrays["inputs_embeds"][keep]
    for name in ("hidden", "k", "v", "ckv", "kpe", "k_phase_free"):
        if name in arrays:
            out[name] = arrays[name][:, rows]
    np.savez_compressed(HERE / family / f"{case}.npz", **out)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "num_key_value_heads": 4, **EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = DeepseekOcr2Config(
        vision_config={
            "sam_config": SAM,
            "encoder_config": {**ENCODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        },
        text_config={**text, "rope_parameters": rope},
        **TOP,
    )
    with torch.no_grad():
        model = build_model(FAMILY, config, DeepseekOcr2ForConditionalGeneration, save_original_format=False)
        write_release(text)
        processor = DeepseekOcr2ImageProcessorPil(size={"height": 64, "width": 64}, tile_size=48, max_patches=3)
        processor.save_pretrained(HERE / FAMILY)
        recorder = LayerRecorder(model.model.language_model, {}, heads=4)
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            inputs, counts = {}, []
            if images:
                inputs = dict(processor(images=[Image.fromarray(image) for image in images], return_tensors="pt"))
                counts = [256 + 144 * int(tiles) + 1 for tiles in inputs["num_local_patches"]]
            parts = [5, *[part for count in counts for part in ((count,), 2)], 3]
            input_ids = tokens_of(parts, start=None, end=None)
            arrays, cache = prefill(model, recorder, input_ids, line(input_ids.shape[1]), **inputs)
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            arrays |= {name: np.asarray(value) for name, value in {**inputs, **kept}.items()}
            arrays = {n: v.astype(np.int32) if v.dtype == np.int64 else v for n, v in arrays.items()}
            if case == "one_image":
                arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1], 1)
            length = input_ids.shape[1]
            edges = np.flatnonzero(np.diff(input_ids[0].numpy() == IMAGE))
            keep = np.unique(np.concatenate([np.arange(0, length, 9), edges, edges + 1, [length - 1]])).astype(np.int32)
            save_rows(FAMILY, case, arrays, keep)


if __name__ == "__main__":
    main()
