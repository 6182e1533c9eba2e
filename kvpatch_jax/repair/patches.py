"""This library's own method: `form_patch` and `apply_patch`, with the chunk, antecedent and start of a splice."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..backbone import KV, Backbone
from ..cache import Chunk, Patch, encode_chunk
from ..core import WHOLE, KVEncoding, PackedArray, arrays_of, to_engine
from ..errors import InputError
from ..patching import (
    DEFAULT_SIZE,
    LEAST_DIRECTIONS,
    Basis,
    ByteBudget,
    apply_patch,
    form_in_basis,
    form_patch,
    mean_base,
    parse_size,
)
from ..patching.patch_flops import adding_flops, transition_adding_flops
from .repair_budget import ALL, NUMBER_BYTES, RepairBudget
from .repaired import RepairBytes, Repaired, engine_written, factorising_flops, method
from .spliced_cache import SplicedCache, canonical_of, required
from .stored_forms import allowed_bytes, expect_values

Base = Literal["canonical", "mean", "others"]
"""What a patch is added to: the canonical; the mean of KV behind all antecedents, or all but the splice's own."""
Frame = Literal["phase_free", "engine"]
PATCH_BUDGET = RepairBudget(share=parse_size(DEFAULT_SIZE, "patch")[0])
ANTECEDENT = ("front",)
"""Ids of the chunks that the patch is formed behind."""


class SplicedChunk(NamedTuple):
    """Rows of a splice as one chunk: rows that have the same positions from the chunk's start on, and one length.

    Attributes:
      rows: of the splice; a number: one row, which has no batch axis then.
      start: the position of each row's chunk, int32 [B] or [B,A]; without B where rows have one start.
      conditioned: the recorded KV of these rows, phase-free.
    """

    rows: slice | int
    chunk: Chunk
    start: np.ndarray
    conditioned: KV


