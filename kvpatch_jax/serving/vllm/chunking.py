"""Division of text without declared ends: at separators, at the openings of messages, and where its content says.

A *document* is the text between two reset points: an end of the prompt, an image, the end of a separator, the start of
an opening. Where a document is cut depends on its own tokens alone, each cut on a few tokens before it. So it has the
same chunks behind any other text, and an edit changes the chunks around it. Equal lengths, counted from the start of a
prompt or of a document, would move every later cut with each inserted token.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from ...errors import ConfigError
from ...segment_reuse import occurrences
from ...utils.kinds import is_whole

WINDOW = 16
"""Tokens before a position that decide whether a document may be cut there; a power of two."""
MAX_LENGTH = 16_384
"""Upper limit of `ChunkingOptions.most`."""
MAX_PATTERNS = 64
"""Number of separators or openings, and of token ids in one of them."""
_FACTOR = 0x9E3779B97F4A7C15
_UNIT = 2**64

Tokens = Int[np.ndarray, " T"]
Bounds = tuple[int, int]
"""Begin and end of a range of tokens."""


@dataclasses.dataclass(frozen=True)
class ChunkingOptions:
    """How text is divided into chunks for requests that declare none.

    Chunks have at least `least` tokens, and with `mean` at most `most`, but for a text between two images that is
    shorter as a whole. A shorter document joins its neighbours: several in a row form one chunk; fewer belong to the
    chunk in front, and at the start of a prompt or after an image to the chunk that follows.

    Attributes:
      separators: sequences of token ids that close a chunk, to which they belong.
      openers: sequences of token ids that open a message, and so a chunk, such as that of `<|im_start|>`. The last one
        opens none if fewer than `least` tokens of the prompt begin with it: it is the opening of the answer.
      mean: tokens of a chunk that ends where the content says, on average; None: only separators and openings divide.
      least, most: tokens of a chunk.

    Raises:
      ConfigError: a pattern is empty, too long or no token ids, or the lengths do not fit together.
    """

    separators: tuple[tuple[int, ...], ...] = ()
    openers: tuple[tuple[int, ...], ...] = ()
    mean: int | None = 512
    least: int = 32
    most: int = 2048

    def __post_init__(self) -> None:
        for name in ("separators", "openers"):
            value = getattr(self, name)
            if not _are_patterns(value):
                raise ConfigError(
                    f"connector.chunking.{name}: got {value!r:.80}; expected at most {MAX_PATTERNS} lists of 1 to "
                    f"{MAX_PATTERNS} token ids"
                )

        for name in ("least", "most") if self.mean is None else ("least", "mean", "most"):
            value = getattr(self, name)
            if not is_whole(value, WINDOW) or value > MAX_LENGTH:
                raise ConfigError(
                    f"connector.chunking.{name}: got {value!r:.80}; expected an integer from {WINDOW} to {MAX_LENGTH}"
                )
        if self.mean is not None and not self.least < self.mean <= self.longest_cut:
            raise ConfigError(
                f"connector.chunking: got least {self.least}, mean {self.mean} and most {self.most}; expected "
                "least < mean <= most - 3 * least"
            )

    @property
    def longest_cut(self) -> int:
        """Number of tokens after which a document is cut whatever its content.

        What may join a chunk fits in `most`: the rest of its document, and short ones in front of it and behind it, of
        fewer than `least` tokens each.
        """
        return self.most - 3 * self.least

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
    cuts_of = _no_cuts if options.mean is None else _content_cuts(tokens, options)
    ends = {bound for image in images for bound in image}
    for begin, end in stretches:
        inner = resets[np.searchsorted(resets, begin, "right") : np.searchsorted(resets, end, "left")]
        ends.update(_text_cuts([begin, *inner.tolist(), end], end == count, cuts_of, options.least))
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


def _text_cuts(edges: Sequence[int], is_last: bool, cuts_of: Callable[[int, int], list[int]], least: int) -> list[int]:
    """Returns the cuts inside a stretch of text.

    Args:
      edges: begins of its documents, and its end.
      is_last: whether it ends with the prompt, so that the text after the last cut is the question, however short.
      cuts_of: returns the cuts inside a document of at least `least` tokens.
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
        cuts += cuts_of(begin, end)

    if run is not None and is_last:
        cuts.append(run)
    return [cut for cut in cuts if cut > first]


def _no_cuts(begin: int, end: int) -> list[int]:
    return []


def _content_cuts(tokens: Tokens, options: ChunkingOptions) -> Callable[[int, int], list[int]]:
    """Returns a function of a document's begin and end: the cuts in it by its content."""
    assert options.mean is not None
    hashes = _window_hashes(tokens)
    # After `least` tokens each position is a cut with this chance, so that chunks have about `mean` tokens on average.
    limit = np.uint64(_UNIT // max(2, options.mean - options.least))
    candidates = np.flatnonzero(hashes < limit).tolist()
    least, longest = options.least, options.longest_cut

    def cuts_of(begin: int, end: int) -> list[int]:
        cuts, last = [], begin
        while True:
            # At least `least` tokens are left for the document's last chunk. `least` is no less than WINDOW, so that
            # the hashes of these positions depend on tokens of this chunk only.
            low, high = last + least, min(last + longest, end - least)
            if low > high:
                return cuts

            place = bisect.bisect_left(candidates, low)
            if place < len(candidates) and candidates[place] <= high:
                last = candidates[place]
            elif high == last + longest:
                # No candidate for too long: the least hash is a choice by content too, and so the same after an edit in
                # front. Of equal ones, as in a text that repeats itself, the last: fewer chunks.
                last = high - int(np.argmin(hashes[low : high + 1][::-1]))
            else:
                return cuts
            cuts.append(last)

    return cuts_of


def _window_hashes(tokens: Tokens) -> UInt64[np.ndarray, " T+1"]:
    """Hashes the WINDOW tokens before each position; the first positions, which have fewer, get the largest number.

    Arithmetic is modulo 2**64, so hashes are the same on every machine. Chunks in stores depend on them: another hash
    is another division, and nothing that was stored is found again.
    """
    hashes = _mixed(tokens.astype(np.uint64) + np.uint64(1))
    width = 1
    while width < WINDOW:
        # The hash of twice as many tokens, from that of the second half and that of the first.
        longer = hashes.copy()
        longer[width:] += hashes[:-width] * np.uint64(pow(_FACTOR, width, _UNIT))
        hashes, width = longer, 2 * width

    result = np.full(len(tokens) + 1, _UNIT - 1, np.uint64)
    result[WINDOW:] = _mixed(hashes[WINDOW - 1 :])
    return result


def _mixed(words: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Spreads every bit of a word over all bits (the finaliser of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _are_patterns(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_PATTERNS:
        return False
    for ids in value:
        if not isinstance(ids, tuple) or not 1 <= len(ids) <= MAX_PATTERNS:
            return False
        if not all(is_whole(token, 0) and token < 2**31 for token in ids):
            return False
    return True
