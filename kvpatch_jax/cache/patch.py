"""Patches as host containers: factors, the metadata that says what they apply to, and the checks of both."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from ..core import (
    PARTS,
    ChannelFactors,
    KVLayout,
    Leaf,
    PackedArray,
    PatchFrame,
    Quantised,
    RaggedFactors,
    is_low_rank,
)
from ..errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from ..utils.kinds import all_of, expect_kind
from .chunk import Chunk, brief, pad
from .ids import examine
from .provenance import Antecedent, Member, antecedent_of, contents_differ

Base = Literal["canonical", "conditioned", "patched"]


@dataclasses.dataclass(frozen=True)
class PatchMetadata:
    """Provenance of a patch: what it was formed from, and so what it may be applied to.

    Attributes:
      chunk: id of the chunk.
      base: what the factors are added to: the "canonical"; the "conditioned" KV (removal patch); or, for a correction
        that only `update_patch` takes, the "patched" KV.
      antecedent: ids of the chunks that precede it, in order; sorted if `orbit`. `behind` has all that is known.
      orbit: whether the patch serves every ordering of the antecedent.
      layers: layers that the factors cover, ascending; the others get no correction.
      frame, start: "phase_free" (any start), or "engine" at exactly `start`.
      base_antecedent: what the base itself was conditioned on; None for the canonical.
      backbone, layout: of the chunk.
      content: of the chunk, which distinguishes chunks of one id.
      local: digest of the chunk's local positions.
      corrects: for a correction, the digest of the patch that it corrects (`patch_digest`); else None.
      asked: (channel, rank) where a larger rank was requested than the chunk's tokens or features allow; the patch has
        the largest possible rank then, or is dense where that is smaller. None where no rank was reduced.
      members: the antecedent with contents and identities; None where the ids say all that is known.
      base_members: likewise for `base_antecedent`.
      lead: of the chunk (`Chunk.lead`): the digest of what its canonical was prefilled after, or None.
      basis: the digest of the shared basis that v is taken from (`basis.Basis`); None where v is the patch's own.
      encoding: word of the encoding of the base that the deficit was taken against (`Chunk.encoding`); None: the KV as
        it was prefilled. Another encoding of the same chunk is another base.

    Raises:
      InputError: a str in place of a sequence of ids, or members of other ids.
    """

    chunk: str
    base: Base
    antecedent: tuple[str, ...]
    backbone: str
    layout: KVLayout
    layers: tuple[int, ...]
    orbit: bool = False
    frame: PatchFrame = "phase_free"
    start: tuple[int, ...] | None = None
    base_antecedent: tuple[str, ...] | None = None
    content: str | None = None
    local: str | None = None
    corrects: str | None = None
    asked: tuple[tuple[str, int], ...] | None = None
    members: tuple[Member, ...] | None = None
    base_members: tuple[Member, ...] | None = None
    lead: str | None = None
    basis: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        for word, ids in (("members", self.antecedent), ("base_members", self.base_antecedent or ())):
            ids, members = tuple(all_of(str, ids, word.replace("members", "antecedent"))), getattr(self, word)
            if members is None:
                continue

            # The ids are kept beside the members: metadata of earlier versions has only them.
            expect_kind(members, tuple | list, f"patch: {word}", "a tuple, each a Member")
            known = Antecedent(tuple(members))
            if known.ids != ids:
                raise InputError(f"patch: got {word} of the ids {known.ids}; expected {ids}")

            # Members that say no more than the ids are dropped, so that equal provenance has one form.
            object.__setattr__(self, word, None if known.plain else known.members)

    @functools.cached_property
    def behind(self) -> Antecedent:
        """The antecedent with all that is known of it."""
        return antecedent_of(self.antecedent if self.members is None else self.members)

    @functools.cached_property
    def base_behind(self) -> Antecedent | None:
        """The base's antecedent with all that is known of it; None for the canonical."""
        if self.base_antecedent is None:
            return None
        return antecedent_of(self.base_antecedent if self.base_members is None else self.base_members)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patch:
    """Low-rank (or dense) factors per channel, with their metadata.

    `factors` is a pytree of arrays, the only part that enters jitted code: {channel: (u, v)} with u [L', T, M] and
    v [L', M, F] (per head: [L', K, T, M] and [L', K, M, H]), or {channel: dense [L', T, K, H]}, or with a rank for each
    layer {channel: `RaggedFactors`}; L' counts those of the metadata's layers that keep the channel. The parts of a
    transition have R rows of their own in place of T. Patches of a batch of chunks have the axis B after L' in every
    factor; stores do not take them.
    u carries the singular values and v's rows are orthonormal (until quantised). A channel without factors gets no
    correction.

    Attributes:
      tokens: padded number of tokens; None of a patch without factors for the channels that have any.
      batch: number of chunks B that the patch is of; None without a batch axis, and of a patch without factors.

    Raises:
      ShapeError: factors of other layers, heads or features than the metadata says, or that do not fit each other.
      LayoutError: a channel that the layout does not have. InputError: layers that the layout does not have.
    """

    factors: Mapping[str, ChannelFactors]
    metadata: PatchMetadata
    tokens: int | None = dataclasses.field(init=False)
    batch: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        tokens, batch = check_factors(self.factors, self.metadata)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "batch", batch)

    def __repr__(self) -> str:
        metadata, asked = self.metadata, dict(self.metadata.asked or ())
        ranks = []
        for name, rank in self.ranks.items():
            reduced = f" ({asked[name]} asked)" if name in asked else ""
            ranks.append(f"{name} {'dense' if rank is None else f'rank {rank}'}{reduced}")

        kind = f"{'orbit, ' if metadata.orbit else ''}{metadata.base}, {metadata.frame}"
        batch = "" if self.batch is None else f"batch of {self.batch}, "
        layers = f"{batch}{len(metadata.layers)} of {metadata.layout.layers} layers"
        exactness = "" if metadata.behind.exact else ", not exact"
        formed = f"{brief(metadata.chunk)!r} after {tuple(map(brief, metadata.antecedent))}{exactness}"
        return f"Patch({formed}: {', '.join(ranks)}, {layers}, {kind}, {self.nbytes} bytes)"

    def pad(self, tokens: int) -> "Patch":
        """Pads the patch for its chunk padded to `tokens`, as `Chunk.pad` does: padding gets no correction.

        Raises:
          ShapeError: `tokens` below what the patch has.
        """
        more = tokens - (tokens if self.tokens is None else self.tokens)
        if more < 0:
            raise ShapeError(
                f"patch of chunk {self.metadata.chunk!r}: got tokens={tokens}; expected at least {self.tokens}"
            )

        factors: dict[str, Any] = {}
        for name, own in self.factors.items():
            if name in PARTS:
                factors[name] = own
            elif isinstance(own, RaggedFactors):
                factors[name] = dataclasses.replace(own, u=_padded(own.u, -1, more))
            elif is_low_rank(own):
                factors[name] = (_padded(own[0], -2, more), own[1])  # pyright: ignore
            else:
                factors[name] = _padded(own, -3, more)  # pyright: ignore[reportArgumentType]

        return Patch(factors, self.metadata)

    @property
    def ranks(self) -> dict[str, int | None]:
        """Rank of each channel of the layout: 0 where it has no factors, None where it is dense.

        Of a channel with a rank for each layer, the highest.
        """
        ranks: dict[str, int | None] = dict.fromkeys(self.metadata.layout.names, 0)
        for name, factors in self.factors.items():
            if isinstance(factors, RaggedFactors):
                ranks[name] = factors.rows.shape[-1]
                continue
            ranks[name] = _shape(factors[0])[-1] if is_low_rank(factors) else None  # pyright: ignore[reportIndexIssue]
        return ranks

    @functools.cached_property
    def operands(self) -> dict[str, Any]:
        """The factors as jitted operators take them: those with a rank for each layer padded to few shapes."""
        operands = dict(self.factors)
        for name, own in operands.items():
            if isinstance(own, RaggedFactors):
                operands[name] = own.padded()
        return operands

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, scales included; a shared basis does not count.

        At rank m a channel takes m·(T + F) numbers where its KV takes T·F: rank 16 of a 480-token chunk at width 512 is
        as much as 31 of its 480 tokens.
        """
        counted = []
        for own in self.factors.values():
            if is_low_rank(own):
                counted.append(own[0])  # pyright: ignore[reportIndexIssue]
                own = own[1]  # pyright: ignore[reportIndexIssue]
            if self.metadata.basis is None:
                counted.append(own)

        return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(counted))


def _shape(leaf: Any) -> tuple[int, ...]:
    return (leaf.values if isinstance(leaf, Quantised) else leaf).shape


def _padded(leaf: Leaf, axis: int, more: int) -> Leaf:
    """Appends `more` zeros along a token axis. A scale is shared by whole directions, or belongs to one token."""
    if isinstance(leaf, PackedArray):
        return pad(leaf, axis, more)
    if not isinstance(leaf, Quantised):
        return pad(leaf, axis, more)
    return Quantised(pad(leaf.values, axis, more), pad(leaf.scale, axis, more if leaf.scale.shape[axis] != 1 else 0))


def check_factors(
    factors: Mapping[str, Any], metadata: PatchMetadata, *, batched: bool = True
) -> tuple[int | None, int | None]:
    """Refuses factors, on the host or on devices, that do not fit their metadata, by their shapes alone.

    Args:
      batched: whether they may have a batch axis.

    Returns:
      Their padded number of tokens and their batch, None each of no factors; and None for the batch without its axis.

    Raises:
      As `Patch`.
    """
    expect_kind(metadata, PatchMetadata, "patch: metadata", "a PatchMetadata")
    expect_kind(factors, Mapping, "patch: factors", "{channel: factors}")
    layout, layers = metadata.layout, metadata.layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= layout.layers:
        raise InputError(f"patch: got layers {layers}; expected some of 0 to {layout.layers - 1}, ascending")

    batch: tuple[int, ...] | None = None
    tokens: set[int] = set()

    for name, own in factors.items():
        channel, low_rank = layout.channel(name), is_low_rank(own)
        # Of the patch's layers those that keep this channel.
        kept = len(layout.rows_of(name, layers))
        if isinstance(own, RaggedFactors):
            count = _check_ragged(own, name, channel.features, kept, channel.rows)
            if channel.rows is None:
                tokens.add(count)
            continue

        # The first channel's batch counts. More axes than are allowed are left out, so that its shape is refused below.
        if batch is None:
            axes = _shape(own[0])[1:-2] if low_rank else _shape(own)[1:-3]
            batch = axes if len(axes) <= batched else ()

        leading = (kept, *batch)
        if low_rank:
            u, v = map(_shape, own)
            _check_shape(u, (*leading, channel.rows, None), f"u of {name!r}", "layers, tokens, rank")
            _check_shape(v, (*leading, u[-1], channel.features), f"v of {name!r}", "rank")
            count = u[-2]
        else:
            dense = _shape(own)
            expected = (kept, *batch, channel.rows, channel.heads, channel.width)
            _check_shape(dense, expected, f"{name!r}", "layers, tokens, heads")
            count = dense[-3]
        if channel.rows is None:
            tokens.add(count)

        for leaf in own if low_rank else (own,):
            if not isinstance(leaf, Quantised):
                continue
            # A scale is shared along an axis, or there is one for each of its places.
            values, scale = leaf.values.shape, leaf.scale.shape
            if len(scale) != len(values) or any(one not in (1, size) for one, size in zip(scale, values, strict=True)):
                raise ShapeError(
                    f"patch: got scale of shape {scale} for values {values} of {name!r}; expected 1 or as many each"
                )

    if len(tokens) > 1:
        raise ShapeError(
            f"patch of chunk {metadata.chunk!r}: got {sorted(tokens)} tokens; expected as many in every channel"
        )
    return next(iter(tokens), None), batch[0] if batch else None


def _check_ragged(factors: RaggedFactors, name: str, features: int, layers: int, size: int | None) -> int:
    """Checks the shapes of factors with a rank for each layer; returns their padded number of tokens.

    Args:
      size: rows of a transition's part; None: any number of tokens.
    """
    u, v, rows = _shape(factors.u), _shape(factors.v), tuple(factors.rows.shape)
    _check_shape(v, (None, features), f"v of {name!r}", "directions of all layers, features")
    _check_shape(u, (v[0], size), f"u of {name!r}", "directions of all layers, tokens")
    _check_shape(rows, (layers, None), f"rows of {name!r}", "layers, directions of one")
    return u[1]


def _check_shape(found: tuple[int, ...], expected: tuple[int | None, ...], what: str, axes: str) -> None:
    """Raises ShapeError where sizes differ; None in `expected` is any size."""
    if len(found) != len(expected) or any(size not in (None, own) for own, size in zip(found, expected, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in expected)
        raise ShapeError(f"patch: got {what} of shape {found}; expected [{sizes}] ({axes}, …)")


def same_storage(first: KVLayout, second: KVLayout) -> bool:
    """Compares two layouts by the phase-free KV they describe: all but how angles are computed."""
    # Angles change no phase-free number.
    return first is second or first.with_angles(second.rope.angles) == second


def patch_digest(patch: Patch) -> str:
    """Digests the bits of a patch's factors and the metadata that describes them: 32 hexadecimal digits.

    One pass on the device over the factors. A patch has the same digest after storing, and another one after it was
    truncated, quantised or padded.
    """
    metadata = patch.metadata
    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    for word in ("layout", "asked"):
        del fields[word]

    # `examine` takes tokens on the second axis of every array; the longest one bounds them all.
    leaves = {}
    for name, factors in patch.factors.items():
        if isinstance(factors, RaggedFactors):
            # As a store has them, whatever they are held in.
            factors = dataclasses.replace(factors, rows=np.asarray(factors.rows, np.int32))
        leaves |= {f"{name}.{place}": leaf for place, leaf in enumerate(jax.tree.leaves(factors))}
    tokens = max((leaf.shape[1] for leaf in leaves.values()), default=0)
    found = examine(leaves, tokens)[0]
    return hashlib.blake2b(f"{found}\0{sorted(fields.items())}".encode(), digest_size=16).hexdigest()


def check_chunk(patch: Patch, chunk: Chunk, base: Base) -> None:
    """Checks that a patch is of this chunk, base, backbone, lead, layout, content, local positions and shape.

    Contents are compared where both are known. Nothing is computed but a digest of few positions, once.

    Raises:
      PatchMismatchError: one of them differs. ShapeError: the factors have another number of tokens, or another batch,
      than the chunk. InputError: not a patch.
    """
    expect_kind(patch, Patch, "patch", "a Patch")
    # Cheap comparisons first; the digest of positions last.
    metadata = patch.metadata
    for word, found, expected in (
        ("chunk", metadata.chunk, chunk.id),
        ("base", metadata.base, base),
        ("backbone", metadata.backbone, chunk.backbone),
        ("lead", metadata.lead, chunk.lead),
        ("encoding", metadata.encoding, chunk.encoding),
    ):
        if found != expected:
            raise PatchMismatchError(f"patch: got {word} {found!r}; expected {expected!r}")

    if metadata.layout is not chunk.layout and not same_storage(metadata.layout, chunk.layout):
        raise PatchMismatchError(f"patch: got layout {metadata.layout}; expected {chunk.layout}")

    # What one of the two does not know differs from nothing; the digest of positions is computed once for a chunk.
    contents = ("content", metadata.content, chunk.content)
    places = ("local positions", metadata.local, None if metadata.local is None else chunk.places)
    for word, found, expected in (contents, places):
        if contents_differ(found, expected):
            raise PatchMismatchError(
                f"patch: got one formed of chunk {chunk.id!r} with {word} {found!r}; expected {expected!r}, which this "
                "chunk of the same id has"
            )

    if patch.tokens not in (None, chunk.tokens):
        raise ShapeError(
            f"patch of chunk {chunk.id!r}: got {patch.tokens} tokens; expected the chunk's {chunk.tokens} (`Patch.pad` "
            "pads a patch as `Chunk.pad` its chunk)"
        )
    if patch.factors and patch.batch != chunk.batch:
        raise ShapeError(f"patch of chunk {chunk.id!r}: got batch {patch.batch}; expected the chunk's {chunk.batch}")


def check_applies(
    patch: Patch,
    chunk: Chunk,
    start: np.ndarray | jax.Array,
    antecedent: Antecedent,
    base_antecedent: Antecedent | None = None,
    *,
    allow_stale: bool = False,
) -> None:
    """Checks that a patch may be applied to a chunk, at a start and after an antecedent.

    Args:
      base_antecedent: what the base is conditioned on; None where the patch is added to the canonical.
      allow_stale: accept another antecedent than the one the patch was formed after, and no other difference.

    Raises:
      StalePatchError: another antecedent, of the chunk or of the base. PatchMismatchError: it does not belong to the
      chunk, or an engine-frame patch does not belong at the start. ShapeError: as `check_chunk`.
    """
    check_chunk(patch, chunk, "canonical" if base_antecedent is None else "conditioned")
    metadata = patch.metadata
    if metadata.frame == "engine":
        found = tuple(int(number) for number in np.asarray(start).ravel())
        if found != metadata.start:
            raise PatchMismatchError(f"patch: got one formed in the engine frame at {metadata.start}; expected {found}")

    # A removal patch is added to conditioned KV, so what that was conditioned on counts as well.
    if base_antecedent is not None:
        formed = metadata.base_behind
        difference = f"None; expected {base_antecedent.ids}" if formed is None else formed.difference(base_antecedent)
        if difference is not None:
            raise StalePatchError(f"patch of chunk {chunk.id!r}: got a base conditioned on {difference}")

    # Equal members are compared here, so that the usual case stops at once; members of unknown content match others.
    difference = None
    if not allow_stale and metadata.behind != antecedent:
        difference = metadata.behind.difference(antecedent, metadata.orbit)
    if difference is not None:
        kind = "any ordering of " if metadata.orbit else ""
        # Likely forgotten, since the argument has a default for chunks without an antecedent.
        if not antecedent.ids:
            shown = metadata.behind.shown
            difference = f"{shown}; got no antecedent; expected antecedent={shown}, the chunks that precede this one"
        raise StalePatchError(f"patch of chunk {chunk.id!r}: got one formed behind {kind}{difference}")
