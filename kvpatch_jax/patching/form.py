"""Forming the patch of a chunk after an antecedent: the deficit, its rank, its factors and their metadata.

Kamera §3 and App. A, with one change: the deficit is taken and added before the rotation, in the phase-free frame, so
that one patch serves every position at a lower rank.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from ..cache import (
    AntecedentLike,
    Chunk,
    ChunkKey,
    KVArray,
    Patch,
    PatchMetadata,
    antecedent_of,
    check_finite,
    trusted_patch,
)
from ..core import PARTS, Factors, FormPlan, KVLayout, arrays_of, expect_frame, factor_bits, ops, quantised
from ..errors import InputError, LayoutError, ShapeError, WorseThanBlindError
from ..utils.kinds import expect_kind, is_whole
from .byte_budget import DEFAULT_SIZE, ByteBudget, budget_of, form_ragged
from .information_weights import InformationWeights, check_weights
from .readout_error import readout_errors

Method = Literal["randomised", "exact"]
KVArrays = Mapping[str, KVArray]
Rank = int | Mapping[str, int]
"""M of every channel, or of some: by channel, or by the words of `GROUPS`."""
Size = Rank | ByteBudget | str
"""How large a patch may be: a rank, or bytes: a `ByteBudget`, or text such as "12 kB", or "15 %" of the chunk's KV."""
DEFAULT_RANK = 16
"""Rank of the patches of a batch, which have no budget of bytes, where none is named."""
FEW_BITS = ("int4", "int5")
GROUPS = ("rows", "transition")
"""Words for all channels with a row per token, and for all parts of a transition, where ranks are named."""


def form_patch(
    chunk: Chunk,
    conditioned: KVArrays,
    rank: Size | None,
    antecedent: AntecedentLike,
    *,
    layers: Iterable[int] | None = None,
    dense: bool = True,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: InformationWeights | None = None,
    force: bool = False,
) -> Patch:
    """Forms the patch of a chunk after an antecedent: thin factors of KV(B|A) − KV(B|∅). Kamera App. A.

    What the factors leave is measured as readout error and kept in the metadata (`Patch.predicted`).

    Args:
      chunk: the canonical. The patch of a batch of chunks is a batch too: every factor has the axis B after L.
      conditioned: KV(B|A), phase-free, {channel: [L, T, K, H]} or [L, B, T, K, H], of the chunk's shapes.
      rank: M for every channel, or one per channel (0, or leaving a channel out, gives it no patch). Of a hybrid model
        {"rows": M, "transition": N} names all channels of a kind, either or both. A larger rank than min(T, F), of a
        transition's part min(R, F), is reduced to that. Or bytes, as a `ByteBudget` or as text ("12 kB", or "15 %" of
        the chunk's KV in 16 bits): a rank for each layer and channel, so that the patch holds most of the deficit
        within these bytes; of one chunk, from exact directions whatever `method` says. None: "15 %", of a batch 16.
      antecedent: the chunks that precede this one, in order: chunks, ids, or members with the identities of their KV.
        Ids and chunks mean that each was prefilled there.
      layers: layers to patch; None for all.
      dense: store a channel's deficit as it is where factors would not be smaller, M·(T + F) ≥ T·F; where bytes are
        given, in 4 or 5 bits if that takes no more of them than factors and leaves less readout error. False keeps
        factors, of which `truncate` makes smaller ranks.
      method: "randomised" (deterministic by `key`) or "exact".
      key: a typed PRNG key; None is `jax.random.key(0)`.
      dtype: of the factors, as `quantise` takes it; None is the chunk's, of bytes int4.
      weights: of bytes, how much an error in each feature counts (`calibrate_sensitivity`).
      force: form it also where its readout error is not below that of the chunk without it.

    Raises:
      WorseThanBlindError: the patch would not help.
      InputError: a rank below 1, or bytes that hold no direction. LayoutError, ShapeError, NotFiniteError:
      `conditioned` or the chunk do not fit. InputError: layers out of range, a dtype that factors cannot have, or
      weights with a rank. PatchMismatchError: weights of another backbone or layout.
    """
    check_conditioned(chunk, conditioned)
    covered = check_layers(layers, chunk.layout.layers)
    metadata = PatchMetadata(ChunkKey.of(chunk), antecedent_of(antecedent), covered)
    delta = deficit_of(conditioned, chunk.kv, chunk)
    if layers is not None:
        delta = {name: value for name, value in chunk.layout.of_layers(delta, covered).items() if len(value)}
    size = (DEFAULT_SIZE if chunk.batch is None else DEFAULT_RANK) if rank is None else rank
    patch = from_deficit(
        chunk, delta, size, metadata, dense=dense, method=method, key=key, dtype=dtype, weights=weights
    )
    patch = _measured(patch, chunk, conditioned)
    if dense and isinstance(size, ByteBudget | str):
        patch = _in_few_bits_where_better(patch, chunk, conditioned, delta)
    if patch.factors and not force and (patch.predicted or 0.0) >= 1:
        patched, blind = patch.metadata.errors or (0.0, 0.0)
        raise WorseThanBlindError(
            f"form_patch: got rank {rank!r:.80} for chunk {chunk.id!r}, which leaves a readout error of {patched:.3g}; "
            f"expected less than {blind:.3g}, that without a patch: a larger rank, or force=True"
        )
    return patch


