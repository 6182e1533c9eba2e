"""Applying a patch: a placed chunk's KV in the engine frame. Kamera eq. 1."""

from ..cache import check_finite
from ..core import EngineKV, ops, rotate_kv
from ..utils.kinds import expect_kind
from .placed import Placed


def apply_patch(placed: Placed) -> EngineKV:
    """Computes R(start + local) · (KV + u v): a placed chunk in the engine frame, as its antecedent would have made it.

    Returns:
      {channel: [L, T, K, H]}, or [L, B, T, K, H] of a batch, in the engine frame and the chunk's dtype.

    Raises:
      NotFiniteError: a base with NaN or infinity. InputError: not a `Placed`.
    """
    expect_kind(placed, Placed, "apply_patch", "a Placed: a chunk, its patch, a start and an antecedent")
    if placed.base is not None:
        check_finite(placed.base, f"base of chunk {placed.chunk.id!r}")

    layout, kv, local, start = placed.layout, placed.kv, placed.chunk.local, placed.start
    if not placed.factors:
        return EngineKV(rotate_kv(layout, kv, local, start))
    return EngineKV(ops.jitted_apply(layout, kv, placed.factors, local, start, **placed.options))
