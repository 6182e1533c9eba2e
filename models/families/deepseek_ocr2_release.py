"""DeepSeek's own DeepSeek-OCR-2 checkpoints: their configuration. Their tensors' names are read as they are.

Sources: DeepSeek-OCR-2's `modeling_deepseekocr2.py`, and `build_qwen2_decoder_as_encoder` of its `deepencoderv2.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import WHOLE, Rule
from ..decoder.hf_config import need
from ..inputs.images import PictureConfig
from ..inputs.qwen_images import CONFIG_FILE
from . import deepseek_ocr2
from .authors import AuthorsFormat, Raw, expect
from .deepseek_ocr import SAM, TOWER_KEYS, read_authors, tower_table

ARCHITECTURE = "DeepseekOCR2ForCausalLM"
QWEN2 = "qwen2-0-5b"
ENCODER = {
    "model_type": "deepseek_ocr2_encoder",
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
"""What the authors' code fixes of the encoder, and files do not say."""


def _config(raw: Raw, root: Path) -> dict[str, Any]:
    """Turns the authors' `config.json` into that of transformers' class."""
    model, text = read_authors(raw)
    vision = model["vision_config"]
    expect(vision, "vision_config", model_name="deepencoderv2")
    sam = tower_table(need(vision, "width"), SAM, TOWER_KEYS[SAM])
    width = need(tower_table(vision["width"], QWEN2, {"dim"}), "dim")
    glue = {"projector_type": "linear", "input_dim": width, "n_embed": text["hidden_size"]}
    expect(model["projector_config"], "projector_config", **glue)

    # Files say 1024 where the compressor ends, as those of the first version do; it ends in the encoder's width.
    first, _ = deepseek_ocr2.read_channels(need(sam, "downsample_channels"))
    return {
        "architectures": [deepseek_ocr2.ARCHITECTURE],
        "model_type": "deepseek_ocr2",
        "image_token_id": model["image_token_id"],
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_ocr2_vision",
            "sam_config": {
                "model_type": "deepseek_ocr2_sam_vision_model",
                "hidden_size": need(sam, "width"),
                "num_hidden_layers": need(sam, "layers"),
                "num_attention_heads": need(sam, "heads"),
                "global_attn_indexes": need(sam, "global_attn_indexes"),
                "image_size": need(vision, "image_size"),
                "downsample_channels": [first, width],
            },
            "encoder_config": {**ENCODER, "hidden_size": width},
        },
        **{name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None},
    }


def _rules(config: Any, raw: Raw) -> Sequence[Rule]:
    return [(r"(.*)", {r"\1": WHOLE})]


def _settings(raw: Raw, root: Path) -> PictureConfig:
    """Reads `preprocessor_config.json`; the release has none, and its own code holds the settings."""
    return deepseek_ocr2.read_settings(root) if (root / CONFIG_FILE).is_file() else deepseek_ocr2.DEFAULT_SETTINGS


def _template(raw: Raw) -> str:
    return deepseek_ocr2.TEMPLATE


FORMAT = AuthorsFormat(ARCHITECTURE, "DeepseekOCR2", _config, _rules, _settings, _template)
