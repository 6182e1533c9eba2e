"""Items of a data set: a context in pieces, a question behind it, and the answers that count as right."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax import Text

PieceContent = Text | Path
"""A text, or an image's file."""


class Piece(NamedTuple):
    """One piece of a context, cached as a chunk of its own: an image, a page, a segment of text.

    Attributes:
      content: what it shows. label: its name in reports, such as "image 3"; the model does not see it.
    """

    content: PieceContent
    label: str


class Item(NamedTuple):
    """One question behind a context.

    Attributes:
      id: unique in the data set.
      cluster: what intervals resample: items of one document, deck or episode are not independent.
      pieces: the context, in order.
      question: as it is asked, options and instruction included.
      answers: those that count as right, of a choice its letter; none: what re-prefill answers is right.
      scorer: a key of `scoring.SCORERS`. kind: the category that tables are divided by; "" without one.
      options: of a choice, by their letters' order.
      where: file and line or number, for messages.
    """

    id: str
    cluster: str
    pieces: tuple[Piece, ...]
    question: str
    answers: tuple[str, ...]
    scorer: str = "exact_match"
    kind: str = ""
    options: tuple[str, ...] = ()
    where: str = ""


class Refusal(NamedTuple):
    """A record that is left out while the rest goes on.

    Attributes:
      where: file and line or number. reason: names the field, what it holds and what was expected.
    """

    where: str
    reason: str


class DataSet(NamedTuple):
    """A data set that was read.

    Attributes:
      name: of its field map. source: what was read. about: one sentence: what a piece of its contexts is.
      items: those that can be asked. refusals: what was left out.
      media: keeps the images that were inside data files on disk, as long as it lives.
    """

    name: str
    source: Path
    about: str
    items: Sequence[Item]
    refusals: Sequence[Refusal]
    media: Any = None

    @property
    def digest(self) -> str:
        """A digest of all that the items consist of but pixels; the same wherever the data lies."""
        digest = hashlib.sha256()
        for item in self.items:
            pieces = [str(content) if isinstance(content, Text) else content.name for content, _ in item.pieces]
            content = [item.id, item.cluster, item.question, item.answers, item.scorer, item.kind, item.options]
            digest.update(json.dumps([*content, pieces]).encode() + b"\n")
        return digest.hexdigest()


def content_key(content: PieceContent) -> str:
    """Names what a piece shows: equal names show the same."""
    return f"text {content}" if isinstance(content, Text) else f"image {content}"
