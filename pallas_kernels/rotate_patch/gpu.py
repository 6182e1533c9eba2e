"""rotate_patch for Hopper GPUs, on Mosaic GPU: one launch over all layers, float32 inside, one pass over memory.

A block owns 64 tokens and the same columns of several layers. The copy engine brings the next layers' columns while one
warpgroup adds u v (on the tensor cores), rotates, rounds, and leaves the result in shared memory, from where it is sent
off. `splice` differs in where to.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .._operands import Codes, Operands, bfloat16_factors, flat, refuse
from .._target import require_hopper

ROWS, SPANS = 64, (128, 64)
"""Tokens of a block, and columns that it may work on together, best first: heads where they rotate."""
PROCESSORS, SHARED_MEMORY = 132, 227 * 1024


class Form(NamedTuple):
    """How columns are cut: a block reads `parts` times `span` of them, item i those from (part · items + i) · span on.

    Codes have two parts, in the lower and the upper half of their bytes. Where pairs rotate, x and the result are
    `words` of two neighbouring bfloat16.
    """

    parts: int
    span: int
    items: int
    words: bool

    @classmethod
    def of(cls, operands: Operands, layout: str) -> "Form":
        """Chooses a form for a call; raises NotImplementedError for what these kernels do not take."""
        require_hopper()
        x, rotary, (tokens, heads, width) = operands.x, operands.rotary, operands.x.shape[-3:]
        parts, words = 1 + isinstance(x, Codes), layout == "pairs" and rotary > 0
        span = width if rotary else next((size for size in SPANS if heads * width // parts % size == 0), 0)
        whole = span in SPANS and heads * width % (parts * span) == 0
        expected = f"rotating heads of {SPANS}, others of {SPANS[-1]} columns in all, or multiples; twice that of codes"
        refuse(
            (rotary not in (0, width), f"{rotary} of {width} channels that rotate; expected all or none"),
            (not whole, f"{heads} heads of {width}, {rotary} rotary; expected {expected}"),
        )
        if isinstance(x, Codes):
            unit, along = (span, heads * width) if x.by_token else (ROWS, tokens)
            fits = x.group % unit == 0 or x.group >= along or (unit % x.group == 0 and x.group >= 32)
            expected = f"32, 64, a multiple of {unit}, or one group"
            refuse(
                (words, "codes in layout 'pairs'; expected 'half'"),
                (not fits, f"codes in groups of {x.group}; expected {expected}"),
            )
        return cls(parts, span, heads * width // (parts * span), words)


class Input(NamedTuple):
    """An array that blocks read piece by piece: the shape of a piece, and which one by layer, tile and item.

    Items are counted over all parts; an input that has a `part` is read for that alone.
    """

    array: Array
    shape: tuple[int | None, ...]
    index: Callable[[Any, Any, Any], tuple[Any, ...]]
    part: int = 0
    transforms: tuple[Any, ...] = ()


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Describes shared memory in which threads that read one column of several rows meet in no bank.

    In tiles of one row, for the copy engine to stop at any token; it takes larger ones only of multiples of 8 tokens.
    """
    swizzle = plgpu.find_swizzle(columns * dtype.itemsize * 8)
    tile = plgpu.TilingTransform((1, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return tile, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def as_words(rows: Array) -> Array:
    """Sees rows of bfloat16 as words of two."""
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), jnp.uint32)


