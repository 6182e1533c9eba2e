"""Layout of a backbone's KV: its channels, their widths, which carry rotary phase, and rotation between three frames.

Frames: *phase-free* (keys before RoPE, after bias and qk-norm: what is stored and patched), *local* (rotated to
positions relative to the chunk's start) and *engine* (rotated to positions in the sequence). Frames differ only in
the channels that rotate. Kamera §3, "one mechanism for MLA, GQA and MHA".
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

from ..errors import DtypeError, LayoutError, PositionError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .frames import EngineKV, LocalKV, PhaseFreeKV, expect_frame
from .frames import Frame as Frame
from .rope import POSITION_LIMIT, Angles, Rope, check_positions, relocation_tables, rope_tables, rotate

AnyArray = jax.Array | np.ndarray
KV = Mapping[str, Any]
"""{channel: array}, or a `PackedArray`."""
Positions = Num[AnyArray, "..."]
Start = Int[AnyArray, "..."] | int | np.integer | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Channel:
    """One cached tensor per layer: `heads` vectors of `width` per token, of which the first `rotary` entries rotate.

    Attributes:
      rope: what rotates it, where that is another than the layout's; None: the layout's.
      layers: the decoder's layers that keep it, ascending; None: all. Its arrays have one entry for each of these.
    """

    name: str
    heads: int
    width: int
    rotary: int = 0
    rope: Rope | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        whole = all(is_whole(number, 0) for number in (self.heads, self.width, self.rotary))
        if not whole or self.heads < 1 or self.width < 1 or not 0 <= self.rotary <= self.width:
            raise LayoutError(
                f"channel {self.name!r}: got heads {self.heads}, width {self.width}, rotary {self.rotary}; expected "
                "positive heads and width, and rotary at most the width"
            )
        if self.rope is not None:
            expect_kind(self.rope, Rope, f"channel {self.name!r}: rope", "a Rope, or None", LayoutError)
        if self.layers is not None:
            expect_kind(self.layers, tuple, f"channel {self.name!r}: layers", "a tuple, or None", LayoutError)
            whole = all(is_whole(layer, 0) for layer in self.layers)
            if not self.layers or not whole or list(self.layers) != sorted(set(self.layers)):
                raise LayoutError(
                    f"channel {self.name!r}: got layers {self.layers!r:.80}; expected whole numbers, ascending, or None"
                )

    @property
    def features(self) -> int:
        """Numbers per token and layer, F = K·H."""
        return self.heads * self.width

    @property
    def rotates(self) -> bool:
        """Whether any of its entries carry rotary phase."""
        return self.rotary > 0


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Ordered channels of a backbone's KV. Hashable: a static argument under jit. Construct with gqa, mha or mla.

    Layers may be of unlike kinds: a channel may live on some of them alone, and turn by a rope of its own. All ropes
    have the same position axes, and positions are checked with the layout's. `uniform` says that none of this is so.

    Raises:
      LayoutError: channels that do not fit the layers or their rope.
    """

    kind: Literal["gqa", "mha", "mla"]
    layers: int
    channels: tuple[Channel, ...]
    rope: Rope

    def __post_init__(self) -> None:
        if not is_whole(self.layers, 1):
            raise LayoutError(f"layout: got layers {self.layers!r:.80}; expected a whole number from 1")

        expect_kind(self.rope, Rope, "layout: rope", "a Rope", LayoutError)
        expect_kind(self.channels, tuple, "layout: channels", "a tuple of Channel", LayoutError)
        for channel in self.channels:
            expect_kind(channel, Channel, "layout: channels", "each a Channel", LayoutError)
        if len(set(self.names)) != len(self.names) or not self.names:
            raise LayoutError(f"layout: got channels {list(self.names)}; expected distinct names")

        # One table of cosines serves every channel that rotates by the same rope.
        for channel in self.channels:
            rope = self.rope if channel.rope is None else channel.rope
            if channel.rotates and (channel.rotary != rope.dim or channel.width != rope.head_width):
                raise LayoutError(
                    f"layout: got channel {channel.name!r} of width {channel.width} that rotates {channel.rotary}; "
                    f"expected the rope's {rope.head_width} and {rope.dim}"
                )
            self._check_kind(channel)

    def _check_kind(self, channel: Channel) -> None:
        """Refuses a channel's own rope or layers that are not of this layout, or say nothing."""
        rope, layers, what = channel.rope, channel.layers, f"layout: got channel {channel.name!r}"
        if rope is not None:
            # Equal layouts have one form, and one rope knows how far positions may go.
            if not channel.rotates or rope == self.rope:
                raise LayoutError(f"{what} with a rope of its own; expected a channel that rotates, by another rope")
            if rope.axes != self.rope.axes or (
                rope.scaling is not None and rope.scaling.kind in ("longrope", "dynamic")
            ):
                raise LayoutError(
                    f"{what} with a rope of {rope.axes} position axes and scaling {rope.scaling}; expected the axes of "
                    f"the layout's rope, {self.rope.axes}, and frequencies that depend on no length"
                )
        if layers is not None and (layers[-1] >= self.layers or len(layers) == self.layers):
            raise LayoutError(f"{what} on layers {layers}; expected some of 0 to {self.layers - 1}, or None for all")

    @classmethod
    def gqa(cls, layers: int, kv_heads: int, head_dim: int, rope: Rope) -> "KVLayout":
        """Describes grouped-query attention: channels k (rotates) and v, [L, T, kv_heads, head_dim] each.

        Raises:
          LayoutError: the rope does not match `head_dim`.
        """
        channels = (Channel("k", kv_heads, head_dim, rope.dim), Channel("v", kv_heads, head_dim))
        return cls("gqa", layers, channels, rope)

    @classmethod
    def mha(cls, layers: int, heads: int, head_dim: int, rope: Rope) -> "KVLayout":
        """Describes multi-head attention: as gqa, with one KV head per query head."""
        return dataclasses.replace(cls.gqa(layers, heads, head_dim, rope), kind="mha")

    @classmethod
    def mla(cls, layers: int, latent: int = 512, rope_dim: int = 64, *, rope: Rope) -> "KVLayout":
        """Describes latent attention: ckv (post-norm latent, no phase) and kpe (decoupled key, rotates), one head.

        Raises:
          LayoutError: a rope whose dim is not `rope_dim`.
        """
        return cls("mla", layers, (Channel("ckv", 1, latent), Channel("kpe", 1, rope_dim, rope.dim)), rope)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Channel names, in order."""
        return tuple(channel.name for channel in self.channels)

    def channel(self, name: str) -> Channel:
        """Returns the channel called `name`.

        Raises:
          LayoutError: there is no such channel.
        """
        for channel in self.channels:
            if channel.name == name:
                return channel
        raise LayoutError(f"layout: got no channel {name!r}; expected one of {self.names}")

    def with_angles(self, angles: Angles | None) -> "KVLayout":
        """Replaces the rope's `angles` ("exact" or "float32"); None leaves them as they are."""
        # The same object where nothing changes: layouts are compared and hashed by every jitted call.
        if angles is None or all(rope.angles == angles for rope in self.ropes):
            return self

        channels = []
        for channel in self.channels:
            own = None if channel.rope is None else dataclasses.replace(channel.rope, angles=angles)
            channels.append(channel if own is None else dataclasses.replace(channel, rope=own))
        return dataclasses.replace(self, channels=tuple(channels), rope=dataclasses.replace(self.rope, angles=angles))

    @functools.cached_property
    def uniform(self) -> bool:
        """Whether every channel lives on all layers and rotates, if it does, by the layout's rope."""
        return all(channel.rope is None and channel.layers is None for channel in self.channels)

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Distinct ropes, the layout's first."""
        return tuple(
            dict.fromkeys((self.rope, *(channel.rope for channel in self.channels if channel.rope is not None)))
        )

    def rope_of(self, name: str) -> Rope:
        """Returns what rotates the channel called `name`."""
        own = self.channel(name).rope
        return self.rope if own is None else own

    def layers_of(self, name: str) -> Sequence[int]:
        """Returns the decoder's layers that keep the channel called `name`, ascending: its arrays' first axis."""
        own = self.channel(name).layers
        # Not as a tuple: a forged header may claim any number of layers.
        return range(self.layers) if own is None else own

    def depth(self, name: str) -> int:
        """Returns how many layers keep the channel called `name`."""
        own = self.channel(name).layers
        return self.layers if own is None else len(own)

    def rows_of(self, name: str, layers: Iterable[int]) -> tuple[int, ...]:
        """Returns where, along the first axis of a channel's arrays, those of these layers are that keep it."""
        own = self.channel(name).layers
        if own is None:
            return tuple(layers)
        return tuple(own.index(layer) for layer in layers if layer in own)

    def of_layers(self, values: Mapping[str, Any], layers: Iterable[int]) -> dict[str, Any]:
        """Cuts {channel: [L, ...]} to some of the decoder's layers: of each channel those of them that keep it."""
        layers = tuple(layers)
        return {name: value[np.asarray(self.rows_of(name, layers), int)] for name, value in values.items()}

    def kernels(self, rotation: Callable[..., Any]) -> list[tuple[list[str], Callable[..., Any]]]:
        """Groups channels by the layers that keep them and their order of pairs, each with its rotation kernel."""
        groups: dict[Any, list[str]] = {}
        for name in self.names:
            groups.setdefault((self.layers_of(name), self.rope_of(name).cached), []).append(name)
        return [(names, functools.partial(rotation, layout=cached)) for (_, cached), names in groups.items()]

    @functools.cached_property
    def numbers(self) -> int:
        """Numbers per token, all layers and channels."""
        return sum(self.depth(channel.name) * channel.features for channel in self.channels)

    def bytes_per_token(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
        """Counts the bytes that one token takes, all layers and channels."""
        return self.numbers * jnp.dtype(dtype).itemsize

    def check(self, kv: KV, what: str = "kv") -> None:
        """Checks that a kv pytree is {channel: float [L, ..., T, K, H]} of this layout, L the channel's layers.

        Raises:
          LayoutError: the channels differ. ShapeError: a shape differs. DtypeError: a dtype is not floating-point.
        """
        expect_kind(kv, Mapping, what, "{channel: array}", LayoutError)
        if set(kv) != set(self.names):
            raise LayoutError(f"{what}: got channels {sorted(kv)}; expected {sorted(self.names)}")

        # Batch and token axes, which all channels share.
        middle = None
        for channel in self.channels:
            value = kv[channel.name]
            if not hasattr(value, "dtype") or not hasattr(value, "shape"):
                raise LayoutError(f"{what}[{channel.name!r}]: got a {type(value).__name__}; expected an array")
            if not _is_floating(value.dtype):
                raise DtypeError(f"{what}[{channel.name!r}]: got dtype {value.dtype}; expected a floating-point dtype")

            shape, depth = value.shape, self.layers if channel.layers is None else len(channel.layers)
            if len(shape) < 4 or shape[0] != depth or shape[-2:] != (channel.heads, channel.width):
                raise ShapeError(
                    f"{what}[{channel.name!r}]: got shape {shape}; expected [{depth}, ..., T, {channel.heads}, "
                    f"{channel.width}]"
                )
            if middle is not None and shape[1:-2] != middle:
                raise ShapeError(
                    f"{what}[{channel.name!r}]: got shape {shape}; expected {middle} between layers and heads"
                )
            middle = shape[1:-2]


def check_uniform(layout: KVLayout, what: str) -> None:
    """Refuses a layout with layers of unlike kinds, for what works with layers of one kind alone.

    Raises:
      LayoutError: it names a channel that lives on some layers alone, or turns by a rope of its own.
    """
    if not layout.uniform:
        channel = next(channel for channel in layout.channels if channel.rope is not None or channel.layers is not None)
        own = "layers" if channel.layers is not None else "rope"
        raise LayoutError(
            f"{what}: got a layout whose channel {channel.name!r} has {own} of its own; expected layers of one kind, "
            "each with every channel"
        )


@functools.cache
def _is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def as_start(
    rope: Rope, start: Start, batch: tuple[int, ...] | None = None, what: str = "start"
) -> Int[AnyArray, "..."]:
    """Converts a start to an int32 array: a scalar, or [..., A] with sections (a scalar is broadcast over axes).

    Args:
      batch: shape of a batch: one start for all of it, or one for each; () for a single sequence. None: any leading
        axes, for callers that compare them with the KV's.
      what: begins the message about a start of another shape.

    Raises:
      PositionError: the start is not an integer, is too large, or does not have one entry per axis; another number of
      starts than the batch has.
    """
    if not isinstance(start, jax.Array):
        array = np.asarray(start)
        whole = array.dtype.kind in "iu"
        if not whole or max(-int(array.min(initial=0)), int(array.max(initial=0))) >= POSITION_LIMIT:
            raise PositionError(f"start: got {start!r}; expected integers below 2**30 in magnitude")
        start = array.astype(np.int32)
    elif not jnp.issubdtype(start.dtype, jnp.integer):
        raise PositionError(f"start: got dtype {start.dtype}; expected int32")
    elif start.dtype != jnp.int32:
        # Conversion to int32 would wrap larger numbers.
        check_positions(rope, start, np.zeros((), np.int32))

    one = () if rope.axes is None else (rope.axes,)
    if rope.axes is not None and start.ndim == 0:
        start = (np if isinstance(start, np.ndarray) else jnp).broadcast_to(start, one)
    if rope.axes is not None and start.shape[-1] != rope.axes:
        raise PositionError(f"start: got shape {start.shape}; expected a scalar or [..., {rope.axes}]")

    # Other leading axes would broadcast over tokens or layers.
    if batch is not None and start.shape not in (one, (*batch, *one)):
        several = f", or the same for each of {batch[0]} chunks" if batch else ""
        raise PositionError(
            f"{what}: got start of shape {start.shape}; expected a scalar, or one per axis of the rope{several}"
        )
    return start.astype(jnp.int32)


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
    # `jnp.asarray` takes 30 µs to return a jax array unchanged.
    return {name: value if isinstance(value, jax.Array) else jnp.asarray(value) for name, value in kv.items()}


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
        raise PositionError(f"local positions: got a {type(local).__name__}; expected an array, such as `chunk.local`")

    # kv is [L, ..., T, K, H]. Positions or starts of another number would broadcast over tokens or layers.
    shape, axes = kv[layout.names[0]].shape, layout.rope.axes
    batch, tokens = shape[1:-3], shape[-3]
    places = local.shape if axes is None else local.shape[:-1]
    if not places or places[-1] != tokens:
        raise PositionError(f"local positions: got shape {local.shape}; expected one for each of {tokens} tokens")

    for what, found in (("start", start.shape if axes is None else start.shape[:-1]), ("local", places[:-1])):
        if len(found) > len(batch):
            raise PositionError(f"{what}: got shape {found}; expected one for each of {batch} sequences, or for all")

    check_positions(layout.rope, local, start)
    return rotate_kv(layout, kv, local, start, back)


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
      LayoutError, ShapeError, DtypeError, PositionError, RopeRegimeError: an argument does not match the layout.
      FrameError: the keys are rotated already.
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
      As `to_engine`. FrameError: the keys are phase-free already.
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
      PositionError: a position is not finite, or is 2³⁰ or more. FrameError: the keys are phase-free. Otherwise as
      `to_engine`.
    """
    expect_kind(layout, KVLayout, "layout", "a KVLayout, such as `backbone.layout`", LayoutError)
    expect_frame(kv, "relocate", "engine", "local")
    layout.check(kv)
    old, new = _side(layout.rope, old), _side(layout.rope, new)
    return EngineKV(_rotate_channels(layout, kv, jitted_relocate, old, new))


def _side(rope: Rope, positions: Positions | Start) -> AnyArray:
    """Checks a start or full positions and returns them as `relocation_tables` takes them."""
    array = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    if array.dtype.kind not in "iuf" or not array.size:
        raise PositionError(
            f"relocate: got positions {positions!r:.80}; expected numbers, a start or one for each token"
        )

    check_positions(rope, array, np.zeros((), np.int32))
    array = array.astype(np.int32 if jnp.issubdtype(array.dtype, jnp.integer) else np.float32)
    # A start gets a token axis of length 1, over which the tables broadcast.
    if rope.axes is None:
        return array[None] if array.ndim == 0 else array
    if array.ndim > 1:
        return array
    numbers = np if isinstance(array, np.ndarray) else jnp
    return numbers.broadcast_to(array, (rope.axes,))[None, :]
