"""This library's own method: `form_patch` and `apply_patch`, with the chunk, antecedent and start of a splice."""

import dataclasses
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..backbone import KV, Backbone
from ..cache import Chunk, Patch, encode_chunk
from ..core import KVEncoding, KVLayout, PackedArray, arrays_of, to_engine
from ..errors import InputError, LayoutError, RankError
from ..patching import (
    Basis,
    ByteBudget,
    InformationWeights,
    apply_patch,
    form_in_basis,
    form_patch,
    keep_layers,
    mean_base,
    quantise,
    truncate,
)
from ..patching.patch_flops import adding_flops, transition_adding_flops
from .repair_budget import RepairBudget
from .spliced_cache import (
    NUMBER_BYTES,
    RepairBytes,
    Repaired,
    SplicedCache,
    canonical_of,
    factorising_flops,
    kv_bytes,
    recorded_of,
    with_placing,
)
from .stored_kv import Base, allowed_bytes, check_base, engine_written, others_of

Frame = Literal["phase_free", "engine"]
ANTECEDENT = ("front",)
"""Ids of the chunks that the patch is formed behind."""


class SplicedChunk(NamedTuple):
    """Rows of a splice as one chunk: rows that have the same positions from the chunk's start on, and one length.

    Attributes:
      rows: of the splice; a number: one row, which has no batch axis then.
      chunk: of these rows.
      start: the position of each row's chunk, int32 [B] or [B,A]; without B where rows have one start.
      conditioned: the recorded KV of these rows, phase-free.
    """

    rows: slice | int
    chunk: Chunk
    start: np.ndarray
    conditioned: KV


_FORMED: weakref.WeakKeyDictionary[SplicedCache, dict[Any, Any]] = weakref.WeakKeyDictionary()
_FORMING = threading.RLock()


