"""Jitted programs on the vectors at slots of a pool and of its phase-free source: read, put, copy, write, rotate.

Each is compiled once per layout, pool and bucket of slots. All but `read_rows` take the pools as donated and write
them in place.

Axis letters: L layers, P pages, O offset in a page, N and T tokens (padded to buckets), K KV heads, H head width,
A position axes. `length` is how many of the tokens count: the others are written nowhere, and neither are tokens at
slots out of range.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import rotate_patch
from pallas_kernels import splice as splice_kernel

from ..core import KVLayout, PackedArray, Rope, flat, is_packed, ops, relocation_tables, rope_tables, unpack
from ..utils.compiling import describe_program


class Pools(NamedTuple):
    """A pool in the engine frame and its phase-free source; of `read_rows`, the rows of both.

    Attributes:
      engine: {channel: [L, P, O, K, H]}; rows are [L, N, K, H].
      source: the same slots of the channels that rotate, before their rotation; {} for a pool without a source.
    """

    engine: dict[str, Array]
    source: dict[str, Array]


@functools.partial(jax.jit, static_argnums=(0, 1))
def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """Makes an array of zeros by one program; `jnp.zeros` compiles two."""
    return jnp.zeros(shape, dtype)


def with_source(layout: KVLayout, pool: Mapping[str, Float[Array, "L P O _ _"]]) -> Pools:
    """Adds a source of zeros to a pool, for the channels that rotate, padded as they are."""
    source = {}
    for channel in layout.token_channels:
        if channel.rotates:
            value = pool[channel.name]
            committed = isinstance(value, jax.Array) and value.committed
            source[channel.name] = jnp.zeros_like(value) if committed else zeros(value.shape, value.dtype)
    return Pools(dict(pool), source)


def enlarged(pools: Pools, pages: int) -> Pools:
    """Appends this many pages of zeros; slots keep their numbers and vectors."""
    return jax.tree.map(lambda value: jnp.pad(value, [(0, 0), (0, pages), (0, 0), (0, 0), (0, 0)]), pools)


@jax.jit
def read_rows(pools: Pools, slots: Int[Array, " N"]) -> Pools:
    """Reads the rows at slots, padding included."""
    return jax.tree.map(lambda value: flat(value)[:, slots], pools)


@functools.partial(jax.jit, donate_argnames="pools")
def put_rows(pools: Pools, slots: Int[Array, " N"], rows: Pools, length: Int[Array, ""]) -> Pools:
    """Writes rows to slots unchanged; channels that the rows lack keep their vectors."""
    written = Pools(dict(pools.engine), dict(pools.source))
    for vectors, values in zip(written, rows, strict=True):
        for name, value in values.items():
            vectors[name] = splice_kernel(vectors[name], slots, value, length=length)
    return written


@functools.partial(jax.jit, donate_argnames="pools")
def copy_slots(pools: Pools, read: Int[Array, " N"], write: Int[Array, " N"], length: Int[Array, ""]) -> Pools:
    """Copies the vectors at slots `read` to slots `write`, reading all before writing any."""
    return put_rows(pools, write, read_rows(pools, read), length)


@functools.partial(jax.jit, static_argnames=("layout", "layers"), donate_argnames="pools")
def write_piece(
    layout: KVLayout,
    pools: Pools,
    slots: Int[Array, " T"],
    local: Num[Array, "..."],
    start: Int[Array, "..."],
    length: Int[Array, ""],
    kv: Mapping[str, Float[Array, "..."] | PackedArray],
    factors: ops.Factors,
    *,
    layers: tuple[int, ...] | None = None,
) -> Pools:
    """Writes R(start + local) · (KV + u v) to slots of the pool, and KV + u v to those of its source.

    Args:
      kv: phase-free, {channel: [L, T, K, H]} or, as a prefill gives it, [L, 1, T, K, H]. Packed channels are decoded
        one layer at a time, and written as their decoded twins are. Channels that it lacks keep their vectors.
      layers: the layers that the factors patch; None for all.
    """
    describe_program("write_piece", f"placing of {len(slots)} tokens")
    arguments = ops.operator_arguments(layout, factors, local, start, layers)

    def write(pools: Pools, values: Mapping[str, Any], arguments: Mapping[str, Any], layer: Any = None) -> Pools:
        """Writes rows of all layers in one launch, or those of one layer."""
        engine, source = dict(pools.engine), dict(pools.source)
        for name, value in values.items():
            operands, cached = arguments[name], layout.rope_of(name).cached
            if is_packed(value):
                rows = ops.codes_of(value)
            else:
                # A prefill's rows have a batch axis of 1.
                rows = value.reshape(*value.shape[: 1 if layer is None else 0], *value.shape[-3:])
                rows = rows.astype(engine[name].dtype)
            if name in source:
                # The pool must hold the rotated source, bit for bit: then rotating the source again gives the same.
                rotation = {word: operands[word] for word in ("cos", "sin", "scale")}
                patching = {word: operand for word, operand in operands.items() if word not in rotation}
                if patching or is_packed(value):
                    rows = jax.lax.optimization_barrier(rotate_patch(rows, **patching))
                source[name] = _scattered(source[name], slots, rows, length, layer)
                operands = rotation
            engine[name] = _scattered(engine[name], slots, rows, length, layer, layout=cached, **operands)
        return Pools(engine, source)

    names = [name for name in pools.engine if name in kv]
    by_layer = {name for name in names if is_packed(kv[name]) and not _kernel_takes(pools, name, kv[name], arguments)}
    pools = write(pools, {name: kv[name] for name in names if name not in by_layer}, arguments)

    def decode_and_write(pools: Pools, operands: tuple[Array, Any]) -> tuple[Pools, None]:
        layer, (codes, layered) = operands
        # A rotation reads every number twice, and a fused program would decode it twice.
        values = {name: jax.lax.optimization_barrier(unpack(value)) for name, value in codes.items()}
        return write(pools, values, {name: arguments[name] | layered[name] for name in codes}, layer), None

    # Packed channels on the same layers go through one loop: of several, XLA copies the pools.
    for group, _ in layout.kernels(rotate_patch):
        codes = {name: kv[name] for name in group if name in by_layer}
        if codes:
            layered = {name: ops.layered_arguments(arguments[name]) for name in codes}
            pools, _ = jax.lax.scan(decode_and_write, pools, (jnp.arange(layout.depth(group[0])), (codes, layered)))
    return pools


def _kernel_takes(pools: Pools, name: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a kernel is tried on a packed channel, all layers at once."""
    operation = "rotate_patch" if name in pools.source else "splice"
    return value.dtype == pools.engine[name].dtype and ops.kernel_decodes(operation, value, arguments[name])


