"""rotate_patch for TPU, on Mosaic: one launch over all layers, float32 inside, one pass over memory.

The grid runs over blocks of tokens, then over layers, so that angles are fetched once per block of tokens. A block is
worked on 32 tokens of one head at a time, [32, H], as the angles of these tokens lie. Heads of bfloat16 lie in words of
two, which are loaded with a stride, and taken apart and put together by arithmetic. A channel of one head is seen as
[layers, T, H], which is how XLA lays it out.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import LANES, Codes, Operands, bfloat16_factors, flat, padded_width, refuse

UNIT = 32
"""Tokens that are worked on at a time; blocks are multiples of it."""
VMEM_BUDGET = 10 * 2**20
"""Bytes that one step may take, both buffers of its blocks counted."""
BYTES = 24
"""Of one number of x: two buffers in, two out, and what splice keeps beside them."""
WHOLE = ("v", "columns")
"""Arrays that every block of tokens reads whole."""


def write_block(given: Mapping[str, Any], out, count, *, layout: str, rotary: int, interpret) -> None:
    """Writes R · (x + u v) of a block to `out` [tokens, K, H] or [tokens, H], rounded; zeros from token `count` on.

    Args:
      given: references by the names of `arrays_of`.
    """
    tokens, heads, width = out.shape[0], 1 if out.ndim == 2 else out.shape[1], out.shape[-1]
    count = jnp.clip(count, 0, tokens)

    @pl.loop(0, (count + UNIT - 1) // UNIT)
    def _(unit):
        at = pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)
        columns = _decoded(given, at, unit) if "codes" in given else None
        values = _load(given["x"], at, interpret) if columns is None else jnp.split(columns, heads, 1)
        if "u" in given:
            delta = jnp.dot(given["u"][at], given["v"][...], preferred_element_type=jnp.float32)
            values = [value + part for value, part in zip(values, jnp.split(delta, heads, 1), strict=True)]
        if rotary:
            cos, sin = given["cos"][at], given["sin"][at]
            values = [value * cos + _partner(value, rotary, layout) * sin for value in values]
        kept = jax.lax.broadcasted_iota(jnp.int32, (UNIT, width), 0) < count - unit * UNIT
        _store(out, at, [jnp.where(kept, value, 0.0) for value in values], interpret)

    @pl.loop((count + UNIT - 1) // UNIT, tokens // UNIT)
    def _(unit):
        at = pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)
        out[at] = jnp.zeros((UNIT, *out.shape[1:]), out.dtype)


def _decoded(given: Mapping[str, Any], at: pl.Slice, unit) -> Array:
    """Returns tokens of codes, [32, K·H], rounded to bfloat16."""
    pairs = given["codes"][at].astype(jnp.int32)
    value = jnp.concatenate([pairs & 15, pairs >> 4], 1).astype(jnp.float32)

    def expanded(ref):
        if "columns" in given:  # groups of columns: every column takes its group's number, exactly
            return jnp.dot(ref[at], given["columns"][...], preferred_element_type=jnp.float32)
        return ref[unit if ref.shape[0] > 1 else 0].astype(jnp.float32)

    step = expanded(given["scale"])
    value = value * step + expanded(given["least"]) if "least" in given else (value - 8.0) * step
    return value.astype(jnp.bfloat16).astype(jnp.float32)


def _partner(value: Array, rotary: int, layout: str) -> Array:
    """Moves each channel's other half of its rotary pair to it; anything where nothing rotates."""
    width, step = value.shape[1], rotary // 2 if layout == "half" else 1

    def ahead(by: int) -> Array:
        # Rotating whole registers is one instruction; other shapes the compiler does not take.
        if width % LANES == 0:
            return pltpu.roll(value, width - by, 1)
        return jnp.concatenate([value[:, by:], value[:, :by]], 1)

    if layout == "half" and rotary == width:
        return ahead(step)
    channel = jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
    return jnp.where(channel < step if layout == "half" else channel % 2 == 0, ahead(step), ahead(width - step))


