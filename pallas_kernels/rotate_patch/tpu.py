"""rotate_patch for TPU, on Mosaic: one launch over all layers, float32 inside, one pass over memory.

The grid runs over blocks of tokens, then over layers, so that cosines and sines are fetched once per block of tokens. A
channel of one head is seen as [layers, T, H], which is how XLA lays it out.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from . import reference

LANES = 128
RANK_LIMIT = 256
DTYPES = ("bfloat16", "float32")
VMEM_BUDGET = 10 * 2**20
"""Bytes that the blocks of one step may take, both buffers and float32 temporaries counted."""


class Tile(NamedTuple):
    """Tokens in one block."""

    tokens: int


def unsupported(x, cos, u, v, dense, per_head: bool) -> str | None:
    """Why this kernel cannot take such arguments; None if it can."""
    given = [leaf for leaf in (x, u, v, dense) if leaf is not None]
    if any(leaf.dtype.name not in DTYPES for leaf in given):
        return f"dtypes {[leaf.dtype.name for leaf in given]}; expected {DTYPES}"
    if per_head and u is not None:
        return "factors per head"
    if u is not None and u.shape[-1] > RANK_LIMIT:
        return f"rank {u.shape[-1]}; expected at most {RANK_LIMIT}"
    leading = x.shape[:-3]
    for name, leaf, inner in (("cos", cos, 2), ("u", u, 2), ("v", v, 2), ("dense", dense, 3)):
        outer = () if leaf is None else leaf.shape[: leaf.ndim - inner]
        if any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]:
            return f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}"
    if cos is not None and cos.shape[-2] != x.shape[-3]:
        return f"cosines of {cos.shape[-2]} tokens; expected {x.shape[-3]}"
    if 0 in x.shape:
        return f"an empty array {x.shape}"
    return None


def tile_of(tokens: int, heads: int, width: int, rank: int, itemsize: int) -> Tile:
    """The largest block of tokens that fits the budget: a multiple of 32, or all tokens."""
    lanes = -(-width // LANES) * LANES
    rows = 1 if heads == 1 else -(-heads // 8) * 8
    ranks = -(-rank // LANES) * LANES
    per_token = rows * lanes * (4 * itemsize + 4 * 4) + 2 * 2 * lanes * 4 + 2 * ranks * 4
    fixed = 2 * rank * heads * lanes * 4
    fit = max((VMEM_BUDGET - fixed) // per_token // 32 * 32, 32)
    return Tile(tokens if tokens <= fit else int(fit))


def _flat(leaf: Array | None, inner: int) -> tuple[Array | None, int]:
    """A leaf with its leading dimensions merged into one, and that one's size."""
    if leaf is None:
        return None, 1
    merged = leaf.reshape(-1, *leaf.shape[leaf.ndim - inner :])
    return merged, merged.shape[0]


def _tables(cos: Array, sin: Array, width: int, layout: str) -> tuple[Array, Array]:
    """Cosine and signed sine of every channel, [..., T, H]: 1 and 0 where nothing rotates."""
    join = lambda first, second: (
        jnp.concatenate([first, second], -1)
        if layout == "half"
        else jnp.stack([first, second], -1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    )
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, width - 2 * cos.shape[-1])]
    return jnp.pad(join(cos, cos), rest, constant_values=1.0), jnp.pad(join(-sin, sin), rest)


def _partner(value: Array, rotary: int, layout: str) -> Array:
    """Each channel's other half of its rotary pair; anything where nothing rotates."""
    width, axis = value.shape[-1], value.ndim - 1
    step = rotary // 2 if layout == "half" else 1
    if layout == "half" and rotary == width:
        return jnp.concatenate([value[..., step:], value[..., :step]], -1)
    channel = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis)
    first = channel < step if layout == "half" else channel % 2 == 0
    ahead = jnp.concatenate([value[..., step:], value[..., :step]], -1)
    behind = jnp.concatenate([value[..., width - step :], value[..., : width - step]], -1)
    return jnp.where(first, ahead, behind)


