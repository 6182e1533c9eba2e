"""Contexts of the sheets task as token sequences: [sheet] … [sheet][page][question] … [question].

Every question stands at the same positions right behind the page and sees no other question. Axis letters: B contexts,
T tokens of the prefix, N tokens of the questions.
"""

import functools
from typing import Any

import numpy as np

from ..small_task.prefix import Prefix, blank_image, positions_behind, prefix_positions, within_own
from . import task
from .task import ContextSize, SheetsContexts, SheetsQuestions


@functools.lru_cache
def form_of(config: Any, images: Any, size: ContextSize) -> Prefix:
    """Finds the form that a backbone of this configuration and these image settings gives contexts of this size."""
    sheet, page = (
        blank_image(config, images, *(count * task.CELL_PIXELS for count in shape))
        for shape in (size.sheet_shape, size.page_shape)
    )
    ids, local = zip(*[sheet] * size.sheets, page, strict=True)
    return Prefix(ids, local, config.image_token)


def context_images(contexts: SheetsContexts) -> list[np.ndarray]:
    """Renders every context's sheets in their order, then its page: B · chunks images uint8 [H,W,3]."""
    sheets, pages = task.render(contexts)
    return [image for index in range(len(contexts)) for image in (*sheets[index], pages[index])]


def pack(
    form: Prefix, questions: SheetsQuestions, *, shown: np.ndarray, sees_sheets: np.ndarray, start: np.ndarray
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
    mask[:, prefix:, prefix:] = within_own(questions.own)
    ids = np.broadcast_to(form.ids, (count, prefix))
    return {
        "input_ids": np.concatenate([ids, questions.ids], axis=1).astype(np.int32),
        "positions": np.concatenate([positions, positions_behind(form, behind, questions.step)], axis=1),
        "mask": mask[:, None],
        "answer": questions.answer,
    }
