"""rotate_patch for TPU, on Mosaic: one launch over all layers, float32 inside, one pass over memory."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import Operands
from ..tpu.block import clear_block, write_block
from ..tpu.prepare import Tile, arrays_of, reach, specs_of, tile_for, untyped
from ..tpu.prepare import unsupported as unsupported


def _body(length_ref, *refs, names: tuple[str, ...], rotary: int, layout: str, interpret) -> None:
    """Writes one block of tokens of one layer; one of padding alone is cleared without a look at its operands."""
    given, out = dict(zip(names, refs[:-1], strict=True)), refs[-1]
    tokens = out.shape[0]
    start = pl.program_id(0) * tokens

    @pl.when(start < length_ref[0])
    def _():
        write_block(given, out, rotary, layout, interpret, length_ref[0] - start)

    @pl.when(start >= length_ref[0])
    def _():
        clear_block(out)


def kernel(
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    out_dtype: jax.typing.DTypeLike | None = None,
    tile: Tile | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v + dense) as `reference.rotate_patch`, of what `unsupported` has nothing against.

    Args:
      out_dtype: of the result; None is x's.
      tile: tokens per block; None asks the device's configuration, then `tile_of`.
      interpret: how to interpret the kernel where there is no TPU.
    """
    x = operands.x
    tokens = x.shape[-3]
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    arrays = arrays_of(operands, layout)
    tile = tile or tile_for(operands, out_dtype)
    block = min(tile.tokens, tokens)
    last = -(-tokens // block) - 1
    shape = arrays["x"].shape

    # Blocks write what no other block reads, so the grid may be gone through in any order.
    body = functools.partial(_body, names=tuple(arrays), rotary=operands.rotary, layout=layout, interpret=interpret)
    run = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(last + 1, shape[0]),
            in_specs=specs_of(arrays, block, shape[0]),
            out_specs=pl.BlockSpec((None, block, *shape[2:]), lambda i, g, _: (g, i, *([0] * (len(shape) - 2)))),
        ),
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotate_patch",
    )

    result = untyped(run, arrays["x"])(reach(tokens if length is None else length, block, last), *arrays.values())
    return result.reshape(x.shape)
