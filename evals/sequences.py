"""Contexts of the small task as token sequences: ids, three-axis positions, masks, packed questions, patches.

A training sequence is [legend][legend][legend][page][question] … [question]; every question stands at the same
positions right behind the page and sees no other question. Axis letters: B batch, T tokens, Q questions.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

from models.preprocessing import ImageConfig, normalise, patchify

from . import small_task as task
from .small_task import VOCABULARY, Contexts, Questions

LEGEND_SHAPE, PAGE_SHAPE = (task.LEGEND_ROWS, 3), (task.ROWS, task.CELLS + 1)
LEGEND_TOKENS, PAGE_TOKENS = 2 + task.LEGEND_ROWS * 3, 2 + task.ROWS * (task.CELLS + 1)
LEGEND_SPAN, PAGE_SPAN = 2 + max(LEGEND_SHAPE), 2 + max(PAGE_SHAPE)
CHUNKS = task.LEGENDS + 1
PREFIX_TOKENS = task.LEGENDS * LEGEND_TOKENS + PAGE_TOKENS
QUESTION_TOKENS = 2
IMAGE_CONFIG = ImageConfig(
    patch_size=task.PATCH,
    merge_size=task.MERGE,
    temporal_patch_size=task.TEMPORAL,
    min_pixels=task.CELL_PIXELS**2,
    max_pixels=1_000_000,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)
"""The small backbone's image settings: no resizing, five-pixel patches."""


@functools.cache
def image_tokens(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T] and positions local to the chunk [T,3] of one image with its start and end tokens."""
    rows, columns = shape
    ids = [VOCABULARY.vision_start, *[VOCABULARY.image] * (rows * columns), VOCABULARY.vision_end]
    row, column = np.divmod(np.arange(rows * columns), columns)
    inside = 1 + np.stack([np.zeros_like(row), row, column], axis=1)
    last = 1 + max(shape)
    local = np.concatenate([np.zeros((1, 3), int), inside, np.full((1, 3), last)])
    return np.array(ids, np.int32), local.astype(np.int32)


@functools.cache
def _chunk_table() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Over the prefix: ids [T], local positions [T,3], the chunk's place 0…3 [T], spans per chunk."""
    shapes = [LEGEND_SHAPE] * task.LEGENDS + [PAGE_SHAPE]
    parts = [image_tokens(shape) for shape in shapes]
    owner = np.concatenate([np.full(len(ids), place) for place, (ids, _) in enumerate(parts)])
    spans = np.array([LEGEND_SPAN] * task.LEGENDS + [PAGE_SPAN])
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([local for _, local in parts]), owner, spans


def chunk_slices() -> list[slice]:
    """Where each of the four chunks stands in the prefix."""
    edges = np.cumsum([0, *[LEGEND_TOKENS] * task.LEGENDS, PAGE_TOKENS])
    return [slice(int(first), int(last)) for first, last in itertools.pairwise(edges)]


