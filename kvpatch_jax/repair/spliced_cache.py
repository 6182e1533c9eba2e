"""What repairs work on and what they return: a cache into which chunks were spliced blind, mended, with its cost.

Kamera §6 and App. C.3 compare repairs with feature-axis patches at equal budget and at equal bytes.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..backbone import KV, Backbone, Tokens
from ..core import KVLayout, check_uniform, expect_frame, to_phase_free
from ..errors import InputError, LayoutError, ShapeError
from ..patching.patch_flops import ROTATION, composing_flops
from ..utils.pytrees import pytree
from ..utils.traced_flops import traced_flops
from .repair_budget import NUMBER_BYTES, RepairBudget, kv_bytes

AnyArray = jax.Array | np.ndarray


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
        *("tokens", "cache", "slots", "mask", "front", "question", "seen", "length"),
        *("conditioned", "recorded", "hidden", "others", "canonical", "before"),
    ),
    static=("chunks", "tower_flops"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class SplicedCache:
    """Cache of a sequence into which chunks were spliced blind, and the inputs of a repair. A pytree, may be traced.

    It is of one chunk behind others (`chunks` None: `tokens` are the chunk's), or of a whole prompt, in which cached
    chunks and new text alternate.

    Attributes:
      tokens: embeddings [B,T,D] and absolute positions: the chunk's, or the whole prompt's.
      cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}. At new text it may hold anything.
      slots: indices of the tokens in the cache, int [B,T].
      mask: True where a token may attend, bool [B,1,T,S]; None: to slots up to its own.
      front: tokens that precede, in the first slots. Methods read it that keep nothing of them, that keep them with the
        chunk, or that compare antecedents by their embeddings.
      question: what is asked after the cache, with absolute positions. Query-aware methods read it.
      seen: keys that the question may attend to, bool [B,S]; None: all.
      length: int [B], tokens per row that are not padding; None: all. Padding is never recomputed.
      conditioned: the tokens' true KV in context, phase-free as `prefill` returns it, {channel: [L,B,T,K,H]}. Only
        oracles read it.
      recorded: KV that an earlier prefill behind the same antecedent left, phase-free {channel: [L,B,T,K,H]}. Methods
        that store a form of it (patches, quantised KV, low-rank keys) read it; no method that recomputes does.
      hidden: {layer: [B,T,D]}, the residual of the chunk alone as it enters a layer, kept beside its canonical.
      others: the chunk's KV behind other antecedents, in the order in which they were met. Only methods read it that
        keep one form for all antecedents.
      canonical: the tokens' KV as it was prefilled alone, phase-free; None: read back from the cache. That of a hybrid
        model has the chunk's transition beside its rows.
      before: of a hybrid model, the transition of what precedes the chunk; the cache has that of the whole sequence.
      chunks: (first, one past the last) token of each cached chunk, ascending and static; what none of them covers is
        new text. None: all tokens are one chunk.
      tower_flops: of encoding the images of one row, which methods pay that keep no embeddings.
    """

    tokens: Tokens
    cache: KV
    slots: Int[AnyArray, "B T"]
    mask: Bool[AnyArray, "B 1 T S"] | None = None
    front: Tokens | None = None
    question: Tokens | None = None
    seen: Bool[AnyArray, "B S"] | None = None
    length: Int[AnyArray, " B"] | None = None
    conditioned: KV | None = None
    recorded: KV | None = None
    hidden: Mapping[int, Array] | None = None
    others: tuple[OtherAntecedent, ...] = ()
    canonical: KV | None = None
    before: KV | None = None
    chunks: tuple[tuple[int, int], ...] | None = None
    tower_flops: int = 0

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


class RepairBytes(NamedTuple):
    """Bytes of one row. Numbers count in 16 bits, as they are served, unless a method keeps them in fewer.

    Attributes:
      canonical: of the canonicals that are read, which are kept once for all antecedents.
      stored: kept for this antecedent alone: a patch, or a form of the conditioned KV.
      inputs: kept so that tokens can run again: their embeddings, or the residual at a boundary.
      moved: read from where all this lies, for one reuse.
      shared: kept once for all antecedents beside canonicals: another base, anchors, an average.
    """

    canonical: int = 0
    stored: int = 0
    inputs: int = 0
    moved: int = 0
    shared: int = 0

    def per_antecedent(self, antecedents: int) -> float:
        """Returns the bytes kept in all for each of a chunk's antecedents: `stored`, and a share of all the others.

        Raises:
          InputError: fewer than one antecedent.
        """
        if antecedents < 1:
            raise InputError(f"bytes.antecedents: got {antecedents}; expected at least 1")
        return self.stored + (self.canonical + self.inputs + self.shared) / antecedents


NO_BYTES = RepairBytes()


@pytree(
    data=("cache", "chosen", "visible", "logits"),
    static=("bytes", "tower_flops", "placing_flops", "forming_flops", "count_flops"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Repaired:
    """Repaired cache and what the repair took.

    Attributes:
      cache: {channel: [L,B,S,K,H]}, engine frame.
      chosen: which of the splice's tokens were rewritten by running them, at each layer, [L,B,T].
      bytes: stored and moved, per row.
      visible: keys that the question may attend to, bool [B,S], where the method drops others; None: as the splice
        says.
      logits: of the last token [B,1,V], where the method's forward includes it; else None.
      tower_flops: of encoding the images of one row again.
      placing_flops: of one row, beside matrix products: of rotating what was kept, and bringing it back from few bits.
      forming_flops: of factorising one row before its first reuse; forwards are not among them.
      count_flops: counts FLOPs of the whole batch; None where the repair ran inside another trace.
    """

    cache: dict[str, Array]
    chosen: Bool[Array, "L B T"]
    bytes: RepairBytes = NO_BYTES
    visible: Bool[Array, "B S"] | None = None
    logits: Float[Array, "B 1 V"] | None = None
    tower_flops: int = 0
    placing_flops: int = 0
    forming_flops: int = 0
    count_flops: Callable[[], int] | None = None

    @property
    def token_layers(self) -> Int[Array, " B"]:
        """Token-layers recomputed per row (re-prefilling the chunk takes L·T)."""
        return self.chosen.sum((0, 2))

    @property
    def flops(self) -> float:
        """FLOPs of serving one row: the matrix products of what was run, counted from its trace, placing, the tower.

        Raises:
          InputError: the repair was called inside another trace.
        """
        if self.count_flops is None:
            raise InputError("repaired.flops: got a repair inside a trace; expected one that was called eagerly")
        return self.count_flops() / self.chosen.shape[1] + self.placing_flops + self.tower_flops


@runtime_checkable
class Method(Protocol):
    """Signature of methods of reuse. Settings of a method are keyword arguments with defaults."""

    def __call__(self, backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, /) -> Repaired:
        """Repairs `splice` within a budget; a float is a share of the cached tokens.

        Raises:
          InputError: the budget is out of range or of a kind that the method does not take, or the splice lacks what
            the method reads. ShapeError, LayoutError, DtypeError, FrameError: arrays do not match.
        """
        ...


_COUNTED: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def counted[F: Callable[..., Repaired]](repair: F) -> F:
    """Makes a repair say its FLOPs: traced again, when they are asked for, once per shape, budget and setting."""

    @functools.wraps(repair)
    def call(backbone: Backbone, splice: SplicedCache, *budget: Any, **settings: Any) -> Repaired:
        repaired = repair(backbone, splice, *budget, **settings)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(splice)):
            return repaired
        setting = (repair, *budget, *sorted(settings.items()))
        return with_flops(repaired, lambda own: repair(backbone, own, *budget, **settings), splice, backbone, setting)

    return cast(F, call)


def with_flops(
    repaired: Repaired,
    serve: Callable[[SplicedCache], Any],
    splice: SplicedCache,
    backbone: Backbone,
    setting: Any,
    elementwise: int = 0,
) -> Repaired:
    """Returns a result that counts the FLOPs of `serve(splice)` when it is asked for them.

    Args:
      serve: what is run for one reuse.
      setting: what the count depends on besides the shapes of the splice; equal ones are counted once.
      elementwise: FLOPs of one row that are no matrix products, beside the rotation of what was kept.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), splice)

    def count() -> int:
        known = _COUNTED.setdefault(backbone, {})
        key = (repr(setting), jax.tree.structure(shapes), tuple(jax.tree.leaves(shapes)))
        if key not in known:
            known[key] = traced_flops(serve, shapes)
        return known[key]

    return with_placing(dataclasses.replace(repaired, count_flops=count), backbone.layout, splice, elementwise)