def _scattered(
    pool: Array, slots: Array, rows: Any, length: Array, layer: Any = None, *, layout: str = "half", **operands: Any
) -> Array:
    """Returns a pool with R · (rows + u v) at slots, of all layers by the kernel, or of one layer."""
    if layer is None:
        return splice_kernel(pool, slots, rows, layout=layout, length=length, **operands)
    pages, size = pool.shape[1:3]
    rows = rotate_patch(rows, layout=layout, **operands) if operands else rows
    rows = jnp.pad(rows.astype(pool.dtype), [(0, 0), (0, 0), (0, pool.shape[-1] - rows.shape[-1])])
    where = places(slots, length, pages * size)
    return pool.at[layer, where // size, where % size].set(rows, mode="drop", unique_indices=True)


def places(slots: Int[Array, " T"], length: Int[Array, ""], total: int) -> Int[Array, " T"]:
    """Finds where tokens go among `total` slots; tokens that go nowhere get distinct places beyond the last slot."""
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    keep = (tokens < length) & (slots >= 0) & (slots < total)
    return jnp.where(keep, slots.astype(jnp.int32), total + tokens)


def token_rotations(
    layout: KVLayout, local: Num[Array, "..."], start: Int[Array, "..."], *, relative: bool
) -> dict[Rope, dict[str, Any]]:
    """Builds the kernels' arguments that rotate tokens, each by a start of its own, by rope.

    Args:
      relative: rotates engine-frame keys by local + start from where they are; they carry the attention scaling.
        Otherwise rotates phase-free keys to that position.
    """
    rotations = {}
    for rope in layout.ropes:
        if relative:
            (cos, sin), scale = relocation_tables(rope, jnp.zeros_like(start), local + start), 1.0
        else:
            (cos, sin), scale = rope_tables(rope, local[:, None], start), rope.attention_scaling
            cos, sin = cos[:, 0], sin[:, 0]
        rotations[rope] = {"cos": cos, "sin": sin, "scale": scale}
    return rotations


@functools.partial(jax.jit, static_argnames=("layout", "whole"), donate_argnames="pools")
def rotate_pieces(
    layout: KVLayout,
    pools: Pools,
    read: Int[Array, " N"],
    write: Int[Array, " N"],
    local: Num[Array, "..."],
    start: Int[Array, "..."],
    length: Int[Array, ""],
    *,
    whole: bool,
) -> Pools:
    """Rotates the keys at slots `read` to local + start, from the source, and writes them to slots `write`.

    Without a source, keys rotate by local + start from where they are. All is read before any is written, so `read`
    and `write` may overlap.

    Args:
      whole: also copies the other channels, and the source, from `read` to `write`.
    """
    describe_program("rotate_pieces", f"rotation of {len(read)} tokens")
    engine, source = dict(pools.engine), dict(pools.source)
    rotations = token_rotations(layout, local, start, relative=not source)
    for channel in layout.token_channels:
        name, rope = channel.name, layout.rope_of(channel.name)
        if not (whole or channel.rotates):
            continue
        begin, operands = (source or engine, rotations[rope]) if channel.rotates else (engine, {})
        rows = flat(begin[name])[:, read].astype(engine[name].dtype)
        engine[name] = splice_kernel(engine[name], write, rows, layout=rope.cached, length=length, **operands)
        if whole and name in source:
            source[name] = splice_kernel(source[name], write, flat(source[name])[:, read], length=length)
    return Pools(engine, source)
