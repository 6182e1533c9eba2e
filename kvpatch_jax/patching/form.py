"""Forming the patch of a chunk after an antecedent, or of a chunk that stays when its antecedent loses one.

Kamera §3 and App. A, with one change: the deficit is taken and added before the rotation, in the phase-free frame, so
that one patch serves every position at a lower rank. ``frame="engine"`` keeps the paper's order as a control.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from ..cache import Antecedent, AntecedentLike, Chunk, Patch, antecedent_of, brief
from ..core import (
    Angles,
    FormPlan,
    PatchFrame,
    Start,
    arrays_of,
    as_start,
    is_packed,
    ops,
)
from ..errors import InputError
from .basis import Basis, form_in_basis
from .byte_budget import ByteBudget, form_ragged
from .compress import Rank, finite_factors
from .factors import (
    KVArrays,
    Method,
    check_conditioned,
    check_layers,
    choose_ranks,
    deficit_of,
    factor_dtype,
    from_deficit,
    metadata_of,
)
from .information_weights import InformationWeights, check_weights


@dataclasses.dataclass(frozen=True)
class FormOptions:
    """Options of `form_patch`, which takes them as keywords.

    Attributes:
      method: "randomised" (deterministic by `key`) or "exact".
      key: a typed PRNG key; None is `jax.random.key(0)`.
      layers: layers to patch; None for all.
      dense: store a channel's deficit as it is where factors would not be smaller, M·(T + F) ≥ T·F. False keeps
        factors, of which `truncate` makes smaller ranks.
      frame: "phase_free", or "engine" for the paper's order, which holds only at `start`.
      start: where the engine-frame patch is to be applied.
      angles: "exact" or "float32" in place of the layout's, for the engine frame.
      dtype: of the factors; None is the chunk's, of a `ByteBudget` int4.
      basis: directions that patches of this backbone share (`fit_basis`): the patch has coefficients alone, of the
        first `rank` of them. In the phase-free frame; `method`, `key` and `dense` have no effect then.
      weights: of a `ByteBudget`, how much an error in each feature counts (`calibrate_sensitivity`).

    Raises:
      InputError: an unknown frame, an engine frame without a start, a start without it, a basis with another frame,
      or weights without a `ByteBudget`.
    """

    method: Method = "randomised"
    key: Key[Array, ""] | None = None
    layers: Iterable[int] | None = None
    dense: bool = True
    frame: PatchFrame = "phase_free"
    start: Start | None = None
    angles: Angles | None = None
    dtype: jax.typing.DTypeLike | None = None
    basis: Basis | None = None
    weights: InformationWeights | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights)
        if self.frame not in get_args(PatchFrame):
            raise InputError(f"patch: got frame {self.frame!r:.80}; expected one of {get_args(PatchFrame)}")
        if self.basis is not None and self.frame != "phase_free":
            raise InputError(f"patch: got frame {self.frame!r} with a basis; expected 'phase_free'")
        if (self.frame == "engine") != (self.start is not None):
            raise InputError(
                f"patch: got frame {self.frame!r}, start {self.start}; expected a start with the engine frame, and "
                "only with it"
            )


def form_patch(
    chunk: Chunk, conditioned: KVArrays, rank: Rank | ByteBudget, antecedent: AntecedentLike, **options: Any
) -> Patch:
    """Forms the patch of a chunk after an antecedent: thin factors of KV(B|A) − KV(B|∅). Kamera App. A.

    Args:
      chunk: the canonical. The patch of a batch of chunks is a batch too: every factor has the axis B after L.
      conditioned: KV(B|A), phase-free, {channel: [L, T, K, H]} or [L, B, T, K, H], of the chunk's shapes.
      rank: M for every channel, or one per channel (0, or leaving a channel out, gives it no patch). Of a hybrid model
        {"rows": M, "transition": N} names all channels of a kind, either or both. At most min(T, F), of a transition's
        part min(R, F): a larger rank is reduced to that and recorded in `metadata.asked`. Or a `ByteBudget`: a rank for
        each layer and channel, so that the patch holds most of the deficit within these bytes; of one chunk, joint
        heads in the phase-free frame, from exact directions whatever `method` says.
      antecedent: the chunks that precede this one, in order: chunks, ids, or members with the identities of their KV.
        Ids and chunks mean that each was prefilled there.
      options: fields of `FormOptions`: method, key, layers, dense, frame, start, angles, dtype,
        basis, weights.

    Raises:
      RankError: a rank below 1. LayoutError, ShapeError, DtypeError, NotFiniteError: `conditioned` or the chunk do not
      fit. InputError: layers out of range, a dtype that factors cannot have, or as `FormOptions`. PatchMismatchError: a
      basis or weights of another backbone or layout.
    """
    chosen = FormOptions(**options)
    if chosen.weights is not None and not isinstance(rank, ByteBudget):
        raise InputError(f"patch: got weights with rank {rank!r:.80}; expected a ByteBudget")
    if chosen.basis is not None:
        if not isinstance(rank, int | np.integer):
            raise InputError(f"patch: got rank {rank!r:.80} with a basis; expected one rank")
        return form_in_basis(
            chunk, conditioned, chosen.basis, antecedent, int(rank), layers=chosen.layers, dtype=chosen.dtype
        )

    check_conditioned(chunk, conditioned)
    antecedent = antecedent_of(antecedent)
    layout = chunk.layout.with_angles(chosen.angles)
    # In the phase-free frame the start has no effect, but the program takes one.
    start = as_start(layout.rope, 0 if chosen.start is None else chosen.start, (), "patch")
    layers = check_layers(chosen.layers, layout.layers)
    if isinstance(rank, ByteBudget):
        return _form_within(chunk, conditioned, rank, antecedent, layers, chosen)
    ranks, asked = choose_ranks(chunk, rank, chosen.dense)
    # A channel that none of the layers keeps gets no factors.
    ranks = tuple(pair for pair in ranks if layout.rows_of(pair[0], layers))

    plan = FormPlan(
        ranks=ranks,
        method=chosen.method,
        # None for all layers, so that such plans share one compiled program.
        layers=None if len(layers) == layout.layers else layers,
        frame=chosen.frame,
        dtype=factor_dtype(chunk, chosen.dtype),
    )
    key = jax.random.key(0) if chosen.key is None else chosen.key
    length, local = jnp.int32(chunk.length), jnp.asarray(chunk.local)
    arrays = (arrays_of(conditioned), arrays_of(chunk.kv), length, key, local, start)
    factors = ops.jitted_form(layout, *arrays, plan=plan)

    metadata = metadata_of(
        chunk,
        "canonical",
        antecedent,
        layout=layout,
        layers=layers,
        frame=chosen.frame,
        start=None if chosen.start is None else tuple(int(number) for number in np.asarray(start).ravel()),
        asked=asked,
    )
    return Patch(finite_factors(factors, f"factors of chunk {chunk.id!r} in {plan.dtype}"), metadata)


def _delta_of(chunk: Chunk, conditioned: KVArrays, layers: tuple[int, ...]) -> dict[str, Float[Array, "kept *B T _ _"]]:
    """Computes the deficit of some layers."""
    delta = deficit_of(conditioned, chunk.kv, chunk)
    if len(layers) < chunk.layout.layers:
        delta = chunk.layout.of_layers(delta, layers)
        delta = {name: value for name, value in delta.items() if len(value)}
    return delta


def _form_within(
    chunk: Chunk,
    conditioned: KVArrays,
    budget: ByteBudget,
    antecedent: Antecedent,
    layers: tuple[int, ...],
    chosen: FormOptions,
) -> Patch:
    """Forms a patch with a rank for each layer and channel."""
    if chosen.frame != "phase_free":
        raise InputError(f"patch: got frame {chosen.frame!r} with a ByteBudget; expected 'phase_free'")
    weights = None if chosen.weights is None else chosen.weights.of_layers(chunk, layers)
    delta, dtype = _delta_of(chunk, conditioned, layers), factor_dtype(chunk, chosen.dtype, budget)
    what = f"factors of chunk {chunk.id!r} in {dtype}"
    factors = form_ragged(delta, chunk.length, budget, dtype, what, weights)
    return Patch(factors, metadata_of(chunk, "canonical", antecedent, layers=layers))


def _is_canonical(chunk: Chunk, kv: KVArrays) -> bool:
    """Returns whether KV is a chunk's canonical, number for number; of traced arrays, whether it is the same."""
    for name, value in arrays_of(kv).items():
        own = chunk.kv[name]
        own = jnp.asarray(own) if is_packed(own) else own
        if own is value:
            continue
        if isinstance(own, Tracer) or isinstance(value, Tracer):
            return False
        if own.shape != value.shape or own.dtype != value.dtype or not np.array_equal(own, value):
            return False
    return True


