"""Jitted programs of a paged executor: writing, rotating, copying and reading the vectors at slots.

Axis letters: L layers, P pages, O offset in a page, S = P·O slots, T and N tokens (padded to buckets), K KV heads,
H head width, A position axes.

Beside a pool, which is in the engine frame, lies its *source*: the same slots, phase-free, of the channels that carry
phase. Survivors are rotated from there by one gather and one scatter.

Hybrid models' transitions are beside the pool too, an array for each piece and part: R rows, W width.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import rotate_patch, splice

from ..core import (
    KVLayout,
    PackedArray,
    Rope,
    compose,
    flat,
    fold,
    is_packed,
    ops,
    rope_tables,
    unpack,
)
from ..core.transitions import through_map

Vectors = dict[str, Float[Array, "L P O _ _"]]
Rows = dict[str, Float[Array, "L N _ _"]]

ROTATION_ARGUMENTS = ("cos", "sin", "scale")
"""Arguments of a kernel that rotate what it writes; the others add a patch to it."""


class Pools(NamedTuple):
    """A pool in the engine frame and its phase-free source; both are donated and returned together."""

    engine: Vectors
    source: Vectors


class SavedRows(NamedTuple):
    """Vectors at some slots of a pool and of its source, padding of lanes included."""

    engine: Rows
    source: Rows


class Destination(NamedTuple):
    """Slots that a piece is written to, padded to a bucket. Every field is traced.

    Attributes:
      slots: int32 [T].
      local: positions relative to the start, [T] or [T,A].
      start: as `as_start` gives it.
      length: how many of the tokens count, int32 scalar.
    """

    slots: Any
    local: Any
    start: Any
    length: Any


class SlotRotation(NamedTuple):
    """Keys to rotate, padded to a bucket. Every field is traced.

    Attributes:
      read, write: slots, int32 [N].
      local: positions relative to the starts, [N] or [N,A].
      start: the new start of every token, int32 of the same shape.
      length: how many count, int32 scalar.
    """

    read: Any
    write: Any
    local: Any
    start: Any
    length: Any


# Every program is compiled once per pool and bucket of slots. The pools are donated by all but `read_rows`.


@jax.jit
def read_rows(pools: Pools, slots: Int[Array, " N"]) -> SavedRows:
    """Returns the vectors at slots."""
    engine = {name: flat(value)[:, slots] for name, value in pools.engine.items()}
    return SavedRows(engine, {name: flat(value)[:, slots] for name, value in pools.source.items()})


def _put(pools: Pools, slots: Int[Array, " N"], rows: SavedRows, length: Int[Array, ""]) -> Pools:
    """Writes rows to slots unchanged; channels that the rows lack keep their vectors."""
    # Snapshots may have fewer channels than the pool, as those of an undo do.
    written = []
    for pool, own in zip(pools, rows, strict=True):
        new = {name: splice(pool[name], slots, value, length=length) for name, value in own.items()}
        written.append({**pool, **new})
    return Pools(*written)


put_rows = jax.jit(_put, donate_argnames="pools")


@functools.partial(jax.jit, donate_argnames="pools")
def copy_slots(pools: Pools, read: Int[Array, " N"], write: Int[Array, " N"], length: Int[Array, ""]) -> Pools:
    """Copies the vectors at slots `read` to slots `write`, reading all before writing any."""
    return _put(pools, write, read_rows(pools, read), length)


@functools.partial(jax.jit, static_argnames=("layout", "layers"), donate_argnames="pools")
def write_piece(
    layout: KVLayout,
    pools: Pools,
    destination: Destination,
    kv: Mapping[str, Float[Array, "..."] | PackedArray],
    factors: ops.Factors,
    *,
    layers: tuple[int, ...] | None = None,
) -> Pools:
    """Writes R(start + local) · (KV + u v) to slots of the pool, and KV + u v to those of its source.

    `kv` is phase-free, {channel: [L,T,K,H]} or, as a prefill gives it, [L,1,T,K,H]. Packed channels are decoded one
    layer at a time, and written as their decoded twins are.
    """
    slots, local, start, length = destination
    # Per channel, what the kernel adds and by what it rotates.
    arguments_of = ops.operator_arguments(layout, factors, local, start, layers)
    packed = {name: value for name, value in kv.items() if is_packed(value)}
    if packed:
        return _write_packed(layout, pools, destination, packed, arguments_of)
    engine, source = {}, {}

    for name, value in pools.engine.items():
        rows, arguments = kv[name], arguments_of[name]
        rows = (rows[:, 0] if rows.ndim == 5 else rows).astype(value.dtype)

        # The pool must hold the rotated source, bit for bit: then rotating the source again gives the same bits.
        if name in pools.source:
            patching = {word: own for word, own in arguments.items() if word not in ROTATION_ARGUMENTS}
            arguments = {word: own for word, own in arguments.items() if word in ROTATION_ARGUMENTS}
            rows = rotate_patch(rows, **patching) if patching else rows
            kept = rows.astype(pools.source[name].dtype)
            source[name] = splice(pools.source[name], slots, kept, length=length)

        cached = layout.rope_of(name).cached
        engine[name] = splice(value, slots, rows, layout=cached, length=length, **arguments)

    return Pools(engine, source)


def _write_packed(
    layout: KVLayout,
    pools: Pools,
    destination: Destination,
    kv: Mapping[str, PackedArray],
    arguments_of: Mapping[str, dict[str, Any]],
) -> Pools:
    """Does what `write_piece` does with packed channels: one layer is decoded, patched and written before the next."""
    slots, length = destination.slots, destination.length
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def scatter(value: Array, layer: Array, rows: Array) -> Array:
        # Padding gets slots behind the pool, each its own so that indices stay unique.
        pages, size = value.shape[1:3]
        where = jnp.where(tokens < length, slots, pages * size + tokens)
        rows = jnp.pad(rows.astype(value.dtype), [(0, 0), (0, 0), (0, value.shape[-1] - rows.shape[-1])])
        return value.at[layer, where // size, where % size].set(rows, mode="drop", unique_indices=True)

    def step(pools: Pools, operands: tuple[Array, Any]) -> tuple[Pools, None]:
        layer, (packed, layered) = operands
        engine, source = dict(pools.engine), dict(pools.source)
        for name in packed:
            value, cached = engine[name], layout.rope_of(name).cached
            # As of plain KV: numbers of the chunk's dtype, then of the pool's, and one rounding after each addition.
            rows = jax.lax.optimization_barrier(unpack(packed[name])).astype(value.dtype)
            arguments = {**arguments_of[name], **layered[name]}
            if name in source:
                patching = {word: own for word, own in arguments.items() if word not in ROTATION_ARGUMENTS}
                arguments = {word: own for word, own in arguments.items() if word in ROTATION_ARGUMENTS}
                rows = rotate_patch(rows, **patching) if patching else rows
                source[name] = scatter(source[name], layer, rows)
                # The pool must hold the rotated source, bit for bit.
                rows = jax.lax.optimization_barrier(rows)
            rows = rotate_patch(rows, layout=cached, **arguments) if arguments else rows
            engine[name] = scatter(value, layer, rows)
        return Pools(engine, source), None

    # Channels that live on as many layers go through one loop.
    for names, _ in layout.kernels(rotate_patch):
        own = {name: kv[name] for name in names if name in kv}
        layered = {name: ops.layered_arguments(arguments_of[name]) for name in own}
        if own:
            pools, _ = jax.lax.scan(step, pools, (jnp.arange(layout.depth(names[0])), (own, layered)))
    return pools


@functools.partial(jax.jit, static_argnames=("layout", "first"), donate_argnames="pools")
def write_layers(
    layout: KVLayout,
    pools: Pools,
    destination: Destination,
    kv: Mapping[str, Float[Array, "L 1 T _ _"]],
    *,
    first: int,
) -> Pools:
    """Writes phase-free KV of the layers from `first` up; the layers below keep their bits."""
    # Kernels write all layers, so this one scatters.
    slots, local, start, length = destination
    tables = {rope: rope_tables(rope, local, start) for rope in layout.ropes}
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def scatter(name: str, value: Array, rotated: bool) -> Array:
        rows = kv[name][:, 0].astype(value.dtype)
        if rotated and layout.channel(name).rotates:
            rope = layout.rope_of(name)
            rows = rotate_patch(rows, *tables[rope], layout=rope.cached, scale=rope.attention_scaling)

        # Padding gets slots behind the pool, which "drop" leaves out, each its own so that indices stay unique.
        pages, size = value.shape[1:3]
        where = jnp.where(tokens < length, slots, pages * size + tokens)
        above = slice(layout.depth(name) - len(layout.rows_of(name, range(first, layout.layers))), None)
        at = (above, where // size, where % size, slice(None), slice(rows.shape[-1]))
        return value.at[at].set(rows, mode="drop", unique_indices=True)

    return Pools(
        {name: scatter(name, value, True) for name, value in pools.engine.items()},
        {name: scatter(name, value, False) for name, value in pools.source.items()},
    )


@functools.partial(jax.jit, static_argnames=("layout", "whole"), donate_argnames="pools")
def rotate_slots(layout: KVLayout, pools: Pools, rotation: SlotRotation, *, whole: bool) -> Pools:
    """Rotates the keys at slots `read` to their new starts and writes them to slots `write`.

    Keys rotate from phase 0, in the source, to local + new.

    Args:
      whole: also copies the other channels, and the source, from `read` to `write`.
    """
    read, write, local, start, length = rotation
    turns: dict[Rope, dict[str, Any]] = {}
    for rope in layout.ropes:
        cos, sin = (table[:, 0] for table in rope_tables(rope, local[:, None], start))  # one start per token
        turns[rope] = {"cos": cos, "sin": sin, "scale": rope.attention_scaling}

    engine, source = dict(pools.engine), dict(pools.source)
    for channel in layout.token_channels:
        name = channel.name
        if not (whole or channel.rotates):
            continue

        # Reading completes before the write begins, so `read` and `write` may overlap.
        rope = layout.rope_of(name)
        arguments = turns[rope] if channel.rotates else {}
        begun = source[name] if channel.rotates else engine[name]
        rows = flat(begun)[:, read, :, : channel.width].astype(engine[name].dtype)
        engine[name] = splice(engine[name], write, rows, layout=rope.cached, length=length, **arguments)
        if whole and name in source:
            source[name] = splice(source[name], write, flat(source[name])[:, read], length=length)

    return Pools(engine, source)


# Programs of transitions, {part: [L,R,K,W]}. Nothing is donated: the same arrays serve many windows and questions.


@functools.partial(jax.jit, static_argnames=("layout", "layers"))
def make_transition(
    layout: KVLayout,
    parts: Mapping[str, Float[Array, "..."] | PackedArray],
    factors: ops.Factors,
    *,
    layers: tuple[int, ...] | None = None,
) -> dict[str, Float[Array, "L R _ _"]]:
    """Returns a transition plus what a patch adds to it, in float32.

    `parts` are [L,R,K,W] or, as a prefill gives them, [L,1,R,K,W]; the layers may be the upper ones alone.
    """
    made = {}
    for name, value in parts.items():
        value = (unpack(value, jnp.float32) if is_packed(value) else value).astype(jnp.float32)
        value = value[:, 0] if value.ndim == 5 else value
        kept = None if layers is None else layout.rows_of(name, layers)
        patching = ops.kernel_arguments(factors.get(name), kept, layout.depth(name))
        made[name] = rotate_patch(value, **patching) if patching else value
    return made


@jax.jit
def replace_upper_layers(
    below: Mapping[str, Float[Array, "L R _ _"]], above: Mapping[str, Float[Array, "_ R _ _"]]
) -> dict[str, Float[Array, "L R _ _"]]:
    """Returns a transition whose upper layers are replaced, as many as `above` has."""
    upper = above.items()
    return {name: jnp.concatenate([below[name][: len(below[name]) - len(new)], new]) for name, new in upper}


@jax.jit
def compose_transitions(
    transitions: tuple[Mapping[str, Float[Array, "L R _ _"]], ...], lengths: Int[Array, " n"]
) -> dict[str, Float[Array, "L 1 R _ _"]]:
    """Composes transitions of stretches of tokens, of these lengths, that follow each other; as a context has them."""
    composed = fold(transitions, [lengths[index] for index in range(len(transitions))])
    return {name: value[:, None] for name, value in composed.items()}


@jax.jit
def extend_composition(
    front: Mapping[str, Float[Array, "L 1 R _ _"]],
    last: Mapping[str, Float[Array, "L R _ _"]],
    length: Int[Array, ""],
) -> dict[str, Float[Array, "L 1 R _ _"]]:
    """Composes what `compose_transitions` gave of a context with the stretch behind it, of `length` tokens."""
    composed = compose({name: value[:, 0] for name, value in front.items()}, last, length)
    return {name: value[:, None] for name, value in composed.items()}


@jax.jit
def answer_transition(
    before: Mapping[str, Float[Array, "L 1 R _ _"]],
    after: Mapping[str, Float[Array, "L 1 R _ _"]],
    length: Int[Array, ""],
) -> dict[str, Float[Array, "L R _ _"]]:
    """Returns the transition of decoded tokens, from the states in front of them and behind them, and their own map.

    B = S_out − M·S_in; of the tail what they have put there, which is at most `length` inputs.
    """
    made = {"map": after["map"], "state": after["state"] - through_map(after["map"], before["state"])}
    if "tail" in after:
        rows = after["tail"].shape[-3]
        own = jnp.arange(rows)[:, None, None] >= rows - length
        made["tail"] = jnp.where(own, after["tail"], 0)
    return {name: value[:, 0].astype(jnp.float32) for name, value in made.items()}
