"""What an executor makes pieces of: tokens to prefill, canonicals, patches and stored prefills, provided or fetched.

All are padded to the buckets that prompts have, on the host, where no length compiles a program.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.core import Tracer

from ..backbone import Backbone, Tokens, check_tokens
from ..cache import (
    Antecedent,
    Chunk,
    Patch,
    PatchMetadata,
    brief,
    content_of,
    contents_differ,
    encode_chunk,
)
from ..core import KVEncoding, KVLayout, bucket
from ..errors import InputError, PatchMismatchError, ShapeError
from .entry import PatchNote
from .stored_prefill import StoredPrefills

Encodings = tuple[str | None, ...]
"""Words of encodings; None stands for KV as it was prefilled."""


def encodings_of(encoding: KVEncoding | str | None) -> Encodings:
    """Returns the encodings in which canonicals are looked for, the one that they are kept in first.

    Raises:
      InputError: an unknown word.
    """
    return (None,) if encoding is None else (str(KVEncoding.of(encoding)), None)


@runtime_checkable
class PatchStore(Protocol):
    """Store of canonicals and patches, as `kvpatch_jax.ChunkStore` is one."""

    def get(self, id: str, backbone: str) -> Chunk | None:
        """Reads a canonical, None if there is none. `encoding`, a word, is passed if it is in few bits."""
        ...

    def put(self, chunk: Chunk) -> None:
        """Stores a canonical."""
        ...

    def get_patches(self, served: Any) -> list[Patch]:
        """Reads the patches that serve a chunk."""
        ...

    def put_patches(self, patches: list[Patch]) -> None:
        """Stores patches."""
        ...


def stored(
    store: PatchStore | None, id: str, backbone: str, lead: str | None = None, encoding: str | None = None
) -> Chunk | None:
    """Reads a canonical, prefilled behind `lead` if there is one; None if no store has it.

    Args:
      encoding: that it is to have, as a word; None: as it was prefilled.
    """
    # A store that knows neither leads nor encodings need not take the arguments.
    if store is None:
        return None
    options: dict[str, Any] = {} if lead is None else {"lead": lead}
    if encoding is not None:
        options["encoding"] = encoding
    chunk = store.get(id, backbone, **options)
    return None if chunk is None or chunk.encoding != encoding else chunk


def stored_patches(store: PatchStore | None, query: PatchMetadata) -> list[Patch]:
    """Reads the patches that serve a query, of a base in its encoding."""
    patches = [] if store is None else store.get_patches(query)
    return [patch for patch in patches if patch.metadata.encoding == query.encoding]


def asked_behind(
    behind: Antecedent,
    chunk: str,
    content: str | None,
    layout: KVLayout,
    backbone: str,
    lead: str | None = None,
    encoding: str | None = None,
) -> PatchMetadata:
    """Describes what a store is queried for: patches of a chunk's canonical, of every layer, behind an antecedent.

    Args:
      encoding: of the canonical; None: as it was prefilled.
    """
    return PatchMetadata(
        chunk=chunk,
        base="canonical",
        antecedent=behind.ids,
        members=behind.members,
        backbone=backbone,
        layout=layout,
        layers=tuple(range(layout.layers)),
        content=content,
        lead=lead,
        encoding=encoding,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What is known of one piece.

    Attributes:
      tokens: to prefill it from, at local positions, padded.
      length: those that count, 0 if no tokens are known.
      chunk: its canonical, padded.
      content: digest of what it shows, None if unknown.
      patches: by digest, padded as the canonical is.
      notes: of the same patches as they came: padding is no part of what they cost.
    """

    tokens: Tokens | None = None
    length: int = 0
    chunk: Chunk | None = None
    content: str | None = None
    patches: Mapping[str, Patch] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, PatchNote] = dataclasses.field(default_factory=dict)


