"""Forming and applying conditioning patches. Host side: checks here, arithmetic in `ops.py`.

Kamera §3 and App. A, with one change: the deficit is taken and added before the rotation, in the phase-free frame, so
that one patch serves every position at a lower rank. ``frame="engine"`` keeps the paper's order as a control.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from ..cache import Behind, Chunk, Patch, antecedent_of, check_factor_shapes, check_finite, check_is_chunk, check_stamp
from ..core import (
    Angles,
    AnyArray,
    EngineKV,
    FormPlan,
    Heads,
    KVLayout,
    PatchFrame,
    Start,
    as_start,
    check_extent,
    chunk_start,
    ops,
    placed,
)
from ..errors import InputError
from .basis import Basis, form_in_basis
from .compress import Rank
from .form import (
    KVArrays,
    Method,
    arrays_of,
    check_alike,
    check_conditioned,
    check_layers,
    checked_patch,
    choose_ranks,
    factor_dtype,
    from_deficit,
    metadata_of,
)


def form_patch(
    chunk: Chunk,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: Behind,
    *,
    heads: Heads = "joint",
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    layers: Iterable[int] | None = None,
    shared_left: bool = False,
    dense: bool = True,
    frame: PatchFrame = "phase_free",
    start: Start | None = None,
    angles: Angles | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    basis: Basis | None = None,
) -> Patch:
    """Forms the patch of a chunk behind an antecedent: thin factors of KV(B|A) − KV(B|∅). Kamera App. A.

    Args:
      chunk: the canonical. Of a batch of chunks, the patch is a batch too: B stands behind L in every factor.
      conditioned: KV(B|A), phase-free, {channel: [L, T, K, H]} or [L, B, T, K, H], of the chunk's shapes.
      rank: M for every channel, or one per channel (0, or leaving a channel out, gives it no patch). At most min(T, F):
        more is brought down to that, and `metadata.asked` says so.
      antecedent: what stood in front, in order: chunks, ids, or members that say how they were served. Ids and chunks
        mean that each was served exactly.
      heads: one factorisation over all KV heads, or one per head.
      method: "randomised" (deterministic by `key`) or "exact".
      key: a typed PRNG key; None is `jax.random.key(0)`.
      layers: layers to patch; None for all.
      shared_left: one left factor for all channels.
      dense: store a channel's deficit as it is where factors would not be smaller, M·(T + F) ≥ T·F. False keeps
        factors, of which `truncate` makes smaller ranks.
      frame: "phase_free", or "engine" for the paper's order, which holds only at `start`.
      start: where the engine-frame patch is to be applied.
      angles: "exact" or "float32" in place of the layout's, for the engine frame.
      dtype: of the factors; None is the chunk's.
      basis: directions that patches of this backbone share (`basis.fit_basis`): the patch has coefficients alone, of
        the first `rank` of them. For joint heads in the phase-free frame; `method`, `key`, `dense` do not matter then.

    Raises:
      RankError: a rank below 1. LayoutError, ShapeError, DtypeError, NotFiniteError: `conditioned` or the chunk do not
      fit. InputError: layers out of range, an engine frame without start, or a basis with what it is not for.
      PatchMismatchError: a basis of another backbone or layout.
    """
    if basis is not None:
        if (heads, frame, shared_left) != ("joint", "phase_free", False) or not isinstance(rank, int | np.integer):
            raise InputError(
                f"patch: heads {heads!r}, frame {frame!r}, shared_left {shared_left}, rank {rank} with a basis; "
                "expected 'joint', 'phase_free', no shared left factor, one rank"
            )
        return form_in_basis(chunk, conditioned, basis, antecedent, rank, layers=layers, dtype=dtype)
    check_conditioned(chunk, conditioned)
    behind = antecedent_of(antecedent)
    layout = chunk.layout.with_angles(angles)
    if (frame == "engine") != (start is not None):
        raise InputError(
            f"patch: frame {frame!r}, start {start}; expected a start with the engine frame, and only then"
        )
    place = as_start(layout.rope, 0) if start is None else chunk_start(layout.rope, start, None, "patch")
    kept = check_layers(layers, layout.layers)
    ranks, asked = choose_ranks(chunk, rank, heads, shared_left, dense)

    plan = FormPlan(
        ranks=ranks,
        heads=heads,
        method=method,
        layers=None if len(kept) == layout.layers else kept,
        shared_left=shared_left,
        frame=frame,
        dtype=factor_dtype(chunk, dtype),
    )
    factors = ops.jitted_form(
        layout,
        arrays_of(conditioned),
        arrays_of(chunk.kv),
        jnp.int32(chunk.length),
        jax.random.key(0) if key is None else key,
        jnp.asarray(chunk.local),
        place,
        plan=plan,
    )

    metadata = metadata_of(
        chunk,
        "canonical",
        behind,
        layout=layout,
        layers=kept,
        heads=heads,
        shared_left=shared_left,
        frame=frame,
        start=None if start is None else tuple(int(number) for number in np.asarray(place).ravel()),
        asked=asked,
    )
    return checked_patch(factors, metadata, plan)


def removal_patch(
    chunk: Chunk,
    target: KVArrays,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: Behind,
    base_antecedent: Behind,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms a survivor's patch when its antecedent lost A: factors of KV(C|B) − KV(C|A,B), added to conditioned KV.

    Args:
      chunk: C, one or a batch.
      target: KV(C|B), phase-free. conditioned: KV(C|A,B), phase-free, the base.
      rank: as in `form_patch`.
      antecedent: what is left in front of C (B); base_antecedent: what the base was conditioned on (A, B).

    Raises:
      As `form_patch`.
    """
    check_conditioned(chunk, target, "target KV")
    check_conditioned(chunk, conditioned)
    delta = ops.deficit(arrays_of(target), arrays_of(conditioned), jnp.int32(chunk.length))
    before = antecedent_of(base_antecedent, "base_antecedent")
    metadata = metadata_of(chunk, "conditioned", antecedent_of(antecedent), before)
    return from_deficit(chunk, delta, rank, metadata, method, key, dtype)


