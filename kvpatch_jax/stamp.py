"""Patches as host containers: factors, the stamp that says what they are for, and the checks of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from .chunk import Chunk
from .errors import LayoutError, PatchMismatchError, StalePatchError
from .layout import KVLayout
from .ops import ChannelFactors, Heads, PatchFrame, Quantised, is_low_rank

Base = Literal["canonical", "conditioned", "patched"]


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What a patch was formed from, and so what it may be applied to.

    Attributes:
      chunk: id of the chunk.
      base: what the factors are added to: the "canonical"; the "conditioned" KV (removal patch); or, for a correction
        that only `update_patch` takes, the "patched" KV.
      antecedent: ids in front of the chunk, in order; sorted if `orbit`.
      orbit: the patch serves every ordering of the antecedent.
      layers: layers the factors cover, ascending; the others get nothing.
      heads: "joint" or "separate".
      shared_left: every channel has the same left factor (stored once).
      frame, start: "phase_free" (any start), or "engine" at exactly `start`.
      base_antecedent: what the base itself was conditioned on; None for the canonical.
      backbone, layout: of the chunk.
    """

    chunk: str
    base: Base
    antecedent: tuple[str, ...]
    backbone: str
    layout: KVLayout
    layers: tuple[int, ...]
    orbit: bool = False
    heads: Heads = "joint"
    shared_left: bool = False
    frame: PatchFrame = "phase_free"
    start: tuple[int, ...] | None = None
    base_antecedent: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank (or dense) factors per channel, with their stamp.

    `factors` is a pytree of arrays, the only part that enters jitted code: {channel: (u, v)} with u [L', T, M] and
    v [L', M, F] (per head: [L', K, T, M] and [L', K, M, H]), or {channel: dense [L', T, K, H]}, L' = len(stamp.layers).
    u carries the singular values and v's rows are orthonormal (until quantised). A channel left out gets no correction.
    """

    factors: Mapping[str, ChannelFactors]
    stamp: Stamp

    @property
    def ranks(self) -> dict[str, int | None]:
        """Rank of each channel of the layout: 0 where it gets no patch, None where it is dense."""
        return {name: self._rank(name) for name in self.stamp.layout.names}

    def _rank(self, name: str) -> int | None:
        factors = self.factors.get(name)
        if factors is None:
            return 0
        if not is_low_rank(factors):
            return None
        leaf = factors[0]
        return (leaf.values if isinstance(leaf, Quantised) else leaf).shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, scales included; a shared left factor counts once."""
        return patch_bytes(self)


def patch_bytes(patch: Patch) -> int:
    """Bytes of a patch's factors, scales included; a shared left factor counts once.

    At rank m a channel takes m·(T + F) numbers where its KV takes T·F: rank 16 of a 480-token chunk at width 512 is as
    much as 31 of its 480 tokens.
    """
    seen_left = False
    total = 0
    for factors in patch.factors.values():
        leaves = jax.tree.leaves(factors)
        if patch.stamp.shared_left and is_low_rank(factors):
            left = jax.tree.leaves(factors[0])
            total -= sum(int(leaf.nbytes) for leaf in left) if seen_left else 0
            seen_left = True
        total += sum(int(leaf.nbytes) for leaf in leaves)
    return total


def same_storage(first: KVLayout, second: KVLayout) -> bool:
    """Whether two layouts hold the same phase-free KV: all but the way angles are computed agrees."""
    plain = lambda layout: dataclasses.replace(layout, rope=dataclasses.replace(layout.rope, angles="exact"))
    return plain(first) == plain(second)


def check_layout(layout: KVLayout, chunk: Chunk) -> None:
    """Raises LayoutError where a chunk is of another layout."""
    if not same_storage(layout, chunk.layout):
        raise LayoutError(f"chunk {chunk.id!r} is of layout {chunk.layout}; expected {layout}")


def check_stamp(
    patch: Patch,
    layout: KVLayout,
    chunk: Chunk,
    start: np.ndarray | jax.Array,
    antecedent: Sequence[str],
    base_antecedent: Sequence[str] | None,
    allow_stale: bool,
) -> None:
    """Raises PatchMismatchError or StalePatchError, with found and expected values, where a patch does not belong.

    `base_antecedent` is None where the patch would be added to the canonical.
    """
    stamp = patch.stamp
    base = "canonical" if base_antecedent is None else "conditioned"
    for word, found, expected in (
        ("chunk", stamp.chunk, chunk.id),
        ("base", stamp.base, base),
        ("backbone", stamp.backbone, chunk.backbone),
    ):
        if found != expected:
            raise PatchMismatchError(f"patch: {word} {found!r}; expected {expected!r}")
    if not same_storage(stamp.layout, layout):
        raise PatchMismatchError(f"patch: layout {stamp.layout}; expected {layout}")
    if stamp.frame == "engine":
        found = tuple(int(number) for number in np.asarray(start).ravel())
        if found != stamp.start:
            raise PatchMismatchError(f"patch: formed in the engine frame at {stamp.start}; expected {found}")
    if allow_stale:
        return
    wanted = tuple(sorted(antecedent)) if stamp.orbit else tuple(antecedent)
    if wanted != stamp.antecedent:
        kind = "any ordering of " if stamp.orbit else ""
        raise StalePatchError(
            f"patch of chunk {chunk.id!r}: formed behind {kind}{stamp.antecedent}; expected {tuple(antecedent)}"
        )
    if base_antecedent is not None and tuple(base_antecedent) != stamp.base_antecedent:
        raise StalePatchError(
            f"patch of chunk {chunk.id!r}: its base was conditioned on {stamp.base_antecedent}; expected "
            f"{tuple(base_antecedent)}"
        )
