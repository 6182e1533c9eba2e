"""The reference of a window that remembers: one forward over the whole history under a chunk-banded mask.

Every chunk sees the chunks that were in its window when it was appended, and the lead. The lead stays in front of the
window while history moves on, so each place of the window has its own copy of the lead; a copy sees only itself.
Positions are the history's: attention depends on differences alone.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool

Kind = Literal["lead", "chunk", "question"]


class Segment(NamedTuple):
    """Adjacent tokens of the history.

    Attributes:
      kind: whether they are a copy of the lead, a chunk, or the question after one.
      index: the chunk's number in the history; of a copy of the lead, of the chunk that it precedes; of a question, of
        the newest chunk.
      start: its first position.
      sees: the segments that its tokens see beside themselves, by their index in the list.
    """

    kind: Kind
    index: int
    start: int
    sees: tuple[int, ...]


def history(spans: Sequence[int], window: int, lead: int, asked: Sequence[int]) -> list[Segment]:
    """Lays out a window's whole history: copies of the lead, chunks, questions.

    Args:
      spans: how far each chunk moves what follows, in the order in which they were appended.
      window: chunks in the window, the newest included.
      lead: how far the lead moves what follows; 0 for none.
      asked: numbers of the chunks that a question follows.
    """
    starts = [lead, *(lead + end for end in itertools.accumulate(spans))]
    oldest = [max(0, chunk - window + 1) for chunk in range(len(spans))]
    segments: list[Segment] = []
    copies: dict[int, int] = {}
    for first in sorted(set(oldest)) if lead else ():
        copies[first] = len(segments)
        segments.append(Segment("lead", first, starts[first] - lead, ()))

    base = len(segments)
    kinds: tuple[tuple[Kind, Sequence[int]], ...] = (("chunk", range(len(spans))), ("question", asked))
    for kind, chunks in kinds:
        newer = int(kind == "question")  # a question also sees the chunk that it follows
        for chunk in chunks:
            sees = [copies[oldest[chunk]]] if lead else []
            sees += range(base + oldest[chunk], base + chunk + newer)
            segments.append(Segment(kind, chunk, starts[chunk + newer], tuple(sees)))

    return segments


def banded_mask(segments: Sequence[Segment], counts: Sequence[int]) -> Bool[np.ndarray, "S S"]:
    """Makes the mask [S, S], True where a token may look; `counts` are the segments' numbers of tokens."""
    ends = list(itertools.accumulate(counts))
    places = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    mask = np.zeros((ends[-1], ends[-1]), bool)
    for segment, place, count in zip(segments, places, counts, strict=True):
        mask[place, place] = np.tri(count, dtype=bool)
        for other in segment.sees:
            mask[place, places[other]] = True
    return mask
