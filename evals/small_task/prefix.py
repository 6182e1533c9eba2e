"""Images one behind the other as tokens, and questions behind them: what every task lays out alike.

Axis letters: B contexts, T tokens of the prefix, N tokens of the questions.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """How a backbone's own processor lays a context's images out as tokens.

    Attributes:
      chunk_ids: token ids of each chunk's image, the page last, with start and end tokens where the family has them.
      chunk_local: their positions counted from the image's own start, [T] or [T,3] each.
      image_token: the placeholder among the ids.
    """

    chunk_ids: tuple[np.ndarray, ...]
    chunk_local: tuple[np.ndarray, ...]
    image_token: int

    @property
    def chunks(self) -> int:
        """Chunks of a context, the page among them."""
        return len(self.chunk_ids)

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """Token ids [T] of the prefix."""
        return np.concatenate(self.chunk_ids)

    @functools.cached_property
    def local(self) -> np.ndarray:
        """Positions [T] or [T,3] of the prefix tokens within their own images."""
        return np.concatenate(self.chunk_local)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Tokens of each chunk."""
        return [len(ids) for ids in self.chunk_ids]

    @functools.cached_property
    def spans(self) -> list[int]:
        """How far each chunk moves the position of what follows."""
        return [int(local.max()) + 1 for local in self.chunk_local]

    @functools.cached_property
    def owner(self) -> np.ndarray:
        """The place of the chunk that each prefix token belongs to, [T]."""
        return np.repeat(np.arange(self.chunks), self.sizes)

    @functools.cached_property
    def slices(self) -> list[slice]:
        """Where each chunk stands in the prefix."""
        edges = np.cumsum([0, *self.sizes])
        return [slice(int(first), int(last)) for first, last in itertools.pairwise(edges)]

    @property
    def page(self) -> slice:
        """Where the page stands in the prefix."""
        return self.slices[-1]

    def cells(self, place: int) -> slice:
        """Finds where the cells of a chunk stand in the prefix, without start and end tokens."""
        inside = self.slices[place].start + np.flatnonzero(self.ids[self.slices[place]] == self.image_token)
        return slice(int(inside[0]), int(inside[-1]) + 1)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix."""
        return sum(self.sizes)


def lay_out(
    config: Any, images: Any, front: tuple[int, int], page: tuple[int, int], count: int
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Lays `count` images and a page out as tokens: ids [T] and positions [T] or [T,3] of each, by the family's rules.

    Args:
      front, page: height and width in pixels of the images in front and of the page.
    """
    vision, blank = config.family.vision, {}
    for height, width in {front, page}:
        arrays = vision.process([np.zeros((height, width, 3), np.uint8)], images)
        ids = np.array(vision.tokens(config, arrays, 0, None), np.int32)
        blank[height, width] = ids, config.family.positions(config, ids, arrays).astype(np.int32)

    ids, local = zip(*[blank[front]] * count, blank[page], strict=True)
    return ids, local


def by_context(fronts: Sequence[Sequence[np.ndarray]] | np.ndarray, pages: np.ndarray) -> list[np.ndarray]:
    """Lists every context's images as they stand: those in front, then its page."""
    images = []
    for front, page in zip(fronts, pages, strict=True):
        images += [*front, page]
    return images


def prefix_positions(form: Prefix, shown: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes positions [B,T] or [B,T,3] of the prefix and the place [B] behind it; only `shown` chunks take room.

    Args:
      shown: bool [B, chunks] by place (the page is last). start: int [B], position of the first chunk shown.
    """
    # A chunk that is not shown keeps its slots but takes no room, so what follows moves up.
    room = np.where(shown, form.spans, 0)
    first = (start[:, None] + np.cumsum(room, axis=1) - room)[:, form.owner]
    positions = first.reshape(*first.shape, *[1] * (form.local.ndim - 1)) + form.local
    return positions.astype(np.int32), (start + room.sum(axis=1)).astype(np.int32)


def positions_behind(form: Prefix, behind: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Computes positions [B,N] or [B,N,3] of tokens that stand `step` [N] behind the place `behind` [B]."""
    positions = behind[:, None] + step
    if form.local.ndim == 2:
        positions = np.repeat(positions[..., None], form.local.shape[1], axis=2)
    return positions.astype(np.int32)


def within_own(own: np.ndarray) -> np.ndarray:
    """Makes a mask [N,N] of packed questions by the number of each token's: a token sees its own up to itself."""
    return (own[:, None] == own) & np.tri(own.size, dtype=bool)


def pack(
    form: Prefix,
    ids: np.ndarray,
    own: np.ndarray,
    step: np.ndarray,
    *,
    shown: np.ndarray,
    sees: np.ndarray,
    start: np.ndarray,
) -> dict[str, np.ndarray]:
    """Packs contexts and their questions: input_ids [B,T+N], positions and mask [B,1,T+N,T+N] (True: may look).

    Args:
      ids: [B,N], the questions' tokens. own: [N], the question that each belongs to. step: [N], its place in it.
      shown: bool [B, chunks in front]: which chunks are there at all.
      sees: bool [B,N]: whether a token may look at the chunks in front (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    count, prefix, total = len(ids), form.prefix_tokens, form.prefix_tokens + len(own)
    here = np.concatenate([shown, np.ones((count, 1), bool)], axis=1)
    positions, behind = prefix_positions(form, here, start)

    # Prefix tokens look at what precedes them, questions at the page, perhaps at what is in front, and at themselves.
    there = here[:, form.owner][:, None]
    mask = np.zeros((count, total, total), bool)
    mask[:, :prefix, :prefix] = np.tri(prefix, dtype=bool) & there
    mask[:, prefix:, :prefix] = there & ((form.owner == form.chunks - 1) | sees[..., None])
    mask[:, prefix:, prefix:] = within_own(own)
    return {
        "input_ids": np.concatenate([np.broadcast_to(form.ids, (count, prefix)), ids], axis=1).astype(np.int32),
        "positions": np.concatenate([positions, positions_behind(form, behind, step)], axis=1),
        "mask": mask[:, None],
    }


def branches(form: Prefix, own: np.ndarray) -> dict[str, np.ndarray]:
    """Lays packed questions out as rows of their own, for layers that know of no mask.

    Args:
      own: [N], the question that each packed token belongs to.

    Returns:
      page: where the page's tokens stand in the prefix. columns: [Q,n], the packed tokens of each question, −1 behind
      shorter ones. rows: [N], where each packed token is among the Q·n.
    """
    sizes = np.bincount(own)
    columns = np.full((len(sizes), sizes.max()), -1, np.int32)
    for question, size in enumerate(sizes):
        columns[question, :size] = np.flatnonzero(own == question)
    there = np.flatnonzero(columns.ravel() >= 0)
    rows = there[np.argsort(columns.ravel()[there])]
    return {
        "page": np.arange(form.page.start, form.page.stop, dtype=np.int32),
        "columns": columns,
        "rows": rows.astype(np.int32),
    }
