"""Contents of a window: entries, the states in which they are served, and notes of patches. No arrays.

An entry is what is placed; a state is how its KV was made; a piece is an entry in its state at its place.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Literal, NamedTuple

import jax
import numpy as np

from ..backbone import Tokens
from ..cache import EXACT, Antecedent, Chunk, Member, Patch, brief, content_of, encoded, patch_digest
from ..core import PackedArray, Quantised, RaggedFactors, end_position
from ..errors import WindowError
from .costs import adding_flops, transition_adding_flops

Kind = Literal["chunk", "text"]
How = Literal["prefill", "patch", "bare", "leading", "restored"]
StateKind = Literal["bare", "patched", "conditioned", "evicted"]
PatchBase = Literal["canonical", "conditioned"]
Likeness = Literal["mean", "near"]
"""What a stored prefill has in common with a place, beside the pinned lead: the nearest piece, as the mean over several
such; or of one."""
Fidelity = Literal["exact", "survivor", "approximate"]
Way = tuple[str, int]
"""How KV became approximate: an operating point and a rank, the key under which a certificate bounds the loss."""
Ways = tuple[Way, ...]
"""Distinct ways, sorted. None at all: the KV is what the model computes."""

BARE_WAYS: Ways = (("bare", 0),)
UNKNOWN: Way = ("", 0)
"""Way of what is of unknown origin. Nothing bounds it."""
UNKNOWN_WAYS: Ways = (UNKNOWN,)
MOST_WAYS = 8
"""Ways that one piece keeps apart. Of more than that, nothing is known."""

tuple_of = tuple.__new__
"""Makes a named tuple of all its fields, without its constructor, which takes twice as long: for hundreds of them."""

LIMIT = 2**30
"""Upper bound of positions, tokens and spans."""


def short_digest(text: str) -> str:
    """Returns the digest of a text, 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def merged(first: Ways, second: Ways) -> Ways:
    """Returns the ways of either; only the unknown one where it is among them, because nothing else matters then."""
    if not second or first == UNKNOWN_WAYS:
        return first
    together = {*first, *second}
    known = UNKNOWN not in together and len(together) <= MOST_WAYS
    return tuple(sorted(together)) if known else UNKNOWN_WAYS