@method(hybrid=True)
def patch(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget = PATCH_BUDGET,
    *,
    rank: int | None = None,
    channels: str | None = None,
    from_layer: int = 0,
    dtype: str | None = None,
    encoding: KVEncoding | str | None = None,
    base: Base = "canonical",
    frame: Frame = "phase_free",
    relative: float | int = ByteBudget.relative,
) -> Repaired:
    """Adds the low-rank patch of the deficit, R(p) · (canonical + u v): `form_patch`, and `apply_patch`.

    Kamera eq. 1. Factors are of a full SVD, and count 16 bits a number where `dtype` has no fewer.

    Args:
      budget: bytes of the factors, where there is no rank: a `ByteBudget`, with a rank for each layer and channel of
        each row. By default the share that `form_patch` has, `DEFAULT_SIZE`.
      rank: of every channel, in place of the budget; 0: the base alone.
      channels: the only channel that is patched; None: all.
      from_layer: the lowest layer that is patched.
      dtype: of the factors, as `form_patch` takes it: "int2" to "int8", "bfloat16", …; None: `form_patch`'s own.
      encoding: that the base is kept in, such as "k4v4g32"; None: as it was prefilled.
      base: what the patch is added to: "canonical"; "mean": of the KV behind all antecedents; "others": of
        `splice.others` alone.
      frame: "phase_free"; "engine": formed after the rotation, as the paper's listing does.
      relative: of a budget, how directions of unlike layers compare (`ByteBudget.relative`).
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget)
    highest = max(min(channel.rows_for(tokens), channel.features) for channel in layout.channels)
    if rank is not None and not 0 <= rank <= highest:
        raise InputError(f"patch.rank: got {rank}; expected 0 to {highest}, the rank of {tokens} tokens' KV")
    for setting, value, words in (("base", base, get_args(Base)), ("frame", frame, get_args(Frame))):
        if value not in words:
            raise InputError(f"patch.{setting}: got {value!r:.80}; expected one of {words}")

    names = layout.names if channels is None else (layout.channel(channels).name,)
    size = ByteBudget(allowed, relative) if rank is None and allowed else dict.fromkeys(names, rank) if rank else None
    layers = range(from_layer, layout.layers) if from_layer else None
    pieces = []
    # A budget is of one chunk.
    for part in spliced_chunks(backbone, splice, base, encoding, single=rank is None):
        part, formed = _rotated(part) if frame == "engine" else part, None
        if size is not None:
            # A share has the floor that it has where users ask for it.
            if isinstance(size, ByteBudget) and budget.share is not None:
                size = ByteBudget.share(part.chunk, budget.share, relative, LEAST_DIRECTIONS)
            formed = form_patch(
                part.chunk, part.conditioned, size, ANTECEDENT, layers=layers, method="exact", dtype=dtype, force=True
            )
        pieces.append((part, formed))

    repaired = _served(backbone, splice, pieces, encoding, base)
    left = [formed.predicted for part, formed in pieces if formed is not None and not isinstance(part.rows, slice)]
    if len(left) == len(pieces):
        repaired = dataclasses.replace(repaired, estimate=np.asarray(left, np.float32))
    patched = {name for _, formed in pieces if formed is not None for name in formed.factors}
    return dataclasses.replace(repaired, forming_flops=factorising_flops(layout, tokens, patched))


@method()
def pooled(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget = ALL,
    *,
    basis: Basis | None = None,
    rank: int | None = None,
) -> Repaired:
    """Adds the patch of the deficit in directions that all chunks of a backbone share (`fit_basis`).

    Args:
      basis: fitted on chunks that nothing is served of. Kept once, so its bytes are `shared`.
      rank: how many of its directions, the strongest first; None: as many as the budget's bytes hold coefficients of.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget)
    if basis is None:
        raise InputError("pooled.basis: got None; expected directions that `fit_basis` found on other chunks")
    per_rank = NUMBER_BYTES * tokens * layout.layers * len(basis.directions)
    size = min(allowed // per_rank, max(basis.ranks.values())) if rank is None else rank

    pieces = []
    for part in spliced_chunks(backbone, splice):
        pieces.append((part, form_in_basis(part.chunk, part.conditioned, basis, ANTECEDENT, size)))
    repaired = _served(backbone, splice, pieces)
    numbers = layout.layers * sum(min(size, most) * layout.channel(name).features for name, most in basis.ranks.items())
    bytes = repaired.bytes._replace(shared=NUMBER_BYTES * numbers)
    # Coefficients are one product with the directions, as serving is.
    return dataclasses.replace(repaired, bytes=bytes, forming_flops=numbers * 2 * tokens)


def spliced_chunks(
    backbone: Backbone,
    splice: SplicedCache,
    base: Base = "canonical",
    encoding: KVEncoding | str | None = None,
    single: bool = False,
) -> list[SplicedChunk]:
    """Returns the splice's rows as chunks of a base: one batch, where rows differ in nothing but their start.

    Args:
      single: whether every row is a chunk by itself.
    """
    layout, recorded = backbone.layout, required(splice, "recorded")
    canonical = canonical_of(layout, splice)
    expect_values((recorded, canonical, splice.tokens.positions, splice.length, splice.others), "patch")

    # The least integer position of every axis.
    start, (rows, tokens) = np.floor(np.asarray(splice.tokens.positions).min(1)).astype(np.int32), splice.slots.shape
    local = (np.asarray(splice.tokens.positions) - start[:, None]).astype(np.float32)
    lengths = np.full(rows, tokens) if splice.length is None else np.asarray(splice.length)
    alike = (local == local[0]).all() and (lengths == lengths[0]).all()
    groups: list[slice | int] = [slice(0, rows)] if alike and not single else list(range(rows))

    parts = []
    for group in groups:
        conditioned, first = _rows(recorded, group), 0 if isinstance(group, slice) else group
        chunk = Chunk(
            kv=_rows(canonical, group),
            local=local[first],
            span=int(local[first].max()) + 1,
            length=int(lengths[first]),
            id="chunk",
            layout=layout,
            backbone=backbone.fingerprint,
        )
        if base != "canonical":
            versions = [_rows(other.kv, group) for other in required(splice, "others")]
            versions = [conditioned, *versions] if base == "mean" else versions
            chunk = mean_base(chunk, versions, [[f"antecedent {place}"] for place in range(len(versions))])
        chunk = chunk if encoding is None else encode_chunk(chunk, encoding)
        one_start = not isinstance(group, slice) or (start == start[0]).all()
        parts.append(SplicedChunk(group, chunk, start[first] if one_start else start, conditioned))
    return parts


def _rows(kv: Mapping[str, Any], rows: slice | int) -> dict[str, Array]:
    return dict(kv) if isinstance(rows, slice) else {name: jnp.asarray(value)[:, rows] for name, value in kv.items()}


def _rotated(part: SplicedChunk) -> SplicedChunk:
    """Returns a chunk of rotated keys, in float32, that rotates no more: the paper patches in this frame."""
    chunk, layout = part.chunk, part.chunk.layout
    channels = tuple(dataclasses.replace(channel, rotary=0, rope=None) for channel in layout.channels)
    placed = []
    for kv in (arrays_of(chunk.kv), part.conditioned):
        wide = {name: jnp.asarray(value).astype(jnp.float32) for name, value in kv.items()}
        placed.append(dict(to_engine(layout, wide, chunk.local, part.start)))
    still = dataclasses.replace(layout, channels=channels)
    return part._replace(chunk=dataclasses.replace(chunk, kv=placed[0], layout=still), conditioned=placed[1])


def _served(
    backbone: Backbone,
    splice: SplicedCache,
    pieces: list[tuple[SplicedChunk, Patch | None]],
    encoding: KVEncoding | str | None = None,
    base: Base = "canonical",
) -> Repaired:
    """Applies the patches, writes the result into the cache, and counts the bytes of base and factors."""
    layout, (rows, tokens) = backbone.layout, splice.slots.shape
    placed, adding, stored = [], 0, 0
    for part, formed in pieces:
        kv, batched = dict(apply_patch(part.chunk, formed, part.start, ANTECEDENT)), isinstance(part.rows, slice)
        placed.append(kv if batched else {name: value[:, None] for name, value in kv.items()})
        if formed is not None:
            flops = adding_flops(formed) * tokens + transition_adding_flops(formed)
            adding += flops * (rows if batched else 1)
            stored += _factor_bytes(formed)
    if len(placed) > 1:
        placed = [{name: jnp.concatenate([kv[name] for kv in placed], axis=1) for name in placed[0]}]

    kept = KVEncoding(WHOLE, WHOLE) if encoding is None else KVEncoding.of(encoding)
    size = kept.nbytes(layout, tokens)
    stored = round(stored / rows)
    bytes = RepairBytes(stored=stored, moved=size + stored, **{"canonical" if base == "canonical" else "shared": size})
    decoding = kept.decoding * layout.numbers * tokens
    repaired = engine_written(layout, splice, placed[0], bytes)
    return dataclasses.replace(repaired, placing_flops=round(adding / rows) + decoding, count_flops=lambda: 0)


def _factor_bytes(patch: Patch) -> int:
    """Counts the bytes of factors without a shared basis: 16 bits a number, fewer where they are packed."""
    factors: Any = patch.factors
    if patch.metadata.basis is not None:
        factors = [coefficients for coefficients, _ in factors.values()]
    total = 0
    for leaf in jax.tree.leaves(factors, is_leaf=lambda leaf: isinstance(leaf, PackedArray)):
        # Indices of ragged factors are integers, which are kept as they are.
        served = not isinstance(leaf, PackedArray) and jnp.issubdtype(leaf.dtype, jnp.floating)
        total += NUMBER_BYTES * leaf.size if served else leaf.nbytes
    return total