def inputs_of(operands: Operands, form: Form) -> dict[str, Input]:
    """Lists what blocks read of every layer, by name; what a part has of its own ends in its number."""
    x, (parts, span, items, words) = operands.x, form
    rows = flat(x.codes, 2) if isinstance(x, Codes) else x.reshape(-1, x.shape[-3], items * span)
    rows = as_words(rows) if words else rows
    read = rows.shape[-1] // items
    inputs = {"x": Input(rows, (None, ROWS, read), lambda *place: place, 0, swizzled(read, rows.dtype))}
    if operands.u is not None and operands.v is not None:
        u, v = bfloat16_factors(operands.u, operands.v)
        u = jnp.pad(u, ((0, 0), (0, -u.shape[1] % 8), (0, 0)))  # The tensor cores' tiles have eight rows.
        if words:  # A product's even columns come first, then the odd ones.
            v = jnp.swapaxes(v.reshape(*v.shape[:-1], items, span // 2, 2), -1, -2).reshape(v.shape)
        inputs["u"] = Input(u, (None, ROWS, u.shape[-1]), lambda layer, tile, item: (layer % len(u), tile, 0))
        for part in range(parts):
            piece = (None, v.shape[-2], span)
            inputs[f"v{part}"] = Input(v, piece, lambda layer, tile, item: (layer % len(v), 0, item), part)
    for name in ("scale", "least"):
        if isinstance(x, Codes) and getattr(x, name) is not None:
            steps = _steps(x, flat(getattr(x, name), 2), span)
            inputs |= {f"{name}{part}": steps._replace(part=part) for part in range(parts)}
    return inputs


def _steps(codes: Codes, values: Array, span: int) -> Input:
    """Describes scales: a row for every group among a block's tokens or, by token, among a part's columns."""
    count = max(1, (span if codes.by_token else ROWS) // codes.group)
    rows = count * codes.group
    if not codes.by_token:
        return Input(values, (None, count, span), lambda layer, tile, item: (layer, tile * ROWS // rows, item))
    # Tokens last, as many as make whole 16 bytes, which is what the copy engine takes.
    values = jnp.pad(jnp.swapaxes(values, 1, 2), ((0, 0), (0, 0), (0, -values.shape[1] % 8)))
    return Input(values, (None, count, ROWS), lambda layer, tile, item: (layer, item * span // rows, tile))


def _decoded(codes: Codes, blocks: dict[str, Any], part: int) -> Array:
    """Reads a part of codes from shared memory: least + scale · code in float32, rounded to bfloat16."""
    words = plgpu.layout_cast(blocks["x"][...], plgpu.Layout.WGMMA).astype(jnp.uint32)
    numbers = ((words >> 4 * part) & jnp.uint32(15)).astype(jnp.int32).astype(jnp.float32)
    axis = 0 if codes.by_token else 1

    def of_numbers(values: Any) -> Array:
        count, layout = values.shape[0], plgpu.Layout.WGMMA.reduce(1 - axis)
        shape = (ROWS, numbers.shape[1] // count) if codes.by_token else numbers.shape
        rows = [plgpu.layout_cast(values[row], layout).astype(jnp.float32) for row in range(count)]
        rows = [jax.lax.broadcast_in_dim(row, shape, (axis,)) for row in rows]
        if codes.by_token or count == 1:
            return jnp.concatenate(rows, 1)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        return jnp.where(token < codes.group, *rows)

    scale, least = of_numbers(blocks[f"scale{part}"]), blocks.get(f"least{part}")
    value = (numbers - 8.0) * scale if least is None else numbers * scale + of_numbers(least)
    # To the nearest bfloat16, ties to even. Not a conversion there and back: a compiler may leave that out.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _read(block: Any, words: bool) -> Array:
    """Reads bfloat16 from shared memory, as float32 [64, span]; of words, the even columns first."""
    value = plgpu.layout_cast(block[...], plgpu.Layout.WGMMA)
    if not words:
        return value.astype(jnp.float32)
    halves = value << 16, value & jnp.uint32(0xFFFF0000)
    return jnp.concatenate([jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves], 1)


def _rounded(first: Array, second: Array, words: bool) -> Array:
    """Rounds both halves of a part to bfloat16, and joins them."""
    halves = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
    if not words:
        return jnp.concatenate(halves, 1)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in halves)
    return low | (high << 16)


def _computed(
    operands: Operands, form: Form, blocks: dict[str, Any], part: int, angles: list[Array], count: Array
) -> Array:
    """Computes R · (x + u v) of a part, zeros but for the first `count` tokens, as it is stored."""
    coded = isinstance(operands.x, Codes)
    value = _decoded(operands.x, blocks, part) if coded else _read(blocks["x"], form.words)
    if operands.rank:

        def multiply(total):
            plgpu.wgmma(total, blocks["u"], blocks[f"v{part}"])
            return total[...]

        value = value + pl.run_scoped(multiply, plgpu.ACC((ROWS, form.span)))
    first, second = value[:, : form.span // 2], value[:, form.span // 2 :]
    if angles:
        cos, sin = angles
        first, second = first * cos - second * sin, second * cos + first * sin
    # Not a product with 0: padding may hold what is not a number.
    counted = plgpu.broadcasted_iota(jnp.int32, first.shape, 0, layout=plgpu.Layout.WGMMA) < count
    return _rounded(jnp.where(counted, first, 0.0), jnp.where(counted, second, 0.0), form.words)


def _plan(inputs: dict[str, Input], form: Form) -> tuple[int, int]:
    """Chooses how many layers a block has, and how many of them are in flight."""
    layers, tokens, _ = inputs["x"].array.shape
    layer = sum(math.prod(size or 1 for size in leaf.shape) * leaf.array.dtype.itemsize for leaf in inputs.values())
    results = 2 * ROWS * form.span * 2 + 1024
    # Two blocks per processor where they fit: one computes while the other waits.
    resident = 2 if 2 * (results + 2 * layer) <= SHARED_MEMORY else 1
    in_flight = min(4, (SHARED_MEMORY // resident - results) // layer)
    refuse((in_flight < 1, f"factors of {layer} bytes a block; expected what shared memory holds"))
    # Blocks work in waves, and each has about two layers' time of its own.
    blocks = -(-tokens // ROWS) * form.items
    waves = {share: -(-blocks * (layers // share) // (PROCESSORS * resident)) for share in range(1, layers + 1)}
    share = min((share for share in waves if layers % share == 0), key=lambda share: waves[share] * (share + 2))
    return share, in_flight


def run_tiles(
    send: Callable[..., None],
    form: Form,
    operands: Operands,
    length: Int[Array, ""] | None,
    places: Sequence[Any],
    out_type: Any = (),
    interpret: Any = False,
) -> Any:
    """Launches blocks that compute R · (x + u v), zeros from `length` on, and `send` it.

    Args:
      send: starts the copies of 64 tokens of a layer: `send(refs, part, layer, start, columns)`, with the references of
        `places` and of `out_type`, the tokens in shared memory, the first token, and which columns these are.
    """
    inputs = inputs_of(operands, form)
    share, in_flight = _plan(inputs, form)
    layers, tokens, _ = inputs["x"].array.shape
    length = jnp.full((1,), tokens, jnp.int32) if length is None else length.reshape(1)
    tables = [flat(leaf, 2)[0].astype(jnp.float32) for leaf in (operands.cos, operands.sin) if leaf is not None]
    # Registers are loaded for whole blocks, without a look at how many tokens there are.
    tables = [jnp.pad(table, ((0, -tokens % ROWS), (0, 0))) for table in tables]
    dtype, columns = (jnp.uint32, form.span // 2) if form.words else (jnp.bfloat16, form.span)
    results = plgpu.SMEM((2, ROWS, columns), dtype, transforms=swizzled(columns, jnp.dtype(dtype)))

    def body(length_ref, *refs, results):
        tile, item, split = (jax.lax.axis_index(name) for name in ("tile", "item", "split"))
        start, first_layer, count = tile * ROWS, split * share, len(tables) + len(inputs)
        table_refs, input_refs, place_refs = refs[: len(tables)], refs[len(tables) : count], refs[count:]
        places = [ref.at[pl.ds(start, ROWS)] for ref in table_refs]
        angles = [plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False) for place in places]

        def step(indices, *blocks):
            blocks = dict(zip(inputs, blocks, strict=True))
            for part in range(form.parts):
                computed = _computed(operands, form, blocks, part, angles, length_ref[0] - start)
                # The copies of the part before the last have read the memory that this one overwrites.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                result = results.at[(indices[0] * form.parts + part) % 2]
                result[...] = computed
                plgpu.commit_smem()
                place = pl.ds((part * form.items + item) * columns, columns)
                send(place_refs, result, first_layer + indices[0], start, place)
                plgpu.commit_smem_to_gmem_group()

        def spec(leaf: Input):
            def index(step):
                return leaf.index(first_layer + step, tile, leaf.part * form.items + item)

            return plgpu.BlockSpec(leaf.shape, index, transforms=leaf.transforms)

        specs = [spec(leaf) for leaf in inputs.values()]
        pipeline = plgpu.emit_pipeline(step, grid=(share,), in_specs=specs, max_concurrent_steps=in_flight)
        # Tokens behind the length are zeros in a result, and have no slot in a pool.
        pl.when((start < length_ref[0]) | bool(out_type))(lambda: pipeline(*input_refs))
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types={"results": results},
        grid=(-(-tokens // ROWS), form.items, layers // share),
        grid_names=("tile", "item", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return run(length, *tables, *(leaf.array for leaf in inputs.values()), *places)


def kernel(
    operands: Operands, length: Int[Array, ""] | None, *, layout: str, interpret: Any = False
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v) as `reference.rotate_patch` does; raises NotImplementedError for what it does not take."""
    form, (*leading, tokens, heads, width) = Form.of(operands, layout), operands.x.shape
    columns, dtype = (heads * width // 2, jnp.uint32) if form.words else (heads * width, jnp.bfloat16)

    def send(refs, part, layer, start, columns):
        plgpu.copy_smem_to_gmem(part, refs[0].at[layer, pl.ds(start, ROWS), columns], commit_group=False)

    out = jax.ShapeDtypeStruct((math.prod(leading), tokens, columns), dtype)
    rows = run_tiles(send, form, operands, length, (), out, interpret)
    return jax.lax.bitcast_convert_type(rows, jnp.bfloat16).reshape(operands.x.shape)
