"""Updating a stored patch when its antecedent changes: a correction to ship, and folding it in. Kamera App. D."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..cache import (
    AntecedentLike,
    Chunk,
    Patch,
    PatchMetadata,
    antecedent_of,
    check_chunk,
    check_factor_shapes,
    check_is_patch,
    patch_digest,
)
from ..core import ChannelFactors, is_low_rank, ops, value_of
from ..errors import PatchMismatchError, RankError
from .compress import Rank, quantise
from .factors import KVArrays, Method, arrays_of, check_conditioned, from_deficit, metadata_of


def correction_patch(
    chunk: Chunk,
    patch: Patch,
    conditioned: KVArrays,
    rank: Rank,
    antecedent: AntecedentLike,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms what a stored patch lacks behind a changed antecedent: factors of KV(B|A′) − KV(B|∅) − u v. Kamera App. D.

    It is small to ship; `update_patch` folds it into the stored patch, and nothing else takes it.

    Raises:
      PatchMismatchError: `patch` is of another chunk or layout, or one that `update_patch` does not take. Else as
      `form_patch`.
    """
    check_conditioned(chunk, conditioned)
    check_chunk(patch, chunk, "canonical")
    _check_updatable(patch.metadata, "correction_patch")
    check_factor_shapes(patch, chunk)
    have = ops.correction(chunk.layout, dict(patch.factors), layers=patch.metadata.layers, heads=patch.metadata.heads)
    delta = ops.deficit(arrays_of(conditioned), arrays_of(chunk.kv), jnp.int32(chunk.length))
    delta = {name: value - have.get(name, 0.0) for name, value in delta.items()}
    behind = antecedent_of(antecedent)
    metadata = metadata_of(chunk, "patched", behind, patch.metadata.behind, corrects=patch_digest(patch))
    return from_deficit(chunk, delta, rank, metadata, method, key, dtype)


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
    check_is_patch(patch)
    check_is_patch(correction)
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
    metadata = dataclasses.replace(
        old, antecedent=new.antecedent, members=new.members, orbit=False, layout=new.layout, asked=None, basis=None
    )
    updated = Patch(factors, metadata)
    leaf = next(iter(jax.tree.leaves(dict(patch.factors))), None)
    return updated if leaf is None else quantise(updated, leaf.dtype)


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
