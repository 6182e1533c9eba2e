"""InternLM2 and 2.5: Llama with query, key and value fused per KV head, under names of its own.

Source: InternLM's `modeling_internlm2.py` and `configuration_internlm2.py`. Dynamic NTK scaling is transformers' own:
the base moves where a prompt is longer than `max_position_embeddings`, so `load` pins it (`regime`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints import WHOLE, Rule, TensorSelection, split_rows
from ..decoder.config import DecoderConfig
from .authors import AuthorsFormat, Raw

ARCHITECTURE = "InternLM2ForCausalLM"
_VOCABULARY = 103168


def as_llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Turns InternLM2's configuration into Llama's: one switch for the biases of attention, which are there unless it
    says otherwise.
    """
    text = {"vocab_size": _VOCABULARY, **raw}
    return text | {"attention_bias": text.pop("bias", True), "model_type": "llama"}


def internlm2_rules(text: DecoderConfig, prefix: str = "") -> list[Rule]:
    """Returns what InternLM2's tensors become as Llama's; `prefix` is what both begin with."""
    start, layer = prefix.replace(".", r"\."), r"model\.layers\.(\d+)"
    ours = rf"{prefix}model.layers.\1"

    # `wqkv` lies by KV head: its query heads, then its key, then its value.
    heads = {"q": text.heads // text.kv_heads, "k": 1, "v": 1}
    groups = split_rows(text.kv_heads, **{part: count * text.head_dim for part, count in heads.items()})
    names: dict[str, tuple[str, TensorSelection]] = {
        r"attention\.wo\.(\w+)": (r"self_attn.o_proj.\2", WHOLE),
        r"feed_forward\.w1\.(\w+)": (r"mlp.gate_proj.\2", WHOLE),
        r"feed_forward\.w3\.(\w+)": (r"mlp.up_proj.\2", WHOLE),
        r"feed_forward\.w2\.(\w+)": (r"mlp.down_proj.\2", WHOLE),
        r"attention_norm\.(\w+)": (r"input_layernorm.\2", WHOLE),
        r"ffn_norm\.(\w+)": (r"post_attention_layernorm.\2", WHOLE),
    }
    qkv = {rf"{ours}.self_attn.{part}_proj.\2": piece for part, piece in groups.items()}
    return [
        (rf"{start}{layer}\.attention\.wqkv\.(\w+)", qkv),
        *((rf"{start}{layer}\.{theirs}", {f"{ours}.{name}": piece}) for theirs, (name, piece) in names.items()),
        (rf"{start}model\.tok_embeddings\.weight", {f"{prefix}model.embed_tokens.weight": WHOLE}),
        (rf"{start}output\.weight", {f"{prefix}lm_head.weight": WHOLE}),
    ]


def _config(raw: Raw, root: Path) -> dict[str, Any]:
    return as_llama(raw) | {"architectures": ["LlamaForCausalLM"]}


def _rules(config: Any, raw: Raw) -> list[Rule]:
    return internlm2_rules(config.text)


def _settings(raw: Raw, root: Path) -> None:
    """Returns no image settings."""
    return None


FORMAT = AuthorsFormat(ARCHITECTURE, "internlm2", _config, _rules, _settings)
