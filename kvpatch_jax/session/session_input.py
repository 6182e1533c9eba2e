"""Normalised inputs of a session: images, frames, texts and token ids, named by their contents and embedded."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..backbone import Backbone, Tokens
from ..cache import Text, check_text, chunk_id, decoded, expect_small, sort_of
from ..errors import InputError
from ..window import Entry, Kind


@dataclasses.dataclass(frozen=True, eq=False)
class SessionInput:
    """A caller's input in the normal form over which its id is computed.

    Attributes:
      items: as `Backbone.prepare` takes them; images are pixels.
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
            text = isinstance(item, str)
            size += len(item.encode("utf-8", "surrogatepass")) if text else np.asarray(item).nbytes
        return size


def read_input(backbone: Backbone, item: Any, largest_image: int) -> SessionInput:
    """Returns a caller's input in its normal form.

    A `pathlib.Path` is an image file, a str a text (see `content.check_text`). Lists and tuples of integers are token
    ids. Other lists, and arrays [F, H, W] or more of frames, are one unit of several items.

    Args:
      largest_image: bytes that an image may have.

    Raises:
      InputError: an empty input, or one of another kind. ImageError: an image that cannot be read, or is too large.
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
        images = sum(not isinstance(item, str | list) for item in read.items)
        modality = "text" if read.textual else "mixed"
        if images == len(read.items):
            modality = "image" if images == 1 else "images"
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
        following = places.max() + 1 + np.arange(len(behind), dtype=places.dtype)
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
    return EmbeddedInput(tokens, length, int(np.floor(places.max())) - int(np.floor(places.min())) + 1)
