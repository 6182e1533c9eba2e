"""The jitted programs of a paged window: writing, turning, copying and reading the vectors of slots.

Axis letters: L layers, P pages, O offset in a page, S = P·O slots, T and N tokens (padded to buckets), K KV heads,
H head width, A position axes. `length` is how many of the tokens count; it is traced, like slots, starts and positions.

Beside a pool, which is in the engine frame, there may be its *source*: the same slots, phase-free, of the channels that
carry phase (or of all). Survivors are turned from there by one gather and one scatter.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import rotate_patch, splice

from ..core import KVLayout, flat, ops, relocation_tables, rope_tables

Vectors = dict[str, Float[Array, "L P O _ _"]]
Rows = dict[str, Float[Array, "L N _ _"]]
TURNING = ("cos", "sin", "scale")
"""Arguments of a kernel that turn what it writes; the others add a patch to it."""


class Pools(NamedTuple):
    """A pool in the engine frame and its phase-free source, {} where none is kept; donated and given back together."""

    engine: Vectors
    source: Vectors


class SavedRows(NamedTuple):
    """What lay at some slots of a pool and of its source."""

    engine: Rows
    source: Rows


def _read(pools: Pools, slots: Int[Array, " N"]) -> SavedRows:
    """What lies at slots, padding of lanes included."""
    return SavedRows(*({name: flat(value)[:, slots] for name, value in pool.items()} for pool in pools))


def _put(pools: Pools, slots: Int[Array, " N"], rows: SavedRows, length: Int[Array, ""]) -> Pools:
    """Writes rows to slots as they are; channels that the rows lack are left alone."""
    written = []
    for pool, own in zip(pools, rows, strict=True):
        new = {name: splice(pool[name], slots, value, length=length) for name, value in own.items()}
        written.append({**pool, **new})
    return Pools(*written)


def _copy(pools: Pools, read: Int[Array, " N"], write: Int[Array, " N"], length: Int[Array, ""]) -> Pools:
    """Copies what lies at slots `read` to slots `write`, reading all before writing any."""
    return _put(pools, write, _read(pools, read), length)


def _write(
    layout: KVLayout,
    pools: Pools,
    slots: Int[Array, " T"],
    kv: Mapping[str, Float[Array, "..."]],
    factors: ops.Factors,
    local: Num[Array, "..."],
    start: Int[Array, "..."],
    length: Int[Array, ""],
    *,
    layers: tuple[int, ...] | None = None,
    heads: ops.Heads = "joint",
) -> Pools:
    """Writes R(start + local) · (KV + u v) to slots of the pool, and KV + u v to those of its source.

    `kv` is phase-free, {channel: [L,T,K,H]} or, as a prefill gives it, [L,1,T,K,H].
    """
    rows = {name: value[:, 0] if value.ndim == 5 else value for name, value in kv.items()}
    given = ops.operator_arguments(layout, factors, local, start, layers, heads)
    engine, source = {}, {}
    for name, value in pools.engine.items():
        own, arguments = rows[name].astype(value.dtype), given[name]
        if name in pools.source:
            # What the pool holds is the source, turned: turning it again, anywhere, gives the same bits.
            added = {word: own for word, own in arguments.items() if word not in TURNING}
            kept = rotate_patch(own, **added) if added else own
            source[name] = splice(pools.source[name], slots, kept.astype(pools.source[name].dtype), length=length)
            own, arguments = kept, {word: own for word, own in arguments.items() if word in TURNING}
        engine[name] = splice(value, slots, own, layout=layout.rope.cached, length=length, **arguments)
    return Pools(engine, source)


def _write_layers(
    layout: KVLayout,
    pools: Pools,
    slots: Int[Array, " T"],
    kv: Mapping[str, Float[Array, "L 1 T _ _"]],
    local: Num[Array, "..."],
    start: Int[Array, "..."],
    length: Int[Array, ""],
    *,
    first: int,
) -> Pools:
    """Writes phase-free KV of the layers from `first` up; the layers below keep their bits."""
    cos, sin = rope_tables(layout.rope, local, start)
    scale, cached = layout.rope.attention_scaling, layout.rope.cached

    def written(name: str, value: Array, turned: bool) -> Array:
        rows = kv[name][:, 0].astype(value.dtype)
        if turned and layout.channel(name).rotates:
            rows = rotate_patch(rows, cos, sin, layout=cached, scale=scale)
        pages, size = value.shape[1:3]
        tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
        places = jnp.where(tokens < length, slots, pages * size + tokens)
        at = (slice(first, None), places // size, places % size, slice(None), slice(rows.shape[-1]))
        return value.at[at].set(rows, mode="drop", unique_indices=True)

    return Pools(
        {name: written(name, value, True) for name, value in pools.engine.items()},
        {name: written(name, value, False) for name, value in pools.source.items()},
    )


def _turn(
    layout: KVLayout,
    pools: Pools,
    read: Int[Array, " N"],
    write: Int[Array, " N"],
    local: Num[Array, "..."],
    old: Int[Array, "..."],
    new: Int[Array, "..."],
    length: Int[Array, ""],
    *,
    whole: bool,
) -> Pools:
    """Turns the keys at slots `read` to their new starts and writes them to slots `write`.

    Args:
      local: of each token, [N] or [N,A]. old, new: its starts, int32 of the same shape. Where there is a source keys
        turn from phase 0 to local + new, else from where they stand by new − old.
      whole: the other channels, and the source, are copied from `read` to `write` too.
    """
    rope = layout.rope
    if pools.source:
        cos, sin = (table[:, 0] for table in rope_tables(rope, local[:, None], new))  # a start of its own for each
    else:
        cos, sin = relocation_tables(rope, old, new)
    scale = rope.attention_scaling if pools.source else 1.0

    engine, source = dict(pools.engine), dict(pools.source)
    for channel in layout.channels:
        name = channel.name
        if not (whole or channel.rotates):
            continue
        turning = {"cos": cos, "sin": sin, "scale": scale} if channel.rotates else {}
        begun = source.get(name, engine[name]) if channel.rotates else engine[name]
        rows = flat(begun)[:, read, :, : channel.width].astype(engine[name].dtype)
        engine[name] = splice(engine[name], write, rows, layout=rope.cached, length=length, **turning)
        if whole and name in source:
            source[name] = splice(source[name], write, flat(source[name])[:, read], length=length)
    return Pools(engine, source)


read_rows = jax.jit(_read)
"""Compiled once per pool and bucket of slots, as all of these; the pools of the others are donated."""
put_rows = jax.jit(_put, donate_argnames="pools")
copy_slots = jax.jit(_copy, donate_argnames="pools")
write_piece = jax.jit(_write, static_argnames=("layout", "layers", "heads"), donate_argnames="pools")
write_layers = jax.jit(_write_layers, static_argnames=("layout", "first"), donate_argnames="pools")
turn_slots = jax.jit(_turn, static_argnames=("layout", "whole"), donate_argnames="pools")
