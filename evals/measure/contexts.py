"""One context as a model sees it: every piece prefilled alone, and all of them as one prompt.

All arms start from the same KV: the canonical of each piece, formed alone at its own start and placed where the prompt
has it, and the KV of the whole prompt, which is what re-prefill leaves. Arrays are kept on the host, padded to buckets:
on a device every length would compile programs of its own.

Axis letters: L layers, T tokens of a piece, S keys, K KV heads, H head width.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvpatch_jax as kvp
from kvpatch_jax import Text
from kvpatch_jax.backbone import Tokens, ahead_of
from kvpatch_jax.core import Buckets, end_position
from kvpatch_jax.errors import InputError, NotFiniteError
from kvpatch_jax.repair import SplicedCache
from kvpatch_jax.window.padding import padded_chunk, padded_tokens, zero_padded
from models import ModelBackbone

from ..arms.reused_page import chunk_of, cut
from ..results.costs import ChunkCosts, input_width
from .frame import PromptFrame
from .items import Piece, PieceContent, StoredImage

HostKV = dict[str, np.ndarray]
"""{channel: [L,1,T,K,H]} on the host."""
BLOCK_ABOVE, BLOCK = 4096, 2048
"""Prompts of more tokens are prefilled in blocks of so many, which bounds the memory of attention."""


class FormedPiece(NamedTuple):
    """A piece of a context, prefilled alone.

    Attributes:
      label: its name in reports.
      tokens: embeddings and positions from its own start.
      span: positions that it takes.
      chunk: its canonical.
    """

    label: str
    tokens: Tokens
    span: int
    chunk: kvp.Chunk

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.tokens.embeddings.shape[1]


def prepared(backbone: ModelBackbone, content: PieceContent, between: Sequence[int] = ()) -> dict[str, Any]:
    """Makes the arrays of one piece's prompt.

    Args:
      between: ids that stand behind an image.

    Raises:
      ImageError: an image that cannot be read. InputError: text that the tokenizer does not know, or a video that
      cannot be read. OSError: a file that is gone.
    """
    if isinstance(content, Text):
        # As ids: the tokenizer's own start and end tokens stand around a prompt, not around each of its pieces.
        return backbone.prepare([backbone.ids(str(content))])
    behind = [list(between)] if between else []
    if isinstance(content, StoredImage):
        return backbone.prepare([content.read(), *behind])
    if isinstance(content, Path) and not content.is_file():
        raise InputError(f"image: got {str(content)!r}, which is no file; expected one")
    return backbone.prepare([content, *behind])


class MeasuredContext:
    """A context that questions are asked behind.

    Attributes:
      backbone, frame: what asks.
      pieces: prefilled alone.
      first: slot and position of the first piece: tokens of the frame's front.
      tokens: of front and pieces together. span: the position of what follows them.
      slots: of each piece. starts: positions of each piece.
      conditioned: phase-free KV of the pieces as one prompt, behind the front, padded.
    """

    def __init__(self, backbone: ModelBackbone, frame: PromptFrame, pieces: Sequence[Piece], most: int | None):
        """Prefills all pieces alone, and then all of them behind one another.

        Args:
          most: tokens that a context may have; None for any number.

        Raises:
          InputError: no pieces, or more tokens than that. As `prepared`; what the backbone raises.
        """
        if not pieces:
            raise InputError("context: got no pieces; expected at least one")
        self.backbone, self.frame = backbone, frame
        self.buckets = backbone.buckets or Buckets()
        prompts = []
        for number, piece in enumerate(pieces):
            prompts.append(prepared(backbone, piece.content, frame.between if number < len(pieces) - 1 else ()))
        self.first = len(frame.front)
        self.tokens = self.first + sum(prompt["input_ids"].shape[1] for prompt in prompts)
        if most is not None and self.tokens > most:
            raise InputError(f"context: got {self.tokens} tokens; expected at most {most}, which the model serves")

        self.pieces: list[FormedPiece] = []
        for number, (piece, prompt) in enumerate(zip(pieces, prompts, strict=True)):
            self.pieces.append(self._formed(f"{number}", piece.label, prompt))
        lengths, spans = ([getattr(own, name) for own in self.pieces] for name in ("length", "span"))
        edges = self.first + np.cumsum([0, *lengths])
        self.slots = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(edges)]
        self.starts = [int(start) for start in self.first + np.cumsum([0, *spans[:-1]])]
        self.span = self.first + sum(spans)
        self._patches: dict[int, kvp.Patch] = {}

        out = self._prefilled(self.prompt, self.front_kv)
        if not np.isfinite(np.asarray(out.logits)).all():
            raise NotFiniteError("context: got logits with NaN or infinity; expected none")
        self.conditioned: HostKV = {name: np.asarray(value) for name, value in out.kv.items()}

    def _formed(self, name: str, label: str, prompt: Mapping[str, Any]) -> FormedPiece:
        """Prefills one piece alone."""
        tokens, length = self.backbone.embed_padded(**prompt)
        kv = self._prefilled(tokens, None).kv
        own = on_host(tokens).take(0, length)
        local = np.asarray(own.positions)[0]
        whole = {channel: np.asarray(value)[:, 0, :length] for channel, value in kv.items()}
        chunk = chunk_of(self.backbone, whole, local, name)
        return FormedPiece(label, own, math.floor(float(end_position(local[None])[0])) + 1, chunk)

    def _prefilled(self, tokens: Tokens, front: HostKV | None) -> Any:
        """Runs tokens that are padded to their bucket, in blocks where they are many."""
        size = tokens.embeddings.shape[1]
        many = size > BLOCK_ABOVE and tokens.ahead is None
        return self.backbone.prefill(tokens, context=on_device(front), chunk=BLOCK if many else None)

    @functools.cached_property
    def front_kv(self) -> HostKV | None:
        """The front's KV at its place, exact in every arm; None without a front."""
        if not self.first:
            return None
        tokens, length = self.backbone.embed_padded(np.asarray([self.frame.front], np.int32))
        kv = self.backbone.prefill(tokens).kv
        placed = kvp.to_engine(self.backbone.layout, dict(kv), np.asarray(tokens.positions), 0)
        return cut({name: np.asarray(value) for name, value in placed.items()}, slice(length))

    @functools.cached_property
    def prompt(self) -> Tokens:
        """All pieces at their places, padded to their bucket."""
        placed = [piece.tokens.shift(start) for piece, start in zip(self.pieces, self.starts, strict=True)]
        return padded_tokens(joined(placed), self.buckets.round_up(self.tokens - self.first))

    # ------------------------------------------------------------------------------------------------- caches

    @functools.cached_property
    def reference(self) -> HostKV:
        """The cache that re-prefill leaves, engine frame, [L,1,S,K,H]."""
        placed = kvp.to_engine(self.backbone.layout, self.conditioned, np.asarray(self.prompt.positions), 0)
        return self._behind_front(cut({n: np.asarray(v) for n, v in placed.items()}, slice(self.tokens - self.first)))

    @functools.cached_property
    def blind(self) -> HostKV:
        """The cache of all canonicals, placed and not mended."""
        return self.cache_of([self.placed(number) for number in range(len(self.pieces))])

    def cache_of(self, placed: Sequence[HostKV]) -> HostKV:
        """Joins what stands for each piece behind the front: a cache of the whole context."""
        whole = {name: np.concatenate([own[name] for own in placed], axis=2) for name in placed[0]}
        return self._behind_front(whole)

    def placed(self, number: int, patch: kvp.Patch | None = None) -> HostKV:
        """Places a piece's canonical, with a patch or without, engine frame."""
        piece, start = self.pieces[number], self.starts[number]
        chunk = padded_chunk(piece.chunk, self.buckets.round_up(piece.length))
        kv = kvp.apply_patch(kvp.Placed(chunk, patch, start, self.antecedent(number)))
        return {name: np.asarray(value)[:, None, : piece.length] for name, value in kv.items()}

    def _behind_front(self, kv: HostKV) -> HostKV:
        if self.front_kv is None:
            return kv
        return {name: np.concatenate([self.front_kv[name], value], axis=2) for name, value in kv.items()}

    # ------------------------------------------------------------------------------- what arms are made of

    def is_exact(self, number: int) -> bool:
        """Says whether a piece's canonical is its KV in context: nothing stands in front of it."""
        return number == 0 and not self.first

    def antecedent(self, number: int) -> tuple[str, ...]:
        """Lists the ids of the pieces in front of one."""
        front = ("front",) if self.first else ()
        return (*front, *(piece.chunk.id for piece in self.pieces[:number]))

    def conditioned_of(self, number: int) -> HostKV:
        """Returns one piece's KV in context, phase-free."""
        where = self.slots[number]
        return cut(self.conditioned, slice(where.start - self.first, where.stop - self.first))

    def largest_patch(self, number: int) -> kvp.Patch:
        """Forms a piece's patch of every direction, of which smaller ranks are slices: one SVD for all arms."""
        if number not in self._patches:
            piece = self.pieces[number]
            size = self.buckets.round_up(piece.length)
            conditioned = {name: zero_padded(kv[:, 0], 1, size) for name, kv in self.conditioned_of(number).items()}
            self._patches[number] = kvp.form_patch(
                padded_chunk(piece.chunk, size),
                conditioned,
                min(size, max(channel.features for channel in self.backbone.layout.channels)),
                self.antecedent(number),
                method="exact",
                dense=False,
            )
        return self._patches[number]

    def costs(self, number: int) -> ChunkCosts:
        """Returns what shares of one piece's costs are of."""
        width, behind = input_width(self.prompt), self.slots[number].start
        layout, forward = self.backbone.layout, self.backbone.forward_costs
        return ChunkCosts(forward, layout, self.pieces[number].length, behind, width)

    def splice(self) -> SplicedCache:
        """Makes what repairs of tokens start from: all pieces, and behind them padding as a chunk of its own."""
        count, size = self.tokens - self.first, self.prompt.embeddings.shape[1]
        slots = np.arange(self.first, self.first + size, dtype=np.int32)[None]
        chunks = [(where.start - self.first, where.stop - self.first) for where in self.slots]
        if size > count:
            chunks.append((count, size))
        cache = {name: jnp.asarray(zero_padded(kv, 2, self.first + size)) for name, kv in self.blind.items()}
        # Padding has the positions that follow, so that every repair's geometry finds places in order.
        positions = np.array(self.prompt.positions)
        behind = self.span + np.arange(size - count)
        positions[:, count:] = behind[None, :] if positions.ndim == 2 else behind[None, :, None]
        return SplicedCache(
            self.prompt._replace(positions=positions),
            cache,
            slots,
            length=np.array([count], np.int32),
            chunks=tuple(chunks),
        )

    def piece_splice(self, number: int) -> SplicedCache:
        """Makes what forms of one piece's KV in context start from: the piece alone in a cache, at its place."""
        piece, start = self.pieces[number], self.starts[number]
        size = self.buckets.round_up(piece.length)
        tokens = padded_tokens(piece.tokens.shift(start), size)
        recorded = {name: jnp.asarray(zero_padded(kv, 2, size)) for name, kv in self.conditioned_of(number).items()}
        cache = {name: jnp.asarray(zero_padded(kv, 2, size)) for name, kv in self.placed(number).items()}
        slots, length = np.arange(size, dtype=np.int32)[None], np.array([piece.length], np.int32)
        return SplicedCache(tokens, cache, slots, recorded=recorded, length=length)


