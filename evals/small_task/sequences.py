"""Contexts of the small task as token sequences: form, packed questions, images, labels of their tokens.

A training sequence is [legend][legend][legend][page][question] … [question]; every question stands at the same
positions right behind the page and sees no other question. Axis letters: B batch, T tokens, Q questions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from . import task
from .prefix import Prefix, by_context, lay_out, pack, positions_behind, within_own
from .task import VOCABULARY, Contexts, Questions

CHUNKS = task.LEGENDS + 1
QUESTION_TOKENS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Form(Prefix):
    """How a backbone's own processor lays the task's images out as tokens.

    Attributes:
      legend_shape: cells (rows, columns) of a legend's image; as many as a page's where the tower takes one size only.
    """

    legend_shape: tuple[int, int]


@functools.lru_cache
def form_of(config: Any, images: Any) -> Form:
    """Finds the form that a backbone of this configuration and these image settings gives the task's images."""
    # A tower of one image size gets legends as large as pages; `render` repeats a legend until it fills that.
    side = getattr(config.vision, "image", None)
    page_shape = (task.ROWS, task.CELLS + 1)
    legend_shape = (task.LEGEND_ROWS, 3) if side is None else page_shape
    front, page = (
        (rows * task.CELL_PIXELS, columns * task.CELL_PIXELS) for rows, columns in (legend_shape, page_shape)
    )
    ids, local = lay_out(config, images, front, page, task.LEGENDS)
    return Form(ids, local, config.image_token, legend_shape)


def context_images(form: Form, contexts: Contexts, split: str) -> list[np.ndarray]:
    """Renders every context's legends in their standing order, then its page: 4·B images uint8 [H,W,3]."""
    legends, pages = task.render(contexts, split, form.legend_shape)
    return by_context(np.take_along_axis(legends, contexts.order[..., None, None, None], axis=1), pages)


class QuestionTokens(NamedTuple):
    """Packed questions: ids [B,N], positions [B,N] or [B,N,3], among [N,N] or [B,N,N] (True: may look), asked [Q] or
    [B,Q]."""

    ids: np.ndarray
    positions: np.ndarray
    among: np.ndarray
    asked: np.ndarray


def question_tokens(form: Form, questions: Questions, behind: np.ndarray) -> QuestionTokens:
    """Makes two tokens of every question, all at the positions from `behind` [B] on, none seeing another."""
    count, asked = questions.answer.shape
    ids = np.stack([questions.ask, questions.argument], axis=2).reshape(count, -1).astype(np.int32)
    positions = positions_behind(form, behind, np.tile(np.arange(QUESTION_TOKENS), asked))
    # Packed behind one another in the sequence, each question is masked off from all others.
    among = within_own(np.repeat(np.arange(asked), QUESTION_TOKENS))
    last = QUESTION_TOKENS * np.arange(asked, dtype=np.int32) + QUESTION_TOKENS - 1
    return QuestionTokens(ids, positions, among, last)


def in_common(form: Form, questions: Questions, behind: np.ndarray) -> QuestionTokens:
    """Makes the same questions of fewer tokens: each way of asking once, [B, ways], and then every question's argument.

    A first token sees what stands in front and itself, so that it is the same in all questions that begin with it.
    Where questions are even in number, one of them is there twice: 12 and 13 are read by one program.
    """
    count, asked = questions.answer.shape
    ways, argument, ask = np.array(VOCABULARY.asks), questions.argument, questions.ask
    if asked % 2 == 0:
        argument, ask = (np.concatenate([value, value[:, -1:]], axis=1) for value in (argument, ask))
    ids = np.concatenate([np.broadcast_to(ways, (count, len(ways))), argument], axis=1)
    positions = positions_behind(form, behind, np.repeat(np.arange(QUESTION_TOKENS), [len(ways), ask.shape[1]]))

    among = np.tile(np.eye(ids.shape[1], dtype=bool), (count, 1, 1))
    among[:, len(ways) :, : len(ways)] = ask[..., None] == ways
    last = np.arange(len(ways), len(ways) + asked, dtype=np.int32)
    return QuestionTokens(ids.astype(np.int32), positions, among, last)


