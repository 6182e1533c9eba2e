"""R · (x + u v + dense) of one block, for TPU.

A register holds eight rows of 128 lanes, a token's K heads are K rows of 32-bit numbers and K/2 of bfloat16: a token
with few heads fills a part of a register, and its cosines must be spread over its heads. So where a head fills whole
lanes, a block is taken one head at a time: a load with a stride brings that head of eight tokens into one register, as
the cosines lie. bfloat16 comes in words of two heads, which are taken apart and put together by arithmetic.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .._operands import LANES

ROWS, PRODUCT_ROWS = 16, 128
"""Tokens that are worked on at a time: few, to stay in registers; more where v is loaded for each."""
UNIT = 32
"""Tokens that are cleared at a time."""
UPPER = 0xFFFF0000
"""The upper half of a word: as float32 bits, the second of its two bfloat16."""


def partner(value: Array, rotary: int, layout: str) -> Array:
    """Moves each channel's other half of its rotary pair to it; anything where nothing rotates."""
    width, axis = value.shape[-1], value.ndim - 1
    step = rotary // 2 if layout == "half" else 1
    if layout == "half" and rotary == width:
        return _ahead(value, step)
    channel = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis)
    first = channel < step if layout == "half" else channel % 2 == 0
    return jnp.where(first, _ahead(value, step), _ahead(value, width - step))


def _ahead(value: Array, step: int) -> Array:
    """Rotates channels: at each the one `step` further on, around the end."""
    width = value.shape[-1]
    # Rotating whole registers is one instruction; other shapes the compiler does not take.
    if width % LANES == 0 and value.ndim == 2:
        return pltpu.roll(value, width - step, 1)
    return jnp.concatenate([value[..., step:], value[..., :step]], -1)


def product(u: Array, v: Array, scale: Array | None) -> Array:
    """Multiplies u v in float32, `scale` [M, 1] between them.

    Eight-bit numbers are exact in bfloat16, which the matrix unit takes at once; scaled they are not.
    """
    if scale is not None:
        u, v = u.astype(jnp.float32), v.astype(jnp.float32) * scale
    elif u.dtype != v.dtype:
        u, v = u.astype(jnp.float32), v.astype(jnp.float32)
    elif u.dtype.itemsize == 1:
        u, v = u.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    precision = jax.lax.Precision.HIGHEST if u.dtype == jnp.float32 else None
    return jnp.dot(u, v, precision=precision, preferred_element_type=jnp.float32)


def value_of_block(given, rotary: int, layout: str) -> Array:
    """Computes R · (x + u v + dense) of a whole block, float32 [tokens, K, H] or [tokens, H].

    Args:
      given: references by name.
    """
    value = given["x"][...].astype(jnp.float32)
    if "x_scale" in given:
        value = value * given["x_scale"][...]
    if "u" in given:
        scale = given["scale"][...] if "scale" in given else None
        value = value + product(given["u"][...], given["v"][...], scale).reshape(value.shape)

    if "dense" in given:
        value = value + given["dense"][...].astype(jnp.float32)
    if rotary:
        cos, sin = given["cos"][...], given["sin"][...]
        cos, sin = (cos[:, None], sin[:, None]) if value.ndim == 3 else (cos, sin)
        value = value * cos + partner(value, rotary, layout) * sin

    return value


def write_block(given, out, rotary: int, layout: str, interpret, count=None) -> None:
    """Writes R · (x + u v + dense) of one block to `out` [tokens, K, H] or [tokens, H], rounded; zeros from `count` on.

    Args:
      given: references by name.
      interpret: how the kernel is interpreted; False where it is compiled.
      count: tokens of this block that are below the length; None: all of them.
    """
    if by_pairs(given, out):
        _write_by_pairs(given, out, rotary, layout, interpret, count)
        return
    value = value_of_block(given, rotary, layout)
    if count is not None:
        value = jnp.where(jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) < count, value, 0.0)
    out[...] = value.astype(out.dtype)


