"""Padding prompts and images to their buckets, so that another size in the same bucket compiles nothing anew.

Padding is exact: padded patches belong to no segment, padded tokens are seen by nobody, and what comes back is cut to
the true size. On a device padding and cutting are small programs of their own; the model's are compiled once per
bucket.

Axis letters: B batch, T tokens, S keys, P rows of pixels (patches or tiles); a prime marks the bucket's size.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.core import PARTS, AnyArray, Buckets, cut, host_view, token_rows, zero_padded

from ..attention import Mask
from .masks import causal_mask, without_padding

EMBEDDED = 512
"""Tokens that are embedded at a time."""


def pad_images(
    buckets: Buckets, pixels: np.ndarray, plan: Mapping[str, Any], fills: Mapping[str, int | str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns pixel rows [P',…] and the plan that goes with them.

    Args:
      pixels: [P, …] patches or [n, …, 3, H, W] tiles.
      fills: the plan's tables of numbers, of patches (1 per row of pixels), features (as many as a tile has) or rows of
        another table (its name): the number one past the last stands for none. Other tables are padded with zeros along
        their first axis.
    """
    # Tiles of all images on one axis: a plan counts them through.
    if pixels.ndim > 4:
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
    rows, padded = len(pixels), buckets.round_up(len(pixels))
    tables = {}

    for name, given in plan.items():
        table = np.asarray(given)
        if name in fills:
            # What stood for none stands for a row of padding now, so it moves behind that.
            counted = fills[name]
            if isinstance(counted, str):
                none = len(plan[counted])
                fill = buckets.round_up(none)
            else:
                none, fill = rows * counted, padded * counted
            table = np.where(table == none, fill, table).astype(table.dtype)
            tables[name] = _grown(table, [buckets.round_up(size) for size in table.shape], fill)
        else:
            tables[name] = _grown(table, [buckets.round_up(len(table)), *table.shape[1:]], 0)

    return _grown(np.asarray(pixels), [padded, *pixels.shape[1:]], 0), tables


def pad_ids(buckets: Buckets, input_ids: np.ndarray, pads: tuple[int, ...]) -> np.ndarray:
    """Returns ids [B,T'], filled up with the first id that is no image placeholder."""
    return _grown(input_ids, [len(input_ids), buckets.round_up(input_ids.shape[1])], _no_placeholder(pads))


def embedding_blocks(
    input_ids: np.ndarray, features: Array | np.ndarray | None, pads: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields all rows' ids [B,T], one behind the other, as [1,`EMBEDDED`], with the features [n,`EMBEDDED`,D] of their
    placeholders: whatever the number of either, one program embeds them.
    """
    flat, begin, host = input_ids.reshape(1, -1), 0, None if features is None else np.asarray(features)
    fill = _no_placeholder(pads)
    for start in range(0, max(flat.shape[1], 1), EMBEDDED):
        ids = _grown(flat[:, start : start + EMBEDDED], [1, EMBEDDED], fill)
        end = begin + int(np.isin(ids, pads).sum())
        yield ids, None if host is None else np.asarray(zero_padded(host[:, begin:end], 1, EMBEDDED))
        begin = end


def _no_placeholder(pads: tuple[int, ...]) -> int:
    return next(number for number in range(len(pads) + 1) if number not in pads)


def _grown(table: np.ndarray, shape: list[int], fill: int) -> np.ndarray:
    if list(table.shape) == shape:
        return table
    room = [(0, size - own) for size, own in zip(shape, table.shape, strict=True)]
    return np.pad(table, room, constant_values=fill)


def pad_tokens(buckets: Buckets, tokens: Tokens) -> Tokens:
    """Returns tokens [B,T',…]; padded ones have zero embeddings and position 0."""
    extra = buckets.round_up(tokens.embeddings.shape[1]) - tokens.embeddings.shape[1]
    return jax.tree.map(lambda x: _room(x, 1, extra), tokens)


def pad_context(buckets: Buckets, context: Mapping[str, AnyArray] | None) -> dict[str, Any] | None:
    """Returns an engine-frame context [L,B,S',K,H]."""
    if context is None:
        return None
    size = token_rows(context).shape[2]
    extra = buckets.round_up(size) - size
    return {name: value if name in PARTS else _room(value, 2, extra) for name, value in context.items()}


def pad_mask(buckets: Buckets, length: int, size: int, mask: AnyArray | None, window: int | None) -> Mask:
    """Pads a mask to T' tokens over [S' keys of a context, T' tokens] from one [B,1,T,S+T], or the causal one for
    None.
    """
    padded, keys = buckets.round_up(length), buckets.round_up(size)
    if mask is None:
        return causal_mask(padded, keys, size, window)
    mask = host_view(mask)
    parts = _room(mask[..., :size], 3, keys - size), _room(mask[..., size:], 3, padded - length)
    xp = np if isinstance(mask, np.ndarray) else jnp
    made = Mask(offset=keys, allowed=_room(xp.concatenate(parts, axis=3), 2, padded - length))
    return made if window is None else without_padding(made, padded, keys, size)


def pad_own_mask(buckets: Buckets, mask: AnyArray | None, length: int) -> AnyArray | None:
    """Returns a mask [B,1,T,S+T] over the keys of pages, which need no more padding, and T tokens: [B,1,T',S+T']."""
    extra = buckets.round_up(length) - length
    return None if mask is None else _room(_room(mask, 2, extra), 3, extra)


def pad_slots(buckets: Buckets, slots: AnyArray, keep: Any, mask: Any, size: int) -> tuple[AnyArray, Any, Any]:
    """Returns slots [B,T'], keep [L,B,T'] and mask [B,1,T',S] of a recompute; padded tokens are written nowhere."""
    extra = buckets.round_up(slots.shape[1]) - slots.shape[1]
    keep = None if keep is None else _room(keep, 2, extra)
    mask = None if mask is None else _room(mask, 2, extra)
    return _room(slots, 1, extra, size), keep, mask


def cut_output(output: Output, length: int, every: bool) -> Output:
    """Returns an output's first `length` tokens; their logits too where it has those of every token."""
    if token_rows(output.kv).shape[2] == length:
        return output
    logits = cut(output.logits, 1, 0, length) if every else output.logits
    kv = {name: value if name in PARTS else cut(value, 2, 0, length) for name, value in output.kv.items()}
    return Output(logits, kv, {layer: cut(x, 1, 0, length) for layer, x in output.hidden.items()})


def _room(x: Any, axis: int, extra: int, fill: int = 0) -> Any:
    """Returns `x` with room for `extra` more along an axis."""
    if not extra:
        return x
    x = host_view(x)
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
    return pad(x, [(0, extra if number == axis else 0) for number in range(x.ndim)], constant_values=fill)
