"""Cutting a context into chunks: at fixed sizes, at the ends of passages, and an image between rows of its tokens."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from kvpatch_jax.errors import InputError

Parts = tuple[tuple[int, int], ...]
"""(first, one past the last) token of each chunk, ascending, without gaps."""


def fixed_parts(tokens: int, size: int) -> Parts:
    """Cuts tokens into chunks of one size; the last one may be shorter.

    Raises:
      InputError: no tokens, or no size.
    """
    if tokens < 1 or size < 1:
        raise InputError(f"fixed_parts: got {tokens} tokens and a size of {size}; expected at least 1 of each")
    return tuple((first, min(first + size, tokens)) for first in range(0, tokens, size))


def passage_parts(ends: Sequence[int], least: int = 1) -> Parts:
    """Cuts a context where passages end; passages of fewer than `least` tokens are joined to the one behind them.

    Args:
      ends: one past the last token of each passage, ascending; the last one ends the context.

    Raises:
      InputError: there are none, or they do not ascend from 1 on.
    """
    edges = [0, *ends]
    if len(edges) < 2 or any(right <= left for left, right in itertools.pairwise(edges)):
        raise InputError(f"passage_parts.ends: got {list(ends)}; expected ascending ends, above 0")
    kept = [0]
    for end in ends:
        if end - kept[-1] >= least:
            kept.append(end)
    # What is left behind the last cut belongs to the chunk in front of it.
    if kept[-1] != ends[-1]:
        kept = [*kept[: max(1, len(kept) - 1)], ends[-1]]
    return tuple(itertools.pairwise(kept))


def row_parts(is_cell: Bool[np.ndarray, " T"], rows: int, count: int) -> Parts:
    """Cuts an image's tokens between rows of cells; what stands in front of and behind the cells stays with them.

    Args:
      is_cell: which of the image's tokens are cells, row by row; others are start and end tokens.
      rows: of cells. count: chunks, whose numbers of rows differ by one at most.

    Raises:
      InputError: cells are not contiguous or no whole rows, or there are fewer rows than chunks.
    """
    cells = np.flatnonzero(is_cell)
    whole = len(cells) > 0 and rows > 0 and len(cells) % rows == 0 and cells[-1] - cells[0] + 1 == len(cells)
    if not whole or not 1 <= count <= rows:
        raise InputError(
            f"row_parts: got {len(cells)} cells in {rows} rows for {count} chunks; expected whole rows behind one "
            "another, and at least one for each chunk"
        )
    width = len(cells) // rows
    sizes = [len(part) for part in np.array_split(np.arange(rows), count)]
    inner = [int(cells[0]) + width * int(row) for row in np.cumsum(sizes)[:-1]]
    return tuple(itertools.pairwise([0, *inner, len(is_cell)]))


def local_positions(parts: Parts) -> Int[np.ndarray, " T"]:
    """Counts each token's position from its chunk's start."""
    return np.concatenate([np.arange(last - first, dtype=np.int32) for first, last in parts])


def block_mask(parts: Parts) -> Bool[np.ndarray, "T T"]:
    """Makes the mask in which each chunk sees itself alone, causally: one forward prefills all chunks."""
    owner = np.repeat(np.arange(len(parts)), [last - first for first, last in parts])
    return (owner[:, None] == owner) & np.tri(len(owner), dtype=bool)