def _measured(patch: Patch, chunk: Chunk, conditioned: KVArrays) -> Patch:
    """Returns a patch with its readout errors in its metadata."""
    errors = readout_errors(chunk, conditioned, patch.operands, patch.metadata.layers)
    return trusted_patch(patch.factors, dataclasses.replace(patch.metadata, errors=errors))


def _in_few_bits_where_better(patch: Patch, chunk: Chunk, conditioned: KVArrays, delta: Mapping[str, Any]) -> Patch:
    """Returns the deficit in 4 or 5 bits in place of factors, where it takes no more bytes and leaves less error."""
    best = patch
    for dtype in FEW_BITS:
        numbers = sum(value.size for name, value in delta.items() if name in patch.factors)
        # Codes alone: most patches are far smaller, and nothing is packed to find that out.
        if numbers * int(dtype[3:]) > 8 * patch.nbytes:
            continue
        factors = {name: quantised(delta[name], dtype, -1) for name in patch.factors}
        packed = trusted_patch(factors, patch.metadata)
        if packed.nbytes <= patch.nbytes:
            packed = _measured(packed, chunk, conditioned)
            better = (packed.predicted or 0.0) < (best.predicted or 0.0)
            best = packed if better else best
    return best


def from_deficit(
    chunk: Chunk,
    delta: Mapping[str, Float[Array, "L *B T _ _"]],
    rank: Size,
    metadata: PatchMetadata,
    *,
    dense: bool = True,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: InformationWeights | None = None,
) -> Patch:
    """Forms the patch of a deficit over the layers of its metadata; arguments and errors as of `form_patch`."""
    stored_dtype = factor_dtype(chunk, dtype, rank)
    budget = budget_of(chunk, rank) if isinstance(rank, str) else rank
    what = f"factors of chunk {chunk.id!r} in {stored_dtype}"
    if weights is not None:
        check_weights(weights)
        if not isinstance(budget, ByteBudget):
            raise InputError(f"patch: got weights with rank {rank!r:.80}; expected bytes")
    if isinstance(budget, ByteBudget):
        by_feature = None if weights is None else weights.of_layers(chunk, metadata.layers)
        return trusted_patch(form_ragged(delta, chunk.length, budget, stored_dtype, what, by_feature), metadata)

    if method not in ("randomised", "exact"):
        raise InputError(f"patch: got method {method!r:.80}; expected 'randomised' or 'exact'")
    ranks = tuple([pair for pair in choose_ranks(chunk, budget, dense) if pair[0] in delta])
    plan = FormPlan(ranks, method, stored_dtype)
    # No key means a fixed one: the same deficit gives the same patch.
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise InputError(f"patch: got key {key!r:.80}; expected a typed PRNG key, such as jax.random.key(0)")
    factors = ops.jitted_factorise(dict(delta), key, np.int32(chunk.length), plan=plan)
    return trusted_patch(finite_factors(factors, what), metadata)


# ---------------------------------------------------------------------------------------------------------- arguments


def check_conditioned(chunk: Chunk, conditioned: KVArrays, what: str = "conditioned KV") -> None:
    """Checks that KV has a chunk's frame, layout and shapes, and is finite.

    Raises:
      InputError: not a chunk. LayoutError, ShapeError: the KV does not fit it.
      NotFiniteError: NaN or infinity.
    """
    expect_kind(chunk, Chunk, "chunk", "a Chunk")
    what = f"{what} of chunk {chunk.id!r}"
    expect_frame(conditioned, what, "phase_free")
    chunk.layout.check(conditioned, what)
    for name, value in conditioned.items():
        if value.shape != chunk.kv[name].shape:
            raise ShapeError(f"{what}[{name!r}]: got shape {value.shape}; expected the chunk's {chunk.kv[name].shape}")
    check_finite(conditioned, what)


def deficit_of(conditioned: KVArrays, base: KVArrays, chunk: Chunk) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Computes conditioned − base in float32, zero on the chunk's padding."""
    return ops.jitted_deficit(arrays_of(conditioned), arrays_of(base), np.int32(chunk.length))