def _load(ref, at: pl.Slice, interpret) -> list[Array]:
    """Returns tokens in float32, [32, H] of every head."""
    if ref.ndim == 2:
        return [ref[at].astype(jnp.float32)]
    if not _in_words(ref, interpret):
        value = ref[at].astype(jnp.float32)
        return [value[:, head] for head in range(ref.shape[1])]
    words = [_words(ref, at, pair)[...] for pair in range(ref.shape[1] // 2)]
    # A bfloat16 is the upper half of the float32 it stands for.
    halves = [half for word in words for half in (word << 16, word & jnp.uint32(0xFFFF0000))]
    return [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]


def _store(ref, at: pl.Slice, values: list[Array], interpret) -> None:
    """Rounds tokens to the dtype of `ref` and stores them."""
    if ref.ndim == 2:
        ref[at] = values[0].astype(ref.dtype)
    elif not _in_words(ref, interpret):
        ref[at] = jnp.stack(values, 1).astype(ref.dtype)
    else:
        for pair in range(len(values) // 2):
            _words(ref, at, pair)[...] = _word(values[2 * pair : 2 * pair + 2], interpret)


def _in_words(ref, interpret) -> bool:
    """Returns whether heads are taken by words of two: they fill the lanes and lie without padding.

    The interpreter that looks for races sees references in no other shape.
    """
    heads, width = ref.shape[1:]
    return width == LANES and (heads in (2, 4) or heads % 8 == 0) and not isinstance(interpret, pltpu.InterpretParams)


def _words(ref, at: pl.Slice, pair: int):
    """Returns a reference to words of heads 2·pair, in the lower halves, and 2·pair + 1: uint32 [32, H]."""
    heads, width = ref.shape[1:]
    rows = ref.at[at].reshape(UNIT * heads, width).bitcast(jnp.uint32)
    return rows.at[pl.ds(pair, UNIT, heads // 2)]


def _word(values: list[Array], interpret) -> Array:
    """Rounds two heads to bfloat16 and returns words of them."""
    if interpret is False:  # one operation of Mosaic's, which the interpreter does not know
        return pltpu.pack_elementwise(values, packed_dtype=jnp.bfloat16)
    low, high = (jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16) for value in values)
    return low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16


def arrays_of(operands: Operands, layout: str) -> dict[str, Array]:
    """Makes what `write_block` reads, by name, leading dimensions merged.

    Raises:
      NotImplementedError: codes whose groups or columns these kernels do not take.
    """
    x, arrays = operands.x, {}
    tokens, heads, width = x.shape[-3:]
    if isinstance(x, Codes):
        along = f"groups of {x.group} tokens; expected 32, or all {tokens}"
        refuse(
            (heads > 1 and heads % 2 != 0, f"codes of {heads} heads; expected 1 or an even number"),
            (heads * width % (2 * LANES) != 0, f"codes of {heads * width} columns; expected a multiple of {2 * LANES}"),
            (not x.by_token and x.group != UNIT and x.group < tokens, along),
        )
        scales = {"scale": x.scale} if x.least is None else {"scale": x.scale, "least": x.least}
        arrays["codes"] = flat(x.codes, 2)
        arrays |= {name: flat(leaf if x.by_token else leaf[..., None, :], 2 + (not x.by_token)) for name, leaf in scales.items()}
        if x.by_token:
            group, column = jnp.arange(x.scale.shape[-1])[:, None], jnp.arange(heads * width)
            arrays["columns"] = (column // x.group == group).astype(jnp.bfloat16)[None]
    else:
        arrays["x"] = flat(x, 3)[:, :, 0] if heads == 1 else flat(x, 3)
    if operands.u is not None and operands.v is not None:
        arrays["u"], arrays["v"] = bfloat16_factors(operands.u, operands.v)
    if operands.cos is not None and operands.sin is not None:
        arrays["cos"], arrays["sin"] = (flat(leaf, 2) for leaf in _tables(operands.cos, operands.sin, width, layout))
    return arrays


def _tables(cos: Array, sin: Array, width: int, layout: str) -> tuple[Array, Array]:
    """Returns cosine and signed sine of every channel of a head: 1 and 0 where nothing rotates.

    With them a rotation is `x · cos + partner(x) · sin`, whichever half of its pair a channel is.
    """

    def join(first: Array, second: Array) -> Array:
        if layout == "half":
            return jnp.concatenate([first, second], -1)
        return jnp.stack([first, second], -1).reshape(*first.shape[:-1], 2 * first.shape[-1])

    rest = [(0, 0)] * (cos.ndim - 1) + [(0, width - 2 * cos.shape[-1])]
    return jnp.pad(join(cos, cos), rest, constant_values=1.0), jnp.pad(join(-sin, sin), rest)


def block_of(tokens: int, heads: int, width: int, rank: int) -> int:
    """Finds the largest block of tokens that fits the budget, a multiple of 32.

    Raises:
      NotImplementedError: factors that leave no room for one.
    """
    rows = heads if heads in (1, 2, 4) else padded_width(heads, 8)
    per_token = rows * padded_width(width) * BYTES + 2 * padded_width(width) * 2 * 4 + 2 * padded_width(rank) * 2
    room = VMEM_BUDGET - 2 * rank * heads * padded_width(width) * 2
    refuse((room < UNIT * per_token, f"factors of rank {rank} over {heads * width} columns; expected fewer"))
    return min(room // per_token // UNIT, -(-tokens // UNIT)) * UNIT


def reach(length: Array | None, tokens: int, block: int) -> Int[Array, " 2"]:
    """Returns the length, and the last block that has any of it: made here, for scalars in a kernel are slow."""
    length = jnp.int32(tokens) if length is None else jnp.clip(length, 0, tokens)
    return jnp.stack([length, jnp.maximum((length + block - 1) // block - 1, 0)])


def specs_of(arrays: Mapping[str, Array], block: int, layers: int) -> list[pl.BlockSpec]:
    """Returns how arrays go through a grid of (blocks of tokens, layers); `reach` is the last scalar prefetched."""
    return [_spec(name, leaf, block, layers) for name, leaf in arrays.items()]


def _spec(name: str, leaf: Array, block: int, layers: int) -> pl.BlockSpec:
    """Returns the spec of one array: of one layer a block of tokens, or all of it."""
    count, first, *inner = leaf.shape
    by_groups = name in ("scale", "least") and leaf.ndim == 4
    whole = name in WHOLE or (by_groups and first == 1)
    rows = first if whole else block // UNIT if by_groups else block

    def index(number, layer, *scalars):
        # Blocks past the length are not fetched: an index that stays as it was moves nothing.
        place = 0 if whole else jnp.minimum(number, scalars[-1][1])
        return (0 if count == 1 else layer if count == layers else layer % count, place, *([0] * len(inner)))

    return pl.BlockSpec((None, rows, *inner), index)


def untyped(run: Callable[..., Array], like: Array) -> Callable[..., Array]:
    """Returns `run`, whose result lies as `like`, traced with no axis of a mesh in types.

    A reference whose type has axes cannot be seen in another shape.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return run
    plain: Any = jax.sharding.auto_axes(run, out_sharding=jax.typeof(like).sharding.spec)
    return plain


def _body(reach, *refs, names: tuple[str, ...], **plan) -> None:
    """Writes one block of tokens of one layer."""
    out = refs[-1]
    write_block(dict(zip(names, refs[:-1], strict=True)), out, reach[0] - pl.program_id(0) * out.shape[0], **plan)


def kernel(
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v) in bfloat16; tokens from `length` on are zero. See `api.rotate_patch`.

    Args:
      interpret: how to interpret the kernel where there is no TPU.

    Raises:
      NotImplementedError: operands that this kernel does not take.
    """
    tokens, heads, width = operands.x.shape[-3:]
    arrays = arrays_of(operands, layout)
    layers = next(iter(arrays.values())).shape[0]
    block = block_of(tokens, heads, width, arrays["u"].shape[-1] if "u" in arrays else 0)
    shape = (layers, tokens, width) if heads == 1 else (layers, tokens, heads, width)
    plan = {"layout": layout, "rotary": operands.rotary, "interpret": interpret}
    run = pl.pallas_call(
        functools.partial(_body, names=tuple(arrays), **plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-tokens // block), layers),
            in_specs=specs_of(arrays, block, layers),
            out_specs=pl.BlockSpec((None, block, *shape[2:]), lambda i, layer, _: (layer, i, *([0] * (len(shape) - 2)))),
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        # Blocks write what no other block reads, so the grid may be gone through in any order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotate_patch",
    )
    like = next(iter(arrays.values()))
    return untyped(run, like)(reach(length, tokens, block), *arrays.values()).reshape(operands.x.shape)
