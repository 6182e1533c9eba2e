"""Changing a patch: for a survivor, after a changed antecedent, and smaller in rank, layers or bits."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..cache import (
    AntecedentLike,
    Chunk,
    ChunkKey,
    Patch,
    PatchMetadata,
    antecedent_of,
    brief,
    check_applies,
    patch_digest,
    trusted_patch,
)
from ..core import (
    AnyArray,
    ChannelFactors,
    Factors,
    Leaf,
    PackedArray,
    RaggedFactors,
    arrays_of,
    is_low_rank,
    is_packed,
    ops,
    quantised,
    resize,
    value_of,
)
from ..errors import InputError, PatchMismatchError
from ..utils.kinds import expect_kind, is_whole
from .form import (
    KVArrays,
    Rank,
    Size,
    check_conditioned,
    deficit_of,
    finite_factors,
    from_deficit,
    rank_by_channel,
    storable_dtype,
)

# ------------------------------------------------------------------------------------------- another antecedent


def removal_patch(
    chunk: Chunk,
    target: KVArrays,
    conditioned: KVArrays,
    rank: Size,
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
      options: keywords of `form_patch`: dense, method, key, dtype, weights.

    Returns:
      A patch of conditioned KV; where that is the canonical, conditioned on nothing, the patch that `form_patch` forms.

    Raises:
      As `form_patch`. InputError: the canonical, said to be conditioned on something.
    """
    # Both are conditioned: the canonical plays no part in the difference.
    check_conditioned(chunk, target, "target KV")
    check_conditioned(chunk, conditioned)
    after, before = antecedent_of(antecedent), antecedent_of(base_antecedent, "base_antecedent")
    alone = _is_canonical(chunk, conditioned)
    if alone and before.members:
        raise InputError(
            f"removal_patch: got the canonical of {brief(chunk.id)!r} as its KV behind {before.shown}; expected that KV"
        )
    layers = tuple(range(chunk.layout.layers))
    metadata = PatchMetadata(ChunkKey.of(chunk), after, layers)
    if not alone:
        metadata = dataclasses.replace(metadata, base="conditioned", base_antecedent=before)
    return from_deficit(chunk, deficit_of(target, conditioned, chunk), rank, metadata, **options)


def _is_canonical(chunk: Chunk, kv: KVArrays) -> bool:
    """Returns whether KV is a chunk's canonical, number for number; of traced arrays, whether it is the same."""
    for name, value in arrays_of(kv).items():
        canonical = jnp.asarray(chunk.kv[name]) if is_packed(chunk.kv[name]) else chunk.kv[name]
        if canonical is value:
            continue
        if isinstance(canonical, Tracer) or isinstance(value, Tracer):
            return False
        if canonical.dtype != value.dtype or not np.array_equal(canonical, value):
            return False
    return True


def correction_patch(
    chunk: Chunk, patch: Patch, conditioned: KVArrays, rank: Size, antecedent: AntecedentLike, **options: Any
) -> Patch:
    """Forms what a stored patch lacks after a changed antecedent: factors of KV(B|A′) − KV(B|∅) − u v. Kamera App. D.

    It is small to ship; only `update_patch` takes it, and folds it into the stored patch.

    Args:
      chunk, conditioned, rank, antecedent: as in `form_patch`, after the changed antecedent A′.
      patch: the stored patch, of all layers.
      options: keywords of `form_patch`: dense, method, key, dtype, weights.

    Raises:
      PatchMismatchError: `patch` is of another chunk or layout, or one that `update_patch` does not take. Else as
      `form_patch`.
    """
    check_conditioned(chunk, conditioned)
    _check_updatable(patch, "correction_patch")
    check_applies(patch, chunk, patch.metadata.antecedent)

    # What the stored patch already corrects is taken off; the rest is thin where the antecedent changed little.
    present = ops.correction(chunk.layout, dict(patch.factors))
    delta = deficit_of(conditioned, chunk.kv, chunk)
    delta = {name: value - present.get(name, 0.0) for name, value in delta.items()}
    after, before = antecedent_of(antecedent), patch.metadata.antecedent
    key, layers = ChunkKey.of(chunk), patch.metadata.layers
    metadata = PatchMetadata(key, after, layers, "patched", before, corrects=patch_digest(patch))
    return from_deficit(chunk, delta, rank, metadata, **options)


