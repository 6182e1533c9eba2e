"""Patches as host containers: factors, the metadata that says what they are for, and the checks of it."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..core import ChannelFactors, Heads, KVLayout, Leaf, PatchFrame, Quantised, Rope, is_low_rank
from ..errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from ..utils.kinds import expect_kind
from .antecedent import Antecedent, AntecedentLike, Member, antecedent_of
from .checksum import examine
from .chunk import Chunk, brief
from .content import names_of

Base = Literal["canonical", "conditioned", "patched"]


@dataclasses.dataclass(frozen=True)
class PatchMetadata:
    """What a patch was formed from, and so what it may be applied to.

    Attributes:
      chunk: id of the chunk.
      base: what the factors are added to: the "canonical"; the "conditioned" KV (removal patch); or, for a correction
        that only `update_patch` takes, the "patched" KV.
      antecedent: ids in front of the chunk, in order; sorted if `orbit`. `behind` says all that is known of them.
      orbit: the patch serves every ordering of the antecedent.
      layers: layers the factors cover, ascending; the others get nothing.
      heads: "joint" or "separate".
      shared_left: every channel has the same left factor (stored once).
      frame, start: "phase_free" (any start), or "engine" at exactly `start`.
      base_antecedent: what the base itself was conditioned on; None for the canonical.
      backbone, layout: of the chunk.
      content: of the chunk, so that another chunk of the same id is told apart; None in metadata of earlier versions.
      local: digest of the chunk's local positions; None likewise.
      corrects: of a correction, the digest of the patch that it corrects (`patch_digest`); else None.
      asked: (channel, rank) where a larger rank was asked for than the chunk's tokens or features allow, which is then
        what the patch has (or it is dense, where that is smaller); None where no rank was.
      members: the antecedent with contents and how each was served; None where the ids say all that is known.
      base_members: likewise of `base_antecedent`.
      lead: of the chunk (`Chunk.lead`): the digest of what its canonical was prefilled behind, or None.
      basis: the digest of the shared basis that v is taken from (`basis.Basis`); None where v is the patch's own.

    Raises:
      InputError: a bare str in place of several ids, or members of other ids.
    """

    chunk: str
    base: Base
    antecedent: tuple[str, ...]
    backbone: str
    layout: KVLayout
    layers: tuple[int, ...]
    orbit: bool = False
    heads: Heads = "joint"
    shared_left: bool = False
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

    def __post_init__(self) -> None:
        for word, ids in (("members", self.antecedent), ("base_members", self.base_antecedent or ())):
            ids, members = names_of(ids, word.replace("members", "antecedent")), getattr(self, word)
            if members is None:
                continue
            expect_kind(members, tuple | list, f"patch: {word}", "a tuple, each a Member")
            known = Antecedent(tuple(members))
            if known.ids != ids:
                raise InputError(f"patch: {word} of the ids {known.ids}; expected {ids}")
            object.__setattr__(self, word, None if known.plain else known.members)

    @property
    def behind(self) -> Antecedent:
        """The antecedent with all that is known of it."""
        return Antecedent.of(*self.antecedent) if self.members is None else Antecedent(self.members)

    @property
    def base_behind(self) -> Antecedent | None:
        """What the base was conditioned on, with all that is known of it; None for the canonical."""
        if self.base_members is not None:
            return Antecedent(self.base_members)
        return None if self.base_antecedent is None else Antecedent.of(*self.base_antecedent)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patch:
    """Low-rank (or dense) factors per channel, with their metadata.

    `factors` is a pytree of arrays, the only part that enters jitted code: {channel: (u, v)} with u [L', T, M] and
    v [L', M, F] (per head: [L', K, T, M] and [L', K, M, H]), or {channel: dense [L', T, K, H]}; L' counts the
    metadata's layers. The patches of a batch of chunks have B behind L' in every factor; stores do not take them.
    u carries the singular values and v's rows are orthonormal (until quantised). A channel left out gets no correction.

    Raises:
      ShapeError: factors of other layers, heads or features than the metadata says, or that do not fit each other.
      LayoutError: a channel that the layout does not have. InputError: layers likewise.
    """

    factors: Mapping[str, ChannelFactors]
    metadata: PatchMetadata

    def __post_init__(self) -> None:
        check_factors(self.factors, self.metadata)

    def __repr__(self) -> str:
        metadata, asked = self.metadata, dict(self.metadata.asked or ())
        ranks = ", ".join(
            f"{name} {'dense' if rank is None else f'rank {rank}'}{f' ({asked[name]} asked)' if name in asked else ''}"
            for name, rank in self.ranks.items()
        )
        kind = f"{'orbit, ' if metadata.orbit else ''}{metadata.base}, {metadata.frame}"
        batch = "" if self.batch is None else f"batch of {self.batch}, "
        layers = f"{batch}{len(metadata.layers)} of {metadata.layout.layers} layers"
        served = "" if metadata.behind.exact else ", not served exactly"
        behind = f"{brief(metadata.chunk)!r} behind {tuple(map(brief, metadata.antecedent))}{served}"
        return f"Patch({behind}: {ranks}, {layers}, {kind}, {self.nbytes} bytes)"

    @property
    def tokens(self) -> int | None:
        """Padded number of tokens; None of a patch without factors."""
        for factors in self.factors.values():
            return (_shape(factors[0])[-2:] if is_low_rank(factors) else _shape(factors)[-3:])[0]  # pyright: ignore
        return None

    @property
    def batch(self) -> int | None:
        """How many chunks the patch is of, B; None of one without a batch axis, and of a patch without factors."""
        batch = _batch_of(self.factors, self.metadata.heads)
        return batch[0] if batch else None

    def pad(self, tokens: int) -> "Patch":
        """Pads the patch for its chunk padded to `tokens`, as `Chunk.pad` does it: nothing is added to padding.

        Raises:
          ShapeError: `tokens` below what the patch has.
        """
        more = tokens - (tokens if self.tokens is None else self.tokens)
        if more < 0:
            raise ShapeError(
                f"patch of chunk {self.metadata.chunk!r}: pad to {tokens}; expected at least {self.tokens}"
            )
        factors = {
            name: (_longer(own[0], -2, more), own[1]) if is_low_rank(own) else _longer(own, -3, more)  # pyright: ignore
            for name, own in self.factors.items()
        }
        return Patch(factors, self.metadata)  # pyright: ignore[reportArgumentType]

    @property
    def ranks(self) -> dict[str, int | None]:
        """Rank of each channel of the layout: 0 where it gets no patch, None where it is dense."""
        return {name: self._rank(name) for name in self.metadata.layout.names}

    def _rank(self, name: str) -> int | None:
        factors = self.factors.get(name)
        if factors is None:
            return 0
        if not is_low_rank(factors):
            return None
        leaf = factors[0]
        return (leaf.values if isinstance(leaf, Quantised) else leaf).shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, scales included; a shared left factor counts once, a shared basis not at all.

        At rank m a channel takes m·(T + F) numbers where its KV takes T·F: rank 16 of a 480-token chunk at width 512 is
        as much as 31 of its 480 tokens.
        """
        own = dict(self.factors)
        if self.metadata.basis is not None:
            own = {name: factors[0] for name, factors in own.items() if is_low_rank(factors)}  # pyright: ignore
        leaves = jax.tree.leaves(own)
        total = sum(int(leaf.nbytes) for leaf in leaves)
        if self.metadata.shared_left:
            lefts = [jax.tree.leaves(own[0]) for own in self.factors.values() if is_low_rank(own)]  # pyright: ignore
            total -= sum(int(leaf.nbytes) for left in lefts[1:] for leaf in left)
        return total


