"""Flax backbones. `load(directory)` reads any supported Hugging Face checkpoint directory."""

import json
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from kvpatch_jax.errors import ConfigError

from .backbone import ModelBackbone as ModelBackbone
from .backbone import QwenVLBackbone as QwenVLBackbone
from .families.family import Family
from .families.image_families import IMAGE_FAMILIES
from .families.qwen2_5_vl import FAMILY as _QWEN2_5_VL
from .families.text_families import TEXT_FAMILIES
from .inputs.buckets import Buckets as Buckets

FAMILIES: dict[str, Family] = {_QWEN2_5_VL.architecture: _QWEN2_5_VL} | IMAGE_FAMILIES | TEXT_FAMILIES
_BY_MODEL_TYPE = {family.model_type: family.architecture for family in FAMILIES.values()}


def load(
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    angles: str = "exact",
    regime: str | int | None = None,
    buckets: Buckets | None = None,
    mesh: Mesh | None = None,
) -> ModelBackbone:
    """Load a backbone.

    Args:
      directory: a Hugging Face checkpoint directory (config.json, safetensors, and for images
        preprocessor_config.json).
      dtype: "float32" or "bfloat16"; the configuration's own when None.
      angles: "exact" for cosines right at every position, "float32" for parity with the original engines.
      regime: for ropes whose frequencies depend on the sequence length, the one set to use: "short" (the default) or
        "long" for longrope, a length for dynamic scaling (the model's own by default).
      buckets: sizes that prompts and images are padded to, so that another size in the same bucket compiles nothing
        anew; None for no padding.
      mesh: lays parameters and KV over the axis "tensor" of this mesh, as `models/sharding.py` says; each shard goes
        from the file straight to its devices. None puts everything on the default device.

    Raises:
      ConfigError: no such directory (names of the Hugging Face hub are not fetched), no readable config.json, a key
        that is not known for the model or not of its kind, a layer that keeps no KV, a regime for a rope that has none,
        an architecture that is not built (the known ones are listed), or a mesh without the axis "tensor" or with a
        number of devices on it that does not divide the model's heads, KV heads, MLP widths or experts.
      WeightsError: missing, unexpected, mis-shaped or mis-typed tensors, a damaged file, or a parameter that did not
        come out in its type and sharding.
    """
    path = Path(directory) / "config.json"
    raw = _read(path)
    names = raw.get("architectures") or [_BY_MODEL_TYPE.get(str(raw.get("model_type")), raw.get("model_type"))]
    if not isinstance(names, list) or not all(name is None or isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: architectures is {names!r}; expected a list of names")
    for name in names:
        if name in FAMILIES:
            return ModelBackbone.from_directory(FAMILIES[name], directory, raw, dtype, angles, regime, buckets, mesh)
    raise ConfigError(f"architectures {names} in {path}; this library knows {sorted(FAMILIES)}")


def _read(path: Path) -> dict[str, Any]:
    """`config.json` as a table."""
    if not path.parent.exists():
        raise ConfigError(
            f"{str(path.parent)!r} is not there; expected a Hugging Face checkpoint directory on this machine. Names "
            "of the hub are not fetched: download the checkpoint first and give its directory"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is not there; expected a Hugging Face checkpoint directory") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; expected a table")
    return raw


def save(backbone: ModelBackbone, directory: str | os.PathLike[str], dtype: str | None = None) -> Path:
    """Write a backbone as a Hugging Face checkpoint directory that `load` (and transformers) reads. Returns it.

    `dtype` casts the parameters; None leaves them.
    """
    return backbone.save(directory, dtype)
