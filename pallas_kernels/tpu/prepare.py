"""From the operands of a call to the blocks of a kernel for TPUs: which arguments it takes, tiles, arrays, grids.

The grid runs over blocks of tokens, then over layers, so that cosines and sines are fetched once per block of tokens. A
channel of one head is seen as [layers, T, H], which is how XLA lays it out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from .._operands import Operands, first_reason, flat, padded_width, refusals, tables_of_channels

VMEM_BUDGET = 10 * 2**20
"""Bytes that the blocks of one step may take, both buffers and float32 temporaries counted."""
WHOLE = ("v", "x_scale", "scale")
"""Arrays that a block of tokens reads whole."""


class Tile(NamedTuple):
    """Tokens in one block."""

    tokens: int


def unsupported(operands: Operands, layout: str, out_dtype: str) -> str | None:
    """Returns why these kernels cannot take such arguments; None if they can. Any `layout` will do."""
    return first_reason(refusals(operands, out_dtype))


def tile_of(tokens: int, heads: int, width: int, rank: int, itemsize: int) -> Tile:
    """Finds the largest block of tokens that fits the budget: a multiple of 32, or all tokens."""
    lanes = padded_width(width)
    # Registers hold eight rows: the heads of a token take whole ones, but a channel of one head is laid out by tokens.
    rows = 1 if heads == 1 else -(-heads // 8) * 8
    ranks = padded_width(rank)
    # x and the result in two buffers each, four float32 temporaries; two tables and u in two buffers each.
    per_token = rows * lanes * (4 * itemsize + 4 * 4) + 2 * 2 * lanes * 4 + 2 * ranks * 4
    fixed = 2 * rank * heads * lanes * 4
    fit = max((VMEM_BUDGET - fixed) // per_token // 32 * 32, 32)
    return Tile(tokens if tokens <= fit else int(fit))


def tile_for(operands: Operands, out_dtype: jax.typing.DTypeLike) -> Tile:
    """Returns `tile_of` for the operands of a call."""
    tokens, heads, width = operands.x.shape[-3:]
    itemsize = max(operands.x.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    return tile_of(tokens, heads, width, operands.rank, itemsize)


def arrays_of(operands: Operands, layout: str) -> dict[str, Array]:
    """Makes what `write_block` reads, by name, leading dimensions merged; a channel of one head as [layers, T, H]."""
    heads, width = operands.x.shape[-2:]
    rows = (lambda leaf: leaf[:, :, 0]) if heads == 1 else (lambda leaf: leaf)
    arrays = {"x": rows(flat(operands.x, 3))}
    if operands.x_scale is not None:
        arrays["x_scale"] = rows(flat(operands.x_scale, 3))

    if operands.u is not None and operands.v is not None:
        arrays["u"], arrays["v"] = flat(operands.u, 2), flat(operands.v, 2)
        scale = operands.factor_scale()
        if scale is not None:
            arrays["scale"] = flat(scale, 2)

    if operands.dense is not None:
        arrays["dense"] = rows(flat(operands.dense, 3))
    if operands.cos is not None and operands.sin is not None:
        cos, sin = tables_of_channels(operands.cos, operands.sin, width, layout)
        arrays["cos"], arrays["sin"] = flat(cos, 2), flat(sin, 2)
    return arrays


def reach(length: Int[Array, ""] | int, tokens: int, last: int) -> Int[Array, " 2"]:
    """Returns the length, and the last block of `tokens` that has any of it: made here, for scalars in a kernel are
    slow.
    """
    length = jnp.int32(length)
    return jnp.stack([length, jnp.clip((length + tokens - 1) // tokens - 1, 0, last)])


def specs_of(arrays: dict[str, Array], tokens: int, groups: int) -> Sequence[pl.BlockSpec]:
    """Returns how each of the arrays goes through a grid of (blocks of `tokens`, `groups`); `reach` is the last
    prefetched.
    """
    return [_spec(leaf, name, tokens, groups) for name, leaf in arrays.items()]


def _spec(leaf: Array, name: str, tokens: int, groups: int) -> pl.BlockSpec:
    """Returns a block of one layer: one block of tokens, or all of it."""
    layers, *inner = leaf.shape

    def index(block, group, *scalars):
        layer = 0 if layers == 1 else group if layers == groups else group % layers
        if name in WHOLE:
            return (layer, *([0] * len(inner)))
        # Blocks past the length are not fetched: an index that stays as it was moves nothing.
        return (layer, jnp.minimum(block, scalars[-1][1]), *([0] * (len(inner) - 1)))

    shape = inner if name in WHOLE else (tokens, *inner[1:])
    return pl.BlockSpec((None, *shape), index)


def untyped(run: Callable[..., Array], like: Array) -> Callable[..., Array]:
    """Returns `run`, whose result lies as `like`, traced with no axis of a mesh in types.

    A reference whose type has axes cannot be seen in another shape.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return run
    plain: Any = jax.sharding.auto_axes(run, out_sharding=jax.typeof(like).sharding.spec)
    return plain
