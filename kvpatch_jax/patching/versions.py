"""Many conditioned versions of one chunk, kept together: shared directions, differences, and values between them.

A chunk that is met behind N antecedents has N patches. They may be coefficients in directions that they share
(`chunk_basis`), or differences to the nearest one that is stored (`difference_patch`). Behind an antecedent that was
never met, a patch may be interpolated between those that were, as KVCOMM does (arXiv 2510.12872): an approximation,
which no antecedent matches, so that it is served with `allow_stale=True` alone.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..cache import (
    Antecedent,
    AntecedentLike,
    Chunk,
    Member,
    Patch,
    PatchMetadata,
    digest_of,
    encoded,
    patch_digest,
    same_storage,
)
from ..core import ChannelFactors, FormPlan, RaggedFactors, is_low_rank, ops, value_of
from ..errors import InputError, PatchMismatchError, RankError
from ..utils.kinds import all_of, expect_kind
from .basis import Basis, DeficitSum
from .byte_budget import ByteBudget
from .compress import Rank, rank_by_channel
from .factors import KVArrays
from .gate import PatchCandidate, Pooled, candidates, divergence
from .update import correction_patch

INTERPOLATED = "interpolation"
"""Id of the one member that an interpolated patch names as its antecedent, which no chunk has."""


def chunk_basis(
    chunk: Chunk, conditioned: Iterable[KVArrays], rank: Rank, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Basis:
    """Computes the directions that the deficits of one chunk share behind several antecedents.

    Patches of the chunk are then coefficients alone: `form_patch(..., basis=)`. When an antecedent comes later,
    `DeficitSum` gives the basis again without the earlier KV, or `extend_basis` adds what the basis lacks; `in_basis`
    re-expresses the patches that are there.

    Args:
      conditioned: KV behind each antecedent.
      rank: as in `fit_basis`.

    Raises:
      As `fit_basis`.
    """
    total = DeficitSum(chunk.layout, chunk.backbone)
    for kv in conditioned:
        total = total.add(chunk, kv)
    return total.basis(rank, dtype=dtype)


def nearest_patch(
    patches: Sequence[Patch], antecedent: AntecedentLike, *, pooled: Pooled | None = None
) -> PatchCandidate:
    """Returns the patch whose antecedent diverges least from the wanted one, with its divergence.

    Args:
      patches: of one chunk. pooled: as `gate.divergence`.

    Raises:
      InputError: no patches.
    """
    listed = candidates(all_of(Patch, patches, "nearest_patch"), antecedent, allow_stale=True, pooled=pooled)
    if not listed:
        raise InputError("nearest_patch: got no patches; expected at least one")
    return listed[0]


def difference_patch(
    chunk: Chunk,
    patches: Sequence[Patch],
    conditioned: KVArrays,
    rank: Rank | ByteBudget,
    antecedent: AntecedentLike,
    *,
    pooled: Pooled | None = None,
    **options: Any,
) -> tuple[Patch, Patch]:
    """Forms the patch behind one more antecedent as its difference to the nearest stored patch.

    Args:
      chunk, conditioned, rank, antecedent: as in `form_patch`.
      patches: stored ones of the chunk. options: as `correction_patch` takes them.

    Returns:
      The difference, which names the patch that it belongs to by its digest, and that patch; `resolve_difference` of
      both is applied.

    Raises:
      InputError: no patches. Else as `correction_patch`.
    """
    nearest = nearest_patch(patches, antecedent, pooled=pooled).patch
    return correction_patch(chunk, nearest, conditioned, rank, antecedent, **options), nearest


def resolve_difference(patch: Patch, difference: Patch) -> Patch:
    """Adds a difference to the patch that it was formed of: a patch of the difference's antecedent, without a loss.

    Factors are set side by side, so ranks add up and nothing is rounded; `update_patch` reduces them instead.

    Raises:
      PatchMismatchError: the difference is of another patch.
    """
    for own in (patch, difference):
        expect_kind(own, Patch, "resolve_difference", "a Patch")
    old, new = patch.metadata, difference.metadata
    digest = patch_digest(patch)
    if new.base != "patched" or new.chunk != old.chunk or new.corrects != digest:
        raise PatchMismatchError(
            f"resolve_difference: got a patch of chunk {new.chunk!r}, base {new.base!r}, of the patch {new.corrects}; "
            f"expected {old.chunk!r}, 'patched', {digest}, which this patch has"
        )
    metadata = dataclasses.replace(
        old, antecedent=new.antecedent, members=new.members, orbit=False, asked=None, basis=None
    )
    return Patch(_sum_of([patch, difference], [1.0, 1.0]), metadata)


def interpolation_weights(
    patches: Sequence[Patch],
    antecedent: AntecedentLike,
    *,
    pooled: Pooled | None = None,
    temperature: float | int = 0.1,
) -> Float[np.ndarray, " N"]:
    """Computes the weights of stored patches for an antecedent: a softmax of minus their divergences.

    KVCOMM takes the distance of embeddings; `gate.divergence` with `pooled` is one minus the cosine of pooled
    canonicals, and without it counts chunks in common.

    Args:
      temperature: the divergence that divides a weight by e, above 0.

    Raises:
      InputError: no patches, or a temperature that is not above 0.
    """
    listed = all_of(Patch, patches, "interpolation_weights")
    if not listed or not 0 < temperature < float("inf"):
        raise InputError(
            f"interpolation_weights: got {len(listed)} patches, temperature {temperature!r:.80}; expected at least one "
            "patch, and a temperature above 0"
        )
    apart = []
    for patch in listed:
        own = patch.metadata
        apart.append(divergence(own.behind, antecedent, orbit=own.orbit, pooled=pooled))
    # The largest exponent is 0, so nothing overflows.
    share = np.exp((min(apart) - np.asarray(apart)) / temperature)
    return share / share.sum()


def interpolate_patches(
    patches: Sequence[Patch],
    weights: Sequence[float | int] | Float[np.ndarray, " N"],
    rank: Rank | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Computes the weighted mean of a chunk's patches: an approximation behind an antecedent that was never met.

    Its metadata name one antecedent, "interpolation", served "interpolated:…" with a digest of the patches and their
    weights. No chunk's antecedent matches that, so the patch is refused unless `allow_stale` accepts it.

    Args:
      patches: of one chunk, base and layers, in the phase-free frame, with joint heads.
      weights: one for each, 0 or more, of sum 1; as `interpolation_weights` gives them.
      rank: of the result, reduced by its singular values; None: all ranks together, without a loss.
      dtype: of the factors; None: float32.

    Raises:
      InputError: no patches, or other weights. PatchMismatchError: patches that differ in what they apply to.
      RankError: a rank below 1.
    """
    listed, shares = all_of(Patch, patches, "interpolate_patches"), np.asarray(weights, np.float64)
    fits = shares.shape == (len(listed),) and np.isfinite(shares).all() and (shares >= 0).all()
    if not listed or not fits or abs(shares.sum() - 1) > 1e-5:
        raise InputError(
            f"interpolate_patches: got {len(listed)} patches, weights {shares.tolist()!r:.80}; expected one weight for "
            "each, 0 or more, of sum 1"
        )
    first = listed[0].metadata
    for patch in listed:
        _check_together(patch, first)

    fields = [b"interpolation"]
    for digest, share in sorted(zip(map(patch_digest, listed), shares.tolist(), strict=True)):
        fields += [encoded(digest), np.float64(share).tobytes()]
    behind = Antecedent((Member(INTERPOLATED, None, f"interpolated:{digest_of(fields, size=16)}"),))
    metadata = dataclasses.replace(
        first, antecedent=behind.ids, members=behind.members, orbit=False, asked=None, basis=None
    )

    used = [patch for patch, share in zip(listed, shares, strict=True) if share]
    factors = _sum_of(used, shares[shares > 0].tolist())
    if rank is not None:
        factors = _reduced(factors, metadata, rank)
    stored: ops.Factors = {}
    for name, own in factors.items():
        if is_low_rank(own):
            u, v = (value_of(leaf) for leaf in own)  # pyright: ignore[reportGeneralTypeIssues]
            stored[name] = ops.stored(u, dtype or jnp.float32, -2), ops.stored(v, dtype or jnp.float32, -1)
        else:
            stored[name] = ops.stored(value_of(own), dtype or jnp.float32, -1)  # pyright: ignore[reportArgumentType]
    return Patch(stored, metadata)


