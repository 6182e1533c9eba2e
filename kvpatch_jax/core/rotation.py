"""Rotation of a layout's KV between its frames: to a place in the sequence, to the chunk's own start, and back.

Rows of tokens rotate; the parts of a transition have no phase and are returned unchanged.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..errors import InputError, LayoutError
from ..utils.kinds import expect_kind
from .buckets import on_device
from .frames import EngineKV, LocalKV, PhaseFreeKV, expect_frame
from .layout import KV, AnyArray, KVLayout, Positions, Start
from .rope import POSITION_LIMIT, Rope, check_extent, check_positions, relocation_tables, rope_tables, rotate


def as_start(
    rope: Rope,
    start: Start,
    batch: tuple[int, ...] | None = None,
    what: str = "start",
    local: tuple[float, float] | None = None,
) -> Int[AnyArray, "..."]:
    """Converts a start to an int32 array: a scalar, or [..., A] with sections (a scalar is broadcast over axes).

    Args:
      batch: shape of a batch: one start for all of it, or one for each; () for a single sequence. None: any leading
        axes, for callers that compare them with the KV's.
      what: begins the message about a start of another shape.
      local: the extent of the local positions that are to be placed there, which are then checked (`check_extent`).

    Raises:
      InputError: the start is not an integer, is too large, or does not have one entry per axis; another number of
      starts than the batch has; a position out of range.
    """
    if not isinstance(start, jax.Array):
        array = np.asarray(start)
        whole = array.dtype.kind in "iu"
        if not whole or max(-int(array.min(initial=0)), int(array.max(initial=0))) >= POSITION_LIMIT:
            raise InputError(f"start: got {start!r}; expected integers below 2**30 in magnitude")
        start = array.astype(np.int32)
    elif not jnp.issubdtype(start.dtype, jnp.integer):
        raise InputError(f"start: got dtype {start.dtype}; expected int32")
    elif start.dtype != jnp.int32:
        # Conversion to int32 would wrap larger numbers.
        check_positions(rope, start, np.zeros((), np.int32))

    one = () if rope.axes is None else (rope.axes,)
    if rope.axes is not None and start.ndim == 0:
        start = (np if isinstance(start, np.ndarray) else jnp).broadcast_to(start, one)
    if rope.axes is not None and start.shape[-1] != rope.axes:
        raise InputError(f"start: got shape {start.shape}; expected a scalar or [..., {rope.axes}]")

    # Other leading axes would broadcast over tokens or layers.
    if batch is not None and start.shape not in (one, (*batch, *one)):
        several = f", or the same for each of {batch[0]} chunks" if batch else ""
        raise InputError(
            f"{what}: got start of shape {start.shape}; expected a scalar, or one per axis of the rope{several}"
        )
    if local is not None:
        check_extent(rope, local, start)
    return start if start.dtype == np.int32 else start.astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("layout", "back"))
def jitted_rotate(layout: KVLayout, kv: dict[str, Array], local: Array, start: Array, back: bool) -> dict[str, Array]:
    """Rotates the channels that carry phase; one program per layout and shape, so that rounding is the same."""
    tables = {rope: rope_tables(rope, local, start) for rope in layout.ropes}

    def turn(rope: Rope, value: Array) -> Array:
        (cos, sin), scale = tables[rope], rope.attention_scaling
        # The inverse turns the other way, and takes the attention scaling out again.
        if back:
            sin, scale = -sin, 1.0 / scale
        return rotate(value, cos, sin, rope.cached, scale)

    return {name: turn(layout.rope_of(name), value) for name, value in kv.items()}


@functools.partial(jax.jit, static_argnames=("layout",))
def jitted_relocate(layout: KVLayout, kv: dict[str, Array], old: Array, new: Array) -> dict[str, Array]:
    """Rotates the channels that carry phase once, from old to new positions; compiled once per layout and shape."""
    tables = {rope: relocation_tables(rope, old, new) for rope in layout.ropes}
    turned = {}
    for name, value in kv.items():
        rope = layout.rope_of(name)
        turned[name] = rotate(value, *tables[rope], rope.cached)
    return turned


def arrays_of(kv: Mapping[str, Any]) -> dict[str, Array]:
    """Returns arrays by channel, such as KV or a pool, as a plain dictionary of jax arrays; packed ones are decoded."""
    return {name: on_device(value) for name, value in kv.items()}


def rotate_kv(layout: KVLayout, kv: KV, local: Positions, start: Start, back: bool = False) -> dict[str, Array]:
    """Rotates keys as `to_engine` (with `back`, `to_phase_free`) without checks; `start` comes from `as_start`."""
    return _rotate_channels(layout, kv, jitted_rotate, local, start, back)


def _rotate_channels(
    layout: KVLayout, kv: KV, program: Callable[..., dict[str, Array]], *arguments: Any
) -> dict[str, Array]:
    """Returns all channels in the layout's order, those that carry rotary phase as a jitted program rotates them."""
    # Only the channels that rotate enter the program; the others are returned as they are, without a copy.
    arrays = arrays_of({name: kv[name] for name in layout.names})
    rotating = {channel.name: arrays[channel.name] for channel in layout.channels if channel.rotates}
    return arrays | program(layout, rotating, *arguments)


