"""What repairs work on: a cache into which chunks were spliced blind, and the inputs of a repair.

Kamera §6 and App. C.3 compare repairs with feature-axis patches at equal budget and at equal bytes.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..backbone import KV, Tokens, joined_tokens
from ..core import AnyArray, KVLayout, check_mask, check_uniform, expect_frame, to_phase_free
from ..errors import InputError, LayoutError, ShapeError
from ..utils.pytrees import pytree


class OtherAntecedent(NamedTuple):
    """The chunk's KV behind another antecedent than the splice's.

    Attributes:
      kv: phase-free, as `prefill` returns it, {channel: [L,B,T,K,H]}.
      embedding: [B,D], the mean of that antecedent's token embeddings (`pooled_embedding`); None: not known.
    """

    kv: KV
    embedding: Float[AnyArray, "B D"] | None = None


@pytree(
    data=(
        *("tokens", "cache", "slots", "front", "question", "seen", "length"),
        *("recorded", "hidden", "others", "canonical", "before"),
    ),
    static=("chunks",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class SplicedCache:
    """Cache of a sequence into which chunks were spliced blind, and the inputs of a repair. A pytree, may be traced.

    It is of one chunk behind others (`chunks` None: `tokens` are the chunk's), or of a whole prompt, in which cached
    chunks and new text alternate.

    Attributes:
      tokens: embeddings [B,T,D] and absolute positions: the chunk's, or the whole prompt's.
      cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}. At new text it may hold anything.
      slots: indices of the tokens in the cache, int [B,T]. A token attends to slots up to its own.
      front: tokens that precede, in the first slots. Methods read it that keep nothing of them, that keep them with the
        chunk, or that compare antecedents by their embeddings.
      question: what is asked after the cache, with absolute positions. Query-aware methods read it.
      seen: keys that the question may attend to, bool [B,S]; None: all.
      length: int [B], tokens per row that are not padding; None: all. Padding is never recomputed.
      recorded: the chunk's true KV in context, which an earlier prefill behind the same antecedent left, phase-free as
        `prefill` returns it, {channel: [L,B,T,K,H]}. Methods that store a form of it (patches, quantised KV, low-rank
        keys) and the oracle read it; no other method that recomputes does.
      hidden: {layer: [B,T,D]}, the residual of the chunk alone as it enters a layer, kept beside its canonical.
      others: the chunk's KV behind other antecedents, in the order in which they were met. Only methods read it that
        keep one form for all antecedents.
      canonical: the tokens' KV as it was prefilled alone, phase-free; None: read back from the cache. That of a hybrid
        model has the chunk's transition beside its rows.
      before: of a hybrid model, the transition of what precedes the chunk; the cache has that of the whole sequence.
      chunks: (first, one past the last) token of each cached chunk, ascending and static; what none of them covers is
        new text. None: all tokens are one chunk.
    """

    tokens: Tokens
    cache: KV
    slots: Int[AnyArray, "B T"]
    front: Tokens | None = None
    question: Tokens | None = None
    seen: Bool[AnyArray, "B S"] | None = None
    length: Int[AnyArray, " B"] | None = None
    recorded: KV | None = None
    hidden: Mapping[int, AnyArray] | None = None
    others: tuple[OtherAntecedent, ...] = ()
    canonical: KV | None = None
    before: KV | None = None
    chunks: tuple[tuple[int, int], ...] | None = None

    def replace(self, **changes: Any) -> "SplicedCache":
        """Returns a splice with other attributes."""
        return dataclasses.replace(self, **changes)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The cached chunks as (first, one past the last) token; one of all tokens if none are said."""
        return ((0, self.slots.shape[1]),) if self.chunks is None else self.chunks

    @property
    def cached_count(self) -> int:
        """Number of tokens per row that chunks hold, padding included."""
        return sum(last - first for first, last in self.parts)

    def new_text(self) -> Bool[np.ndarray, " T"]:
        """Marks the tokens that no chunk holds."""
        new = np.ones(self.slots.shape[1], bool)
        for first, last in self.parts:
            new[first:last] = False
        return new


# --------------------------------------------------------------------------------------------------------- checks

