"""What a GGUF file's metadata says of the model: `config.json` as Hugging Face has it, and where each tensor lies.

Source: llama.cpp's `convert_hf_to_gguf.py` and `gguf-py/gguf/constants.py`, which write these names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from kvpatch_jax.errors import ConfigError, WeightsError

from ..source import OpenFile, TensorSource
from .header import GgufHeader, read_header
from .source import GgufSource, TensorLocation

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""By llama.cpp's name: Hugging Face's architecture and model type."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_READ = frozenset(
    """
    attention.layer_norm_rms_epsilon attention.value_length rope.dimension_count rope.freq_base vocab_size
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.finetuned rope.scale_linear
    """.split()  # noqa: SIM905  (a list of this length is harder to read)
)
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(header: GgufHeader) -> dict[str, Any]:
    """Makes `config.json` of the metadata.

    Raises:
      ConfigError: an architecture or an entry that is not known, one that is missing or of another kind than expected,
        or a value that no decoder is built for.
    """
    values = header.metadata
    name = values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: got architecture {name!r}; expected one of {', '.join(ARCHITECTURES)}. Vision towers, "
            "which llama.cpp keeps in a second file, are not read"
        )
    if values.get("split.count", 1) != 1:
        raise ConfigError(
            f"{header.path}: got one of {values['split.count']} files; expected a whole one, as `llama-gguf-split "
            "--merge` makes it"
        )

    own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
    table = _Table(str(header.path), str(name), own)
    table.check_known()

    architecture, model_type = ARCHITECTURES[name]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{header.path}: got no matrix 'token_embd.weight'; expected the embedding")

    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": table.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": table.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    optional = ("attention.key_length", "attention.head_count_kv")
    # Head width and KV heads may be absent, and then follow from the others; every other size is needed.
    config |= {
        theirs: table.whole(ours) for ours, theirs in _SIZES.items() if ours not in optional or ours in table.values
    }
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    table.expect("attention.value_length", config["head_dim"])
    table.expect("rope.dimension_count", config["head_dim"])
    table.expect("vocab_size", config["vocab_size"])

    if name == "qwen3moe":
        config |= {theirs: table.whole(ours) for ours, theirs in _EXPERT_SIZES.items()} | {"norm_topk_prob": True}
    # Qwen2 has the biases always, and says nothing of them.
    if name != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors

    _check_sizes(header, config)
    config["rope_scaling"] = _scaling(header, table, config)
    for ours in ("bos", "eos"):
        if isinstance(values.get(f"tokenizer.ggml.{ours}_token_id"), int):
            config[f"{ours}_token_id"] = values[f"tokenizer.ggml.{ours}_token_id"]
    return config


def _check_sizes(header: GgufHeader, config: Mapping[str, Any]) -> None:
    """Refuses sizes that the first tensors do not have, before anything is made of them."""
    width = config["hidden_size"]
    wanted: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], width),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * config["head_dim"], width),
    }
    if "num_experts" in config:
        wanted["blk.0.ffn_gate_exps.weight"] = (config["num_experts"], config["moe_intermediate_size"], width)

    for name, shape in wanted.items():
        found = header.tensors.get(name)
        if found is None or found.shape != shape:
            shown = f"no tensor {name!r}" if found is None else f"tensor {name!r} of shape {found.shape}"
            raise WeightsError(f"{header.path}: got {shown}; expected shape {shape}, as the metadata say")

    last = f"blk.{config['num_hidden_layers'] - 1}.attn_norm.weight"
    if last not in header.tensors:
        raise WeightsError(f"{header.path}: got no tensor {last!r}; expected it in the last layer, by block_count")


class _Table:
    """The metadata of one architecture, checked entry by entry.

    Attributes:
      values: what the file says, by names without the architecture's.
    """

    def __init__(self, path: str, name: str, values: Mapping[str, Any]):
        self._path, self._name, self.values = path, name, values

    def check_known(self) -> None:
        """Refuses entries that may change what the model computes and are not read."""
        known = _READ | set(_SIZES) | (set(_EXPERT_SIZES) if self._name == "qwen3moe" else set())
        for key, value in self.values.items():
            if key not in known and value not in (0, False, 0.0):
                raise ConfigError(
                    f"{self._path}: got {self._name}.{key} = {value!r}, which this library does not know and which may "
                    f"change what the model computes; expected one of {', '.join(sorted(known))}"
                )

    def whole(self, key: str) -> int:
        """Returns a positive whole number."""
        found = self.values.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ConfigError(f"{self._path}: got {self._name}.{key} {found!r}; expected a positive whole number")
        return found

    def number(self, key: str, absent: float | None = None) -> float:
        """Returns a number, as the shortest decimal that is the file's float32."""
        found = self.values.get(key, absent)
        if not isinstance(found, int | float) or isinstance(found, bool) or not np.isfinite(found) or found <= 0:
            raise ConfigError(f"{self._path}: got {self._name}.{key} {found!r}; expected a positive number")
        return float(str(np.float32(found)))

    def expect(self, key: str, value: int) -> None:
        """Refuses another value than this one, where there is any."""
        found = self.values.get(key, value)
        if found != value:
            raise ConfigError(
                f"{self._path}: got {self._name}.{key} {found!r}; expected {value}, as its other sizes say"
            )


