"""Random checkpoints to time: the tiny models of `tests/goldens`, and one of Qwen2-0.5B's shape.

Weights are drawn in the layout of our own parameters and written with `models.save`, so that both sides of a
comparison read the same file.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.window import Costs
from models import FAMILIES, ModelBackbone
from models.checkpoints import flatten_params
from models.decoder.costs import forward_costs
from models.families.family import abstract, parameters

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
TINY = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "Kimi_K25ForConditionalGeneration": "kimi_vl",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "DeepseekVLHybridForConditionalGeneration": "deepseek_vl_hybrid",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2",
    "InternVLForConditionalGeneration": "internvl",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "Gemma4ForConditionalGeneration": "gemma4_moe",
    "LlamaForCausalLM": "llama3_1",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Phi3ForCausalLM": "phi3_long",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Which tiny model stands for an architecture."""
_KIMI_K25 = "transformers has no such class; Kimi_K25 is the same function of images"
UNTIMED = {
    "KimiVLForConditionalGeneration": _KIMI_K25,
    "Phi3VForCausalLM": "transformers has no such class",
    "Ernie4_5_VLMoeForConditionalGeneration": "the timed forwards do not say which tokens are images'",
    "DeepseekVLV2ForCausalLM": "transformers has no such class",
    **dict.fromkeys(
        (
            "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Glm46VForConditionalGeneration",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        "no tiny model of it is drawn here yet",
    ),
}
REGIMES = {"Phi3ForCausalLM": "long"}
PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")
PICTURES += ("high_res_pixel_values", "image_position_ids")


def qwen2_config(
    width: int, intermediate: int, heads: int, layers: int, kv_heads: int, vocabulary: int, **fields: Any
) -> dict[str, Any]:
    """Makes `config.json` of a Qwen2 of these sizes; `fields` replace others of it."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    } | fields


LARGE = qwen2_config(896, 4864, heads=14, layers=24, kv_heads=2, vocabulary=151936)
"""Qwen2-0.5B's shape."""
SEVEN_BILLION = qwen2_config(
    3584, 18944, heads=28, layers=28, kv_heads=4, vocabulary=152064, tie_word_embeddings=False, torch_dtype="bfloat16"
)
"""The shape of Qwen2.5-VL-7B's text decoder."""


KIMI_VL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 800000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""The shape of Kimi-VL-A3B's text decoder: a mixture of experts over latent attention."""


def shape_costs(name: str, raw: Mapping[str, Any]) -> Costs:
    """Computes the costs of a text decoder of this `config.json`, in bfloat16; no model is made."""
    text = FAMILIES[raw["architectures"][0]].config(raw, "exact", None).text
    layout = text.layout
    rotating = [channel for channel in layout.channels if channel.rotates]
    depths = {channel.name: layout.depth(channel.name) for channel in rotating}
    # Two bytes a number.
    turning = 2 * sum(depths[channel.name] * channel.features for channel in rotating)
    rotary = sum(depths[channel.name] * channel.heads * channel.rotary for channel in rotating)
    return Costs(name, text.layers, layout.bytes_per_token("bfloat16"), turning, rotary, forward_costs(text))


def tiny_config(architecture: str) -> dict[str, Any]:
    """Reads `config.json` of the tiny model that stands for this architecture.

    Raises:
      ConfigError: no such model, or no goldens beside the package (they are not installed with it).
    """
    if architecture not in TINY:
        raise ConfigError(f"architecture: got {architecture!r}, without a tiny model; expected one of {sorted(TINY)}")

    name = TINY[architecture]
    text, image = GOLDENS / "text" / f"{name}.json", GOLDENS / name / "config.json"
    if not GOLDENS.is_dir():
        raise ConfigError(
            f"tiny models: got no folder {GOLDENS}; expected a checkout of the repository, whose configurations it uses"
        )
    raw = json.loads(text.read_text())["config"] if text.exists() else json.loads(image.read_text())
    return raw | {"architectures": [architecture]}


def tiny_pictures(architecture: str) -> dict[str, np.ndarray]:
    """Reads what the tiny model's processor made of one image, with `input_ids` [1,T]; {} for a text family."""
    path = GOLDENS / TINY[architecture] / "one_image.npz"
    if FAMILIES[architecture].vision is None:
        return {}
    with np.load(path) as file:
        kept = {name: file[name] for name in PICTURES if name in file.files}
        return kept | {"input_ids": file["input_ids"][None]}


def random_backbone(raw: Mapping[str, Any], seed: int = 0) -> ModelBackbone:
    """Makes a backbone of this `config.json` with drawn float32 parameters and without image settings."""
    family = FAMILIES[raw["architectures"][0]]
    generator = np.random.default_rng(seed)

    # Norms near 1, biases near 0, matrices of standard deviation 1/√(inputs): nothing that could be left out.
    def draw(name: str, shape: tuple[int, ...]) -> Array:
        values = generator.standard_normal(shape, np.float32)
        if name == "weight":
            values = 1 + 0.2 * values
        elif name in ("bias", "correction"):
            values = 0.2 * values
        elif name in ("kernel", "gate", "up", "down", "embedding"):
            values = values * np.float32(1 / math.sqrt(shape[-1 if name == "embedding" else -2]))
        elif name == "decay_rate":
            # Heads of linear attention forget within one to a thousand tokens.
            values = 2 * values - 3.5
        else:
            values = 0.5 * values
        return jnp.asarray(values)

    return filled_backbone(family.config(raw, "exact", REGIMES.get(family.architecture)), draw)


def filled_backbone(config: Any, draw: Callable[[str, tuple[int, ...]], Array]) -> ModelBackbone:
    """Makes a backbone whose parameters are what `draw` returns for each name and shape, in order of their paths."""
    values: dict[str, Any] = {}
    for path, leaf in sorted(flatten_params(parameters(abstract(config))).items()):
        parent = values
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = draw(path[-1], leaf.shape)
    return ModelBackbone(config, values)


def prompt(count: int) -> Int[np.ndarray, "1 count"]:
    """Makes ids of a text prompt that every vocabulary has, and that are no placeholder of any tiny model."""
    return ((np.arange(count, dtype=np.int32) * 37 + 11) % 290 + 3)[None]


def pad_cache(kv: Mapping[str, Array], room: int) -> dict[str, Array]:
    """Pads a cache [L,B,S,K,H] per channel with room for as many tokens more."""
    return {name: jnp.pad(value, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))) for name, value in kv.items()}
