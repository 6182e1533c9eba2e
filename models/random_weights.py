"""Backbones with drawn weights, of any `config.json`: to time and to test shapes without a checkpoint."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from kvpatch_jax.core import on_device

from .backbone import ModelBackbone
from .checkpoints import flatten_params
from .families.family import abstract, parameters
from .families.registry import FAMILIES

_REGIMES = {"Phi3ForCausalLM": "long"}


def config_of(raw: Mapping[str, Any]) -> Any:
    """Reads a `config.json`."""
    family = FAMILIES[raw["architectures"][0]]
    return family.config(raw, "exact", _REGIMES.get(family.architecture))


def random_backbone(raw: Mapping[str, Any], seed: int = 0) -> ModelBackbone:
    """Makes a backbone of this `config.json` with drawn float32 parameters and without image settings."""
    generator, config = np.random.default_rng(seed), config_of(raw)

    # Norms near 1, biases near 0, matrices of standard deviation 1/√(inputs): nothing that could be left out.
    def draw(name: str, shape: tuple[int, ...]) -> Array:
        values = generator.standard_normal(shape, np.float32)
        if name == "weight":
            values = 1 + 0.2 * values
        elif name in ("bias", "correction"):
            values = 0.2 * values
        elif name in ("kernel", "gate", "up", "down", "embedding"):
            values = values * np.float32(1 / math.sqrt(shape[-1 if name == "embedding" else -2]))
        elif name == "decay_rate":
            # Heads of linear attention forget within one to a thousand tokens.
            values = 2 * values - 3.5
        else:
            values = 0.5 * values
        return on_device(values)

    values: dict[str, Any] = {}
    for path, leaf in sorted(flatten_params(parameters(abstract(config))).items()):
        parent = values
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = draw(path[-1], leaf.shape)
    return ModelBackbone(config, values)