def contents_differ(first: str | None, second: str | None) -> bool:
    """Returns whether two digests are of different contents. An unknown one (None) is taken on trust."""
    return first is not None and second is not None and first != second


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is placed in a window: a chunk, which has a canonical, or a segment of text, which has none.

    Attributes:
      id: its name, unique in a window.
      content: digest of what it shows, by which provenance identifies it; None if unknown (then its id counts).
      tokens: how many it has, without padding.
      span: by how much the next entry's start moves: its largest position plus one (under M-RoPE the largest extent).
      kind: "chunk" or "text".
      order_free: a chunk whose place among others of its kind has no meaning, so that `reorder` may move it.
      modality: what it shows: "image", "video", "audio", "text", "images" (several in one), "mixed"; None if unknown,
        of texts "text". Certificates cover certain modalities. It is no part of the entry's identity.

    Raises:
      WindowError: an empty id, content or modality, no tokens, a span below 1, an unknown kind, or a text that is
        order-free.
      InputError: an id or content that UTF-8 cannot encode.
    """

    id: str
    content: str | None
    tokens: int
    span: int
    kind: Kind = "chunk"
    order_free: bool = False
    modality: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        # The kind of a text says its modality; fields of a frozen dataclass are set through `object`.
        if self.modality is None and self.kind == "text":
            object.__setattr__(self, "modality", "text")
        if self.modality is not None and (not isinstance(self.modality, str) or not self.modality):
            raise WindowError(f"entry.modality: got {self.modality!r:.80}; expected a word such as 'image', or None")
        if not isinstance(self.id, str) or not self.id:
            raise WindowError(f"entry.id: got {self.id!r:.80}; expected a non-empty string")

        # Digests need UTF-8, which lone surrogates are not.
        encoded(self.id + (self.content if isinstance(self.content, str) else ""))
        if self.content is not None and (not isinstance(self.content, str) or not self.content):
            raise WindowError(
                f"entry.content: got {self.content!r:.80} of {brief(self.id)!r}; expected a digest, or None"
            )

        for name, number in (("tokens", self.tokens), ("span", self.span)):
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < LIMIT:
                raise WindowError(f"entry.{name}: got {number!r:.80} of {brief(self.id)!r}; expected 1 to 2**30 - 1")

        if self.kind not in ("chunk", "text"):
            raise WindowError(f"entry.kind: got {self.kind!r:.80} of {brief(self.id)!r}; expected 'chunk' or 'text'")
        if not isinstance(self.order_free, bool) or (self.order_free and self.kind == "text"):
            raise WindowError(
                f"entry.order_free: got {self.order_free!r} of a {self.kind}; expected True of chunks only"
            )

    @classmethod
    def of(cls, chunk: Chunk, *, order_free: bool = False, modality: str | None = None) -> "Entry":
        """Describes a chunk. Its content is computed if it has none."""
        # A chunk whose tokens share one position still takes one.
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
        """Describes embedded tokens, [B, T] as `backbone.embed` returns them; all rows must have one extent.

        Raises:
          WindowError: rows of unequal extents. Else as `Entry`.
        """
        # Over all axes: under M-RoPE an image may extend furthest along its height or width.
        positions = np.asarray(tokens.positions)
        rows = zip(positions, end_position(positions), strict=True) if positions.size else ()
        spans = {math.floor(last) - math.floor(row.min()) + 1 for row, last in rows} or {0}
        if len(spans) != 1:
            raise WindowError(f"entry.tokens: got rows that span {sorted(spans)} of {brief(id)!r}; expected one span")
        return cls(id, content, int(positions.shape[1]), spans.pop(), kind, order_free, modality)

    @property
    def key(self) -> str:
        """Its identity in provenance: its content, or its id if that is unknown."""
        return self.id if self.content is None else self.content


@dataclasses.dataclass(frozen=True)
class PieceState:
    """How an entry's KV was made.

    Attributes:
      kind: "conditioned" (by a forward behind what preceded it), "patched" (a base and a patch), "bare" (the canonical
        alone) or, of what left the window, "evicted".
      behind: the window's digest of what it was made behind, and of how that was served. What is patched, bare, or
        restored from elsewhere has the digest of what it stands for: of the place that it was put in, with everything
        in front as promised. "" until `linked` has filled it in.
      ways: the approximations that its KV went through: its own (patched or bare) and those of the pieces that it was
        conditioned on. None: the KV that the model itself computes, in all layers, if no token sees a chunk that had
        left by then. It stays so, whatever leaves afterwards.
      patch: digest of the patch; of a prefill that was restored from elsewhere, of what that was computed behind; or
        None.
      base: what the patch is added to.
      rank, patch_bytes, patch_flops: of the patch: its rank as in `PatchNote`, bytes of its factors, FLOPs per token to
        add it.
      transition_flops: FLOPs of adding it to the piece's transition, in a hybrid model.
    """

    kind: StateKind
    behind: str = ""
    ways: Ways = ()
    patch: str | None = None
    base: PatchBase = "canonical"
    rank: int = 0
    patch_bytes: int = 0
    patch_flops: int = 0
    transition_flops: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """Digest of what the KV depends on, 32 hexadecimal digits."""
        pure, behind = self.kind == "conditioned" and not self.ways, "" if self.kind == "bare" else self.behind
        return short_digest(f"state {self.kind} {behind} {pure} {self.base} {self.patch}")

    @classmethod
    def conditioned(cls, behind: str, ways: Ways) -> "PieceState":
        """Returns the state of what was prefilled behind this, where these ways were in front."""
        # Linking a window makes hundreds of them, and setting the fields of a frozen dataclass takes longer than
        # digesting them. Fields with a default are found on the class.
        state = object.__new__(cls)
        state.__dict__.update(kind="conditioned", behind=behind, ways=ways)
        return state

    def standing_for(self, behind: str) -> "PieceState":
        """Returns this state, put where this is in front if everything there is served as promised."""
        # Plans put the same patch in the same place again and again. All bare pieces begin from one state, and have
        # one digest.
        last = self.__dict__.get("_last")
        if last is None or last.behind != behind:
            last = object.__new__(PieceState)
            last.__dict__.update(self.__dict__, behind=behind)
            last.__dict__.pop("_last", None)
            if self.kind != "bare":
                last.__dict__.pop("digest", None)
            self.__dict__["_last"] = last
        return last


FRESH = PieceState("conditioned")
"""State of a piece that is prefilled in its place; linking replaces it by one that says behind what."""
BARE = PieceState("bare", ways=BARE_WAYS)


class PlacedPiece(NamedTuple):
    """Entry at its place in a window.

    Attributes:
      start: where its positions count from, one number for all axes.
      state: how it is served.
      replaced: the state before, of a piece that is served otherwise in its place; None once it is linked.
      born: the step at which its KV was computed; it has seen pieces in front that were placed before. 0: none but
        those that it was made behind, or stands for.
      placed: the step at which it came in front of those behind it, in its present form.
      front: digest of what precedes it. This and what follows is derived, by `linked`.
      fidelity: "exact", "survivor" or "approximate".
      ways: what makes it differ from what the window promises, where it is; none: it does not.
      latest: the last step at which it, or one in front of it, was placed.
      absorbed: the ways of all approximate pieces up to this one, which a prefill behind it goes through.
      target: digest of what would precede it if everything in front were served as promised.
      target_exact: whether all of that would be exact.
      promised: the state in which it would be as promised then: its own; None: a prefill's.
      settled: whether no piece up to this one has to be run again for that.
      steady: whether every piece up to this one has been there, in some form, since those in front of it were placed.
    """

    entry: Entry
    start: int
    state: PieceState
    replaced: PieceState | None = None
    born: int = 0
    placed: int = 0
    front: str = ""
    fidelity: Fidelity = "approximate"
    ways: Ways = UNKNOWN_WAYS
    latest: int = 0
    absorbed: Ways = ()
    target: str = ""
    target_exact: bool = False
    promised: PieceState | None = None
    settled: bool = False
    steady: bool = False

    @property
    def id(self) -> str:
        """Id of the entry."""
        return self.entry.id

    @property
    def end(self) -> int:
        """Start of a piece right behind it."""
        return self.start + self.entry.span

    @property
    def service(self) -> str:
        """How it is served, as provenance has it: "exact", or a word and the state's digest."""
        if self.fidelity == EXACT:
            return EXACT

        # A survivor and an approximate piece of equal states are served differently: only one is as promised.
        word = self.state.kind if self.state.kind in ("bare", "patched") else self.fidelity
        return f"{word}:{self.state.digest}"

    def run_again(self, born: int) -> "PlacedPiece":
        """Returns the piece as prefilled in its place at this step, not linked yet."""
        return tuple_of(PlacedPiece, (self.entry, self.start, FRESH, self.state, born, *self[5:]))

    @property
    def member(self) -> Member:
        """The piece as a member of an antecedent."""
        return Member(self.entry.id, self.entry.content, self.service)


