"""Items of a user's data set: contexts in pieces, questions behind them, and the answers that count as right."""

import dataclasses
from collections.abc import Callable, Sequence
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
class Item:
    """One question behind a context.

    Attributes:
      id: unique in the data set.
      cluster: what its interval is clustered over: items of one document, deck, video or episode are not independent.
      pieces: the context, in order.
      question: as it is asked, with the options and the instruction that the data set's own evaluation adds.
      answers: those that count as right; of a choice, its letter.
      kind: the category that tables are divided by; "" without one.
      rule: name of the scoring rule, a key of `scoring.RULES`.
      options: of a choice, by its letters' order.
      answer_format: what the rule needs besides, such as "Int" of MMLongBench-Doc; "" without it.
      where: file and line or record, for messages.
    """

    id: str
    cluster: str
    pieces: tuple[Piece, ...]
    question: str
    answers: tuple[str, ...]
    kind: str
    rule: str
    options: tuple[str, ...] = ()
    answer_format: str = ""
    where: str = ""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A line, record or field of a data set that is left out, and why; the rest goes on.

    Attributes:
      where: file and line or record. reason: names the field, what was found and what was expected.
    """

    where: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ItemSet:
    """A data set that was read.

    Attributes:
      format: its name, a key of `formats.READERS`.
      source: what was read.
      items: those that can be asked.
      refusals: what was left out, a line each.
      chunk_rule: one sentence: what makes a piece of a context in this format.
      digest: of all that the items consist of but pixels: two sets with the same digest ask the same.
    """

    format: str
    source: Path
    items: Sequence[Item]
    refusals: Sequence[Refusal]
    chunk_rule: str
    digest: str
