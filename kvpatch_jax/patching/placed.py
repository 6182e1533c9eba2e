"""Placing a chunk at a position: `Placed`, which is checked once, and `apply_patch`, which computes its KV."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from ..cache import AntecedentLike, Chunk, Patch, antecedent_of, check_applies, trusted
from ..core import (
    EngineKV,
    Factors,
    KVLayout,
    PackedArray,
    Start,
    as_start,
    extent,
    ops,
    rotate_kv,
)
from ..errors import InputError
from .form import KVArrays, check_conditioned


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
      kv: the phase-free arrays that are placed, {channel: [L, T, K, H]} or [L, B, T, K, H] of a batch.
      factors: the patch's; empty for blind reuse.
      layers: that the patch covers, static; None: all.

    Raises:
      StalePatchError: the patch was formed behind another antecedent; the message says whether chunks, their order,
      their contents or how they were served differ. PatchMismatchError: the patch does not belong here otherwise.
      ShapeError: the factors have another number of tokens or another batch. LayoutError, InputError: a layout or a
      start that does not fit. LayoutError, ShapeError: likewise of `base`. NotFiniteError: a base with NaN or infinity.
      InputError: no chunk, or no antecedent.
    """

    chunk: Chunk
    patch: Patch | None = None
    start: Start | float = 0
    antecedent: AntecedentLike = ()
    _: dataclasses.KW_ONLY
    base: KVArrays | None = None
    base_antecedent: AntecedentLike = ()
    allow_stale: bool = False
    kv: Mapping[str, Array | PackedArray] = dataclasses.field(init=False)
    factors: Factors = dataclasses.field(init=False)
    layers: tuple[int, ...] | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        chunk, patch, base, start = self.chunk, self.patch, self.base, self.start
        if not isinstance(chunk, Chunk):
            raise InputError(f"chunk: got a {type(chunk).__name__}; expected a Chunk")
        layout, fraction = chunk.layout, 0.0
        if isinstance(start, float):
            if not math.isfinite(start):
                raise InputError(f"placed: got start {start}; expected a finite number")
            start, fraction = math.floor(start), start - math.floor(start)
        start = as_start(layout.rope, start, () if chunk.batch is None else (chunk.batch,), "placed", chunk.extent)
        if base is not None:
            check_conditioned(chunk, base, "base")

        antecedent = antecedent_of(self.antecedent)
        checked: dict[str, Any] = {"start": start, "antecedent": antecedent, "factors": {}}
        if patch is not None:
            before = None if base is None else antecedent_of(self.base_antecedent, "base_antecedent")
            check_applies(patch, chunk, antecedent, before, allow_stale=self.allow_stale)
            checked["factors"] = patch.operands
            # None for all layers, so that such patches share one compiled program.
            if len(patch.metadata.layers) < layout.layers:
                checked["layers"] = patch.metadata.layers

        # Packed KV stays packed: the operator decodes it, one layer at a time.
        checked["kv"] = dict(chunk.kv if base is None else base)
        # Patches are held against the chunk as it is, before its tokens move by less than one position.
        if fraction:
            local = np.asarray(chunk.local, np.float32) + np.float32(fraction)
            checked["chunk"] = trusted(chunk, local=local, span=math.floor(extent(local)[1]) + 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def layout(self) -> KVLayout:
        """The chunk's layout, static under jit."""
        return self.chunk.layout

    def apply(self) -> EngineKV:
        """Computes what `apply_patch` does."""
        chunk, kv, start = self.chunk, self.kv, self.start
        # Blind reuse rotates the keys alone and returns the values as they are, without a copy.
        if not self.factors and not any([isinstance(value, PackedArray) for value in kv.values()]):
            return EngineKV(rotate_kv(chunk.layout, kv, chunk.local, start))  # pyright: ignore[reportArgumentType]
        arrays = (kv, self.factors, chunk.local, start)
        return EngineKV(ops.jitted_apply(chunk.layout, *arrays, layers=self.layers))


def apply_patch(
    chunk: Chunk, patch: Patch | None = None, start: Start | float = 0, antecedent: AntecedentLike = (), **options: Any
) -> EngineKV:
    """Computes R(start + local) · (KV + u v): a chunk in the engine frame, as its antecedent would have made it.

    Kamera eq. 1, with the patch added before the rotation.

    Args:
      chunk, patch, start, antecedent, options: fields of `Placed`.

    Returns:
      {channel: [L, T, K, H]}, or [L, B, T, K, H] of a batch, in the engine frame and the chunk's dtype.

    Raises:
      As `Placed`.
    """
    return Placed(chunk, patch, start, antecedent, **options).apply()
