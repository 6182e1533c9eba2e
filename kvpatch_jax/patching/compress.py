"""Making a patch smaller: fewer directions, fewer layers, fewer bits."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..cache import Patch, check_finite, check_is_patch
from ..core import ChannelFactors, Quantised, is_low_rank, ops, value_of
from ..errors import InputError, RankError
from ..utils.kinds import expect_kind, is_whole

Rank = int | Mapping[str, int]


def _rank_slice(leaf: ops.Leaf, rank: int, axis: int) -> ops.Leaf:
    cut = lambda value: jax.lax.slice_in_dim(value, 0, rank, axis=value.ndim + axis)
    return Quantised(cut(leaf.values), cut(leaf.scale)) if isinstance(leaf, Quantised) else cut(leaf)


def check_whole_ranks(rank: Any, what: str, *, dense: bool = False) -> None:
    """Refuses ranks that are no whole numbers; how large they may be depends on what they are for.

    Args:
      rank: one, or one for each channel. dense: whether None is one, of a channel that has no factors.

    Raises:
      RankError: `what` begins the message.
    """
    for number in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not (dense and number is None) and not is_whole(number, -(1 << 62)):
            raise RankError(f"{what}: rank {rank!r:.80}; expected a whole number from 1, or one for each channel")


def truncate(patch: Patch, rank: Rank) -> Patch:
    """Cuts a patch to a smaller rank: a slice, since singular values fall from left to right.

    Args:
      rank: for every low-rank channel, or per channel (channels left out stay). Dense channels stay dense.

    Raises:
      RankError: below 1 or above what the patch has, or several for channels that share their left factor. LayoutError:
      a channel that is not there.
    """
    check_is_patch(patch)
    check_whole_ranks(rank, "truncate", dense=True)
    for name in rank if isinstance(rank, Mapping) else ():
        patch.metadata.layout.channel(name)
    if patch.metadata.shared_left and isinstance(rank, Mapping):
        left = {name: rank.get(name, have) for name, have in patch.ranks.items() if have}
        if len(set(left.values())) > 1:
            raise RankError(f"truncate: ranks {left} with a shared left factor; expected one rank for all of them")
    factors: dict[str, ChannelFactors] = {}
    for name, own in patch.factors.items():
        wanted = rank.get(name) if isinstance(rank, Mapping) else rank
        have = patch.ranks[name]
        if wanted is None or have is None:
            factors[name] = own
            continue
        if not 1 <= wanted <= have:
            raise RankError(f"truncate: rank {wanted} for channel {name!r}; expected 1 to {have}")
        factors[name] = (_rank_slice(own[0], wanted, -1), _rank_slice(own[1], wanted, -2))  # pyright: ignore
    return Patch(factors, patch.metadata)


@jax.jit
def _rows_of(factors: ops.Factors, rows: Int[Array | np.ndarray, " kept"]) -> ops.Factors:
    return jax.tree.map(lambda leaf: leaf[rows], factors)


def keep_layers(patch: Patch, layers: Iterable[int]) -> Patch:
    """Keeps a patch on some layers; the others get no correction and take no bytes. Kamera §4, the deep-only patch.

    Raises:
      InputError: none, or layers that the patch does not cover.
    """
    check_is_patch(patch)
    expect_kind(layers, Iterable, "keep_layers: layers", "numbers of layers")
    given = list(layers)
    if not all(is_whole(layer, 0) for layer in given):
        raise InputError(f"keep_layers: layers {given!r:.80}; expected some of {patch.metadata.layers}")
    kept = tuple(sorted({int(layer) for layer in given}))
    missing = [layer for layer in kept if layer not in patch.metadata.layers]
    if missing or not kept:
        raise InputError(f"keep_layers: layers {kept}; expected some of {patch.metadata.layers}")
    rows = np.asarray([patch.metadata.layers.index(layer) for layer in kept])
    factors = _rows_of(dict(patch.factors), rows)
    return Patch(factors, dataclasses.replace(patch.metadata, layers=kept))


def quantise(patch: Patch, dtype: jax.typing.DTypeLike) -> Patch:
    """Brings a patch to a smaller dtype: 8 bits with one float32 scale per direction, wider ones by rounding.

    Raises:
      InputError: neither a floating dtype nor int8. NotFiniteError: factors beyond the dtype's range (float16's).
    """
    check_is_patch(patch)
    try:
        target = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        target = None
    if target is None:
        raise InputError(f"quantise: dtype {dtype!r:.80}; expected a floating dtype or int8")
    if not jnp.issubdtype(target, jnp.floating) and target != jnp.int8:
        raise InputError(f"quantise: dtype {target}; expected a floating dtype or int8")
    convert = lambda leaf, axis: ops.stored(value_of(leaf), target, axis)
    factors: dict[str, ChannelFactors] = {}
    for name, own in patch.factors.items():
        if is_low_rank(own):
            u, v = own[0], own[1]  # pyright: ignore
            # A shared basis stays as it is: others hold it too.
            factors[name] = (convert(u, -2), v if patch.metadata.basis is not None else convert(v, -1))
        else:
            factors[name] = convert(own, -1)
    return Patch(finite_factors(factors, f"patch of chunk {patch.metadata.chunk!r} in {target}"), patch.metadata)


def finite_factors(factors: ops.Factors, what: str) -> ops.Factors:
    """Returns factors after a look at every one of them.

    Raises:
      NotFiniteError: one is NaN or infinite, as float16 makes of what is beyond 65504.
    """
    leaves = [(name, leaf) for name, own in factors.items() for leaf in jax.tree.leaves(own)]
    check_finite([(name, leaf) for name, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)], what)
    return factors
