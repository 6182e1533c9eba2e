"""Contexts as tokens: images one behind the other as a family's own processor lays them out, and questions behind them.

Axis letters: B contexts, T tokens of the prefix (all images), N tokens of the questions.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from .contexts import Contexts, ContextSize
from .drawing import DRAWINGS, images_of
from .vocabulary import vocabulary


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The images of a context as tokens.

    Attributes:
      chunk_ids: token ids of each chunk's image, the page last, with start and end tokens where the family has them.
      chunk_local: their positions counted from the image's own start, [T] or [T,3] each.
      image_token: the placeholder among the ids; one per cell.
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
        """Token ids [T]."""
        return np.concatenate(self.chunk_ids)

    @functools.cached_property
    def local(self) -> np.ndarray:
        """Positions [T] or [T,3] of tokens within their own images."""
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
    def place(self) -> np.ndarray:
        """The place of the chunk that each token belongs to, [T]."""
        return np.repeat(np.arange(self.chunks), self.sizes)

    @functools.cached_property
    def slices(self) -> list[slice]:
        """Where each chunk stands."""
        edges = np.cumsum([0, *self.sizes])
        return [slice(int(first), int(last)) for first, last in itertools.pairwise(edges)]

    @property
    def page(self) -> slice:
        """Where the page stands."""
        return self.slices[-1]

    def cells(self, place: int, count: int) -> np.ndarray:
        """Finds the tokens of the last `count` cells of a chunk: what is drawn above them, a title, stands in front."""
        ids = self.ids[self.slices[place]]
        return self.slices[place].start + np.flatnonzero(ids == self.image_token)[-count:]

    def positions(self, shown: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes positions [B,T] or [B,T,3], and the place [B] behind the prefix; only `shown` chunks take room.

        Args:
          shown: bool [B, chunks] by place (the page is last). start: int [B], position of the first chunk shown.
        """
        # A chunk that is not shown keeps its slots but takes no room, so what follows moves up.
        room = np.where(shown, self.spans, 0)
        first = (start[:, None] + np.cumsum(room, axis=1) - room)[:, self.place]
        positions = first.reshape(*first.shape, *[1] * (self.local.ndim - 1)) + self.local
        return positions.astype(np.int32), (start + room.sum(axis=1)).astype(np.int32)

    def positions_behind(self, behind: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Computes positions [B,N] or [B,N,3] of tokens that stand `step` [N] behind the place `behind` [B]."""
        positions = behind[:, None] + step
        if self.local.ndim == 2:
            positions = np.repeat(positions[..., None], self.local.shape[1], axis=2)
        return positions.astype(np.int32)


@functools.lru_cache
def prefix_of(config: Any, settings: Any, size: ContextSize, drawing: str = "documents") -> Prefix:
    """Lays contexts of this size out by the rules of a backbone's family.

    Args:
      config, settings: of the backbone and of its images.
    """
    vision, style, words = config.family.vision, DRAWINGS[drawing], vocabulary(drawing)

    def image(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = shape[0] + style.titles, shape[1]
        blank = np.zeros((rows * style.cell, columns * style.cell, 3), np.uint8)
        arrays = vision.process([blank], settings)
        ids = np.array(vision.tokens(config, arrays, 0, words), np.int32)
        return ids, config.family.positions(config, ids, arrays).astype(np.int32)

    ids, local = zip(*[image(size.sheet_shape)] * size.sheets, image(size.page_shape), strict=True)
    return Prefix(ids, local, config.image_token)


def tower_inputs(config: Any, settings: Any, contexts: Contexts) -> dict[str, np.ndarray]:
    """Draws contexts and makes the arrays that a tower takes."""
    return config.family.vision.process(images_of(contexts), settings)


def within_question(number: np.ndarray) -> np.ndarray:
    """Makes a mask [N,N] of packed questions by each token's question: a token sees its own question up to itself."""
    return (number[:, None] == number) & np.tri(number.size, dtype=bool)


def pack(
    prefix: Prefix,
    ids: np.ndarray,
    number: np.ndarray,
    step: np.ndarray,
    *,
    shown: np.ndarray,
    sees: np.ndarray,
    start: np.ndarray,
) -> dict[str, np.ndarray]:
    """Packs contexts and their questions: input_ids [B,T+N], positions and mask [B,1,T+N,T+N] (True: may look).

    Args:
      ids: [B,N], the questions' tokens. number: [N], the question that each belongs to. step: [N], its place in it.
      shown: bool [B, sheets]: which sheets are there at all.
      sees: bool [B,N]: whether a token may look at the sheets (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    count, length = len(ids), len(prefix.ids)
    total = length + len(number)
    present = np.concatenate([shown, np.ones((count, 1), bool)], axis=1)
    positions, behind = prefix.positions(present, start)

    # Images look at what precedes them, questions at the page, perhaps at the sheets, and at themselves.
    tokens_present = present[:, prefix.place][:, None]
    mask = np.zeros((count, total, total), bool)
    mask[:, :length, :length] = np.tri(length, dtype=bool) & tokens_present
    mask[:, length:, :length] = tokens_present & ((prefix.place == prefix.chunks - 1) | sees[..., None])
    mask[:, length:, length:] = within_question(number)
    return {
        "input_ids": np.concatenate([np.broadcast_to(prefix.ids, (count, length)), ids], axis=1).astype(np.int32),
        "positions": np.concatenate([positions, prefix.positions_behind(behind, step)], axis=1),
        "mask": mask[:, None],
    }
