"""What repairs return: a mended cache with its bytes, its FLOPs and the tokens that ran."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone
from ..core import KVLayout, compose, split_transition
from ..errors import InputError
from ..patching.patch_flops import ROTATION, composing_flops
from ..utils.pytrees import pytree
from ..utils.traced_flops import traced_flops
from .repair_budget import NUMBER_BYTES, kv_bytes
from .spliced_cache import AnyArray, SplicedCache, live_tokens, required, write_slots


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
    bytes: RepairBytes
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


# -------------------------------------------------------------------------------------------------------- results


def untouched(layout: KVLayout, splice: SplicedCache) -> Repaired:
    """Returns the cache unchanged, with no token chosen."""
    chosen = jnp.zeros((layout.layers, *splice.slots.shape), bool)
    return Repaired(dict(splice.cache), chosen, blind_bytes(layout, splice))


def engine_written(layout: KVLayout, splice: SplicedCache, kv: Mapping[str, AnyArray], bytes: RepairBytes) -> Repaired:
    """Returns the cache with engine-frame KV at the splice's slots; no token was run.

    A hybrid's transition is composed with that of what precedes the chunk, which is the last of the sequence.
    """
    rows, transition = split_transition(kv)
    cache = {name: splice.cache[name] for name in rows}
    cache = write_slots(cache, jnp.asarray(splice.slots), rows, live_tokens(splice))
    if transition is not None:
        before = required(splice, "before", "repair", "the transition of what precedes the chunk")
        cache |= _jitted_compose(dict(before), transition)
    return dataclasses.replace(untouched(layout, splice), cache=cache, bytes=bytes)


_jitted_compose = jax.jit(compose)


# ---------------------------------------------------------------------------------------------------------- bytes


def input_bytes(splice: SplicedCache) -> int:
    """Counts the bytes that one token is run from: its embedding, and what layers take of it beside that."""
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
    size = kv_bytes(layout, splice.cached_count)
    return RepairBytes(canonical=size, moved=size)


# ---------------------------------------------------------------------------------------------------------- FLOPs

_COUNTED: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def counted[F: Callable[..., Repaired]](repair: F) -> F:
    """Makes a repair count its FLOPs: traced again, when they are asked for, once per shape, budget and setting."""

    @functools.wraps(repair)
    def call(backbone: Backbone, splice: SplicedCache, *budget: Any, **settings: Any) -> Repaired:
        repaired = repair(backbone, splice, *budget, **settings)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(splice)):
            return repaired
        setting = (repair, *budget, *sorted(settings.items()))

        def serve(splice: SplicedCache) -> Repaired:
            return repair(backbone, splice, *budget, **settings)

        return with_flops(repaired, serve, splice, backbone, setting)

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
        counts = _COUNTED.setdefault(backbone, {})
        key = (repr(setting), jax.tree.structure(shapes), tuple(jax.tree.leaves(shapes)))
        if key not in counts:
            counts[key] = traced_flops(serve, shapes)
        return counts[key]

    return with_placing(dataclasses.replace(repaired, count_flops=count), backbone.layout, splice, elementwise)


def with_placing(repaired: Repaired, layout: KVLayout, splice: SplicedCache, elementwise: int = 0) -> Repaired:
    """Returns a result that counts the rotation of what was kept, and other FLOPs of one row."""
    kept = repaired.bytes.canonical + repaired.bytes.stored + repaired.bytes.shared
    rotating = rotation_flops(layout, splice.cached_count) if kept else 0
    count = repaired.count_flops or (lambda: 0)
    return dataclasses.replace(repaired, placing_flops=rotating + elementwise, count_flops=count)


def rotation_flops(layout: KVLayout, tokens: int) -> int:
    """Counts the FLOPs of turning the keys of some tokens, and of composing a hybrid's transition."""
    numbers = sum(
        layout.depth(channel.name) * channel.heads * channel.rotary for channel in layout.channels if channel.rotates
    )
    return ROTATION * tokens * numbers + composing_flops(layout)


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
