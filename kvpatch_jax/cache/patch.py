"""Patches as host containers: factors, the metadata that says what they apply to, and the checks of both."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..core import PARTS, AnyArray, ChannelFactors, KVLayout, RaggedFactors, is_low_rank
from ..errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from ..utils.kinds import expect_kind, is_whole
from .chunk import Chunk, brief, check_finite, content_of, pad
from .ids import examine
from .provenance import Antecedent

Base = Literal["canonical", "conditioned", "patched"]


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What a patch may be added to: a chunk's name, what computed it, and what tells chunks of one name apart.

    Attributes:
      id, backbone, layout: of the chunk.
      content: of the chunk; None is unknown, and matches any.
      places: digest of the chunk's local positions (`Chunk.places`); None likewise.
      lead: digest of what its canonical was prefilled after (`Chunk.lead`), or None.
      encoding: word of the encoding of the base that the deficit was taken against (`Chunk.encoding`); None: the KV as
        it was prefilled. Another encoding of the same chunk is another base.
    """

    id: str
    backbone: str
    layout: KVLayout
    content: str | None = None
    places: str | None = None
    lead: str | None = None
    encoding: str | None = None

    @classmethod
    def of(cls, chunk: Chunk) -> "ChunkKey":
        """Returns the key of a chunk."""
        return cls(chunk.id, chunk.backbone, chunk.layout, content_of(chunk), chunk.places, chunk.lead, chunk.encoding)


@dataclasses.dataclass(frozen=True)
class PatchMetadata:
    """Provenance of a patch: what it was formed from, and so what it may be applied to.

    Attributes:
      chunk: what it was formed of.
      antecedent: the chunks that precede it, in order; sorted if `orbit`.
      layers: layers that the factors cover, ascending; the others get no correction.
      base: what the factors are added to: the "canonical"; the "conditioned" KV (removal patch); or, for a correction
        that only `update_patch` takes, the "patched" KV.
      base_antecedent: what the base itself was conditioned on; None for the canonical.
      orbit: whether the patch serves every ordering of the antecedent.
      corrects: for a correction, the digest of the patch that it corrects (`patch_digest`); else None.
      basis: the digest of the shared basis that v is taken from (`patching.Basis`); None where v is the patch's own.
      errors: readout error of the chunk with the patch, and without it (`patching.readout_error`). The square of their
        ratio estimates what the patch leaves of blind reuse's loss. None where it was not measured. It tells no patches
        apart.
    """

    chunk: ChunkKey
    antecedent: Antecedent
    layers: tuple[int, ...]
    base: Base = "canonical"
    base_antecedent: Antecedent | None = None
    orbit: bool = False
    corrects: str | None = None
    basis: str | None = None
    errors: tuple[float, float] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patch:
    """Low-rank (or dense) factors per channel, with their metadata.

    `factors` is a pytree of arrays, the only part that enters jitted code: {channel: (u, v)} with u [L', T, M] and
    v [L', M, F], or {channel: dense [L', T, K, H]}, or with a rank for each layer {channel: `RaggedFactors`}; L' counts
    those of the metadata's layers that keep the channel. The parts of a transition have R rows of their own in place of
    T. Patches of a batch of chunks have the axis B after L' in every factor; stores do not take them.
    u carries the singular values and v's rows are orthonormal (until quantised). A channel without factors gets no
    correction.

    Raises:
      InputError: factors that are no arrays by channel, or no metadata. NotFiniteError: NaN or infinity in them.
    """

    factors: Mapping[str, ChannelFactors]
    metadata: PatchMetadata

    def __post_init__(self) -> None:
        expect_kind(self.metadata, PatchMetadata, "patch: metadata", "a PatchMetadata")
        expect_kind(self.factors, Mapping, "patch: factors", "a mapping from channels to factors")
        floating = []
        for name, own in self.factors.items():
            for leaf in jax.tree.leaves(own):
                expect_kind(leaf, AnyArray, f"patch: factors[{name!r}]", "arrays")
                if jnp.issubdtype(leaf.dtype, jnp.floating):
                    floating.append((name, leaf))
        check_finite(floating, f"patch of chunk {self.metadata.chunk.id!r}")

    def __repr__(self) -> str:
        metadata, chunk = self.metadata, self.metadata.chunk
        ranks = [f"{name} {'dense' if rank is None else f'rank {rank}'}" for name, rank in self.ranks.items()]
        batch = "" if self.batch is None else f"batch of {self.batch}, "
        layers = f"{batch}{len(metadata.layers)} of {chunk.layout.layers} layers"
        exactness = "" if metadata.antecedent.exact else ", not exact"
        formed = f"{brief(chunk.id)!r} after {tuple(map(brief, metadata.antecedent.ids))}{exactness}"
        kind = f"{'orbit, ' if metadata.orbit else ''}{metadata.base}"
        left = "" if self.predicted is None else f", leaves {self.predicted:.2g} of blind reuse's loss"
        return f"Patch({formed}: {', '.join(ranks)}, {layers}, {kind}, {self.nbytes} bytes{left})"

    @property
    def predicted(self) -> float | None:
        """Share of blind reuse's loss (KL) that the patch is estimated to leave; None where that was not measured."""
        if self.metadata.errors is None:
            return None
        patched, blind = self.metadata.errors
        # Nothing is lost where nothing was absorbed.
        return (patched / blind) ** 2 if blind else 0.0

    @functools.cached_property
    def tokens(self) -> int | None:
        """Padded number of tokens; None of a patch without factors for the channels that have any."""
        for channel in self.metadata.chunk.layout.token_channels:
            factors = self.factors.get(channel.name)
            if isinstance(factors, RaggedFactors):
                return factors.u.shape[-1]
            if factors is not None:
                return factors[0].shape[-2] if is_low_rank(factors) else factors.shape[-3]  # pyright: ignore
        return None

    @functools.cached_property
    def batch(self) -> int | None:
        """Number of chunks B that the patch is of; None without a batch axis, and of a patch without factors."""
        for factors in self.factors.values():
            if not isinstance(factors, RaggedFactors):
                shape = factors[0].shape[:-2] if is_low_rank(factors) else factors.shape[:-3]  # pyright: ignore
                return shape[1] if len(shape) > 1 else None
        return None

    def pad(self, tokens: int) -> "Patch":
        """Pads the patch for its chunk padded to `tokens`, as `Chunk.pad` does: padding gets no correction.

        Raises:
          ShapeError: `tokens` below what the patch has.
        """
        if not is_whole(tokens, self.tokens or 0):
            what = f"patch of chunk {self.metadata.chunk.id!r}"
            raise ShapeError(f"{what}: got tokens={tokens!r:.80}; expected at least {self.tokens or 0}")
        more = 0 if self.tokens is None else int(tokens) - self.tokens

        factors: dict[str, Any] = {}
        for name, own in self.factors.items():
            if name in PARTS:
                factors[name] = own
            elif isinstance(own, RaggedFactors):
                factors[name] = dataclasses.replace(own, u=pad(own.u, -1, more))
            elif is_low_rank(own):
                factors[name] = (pad(own[0], -2, more), own[1])  # pyright: ignore
            else:
                factors[name] = pad(own, -3, more)  # pyright: ignore[reportArgumentType]

        return trusted_patch(factors, self.metadata)

    @property
    def ranks(self) -> dict[str, int | None]:
        """Rank of each channel of the layout: 0 where it has no factors, None where it is dense.

        Of a channel with a rank for each layer, the highest.
        """
        ranks: dict[str, int | None] = dict.fromkeys(self.metadata.chunk.layout.names, 0)
        for name, factors in self.factors.items():
            if isinstance(factors, RaggedFactors):
                ranks[name] = factors.rows.shape[-1]
                continue
            ranks[name] = factors[0].shape[-1] if is_low_rank(factors) else None  # pyright: ignore[reportIndexIssue]
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


