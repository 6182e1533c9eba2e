"""What a window that remembers promises, as one forward over the whole history under a chunk-banded mask.

Every chunk sees the chunks that stood in its window when it was appended, and the lead. The lead stays in front of
the window while history moves on, so each place of the window has a copy of the lead of its own; a copy sees itself.
Positions are the history's own: attention looks at differences alone.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool


class Segment(NamedTuple):
    """Tokens that stand together.

    Attributes:
      kind: whether they are a copy of the lead, a chunk, or what is asked behind one.
      index: the chunk's number in the history; of a copy of the lead, of the chunk that it stands in front of; of a
        question, of the newest chunk.
      start: where its positions count from.
      sees: the segments that its tokens see beside themselves, by their place in the list.
    """

    kind: Literal["lead", "chunk", "question"]
    index: int
    start: int
    sees: tuple[int, ...]


def history(spans: Sequence[int], window: int, lead: int, asked: Sequence[int]) -> list[Segment]:
    """Lays out a window's whole history: copies of the lead, chunks, questions.

    Args:
      spans: how far each chunk moves what follows, in the order in which they were appended.
      window: chunks in the window, the newest included.
      lead: how far the lead moves what follows; 0 for none.
      asked: numbers of the chunks behind which a question stands.
    """
    starts = [lead, *(lead + end for end in itertools.accumulate(spans))]
    oldest = [max(0, chunk - window + 1) for chunk in range(len(spans))]
    found: list[Segment] = []
    copies: dict[int, int] = {}
    for first in sorted(set(oldest)) if lead else ():
        copies[first] = len(found)
        found.append(Segment("lead", first, starts[first] - lead, ()))

    base = len(found)
    in_front = lambda chunk: [copies[oldest[chunk]]] if lead else []
    for chunk in range(len(spans)):
        sees = [*in_front(chunk), *range(base + oldest[chunk], base + chunk)]
        found.append(Segment("chunk", chunk, starts[chunk], tuple(sees)))
    for chunk in asked:
        sees = [*in_front(chunk), *range(base + oldest[chunk], base + chunk + 1)]
        found.append(Segment("question", chunk, starts[chunk + 1], tuple(sees)))
    return found


def banded_mask(segments: Sequence[Segment], counts: Sequence[int]) -> Bool[np.ndarray, "S S"]:
    """Says who sees whom, True where a token may look; `counts` are the segments' numbers of tokens."""
    ends = list(itertools.accumulate(counts))
    places = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    mask = np.zeros((ends[-1], ends[-1]), bool)
    for segment, own, count in zip(segments, places, counts, strict=True):
        mask[own, own] = np.tri(count, dtype=bool)
        for other in segment.sees:
            mask[own, places[other]] = True
    return mask