class Sources:
    """Sources of all pieces of an executor, and the store behind them."""

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None,
        *,
        dtype: jax.typing.DTypeLike,
        encoding: str | None = None,
    ):
        """Starts without sources.

        Args:
          dtype: of the KV that forwards read, by which stored prefills are named.
          encoding: in which canonicals are kept; one as it was prefilled serves where that is missing.
        """
        self.store, self.encodings = store, encodings_of(encoding)
        self._backbone, self._buckets = backbone, getattr(backbone, "buckets", None)
        self._dtype = dtype
        self._units: dict[str, Source] = {}

    def __getitem__(self, id: str) -> Source:
        return self._units.get(id, Source())

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the canonicals that are held, with their padding: of encoded ones, codes and scales."""
        return sum(unit.chunk.nbytes for unit in list(self._units.values()) if unit.chunk is not None)

    def provide(
        self,
        id: str,
        *,
        tokens: Tokens | None = None,
        length: int | None = None,
        chunk: Chunk | None = None,
        patch: Patch | None = None,
        content: str | None = None,
    ) -> str | None:
        """Provides what runs of a piece will need, all of it or nothing. An input replaces the one provided before.

        Args:
          tokens: one row, at the piece's own positions (from 0).
          length: how many of the tokens count, the first ones, of tokens padded to a bucket; None: all.
          chunk: its canonical.
          patch: of that canonical, or a removal patch.
          content: digest of what the tokens show; another content than before discards all other inputs.

        Returns:
          The digest of `patch`, None without one.

        Raises:
          InputError, ShapeError: an argument of the wrong kind, or of another number of tokens than what is known.
          PatchMismatchError: a chunk or patch of another id, or another backbone.
        """
        # Another content is another piece: nothing known of the old one holds.
        unit, digest = self[id], None
        content = content if chunk is None else content_of(chunk)
        if content is not None and unit.content != content:
            unit = dataclasses.replace(unit if unit.content is None else Source(), content=content)
        if chunk is not None:
            unit = self._with_chunk(id, unit, chunk)
        if tokens is not None:
            unit = self._with_tokens(id, unit, tokens, length)
        if patch is not None:
            if patch.metadata.chunk != id:
                raise PatchMismatchError(f"provide.patch: got one of chunk {patch.metadata.chunk!r}; expected {id!r}")
            # The digest is of the patch as it came: padding changes its bytes.
            note = PatchNote.of(patch)
            digest = note.digest
            size = bucket(self._buckets, patch.tokens or 0) if unit.chunk is None else unit.chunk.tokens
            patches = {**unit.patches, digest: patch.pad(size)}
            unit = dataclasses.replace(unit, patches=patches, notes={**unit.notes, digest: note})
        self._units[id] = unit
        return digest

    def forget(self, id: str) -> None:
        """Discards everything known of a piece."""
        self._units.pop(id, None)

    def tokens(self, id: str, content: str | None) -> tuple[Tokens, int]:
        """Returns the tokens that a forward of a piece runs, and how many of them count.

        Raises:
          InputError: they are unknown, or of another content.
        """
        unit, shown = self[id], brief(id)
        if unit.tokens is None:
            raise InputError(f"prefill: got piece {shown!r}; expected provide({shown!r}, tokens=…) first")
        if contents_differ(content, unit.content):
            raise InputError(f"prefill: got tokens of {shown!r} that show {unit.content!r}; expected {content!r}")
        return unit.tokens, unit.length

    def canonical(self, id: str, content: str | None, encodings: Encodings | None = None) -> tuple[Chunk, bool]:
        """Returns a canonical, provided or from the store, and whether it was read from the store now.

        Args:
          encodings: one of which it must have, the first in preference; None: those of the executor. A canonical as it
            was prefilled is encoded if need be, and then kept so.

        Raises:
          InputError: nobody has it. PatchMismatchError: it has another content.
        """
        words, unit, fetched = self.encodings if encodings is None else encodings, self[id], False
        chunk, shown = unit.chunk, unit.content
        if chunk is None or chunk.encoding not in words or contents_differ(content, shown):
            candidates = (stored(self.store, id, self._backbone.fingerprint, None, word) for word in words)
            from_store = next((candidate for candidate in candidates if candidate is not None), None)
            if from_store is not None:
                chunk, shown, fetched = from_store, from_store.content, True
            elif chunk is not None and chunk.encoding is None and words[0] is not None:
                chunk = encode_chunk(chunk, words[0])
            elif chunk is None or chunk.encoding not in words:
                have = "no canonical" if chunk is None else f"one in {chunk.encoding or 'no encoding'}"
                raise InputError(
                    f"piece {brief(id)!r}: got {have}; expected provide({brief(id)!r}, chunk=…) or one stored "
                    f"in {', '.join(word or 'no encoding' for word in words)}"
                )
        # Before it is kept: a canonical of another content replaces all that is known of the piece.
        if contents_differ(content, shown):
            raise PatchMismatchError(f"piece {brief(id)!r}: got content {shown!r}; expected {content!r}")
        if chunk is not unit.chunk:
            self.provide(id, chunk=chunk)
            chunk = self[id].chunk
        assert chunk is not None
        return chunk, fetched

    def patch(self, id: str, content: str | None, digest: str, target: Antecedent) -> tuple[Patch, bool]:
        """Returns a patch by its digest, provided or from the store, and whether it was read from the store now.

        Args:
          target: what it was formed behind, in any order for an orbit patch.

        Raises:
          InputError: nobody has it.
        """
        if digest in self[id].patches:
            return self[id].patches[digest], False
        # A store is searched by antecedent.
        layout, fingerprint = self._backbone.layout, self._backbone.fingerprint
        query = asked_behind(target, id, content, layout, fingerprint)
        for encoding, orbit in itertools.product(self.encodings, (False, True)):
            for patch in stored_patches(self.store, dataclasses.replace(query, encoding=encoding, orbit=orbit)):
                if self.provide(id, patch=patch) == digest:
                    return self[id].patches[digest], True
        raise InputError(f"piece {brief(id)!r}: got patch {digest}, which nobody has; expected it provided or stored")

    def prefill(self, id: str, content: str | None, made: str, tokens: int) -> Chunk:
        """Reads a stored prefill.

        Raises:
          InputError: no store has it. PatchMismatchError: it is of another content, layout or length.
        """
        chunk = None
        if StoredPrefills.supports(self.store):
            chunk = StoredPrefills(self.store, self._backbone.fingerprint, self._dtype).get(id, made)
        if chunk is None:
            raise InputError(f"piece {brief(id)!r}: got stored prefill {made}, which no store has; expected it stored")
        # What is stored may be of anybody's making.
        if contents_differ(content, chunk.content) or chunk.layout != self._backbone.layout or chunk.batch is not None:
            raise PatchMismatchError(
                f"piece {brief(id)!r}: got a prefill with content {chunk.content!r}; expected {content!r} of this model"
            )
        if chunk.length != tokens:
            raise PatchMismatchError(f"piece {brief(id)!r}: got a prefill of {chunk.length} tokens; expected {tokens}")
        return chunk.pad(max(bucket(self._buckets, chunk.length), chunk.tokens))

    def _with_chunk(self, id: str, unit: Source, chunk: Chunk) -> Source:
        fingerprint = self._backbone.fingerprint
        if chunk.id != id or chunk.backbone != fingerprint:
            raise PatchMismatchError(
                f"provide.chunk: got {brief(chunk.id)!r} of backbone {chunk.backbone[:16]!r}; expected {brief(id)!r} "
                f"of {fingerprint[:16]!r}"
            )
        if chunk.batch is not None:
            raise InputError(f"provide.chunk: got a batch of {chunk.batch} of {brief(id)!r}; expected one chunk")
        if unit.tokens is not None and unit.length != chunk.length:
            raise ShapeError(f"provide.chunk: got {chunk.length} tokens of {brief(id)!r}; expected {unit.length}")
        # Patches that arrived earlier are padded again, to this chunk's size.
        chunk = chunk.pad(max(bucket(self._buckets, chunk.length), chunk.tokens))
        patches = {digest: patch.pad(chunk.tokens) for digest, patch in unit.patches.items()}
        return dataclasses.replace(unit, chunk=chunk, patches=patches)

    def _with_tokens(self, id: str, unit: Source, tokens: Tokens, length: int | None) -> Source:
        check_tokens(tokens, "provide")
        rows, count = tokens.embeddings.shape[:2]
        if rows != 1:
            raise InputError(f"provide.tokens: got {rows} rows of {brief(id)!r}; expected one")
        length = count if length is None else length
        if not 1 <= length <= count:
            raise ShapeError(f"provide.length: got {length} of {count} tokens; expected 1 to {count}")
        if isinstance(tokens.positions, Tracer):
            raise InputError("provide.tokens: got traced positions; expected arrays")
        if unit.chunk is not None and unit.chunk.length != length:
            raise ShapeError(f"provide.tokens: got {length} of {brief(id)!r}; expected its chunk's {unit.chunk.length}")
        # Tokens that came padded beyond their bucket stay as long as they are.
        padded = tokens.pad(max(count, bucket(self._buckets, length)))
        return dataclasses.replace(unit, tokens=padded, length=length)
