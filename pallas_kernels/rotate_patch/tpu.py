"""rotate_patch for TPU, on Mosaic: one launch over all layers, float32 inside, one pass over memory.

The grid runs over blocks of tokens, then over layers, so that cosines and sines are fetched once per block of tokens. A
channel of one head is seen as [layers, T, H], which is how XLA lays it out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from .._wins import block_of
from . import reference
from .tpu_block import LANES, clear_block, write_block

RANK_LIMIT = 256
DTYPES = ("bfloat16", "float32")
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
VMEM_BUDGET = 10 * 2**20
"""Bytes that the blocks of one step may take, both buffers and float32 temporaries counted."""


class Tile(NamedTuple):
    """Tokens in one block."""

    tokens: int


def unsupported(
    x, cos, u, v, dense, per_head: bool, x_scale=None, u_scale=None, v_scale=None, out_dtype: str | None = None
) -> str | None:
    """Why this kernel cannot take such arguments; None if it can."""
    given = [leaf.dtype.name for leaf in (x, u, v) if leaf is not None]
    wide = [leaf.dtype.name for leaf in (dense,) if leaf is not None] + ([] if out_dtype is None else [out_dtype])
    if any(name not in DTYPES + NARROW for name in given) or any(name not in DTYPES for name in wide):
        return f"dtypes {given + wide}; expected {DTYPES}, or before the arithmetic {NARROW}"
    if per_head and u is not None:
        return "factors per head"
    if u is not None and u.shape[-1] > RANK_LIMIT:
        return f"rank {u.shape[-1]}; expected at most {RANK_LIMIT}"
    leading = x.shape[:-3]
    leaves = {"cos": (cos, 2), "u": (u, 2), "v": (v, 2), "dense": (dense, 3)}
    leaves |= {"x_scale": (x_scale, 3), "u_scale": (u_scale, 2), "v_scale": (v_scale, 2)}
    for name, (leaf, inner) in leaves.items():
        outer = () if leaf is None else leaf.shape[: leaf.ndim - inner]
        if any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]:
            return f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}"
    if cos is not None and cos.shape[-2] != x.shape[-3]:
        return f"cosines of {cos.shape[-2]} tokens; expected {x.shape[-3]}"
    if 0 in x.shape:
        return f"an empty array {x.shape}"
    return None


def padded_width(width: int, lanes: int = LANES) -> int:
    """The least multiple of `lanes` that is not below `width`."""
    return -(-width // lanes) * lanes


def tile_of(tokens: int, heads: int, width: int, rank: int, itemsize: int) -> Tile:
    """The largest block of tokens that fits the budget: a multiple of 32, or all tokens."""
    lanes = padded_width(width)
    rows = 1 if heads == 1 else -(-heads // 8) * 8
    ranks = padded_width(rank)
    per_token = rows * lanes * (4 * itemsize + 4 * 4) + 2 * 2 * lanes * 4 + 2 * ranks * 4
    fixed = 2 * rank * heads * lanes * 4
    fit = max((VMEM_BUDGET - fixed) // per_token // 32 * 32, 32)
    return Tile(tokens if tokens <= fit else int(fit))


def configured(operation: str, tokens: int, heads: int, width: int, rank: int, itemsize: int) -> Tile:
    """The tile that won when this shape was timed on the device, else the heuristic's."""
    block = block_of(operation, heads, width, rank, itemsize)
    return tile_of(tokens, heads, width, rank, itemsize) if block is None else Tile(block["tokens"])


def _tables(cos: Array, sin: Array, width: int, layout: str) -> tuple[Array, Array]:
    """Cosine and signed sine of every channel, [..., T, H]: 1 and 0 where nothing rotates."""
    join = lambda first, second: (
        jnp.concatenate([first, second], -1)
        if layout == "half"
        else jnp.stack([first, second], -1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    )
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, width - 2 * cos.shape[-1])]
    return jnp.pad(join(cos, cos), rest, constant_values=1.0), jnp.pad(join(-sin, sin), rest)


def operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale, layout: str) -> dict[str, Array]:
    """What `write_block` reads, by name, leading dimensions merged; a channel of one head as [layers, T, H]."""
    heads, width = x.shape[-2:]
    rows = (lambda leaf: leaf[:, :, 0]) if heads == 1 else (lambda leaf: leaf)
    given = {"x": rows(reference.flat(x, 3))}
    if x_scale is not None:
        given["x_scale"] = rows(reference.flat(x_scale, 3))
    if u is not None and v is not None:
        given |= {"u": reference.flat(u, 2), "v": reference.flat(v, 2)}
        scales = [] if u_scale is None else [jnp.swapaxes(u_scale, -1, -2)]
        scales += [] if v_scale is None else [v_scale]
        if scales:
            given["scale"] = reference.flat(functools.reduce(jnp.multiply, scales), 2)
    if dense is not None:
        given["dense"] = rows(reference.flat(dense, 3))
    if cos is not None and sin is not None:
        given["cos"], given["sin"] = (reference.flat(leaf, 2) for leaf in _tables(cos, sin, width, layout))
    return given


