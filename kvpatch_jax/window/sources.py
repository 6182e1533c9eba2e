"""What an executor makes pieces of: tokens to prefill, canonicals, patches and stored prefills, provided or fetched.

All are padded to the buckets that prompts have, on the host, where no length compiles a program.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.core import Tracer

from ..backbone import Backbone, Tokens, check_tokens
from ..cache import (
    Antecedent,
    Chunk,
    ChunkKey,
    Patch,
    PatchMetadata,
    brief,
    content_of,
    contents_differ,
    encode_chunk,
)
from ..core import KVEncoding, KVLayout, bucket
from ..errors import InputError, PatchMismatchError, SessionError, ShapeError
from .entry import Entry, PatchNote
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

    def put(self, chunk: Chunk) -> None:
        """Stores a canonical."""

    def get_patches(self, served: Any) -> list[Patch]:
        """Reads the patches that serve a chunk."""
        ...

    def put_patches(self, patches: list[Patch]) -> None:
        """Stores patches."""


def stored(store: PatchStore | None, id: str, backbone: str, encodings: Encodings = (None,)) -> Chunk | None:
    """Reads a canonical in the first of these encodings that the store has; None if it has none."""
    if store is None:
        return None
    for encoding in encodings:
        # A store that knows no encodings need not take the argument.
        options: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
        chunk = store.get(id, backbone, **options)
        if chunk is not None and chunk.encoding == encoding:
            return chunk
    return None


def stored_patches(
    store: PatchStore | None,
    entry: Entry | Chunk,
    antecedent: Antecedent,
    layout: KVLayout,
    backbone: str,
    encodings: Encodings = (None,),
    orbits: Sequence[bool] = (False,),
) -> Iterator[Patch]:
    """Reads patches of a chunk's canonical, of every layer, that were formed behind an antecedent.

    Args:
      encodings: of the canonicals, the most preferred first.
      orbits: whether patches are of this very order (False), of any order (True).
    """
    if store is None:
        return
    for encoding, orbit in itertools.product(encodings, orbits):
        key = ChunkKey(entry.id, backbone, layout, entry.content, encoding=encoding)
        query = PatchMetadata(key, antecedent, tuple(range(layout.layers)), orbit=orbit)
        yield from (patch for patch in store.get_patches(query) if patch.metadata.chunk.encoding == encoding)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What is known of one piece.

    Attributes:
      tokens: to prefill it from, at local positions, padded.
      length: those that count, 0 if no tokens are known.
      chunk: its canonical, padded.
      content: digest of what it shows, None if unknown.
      patches: by digest, padded as the canonical is, each with its note as it came: padding is no part of its costs.
    """

    tokens: Tokens | None = None
    length: int = 0
    chunk: Chunk | None = None
    content: str | None = None
    patches: Mapping[str, tuple[Patch, PatchNote]] = dataclasses.field(default_factory=dict)


