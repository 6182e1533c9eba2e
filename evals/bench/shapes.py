"""Models to time: shapes of releases, and the tiny models of every family.

Fields are what is publicly known of these releases, Qwen3.5's largest the defaults of transformers' classes; no file
was read from their own repositories, and no weights of them were loaded.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import FAMILIES

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
def tiny_models() -> dict[str, dict[str, Any]]:
    """Reads `config.json` of each architecture's tiny model, from the goldens of the tests.

    Raises:
      ConfigError: there are no goldens beside the package (they are not installed with it).
    """
    models: dict[str, dict[str, Any]] = {}
    for path in sorted(GOLDENS.glob("*/config.json")):
        raw = json.loads(path.read_text())
        # transformers writes no architecture into the configuration of this one.
        unnamed = "Qwen2_5_VLForConditionalGeneration" if raw["model_type"] == "qwen2_5_vl" else ""
        name = raw.get("architectures", [unnamed])[0]
        if name in FAMILIES:
            models.setdefault(name, raw | {"architectures": [name]})
    if not models:
        raise ConfigError(f"tiny models: got no folder {GOLDENS}; expected a checkout of the repository")
    return models


def tiny_config(architecture: str) -> dict[str, Any]:
    """Reads `config.json` of an architecture's tiny model. Raises ConfigError where there is none."""
    if architecture not in tiny_models():
        expected = f"one of {sorted(tiny_models())}"
        raise ConfigError(f"architecture: got {architecture!r}, without a tiny model; expected {expected}")
    return tiny_models()[architecture]


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Draws token ids that every vocabulary has, and that are no placeholder of any tiny model."""
    return np.random.default_rng(seed).integers(3, 290, count).tolist()
