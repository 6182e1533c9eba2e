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

from ..cache import AntecedentLike, Chunk, Patch, PatchMetadata, antecedent_of, examine, fingerprint_of, same_storage
from ..core import AnyArray, Factors, KVLayout, check_uniform, is_low_rank, ops, quantised, value_of
from ..errors import InputError, PatchMismatchError, RankError, ShapeError
from .compress import Rank, finite_factors, rank_by_channel
from .factors import KVArrays, check_conditioned, check_layers, deficit_of, factor_dtype, metadata_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Basis:
    """Directions of deficits, by channel, that the patches of one backbone share.

    Attributes:
      directions: {channel: [L, M, F]}, phase-free; each layer's rows orthonormal, the strongest first.
      layout, backbone: of the deficits.

    Raises:
      LayoutError: an unknown channel, or layers of unlike kinds. ShapeError: directions that do not fit the layout.
    """

    directions: Mapping[str, Float[AnyArray, "L M F"]]
    layout: KVLayout
    backbone: str

    def __post_init__(self) -> None:
        fingerprint_of(self.backbone, "basis")
        check_uniform(self.layout, "basis")
        for name, value in self.directions.items():
            wanted, shape = self.layout.channel(name).features, value.shape
            if len(shape) != 3 or (shape[0], shape[2]) != (self.layout.layers, wanted) or not 1 <= shape[1] <= wanted:
                raise ShapeError(f"basis: got {name!r} of shape {shape}; expected [{self.layout.layers}, M, {wanted}]")

    def __repr__(self) -> str:
        return f"Basis({self.ranks}, backbone {self.backbone[:16]!r}, {self.digest})"

    @property
    def ranks(self) -> dict[str, int]:
        """Number of directions of each channel."""
        return {name: value.shape[1] for name, value in self.directions.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the directions."""
        return sum(int(value.nbytes) for value in self.directions.values())

    @functools.cached_property
    def digest(self) -> str:
        """Digest over the bits of the directions and the backbone, 32 hexadecimal digits, which patches name."""
        # Directions of another backbone are another basis, even if their numbers were equal.
        fields = [self.backbone]
        for name, value in sorted(self.directions.items()):
            fields.append(f"{name}\0{examine({name: value}, value.shape[1])[0]}")
        return hashlib.blake2b("\0".join(fields).encode(), digest_size=16).hexdigest()

    def rows(self, name: str, layers: tuple[int, ...], rank: int) -> AnyArray:
        """Returns the first `rank` directions of some layers, [L', M, F]; without a copy where that is all of them."""
        value = self.directions[name]
        if len(layers) < self.layout.layers:
            value = value[np.asarray(layers)]
        return value if rank == value.shape[1] else value[:, :rank]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DeficitSum:
    """Running sum ΣΔᵀΔ of deficits in each layer and channel, from which `basis` gives the directions that they share.

    A deficit that comes later is added without the earlier ones. Of one chunk's antecedents it gives the basis of that
    chunk, of many chunks' that of a backbone.

    Attributes:
      layout, backbone: of the deficits.
      sums: {channel: float32 [L, F, F]}; empty of no deficits.
      count: how many deficits.
    """

    layout: KVLayout
    backbone: str
    sums: Mapping[str, Float[AnyArray, "L F F"]] = dataclasses.field(default_factory=dict)
    count: int = 0

    def __repr__(self) -> str:
        return f"DeficitSum({self.count} deficits, backbone {self.backbone[:16]!r})"

    def add(self, chunk: Chunk, conditioned: KVArrays) -> "DeficitSum":
        """Adds KV(B|A) − KV(B|∅) of one more chunk or antecedent.

        Raises:
          PatchMismatchError: a chunk of another backbone or layout. Else as `form_patch` of `conditioned`.
        """
        check_conditioned(chunk, conditioned)
        _check_same_model(self.backbone, self.layout, chunk)
        sums = {}
        for name, value in deficit_of(conditioned, chunk.kv, chunk).items():
            sums[name] = self.sums.get(name, 0.0) + _jitted_gram(value)
        return dataclasses.replace(self, sums=sums, count=self.count + 1)

    def basis(self, rank: Rank, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Basis:
        """Computes the directions of largest energy: the eigenvectors of the sums.

        Args:
          rank: directions for every channel, or per channel (0, or leaving one out: none).

        Raises:
          InputError: no deficits. RankError: a rank below 1, or beyond a channel's features. LayoutError: an unknown
          channel.
        """
        if not self.count:
            raise InputError("basis: got no deficits; expected some chunks, each with its conditioned KV")

        directions = {}
        for name, size in rank_by_channel(self.layout, rank, "basis").items():
            features = self.layout.channel(name).features
            if size == 0 and isinstance(rank, Mapping):
                continue
            if not 1 <= size <= features:
                raise RankError(f"basis: got rank {size} for channel {name!r}; expected 1 to {features}")
            # Columns, the weakest first.
            vectors = jnp.linalg.eigh(jnp.asarray(self.sums[name]))[1]
            directions[name] = jnp.swapaxes(vectors[..., ::-1][..., :size], -1, -2).astype(dtype)

        return Basis(directions, self.layout, self.backbone)


def fit_basis(
    pairs: Iterable[tuple[Chunk, KVArrays]], rank: Rank, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> Basis:
    """Computes the directions that many deficits share: the eigenvectors of Σ ΔᵀΔ in each layer and channel.

    Holds F·F float32 numbers for each layer and channel while it runs, and one deficit at a time.

    Args:
      pairs: chunks of one backbone, each with its conditioned KV. Leave out items that patches are to be tested on.
      rank: directions for every channel, or per channel (0, or leaving one out: none).

    Raises:
      InputError: no pairs. PatchMismatchError: chunks of several backbones. RankError: a rank below 1, or beyond a
      channel's features. LayoutError: an unknown channel. Else as `form_patch` of `conditioned`.
    """
    total: DeficitSum | None = None
    for chunk, conditioned in pairs:
        check_conditioned(chunk, conditioned)
        # Summed as they come, so that one deficit is held at a time.
        total = (total or DeficitSum(chunk.layout, chunk.backbone)).add(chunk, conditioned)

    if total is None:
        raise InputError("basis: got no deficits; expected some chunks, each with its conditioned KV")
    return total.basis(rank, dtype=dtype)


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
    layers: Iterable[int] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Patch:
    """Forms the patch of a chunk in a shared basis: coefficients of KV(B|A) − KV(B|∅), without directions of its own.

    It is applied like any other patch. `Patch.nbytes` leaves out the basis, which the metadata names. The patch of a
    batch of chunks has the basis once for each of them.

    Args:
      chunk, conditioned, antecedent, layers, dtype: as in `form_patch`; dtype is that of the coefficients.
      rank: how many of the directions, the strongest first; None for all.

    Raises:
      PatchMismatchError: a basis of another backbone or layout. RankError: a rank below 1. Else as `form_patch`.
    """
    check_conditioned(chunk, conditioned)
    behind = antecedent_of(antecedent)
    _check_same_model(basis.backbone, basis.layout, chunk)
    if rank is not None and rank < 1:
        raise RankError(f"basis: got rank {rank}; expected at least 1, or None")

    kept = check_layers(layers, chunk.layout.layers)
    delta = deficit_of(conditioned, chunk.kv, chunk)

    factors: Factors = {}
    for name, have in basis.ranks.items():
        # Directions are orthonormal, so the best coefficients are products with them: no factorisation.
        v = jnp.asarray(basis.rows(name, kept, have if rank is None else min(rank, have)))
        flat = ops.flatten_heads(delta[name])[np.asarray(kept)]
        u = jnp.einsum("l...tf,lmf->l...tm", flat, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        if chunk.batch is not None:
            v = jnp.broadcast_to(v[:, None], (len(v), chunk.batch, *v.shape[1:]))
        factors[name] = (quantised(u, factor_dtype(chunk, dtype), -2), v)

    metadata = metadata_of(chunk, "canonical", behind, layers=kept, basis=basis.digest)
    return Patch(finite_factors(factors, f"factors of chunk {chunk.id!r}"), metadata)


def _check_same_model(backbone: str, layout: KVLayout, chunk: Chunk) -> None:
    if chunk.backbone != backbone:
        raise PatchMismatchError(f"basis: got backbone {backbone!r}; expected {chunk.backbone!r}, that of {chunk.id!r}")
    if not same_storage(layout, chunk.layout):
        raise PatchMismatchError(f"basis: got layout {layout}; expected {chunk.layout}")


def coefficients(patch: Patch) -> dict[str, Any]:
    """Returns the coefficients of a patch in a basis: u by channel."""
    return {name: factors[0] for name, factors in patch.factors.items() if is_low_rank(factors)}  # pyright: ignore


def with_basis(own: Mapping[str, Any], metadata: PatchMetadata, basis: Basis) -> Patch:
    """Returns the patch of coefficients that were kept without their basis.

    Args:
      own: u by channel, as `coefficients` returns them.
      metadata: of the patch.

    Raises:
      PatchMismatchError: another basis than the metadata names. ShapeError: coefficients of more directions.
    """
    if metadata.basis != basis.digest:
        raise PatchMismatchError(
            f"patch of chunk {metadata.chunk!r}: got one formed in basis {metadata.basis}; expected {basis.digest}"
        )

    # A patch may use the first few directions only; then it has as many columns.
    factors: dict[str, Any] = {}
    for name, u in own.items():
        rank = u.shape[-1]
        if rank > basis.ranks.get(name, 0):
            raise ShapeError(f"patch: got {rank} directions of {name!r}; expected at most {basis.ranks.get(name, 0)}")
        factors[name] = (jax.tree.map(jnp.asarray, u), jnp.asarray(basis.rows(name, metadata.layers, rank)))

    return Patch(factors, metadata)


def check_in_basis(patch: Patch, basis: Basis) -> None:
    """Checks that a patch's directions are those of a basis, unchanged.

    Raises:
      PatchMismatchError.
    """
    wanted = with_basis(coefficients(patch), patch.metadata, basis)
    for name, factors in patch.factors.items():
        own, other = (value_of(pair[1]) for pair in (factors, wanted.factors[name]))  # pyright: ignore
        if own is not other and not np.array_equal(np.asarray(own), np.asarray(other)):
            raise PatchMismatchError(
                f"patch of chunk {patch.metadata.chunk!r}: got directions of {name!r} that are not those of basis "
                f"{basis.digest}; expected them as they were formed"
            )
