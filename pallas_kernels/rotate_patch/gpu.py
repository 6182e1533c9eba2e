"""rotate_patch for Hopper GPUs, on Mosaic GPU: one launch over all layers, float32 inside, one pass over memory.

How a block works is told in `_hopper.py`; here an item goes back to where it came from, and tokens from the length on
are zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from .. import _cuts as cuts
from .. import _hopper as hopper
from .._pieces import bfloat16_factors, padded_rank, widened_factors
from . import reference

RANK_LIMIT = 256
DTYPES = ("bfloat16", "float32")
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


class Operands(NamedTuple):
    """The arrays of a call, or their shapes; what is not given is None. Checks do not look at `sin`."""

    x: Any
    cos: Any = None
    sin: Any = None
    u: Any = None
    v: Any = None
    dense: Any = None
    x_scale: Any = None
    u_scale: Any = None
    v_scale: Any = None

    @property
    def rotary(self) -> int:
        """Channels that rotate."""
        return 0 if self.cos is None else 2 * self.cos.shape[-1]


def unsupported(given: Operands, per_head: bool, layout: str, result: str, whole_lines: bool = False) -> str | None:
    """Why this kernel cannot take such arguments; None if it can.

    Args:
      result: dtype of what comes out.
      whole_lines: as `splice.gpu` needs it.
    """
    device = hopper.unsuitable_device()
    if device is not None:
        return device
    x, cos, u, v, dense = given.x, given.cos, given.u, given.v, given.dense
    narrow = [leaf.dtype.name for leaf in (x, u, v) if leaf is not None]
    wide = [leaf.dtype.name for leaf in (dense,) if leaf is not None] + [result]
    if any(name not in DTYPES + NARROW for name in narrow) or any(name not in DTYPES for name in wide):
        return f"dtypes {narrow + wide}; expected {DTYPES}, or before the arithmetic {NARROW}"
    if per_head and u is not None:
        return "factors per head"
    if u is not None and not 0 < u.shape[-1] <= RANK_LIMIT:
        return f"rank {u.shape[-1]}; expected 1 to {RANK_LIMIT}"
    if 0 in x.shape:
        return f"an empty array {x.shape}"
    leading = x.shape[:-3]
    for name, inner in (("u", 2), ("v", 2), ("dense", 3), ("x_scale", 3), ("u_scale", 2), ("v_scale", 2)):
        leaf = getattr(given, name)
        outer = () if leaf is None else leaf.shape[: leaf.ndim - inner]
        if any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]:
            return f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}"
    if cos is not None and any(size != 1 for size in cos.shape[:-2]):
        return f"cosines with leading dimensions {cos.shape[:-2]}; expected one table for all layers"
    if cos is not None and cos.shape[-2] != x.shape[-3]:
        return f"cosines of {cos.shape[-2]} tokens; expected {x.shape[-3]}"
    return _unsupported_cut(given, layout, result, whole_lines)


def _unsupported_cut(given: Operands, layout: str, result: str, whole_lines: bool) -> str | None:
    heads, width = given.x.shape[-2:]
    if whole_lines and given.dense is not None and given.dense.dtype.itemsize > jnp.dtype(result).itemsize:
        return f"a dense correction of {given.dense.dtype}; expected the pool's {result}"
    row = _row(given, layout, result, whole_lines)
    if not cuts.ways_of(row, whole_lines):
        least = cuts.SWIZZLE // 2 // row.itemsize if whole_lines else row.least
        return f"{heads} heads of {width} channels, {given.rotary} rotary; expected halves in multiples of {least}"
    if launch_of(given, layout, result, whole_lines) is None:
        factors = f"rank {given.u.shape[-1]} of {given.u.dtype} factors"
        return f"{factors} for {result} needs more shared memory than a block has"
    return None


def numbers_of(given: Operands, result: str) -> cuts.Numbers:
    """What numbers the launch reads and writes."""
    dense = "" if given.dense is None else given.dense.dtype.name
    return cuts.Numbers(given.x.dtype.name, result, dense, given.x_scale is not None)


def _row(given: Operands, layout: str, result: str, whole_lines: bool) -> cuts.Row:
    heads, width = given.x.shape[-2:]
    sizes = numbers_of(given, result).itemsizes
    # Whole lines are those of the result.
    itemsize = sizes[1] if whole_lines else max(sizes)
    return cuts.Row(heads, width, given.rotary, layout, itemsize, sizes[0])


def pieces_of(result: str) -> int:
    """How many bfloat16 a float32 factor is split into: 24 bits for a float32 result, 16 for a bfloat16 one."""
    return 3 if result == "float32" else 2


def launch_of(given: Operands, layout: str, result: str, whole_lines: bool = False) -> cuts.Launch | None:
    """The launch for such arguments; None if no cut fits shared memory."""
    tokens, heads, width = given.x.shape[-3:]
    rank = 0
    if given.u is not None:
        scaled = given.u_scale is not None or given.v_scale is not None
        rank = padded_rank(given.u.shape[-1], given.u.dtype, given.v.dtype, pieces_of(result), scaled)
    layers = given.x.size // (tokens * heads * width)
    ways = cuts.ways_of(_row(given, layout, result, whole_lines), whole_lines)
    return cuts.launch_of(ways, tokens, layers, rank, numbers_of(given, result), hopper.processors())


def rows_of(x: Array, items: cuts.Items) -> Array:
    """[..., K, H] as rows [groups, ..., K·H], or of words where items are words. Costs nothing on a GPU."""
    rows = x.reshape(*x.shape[:-2], -1)
    if not items.words:
        return rows
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), hopper.stored(items, x.dtype))


def from_rows(rows: Array, shape: tuple[int, ...], dtype) -> Array:
    """The inverse of `rows_of`."""
    return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape)


def operands(launch: cuts.Launch, call: Operands) -> dict[str, Array]:
    """The kernel's operands by name."""
    items = launch.items
    given = {"x": rows_of(reference.flat(call.x, 3), items)}
    if call.dense is not None:
        given["dense"] = rows_of(reference.flat(call.dense, 3), items)
    if call.x_scale is not None:
        scale = reference.flat(call.x_scale, 3)
        given["x_scale"] = _evens_first(scale.reshape(scale.shape[0], -1), items)
    if call.u is not None:
        u, v = widened_factors(call.u, call.v, call.u_scale, call.v_scale)
        u, v = bfloat16_factors(reference.flat(u, 2), reference.flat(v, 2), pieces_of(launch.numbers.result))
        given |= {"u": u, "v": _evens_first(v, items)}
    if call.cos is not None:
        short = -launch.tokens % launch.rows
        cos, sin = (reference.flat(leaf, 2)[0].astype(jnp.float32) for leaf in (call.cos, call.sin))
        if items.swaps:
            cos, sin = _tables(cos, sin, items.head)
            given["swap"] = jnp.asarray(np.eye(items.width)[np.arange(items.width) ^ 1], jnp.bfloat16)
        given |= {name: jnp.pad(leaf, ((0, short), (0, 0))) for name, leaf in (("cos", cos), ("sin", sin))}
    return given