def pack_questions(
    form: Form, questions: Questions, *, shown: np.ndarray, sees_legends: np.ndarray, start: np.ndarray
) -> dict[str, np.ndarray]:
    """Packs contexts and their questions as `prefix.pack` does, with the index [Q] of each question's last token.

    Args:
      shown: bool [B, legends] by standing place: which legends are there at all.
      sees_legends: bool [B,Q]: whether the question may look at the legends (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    tail, asked = question_tokens(form, questions, start), questions.answer.shape[1]
    own, step = np.repeat(np.arange(asked), QUESTION_TOKENS), np.tile(np.arange(QUESTION_TOKENS), asked)
    sees = np.repeat(sees_legends, QUESTION_TOKENS, axis=1)
    return {
        **pack(form, tail.ids, own, step, shown=shown, sees=sees, start=start),
        "asked": form.prefix_tokens + tail.asked,
        "answer": questions.answer.astype(np.int32),
        "weight": questions.valid.astype(np.float32),
    }


def cell_labels(form: Form, contexts: Contexts, shown: np.ndarray) -> dict[str, np.ndarray]:
    """Labels what every image token shows or stands for, as token ids [B, T of the prefix], -1 where nothing.

    seen: glyph, swatch colour or row tag drawn in the cell. tag: the frame's tag. bound: the glyph a swatch belongs
    to. cell: the page cell's full address. fill, stripe: what the legends shown give the page cell's glyph.
    """
    count, item = len(contexts), np.arange(len(contexts))[:, None]
    names = ("seen", "tag", "bound", "cell", "fill", "stripe")
    labels = {name: np.full((count, form.prefix_tokens), -1, np.int32) for name in names}

    # A legend's row is a glyph and its two swatches; `render` repeats them to fill a larger image, and so do these.
    room = [(0, size - own) for size, own in zip(form.legend_shape, (task.LEGEND_ROWS, 3), strict=True)]
    for place in range(task.LEGENDS):
        which = contexts.order[:, place]
        glyph, fill, stripe = (
            first + of_legend[item[:, 0], which]
            for first, of_legend in (
                (VOCABULARY.glyph, contexts.legend_glyph),
                (VOCABULARY.fill, contexts.legend_fill),
                (VOCABULARY.stripe, contexts.legend_stripe),
            )
        )
        bound = np.stack([np.full_like(glyph, -1), glyph, glyph], axis=2)
        for name, cells in (("seen", np.stack([glyph, fill, stripe], axis=2)), ("bound", bound)):
            cells = np.where(shown[:, place, None, None], cells, -1)
            labels[name][:, form.cells(place)] = np.pad(cells, [(0, 0), *room], mode="wrap").reshape(count, -1)

    # A page's row begins with its header, which stands for no cell.
    nothing = np.full(contexts.row_tag.shape, -1)
    address = VOCABULARY.cell + contexts.row_tag[..., None] * task.CELLS + contexts.cell_tag
    page = {
        "seen": (VOCABULARY.row + contexts.row_tag, VOCABULARY.glyph + contexts.page_glyph),
        "tag": (nothing, VOCABULARY.tag + contexts.cell_tag),
        "cell": (nothing, address),
    }
    by_storage = np.zeros_like(shown)
    by_storage[item, contexts.order] = shown
    for name, first, colour in (
        ("fill", VOCABULARY.fill, contexts.legend_fill),
        ("stripe", VOCABULARY.stripe, contexts.legend_stripe),
    ):
        table = task.latest_colours(contexts.legend_glyph, colour, contexts.order, by_storage)
        value = table[item[..., None], contexts.page_glyph]
        page[name] = nothing, np.where(value < 0, -1, first + value)
    for name, (header, cells) in page.items():
        whole = np.concatenate([header[..., None], cells], axis=2)
        labels[name][:, form.cells(task.LEGENDS)] = whole.reshape(count, -1)
    return labels
