"""Where chunks and question stand while tokens are scored, and in which order chunks are served (InfoFlow KV).

Axis letters: B batch, T tokens, A position axes, Q tokens of the question.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..backbone import Tokens
from ..core import KVLayout, check_positions, end_position, relocate
from ..errors import InputError
from .spliced_cache import SplicedCache, live_tokens, read_slots, required, write_slots

Geometry = Literal["global", "hl_hp", "hl_tp", "tl_tp"]
"""Positions while tokens are scored (InfoFlow KV, section 4.2): all as served; every chunk
from position 0, and the question behind the longest of them; every chunk from position 0, and the question as served;
every chunk right before the question, which is as served."""


def placed_for_scoring(layout: KVLayout, splice: SplicedCache, geometry: Geometry) -> tuple[Tokens, dict[str, Array]]:
    """Returns question and cache with the positions that a geometry gives them.

    Of one chunk behind others only the chunk moves; what precedes it stays.

    Raises:
      InputError: an unknown geometry, or no question.
    """
    question = required(splice, "question", "geometry", "the question's tokens behind the cache")
    if geometry not in get_args(Geometry):
        raise InputError(f"geometry: got {geometry!r}; expected one of {', '.join(get_args(Geometry))}")
    if geometry == "global":
        return question, dict(splice.cache)

    positions, starts, ends = jnp.asarray(splice.tokens.positions), [], []
    for first, last in splice.parts:
        starts.append(positions[:, first])
        ends.append(end_position(positions[:, first:last]) + 1)

    tail, moved = jnp.asarray(question.positions)[:, 0], positions
    for (first, last), start, end in zip(splice.parts, starts, ends, strict=True):
        # All axes move by the same distance, so that an image keeps its rows and columns.
        if geometry == "tl_tp":
            by = first_position(tail) - end
        else:
            by = -first_position(start)
        by = by.reshape(-1, *[1] * (positions.ndim - 1))
        moved = moved.at[:, first:last].add(by.astype(positions.dtype))

    keys = relocate(layout, read_slots(splice.cache, splice.slots), positions, moved)
    cache = write_slots(dict(splice.cache), jnp.asarray(splice.slots), dict(keys), live_tokens(splice))
    if geometry == "hl_hp":
        longest = functools.reduce(
            jnp.maximum, (end - first_position(start) for start, end in zip(starts, ends, strict=True))
        )
        by = (longest - first_position(tail)).reshape(-1, *[1] * (positions.ndim - 1))
        question = question._replace(positions=jnp.asarray(question.positions) + by.astype(positions.dtype))
    return question, cache


def first_position[P: (np.ndarray, jax.Array)](position: P) -> P:
    """Returns one number per row for a position [B] or [B,A]: chunks and text begin with equal axes."""
    return position if position.ndim == 1 else position.max(-1)


def chunk_scores(splice: SplicedCache, score: Float[Array, "B T"], share: float) -> Float[np.ndarray, "B chunks"]:
    """Computes how important each chunk is: the sum of the scores of its own highest tokens, a share of them.

    Source: InfoFlow KV, section 4.3: a first selection within each chunk, whose scores are compared between chunks.
    """
    finite, sums = np.where(np.isfinite(score), score, 0.0), []
    for first, last in splice.parts:
        count = max(1, round(share * (last - first)))
        sums.append(np.sort(finite[:, first:last], axis=1)[:, -count:].sum(1))
    return np.stack(sums, axis=1)


def reordered(layout: KVLayout, splice: SplicedCache, order: Sequence[int]) -> SplicedCache:
    """Returns a splice whose chunks stand in another order, the same for all rows, their keys moved with them.

    Slots and positions are filled from the first chunk's on; new text and what surrounds the chunks stays. Truth and
    recorded KV belong to the old order, and are left out.

    Args:
      order: the chunk (by its number) at each place.

    Raises:
      InputError: it is no order of the chunks, or new text stands between them; a position leaves the
        rope's regime.
    """
    parts = splice.parts
    if sorted(order) != list(range(len(parts))):
        raise InputError(f"reordered.order: got {list(order)}; expected an order of {len(parts)} chunks")
    if any(left[1] != right[0] for left, right in itertools.pairwise(parts)):
        raise InputError(f"reordered.chunks: got {parts}; expected chunks without text between them")

    begin, end = parts[0][0], parts[-1][1]
    positions = np.asarray(splice.tokens.positions)
    moved, chunks, place = positions.copy(), [], begin
    start = first_position(positions[:, begin])
    for number in order:
        first, last = parts[number]
        chunk = positions[:, first:last]
        begun = first_position(chunk[:, 0])
        moved[:, place : place + last - first] = chunk + (start - begun).reshape(-1, *[1] * (positions.ndim - 1))
        chunks.append((place, place + last - first))
        start = start + end_position(chunk) + 1 - begun
        place += last - first
    check_positions(layout.rope, moved, np.zeros((), np.int32))

    places = np.arange(positions.shape[1])
    places[begin:end] = np.concatenate([np.arange(*parts[number]) for number in order])
    tokens = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, places], splice.tokens)._replace(positions=moved)
    kv = read_slots(splice.cache, jnp.asarray(splice.slots)[:, places])
    keys = relocate(layout, kv, positions[:, places], moved)
    cache = write_slots(dict(splice.cache), jnp.asarray(splice.slots), dict(keys), live_tokens(splice))
    return splice.replace(
        tokens=tokens, cache=cache, chunks=tuple(chunks), conditioned=None, recorded=None, hidden=None, canonical=None
    )