def _check_updatable(patch: Patch, what: str) -> None:
    """Raises PatchMismatchError for a patch that cannot be updated."""
    expect_kind(patch, Patch, what, "a Patch")
    base, layers, total = patch.metadata.base, patch.metadata.layers, patch.metadata.chunk.layout.layers
    if base != "canonical" or len(layers) < total:
        raise PatchMismatchError(
            f"{what}: got patch with base {base!r}, layers {layers}; expected 'canonical', all {total} layers"
        )


def update_patch(patch: Patch, correction: Patch, rank: Rank | None = None) -> Patch:
    """Folds a correction into a stored patch and reduces it to rank m, forming neither densely. Kamera App. D.

    Args:
      patch: of all layers.
      correction: from `correction_patch` of this very patch, at the same rank and in the same dtype.
      rank: of the result, per channel or for all; None keeps each channel's rank. Dense channels stay dense.

    Returns:
      A patch behind the correction's antecedent, in the dtype of `patch` with its bits and groups. If `patch` has a
      rank for each layer, every layer keeps its rank, or has `rank` where that is smaller.

    Raises:
      PatchMismatchError: the correction is of another patch. InputError: a rank beyond the two patches' ranks together.
      LayoutError: a rank for an unknown channel.
    """
    _check_updatable(patch, "update_patch")
    expect_kind(correction, Patch, "correction", "a Patch")
    old, new = patch.metadata, correction.metadata
    digest = patch_digest(patch)
    if new.base != "patched" or new.chunk.id != old.chunk.id or new.corrects != digest:
        raise PatchMismatchError(
            f"update_patch: got correction of chunk {new.chunk.id!r}, base {new.base!r}, of the patch {new.corrects}; "
            f"expected {old.chunk.id!r}, 'patched', {digest}, which this patch has"
        )

    # A channel that only one of the two corrects keeps its factors, or the strongest of them.
    layout = old.chunk.layout
    ranks = rank_by_channel(layout, rank, "update_patch", keep=True)
    factors: dict[str, ChannelFactors] = {}
    for name in layout.names:
        both = [part.factors[name] for part in (patch, correction) if name in part.factors]
        if len(both) == 2:
            factors[name] = _merge(both[0], both[1], ranks[name], name)
        elif both:
            single = trusted_patch({name: both[0]}, old)
            factors |= (single if ranks[name] is None else truncate(single, {name: ranks[name]})).factors

    # The result serves the changed antecedent in one order, and its directions are no longer those of a basis.
    chunk = dataclasses.replace(old.chunk, layout=new.chunk.layout)
    metadata = dataclasses.replace(old, chunk=chunk, antecedent=new.antecedent, orbit=False, basis=None, errors=None)
    updated, dtype = trusted_patch(factors, metadata), dtype_of(patch)
    return updated if dtype is None else quantise(updated, dtype)


def _merge(own: ChannelFactors, other: ChannelFactors, rank: int | None, name: str) -> ChannelFactors:
    """Adds two corrections of one channel: low-rank ones at `rank`, others densely."""
    first, second = (_decoded(factors) for factors in (own, other))
    if isinstance(first, tuple) and isinstance(second, tuple):
        (u1, v1), (u2, v2) = first, second
        rank = int(u1.shape[-1]) if rank is None else rank
        limit = min(u1.shape[-1] + u2.shape[-1], u1.shape[-2], v1.shape[-1])
        if not 1 <= rank <= limit:
            raise InputError(f"update: got rank {rank} for channel {name!r}; expected 1 to {limit}")
        u, v = ops.jitted_merge((u1, v1), (u2, v2), rank)
        return _ragged_as(own, u, v) if isinstance(own, RaggedFactors) else (u, v)

    dense = second if isinstance(first, tuple) else first
    assert not isinstance(dense, tuple)
    total: Array = jnp.zeros(dense.shape, jnp.float32)
    for factors in (first, second):
        if isinstance(factors, tuple):
            u, v = (leaf.astype(jnp.float32) for leaf in factors)
            total = total + jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST).reshape(dense.shape)
        else:
            total = total + factors
    return total


