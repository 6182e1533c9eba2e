"""What the parts of a backbone find in it."""

from typing import Any

import numpy as np
from jaxtyping import Array

from kvpatch_jax.core import Buckets, KVLayout

from .programs import Forward


class LoadedModel:
    """What the parts of a backbone (`Encoding`, `Generating`, `Writing`, `Answering`) find in it.

    Attributes:
      config, layout, buckets, programs, stop_tokens: as in `ModelBackbone`.
    """

    config: Any
    layout: KVLayout
    buckets: Buckets | None
    programs: Forward
    stop_tokens: tuple[int, ...]

    @property
    def tokenizer(self) -> Any:
        """Of `tokenizers`, or None."""
        raise NotImplementedError

    def _check_regime(self, positions: Array | np.ndarray, ahead: int = 0) -> None:
        """Refuses positions (and as many more) that the rope does not serve."""
        raise NotImplementedError
