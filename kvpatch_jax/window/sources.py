"""What an executor is given of pieces: tokens to prefill them from, canonicals, patches, residuals; and a store.

Whatever is kept here is padded to the buckets that prompts have, and padded on the host, where another length compiles
nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Num

from ..backbone import Tokens, check_tokens
from ..cache import Antecedent, Chunk, Patch, PatchMetadata, brief, content_of, patch_digest, trusted
from ..core import AnyArray, Buckets, KVLayout, PhaseFreeKV, Quantised, is_low_rank, on_device
from ..errors import InputError, PatchMismatchError, ShapeError


@runtime_checkable
class PatchStore(Protocol):
    """What is asked of a store: `kvpatch_jax.ChunkStore` has it."""

    def get(self, id: str, backbone: str, *, lead: str | None = None) -> Chunk | None:
        """Reads a canonical, None where there is none. `lead` is named for one that was prefilled behind it alone."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class PieceSource:
    """What is known of one piece.

    Attributes:
      tokens: to prefill it from, at local positions, padded. length: those that count, 0 where no tokens are known.
      chunk: its canonical, padded.
      content: digest of what it shows; None where nobody said.
      patches: by digest, padded as the canonical is, each with the bytes that it had without padding.
      hidden: residuals entering some layers, {layer: [1,T',D]}, padded.
    """

    tokens: Tokens | None = None
    length: int = 0
    chunk: Chunk | None = None
    content: str | None = None
    patches: Mapping[str, tuple[Patch, int]] = dataclasses.field(default_factory=dict)
    hidden: Mapping[int, Array] = dataclasses.field(default_factory=dict)

    @property
    def local(self) -> Float[np.ndarray, "*positions"] | None:
        """Positions relative to its start of the tokens that count; None where nothing is known."""
        if self.tokens is not None:
            return np.asarray(self.tokens.positions[0], np.float32)[: self.length]
        if self.chunk is not None:
            return np.asarray(self.chunk.local, np.float32)[: self.chunk.length]
        return None


def stored(store: PatchStore | None, id: str, backbone: str, lead: str | None) -> Chunk | None:
    """Reads a canonical, of a lead where there is one; None where no store has it."""
    if store is None:
        return None
    return store.get(id, backbone) if lead is None else store.get(id, backbone, lead=lead)


def asked_behind(
    behind: Antecedent, chunk: str, content: str | None, layout: KVLayout, backbone: str, lead: str | None = None
) -> PatchMetadata:
    """Describes what a store is asked for: patches of a chunk's canonical, of every layer, behind an antecedent."""
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
    )


def bucket(buckets: Buckets | None, size: int) -> int:
    """A size rounded up to its bucket; itself where there are none."""
    return size if buckets is None else buckets.round_up(size)


def grown(value: AnyArray, axis: int, size: int) -> AnyArray:
    """An array with zeros up to `size` along an axis, made on the host; as it is where it has that size."""
    if value.shape[axis] == size:
        return value
    host = np.asarray(value)
    axis %= host.ndim
    whole = np.zeros((*host.shape[:axis], size, *host.shape[axis + 1 :]), host.dtype)
    whole[(*(slice(None),) * axis, slice(host.shape[axis]))] = host
    return whole


def padded_tokens(tokens: Tokens, size: int) -> Tokens:
    """Tokens [B,size], their padding of zeros."""
    deepstack = None if tokens.deepstack is None else on_device(grown(tokens.deepstack, 1, size))
    positions = np.asarray(tokens.positions)
    return Tokens(on_device(grown(tokens.embeddings, 1, size)), np.asarray(grown(positions, 1, size)), deepstack)


def padded_chunk(chunk: Chunk, size: int) -> Chunk:
    """A canonical of `size` tokens, of the same length and content; one that is longer stays as it is."""
    size = max(size, chunk.tokens)
    kv = PhaseFreeKV({name: jnp.asarray(grown(value, -3, size)) for name, value in chunk.kv.items()})
    hidden = None
    if chunk.hidden is not None:
        hidden = {layer: grown(value, -2, size) for layer, value in chunk.hidden.items()}
    local = grown(np.asarray(chunk.local, np.float32), 0, size)
    return trusted(chunk, kv=kv, local=local, hidden=hidden)


