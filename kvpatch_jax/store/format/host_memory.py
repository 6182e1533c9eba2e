"""Memory that the host arrays of objects keep alive."""

from typing import Any

import jax
import numpy as np

from ...cache import Chunk


def memory_of(value: Any) -> int:
    """Counts the host bytes that a chunk, the parts of a patch or an array keep alive: whole buffers, each once.

    The buffer of a mapped file is the file, as if it had been copied: processes that share it count it in each.
    """
    arrays = [value]
    if isinstance(value, Chunk):
        arrays = [value.local, value.encoder, *value.kv.values(), *(value.hidden or {}).values()]
    blocks: dict[int, int] = {}
    while arrays:
        array = arrays.pop()
        if not isinstance(array, np.ndarray):
            if array is not None:  # packed, or a tree
                arrays += [leaf for leaf in jax.tree.leaves(array) if isinstance(leaf, np.ndarray)]
            continue
        while isinstance(base := array.base, np.ndarray):
            array = base
        blocks[id(array)] = array.nbytes
    return sum(blocks.values())
