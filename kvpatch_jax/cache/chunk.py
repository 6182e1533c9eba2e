"""Chunks: one semantic unit each, prefilled alone and kept position-free. Host containers around bare arrays.

The arrays (`kv`, `local`, `encoder`) travel bare into jitted code; `Chunk` itself never does, so that an id
is never part of a compiled program.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Num

from ..core import (
    PARTS,
    WHOLE,
    AnyArray,
    KVEncoding,
    KVLayout,
    PackedArray,
    PhaseFreeKV,
    arrays_of,
    check_extent,
    encode_kv,
    end_position,
    expect_frame,
    extent,
    host_view,
    is_packed,
    on_device,
    resize,
    zero_padded,
)
from ..errors import InputError, NotFiniteError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .ids import examine, fingerprint_of

if TYPE_CHECKING:
    # Wherever an array is taken, a packed one decodes.
    KVArray = AnyArray
else:
    KVArray = Float[AnyArray, "L *B T _ _"] | PackedArray

COMPUTED = "kv:"
"""What a content begins with that was computed from kv."""
EXACT = 2**24
"""Up to here float32 holds every whole number."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunk:
    """The canonical KV of one unit, with what is needed to place it anywhere.

    Attributes:
      kv: {channel: [L, T, K, H]}, phase-free, in the storage dtype. T may be padded beyond `length`. A batch of chunks
        that share everything else, as an evaluation has it, is {channel: [L, B, T, K, H]}; stores do not take one. Of a
        hybrid model also the transition of its own tokens, from a state of zeros: [L, R, K, W] for each part, often in
        another dtype than the rows; padding has no part in it.
      local: positions relative to the chunk's start, [T] or [T, A], below 2**24; kept in float32, may be fractional.
      span: how far the next chunk's start moves: past where its tokens end (`core.end_position`), at least. Under
        M-RoPE that is the largest extent, not the token count.
      length: tokens that are not padding, 1 ≤ length ≤ T.
      id: the chunk's name; patches carry it in their metadata.
      layout: of kv.
      backbone: fingerprint of the model that made it.
      encoder: the tower's output, [n, E, D] as `Backbone.encode` gives it, or None.
      content: a digest of what the chunk shows, which distinguishes chunks of one id; whoever makes the chunk from
        inputs passes theirs, and it is trusted. None takes a checksum of kv, "kv:…", computed in the pass that looks
        for NaN, and again wherever a chunk is made of this one's fields. It finds mistakes, not forgeries.
      lead: the digest of the lead that the chunk was prefilled after (`canonical.lead_digest`), such as
        a system prompt; None for a chunk that was prefilled alone. Another lead is another canonical.
      encoding: word of the encoding whose decoded numbers kv has, packed or not (`encode_chunk`); None: as they were
        prefilled. Patches are of one encoding.

    NumPy arrays that are writeable are copied, so that later changes to them do not change the chunk.

    Raises:
      LayoutError: kv that is rotated. LayoutError, ShapeError: kv does not fit the layout.
      InputError: local or span out of range. NotFiniteError: NaN or infinity in kv.
      InputError: length out of range, an empty id or content, or no fingerprint.
    """

    kv: Mapping[str, KVArray]
    local: Num[AnyArray, " T"] | Num[AnyArray, "T A"]
    span: int
    length: int
    id: str
    layout: KVLayout
    backbone: str
    encoder: Float[AnyArray, "..."] | None = None
    content: str | None = None
    lead: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        expect_kind(self.layout, KVLayout, "chunk: layout", "a KVLayout, such as `backbone.layout`")
        expect_kind(self.local, AnyArray, "chunk: local", "an array of positions", InputError)
        if np.dtype(self.local.dtype).kind not in "iuf":
            raise InputError(f"chunk: got local positions of {self.local.dtype}; expected numbers")
        expect_kind(self.id, str, "chunk: id", "a name")
        expect_kind(self.encoder, AnyArray | None, "chunk: encoder", "an array, or None", InputError)
        for word in ("content", "lead", "encoding"):
            expect_kind(getattr(self, word), str | None, f"chunk: {word}", "a digest or a word, or None")
        expect_frame(self.kv, f"chunk {self.id!r}", "phase_free")
        self.layout.check(self.kv, f"chunk {self.id!r}")
        shape = self.kv[self.layout.names[0]].shape
        if len(shape) not in (4, 5):
            raise ShapeError(f"chunk {self.id!r}: got kv of shape {shape}; expected [L, T, K, H] or [L, B, T, K, H]")

        tokens = shape[-3]
        if not self.id:
            raise InputError(f"chunk: got id {self.id!r}; expected a name")

        fingerprint_of(self.backbone, f"chunk {self.id!r}")
        if not is_whole(self.length, 1) or self.length > tokens:
            raise InputError(f"chunk {self.id!r}: got length {self.length}; expected 1 to {tokens}")

        axes = self.layout.rope.axes
        expected = (tokens,) if axes is None else (tokens, axes)
        if self.local.shape != expected:
            raise InputError(f"chunk {self.id!r}: got local positions {self.local.shape}; expected {expected}")
        if not is_whole(self.span, 0):
            raise InputError(f"chunk {self.id!r}: got span {self.span!r:.80}; expected a whole number from 0")

        # Beyond, float32 holds no odd numbers; NaN compares false.
        least, greatest = self.extent
        if not (least > -EXACT and greatest < EXACT):
            shown = f"local positions from {least:.0f} to {greatest:.0f}"
            raise InputError(f"chunk {self.id!r}: got {shown}; expected finite ones below 2**24, as float32 holds them")
        end = int(np.floor(end_position(np.asarray(self.local)[None, : self.length])[0]))
        if self.span <= end:
            raise InputError(
                f"chunk {self.id!r}: got span {self.span}; expected at least {end + 1}, past its last position"
            )
        check_extent(self.layout.rope, self.extent, np.zeros((), np.int32))
        packed = [channel.name for channel in self.layout.channels if is_packed(self.kv[channel.name])]
        rows = [channel.name for channel in self.layout.token_channels]
        if packed and (self.encoding is None or packed != rows):
            raise InputError(
                f"chunk {self.id!r}: got packed {packed} and encoding {self.encoding!r}; expected {rows} packed, and "
                "the encoding's word (`encode_chunk` makes such chunks)"
            )
        if "" in (self.content, self.lead):
            raise InputError(
                f"chunk {self.id!r}: got content {self.content!r}, lead {self.lead!r}; expected a digest each, or None"
            )

        # Copies come before the checksum, so that it is of what the chunk holds.
        for word in ("kv", "local", "encoder"):
            object.__setattr__(self, word, _kept(getattr(self, word)))
        object.__setattr__(self, "kv", PhaseFreeKV(self.kv))
        # One pass gives the checksum and says whether all is finite; only a failure looks for the channel.
        computed, finite = _examined(self)
        if not finite:
            check_finite(self.kv, f"chunk {self.id!r}")
        # A computed content is that of kv as it was prefilled, so it outlives an encoding.
        if self.content is None or (self.content.startswith(COMPUTED) and self.encoding is None):
            object.__setattr__(self, "content", COMPUTED + computed)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in self.kv.items())
        return (
            f"Chunk({brief(self.id)!r}, {self.length} tokens, span {self.span}: {kinds}, "
            f"backbone {self.backbone[:16]!r}, content {self.content!r:.24}"
            f"{'' if self.lead is None else f', behind the lead {self.lead[:12]}…'}"
            f"{'' if self.encoding is None else f', encoded as {self.encoding}'})"
        )

    @functools.cached_property
    def tokens(self) -> int:
        """Padded number of tokens, T."""
        return self.kv[self.layout.names[0]].shape[-3]

    @functools.cached_property
    def batch(self) -> int | None:
        """How many chunks kv holds, B; None for one chunk without a batch axis."""
        shape = self.kv[self.layout.names[0]].shape
        return shape[1] if len(shape) == 5 else None

    @functools.cached_property
    def places(self) -> str:
        """A digest of the local positions of its tokens, whatever their dtype: 16 hexadecimal digits."""
        # As float32, the type in which positions are stored, so that integers and their floats are the same places.
        positions = np.ascontiguousarray(np.asarray(self.local)[: self.length], np.float32)
        return hashlib.blake2b(positions.tobytes(), digest_size=8).hexdigest()

    @functools.cached_property
    def extent(self) -> tuple[float, float]:
        """The least and the greatest local position, on the host, where every start is checked."""
        return extent(self.local)

    @property
    def nbytes(self) -> int:
        """Bytes of kv as it is kept: of packed kv, codes and scales."""
        return sum(int(value.nbytes) for value in self.kv.values())

    def pad(self, tokens: int) -> "Chunk":
        """Pads T by zeros to `tokens`, so that chunks of unequal length share one program; a transition stays as it is.

        Raises:
          ShapeError: `tokens` below T.
        """
        if not is_whole(tokens, self.tokens):
            raise ShapeError(f"chunk {self.id!r}: got tokens={tokens!r:.80}; expected at least {self.tokens}")
        more = int(tokens) - self.tokens

        # Padding changes neither the content nor whether it is finite, so nothing is examined again.
        kv = {}
        for name, value in self.kv.items():
            if name in PARTS:
                kv[name] = value
            else:
                kv[name] = pad(value, -2 if isinstance(value, PackedArray) else -3, more)
        local = zero_padded(np.asarray(self.local, np.float32), 0, tokens)
        return trusted(self, kv=PhaseFreeKV(kv), local=local)


