"""Text of tokens as they are made: joined, the pieces are the whole text, and none ends inside a character."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvpatch_jax.answers import TextPiece


class TextPieces:
    """Text of one row, token by token: joined, the pieces are the whole text, and none ends inside a character."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # Tokens before `read` are told; those from `begin` on give a tokenizer what it needs for the spaces between.
        self.begin, self.read = 0, 0

    def push(self, token: int) -> str:
        """Takes a token; the text that is complete with it, "" while bytes are missing."""
        self.ids.append(token)
        text = self._untold()
        if not text or text.endswith("\ufffd"):
            return ""
        self.begin, self.read = self.read, len(self.ids)
        return text

    def rest(self) -> str:
        """Returns what is left at the end, with U+FFFD for bytes that make no character."""
        text = self._untold()
        self.begin, self.read = self.read, len(self.ids)
        return text

    def _untold(self) -> str:
        told = self._decode(self.ids[self.begin : self.read])
        return self._decode(self.ids[self.begin :])[len(told) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def pieces_of(
    blocks: Iterator[Int[np.ndarray, "B n"]], tokenizer: Any, rows: int, steps: int, stops: Sequence[int]
) -> Iterator[TextPiece]:
    """Yields the tokens of blocks one by one, each with the text that it completes (none without a tokenizer).

    Args:
      steps: how many tokens there are at most. stops: tokens that end a row, whose text is left out.
    """
    texts = [] if tokenizer is None else [TextPieces(tokenizer) for _ in range(rows)]
    ended, made = np.zeros(rows, bool), 0
    for block in blocks:
        for ids in block.T:
            made += 1
            ending = np.isin(ids, stops) & ~ended
            found = []

            # Bytes that are still missing at the end of a row become U+FFFD.
            for row, pieces in enumerate(texts):
                text = "" if ended[row] or ending[row] else pieces.push(int(ids[row]))
                if ending[row] or (made == steps and not ended[row]):
                    text += pieces.rest()
                found.append(text)

            ended |= ending
            yield TextPiece(ids, tuple(found))