def on_device(kv: HostKV | None) -> dict[str, Array] | None:
    """Brings KV to the device, as a context that is read."""
    return None if kv is None else {name: jnp.asarray(value) for name, value in kv.items()}


def on_host(tokens: Tokens) -> Tokens:
    """Brings tokens to the host."""
    deepstack = None if tokens.deepstack is None else np.asarray(tokens.deepstack)
    ahead = None if tokens.ahead is None else np.asarray(tokens.ahead)
    return Tokens(np.asarray(tokens.embeddings), np.asarray(tokens.positions), deepstack, ahead)  # pyright: ignore[reportArgumentType]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Joins tokens on the host, one behind the other; parts without deepstack features get zeros."""
    deep = next((part.deepstack for part in parts if part.deepstack is not None), None)
    deepstack = None
    if deep is not None:
        filled = []
        for part in parts:
            zeros = np.zeros((*part.embeddings.shape[:2], *deep.shape[2:]), deep.dtype)
            filled.append(zeros if part.deepstack is None else np.asarray(part.deepstack))
        deepstack = np.concatenate(filled, axis=1)
    embeddings = np.concatenate([np.asarray(part.embeddings) for part in parts], axis=1)
    positions = np.concatenate([np.asarray(part.positions) for part in parts], axis=1)
    return Tokens(embeddings, positions, deepstack, ahead_of(parts))  # pyright: ignore[reportArgumentType]