def removal_patch(
    chunk: Chunk,
    target: KVArrays,
    conditioned: KVArrays,
    rank: Rank | ByteBudget,
    antecedent: AntecedentLike,
    base_antecedent: AntecedentLike,
    **options: Any,
) -> Patch:
    """Forms the patch of a survivor whose antecedent lost A: factors of KV(C|B) − KV(C|A,B), added to conditioned KV.

    Kamera §5, for a chunk that stays in a window when a chunk that precedes it leaves.

    Args:
      chunk: C, one or a batch.
      target: KV(C|B), phase-free.
      conditioned: KV(C|A,B), phase-free: the base.
      rank: as in `form_patch`.
      antecedent: the chunks that precede C afterwards (B).
      base_antecedent: what the base was conditioned on (A, B).
      options: keywords of `from_deficit`: method, key, dtype, weights.

    Returns:
      A patch of conditioned KV; where that is the canonical, conditioned on nothing, the patch that `form_patch` forms.

    Raises:
      As `form_patch`. InputError: the canonical, said to be conditioned on something.
    """
    # Both are conditioned: the canonical plays no part in the difference.
    check_conditioned(chunk, target, "target KV")
    check_conditioned(chunk, conditioned)
    delta = deficit_of(target, conditioned, chunk)
    after, before = antecedent_of(antecedent), antecedent_of(base_antecedent, "base_antecedent")
    alone = _is_canonical(chunk, conditioned)
    if alone and before.members:
        raise InputError(
            f"removal_patch: got the canonical of {brief(chunk.id)!r} as its KV behind {before.shown}; expected that KV"
        )
    base, behind = ("canonical", None) if alone else ("conditioned", before)
    metadata = metadata_of(chunk, base, after, behind)
    return from_deficit(chunk, delta, rank, metadata, **options)