def trusted_patch(factors: Mapping[str, Any], metadata: PatchMetadata) -> Patch:
    """Makes a patch of factors that were checked before, without reading them again."""
    patch = object.__new__(Patch)
    object.__setattr__(patch, "factors", factors)
    object.__setattr__(patch, "metadata", metadata)
    return patch


def check_factors(factors: Mapping[str, Any], metadata: PatchMetadata) -> None:
    """Refuses factors of one chunk that do not fit their metadata, by their shapes alone: those of a store's files.

    Raises:
      ShapeError: factors of other layers, heads or features than the metadata says, or that do not fit each other.
      LayoutError: a channel that the layout does not have. InputError: layers that the layout does not have.
    """
    layout, layers = metadata.chunk.layout, metadata.layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= layout.layers:
        raise InputError(f"patch: got layers {layers}; expected some of 0 to {layout.layers - 1}, ascending")

    tokens: set[int] = set()
    for name, own in factors.items():
        channel = layout.channel(name)
        # Of the patch's layers those that keep this channel.
        kept, rows, features = len(layout.rows_of(name, layers)), channel.rows, channel.features
        if isinstance(own, RaggedFactors):
            directions = own.v.shape[0]
            expected = {"v": (own.v, (None, features)), "u": (own.u, (directions, rows))}
            expected["rows"] = (own.rows, (kept, None))
            count = own.u.shape[-1]
        elif is_low_rank(own):
            rank = own[0].shape[-1]
            expected = {"u": (own[0], (kept, rows, None)), "v": (own[1], (kept, rank, features))}
            count = own[0].shape[-2]
        else:
            expected = {"dense": (own, (kept, rows, channel.heads, channel.width))}
            count = own.shape[-3]
        for word, (leaf, sizes) in expected.items():
            fits = [size in (None, actual) for size, actual in zip(sizes, leaf.shape, strict=False)]
            if len(leaf.shape) != len(sizes) or not all(fits):
                shown = ", ".join("any" if size is None else str(size) for size in sizes)
                raise ShapeError(f"patch: got {word} of {name!r} of shape {leaf.shape}; expected [{shown}]")
        if rows is None:
            tokens.add(count)

    if len(tokens) > 1:
        raise ShapeError(f"patch: got {sorted(tokens)} tokens; expected as many in every channel")