def _shape(leaf: Any) -> tuple[int, ...]:
    return (leaf.values if isinstance(leaf, Quantised) else leaf).shape


def _longer(leaf: Leaf, axis: int, more: int) -> Leaf:
    """Zeros behind the tokens. Scales are one for whole directions, or one for each token."""
    if not isinstance(leaf, Quantised):
        return _with_zeros(leaf, axis, more)
    scales = more if leaf.scale.shape[axis] != 1 else 0
    return Quantised(_with_zeros(leaf.values, axis, more), _with_zeros(leaf.scale, axis, scales))


def _with_zeros(value: Array, axis: int, more: int) -> Array:
    widths = [(0, 0)] * value.ndim
    widths[axis] = (0, more)
    return jnp.pad(value, widths)


def _batch_of(factors: Mapping[str, Any], heads: Heads) -> tuple[int, ...]:
    """The batch axes of the first channel's factors."""
    for own in factors.values():
        if is_low_rank(own):
            return _shape(own[0])[1 : -3 if heads == "separate" else -2]
        return _shape(own)[1:-3]
    return ()


def check_factors(factors: Mapping[str, Any], metadata: PatchMetadata, *, batched: bool = True) -> None:
    """Refuses factors, on the host or on devices, that do not fit their metadata, by their shapes alone.

    Args:
      batched: whether they may have a batch axis.

    Raises:
      As `Patch`.
    """
    expect_kind(metadata, PatchMetadata, "patch: metadata", "a PatchMetadata")
    expect_kind(factors, Mapping, "patch: factors", "{channel: factors}")
    layout, layers = metadata.layout, metadata.layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= layout.layers:
        raise InputError(f"patch: layers {layers}; expected some of 0 to {layout.layers - 1}, ascending")
    batch = _batch_of(factors, metadata.heads)
    if len(batch) > batched:
        batch = ()
    lefts, tokens = set(), set()
    for name, own in factors.items():
        channel = layout.channel(name)
        per_head = metadata.heads == "separate"
        before = (len(layers), *batch, channel.heads) if per_head else (len(layers), *batch)
        if is_low_rank(own):
            u, v = map(_shape, own)
            _check_shape(u, (*before, None, None), f"u of {name!r}", "layers, tokens, rank")
            _check_shape(v, (*before, u[-1], channel.width if per_head else channel.features), f"v of {name!r}", "rank")
            lefts.add(u)
            tokens.add(u[-2])
        else:
            dense = _shape(own)
            wanted = (len(layers), *batch, None, channel.heads, channel.width)
            _check_shape(dense, wanted, f"{name!r}", "layers, tokens, heads")
            tokens.add(dense[-3])
        for leaf in own if is_low_rank(own) else (own,):
            if isinstance(leaf, Quantised):
                _check_scale(leaf, name)
    if len(tokens) > 1:
        raise ShapeError(
            f"patch of chunk {metadata.chunk!r}: {sorted(tokens)} tokens; expected as many in every channel"
        )
    if metadata.shared_left and len(lefts) > 1:
        raise ShapeError(f"patch of chunk {metadata.chunk!r}: shapes {sorted(lefts)} of u; expected one left factor")


