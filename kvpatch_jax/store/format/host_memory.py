"""Host arrays of objects: the memory that they keep alive."""

from typing import Any

import jax
import numpy as np

from ...cache import Chunk


def memory_of(value: Any) -> int:
    """Counts the host bytes that a chunk, the parts of a patch or an array keep alive: whole buffers, each once."""
    arrays = value
    if isinstance(value, Chunk):
        arrays = (dict(value.kv), value.local, value.encoder, dict(value.hidden or {}))
    blocks = (_block(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, np.ndarray))
    return sum({id(block): block.nbytes for block in blocks}.values())


def _block(array: np.ndarray) -> np.ndarray:
    """Returns the array that owns a view's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
