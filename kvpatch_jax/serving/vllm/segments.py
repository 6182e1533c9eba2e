"""Division of a prompt into chunks, each named by a digest of its content."""

import bisect
import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...cache import chunk_id
from ...errors import InputError
from .chunking import Bounds, ChunkingOptions, Tokens, chunk_ends
from .settings import MAX_SEGMENTS


class PromptFeature(NamedTuple):
    """An image (or other input of a tower) in a prompt.

    Attributes:
      identifier: the engine's name of its content.
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


def segments_of(
    backbone: str,
    tokens: Sequence[int],
    features: Sequence[PromptFeature] = (),
    ends: Sequence[int] | None = None,
    frame: tuple[int, int] | None = None,
    chunking: ChunkingOptions | None = None,
) -> tuple[PromptSegment, ...]:
    """Divides a prompt into chunks; the tokens after the last chunk are the question.

    A chunk's id is a digest of its tokens and of the names and offsets of the images among them, so a client that
    declares ends cannot claim another chunk's content. It does not depend on the chunk's position.

    Args:
      backbone: fingerprint of the model, part of every id.
      ends: ends of the chunks, increasing. None: each image is a chunk, and so is the text before each image.
      frame: token ids that open and close an image; if both are present, they belong to the image's chunk.
      chunking: how texts are divided further, and the text after the last image too, if `ends` is None. Of more than
        `MAX_SEGMENTS` chunks the first ones are returned. None: they are not divided.

    Raises:
      InputError: an end is outside the prompt, or inside an image.
    """
    ids = np.asarray(tokens, np.int64)
    ordered = sorted(features, key=lambda feature: feature.offset)
    if ends is None:
        ends = _found_ends(ids, _image_bounds(ids, ordered, frame), chunking)

    if any(end >= len(ids) for end in ends):
        raise InputError(
            f"segments: got end {max(ends)} in a prompt of {len(ids)} tokens; expected at least one token of a "
            "question after it"
        )

    for feature in ordered:
        place = bisect.bisect_right(ends, feature.offset)
        if place < len(ends) and ends[place] < feature.end:
            raise InputError(
                f"segments: got end {ends[place]} inside an image at {feature.offset} to {feature.end}; expected ends "
                "outside of images"
            )

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


def _found_ends(tokens: Tokens, images: Sequence[Bounds], chunking: ChunkingOptions | None) -> list[int]:
    """Returns the ends of images and of the texts around them."""
    if chunking is None:
        ends = sorted({bound for image in images for bound in image} - {0})
    else:
        ends = chunk_ends(tokens, images, chunking)[:MAX_SEGMENTS]

    # An image at the end of the prompt is the question.
    while ends and ends[-1] >= len(tokens):
        ends.pop()
    return ends


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
