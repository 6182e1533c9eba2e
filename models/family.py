"""What tells one family of checkpoints from another: a handful of functions, and no class to derive from.

To add a family: a configuration with `.text` (a `DecoderConfig`), `.family` and `.to_dict()`; a module with `.decoder`
and `.embed(input_ids, pixel_values, plan)`; the list of entries that says where tensors go; a `Family` that names them;
and a line in `models/__init__.py`. A family without images needs a row in `text_families.py`.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from .decoder import DecoderConfig
from .weights import Entry

Arrays = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@runtime_checkable
class Config(Protocol):
    """What a backbone asks of its configuration."""

    @property
    def text(self) -> DecoderConfig:
        """The decoder's configuration."""
        ...

    @property
    def family(self) -> "Family":
        """The family that reads it."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """`config.json`, which the family reads back."""
        ...


@dataclasses.dataclass(frozen=True)
class Vision:
    """What a family does with images on the host. Arrays are what the processor makes of all images of a prompt.

    Attributes:
      settings: directory → image settings, a dataclass with `.save(directory)`.
      process: (images, settings) → arrays, `pixel_values` among them.
      tokens: (config, arrays, index, tokenizer) → the token ids that stand for image `index`, start and end included.
      plan: (config, input_ids [B,T], arrays) → the index arrays that `embed` takes beside `pixel_values` (None when
        there are no images); raises InputError where ids, patches and grids do not match.
      fills: config → the plan's tables of patch numbers (1) or feature numbers (features per tile), for padding to
        buckets: the number one past the last stands for none.
    """

    settings: Callable[[str | os.PathLike[str]], Any]
    process: Callable[[Sequence[Any], Any], dict[str, np.ndarray]]
    tokens: Callable[[Any, Arrays, int, Any], list[int]]
    plan: Callable[[Any, np.ndarray, Arrays], Mapping[str, Any] | None]
    fills: Callable[[Any], Mapping[str, int]]


def count_positions(config: Config, input_ids: np.ndarray, arrays: Arrays) -> np.ndarray:
    """Positions 0, 1, 2, … of one prompt's tokens, int32 [T]: the rule of every family without M-RoPE."""
    return np.arange(len(input_ids), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes:
      architecture: the name in `config.json`.
      config: (config.json, angles, regime) → configuration; regime as `models.load` takes it.
      module: (config, rngs) → nnx module with `.decoder` and `.embed(input_ids, pixel_values, plan)`, which gives
        embeddings [B,T,D], or these and deepstack features [B,T,n,D].
      entries: (config, shapes) → where tensors go. `shapes` are those of the file's tensors, for families whose
        releases differ; empty when saving.
      positions: (config, input_ids [T], arrays) → positions [T] or [T,A] of one prompt.
      vision: None for a text family.
      ignore: regular expressions of tensors that may be in a file and are not read.
      model_type: for a `config.json` that names no architecture.
    """

    architecture: str
    config: Callable[[Mapping[str, Any], str, str | int | None], Any]
    module: Callable[[Any, nnx.Rngs], Any]
    entries: Callable[[Any, Shapes], list[Entry]]
    positions: Callable[[Any, np.ndarray, Arrays], np.ndarray] = count_positions
    vision: Vision | None = None
    ignore: tuple[str, ...] = ()
    model_type: str = ""

    def ignored(self, config: Config) -> tuple[str, ...]:
        """`ignore`, and the output head where it is tied to the embedding."""
        return (*self.ignore, r"(.*\.)?lm_head\.weight") if config.text.tied_embeddings else self.ignore


def abstract(config: Any) -> Any:
    """The backbone's module with shapes instead of values."""
    return nnx.eval_shape(lambda: config.family.module(config, nnx.Rngs(0)))


def parameters(model: nnx.Module) -> dict[str, Any]:
    """The parameters as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_parameters(config: Any, values: dict[str, Any]) -> Any:
    """The module of this configuration holding these parameters (nested as `parameters` gives them)."""
    model = abstract(config)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(model, state)
    return model


def with_dtype(config: Any, dtype: str) -> Any:
    """The configuration with every part of it that has a dtype in this one."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    typed = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part) and hasattr(part, "dtype")}
    replaced = {name: dataclasses.replace(part, dtype=dtype) for name, part in typed.items()}  # type: ignore[type-var]
    return dataclasses.replace(config, **replaced)