def with_placing(repaired: Repaired, layout: KVLayout, splice: SplicedCache, elementwise: int = 0) -> Repaired:
    """Returns a result that counts the rotation of what was kept, and other FLOPs of one row."""
    kept = repaired.bytes.canonical + repaired.bytes.stored + repaired.bytes.shared
    rotating = rotation_flops(layout, splice.cached_count) if kept else 0
    count = repaired.count_flops or (lambda: 0)
    return dataclasses.replace(repaired, placing_flops=rotating + elementwise, count_flops=count)


def factorising_flops(layout: KVLayout, tokens: int, names: Iterable[str]) -> int:
    """Counts the FLOPs of full thin singular value decompositions of some channels, layer by layer.

    As in Golub and Van Loan, Matrix Computations, 4th edition, section 8.6: the lesser of 14 m n² + 8 n³ and 6 m n² +
    20 n³ for U, Σ and V of m × n. No compiler sees into LAPACK.
    """
    total = 0
    for name in names:
        channel = layout.channel(name)
        rows = channel.rows_for(tokens)
        m, n = max(rows, channel.features), min(rows, channel.features)
        total += layout.depth(name) * min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)
    return total


def rotation_flops(layout: KVLayout, tokens: int) -> int:
    """Counts the FLOPs of turning the keys of some tokens, and of composing a hybrid's transition."""
    numbers = sum(
        layout.depth(channel.name) * channel.heads * channel.rotary for channel in layout.channels if channel.rotates
    )
    return ROTATION * tokens * numbers + composing_flops(layout)


