"""One context as a model sees it: every piece prefilled alone, and all of them as one prompt.

All arms start from the same KV: the canonical of each piece, formed alone and placed where the prompt has it, and the
KV of the whole prompt, which is what re-prefill leaves. Lengths are rounded up, so that few programs are compiled.
Axis letters: L layers, T tokens of a piece, S keys, K KV heads, H head width.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvpatch_jax as kvp
from kvpatch_jax import Text, Video
from kvpatch_jax.backbone import Tokens, ahead_of
from kvpatch_jax.core import end_position
from kvpatch_jax.errors import ConfigError, InputError, NotFiniteError
from kvpatch_jax.repair import SplicedCache
from kvpatch_jax.window.padding import padded_tokens, zero_padded
from models import ModelBackbone
from models.prompts import ChatFrame

from .items import Item, Piece, PieceContent

HostKV = dict[str, np.ndarray]
"""{channel: [L,1,T,K,H]} on the host."""
BLOCK_ABOVE, BLOCK = 4096, 2048
"""Prompts of more tokens are prefilled in blocks of so many, which bounds the memory of attention."""


def frame_of(backbone: ModelBackbone, name: str) -> ChatFrame:
    """Returns what stands around pieces and question: "chat", the model's template, or "plain": nothing.

    Raises:
      InputError: no tokenizer; or for "chat" no chat template, or one that cannot be read as a frame.
    """
    if backbone.tokenizer is None:
        raise InputError(
            "--model: got a model without a tokenizer, which cannot be asked in words; expected a tokenizer.json. What "
            "reuse loses on it without words: python -m evals.certify --model=DIRECTORY --images=FOLDER"
        )
    if name == "plain":
        word = next(word for word in ("a", *backbone.tokenizer.get_vocab()) if _known(backbone, word))
        ids = np.asarray(backbone.prepare([Text(word)])["input_ids"])[0].tolist()
        # The tokenizer's start token, where it has one.
        return ChatFrame(tuple(ids[: ids.index(backbone.ids(word)[0])]), "", "")
    try:
        return backbone.chat_frame()
    except (InputError, ConfigError) as error:
        raise InputError(f"--frame=chat: {error}. --frame=plain puts the question right behind the pieces") from error


def _known(backbone: ModelBackbone, word: str) -> bool:
    try:
        return bool(backbone.ids(word))
    except InputError:
        return False


def missing(backbone: ModelBackbone, frame: ChatFrame, item: Item) -> str:
    """Says why a model cannot be asked an item, "" where it can. Nothing is read but texts."""
    family = backbone.family
    for piece in item.pieces:
        if isinstance(piece.content, Path) and family.vision is None:
            return f"{piece.label} is an image, and {family.architecture} sees none"
        if isinstance(piece.content, Video) and family.video is None:
            return f"{piece.label} is a video, and {family.architecture} takes none"
    try:
        texts = [str(piece.content) for piece in item.pieces if isinstance(piece.content, Text)]
        empty = not all(backbone.ids(text) for text in (*texts, frame.before + item.question + frame.behind))
    except InputError as error:
        return str(error)
    return "a piece or the question is an empty text" if empty else ""


def prepared(backbone: ModelBackbone, content: PieceContent, between: Sequence[int] = ()) -> dict[str, Any]:
    """Makes the arrays of one piece's prompt.

    Args:
      between: ids that stand behind an image.

    Raises:
      ImageError, InputError, OSError: an image or video that cannot be read, or text that the tokenizer does not know.
    """
    if isinstance(content, Text):
        # As ids: the tokenizer's own start and end tokens stand around a prompt, not around each of its pieces.
        return backbone.prepare([backbone.ids(str(content))])
    if isinstance(content, Path) and not content.is_file():
        raise InputError(f"image: got {str(content)!r}, which is no file; expected one")
    return backbone.prepare([content, *([list(between)] if between else [])])


class FormedPiece(NamedTuple):
    """A piece prefilled alone: tokens with positions from its start, the positions that it takes, phase-free KV."""

    tokens: Tokens
    span: int
    kv: HostKV

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.tokens.embeddings.shape[1]


class MeasuredContext:
    """A context that questions are asked behind.

    Attributes:
      pieces: prefilled alone. slots: of each piece. starts: positions of each piece.
      first: slot and position of the first piece. tokens: of front and pieces. end: the position of what follows.
      conditioned: phase-free KV of the pieces as one prompt, behind the front, padded.
    """

    def __init__(self, backbone: ModelBackbone, frame: ChatFrame, pieces: Sequence[Piece], most: int | None = None):
        """Prefills all pieces alone, and then all of them behind one another.

        Args:
          most: tokens that a context may have; None for any number.

        Raises:
          InputError: more tokens than that. NotFiniteError: the model's logits are. Else as `prepared`.
        """
        self.backbone, self.frame, self.first = backbone, frame, len(frame.front)
        prompts = []
        for number, piece in enumerate(pieces, 1):
            prompts.append(prepared(backbone, piece.content, frame.between if number < len(pieces) else ()))
        self.tokens = self.first + sum(prompt["input_ids"].shape[1] for prompt in prompts)
        if most is not None and self.tokens > most:
            raise InputError(f"context: got {self.tokens} tokens; expected at most {most}, which the model serves")

        self.pieces = [self._formed(prompt) for prompt in prompts]
        edges = self.first + np.cumsum([0, *(piece.length for piece in self.pieces)])
        self.slots = [slice(begin, end) for begin, end in itertools.pairwise(edges.tolist())]
        *self.starts, self.end = (self.first + np.cumsum([0, *(piece.span for piece in self.pieces)])).tolist()
        output = self._prefilled(self.prompt, self.front_kv)
        if not np.isfinite(np.asarray(output.logits)).all():
            raise NotFiniteError("context: got logits with NaN or infinity; expected none")
        self.conditioned: HostKV = {name: np.asarray(value) for name, value in output.kv.items()}

    def _formed(self, prompt: Mapping[str, Any]) -> FormedPiece:
        tokens, length = self.backbone.embed_padded(**prompt)
        kv = cut(self._prefilled(tokens, None).kv, slice(length))
        tokens = on_host(tokens).take(0, length)
        return FormedPiece(tokens, int(end_position(np.asarray(tokens.positions))[0]) + 1, kv)

    def _prefilled(self, tokens: Tokens, front: HostKV | None) -> Any:
        many = tokens.embeddings.shape[1] > BLOCK_ABOVE and tokens.ahead is None
        return self.backbone.prefill(tokens, context=on_device(front), chunk=BLOCK if many else None)

    def engine(self, kv: Mapping[str, Any], tokens: Tokens, length: int) -> HostKV:
        """Brings phase-free KV to the engine frame at the positions of its tokens, and cuts padding off."""
        return cut(kvp.to_engine(self.backbone.layout, dict(kv), np.asarray(tokens.positions), 0), slice(length))

    @functools.cached_property
    def front_kv(self) -> HostKV | None:
        """The front's KV at its place, exact in every arm; None without a front."""
        if not self.first:
            return None
        tokens, length = self.backbone.embed_padded(np.asarray([self.frame.front], np.int32))
        return self.engine(self.backbone.prefill(tokens).kv, tokens, length)

    @functools.cached_property
    def prompt(self) -> Tokens:
        """All pieces at their places, padded."""
        placed = [piece.tokens.shift(start) for piece, start in zip(self.pieces, self.starts, strict=True)]
        return padded_tokens(joined(placed), padded_size(self.tokens - self.first))

    @functools.cached_property
    def reference(self) -> HostKV:
        """The cache that re-prefill leaves, engine frame, [L,1,S,K,H]."""
        return self.behind_front(self.engine(self.conditioned, self.prompt, self.tokens - self.first))

    @functools.cached_property
    def blind(self) -> HostKV:
        """The cache of all canonicals, placed and not mended."""
        return self.behind_front(
            *(self.engine(piece.kv, piece.tokens.shift(start), piece.length)
              for piece, start in zip(self.pieces, self.starts, strict=True))
        )  # fmt: skip

    def behind_front(self, *parts: HostKV) -> HostKV:
        """Joins what stands for the pieces behind the front: a cache of the whole context."""
        front = () if self.front_kv is None else (self.front_kv,)
        return {name: np.concatenate([kv[name] for kv in (*front, *parts)], axis=2) for name in parts[0]}

    def splice(self) -> SplicedCache:
        """Makes what methods that run tokens again start from: all pieces, and padding as a chunk of its own."""
        count, size = self.tokens - self.first, self.prompt.embeddings.shape[1]
        slots = np.arange(self.first, self.first + size, dtype=np.int32)[None]
        chunks = [(where.start - self.first, where.stop - self.first) for where in self.slots]
        chunks += [(count, size)] if size > count else []
        cache = {name: jnp.asarray(zero_padded(kv, 2, self.first + size)) for name, kv in self.blind.items()}
        # Padding has the positions that follow, so that every method's geometry finds places in order.
        positions = np.array(self.prompt.positions)
        behind = self.end + np.arange(size - count)
        positions[:, count:] = behind[None, :] if positions.ndim == 2 else behind[None, :, None]
        tokens = self.prompt._replace(positions=positions)
        return SplicedCache(tokens, cache, slots, length=np.array([count], np.int32), chunks=tuple(chunks))

    def piece_splice(self, number: int) -> SplicedCache:
        """Makes what methods that store a form of KV start from: one piece alone in a cache, at its place."""
        piece, where = self.pieces[number], self.slots[number]
        size = padded_size(piece.length)
        tokens = padded_tokens(piece.tokens.shift(self.starts[number]), size)
        conditioned = cut(self.conditioned, slice(where.start - self.first, where.stop - self.first))
        recorded, canonical, cache = (
            {name: jnp.asarray(zero_padded(value, 2, size)) for name, value in kv.items()}
            for kv in (conditioned, piece.kv, cut(self.blind, where))
        )
        slots, length = np.arange(size, dtype=np.int32)[None], np.array([piece.length], np.int32)
        return SplicedCache(tokens, cache, slots, recorded=recorded, canonical=canonical, length=length)


