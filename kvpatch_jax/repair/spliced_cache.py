"""What token repairs work on: the spliced cache, budgets in tokens, and recomputation of a token set.

A token repair recomputes some of a chunk's tokens in context and overwrites their KV, which was spliced in blind.
Kamera §6 and App. C.3 compare repairs with feature-axis patches at equal budget and at equal bytes.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..backbone import KV, Backbone, Tokens
from ..core import KVLayout, expect_frame
from ..errors import InputError, RankError, ShapeError

AnyArray = jax.Array | np.ndarray
AT_ONCE = 16
"""The number of recomputed tokens is padded to a multiple of this, or to all of the chunk's tokens."""


class SplicedCache(NamedTuple):
    """Cache of a sequence into which one chunk was spliced blind, and the inputs of a repair. A pytree, may be traced.

    Attributes:
      tokens: the chunk's tokens at their new positions: embeddings [B,T,D] and absolute positions.
      cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}.
      slots: indices of the chunk's tokens in the cache, int [B,T].
      mask: True where a token may attend, bool [B,1,T,S]; None: to slots up to its own.
      conditioned: the chunk's true KV in context, phase-free as `prefill` returns it, {channel: [L,B,T,K,H]}. Only
        oracles read it.
      length: int [B], tokens per row that are not padding; None: all. Padding is never recomputed.
    """

    tokens: Tokens
    cache: KV
    slots: Int[Array, "B T"]
    mask: Bool[Array, "B 1 T S"] | None = None
    conditioned: KV | None = None
    length: Int[Array, " B"] | None = None


class Repaired(NamedTuple):
    """Repaired cache {channel: [L,B,S,K,H]}, and which of the chunk's tokens were rewritten at each layer [L,B,T]."""

    cache: dict[str, Array]
    chosen: Bool[Array, "L B T"]

    @property
    def token_layers(self) -> Int[Array, " B"]:
        """Cost of the repair: token-layers recomputed per row (re-prefilling the chunk costs L·T)."""
        return self.chosen.sum((0, 2))


class Repair(Protocol):
    """Signature of token repairs."""

    def __call__(self, backbone: Backbone, splice: SplicedCache, count: int, /) -> Repaired:
        """Repairs `splice` by recomputing `count` tokens per row (static, 0 … T).

        Raises:
          InputError: the count is outside 0 … T. ShapeError: shapes of the splice's arrays do not match.
        """
        ...


def fraction_to_count(fraction: float, tokens: int) -> int:
    """Converts a fraction of a chunk's tokens to a number of tokens, rounded half up.

    Raises:
      InputError: the fraction is outside 0 … 1, or `tokens` is negative.
    """
    if not 0.0 <= fraction <= 1.0 or tokens < 0:
        raise InputError(f"fraction: got {fraction} of {tokens} tokens; expected 0 to 1 of 0 tokens or more")
    # `round` would take halves to the even number.
    return int(fraction * tokens + 0.5)


def count_of_equal_bytes(layout: KVLayout, rank: int | Mapping[str, int], tokens: int) -> int:
    """Computes how many tokens' KV takes as many bytes as a patch of this rank over `tokens` tokens (Kamera Table 6).

    Per layer and channel of width F, a rank-m patch over n tokens takes m(n + F) numbers (at most n·F, because it is
    stored dense beyond that) and a token takes F. At width 512 and 480 tokens, rank 16 equals 31 tokens and rank 64
    equals 124.

    Args:
      rank: one for all channels, or by channel, as `form_patch` takes it (0, or no entry: no patch).

    Returns:
      The nearest whole number of tokens, at most `tokens`.

    Raises:
      RankError: a rank is out of range. LayoutError: the layout lacks a channel.
    """
    ranks = dict.fromkeys(layout.names, rank) if isinstance(rank, int) else rank
    least = 1 if isinstance(rank, int) else 0
    numbers = 0
    # Layers are the same factor on both sides, and left out.
    for name, channel_rank in ranks.items():
        if channel_rank < least:
            raise RankError(f"rank: got {channel_rank} for channel {name!r}; expected at least {least}")
        features = layout.channel(name).features
        numbers += min(channel_rank * (tokens + features), tokens * features)

    return int(numbers / sum(channel.features for channel in layout.channels) + 0.5)


