"""Division of text without declared ends: at separators, and at the openings of messages.

A *document* is the text between two reset points: an end of the prompt, an image, the end of a separator, the start of
an opening. It has the same chunks behind any other text.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ...errors import ConfigError
from ...segment_reuse import occurrences
from ...utils.kinds import is_whole

MAX_LENGTH = 16_384
"""Upper limit of `ChunkingOptions.least`."""
MAX_PATTERNS = 64
"""Number of separators or openings, and of token ids in one of them."""

Tokens = Int[np.ndarray, " T"]
Bounds = tuple[int, int]
"""Begin and end of a range of tokens."""


@dataclasses.dataclass(frozen=True)
class ChunkingOptions:
    """How text is divided into chunks for requests that declare none.

    Chunks have at least `least` tokens, but for a text between two images that is shorter as a whole. A shorter
    document joins its neighbours: several in a row form one chunk; fewer belong to the chunk in front, and at the start
    of a prompt or after an image to the chunk that follows.

    Attributes:
      separators: sequences of token ids that close a chunk, to which they belong.
      openers: sequences of token ids that open a message, and so a chunk, such as that of `<|im_start|>`. The last one
        opens none if fewer than `least` tokens of the prompt begin with it: it is the opening of the answer.
      least: tokens of a chunk.

    Raises:
      ConfigError: there is no pattern, one is empty, too long or no token ids, or the length is out of range.
    """

    separators: tuple[tuple[int, ...], ...] = ()
    openers: tuple[tuple[int, ...], ...] = ()
    least: int = 32

    def __post_init__(self) -> None:
        for name in ("separators", "openers"):
            value = getattr(self, name)
            if not _are_patterns(value):
                raise ConfigError(
                    f"connector.chunking.{name}: got {value!r:.80}; expected at most {MAX_PATTERNS} lists of 1 to "
                    f"{MAX_PATTERNS} token ids"
                )
        if not self.separators and not self.openers:
            raise ConfigError("connector.chunking: got no separators and no openers; expected some")
        if not is_whole(self.least, 1) or self.least > MAX_LENGTH:
            raise ConfigError(
                f"connector.chunking.least: got {self.least!r:.80}; expected an integer from 1 to {MAX_LENGTH}"
            )

    @classmethod
    def read(cls, value: Any) -> "ChunkingOptions":
        """Reads the setting `chunking`, a mapping from JSON. Raises as the class."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or set(value) - fields:
            raise ConfigError(f"connector.chunking: got {value!r:.80}; expected a mapping with any of {sorted(fields)}")

        # JSON has no tuples.
        values = dict(value)
        for name in ("separators", "openers"):
            patterns = values.get(name)
            if isinstance(patterns, list):
                values[name] = tuple(tuple(ids) if isinstance(ids, list) else ids for ids in patterns)
        return cls(**values)


def chunk_ends(tokens: Tokens, images: Sequence[Bounds], options: ChunkingOptions) -> list[int]:
    """Finds the ends of a prompt's chunks: of images, and of the text around them, which is divided.

    Args:
      tokens: token ids of the prompt.
      images: bounds of the images with their frames, in order, without overlap; none is divided.
      options: how text is divided.

    Returns:
      Increasing ends. Only an image can end with the prompt: of a text, what follows the last end is the question.
    """
    count = len(tokens)
    stretches, begin = [], 0
    for image in [*images, (count, count)]:
        if image[0] > begin:
            stretches.append((begin, image[0]))
        begin = image[1]

    resets = _reset_points(tokens, stretches, options)
    ends = {bound for image in images for bound in image}
    for begin, end in stretches:
        inner = resets[np.searchsorted(resets, begin, "right") : np.searchsorted(resets, end, "left")]
        ends.update(_text_cuts([begin, *inner.tolist(), end], end == count, options.least))
    return sorted(ends - {0})


def _reset_points(tokens: Tokens, stretches: Sequence[Bounds], options: ChunkingOptions) -> Int[np.ndarray, " N"]:
    """Returns where separators end and openings start, increasing; only of those that lie within one stretch."""
    points = [np.zeros(0, np.int64)]
    begins, ends = np.array(stretches, np.int64).reshape(-1, 2).T

    def starts_of(pattern: tuple[int, ...]) -> Int[np.ndarray, " M"]:
        # What begins in an image or before the first stretch, or reaches into an image, divides nothing.
        starts = occurrences(tokens, pattern)
        place = np.searchsorted(begins, starts, "right") - 1
        starts, place = starts[place >= 0], place[place >= 0]
        return starts[starts + len(pattern) <= ends[place]]

    for separator in options.separators:
        points.append(starts_of(separator) + len(separator))
    opened = np.unique(np.concatenate([points[0], *(starts_of(opener) for opener in options.openers)]))
    if len(opened) and len(tokens) - opened[-1] < options.least:
        # A chat prompt ends with the opening of the answer, and a chunk in front of it would end with the question.
        opened = opened[:-1]
    return np.unique(np.concatenate([*points, opened]))


def _text_cuts(edges: Sequence[int], is_last: bool, least: int) -> list[int]:
    """Returns the cuts inside a stretch of text.

    Args:
      edges: begins of its documents, and its end.
      is_last: whether it ends with the prompt, so that the text after the last cut is the question, however short.
    """
    first = edges[0]
    cuts, run = [], None  # `run`: the begin of short documents in a row, of fewer than `least` tokens together
    for begin, end in itertools.pairwise(edges):
        if end - begin < least:
            run = begin if run is None else run
            if end - run >= least:
                cuts.append(run)
                run = None
            continue

        # A short run belongs to the chunk in front, so that this document begins a chunk; there may be none in front.
        if run != first:
            cuts.append(begin)
        run = None

    if run is not None and is_last:
        cuts.append(run)
    return [cut for cut in cuts if cut > first]


def _are_patterns(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_PATTERNS:
        return False
    for ids in value:
        if not isinstance(ids, tuple) or not 1 <= len(ids) <= MAX_PATTERNS:
            return False
        if not all(is_whole(token, 0) and token < 2**31 for token in ids):
            return False
    return True