WHOLE = ("v", "x_scale", "scale")
"""Operands that a block of tokens reads whole."""


def reach(length: Int[Array, ""] | int, tokens: int, last: int) -> Array:
    """The length, and the last block of `tokens` that has any of it: made here, for scalars in a kernel are slow."""
    length = jnp.int32(length)
    return jnp.stack([length, jnp.clip((length + tokens - 1) // tokens - 1, 0, last)])


def spec(leaf: Array, name: str, tokens: int, groups: int) -> pl.BlockSpec:
    """A block of one layer: one block of tokens, or all of it. Blocks past the length are not fetched.

    The grid is (blocks, groups), `reach` the last prefetched array.
    """
    layers, *inner = leaf.shape

    def index(block, group, *scalars):
        layer = 0 if layers == 1 else group if layers == groups else group % layers
        if name in WHOLE:
            return (layer, *([0] * len(inner)))
        return (layer, jnp.minimum(block, scalars[-1][1]), *([0] * (len(inner) - 1)))

    shape = inner if name in WHOLE else (tokens, *inner[1:])
    return pl.BlockSpec((None, *shape), index)


def untyped(run: Callable[..., Array], like: Array) -> Callable[..., Array]:
    """`run`, whose result lies as `like`, traced with no axis of a mesh in types.

    A reference whose type has axes cannot be seen in another shape.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return run
    plain: Any = jax.sharding.auto_axes(run, out_sharding=jax.typeof(like).sharding.spec)
    return plain


def _body(length_ref, *refs, names: tuple[str, ...], rotary: int, layout: str, interpret) -> None:
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
    x: Num[Array, "*leading T K H"],
    cos: Float[Array, "..."] | None,
    sin: Float[Array, "..."] | None,
    u: Num[Array, "..."] | None,
    v: Num[Array, "..."] | None,
    dense: Float[Array, "..."] | None,
    length: Int[Array, ""] | None,
    x_scale: Float[Array, "..."] | None = None,
    u_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    *,
    layout: str,
    out_dtype: jax.typing.DTypeLike | None = None,
    tile: Tile | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading T K H"]:
    """R · (x + u v + dense) as `reference.rotate_patch` has it, for arguments that `unsupported` has nothing against.

    Args:
      tile: tokens per block; None asks the device's configuration, then `tile_of`.
      interpret: how to interpret the kernel where there is no TPU.
    """
    tokens, heads, width = x.shape[-3:]
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    given = operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale, layout)
    rank = 0 if u is None else u.shape[-1]
    itemsize = max(x.dtype.itemsize, out_dtype.itemsize)
    tile = tile or configured("rotate_patch", tokens, heads, width, rank, itemsize)
    block = min(tile.tokens, tokens)
    last = -(-tokens // block) - 1
    shape = given["x"].shape
    out = pl.BlockSpec((None, block, *shape[2:]), lambda i, g, _: (g, i, *([0] * (len(shape) - 2))))
    common = {"names": tuple(given), "rotary": 0 if cos is None else 2 * cos.shape[-1], "layout": layout}
    run = pl.pallas_call(
        functools.partial(_body, **common, interpret=interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(last + 1, shape[0]),
            in_specs=[spec(leaf, name, block, shape[0]) for name, leaf in given.items()],
            out_specs=out,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotate_patch",
    )
    result = untyped(run, given["x"])(reach(tokens if length is None else length, block, last), *given.values())
    return result.reshape(x.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def rotate_patch(layout, out_dtype, interpret, x, cos, sin, u, v, dense, length, x_scale, u_scale, v_scale):
    """`kernel`, with the reference's derivatives."""
    scales = (x_scale, u_scale, v_scale)
    plan = {"layout": layout, "out_dtype": out_dtype, "interpret": interpret}
    return kernel(x, cos, sin, u, v, dense, length, *scales, **plan)


@rotate_patch.defjvp
def _rotate_patch_jvp(layout, out_dtype, interpret, primals, tangents):
    plain = functools.partial(reference.rotate_patch, per_head=False, layout=layout, out_dtype=out_dtype)
    out = rotate_patch(layout, out_dtype, interpret, *primals)
    return out, jax.jvp(plain, tuple(primals), tuple(tangents))[1]
