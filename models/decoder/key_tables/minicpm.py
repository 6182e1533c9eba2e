"""Keys of MiniCPM-V 2.6, 4.0 and 4.5: those of Qwen2, Llama and Qwen3 at the same level as the authors' own."""

from typing import Any

from . import texts

OWN: dict[str, Any] = {
    "version": None,
    "query_num": 64,
    "drop_vision_last_layer": True,
    "vision_config": None,
    # The authors' processor names the placeholder nowhere but in the vocabulary.
    "image_token_id": None,
    # What the processor's own file says again, and how many slices the authors' tower takes at a time.
    "slice_config": None,
    "image_size": 448,
    "patch_size": 14,
    "vision_batch_size": 16,
    "batch_3d_resampler": True,
}
ONLY_OWN: dict[str, Any] = {"slice_mode": True, "use_image_id": True, "batch_vision_input": True}
TEXTS = {"minicpmv2.6": "qwen2", "minicpmv4.0": "llama", "minicpmv4.5": "qwen3"}
"""By release: whose keys stand beside the authors'."""

DEFAULTS: dict[str, dict[str, Any]] = {kind: texts.DEFAULTS[text] | OWN for kind, text in TEXTS.items()}
ONLY: dict[str, dict[str, Any]] = {kind: texts.ONLY.get(text, {}) | ONLY_OWN for kind, text in TEXTS.items()}
AUTHORS = set(TEXTS)