def pad(value: AnyArray | PackedArray, axis: int, more: int) -> Any:
    """Appends `more` zeros along an axis, on the host: on a device every length would compile a program."""
    if isinstance(value, PackedArray):
        size = value.columns if axis == -1 else value.planes[0].shape[axis]
        return jax.tree.map(on_device, resize(value, axis, size + more, host=True) if more else value)
    return on_device(zero_padded(value, axis, value.shape[axis] + more))


def _kept(value: Any) -> Any:
    """Returns a value with its writeable NumPy arrays copied; mappings are copied, jax arrays are not."""
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    if is_packed(value):
        return jax.tree.map(_kept, value)

    # A read-only view may be of an array that is writeable.
    owner = value
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.base
    if not isinstance(owner, np.ndarray):
        return value

    copy = np.array(value)
    copy.flags.writeable = False
    return copy


def brief(id: str) -> str:
    """Shortens an id for messages: a digest of 64 digits to its first 12."""
    return id if len(id) <= 24 else f"{id[:12]}…"


def trusted(chunk: Chunk, **changes: Any) -> Chunk:
    """Copies a chunk with some fields changed, of the same content, without checking its values again."""
    # `dataclasses.replace` would run the checks, which read every number of kv.
    copy = object.__new__(Chunk)
    for field in dataclasses.fields(Chunk):
        object.__setattr__(copy, field.name, changes.get(field.name, getattr(chunk, field.name)))
    return copy