def _tables(cos: Array, sin: Array, width: int) -> tuple[Array, Array]:
    """Cosine and signed sine of every channel of a head in pairs, [T, H]: 1 and 0 where nothing rotates."""
    join = lambda first, second: jnp.stack([first, second], -1).reshape(first.shape[0], -1)
    rest = ((0, 0), (0, width - 2 * cos.shape[-1]))
    return jnp.pad(join(cos, cos), rest, constant_values=1.0), jnp.pad(join(-sin, sin), rest)


def _evens_first(columns: Array, items: cuts.Items) -> Array:
    """[..., K·H] with each head's even columns before its odd ones where items are words."""
    if not items.words:
        return columns
    apart = columns.reshape(*columns.shape[:-1], items.heads, items.head // 2, 2)
    return jnp.swapaxes(apart, -1, -2).reshape(columns.shape)


def _work(here: hopper.Here, given, shared) -> None:
    length = given["length"][0]
    hopper.roles(
        here,
        lambda: pl.when(here.start < length)(lambda: hopper.fetch(here, given, shared)),
        lambda: _compute(here, given, shared, length),
    )


def _compute(here: hopper.Here, given, shared, length) -> None:
    items = here.launch.items
    out = given["out"]
    rows = pl.ds(here.group * hopper.ROWS, hopper.ROWS)
    tokens = pl.ds(here.start + here.group * hopper.ROWS, hopper.ROWS)

    def send(number, buffer, stage):
        layer, head = here.item(number)
        for run, column in enumerate(items.sources(here.kind, head)):
            place = out.at[layer, tokens, pl.ds(column, items.span)]
            plgpu.copy_smem_to_gmem(buffer.at[stage, run, rows], place, commit_group=False)

    @pl.when(here.start < length)
    def _():
        angles = hopper.Angles.of(here, given, shared)
        shape = (hopper.ROWS, items.width)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        keep = token < length - (here.start + here.group * hopper.ROWS)

        def deliver(number):
            values = hopper.compute(here, shared, angles, number)
            values = jnp.where(keep, values[0], 0.0), jnp.where(keep, values[1], 0.0)
            hopper.put(here, shared, number, values)
            send(number, *hopper.outlet(here, shared, number))

        hopper.consume(here, shared, deliver)

    @pl.when(here.start >= length)
    def _():
        zeros = jnp.zeros((hopper.ROWS, items.width), jnp.float32)
        hopper.put(here, shared, 0, (zeros, zeros))

        def step(number, carry):
            send(number, hopper.outlet(here, shared, 0)[0], 0)
            plgpu.commit_smem_to_gmem_group()
            return carry

        jax.lax.fori_loop(0, here.count, step, None)
        plgpu.wait_smem_to_gmem(0)


def kernel(
    given: Operands, length: Int[Array, ""] | None, *, layout: str, result: str, plan=None, interpret=False
) -> Array:
    """R · (x + u v + dense) as `reference.rotate_patch` has it, for arguments that `unsupported` has nothing against.

    Args:
      result: dtype of what comes out.
      plan: how the launch is cut up; None chooses.
      interpret: how to interpret the kernel where there is no GPU.
    """
    launch = launch_of(given, layout, result)
    assert launch is not None
    launch = launch if plan is None else launch._replace(plan=plan)
    arrays = operands(launch, given)
    arrays["length"] = jnp.full((1,), launch.tokens, jnp.int32) if length is None else length.reshape(1)
    out = jax.ShapeDtypeStruct(arrays["x"].shape, hopper.stored(launch.items, result))
    run = hopper.kernel_of("rotate_patch", launch, (*arrays, "out"), _work, interpret, out)
    return from_rows(run(*arrays.values()), given.x.shape, jnp.dtype(result))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def rotate_patch(layout, result, interpret, x, cos, sin, u, v, dense, length, x_scale, u_scale, v_scale):
    """`kernel`, with the reference's derivatives."""
    given = Operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale)
    return kernel(given, length, layout=layout, result=result, interpret=interpret)


@rotate_patch.defjvp
def _rotate_patch_jvp(layout, result, interpret, primals, tangents):
    plain = functools.partial(reference.rotate_patch, per_head=False, layout=layout, out_dtype=result)
    out = rotate_patch(layout, result, interpret, *primals)
    return out, jax.jvp(plain, tuple(primals), tuple(tangents))[1]