def _decoded(factors: ChannelFactors) -> tuple[AnyArray, AnyArray] | AnyArray:
    """Returns factors as arrays: (u, v) with as many directions in every layer, or dense."""
    if isinstance(factors, RaggedFactors):
        return factors.by_layer()
    if is_low_rank(factors):
        return value_of(factors[0]), value_of(factors[1])
    return value_of(factors)  # pyright: ignore[reportArgumentType]


def _ragged_as(own: RaggedFactors, u: Float[Array, "L T M"], v: Float[Array, "L M F"]) -> RaggedFactors:
    """Returns factors with the ranks by layer that others have, at most M each."""
    rank, layers, directions = u.shape[-1], [], []
    for layer, size in enumerate(own.ranks):
        layers += [layer] * min(size, rank)
        directions += range(min(size, rank))
    # The number of directions stands for none.
    rows = np.full((len(u), rank), len(layers), np.asarray(own.rows).dtype)
    rows[layers, directions] = np.arange(len(layers))
    return RaggedFactors(u[layers, :, directions], v[layers, directions], jnp.asarray(rows))


# ------------------------------------------------------------------------------------------------ smaller patches


def truncate(patch: Patch, rank: Rank) -> Patch:
    """Truncates a patch to a smaller rank: a slice, because singular values descend.

    Args:
      rank: for every low-rank channel, or per channel (channels left out stay). Dense channels stay dense.

    Raises:
      InputError: below 1 or above what the patch has. LayoutError: an unknown channel.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    ranks, present = rank_by_channel(patch.metadata.chunk.layout, rank, "truncate", keep=True), patch.ranks

    factors: dict[str, ChannelFactors] = {}
    for name, own in patch.factors.items():
        size, most = ranks[name], present[name]
        if size is None or most is None:
            factors[name] = own
            continue
        if not 1 <= size <= most:
            raise InputError(f"truncate: got rank {size} for channel {name!r}; expected 1 to {most}")
        if isinstance(own, RaggedFactors):
            factors[name] = _with_rows(own, np.asarray(own.rows)[:, :size])
            continue
        factors[name] = (_rank_slice(own[0], size, -1), _rank_slice(own[1], size, -2))  # pyright: ignore
    return trusted_patch(factors, dataclasses.replace(patch.metadata, errors=None))


def _rank_slice(leaf: Leaf, rank: int, axis: int) -> Leaf:
    """Returns the first `rank` directions along a negative axis, of values and scales alike."""
    if isinstance(leaf, PackedArray):
        return resize(leaf, axis, rank)
    return jax.lax.slice_in_dim(leaf, 0, rank, axis=leaf.ndim + axis)


def _with_rows(factors: RaggedFactors, rows: Int[np.ndarray, "L M"]) -> RaggedFactors:
    """Returns ragged factors with some of their directions: those of `rows`, in the order in which layers have them."""
    total = factors.v.shape[0]
    listed = rows[rows < total]
    place = np.full(total + 1, len(listed), np.int32)
    place[listed] = np.arange(len(listed))
    u, v = jax.tree.map(lambda leaf: leaf[listed], (factors.u, factors.v))
    return RaggedFactors(u, v, jnp.asarray(place[np.minimum(rows, total)].astype(rows.dtype)))


def keep_layers(patch: Patch, layers: Iterable[int]) -> Patch:
    """Keeps a patch on some layers; the others get no correction and take no bytes. Kamera §4, the deep-only patch.

    Raises:
      InputError: no layers, or layers that the patch does not cover.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    expect_kind(layers, Iterable, "keep_layers: layers", "numbers of layers")
    listed, covered = list(layers), patch.metadata.layers
    if not listed or not all(is_whole(layer, 0) and layer in covered for layer in listed):
        raise InputError(f"keep_layers: got layers {listed!r:.80}; expected some of {covered}")

    # Factors have rows for the patch's own layers that keep the channel, which need not be all of the model's.
    remaining = tuple(sorted({int(layer) for layer in listed}))
    factors, plain = dict[str, Any](), dict[tuple[int, ...], dict[str, Any]]()
    for name, own in patch.factors.items():
        present = [layer for layer in covered if layer in patch.metadata.chunk.layout.layers_of(name)]
        rows = tuple(present.index(layer) for layer in remaining if layer in present)
        # A channel that none of the layers keeps has nothing left.
        if rows and isinstance(own, RaggedFactors):
            factors[name] = _with_rows(own, np.asarray(own.rows)[np.asarray(rows)])
        elif rows:
            plain.setdefault(rows, {})[name] = own
    for rows, own in plain.items():
        factors |= _layers_of(own, np.asarray(rows, np.int32))
    factors = {name: factors[name] for name in patch.factors if name in factors}
    return trusted_patch(factors, dataclasses.replace(patch.metadata, layers=remaining, errors=None))


