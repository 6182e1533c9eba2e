"""Smaller patches: fewer directions, fewer layers, fewer bits."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..cache import Patch, check_finite
from ..core import (
    ChannelFactors,
    KVLayout,
    PackedArray,
    RaggedFactors,
    factor_bits,
    is_low_rank,
    is_packed,
    ops,
    quantised,
    resize,
    value_of,
)
from ..errors import InputError, LayoutError, RankError
from ..utils.kinds import expect_kind, is_whole

Rank = int | Mapping[str, int]
"""M of every channel, or of some: by channel, or by the words of `GROUPS`."""

GROUPS = ("rows", "transition")
"""Words for all channels with a row per token, and for all parts of a transition, where ranks are named."""


def _rank_slice(leaf: ops.Leaf, rank: int, axis: int) -> ops.Leaf:
    """Returns the first `rank` directions along a negative axis, of values and scales alike."""
    if isinstance(leaf, PackedArray):
        return resize(leaf, axis, rank)
    return jax.tree.map(lambda part: jax.lax.slice_in_dim(part, 0, rank, axis=part.ndim + axis), leaf)


def rank_by_channel(layout: KVLayout, rank: Rank | None, what: str, *, keep: bool = False) -> dict[str, Any]:
    """Returns the rank of every channel of a layout; its bounds depend on the operation.

    Args:
      rank: one for all channels, or one per channel; a channel that a mapping leaves out gets 0. "rows" in a mapping
        stands for all channels with a row per token, "transition" for all parts of a transition; channels that it
        names besides have their own.
      what: begins messages.
      keep: accept None for a channel that stays as it is, and give it to those that a mapping leaves out.

    Raises:
      RankError: not whole numbers. LayoutError: an unknown channel.
    """
    for number in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not (keep and number is None) and not is_whole(number, -(1 << 62)):
            raise RankError(f"{what}: got rank {rank!r:.80}; expected a whole number from 1, or one for each channel")
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


def truncate(patch: Patch, rank: Rank) -> Patch:
    """Truncates a patch to a smaller rank: a slice, because singular values descend.

    Args:
      rank: for every low-rank channel, or per channel (channels left out stay). Dense channels stay dense.

    Raises:
      RankError: below 1 or above what the patch has. LayoutError: an unknown channel.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    ranks = rank_by_channel(patch.metadata.layout, rank, "truncate", keep=True)

    factors: dict[str, ChannelFactors] = {}
    for name, own in patch.factors.items():
        wanted, have = ranks[name], patch.ranks[name]
        if wanted is None or have is None:
            factors[name] = own
            continue
        if not 1 <= wanted <= have:
            raise RankError(f"truncate: got rank {wanted} for channel {name!r}; expected 1 to {have}")
        if isinstance(own, RaggedFactors):
            factors[name] = _with_rows(own, np.asarray(own.rows)[:, :wanted])
            continue
        factors[name] = (_rank_slice(own[0], wanted, -1), _rank_slice(own[1], wanted, -2))  # pyright: ignore

    return Patch(factors, patch.metadata)


def _with_rows(factors: RaggedFactors, rows: Int[np.ndarray, "L M"]) -> RaggedFactors:
    """Returns ragged factors with some of their directions: those of `rows`, in the order in which layers have them."""
    total = factors.v.shape[0]
    kept = rows[rows < total]
    place = np.full(total + 1, len(kept), np.int32)
    place[kept] = np.arange(len(kept))
    u, v = jax.tree.map(lambda leaf: leaf[kept], (factors.u, factors.v))
    return RaggedFactors(u, v, jnp.asarray(place[np.minimum(rows, total)].astype(rows.dtype)))


# One program for all leaves.
@jax.jit
def _rows_of(factors: ops.Factors, rows: Int[Array | np.ndarray, " kept"]) -> ops.Factors:
    return jax.tree.map(lambda leaf: leaf[rows], factors)


def keep_layers(patch: Patch, layers: Iterable[int]) -> Patch:
    """Keeps a patch on some layers; the others get no correction and take no bytes. Kamera §4, the deep-only patch.

    Raises:
      InputError: no layers, or layers that the patch does not cover.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    expect_kind(layers, Iterable, "keep_layers: layers", "numbers of layers")
    listed, have = list(layers), patch.metadata.layers
    if not listed or not all(is_whole(layer, 0) and layer in have for layer in listed):
        raise InputError(f"keep_layers: got layers {listed!r:.80}; expected some of {have}")

    # Factors have rows for the patch's own layers, which need not be all of the model's.
    kept = tuple(sorted({int(layer) for layer in listed}))
    factors, plain = dict[str, Any](), dict[tuple[int, ...], dict[str, Any]]()
    for name, own in patch.factors.items():
        own_layers = [layer for layer in have if layer in patch.metadata.layout.layers_of(name)]
        rows = tuple(own_layers.index(layer) for layer in kept if layer in own_layers)
        # A channel that none of the layers keeps has nothing left.
        if rows and isinstance(own, RaggedFactors):
            factors[name] = _with_rows(own, np.asarray(own.rows)[np.asarray(rows)])
        elif rows:
            plain.setdefault(rows, {})[name] = own
    for rows, own in plain.items():
        factors |= _rows_of(own, np.asarray(rows, np.int32))
    factors = {name: factors[name] for name in patch.factors if name in factors}
    return Patch(factors, dataclasses.replace(patch.metadata, layers=kept))


def storable_dtype(dtype: jax.typing.DTypeLike, what: str) -> Any:
    """Returns a dtype that factors may have: a word of few bits as it is, any other as a NumPy dtype.

    Raises:
      InputError: another one, such as int32, to which factors would be rounded.
    """
    if factor_bits(dtype) is not None:
        return dtype
    # None is float64 to NumPy.
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not (jnp.issubdtype(found, jnp.floating) or found == jnp.int8):
        raise InputError(f"{what}: got dtype {dtype!r:.80}; expected a floating dtype, int8, or 'int2' to 'int7'")
    return found


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
            u, v = own[0], own[1]  # pyright: ignore
            # A shared basis stays as it is: other patches hold it too.
            if patch.metadata.basis is None:
                v = quantised(value_of(v), target, -1)
            factors[name] = (quantised(value_of(u), target, -2), v)
        else:
            factors[name] = quantised(value_of(own), target, -1)  # pyright: ignore

    return Patch(finite_factors(factors, f"patch of chunk {patch.metadata.chunk!r} in {target}"), patch.metadata)


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


def finite_factors(factors: ops.Factors, what: str) -> ops.Factors:
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