def _check_together(patch: Patch, first: PatchMetadata) -> None:
    """Raises PatchMismatchError unless a patch applies to what another does, in a form that sums."""
    own = patch.metadata
    if (own.base, own.heads, own.frame, own.shared_left) != ("canonical", "joint", "phase_free", False):
        raise PatchMismatchError(
            f"interpolate_patches: got base {own.base!r}, heads {own.heads!r}, frame {own.frame!r}, shared_left "
            f"{own.shared_left}; expected 'canonical', 'joint', 'phase_free', no shared left factor"
        )
    for word in ("chunk", "backbone", "content", "local", "lead", "encoding", "layers"):
        found, expected = getattr(own, word), getattr(first, word)
        if found != expected:
            raise PatchMismatchError(f"interpolate_patches: got {word} {found!r}; expected {expected!r} of all patches")
    if not same_storage(own.layout, first.layout):
        raise PatchMismatchError(f"interpolate_patches: got layout {own.layout}; expected {first.layout}")


def _sum_of(patches: Sequence[Patch], weights: Sequence[float]) -> ops.Factors:
    """Adds weighted corrections, in float32: low-rank ones side by side, a channel with a dense one densely."""
    factors: ops.Factors = {}
    for channel in patches[0].metadata.layout.channels:
        name = channel.name
        parts: list[tuple[float, ChannelFactors]] = []
        for weight, patch in zip(weights, patches, strict=True):
            if name in patch.factors:
                own = patch.factors[name]
                parts.append((weight, own.by_layer() if isinstance(own, RaggedFactors) else own))
        if not parts:
            continue

        low = [(weight, own) for weight, own in parts if is_low_rank(own)]
        lefts, rights = [], []
        for weight, own in low:
            u, v = (value_of(leaf).astype(jnp.float32) for leaf in own)  # pyright: ignore[reportGeneralTypeIssues]
            lefts.append(weight * u)
            rights.append(v)
        pair = (jnp.concatenate(lefts, axis=-1), jnp.concatenate(rights, axis=-2)) if low else None
        if pair is not None and len(low) == len(parts):
            factors[name] = pair
            continue

        total: Array | float = 0.0
        for weight, own in parts:
            if not is_low_rank(own):
                total = total + weight * value_of(own).astype(jnp.float32)  # pyright: ignore
        if pair is not None:
            inner = jnp.matmul(*pair, precision=jax.lax.Precision.HIGHEST)
            total = total + inner.reshape(*inner.shape[:2], channel.heads, channel.width)
        factors[name] = jnp.asarray(total)
    return factors