def prefix_positions(shown: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions [B,T,3] of the prefix tokens and the place [B] behind them, when only `shown` chunks take room.

    Args:
      shown: bool [B, 4] by place (the page is last). start: int [B], position of the first chunk shown.
    """
    _, local, owner, spans = _chunk_table()
    room = np.where(shown, spans, 0)
    first = start[:, None] + np.cumsum(room, axis=1) - room
    return (first[:, owner, None] + local).astype(np.int32), (start + room.sum(axis=1)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of packed sequences, as host arrays.

    input_ids [B,T], positions [B,T,3], mask [B,1,T,T] (True: may look), patches [B·P, F], asked [Q] index of each
    question's last token, answer [B,Q], weight [B,Q] float32.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    patches: np.ndarray
    asked: np.ndarray
    answer: np.ndarray
    weight: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields as a dictionary, for a jitted step."""
        return dataclasses.asdict(self)


def patch_cells(images: np.ndarray) -> np.ndarray:
    """Images uint8 [..., H, W, 3] as patch rows [..., patches, F], by the backbone's own preprocessing."""
    lead = images.shape[:-3]
    rows = patchify(normalise(images.reshape(-1, *images.shape[-3:]), IMAGE_CONFIG), IMAGE_CONFIG)
    return np.asarray(rows).reshape(*lead, *rows.shape[1:])


def context_patches(contexts: Contexts, split: str) -> np.ndarray:
    """Patch rows [B, P, F] of every context's legends in their standing order, then its page."""
    legends, pages = task.render(contexts, split)
    item = np.arange(len(contexts))[:, None]
    legend_rows = patch_cells(legends)[item, contexts.order]
    return np.concatenate([legend_rows.reshape(len(contexts), -1, legend_rows.shape[-1]), patch_cells(pages)], axis=1)


class QuestionTokens(NamedTuple):
    """Packed questions: ids [B,2Q], positions [B,2Q,3], among [2Q,2Q] (True: may look), asked [Q] (last tokens)."""

    ids: np.ndarray
    positions: np.ndarray
    among: np.ndarray
    asked: np.ndarray


def question_tokens(questions: Questions, behind: np.ndarray) -> QuestionTokens:
    """Every question as its own two tokens, all at the positions from `behind` [B] on, none seeing another."""
    count, asked = questions.answer.shape
    ids = np.stack([questions.ask, questions.argument], axis=2).reshape(count, -1)
    step = np.tile(np.arange(QUESTION_TOKENS), asked)
    positions = np.repeat((behind[:, None] + step)[..., None], 3, axis=2)
    own = np.repeat(np.arange(asked), QUESTION_TOKENS)
    among = (own[:, None] == own) & np.tri(own.size, dtype=bool)
    last = QUESTION_TOKENS * np.arange(asked) + QUESTION_TOKENS - 1
    return QuestionTokens(ids.astype(np.int32), positions.astype(np.int32), among, last.astype(np.int32))


def pack(
    contexts: Contexts,
    questions: Questions,
    *,
    patches: np.ndarray,
    shown: np.ndarray,
    sees_legends: np.ndarray,
    start: np.ndarray,
) -> Batch:
    """Pack contexts and their questions into one batch.

    Args:
      shown: bool [B, legends] by standing place: which legends are there at all.
      sees_legends: bool [B,Q]: whether the question may look at the legends (else they have slid out of the window).
      start: int [B], position of the first chunk.
    """
    count, asked = questions.answer.shape
    ids, _, owner, _ = _chunk_table()
    here = np.concatenate([shown, np.ones((count, 1), bool)], axis=1)
    positions, behind = prefix_positions(here, start)
    tail = question_tokens(questions, behind)
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
        patches=patches.reshape(-1, patches.shape[-1]),
        asked=(prefix + tail.asked).astype(np.int32),
        answer=questions.answer.astype(np.int32),
        weight=questions.valid.astype(np.float32),
    )


def cell_labels(contexts: Contexts, shown: np.ndarray) -> dict[str, np.ndarray]:
    """What every image token shows or stands for, as token ids [B, T of the prefix], -1 where nothing.

    seen: glyph, swatch colour or row tag drawn in the cell. tag: the frame's tag. bound: the glyph a swatch belongs
    to. cell: the page cell's full address. fill, stripe: what the legends shown give the page cell's glyph.
    """
    count, item = len(contexts), np.arange(len(contexts))[:, None]
    names = ("seen", "tag", "bound", "cell", "fill", "stripe")
    labels = {name: np.full((count, PREFIX_TOKENS), -1, np.int32) for name in names}
    slices = chunk_slices()
    for place in range(task.LEGENDS):
        which, inside = contexts.order[:, place], slice(slices[place].start + 1, slices[place].stop - 1)
        glyph = VOCABULARY.glyph + contexts.legend_glyph[item[:, 0], which]
        fill = VOCABULARY.fill + contexts.legend_fill[item[:, 0], which]
        stripe = VOCABULARY.stripe + contexts.legend_stripe[item[:, 0], which]
        there = shown[:, place, None, None]
        put = lambda name, x, there=there, inside=inside: labels[name].__setitem__(
            np.s_[:, inside], np.where(there, x, -1).reshape(count, -1)
        )
        put("seen", np.stack([glyph, fill, stripe], axis=2))
        put("bound", np.stack([np.full_like(glyph, -1), glyph, glyph], axis=2))
    _label_page(contexts, shown, labels, slice(slices[-1].start + 1, slices[-1].stop - 1))
    return labels


def _label_page(contexts: Contexts, shown: np.ndarray, labels: dict[str, np.ndarray], inside: slice) -> None:
    count, item = len(contexts), np.arange(len(contexts))[:, None]
    with_header = lambda header, cells: np.concatenate([header[..., None], cells], axis=2).reshape(count, -1)
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
