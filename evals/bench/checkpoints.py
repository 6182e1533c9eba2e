"""Random checkpoints to time: the tiny models of `tests/goldens`, and one of Qwen2-0.5B's shape.

Weights are drawn in the layout of our own parameters and written with `models.save`, so that both sides of a
comparison read the same file.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError
from models import FAMILIES, ModelBackbone
from models.checkpoints import flatten_params
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
    "InternVLForConditionalGeneration": "internvl",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "LlamaForCausalLM": "llama3_1",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Phi3ForCausalLM": "phi3_long",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Which tiny model stands for an architecture."""
_KIMI_K25 = "transformers has no such class; Kimi_K25 is the same function of images"
UNTIMED = dict.fromkeys(("KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"), _KIMI_K25)
REGIMES = {"Phi3ForCausalLM": "long"}
LARGE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen2-0.5B's shape."""
PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")


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
            f"tiny models: {GOLDENS} is missing; expected a checkout of the repository, whose configurations it uses"
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
    config = family.config(raw, "exact", REGIMES.get(family.architecture))
    generator = np.random.default_rng(seed)
    values: dict[str, Any] = {}

    for path, leaf in sorted(flatten_params(parameters(abstract(config))).items()):
        parent = values
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = jnp.asarray(_draw(path[-1], leaf.shape, generator))

    return ModelBackbone(config, values)


def _draw(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> Float[np.ndarray, "..."]:
    """Draws matrices of standard deviation 1/√(inputs), norms near 1, biases near 0: nothing that could be left out."""
    values = generator.standard_normal(shape, np.float32)
    if name == "weight":
        return 1 + 0.2 * values
    if name in ("bias", "correction"):
        return 0.2 * values
    matrix = name in ("kernel", "gate", "up", "down", "embedding")
    return values * np.float32(1 / math.sqrt(shape[-1 if name == "embedding" else -2])) if matrix else 0.5 * values


def prompt(count: int) -> Int[np.ndarray, "1 count"]:
    """Makes ids of a text prompt that every vocabulary has, and that are no placeholder of any tiny model."""
    return ((np.arange(count, dtype=np.int32) * 37 + 11) % 290 + 3)[None]


def pad_cache(kv: Mapping[str, Array], room: int) -> dict[str, Array]:
    """Pads a cache [L,B,S,K,H] per channel with room for as many tokens more."""
    return {name: jnp.pad(value, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))) for name, value in kv.items()}
