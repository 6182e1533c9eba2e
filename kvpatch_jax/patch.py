"""Forming, applying and reshaping conditioning patches. Host side: checks here, arithmetic in `ops.py`.

Kamera §3 and App. A, with one change: the deficit is taken and added before the rotation, in the phase-free frame, so
that one patch serves every position at a lower rank. ``frame="engine"`` keeps the paper's order as a control.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from . import ops
from .chunk import AnyArray, Chunk, check_finite, content_of
from .compress import finite_factors
from .compress import keep_layers as keep_layers
from .compress import quantise as quantise
from .compress import truncate as truncate
from .content import names_of
from .errors import InputError, PatchMismatchError, RankError, ShapeError
from .frames import EngineKV, expect_frame
from .layout import KVLayout, Start, as_start, on_device, one_start, placed
from .ops import ChannelFactors, FormPlan, Heads, PatchFrame, is_low_rank, value_of
from .patch_metadata import Base, Patch, PatchMetadata, check_chunk, check_layout, check_stamp, patch_digest
from .patch_metadata import patch_bytes as patch_bytes
from .rope import check_extent

Rank = int | Mapping[str, int]
Method = Literal["randomised", "exact"]
KVArrays = Mapping[str, Float[AnyArray, "L T _ _"]]


def _arrays(kv: Mapping[str, AnyArray]) -> dict[str, Array]:
    return {name: on_device(value) for name, value in kv.items()}


def _check_conditioned(layout: KVLayout, conditioned: KVArrays, chunk: Chunk, what: str) -> None:
    expect_frame(conditioned, what, "phase_free")
    layout.check(conditioned, what)
    for name, value in conditioned.items():
        if value.shape != chunk.kv[name].shape:
            raise ShapeError(f"{what}[{name!r}]: shape {value.shape}; expected the chunk's {chunk.kv[name].shape}")
    check_finite(conditioned, what)


def _check_layers(layers: Iterable[int] | None, total: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(total))
    kept = tuple(sorted({int(layer) for layer in layers}))
    if not kept or kept[0] < 0 or kept[-1] >= total:
        raise InputError(f"patch: layers {kept}; expected some of 0 to {total - 1}")
    return kept


def _sides(layout: KVLayout, names: Sequence[str], chunk: Chunk, heads: Heads, shared: bool) -> dict[str, int]:
    """The feature side of each channel's matrix."""
    if shared:
        return {name: sum(layout.channel(other).features for other in names) for name in names}
    return {
        name: layout.channel(name).width if heads == "separate" else layout.channel(name).features for name in names
    }


Ranks = tuple[tuple[str, int | None], ...]
Asked = tuple[tuple[str, int], ...] | None


def _chosen_ranks(layout: KVLayout, rank: Rank, chunk: Chunk, heads: Heads, shared: bool) -> tuple[Ranks, Asked]:
    """(channel, rank or None for dense) of the channels that get a patch, and what was asked for beyond that.

    A rank that the chunk's tokens or the features do not have is brought down to what they do: the whole deficit.
    """
    if isinstance(rank, Mapping):
        for name in rank:
            layout.channel(name)
        wanted = {name: int(rank[name]) for name in layout.names if rank.get(name, 0) != 0}
    else:
        wanted = dict.fromkeys(layout.names, int(rank))
    if shared and (heads == "separate" or len(set(wanted.values())) > 1):
        raise RankError(
            f"patch: ranks {wanted} with heads {heads!r}; expected one rank and joint heads for a shared left"
        )
    sides = _sides(layout, tuple(wanted), chunk, heads, shared)
    chosen: list[tuple[str, int | None]] = []
    for name, size in wanted.items():
        if size < 1:
            raise RankError(f"patch: rank {size} for channel {name!r}; expected at least 1")
        size = min(size, chunk.length, sides[name])
        tokens = chunk.tokens
        dense = size * (tokens + sides[name]) >= tokens * sides[name]
        chosen.append((name, None if dense else size))
    beyond = tuple((name, size) for name, size in wanted.items() if size > min(chunk.length, sides[name]))
    return tuple(chosen), beyond or None


