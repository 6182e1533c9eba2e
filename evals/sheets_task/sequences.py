"""Contexts of the sheets task as token sequences: [sheet] … [sheet][page][question] … [question].

Every question stands at the same positions right behind the page and sees no other question. Axis letters: B contexts,
T tokens of the prefix, N tokens of the questions.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from . import task
from .task import Contexts, Questions, Size


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How a backbone's own processor lays a context out as tokens.

    Attributes:
      ids: token ids of each chunk's image, the page last.
      local: their positions counted from the image's own start, [T] or [T,3] each.
      image_token: the placeholder among the ids.
    """

    ids: tuple[np.ndarray, ...]
    local: tuple[np.ndarray, ...]
    image_token: int

    @property
    def chunks(self) -> int:
        """Chunks of a context: the sheets and the page."""
        return len(self.ids)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Tokens of each chunk."""
        return [len(ids) for ids in self.ids]

    @functools.cached_property
    def spans(self) -> list[int]:
        """How far each chunk moves the position of what follows."""
        return [int(local.max()) + 1 for local in self.local]

    @functools.cached_property
    def owner(self) -> np.ndarray:
        """The chunk that each prefix token belongs to, [T]."""
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

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix."""
        return sum(self.sizes)


@functools.lru_cache
def form_of(config: Any, images: Any, size: Size) -> Form:
    """Finds the form that a backbone of this configuration and these image settings gives contexts of this size."""
    sheet, page = (_blank(config, images, shape) for shape in (size.sheet_shape, size.page_shape))
    ids, local = zip(*[sheet] * size.sheets, page, strict=True)
    return Form(ids, local, config.image_token)


def _blank(config: Any, images: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T] and positions [T] or [T,3] of one blank image."""
    rows, columns = (count * task.CELL_PIXELS for count in shape)
    vision = config.family.vision
    arrays = vision.process([np.zeros((rows, columns, 3), np.uint8)], images)
    ids = np.array(vision.tokens(config, arrays, 0, None), np.int32)
    return ids, config.family.positions(config, ids, arrays).astype(np.int32)


def prefix_positions(form: Form, shown: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes positions [B,T] or [B,T,3] of the prefix and the place [B] behind it; only `shown` chunks take room.

    Args:
      shown: bool [B, chunks]. start: int [B], position of the first chunk shown.
    """
    room = np.where(shown, form.spans, 0)
    first = (start[:, None] + np.cumsum(room, axis=1) - room)[:, form.owner]
    local = np.concatenate(form.local)
    positions = first.reshape(*first.shape, *[1] * (local.ndim - 1)) + local
    return positions.astype(np.int32), (start + room.sum(axis=1)).astype(np.int32)


def question_positions(form: Form, questions: Questions, behind: np.ndarray) -> np.ndarray:
    """Computes positions [B,N] or [B,N,3] of the questions' tokens, each question from `behind` [B] on."""
    positions = behind[:, None] + questions.step
    if form.local[0].ndim == 2:
        positions = np.repeat(positions[..., None], form.local[0].shape[1], axis=2)
    return positions.astype(np.int32)


def among(questions: Questions) -> np.ndarray:
    """Makes the mask between the questions' tokens, bool [N,N]: each sees its own question up to itself."""
    own = questions.own
    return (own[:, None] == own) & np.tri(len(own), dtype=bool)


def context_images(contexts: Contexts) -> list[np.ndarray]:
    """Renders every context's sheets in their order, then its page: B · chunks images uint8 [H,W,3]."""
    sheets, pages = task.render(contexts)
    return [image for index in range(len(contexts)) for image in (*sheets[index], pages[index])]


def pack(
    form: Form, questions: Questions, *, shown: np.ndarray, sees_sheets: np.ndarray, start: np.ndarray
) -> dict[str, np.ndarray]:
    """Packs a batch: input_ids [B,T+N], positions, mask [B,1,T+N,T+N] and answer [B,N].

    Args:
      shown: bool [B, sheets], which sheets are there at all.
      sees_sheets: bool [B,Q]: whether the question may look at the sheets (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    count = len(shown)
    here = np.concatenate([shown, np.ones((count, 1), bool)], axis=1)
    positions, behind = prefix_positions(form, here, start)
    prefix, total = form.prefix_tokens, form.prefix_tokens + len(questions.own)

    # Prefix tokens look at what stands before them, questions at the page and perhaps at the sheets.
    there = here[:, form.owner][:, None]
    mask = np.zeros((count, total, total), bool)
    mask[:, :prefix, :prefix] = np.tri(prefix, dtype=bool) & there
    page = form.owner == form.chunks - 1
    mask[:, prefix:, :prefix] = there & (page | sees_sheets[:, questions.own][..., None])
    mask[:, prefix:, prefix:] = among(questions)
    ids = np.broadcast_to(np.concatenate(form.ids), (count, prefix))
    return {
        "input_ids": np.concatenate([ids, questions.ids], axis=1).astype(np.int32),
        "positions": np.concatenate([positions, question_positions(form, questions, behind)], axis=1),
        "mask": mask[:, None],
        "answer": questions.answer,
    }
