"""Contexts of the small task as token sequences: ids, positions, masks, packed questions, pixels.

A training sequence is [legend][legend][legend][page][question] … [question]; every question stands at the same
positions right behind the page and sees no other question. Axis letters: B batch, T tokens, Q questions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from . import task
from .prefix import Prefix, blank_image, positions_behind, prefix_positions, within_own
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
    legend, page = (
        blank_image(config, images, *(count * task.CELL_PIXELS for count in shape))
        for shape in (legend_shape, page_shape)
    )
    ids, local = zip(*[legend] * task.LEGENDS, page, strict=True)
    return Form(ids, local, config.image_token, legend_shape)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of packed sequences, as host arrays.

    input_ids [B,T], positions [B,T] or [B,T,3], mask [B,1,T,T] (True: may look), pixel_values as the family's processor
    packs them, asked [Q] index of each question's last token, answer [B,Q], weight [B,Q] float32.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    pixel_values: np.ndarray
    asked: np.ndarray
    answer: np.ndarray
    weight: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Gives the fields as a dictionary, for a jitted step."""
        return dataclasses.asdict(self)


def context_images(form: Form, contexts: Contexts, split: str) -> list[np.ndarray]:
    """Renders every context's legends in their standing order, then its page: 4·B images uint8 [H,W,3]."""
    legends, pages = task.render(contexts, split, form.legend_shape)
    return [
        image
        for index, order in enumerate(contexts.order)
        for image in (*(legends[index, which] for which in order), pages[index])
    ]


class QuestionTokens(NamedTuple):
    """Packed questions: ids [B,N], positions [B,N] or [B,N,3], among [N,N] or [B,N,N] (True: may look), asked [Q]."""

    ids: np.ndarray
    positions: np.ndarray
    among: np.ndarray
    asked: np.ndarray


def question_tokens(form: Form, questions: Questions, behind: np.ndarray) -> QuestionTokens:
    """Makes two tokens of every question, all at the positions from `behind` [B] on, none seeing another."""
    count, asked = questions.answer.shape
    ids = np.stack([questions.ask, questions.argument], axis=2).reshape(count, -1)
    positions = positions_behind(form, behind, np.tile(np.arange(QUESTION_TOKENS), asked))

    # Packed behind one another in the sequence, each question is masked off from all others.
    own = np.repeat(np.arange(asked), QUESTION_TOKENS)
    among = within_own(own)
    last = QUESTION_TOKENS * np.arange(asked) + QUESTION_TOKENS - 1
    return QuestionTokens(ids.astype(np.int32), positions, among, last.astype(np.int32))


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


def pack(
    form: Form,
    questions: Questions,
    *,
    pixel_values: np.ndarray,
    shown: np.ndarray,
    sees_legends: np.ndarray,
    start: np.ndarray,
) -> Batch:
    """Packs contexts and their questions into one batch.

    Args:
      pixel_values: of the contexts' images (`context_images`), by the family's processor.
      shown: bool [B, legends] by standing place: which legends are there at all.
      sees_legends: bool [B,Q]: whether the question may look at the legends (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    count, asked = questions.answer.shape
    ids, owner = form.ids, form.owner
    here = np.concatenate([shown, np.ones((count, 1), bool)], axis=1)
    positions, behind = prefix_positions(form, here, start)
    tail = question_tokens(form, questions, behind)

    # Prefix tokens look at what stands before them, questions at the page and perhaps at the legends.
    prefix, total = len(ids), len(ids) + QUESTION_TOKENS * asked
    mask = np.zeros((count, total, total), bool)
    mask[:, :prefix, :prefix] = np.tri(prefix, dtype=bool) & here[:, owner][:, None, :]
    page = owner == task.LEGENDS
    seen = here[:, owner][:, None, :] & (page | np.repeat(sees_legends, QUESTION_TOKENS, axis=1)[..., None])
    mask[:, prefix:, :prefix] = seen
    mask[:, prefix:, prefix:] = tail.among
    return Batch(
        input_ids=np.concatenate([np.broadcast_to(ids, (count, prefix)), tail.ids], axis=1).astype(np.int32),
        positions=np.concatenate([positions, tail.positions], axis=1).astype(np.int32),
        mask=mask[:, None],
        pixel_values=pixel_values,
        asked=(prefix + tail.asked).astype(np.int32),
        answer=questions.answer.astype(np.int32),
        weight=questions.valid.astype(np.float32),
    )


def cell_labels(form: Form, contexts: Contexts, shown: np.ndarray) -> dict[str, np.ndarray]:
    """Labels what every image token shows or stands for, as token ids [B, T of the prefix], -1 where nothing.

    seen: glyph, swatch colour or row tag drawn in the cell. tag: the frame's tag. bound: the glyph a swatch belongs
    to. cell: the page cell's full address. fill, stripe: what the legends shown give the page cell's glyph.
    """
    count, item = len(contexts), np.arange(len(contexts))[:, None]
    names = ("seen", "tag", "bound", "cell", "fill", "stripe")
    labels = {name: np.full((count, form.prefix_tokens), -1, np.int32) for name in names}

    for place in range(task.LEGENDS):
        which, inside = contexts.order[:, place], form.cells(place)
        glyph = VOCABULARY.glyph + contexts.legend_glyph[item[:, 0], which]
        fill = VOCABULARY.fill + contexts.legend_fill[item[:, 0], which]
        stripe = VOCABULARY.stripe + contexts.legend_stripe[item[:, 0], which]
        there = shown[:, place, None, None]

        def put(name, x, there=there, inside=inside):
            return labels[name].__setitem__(np.s_[:, inside], _on_canvas(np.where(there, x, -1), form.legend_shape))

        put("seen", np.stack([glyph, fill, stripe], axis=2))
        put("bound", np.stack([np.full_like(glyph, -1), glyph, glyph], axis=2))

    _label_page(contexts, shown, labels, form.cells(task.LEGENDS))
    return labels


def _on_canvas(labels: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Labels [B, rows, columns] of a legend's cells as those [B, cells] of its image, which repeats it."""
    room = [(0, size - own) for size, own in zip(shape, labels.shape[1:], strict=True)]
    return np.pad(labels, [(0, 0), *room], mode="wrap").reshape(len(labels), -1)


def _label_page(contexts: Contexts, shown: np.ndarray, labels: dict[str, np.ndarray], inside: slice) -> None:
    count, item = len(contexts), np.arange(len(contexts))[:, None]

    def with_header(header, cells):
        return np.concatenate([header[..., None], cells], axis=2).reshape(count, -1)

    nothing = np.full(contexts.row_tag.shape, -1)
    by_storage = np.zeros_like(shown)
    by_storage[item, contexts.order] = shown
    labels["seen"][:, inside] = with_header(VOCABULARY.row + contexts.row_tag, VOCABULARY.glyph + contexts.page_glyph)
    labels["tag"][:, inside] = with_header(nothing, VOCABULARY.tag + contexts.cell_tag)
    address = VOCABULARY.cell + contexts.row_tag[..., None] * task.CELLS + contexts.cell_tag
    labels["cell"][:, inside] = with_header(nothing, address)

    for name, base, colour in (
        ("fill", VOCABULARY.fill, contexts.legend_fill),
        ("stripe", VOCABULARY.stripe, contexts.legend_stripe),
    ):
        table = task.latest_colours(contexts.legend_glyph, colour, contexts.order, by_storage)
        value = table[item[..., None], contexts.page_glyph]
        labels[name][:, inside] = with_header(nothing, np.where(value < 0, -1, base + value))
