"""Families without images, one row each: Llama, Mistral, Qwen2, Qwen3 and Qwen3.5 (dense and MoE), Qwen3-Next, GLM-4,
Gemma 3, Phi-3, DeepSeek-V2, -V3.

Source: the transformers 5.23 classes of these names.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import (
    Raw,
    Regime,
    need,
    read_decoder,
    read_deepseek_experts,
    read_latent,
    read_rope,
    read_softmax_experts,
    read_window,
    rope_table,
)
from ..decoder.known_keys import complete
from ..decoder.weights import decoder_entries, expert_layout
from .family import Family, Shapes
from .gemma_text import NORMS, read_gemma3, read_gemma4
from .hybrid_text import read_hybrid


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A text family's configuration: the decoder's, and `config.json` as it was read."""

    architecture: str
    text: DecoderConfig
    raw: str

    @property
    def family(self) -> Family:
        """The row of this architecture."""
        return TEXT_FAMILIES[self.architecture]

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        kept = {name: value for name, value in json.loads(self.raw).items() if name not in ("dtype", "torch_dtype")}
        return kept | {"architectures": [self.architecture], "torch_dtype": self.text.dtype}


class TextModel(nnx.Module):
    """A decoder alone."""

    def __init__(self, config: TextConfig, rngs: nnx.Rngs):
        self.decoder = Decoder(config.text, rngs)


ReadText = Callable[[Raw, str, Regime], DecoderConfig]
TEXT_TABLE = "the text part of config.json"


def read_head_dim(raw: Raw) -> int:
    """Returns the width of a head, from the configuration or the model's width."""
    width = raw.get("head_dim") or need(raw, "hidden_size") // need(raw, "num_attention_heads")
    if width < 1:
        raise ConfigError(f"head_dim: got {width}; expected a positive whole number: hidden_size / num_attention_heads")
    return width


