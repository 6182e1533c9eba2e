"""What a checkpoint's files say beside its image settings: configuration, tensors, tokenizer and chat template."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from .checkpoints import (
    ADAPTER_CONFIG,
    GgufFile,
    SafetensorsSource,
    TensorSource,
    find_gguf,
    read_table,
)
from .inputs.chat import ChatTemplate
from .inputs.gguf_tokenizer import gguf_chat_template, gguf_tokenizer, missing_tokenizer
from .inputs.stops import read_answer_tokens, read_stop_tokens
from .inputs.texts import read_tokenizer
from .prompts import NO_TOKENIZER

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of models, by safetensors' names."""


@dataclasses.dataclass(frozen=True)
class Files:
    """What the files of a checkpoint say.

    Attributes:
      name: what messages call its configuration. config: `config.json`, or what stands in its place.
      source: opens the tensors; those of a GGUF file are float32.
      tokenizer: None where there is none; `without` says why.
      chat_template: None where there is none.
      stop_tokens: that end an answer; () where nothing says so. answer_tokens: how many it has at most, or None.
    """

    name: str
    config: dict[str, Any]
    source: Callable[[], TensorSource]
    tokenizer: Any
    without: str
    chat_template: ChatTemplate | None
    stop_tokens: tuple[int, ...]
    answer_tokens: int | None

    def dtype(self) -> str | None:
        """Returns the dtype of most elements where the configuration names none at its top, else None."""
        if any(self.config.get(name) for name in ("dtype", "torch_dtype")):
            return None
        sizes: dict[str, int] = {}
        for info in self.source().tensors.values():
            if info.dtype in _FLOATS:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
        return _FLOATS[max(sizes, key=lambda name: sizes[name])] if sizes else None


def open_files(checkpoint: str | os.PathLike[str]) -> Files:
    """Opens a Hugging Face directory, a GGUF file, or a directory with exactly one GGUF file and no safetensors.

    Raises:
      ConfigError: no such file, no readable config.json, quantised weights, a tokenizer, template or settings that
        cannot be read, or a GGUF file with metadata of a model that is not known.
      WeightsError: a damaged GGUF file, or several.
    """
    root = Path(checkpoint)
    path = find_gguf(root)
    if path is not None:
        return _open_gguf(path)
    config = _read_config(root)
    _check_plain(config, root)
    tokenizer = read_tokenizer(root)
    return Files(
        name=str(root / "config.json"),
        config=config,
        source=lambda: SafetensorsSource(root),
        tokenizer=tokenizer,
        without=NO_TOKENIZER,
        chat_template=ChatTemplate.from_directory(root),
        stop_tokens=read_stop_tokens(root, tokenizer),
        answer_tokens=read_answer_tokens(root),
    )


def _open_gguf(path: Path) -> Files:
    file = GgufFile(path)
    missing = missing_tokenizer(file.metadata)
    stops = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return Files(
        name=str(path),
        config=file.config,
        source=lambda: file,
        tokenizer=None if missing else gguf_tokenizer(file.metadata, file.config["vocab_size"]),
        without=f"{path}: {missing}" if missing else NO_TOKENIZER,
        chat_template=gguf_chat_template(file.metadata, str(path)),
        stop_tokens=tuple(dict.fromkeys(int(number) for number in stops if number is not None)),
        answer_tokens=None,
    )


_QUANTISED_KEYS = ("quantization_config", "compression_config")
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json")


def _check_plain(config: dict[str, Any], root: Path) -> None:
    """Refuses a checkpoint that says that its weights are quantised.

    Raises:
      ConfigError: it names the method.
    """
    tables = (config, *(value for value in config.values() if isinstance(value, dict)))
    settings = [table[key] for table in tables for key in _QUANTISED_KEYS if table.get(key)]
    settings += [read_table(root / name) for name in _QUANTISED_FILES if (root / name).is_file()]
    for table in settings:
        method = table.get("quant_method") if isinstance(table, dict) else table
        raise ConfigError(
            f"{root}: got weights quantised by {method!r:.80}; expected plain ones: dequantise the checkpoint first "
            "and save it without its quantization_config"
        )


def _read_config(root: Path) -> dict[str, Any]:
    """Returns `config.json` as a table."""
    path = root / "config.json"
    if (root / ADAPTER_CONFIG).is_file() and not path.is_file():
        raise ConfigError(
            f"{root}: got an adapter ({ADAPTER_CONFIG}) and no model; expected the model's directory, and this one as "
            "adapter: load(DIRECTORY, adapter=…)"
        )
    if not root.exists():
        raise ConfigError(
            f"{str(root)!r}: got no such file; expected a Hugging Face checkpoint directory on this machine, or a "
            "repository of the Hugging Face hub: load('owner/name'), a str"
        )
    if not root.is_dir():
        raise ConfigError(f"{root}: got a file; expected its checkpoint directory, or a GGUF file (*.gguf)")
    inside = sorted(root.glob("snapshots/*"))
    cached = f": this is a repository in the hub's cache, whose files are in {inside[0]}" if inside else ""
    return read_table(path, f"a Hugging Face checkpoint directory{cached}")