def padded_patch(patch: Patch, size: int) -> Patch:
    """A patch for its chunk padded to `size`: nothing is added to padding."""
    return _of_tokens(patch, size, grown)


def trimmed_patch(patch: Patch, length: int) -> Patch:
    """A patch for its chunk without its padding, of which it says nothing."""
    return _of_tokens(patch, length, lambda leaf, axis, size: np.asarray(leaf).take(range(size), axis))


def _of_tokens(patch: Patch, size: int, change: Callable[[AnyArray, int, int], AnyArray]) -> Patch:
    """A patch for so many tokens, its leaves changed along that axis to so many."""
    if patch.tokens in (None, size):
        return patch

    def changed(leaf: Any, axis: int) -> Any:
        if not isinstance(leaf, Quantised):
            return jnp.asarray(change(leaf, axis, size))
        scale = leaf.scale if leaf.scale.shape[axis] == 1 else jnp.asarray(change(leaf.scale, axis, size))
        return Quantised(jnp.asarray(change(leaf.values, axis, size)), scale)

    factors: dict[str, Any] = {}
    for name, own in patch.factors.items():
        factors[name] = (changed(own[0], -2), own[1]) if is_low_rank(own) else changed(own, -3)  # pyright: ignore
    return Patch(factors, patch.metadata)


