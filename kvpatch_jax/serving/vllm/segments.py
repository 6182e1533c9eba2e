"""Division of a prompt into chunks, each named by a digest of its content.

Requests may declare the ends of their chunks. Otherwise a prompt is divided at images, at separators, and at the
openings of messages. A *document* is the text between two reset points: an end of the prompt, an image, the end of a
separator, the start of an opening. It has the same chunks behind any other text.
"""

import bisect
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ...cache import chunk_id
from ...errors import ConfigError, InputError
from ...utils.kinds import is_whole

MAX_SEGMENTS = 4096
"""Number of chunks of a prompt."""
MAX_LENGTH = 16_384
"""Upper limit of `ChunkingOptions.least`."""
MAX_PATTERNS = 64
"""Number of separators or openings, and of token ids in one of them."""

Tokens = Int[np.ndarray, " T"]
Bounds = tuple[int, int]
"""Begin and end of a range of tokens."""


class PromptFeature(NamedTuple):
    """An image (or other input of a tower) in a prompt.

    Attributes:
      identifier: the engine's name of its content, which may be the client's own uuid of it.
      offset: index of its first token.
      length: its number of tokens.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.offset + self.length


class PromptSegment(NamedTuple):
    """A chunk of a prompt: the tokens in [begin, end).

    Attributes:
      id: digest of the tokens and of the images among them.
      modality: "text", "image", or "images" if there is more than one.
    """

    id: str
    begin: int
    end: int
    modality: str = "text"

    @property
    def span(self) -> int | None:
        """Number of positions of a text; None for images, which may span fewer positions than they have tokens."""
        return self.end - self.begin if self.modality == "text" else None


@dataclasses.dataclass(frozen=True)
class ChunkingOptions:
    """How a prompt is divided for requests that declare no ends.

    Chunks of a text have at least `least` tokens, but for a text between two images that is shorter as a whole. A
    shorter document joins its neighbours: several in a row form one chunk; fewer belong to the chunk in front, and at
    the start of a prompt or after an image to the chunk that follows.

    Attributes:
      separators: sequences of token ids that close a chunk, to which they belong.
      openers: sequences of token ids that open a message, and so a chunk, such as that of `<|im_start|>`. The last one
        opens none if fewer than `least` tokens of the prompt begin with it: it is the opening of the answer.
      least: tokens of a chunk.
      image_frame: token ids that open and close an image; where both are present, they belong to the image's chunk.

    Raises:
      ConfigError: a pattern is empty, too long or no token ids, or the length is out of range.
    """

    separators: tuple[tuple[int, ...], ...] = ()
    openers: tuple[tuple[int, ...], ...] = ()
    least: int = 32
    image_frame: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        patterns = f"at most {MAX_PATTERNS} lists of 1 to {MAX_PATTERNS} token ids"
        is_frame = self.image_frame is None or (_are_tokens(self.image_frame) and len(self.image_frame) == 2)
        checks = {
            "separators": (_are_patterns(self.separators), patterns),
            "openers": (_are_patterns(self.openers), patterns),
            "least": (is_whole(self.least, 1) and self.least <= MAX_LENGTH, f"an integer from 1 to {MAX_LENGTH}"),
            "image_frame": (is_frame, "two token ids, or None"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"connector.chunking.{name}: got {getattr(self, name)!r:.80}; expected {expected}")

    @classmethod
    def read(cls, value: Any) -> "ChunkingOptions":
        """Reads the setting `chunking`, a mapping from JSON. Raises as the class."""
        if isinstance(value, ChunkingOptions):
            return value
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or set(value) - fields:
            raise ConfigError(f"connector.chunking: got {value!r:.80}; expected a mapping with any of {sorted(fields)}")
        return cls(**{name: _frozen(option) for name, option in value.items()})


def segments_of(
    backbone: str,
    tokens: Sequence[int],
    features: Sequence[PromptFeature] = (),
    ends: Sequence[int] | None = None,
    chunking: ChunkingOptions | None = None,
) -> tuple[PromptSegment, ...]:
    """Divides a prompt into chunks; the tokens after the last chunk are the question.

    A chunk's id is a digest of its tokens and of the names and offsets of the images among them, so a client that
    declares ends cannot claim another chunk's content. It does not depend on the chunk's position.

    Args:
      backbone: fingerprint of the model, part of every id.
      ends: ends of the chunks, increasing. None: the prompt is divided as `chunking` says, into the first
        `MAX_SEGMENTS` chunks.
      chunking: None: each image is a chunk, and so is the text before each image.

    Raises:
      InputError: an end is outside the prompt, or inside an image.
    """
    ids = np.asarray(tokens, np.int64)
    ordered = sorted(features, key=lambda feature: feature.offset)
    if ends is None:
        options = ChunkingOptions() if chunking is None else chunking
        ends = _chunk_ends(ids, _image_bounds(ids, ordered, options.image_frame), options)
    _check_ends(ends, len(ids), ordered)

    offsets = [feature.offset for feature in ordered]
    segments = []
    for begin, end in itertools.pairwise([0, *ends]):
        images = ordered[bisect.bisect_left(offsets, begin) : bisect.bisect_left(offsets, end)]
        content: list[Tokens | bytes] = [ids[begin:end]]
        if images:
            # Offsets count from the chunk's start: its id is the same wherever the chunk stands.
            relative = [list(image._replace(offset=image.offset - begin)) for image in images]
            content.append(json.dumps(relative).encode())
        modality = ("text", "image", "images")[min(len(images), 2)]
        segments.append(PromptSegment(chunk_id(backbone, *content), begin, end, modality))
    return tuple(segments)


def _check_ends(ends: Sequence[int], count: int, features: Sequence[PromptFeature]) -> None:
    if any(end >= count for end in ends):
        raise InputError(
            f"segments: got end {max(ends)} in a prompt of {count} tokens; expected at least one token of a question "
            "after it"
        )
    for feature in features:
        place = bisect.bisect_right(ends, feature.offset)
        if place < len(ends) and ends[place] < feature.end:
            raise InputError(
                f"segments: got end {ends[place]} inside an image at {feature.offset} to {feature.end}; expected ends "
                "outside of images"
            )


# ------------------------------------------------------------------------------------------- where a prompt is divided


def _image_bounds(tokens: Tokens, features: Sequence[PromptFeature], frame: tuple[int, int] | None) -> list[Bounds]:
    """Returns begin and end of each image with its frame, in order; of those that overlap, of what is beyond others."""
    bounds, last = [], 0
    for feature in features:
        begin, end = feature.offset, feature.end
        if frame is not None and begin and end < len(tokens) and (tokens[begin - 1], tokens[end]) == frame:
            begin, end = begin - 1, end + 1
        if end > last:
            bounds.append((max(begin, last), end))
            last = end
    return bounds


def _chunk_ends(tokens: Tokens, images: Sequence[Bounds], options: ChunkingOptions) -> list[int]:
    """Returns the ends of a prompt's chunks: of images, and of the text around them, which is divided.

    What follows the last end is the question: the end of a text, or an image that ends the prompt.
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
    return [end for end in sorted(ends)[: MAX_SEGMENTS + 1] if 0 < end < count][:MAX_SEGMENTS]


