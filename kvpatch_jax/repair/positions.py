"""Where chunks and question stand while tokens are scored, and in which order chunks are served (InfoFlow KV).

Axis letters: B batch, T tokens, A position axes, Q tokens of the question.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

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
    """Returns question and cache with the positions that a geometry gives them; what precedes the chunks stays."""
    question = required(splice, "question")
    if geometry not in get_args(Geometry):
        raise InputError(f"geometry: got {geometry!r}; expected one of {', '.join(get_args(Geometry))}")
    if geometry == "global":
        return question, dict(splice.cache)

    positions = moved = jnp.asarray(splice.tokens.positions)
    tail, longest = first_position(jnp.asarray(question.positions)), jnp.zeros((), jnp.int32)
    for first, last in splice.parts:
        chunk = positions[:, first:last]
        start, end = first_position(chunk), end_position(chunk) + 1
        moved = moved.at[:, first:last].set(shifted(chunk, tail - end if geometry == "tl_tp" else -start))
        longest = jnp.maximum(longest, end - start)
    if geometry == "hl_hp":
        question = question._replace(positions=shifted(jnp.asarray(question.positions), longest - tail))
    return question, _relocated(layout, splice, np.arange(positions.shape[1]), positions, moved)


def first_position(positions: Any) -> Any:
    """Returns one number per row for positions [B,T] or [B,T,A]: chunks and text begin with equal axes."""
    return positions[:, 0] if positions.ndim == 2 else positions[:, 0].max(-1)


def shifted(positions: Any, by: Any) -> Any:
    """Moves positions [B,T] or [B,T,A] by one number per row; all axes alike, so that an image keeps its rows."""
    return positions + by.reshape(-1, *[1] * (positions.ndim - 1)).astype(positions.dtype)


def _relocated(
    layout: KVLayout, splice: SplicedCache, order: np.ndarray, positions: Any, moved: Any
) -> dict[str, Array]:
    """Returns the cache with the splice's tokens in an order, their keys moved between positions of that order."""
    kv = read_slots(splice.cache, jnp.asarray(splice.slots)[:, order])
    keys = relocate(layout, kv, positions, moved)
    return write_slots(dict(splice.cache), jnp.asarray(splice.slots), dict(keys), live_tokens(splice))


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

    Slots and positions are filled from the first chunk's on; what surrounds the chunks stays. Recorded KV belongs to
    the old order, and is left out.

    Args:
      order: the chunk (by its number) at each place. No text stands between chunks.
    """
    parts = splice.parts
    if any(left[1] != right[0] for left, right in itertools.pairwise(parts)):
        raise InputError(f"reordered.chunks: got {parts}; expected chunks without text between them")

    place, positions = parts[0][0], np.asarray(splice.tokens.positions)
    places, moved, chunks = np.arange(positions.shape[1]), positions.copy(), []
    start = first_position(positions[:, place:])
    for number in order:
        first, last = parts[number]
        chunk, stop = positions[:, first:last], place + last - first
        moved[:, place:stop] = shifted(chunk, start - first_position(chunk))
        places[place:stop] = np.arange(first, last)
        chunks.append((place, stop))
        start, place = start + end_position(chunk) + 1 - first_position(chunk), stop
    check_positions(layout.rope, moved, np.zeros((), np.int32))

    return splice.replace(
        tokens=jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, places], splice.tokens)._replace(positions=moved),
        cache=_relocated(layout, splice, places, positions[:, places], moved),
        chunks=tuple(chunks),
        **dict.fromkeys(("recorded", "hidden", "canonical")),
    )