def _scaling(header: GgufHeader, table: _Table, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `rope_scaling`: of the metadata, or what the tensor of factors (Llama 3) was computed from."""
    kind = table.values.get("rope.scaling.type") or "none"
    if _FACTORS in header.tensors:
        if kind != "none":
            raise ConfigError(f"{header.path}: got rope scaling {kind!r} and {_FACTORS!r}; expected one of them")
        return _factor_scaling(header, config)
    if kind == "none":
        return None

    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{header.path}: got rope scaling {kind!r}, which is not read; expected none, linear or yarn")

    scaling = {"rope_type": kind, "factor": table.number("rope.scaling.factor")}
    if "rope.scaling.attn_factor" in table.values and table.number("rope.scaling.attn_factor") != 1:
        raise ConfigError(f"{header.path}: got rope.scaling.attn_factor, which is not read; expected 1")

    if kind == "yarn" and "rope.scaling.original_context_length" in table.values:
        scaling["original_max_position_embeddings"] = table.whole("rope.scaling.original_context_length")
    return scaling


def _factor_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling that gives the file's factors (what each frequency is divided by): Llama 3's, or the
    factors.
    """
    stored, half = header.tensors[_FACTORS], config["head_dim"] // 2
    if stored.kind != 0 or stored.shape != (half,):
        raise WeightsError(f"{header.path}: got tensor {_FACTORS!r} of shape {stored.shape}; expected F32 ({half},)")

    data = np.empty(half, np.float32)
    OpenFile(header.path).read_into(data, stored.start)
    factors = data.astype(np.float64)
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise WeightsError(
            f"{header.path}: got tensor {_FACTORS!r} that holds {factors.min()}; expected positive numbers"
        )
    if np.allclose(factors, 1, rtol=1e-6):
        return {"rope_type": "default"}

    # What Llama 3.1 and 3.2 divide their frequencies by: 1 for short waves, the factor for long ones.
    largest = float(str(np.float32(factors.max())))
    low, high, original = _LLAMA3.values()
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, 2 * half, 2) / (2 * half))
    between = (original / waves - low) / (high - low)
    smooth = 1 / ((1 - between) / largest + between)
    llama3 = np.where(waves < original / high, 1.0, np.where(waves > original / low, largest, smooth))
    if np.allclose(factors, llama3, rtol=1e-5):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}

    # Any other factors are a longrope whose two sets are alike, so that no regime changes them.
    longest = config["max_position_embeddings"]
    same = {"short_factor": factors.tolist(), "long_factor": factors.tolist(), "attention_factor": 1.0}
    return {"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": longest, **same}


class GgufConversion:
    """A GGUF file.

    Attributes:
      path: the file.
      metadata: what the file says of itself, tokenizer and chat template included.
      config: what follows from it.

    Raises:
      ConfigError, WeightsError: as `read_header` and `read_config`.
    """

    def __init__(self, path: Path):
        self.path, self._header = path, read_header(path)
        self.metadata, self.config = self._header.metadata, read_config(self._header)

    def source(self, dtype: DTypeLike) -> TensorSource:
        """Opens the tensors, as the model names them; quantised ones are dequantised to `dtype`."""
        return GgufSource(self._header, _tensor_places(self._header, self.config), dtype)


def _tensor_places(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, TensorLocation]:
    """Maps Hugging Face's names to where a file's tensors lie. Unknown names stay, to be reported."""
    pairs = {}
    # llama.cpp rotates neighbours in this architecture, and its files have the rows in that order.
    if config["model_type"] == "llama":
        heads = config["num_attention_heads"]
        pairs = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}

    places: dict[str, TensorLocation] = {}
    for name in header.tensors:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        layer, part, end = found.groups() if found else ("", "", "")
        if name in _TOP:
            places[_TOP[name]] = TensorLocation(name)
        elif part in _LAYER:
            places[f"model.layers.{int(layer)}.{_LAYER[part]}.{end}"] = TensorLocation(name, heads=pairs.get(part, 0))
        elif part in _EXPERTS and header.tensors[name].shape[:1]:
            for number in range(header.tensors[name].shape[0]):
                ours = f"model.layers.{int(layer)}.mlp.experts.{number}.{_EXPERTS[part]}.{end}"
                places[ours] = TensorLocation(name, index=number)
        elif name != _FACTORS:
            places[name] = TensorLocation(name)

    return places
