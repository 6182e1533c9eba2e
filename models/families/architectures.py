"""Which family reads a configuration, by the architectures that it names."""

import difflib
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from .registry import FAMILIES

ALIASES = {
    # decapoda-research's first conversions of LLaMA; vLLM's registry reads them as Llama too.
    "LLaMAForCausalLM": "LlamaForCausalLM",
    # What transformers called it at first.
    # Qwen2.5-Omni-3B was released under this name; vLLM's registry has both for the thinker.
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}
"""Other names that files have for an architecture: the same function, under the same names of keys and tensors."""

_SHOWN, _LONGEST_NAME = 8, 80
"""How many names a message repeats, and how many characters of each."""


def find_architecture(raw: Mapping[str, Any], path: str) -> str:
    """Returns the architecture of a configuration, one that is known: the first of its `architectures` that is, or what
    its `model_type` stands for where it names none.

    Raises:
      ConfigError: none that is known; the message lists those that are, and the one whose name is nearest.
    """
    types = {family.model_type: family.architecture for family in FAMILIES.values()}
    names = raw.get("architectures") or [types.get(str(raw.get("model_type")), raw.get("model_type"))]
    if not isinstance(names, list) or not all(name is None or isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: got architectures {names!r}; expected a list of names")
    for name in names:
        found = ALIASES.get(str(name), str(name))
        if found in FAMILIES:
            return found

    near = difflib.get_close_matches(str(names[0])[:_LONGEST_NAME], FAMILIES, n=1)
    nearest = f"; the nearest is {near[0]!r}" if near else ""
    shown = [name if name is None else name[:_LONGEST_NAME] for name in names[:_SHOWN]]
    raise ConfigError(f"{path}: got architectures {shown}; expected one of {sorted(FAMILIES)}{nearest}")