def clear_block(out) -> None:
    """Writes zeros to all of `out`. It is rarely wanted: a loop, for a store of the whole is as long as the rest."""
    tokens = out.shape[0]

    def zeros(rows):
        return jnp.zeros((rows, *out.shape[1:]), out.dtype)

    if tokens >= UNIT:

        @pl.loop(0, tokens // UNIT)
        def _(step):
            out[pl.ds(step * UNIT, UNIT)] = zeros(UNIT)

    if tokens % UNIT:
        out[pl.ds(tokens // UNIT * UNIT, tokens % UNIT)] = zeros(tokens % UNIT)


def by_pairs(given, out) -> bool:
    """Returns whether a block is taken by pairs of heads: they fill the lanes and lie without padding."""
    if len(out.shape) != 3 or out.shape[2] != LANES or "x_scale" in given:
        return False
    sizes = {leaf.dtype.itemsize for leaf in (out, *(given[name] for name in ("x", "dense") if name in given))}
    # Many heads of float32 fill registers as they lie: whole blocks of 32 heads have fewer than half the bundles.
    return 1 not in sizes and (out.shape[1] in (2, 4, 8) or (out.shape[1] % 8 == 0 and 4 not in sizes))


def _write_by_pairs(given, out, rotary: int, layout: str, interpret, count) -> None:
    """Runs `write_block` for a few tokens of two heads after the other, unrolled in Python."""
    tokens, heads, width = out.shape
    scale = given["scale"][...] if "scale" in given else None
    step = PRODUCT_ROWS if "u" in given else ROWS

    for start in range(0, tokens, step):
        at = pl.ds(start, min(step, tokens - start))
        # Angles and products are of all heads: made once for the tokens, before the heads are gone through.
        cos, sin = (given["cos"][at], given["sin"][at]) if rotary else (None, None)
        delta = product(given["u"][at], given["v"][...], scale) if "u" in given else None
        keep = None if count is None else jax.lax.broadcasted_iota(jnp.int32, (at.size, width), 0) < count - start

        for pair in range(heads // 2):
            found = _load(given["x"], at, pair, interpret)
            values = _wide(found)
            if delta is not None:
                columns = jnp.split(delta[:, 2 * pair * width : 2 * (pair + 1) * width], 2, 1)
                values = [value + column for value, column in zip(values, columns, strict=True)]

            if "dense" in given:
                dense = _wide(_load(given["dense"], at, pair, interpret))
                values = [value + more for value, more in zip(values, dense, strict=True)]

            if cos is not None and sin is not None:
                # Nothing added: the partners of two heads in one word are one move of lanes.
                alone = delta is None and "dense" not in given
                others = _wide([partner(each, rotary, layout) for each in (found if alone else values)])
                values = [value * cos + other * sin for value, other in zip(values, others, strict=True)]

            _store(out, at, pair, values, keep, interpret)


def _wide(found: list[Array]) -> list[Array]:
    """Returns two heads in float32, of one word of both or of themselves."""
    if len(found) == 2:
        return found
    # A bfloat16 is the upper half of the float32 it stands for.
    (word,) = found
    return [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (word << 16, word & jnp.uint32(UPPER))]


def _load(ref, at: pl.Slice, pair: int, interpret) -> list[Array]:
    """Returns a pair of heads of tokens `at`, [rows, H] each: one word of both where they are bfloat16, else two of
    float32.
    """
    if ref.dtype.itemsize == 4:
        return [_rows(ref, at, head, interpret)[...] for head in (2 * pair, 2 * pair + 1)]
    if not _indexed(interpret):
        return [_rows(ref, at, pair, interpret)[...]]
    low, high = (_bits(_rows(ref, at, head, interpret)[...]) for head in (2 * pair, 2 * pair + 1))
    return [low | high << 16]


def _store(ref, at: pl.Slice, pair: int, values: list[Array], keep: Array | None, interpret) -> None:
    """Rounds a pair of heads and stores them, zeros where `keep` does not hold."""

    def kept(value):
        return value if keep is None else jnp.where(keep, value, jnp.zeros_like(value))

    if ref.dtype.itemsize == 4:
        for head, value in enumerate(values, 2 * pair):
            _rows(ref, at, head, interpret)[...] = kept(value)
    elif not _indexed(interpret):
        _rows(ref, at, pair, interpret)[...] = kept(_word(values, interpret))
    else:
        word = kept(_word(values, interpret))
        for head, bits in enumerate((word & jnp.uint32(0xFFFF), word >> 16), 2 * pair):
            narrow = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
            _rows(ref, at, head, interpret)[...] = narrow


def _word(values: list[Array], interpret) -> Array:
    """Returns two heads, rounded to bfloat16, in one word: the first in its lower half."""
    if interpret is False:
        # One operation of Mosaic's, which the interpreters do not know.
        return pltpu.pack_elementwise(values, packed_dtype=jnp.bfloat16)
    low, high = (_bits(value.astype(jnp.bfloat16)) for value in values)
    return low | high << 16


def _bits(value: Array) -> Array:
    """Returns bfloat16 as the lower half of a word."""
    return jax.lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)


def _indexed(interpret) -> bool:
    """Returns whether the interpreter sees references in no other shape: the one that looks for races does not."""
    return isinstance(interpret, pltpu.InterpretParams)


def _rows(ref, at: pl.Slice, number: int, interpret):
    """Reads row `number` of every token `at`: rows are heads, or words of two heads of bfloat16 (heads if
    interpreted).
    """
    if _indexed(interpret):
        return ref.at[at, number]
    tokens, heads, width = ref.shape
    flat = ref.reshape(tokens * heads, width)
    if ref.dtype.itemsize == 2:
        flat, heads = flat.bitcast(jnp.uint32), heads // 2
    return flat.at[pl.ds(at.start * heads + number, at.size, heads)]