def padded_size(tokens: int) -> int:
    """Rounds a length up: to multiples of 8, of long ones by a sixteenth at most."""
    step = max(8, (1 << (tokens - 1).bit_length()) // 32)
    return -(-tokens // step) * step


def cut(kv: Mapping[str, Any], where: slice) -> HostKV:
    """Cuts tokens out of KV {channel: [L,B,T,K,H]} and brings them to the host."""
    return {name: np.asarray(value)[:, :, where] for name, value in kv.items()}


def on_device(kv: HostKV | None) -> dict[str, Array] | None:
    """Brings KV to the device, as a context that is read."""
    return None if kv is None else {name: jnp.asarray(value) for name, value in kv.items()}


def on_host(tokens: Tokens) -> Tokens:
    """Brings tokens to the host."""
    return Tokens(*(None if leaf is None else np.asarray(leaf) for leaf in tokens))  # pyright: ignore[reportArgumentType]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Joins tokens on the host, one behind the other; parts without deepstack features get zeros."""
    deep = next((part.deepstack for part in parts if part.deepstack is not None), None)
    deepstack = []
    if deep is not None:
        for part in parts:
            zeros = np.zeros((*part.embeddings.shape[:2], *deep.shape[2:]), deep.dtype)
            deepstack.append(zeros if part.deepstack is None else np.asarray(part.deepstack))
    return Tokens(
        np.concatenate([np.asarray(part.embeddings) for part in parts], axis=1),  # pyright: ignore[reportArgumentType]
        np.concatenate([np.asarray(part.positions) for part in parts], axis=1),
        np.concatenate(deepstack, axis=1) if deepstack else None,  # pyright: ignore[reportArgumentType]
        ahead_of(parts),
    )
