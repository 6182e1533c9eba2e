"""What a prompt is made of: chunks named by what they hold, whoever declares where they begin and end."""

import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

from ...cache import chunk_id
from ...errors import InputError


class PromptFeature(NamedTuple):
    """An image (or other input of a tower) of a prompt.

    Attributes:
      identifier: the engine's name of its content. offset, length: of its tokens.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Behind its last token."""
        return self.offset + self.length


class PromptSegment(NamedTuple):
    """A chunk of a prompt: tokens from `begin` up to `end`, named by them and by the images among them.

    Attributes:
      modality: what it shows: "text", "image", or "images" where there are several in it.
    """

    id: str
    begin: int
    end: int
    modality: str = "text"

    @property
    def span(self) -> int | None:
        """Positions that it spans; None of images, which may span fewer than they have tokens."""
        return self.end - self.begin if self.modality == "text" else None


def segments_of(
    backbone: str,
    tokens: Sequence[int],
    features: Sequence[PromptFeature] = (),
    ends: Sequence[int] | None = None,
    frame: tuple[int, int] | None = None,
) -> tuple[PromptSegment, ...]:
    """Divides a prompt into chunks; what is behind the last one is the question, at least a token.

    A name is a digest of the tokens and of the images' names and places among them, so that whoever declares ends
    declares no content. It does not depend on where the chunk stands.

    Args:
      ends: of the chunks, growing; None: each image is one, with the tokens of `frame` where they are around it, and
        so is the text in front of each.
      frame: token ids that open and close an image.

    Raises:
      InputError: ends out of range, or inside an image.
    """
    ordered = sorted(features, key=lambda feature: feature.offset)
    found = _around(tokens, ordered, frame) if ends is None else list(ends)
    if any(end >= len(tokens) for end in found):
        raise InputError(f"segments: end {max(found)} of a prompt of {len(tokens)} tokens; expected a question behind")
    for feature in ordered:
        cut = next((end for end in found if feature.offset < end < feature.end), None)
        if cut is not None:
            raise InputError(f"segments: end {cut} inside an image at {feature.offset} to {feature.end}")
    segments = []
    for begin, end in itertools.pairwise([0, *found]):
        own = [list(each._replace(offset=each.offset - begin)) for each in ordered if begin <= each.offset < end]
        content = [list(tokens[begin:end])] + ([json.dumps(own).encode()] if own else [])
        modality = ("text", "image")[len(own)] if len(own) < 2 else "images"
        segments.append(PromptSegment(chunk_id(backbone, *content), begin, end, modality))
    return tuple(segments)


def _around(tokens: Sequence[int], features: Sequence[PromptFeature], frame: tuple[int, int] | None) -> list[int]:
    """Ends around each image, and of the text in front of it."""
    ends: list[int] = []
    for feature in features:
        begin, end = feature.offset, feature.end
        if frame is not None and begin and end < len(tokens) and (tokens[begin - 1], tokens[end]) == frame:
            begin, end = begin - 1, end + 1
        ends += [place for place in (begin, end) if place > (ends[-1] if ends else 0)]
    while ends and ends[-1] >= len(tokens):
        ends.pop()
    return ends
