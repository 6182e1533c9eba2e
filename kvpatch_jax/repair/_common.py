"""What the token repairs share: the spliced cache they mend, budgets in tokens, and recompute of a chosen set.

A token repair recomputes some of a chunk's tokens in context and writes their KV over what was spliced in blind. All
of them have one signature, `repair(backbone, splice, count) -> Repaired`. Kamera §6 and App. C.3 hold the feature-axis
patch against them at equal budget and at equal bytes.
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
"""Tokens that are recomputed come in multiples of this, or are all of the chunk's."""


class SplicedCache(NamedTuple):
    """A sequence's cache with one chunk put in blind, and what is needed to mend it. A pytree: it may be traced.

    tokens: the chunk's tokens at their new place, embeddings [B,T,D] and absolute positions.
    cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}.
    slots: where the chunk's tokens stand in the cache, int [B,T].
    mask: where each token may look, bool [B,1,T,S]; slots up to its own when None.
    conditioned: the chunk's true KV in context, phase-free as `prefill` returns it, {channel: [L,B,T,K,H]}. Only
      oracles read it.
    length: int [B], tokens per row that are not padding; all of them when None. Padding is never recomputed.
    """

    tokens: Tokens
    cache: KV
    slots: Int[Array, "B T"]
    mask: Bool[Array, "B 1 T S"] | None = None
    conditioned: KV | None = None
    length: Int[Array, " B"] | None = None


class Repaired(NamedTuple):
    """A mended cache {channel: [L,B,S,K,H]}, and which tokens of the chunk were rewritten at which layer [L,B,T]."""

    cache: dict[str, Array]
    chosen: Bool[Array, "L B T"]

    @property
    def token_layers(self) -> Int[Array, " B"]:
        """The method's cost: token-layers recomputed per row (re-prefilling the chunk costs L·T)."""
        return self.chosen.sum((0, 2))


class Repair(Protocol):
    """The one signature: mend `splice` by recomputing `count` tokens per row (static, 0 … T)."""

    def __call__(self, backbone: Backbone, splice: SplicedCache, count: int, /) -> Repaired:
        """See the class.

        Raises:
          InputError: a count outside 0 … T. ShapeError: a splice whose arrays do not fit one another.
        """
        ...


def fraction_to_count(fraction: float, tokens: int) -> int:
    """Turns a fraction of a chunk's tokens into whole tokens (rounded, halves up).

    Raises:
      InputError: a fraction outside 0 … 1, or fewer than no tokens.
    """
    if not 0.0 <= fraction <= 1.0 or tokens < 0:
        raise InputError(f"fraction {fraction} of {tokens} tokens; expected a fraction from 0 to 1 of 0 or more")
    return int(fraction * tokens + 0.5)


def count_of_equal_bytes(layout: KVLayout, rank: int | Mapping[str, int], tokens: int) -> int:
    """Counts the whole tokens whose KV takes the bytes of a patch of this rank over `tokens` tokens (Kamera Table 6).

    Per channel of width F and layer, a rank-m patch over n tokens takes m(n + F) numbers (at most n·F, for then it is
    stored dense) and a token takes F. Rank 16 over 480 tokens at width 512 equals 31 tokens; rank 64 equals 124.

    Args:
      rank: one for all channels, or per channel, as `form_patch` takes it (0, or a channel left out: no patch).

    Returns:
      The nearest whole number of tokens, at most `tokens`.

    Raises:
      RankError: a rank out of range. LayoutError: a channel the layout does not have.
    """
    ranks = dict.fromkeys(layout.names, rank) if isinstance(rank, int) else rank
    least = 1 if isinstance(rank, int) else 0
    numbers = 0
    for name, own in ranks.items():
        if own < least:
            raise RankError(f"rank {own} for channel {name!r}; expected at least {least}")
        features = layout.channel(name).features
        numbers += min(own * (tokens + features), tokens * features)
    return int(numbers / sum(channel.features for channel in layout.channels) + 0.5)


