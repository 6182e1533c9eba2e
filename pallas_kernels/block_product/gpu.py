"""block_product for Hopper GPUs, on Mosaic GPU: one launch for all blocks, sums in the tensor cores' registers.

A thread block owns one block of rows and some columns of its matrix. The copy engine brings the next pieces of both,
several in flight, while the tensor cores multiply those that have arrived.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .._operands import refuse
from .._target import require_hopper

ROWS = (64, 128)
"""Rows that a block may have: what one warpgroup's accumulator holds."""
COLUMNS = (128, 64)
"""Columns of the result at once, best first."""
DEPTH, STAGES = 64, 4
"""Of what is summed over: how much is fetched at once, and how often in flight."""
SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)
COUNTED = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
"""Whether a kernel can say what it costs: since jax 0.12."""


def check(rows: int, dtype: Any, stack: Any) -> None:
    """Raises NotImplementedError for blocks of so many rows, of this dtype, or matrices that the kernel cannot take."""
    require_hopper()
    depth, columns = stack.shape[-2:]
    sizes = not depth or depth % DEPTH or not columns or columns % COLUMNS[-1]
    dtypes = f"rows of {jnp.dtype(dtype)} and matrices of {stack.dtype}; expected one dtype of 16 bits"
    refuse(
        (rows not in ROWS, f"blocks of {rows} rows; expected one of {ROWS}"),
        (dtype != stack.dtype or dtype not in SIXTEEN_BITS, dtypes),
        (bool(sizes), f"matrices of {depth} × {columns}; expected multiples of {DEPTH} and {COLUMNS[-1]}"),
    )


def kernel(
    x: Float[Array, "rows D"],
    stack: Float[Array, "E D I"],
    which: Int[Array, " M"],
    used: Int[Array, ""],
    *,
    interpret: Any = False,
) -> Float[Array, "rows I"]:
    """Computes what `reference.block_product` does of the first `used` blocks, for what `check` lets pass."""
    count, depth, width = len(which), *stack.shape[1:]
    rows = len(x) // count
    columns = next(size for size in COLUMNS if width % size == 0)

    def block_product(which_ref, used_ref, x_ref, stack_ref, out_ref, out_shared):
        block, column = jax.lax.axis_index("block"), jax.lax.axis_index("column")

        @pl.when(block < used_ref[0])
        def _():
            matrix = stack_ref.at[which_ref[block]]

            def multiply(total):
                def step(_, left, right):
                    plgpu.wgmma(total, left, right)
                    # All but this step's products are done: what they read may be overwritten.
                    plgpu.wgmma_wait(1)

                pipeline = plgpu.emit_pipeline(
                    step,
                    grid=(depth // DEPTH,),
                    in_specs=[
                        plgpu.BlockSpec((rows, DEPTH), lambda step: (block, step), delay_release=1),
                        plgpu.BlockSpec((DEPTH, columns), lambda step: (step, column), delay_release=1),
                    ],
                    max_concurrent_steps=STAGES,
                )
                pipeline(x_ref, matrix)
                return total[...]

            out_shared[...] = pl.run_scoped(multiply, plgpu.ACC((rows, columns))).astype(out_shared.dtype)
            plgpu.commit_smem()
            place = out_ref.at[pl.ds(block * rows, rows), pl.ds(column * columns, columns)]
            plgpu.copy_smem_to_gmem(out_shared, place)
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        block_product,
        out_type=jax.ShapeDtypeStruct((len(x), width), x.dtype),
        scratch_types={"out_shared": plgpu.SMEM((rows, columns), x.dtype)},
        # Neighbours in time share rows, and their expert's matrix is read once by all blocks that run together.
        grid=(count, width // columns),
        grid_names=("block", "column"),
        **(_cost(x, stack, count) if COUNTED else {}),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return run(which.astype(jnp.int32), used.astype(jnp.int32).reshape(1), x, stack)


def _cost(x: Array, stack: Array, blocks: int) -> dict[str, Any]:
    """Returns what a launch costs if every block is in use, each matrix read once."""
    (rows, depth), width = x.shape, stack.shape[-1]
    moved = x.dtype.itemsize * (rows * (depth + width) + min(blocks, len(stack)) * depth * width)
    return {"cost_estimate": pl.CostEstimate(2 * rows * depth * width, bytes_accessed=moved, transcendentals=0)}
