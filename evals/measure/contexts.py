"""One context as a model sees it: every piece prefilled alone, and all of them as one prompt.

All arms start from the same KV: the canonical of each piece, formed alone and placed where the prompt has it, and the
KV of the whole prompt, which is what re-prefill leaves. Lengths are rounded up, so that few programs are compiled.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.backbone import Tokens, joined_tokens
from kvpatch_jax.cache import Template
from kvpatch_jax.core import zero_padded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.prompts import ChatFrame
from kvpatch_jax.repair import SplicedCache

from ..harness.lines import KV, Line, cut, make_piece
from .items import Piece, PieceContent


def frame_of(backbone: ModelBackbone, name: str) -> ChatFrame:
    """Returns what stands around pieces and question: "chat", the model's template, or "plain": nothing.

    Raises:
      InputError: no tokenizer; or for "chat" no chat template, or one that cannot be read as a frame.
    """
    if backbone.tokenizer is None:
        raise InputError(
            "--model: got a model without a tokenizer, which cannot be asked in words; expected a tokenizer.json"
        )
    if name == "plain":
        word = next(word for word in ("a", *backbone.tokenizer.get_vocab()) if knows(backbone, word))
        ids = np.asarray(backbone.prepare([Text(word)])["input_ids"])[0].tolist()
        # The tokenizer's start token, where it has one.
        return ChatFrame(tuple(ids[: ids.index(backbone.ids(word)[0])]), Template(""), Template(""))
    try:
        return backbone.chat_frame()
    except (InputError, ConfigError) as error:
        raise InputError(f"--frame=chat: {error}. --frame=plain puts the question right behind the pieces") from error


def knows(backbone: ModelBackbone, text: str) -> bool:
    """Returns whether the tokenizer knows every word of a text, which has at least one."""
    try:
        return bool(backbone.ids(text))
    except InputError:
        return False


def ids_of(backbone: ModelBackbone, *texts: str) -> list[int]:
    """Returns the tokens of a piece, or of a question with the template's texts around it.

    Raises:
      InputError: it has a word that the tokenizer does not know, or no token.
    """
    ids = backbone.ids(texts)
    if not ids:
        raise InputError(f"text: got {''.join(texts)!r:.80}, which has no tokens; expected a piece or a question")
    return ids


def prepared(backbone: ModelBackbone, content: PieceContent, between: Sequence[int] = ()) -> dict[str, Any]:
    """Makes the arrays of one piece's prompt.

    Args:
      between: ids that stand behind an image.

    Raises:
      InputError, OSError: an image that cannot be read or that the model does not see, or as `ids_of`.
    """
    if isinstance(content, Text):
        # As ids: the tokenizer's own start and end tokens stand around a prompt, not around each of its pieces.
        return backbone.prepare([ids_of(backbone, str(content))])
    return backbone.prepare([content, *([list(between)] if between else [])])


def embedded(backbone: ModelBackbone, prompt: Mapping[str, Any]) -> Tokens:
    """Embeds a prompt of one row; tokens on the host, so that no length compiles a program of its own."""
    tokens, length = backbone.embed_padded(**prompt)
    leaves = [None if leaf is None else np.asarray(leaf) for leaf in tokens]
    return Tokens(*leaves).take(0, length)  # pyright: ignore[reportArgumentType]


class MeasuredContext:
    """A context that questions are asked behind.

    Attributes:
      line: the frame's front, where it has one, and the pieces behind it, each prefilled alone.
      first: tokens of the front. tokens: of front and pieces.
      places: of the pieces in the line.
      conditioned: phase-free KV of front and pieces, prefilled as one prompt.
    """

    def __init__(self, backbone: ModelBackbone, frame: ChatFrame, pieces: Sequence[Piece], most: int | None = None):
        """Prefills all pieces alone, and then all of them behind one another.

        Args:
          most: tokens that a context may have; None for any number.

        Raises:
          InputError: more tokens than that. Else as `prepared`.
        """
        self.backbone, self.frame, self.first = backbone, frame, len(frame.front)
        prompts: list[dict[str, Any]] = [{"input_ids": np.asarray([frame.front], np.int32)}] if self.first else []
        for number, piece in enumerate(pieces, 1):
            prompts.append(prepared(backbone, piece.content, frame.between if number < len(pieces) else ()))
        self.tokens = sum(prompt["input_ids"].shape[1] for prompt in prompts)
        if most is not None and self.tokens > most:
            raise InputError(f"context: got {self.tokens} tokens; expected at most {most}, which the model serves")

        alone = []
        for place, prompt in enumerate(prompts):
            alone.append(make_piece(backbone, embedded(backbone, prompt), f"piece {place}", f"piece {place}"))
        self.line = Line(backbone, alone)
        self.places = range(len(prompts) - len(pieces), len(prompts))
        self.conditioned = self.line.prefill()

    @functools.cached_property
    def reference(self) -> KV:
        """The cache that re-prefill leaves, in the engine frame."""
        return self.line.engine(self.conditioned)

    @functools.cached_property
    def blind(self) -> KV:
        """The cache of all canonicals, placed and not mended."""
        return self.line.engine([cut(piece.chunk.kv, slice(piece.size)) for piece in self.line.pieces])

    def splice(self) -> SplicedCache:
        """Makes what methods that run tokens again start from: all pieces, and padding as a chunk of its own."""
        line, count = self.line, self.tokens - self.first
        size = padded_size(count)
        slots = np.arange(self.first, self.first + size, dtype=np.int32)[None]
        chunks = [
            (line.slices[place].start - self.first, line.slices[place].stop - self.first) for place in self.places
        ]
        chunks += [(count, size)] if size > count else []
        cache = {name: jnp.asarray(zero_padded(kv, 2, self.first + size)) for name, kv in self.blind.items()}
        placed = [line.pieces[place].tokens.shift(line.starts[place]).on_host() for place in self.places]
        tokens = joined_tokens(placed).pad(size)
        # Padding has the positions that follow, so that every method's geometry finds places in order.
        positions = np.array(tokens.positions)
        behind = line.end + np.arange(size - count)
        positions[:, count:] = behind[None, :] if positions.ndim == 2 else behind[None, :, None]
        tokens = tokens._replace(positions=positions)
        return SplicedCache(tokens, cache, slots, length=np.array([count], np.int32), chunks=tuple(chunks))

    def piece_splice(self, place: int) -> SplicedCache:
        """Makes what methods that store a form of KV start from: one piece alone in a cache, at its place."""
        line, piece = self.line, self.line.pieces[place]
        size = padded_size(piece.size)
        tokens = piece.tokens.shift(line.starts[place]).pad(size)
        canonical = cut(piece.chunk.kv, slice(piece.size))
        recorded, canonical, cache = (
            {name: jnp.asarray(zero_padded(value, 2, size)) for name, value in kv.items()}
            for kv in (self.conditioned[place], canonical, cut(self.blind, line.slices[place]))
        )
        slots, length = np.arange(size, dtype=np.int32)[None], np.array([piece.size], np.int32)
        return SplicedCache(tokens, cache, slots, recorded=recorded, canonical=canonical, length=length)


def padded_size(tokens: int) -> int:
    """Rounds a length up: to multiples of 8, of long ones by a sixteenth at most."""
    step = max(8, (1 << (tokens - 1).bit_length()) // 32)
    return -(-tokens // step) * step
