"""What a checkpoint's files say beside its image settings: configuration, tensors, tokenizer and chat template."""

import math
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike

from kvpatch_jax.errors import ConfigError

from .checkpoints import (
    ADAPTER_CONFIG,
    GgufConversion,
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


@runtime_checkable
class Files(Protocol):
    """The files of one checkpoint.

    Attributes:
      name: what they are called in messages.
      config: `config.json`, or what stands in its place.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def dtype(self) -> str | None:
        """Returns the dtype of the weights where the configuration names none at its top, else None."""
        ...

    def source(self, dtype: DTypeLike) -> TensorSource:
        """Opens the tensors; those of a GGUF file are dequantised to `dtype`."""
        ...

    def tokenizer(self) -> tuple[Any, str]:
        """Reads the tokenizer; None where there is none, and then why."""
        ...

    def chat_template(self) -> ChatTemplate | None:
        """Reads the chat template; None where there is none."""
        ...

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """Reads which token ids end an answer; () where nothing says so."""
        ...

    def answer_tokens(self) -> int | None:
        """Reads how many tokens an answer has at most; None where nothing says so."""
        ...


class DirectoryFiles:
    """A Hugging Face directory.

    Raises:
      ConfigError: no such directory, no readable config.json, or quantised weights.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._root = Path(directory)
        self.name = str(self._root / "config.json")
        self.config = _read_config(self._root)
        _check_plain(self.config, self._root)

    def dtype(self) -> str | None:
        """See `Files`; that of most elements."""
        if any(self.config.get(name) for name in ("dtype", "torch_dtype")):
            return None
        sizes: dict[str, int] = {}
        for info in SafetensorsSource(self._root).tensors.values():
            if info.dtype in _FLOATS:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
        return _FLOATS[max(sizes, key=lambda name: sizes[name])] if sizes else None

    def source(self, dtype: DTypeLike) -> TensorSource:
        """See `Files`."""
        return SafetensorsSource(self._root)

    def tokenizer(self) -> tuple[Any, str]:
        """See `Files`."""
        return read_tokenizer(self._root), NO_TOKENIZER

    def chat_template(self) -> ChatTemplate | None:
        """See `Files`."""
        return ChatTemplate.from_directory(self._root)

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """See `Files`."""
        return read_stop_tokens(self._root, tokenizer)

    def answer_tokens(self) -> int | None:
        """See `Files`."""
        return read_answer_tokens(self._root)


class GgufFiles:
    """A GGUF file."""

    def __init__(self, path: Path):
        self.name, self._conversion = str(path), GgufConversion(path)
        self.config = self._conversion.config

    def dtype(self) -> str | None:
        """See `Files`: None, weights are dequantised to float32."""
        return None

    def source(self, dtype: DTypeLike) -> TensorSource:
        """See `Files`."""
        return self._conversion.source(dtype)

    def tokenizer(self) -> tuple[Any, str]:
        """See `Files`."""
        missing = missing_tokenizer(self._conversion.metadata)
        if missing is not None:
            return None, f"{self.name}: {missing}"
        return gguf_tokenizer(self._conversion.metadata, self.config["vocab_size"]), NO_TOKENIZER

    def chat_template(self) -> ChatTemplate | None:
        """See `Files`."""
        return gguf_chat_template(self._conversion.metadata, self.name)

    def stop_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """See `Files`."""
        named = (self._conversion.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return tuple(dict.fromkeys(int(number) for number in named if number is not None))

    def answer_tokens(self) -> int | None:
        """See `Files`."""
        return None


def open_files(checkpoint: str | os.PathLike[str]) -> Files:
    """Opens a Hugging Face directory, a GGUF file, or a directory with exactly one GGUF file and no safetensors.

    Raises:
      ConfigError: no such file, no readable config.json, quantised weights, or a GGUF file with metadata of a model
        that is not known. WeightsError: a damaged GGUF file, or several.
    """
    path = find_gguf(Path(checkpoint))
    return DirectoryFiles(checkpoint) if path is None else GgufFiles(path)


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