def check_splice(layout: KVLayout, splice: SplicedCache, count: int) -> None:
    """Refuses a splice whose arrays do not fit one another, and a count outside 0 … T.

    Raises:
      LayoutError, DtypeError, ShapeError: arrays of other channels, dtypes or shapes than expected.
      FrameError: cache or conditioned KV of another frame.
      InputError: the count, or (where they are concrete) slots outside the cache.
    """
    B, T = splice.slots.shape
    if not 0 <= count <= T:
        raise InputError(f"repair: count {count}; expected 0 to the chunk's {T} tokens")
    expect_frame(splice.cache, "repair: cache", "engine")
    layout.check(splice.cache, "repair: cache")
    S = splice.cache[layout.names[0]].shape[2]
    _expect("cache", splice.cache[layout.names[0]].shape[:3], (layout.layers, B, S))
    _expect("embeddings", splice.tokens.embeddings.shape[:2], (B, T))
    _expect("positions", splice.tokens.positions.shape[:2], (B, T))
    if splice.mask is not None:
        _expect("mask", splice.mask.shape, (B, 1, T, S))
    if splice.length is not None:
        _expect("length", splice.length.shape, (B,))
    if splice.conditioned is not None:
        expect_frame(splice.conditioned, "repair: conditioned", "phase_free")
        layout.check(splice.conditioned, "repair: conditioned")
        _expect("conditioned", splice.conditioned[layout.names[0]].shape[:3], (layout.layers, B, T))
    _check_slots(splice, S)


