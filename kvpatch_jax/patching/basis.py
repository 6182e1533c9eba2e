"""Bases that the patches of a backbone share: the directions of many deficits. Kamera §4.

A deficit's directions depend on the model more than on the chunk, so a patch need only keep its coefficients u: T·M
numbers instead of M·(T + F). The basis is kept once, under its digest.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..cache import (
    AntecedentLike,
    Chunk,
    ChunkKey,
    Patch,
    PatchMetadata,
    antecedent_of,
    examine,
    same_storage,
    trusted_patch,
)
from ..core import AnyArray, Factors, KVLayout, check_uniform, is_low_rank, ops, quantised, value_of
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .form import KVArrays, Rank, check_conditioned, deficit_of, factor_dtype, finite_factors, rank_by_channel


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Basis:
    """Directions of deficits, by channel, that the patches of one backbone share (`fit_basis`).

    Attributes:
      directions: {channel: [L, M, F]}, phase-free; each layer's rows orthonormal, the strongest first.
      layout, backbone: of the deficits.

    Raises:
      LayoutError: an unknown channel, or layers of unlike kinds. ShapeError: directions that do not fit the layout.
    """

    directions: Mapping[str, Float[AnyArray, "L M F"]]
    layout: KVLayout
    backbone: str

    # A store makes bases of files.
    def __post_init__(self) -> None:
        check_uniform(self.layout, "basis")
        for name, value in self.directions.items():
            layers, features = self.layout.layers, self.layout.channel(name).features
            if value.ndim != 3 or value.shape[::2] != (layers, features) or not 1 <= value.shape[1] <= features:
                raise ShapeError(f"basis: got {name!r} of shape {value.shape}; expected [{layers}, M, {features}]")

    @property
    def ranks(self) -> dict[str, int]:
        """Number of directions of each channel."""
        return {name: value.shape[1] for name, value in self.directions.items()}

    @functools.cached_property
    def digest(self) -> str:
        """Digest over the bits of the directions and the backbone, 32 hexadecimal digits, which patches name."""
        # Directions of another backbone are another basis, even if their numbers were equal.
        directions = sorted(self.directions.items())
        fields = [
            self.backbone,
            *[f"{name}\0{examine({name: value}, value.shape[1])[0]}" for name, value in directions],
        ]
        return hashlib.blake2b("\0".join(fields).encode(), digest_size=16).hexdigest()

    def of_layers(self, name: str, layers: tuple[int, ...], rank: int | None) -> Array:
        """Returns the first directions of a channel in some layers, [L', M, F]; all of both without a copy."""
        value = self.directions[name]
        value = value if len(layers) == self.layout.layers else value[np.asarray(layers)]
        return jnp.asarray(value if rank is None or rank >= value.shape[1] else value[:, :rank])

    def check_serves(self, chunk: Chunk) -> None:
        """Raises PatchMismatchError for a chunk of another backbone or layout."""
        if chunk.backbone != self.backbone or not same_storage(self.layout, chunk.layout):
            expected = f"{chunk.backbone!r:.40}, {chunk.layout}, those of {chunk.id!r}"
            raise PatchMismatchError(f"basis: got backbone {self.backbone!r:.40}, {self.layout}; expected {expected}")


def fit_basis(pairs: Iterable[tuple[Chunk, KVArrays]], rank: Rank) -> Basis:
    """Computes the directions that many deficits share: the eigenvectors of Σ ΔᵀΔ in each layer and channel.

    Holds F·F float32 numbers for each layer and channel while it runs, and one deficit at a time.

    Args:
      pairs: chunks of one backbone, each with its conditioned KV. Leave out items that patches are to be tested on.
      rank: directions for every channel, or per channel (0, or leaving one out: none).

    Raises:
      InputError: no pairs. PatchMismatchError: chunks of several backbones. InputError: a rank below 1, or beyond a
      channel's features. LayoutError: an unknown channel. Else as `form_patch` of `conditioned`.
    """
    empty: Basis | None = None
    sums: dict[str, Any] = {}
    for chunk, conditioned in pairs:
        check_conditioned(chunk, conditioned)
        empty = empty or Basis({}, chunk.layout, chunk.backbone)
        empty.check_serves(chunk)
        for name, value in deficit_of(conditioned, chunk.kv, chunk).items():
            sums[name] = sums.get(name, 0.0) + _jitted_gram(value)
    if empty is None:
        raise InputError("basis: got no deficits; expected some chunks, each with its conditioned KV")

    directions = {}
    for name, size in rank_by_channel(empty.layout, rank, "basis").items():
        features = empty.layout.channel(name).features
        if size == 0 and isinstance(rank, Mapping):
            continue
        if not 1 <= size <= features:
            raise InputError(f"basis: got rank {size} for channel {name!r}; expected 1 to {features}")
        # Columns, the weakest first.
        vectors = jnp.linalg.eigh(sums[name])[1]
        directions[name] = jnp.swapaxes(vectors[..., ::-1][..., :size], -1, -2)
    return dataclasses.replace(empty, directions=directions)


@jax.jit
def _jitted_gram(delta: Array) -> Array:
    """Computes ΔᵀΔ of each layer, [L, F, F], heads joined and batches together."""
    flat = ops.flatten_heads(delta)
    flat = flat.reshape(flat.shape[0], -1, flat.shape[-1])
    return jnp.einsum("ltf,ltg->lfg", flat, flat, precision=jax.lax.Precision.HIGHEST)


def form_in_basis(
    chunk: Chunk,
    conditioned: KVArrays,
    basis: Basis,
    antecedent: AntecedentLike,
    rank: int | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms the patch of a chunk in a shared basis: coefficients of KV(B|A) − KV(B|∅), without directions of its own.

    It is applied like any other patch. `Patch.nbytes` leaves out the basis, which the metadata names. The patch of a
    batch of chunks has the basis once for each of them.

    Args:
      chunk, conditioned, antecedent, dtype: as in `form_patch`; dtype is that of the coefficients.
      rank: how many of the directions, the strongest first; None for all.

    Raises:
      PatchMismatchError: a basis of another backbone or layout. InputError: a rank below 1. Else as `form_patch`.
    """
    check_conditioned(chunk, conditioned)
    expect_kind(basis, Basis, "basis", "a Basis, as fit_basis returns it")
    basis.check_serves(chunk)
    if rank is not None and not is_whole(rank, 1):
        raise InputError(f"basis: got rank {rank!r:.80}; expected a whole number from 1, or None")

    delta, layers = deficit_of(conditioned, chunk.kv, chunk), tuple(range(chunk.layout.layers))
    factors: Factors = {}
    for name in basis.directions:
        # Directions are orthonormal, so the best coefficients are products with them: no factorisation.
        v = basis.of_layers(name, layers, rank)
        flat = ops.flatten_heads(delta[name])
        u = jnp.einsum("l...tf,lmf->l...tm", flat, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        if chunk.batch is not None:
            v = jnp.broadcast_to(v[:, None], (len(v), chunk.batch, *v.shape[1:]))
        factors[name] = (quantised(u, factor_dtype(chunk, dtype), -2), v)

    metadata = PatchMetadata(ChunkKey.of(chunk), antecedent_of(antecedent), layers, basis=basis.digest)
    return trusted_patch(finite_factors(factors, f"factors of chunk {chunk.id!r}"), metadata)


def with_basis(patch: Patch, basis: Basis) -> Patch:
    """Returns a patch with the directions of its basis in place of its own, which a store does not keep.

    Raises:
      PatchMismatchError: another basis than the metadata names. ShapeError: coefficients of more directions.
    """
    metadata = patch.metadata
    if metadata.basis != basis.digest:
        raise PatchMismatchError(
            f"patch of chunk {metadata.chunk.id!r}: got one formed in basis {metadata.basis}; expected {basis.digest}"
        )
    factors: dict[str, Any] = {}
    for name, (u, _) in patch.factors.items():  # pyright: ignore[reportGeneralTypeIssues]
        # A patch may use the first few directions only, of some layers; then it has as many columns.
        rank, most = u.shape[-1], basis.ranks.get(name, 0)
        if rank > most:
            raise ShapeError(f"patch: got {rank} directions of {name!r}; expected at most {most}")
        factors[name] = (jax.tree.map(jnp.asarray, u), basis.of_layers(name, metadata.layers, rank))
    return trusted_patch(factors, metadata)


def check_in_basis(patch: Patch, basis: Basis) -> None:
    """Raises PatchMismatchError unless a patch's directions are those of a basis, unchanged."""
    expected = with_basis(patch, basis).factors
    for name, factors in patch.factors.items():
        first, second = (value_of(pair[1]) if is_low_rank(pair) else pair for pair in (factors, expected[name]))
        if first is not second and not np.array_equal(np.asarray(first), np.asarray(second)):
            raise PatchMismatchError(
                f"patch of chunk {patch.metadata.chunk.id!r}: got directions of {name!r} that are not those of basis "
                f"{basis.digest}; expected them as they were formed"
            )