def _reset_points(tokens: Tokens, stretches: Sequence[Bounds], options: ChunkingOptions) -> Int[np.ndarray, " N"]:
    """Returns where separators end and openings start, increasing; only of those that lie within one stretch."""
    points = [np.zeros(0, np.int64)]
    begins, ends = np.array(stretches, np.int64).reshape(-1, 2).T

    def starts_of(pattern: tuple[int, ...]) -> Int[np.ndarray, " M"]:
        # What begins in an image or before the first stretch, or reaches into an image, divides nothing.
        starts = _occurrences(tokens, pattern)
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


def _occurrences(ids: Tokens, pattern: tuple[int, ...]) -> Int[np.ndarray, " N"]:
    """Finds where a sequence of one or more token ids begins in a prompt, increasing; occurrences may overlap."""
    count = max(len(ids) - len(pattern) + 1, 0)
    starts = np.flatnonzero(ids[:count] == pattern[0])
    # Most starts fail at the next token, so this takes one pass over the prompt for a pattern of any length.
    for offset, token in enumerate(pattern[1:], 1):
        starts = starts[ids[starts + offset] == token]
    return starts


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


def _frozen(option: Any) -> Any:
    """Converts lists, which JSON has in place of tuples."""
    return tuple(_frozen(item) for item in option) if isinstance(option, list) else option


def _are_tokens(value: Any) -> bool:
    return isinstance(value, tuple) and all(is_whole(token, 0) and token < 2**31 for token in value)


def _are_patterns(value: Any) -> bool:
    is_list = isinstance(value, tuple) and len(value) <= MAX_PATTERNS
    return is_list and all(_are_tokens(ids) and 1 <= len(ids) <= MAX_PATTERNS for ids in value)