def _reduced(factors: ops.Factors, metadata: PatchMetadata, rank: Rank) -> ops.Factors:
    """Reduces summed factors to a rank by their singular values; a channel of no higher rank stays as it is."""
    ranks = rank_by_channel(metadata.layout, rank, "interpolate_patches", keep=True)
    delta, wanted = {}, []
    for name, own in factors.items():
        size = ranks[name]
        if size is not None and size < 1:
            raise RankError(f"interpolate_patches: got rank {size} for channel {name!r}; expected at least 1")
        channel = metadata.layout.channel(name)
        if is_low_rank(own):
            u, v = (value_of(leaf) for leaf in own)  # pyright: ignore[reportGeneralTypeIssues]
            have = u.shape[-1]
            dense = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST)
            dense = dense.reshape(*dense.shape[:-1], channel.heads, channel.width)
        else:
            dense = value_of(own)  # pyright: ignore[reportArgumentType]
            have = min(dense.shape[1], channel.features)
        if size is not None and size < have:
            delta[name] = dense
            wanted.append((name, min(size, dense.shape[1], channel.features)))
    if not wanted:
        return factors
    plan = FormPlan(ranks=tuple(wanted), method="exact")
    # No row of any channel is padding here.
    tokens = max(value.shape[1] for value in delta.values())
    return factors | ops.jitted_factorise(delta, jax.random.key(0), jnp.int32(tokens), plan=plan)