class PieceSources:
    """Everything given so far, by piece."""

    def __init__(self, buckets: Buckets | None, backbone: str, single: bool, lead: str | None = None):
        """Nothing given yet, for one backbone's fingerprint; `single` refuses batches.

        Args:
          lead: digest of what canonicals were prefilled behind; None takes those of any.
        """
        self._buckets, self._backbone, self._single, self._lead = buckets, backbone, single, lead
        self._units: dict[str, PieceSource] = {}

    def __getitem__(self, id: str) -> PieceSource:
        return self._units.get(id, PieceSource())

    def __contains__(self, id: str) -> bool:
        return id in self._units

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
        """Adds to what is known of a piece; other content takes the place of all that was known.

        Returns:
          The digest of the patch that was given, None where none was.

        Raises:
          InputError, ShapeError: what is no tokens, chunk or patch, or of another number of tokens than what is known.
          PatchMismatchError: a chunk or patch of another id, content or backbone.
        """
        unit = self._units.get(id, PieceSource())
        content = content if chunk is None else content_of(chunk)
        if content is not None and unit.content not in (None, content):
            unit = PieceSource()
        if content is not None:
            unit = dataclasses.replace(unit, content=content)
        if chunk is not None:
            unit = self._with_chunk(id, unit, chunk)
        if tokens is not None:
            unit = self._with_tokens(id, unit, tokens, length)
        digest = None
        if patch is not None:
            if patch.metadata.chunk != id:
                raise PatchMismatchError(f"provide: a patch of chunk {patch.metadata.chunk!r}; expected {id!r}")
            digest = patch_digest(patch)
            size = bucket(self._buckets, patch.tokens or 0) if unit.chunk is None else unit.chunk.tokens
            given = padded_patch(patch, size), patch.nbytes
            unit = dataclasses.replace(unit, patches={**unit.patches, digest: given})
        if hidden is not None:
            size = bucket(self._buckets, self._length(id, unit))
            given = {layer: np.asarray(value) for layer, value in hidden.items()}
            whole = {layer: value if value.ndim == 3 else value[None] for layer, value in given.items()}
            padded = {layer: jnp.asarray(grown(value, 1, size)) for layer, value in whole.items()}
            unit = dataclasses.replace(unit, hidden={**unit.hidden, **padded})
        self._units[id] = unit
        return digest

    def forget(self, id: str) -> None:
        """Lets go of all that is known of a piece."""
        self._units.pop(id, None)

    def forward(self, id: str, kind: str, start_layer: int = 0) -> tuple[Tokens, Float[np.ndarray, "*positions"]]:
        """What a forward of a piece runs, from a layer up, and the positions of what counts of it.

        Args:
          kind: of the edit, for the message.

        Raises:
          InputError: tokens, or the residual entering `start_layer`, that were not given.
        """
        unit = self[id]
        local = unit.local
        if unit.tokens is None or local is None or (start_layer and start_layer not in unit.hidden):
            wanted = f"hidden={{{start_layer}: …}}" if start_layer else "tokens=…"
            raise InputError(f"{kind}: piece {brief(id)!r}; expected provide({brief(id)!r}, {wanted}) first")
        if start_layer:
            return unit.tokens._replace(embeddings=unit.hidden[start_layer]), local
        return unit.tokens, local

    def patch(self, id: str, digest: str) -> tuple[Patch, int]:
        """A patch that was given, by its digest, and its bytes without padding.

        Raises:
          InputError: none such.
        """
        patches = self[id].patches
        if digest not in patches:
            raise InputError(f"piece {brief(id)!r}: patch {digest}; expected one of the given {sorted(patches)}")
        return patches[digest]

    def chunk(self, id: str, content: str | None) -> Chunk:
        """A canonical that was given.

        Raises:
          InputError: none. PatchMismatchError: one of another content.
        """
        chunk = self[id].chunk
        if chunk is None:
            raise InputError(f"piece {brief(id)!r}: no canonical; expected provide({brief(id)!r}, chunk=…), or a store")
        if None not in (content, chunk.content) and content != chunk.content:
            raise PatchMismatchError(f"piece {brief(id)!r}: a chunk of content {chunk.content!r}; expected {content!r}")
        return chunk

    def _with_chunk(self, id: str, unit: PieceSource, chunk: Chunk) -> PieceSource:
        if chunk.id != id or chunk.backbone != self._backbone:
            raise PatchMismatchError(
                f"provide: chunk {brief(chunk.id)!r} of backbone {chunk.backbone[:16]!r}; expected {brief(id)!r} of "
                f"{self._backbone[:16]!r}"
            )
        if self._lead not in (None, chunk.lead):
            raise PatchMismatchError(
                f"provide: chunk {brief(id)!r} was prefilled behind lead {chunk.lead}; expected {self._lead}, this "
                "executor's"
            )
        if self._single and chunk.batch is not None:
            raise InputError(f"provide: chunk {brief(id)!r} is a batch of {chunk.batch}; expected one chunk")
        if unit.tokens is not None and unit.length != chunk.length:
            raise ShapeError(f"provide: chunk {brief(id)!r} of {chunk.length} tokens; expected {unit.length}")
        chunk = padded_chunk(chunk, bucket(self._buckets, chunk.length))
        patches = {digest: (padded_patch(patch, chunk.tokens), size) for digest, (patch, size) in unit.patches.items()}
        hidden = dict(unit.hidden)
        for layer, value in (chunk.hidden or {}).items():
            host = np.asarray(value)
            hidden[layer] = jnp.asarray(host if host.ndim == 3 else host[None])
        return dataclasses.replace(unit, chunk=chunk, patches=patches, hidden=hidden)

    def _with_tokens(self, id: str, unit: PieceSource, tokens: Tokens, length: int | None) -> PieceSource:
        check_tokens(tokens, "provide")
        rows, given = tokens.embeddings.shape[:2]
        if self._single and rows != 1:
            raise InputError(f"provide: {rows} rows of tokens of piece {brief(id)!r}; expected one")
        length = given if length is None else length
        if not 1 <= length <= given:
            raise ShapeError(f"provide: length {length} of {given} tokens; expected 1 to {given}")
        if isinstance(tokens.positions, Tracer):
            raise InputError("provide: traced positions; expected arrays")
        if unit.chunk is not None and unit.chunk.length != length:
            raise ShapeError(
                f"provide: {length} tokens of piece {brief(id)!r}; expected its chunk's {unit.chunk.length}"
            )
        padded = padded_tokens(tokens, max(given, bucket(self._buckets, length)))
        return dataclasses.replace(unit, tokens=padded, length=length)

    def _length(self, id: str, unit: PieceSource) -> int:
        if unit.tokens is not None:
            return unit.length
        if unit.chunk is not None:
            return unit.chunk.length
        raise InputError(f"provide: residuals of piece {brief(id)!r} alone; expected its tokens or its chunk first")
