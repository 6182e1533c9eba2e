"""Models to time: shapes of releases, and tiny models of their architectures.

Fields are what is publicly known of these releases, Qwen3.5's largest the defaults of transformers' classes; no file
was read from their own repositories, and no weights of them were loaded.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError
from models import ModelBackbone

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
"""`config.json` of text decoders, and of Qwen3.5 with a tower of one small layer in the released one's place."""
LARGE = SHAPES["Qwen2-0.5B"]
GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"


def qwen2_config(
    width: int, intermediate: int, heads: int, layers: int, kv_heads: int, vocabulary: int, **fields: Any
) -> dict[str, Any]:
    """Makes `config.json` of a Qwen2 of these sizes; `fields` replace others of it."""
    sizes = {"hidden_size": width, "intermediate_size": intermediate, "num_attention_heads": heads}
    sizes |= {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    return LARGE | sizes | fields


@functools.cache
def tiny_config(architecture: str) -> dict[str, Any]:
    """Reads `config.json` of an architecture's tiny model, from the goldens of the tests.

    Raises:
      ConfigError: there is none, or no goldens beside the package (they are not installed with it).
    """
    for path in (*sorted(GOLDENS.glob("text/*.json")), *sorted(GOLDENS.glob("*/config.json"))):
        raw = json.loads(path.read_text())
        raw = raw.get("config", raw)
        if architecture in raw.get("architectures", ()):
            return raw
    raise ConfigError(f"architecture: got {architecture!r}; expected one with a tiny model in {GOLDENS}")


def with_buckets(backbone: ModelBackbone) -> ModelBackbone:
    """Returns the same model over the same arrays, with the default buckets, as sessions use it."""
    other = backbone.replaced(backbone.parameters)
    other.buckets = Buckets()
    return other


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Draws token ids that every vocabulary has, and that are no placeholder of any tiny model."""
    return np.random.default_rng(seed).integers(3, 290, count).tolist()