EXPECTED = {
    "front": "the tokens that precede, in the first slots",
    "question": "the question's tokens behind the cache",
    "recorded": "KV that an earlier prefill behind the same antecedent left",
    "hidden": "residuals of the chunk alone",
    "others": "KV of the chunk behind at least one other antecedent",
    "canonical": "a hybrid model's KV of the chunk alone, with its transition",
    "before": "the transition of what precedes the chunk",
}


def required(splice: SplicedCache, name: str) -> Any:
    """Returns an optional attribute of a splice, or raises InputError where it lacks it."""
    value = getattr(splice, name)
    if value is None or (name == "others" and not value):
        raise InputError(f"splice.{name}: got {value}; expected {EXPECTED[name]}")
    return value


def check_splice(layout: KVLayout, splice: SplicedCache, *, hybrid: bool = False) -> None:
    """Checks that the arrays of a splice match the layout and one another, and, unless `hybrid`, as `check_rows`.

    Raises:
      LayoutError, ShapeError: channels, a dtype, a shape or a frame differs.
      InputError: chunks overlap or lie outside the tokens, or concrete slots lie outside the cache.
    """
    if not hybrid:
        check_rows(layout)
    (B, T), first = splice.slots.shape, layout.token_channels[0].name
    expect_frame(splice.cache, "repair: cache", "engine")
    layout.check(splice.cache, "repair: cache")
    L, S = layout.depth(first), splice.cache[first].shape[2]
    width = splice.tokens.embeddings.shape[-1]

    check_mask(splice.seen, "repair.seen")
    # Shapes begin with these axes; the layout checks heads and widths.
    expected = [
        ("cache", splice.cache[first], (L, B, S)),
        ("embeddings", splice.tokens.embeddings, (B, T)),
        ("positions", splice.tokens.positions, (B, T)),
        ("seen", splice.seen, (B, S)),
        ("length", splice.length, (B,)),
    ]
    versions = [(name, getattr(splice, name)) for name in ("recorded", "canonical")]
    for place, other in enumerate(splice.others):
        versions.append((f"others[{place}]", other.kv))
        expected.append((f"others[{place}].embedding", other.embedding, (B, width)))
    for name, kv in versions:
        if kv is not None:
            expect_frame(kv, f"repair: {name}", "phase_free")
            layout.check(kv, f"repair: {name}")
            expected.append((name, kv[first], (L, B, T)))
    for layer, residual in (splice.hidden or {}).items():
        expected.append((f"hidden[{layer}]", residual, (B, T, width)))
    for name, value, shape in expected:
        if value is not None and tuple(value.shape[: len(shape)]) != shape:
            raise ShapeError(f"repair.{name}: got a shape that begins with {tuple(value.shape)}; expected {shape}")

    edges = [edge for part in splice.parts for edge in part]
    empty = not edges or any(first == last for first, last in splice.parts)
    if empty or edges != sorted(edges) or not 0 <= edges[0] <= edges[-1] <= T:
        raise InputError(f"repair.chunks: got {splice.chunks}; expected ascending parts of the {T} tokens")

    # Slots of padding are ignored, and those that are traced have no values yet.
    if not any(isinstance(value, Tracer) for value in (splice.slots, splice.length)):
        slots = np.asarray(splice.slots)
        outside = ((slots < 0) | (slots >= S)) & np.asarray(live_tokens(splice))
        if outside.any():
            raise InputError(f"repair.slots: got {slots[outside][0]}; expected 0 to {S - 1}, inside the cache")


def check_rows(layout: KVLayout) -> None:
    """Raises LayoutError for a hybrid model, and for layers of unlike kinds."""
    if layout.parts:
        layers = list(layout.layers_of(layout.parts[0].name))
        raise LayoutError(
            f"repair: got a hybrid model, with linear attention on layers {layers}; expected layers with a row "
            "per token, because a state keeps nothing of single tokens (blind, patch, quantised in 16 bits and "
            "full_reprefill serve hybrid models)"
        )
    check_uniform(layout, "repair")


# ---------------------------------------------------------------------------------------------------- tokens and KV


def live_tokens(splice: SplicedCache) -> Bool[Array, "B T"]:
    """Marks the tokens that are not padding."""
    B, T = splice.slots.shape
    length = jnp.full(B, T) if splice.length is None else jnp.asarray(splice.length)
    return jnp.arange(T) < length[:, None]