def is_unmeasured(factors: object) -> bool:
    """Returns whether factors are of a kind that no certificate was measured on: in few bits, or of uneven ranks."""
    return isinstance(factors, Quantised | PackedArray | RaggedFactors)


@dataclasses.dataclass(frozen=True)
class PatchNote:
    """What a window needs to know of a patch. `PatchNote.of(patch)` digests its factors on the device, so make it once.

    Attributes:
      digest: as `patch_digest` returns it.
      chunk, content: of the patch's chunk.
      base: what it is added to.
      antecedent: what it was formed behind; any order of it if `orbit`.
      base_antecedent: what the base was conditioned on, of a removal patch.
      rank: directions of its own that it has in every channel and layer (all of a dense one), by which a certificate is
        looked up; 0 if it leaves some out, was rounded to few bits, has a shared basis or a rank for each layer, or was
        formed on an encoded canonical.
      nbytes: of its factors.
      flops: per token, of multiplying and adding them.
      transition_flops: of multiplying and adding those of a transition, whatever the tokens, in a hybrid model.
      updated: whether a correction was folded in.
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
    updated: bool = False
    transition_flops: int = 0

    @classmethod
    def of(cls, patch: "Patch | PatchNote") -> "PatchNote":
        """Notes what a window needs of a patch; a note is returned as it is.

        Raises:
          WindowError: no patch, a correction (`update_patch` folds it in), or one that is valid at one start only.
        """
        # Digesting a patch reads its factors from the device, so callers with many windows pass notes.
        if isinstance(patch, PatchNote):
            return patch
        if not isinstance(patch, Patch):
            raise WindowError(f"patch: got a {type(patch).__name__}; expected a Patch, or a PatchNote of one")

        # A window adds one patch to a base, at any start.
        metadata = patch.metadata
        if metadata.base == "patched" or metadata.frame != "phase_free":
            raise WindowError(
                f"patch of chunk {brief(metadata.chunk)!r}: got base {metadata.base!r}, frame {metadata.frame!r}; "
                "expected 'canonical' or 'conditioned', and 'phase_free'"
            )

        # Bounds were measured on whole patches with factors of their own, not rounded. They are looked up by the
        # smallest rank of any channel, and a dense channel has every direction.
        rank, layout = 0, metadata.layout
        leaves = jax.tree.leaves(dict(patch.factors), is_leaf=is_unmeasured)
        rounded = any(map(is_unmeasured, leaves)) or metadata.encoding is not None
        if not rounded and metadata.basis is None and len(metadata.layers) >= layout.layers:
            ranks = patch.ranks.items()
            rank = min(layout.channel(name).features if own is None else own for name, own in ranks)

        return cls(
            digest=patch_digest(patch),
            chunk=metadata.chunk,
            content=metadata.content,
            base=metadata.base,
            antecedent=metadata.behind,
            base_antecedent=metadata.base_behind,
            orbit=metadata.orbit,
            rank=rank,
            nbytes=patch.nbytes,
            flops=adding_flops(patch),
            transition_flops=transition_adding_flops(patch),
        )

    @functools.cached_property
    def chains(self) -> dict[str, str]:
        """Cache of `chain_of`: chain digests of the antecedent by backbone."""
        return {}

    @property
    def point(self) -> Literal["stored", "orbit", "update"]:
        """Operating point of a piece that it serves where it belongs."""
        return "update" if self.updated else "orbit" if self.orbit else "stored"

    def serving(self, base: PieceState = BARE, stale: bool = False) -> PieceState:
        """Returns the state of a piece that this patch serves, until `linked` says what it stands for.

        Args:
          base: state of what it is added to; only a removal patch is added to what has ways of its own.
          stale: nothing bounds it where it is.
        """
        if base is BARE and not stale:
            return self._served
        own: Ways = ((self.point, self.rank),)
        return dataclasses.replace(self._served, ways=UNKNOWN_WAYS if stale else merged(own, base.ways))

    @functools.cached_property
    def _served(self) -> PieceState:
        return PieceState(
            kind="patched",
            ways=((self.point, self.rank),),
            patch=self.digest,
            base=self.base,
            rank=self.rank,
            patch_bytes=self.nbytes,
            patch_flops=self.flops,
            transition_flops=self.transition_flops,
        )