def _examined(chunk: Chunk) -> tuple[str, bool]:
    """Returns a checksum of a chunk's kv, decoded, and whether it is finite."""
    kv: Mapping[str, Any] = chunk.kv if chunk.encoding is None else arrays_of(chunk.kv)
    # `examine` takes tokens on the second axis.
    kv = kv if chunk.batch is None else {name: jnp.moveaxis(value, 1, 2) for name, value in kv.items()}
    return examine(kv, chunk.length)


def content_of(chunk: Chunk) -> str:
    """Returns a chunk's content; computes and keeps it where the chunk, from a store, has none."""
    if chunk.content is None:
        object.__setattr__(chunk, "content", COMPUTED + _examined(chunk)[0])
    assert chunk.content is not None
    return chunk.content


@jax.jit
def _not_finite(values: list[Num[AnyArray, "..."]]) -> list[Array]:
    """Counts NaN and infinities in each array: one program for all of them, which writes no mask."""
    return [jnp.sum(~jnp.isfinite(value), dtype=jnp.uint32) for value in values]


def check_finite(values: Mapping[str, Any] | list[tuple[str, AnyArray]], what: str) -> None:
    """Raises NotFiniteError, naming the first channel that holds NaN or infinity; packed ones are decoded.

    Arrays of a trace, whose values nobody knows yet, pass.
    """
    named = list(values.items()) if isinstance(values, Mapping) else values
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(named)):
        return
    arrays = [host_view(value if isinstance(value, AnyArray) else jnp.asarray(value)) for _, value in named]
    if all(isinstance(array, np.ndarray) for array in arrays):
        counts = [np.count_nonzero(~np.isfinite(array)) for array in arrays]
    else:
        counts = jax.device_get(_not_finite(arrays))
    for (name, _), count in zip(named, counts, strict=True):
        if count:
            raise NotFiniteError(
                f"{what}[{name!r}]: got {count} values that are NaN or infinite; expected finite values"
            )


def encode_chunk(chunk: Chunk, encoding: KVEncoding | str) -> Chunk:
    """Encodes a chunk's KV in few bits: the same chunk and content, and another base for patches.

    Args:
      encoding: bits of keys and of values, or its word, such as "k4v4".

    Returns:
      A chunk whose kv is packed ({channel: `PackedArray`}), and decoded where it is used. Tokens beyond its length take
      no part in the ranges of groups. The parts of a transition are arrays in bfloat16.

    Raises:
      InputError: not an encoding, or a chunk that is encoded already.
    """
    expect_kind(chunk, Chunk, "encode_chunk", "a Chunk")
    encoding = KVEncoding.of(encoding)
    if chunk.encoding is not None:
        raise InputError(f"encode_chunk: got chunk {chunk.id!r} encoded as {chunk.encoding}; expected one as prefilled")
    if WHOLE in (encoding.keys, encoding.values):
        raise InputError(f"encode_chunk: got encoding {encoding}; expected 1 to 8 bits")
    kv = encode_kv(chunk.layout, arrays_of(chunk.kv), encoding, chunk.length)
    return trusted(chunk, kv=PhaseFreeKV(kv), encoding=str(encoding), content=content_of(chunk))


def decode_chunk(chunk: Chunk) -> Chunk:
    """Decodes a chunk's packed KV to arrays. It keeps the word of its encoding: its patches are the same."""
    expect_kind(chunk, Chunk, "decode_chunk", "a Chunk")
    return trusted(chunk, kv=PhaseFreeKV(arrays_of(chunk.kv)))