@functools.partial(jax.jit, static_argnames=("layer",))
def read_slots(cache: KV, slots: Int[AnyArray, "B T"], layer: int | None = None) -> dict[str, Float[Array, "..."]]:
    """Reads the KV at `slots`, of one layer or of all: {channel: [L,B,S,K,H]} → {channel: [L or 1,B,T,K,H]}."""
    # A slice of one layer keeps the axis, so that one layer and all have the same rank.
    rows = jnp.arange(slots.shape[0])[:, None]
    layers = slice(None) if layer is None else slice(layer, layer + 1)
    return {name: value[layers, rows, slots] for name, value in cache.items()}


@jax.jit
def write_slots(cache: KV, slots: Int[AnyArray, "B T"], kv: KV, live: Bool[Array, "B T"]) -> dict[str, Array]:
    """Writes engine-frame KV {channel: [L,B,T,K,H]} at `slots` of a cache, except padding."""
    rows = jnp.arange(slots.shape[0])[:, None]
    size = next(iter(cache.values())).shape[2]
    places = jnp.where(live, slots, size)
    return {
        name: value.at[:, rows, places].set(kv[name].astype(value.dtype), mode="drop") for name, value in cache.items()
    }


def canonical_of(layout: KVLayout, splice: SplicedCache) -> dict[str, Array]:
    """Returns what was spliced blind, phase-free {channel: [L,B,T,K,H]}: as it was prefilled, or else read back.

    Raises:
      InputError: a hybrid model's canonical is not in the splice.
    """
    if splice.canonical is not None:
        return dict(splice.canonical)
    if layout.parts:
        required(splice, "canonical")
    spliced = {name: value.astype(jnp.float32) for name, value in read_slots(splice.cache, splice.slots).items()}
    return dict(to_phase_free(layout, spliced, splice.tokens.positions))


def pooled_embedding(tokens: Tokens) -> Float[Array, "B D"]:
    """Computes the mean embedding of an antecedent's tokens, in float32."""
    return jnp.asarray(tokens.embeddings).astype(jnp.float32).mean(1)


def with_front(splice: SplicedCache, front: Tokens) -> SplicedCache:
    """Returns a splice of the tokens that precede, in the first slots, and the splice's own, as one chunk."""
    rows, before = front.embeddings.shape[:2]
    slots = jnp.concatenate([jnp.broadcast_to(jnp.arange(before), (rows, before)), jnp.asarray(splice.slots)], axis=1)
    length = None if splice.length is None else before + jnp.asarray(splice.length)
    return SplicedCache(joined_tokens([front, splice.tokens]), splice.cache, slots, length=length)


# ---------------------------------------------------------------------------------------------------------- scores


@jax.jit
def deviation(true: KV, spliced: KV, live: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes the deviation of each token's KV in float32: ‖true − spliced‖ summed over channels and layers.

    Each term is divided by the channel's root-mean-square token norm at that layer, so that channels and layers have
    equal weight while tokens compare by magnitude. Padding has −inf, so that it is chosen last.

    Args:
      true, spliced: {channel: [L,B,T,K,H]}, both in the same frame (a rotation does not change norms).
    """
    total = jnp.zeros(live.shape, jnp.float32)
    tokens = jnp.maximum(live.sum(-1), 1)
    # Differences of bfloat16 numbers would lose most of their bits.
    for name, value in true.items():
        wide = value.astype(jnp.float32)
        norm = jnp.sqrt(jnp.square(wide - spliced[name].astype(jnp.float32)).sum((-2, -1)))
        energy = jnp.where(live, jnp.square(wide).sum((-2, -1)), 0.0).sum(-1, keepdims=True)
        typical = jnp.sqrt(energy / tokens[:, None])
        # A channel that is zero in every token has no typical norm, and does not count.
        total = total + jnp.where(typical > 0, norm / jnp.where(typical > 0, typical, 1.0), 0.0).sum(0)

    return jnp.where(live, total, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("count",))
def largest(score: Float[Array, "B T"], count: int) -> Int[Array, "B count"]:
    """Returns the indices of the `count` largest scores of each row, ascending; ties go to earlier tokens."""
    return jnp.sort(jax.lax.top_k(score, count)[1], axis=-1)