def form_patch(
    layout: KVLayout,
    conditioned: KVArrays,
    chunk: Chunk,
    rank: Rank,
    antecedent: Sequence[str],
    *,
    heads: Heads = "joint",
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    layers: Iterable[int] | None = None,
    shared_left: bool = False,
    frame: PatchFrame = "phase_free",
    start: Start | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """The patch of a chunk behind an antecedent: thin factors of KV(B|A) − KV(B|∅). Kamera App. A.

    Args:
      layout: of the chunk.
      conditioned: KV(B|A), phase-free, {channel: [L, T, K, H]} of the chunk's shapes.
      chunk: the canonical.
      rank: M for every channel, or one per channel (0, or leaving a channel out, gives it no patch). At most min(T, F):
        more is brought down to that, and `metadata.asked` says so.
      antecedent: ids of the chunks in front, in order.
      heads: one factorisation over all KV heads, or one per head.
      method: "randomised" (deterministic by `key`) or "exact".
      key: a typed PRNG key; None is `jax.random.key(0)`.
      layers: layers to patch; None for all.
      shared_left: one left factor for all channels.
      frame: "phase_free", or "engine" for the paper's order, which holds only at `start`.
      start: where the engine-frame patch is to be applied.
      dtype: of the factors; None is the chunk's.

    Returns:
      A Patch. Where factors would not be smaller than the deficit, M·(T + F) ≥ T·F, that channel is stored dense.

    Raises:
      RankError: a rank below 1. LayoutError, ShapeError, DtypeError, NotFiniteError: `conditioned`
      or the chunk do not fit. InputError: layers out of range, or an engine frame without start.
    """
    check_layout(layout, chunk)
    _check_conditioned(layout, conditioned, chunk, f"conditioned KV of chunk {chunk.id!r}")
    kept = _check_layers(layers, layout.layers)
    if (frame == "engine") != (start is not None):
        raise InputError(
            f"patch: frame {frame!r}, start {start}; expected a start with the engine frame, and only then"
        )
    place = as_start(layout.rope, 0) if start is None else one_start(layout.rope, start, "patch")
    ranks, asked = _chosen_ranks(layout, rank, chunk, heads, shared_left)
    plan = FormPlan(
        ranks=ranks,
        heads=heads,
        method=method,
        layers=None if len(kept) == layout.layers else kept,
        shared_left=shared_left,
        frame=frame,
        dtype=_factor_dtype(chunk, dtype),
    )
    factors = ops.jitted_form(
        layout,
        _arrays(conditioned),
        _arrays(chunk.kv),
        jnp.int32(chunk.length),
        jax.random.key(0) if key is None else key,
        jnp.asarray(chunk.local),
        place,
        plan=plan,
    )
    metadata = _metadata(
        layout,
        chunk,
        "canonical",
        antecedent,
        layers=kept,
        heads=heads,
        shared_left=shared_left,
        frame=frame,
        start=None if start is None else tuple(int(number) for number in np.asarray(place).ravel()),
        asked=asked,
    )
    return Patch(finite_factors(factors, f"factors of chunk {chunk.id!r} in {plan.dtype}"), metadata)


def _factor_dtype(chunk: Chunk, dtype: jax.typing.DTypeLike | None) -> str:
    return jnp.dtype(next(iter(chunk.kv.values())).dtype if dtype is None else dtype).name


def _from_delta(
    layout: KVLayout,
    delta: Mapping[str, Array],
    chunk: Chunk,
    rank: Rank,
    metadata: PatchMetadata,
    method: Method,
    key,
    dtype,
) -> Patch:
    """A joint-head, phase-free patch from a deficit that is at hand."""
    ranks, asked = _chosen_ranks(layout, rank, chunk, "joint", False)
    plan = FormPlan(ranks=ranks, method=method, dtype=_factor_dtype(chunk, dtype))
    key = jax.random.key(0) if key is None else key
    metadata = dataclasses.replace(metadata, asked=asked)
    factors = ops.jitted_factorise(dict(delta), key, jnp.int32(chunk.length), plan=plan)
    return Patch(finite_factors(factors, f"factors of chunk {chunk.id!r} in {plan.dtype}"), metadata)


def _metadata(layout: KVLayout, chunk: Chunk, base: Base, antecedent: Sequence[str], **more: Any) -> PatchMetadata:
    given: dict[str, Any] = {"layers": tuple(range(layout.layers))} | more
    return PatchMetadata(
        chunk=chunk.id,
        base=base,
        antecedent=names_of(antecedent, "antecedent"),
        backbone=chunk.backbone,
        layout=layout,
        content=content_of(chunk),
        local=chunk.places,
        **given,
    )


def apply_patch(
    layout: KVLayout,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Sequence[str] = (),
    *,
    base: KVArrays | None = None,
    base_antecedent: Sequence[str] = (),
    allow_stale: bool = False,
) -> EngineKV:
    """R(start + local) · (KV + u v): the chunk in the engine frame, as the antecedent would have made it. Kamera eq. 1.

    Args:
      layout: of the chunk; its `angles` are the ones used.
      chunk: the canonical.
      patch: factors, or None for blind reuse (one rotation).
      start: where the chunk's positions count from, int32, a scalar or one per axis. Moving never compiles again.
      antecedent: ids in front of the chunk here; must be what the patch was formed behind.
      base: for a removal patch, the conditioned KV (phase-free) it is added to, in place of the canonical.
      base_antecedent: what `base` was conditioned on.
      allow_stale: serve the patch behind another antecedent. Chunk, base and what that was conditioned on, layout and
        backbone must agree all the same.

    Returns:
      {channel: [L, T, K, H]} in the engine frame and the chunk's dtype.

    Raises:
      StalePatchError, PatchMismatchError: the patch does not belong here. LayoutError, PositionError: bad layout or
      start.
    """
    check_layout(layout, chunk)
    antecedent = names_of(antecedent, "antecedent")
    base_antecedent = names_of(base_antecedent, "base_antecedent")
    place = one_start(layout.rope, start, "apply_patch")
    check_extent(layout.rope, chunk.extent, place)
    if base is not None:
        _check_conditioned(layout, base, chunk, f"base of chunk {chunk.id!r}")
    kv = _arrays(chunk.kv if base is None else base)
    if patch is None:
        return EngineKV(placed(layout, kv, chunk.local, place))
    check_stamp(patch, layout, chunk, place, antecedent, None if base is None else base_antecedent, allow_stale)
    check_factor_shapes(patch, chunk)
    if not patch.factors:
        return EngineKV(placed(layout, kv, chunk.local, place))
    metadata = patch.metadata
    layers = None if len(metadata.layers) == layout.layers else metadata.layers
    given = {"layers": layers, "heads": metadata.heads, "frame": metadata.frame}
    return EngineKV(ops.jitted_apply(layout, kv, dict(patch.factors), chunk.local, place, **given))


def check_factor_shapes(patch: Patch, chunk: Chunk) -> None:
    """Raises ShapeError where a patch's factors have another number of tokens than the chunk."""
    if patch.tokens not in (None, chunk.tokens):
        raise ShapeError(
            f"patch of chunk {chunk.id!r}: {patch.tokens} tokens; expected the chunk's {chunk.tokens} (`Patch.pad` "
            "pads a patch as `Chunk.pad` its chunk)"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulated:
    """The running sum of a chunk's deficits over orderings of an antecedent set.

    `total` is {channel: float32 [L, T, K, H]}; `count` orderings went into it; `antecedent` is the sorted set, or None.
    """

    total: Mapping[str, Float[AnyArray, "..."]]
    count: int
    chunk: Chunk
    antecedent: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"Accumulated({self.count} orderings of {self.antecedent} in front of {self.chunk!r})"


def accumulate(
    acc: Accumulated | None, conditioned: KVArrays, chunk: Chunk, antecedent: Iterable[str] | None = None
) -> Accumulated:
    """Adds one ordering's deficit to a running sum (None starts it). Kamera §5, the orbit patch.

    Args:
      acc: what came before, of the same chunk.
      conditioned: KV(B|A) behind this ordering, phase-free.
      chunk: the canonical.
      antecedent: ids of the antecedent; every ordering must hold the same set. None, then for all orderings, leaves it
        to `orbit_patch` to be told.

    Raises:
      PatchMismatchError: another chunk or antecedent set than before. ShapeError, NotFiniteError: bad `conditioned`.
    """
    check_layout(chunk.layout, chunk)
    _check_conditioned(chunk.layout, conditioned, chunk, f"conditioned KV of chunk {chunk.id!r}")
    members = None if antecedent is None else tuple(sorted(names_of(antecedent, "antecedent")))
    if acc is None:
        total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in chunk.kv.items()}
        acc = Accumulated(total, 0, chunk, members)
    else:
        _check_same_chunk(acc.chunk, chunk)
    if members != acc.antecedent:
        raise PatchMismatchError(f"accumulate: antecedent {members}; expected an ordering of {acc.antecedent}")
    total = ops.jitted_accumulate(dict(acc.total), _arrays(conditioned), _arrays(chunk.kv), jnp.int32(chunk.length))
    return Accumulated(total, acc.count + 1, acc.chunk, members)


def _check_same_chunk(first: Chunk, second: Chunk) -> None:
    for word in ("id", "backbone", "layout", "length", "content"):
        found, expected = getattr(second, word), getattr(first, word)
        if None not in (found, expected) and found != expected:
            what = "chunk" if word == "id" else f"chunk {first.id!r}: {word}"
            raise PatchMismatchError(f"accumulate: {what} {found!r}; expected {expected!r}")
    if first.tokens != second.tokens:
        raise ShapeError(f"accumulate: {second.tokens} tokens; expected the {first.tokens} of the chunk before")


def orbit_patch(
    acc: Accumulated,
    rank: Rank,
    antecedent: Iterable[str] | None = None,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """One patch for every ordering of an antecedent set: factors of the mean deficit. Kamera §5.

    Args:
      acc: from `accumulate`.
      rank: as in `form_patch`.
      antecedent: the set, where `accumulate` was not told.

    Raises:
      RankError: as in `form_patch`. PatchMismatchError: another set than was accumulated. InputError: no set known.
    """
    members = None if antecedent is None else tuple(sorted(names_of(antecedent, "antecedent")))
    if members is not None and acc.antecedent is not None and members != acc.antecedent:
        raise PatchMismatchError(f"orbit_patch: antecedent {members}; expected {acc.antecedent}")
    members = acc.antecedent if members is None else members
    if members is None:
        raise InputError("orbit_patch: antecedent None; expected the ids of the set, here or in accumulate")
    chunk = acc.chunk
    mean = {name: jnp.asarray(value) / acc.count for name, value in acc.total.items()}
    metadata = _metadata(chunk.layout, chunk, "canonical", members, orbit=True)
    return _from_delta(chunk.layout, mean, chunk, rank, metadata, method, key, dtype)


def removal_patch(
    layout: KVLayout,
    target: KVArrays,
    conditioned: KVArrays,
    chunk: Chunk,
    rank: Rank,
    antecedent: Sequence[str],
    base_antecedent: Sequence[str],
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """For a survivor C whose antecedent lost A: factors of KV(C|B) − KV(C|A,B), added to the conditioned KV.

    Args:
      target: KV(C|B), phase-free. conditioned: KV(C|A,B), phase-free, the base.
      chunk: C. rank: as in `form_patch`.
      antecedent: what is left in front of C (B); base_antecedent: what the base was conditioned on (A, B).

    Raises:
      As `form_patch`.
    """
    check_layout(layout, chunk)
    _check_conditioned(layout, target, chunk, f"target KV of chunk {chunk.id!r}")
    _check_conditioned(layout, conditioned, chunk, f"conditioned KV of chunk {chunk.id!r}")
    delta = ops.deficit(_arrays(target), _arrays(conditioned), jnp.int32(chunk.length))
    metadata = _metadata(
        layout, chunk, "conditioned", antecedent, base_antecedent=names_of(base_antecedent, "base_antecedent")
    )
    return _from_delta(layout, delta, chunk, rank, metadata, method, key, dtype)


def correction_patch(
    layout: KVLayout,
    patch: Patch,
    conditioned: KVArrays,
    chunk: Chunk,
    rank: Rank,
    antecedent: Sequence[str],
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """What a stored patch lacks behind a changed antecedent: factors of KV(B|A′) − KV(B|∅) − u v. Kamera App. D.

    It is small to ship; `update_patch` folds it into the stored patch, and nothing else takes it.

    Raises:
      PatchMismatchError: `patch` is of another chunk or layout, or one that `update_patch` does not take. Else as
      `form_patch`.
    """
    check_layout(layout, chunk)
    check_chunk(patch.metadata, layout, chunk, "canonical")
    _check_updatable(patch.metadata, "correction_patch")
    _check_conditioned(layout, conditioned, chunk, f"conditioned KV of chunk {chunk.id!r}")
    check_factor_shapes(patch, chunk)
    have = ops.correction(layout, dict(patch.factors), layers=patch.metadata.layers, heads=patch.metadata.heads)
    delta = ops.deficit(_arrays(conditioned), _arrays(chunk.kv), jnp.int32(chunk.length))
    delta = {name: value - have.get(name, 0.0) for name, value in delta.items()}
    corrected: dict[str, Any] = {"base_antecedent": patch.metadata.antecedent, "corrects": patch_digest(patch)}
    new = _metadata(layout, chunk, "patched", antecedent, **corrected)
    return _from_delta(layout, delta, chunk, rank, new, method, key, dtype)


def _check_updatable(metadata: PatchMetadata, what: str) -> None:
    """Raises PatchMismatchError for a patch that cannot be updated."""
    whole = metadata.layers == tuple(range(metadata.layout.layers))
    plain = (metadata.base, metadata.frame, metadata.heads) == ("canonical", "phase_free", "joint")
    if plain and whole and not metadata.shared_left:
        return
    raise PatchMismatchError(
        f"{what}: patch with base {metadata.base!r}, frame {metadata.frame!r}, heads {metadata.heads!r}, "
        f"layers {metadata.layers}, shared_left {metadata.shared_left}; expected 'canonical', 'phase_free', 'joint', "
        f"all {metadata.layout.layers} layers, no shared left factor"
    )


def update_patch(patch: Patch, correction: Patch, rank: Rank | None = None) -> Patch:
    """Folds a correction into a stored patch and brings it back to rank m, forming neither densely. Kamera App. D.

    Args:
      patch: joint-head patch of all layers. correction: from `correction_patch` of that very patch: not of it at
        another rank or in another dtype.
      rank: of the result, per channel or for all; None keeps each channel's rank.

    Returns:
      A patch stamped with the correction's antecedent, in the dtype that `patch` has.

    Raises:
      PatchMismatchError: the correction is of another patch. RankError: a rank beyond the two patches' ranks together.
      LayoutError: a rank for a channel that is not there.
    """
    old, new = patch.metadata, correction.metadata
    _check_updatable(old, "update_patch")
    digest = patch_digest(patch)
    if new.base != "patched" or new.chunk != old.chunk or new.corrects != digest:
        raise PatchMismatchError(
            f"update_patch: correction of chunk {new.chunk!r}, base {new.base!r}, of the patch {new.corrects}; "
            f"expected {old.chunk!r}, 'patched', {digest}, which this patch has"
        )
    for name in rank if isinstance(rank, Mapping) else ():
        old.layout.channel(name)
    factors = {}
    for name in old.layout.names:
        wanted = rank.get(name) if isinstance(rank, Mapping) else rank
        merged = _merge(patch.factors.get(name), correction.factors.get(name), wanted, name)
        if merged is not None:
            factors[name] = merged
    metadata = dataclasses.replace(old, antecedent=new.antecedent, orbit=False, layout=new.layout, asked=None)
    return _as_stored(Patch(factors, metadata), patch)


def _as_stored(patch: Patch, like: Patch) -> Patch:
    """The patch in the dtype of another's first factor."""
    leaf = next(iter(jax.tree.leaves(dict(like.factors))), None)
    return patch if leaf is None else quantise(patch, leaf.dtype)


def _merge(
    first: ChannelFactors | None, second: ChannelFactors | None, rank: int | None, name: str
) -> ChannelFactors | None:
    if first is None or second is None:
        return second if first is None else first
    if is_low_rank(first) and is_low_rank(second):
        (u1, v1), (u2, v2) = (tuple(value_of(leaf) for leaf in factors) for factors in (first, second))
        rank = u1.shape[-1] if rank is None else rank
        limit = min(u1.shape[-1] + u2.shape[-1], u1.shape[-2], v1.shape[-1])
        if not 1 <= rank <= limit:
            raise RankError(f"update: rank {rank} for channel {name!r}; expected 1 to {limit}")
        u, v = ops.jitted_merge((u1, v1), (u2, v2), rank)
        return u, v
    dense = [factors for factors in (first, second) if not is_low_rank(factors)]
    shape = value_of(dense[0]).shape  # pyright: ignore[reportArgumentType]
    total = jnp.zeros(shape, jnp.float32)
    for factors in (first, second):
        if is_low_rank(factors):
            u, v = (value_of(leaf).astype(jnp.float32) for leaf in factors)
            total = total + jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST).reshape(shape)
        else:
            total = total + value_of(factors)  # pyright: ignore[reportArgumentType]
    return total
