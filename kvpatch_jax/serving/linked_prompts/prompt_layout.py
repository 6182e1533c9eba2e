"""Layout of a prompt's pieces: texts and chunks one behind the other, each at the positions where the last one ends."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...backbone import Backbone, Tokens
from ...cache import Chunk, Text
from ...core import end_position
from ...errors import InputError
from ...repair import PromptPiece


class PromptLayout:
    """Pieces of one prompt in order, and the position at which the next one starts.

    Args:
      backbone: embeds the pieces.
      start: position of the first piece.
    """

    def __init__(self, backbone: Backbone, start: int = 0):
        self.backbone, self.start = backbone, start
        self.pieces: list[PromptPiece] = []

    def add_text(self, item: Any) -> None:
        """Adds new text, a str or token ids; one without a token (a space between references) adds nothing.

        A tokenizer's own first tokens stand in front of the prompt only, not in front of every text in it.
        """
        ids: Any = getattr(self.backbone, "ids", None)
        if self.start and ids is not None and isinstance(item, str):
            item = ids(str(item))
        # A space is no item of a prompt, and has no tokens in most vocabularies.
        if not len(item) or (isinstance(item, str) and not item.strip()):
            return
        prompt = self.backbone.prepare([Text(item) if isinstance(item, str) else list(item)])
        if np.shape(prompt["input_ids"])[1]:
            self._add(self.backbone.embed(**prompt), None)

    def add_first_tokens(self, text: str) -> None:
        """Adds what the tokenizer puts in front of a prompt with this text, where a chunk comes before the text."""
        ids: Any = getattr(self.backbone, "ids", None)
        if ids is None:
            return
        whole = np.asarray(self.backbone.prepare([Text(text)])["input_ids"])[0].tolist()
        own = whole[: len(whole) - len(ids(text))]
        if own:
            self._add(self.backbone.embed(**self.backbone.prepare([own])), None)

    def add_chunk(self, item: Any, chunk: Chunk | None, encoder: Any = None) -> None:
        """Adds a chunk with its canonical; without one, its content is new text, to be computed with the rest.

        Args:
          item: the chunk's content, from whose embeddings tokens of it are recomputed.
          encoder: the tower's output for it, so that the tower does not run.

        Raises:
          InputError: the chunk does not hold the tokens of its content.
        """
        prompt = self.backbone.prepare([item])
        tokens = self.backbone.embed(**prompt) if encoder is None else self.backbone.embed(**prompt, features=encoder)
        if chunk is None:
            self._add(tokens, None)
            return

        places = np.asarray(tokens.positions, np.float32)[0]
        kept = np.asarray(chunk.local, np.float32)[: chunk.length]
        if places.shape != kept.shape or not np.array_equal(places, kept):
            raise InputError(
                f"linked chunk: got KV of {chunk.length} tokens for a content of {len(places)}; expected the KV of "
                "this content"
            )
        kv = {name: jnp.asarray(value)[:, None, : chunk.length] for name, value in chunk.kv.items()}
        self._add(tokens, kv)

    def _add(self, tokens: Tokens, kv: Any) -> None:
        places = np.asarray(tokens.positions)
        shifted = tokens._replace(positions=places + np.asarray(self.start, places.dtype))
        self.pieces.append(PromptPiece(shifted, kv))
        # Fractional positions (videos) end where the next whole one begins.
        self.start += int(np.floor(end_position(places)[0])) + 1