# --------------------------------------------------------------------------------------------------------- checks


def check_repairable(layout: KVLayout) -> None:
    """Refuses a layout whose cache a repair cannot mend token by token.

    Raises:
      LayoutError: a hybrid model's, or layers of unlike kinds.
    """
    if layout.parts:
        layers = list(layout.layers_of(layout.parts[0].name))
        raise LayoutError(
            f"repair: got a hybrid model, with linear attention on layers {layers}; expected layers with a row "
            "per token, because a state keeps nothing of single tokens (blind, patch, quantised in 16 bits, first_k "
            "and full_reprefill serve hybrid models)"
        )
    check_uniform(layout, "repair")


def check_splice(layout: KVLayout, splice: SplicedCache, *, hybrid: bool = False) -> None:
    """Checks that the arrays of a splice match one another.

    Args:
      hybrid: accept layouts of hybrid models, and of layers of unlike kinds, because the chunk is served whole.

    Raises:
      LayoutError, DtypeError, ShapeError: channels, a dtype or a shape differs, or layers are of unlike kinds.
      FrameError: the cache or the conditioned KV is in another frame.
      InputError: chunks overlap or lie outside the tokens, or concrete slots lie outside the cache.
    """
    if not hybrid:
        check_repairable(layout)
    (B, T), first = splice.slots.shape, layout.token_channels[0].name
    expect_frame(splice.cache, "repair: cache", "engine")
    layout.check(splice.cache, "repair: cache")
    L, S = layout.depth(first), splice.cache[first].shape[2]

    # The layout has checked heads and widths.
    shapes = [("cache", splice.cache[first].shape[:3], (L, B, S))]
    shapes += [("embeddings", splice.tokens.embeddings.shape[:2], (B, T))]
    shapes += [("positions", splice.tokens.positions.shape[:2], (B, T))]
    for name in ("conditioned", "recorded", "canonical"):
        kv = getattr(splice, name)
        if kv is not None:
            expect_frame(kv, f"repair: {name}", "phase_free")
            layout.check(kv, f"repair: {name}")
            shapes += [(name, kv[first].shape[:3], (L, B, T))]
    for place, other in enumerate(splice.others):
        expect_frame(other.kv, f"repair: others[{place}]", "phase_free")
        layout.check(other.kv, f"repair: others[{place}]")
        shapes += [(f"others[{place}]", other.kv[first].shape[:3], (L, B, T))]
        if other.embedding is not None:
            width = splice.tokens.embeddings.shape[-1]
            shapes += [(f"others[{place}].embedding", other.embedding.shape, (B, width))]
    for name, expected in (("mask", (B, 1, T, S)), ("seen", (B, S)), ("length", (B,))):
        if getattr(splice, name) is not None:
            shapes += [(name, getattr(splice, name).shape, expected)]
    for layer, residual in (splice.hidden or {}).items():
        shapes += [(f"hidden[{layer}]", residual.shape, splice.tokens.embeddings.shape)]

    for what, found, expected in shapes:
        if tuple(found) != expected:
            raise ShapeError(f"repair.{what}: got a shape that begins with {tuple(found)}; expected {expected}")

    edges = [edge for part in splice.parts for edge in part]
    empty = not edges or any(first == last for first, last in splice.parts)
    if empty or edges != sorted(edges) or not 0 <= edges[0] <= edges[-1] <= T:
        raise InputError(f"repair.chunks: got {splice.chunks}; expected ascending parts of the {T} tokens")

    # Slots of padding are ignored, and those that are traced have no values yet.
    if any(isinstance(value, Tracer) for value in (splice.slots, splice.length)):
        return
    slots = np.asarray(splice.slots)
    outside = (slots < 0) | (slots >= S)
    if splice.length is not None:
        outside &= np.arange(T) < np.asarray(splice.length)[:, None]
    if outside.any():
        raise InputError(f"repair.slots: got {slots[outside][0]}; expected 0 to {S - 1}, inside the cache")


