"""rotate_patch for Hopper GPUs, on Mosaic GPU: one launch over all layers, float32 inside, one pass over memory.

How a block works is told in `hopper/block.py`; here an item goes back to where it came from, and tokens from the length
on are zero.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .._operands import Operands
from ..hopper import arithmetic, block, prepare
from ..hopper.launch import ROWS, LaunchPlan
from ..hopper.prepare import unsupported as unsupported


def _work(here: block.RunningBlock, given, shared) -> None:
    length = given["length"][0]
    block.roles(
        here,
        # A block of padding alone has nothing to fetch.
        lambda: pl.when(here.start < length)(lambda: block.fetch(here, given, shared)),
        lambda: _compute(here, given, shared, length),
    )


def _compute(here: block.RunningBlock, given, shared, length) -> None:
    """Runs a computing warpgroup: its tokens of every item, or zeros where none of the block counts."""
    items = here.launch.items
    out = given["out"]
    rows = block.rows_of_group(here)
    tokens = pl.ds(here.start + here.group * ROWS, ROWS)

    def send(number, buffer, stage):
        layer, head = here.item(number)
        for run, column in enumerate(items.sources(here.kind, head)):
            place = out.at[layer, tokens, pl.ds(column, items.span)]
            plgpu.copy_smem_to_gmem(buffer.at[stage, run, rows], place, commit_group=False)

    @pl.when(here.start < length)
    def _():
        angles = arithmetic.Angles.of(here, given, shared)
        shape = (ROWS, items.width)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        keep = token < length - (here.start + here.group * ROWS)

        def deliver(number):
            values = arithmetic.compute(here, shared, angles, number)
            # Not a product with 0: padding may hold what is not a number.
            values = jnp.where(keep, values[0], 0.0), jnp.where(keep, values[1], 0.0)
            arithmetic.put(here, shared, number, values)
            send(number, *block.outlet(here, shared, number))

        block.consume(here, shared, deliver)

    @pl.when(here.start >= length)
    def _():
        # Zeros are made once and sent to every item's place.
        zeros = jnp.zeros((ROWS, items.width), jnp.float32)
        arithmetic.put(here, shared, 0, (zeros, zeros))

        def step(number, carry):
            send(number, block.outlet(here, shared, 0)[0], 0)
            plgpu.commit_smem_to_gmem_group()
            return carry

        jax.lax.fori_loop(0, here.count, step, None)
        plgpu.wait_smem_to_gmem(0)


def kernel(
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    out_dtype: str,
    plan: LaunchPlan | None = None,
    interpret=False,
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v + dense) as `reference.rotate_patch`, of what `unsupported` has nothing against.

    Args:
      out_dtype: of the result.
      plan: how the launch is cut up; None chooses.
      interpret: how to interpret the kernel where there is no GPU.
    """
    launch = prepare.launch_of(operands, layout, out_dtype)
    assert launch is not None
    launch = launch if plan is None else launch._replace(plan=plan)
    arrays = prepare.arrays_of(launch, operands) | {"length": prepare.length_of(launch, length)}
    out = jax.ShapeDtypeStruct(arrays["x"].shape, prepare.stored_dtype(launch.items, out_dtype))
    run = block.kernel_of("rotate_patch", launch, (*arrays, "out"), _work, interpret, out)
    return prepare.from_rows(run(*arrays.values()), operands.x.shape, jnp.dtype(out_dtype))