def _checked_rotation(layout: KVLayout, kv: KV, local: Positions, start: Start, back: bool) -> dict[str, Array]:
    """Does what `rotate_kv` does, after checking its arguments as `to_engine` says."""
    expect_kind(layout, KVLayout, "layout", "a KVLayout, such as `chunk.layout`", LayoutError)
    layout.check(kv)
    start = as_start(layout.rope, start)
    if not hasattr(local, "shape"):
        raise InputError(f"local positions: got a {type(local).__name__}; expected an array, such as `chunk.local`")

    # Positions or starts of another number would broadcast over tokens or layers.
    shape, axes = kv[layout.names[0]].shape, layout.rope.axes
    batch, tokens = shape[1:-3], shape[-3]
    places = local.shape if axes is None else local.shape[:-1]
    if not places or places[-1] != tokens:
        raise InputError(f"local positions: got shape {local.shape}; expected one for each of {tokens} tokens")

    _check_sequences("start", start.shape if axes is None else start.shape[:-1], batch)
    _check_sequences("local", places[:-1], batch)
    check_positions(layout.rope, local, start)
    return rotate_kv(layout, kv, local, start, back)


def _check_sequences(what: str, leading: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Raises InputError unless there is one for each sequence of a batch, or for all."""
    pairs = zip(leading[::-1], batch[::-1], strict=False)
    if len(leading) > len(batch) or any(size not in (1, own) for size, own in pairs):
        raise InputError(f"{what}: got shape {leading}; expected one for each of {batch} sequences, or for all")


def to_engine(layout: KVLayout, kv: KV, local: Positions, start: Start) -> EngineKV:
    """Rotates phase-free keys to the engine frame: R(start + local), times the rope's attention scaling.

    Args:
      layout: static.
      kv: {channel: [L, ..., T, K, H]}, phase-free.
      local: positions relative to start, [..., T] or [..., T, A].
      start: int32, a scalar or one per axis; traced under jit.

    Returns:
      {channel: [L, ..., T, K, H]} of the same shapes and dtypes; channels without phase are returned unchanged.

    Raises:
      LayoutError, ShapeError, InputError: an argument does not match the layout.
      LayoutError: the keys are rotated already.
    """
    expect_frame(kv, "to_engine", "phase_free")
    return EngineKV(_checked_rotation(layout, kv, local, start, False))


def to_local(layout: KVLayout, kv: KV, local: Positions) -> LocalKV:
    """Rotates phase-free keys to the local frame: `to_engine` at start 0. Queries rotated by R(−start) can read it."""
    return LocalKV(to_engine(layout, kv, local, 0))


def to_phase_free(layout: KVLayout, kv: KV, local: Positions, start: Start = 0) -> PhaseFreeKV:
    """Removes the rotation of engine-frame keys (at start 0: of local-frame keys); the inverse of `to_engine`.

    The result has kv's dtype. Keys that an engine cached in bfloat16 are therefore rounded here, and again when they
    are placed. Convert them to float32 first to get them back bit by bit (`pool.RAGGED.splice` takes such chunks).

    Raises:
      As `to_engine`. LayoutError: the keys are phase-free already.
    """
    expect_frame(kv, "to_phase_free", "engine", "local")
    return PhaseFreeKV(_checked_rotation(layout, kv, local, start, True))


def relocate(layout: KVLayout, kv: KV, old: Positions | Start, new: Positions | Start) -> EngineKV:
    """Moves engine-frame keys from `old` to `new` in one rotation, for caches that another engine computed.

    Args:
      layout: its rope should have that engine's `angles`.
      kv: {channel: [L, ..., T, K, H]}, keys already rotated.
      old, new: a start (a scalar, or one per axis: [A]) or full positions ([..., T], or [..., T, A] with sections).
        Two starts rotate every token by the same angles. Axes may move by different offsets.

    Returns:
      kv of the same shapes and dtypes. No attention scaling is applied, because the keys already carry it.

    Raises:
      InputError: a position is not finite, or is 2³⁰ or more. LayoutError: the keys are phase-free. Otherwise as
      `to_engine`.
    """
    expect_kind(layout, KVLayout, "layout", "a KVLayout, such as `backbone.layout`", LayoutError)
    expect_frame(kv, "relocate", "engine", "local")
    layout.check(kv)
    shape = kv[layout.names[0]].shape
    old, new = (_side(layout.rope, positions, shape[1:-3], shape[-3]) for positions in (old, new))
    return EngineKV(_rotate_channels(layout, kv, jitted_relocate, old, new))


def _side(rope: Rope, positions: Positions | Start, batch: tuple[int, ...], tokens: int) -> AnyArray:
    """Checks a start or full positions and returns them as `relocation_tables` takes them."""
    array = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    if array.dtype.kind not in "iuf" or not array.size:
        raise InputError(f"relocate: got positions {positions!r:.80}; expected numbers, a start or one for each token")

    # A start gets a token axis of length 1, over which the tables broadcast.
    numbers = np if isinstance(array, np.ndarray) else jnp
    axes = () if rope.axes is None else (rope.axes,)
    if array.ndim == 0 or (axes and array.shape == axes):
        array = numbers.broadcast_to(array, (1, *axes))
    places = array.shape[:-1] if axes else array.shape
    if (axes and array.shape[-1:] != axes) or not places or places[-1] not in (1, tokens):
        expected = "".join(f", {size}" for size in axes)
        raise InputError(
            f"relocate: got positions of shape {array.shape}; expected a start, or [..., {tokens}{expected}]"
        )
    _check_sequences("relocate", places[:-1], batch)
    check_positions(rope, array, np.zeros((), np.int32))
    return array.astype(np.int32 if jnp.issubdtype(array.dtype, jnp.integer) else np.float32)
