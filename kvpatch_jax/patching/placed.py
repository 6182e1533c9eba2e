"""Placing a chunk at a position: `Placed`, which is checked once, and `apply_patch`, which computes its KV."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from ..cache import AntecedentLike, Chunk, Patch, antecedent_of, check_applies, check_finite, trusted
from ..core import (
    Angles,
    EngineKV,
    Factors,
    KVLayout,
    PackedArray,
    Start,
    arrays_of,
    as_start,
    check_extent,
    extent,
    is_packed,
    ops,
    rotate_kv,
)
from ..errors import InputError
from ..utils.kinds import expect_kind
from .factors import KVArrays, check_alike


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placed:
    """A chunk, or a batch of chunks, at a start position behind an antecedent, with its patch or without.

    The arguments are checked when it is made, before anything is computed.

    Attributes:
      chunk: the canonical, or a batch of them; its local positions with the start's fraction.
      patch: factors, or None for blind reuse (one rotation).
      start: the position that the chunk's positions count from, int32: a scalar or one per axis; for a batch also [B],
        or [B, A] with axes. A new start never compiles again. A float for a chunk that begins between whole positions,
        as one behind a video of Qwen3-Omni may: the start is then the whole number below, and the fraction is in the
        chunk's local positions.
      antecedent: the chunks that precede this one, in order. They must be those that the patch was formed behind: the
        same ids served in the same way, and the same contents where both are known.
      base: for a removal patch, the conditioned KV (phase-free) that it is added to, in place of the canonical.
      base_antecedent: what `base` was conditioned on.
      allow_stale: accept a patch that was formed behind another antecedent. Chunk, base, the base's antecedent, layout
        and backbone must agree all the same.
      angles: "exact" or "float32" in place of the layout's; None in `layout`, which has them.
      layout: the chunk's, with `angles`; static under jit.
      kv: the phase-free arrays that are placed, {channel: [L, T, K, H]} or [L, B, T, K, H] of a batch.
      factors: the patch's; empty for blind reuse.
      options: the patch's static keywords of `ops.apply` and of splices: layers, heads and frame.

    Raises:
      StalePatchError: the patch was formed behind another antecedent; the message says whether chunks, their order,
      their contents or how they were served differ. PatchMismatchError: the patch does not belong here otherwise.
      ShapeError: the factors have another number of tokens or another batch. LayoutError, InputError: a layout or a
      start that does not fit. FrameError, DtypeError: likewise of `base`. InputError: no chunk, or no antecedent.
    """

    chunk: Chunk
    patch: Patch | None = None
    start: Start | float = 0
    antecedent: AntecedentLike = ()
    _: dataclasses.KW_ONLY
    base: KVArrays | None = None
    base_antecedent: AntecedentLike = ()
    allow_stale: bool = False
    angles: Angles | None = None
    layout: KVLayout = dataclasses.field(init=False)
    kv: Mapping[str, Array | PackedArray] = dataclasses.field(init=False)
    factors: Factors = dataclasses.field(init=False)
    options: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        chunk, patch, base = self.chunk, self.patch, self.base
        expect_kind(chunk, Chunk, "chunk", "a Chunk")
        antecedent = antecedent_of(self.antecedent)
        base_antecedent = antecedent_of(self.base_antecedent, "base_antecedent")
        layout = chunk.layout if self.angles is None else chunk.layout.with_angles(self.angles)
        whole, fraction = _whole_and_fraction(self.start)
        start = as_start(layout.rope, whole, () if chunk.batch is None else (chunk.batch,), "placed")
        check_extent(layout.rope, chunk.extent, start)
        if base is not None:
            # Its values are checked by `apply_patch`; a splice only moves them.
            check_alike(chunk, base, "base")

        factors, options = {}, {}
        if patch is not None:
            conditioned = None if base is None else base_antecedent
            check_applies(patch, chunk, start, antecedent, conditioned, allow_stale=self.allow_stale)
            factors, metadata = dict(patch.operands), patch.metadata
            # None for all layers, so that such patches share one compiled program.
            layers = None if len(metadata.layers) == layout.layers else metadata.layers
            options = {"layers": layers, "frame": metadata.frame}
            if fraction and metadata.frame == "engine":
                raise InputError(f"placed: got start {self.start} for a patch of rotated keys; expected a whole number")

        # Packed KV stays packed: the operator decodes it, one layer at a time.
        kv = chunk.kv if base is None else base
        if chunk.encoding is None or base is not None or not any(map(is_packed, kv.values())):
            kv = arrays_of(kv)
        # Patches are held against the chunk as it is, before its tokens move by less than one position.
        if fraction:
            local = np.asarray(chunk.local, np.float32) + np.float32(fraction)
            chunk = trusted(chunk, local=local, span=math.floor(extent(local)[1]) + 1)
        made = {
            "chunk": chunk,
            "start": start,
            "antecedent": antecedent,
            "base_antecedent": base_antecedent,
            "layout": layout,
        }
        for name, value in (made | {"kv": kv, "factors": factors, "options": options}).items():
            object.__setattr__(self, name, value)


def _whole_and_fraction(start: Start | float) -> tuple[Start, float]:
    """Splits a start into a whole number (or what it is, if no float) and a fraction in [0, 1)."""
    if not isinstance(start, float):
        return start, 0.0
    if not math.isfinite(start):
        raise InputError(f"placed: got start {start}; expected a finite number")
    return math.floor(start), start - math.floor(start)


def apply_patch(placed: Placed) -> EngineKV:
    """Computes R(start + local) · (KV + u v): a placed chunk in the engine frame, as its antecedent would have made it.

    Kamera eq. 1, with the patch added before the rotation.

    Returns:
      {channel: [L, T, K, H]}, or [L, B, T, K, H] of a batch, in the engine frame and the chunk's dtype.

    Raises:
      NotFiniteError: a base with NaN or infinity. InputError: not a `Placed`.
    """
    expect_kind(placed, Placed, "apply_patch", "a Placed: a chunk, its patch, a start and an antecedent")
    if placed.base is not None:
        check_finite(placed.base, f"base of chunk {placed.chunk.id!r}")

    # Blind reuse rotates the keys alone and returns the values as they are, without a copy.
    layout, kv, local = placed.layout, placed.kv, placed.chunk.local
    start: Any = placed.start
    if not placed.factors and not any(map(is_packed, kv.values())):
        return EngineKV(rotate_kv(layout, kv, local, start))
    return EngineKV(ops.jitted_apply(layout, kv, placed.factors, local, start, **placed.options))
