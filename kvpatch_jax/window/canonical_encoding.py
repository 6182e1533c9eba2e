"""Encodings that canonicals are kept in: one for all, or fewer bits once a budget is spent."""

from typing import Any

from ..cache import Chunk, encode_chunk
from ..core import KVEncoding
from ..errors import InputError
from .sources import Encodings

AUTO = "auto"
"""Word for a choice by budget."""
AUTO_ENCODINGS: Encodings = (None, "k8v8gall", "k5v5gall")
"""What "auto" chooses among, in this order: of the measured encodings those that lose least for their bytes."""
CANONICALS = 1 << 30
"""Bytes of canonicals that "auto" keeps as they were prefilled, unless it is told otherwise."""


def encoding_choice(value: Any, what: str, refused: type[Exception] = InputError) -> str | None:
    """Returns the word of a choice: None, "auto", or that of a `KVEncoding`.

    Raises:
      `refused`: another value; `what` begins the message.
    """
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    try:
        return str(KVEncoding.of(value))
    except InputError as error:
        expected = "None, 'auto', a KVEncoding or its word, such as 'k8v8'"
        raise refused(f"{what}: got {value!r:.80}; expected {expected}") from error


class CanonicalEncoding:
    """Choice of the encoding of each new canonical. Not safe for several threads at once.

    "auto" keeps the first `budget` bytes of canonicals as they were prefilled, as many again in 8 bits, and all later
    ones in 5. Counted is what was chosen here, not what a store had before.

    Attributes:
      choice: None (as prefilled), "auto", or the word of an encoding.
      words: the encodings in which canonicals are looked for, the first in preference. One as it was prefilled serves
        where a fixed encoding is missing, because it can be encoded.
      kept: bytes that were chosen for, by word.
    """

    def __init__(self, choice: KVEncoding | str | None = None, budget: int = CANONICALS):
        """Chooses for no canonical yet.

        Raises:
          InputError: not a choice.
        """
        self.choice, self._budget = encoding_choice(choice, "encoding"), budget
        self.words = AUTO_ENCODINGS if self.choice == AUTO else (None,) if self.choice is None else (self.choice, None)
        self.kept: dict[str | None, int] = dict.fromkeys(self.words, 0)

    def encoded(self, chunk: Chunk) -> Chunk:
        """Returns a new canonical in the encoding that it is kept in, and counts its bytes."""
        words = self.words if self.choice == AUTO else self.words[:1]
        for word in words:
            kept = chunk if word is None else encode_chunk(chunk, word)
            if self.kept[word] + kept.nbytes <= self._budget or word == words[-1]:
                self.kept[word] += kept.nbytes
                return kept
        raise AssertionError("the last word takes every canonical")
