"""What a session is given: images, frames, texts, paths, told apart; named by their contents, and embedded."""

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

LARGEST_IMAGE = 64 << 20
"""Bytes of an image, of its file and of its pixels."""


@dataclasses.dataclass(frozen=True, eq=False)
class SessionInput:
    """What was given, in the one form that its id is taken over.

    Attributes:
      items: as `Backbone.prepare` takes them; images are pixels.
      content: `chunk_id` of the items.
      textual: whether all of it is text or token ids.
    """

    items: tuple[Any, ...]
    content: str
    textual: bool

    @property
    def modality(self) -> str:
        """What it shows, as an `Entry` says it."""
        if self.textual:
            return "text"
        images = sum(sort_of(item, "session") == "image" for item in self.items)
        return "mixed" if images < len(self.items) else "image" if images == 1 else "images"

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return sum(
            len(item.encode("utf-8", "surrogatepass")) if isinstance(item, str) else np.asarray(item).nbytes
            for item in self.items
        )


def thing_of(backbone: Backbone, given: Any, largest: int = LARGEST_IMAGE) -> SessionInput:
    """Reads what was given.

    A `pathlib.Path` is an image file, a str a text (see `content.check_text`). Lists and tuples of integers are token
    ids, other lists, and arrays [F, H, W] or more of frames, one unit of several items.

    Args:
      largest: bytes that an image may have.

    Raises:
      InputError: nothing, or what is none of these. ImageError: an image that cannot be read, or is too large.
    """
    several = isinstance(given, list | tuple) and not (given and sort_or_none(given) == "tokens")
    if isinstance(given, np.ndarray | jax.Array) and given.ndim == 4:
        given, several = list(np.asarray(given)), True
    if several and not given:
        raise InputError(f"session: an empty {type(given).__name__}; expected an image, frames, a text or a path")
    items = tuple(_item(each, largest) for each in (given if several else [given]))
    textual = all(sort_of(item, "session") != "image" for item in items)
    return SessionInput(items, chunk_id(backbone.fingerprint, *items), textual)


def sort_or_none(given: Any) -> str | None:
    """What `content.sort_of` calls something, None where it knows no word."""
    try:
        return sort_of(given)
    except InputError:
        return None


def _item(given: Any, largest: int) -> Any:
    """One item in its one form."""
    if isinstance(given, str):
        check_text(given, "session")
        if not given:
            raise InputError("session: an empty text; expected some")
        return Text(given)
    if sort_of(given, "session") == "tokens":
        ids = [int(token) for token in given]
        if not ids:
            raise InputError("session: no token ids; expected some")
        return ids
    expect_small(given, largest)
    name = os.fspath(given) if isinstance(given, os.PathLike) else "image"
    # A copy: whoever gave an array or a PIL image may go on writing into it.
    return np.array(decoded(np.asarray(given) if isinstance(given, jax.Array) else given, name))


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddedInput:
    """A thing as tokens.

    Attributes:
      tokens: one row, padded where the backbone has buckets. length: how many count. span: as an `Entry` has it.
    """

    tokens: Tokens
    length: int
    span: int

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the embeddings."""
        deep = self.tokens.deepstack
        return self.tokens.embeddings.nbytes + (0 if deep is None else deep.nbytes)

    def entry(self, id: str, thing: SessionInput, kind: Kind, order_free: bool) -> Entry:
        """It as an entry of a window, which shows what was given."""
        return Entry(id, thing.content, self.length, self.span, kind, order_free, thing.modality)


def embedded(
    backbone: Backbone, items: Any, behind: Any = (), prompt: Mapping[str, Any] | None = None
) -> EmbeddedInput:
    """Embeds items, and token ids that follow them, at positions from 0.

    Args:
      behind: token ids, such as an answer's, at the positions that decoding gives them.
      prompt: what `prepare` made of the items, with what stands for pixels; None: it is asked.

    Raises:
      InputError: no token, such as of spaces alone. What `prepare` and `embed` raise.
    """
    prompt = dict(backbone.prepare(list(items)) if prompt is None else prompt)
    if len(behind):
        prompt = followed(prompt, behind)
    maker: Any = backbone
    if not prompt["input_ids"].shape[1]:
        raise InputError(f"session: {items!r:.80} is no token; expected one at least")
    if hasattr(maker, "embed_padded"):
        tokens, length = maker.embed_padded(**prompt)
    else:
        tokens = maker.embed(**prompt)
        length = tokens.embeddings.shape[1]
    places = np.asarray(tokens.positions)[:, :length]
    return EmbeddedInput(tokens, length, int(np.floor(places.max())) - int(np.floor(places.min())) + 1)


def followed(prompt: dict[str, Any], ids: Any) -> dict[str, Any]:
    """A prompt with token ids behind it, one position after the other on all axes."""
    places = np.asarray(prompt["position_ids"])
    following = places.max() + 1 + np.arange(len(ids), dtype=places.dtype)
    following = following.reshape(1, -1, *(1 for _ in places.shape[2:]))
    following = np.broadcast_to(following, (1, len(ids), *places.shape[2:]))
    whole = np.concatenate([np.asarray(prompt["input_ids"]), np.asarray(ids, np.int32)[None]], axis=1)
    return {**prompt, "input_ids": whole, "position_ids": np.concatenate([places, following], axis=1)}
