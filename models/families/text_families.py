"""Families without images, one row each: Llama, Mistral, Qwen2, Qwen3 and Qwen3.5 (dense and MoE), Qwen3-Next, GLM-4,
Gemma 3 and 4, Phi-3, DeepSeek-V2, -V3.

Source: the transformers classes of these names.
"""

from typing import Any

from flax import nnx

from ..checkpoints import TensorEntry
from ..decoder.decoder import Decoder
from ..decoder.weights import decoder_entries, expert_layout
from .config_file import ConfigFile, FamilyConfig, dtype_of
from .family import Family, Shapes
from .gemma_text import NORMS
from .text_towers import ReadText, read_hybrid, read_text


class TextModel(nnx.Module):
    """A decoder alone."""

    def __init__(self, config: FamilyConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config.text, rngs)


def _read_hybrid(raw: Any, angles: str, regime: Any = None) -> Any:
    return read_hybrid(raw, angles, regime, axes=False)


def text_family(architecture: str, model_type: str, read: ReadText = read_text, **options: Any) -> Family:
    """Returns a family of text checkpoints; `options` go to `decoder_entries`."""

    def config(file: ConfigFile) -> FamilyConfig:
        table = file.model | {"dtype": dtype_of(file.raw) or "float32"}
        return file.config(FamilyConfig, read(table, file.angles, file.regime))

    def entries(config: FamilyConfig, shapes: Shapes) -> list[TensorEntry]:
        return decoder_entries(config.text, fused_experts=expert_layout(config.text, shapes, "model."), **options)

    return Family(architecture, config, TextModel, entries, model_type=model_type)


TEXT_FAMILIES = {
    family.architecture: family
    for family in (
        text_family("LlamaForCausalLM", "llama"),
        text_family("MistralForCausalLM", "mistral"),
        text_family("Qwen2ForCausalLM", "qwen2"),
        text_family("Qwen3ForCausalLM", "qwen3"),
        text_family("Qwen3MoeForCausalLM", "qwen3_moe"),
        text_family("Qwen3NextForCausalLM", "qwen3_next"),
        text_family("Qwen3_5ForCausalLM", "qwen3_5_text", _read_hybrid),
        text_family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _read_hybrid),
        text_family("GlmForCausalLM", "glm", fused=("gate_up",)),
        text_family("Glm4ForCausalLM", "glm4", fused=("gate_up",)),
        text_family("Gemma3ForCausalLM", "gemma3_text", norms=NORMS),
        text_family("Gemma4ForCausalLM", "gemma4_text", norms=NORMS),
        text_family("Phi3ForCausalLM", "phi3", fused=("gate_up", "qkv")),
        text_family("DeepseekV2ForCausalLM", "deepseek_v2"),
        text_family("DeepseekV3ForCausalLM", "deepseek_v3"),
    )
}
