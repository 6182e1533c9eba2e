"""Make the Mistral Small 3.1 and Pixtral-12B goldens with transformers (5.23) and torch. See README.md.

Run it in an environment that has them: `python tests/goldens/make_mistral3.py`. It rewrites `mistral3/` and `pixtral/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
from typing import Any

import numpy as np
import torch
from make_chat import TURN_MARKS, pil, write_chat
from PIL import Image
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.pixtral.processing_pixtral import PixtralProcessor
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, build_model, decode, draw_image, line, prefill, save, tokens_of

PATCH, BREAK, END = 4, 12, 13
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 40,
    "patch_size": PATCH,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
FORMS = {"mistral3": (40, 2, "silu"), "pixtral": (24, 1, "gelu")}
"""By family: longest edge, patches per side that become a token, activation of the tower."""
CASES = {"text": [], "one_image": [(24, 60)], "two_images": [(21, 38), (33, 10)]}


def write_release(family: str, architecture: str, text: dict, top: dict) -> None:
    """`config_release.json` as released: `rope_theta` in both parts."""
    vision = {key: value for key, value in VISION.items() if key != "rope_parameters"}
    vision |= {"hidden_act": FORMS[family][2]}
    release = {
        "architectures": [architecture],
        "model_type": "mistral3" if family == "mistral3" else "llava",
        "image_token_index": IMAGE,
        **top,
        "torch_dtype": "float32",
        "text_config": {"model_type": "mistral", **text, "rope_theta": 1e6, "is_composition": True},
        "vision_config": {**vision, "rope_theta": 100.0},
    }
    release["text_config"].pop("rope_parameters")
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def cut(pixels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Patches [P, 3, p, p] in raster order of images that the processor padded to one size."""
    found = []
    for image, (height, width) in zip(pixels, sizes, strict=True):
        cells = image[:, :height, :width].reshape(3, height // PATCH, PATCH, width // PATCH, PATCH)
        found.append(cells.transpose(1, 3, 0, 2, 4).reshape(-1, 3, PATCH, PATCH))
    return np.concatenate(found)


def ids_of(counts: list[tuple[int, int]]) -> torch.Tensor:
    """Five text tokens, images with a token behind each row, four text tokens."""
    text = tokens_of([9])[0].tolist()
    ids = text[:5]
    for rows, columns in counts:
        ids += ([IMAGE] * columns + [BREAK]) * rows
        ids[-1] = END
    return torch.tensor([[*ids, *text[5:]]])


def make_case(family: str, case: str, model, recorder: LayerRecorder, sizes: list) -> None:
    edge, merge, _ = FORMS[family]
    images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
    inputs: dict[str, Any] = {}
    if images:
        # PixtralProcessor sets the patch size to what a token shows.
        side = PATCH * merge
        processor = PixtralImageProcessorPil(size={"longest_edge": edge}, patch_size={"height": side, "width": side})
        inputs = dict(processor(images=[Image.fromarray(image) for image in images], return_tensors="pt"))
    counts = [(int(h) // PATCH // merge, int(w) // PATCH // merge) for h, w in inputs.get("image_sizes", [])]
    input_ids = ids_of(counts)
    arrays, cache = prefill(model, recorder, input_ids, line(input_ids.shape[1]), **inputs)
    arrays |= {f"image.{index}": image for index, image in enumerate(images)}
    if images:
        arrays["image_sizes"] = np.asarray(inputs["image_sizes"], np.int32)
        arrays["pixel_values"] = cut(inputs["pixel_values"].numpy(), arrays["image_sizes"])
    if case == "one_image":
        arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1], 1)
    save(family, case, arrays)


def make_family(family: str, config, model_class, text: dict, top: dict) -> None:
    model = build_model(family, config, model_class)
    write_release(family, model_class.__name__, text, top)
    PixtralImageProcessorPil(size={"longest_edge": FORMS[family][0]}, patch_size=PATCH).save_pretrained(HERE / family)
    recorder = LayerRecorder(model.model.language_model, {"vision_features": [model.model.multi_modal_projector]})
    for case, sizes in CASES.items():
        make_case(family, case, model, recorder, sizes)


def make_chat() -> None:
    """A conversation with two images, as `make_chat.py` makes them; the tokenizer has numbers of its own for rows."""
    form = {"patch_size": PATCH, "spatial_merge_size": 2}
    write_chat("mistral3", lambda tokenizer, template: PixtralProcessor(
        pil(PixtralImageProcessorPil, "mistral3"), tokenizer, **form, chat_template=template
    ), "[IMG]", {"[IMG]": IMAGE, "[IMG_BREAK]": 305, "[IMG_END]": 306, **TURN_MARKS})  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Heads that are not the width divided by their number, as Mistral Small's.
    text = {**TEXT, "head_dim": 24, "sliding_window": None, "rms_norm_eps": 1e-5}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    parts = {"text_config": {"model_type": "mistral", **text}, "image_token_index": IMAGE}
    with torch.no_grad():
        top = {"spatial_merge_size": 2, "projector_hidden_act": "gelu", "vision_feature_layer": -1}
        top |= {"multimodal_projector_bias": False, "tie_word_embeddings": False}
        config = Mistral3Config(**parts, vision_config={**VISION, "hidden_act": FORMS["mistral3"][2]}, **top)
        make_family("mistral3", config, Mistral3ForConditionalGeneration, text, top)
        top = {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        config = LlavaConfig(**parts, vision_config={**VISION, "hidden_act": FORMS["pixtral"][2]}, **top)
        make_family("pixtral", config, LlavaForConditionalGeneration, text, top)
    make_chat()


if __name__ == "__main__":
    main()
