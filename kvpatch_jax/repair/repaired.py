"""What repairs return: a mended cache with its bytes, its FLOPs and the tokens that ran; and what they all share."""

import dataclasses
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..backbone import Backbone
from ..core import AnyArray, KVLayout, compose, split_transition
from ..errors import InputError
from ..patching.patch_flops import ROTATION, composing_flops
from ..utils.kinds import expect_names, is_of
from ..utils.pytrees import pytree
from ..utils.traced_flops import traced_flops
from .repair_budget import NUMBER_BYTES, RepairBudget, kv_bytes
from .spliced_cache import SplicedCache, check_splice, live_tokens, required, write_slots


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
    data=("cache", "chosen", "visible", "logits", "estimate"),
    static=("bytes", "placing_flops", "forming_flops", "count_flops"),
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
      placing_flops: of one row, beside matrix products: of rotating what was kept, and bringing it back from few bits.
      forming_flops: of factorising one row before its first reuse; forwards are not among them.
      count_flops: counts FLOPs of the whole batch; None where the repair ran inside another trace.
      estimate: share of blind reuse's loss that each row is estimated to leave [B], where the method says (`patch`).
    """

    cache: dict[str, Array]
    chosen: Bool[Array, "L B T"]
    bytes: RepairBytes
    visible: Bool[Array, "B S"] | None = None
    logits: Float[Array, "B 1 V"] | None = None
    placing_flops: int = 0
    forming_flops: int = 0
    count_flops: Callable[[], int] | None = None
    estimate: Float[np.ndarray, " B"] | None = None

    @property
    def token_layers(self) -> Int[Array, " B"]:
        """Token-layers recomputed per row (re-prefilling the chunk takes L·T)."""
        return self.chosen.sum((0, 2))

    @property
    def flops(self) -> float:
        """FLOPs of serving one row: the matrix products of what was run, counted from its trace, and placing.

        Raises:
          InputError: the repair was called inside another trace.
        """
        if self.count_flops is None:
            raise InputError("repaired.flops: got a repair inside a trace; expected one that was called eagerly")
        return self.count_flops() / self.chosen.shape[1] + self.placing_flops


def method(*, hybrid: bool = False) -> Callable[[Callable[..., Repaired]], Callable[..., Repaired]]:
    """Makes a function a method of reuse: checks its splice and budget, and counts what serving costs.

    FLOPs are those of the function, traced again when they are asked for, unless it counts them itself.

    Args:
      hybrid: whether it serves chunks of hybrid models, too.
    """

    def decorate(function: Callable[..., Repaired]) -> Callable[..., Repaired]:
        @functools.wraps(function)
        def call(
            backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float | None = None, **settings: Any
        ) -> Repaired:
            check_splice(backbone.layout, splice, hybrid=hybrid)
            _check_settings(function, budget, settings)
            # Without a budget, the function's own default.
            budgets = () if budget is None else (RepairBudget.of(budget),)

            def serve(splice: SplicedCache) -> Repaired:
                return function(backbone, splice, *budgets, **settings)

            repaired = serve(splice)
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(splice)):
                return repaired
            # Whatever was kept is rotated to its place.
            reused = repaired.bytes.canonical + repaired.bytes.stored + repaired.bytes.shared
            placing = repaired.placing_flops + (rotation_flops(backbone.layout, splice.cached_count) if reused else 0)
            setting = function.__name__, *budgets, settings
            count = flops_counter(backbone, splice, setting, serve, repaired.count_flops)
            return dataclasses.replace(repaired, placing_flops=placing, count_flops=count)

        return call

    return decorate


def _check_settings(function: Callable[..., Repaired], budget: Any, settings: Mapping[str, Any]) -> None:
    """Raises InputError for settings that a method does not have or of another kind, and for a budget that it needs."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    given = [parameter.name for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
    expect_names(settings, given, name)
    hints = typing.get_type_hints(function)
    for setting, value in settings.items():
        if not is_of(value, hints[setting]):
            hint = hints[setting]
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise InputError(f"{name}.{setting}: got {value!r:.80}; expected {expected}")
    if budget is None and parameters["budget"].default is inspect.Parameter.empty:
        raise InputError(f"{name}.budget: got None; expected a RepairBudget, or a share from 0 to 1")


# -------------------------------------------------------------------------------------------------------- results


def untouched(layout: KVLayout, splice: SplicedCache) -> Repaired:
    """Returns the cache unchanged, with no token chosen and the bytes of splicing canonicals."""
    size = kv_bytes(layout, splice.cached_count)
    chosen = jnp.zeros((layout.layers, *splice.slots.shape), bool)
    return Repaired(dict(splice.cache), chosen, RepairBytes(canonical=size, moved=size))


def engine_written(layout: KVLayout, splice: SplicedCache, kv: Mapping[str, AnyArray], bytes: RepairBytes) -> Repaired:
    """Returns the cache with engine-frame KV at the splice's slots; no token was run.

    A hybrid's transition is composed with that of what precedes the chunk, which is the last of the sequence.
    """
    rows, transition = split_transition(kv)
    cache = {name: splice.cache[name] for name in rows}
    cache = write_slots(cache, jnp.asarray(splice.slots), rows, live_tokens(splice))
    if transition is not None:
        cache |= _jitted_compose(dict(required(splice, "before")), transition)
    return dataclasses.replace(untouched(layout, splice), cache=cache, bytes=bytes)


_jitted_compose = jax.jit(compose)


# ---------------------------------------------------------------------------------------------------------- costs


def input_bytes(splice: SplicedCache) -> int:
    """Counts the bytes that one token is run from: its embedding, and what layers take of it beside that."""
    deepstack = splice.tokens.deepstack
    beside = 0 if deepstack is None else deepstack.shape[2] * deepstack.shape[3]
    return NUMBER_BYTES * (splice.tokens.embeddings.shape[-1] + beside)


_COUNTED: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def flops_counter(
    backbone: Backbone,
    splice: SplicedCache,
    setting: Any,
    serve: Callable[[SplicedCache], Any],
    own: Callable[[], int] | None = None,
) -> Callable[[], int]:
    """Returns a count of FLOPs, which counts once per backbone, shapes and setting.

    Args:
      serve: what is traced.
      own: counts in place of a trace of `serve`, likewise by shapes and setting alone.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), splice)

    def count() -> int:
        counts = _COUNTED.setdefault(backbone, {})
        key = (repr(setting), jax.tree.structure(shapes), tuple(jax.tree.leaves(shapes)))
        if key not in counts:
            counts[key] = traced_flops(serve, shapes) if own is None else own()
        return counts[key]

    return count


def rotation_flops(layout: KVLayout, tokens: int) -> int:
    """Counts the FLOPs of turning the keys of some tokens, and of composing a hybrid's transition."""
    numbers = [layout.depth(channel.name) * channel.heads * channel.rotary for channel in layout.channels]
    return ROTATION * tokens * sum(numbers) + composing_flops(layout)


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
