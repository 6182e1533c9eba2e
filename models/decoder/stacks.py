"""Weights of stacked layers [L,…] as a scan over layers sees them.

A scan cuts each layer's weights out of their stacks, which XLA does by a copy on a CPU: for a step of few tokens three
times the memory traffic of reading each weight once. There large matrices stay in their stacks (`InStack`), and a
product reads them in blocks that fit a cache. (Unrolled layers would read them where they lie, 10 to 20 % faster in
float32 and slower in bfloat16, but compile for a tenth of a second each.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._target import platform

STEP_TOKENS = 16
"""Tokens of all rows up to which a forward is bound by reading the weights."""
KERNEL_BYTES = 2**16
"""Bytes of a layer's matrix below which a copy costs nothing."""
BLOCK_BYTES = 2**20
"""Bytes of a matrix that a product copies at a time: what stays in a core's cache until it is multiplied."""
COPIED_BYTES = 2**28
"""Size of a stack up to which a run over some of its layers may copy these."""


@dataclasses.dataclass(frozen=True)
class InStack:
    """A layer's matrix [D,E] in the stack [L,D,E] of all layers'; `layer` is traced."""

    stack: Array
    layer: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's matrix."""
        return self.stack.shape[1:]

    def __getitem__(self, _: Any) -> "InStack":
        """Returns itself, as `parameter[...]` asks."""
        return self

    def whole(self) -> Float[Array, "D E"]:
        """Returns a copy."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)

    def product(self, x: Float[Array, "*rows D"], multiply: Callable[[Array, Array], Array]) -> Float[Array, "*rows E"]:
        """Returns the sum of `multiply` over blocks of the matrix's rows and of the last axis of `x`, in float32."""
        width, outputs = self.shape
        most = max(BLOCK_BYTES // (outputs * self.stack.dtype.itemsize), 1)
        size = max(rows for rows in range(1, min(width, most) + 1) if width % rows == 0)

        def add(total: Array, start: Array) -> tuple[Array, None]:
            block = jax.lax.dynamic_slice(self.stack, (self.layer, start, 0), (1, size, outputs))[0]
            return total + multiply(jax.lax.dynamic_slice_in_dim(x, start, size, axis=-1), block), None

        starts = jnp.arange(0, width, size)
        return jax.lax.scan(add, jnp.zeros((*x.shape[:-1], outputs), jnp.float32), starts)[0]


def layers_to_scan(
    state: Any, first: int, last: int, tokens: int | None = None
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns what a scan goes over to see layers first … last-1 of a stack, and a function of an entry and its
    layer's place in the stack to the layer's state.

    Some layers of a large stack are looked up one by one, for a part of an array that is scanned over is copied; of a
    small one they are cut out, for looking up has dear derivatives.

    Args:
      tokens: how many are run; of few on a CPU large kernels stay in the stack. None: they never do.
    """
    found, tree = jax.tree_util.tree_flatten_with_path(state)
    stays = tokens is not None and tokens <= STEP_TOKENS and platform() == "cpu"
    inside = [stays and _is_large_kernel(path, leaf) for path, leaf in found]
    cut = [leaf for (_, leaf), stay in zip(found, inside, strict=True) if not stay]

    def layer_of(own: list[Any], layer: Any) -> Any:
        rest = iter(own)
        return jax.tree.unflatten(
            tree,
            [InStack(leaf, layer) if stay else next(rest) for (_, leaf), stay in zip(found, inside, strict=True)],
        )

    if (first, last) == (0, len(cut[0])) or sum(leaf.size * leaf.dtype.itemsize for leaf in cut) <= COPIED_BYTES:
        return [leaf[first:last] for leaf in cut], layer_of

    def look_up(_: Any, layer: Any) -> Any:
        return layer_of([jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) for leaf in cut], layer)

    return [], look_up


def _is_large_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    large = leaf.ndim == 3 and leaf.size * leaf.dtype.itemsize >= KERNEL_BYTES * len(leaf)
    return large and "kernel" in names and "router" not in names