def read_llama(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Llama 2 and 3.1 (also the text towers of LLaVA, DeepSeek-VL and SmolVLM)."""
    raw = complete(raw, "llama", TEXT_TABLE)
    # One switch for query, key, value and output.
    bias = raw["attention_bias"]
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    return read_decoder(raw, rope, attention_bias=bias, output_bias=bias, mlp_bias=raw["mlp_bias"])


def read_mistral(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Mistral; version 0.1 has a sliding window."""
    raw = complete(raw, "mistral", TEXT_TABLE)
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    return read_decoder(raw, rope, **read_window(raw))


def read_qwen2(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Qwen2 and 2.5 (also InternVL3's text tower): biases on query, key and value."""
    raw = complete(raw, "qwen2", TEXT_TABLE)
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    return read_decoder(raw, rope, attention_bias=True, **read_window(raw))


def read_qwen3(
    raw: Raw, angles: str, regime: Regime = None, kind: str = "qwen3", sections: tuple[int, ...] | None = None
) -> DecoderConfig:
    """Reads Qwen3: norms on query and key heads, before rotation. M-RoPE sections, where there are any, are
    interleaved.

    `kind` and `sections` are Qwen3-VL's and the mixtures' own: what `known_keys` calls them, and M-RoPE's default.
    """
    raw = complete(raw, kind, TEXT_TABLE)
    bias, order = raw["attention_bias"], "interleaved"
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime, order=order, sections=sections)
    switches = {"head_dim": rope.head_width, "attention_bias": bias, "output_bias": bias, "qk_norm": True}
    return read_decoder(raw, rope, **switches, **read_window(raw, every_layer="moe" in kind))


def read_qwen3_moe(
    raw: Raw, angles: str, regime: Regime = None, kind: str = "qwen3_moe", sections: tuple[int, ...] | None = None
) -> DecoderConfig:
    """Reads Qwen3 with experts in every layer."""
    experts = read_softmax_experts(complete(raw, kind, TEXT_TABLE))
    return dataclasses.replace(read_qwen3(raw, angles, regime, kind, sections), experts=experts)


def read_glm(raw: Raw, angles: str, regime: Regime = None, post_norms: bool = False) -> DecoderConfig:
    """Reads GLM-4: half of each head rotates, in pairs; the 0414 release has norms after attention and MLP."""
    raw = complete(raw, "glm4" if post_norms else "glm", TEXT_TABLE)
    head_dim = read_head_dim(raw)
    rope = read_rope(raw, head_dim, angles=angles, regime=regime, partial=0.5, cached="pairs")
    return read_decoder(raw, rope, head_dim=head_dim, attention_bias=raw["attention_bias"], post_norms=post_norms)


def read_phi3(raw: Raw, angles: str, regime: Regime = None) -> DecoderConfig:
    """Reads Phi-3: fused projections; longrope, which early files call "su" or "yarn"."""
    raw = complete(raw, "phi3", TEXT_TABLE)
    table = rope_table(raw)
    # Their "yarn" has longrope's two lists of factors.
    if table.get("rope_type", table.get("type")) == "yarn":
        raw = {**raw, "rope_scaling": None, "rope_parameters": {**table, "rope_type": "longrope"}}
    rope = read_rope(raw, read_head_dim(raw), angles=angles, regime=regime)
    return read_decoder(raw, rope, **read_window(raw))


def read_deepseek(raw: Raw, angles: str, regime: Regime = None, version: int = 3) -> DecoderConfig:
    """Reads DeepSeek-V2 (caches rotary pairs side by side), V3 and Kimi (read pairs, cache halves)."""
    raw = complete(raw, f"deepseek_v{version}", TEXT_TABLE)
    # A trap: both versions read pairs that lie side by side. V3 writes all first members, then all second ones, so its
    # cached keys rotate in halves. A wrong choice shows only where a key moves.
    cached = "pairs" if version == 2 else "half"
    rope = read_rope(raw, need(raw, "qk_rope_head_dim"), angles=angles, regime=regime, cached=cached)
    bias = raw["attention_bias"]
    return read_decoder(
        raw,
        rope,
        attention="mla",
        attention_bias=bias,
        output_bias=bias,
        latent=read_latent(raw, rope, reads_pairs=version == 3 and raw["rope_interleave"]),
        experts=read_deepseek_experts(raw, "softmax" if version == 2 else "sigmoid"),
    )


def text_family(architecture: str, model_type: str, read: ReadText, **options: Any) -> Family:
    """Returns a family of text checkpoints; `options` go to `decoder_entries`."""

    def config(raw: Mapping[str, Any], angles: str, regime: Regime) -> TextConfig:
        return TextConfig(architecture, read(raw, angles, regime), json.dumps(dict(raw), sort_keys=True))

    def entries(config: TextConfig, shapes: Shapes) -> list[TensorEntry]:
        return decoder_entries(config.text, fused_experts=expert_layout(config.text, shapes, "model."), **options)

    return Family(architecture, config, TextModel, entries, model_type=model_type)


_read_glm4 = functools.partial(read_glm, post_norms=True)
_read_qwen3_5 = functools.partial(read_hybrid, kind="qwen3_5_text")
_read_qwen3_5_moe = functools.partial(read_hybrid, kind="qwen3_5_moe_text")
_read_deepseek_v2 = functools.partial(read_deepseek, version=2)

TEXT_FAMILIES = {
    family.architecture: family
    for family in (
        text_family("LlamaForCausalLM", "llama", read_llama),
        text_family("MistralForCausalLM", "mistral", read_mistral),
        text_family("Qwen2ForCausalLM", "qwen2", read_qwen2),
        text_family("Qwen3ForCausalLM", "qwen3", read_qwen3),
        text_family("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe),
        text_family("Qwen3NextForCausalLM", "qwen3_next", read_hybrid),
        text_family("Qwen3_5ForCausalLM", "qwen3_5_text", _read_qwen3_5),
        text_family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _read_qwen3_5_moe),
        text_family("GlmForCausalLM", "glm", read_glm, fused=("gate_up",)),
        text_family("Glm4ForCausalLM", "glm4", _read_glm4, fused=("gate_up",)),
        text_family("Gemma3ForCausalLM", "gemma3_text", read_gemma3, norms=NORMS),
        text_family("Gemma4ForCausalLM", "gemma4_text", read_gemma4, norms=NORMS),
        text_family("Phi3ForCausalLM", "phi3", read_phi3, fused=("gate_up", "qkv")),
        text_family("DeepseekV2ForCausalLM", "deepseek_v2", _read_deepseek_v2),
        text_family("DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek),
    )
}
