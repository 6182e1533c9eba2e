"""The word pieces that are drawn, and texts written in these pieces alone.

A byte-level BPE that stops after its first merges is a tokenizer of its own: a piece that it lacks is written as the
two that it would have been merged from. So every text of the characters that are drawn can be written in the first
pieces.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from kvpatch_jax.errors import ConfigError, InputError

SIDE = 3
LETTERS = SIDE**2
"""Slots of a cell, so letters that a piece may have."""
WHITE = {" ": "·", "\n": "¶", "\t": "»"}
"""What is drawn for a piece of white space, as editors show it."""
GLYPHS = " " + "".join(map(chr, range(33, 127))) + "".join(WHITE.values())


def drawn(text: str) -> str | None:
    """Returns the letters of a piece's cell, white space alone by its signs; None where it cannot be drawn."""
    shown = "".join(WHITE.get(letter, letter) for letter in text) if text.isspace() else text
    fits = 0 < len(shown) <= LETTERS and all(letter in GLYPHS for letter in shown)
    return shown if fits and not set(WHITE.values()) & set(text) else None


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces that are drawn.

    Attributes:
      ids: the decoder's token ids, ascending.
      shown: the letters in each one's cell.
      halves: the two pieces that a piece is merged from, by token id.
    """

    ids: tuple[int, ...]
    shown: tuple[str, ...]
    halves: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, tokenizer: Any, count: int) -> "Pieces":
        """Finds those of a byte-level BPE's first `count` token ids that can be drawn.

        Raises:
          ConfigError: a tokenizer of another kind.
        """
        model = json.loads(tokenizer.to_str())["model"]
        if model["type"] != "BPE" or not model["merges"]:
            raise ConfigError(f"tokenizer: got type {model['type']!r}; expected byte-level BPE with its merges")

        vocabulary, halves = model["vocab"], {}
        # A piece may be merged in two ways; the first merge is the one that the tokenizer applies.
        for left, right in model["merges"]:
            halves.setdefault(vocabulary[left + right], (vocabulary[left], vocabulary[right]))
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        drawable = {}

        for text, number in vocabulary.items():
            shown = drawn(tokenizer.decode([number])) if number < count and text not in special else None
            if shown is not None:
                drawable[number] = shown

        ids = tuple(sorted(drawable))
        return cls(ids, tuple(drawable[number] for number in ids), halves)

    @functools.cached_property
    def places(self) -> Mapping[int, int]:
        """The index of a token id in `ids`."""
        return {number: place for place, number in enumerate(self.ids)}

    @functools.cached_property
    def letters(self) -> UInt8[np.ndarray, "V slots"]:
        """The number of the glyph in each slot of each piece's cell; 0 is none."""
        numbers = {letter: number for number, letter in enumerate(GLYPHS)}
        letters = "".join(shown.ljust(LETTERS) for shown in self.shown)
        return np.array([numbers[letter] for letter in letters], np.uint8).reshape(-1, LETTERS)

    def split(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> Int[np.ndarray, " S"]:
        """Writes a text's token ids in the pieces that are drawn; bytes of other characters are left out."""
        written: list[int] = []
        waiting = [int(number) for number in reversed(ids)]
        # A stack: a piece that is not drawn is replaced by its halves, the left one on top.
        while waiting:
            number = waiting.pop()
            if number in self.places:
                written.append(number)
            elif number in self.halves:
                left, right = self.halves[number]
                waiting += [right, left]

        return np.array(written, np.int32)

    def rows(self, ids: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        """Returns the indices of token ids in `ids`.

        Raises:
          InputError: one that is not drawn.
        """
        unknown = [int(number) for number in ids if int(number) not in self.places]
        if unknown:
            raise InputError(f"token ids: got {unknown[0]}, which is not drawn; expected pieces that `split` gives")
        return np.array([self.places[int(number)] for number in ids], np.int32)
