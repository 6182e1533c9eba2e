"""Items of a user's data set: contexts in pieces, questions behind them, and the answers that count as right."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from kvpatch_jax import Text, Video


@dataclasses.dataclass(frozen=True)
class StoredImage:
    """An image inside a larger file, read when it is needed.

    Attributes:
      read: returns the encoded image. name: where it is, for messages: the file and the line or record.
    """

    read: Callable[[], bytes]
    name: str


PieceContent = Text | Path | StoredImage | Video
"""A text, an image's file, an image inside another file, or a video."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of a context, cached as a chunk of its own: an image, a page, a segment of text.

    Attributes:
      content: what it shows. label: its name in reports, such as "page 3"; it is not shown to the model.
    """

    content: PieceContent
    label: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A line, record or field of a data set that is left out, and why; the rest goes on.

    Attributes:
      where: file and line or record. reason: names the field, what was found and what was expected.
    """

    where: str
    reason: str
