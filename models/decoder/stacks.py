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
"""Names of the decoder's stacks."""
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
    stacks = [leaf for path, leaf in found if _in_stack(path)]
    if not all(_on_one_cpu(leaf) for leaf in stacks) or sum(leaf.nbytes for leaf in stacks) < LEAST_BYTES:
        return state
    return jax.tree.unflatten(tree, [_layers_of(leaf) if _in_stack(path) else leaf for path, leaf in found])


def _in_stack(path: tuple[Any, ...]) -> bool:
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path[:2]]
    return names[0] == "decoder" and names[1] in STACKS


def _on_one_cpu(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and [d.platform for d in leaf.devices()] == ["cpu"]
    )


def _layers_of(stack: jax.Array) -> tuple[jax.Array, ...]:
    host = np.asarray(stack)  # a view
    (device,) = stack.devices()
    return tuple(jax.device_put(layer, device, may_alias=True) for layer in host)


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
