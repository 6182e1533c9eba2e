"""Normalised inputs of a session: images, frames, videos, sounds, texts, token ids and messages that hold them, named
by their contents and embedded.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import cache
from ..backbone import Backbone, Tokens
from ..cache import Audio, Text, Video, chunk_id, decoded, medium_of, sort_of
from ..core import end_position
from ..errors import InputError
from ..window import Entry, Kind


@dataclasses.dataclass(frozen=True, eq=False)
class SessionInput:
    """A caller's input in the normal form over which its id is computed.

    Attributes:
      items: as `Backbone.prepare` takes them; images are pixels, videos and sounds as their `read` gives them.
      content: `chunk_id` of the items.
      textual: whether all items are texts or token ids.
      name: vLLM's name of a medium in a message, or None.
    """

    items: tuple[Any, ...]
    content: str
    textual: bool
    name: str | None = None

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the items."""
        sources = [item.source if isinstance(item, Video | Audio) else item for item in self.items]
        return sum(len(source.encode()) if isinstance(source, str) else np.asarray(source).nbytes for source in sources)


def read_input(backbone: Backbone, item: Any, largest_image: int) -> SessionInput:
    """Returns a caller's input in its normal form.

    It is what `Session.add` takes. A path with the suffix of a video's or sound's file is one. Lists, tuples and
    vectors of integers are token ids; other lists, and arrays [F, H, W] or more of images, are several items.

    Args:
      largest_image: bytes that an image may have, and a video or sound as it was given (a file's are encoded).

    Raises:
      InputError: an empty input, one of another kind, an address, or a video or sound that cannot be read. InputError:
      an image that cannot be read, or an input that is too large.
    """
    parts = cache.unit_items(item, "session")
    if not parts:
        expected = "an image, frames, a text, a path or a message"
        raise InputError(f"session: got an empty {type(item).__name__}; expected {expected}")

    items, textual = [], True
    for part in parts:
        sort = sort_of(part, "session")
        if sort in ("text", "tokens") and not len(part):
            raise InputError(f"session: got an empty {sort}; expected at least one character or token id")
        if sort == "text":
            items.append(part if isinstance(part, Text) else Text(part))
        elif sort == "tokens":
            items.append([int(token) for token in part])
        elif (medium := medium_of(part)) is not None:
            cache.expect_small(medium, largest_image)
            items.append(medium.read())
        else:
            cache.expect_small(part, largest_image)
            name = os.fspath(part) if isinstance(part, os.PathLike) else "image"
            # Copied, because the caller may keep writing into an array or a PIL image.
            items.append(np.array(decoded(part, name)))
        textual = textual and sort in ("text", "tokens")

    return SessionInput(tuple(items), chunk_id(backbone.fingerprint, *items), textual, cache.part_name(item))


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddedInput:
    """An input as tokens.

    Attributes:
      tokens: one row, padded where the backbone has buckets.
      length: the number of tokens without padding.
      span: positions from the first to the last, as in `Entry`.
    """

    tokens: Tokens
    length: int
    span: int

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the embeddings."""
        deepstack = self.tokens.deepstack
        return self.tokens.embeddings.nbytes + (0 if deepstack is None else deepstack.nbytes)

    def take(self, start: int, stop: int) -> Tokens:
        """Returns tokens start … stop-1, cut on the host, where no length compiles a program."""
        return self.tokens.on_host().take(start, stop)

    def entry(self, id: str, read: SessionInput, kind: Kind, order_free: bool) -> Entry:
        """Returns the entry of a window that shows this input."""
        sorts = {sort_of(item) for item in read.items}
        modality = "text" if read.textual else "mixed"
        if len(sorts) == 1 and not read.textual:
            modality = sorts.pop() + ("s" if len(read.items) > 1 else "")
        return Entry(id, read.content, self.length, self.span, kind, order_free, modality)


def embedded(
    backbone: Backbone, items: Any, behind: Any = (), prompt: Mapping[str, Any] | None = None
) -> EmbeddedInput:
    """Embeds items, and token ids that follow them, at positions from 0.

    Args:
      behind: token ids, such as those of an answer, at the positions that decoding gives them.
      prompt: the result of `backbone.prepare(items)`, with features in place of pixels. None: `prepare` is called.

    Raises:
      InputError: items without a token, such as a text of spaces. What `prepare` and `embed` raise.
    """
    prompt = dict(backbone.prepare(list(items)) if prompt is None else prompt)
    if len(behind):
        # As decoding does, each token is one position further on every axis of M-RoPE.
        places = np.asarray(prompt["position_ids"])
        following = end_position(places)[0] + 1 + np.arange(len(behind), dtype=places.dtype)
        following = following.reshape(1, -1, *(1 for _ in places.shape[2:]))
        following = np.broadcast_to(following, (1, len(behind), *places.shape[2:]))
        input_ids = [np.asarray(prompt["input_ids"]), np.asarray(behind, np.int32)[None]]
        prompt["input_ids"] = np.concatenate(input_ids, axis=1)
        prompt["position_ids"] = np.concatenate([places, following], axis=1)

    if not prompt["input_ids"].shape[1]:
        raise InputError(f"session: got {items!r:.80}, which has no token; expected at least one")

    # Padding to buckets keeps the number of compiled programs small.
    model: Any = backbone
    if hasattr(model, "embed_padded"):
        tokens, length = model.embed_padded(**prompt)
    else:
        tokens = model.embed(**prompt)
        length = tokens.embeddings.shape[1]

    # Positions of videos are fractional; the next piece starts at a whole one.
    places = np.asarray(tokens.positions)[:, :length]
    return EmbeddedInput(tokens, length, int(np.floor(end_position(places)[0])) - int(np.floor(places.min())) + 1)
