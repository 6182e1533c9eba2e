"""Normalised inputs of a session: images, frames, videos, sounds, texts and token ids, named by their contents and
embedded.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..backbone import Backbone, Tokens
from ..cache import (
    Audio,
    Text,
    Video,
    check_text,
    chunk_id,
    decoded,
    expect_small,
    expect_small_medium,
    medium_of,
    sort_of,
)
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
    """

    items: tuple[Any, ...]
    content: str
    textual: bool

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the items."""
        size = 0
        for item in self.items:
            if isinstance(item, str):
                size += len(item.encode("utf-8", "surrogatepass"))
            else:
                size += (item if isinstance(item, Video | Audio) else np.asarray(item)).nbytes
        return size


def read_input(backbone: Backbone, item: Any, largest_image: int) -> SessionInput:
    """Returns a caller's input in its normal form.

    A `pathlib.Path` is a file of an image, or by its suffix of a video or sound; a str is a text (see
    `content.check_text`). Lists and tuples of integers are token ids. Other lists, and arrays [F, H, W] or more of
    images, are one unit of several items.

    Args:
      largest_image: bytes that an image may have, and a video or sound as it was given (a file's are encoded).

    Raises:
      InputError: an empty input, one of another kind, or a video or sound that cannot be read. ImageError: an image
      that cannot be read, or an input that is too large.
    """
    # One input may be several items, such as the frames of a clip.
    several = False
    if isinstance(item, np.ndarray | jax.Array) and item.ndim == 4:
        item, several = list(np.asarray(item)), True
    elif isinstance(item, list | tuple):
        if not item:
            raise InputError(
                f"session: got an empty {type(item).__name__}; expected an image, frames, a text or a path"
            )
        # A list that is no kind of item by itself has several, each of which is checked below.
        try:
            several = sort_of(item) != "tokens"
        except InputError:
            several = True

    items, textual = [], True
    for each in item if several else [item]:
        if isinstance(each, str):
            check_text(each, "session")
            if not each:
                raise InputError("session: got an empty text; expected at least one character")
            items.append(Text(each))
        elif sort_of(each, "session") == "tokens":
            token_ids = [int(token) for token in each]
            if not token_ids:
                raise InputError("session: got no token ids; expected at least one")
            items.append(token_ids)
        elif (medium := medium_of(each)) is not None:
            textual = False
            expect_small_medium(medium, largest_image)
            items.append(medium.read())
        else:
            textual = False
            expect_small(each, largest_image)
            name = os.fspath(each) if isinstance(each, os.PathLike) else "image"
            pixels = decoded(np.asarray(each) if isinstance(each, jax.Array) else each, name)
            # Copied, because the caller may keep writing into an array or a PIL image.
            items.append(np.array(pixels))

    return SessionInput(tuple(items), chunk_id(backbone.fingerprint, *items), textual)


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
