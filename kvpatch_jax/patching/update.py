"""Updating a stored patch when its antecedent changes: a correction to ship, and folding it in. Kamera App. D."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..cache import AntecedentLike, Chunk, Patch, PatchMetadata, antecedent_of, check_chunk, patch_digest
from ..core import ChannelFactors, RaggedFactors, is_low_rank, ops, value_of
from ..errors import PatchMismatchError, RankError
from ..utils.kinds import expect_kind
from .byte_budget import ByteBudget
from .compress import Rank, dtype_of, quantise, rank_by_channel
from .factors import KVArrays, check_conditioned, deficit_of, from_deficit, metadata_of


def correction_patch(
    chunk: Chunk,
    patch: Patch,
    conditioned: KVArrays,
    rank: Rank | ByteBudget,
    antecedent: AntecedentLike,
    **options: Any,
) -> Patch:
    """Forms what a stored patch lacks after a changed antecedent: factors of KV(B|A′) − KV(B|∅) − u v. Kamera App. D.

    It is small to ship; only `update_patch` takes it, and folds it into the stored patch.

    Args:
      chunk, conditioned, rank, antecedent: as in `form_patch`, after the changed antecedent A′.
      patch: the stored patch.
      options: keywords of `from_deficit`: method, key, dtype, weights.

    Raises:
      PatchMismatchError: `patch` is of another chunk or layout, or one that `update_patch` does not take. Else as
      `form_patch`.
    """
    check_conditioned(chunk, conditioned)
    check_chunk(patch, chunk, "canonical")
    _check_updatable(patch.metadata, "correction_patch")

    # What the stored patch already corrects is taken off; the rest is thin where the antecedent changed little.
    have = ops.correction(chunk.layout, dict(patch.factors), layers=patch.metadata.layers)
    delta = deficit_of(conditioned, chunk.kv, chunk)
    delta = {name: value - have.get(name, 0.0) for name, value in delta.items()}
    after, digest = antecedent_of(antecedent), patch_digest(patch)
    metadata = metadata_of(chunk, "patched", after, patch.metadata.behind, corrects=digest)
    return from_deficit(chunk, delta, rank, metadata, **options)


def _check_updatable(metadata: PatchMetadata, what: str) -> None:
    """Raises PatchMismatchError for a patch that cannot be updated."""
    all_layers = metadata.layers == tuple(range(metadata.layout.layers))
    if (metadata.base, metadata.frame) == ("canonical", "phase_free") and all_layers:
        return

    raise PatchMismatchError(
        f"{what}: got patch with base {metadata.base!r}, frame {metadata.frame!r}, layers {metadata.layers}; "
        f"expected 'canonical', 'phase_free', all {metadata.layout.layers} layers"
    )


def update_patch(patch: Patch, correction: Patch, rank: Rank | None = None) -> Patch:
    """Folds a correction into a stored patch and reduces it to rank m, forming neither densely. Kamera App. D.

    Args:
      patch: of all layers.
      correction: from `correction_patch` of this very patch, at the same rank and in the same dtype.
      rank: of the result, per channel or for all; None keeps each channel's rank.

    Returns:
      A patch stamped with the correction's antecedent, in the dtype of `patch`, bits and groups included. Of a patch
      with a rank for each layer, every layer keeps its rank, or has `rank` where that is smaller.

    Raises:
      PatchMismatchError: the correction is of another patch. RankError: a rank beyond the two patches' ranks together.
      LayoutError: a rank for an unknown channel.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    expect_kind(correction, Patch, "correction", "a Patch")
    old, new = patch.metadata, correction.metadata
    _check_updatable(old, "update_patch")
    digest = patch_digest(patch)
    if new.base != "patched" or new.chunk != old.chunk or new.corrects != digest:
        raise PatchMismatchError(
            f"update_patch: got correction of chunk {new.chunk!r}, base {new.base!r}, of the patch {new.corrects}; "
            f"expected {old.chunk!r}, 'patched', {digest}, which this patch has"
        )

    # A channel that only one of the two corrects keeps its factors.
    ranks = rank_by_channel(old.layout, rank, "update_patch", keep=True)
    factors: dict[str, ChannelFactors] = {}
    for name in old.layout.names:
        own, other = patch.factors.get(name), correction.factors.get(name)
        if own is not None and other is not None:
            factors[name] = _merge(own, other, ranks[name], name)
        elif own is not None or other is not None:
            factors[name] = other if own is None else own  # pyright: ignore[reportArgumentType]

    # The result serves the changed antecedent in one order, and its directions are no longer those of a basis.
    metadata = dataclasses.replace(
        old, antecedent=new.antecedent, members=new.members, orbit=False, layout=new.layout, asked=None, basis=None
    )
    updated, dtype = Patch(factors, metadata), dtype_of(patch)
    return updated if dtype is None else quantise(updated, dtype)


def _merge(own: ChannelFactors, other: ChannelFactors, rank: int | None, name: str) -> ChannelFactors:
    """Adds two corrections of one channel: low-rank ones at `rank`, others densely."""
    first, second = (_decoded(factors) for factors in (own, other))
    if isinstance(first, tuple) and isinstance(second, tuple):
        (u1, v1), (u2, v2) = first, second
        rank = u1.shape[-1] if rank is None else rank
        limit = min(u1.shape[-1] + u2.shape[-1], u1.shape[-2], v1.shape[-1])
        if not 1 <= rank <= limit:
            raise RankError(f"update: got rank {rank} for channel {name!r}; expected 1 to {limit}")
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


def _decoded(factors: ChannelFactors) -> tuple[Array, Array] | Array:
    """Returns factors as arrays: (u, v) with as many directions in every layer, or dense."""
    if isinstance(factors, RaggedFactors):
        return factors.by_layer()
    if is_low_rank(factors):
        return value_of(factors[0]), value_of(factors[1])
    return value_of(factors)  # pyright: ignore[reportArgumentType]


def _ragged_as(own: RaggedFactors, u: Float[Array, "L T M"], v: Float[Array, "L M F"]) -> RaggedFactors:
    """Returns factors with the ranks by layer that others have, at most M each."""
    rank, layers, directions = u.shape[-1], [], []
    for layer, have in enumerate(own.ranks):
        layers += [layer] * min(have, rank)
        directions += range(min(have, rank))
    # The number of directions stands for none.
    rows = np.full((len(u), rank), len(layers), np.asarray(own.rows).dtype)
    rows[layers, directions] = np.arange(len(layers))
    return RaggedFactors(u[layers, :, directions], v[layers, directions], jnp.asarray(rows))
