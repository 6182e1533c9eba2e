"""Flax backbones. `load(directory)` reads any supported Hugging Face checkpoint directory."""

import json
import os
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from .qwen2_5_vl import ARCHITECTURE as _QWEN2_5_VL
from .vlm import QwenVLBackbone as QwenVLBackbone

FAMILIES = {_QWEN2_5_VL: QwenVLBackbone}
_BY_MODEL_TYPE = {"qwen2_5_vl": _QWEN2_5_VL}


def load(directory: str | os.PathLike[str], dtype: str | None = None, angles: str = "exact") -> QwenVLBackbone:
    """Load a backbone.

    Args:
      directory: a Hugging Face checkpoint directory (config.json, preprocessor_config.json, safetensors).
      dtype: "float32" or "bfloat16"; the configuration's own when None.
      angles: "exact" for cosines right at every position, "float32" for parity with the original engines.

    Raises:
      ConfigError: no readable config.json, or an architecture that is not built (the known ones are listed).
      WeightsError: missing, unexpected, mis-shaped or mis-typed tensors, or a damaged file.
    """
    path = Path(directory) / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there; expected a Hugging Face checkpoint directory") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    names = raw.get("architectures") or [_BY_MODEL_TYPE.get(raw.get("model_type", ""), raw.get("model_type"))]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name].from_directory(directory, raw, dtype, angles)
    raise ConfigError(f"architectures {names} in {path}; this library knows {sorted(FAMILIES)}")