def _check_shape(found: tuple[int, ...], wanted: tuple[int | None, ...], what: str, axes: str) -> None:
    if len(found) != len(wanted) or any(size not in (None, own) for own, size in zip(found, wanted, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ShapeError(f"patch: {what} of shape {found}; expected [{sizes}] ({axes}, …)")


def _check_scale(leaf: Quantised, name: str) -> None:
    values, scale = leaf.values.shape, leaf.scale.shape
    if len(scale) != len(values) or any(one not in (1, own) for one, own in zip(scale, values, strict=True)):
        raise ShapeError(f"patch: scale of shape {scale} for values {values} of {name!r}; expected 1 or as many each")


_STORED = tuple(field.name for field in dataclasses.fields(Rope) if field.name != "angles")


def same_storage(first: KVLayout, second: KVLayout) -> bool:
    """Compares two layouts by the phase-free KV they hold: all but the way angles are computed."""
    if first is second:
        return True
    if (first.kind, first.layers, first.channels) != (second.kind, second.layers, second.channels):
        return False
    return all(getattr(first.rope, name) == getattr(second.rope, name) for name in _STORED)


_LATER = ("members", "base_members", "lead", "basis")


def patch_digest(patch: Patch) -> str:
    """Digests the bits of a patch's factors and all that its metadata says of what they are: 32 hexadecimal digits.

    One pass on the device over the factors. Equal for the same patch after storing; another for it truncated, quantised
    or padded.
    """
    metadata = patch.metadata
    said = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    for word in ("layout", "asked"):
        del said[word]
    for word in _LATER:
        if said[word] is None:  # so that what was formed before the word was known keeps its digest
            del said[word]
    leaves = {}
    for name, factors in patch.factors.items():
        leaves |= {f"{name}.{place}": leaf for place, leaf in enumerate(jax.tree.leaves(factors))}
    tokens = max((leaf.shape[1] for leaf in leaves.values()), default=0)
    found = examine(leaves, tokens)[0]
    return hashlib.blake2b(f"{found}\0{sorted(said.items())}".encode(), digest_size=16).hexdigest()


def check_is_chunk(chunk: Chunk) -> None:
    """Raises InputError where what is given as a chunk is none."""
    if not isinstance(chunk, Chunk):
        raise InputError(f"chunk of type {type(chunk).__name__}; expected a Chunk")


def check_is_patch(patch: Patch) -> None:
    """Raises InputError where what is given as a patch is none."""
    if not isinstance(patch, Patch):
        raise InputError(f"patch of type {type(patch).__name__}; expected a Patch")


def check_chunk(patch: Patch, chunk: Chunk, base: Base) -> None:
    """Raises PatchMismatchError where a patch is of another chunk, base, backbone or layout.

    Contents are compared where both are known: nothing is computed for it but a digest of few positions, once.
    """
    check_is_patch(patch)
    metadata = patch.metadata
    for word, found, expected in (
        ("chunk", metadata.chunk, chunk.id),
        ("base", metadata.base, base),
        ("backbone", metadata.backbone, chunk.backbone),
        ("lead", metadata.lead, chunk.lead),
    ):
        if found != expected:
            raise PatchMismatchError(f"patch: {word} {found!r}; expected {expected!r}")
    if not same_storage(metadata.layout, chunk.layout):
        raise PatchMismatchError(f"patch: layout {metadata.layout}; expected {chunk.layout}")
    if None not in (metadata.content, chunk.content) and metadata.content != chunk.content:
        raise PatchMismatchError(
            f"patch: formed of chunk {chunk.id!r} with content {metadata.content!r}; expected {chunk.content!r}, which "
            "this chunk of the same id has"
        )
    if metadata.local is not None and metadata.local != chunk.places:
        raise PatchMismatchError(
            f"patch: formed of chunk {chunk.id!r} with local positions {metadata.local}; expected {chunk.places}, "
            "which this chunk has"
        )


def check_factor_shapes(patch: Patch, chunk: Chunk) -> None:
    """Raises ShapeError where a patch's factors have another number of tokens, or another batch, than the chunk."""
    if patch.tokens not in (None, chunk.tokens):
        raise ShapeError(
            f"patch of chunk {chunk.id!r}: {patch.tokens} tokens; expected the chunk's {chunk.tokens} (`Patch.pad` "
            "pads a patch as `Chunk.pad` its chunk)"
        )
    if patch.factors and patch.batch != chunk.batch:
        raise ShapeError(f"patch of chunk {chunk.id!r}: batch {patch.batch}; expected the chunk's {chunk.batch}")


def check_stamp(
    patch: Patch,
    chunk: Chunk,
    start: np.ndarray | jax.Array,
    antecedent: AntecedentLike,
    base_antecedent: AntecedentLike | None,
    allow_stale: bool,
) -> None:
    """Raises PatchMismatchError or StalePatchError, with found and expected values, where a patch does not belong.

    `base_antecedent` is None where the patch would be added to the canonical. `allow_stale` overrides `antecedent`.
    """
    check_is_patch(patch)
    metadata, wanted = patch.metadata, antecedent_of(antecedent)
    check_chunk(patch, chunk, "canonical" if base_antecedent is None else "conditioned")
    if metadata.frame == "engine":
        found = tuple(int(number) for number in np.asarray(start).ravel())
        if found != metadata.start:
            raise PatchMismatchError(f"patch: formed in the engine frame at {metadata.start}; expected {found}")
    if base_antecedent is not None:
        base = antecedent_of(base_antecedent, "base_antecedent")
        formed = metadata.base_behind
        differs = f"None; expected {base.ids}" if formed is None else formed.difference(base)
        if differs is not None:
            raise StalePatchError(f"patch of chunk {chunk.id!r}: its base was conditioned on {differs}")
    if allow_stale:
        return
    differs = metadata.behind.difference(wanted, metadata.orbit)
    if differs is not None:
        kind = "any ordering of " if metadata.orbit else ""
        if not wanted.ids:  # likely forgotten: it has a default, for chunks with nothing in front of them
            shown = metadata.behind.shown
            differs = f"{shown}; got no antecedent; expected antecedent={shown}: what stands in front of the chunk"
        raise StalePatchError(f"patch of chunk {chunk.id!r}: formed behind {kind}{differs}")
