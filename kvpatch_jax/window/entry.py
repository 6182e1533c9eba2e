"""What windows consist of, without arrays: entries, and notes of the patches that serve them."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import numpy as np

from ..backbone import Tokens
from ..cache import Antecedent, Chunk, Patch, brief, content_of, encoded, patch_digest
from ..core import PackedArray, RaggedFactors, end_position
from ..errors import SessionError
from ..patching.patch_flops import adding_flops, transition_adding_flops

Kind = Literal["chunk", "text"]
PatchBase = Literal["canonical", "conditioned"]

LIMIT = 2**30
"""Upper bound of positions, tokens and spans."""


def is_count(value: object, least: int = 1, most: int = LIMIT - 1) -> bool:
    """Returns whether a value is an integer within bounds; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


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
      SessionError: a field of another kind or out of range, or a text that is order-free.
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
        name = f"{self.id:.60}" if isinstance(self.id, str) else self.id
        checks = (
            ("id", isinstance(self.id, str) and bool(self.id), "a non-empty string"),
            ("content", self.content is None or (isinstance(self.content, str) and self.content), "a digest, or None"),
            ("tokens", is_count(self.tokens), "1 to 2**30 - 1"),
            ("span", is_count(self.span), "1 to 2**30 - 1"),
            ("kind", self.kind in ("chunk", "text"), "'chunk' or 'text'"),
            ("order_free", self.order_free in (False, self.kind == "chunk"), "True of chunks only"),
            (
                "modality",
                self.modality is None or (isinstance(self.modality, str) and self.modality),
                "a word, or None",
            ),
        )
        for field, valid, expected in checks:
            if not valid:
                raise SessionError(f"entry.{field}: got {getattr(self, field)!r:.80} of {name!r}; expected {expected}")
        # Digests need UTF-8, which lone surrogates are not.
        encoded(self.id + (self.content or ""))

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
          SessionError: rows of unequal extents. Else as `Entry`.
        """
        # Over all axes: under M-RoPE an image may extend furthest along its height or width.
        positions = np.asarray(tokens.positions)
        rows = zip(positions, end_position(positions), strict=True) if positions.size else ()
        spans = {math.floor(last) - math.floor(row.min()) + 1 for row, last in rows} or {0}
        if len(spans) != 1:
            raise SessionError(f"entry.tokens: got rows that span {sorted(spans)} of {brief(id)!r}; expected one span")
        return cls(id, content, int(positions.shape[1]), spans.pop(), kind, order_free, modality)

    @property
    def key(self) -> str:
        """Its identity in provenance: its content, or its id if that is unknown."""
        return self.id if self.content is None else self.content


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
      state_flops: of multiplying and adding those of a hybrid's transition, whatever the tokens.
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
    state_flops: int = 0

    @classmethod
    def of(cls, patch: "Patch | PatchNote") -> "PatchNote":
        """Notes what a window needs of a patch; a note is returned as it is.

        Raises:
          SessionError: no patch, or a correction (`update_patch` folds it in).
        """
        if isinstance(patch, PatchNote):
            return patch
        if not isinstance(patch, Patch):
            raise SessionError(f"patch: got a {type(patch).__name__}; expected a Patch, or a PatchNote of one")
        metadata = patch.metadata
        if metadata.base == "patched":
            raise SessionError(
                f"patch of chunk {brief(metadata.chunk.id)!r}: got a correction; expected a patch, such as "
                "`update_patch` makes of it"
            )
        return cls(
            digest=patch_digest(patch),
            chunk=metadata.chunk.id,
            content=metadata.chunk.content,
            base=metadata.base,
            antecedent=metadata.antecedent,
            base_antecedent=metadata.base_antecedent,
            orbit=metadata.orbit,
            rank=certified_rank(patch),
            nbytes=patch.nbytes,
            flops=adding_flops(patch),
            state_flops=transition_adding_flops(patch),
        )

    @functools.cached_property
    def point(self) -> Literal["stored", "orbit", "update"]:
        """Operating point of a chunk that it serves where it belongs."""
        return "update" if self.updated else "orbit" if self.orbit else "stored"


def certified_rank(patch: Patch) -> int:
    """Returns the rank by which a certificate bounds a patch; 0 of patches that none was measured on."""
    # Bounds were measured on whole patches with factors of their own, not rounded. They are looked up by the smallest
    # rank of any channel, and a dense channel has every direction.
    unmeasured = (PackedArray, RaggedFactors)
    leaves = jax.tree.leaves(dict(patch.factors), is_leaf=lambda leaf: isinstance(leaf, unmeasured))
    metadata, layout = patch.metadata, patch.metadata.chunk.layout
    whole = metadata.basis is None and metadata.chunk.encoding is None and len(metadata.layers) >= layout.layers
    if not whole or any(isinstance(leaf, unmeasured) for leaf in leaves):
        return 0
    return min(layout.channel(name).features if rank is None else rank for name, rank in patch.ranks.items())