class OperatorCall(NamedTuple):
    """What the operator runs on once everything was checked: arguments of `ops.apply` and of a splice alike.

    Attributes:
      layout: static.
      kv: phase-free {channel: [L, T, K, H]} or [L, B, T, K, H].
      factors: of the patch; none for blind reuse.
      start: int32, as `as_start` makes it.
      options: the keywords layers, heads and frame, of a patch.
    """

    layout: KVLayout
    kv: dict[str, Array]
    factors: ops.Factors
    start: AnyArray
    options: dict[str, Any]


def operator_call(
    what: str,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Behind,
    base: KVArrays | None,
    base_antecedent: Behind,
    allow_stale: bool,
    angles: Angles | None,
) -> OperatorCall:
    """Checks that chunk, patch, place and antecedents belong together. `what` names the caller in messages.

    Raises:
      As `apply_patch`.
    """
    check_is_chunk(chunk)
    antecedent = antecedent_of(antecedent)
    base_antecedent = antecedent_of(base_antecedent, "base_antecedent")
    layout = chunk.layout.with_angles(angles)
    place = chunk_start(layout.rope, start, chunk.batch, what)
    check_extent(layout.rope, chunk.extent, place)
    if base is not None:
        check_alike(chunk, base, "base")  # its values are looked at by `apply_patch`; a splice only moves them
    kv = arrays_of(chunk.kv if base is None else base)
    if patch is None:
        return OperatorCall(layout, kv, {}, place, {})
    check_stamp(patch, chunk, place, antecedent, None if base is None else base_antecedent, allow_stale)
    check_factor_shapes(patch, chunk)
    metadata = patch.metadata
    layers = None if len(metadata.layers) == layout.layers else metadata.layers
    options = {"layers": layers, "heads": metadata.heads, "frame": metadata.frame}
    return OperatorCall(layout, kv, dict(patch.factors), place, options)


def apply_patch(
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Behind = (),
    *,
    base: KVArrays | None = None,
    base_antecedent: Behind = (),
    allow_stale: bool = False,
    angles: Angles | None = None,
) -> EngineKV:
    """Computes R(start + local) · (KV + u v): the chunk in the engine frame, as the antecedent would have made it.

    Kamera eq. 1.

    Args:
      chunk: the canonical, or a batch of them.
      patch: factors, or None for blind reuse (one rotation).
      start: where the chunk's positions count from, int32, a scalar or one per axis; for a batch also [B], or [B, A]
        with axes. Moving never compiles again.
      antecedent: what stands in front of the chunk here, in order; must be what the patch was formed behind: the same
        ids served in the same way, and the same contents where both are known.
      base: for a removal patch, the conditioned KV (phase-free) it is added to, in place of the canonical.
      base_antecedent: what `base` was conditioned on.
      allow_stale: serve the patch behind another antecedent. Chunk, base and what that was conditioned on, layout and
        backbone must agree all the same.
      angles: "exact" or "float32" in place of the layout's.

    Returns:
      {channel: [L, T, K, H]}, or [L, B, T, K, H] of a batch, in the engine frame and the chunk's dtype.

    Raises:
      StalePatchError: the patch was formed behind another antecedent; says whether other chunks, another order, another
      content or another way of serving them. PatchMismatchError: it does not belong here otherwise. ShapeError: its
      factors are of another number of tokens or another batch. LayoutError, PositionError: bad layout or start.
    """
    call = operator_call("apply_patch", chunk, patch, start, antecedent, base, base_antecedent, allow_stale, angles)
    if base is not None:
        check_finite(base, f"base of chunk {chunk.id!r}")
    if not call.factors:
        return EngineKV(placed(call.layout, call.kv, chunk.local, call.start))
    return EngineKV(ops.jitted_apply(call.layout, call.kv, call.factors, chunk.local, call.start, **call.options))