def _expect(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise ShapeError(f"repair: {what} begins with shape {tuple(found)}; expected {expected}")


def _check_slots(splice: SplicedCache, size: int) -> None:
    if any(isinstance(value, Tracer) for value in (splice.slots, splice.length)):
        return
    slots = np.asarray(splice.slots)
    outside = (slots < 0) | (slots >= size)
    if splice.length is not None:
        outside &= np.arange(slots.shape[1]) < np.asarray(splice.length)[:, None]
    if outside.any():
        raise InputError(f"repair: slot {slots[outside][0]}; expected 0 to {size - 1}, inside the cache")


def live_tokens(splice: SplicedCache) -> Bool[Array, "B T"]:
    """Marks the tokens that are not padding."""
    return _live(splice.length, splice.slots.shape)


@functools.partial(jax.jit, static_argnames=("shape",))
def _live(length: Int[AnyArray, " B"] | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    if length is None:
        return jnp.ones(shape, bool)
    return jnp.arange(shape[1]) < length[:, None]


def untouched(layout: KVLayout, splice: SplicedCache) -> Repaired:
    """Answers a count of 0, for every repair: the cache as it is, nothing chosen."""
    return Repaired(dict(splice.cache), jnp.zeros((layout.layers, *splice.slots.shape), bool))


@functools.partial(jax.jit, static_argnames=("layer",))
def read_slots(cache: KV, slots: Int[AnyArray, "B T"], layer: int | None = None) -> dict[str, Float[Array, "..."]]:
    """Reads the KV at `slots`, of one layer or of all: {channel: [L,B,S,K,H]} → {channel: [L or 1,B,T,K,H]}."""
    rows = jnp.arange(slots.shape[0])[:, None]
    layers = slice(None) if layer is None else slice(layer, layer + 1)
    return {name: value[layers, rows, slots] for name, value in cache.items()}


@jax.jit
def deviation(true: KV, found: KV, live: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Measures how far each token's KV is off, in float32: ‖true − found‖ summed over channels and layers.

    Each term is over the channel's root-mean-square token norm at that layer, so that channels and layers weigh alike
    while tokens compare by magnitude; −inf on padding, so that it is chosen last.

    Args:
      true, found: {channel: [L,B,T,K,H]}, both in one frame (a rotation changes no norm).
    """
    total = jnp.zeros(live.shape, jnp.float32)
    tokens = jnp.maximum(live.sum(-1), 1)
    for name, value in true.items():
        wide = value.astype(jnp.float32)
        norm = jnp.sqrt(jnp.square(wide - found[name].astype(jnp.float32)).sum((-2, -1)))
        energy = jnp.where(live, jnp.square(wide).sum((-2, -1)), 0.0).sum(-1, keepdims=True)
        typical = jnp.sqrt(energy / tokens[:, None])
        total = total + jnp.where(typical > 0, norm / jnp.where(typical > 0, typical, 1.0), 0.0).sum(0)
    return jnp.where(live, total, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("count",))
def largest(score: Float[Array, "B T"], count: int) -> Int[Array, "B count"]:
    """Finds the `count` largest scores of each row: indices, ascending; of equal scores the earlier tokens."""
    return jnp.sort(jax.lax.top_k(score, count)[1], axis=-1)


def mark(splice: SplicedCache, index: Int[Array, "B count"]) -> Bool[Array, "B T"]:
    """Turns the chosen tokens into a mask, without padding."""
    return _marked(index, live_tokens(splice))


@jax.jit
def _marked(index: Int[Array, "B count"], live: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    rows = jnp.arange(index.shape[0])[:, None]
    return jnp.zeros(live.shape, bool).at[rows, index].set(True) & live


def recompute_tokens(
    backbone: Backbone,
    splice: SplicedCache,
    index: Int[Array, "B count"],
    written: Bool[Array, "L B T"] | None = None,
) -> dict[str, Array]:
    """Recomputes the tokens at `index`, and no others, in context through all layers; returns the cache.

    They see each other's fresh KV and the rest of the cache as it stands. Only these tokens are run, the last of them
    several times, up to a multiple of `AT_ONCE`: so few programs are compiled for many counts, and none for another
    chunk of the same shape.

    Args:
      written: at which layers each of the chunk's tokens is, nested; all that are not padding when None.
    """
    index = _filled(index, min(splice.slots.shape[1], -(-index.shape[1] // AT_ONCE) * AT_ONCE))
    if written is None and splice.length is not None:
        written = live_tokens(splice)[None]
    tokens, slots, keep, mask = _taken(splice.tokens, splice.slots, written, splice.mask, index, backbone.layout.layers)
    return backbone.recompute(tokens, splice.cache, slots, keep, mask).cache


@functools.partial(jax.jit, static_argnames=("size",))
def _filled(index: Int[Array, "B count"], size: int) -> Int[Array, "B size"]:
    return jnp.pad(index, ((0, 0), (0, size - index.shape[1])), mode="edge")


@functools.partial(jax.jit, static_argnames=("layers",))
def _taken(
    tokens: Tokens,
    slots: Int[AnyArray, "B T"],
    written: Bool[Array, "n B T"] | None,
    mask: Bool[AnyArray, "B 1 T S"] | None,
    index: Int[Array, "B count"],
    layers: int,
) -> tuple[Tokens, Int[Array, "B count"], Bool[Array, "L B count"] | None, Bool[Array, "B 1 count S"] | None]:
    """What `recompute` takes, of the tokens at `index` alone: one program, not one for each of its parts."""
    take = lambda x: jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
    keep = None
    if written is not None:
        keep = jnp.broadcast_to(jnp.take_along_axis(written, index[None], axis=2), (layers, *index.shape))
    seen = None if mask is None else jnp.take_along_axis(mask, index[:, None, :, None], axis=2)
    return jax.tree.map(take, tokens), take(slots), keep, seen


def repair_everywhere(backbone: Backbone, splice: SplicedCache, index: Int[Array, "B count"]) -> Repaired:
    """Recomputes one token set at every layer."""
    chosen = jnp.broadcast_to(mark(splice, index), (backbone.layout.layers, *splice.slots.shape))
    return Repaired(recompute_tokens(backbone, splice, index), chosen)
