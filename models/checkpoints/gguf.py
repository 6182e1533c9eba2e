"""GGUF files of Llama, Qwen2 and Gemma 3, read by the package `gguf`: what they say of the model, and their tensors.

Source: llama.cpp's `convert_hf_to_gguf.py` and `gguf-py/gguf/constants.py`, which write these names; what Gemma 3's
files leave out is as llama.cpp's loader has it (`llama-model.cpp`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.utils.optional_packages import require

from .source import OpenFile, Slices, TensorInfo, whole_region

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""Hugging Face's architecture and model type, by llama.cpp's name."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_OPTIONAL = ("attention.key_length", "attention.head_count_kv")
"""Sizes that follow from the others where they are absent."""
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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_SIZES = {"attention.sliding_window": "sliding_window"}
_GEMMA_READ = frozenset({"rope.freq_base_swa", "final_logit_softcapping"})
_GEMMA_LAYER = {
    **_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA_27B = 62
"""Layers of the one Gemma 3 whose attention is scaled by its width over its heads, and not by its heads' width."""
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FACTORS = "rope_freqs.weight"


def find_gguf(checkpoint: Path) -> Path | None:
    """Finds the GGUF file that a checkpoint is: itself, or the only one in a directory without safetensors.

    Raises:
      WeightsError: a directory of several GGUF files.
    """
    if checkpoint.suffix == ".gguf" and not checkpoint.is_dir():
        return checkpoint
    if not checkpoint.is_dir() or any(checkpoint.glob("*.safetensors*")):
        return None

    files = sorted(checkpoint.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise WeightsError(f"{checkpoint}: got {len(files)} GGUF files ({names}); expected the name of one of them")
    return files[0] if files else None


class GgufFile:
    """A GGUF file: its tensors by Hugging Face's names, dequantised to float32 where they are read.

    Attributes:
      metadata: what the file says of itself, tokenizer and chat template included.
      config: `config.json` that follows from it.

    Raises:
      WeightsError: a file that cannot be opened or read, or a tensor whose rows its heads do not divide.
      MissingExtraError: `gguf` is not installed.
      ConfigError: an architecture or an entry that is not known, one that is missing or of another kind than expected,
        or a value that no decoder is built for.
    """

    def __init__(self, path: Path):
        reader = require("gguf.gguf_reader", "gguf", "gguf")
        try:
            file = reader.GGUFReader(path)
            fields = {key: field.contents() for key, field in file.fields.items()}
        except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise WeightsError(f"{path}: got a file that cannot be read ({error}); expected a GGUF file") from error
        self.metadata = {key: value for key, value in fields.items() if not key.startswith("GGUF.")}
        tensors = {tensor.name: tensor for tensor in file.tensors}
        self.config = config = _read_config(str(path), self.metadata, tensors)

        self.origin, self._file = str(path), OpenFile(path)
        self._stored: dict[str, tuple[Any, int]] = {}
        heads, gemma = config["num_attention_heads"], config["model_type"] == "gemma3_text"
        names = _GEMMA_LAYER if gemma else _LAYER
        # llama.cpp multiplies by Gemma's norms as they are in the file, Hugging Face by 1 more than its own.
        self._offset = 1.0 if gemma else 0.0
        # llama.cpp rotates neighbours in Llama, and its files have the rows of a head in that order.
        pairs = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            layer, part, end = match.groups() if match else ("", "", "")
            paired = pairs.get(part, 0) if config["model_type"] == "llama" else 0
            if paired and tensor.shape[-1] % (2 * paired):
                raise WeightsError(
                    f"{path}: got tensor {name!r} of shape {_shape(tensor)}; expected rows of {paired} heads of pairs"
                )
            if name in _TOP:
                self._stored[_TOP[name]] = tensor, 0
            elif part in names:
                self._stored[f"model.layers.{int(layer)}.{names[part]}.{end}"] = tensor, paired
            elif name != _FACTORS:
                self._stored[name] = tensor, 0  # unknown, and reported as such
        self.tensors = {name: TensorInfo(_shape(tensor), "F32") for name, (tensor, _) in self._stored.items()}

    def read(self, name: str, region: Slices | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reads a tensor or a region of it; of the file whole rows. `out` is not used.

        Raises:
          WeightsError: data that cannot be read, or a type that `gguf` does not dequantise.
        """
        tensor, heads = self._stored[name]
        shape = self.tensors[name].shape
        span = whole_region(shape, region)
        rows = np.arange(shape[0])
        if heads:
            rows = rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if len(shape) == 1:
            return self._rows(tensor, 0, 1)[0][rows][span]
        rows = rows[span[0]]
        if not rows.size:
            return np.empty([part.stop - part.start for part in span], np.float32)
        first = int(rows.min())
        return self._rows(tensor, first, int(rows.max()) + 1)[rows - first][:, *span[1:]]

    def _rows(self, tensor: Any, first: int, last: int) -> np.ndarray:
        """Returns some rows, dequantised."""
        quants = require("gguf.quants", "gguf", "gguf")
        size = int(tensor.n_bytes) // int(np.prod(tensor.shape[1:], dtype=np.int64))
        data = np.empty((last - first, size), np.uint8)
        self._file.read_into(data, tensor.data_offset + first * size)
        try:
            # Numbers that are not finite are refused by the reader, which knows their tensor.
            with np.errstate(all="ignore"):
                numbers = quants.dequantize(data, tensor.tensor_type)
                return numbers - np.float32(self._offset if tensor.name.endswith("norm.weight") else 0.0)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.origin}: got tensor {tensor.name!r} of type {tensor.tensor_type.name}; expected one that the "
                "package gguf dequantises"
            ) from error


def _shape(tensor: Any) -> tuple[int, ...]:
    """Returns a tensor's sizes, the slowest axis first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _read_config(path: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Makes `config.json` of the metadata."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: got architecture {name!r}; expected one of {', '.join(ARCHITECTURES)}. Vision towers, which "
            "llama.cpp keeps in a second file, are not read"
        )
    if metadata.get("split.count", 1) != 1:
        raise ConfigError(
            f"{path}: got one of {metadata['split.count']} files; expected a whole one, as `llama-gguf-split --merge` "
            "makes it"
        )
    if "token_embd.weight" not in tensors:
        raise WeightsError(f"{path}: got no tensor 'token_embd.weight'; expected the embedding")

    table = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    gemma = name == "gemma3"
    sizes = {**_SIZES, **_GEMMA_SIZES} if gemma else _SIZES
    known = _READ | set(sizes) | (_GEMMA_READ if gemma else frozenset())
    for key, value in table.items():
        if key not in known and value not in (0, False, 0.0):
            raise ConfigError(
                f"{path}: got {name}.{key} = {value!r}, which this library does not know and which may change what the "
                f"model computes; expected one of {', '.join(sorted(known))}"
            )

    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name][0]],
        "model_type": ARCHITECTURES[name][1],
        "vocab_size": _shape(tensors["token_embd.weight"])[0],
        "rms_norm_eps": _number(path, table, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(path, table, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config |= {theirs: table.get(ours) for ours, theirs in sizes.items() if ours not in _OPTIONAL or ours in table}
    for key, value in config.items():
        if key in sizes.values() and (type(value) is not int or value < 1):
            raise ConfigError(f"{path}: got {key} {value!r}; expected a positive whole number")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    derived = {"attention.value_length": "head_dim", "rope.dimension_count": "head_dim", "vocab_size": "vocab_size"}
    for key, theirs in derived.items():
        if table.get(key, config[theirs]) != config[theirs]:
            raise ConfigError(f"{path}: got {key} {table[key]!r}; expected {config[theirs]}, as its other sizes say")

    if gemma:
        by_heads = config["num_hidden_layers"] == _GEMMA_27B
        width, heads = config["hidden_size"], config["num_attention_heads"]
        config["query_pre_attn_scalar"] = width // heads if by_heads else config["head_dim"]
        config["rope_local_base_freq"] = _number(path, table, "rope.freq_base_swa", 10000.0)
        config["final_logit_softcapping"] = table.get("final_logit_softcapping") or None
    # Qwen2 has the biases always, and says nothing of them.
    if name != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["rope_scaling"] = _scaling(path, table, tensors, config)
    for ours in ("bos", "eos"):
        if isinstance(metadata.get(f"tokenizer.ggml.{ours}_token_id"), int):
            config[f"{ours}_token_id"] = metadata[f"tokenizer.ggml.{ours}_token_id"]
    return config


def _number(path: str, table: Mapping[str, Any], key: str, absent: float | None = None) -> float:
    """Returns a number, as the shortest decimal that is the file's float32."""
    value = table.get(key, absent)
    if type(value) not in (int, float) or not np.isfinite(value) or value <= 0:
        raise ConfigError(f"{path}: got {key} {value!r}; expected a positive number")
    return float(str(np.float32(value)))


def _scaling(
    path: str, table: Mapping[str, Any], tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns `rope_scaling`: of the metadata, or what the tensor of factors (Llama 3) was computed from."""
    kind = table.get("rope.scaling.type") or "none"
    if _FACTORS in tensors:
        return _factor_scaling(path, tensors[_FACTORS].data, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{path}: got rope scaling {kind!r}, which is not read; expected none, linear or yarn")

    scaling = {"rope_type": kind, "factor": _number(path, table, "rope.scaling.factor")}
    if _number(path, table, "rope.scaling.attn_factor", 1.0) != 1:
        raise ConfigError(f"{path}: got rope.scaling.attn_factor, which is not read; expected 1")
    if kind == "yarn" and "rope.scaling.original_context_length" in table:
        scaling["original_max_position_embeddings"] = table["rope.scaling.original_context_length"]
    return scaling


def _factor_scaling(path: str, stored: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling that divides each frequency by the file's factors (Llama 3 computes them from its own): a
    longrope whose two sets are alike, so that no regime changes them.
    """
    half, factors = config["head_dim"] // 2, stored.astype(np.float64)
    if factors.shape != (half,) or not np.isfinite(factors).all() or factors.min() <= 0:
        raise WeightsError(
            f"{path}: got tensor {_FACTORS!r} of shape {factors.shape} and numbers from {factors.min()} on; expected "
            f"{half} positive numbers"
        )
    same = {"short_factor": factors.tolist(), "long_factor": factors.tolist(), "attention_factor": 1.0}
    longest = config["max_position_embeddings"]
    return {"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": longest, **same}
