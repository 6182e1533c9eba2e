"""rotate_patch for Hopper GPUs, on Mosaic GPU: one launch over all layers, float32 inside, one pass over memory.

How a block works is told in `_hopper.py`; here an item goes back to where it came from, and tokens from the length on
are zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .. import _hopper as hopper
from .._pieces import bfloat16_factors, padded_rank
from . import reference

RANK_LIMIT = 256
DTYPES = ("bfloat16", "float32")


def unsupported(
    x, cos, u, v, dense, per_head: bool, layout: str, out_dtype: str | None = None, whole_lines: bool = False
) -> str | None:
    """Why this kernel cannot take such arguments; None if it can. `whole_lines`: as `splice.gpu` needs it."""
    device = hopper.unsuitable_device()
    if device is not None:
        return device
    given = [leaf for leaf in (x, u, v, dense) if leaf is not None]
    if any(leaf.dtype.name not in DTYPES for leaf in given):
        return f"dtypes {[leaf.dtype.name for leaf in given]}; expected {DTYPES}"
    if out_dtype not in (None, x.dtype.name):
        return f"a result of {out_dtype}; expected x's {x.dtype}"
    if per_head and u is not None:
        return "factors per head"
    if u is not None and not 0 < u.shape[-1] <= RANK_LIMIT:
        return f"rank {u.shape[-1]}; expected 1 to {RANK_LIMIT}"
    if 0 in x.shape:
        return f"an empty array {x.shape}"
    leading = x.shape[:-3]
    for name, leaf, inner in (("u", u, 2), ("v", v, 2), ("dense", dense, 3)):
        outer = () if leaf is None else leaf.shape[: leaf.ndim - inner]
        if any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]:
            return f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}"
    if dense is not None and dense.dtype != x.dtype:
        return f"a dense correction of {dense.dtype}; expected x's {x.dtype}"
    if cos is not None and any(size != 1 for size in cos.shape[:-2]):
        return f"cosines with leading dimensions {cos.shape[:-2]}; expected one table for all layers"
    if cos is not None and cos.shape[-2] != x.shape[-3]:
        return f"cosines of {cos.shape[-2]} tokens; expected {x.shape[-3]}"
    return _unsupported_cut(x, cos, u, v, dense, layout, whole_lines)


def _unsupported_cut(x, cos, u, v, dense, layout: str, whole_lines: bool) -> str | None:
    heads, width = x.shape[-2:]
    rotary = 0 if cos is None else 2 * cos.shape[-1]
    if rotary and layout == "pairs" and x.dtype != jnp.bfloat16:
        return f"rotary pairs of {x.dtype}; expected bfloat16"
    if not hopper.ways_of(heads, width, rotary, layout, x.dtype.itemsize, whole_lines):
        least = hopper.SWIZZLE // x.dtype.itemsize if whole_lines else hopper.NARROWEST
        return f"{heads} heads of {width} channels, {rotary} rotary; expected halves in multiples of {least}"
    if launch_of(x, cos, u, v, dense, layout, whole_lines) is None:
        return f"rank {u.shape[-1]} of {u.dtype} factors on {x.dtype} needs more shared memory than a block has"
    return None


def pieces_of(x) -> int:
    """How many bfloat16 a float32 factor is split into: 24 bits for a float32 result, 16 for a bfloat16 one."""
    return 3 if x.dtype == jnp.float32 else 2


def launch_of(x, cos, u, v, dense, layout: str, whole_lines: bool = False) -> hopper.Launch | None:
    """The launch for such arguments; None if no cut fits shared memory."""
    tokens, heads, width = x.shape[-3:]
    rotary = 0 if cos is None else 2 * cos.shape[-1]
    ways = hopper.ways_of(heads, width, rotary, layout, x.dtype.itemsize, whole_lines)
    rank = 0 if u is None else padded_rank(u.shape[-1], u.dtype, v.dtype, pieces_of(x))
    layers = x.size // (tokens * heads * width)
    return hopper.launch_of(ways, tokens, layers, rank, x.dtype.itemsize, dense is not None)


def rows_of(x: Array, items: hopper.Items) -> Array:
    """[..., K, H] as rows [groups, ..., K·H], or of 32-bit words where items are words. Costs nothing on a GPU."""
    rows = x.reshape(*x.shape[:-2], -1)
    if not items.words:
        return rows
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), jnp.uint32)


def from_rows(rows: Array, shape: tuple[int, ...], dtype) -> Array:
    """The inverse of `rows_of`."""
    return jax.lax.bitcast_convert_type(rows, dtype).reshape(shape)


def operands(launch: hopper.Launch, x, cos, sin, u, v, dense) -> dict[str, Array]:
    """The kernel's operands by name."""
    items = launch.items
    given = {"x": rows_of(reference.flat(x, 3), items)}
    if dense is not None:
        given["dense"] = rows_of(reference.flat(dense, 3), items)
    if u is not None:
        u, v = bfloat16_factors(reference.flat(u, 2), reference.flat(v, 2), pieces_of(x))
        if items.words:
            apart = v.reshape(*v.shape[:-1], items.heads, items.head // 2, 2)
            v = jnp.swapaxes(apart, -1, -2).reshape(v.shape)
        given |= {"u": u, "v": v}
    if cos is not None:
        short = -launch.tokens % launch.rows
        tables = (reference.flat(leaf, 2)[0].astype(jnp.float32) for leaf in (cos, sin))
        given |= {name: jnp.pad(leaf, ((0, short), (0, 0))) for name, leaf in zip(("cos", "sin"), tables, strict=True)}
    return given


def _work(here: hopper.Here, given, shared) -> None:
    length = given["length"][0]
    hopper.roles(
        here,
        lambda: pl.when(here.start < length)(lambda: hopper.fetch(here, given, shared)),
        lambda: _compute(here, given, shared, length),
    )


def _compute(here: hopper.Here, given, shared, length) -> None:
    items = here.launch.items
    out, buffer = given["out"], shared["x"]
    rows = pl.ds(here.group * hopper.ROWS, hopper.ROWS)
    tokens = pl.ds(here.start + here.group * hopper.ROWS, hopper.ROWS)

    def send(number, stage):
        layer, head = here.item(number)
        plgpu.commit_smem()
        for run, column in enumerate(items.sources(here.kind, head)):
            place = out.at[layer, tokens, pl.ds(column, items.width)]
            plgpu.copy_smem_to_gmem(buffer.at[stage, run, rows], place, commit_group=False)

    @pl.when(here.start < length)
    def _():
        angles = hopper.Angles.of(here, given)
        shape = (hopper.ROWS, items.width)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        keep = token < length - (here.start + here.group * hopper.ROWS)

        def deliver(number):
            values = hopper.compute(here, shared, angles, number)
            values = jnp.where(keep, values[0], 0.0), jnp.where(keep, values[1], 0.0)
            stage = number % here.launch.plan.stages
            for run, value in enumerate(hopper.rounded(items, values, buffer.dtype)):
                buffer[stage, run, rows] = value
            send(number, stage)

        hopper.consume(here, shared, deliver)

    @pl.when(here.start >= length)
    def _():
        zeros = jnp.zeros((hopper.ROWS, items.width), buffer.dtype)
        for run in range(items.runs):
            buffer[0, run, rows] = zeros

        def step(number, carry):
            send(number, 0)
            plgpu.commit_smem_to_gmem_group()
            return carry

        jax.lax.fori_loop(0, here.count, step, None)
        plgpu.wait_smem_to_gmem(0)


def kernel(
    x: Float[Array, "*leading T K H"],
    cos: Float[Array, "..."] | None,
    sin: Float[Array, "..."] | None,
    u: Float[Array, "..."] | None,
    v: Float[Array, "..."] | None,
    dense: Float[Array, "..."] | None,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    plan: hopper.Plan | None = None,
    interpret=False,
) -> Float[Array, "*leading T K H"]:
    """R · (x + u v + dense) as `reference.rotate_patch` has it, for arguments that `unsupported` has nothing against.

    Args:
      plan: how the launch is cut up; None chooses.
      interpret: how to interpret the kernel where there is no GPU.
    """
    launch = launch_of(x, cos, u, v, dense, layout)
    assert launch is not None
    launch = launch if plan is None else launch._replace(plan=plan)
    given = operands(launch, x, cos, sin, u, v, dense)
    given["length"] = jnp.full((1,), launch.tokens, jnp.int32) if length is None else length.reshape(1)
    rows = given["x"]
    run = hopper.kernel_of(
        "rotate_patch",
        launch,
        (*given, "out"),
        _work,
        rows.dtype,
        interpret,
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
    )
    return from_rows(run(*given.values()), x.shape, x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def rotate_patch(layout, interpret, x, cos, sin, u, v, dense, length):
    """`kernel`, with the reference's derivatives."""
    return kernel(x, cos, sin, u, v, dense, length, layout=layout, interpret=interpret)


@rotate_patch.defjvp
def _rotate_patch_jvp(layout, interpret, primals, tangents):
    *values, length = primals
    plain = lambda x, cos, sin, u, v, dense: reference.rotate_patch(
        x, cos, sin, u, v, dense, length, per_head=False, layout=layout
    )
    out = rotate_patch(layout, interpret, *primals)
    return out, jax.jvp(plain, tuple(values), tuple(tangents[:-1]))[1]