def required(splice: SplicedCache, name: str, method: str, expected: str) -> Any:
    """Returns an optional attribute of a splice.

    Raises:
      InputError: it is None.
    """
    value = getattr(splice, name)
    if value is None:
        raise InputError(f"{method}.{name}: got None; expected {expected}")
    return value


def recorded_of(splice: SplicedCache, method: str) -> KV:
    """Returns the KV that methods keep a form of.

    Raises:
      InputError: there is none.
    """
    return required(splice, "recorded", method, "KV that an earlier prefill behind the same antecedent left")


def check_budget(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str) -> int:
    """Checks a splice, and returns how many cached tokens per row a budget allows; see `RepairBudget.count`."""
    check_splice(backbone.layout, splice)
    return RepairBudget.of(budget).count(backbone.layout, splice.cached_count, method)


# ------------------------------------------------------------------------------------------------ tokens and bytes


def live_tokens(splice: SplicedCache) -> Bool[Array, "B T"]:
    """Marks the tokens that are not padding."""
    return _live(splice.length, splice.slots.shape)


@functools.partial(jax.jit, static_argnames=("shape",))
def _live(length: Int[AnyArray, " B"] | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    if length is None:
        return jnp.ones(shape, bool)
    return jnp.arange(shape[1]) < length[:, None]


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
        required(splice, "canonical", "repair", "a hybrid model's KV of the chunk alone, with its transition")
    spliced = {name: value.astype(jnp.float32) for name, value in read_slots(splice.cache, splice.slots).items()}
    return dict(to_phase_free(layout, spliced, splice.tokens.positions))


def pooled_embedding(tokens: Tokens) -> Float[Array, "B D"]:
    """Computes the mean embedding of an antecedent's tokens, in float32."""
    return jnp.asarray(tokens.embeddings).astype(jnp.float32).mean(1)


def input_bytes(splice: SplicedCache) -> int:
    """Returns the bytes that one token is run from: its embedding, and what layers take of it beside that."""
    deepstack = splice.tokens.deepstack
    beside = 0 if deepstack is None else deepstack.shape[2] * deepstack.shape[3]
    return NUMBER_BYTES * (splice.tokens.embeddings.shape[-1] + beside)


def recompute_bytes(
    layout: KVLayout, splice: SplicedCache, counts: tuple[int, ...], inputs: int | None = None, compared: int = 0
) -> RepairBytes:
    """Counts the bytes of a repair that recomputes `counts[l]` cached tokens at layer l.

    Args:
      inputs: tokens whose inputs are kept; None: all, because any may be chosen.
      compared: token-layers whose cached KV is read to be compared, though it is overwritten.
    """
    unit, cached = kv_bytes(layout, 1) // layout.layers, splice.cached_count
    read = sum(cached - count for count in counts) + compared
    kept = cached if inputs is None else inputs
    return RepairBytes(
        canonical=unit * cached * layout.layers,
        inputs=input_bytes(splice) * kept,
        moved=unit * read + input_bytes(splice) * max(counts, default=0),
    )


def blind_bytes(layout: KVLayout, splice: SplicedCache) -> RepairBytes:
    """Counts the bytes of splicing canonicals, without more."""
    whole = kv_bytes(layout, splice.cached_count)
    return RepairBytes(canonical=whole, moved=whole)


def untouched(layout: KVLayout, splice: SplicedCache) -> Repaired:
    """Returns the result of every repair for a budget of 0: the cache unchanged, no token chosen."""
    chosen = jnp.zeros((layout.layers, *splice.slots.shape), bool)
    return Repaired(dict(splice.cache), chosen, blind_bytes(layout, splice))


# ---------------------------------------------------------------------------------------------------------- scores


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


def choose_scored(splice: SplicedCache, score: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """Chooses all new text, and of the cached tokens the `count` with the largest scores; ascending indices."""
    new = splice.new_text()
    if new.any():
        score = jnp.where(jnp.asarray(new), jnp.inf, score)
    return largest(score, count + int(new.sum()))
