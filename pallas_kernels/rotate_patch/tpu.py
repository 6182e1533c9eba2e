"""rotate_patch for TPU, on Mosaic: one launch over all layers, float32 inside, one pass over memory.

The grid runs over blocks of tokens, then over layers, so that angles are fetched once per block of tokens. A block is
worked on 32 tokens of one head at a time, [32, H], as their angles lie. Heads of bfloat16 lie in words of two, which
are loaded with a stride, and taken apart and put together by arithmetic. One head is seen as [layers, T, H].
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import LANES, Codes, Operands, bfloat16_factors, flat, padded_width, refuse

UNIT = 32
"""Tokens that are worked on at a time; blocks are multiples of it."""
VMEM_BUDGET, BYTES = 10 * 2**20, 24
"""Bytes that one step may take; of one number of x: two buffers in, two out, and what splice keeps beside them."""


def _write_block(names: tuple[str, ...], layout: str, rotary: int, interpret, refs, out, count) -> None:
    """Writes R · (x + u v) of a block to `out` [tokens, (K,) H], rounded; zeros from token `count` on."""
    given, heads = dict(zip(names, refs, strict=False)), 1 if out.ndim == 2 else out.shape[1]
    count = jnp.clip(count, 0, out.shape[0])

    @pl.loop(0, (count + UNIT - 1) // UNIT)
    def _(unit):
        at = pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)
        values = _load(given["x"], at, interpret) if "x" in given else jnp.split(_decoded(given, at, unit), heads, 1)
        if "u" in given:
            delta = jnp.dot(given["u"][at], given["v"][...], preferred_element_type=jnp.float32)
            values = [value + part for value, part in zip(values, jnp.split(delta, heads, 1), strict=True)]
        if rotary:
            cos, sin = given["cos"][at], given["sin"][at]
            values = [value * cos + _partner(value, rotary, layout) * sin for value in values]
        counts = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, 0) < count - unit * UNIT
        _store(out, at, [jnp.where(counts, value, 0.0) for value in values], interpret)

    @pl.loop((count + UNIT - 1) // UNIT, out.shape[0] // UNIT)
    def _(unit):
        out[pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)] = jnp.zeros((UNIT, *out.shape[1:]), out.dtype)


def _decoded(given: Mapping[str, Any], at: pl.Slice, unit) -> Array:
    """Returns tokens of codes, [32, K·H], rounded to bfloat16."""
    pairs = given["codes"][at].astype(jnp.int32)
    numbers = jnp.concatenate([pairs & 15, pairs >> 4], 1).astype(jnp.float32)

    def expanded(ref) -> Array:
        if "columns" in given:  # every column takes its group's number, exactly
            return jnp.dot(ref[at], given["columns"][...], preferred_element_type=jnp.float32)
        return ref[unit if ref.shape[0] > 1 else 0].astype(jnp.float32)

    step = expanded(given["scale"])
    value = numbers * step + expanded(given["least"]) if "least" in given else (numbers - 8.0) * step
    return value.astype(jnp.bfloat16).astype(jnp.float32)


def _partner(value: Array, rotary: int, layout: str) -> Array:
    """Moves each channel's other half of its rotary pair to it; anything where nothing rotates."""
    width, step = value.shape[1], rotary // 2 if layout == "half" else 1
    channel = jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)

    def ahead(by: int) -> Array:
        # Rotating whole registers is one instruction; other shapes the compiler does not take.
        if width % LANES == 0:
            return pltpu.roll(value, width - by, 1)
        return jnp.concatenate([value[:, by:], value[:, :by]], 1)

    # Of a whole head in halves both are the same, which the compiler sees.
    return jnp.where(channel < step if layout == "half" else channel % 2 == 0, ahead(step), ahead(width - step))


