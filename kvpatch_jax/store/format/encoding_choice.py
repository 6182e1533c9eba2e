"""The encoding in which a store puts and gets a canonical: the call's, the chunk's own, or the store's default."""

from ...cache import Chunk, brief, encode_chunk
from ...errors import InputError
from .codec import chunk_body
from .naming import Encoding, encoding_word, few_bits

UNREDUCED = "unreduced"
"""Word for the canonical as it was prefilled, where a store has another default."""


class EncodingChoice:
    """Choice of a canonical's encoding.

    Args:
      default: encoding of calls that name none; None: unreduced.

    Attributes:
      default: its word.

    Raises:
      InputError: the encoding is unknown.
    """

    def __init__(self, default: Encoding | None = None):
        self.default = _word_of(default)

    def to_put(self, chunk: Chunk, encoding: Encoding | None) -> str | None:
        """Returns the word of the object that a chunk is put as; None: unreduced. An encoded chunk keeps its own.

        Raises:
          InputError: the encoding is unknown, or the chunk has another; or its kv were decoded, whose codes are lost.
        """
        if chunk.encoding is None:
            return self.default if encoding is None else _word_of(encoding)
        word = _word_of(encoding)
        chunk_body(chunk)  # refuses kv that were decoded, whose codes are lost
        if encoding is not None and word != chunk.encoding:
            raise InputError(
                f"store: got encoding {word or UNREDUCED!r} for chunk {brief(chunk.id)!r} in {chunk.encoding}; "
                "expected that one, or the chunk as it was prefilled"
            )
        return encoding_word(chunk.encoding)

    def to_get(self, encoding: Encoding | None) -> tuple[str | None, ...]:
        """Returns the words of the objects to look for, the first in preference.

        Raises:
          InputError: the encoding is unknown.
        """
        if encoding is None and self.default is not None:
            return self.default, None
        return (_word_of(encoding),)

    def served(self, chunk: Chunk, encoding: Encoding | None) -> Chunk:
        """Returns a chunk as it is read once it is put: in few bits, if it is put so. Raises as `to_put`."""
        word = self.to_put(chunk, encoding)
        if word is None or few_bits(word) is None or chunk.encoding is not None:
            return chunk
        return encode_chunk(chunk, word)


def _word_of(encoding: Encoding | None) -> str | None:
    return None if encoding == UNREDUCED else encoding_word(encoding)