def _dot(u: Array, v: Array) -> Array:
    if u.dtype != v.dtype:
        u, v = u.astype(jnp.float32), v.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if u.dtype == jnp.float32 else None
    return jnp.dot(u, v, precision=precision, preferred_element_type=jnp.float32)


def _body(length_ref, *refs, names: tuple[str, ...], rotary: int, layout: str) -> None:
    given, out = dict(zip(names, refs[:-1], strict=True)), refs[-1]
    tokens = out.shape[0]
    start = pl.program_id(0) * tokens

    @pl.when(start < length_ref[0])
    def _():
        value = given["x"][...].astype(jnp.float32)
        if "u" in given:
            value = value + _dot(given["u"][...], given["v"][...]).reshape(value.shape)
        if "dense" in given:
            value = value + given["dense"][...].astype(jnp.float32)
        if rotary:
            cos, sin = given["cos"][...], given["sin"][...]
            cos, sin = (cos[:, None], sin[:, None]) if value.ndim == 3 else (cos, sin)
            value = value * cos + _partner(value, rotary, layout) * sin
        token = start + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
        out[...] = jnp.where(token < length_ref[0], value, 0.0).astype(out.dtype)

    @pl.when(start >= length_ref[0])
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)


def _spec(leaf: Array, name: str, tokens: int, last: int) -> pl.BlockSpec:
    """A block of one layer: all of v, one block of tokens of the rest. Blocks past the length are not fetched."""
    shared = leaf.shape[0] == 1
    inner = leaf.shape[1:]

    def index(block, group, length_ref):
        layer = 0 if shared else group % leaf.shape[0]
        if name == "v":
            return (layer, 0, 0)
        needed = jnp.minimum(jnp.maximum((length_ref[0] + tokens - 1) // tokens - 1, 0), last)
        return (layer, jnp.minimum(block, needed), *([0] * (len(inner) - 1)))

    shape = inner if name == "v" else (tokens, *inner[1:])
    return pl.BlockSpec((None, *shape), index)


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
    tile: Tile | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading T K H"]:
    """R · (x + u v + dense) as `reference.rotate_patch` has it, for arguments that `unsupported` has nothing against.

    Args:
      tile: tokens per block; None chooses by `tile_of`.
      interpret: how to interpret the kernel where there is no TPU.
    """
    tokens, heads, width = x.shape[-3:]
    rotary = 0 if cos is None else 2 * cos.shape[-1]
    flat, groups = _flat(x, 3)
    rows = (lambda leaf: leaf[:, :, 0]) if heads == 1 else (lambda leaf: leaf)
    given = {"x": rows(flat)}
    if u is not None and v is not None:
        given |= {"u": _flat(u, 2)[0], "v": _flat(v, 2)[0]}
    if dense is not None:
        given["dense"] = rows(_flat(dense, 3)[0])
    if cos is not None and sin is not None:
        given["cos"], given["sin"] = (_flat(leaf, 2)[0] for leaf in _tables(cos, sin, width, layout))
    rank = 0 if u is None else u.shape[-1]
    block = (tile or tile_of(tokens, heads, width, rank, x.dtype.itemsize)).tokens
    block = min(block, tokens)
    last = -(-tokens // block) - 1
    shape = given["x"].shape
    specs = [_spec(leaf, name, block, last) for name, leaf in given.items()]
    out = pl.BlockSpec((None, block, *shape[2:]), lambda i, g, _: (g, i, *([0] * (len(shape) - 2))))
    length = jnp.full((1,), tokens, jnp.int32) if length is None else length.reshape(1)
    result = pl.pallas_call(
        functools.partial(_body, names=tuple(given), rotary=rotary, layout=layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(last + 1, groups), in_specs=specs, out_specs=out
        ),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotate_patch",
    )(length, *given.values())
    return result.reshape(x.shape)


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
