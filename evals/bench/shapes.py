"""Models to time and to count: shapes of releases, tiny models of every family, and random weights for either.

Fields and published counts are what is publicly known of these releases (Qwen3.5's largest are the defaults of
transformers' classes); not every file was read from its own repository, and a total that fits is the evidence that the
fields are right. No weights of these were loaded.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.window import Costs
from models import FAMILIES, ModelBackbone
from models.checkpoints import flatten_params
from models.decoder.costs import forward_costs
from models.families.family import abstract, parameters


class Released(NamedTuple):
    """A released checkpoint: `config.json`, and the published billions of parameters, towers too (None: not known)."""

    config: dict[str, Any]
    published: float | None


_HERE = Path(__file__).parent
_CONFIGS = json.loads((_HERE / "released_configs.json").read_text(encoding="utf-8"))
RELEASED = {name: Released(**fields) for name, fields in _CONFIGS.items()}
"""By Hugging Face repository."""
SHAPES: dict[str, dict[str, Any]] = json.loads((_HERE / "shapes.json").read_text(encoding="utf-8"))
"""`config.json` of text decoders, and of Qwen3.5 with a tower of one small layer in the released one's place."""
LARGE, SEVEN_BILLION, KIMI_VL = SHAPES["Qwen2-0.5B"], SHAPES["Qwen2.5-7B"], SHAPES["Kimi-VL-A3B"]
HYBRIDS = {name: raw for name, raw in SHAPES.items() if name.startswith("Qwen3.5")}
GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
REGIMES = {"Phi3ForCausalLM": "long"}


def qwen2_config(
    width: int, intermediate: int, heads: int, layers: int, kv_heads: int, vocabulary: int, **fields: Any
) -> dict[str, Any]:
    """Makes `config.json` of a Qwen2 of these sizes; `fields` replace others of it."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }
    return LARGE | sizes | fields


def config_of(raw: Mapping[str, Any]) -> Any:
    """Reads a `config.json`."""
    family = FAMILIES[raw["architectures"][0]]
    return family.config(raw, "exact", REGIMES.get(family.architecture))


def shape_costs(name: str, raw: Mapping[str, Any]) -> Costs:
    """Computes the costs of a text decoder of this `config.json`, in bfloat16; no model is made."""
    text = config_of(raw).text
    layout = text.layout
    rotating = [channel for channel in layout.channels if channel.rotates]
    depths = {channel.name: layout.depth(channel.name) for channel in rotating}
    # Two bytes a number.
    turning = 2 * sum(depths[channel.name] * channel.features for channel in rotating)
    rotary = sum(depths[channel.name] * channel.heads * channel.rotary for channel in rotating)
    return Costs(name, text.layers, layout.bytes_per_token("bfloat16"), turning, rotary, forward_costs(text))


@functools.cache
def tiny_models() -> dict[str, Path]:
    """Finds the file with the tiny model of each architecture, among the goldens of the tests.

    Raises:
      ConfigError: there are no goldens beside the package (they are not installed with it).
    """
    models: dict[str, Path] = {}
    for path in (*sorted(GOLDENS.glob("text/*.json")), *sorted(GOLDENS.glob("*/config.json"))):
        raw = json.loads(path.read_text())
        raw = raw.get("config", raw)
        # transformers writes no architecture into the configuration of this one.
        unnamed = ["Qwen2_5_VLForConditionalGeneration"] if raw["model_type"] == "qwen2_5_vl" else [""]
        models.setdefault(raw.get("architectures", unnamed)[0], path)
    if not models:
        expected = "a checkout of the repository, whose configurations are used"
        raise ConfigError(f"tiny models: got no folder {GOLDENS}; expected {expected}")
    return {name: path for name, path in models.items() if name in FAMILIES}


def tiny_config(architecture: str) -> dict[str, Any]:
    """Reads `config.json` of an architecture's tiny model. Raises ConfigError where there is none."""
    models = tiny_models()
    if architecture not in models:
        raise ConfigError(f"architecture: got {architecture!r}, without a tiny model; expected one of {sorted(models)}")
    raw = json.loads(models[architecture].read_text())
    return raw.get("config", raw) | {"architectures": [architecture]}


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
        return jnp.asarray(values)

    values: dict[str, Any] = {}
    for path, leaf in sorted(flatten_params(parameters(abstract(config))).items()):
        parent = values
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = draw(path[-1], leaf.shape)
    return ModelBackbone(config, values)


def with_buckets(backbone: ModelBackbone) -> ModelBackbone:
    """Returns the same model over the same arrays, with the default buckets, as sessions use it."""
    other = backbone.replaced(backbone.parameters)
    other.buckets = Buckets()
    return other


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Draws token ids that every vocabulary has, and that are no placeholder of any tiny model."""
    return np.random.default_rng(seed).integers(3, 290, count).tolist()