def check_layers(layers: Iterable[int] | None, total: int) -> tuple[int, ...]:
    """Returns the layers that a patch covers, ascending; all of `total` for None.

    Raises:
      InputError: no layers, or some out of range.
    """
    if layers is None:
        return tuple(range(total))
    expect_kind(layers, Iterable, "patch: layers", "numbers of layers, or None for all")
    listed = list(layers)
    if not listed or not all(is_whole(layer, 0) and layer < total for layer in listed):
        raise InputError(f"patch: got layers {listed!r:.80}; expected some of 0 to {total - 1}")
    return tuple(sorted({int(layer) for layer in listed}))


def rank_by_channel(layout: KVLayout, rank: Rank | None, what: str, *, keep: bool = False) -> dict[str, Any]:
    """Returns the rank of every channel of a layout; its bounds depend on the operation.

    Args:
      rank: one for all channels, or one per channel; a channel that a mapping leaves out gets 0. "rows" in a mapping
        stands for all channels with a row per token, "transition" for all parts of a transition; channels that it
        names besides have their own.
      what: begins messages.
      keep: accept None for a channel that stays as it is, and give it to those that a mapping leaves out.

    Raises:
      InputError: not whole numbers. LayoutError: an unknown channel.
    """
    for number in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not (keep and number is None) and not is_whole(number, -(1 << 62)):
            raise InputError(f"{what}: got rank {rank!r:.80}; expected a whole number from 1, or one for each channel")
    if not isinstance(rank, Mapping):
        return dict.fromkeys(layout.names, rank)

    ranks: dict[str, Any] = dict.fromkeys(layout.names, None if keep else 0)
    for word, channels in zip(GROUPS, (layout.token_channels, layout.parts), strict=True):
        if word in rank and not channels:
            raise LayoutError(f"{what}: got a rank for {word!r}; expected a layout that has some, got {layout.names}")
        if word in rank:
            ranks |= dict.fromkeys([channel.name for channel in channels], rank[word])
    for name, number in rank.items():
        if name not in GROUPS:
            ranks[layout.channel(name).name] = number
    return ranks


def choose_ranks(chunk: Chunk, rank: Rank, dense: bool = True) -> tuple[tuple[str, int | None], ...]:
    """Returns the rank of each channel that gets a patch, at most min(T, F); None where it is stored dense.

    Raises:
      InputError: a rank below 1. LayoutError: an unknown channel.
    """
    chosen: list[tuple[str, int | None]] = []
    for name, size in rank_by_channel(chunk.layout, rank, "patch").items():
        # A mapping leaves channels out, or gives them rank 0.
        if size == 0 and isinstance(rank, Mapping):
            continue
        if size < 1:
            raise InputError(f"patch: got rank {size} for channel {name!r}; expected at least 1")

        # The parts of a transition have rows of their own, and no padding.
        kv, live = chunk.kv[name], None if name in PARTS else chunk.length
        rows, features = kv.shape[-3], kv.shape[-2] * kv.shape[-1]
        size = min(int(size), live or rows, features)
        # Dense where factors would take as many numbers: M·(T + F) ≥ T·F.
        chosen.append((name, None if dense and size * (rows + features) >= rows * features else size))
    return tuple(chosen)


def storable_dtype(dtype: jax.typing.DTypeLike, what: str) -> str:
    """Returns the name of a dtype that factors may have: a word of few bits as it is, any other as NumPy names it.

    Raises:
      InputError: another one, such as int32, to which factors would be rounded.
    """
    if factor_bits(dtype) is not None:
        return dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    # None is float64 to NumPy.
    try:
        kind = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not (jnp.issubdtype(kind, jnp.floating) or kind == jnp.int8):
        raise InputError(f"{what}: got dtype {dtype!r:.80}; expected a floating dtype, int8, or 'int2' to 'int7'")
    return kind.name


def factor_dtype(chunk: Chunk, dtype: jax.typing.DTypeLike | None, rank: Any = None) -> str:
    """Returns the name of the dtype of a patch's factors; int2 to int7 are packed in groups.

    None is that of the chunk's rows, and of a `ByteBudget` int4: of a number of bytes, 4 bits and more directions leave
    less error.

    Raises:
      InputError: a dtype that `quantise` does not take either.
    """
    if dtype is not None:
        return storable_dtype(dtype, "patch")
    return "int4" if isinstance(rank, ByteBudget | str) else jnp.dtype(chunk.kv[chunk.layout.names[0]].dtype).name


def finite_factors(factors: Factors, what: str) -> Factors:
    """Returns factors after checking that all of them are finite.

    Raises:
      NotFiniteError: NaN or infinity, such as float16's numbers beyond 65504.
    """
    leaves = []
    for name, own in factors.items():
        # int8 values are always finite; their scales are looked at.
        leaves += [(name, leaf) for leaf in jax.tree.leaves(own) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    check_finite(leaves, what)
    return factors
