"""What a window holds: entries, the ways in which they are served, and what it keeps of a patch. No arrays.

An entry is what is placed; a state is how its KV was made; a piece is an entry in its state at its place.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Literal, NamedTuple

import numpy as np

from ..backbone import Tokens
from ..cache import EXACT, Antecedent, Chunk, Member, Patch, brief, content_of, encoded, patch_digest
from ..core import Quantised, is_low_rank
from ..errors import WindowError
from .costs import adding_flops

Kind = Literal["chunk", "text"]
How = Literal["prefill", "patch", "bare", "leading"]
StateKind = Literal["bare", "patched", "conditioned", "evicted"]
PatchBase = Literal["canonical", "conditioned"]
Fidelity = Literal["exact", "survivor", "approximate"]

tuple_of = tuple.__new__
"""Makes a named tuple of all its fields past its constructor, which takes twice as long: where there are hundreds."""

LIMIT = 2**30
"""Positions, tokens and spans lie below."""


def short_digest(text: str) -> str:
    """Digests a text: 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is placed in a window: a chunk, which has a canonical, or a segment of text, which has none.

    Attributes:
      id: its name, of which a window has no two.
      content: a digest of what it shows, by which provenance tells it from others; None where nobody said (then its
        id counts).
      tokens: how many it has, padding left out.
      span: how far the next entry's start moves: one more than its largest position (under M-RoPE the largest extent).
      kind: "chunk" or "text".
      order_free: a chunk whose place among others of its kind means nothing, so that `reorder` may move it.
      modality: what it shows: "image", "text", "images" (several in one), "mixed"; None where nobody said, of texts
        "text". Certificates are of some alone. Its content tells it from others, not this.

    Raises:
      WindowError: an empty id, content or modality, no tokens, a span below 1, another kind, or a text that is
        order-free.
      InputError: an id or content that UTF-8 cannot hold.
    """

    id: str
    content: str | None
    tokens: int
    span: int
    kind: Kind = "chunk"
    order_free: bool = False
    modality: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.modality is None and self.kind == "text":
            object.__setattr__(self, "modality", "text")
        if self.modality is not None and (not isinstance(self.modality, str) or not self.modality):
            raise WindowError(f"entry: modality {self.modality!r:.80}; expected a word such as 'image', or None")
        if not isinstance(self.id, str) or not self.id:
            raise WindowError(f"entry: id {self.id!r:.80}; expected a name")
        encoded(self.id + (self.content if isinstance(self.content, str) else ""))
        if self.content is not None and (not isinstance(self.content, str) or not self.content):
            raise WindowError(f"entry {brief(self.id)!r}: content {self.content!r:.80}; expected a digest, or None")
        for word in ("tokens", "span"):
            found = getattr(self, word)
            if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found < LIMIT:
                raise WindowError(f"entry {brief(self.id)!r}: {word} {found!r:.80}; expected a number from 1 to 2**30")
        if self.kind not in ("chunk", "text"):
            raise WindowError(f"entry {brief(self.id)!r}: kind {self.kind!r:.80}; expected 'chunk' or 'text'")
        if not isinstance(self.order_free, bool) or (self.order_free and self.kind == "text"):
            raise WindowError(f"entry {brief(self.id)!r}: order_free {self.order_free!r}; expected it of chunks alone")

    @classmethod
    def of(cls, chunk: Chunk, *, order_free: bool = False, modality: str | None = None) -> "Entry":
        """Describes a chunk. Its content is computed where it came without one."""
        span = max(int(chunk.span), 1)
        return cls(chunk.id, content_of(chunk), int(chunk.length), span, "chunk", order_free, modality)

    @classmethod
    def of_tokens(
        cls,
        id: str,
        tokens: Tokens,
        content: str | None = None,
        *,
        kind: Kind = "text",
        order_free: bool = False,
        modality: str | None = None,
    ) -> "Entry":
        """Describes embedded tokens, [B, T] as `backbone.embed` gives them; rows must reach equally far.

        Raises:
          WindowError: rows of unequal extents. Else as `Entry`.
        """
        places = np.asarray(tokens.positions)
        rows = places.reshape(len(places), -1)
        reach = {math.floor(row.max()) - math.floor(row.min()) + 1 for row in rows} if rows.size else {0}
        if len(reach) != 1:
            raise WindowError(f"entry {brief(id)!r}: rows that span {sorted(reach)}; expected one span")
        return cls(id, content, int(places.shape[1]), reach.pop(), kind, order_free, modality)

    @property
    def key(self) -> str:
        """What provenance knows it by: its content, or its id where that is unknown."""
        return self.id if self.content is None else self.content


@dataclasses.dataclass(frozen=True)
class PieceState:
    """How an entry's KV was made.

    Attributes:
      kind: "conditioned" (a forward behind what stood in front), "patched" (a base and a patch), "bare" (the canonical
        alone) or, of what left the window, "evicted".
      behind: a digest of what it was made behind: of a conditioned one, of all in front and how each was served (the
        window's digest at that place); of a patched one, the digest of the antecedent that its patch was formed behind;
        of a bare one, "".
      pure: conditioned, in all layers, when nothing in front was approximate: the KV that the model itself computes
        where no token sees a chunk that had left by then. It stays what it was, whatever leaves afterwards.
      patch: digest of the patch; None without one.
      base: what the patch is added to.
      rank, patch_bytes, patch_flops: of the patch: its rank as in `PatchNote`, bytes of its factors, FLOPs per token to
        add it.
    """

    kind: StateKind
    behind: str = ""
    pure: bool = False
    patch: str | None = None
    base: PatchBase = "canonical"
    rank: int = 0
    patch_bytes: int = 0
    patch_flops: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """Digests what the KV depends on: 32 hexadecimal digits."""
        return short_digest(f"state {self.kind} {self.behind} {self.pure} {self.base} {self.patch}")

    @classmethod
    def conditioned(cls, behind: str, pure: bool) -> "PieceState":
        """The state of what was prefilled behind this.

        A window is linked with hundreds of them at a time: what has its default is left to the class, for setting the
        fields of a frozen dataclass takes longer than digesting what they say.
        """
        made = object.__new__(cls)
        made.__dict__.update(kind="conditioned", behind=behind, pure=pure)
        return made


FRESH = PieceState("conditioned")
"""Of a piece that is prefilled where it stands; linking fills in behind what. Of one that is run again in its place
`aside` says until then what it was."""
BARE = PieceState("bare")


class PlacedPiece(NamedTuple):
    """An entry at its place.

    Attributes:
      entry: what it is.
      start: where its positions count from, one number for all axes.
      state: how it is served.
      aside: the state that `Window.condition` switches back to, of a piece that `Window.bare` switched; else None.
      born: the step at which its KV was computed; it has seen what stands in front and was placed before.
      placed: the step at which it came to stand in front of those behind it, as what it is now.
      front: digest of what stands in front of it, gap included. This and what follows is derived by the window.
      fidelity: "exact", "survivor" or "approximate".
      latest: the last step at which it, or one in front of it, was placed.
      pure: whether neither it nor any in front is approximate.
    """

    entry: Entry
    start: int
    state: PieceState
    aside: PieceState | None = None
    born: int = 0
    placed: int = 0
    front: str = ""
    fidelity: Fidelity = "approximate"
    latest: int = 0
    pure: bool = False

    @property
    def id(self) -> str:
        """The entry's id."""
        return self.entry.id

    @property
    def end(self) -> int:
        """Where the next piece's positions count from if it stands right behind."""
        return self.start + self.entry.span

    @property
    def service(self) -> str:
        """How it is served, as provenance writes it: "exact", or a word and the state's digest."""
        if self.fidelity == EXACT:
            return EXACT
        word = self.state.kind if self.state.kind in ("bare", "patched") else self.fidelity
        return f"{word}:{self.state.digest}"

    def run_again(self, born: int) -> "PlacedPiece":
        """It before it is linked, prefilled in its place at this step."""
        return tuple_of(PlacedPiece, (self.entry, self.start, FRESH, self.aside or self.state, born, *self[5:]))

    def member(self, gap: int = 0) -> Member:
        """It as a member of an antecedent; `gap` is what is free between it and what stands behind it."""
        return Member(self.entry.id, self.entry.content, apart(self.service, gap))


def apart(service: str, gap: int) -> str:
    """How a piece is served with so many free positions behind it: those who read it find it further away."""
    return f"apart:{short_digest(f'apart {gap} {service}')}" if gap else service


@dataclasses.dataclass(frozen=True)
class PatchNote:
    """What a window needs to know of a patch, made of it once: `PatchNote.of(patch)` digests its factors on the device.

    Attributes:
      digest: as `patch_digest` gives it. chunk, content: of the chunk it is of.
      base: what it is added to. antecedent: what it was formed behind; any order of it if `orbit`.
      base_antecedent: what the base was conditioned on, of a removal patch.
      rank: directions of its own that it has in every channel and layer (where it is dense, all), by which a
        certificate is asked; 0 where it leaves some out, was rounded to 8 bits or has a shared basis.
      nbytes: of its factors. flops: per token, of multiplying and adding them.
    """

    digest: str
    chunk: str
    content: str | None
    base: PatchBase
    antecedent: Antecedent
    base_antecedent: Antecedent | None
    orbit: bool
    rank: int
    nbytes: int
    flops: int

    @classmethod
    def of(cls, patch: "Patch | PatchNote") -> "PatchNote":
        """Takes down what a window needs of a patch; a note passes.

        Raises:
          WindowError: no patch, a correction (`update_patch` folds it in), or one that holds at one start only.
        """
        if isinstance(patch, PatchNote):
            return patch
        if not isinstance(patch, Patch):
            raise WindowError(f"patch of type {type(patch).__name__}; expected a Patch, or a PatchNote of one")
        metadata = patch.metadata
        if metadata.base == "patched" or metadata.frame != "phase_free":
            raise WindowError(
                f"patch of chunk {brief(metadata.chunk)!r}: base {metadata.base!r}, frame {metadata.frame!r}; expected "
                "'canonical' or 'conditioned', and 'phase_free'"
            )
        return cls(
            digest=patch_digest(patch),
            chunk=metadata.chunk,
            content=metadata.content,
            base=metadata.base,
            antecedent=metadata.behind,
            base_antecedent=metadata.base_behind,
            orbit=metadata.orbit,
            rank=_common_rank(patch),
            nbytes=patch.nbytes,
            flops=adding_flops(patch),
        )

    @functools.cached_property
    def chains(self) -> dict[str, str]:
        """Chain digests of the antecedent by backbone, as `chain.chain_of` computed them."""
        return {}

    @functools.cached_property
    def served(self) -> PieceState:
        """The state of a piece that this patch serves, with its digest computed once."""
        return self.state()

    def state(self) -> PieceState:
        """The state of a piece that this patch serves."""
        return PieceState(
            kind="patched",
            behind=self.antecedent.digest,
            patch=self.digest,
            base=self.base,
            rank=self.rank,
            patch_bytes=self.nbytes,
            patch_flops=self.flops,
        )


def _common_rank(patch: Patch) -> int:
    """See `PatchNote.rank`: never more than what the patch has anywhere, for bounds are looked up by it."""
    metadata, layout = patch.metadata, patch.metadata.layout
    leaves = [leaf for own in patch.factors.values() for leaf in (own if is_low_rank(own) else (own,))]
    rounded = any(isinstance(leaf, Quantised) for leaf in leaves)
    if rounded or metadata.basis is not None or len(metadata.layers) < layout.layers:
        return 0
    found = patch.ranks
    return min(layout.channel(name).features if rank is None else rank for name, rank in found.items())