def _load(ref, at: pl.Slice, interpret) -> list[Array]:
    """Returns tokens in float32, [32, H] of every head."""
    if not _in_words(ref, interpret):
        value = ref[at].astype(jnp.float32)
        return [value] if ref.ndim == 2 else [value[:, head] for head in range(ref.shape[1])]
    words = [_words(ref, at, pair)[...] for pair in range(ref.shape[1] // 2)]
    # A bfloat16 is the upper half of the float32 it stands for.
    halves = [half for word in words for half in (word << 16, word & jnp.uint32(0xFFFF0000))]
    return [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]


def _store(ref, at: pl.Slice, values: list[Array], interpret) -> None:
    """Rounds tokens to the dtype of `ref` and stores them."""
    if not _in_words(ref, interpret):
        ref[at] = (values[0] if ref.ndim == 2 else jnp.stack(values, 1)).astype(ref.dtype)
        return
    for pair, heads in enumerate(zip(values[::2], values[1::2], strict=True)):
        if interpret is False:  # one operation of Mosaic's, which the interpreter does not know
            word = pltpu.pack_elementwise(heads, packed_dtype=jnp.bfloat16)
        else:
            bits = [jax.lax.bitcast_convert_type(head.astype(jnp.bfloat16), jnp.uint16) for head in heads]
            word = bits[0].astype(jnp.uint32) | bits[1].astype(jnp.uint32) << 16
        _words(ref, at, pair)[...] = word


def _in_words(ref, interpret) -> bool:
    """Returns whether heads are taken by words: they fill the lanes and lie without padding."""
    # The interpreter that looks for races sees references in no other shape.
    fits = ref.ndim == 3 and ref.shape[2] == LANES and (ref.shape[1] in (2, 4) or ref.shape[1] % 8 == 0)
    return fits and not isinstance(interpret, pltpu.InterpretParams)


def _words(ref, at: pl.Slice, pair: int):
    """Returns a reference to words of heads 2·pair, in the lower halves, and 2·pair + 1: uint32 [32, H]."""
    words = ref.at[at].reshape(UNIT * ref.shape[1], LANES).bitcast(jnp.uint32)
    return words.at[pl.ds(pair, UNIT, ref.shape[1] // 2)]


def prepare(operands: Operands, layout: str, length: Array | None, interpret: Any, most: int | None = None) -> tuple:
    """Prepares a launch over a grid of (blocks of tokens, layers), with blocks of at most `most` tokens.

    Returns:
      What writes a block, of (references of arrays, where to, tokens that count); the arrays; how they are read; tokens
      in a block; the grid; and the last scalars to prefetch: the length, and the last block that has any of it.

    Raises:
      NotImplementedError: operands that these kernels do not take.
    """
    x, arrays = operands.x, {}
    tokens, heads, width = x.shape[-3:]
    layers, columns, lanes = math.prod(x.shape[:-3]), heads * width, padded_width(width)
    typed = jax.sharding.get_abstract_mesh().explicit_axes
    refuse((bool(typed), f"axes {typed} of a mesh in types; expected none"))
    if operands.u is not None and operands.v is not None:
        arrays["u"], arrays["v"] = bfloat16_factors(operands.u, operands.v)
    if operands.cos is not None and operands.sin is not None:
        arrays["cos"], arrays["sin"] = _tables(flat(operands.cos, 2), flat(operands.sin, 2), width, layout)
    if isinstance(x, Codes):
        arrays |= _arrays_of_codes(x)
    else:
        arrays["x"] = flat(x, 3)[:, :, 0] if heads == 1 else flat(x, 3)

    # The largest block that fits; registers hold eight rows.
    rank = arrays["u"].shape[-1] if "u" in arrays else 0
    rows = heads if heads in (1, 2, 4) else padded_width(heads, 8)
    per_token = (rows * BYTES + 2 * 2 * 4) * lanes + 2 * 2 * padded_width(rank)
    room = (VMEM_BUDGET - 2 * 2 * rank * heads * lanes) // per_token // UNIT * UNIT
    refuse((room < UNIT, f"factors of rank {rank} over {columns} columns; expected fewer"))
    block = min(room, most or room, padded_width(tokens, UNIT))
    length = jnp.int32(tokens) if length is None else jnp.clip(length, 0, tokens)
    reach = jnp.stack([length, jnp.maximum((length + block - 1) // block - 1, 0)])  # scalars in a kernel are slow

    def spec(name: str, leaf: Array) -> pl.BlockSpec:
        """Returns how one layer of an array is read: by blocks of tokens, or all of it."""
        count, first, *inner = leaf.shape
        grouped = name in ("scale", "least") and not x.by_token
        whole = name in ("v", "columns") or (grouped and first == 1)

        def index(number, layer, *scalars):
            # Blocks past the length are not fetched: an index that stays as it was moves nothing.
            place = 0 if whole else jnp.minimum(number, scalars[-1][1])
            return (0 if count == 1 else layer if count == layers else layer % count, place, *([0] * len(inner)))

        return pl.BlockSpec((None, first if whole else block // UNIT if grouped else block, *inner), index)

    write = functools.partial(_write_block, tuple(arrays), layout, operands.rotary, interpret)
    specs = [spec(name, leaf) for name, leaf in arrays.items()]
    return write, arrays.values(), specs, block, (-(-tokens // block), layers), reach


def _arrays_of_codes(x: Codes) -> dict[str, Array]:
    """Returns codes and scales by name: of groups of tokens [layers, groups, 1, K·H], of columns as they are."""
    tokens, heads, width = x.shape[-3:]
    columns = heads * width
    along = not x.by_token and x.group != UNIT and x.group < tokens
    refuse(
        (heads > 1 and heads % 2 != 0, f"codes of {heads} heads; expected 1 or an even number"),
        (columns % (2 * LANES) != 0, f"codes of {columns} columns; expected a multiple of {2 * LANES}"),
        (along, f"groups of {x.group} tokens; expected {UNIT}, or all {tokens}"),
    )
    scales = {"scale": x.scale} if x.least is None else {"scale": x.scale, "least": x.least}
    arrays = {name: flat(leaf, 2) if x.by_token else flat(leaf, 2)[:, :, None] for name, leaf in scales.items()}
    if x.by_token:
        group = jnp.arange(x.scale.shape[-1])[:, None]
        arrays["columns"] = (jnp.arange(columns) // x.group == group).astype(jnp.bfloat16)[None]
    return arrays | {"codes": flat(x.codes, 2)}


def _tables(cos: Array, sin: Array, width: int, layout: str) -> tuple[Array, Array]:
    """Returns cosines and signed sines of channels, 1 and 0 where nothing rotates: R x = x · cos + partner(x) · sin."""
    if layout == "half":
        cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
    else:
        cos, sin = (jnp.stack(pair, -1).reshape(*cos.shape[:-1], -1) for pair in ((cos, cos), (-sin, sin)))
    rest = ((0, 0), (0, 0), (0, width - cos.shape[-1]))
    return jnp.pad(cos, rest, constant_values=1.0), jnp.pad(sin, rest)


def kernel(
    operands: Operands, length: Int[Array, ""] | None, *, layout: str, interpret: pltpu.InterpretParams | bool = False
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v) in bfloat16, zeros from token `length` on; NotImplementedError as `prepare`."""
    write, arrays, specs, block, grid, reach = prepare(operands, layout, length, interpret)
    tokens, *rows = operands.x.shape[-3:]
    rows = rows[1:] if rows[0] == 1 else rows

    def body(reach, *refs) -> None:
        write(refs[:-1], refs[-1], reach[0] - pl.program_id(0) * block)

    run = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=specs,
            out_specs=pl.BlockSpec((None, block, *rows), lambda i, layer, _: (layer, i, *([0] * len(rows)))),
        ),
        out_shape=jax.ShapeDtypeStruct((grid[1], tokens, *rows), jnp.bfloat16),
        # Blocks write what no other block reads, so the grid may be gone through in any order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotate_patch",
    )
    return run(reach, *arrays).reshape(operands.x.shape)
