"""What the tables of several families have in common."""

from typing import Any


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


ROPE: dict[str, Any] = {
    "rope_theta": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "layers_block_type": None,
    "linear_attn_config": None,
}
"""Keys of a rope."""
PARTS = {"text_config": None, "vision_config": None, "tie_word_embeddings": False, "vocab_size": None}
"""Keys at the top of a file with a text and a vision part."""
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def sizes(vocabulary: int, width: int, inner: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    """Returns a text tower's keys with the sizes that its class has by default."""
    return ROPE | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "layer_types": None,
    }


def tower(width: int, inner: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    """Returns a plain vision tower's keys with the sizes that its class has by default."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_channels": 3,
        "image_size": image,
        "patch_size": patch,
    }
