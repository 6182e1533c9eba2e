"""Forming the patch of a chunk behind an antecedent. Checks here, arithmetic in `core.ops`.

Kamera §3 and App. A, with one change: the deficit is taken and added before the rotation, in the phase-free frame, so
that one patch serves every position at a lower rank. ``frame="engine"`` keeps the paper's order as a control.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from ..cache import AntecedentLike, Chunk, Patch, antecedent_of
from ..core import Angles, FormPlan, Heads, PatchFrame, Start, as_start, chunk_start, ops
from ..errors import InputError
from .basis import Basis, form_in_basis
from .compress import Rank
from .factors import (
    KVArrays,
    Method,
    arrays_of,
    check_conditioned,
    check_layers,
    checked_patch,
    choose_ranks,
    factor_dtype,
    metadata_of,
)


def form_patch(
    chunk: Chunk,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: AntecedentLike,
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
