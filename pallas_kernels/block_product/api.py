"""block_product: checks and dispatch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from .._dispatch import Case, dispatch, kernel_module
from .._target import interpretation
from ..errors import KernelError
from . import reference


def block_product(
    x: Float[Array, "rows D"],
    stack: Float[Array, "E D I"],
    which: Int[Array, " M"],
    used: Int[Array, ""],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "rows I"]:
    """Multiplies each of M equal blocks of rows by one matrix of a stack: block m by `stack[which[m]]`.

    Products are summed in float32 and rounded once. The stack is read where it lies: no matrix is cut out of it.

    Args:
      x: blocks of rows / M rows, one behind the other.
      which: each block's matrix, int32. Numbers that are no matrix's must not occur in the first `used` blocks.
      used: how many blocks, the first ones, are asked for. What the others' rows hold in the result is not defined.
      implementation: "xla", "gpu", or several in order of preference. None: as in `rotate_patch`.

    Raises:
      KernelError: blocks of unequal size, or rows of another width than the matrices';
      x and stack of two dtypes.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    if not len(which) or len(x) % len(which):
        raise KernelError(f"block_product: got {len(x)} rows in {len(which)} blocks; expected blocks of one size")
    if x.shape[1] != stack.shape[1]:
        raise KernelError(f"block_product: got rows of {x.shape[1]}; expected {stack.shape[1]}, as the matrices have")
    if x.dtype != stack.dtype:
        raise KernelError(f"block_product: got rows of {x.dtype}; expected {stack.dtype}, as the matrices are")
    if what_runs(len(x) // len(which), x.dtype, stack, implementation) == "xla":
        return reference.block_product(x, stack, which)
    return _by_kernel(interpretation(), x, stack, which, used)


def what_runs(rows: int, dtype: Any, stack: Any, implementation: str | Sequence[str] | None = None) -> str:
    """Names what `block_product` would run for blocks of so many rows: "xla" or "gpu".

    Args:
      dtype: of the rows. stack: the matrices, or their shape and dtype.

    Raises:
      KernelUnavailableError: as `block_product`.
    """

    def run(name: str) -> str:
        if name == "gpu":
            kernel_module("block_product", "gpu").check(rows, dtype, stack)
        return name

    return dispatch(Case("block_product"), implementation, run, kernels=("gpu",))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(interpret: Any, x: Array, stack: Array, which: Array, used: Array) -> Array:
    """Returns the kernel's result, with the reference's derivatives: a kernel has none of its own."""
    return kernel_module("block_product", "gpu").kernel(x, stack, which, used, interpret=interpret)


@_by_kernel.defjvp
def _(interpret: Any, primals: Any, tangents: Any):
    x, stack, which, _ = primals

    def plain(x, stack):
        return reference.block_product(x, stack, which)

    return _by_kernel(interpret, *primals), jax.jvp(plain, (x, stack), tuple(tangents[:2]))[1]