def same_storage(first: KVLayout, second: KVLayout) -> bool:
    """Compares two layouts by the phase-free KV they describe: all but how angles are computed."""
    # Angles change no phase-free number.
    return first is second or first.with_angles(second.rope.angles) == second


def patch_digest(patch: Patch) -> str:
    """Digests the bits of a patch's factors and the metadata that describes them: 32 hexadecimal digits.

    One pass on the device over the factors. A patch has the same digest after storing, and another one after it was
    truncated, quantised or padded.
    """
    # How angles are computed changes no phase-free number.
    metadata, chunk = patch.metadata, patch.metadata.chunk
    fields = [chunk.id, chunk.backbone, chunk.content, chunk.places, chunk.lead, chunk.encoding]
    fields += [metadata.antecedent, metadata.layers, metadata.base, metadata.base_antecedent, metadata.orbit]
    fields += [metadata.corrects, metadata.basis]

    # `examine` takes tokens on the second axis of every array; the longest one bounds them all.
    leaves = {}
    for name, factors in patch.factors.items():
        if isinstance(factors, RaggedFactors):
            # As a store has them, whatever they are held in.
            factors = dataclasses.replace(factors, rows=np.asarray(factors.rows, np.int32))
        leaves |= {f"{name}.{place}": leaf for place, leaf in enumerate(jax.tree.leaves(factors))}
    tokens = max((leaf.shape[1] for leaf in leaves.values()), default=0)
    bits = examine(leaves, tokens)[0]
    return hashlib.blake2b(f"{bits}\0{fields}".encode(), digest_size=16).hexdigest()


def check_applies(
    patch: Patch,
    chunk: Chunk,
    antecedent: Antecedent,
    base_antecedent: Antecedent | None = None,
    *,
    allow_stale: bool = False,
) -> None:
    """Checks that a patch may be applied to a chunk after an antecedent, by its metadata and its shape.

    Contents and positions are compared where both are known. Nothing is computed but a digest of few positions, once.

    Args:
      base_antecedent: what the base is conditioned on; None where the patch is added to the canonical.
      allow_stale: accept another antecedent than the one the patch was formed after, and no other difference.

    Raises:
      StalePatchError: another antecedent, of the chunk or of the base. PatchMismatchError: it does not belong to the
      chunk. ShapeError: the factors have another number of tokens, or another batch, than the chunk. InputError: not a
      patch.
    """
    if not isinstance(patch, Patch):
        raise InputError(f"patch: got a {type(patch).__name__}; expected a Patch")
    key, base = patch.metadata.chunk, "canonical" if base_antecedent is None else "conditioned"
    if patch.metadata.base != base:
        raise PatchMismatchError(f"patch: got base {patch.metadata.base!r}; expected {base!r}")
    if key.layout is not chunk.layout and not same_storage(key.layout, chunk.layout):
        raise PatchMismatchError(f"patch: got layout {key.layout}; expected {chunk.layout}")
    for word in ("id", "backbone", "lead", "encoding", "content", "places"):
        formed, actual = getattr(key, word), getattr(chunk, word)
        # What one of the two does not know differs from nothing; of lead and encoding None is known.
        unknown = word in ("content", "places") and None in (formed, actual)
        if formed != actual and not unknown:
            name = "local positions" if word == "places" else word
            raise PatchMismatchError(
                f"patch: got one formed of chunk {key.id!r} with {name} {formed!r}; expected {actual!r}, which chunk "
                f"{chunk.id!r} has"
            )
    if patch.factors and (patch.tokens or chunk.tokens, patch.batch) != (chunk.tokens, chunk.batch):
        raise ShapeError(
            f"patch of chunk {chunk.id!r}: got {patch.tokens} tokens, batch {patch.batch}; expected the chunk's "
            f"{chunk.tokens}, batch {chunk.batch} (`Patch.pad` pads a patch as `Chunk.pad` its chunk)"
        )

    # A removal patch is added to conditioned KV, so what that was conditioned on counts as well.
    formed, base_formed = patch.metadata.antecedent, patch.metadata.base_antecedent
    if base_antecedent is not None and base_formed != base_antecedent:
        difference = f"None; expected {base_antecedent.ids}"
        difference = difference if base_formed is None else base_formed.difference(base_antecedent)
        if difference is not None:
            raise StalePatchError(f"patch of chunk {chunk.id!r}: got a base conditioned on {difference}")

    # Equal members are compared here, so that the usual case stops at once; members of unknown content match others.
    if allow_stale or formed == antecedent:
        return
    difference = formed.difference(antecedent, patch.metadata.orbit)
    if difference is None:
        return
    # Likely forgotten, since the argument has a default for chunks without an antecedent.
    if not antecedent.ids:
        shown = formed.shown
        difference = f"{shown}; got no antecedent; expected antecedent={shown}, the chunks that precede this one"
    kind = "any ordering of " if patch.metadata.orbit else ""
    raise StalePatchError(f"patch of chunk {chunk.id!r}: got one formed behind {kind}{difference}")
