"""From a deficit to the factors of a patch: checks, ranks, factorisation and metadata."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..cache import Antecedent, Base, Chunk, KVArray, Patch, PatchMetadata, check_finite, content_of
from ..core import FormPlan, arrays_of, expect_frame, ops
from ..errors import InputError, RankError, ShapeError
from ..utils.kinds import expect_kind
from .byte_budget import ByteBudget, form_ragged
from .compress import Rank, finite_factors, rank_by_channel, storable_dtype
from .information_weights import InformationWeights, check_weights

Method = Literal["randomised", "exact"]
KVArrays = Mapping[str, KVArray]


def check_alike(chunk: Chunk, kv: KVArrays, what: str) -> None:
    """Checks that KV has a chunk's frame, layout and shapes; reads no values.

    Raises:
      InputError: not a chunk. FrameError, LayoutError, ShapeError, DtypeError: the KV does not fit it.
    """
    expect_kind(chunk, Chunk, "chunk", "a Chunk")
    what = f"{what} of chunk {chunk.id!r}"
    expect_frame(kv, what, "phase_free")
    chunk.layout.check(kv, what)
    for name, value in kv.items():
        if value.shape != chunk.kv[name].shape:
            raise ShapeError(f"{what}[{name!r}]: got shape {value.shape}; expected the chunk's {chunk.kv[name].shape}")


def check_conditioned(chunk: Chunk, conditioned: KVArrays, what: str = "conditioned KV") -> None:
    """Checks that KV has a chunk's frame, layout and shapes, and is finite.

    Raises:
      As `check_alike`. NotFiniteError: NaN or infinity.
    """
    check_alike(chunk, conditioned, what)
    check_finite(conditioned, f"{what} of chunk {chunk.id!r}")


def deficit_of(conditioned: KVArrays, base: KVArrays, chunk: Chunk) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Computes conditioned − base in float32, zero on the chunk's padding."""
    return ops.deficit(arrays_of(conditioned), arrays_of(base), jnp.int32(chunk.length))


def check_layers(layers: Iterable[int] | None, total: int) -> tuple[int, ...]:
    """Returns the layers that a patch covers, ascending; all of `total` for None.

    Raises:
      InputError: no layers, or layers out of range.
    """
    if layers is None:
        return tuple(range(total))
    kept = tuple(sorted({int(layer) for layer in layers}))
    if not kept or kept[0] < 0 or kept[-1] >= total:
        raise InputError(f"patch: got layers {kept}; expected some of 0 to {total - 1}")
    return kept


def choose_ranks(
    chunk: Chunk, rank: Rank, dense: bool = True
) -> tuple[tuple[tuple[str, int | None], ...], tuple[tuple[str, int], ...] | None]:
    """Determines every channel's rank.

    A rank beyond the chunk's tokens or a channel's features is reduced to what they allow: the whole deficit. A part of
    a transition has its own rows in place of tokens.

    Returns:
      (channel, rank or None for dense) of the channels that get a patch; and (channel, rank) where a larger rank was
      requested, None where no rank was reduced.

    Raises:
      RankError: a rank below 1. LayoutError: an unknown channel.
    """
    layout = chunk.layout
    # A mapping leaves channels out, or gives them rank 0; one rank of 0 for all is refused below.
    ranks = rank_by_channel(layout, rank, "patch")
    wanted = {name: int(size) for name, size in ranks.items() if size != 0 or not isinstance(rank, Mapping)}

    chosen: list[tuple[str, int | None]] = []
    reduced: list[tuple[str, int]] = []

    for name, size in wanted.items():
        if size < 1:
            raise RankError(f"patch: got rank {size} for channel {name!r}; expected at least 1")

        channel = layout.channel(name)
        side = channel.features
        most, tokens = min(channel.rows_for(chunk.length), side), channel.rows_for(chunk.tokens)
        if size > most:
            reduced.append((name, size))
            size = most

        # Dense where factors would take as many numbers: M·(T + F) ≥ T·F.
        smaller = size * (tokens + side) < tokens * side
        chosen.append((name, size if smaller or not dense else None))

    return tuple(chosen), tuple(reduced) or None


def factor_dtype(chunk: Chunk, dtype: jax.typing.DTypeLike | None, rank: Any = None) -> str:
    """Returns the name of the dtype of a patch's factors; int2 to int7 are packed in groups.

    None is that of the chunk's rows, and of a `ByteBudget` int4: of a number of bytes, 4 bits and more directions leave
    less error.

    Raises:
      InputError: a dtype that `quantise` does not take either.
    """
    if dtype is None:
        return "int4" if isinstance(rank, ByteBudget) else jnp.dtype(chunk.kv[chunk.layout.names[0]].dtype).name
    found = storable_dtype(dtype, "patch")
    return found if isinstance(found, str) else jnp.dtype(found).name


def metadata_of(
    chunk: Chunk, base: Base, antecedent: Antecedent, base_antecedent: Antecedent | None = None, **fields: Any
) -> PatchMetadata:
    """Returns the metadata of a patch of a chunk, of all layers unless `fields` say otherwise."""
    fields = {"layout": chunk.layout, "layers": tuple(range(chunk.layout.layers))} | fields
    if base_antecedent is not None:
        fields |= {"base_antecedent": base_antecedent.ids, "base_members": base_antecedent.members}
    return PatchMetadata(
        chunk=chunk.id,
        base=base,
        antecedent=antecedent.ids,
        members=antecedent.members,
        backbone=chunk.backbone,
        content=content_of(chunk),
        lead=chunk.lead,
        encoding=chunk.encoding,
        local=chunk.places,
        **fields,
    )


def from_deficit(
    chunk: Chunk,
    delta: Mapping[str, Float[Array, "L *B T _ _"]],
    rank: Rank | ByteBudget,
    metadata: PatchMetadata,
    *,
    method: Method = "randomised",
    key: Key[Array, ""] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: InformationWeights | None = None,
) -> Patch:
    """Forms a phase-free patch of a deficit.

    Args:
      rank: as in `form_patch`; a `ByteBudget` is spent on exact directions, whatever the method.
      method: "randomised" (deterministic by `key`) or "exact".
      key: a typed PRNG key; None is `jax.random.key(0)`.
      dtype: of the factors; None is the chunk's, of a `ByteBudget` int4.
      weights: as in `form_patch`.

    Raises:
      RankError, LayoutError: as `choose_ranks`. NotFiniteError: factors beyond the dtype's range. ShapeError: a batch
      of chunks with a budget. InputError, PatchMismatchError: what are no weights of the chunk's backbone.
    """
    what = f"factors of chunk {metadata.chunk!r} in {factor_dtype(chunk, dtype, rank)}"
    own = None
    if weights is not None:
        check_weights(weights)
        own = weights.of_layers(chunk, range(chunk.layout.layers))
    if isinstance(rank, ByteBudget):
        factors = form_ragged(delta, chunk.length, rank, factor_dtype(chunk, dtype, rank), what, own)
        return Patch(factors, metadata)
    if own is not None:
        raise InputError(f"patch: got weights with rank {rank!r:.80}; expected a ByteBudget")

    # No key means a fixed one: the same deficit gives the same patch.
    ranks, asked = choose_ranks(chunk, rank)
    plan = FormPlan(ranks=ranks, method=method, dtype=factor_dtype(chunk, dtype))
    key = jax.random.key(0) if key is None else key
    factors = finite_factors(ops.jitted_factorise(dict(delta), key, jnp.int32(chunk.length), plan=plan), what)
    return Patch(factors, dataclasses.replace(metadata, asked=asked))