def check_splice(layout: KVLayout, splice: SplicedCache, count: int) -> None:
    """Checks that the arrays of a splice match one another, and that the count is in 0 … T.

    Raises:
      LayoutError, DtypeError, ShapeError: channels, a dtype or a shape differs.
      FrameError: the cache or the conditioned KV is in another frame.
      InputError: the count is out of range, or concrete slots lie outside the cache.
    """
    (B, T), first = splice.slots.shape, layout.names[0]
    if not 0 <= count <= T:
        raise InputError(f"repair.count: got {count}; expected 0 to the chunk's {T} tokens")

    expect_frame(splice.cache, "repair: cache", "engine")
    layout.check(splice.cache, "repair: cache")
    if splice.conditioned is not None:
        expect_frame(splice.conditioned, "repair: conditioned", "phase_free")
        layout.check(splice.conditioned, "repair: conditioned")

    # The layout has checked heads and widths.
    L, S = layout.layers, splice.cache[first].shape[2]
    shapes = [("cache", splice.cache[first].shape[:3], (L, B, S))]
    shapes += [("embeddings", splice.tokens.embeddings.shape[:2], (B, T))]
    shapes += [("positions", splice.tokens.positions.shape[:2], (B, T))]
    if splice.mask is not None:
        shapes += [("mask", splice.mask.shape, (B, 1, T, S))]
    if splice.length is not None:
        shapes += [("length", splice.length.shape, (B,))]
    if splice.conditioned is not None:
        shapes += [("conditioned", splice.conditioned[first].shape[:3], (L, B, T))]

    for what, found, expected in shapes:
        if tuple(found) != expected:
            raise ShapeError(f"repair.{what}: got a shape that begins with {tuple(found)}; expected {expected}")

    # Slots of padding are ignored, and those that are traced have no values yet.
    if any(isinstance(value, Tracer) for value in (splice.slots, splice.length)):
        return
    slots = np.asarray(splice.slots)
    outside = (slots < 0) | (slots >= S)
    if splice.length is not None:
        outside &= np.arange(T) < np.asarray(splice.length)[:, None]
    if outside.any():
        raise InputError(f"repair.slots: got {slots[outside][0]}; expected 0 to {S - 1}, inside the cache")


def live_tokens(splice: SplicedCache) -> Bool[Array, "B T"]:
    """Marks the tokens that are not padding."""
    return _live(splice.length, splice.slots.shape)


