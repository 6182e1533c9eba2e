"""Host arrays of objects: the memory that they keep alive, and stacks of layers that are views of it."""

from collections.abc import Sequence
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
    while True:
        owner = array.base
        if not isinstance(owner, np.ndarray):
            owner = getattr(owner, "base", None)  # the base of a strided view is an intermediate object
        if not isinstance(owner, np.ndarray):
            return array
        array = owner


def stack_views(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks L arrays of one shape; as a view if they are evenly spaced in one buffer."""
    first = parts[0]
    addresses = [part.ctypes.data for part in parts]
    steps = set(np.diff(addresses).tolist())
    base = first.base
    even = len(steps) == 1 and min(steps) >= first.nbytes and all(part.base is base for part in parts)
    if base is None or not even or any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        return np.stack(parts)

    raw = first.view(np.uint8)  # NumPy's stride tricks do not support every dtype, bfloat16 for one
    shape, strides = (len(parts), *raw.shape), (steps.pop(), *raw.strides)
    return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False).view(first.dtype)
