"""From the operands of a call to a launch on a Hopper GPU and the arrays that its blocks fetch.

Everything here is traced by XLA before the kernel. It is small beside x, which is only seen in another shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

from .._operands import Operands, first_reason, flat, refusals, tables_of_channels
from . import launch as launches
from .factors import bfloat16_factors, padded_rank, widened_factors
from .launch import Items, Launch


def unsuitable_device() -> str | None:
    """Returns why the process's own GPU cannot run these kernels; None if it can, or if it has none."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return None if capability == "9.0" else f"a GPU of compute capability {capability}; expected 9.0"


def processors() -> int:
    """Counts the processors of the process's own GPU; an H200's where it has none."""
    own = getattr(jax.devices()[0], "core_count", None) if jax.default_backend() == "gpu" else None
    return launches.PROCESSORS if own is None else int(own)


def unsupported(operands: Operands, layout: str, out_dtype: str, whole_lines: bool = False) -> str | None:
    """Returns why these kernels cannot take such arguments; None if they can.

    Args:
      whole_lines: runs must travel as exactly 128 bytes, as `splice` needs it.
    """
    cos = operands.cos
    outer = () if cos is None else cos.shape[:-2]
    tables = f"cosines with leading dimensions {outer}; expected one table for all layers"
    checks = [
        # Blocks keep cosines in registers while they go through the layers.
        (any(size != 1 for size in outer), tables),
        (operands.u is not None and operands.rank == 0, "rank 0; expected 1 or more"),
        *refusals(operands, out_dtype),
    ]
    return unsuitable_device() or first_reason(checks) or _cannot_cut(operands, layout, out_dtype, whole_lines)


def _cannot_cut(operands: Operands, layout: str, out_dtype: str, whole_lines: bool) -> str | None:
    """Returns why there is no launch for operands that are otherwise as they should be; None if there is one."""
    heads, width = operands.x.shape[-2:]
    dense = operands.dense
    row = _row(operands, layout, out_dtype, whole_lines)
    least = launches.SWIZZLE // 2 // row.itemsize if whole_lines else row.least
    wider = whole_lines and dense is not None and dense.dtype.itemsize > jnp.dtype(out_dtype).itemsize
    checks = [
        (wider, f"a dense correction of {None if dense is None else dense.dtype}; expected the pool's {out_dtype}"),
        (
            not launches.ways_of(row, whole_lines),
            f"{heads} heads of {width} channels, {operands.rotary} rotary; expected halves in multiples of {least}",
        ),
        (
            launch_of(operands, layout, out_dtype, whole_lines) is None,
            f"rank {operands.rank} of {None if operands.u is None else operands.u.dtype} factors for {out_dtype} needs "
            "more shared memory than a block has",
        ),
    ]
    return first_reason(checks)


def _dtypes(operands: Operands, out_dtype: str) -> launches.LaunchDtypes:
    """Returns the dtypes that the launch reads and writes."""
    dense = "" if operands.dense is None else operands.dense.dtype.name
    return launches.LaunchDtypes(operands.x.dtype.name, out_dtype, dense, operands.x_scale is not None)


def _row(operands: Operands, layout: str, out_dtype: str, whole_lines: bool) -> launches.RowShape:
    """Returns what a launch cuts into items."""
    heads, width = operands.x.shape[-2:]
    sizes = _dtypes(operands, out_dtype).itemsizes
    # Whole lines are those of the result.
    itemsize = sizes[1] if whole_lines else max(sizes)
    return launches.RowShape(heads, width, operands.rotary, layout, itemsize, sizes[0])


def pieces_of(out_dtype: str) -> int:
    """Returns how many bfloat16 a float32 factor is split into: 24 bits for a float32 result, 16 for a bfloat16 one."""
    return 3 if out_dtype == "float32" else 2


def launch_of(operands: Operands, layout: str, out_dtype: str, whole_lines: bool = False) -> Launch | None:
    """Cuts a launch for such operands; None if no cut fits shared memory."""
    tokens, heads, width = operands.x.shape[-3:]
    rank = 0
    if operands.u is not None and operands.v is not None:
        scaled = operands.u_scale is not None or operands.v_scale is not None
        rank = padded_rank(operands.rank, operands.u.dtype, operands.v.dtype, pieces_of(out_dtype), scaled)
    layers = operands.x.size // (tokens * heads * width)
    ways = launches.ways_of(_row(operands, layout, out_dtype, whole_lines), whole_lines)
    return launches.launch_of(ways, tokens, layers, rank, _dtypes(operands, out_dtype), processors())


def stored_dtype(items: Items, dtype) -> jnp.dtype:
    """Returns the dtype that channels of `dtype` are seen in: of words where items are words."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype({1: jnp.uint16, 2: jnp.uint32}[dtype.itemsize]) if items.words else dtype


def rows_of(x: Num[Array, "*axes K H"], items: Items) -> Num[Array, "*axes columns"]:
    """Sees [..., K, H] as rows [..., K·H], or as rows of words where items are words. Costs nothing on a GPU."""
    rows = x.reshape(*x.shape[:-2], -1)
    if not items.words:
        return rows
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), stored_dtype(items, x.dtype))


def from_rows(rows: Num[Array, "*axes columns"], shape: tuple[int, ...], dtype) -> Num[Array, "..."]:
    """Returns the inverse of `rows_of`."""
    return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape)


def arrays_of(launch: Launch, operands: Operands) -> dict[str, Array]:
    """Makes what the blocks of a launch read, by name, leading dimensions merged."""
    items = launch.items
    arrays = {"x": rows_of(flat(operands.x, 3), items)}
    if operands.dense is not None:
        arrays["dense"] = rows_of(flat(operands.dense, 3), items)
    if operands.x_scale is not None:
        scale = flat(operands.x_scale, 3)
        arrays["x_scale"] = _evens_first(scale.reshape(scale.shape[0], -1), items)

    if operands.u is not None and operands.v is not None:
        u, v = widened_factors(operands.u, operands.v, operands.factor_scale())
        u, v = bfloat16_factors(flat(u, 2), flat(v, 2), pieces_of(launch.dtypes.result))
        arrays["u"], arrays["v"] = u, _evens_first(v, items)

    if operands.cos is not None and operands.sin is not None:
        cos, sin = (flat(leaf, 2)[0].astype(jnp.float32) for leaf in (operands.cos, operands.sin))
        if items.swaps:
            cos, sin = tables_of_channels(cos, sin, items.head, "pairs")
            arrays["swap"] = jnp.asarray(np.eye(items.width)[np.arange(items.width) ^ 1], jnp.bfloat16)
        # Registers are loaded for whole blocks, without a look at how many tokens there are.
        short = ((0, -launch.tokens % launch.rows), (0, 0))
        arrays["cos"], arrays["sin"] = jnp.pad(cos, short), jnp.pad(sin, short)

    return arrays


def length_of(launch: Launch, length: Int[Array, ""] | None) -> Int[Array, " 1"]:
    """Makes the number of tokens that count, as a kernel reads it."""
    return jnp.full((1,), launch.tokens, jnp.int32) if length is None else length.reshape(1)


def _evens_first(columns: Num[Array, "*axes columns"], items: Items) -> Num[Array, "*axes columns"]:
    """Returns [..., K·H] with each head's even columns before its odd ones where items are words."""
    if not items.words:
        return columns
    apart = columns.reshape(*columns.shape[:-1], items.heads, items.head // 2, 2)
    return jnp.swapaxes(apart, -1, -2).reshape(columns.shape)
