"""Shapes of Qwen3.5 at its released sizes.

Fields are what is publicly known of the releases; no file was read from their own repositories. Those of 9B and 35B-A3B
are the defaults of transformers' classes. Towers are not described: nothing here runs one.
"""

from typing import Any

from models import FAMILIES
from models.decoder.config import DecoderConfig

TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 4,
}
"""Of one small layer, in the released tower's place."""


def hybrid_config(
    width: int,
    intermediate: int | None,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    tied: bool = False,
    **text: Any,
) -> dict[str, Any]:
    """Makes `config.json` of a Qwen3.5 of these sizes.

    Args:
      intermediate: width inside an MLP; None: every layer has experts, as `text` says.
      heads: of queries, and of keys and values. value_heads: of linear attention, which has 16 key heads.
      text: further fields of the text part.
    """
    dense = intermediate is not None
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration" if dense else "Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5" if dense else "qwen3_5_moe",
        "tie_word_embeddings": tied,
        "text_config": {
            **({"intermediate_size": intermediate} if dense else {}),
            "model_type": "qwen3_5_text" if dense else "qwen3_5_moe_text",
            "vocab_size": 248320,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": 256,
            "linear_num_value_heads": value_heads,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": tied,
            "dtype": "float32",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
            **text,
        },
        "vision_config": TOWER | {"out_hidden_size": width},
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    }


HYBRIDS = {
    "Qwen3.5-0.8B": hybrid_config(1024, 3584, 24, (8, 2), 16, tied=True),
    "Qwen3.5-2B": hybrid_config(2048, 6144, 24, (8, 2), 16, tied=True),
    "Qwen3.5-4B": hybrid_config(2560, 9216, 32, (16, 4), 32, tied=True),
    "Qwen3.5-9B": hybrid_config(4096, 12288, 32, (16, 4), 32),
    "Qwen3.5-35B-A3B": hybrid_config(2048, None, 40, (16, 2), 32),
}


def config_of(raw: dict[str, Any]) -> Any:
    """Reads a `config.json`."""
    return FAMILIES[raw["architectures"][0]].config(raw, "exact", None)


def decoder_of(name: str) -> DecoderConfig:
    """Reads the decoder of a hybrid."""
    return config_of(HYBRIDS[name]).text
