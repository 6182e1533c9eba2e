"""Inputs of an executor by piece: tokens to prefill, canonicals, patches and residuals, provided or fetched.

All are padded to the buckets that prompts have, on the host, where no length compiles a program.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Num

from ..backbone import Backbone, Tokens, check_tokens
from ..cache import Antecedent, Chunk, Patch, PatchMetadata, brief, content_of, encode_chunk, patch_digest
from ..core import AnyArray, Buckets, KVLayout
from ..errors import InputError, PatchMismatchError, ShapeError
from .edits import Fetch
from .entry import contents_differ
from .padding import bucket, padded_chunk, padded_patch, padded_tokens, zero_padded
from .stored_prefill import StoredPrefills
from .window import Window

Encodings = tuple[str | None, ...]
"""Words of encodings; None stands for KV as it was prefilled."""
Lead = Sequence[Any] | Tokens | None
"""What canonicals are prefilled behind, as `make_chunk` takes it."""


@runtime_checkable
class PatchStore(Protocol):
    """Store of canonicals and patches, as `kvpatch_jax.ChunkStore` is one."""

    def get(self, id: str, backbone: str, *, lead: str | None = None) -> Chunk | None:
        """Reads a canonical, None if there is none.

        `lead` is passed only if canonicals are prefilled behind one, and `encoding`, a word, only if they are encoded.
        """
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
    store: PatchStore | None, id: str, backbone: str, lead: str | None, encoding: str | None = None
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
    found = [] if store is None else store.get_patches(query)
    return [patch for patch in found if patch.metadata.encoding == query.encoding]


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


def _counted_bytes(chunk: Chunk) -> int:
    """Returns bytes of a chunk without padding: of the tokens that count, and of its transition."""
    # Stored chunks may be padded; an edit's own cost is of the tokens that count.
    parts = sum(int(chunk.kv[channel.name].nbytes) for channel in chunk.layout.parts)
    return (chunk.nbytes - parts) * chunk.length // chunk.tokens + parts


@dataclasses.dataclass(frozen=True, eq=False)
class PieceSource:
    """What is known of one piece.

    Attributes:
      tokens: to prefill it from, at local positions, padded.
      length: those that count, 0 if no tokens are known.
      chunk: its canonical, padded.
      content: digest of what it shows, None if unknown.
      patches: by digest, padded as the canonical is, each with the bytes that it had without padding.
      hidden: residuals entering some layers, {layer: [1,T',D]}, padded.
      prefill: the stored prefill that was read last, padded, with what it was computed behind.
    """

    tokens: Tokens | None = None
    length: int = 0
    chunk: Chunk | None = None
    content: str | None = None
    patches: Mapping[str, tuple[Patch, int]] = dataclasses.field(default_factory=dict)
    hidden: Mapping[int, Array] = dataclasses.field(default_factory=dict)
    prefill: tuple[str, Chunk] | None = None

    @property
    def local(self) -> Float[np.ndarray, "*positions"] | None:
        """Positions relative to its start of the tokens that count; None if neither tokens nor chunk are known."""
        if self.tokens is not None:
            return np.asarray(self.tokens.positions[0], np.float32)[: self.length]
        if self.chunk is not None:
            return np.asarray(self.chunk.local, np.float32)[: self.chunk.length]
        return None

    def has_canonical(self, content: str | None) -> bool:
        """Returns whether there is a canonical that shows this content (None: any)."""
        return self.chunk is not None and content in (None, self.chunk.content)


class PieceSources:
    """Sources of all pieces of an executor."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        buckets: Buckets | None,
        lead: str | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        encodings: Encodings = (None,),
    ):
        """Starts without sources.

        Args:
          buckets: what inputs are padded to, None for no padding.
          lead: digest of what canonicals were prefilled behind; None accepts any.
          dtype: of the KV that forwards read, by which stored prefills are named.
          encodings: in which canonicals are read from a store, the first in preference.
        """
        self._backbone, self._buckets, self._lead = backbone, buckets, lead
        self._dtype, self._encodings = dtype, encodings
        self._units: dict[str, PieceSource] = {}

    def __getitem__(self, id: str) -> PieceSource:
        return self._units.get(id, PieceSource())

    def __contains__(self, id: str) -> bool:
        return id in self._units

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the canonicals that are held, with their padding: of encoded ones, codes and scales."""
        return sum(unit.chunk.nbytes for unit in list(self._units.values()) if unit.chunk is not None)

    def give(
        self,
        id: str,
        *,
        tokens: Tokens | None = None,
        length: int | None = None,
        chunk: Chunk | None = None,
        patch: Patch | None = None,
        content: str | None = None,
        hidden: Mapping[int, Num[AnyArray, "*B T D"]] | None = None,
    ) -> str | None:
        """Adds to what is known of a piece, all of it or nothing. See `PagedExecutor.provide`."""
        # Another content is another piece: nothing known of the old one holds.
        unit, digest = self[id], None
        content = content if chunk is None else content_of(chunk)
        if content is not None and unit.content != content:
            unit = dataclasses.replace(unit if unit.content is None else PieceSource(), content=content)

        if chunk is not None:
            unit = self._with_chunk(id, unit, chunk)
        if tokens is not None:
            unit = self._with_tokens(id, unit, tokens, length)

        if patch is not None:
            if patch.metadata.chunk != id:
                raise PatchMismatchError(f"provide.patch: got one of chunk {patch.metadata.chunk!r}; expected {id!r}")
            # The digest is of the patch as it came: padding changes its bytes.
            digest = patch_digest(patch)
            size = bucket(self._buckets, patch.tokens or 0) if unit.chunk is None else unit.chunk.tokens
            padded = padded_patch(patch, size), patch.nbytes
            unit = dataclasses.replace(unit, patches={**unit.patches, digest: padded})

        if hidden is not None:
            # They are padded as the tokens are that they belong to.
            known = unit.length if unit.tokens is not None else unit.chunk.length if unit.chunk is not None else 0
            if not known:
                raise InputError(f"provide.hidden: got residuals of {brief(id)!r}; expected tokens or a chunk first")

            residuals = dict(unit.hidden)
            for layer, value in hidden.items():
                host = np.asarray(value)
                rows = host if host.ndim == 3 else host[None]
                residuals[layer] = jnp.asarray(zero_padded(rows, 1, bucket(self._buckets, known)))
            unit = dataclasses.replace(unit, hidden=residuals)

        # Entered at the end, so that a refused argument changes nothing.
        self._units[id] = unit
        return digest

    def forget(self, id: str) -> None:
        """Discards everything known of a piece."""
        self._units.pop(id, None)

    def forward(self, id: str, kind: str, start_layer: int = 0) -> tuple[Tokens, Float[np.ndarray, "*positions"]]:
        """Returns the tokens that a forward of a piece runs, from a layer up, and the positions of those that count.

        Args:
          kind: of the edit, for the message.

        Raises:
          InputError: tokens, or the residual entering `start_layer`, are unknown.
        """
        unit = self[id]
        local = unit.local
        if unit.tokens is None or local is None or (start_layer and start_layer not in unit.hidden):
            wanted = f"hidden={{{start_layer}: …}}" if start_layer else "tokens=…"
            raise InputError(f"{kind}: got piece {brief(id)!r}; expected provide({brief(id)!r}, {wanted}) first")

        # From a higher layer the residual entering it takes the place of the embeddings.
        if start_layer:
            return unit.tokens._replace(embeddings=unit.hidden[start_layer]), local
        return unit.tokens, local

    def patch(self, id: str, digest: str) -> tuple[Patch, int]:
        """Returns a patch by its digest, and its bytes without padding.

        Raises:
          InputError: it is unknown.
        """
        patches = self[id].patches
        if digest not in patches:
            raise InputError(f"piece {brief(id)!r}: got patch {digest}; expected one of the provided {sorted(patches)}")
        return patches[digest]

    def chunk(self, id: str, content: str | None, encodings: Encodings | None = None, store: Any = None) -> Chunk:
        """Returns a canonical.

        Args:
          encodings: one of which it has to have; None: any. A canonical as it was prefilled is encoded if need be, and
            then kept so; in place of one in another encoding the store's is read.

        Raises:
          InputError: it is unknown, or not in such an encoding. PatchMismatchError: it has another content.
        """
        chunk = self[id].chunk
        if chunk is None:
            raise InputError(
                f"piece {brief(id)!r}: got no canonical; expected provide({brief(id)!r}, chunk=…), or a store"
            )
        if encodings is not None and chunk.encoding not in encodings:
            found, word = chunk, encodings[0]
            if chunk.encoding is not None or word is None:
                found = stored(store, id, self._backbone.fingerprint, self._lead, word)
            if found is None:
                raise InputError(
                    f"piece {brief(id)!r}: got a canonical in {chunk.encoding or 'no encoding'}; expected one in "
                    f"{word or 'none'}, provided or from a store"
                )
            self.give(id, chunk=found if word is None or found.encoding is not None else encode_chunk(found, word))
            chunk = self[id].chunk
            assert chunk is not None
        if contents_differ(content, chunk.content):
            raise PatchMismatchError(f"piece {brief(id)!r}: got content {chunk.content!r}; expected {content!r}")
        return chunk

    def fetch(self, edit: Fetch, window: Window, store: PatchStore | None) -> int | None:
        """Reads a canonical or a patch from a store, unless it is known.

        Returns:
          Bytes that were read, without padding; None if nothing was.

        Raises:
          InputError: no store has it.
        """
        id, unit = edit.id, self[edit.id]
        fingerprint = self._backbone.fingerprint
        content = window.piece(id).entry.content if id in window else None

        if edit.what == "prefill":
            return self._fetch_prefill(edit, content, store)

        if edit.what == "canonical":
            encodings = self._wanted(id, window)
            if unit.has_canonical(content) and (unit.chunk is None or unit.chunk.encoding in encodings):
                return None
            found = (stored(store, id, fingerprint, self._lead, encoding) for encoding in encodings)
            chunk = next((chunk for chunk in found if chunk is not None), None)
            if chunk is None:
                raise InputError(f"fetch: got {brief(id)!r}, of which no store has the canonical; expected it provided")
            self.give(id, chunk=chunk)
            return _counted_bytes(chunk)

        if edit.digest in unit.patches:
            return None

        # The edit names a digest; a store is searched by antecedent, in any order of it for an orbit patch.
        query = asked_behind(window.target(id), id, content, self._backbone.layout, fingerprint, self._lead)
        for encoding, orbit in itertools.product(self._encodings, (False, True)):
            served = dataclasses.replace(query, encoding=encoding, orbit=orbit)
            for patch in stored_patches(store, served):
                if self.give(id, patch=patch) == edit.digest:
                    return patch.nbytes

        raise InputError(f"fetch: got patch {edit.digest} of {brief(id)!r}, which no store has; expected it provided")

    def _wanted(self, id: str, window: Window) -> Encodings:
        """Returns the encodings that a piece's canonical may have, as the window serves the piece."""
        state = window.piece(id).state if id in window else None
        # At the front of a window the canonical stands for the prefill itself.
        if state is not None and state.kind == "conditioned":
            return (None,)
        patch = None if state is None or state.patch is None else self[id].patches.get(state.patch)
        return self._encodings if patch is None else (patch[0].metadata.encoding,)

    def take_prefill(self, id: str, front: str) -> Chunk:
        """Returns a stored prefill behind this front, which was fetched before, and forgets it.

        Raises:
          InputError: it was not fetched.
        """
        unit = self[id]
        if unit.prefill is None or unit.prefill[0] != front:
            raise InputError(f"piece {brief(id)!r}: got no stored prefill behind {front}; expected it fetched first")
        # The pool has it from now on; kept here it would take as much memory once more.
        self._units[id] = dataclasses.replace(unit, prefill=None)
        return unit.prefill[1]

    def _fetch_prefill(self, edit: Fetch, content: str | None, store: Any) -> int:
        """Reads a stored prefill. Returns its bytes, without padding.

        Raises:
          InputError: no store has it. PatchMismatchError: it is of another content, layout or length.
        """
        id, unit, front = edit.id, self[edit.id], edit.digest
        chunk = None
        if front is not None and StoredPrefills.supports(store):
            chunk = StoredPrefills(store, self._backbone.fingerprint, self._dtype).get(id, front)
        if chunk is None:
            raise InputError(f"fetch: got {brief(id)!r}, of which no store has a prefill behind {front}")

        # What is stored may be of anybody's making.
        other = None not in (content, chunk.content) and content != chunk.content
        lengths = {chunk.length, unit.length or chunk.length}
        if other or chunk.layout != self._backbone.layout or chunk.batch is not None or len(lengths) > 1:
            raise PatchMismatchError(
                f"fetch: got a prefill of {brief(id)!r} with content {chunk.content!r} and {chunk.length} tokens; "
                f"expected {content!r} and {unit.length or 'as many as its entry'}"
            )

        padded = padded_chunk(chunk, bucket(self._buckets, chunk.length))
        self._units[id] = dataclasses.replace(unit, prefill=(edit.digest or "", padded))
        return _counted_bytes(chunk)

    def _with_chunk(self, id: str, unit: PieceSource, chunk: Chunk) -> PieceSource:
        fingerprint = self._backbone.fingerprint
        if chunk.id != id or chunk.backbone != fingerprint:
            raise PatchMismatchError(
                f"provide.chunk: got {brief(chunk.id)!r} of backbone {chunk.backbone[:16]!r}; expected {brief(id)!r} "
                f"of {fingerprint[:16]!r}"
            )
        if self._lead not in (None, chunk.lead):
            raise PatchMismatchError(
                f"provide.chunk: got {brief(id)!r}, which was prefilled behind lead {chunk.lead}; expected {self._lead}"
            )
        if chunk.batch is not None:
            raise InputError(f"provide.chunk: got a batch of {chunk.batch} of {brief(id)!r}; expected one chunk")
        if unit.tokens is not None and unit.length != chunk.length:
            raise ShapeError(f"provide.chunk: got {chunk.length} tokens of {brief(id)!r}; expected {unit.length}")

        # Patches that arrived earlier are padded again, to this chunk's size.
        chunk = padded_chunk(chunk, bucket(self._buckets, chunk.length))
        patches = {digest: (padded_patch(patch, chunk.tokens), size) for digest, (patch, size) in unit.patches.items()}
        hidden = dict(unit.hidden)
        for layer, value in (chunk.hidden or {}).items():
            host = np.asarray(value)
            hidden[layer] = jnp.asarray(host if host.ndim == 3 else host[None])
        return dataclasses.replace(unit, chunk=chunk, patches=patches, hidden=hidden)

    def _with_tokens(self, id: str, unit: PieceSource, tokens: Tokens, length: int | None) -> PieceSource:
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
        padded = padded_tokens(tokens, max(count, bucket(self._buckets, length)))
        return dataclasses.replace(unit, tokens=padded, length=length)
