"""Stacks of layers as their layers, without a copy: what a decode step on a CPU reads its weights from.

A scan over stacked layers [L,…] cuts each layer's weights out of the stack, which XLA does by a copy on a CPU: three
times the memory traffic of reading each weight once. An unrolled step on arrays that are views of the stack reads them
where they lie. It costs compilation, about a quarter of a second per layer, so it is for steps of few tokens over large
stacks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

STACKS = ("layers", "dense_layers")
"""How names of the decoder's stacks begin."""
LEAST_BYTES = 2**24
"""Bytes of all stacks below which a copy costs nothing beside the rest of a step."""


def unstacked(state: Any) -> Any:
    """Splits the decoder's stacks into tuples of one array per layer, which share the stacks' memory.

    Args:
      state: a model's parameters, nested, the decoder's below "decoder".

    Returns:
      The same pytree, each leaf [L,…] of a stack a tuple of L arrays; or `state` itself where that would not help: on
      accelerators, over several devices, for small stacks, and while parameters are traced.
    """
    found, tree = jax.tree_util.tree_flatten_with_path(state)
    size = 0
    for path, leaf in found:
        if not _in_stack(path):
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return state
        if [device.platform for device in leaf.devices()] != ["cpu"]:
            return state
        size += leaf.nbytes
    if size < LEAST_BYTES:
        return state

    leaves = []
    for path, leaf in found:
        if _in_stack(path):
            # On a CPU the host array is a view of the stack, and so are its layers.
            (device,) = leaf.devices()
            leaf = tuple(jax.device_put(layer, device, may_alias=True) for layer in np.asarray(leaf))
        leaves.append(leaf)
    return jax.tree.unflatten(tree, leaves)


def _in_stack(path: tuple[Any, ...]) -> bool:
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path[:2]]
    return names[0] == "decoder" and str(names[1]).startswith(STACKS)


COPIED_BYTES = 2**28
"""Size of a stack up to which a run over some of its layers may copy these."""


def layers_to_scan(state: Any, first: int, last: int) -> tuple[Any, Callable[[Any], Any]]:
    """Returns what a scan goes over to see layers first … last-1 of a stack, and a function of each entry to its
    layer's state.

    Some layers of a large stack are looked up one by one, for a part of an array that is scanned over is copied; of a
    small one they are cut out, for looking up has dear derivatives.
    """
    leaves = jax.tree.leaves(state)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if (first, last) == (0, leaves[0].shape[0]) or size <= COPIED_BYTES:
        return jax.tree.map(lambda leaf: leaf[first:last], state), lambda entry: entry

    def look_up(at):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), state)

    return jnp.arange(first, last), look_up
