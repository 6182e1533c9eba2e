"""Layout of a backbone's KV: its channels, their widths, which carry rotary phase, and rotation between three frames.

Layers with attention keep *rows*, one per token. Layers with linear attention keep a *transition* of the tokens, a map
of constant size (`transitions`), whose parts are channels too: they have a fixed number of rows, and no phase.

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
from jaxtyping import Int, Num

from ..errors import LayoutError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .frames import Frame as Frame
from .rope import Angles, Rope

AnyArray = jax.Array | np.ndarray
KV = Mapping[str, Any]
"""{channel: array}, or a `PackedArray`."""
Positions = Num[AnyArray, "..."]
Start = Int[AnyArray, "..."] | int | np.integer | tuple[int, ...]


PARTS = ("map", "state", "tail")
"""Names of the channels that make up a transition: M, B, and what the causal convolution in front reads next."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """One cached tensor per layer: `heads` vectors of `width` per token, of which the first `rotary` entries rotate.

    Attributes:
      rope: what rotates it, where that is another than the layout's; None: the layout's.
      layers: the decoder's layers that keep it, ascending; None: all. Its arrays have one entry for each of these.
      rows: of a transition's part, which is called one of `PARTS`: rows of vectors that it has, however many tokens
        there are. Its arrays are [L, ..., rows, K, H], the same in every frame. None: one row per token.
    """

    name: str
    heads: int
    width: int
    rotary: int = 0
    rope: Rope | None = None
    layers: tuple[int, ...] | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        what, numbers = f"channel {self.name!r}", (self.heads, self.width, self.rotary)
        if not all(is_whole(number, 0) for number in numbers) or 0 in numbers[:2] or self.rotary > self.width:
            raise LayoutError(
                f"{what}: got heads {self.heads}, width {self.width}, rotary {self.rotary}; expected positive heads "
                "and width, and rotary at most the width"
            )
        expect_kind(self.rope, Rope | None, f"{what}: rope", "a Rope, or None", LayoutError)
        if self.layers is not None:
            expect_kind(self.layers, tuple, f"{what}: layers", "a tuple, or None", LayoutError)
            whole = all(is_whole(layer, 0) for layer in self.layers)
            if not self.layers or not whole or list(self.layers) != sorted(set(self.layers)):
                raise LayoutError(f"{what}: got layers {self.layers!r:.80}; expected whole numbers, ascending, or None")

    @property
    def features(self) -> int:
        """Numbers per row (a token's, or one of a transition's part) and layer, F = K·H."""
        return self.heads * self.width

    def rows_for(self, tokens: int) -> int:
        """Returns how many rows it has of so many tokens: as many, or of a transition's part its own number."""
        return tokens if self.rows is None else self.rows

    @property
    def rotates(self) -> bool:
        """Whether any of its entries carry rotary phase."""
        return self.rotary > 0


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Ordered channels of a backbone's KV. Hashable: a static argument under jit. Construct with gqa, mha or mla.

    Layers may be of unlike kinds: a channel may live on some of them alone, and turn by a rope of its own. All ropes
    have the same position axes, and positions are checked with the layout's. `uniform` says that none of this is so.
    Channels with a row per token come first; behind them, in hybrid models, the parts of a transition
    (`with_transitions`).

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

    def with_transitions(
        self,
        layers: Sequence[int],
        heads: int,
        key_width: int,
        value_width: int,
        *,
        tail: tuple[int, int] | None = None,
    ) -> "KVLayout":
        """Returns this layout with linear attention on some layers, which keep a transition and no rows.

        Args:
          layers: that have linear attention; this layout's channels are kept by the others.
          heads, key_width, value_width: of the state S: [key_width, value_width] per head.
          tail: tokens that the convolution reads behind, and its width; None: there is no convolution.

        Raises:
          LayoutError: no layer is left for the rows, or a channel says which layers keep it already.
        """
        linear = tuple(sorted(set(layers)))
        others = tuple(layer for layer in range(self.layers) if layer not in linear)
        if not linear or not others or linear[-1] >= self.layers or not self.uniform:
            raise LayoutError(
                f"layout: got linear attention on layers {linear} of {self.layers}; expected some of them, not all, of "
                "a layout whose channels are on every layer"
            )
        channels = [dataclasses.replace(channel, layers=others) for channel in self.channels]
        channels.append(Channel("map", heads, key_width, layers=linear, rows=key_width))
        channels.append(Channel("state", heads, value_width, layers=linear, rows=key_width))
        if tail is not None:
            channels.append(Channel("tail", 1, tail[1], layers=linear, rows=tail[0]))
        return dataclasses.replace(self, channels=tuple(channels))

    @functools.cached_property
    def parts(self) -> tuple[Channel, ...]:
        """Channels that make up a transition: map, state and tail of hybrid models; none of others."""
        return tuple(channel for channel in self.channels if channel.rows is not None)

    @functools.cached_property
    def token_channels(self) -> tuple[Channel, ...]:
        """Channels with a row per token."""
        return tuple(channel for channel in self.channels if channel.rows is None)

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
        """Numbers per token, all layers and channels with a row per token."""
        return sum(self.depth(channel.name) * channel.features for channel in self.token_channels)

    @functools.cached_property
    def transition_numbers(self) -> int:
        """Numbers of a transition, all layers and parts, whatever the number of tokens; 0 where there is none."""
        return sum(self.depth(channel.name) * (channel.rows or 0) * channel.features for channel in self.parts)

    def bytes_per_token(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
        """Counts the bytes that one token takes, all layers and channels; a transition comes on top, once per chunk."""
        return self.numbers * jnp.dtype(dtype).itemsize

    def transition_bytes(self, dtype: jax.typing.DTypeLike = jnp.float32) -> int:
        """Counts the bytes that a chunk's transition takes, whatever its tokens; in float32, as it is made."""
        return self.transition_numbers * jnp.dtype(dtype).itemsize

    def between(self, kv: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
        """Cuts {channel: [L, ..., T, K, H]} to the tokens from `begin` up to `end`.

        Raises:
          LayoutError: a hybrid model's layout: the transition of some tokens is no part of that of more.
        """
        if self.parts:
            raise LayoutError(
                f"layout: got KV with a transition to cut to tokens {begin} to {end}; expected rows alone: these "
                "tokens have a transition of their own, which a forward over them gives"
            )
        return {name: value[..., begin:end, :, :] for name, value in kv.items()}

    def check(self, kv: KV, what: str = "kv") -> None:
        """Checks that a kv pytree is {channel: float [L, ..., T, K, H]} of this layout, L the channel's layers.

        The parts of a transition have their rows in place of T.

        Raises:
          LayoutError: the channels differ. ShapeError: a shape differs; a dtype is not floating-point.
        """
        expect_kind(kv, Mapping, what, "{channel: array}", LayoutError)
        if set(kv) != set(self.names):
            raise LayoutError(f"{what}: got channels {sorted(kv)}; expected {sorted(self.names)}")

        # Batch and token axes, which all channels share; a transition's parts have no tokens.
        middle = None
        for channel in self.channels:
            value = kv[channel.name]
            if not hasattr(value, "dtype") or not hasattr(value, "shape"):
                raise LayoutError(f"{what}[{channel.name!r}]: got a {type(value).__name__}; expected an array")
            if not _is_floating(value.dtype):
                raise ShapeError(f"{what}[{channel.name!r}]: got dtype {value.dtype}; expected a floating-point dtype")

            shape, depth = value.shape, self.layers if channel.layers is None else len(channel.layers)
            rows = channel.rows
            fits = len(shape) >= 4 and shape[0] == depth and shape[-2:] == (channel.heads, channel.width)
            if not fits or (rows is not None and shape[-3] != rows):
                raise ShapeError(
                    f"{what}[{channel.name!r}]: got shape {shape}; expected [{depth}, ..., "
                    f"{'T' if rows is None else rows}, {channel.heads}, {channel.width}]"
                )
            # The rows of tokens come first, so their axes are known.
            if rows is not None:
                if shape[1:-3] != (middle or ())[:-1]:
                    raise ShapeError(
                        f"{what}[{channel.name!r}]: got shape {shape}; expected {(middle or ())[:-1]} between layers "
                        "and rows"
                    )
                continue
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
