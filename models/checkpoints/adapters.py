"""LoRA adapters (arXiv:2106.09685) as `peft` saves them, merged into a checkpoint's tensors while these are read.

W + s · up · down, s = alpha / r (rank-stabilised: alpha / √r, arXiv:2312.03732), in float32; whoever reads rounds once.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, WeightsError

from .json_table import read_table
from .safetensors_files import SafetensorsSource
from .source import Slices, TensorInfo, TensorSource

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<rest>(\.\w+)*)")
_KNOWN = frozenset(
    {
        # Read here.
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save"),
        *("fan_in_fan_out", "init_lora_weights", "lora_bias"),
        # Of no effect on what was saved.
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    }
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base as it is; the others (PiSSA, OLoRA, …) take something away from it."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """What an adapter does to one tensor, by names of its file: another one in its place, and a product or a bias
    added. `down` is [r, in] and `up` [out, r]; an embedding [V, D] has their product transposed.
    """

    replaced: str | None = None
    down: str | None = None
    up: str | None = None
    bias: str | None = None
    embedding: bool = False
    scale: float = 1.0


class LoRASource:
    """A checkpoint's tensors with an adapter merged into them.

    Attributes:
      changed: names of the tensors that the adapter changes or adds.

    Args:
      inner: the base. directory: with `adapter_config.json` and `adapter_model.safetensors`.
      translate: name of a tensor as the adapter says it → as `inner` and the model do; None for one of another model.

    Raises:
      ConfigError: no adapter there, or one that is not a plain LoRA (it names the kind).
      WeightsError: a damaged file, a tensor of the adapter that matches none of the base, factors that do not fit.
    """

    def __init__(self, inner: TensorSource, directory: str | os.PathLike[str], translate: Callable[[str], str | None]):
        self._inner, self._directory = inner, Path(directory)
        self.origin = f"{inner.origin} with the adapter {self._directory}"
        config = read_adapter_config(self._directory)
        self._file = SafetensorsSource(self._directory, ADAPTER_FILE)
        self._changes = self._read_changes(config, translate)
        self.changed = frozenset(self._changes)
        self.tensors: dict[str, TensorInfo] = dict(inner.tensors)

        shapes = {name: info.shape for name, info in self._file.tensors.items()}
        for name, change in self._changes.items():
            info = inner.tensors[name] if change.replaced is None else self._file.tensors[change.replaced]
            # Sums are float32, whatever the base's type; a tensor that is only replaced keeps its own.
            found, dtype = info.shape, info.dtype if change.up is None and change.bias is None else "F32"
            if change.up is not None and change.down is not None:
                rows, columns = shapes[change.up][0], shapes[change.down][1]
                found = (columns, rows) if change.embedding else (rows, columns)
            elif change.bias is not None:
                found = shapes[change.bias]
            if found != info.shape:
                raise WeightsError(
                    f"{self._directory}: got a change of {name!r} of shape {found}; expected {info.shape}"
                )
            self.tensors[name] = TensorInfo(info.shape, dtype)

    def read(self, name: str, region: Slices | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reads a tensor or a region of it, merged. Raises WeightsError where data cannot be read."""
        change = self._changes.get(name)
        if change is None:
            return self._inner.read(name, region, out)

        region, numbers = region or (), lambda part: self._file.read(part).astype(np.float32)
        base = self._inner.read(name, region) if change.replaced is None else self._file.read(change.replaced, region)
        if change.up is None and change.bias is None:
            return base

        merged = np.array(base, np.float32)
        if change.bias is not None:
            merged += np.float32(change.scale) * numbers(change.bias)[region]
        if change.up is not None and change.down is not None:
            # Of the product only what the region asks for.
            first, second = numbers(change.up), numbers(change.down)
            if change.embedding:
                first, second = second.T, first.T
            rows, columns = (*region, *[slice(None)] * (2 - len(region)))
            merged += np.float32(change.scale) * (first[rows] @ second[:, columns])
        return merged

    def _read_changes(self, config: Mapping[str, Any], translate: Callable[[str], str | None]) -> dict[str, _Change]:
        """Returns what is done to which tensor, by the base's names."""
        changes: dict[str, _Change] = {}
        for name in sorted(self._file.tensors):
            module, field, kind = _parts(name)
            target = translate(f"{module}.{kind}")
            replaces = field == "replaced"
            if target is None or (target not in self._inner.tensors and not replaces):
                raise WeightsError(
                    f"{self._directory}: got tensor {name!r}, which matches none of {self._inner.origin}; expected an "
                    f"adapter of tensors that are there ({target!r} may be tied to another, or stored otherwise)"
                )
            change = changes.get(target, _Change())
            if getattr(change, field) is not None:
                raise WeightsError(f"{self._directory}: got tensor {name!r} twice; expected one for {target!r}")

            scale = change.scale if replaces else self._scale(config, name, module, field)
            embedding = change.embedding or "lora_embedding" in name
            changes[target] = dataclasses.replace(change, **{field: name}, scale=scale, embedding=embedding)

        if not changes:
            raise WeightsError(f"{self._directory / ADAPTER_FILE}: got no tensors; expected an adapter's")
        for target, change in changes.items():
            if (change.up is None) != (change.down is None):
                half = change.up or change.down
                raise WeightsError(f"{self._directory}: got only {half!r} of the factors of {target!r}; expected two")
        return changes

    def _scale(self, config: Mapping[str, Any], name: str, module: str, field: str) -> float:
        """Returns alpha / r of a module, or alpha / √r. Raises WeightsError where the factor has another rank."""
        rank = _of_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        shape, side = self._file.tensors[name].shape, {"down": 0, "up": 1}.get(field)
        if side is not None and (len(shape) != 2 or shape[side] != rank):
            raise WeightsError(
                f"{self._directory}: got tensor {name!r} of shape {shape}; expected a matrix with the rank, {rank}, on "
                f"axis {side}"
            )
        return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Reads `adapter_config.json`.

    Raises:
      ConfigError: not there, not a table, or not a plain LoRA: another kind of adapter, or an option that is not built.
    """
    path = directory / ADAPTER_CONFIG
    config = read_table(path, "an adapter's directory, as peft saves it")
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: got peft_type {config.get('peft_type')!r}, which is not built; expected 'LORA'")
    for key, value in config.items():
        if key not in _KNOWN and value not in (None, False, {}, []):
            raise ConfigError(
                f"{path}: got {key} {value!r}, which is not built or not known; expected a plain LoRA without it"
            )
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{path}: got init_lora_weights {config['init_lora_weights']!r}, which changes the base model; expected "
            f"one of {_PLAIN_STARTS}, as peft writes when it saves with path_initial_model_for_weight_conversion"
        )

    numbers = {key: config.get(key) for key in ("r", "lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key) or {}
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: got {key} {table!r}; expected a table")
        numbers |= {f"{key} of {pattern!r}": value for pattern, value in table.items()}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{path}: got {key} {value!r}; expected a positive number")
    return config


def _parts(name: str) -> tuple[str, str, str]:
    """Splits an adapter's tensor name: the module it belongs to, the field of `_Change`, and "weight" or "bias"."""
    bare = name.removeprefix("base_model.model.")
    match = _NAME.fullmatch(bare)
    # The whole of a module that was trained, or what LoRA wraps.
    if match is None:
        module, _, kind = bare.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".").rpartition(".")
        return module, "replaced", kind
    if match["rest"].endswith(".bias"):
        return match["module"], "bias", "bias"
    return match["module"], "down" if match["part"].endswith("A") else "up", "weight"


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: int | float) -> int | float:
    """Returns the value of the first pattern that the end of a module's name fits, as peft finds it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
