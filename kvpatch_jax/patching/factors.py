"""From a deficit to a patch: what is checked before factors are formed, their ranks, and their metadata."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..cache import Antecedent, Base, Chunk, Patch, PatchMetadata, check_finite, check_is_chunk, content_of
from ..core import AnyArray, FormPlan, Heads, expect_frame, on_device, ops
from ..errors import InputError, RankError, ShapeError
from .compress import Rank, check_whole_ranks, finite_factors

Method = Literal["randomised", "exact"]
KVArrays = Mapping[str, Float[AnyArray, "L *B T _ _"]]


def arrays_of(kv: KVArrays) -> dict[str, Array]:
    """Turns KV into a plain dictionary of jax arrays."""
    return {name: on_device(value) for name, value in kv.items()}


def check_alike(chunk: Chunk, kv: KVArrays, what: str) -> None:
    """Refuses KV that is not of a chunk's frame, layout and shape. Looks at no value.

    Raises:
      InputError: no chunk. FrameError, LayoutError, ShapeError, DtypeError: the KV.
    """
    check_is_chunk(chunk)
    what = f"{what} of chunk {chunk.id!r}"
    expect_frame(kv, what, "phase_free")
    chunk.layout.check(kv, what)
    for name, value in kv.items():
        if value.shape != chunk.kv[name].shape:
            raise ShapeError(f"{what}[{name!r}]: shape {value.shape}; expected the chunk's {chunk.kv[name].shape}")


def check_conditioned(chunk: Chunk, conditioned: KVArrays, what: str = "conditioned KV") -> None:
    """Refuses KV that is not of a chunk's frame, layout and shape, or not finite.

    Raises:
      As `check_alike`. NotFiniteError: NaN or infinity.
    """
    check_alike(chunk, conditioned, what)
    check_finite(conditioned, f"{what} of chunk {chunk.id!r}")


def check_layers(layers: Iterable[int] | None, total: int) -> tuple[int, ...]:
    """Sorts the layers that a patch is to cover; all of `total` for None.

    Raises:
      InputError: none, or layers out of range.
    """
    if layers is None:
        return tuple(range(total))
    kept = tuple(sorted({int(layer) for layer in layers}))
    if not kept or kept[0] < 0 or kept[-1] >= total:
        raise InputError(f"patch: layers {kept}; expected some of 0 to {total - 1}")
    return kept


def choose_ranks(
    chunk: Chunk, rank: Rank, heads: Heads = "joint", shared_left: bool = False, dense: bool = True
) -> tuple[tuple[tuple[str, int | None], ...], tuple[tuple[str, int], ...] | None]:
    """Settles every channel's rank.

    A rank that the chunk's tokens or the features do not have is brought down to what they do: the whole deficit.

    Returns:
      (channel, rank or None for dense) of the channels that get a patch; and (channel, rank) where a larger rank was
      asked for, None where none was.

    Raises:
      RankError: a rank below 1, or unequal ranks for a shared left factor. LayoutError: a channel that is not there.
    """
    layout = chunk.layout
    check_whole_ranks(rank, "patch")
    if isinstance(rank, Mapping):
        for name in rank:
            layout.channel(name)
        wanted = {name: int(rank[name]) for name in layout.names if rank.get(name, 0) != 0}
    else:
        wanted = dict.fromkeys(layout.names, int(rank))
    if shared_left and (heads == "separate" or len(set(wanted.values())) > 1):
        raise RankError(
            f"patch: ranks {wanted} with heads {heads!r}; expected one rank and joint heads for a shared left"
        )

    together = sum(layout.channel(name).features for name in wanted)
    chosen: list[tuple[str, int | None]] = []
    beyond: list[tuple[str, int]] = []
    for name, size in wanted.items():
        if size < 1:
            raise RankError(f"patch: rank {size} for channel {name!r}; expected at least 1")
        channel = layout.channel(name)
        side = channel.width if heads == "separate" else channel.features
        side = together if shared_left else side
        if size > min(chunk.length, side):
            beyond.append((name, size))
            size = min(chunk.length, side)
        smaller = size * (chunk.tokens + side) < chunk.tokens * side
        chosen.append((name, size if smaller or not dense else None))
    return tuple(chosen), tuple(beyond) or None


def factor_dtype(chunk: Chunk, dtype: jax.typing.DTypeLike | None) -> str:
    """Names the dtype of a patch's factors: the chunk's, where none is asked for."""
    return jnp.dtype(next(iter(chunk.kv.values())).dtype if dtype is None else dtype).name


def metadata_of(
    chunk: Chunk, base: Base, antecedent: Antecedent, base_antecedent: Antecedent | None = None, **more: Any
) -> PatchMetadata:
    """Writes the metadata of a patch that is formed of a chunk now, of all layers; `more` are further fields."""
    given: dict[str, Any] = {"layout": chunk.layout, "layers": tuple(range(chunk.layout.layers))} | more
    if base_antecedent is not None:
        given |= {"base_antecedent": base_antecedent.ids, "base_members": base_antecedent.members}
    return PatchMetadata(
        chunk=chunk.id,
        base=base,
        antecedent=antecedent.ids,
        members=antecedent.members,
        backbone=chunk.backbone,
        content=content_of(chunk),
        lead=chunk.lead,
        local=chunk.places,
        **given,
    )


def from_deficit(
    chunk: Chunk,
    delta: Mapping[str, Float[Array, "L *B T _ _"]],
    rank: Rank,
    metadata: PatchMetadata,
    method: Method,
    key: Key[Array, ""] | None,
    dtype: jax.typing.DTypeLike | None,
) -> Patch:
    """Forms a joint-head, phase-free patch from a deficit that is at hand.

    Raises:
      RankError, LayoutError: as `choose_ranks`. NotFiniteError: factors beyond the dtype's range.
    """
    ranks, asked = choose_ranks(chunk, rank)
    plan = FormPlan(ranks=ranks, method=method, dtype=factor_dtype(chunk, dtype))
    key = jax.random.key(0) if key is None else key
    factors = ops.jitted_factorise(dict(delta), key, jnp.int32(chunk.length), plan=plan)
    return checked_patch(factors, dataclasses.replace(metadata, asked=asked), plan)


def checked_patch(factors: ops.Factors, metadata: PatchMetadata, plan: FormPlan) -> Patch:
    """Makes a patch of new factors, after a look at every one of them.

    Raises:
      NotFiniteError: factors beyond the dtype's range.
    """
    return Patch(finite_factors(factors, f"factors of chunk {metadata.chunk!r} in {plan.dtype}"), metadata)