@functools.partial(jax.jit, static_argnames=("shape",))
def _live(length: Int[AnyArray, " B"] | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    if length is None:
        return jnp.ones(shape, bool)
    return jnp.arange(shape[1]) < length[:, None]


def untouched(layout: KVLayout, splice: SplicedCache) -> Repaired:
    """Returns the result of every repair for a count of 0: the cache unchanged, no token chosen."""
    return Repaired(dict(splice.cache), jnp.zeros((layout.layers, *splice.slots.shape), bool))


@functools.partial(jax.jit, static_argnames=("layer",))
def read_slots(cache: KV, slots: Int[AnyArray, "B T"], layer: int | None = None) -> dict[str, Float[Array, "..."]]:
    """Reads the KV at `slots`, of one layer or of all: {channel: [L,B,S,K,H]} → {channel: [L or 1,B,T,K,H]}."""
    # A slice of one layer keeps the axis, so that one layer and all have the same rank.
    rows = jnp.arange(slots.shape[0])[:, None]
    layers = slice(None) if layer is None else slice(layer, layer + 1)
    return {name: value[layers, rows, slots] for name, value in cache.items()}


@jax.jit
def deviation(true: KV, found: KV, live: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes the deviation of each token's KV in float32: ‖true − found‖ summed over channels and layers.

    Each term is divided by the channel's root-mean-square token norm at that layer, so that channels and layers have
    equal weight while tokens compare by magnitude. Padding has −inf, so that it is chosen last.

    Args:
      true, found: {channel: [L,B,T,K,H]}, both in the same frame (a rotation does not change norms).
    """
    total = jnp.zeros(live.shape, jnp.float32)
    tokens = jnp.maximum(live.sum(-1), 1)
    # Differences of bfloat16 numbers would lose most of their bits.
    for name, value in true.items():
        wide = value.astype(jnp.float32)
        norm = jnp.sqrt(jnp.square(wide - found[name].astype(jnp.float32)).sum((-2, -1)))
        energy = jnp.where(live, jnp.square(wide).sum((-2, -1)), 0.0).sum(-1, keepdims=True)
        typical = jnp.sqrt(energy / tokens[:, None])
        # A channel that is zero in every token has no typical norm, and does not count.
        total = total + jnp.where(typical > 0, norm / jnp.where(typical > 0, typical, 1.0), 0.0).sum(0)

    return jnp.where(live, total, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("count",))
def largest(score: Float[Array, "B T"], count: int) -> Int[Array, "B count"]:
    """Returns the indices of the `count` largest scores of each row, ascending; ties go to earlier tokens."""
    return jnp.sort(jax.lax.top_k(score, count)[1], axis=-1)


@jax.jit
def mark(index: Int[Array, "B count"], live: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Converts indices of chosen tokens to a mask, which excludes padding; `live` is as of `live_tokens`."""
    rows = jnp.arange(index.shape[0])[:, None]
    return jnp.zeros(live.shape, bool).at[rows, index].set(True) & live


def recompute_tokens(
    backbone: Backbone,
    splice: SplicedCache,
    index: Int[Array, "B count"],
    written: Bool[Array, "L B T"] | None = None,
) -> dict[str, Array]:
    """Recomputes only the tokens at `index`, in context through all layers; returns the cache.

    They attend to each other's new KV and to the rest of the cache. The last token is repeated up to a multiple of
    `AT_ONCE`, so that few programs are compiled for many counts, and none for another chunk of the same shape.

    Args:
      written: layers at which each of the chunk's tokens is written, as nested sets; None: all, except padding.
    """
    # Whatever their number, tokens are computed in groups: a repeated one is written twice with the same values.
    size = min(splice.slots.shape[1], -(-index.shape[1] // AT_ONCE) * AT_ONCE)
    index = _filled(index, size)
    if written is None and splice.length is not None:
        written = live_tokens(splice)[None]
    arrays = (splice.tokens, splice.slots, written, splice.mask, index)
    tokens, slots, keep, mask = _gathered(*arrays, backbone.layout.layers)
    return backbone.recompute(tokens, splice.cache, slots, keep, mask).cache


# Apart from `_gathered`, which is so compiled for few sizes whatever the counts.
@functools.partial(jax.jit, static_argnames=("size",))
def _filled(index: Int[Array, "B count"], size: int) -> Int[Array, "B size"]:
    return jnp.pad(index, ((0, 0), (0, size - index.shape[1])), mode="edge")


@functools.partial(jax.jit, static_argnames=("layers",))
def _gathered(
    tokens: Tokens,
    slots: Int[AnyArray, "B T"],
    written: Bool[Array, "n B T"] | None,
    mask: Bool[AnyArray, "B 1 T S"] | None,
    index: Int[Array, "B size"],
    layers: int,
) -> tuple[Tokens, Int[Array, "B size"], Bool[Array, "L B size"] | None, Bool[Array, "B 1 size S"] | None]:
    """Gathers the arguments of `recompute` at `index`, in one program in place of one per array."""

    # Of arrays [B,T,…], whatever their trailing axes.
    def take(x: AnyArray) -> Array:
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)

    keep = None
    if written is not None:
        keep = jnp.broadcast_to(jnp.take_along_axis(written, index[None], axis=2), (layers, *index.shape))
    seen = None if mask is None else jnp.take_along_axis(mask, index[:, None, :, None], axis=2)
    return jax.tree.map(take, tokens), take(slots), keep, seen


def repair_everywhere(backbone: Backbone, splice: SplicedCache, index: Int[Array, "B count"]) -> Repaired:
    """Recomputes one token set at every layer."""
    chosen = jnp.broadcast_to(mark(index, live_tokens(splice)), (backbone.layout.layers, *splice.slots.shape))
    return Repaired(recompute_tokens(backbone, splice, index), chosen)