# One program for all leaves.
@jax.jit
def _layers_of(factors: Factors, rows: Int[Array | np.ndarray, " kept"]) -> Factors:
    return jax.tree.map(lambda leaf: leaf[rows], factors)


def quantise(patch: Patch, dtype: jax.typing.DTypeLike) -> Patch:
    """Converts a patch to a smaller dtype: 8 bits with one float32 scale per direction, fewer in groups, wider ones by
    rounding.

    Args:
      dtype: a floating dtype, int8, or a word from "int2" to "int7": that many bits, in groups of 32 numbers with a
        bfloat16 scale each; "int4g64" has groups of 64, and "int4gall" one scale per direction.

    Raises:
      InputError: another dtype. NotFiniteError: factors beyond the dtype's range.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    target = storable_dtype(dtype, "quantise")

    factors: dict[str, ChannelFactors] = {}
    for name, own in patch.factors.items():
        if isinstance(own, RaggedFactors):
            u, v = (quantised(value_of(leaf), target, -1) for leaf in (own.u, own.v))
            factors[name] = RaggedFactors(u, v, own.rows)
        elif is_low_rank(own):
            u, v = own
            # A shared basis stays as it is: other patches hold it too.
            if patch.metadata.basis is None:
                v = quantised(value_of(v), target, -1)
            factors[name] = (quantised(value_of(u), target, -2), v)
        else:
            factors[name] = quantised(value_of(own), target, -1)  # pyright: ignore[reportArgumentType]
    checked = finite_factors(factors, f"patch of chunk {patch.metadata.chunk.id!r} in {target}")
    return trusted_patch(checked, dataclasses.replace(patch.metadata, errors=None))


def dtype_of(patch: Patch) -> str | None:
    """Returns the dtype of a patch's factors as `quantise` takes it; None of a patch without factors."""
    leaves: list[Any] = []
    for own in patch.factors.values():
        leaves += [own.u, own.v] if isinstance(own, RaggedFactors) else own if is_low_rank(own) else [own]
    packed = [leaf for leaf in leaves if is_packed(leaf)]
    if packed and packed[0].scaled:
        return packed[0].planes[0].dtype.name
    if packed:
        # An array of one group does not say what size its groups may have; every other one does.
        groups = {leaf.group for leaf in packed if leaf.scale.shape[leaf.axis] > 1}
        return f"int{packed[0].bits}g{groups.pop() if groups else 'all'}"
    return leaves[0].dtype.name if leaves else None