class Sources:
    """Sources of all pieces of an executor, and the store behind them.

    Attributes:
      store: of canonicals and patches; None without one.
      encodings: in which canonicals are kept, the first in preference.
      prefills: those that the store keeps; None if it keeps none.
    """

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
        # One for all who ask, because it remembers what was read in vain from a remote store.
        supported = StoredPrefills.supports(store)
        self.prefills = StoredPrefills(store, backbone.fingerprint, dtype) if supported else None
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
            self._check_chunk(id, chunk)
            # Patches that arrived earlier are padded again, to this chunk's size.
            chunk = chunk.pad(max(bucket(self._buckets, chunk.length), chunk.tokens))
            patches = {key: (known.pad(chunk.tokens), note) for key, (known, note) in unit.patches.items()}
            unit = dataclasses.replace(unit, chunk=chunk, patches=patches)
        if tokens is not None:
            length = self._checked_length(id, tokens, length)
            # Tokens that came padded beyond their bucket stay as long as they are.
            size = max(tokens.embeddings.shape[1], bucket(self._buckets, length))
            unit = dataclasses.replace(unit, tokens=tokens.pad(size), length=length)
        if unit.chunk is not None and unit.tokens is not None and unit.chunk.length != unit.length:
            raise ShapeError(
                f"provide: got {unit.length} tokens of {brief(id)!r}; expected as many as its chunk's "
                f"{unit.chunk.length}"
            )
        if patch is not None:
            if patch.metadata.chunk.id != id:
                formed = patch.metadata.chunk.id
                raise PatchMismatchError(f"provide.patch: got one of chunk {formed!r}; expected {id!r}")
            # The digest is of the patch as it came: padding changes its bytes.
            note = PatchNote.of(patch)
            digest = note.digest
            size = bucket(self._buckets, patch.tokens or 0) if unit.chunk is None else unit.chunk.tokens
            unit = dataclasses.replace(unit, patches={**unit.patches, digest: (patch.pad(size), note)})
        self._units[id] = unit
        return digest

    def forget(self, id: str) -> None:
        """Discards everything known of a piece."""
        self._units.pop(id, None)

    def tokens(self, entry: Entry) -> Tokens:
        """Returns the tokens that a forward of an entry runs, padded.

        Raises:
          InputError: they are unknown, of another content, or of another number.
        """
        unit, shown = self[entry.id], brief(entry.id)
        if unit.tokens is None:
            raise InputError(f"prefill: got piece {shown!r}; expected provide({shown!r}, tokens=…) first")
        if contents_differ(entry.content, unit.content):
            raise InputError(f"prefill: got tokens of {shown!r} that show {unit.content!r}; expected {entry.content!r}")
        if unit.length != entry.tokens:
            raise InputError(f"prefill: got {unit.length} tokens of {shown!r}; expected {entry.tokens}")
        return unit.tokens

    def canonical(self, entry: Entry, encodings: Encodings | None = None) -> tuple[Chunk, bool]:
        """Returns a canonical, provided or from the store, and whether it was read from the store now.

        Args:
          encodings: one of which it must have, the first in preference; None: those of the executor. A canonical as it
            was prefilled is encoded if need be, and then kept so.

        Raises:
          InputError: nobody has it. PatchMismatchError: it has another content. SessionError: another number of tokens.
        """
        words, unit, name = encodings or self.encodings, self[entry.id], brief(entry.id)
        chunk, content, is_read = unit.chunk, unit.content, False
        if chunk is None or chunk.encoding not in words or contents_differ(entry.content, content):
            candidate = stored(self.store, entry.id, self._backbone.fingerprint, words)
            if candidate is not None:
                chunk, content, is_read = candidate, candidate.content, True
            elif chunk is not None and chunk.encoding is None and words[0] is not None:
                chunk = encode_chunk(chunk, words[0])
            elif chunk is None or chunk.encoding not in words:
                have = "no canonical" if chunk is None else f"one in {chunk.encoding or 'no encoding'}"
                raise InputError(
                    f"piece {name!r}: got {have}; expected provide({name!r}, chunk=…) or one stored "
                    f"in {', '.join(word or 'no encoding' for word in words)}"
                )
        # Before it is kept: a canonical of another content replaces all that is known of the piece.
        if contents_differ(entry.content, content):
            raise PatchMismatchError(f"piece {name!r}: got content {content!r}; expected {entry.content!r}")
        if chunk.length != entry.tokens:
            raise SessionError(f"piece {name!r}: got {chunk.length} tokens of {name!r}; expected {entry.tokens}")
        if chunk is not unit.chunk:
            self.provide(entry.id, chunk=chunk)
        return self[entry.id].chunk or chunk, is_read

    def patch(self, entry: Entry, digest: str, target: Antecedent) -> tuple[Patch, PatchNote, bool]:
        """Returns a patch by its digest, provided or from the store, its note, and whether it was read just now.

        Args:
          target: what it was formed behind, in any order for an orbit patch.

        Raises:
          InputError: nobody has it.
        """
        if digest in self[entry.id].patches:
            return *self[entry.id].patches[digest], False
        # A store is searched by antecedent.
        layout, fingerprint = self._backbone.layout, self._backbone.fingerprint
        for patch in stored_patches(self.store, entry, target, layout, fingerprint, self.encodings, (False, True)):
            if self.provide(entry.id, patch=patch) == digest:
                return *self[entry.id].patches[digest], True
        raise InputError(
            f"piece {brief(entry.id)!r}: got patch {digest}, which nobody has; expected it provided or stored"
        )

    def prefill(self, entry: Entry, made: str) -> Chunk:
        """Reads a stored prefill.

        Raises:
          InputError: no store has it. PatchMismatchError: it is of another content, layout or length.
        """
        chunk, name = None if self.prefills is None else self.prefills.get(entry.id, made), brief(entry.id)
        if chunk is None:
            raise InputError(f"piece {name!r}: got stored prefill {made}, which no store has; expected it stored")
        # What is stored may be of anybody's making.
        is_other = contents_differ(entry.content, chunk.content) or chunk.layout != self._backbone.layout
        if is_other or chunk.batch is not None or chunk.length != entry.tokens:
            raise PatchMismatchError(
                f"piece {name!r}: got a prefill of {chunk.length} tokens with content {chunk.content!r}; expected "
                f"{entry.tokens} with {entry.content!r}, of this model"
            )
        return chunk.pad(max(bucket(self._buckets, chunk.length), chunk.tokens))

    def _check_chunk(self, id: str, chunk: Chunk) -> None:
        fingerprint = self._backbone.fingerprint
        if chunk.id != id or chunk.backbone != fingerprint:
            raise PatchMismatchError(
                f"provide.chunk: got {brief(chunk.id)!r} of backbone {chunk.backbone[:16]!r}; expected {brief(id)!r} "
                f"of {fingerprint[:16]!r}"
            )
        if chunk.batch is not None:
            raise InputError(f"provide.chunk: got a batch of {chunk.batch} of {brief(id)!r}; expected one chunk")

    def _checked_length(self, id: str, tokens: Tokens, length: int | None) -> int:
        """Returns how many tokens count, of one row at positions that are arrays."""
        check_tokens(tokens, "provide")
        rows, count = tokens.embeddings.shape[:2]
        if rows != 1 or isinstance(tokens.positions, Tracer):
            raise InputError(f"provide.tokens: got {rows} rows of {brief(id)!r}; expected one, its positions an array")
        length = count if length is None else length
        if not 1 <= length <= count:
            raise ShapeError(f"provide.length: got {length} of {count} tokens; expected 1 to {count}")
        return length
