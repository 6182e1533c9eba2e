"""Attention masks: bool arrays, True where a token may look, and the causal one as structure."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvpatch_jax.backbone import Context, Tokens
from kvpatch_jax.core import Paged, token_rows
from kvpatch_jax.errors import InputError, ShapeError

from ..attention import Mask
from ..attention.mask import NOWHERE


def causal_mask(length: int, keys: int, seen: int | None = None, window: int | None = None) -> Mask:
    """Makes the mask of tokens that look at a context and, causally, at each other.

    Args:
      length: T tokens. keys: of the context, in front of the tokens' own.
      seen: how many of the context's keys count, the first ones (the others are padding). None: all.
      window: of the layers that slide; padding does not count as places in it.
    """
    if seen is None or keys == 0:
        return Mask(causal=True, offset=keys)
    if window is not None:
        return without_padding(Mask(causal=True), length, keys, seen)
    key = np.arange(keys + length)
    segments = np.where((key >= seen) & (key < keys), -1, 0).astype(np.int32)[None]
    return Mask(causal=True, offset=keys, query_segments=np.zeros((1, length), np.int32), key_segments=segments)


def without_padding(mask: Mask, length: int, keys: int, seen: int) -> Mask:
    """Returns the mask with places as they are without the padding between a context's `seen` keys and the tokens'."""
    key = np.arange(keys + length)
    places = np.where(key < seen, key, np.where(key < keys, NOWHERE, key - keys + seen)).astype(np.int32)
    return dataclasses.replace(mask, query_places=places[None, keys:], key_places=places[None])


def paged_mask(length: int, context: Paged, mask: Any, window: int | None) -> Mask:
    """Makes the mask of tokens that look at those keys of a paged context that count and, causally, at each other.

    Args:
      length: T tokens.
      mask: bool [B,1,T,S+T], what they may look at in its stead, among the keys that count; None for all of it.
      window: of the layers that slide. Keys stand at their places, the tokens behind the last of them.
    """
    seen, keys = jnp.asarray(context.seen), context.key_count
    own = jnp.arange(length, dtype=jnp.int32)
    made = Mask(causal=mask is None, offset=keys)

    if window is not None:
        # Tokens behind a table of which nothing counts stand from place 0 on.
        places = jnp.where(seen, context.places_of_keys(), NOWHERE)
        queries = jnp.max(places, axis=1, where=seen, initial=-1)[:, None] + 1 + own
        made = dataclasses.replace(made, query_places=queries, key_places=jnp.concatenate([places, queries], axis=1))

    if mask is not None:
        allowed = jnp.pad(seen, ((0, 0), (0, length)), constant_values=True)[:, None, None]
        return dataclasses.replace(made, allowed=mask & allowed)
    if window is not None:
        return made
    segments = jnp.pad(jnp.where(seen, 0, -1), ((0, 0), (0, length)))
    return dataclasses.replace(made, query_segments=jnp.zeros((1, length), jnp.int32), key_segments=segments)


def check_mask_over(mask: Any, shape: tuple[int, int, int], what: str) -> None:
    """Refuses a mask of another shape than [rows, 1, tokens, keys] over pages, given (rows, tokens, keys).

    Raises:
      ShapeError: it has both shapes.
    """
    rows, *rest = shape
    if mask is not None and (mask.ndim != 4 or mask.shape[0] not in (1, rows) or mask.shape[1:] != (1, *rest)):
        raise ShapeError(
            f"{what}: got mask of shape {mask.shape}; expected {(rows, 1, *rest)}, over all keys of a table's pages, "
            "and in front of tokens over these"
        )


def check_behind(tokens: Tokens, context: Context, mask: Any, what: str) -> None:
    """Checks that tokens follow their context: no row that sees it starts at position 0.

    Checking positions on the host (as `embed` and `shift` return them) is free; those on a device are copied to the
    host; traced ones pass. Rows that start with padding at position 0 pass, and so do rows whose first token may not
    attend to any of the context.

    Raises:
      InputError: a row starts at position 0; the message names it.
    """
    paged = isinstance(context, Paged)
    size = context.key_count if paged else token_rows(context).shape[2]
    if size == 0 or isinstance(tokens.positions, Tracer) or (paged and isinstance(context.seen, Tracer)):
        return

    # A row that starts with padding has its second token at position 0, too.
    first = np.asarray(tokens.positions)[:, :2]
    at_start = (first == 0).all(axis=tuple(range(2, first.ndim)))  # [B, 2] or [B, 1]
    unmoved = at_start[:, 0] & ~at_start[:, 1:].any(axis=1)
    visible = np.asarray(context.seen) if paged else np.ones((1, size), bool)
    if unmoved.any() and mask is not None and not isinstance(mask, Tracer):
        visible = visible & np.asarray(mask)[:, 0, 0, :size]
    unmoved &= visible.any(axis=-1)
    if unmoved.any():
        raise InputError(
            f"{what}: got row {int(unmoved.argmax())} at position 0 behind a context of {size} tokens; expected "
            "positions behind it: tokens.shift(start), start being where the context's span ends"
        )


def counted_tokens(mask: Any, keys: int, what: str) -> Any:
    """Returns which tokens count by a mask [B,1,T,S+T] for a model with linear attention: those that see themselves.

    Such layers pass over tokens that are padding, wherever these stand, and know of no other mask. Keys of the context
    may be hidden from attention, where all tokens that count see the same: linear layers hold what they hold.

    Raises:
      InputError: a mask that is not causal among the tokens that count.
    """
    own = mask[:, 0, :, keys:]
    counted = own.diagonal(axis1=1, axis2=2)
    if isinstance(mask, Tracer):
        return counted
    own, context, counted = np.asarray(own), np.asarray(mask[:, 0, :, :keys]), np.asarray(counted)
    causal = np.tril(np.ones(own.shape[1:], bool)) & counted[:, None, :]
    first = np.take_along_axis(context, counted.argmax(axis=1)[:, None, None], axis=1)
    wrong = counted & ((own != causal).any(axis=2) | (context != first).any(axis=2))
    if wrong.any():
        row, token = np.argwhere(wrong)[0]
        raise InputError(
            f"{what}: got a mask by which token {token} of row {row} does not see all that is in front of it, and "
            "linear attention knows of no mask; expected causal order, among tokens that are not padding"
        )
    return counted


def check_chunk(chunk: int | None, mask: Any, keys: int, ahead: Any = None) -> None:
    """Refuses a chunk length that is none, and masks of tokens that look at tokens of later chunks.

    So it does, without a mask, of tokens that see others `ahead`: an image's that see each other stand in one chunk.

    Raises:
      InputError: it names the token and what it sees.
    """
    if chunk is None:
        return
    if type(chunk) is not int or chunk < 1:
        raise InputError(f"chunk: got {chunk!r}; expected a number of tokens, at least 1, or None")
    if mask is None and ahead is not None and not isinstance(ahead, Tracer):
        places = np.arange(np.shape(ahead)[1])
        across = np.asarray(ahead) + places % chunk >= chunk
        if across.any():
            token = int(np.argwhere(across)[0, 1])
            raise InputError(
                f"chunk: got {chunk} tokens, which part token {token} from those that it sees behind its own; expected "
                "chunks that hold every image whole, or None"
            )
    if mask is None or isinstance(mask, Tracer):
        return

    own = np.asarray(mask)[:, 0, :, keys:]
    for start in range(0, own.shape[1], chunk):
        ahead = own[:, start : start + chunk, start + chunk :]
        if ahead.any():
            _, token, key = np.argwhere(ahead)[0] + (0, start, start + chunk)
            raise InputError(
                f"mask: got one by which token {token} sees token {key}, which is in a later chunk of {chunk}; "
                "expected masks that look back where a prefill goes chunk by chunk"
            )