def patch(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    rank: int | None = None,
    transition: int | None = None,
    channels: str | None = None,
    from_layer: int = 0,
    dtype: str | None = None,
    encoding: KVEncoding | str | None = None,
    base: Base = "canonical",
    frame: Frame = "phase_free",
    weights: InformationWeights | None = None,
) -> Repaired:
    """Adds the low-rank patch of the deficit, R(p) · (canonical + u v): `form_patch`, and `apply_patch`.

    Kamera eq. 1. Factors are of a full SVD, and count 16 bits a number where `dtype` has no fewer. A splice that is
    patched at several ranks is factorised once.

    Args:
      budget: bytes of the factors, where there is no rank: a `ByteBudget`, with a rank for each layer and channel of
        each row.
      rank: of every channel, in place of the budget; 0: the base alone.
      transition: of a hybrid model's transition, in place of `rank`; 0: none.
      channels: the only channel that is patched; None: all.
      from_layer: the lowest layer that is patched.
      dtype: of the factors, as `form_patch` takes it: "int2" to "int8", "bfloat16", …; None: `form_patch`'s own.
      encoding: that the base is kept in, such as "k4v4g32"; None: as it was prefilled.
      base: what the patch is added to: "canonical"; "mean": of the KV behind all antecedents; "others": of
        `splice.others` alone.
      frame: "phase_free"; "engine": formed after the rotation, as the paper's listing does.
      weights: of features, where a budget in bytes chooses directions.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, another base, KV inside a trace, or no KV of others.
        RankError: the rank is out of range. LayoutError: an unknown channel. Else as `form_patch`.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "patch", hybrid=True)
    highest = max(min(tokens, channel.features) for channel in layout.channels)
    if rank is not None and not 0 <= rank <= highest:
        raise RankError(f"patch.rank: got {rank}; expected 0 to {highest}, the rank of {tokens} tokens' KV")
    ranks = _ranks(layout, rank, transition, channels)
    options = {"layers": range(from_layer, layout.layers)} if from_layer else {}

    pieces = []
    # A budget is of one chunk.
    for number, part in enumerate(spliced_chunks(backbone, splice, base, encoding, rank is None, frame)):
        own = None
        if rank is None and allowed:
            limits = {**options, "weights": weights, "dtype": dtype}
            own = form_patch(part.chunk, part.conditioned, ByteBudget(allowed), ANTECEDENT, **limits)
        elif ranks:
            key = ("factors", base, str(encoding), frame, number)
            own = _of_ranks(_formed_of(splice), key, part, ranks)
            own = keep_layers(own, options["layers"]) if options else own
            own = own if dtype is None else quantise(own, dtype)
        pieces.append((part, own))

    kept = _base_bytes(layout, splice, base, encoding)
    stored = round(sum(patch_bytes(own) for _, own in pieces if own is not None) / len(splice.slots))
    bytes = kept._replace(stored=stored, moved=kept.moved + stored)
    # Bringing back from few bits takes two FLOPs a number: its product with the scale, and the least value added.
    decoding = 0 if encoding is None else 2 * layout.numbers * tokens
    factorised = [name for name in layout.names if any(own is not None and name in own.factors for _, own in pieces)]
    repaired = _served(backbone, splice, pieces, bytes, decoding)
    return dataclasses.replace(repaired, forming_flops=factorising_flops(layout, tokens, factorised))


def pooled(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float = 1.0,
    *,
    basis: Basis | None = None,
    rank: int | None = None,
) -> Repaired:
    """Adds the patch of the deficit in directions that all chunks of a backbone share (`fit_basis`).

    Args:
      basis: fitted on chunks that nothing is served of. Kept once, so its bytes are `shared`.
      rank: how many of its directions, the strongest first; None: as many as the budget's bytes hold coefficients of.

    Raises:
      InputError: no basis, no recorded KV, or a budget in tokens or by layer. RankError: a rank below 1, or none fits.
        Else as `form_patch`.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "pooled")
    if basis is None:
        raise InputError("pooled.basis: got None; expected directions that `fit_basis` found on other chunks")
    per_rank = NUMBER_BYTES * tokens * layout.layers * len(basis.directions)
    size = min(allowed // per_rank, max(basis.ranks.values())) if rank is None else rank

    pieces, stored = [], 0
    for part in spliced_chunks(backbone, splice, "canonical", None):
        own = form_in_basis(part.chunk, part.conditioned, basis, ANTECEDENT, size)
        stored += sum(_leaf_bytes(factors[0]) for factors in own.factors.values())  # pyright: ignore[reportIndexIssue]
        pieces.append((part, own))
    numbers = layout.layers * sum(min(size, have) * layout.channel(name).features for name, have in basis.ranks.items())
    shared = NUMBER_BYTES * numbers
    kept, stored = _base_bytes(layout, splice, "canonical", None), round(stored / len(splice.slots))
    bytes = kept._replace(stored=stored, shared=shared, moved=kept.moved + stored)
    # Coefficients are one product with the directions, as serving is.
    return dataclasses.replace(_served(backbone, splice, pieces, bytes, 0), forming_flops=numbers * 2 * tokens)


def patch_bytes(patch: Patch) -> int:
    """Counts the bytes of a patch's factors: 16 bits a number, fewer where they have fewer, with their scales."""
    return sum(_leaf_bytes(own) for own in patch.factors.values())


def _leaf_bytes(factors: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(factors, is_leaf=lambda leaf: isinstance(leaf, PackedArray)):
        if isinstance(leaf, PackedArray):
            total += leaf.nbytes
        else:
            # Indices of ragged factors are whole numbers, which are kept as they are.
            number = NUMBER_BYTES if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype.itemsize
            total += number * leaf.size
    return total


def _ranks(layout: KVLayout, rank: int | None, transition: int | None, channels: str | None) -> dict[str, int]:
    """Returns the rank of each channel that is patched."""
    parts = {channel.name for channel in layout.parts}
    if channels is not None:
        names = (layout.channel(channels).name,)
    else:
        names = layout.names
    if transition is not None and not parts:
        raise LayoutError(f"patch.transition: got rank {transition}; expected None, as the model has no transition")
    ranks = {}
    for name in names:
        ranks[name] = transition if name in parts and transition is not None else rank
    return {name: own for name, own in ranks.items() if own}


# ------------------------------------------------------------------------------------------------ chunks of a splice


def _formed_of(splice: SplicedCache) -> dict[Any, Any]:
    """Returns what was formed of a splice before; it is forgotten with the splice."""
    with _FORMING:
        return _FORMED.setdefault(splice, {})


def spliced_chunks(
    backbone: Backbone,
    splice: SplicedCache,
    base: Base = "canonical",
    encoding: KVEncoding | str | None = None,
    single: bool = False,
    frame: Frame = "phase_free",
) -> list[SplicedChunk]:
    """Returns the splice's rows as chunks of a base: one batch, where rows differ in nothing but their start.

    Args:
      single: whether every row is a chunk by itself.
      frame: "engine": of rotated keys, of a layout without phase.

    Raises:
      InputError: another frame, or as `patch`.
    """
    check_base(base, "patch")
    if frame not in get_args(Frame):
        raise InputError(f"patch.frame: got {frame!r:.80}; expected one of {get_args(Frame)}")
    formed, key = _formed_of(splice), ("chunks", base, str(encoding), single, frame)
    with _FORMING:
        if key not in formed:
            parts = _make_chunks(backbone, splice, base, encoding, single)
            formed[key] = [_rotated(part) for part in parts] if frame == "engine" else parts
    return formed[key]


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


def _make_chunks(
    backbone: Backbone, splice: SplicedCache, base: Base, encoding: KVEncoding | str | None, single: bool
) -> list[SplicedChunk]:
    layout, recorded = backbone.layout, recorded_of(splice, "patch")
    canonical = canonical_of(layout, splice)
    arrays = (recorded, canonical, splice.tokens.positions, splice.length, splice.others)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise InputError("patch: got KV inside a trace; expected arrays, of which a chunk is made")

    start, (rows, tokens) = _starts(splice), splice.slots.shape
    local = (np.asarray(splice.tokens.positions) - start[:, None]).astype(np.float32)
    lengths = np.full(rows, tokens) if splice.length is None else np.asarray(splice.length)
    alike = (local == local[0]).all() and (lengths == lengths[0]).all()
    groups: list[Any] = [slice(0, rows)] if alike and not single else list(range(rows))

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
            behind = [_rows(other.kv, group) for other in others_of(splice, "patch")]
            behind = [conditioned, *behind] if base == "mean" else behind
            chunk = mean_base(chunk, behind, [[f"antecedent {place}"] for place in range(len(behind))])
        chunk = chunk if encoding is None else encode_chunk(chunk, encoding)
        one_start = not isinstance(group, slice) or (start == start[0]).all()
        parts.append(SplicedChunk(group, chunk, start[first] if one_start else start, conditioned))
    return parts


def _starts(splice: SplicedCache) -> np.ndarray:
    """Returns where each row's chunk begins, int32 [B] or [B,A]: the least whole position of every axis."""
    return np.floor(np.asarray(splice.tokens.positions).min(1)).astype(np.int32)


def _rows(kv: Mapping[str, Any], rows: slice | int) -> dict[str, Array]:
    if isinstance(rows, slice):
        return dict(kv)
    return {name: jnp.asarray(value)[:, rows] for name, value in kv.items()}


def _of_ranks(formed: dict[Any, Any], key: tuple[Any, ...], part: SplicedChunk, ranks: Mapping[str, int]) -> Patch:
    """Forms the patch of these ranks, as `form_patch` does, of the factors of full rank that `formed` has."""
    chunk, layout = part.chunk, part.chunk.layout
    where: dict[str, Any] = {"method": "exact"}
    thin, dense = {}, {}
    for name, rank in ranks.items():
        channel = layout.channel(name)
        rows, most = channel.rows_for(chunk.tokens), min(channel.rows_for(chunk.length), channel.features)
        # Where factors would be no smaller, `form_patch` keeps the deficit as it is.
        smaller = min(rank, most) * (rows + channel.features) < rows * channel.features
        (thin if smaller else dense)[name] = min(rank, most)

    factors, metadata = {}, None
    if thin:
        with _FORMING:
            if key not in formed:
                full = {}
                for channel in layout.channels:
                    full[channel.name] = min(channel.rows_for(chunk.length), channel.features)
                formed[key] = form_patch(chunk, part.conditioned, full, ANTECEDENT, dense=False, **where)
        largest = formed[key]
        factors |= {name: own for name, own in truncate(largest, thin).factors.items() if name in thin}
        metadata = largest.metadata
    if dense:
        whole = form_patch(chunk, part.conditioned, dense, ANTECEDENT, **where)
        factors |= whole.factors
        metadata = metadata or whole.metadata
    assert metadata is not None
    return Patch({name: factors[name] for name in layout.names if name in factors}, metadata)


def _base_bytes(layout: KVLayout, splice: SplicedCache, base: Base, encoding: KVEncoding | str | None) -> RepairBytes:
    tokens = splice.slots.shape[1]
    size = kv_bytes(layout, tokens) if encoding is None else KVEncoding.of(encoding).nbytes(layout, tokens)
    return RepairBytes(canonical=size, moved=size) if base == "canonical" else RepairBytes(shared=size, moved=size)


def _served(
    backbone: Backbone,
    splice: SplicedCache,
    pieces: list[tuple[SplicedChunk, Patch | None]],
    bytes: RepairBytes,
    decoding: int,
) -> Repaired:
    """Applies the patches, and writes the result into the cache."""
    layout, tokens = backbone.layout, splice.slots.shape[1]
    placed, flops = [], 0
    for part, own in pieces:
        kv = dict(apply_patch(part.chunk, own, part.start, ANTECEDENT))
        batched = isinstance(part.rows, slice)
        placed.append(kv if batched else {name: value[:, None] for name, value in kv.items()})
        adding = 0 if own is None else adding_flops(own) * tokens + transition_adding_flops(own)
        flops += adding * (len(splice.slots) if batched else 1)
    if len(placed) > 1:
        placed = [{name: jnp.concatenate([kv[name] for kv in placed], axis=1) for name in placed[0]}]
    repaired = engine_written(layout, splice, placed[0], bytes)
    return with_placing(repaired, layout, splice, round(flops / len(splice.slots)) + decoding)
