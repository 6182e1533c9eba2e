"""Make the goldens of LLaVA's image settings with transformers (5.23) and Pillow. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_clip_options.py`. It rewrites `clip_options.npz`:
per case the settings (JSON), the image, and what the processor makes of it.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from vlm_golden import draw_image

SIZES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
CASES = {
    "plain": ("CLIP", {}, (15, 33)),
    "no_resize": ("CLIP", {"do_resize": False}, (21, 33)),
    "no_resize_small": ("CLIP", {"do_resize": False}, (9, 33)),
    "no_crop": ("CLIP", {"do_center_crop": False}, (20, 20)),
    "exact": ("CLIP", {"size": {"height": 16, "width": 16}}, (15, 33)),
    "crop_of_more": ("CLIP", {"size": {"shortest_edge": 13}}, (15, 33)),
    "clip_pads": ("CLIP", {"do_pad": True}, (15, 33)),
    "llava_pads": ("Llava", {"do_pad": True}, (15, 34)),
    "llava_does_not": ("Llava", {}, (31, 15)),
}
CLASSES = {"CLIP": CLIPImageProcessorPil, "Llava": LlavaImageProcessorPil}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, (kind, options, shape) in CASES.items():
        settings, image = {**SIZES, **options}, draw_image(name, *shape)
        pixels = CLASSES[kind](**settings)(images=[Image.fromarray(image)], return_tensors="np")["pixel_values"]
        written = {**settings, "image_processor_type": f"{kind}ImageProcessor"}
        arrays |= {f"{name}.settings": np.array(json.dumps(written)), f"{name}.image": image}
        arrays[f"{name}.pixel_values"] = np.asarray(pixels, np.float32)
    np.savez_compressed(Path(__file__).parent / "clip_options.npz", **arrays)


if __name__ == "__main__":
    main()
