"""The sheets task, version 2 of the small task: colours that belong to addresses, all of a page's cells unlike.

A *sheet* image has cells of one *entry* each: a frame in two colours, which is the entry's address (row mark above and
to the left, column mark below and to the right), and inside it a solid swatch (its *fill*) and a striped one (its
*stripe*). A *page* image has 8 × 8 cells: each has an address frame too, no two alike, and in it one of the 64 glyphs
(a shape in an ink), each glyph once. What a page's cell absorbs from the sheets is two independent colours of twelve
each: nothing that the cell itself shows tells them. A few addresses are on two sheets: the later one counts.

Everything here is NumPy; `sample_contexts` draws the meaning, `render` the pixels, `ask` the questions.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from ..small_task.task import PALETTE as WARM_PALETTE
from ..small_task.task import TaskVocabulary, tile

ROW_MARKS, COLUMN_MARKS = 9, 8
ADDRESSES = ROW_MARKS * COLUMN_MARKS
SHAPES, INKS = 8, 8
GLYPHS = SHAPES * INKS
COLOURS = 12
CELL_PIXELS, TEMPORAL = 10, 2


class ContextSize(NamedTuple):
    """How large a context is: sheets, their shape in cells, and that of the page."""

    sheets: int
    sheet_shape: tuple[int, int]
    page_shape: tuple[int, int]

    @property
    def cells(self) -> int:
        """Cells of the page."""
        return self.page_shape[0] * self.page_shape[1]

    @property
    def entries(self) -> int:
        """Entries of all sheets."""
        return self.sheets * self.sheet_shape[0] * self.sheet_shape[1]


SIZES = {
    "tiny": ContextSize(2, (3, 1), (2, 2)),
    "small": ContextSize(3, (7, 1), (4, 4)),
    "4": ContextSize(3, (13, 2), (8, 8)),
    "8": ContextSize(7, (11, 1), (8, 8)),
    "16": ContextSize(15, (5, 1), (8, 8)),
}
"""Sizes by name: the chunks of a context, or a small one to begin training with."""
KINDS = ("page", "sheet", "chain", "override", "aggregate", "whole", "list")
LISTED = 4
"""Cells of one `list` question."""
LEAD = 5
"""Cells of an ink, of eight, that have its most frequent fill: who looks one cell up names it in 5 of 8 cases."""

PALETTE = np.concatenate([WARM_PALETTE, np.array([[130, 130, 130], [20, 110, 90]], np.float32)])

_SHAPES = """
########  #......#  ...##...  ########  ##....##  ...##...  ####....  #.#.#.#.
########  ##....##  ...##...  #......#  ##....##  ..####..  ####....  #.#.#.#.
##....##  .##..##.  ...##...  ........  ##....##  .##..##.  ####....  #.#.#.#.
##....##  ..####..  ########  ########  ########  ##....##  ####....  #.#.#.#.
##....##  ..####..  ########  ########  ########  ##....##  ....####  #.#.#.#.
##....##  .##..##.  ...##...  ........  ##....##  .##..##.  ....####  #.#.#.#.
########  ##....##  ...##...  #......#  ##....##  ..####..  ....####  #.#.#.#.
########  #......#  ...##...  ########  ##....##  ...##...  ....####  #.#.#.#.
"""


class SheetsVocabulary(TaskVocabulary):
    """Token ids of the sheets task; the shipped instances were trained with these."""

    def __init__(self) -> None:
        super().__init__()
        asks = ("row?", "column?", "fill?", "stripe?", "most?", "where?", "list?")
        self.ask_row, self.ask_column, self.ask_fill, self.ask_stripe, *others = (self.add([ask]) for ask in asks)
        self.ask_most, self.ask_where, self.ask_list = others
        self.row = self.add([f"r{mark}" for mark in range(ROW_MARKS)])
        self.column = self.add([f"c{mark}" for mark in range(COLUMN_MARKS)])
        self.ink = self.add([f"ink{ink}" for ink in range(INKS)])
        self.fill = self.add([f"fill{colour}" for colour in range(COLOURS)])
        self.stripe = self.add([f"stripe{colour}" for colour in range(COLOURS)])
        self.glyph = self.add([f"s{glyph % SHAPES}i{glyph // SHAPES}" for glyph in range(GLYPHS)])
        self.cell = self.add([f"r{place // COLUMN_MARKS}c{place % COLUMN_MARKS}" for place in range(ADDRESSES)])


VOCABULARY = SheetsVocabulary()


@dataclasses.dataclass(frozen=True)
class SheetsContexts:
    """The meaning of a batch of contexts (leading axis B everywhere).

    sheet_address, sheet_fill, sheet_stripe: [B, sheets, entries], sheets in the order they stand in.
    page_address, page_glyph: [B, cells] in reading order. ink_seed: [B], what the noise is drawn from.
    size: of every context.
    """

    sheet_address: np.ndarray
    sheet_fill: np.ndarray
    sheet_stripe: np.ndarray
    page_address: np.ndarray
    page_glyph: np.ndarray
    ink_seed: np.ndarray
    size: ContextSize

    def __len__(self) -> int:
        return len(self.page_address)

    @property
    def sheets(self) -> int:
        """Sheets in front of the page."""
        return self.sheet_address.shape[1]


def sample_contexts(rng: np.random.Generator, count: int, size: ContextSize = SIZES["4"]) -> SheetsContexts:
    """Draws `count` contexts of this size."""
    drawn = [_sample(rng, size) for _ in range(count)]
    return SheetsContexts(*(np.stack(parts) for parts in zip(*drawn, strict=True)), size=size)


def _sample(rng: np.random.Generator, size: ContextSize) -> tuple[np.ndarray, ...]:
    cells = size.cells
    # A twelfth of the entries is there twice; of what is there once, an eighth or so is not on the page.
    known = rng.permutation(ADDRESSES)[: size.entries - max(1, size.entries // 13)]
    address = rng.permutation(known)[:cells]
    # As many cells of an ink as there are inks; on the smallest page glyphs are any.
    side = math.isqrt(cells)
    inks = rng.permutation(INKS)[:side] if side > 2 else rng.permutation(0)
    glyph = rng.permutation(GLYPHS)[:cells]
    if len(inks):
        shapes_of = rng.permuted(np.tile(np.arange(SHAPES), (side, 1)), axis=1)[:, :side]
        glyph = rng.permutation((inks[:, None] * SHAPES + shapes_of).reshape(-1))

    fill, stripe = rng.integers(0, COLOURS, ADDRESSES), rng.integers(0, COLOURS, ADDRESSES)

    # Each ink's cells have a fill of their own that leads; no other fill is there twice.
    for ink, leader in zip(inks, rng.permutation(COLOURS), strict=False):
        often = LEAD if side == SHAPES else 2
        others = rng.permutation(np.delete(np.arange(COLOURS), leader))[: side - often]
        fill[address[glyph // SHAPES == ink]] = rng.permutation(np.concatenate([np.full(often, leader), others]))

    entries = _deal(rng, known, size)
    sheet_fill, sheet_stripe = fill[entries], stripe[entries]
    # Of an address on two sheets the earlier one shows other colours.
    where: dict[int, tuple[int, ...]] = {}

    for place in itertools.product(*map(range, entries.shape)):
        earlier = where.get(int(entries[place]))
        if earlier is not None:
            for colour in (sheet_fill, sheet_stripe):
                colour[earlier] = (colour[earlier] + rng.integers(1, COLOURS)) % COLOURS
        where[int(entries[place])] = place

    return entries, sheet_fill, sheet_stripe, address, glyph, np.array(rng.integers(0, 2**62))


def _deal(rng: np.random.Generator, known: np.ndarray, size: ContextSize) -> np.ndarray:
    """Deals addresses [sheets, entries]: all that are known, and some a second time on another sheet."""
    dealt = np.concatenate([known, rng.permutation(known)[: size.entries - len(known)]])
    while True:
        table = rng.permutation(dealt).reshape(size.sheets, -1)
        if all(len(set(row)) == len(row) for row in table.tolist()):
            return table


def latest(contexts: SheetsContexts, shown: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds fill, stripe and times defined [B, addresses] by the sheets shown (bool [B, sheets]); -1: by none."""
    count = len(contexts)
    item = np.arange(count)[:, None]
    fill, stripe = np.full((count, ADDRESSES), -1), np.full((count, ADDRESSES), -1)
    times = np.zeros((count, ADDRESSES), np.int64)

    for sheet in range(contexts.sheets):
        address = contexts.sheet_address[:, sheet]
        here = np.ones((count, 1), bool) if shown is None else shown[:, sheet, None]
        for table, colour in ((fill, contexts.sheet_fill), (stripe, contexts.sheet_stripe)):
            table[item, address] = np.where(here, colour[:, sheet], table[item, address])
        times[item, address] += here

    return fill, stripe, times


# ---------------------------------------------------------------------------------------------------- pixels


@functools.cache
def shapes() -> np.ndarray:
    """Gives the shapes, bool [shapes, 8, 8]."""
    marks = np.array([list(line.replace("  ", "")) for line in _SHAPES.split("\n") if line])
    return np.moveaxis(marks.reshape(8, SHAPES, 8) == "#", 1, 0)


def render(contexts: SheetsContexts) -> tuple[np.ndarray, np.ndarray]:
    """Renders a batch: sheets [B, sheets, height, width, 3] and pages [B, 80, 80, 3], uint8.

    The pixels of one context depend on its own meaning and `ink_seed` only, never on the batch around it.
    """
    sheets, pages = _frames(contexts.sheet_address), _frames(contexts.page_address)
    # Three columns of fill and five of stripes, so that both colours take about as many pixels.
    sheets[..., 1:9, 1:4, :] = PALETTE[contexts.sheet_fill][..., None, None, :]
    sheets[..., 1:9, 4:9, :] = PALETTE[contexts.sheet_stripe][..., None, None, :]
    sheets[..., 3:9:3, 4:9, :] = 15.0
    mark = shapes()[contexts.page_glyph % SHAPES][..., None]
    pages[..., 1:9, 1:9, :] = np.where(mark, PALETTE[contexts.page_glyph // SHAPES][..., None, None, :], 15.0)

    for index, seed in enumerate(contexts.ink_seed):
        rng = np.random.default_rng(int(seed))
        for cells in (sheets[index], pages[index]):
            cells += 8.0 * rng.standard_normal(cells.shape, np.float32)

    size, cell = contexts.size, sheets.shape[-3:]
    sheets = sheets.reshape(*sheets.shape[:2], *size.sheet_shape, *cell)
    return tile(sheets), tile(pages.reshape(-1, *size.page_shape, *cell))


def _frames(address: np.ndarray) -> np.ndarray:
    """Draws dark cells [..., 10, 10, 3] inside their address frames."""
    cells = np.full((*address.shape, CELL_PIXELS, CELL_PIXELS, 3), 15.0, np.float32)
    row = PALETTE[address // COLUMN_MARKS][..., None, :]
    column = PALETTE[address % COLUMN_MARKS][..., None, :]
    cells[..., 0, :, :] = cells[..., :, 0, :] = row
    cells[..., -1, 1:, :] = cells[..., 1:, -1, :] = column
    return cells


# ------------------------------------------------------------------------------------------------- questions


@dataclasses.dataclass(frozen=True)
class SheetsQuestions:
    """Questions about a batch of contexts, packed behind one another: B contexts, N tokens, Q questions.

    ids: [B,N]. answer: [B,N], the token to be said after each, -1 where nothing is asked. own: [N], the question each
    token belongs to. step: [N], its place in that question. kind: [Q], index into KINDS. cell: [B,Q], the page's cell
    asked about, -1 where there is none or more than one.
    """

    ids: np.ndarray
    answer: np.ndarray
    own: np.ndarray
    step: np.ndarray
    kind: np.ndarray
    cell: np.ndarray


def ask(
    contexts: SheetsContexts,
    rng: np.random.Generator,
    counts: dict[str, int],
    shown: np.ndarray | None = None,
    asker: "type[Asker] | None" = None,
) -> SheetsQuestions:
    """Draws `counts[kind]` questions of each kind per context, answerable from the sheets shown (all when None).

    * page: the row or column mark of a glyph's cell. sheet: the fill or stripe of an address that is not on the page.
    * chain, override: the fill or stripe of a glyph's cell, whose address is on one sheet, or on two.
    * aggregate: the most frequent fill among an ink's cells. whole: the ink whose cells most often have a fill.
    * list: the fills of four glyphs' cells, one after another; each answer is read before the next glyph.

    Args:
      asker: how the questions are worded; as in this task where it is left out.
    """
    drawn = (asker or Asker)(contexts, rng, shown)
    makers = {
        "page": drawn.page,
        "sheet": drawn.sheet,
        "chain": lambda: drawn.chain(drawn.times == 1),
        "override": lambda: drawn.chain(drawn.times > 1),
        "aggregate": drawn.aggregate,
        "whole": drawn.whole,
        "list": drawn.list,
    }
    kinds = np.repeat(list(counts), list(counts.values())).tolist()
    ids, answers, cells = zip(*(makers[kind]() for kind in kinds), strict=True)
    sizes = [of_question.shape[1] for of_question in ids]
    return SheetsQuestions(
        ids=np.concatenate(ids, axis=1).astype(np.int32),
        answer=np.concatenate(answers, axis=1).astype(np.int32),
        own=np.repeat(np.arange(len(kinds)), sizes),
        step=np.concatenate([np.arange(size) for size in sizes]),
        kind=np.array([KINDS.index(kind) for kind in kinds]),
        cell=np.stack(cells, axis=1),
    )


def fill_shares(
    contexts: SheetsContexts,
    questions: SheetsQuestions,
    shown: np.ndarray | None = None,
    first_ink: int = VOCABULARY.ink,
) -> np.ndarray:
    """Computes, where an aggregate question is answered, the share [B,N,12] of its cells with each fill; else 0."""
    counts = Asker(contexts, np.random.default_rng(0), shown).counts
    ink = questions.ids - first_ink
    asked = (ink >= 0) & (ink < INKS) & (questions.answer >= 0)
    mine = np.take_along_axis(counts, np.where(asked, ink, 0)[..., None], axis=1)
    return (mine * asked[..., None] / np.maximum(mine.sum(axis=-1, keepdims=True), 1)).astype(np.float32)


class Asker:
    """Draws one question of a kind for every context: ids [B,N], answers [B,N], cell [B]."""

    vocabulary: Any = VOCABULARY

    def __init__(self, contexts: SheetsContexts, rng: np.random.Generator, shown: np.ndarray | None):
        self.contexts, self.rng = contexts, rng
        self.item = np.arange(len(contexts))
        self.by_address = latest(contexts, shown)
        self.fill, self.stripe, self.times = (
            np.take_along_axis(table, contexts.page_address, axis=1) for table in self.by_address
        )
        # [B, inks, colours]: how many cells of an ink have each fill; an ink counts when all its cells are defined.
        ink = contexts.page_glyph // SHAPES
        self.counts = np.zeros((len(contexts), INKS, COLOURS), np.int64)
        np.add.at(self.counts, (self.item[:, None], ink, np.maximum(self.fill, 0)), 1)
        there, known = np.zeros((2, len(contexts), INKS), np.int64)
        np.add.at(there, (self.item[:, None], ink), 1)
        np.add.at(known, (self.item[:, None], ink), self.fill >= 0)
        self.defined = (there > 0) & (known == there)
        # On a whole page what leads does so by two or more.
        self.least = 2 if contexts.size.cells == GLYPHS else 1

    def _pick(self, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns one index [B] per row of `allowed`, and whether it is allowed."""
        picked = np.where(allowed, self.rng.random(allowed.shape), -1.0).argmax(axis=1)
        return picked, allowed[self.item, picked]

    def _two_tokens(self, first, second, answer, valid, cell=None):
        ids = np.stack(np.broadcast_arrays(first, second), axis=1)
        said = np.stack([np.full(len(self.item), -1), np.where(valid, answer, -1)], axis=1)
        return ids, said, np.full(len(self.item), -1) if cell is None else cell

    def _colour(self, fill: np.ndarray, stripe: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        by_fill = self.rng.random(len(fill)) < 0.5
        asked = np.where(by_fill, self.vocabulary.ask_fill, self.vocabulary.ask_stripe)
        return asked, np.where(by_fill, self.vocabulary.fill + fill, self.vocabulary.stripe + stripe)

    def page(self):
        cell = self.rng.integers(0, self.fill.shape[1], len(self.item))
        row, column = np.divmod(self.contexts.page_address[self.item, cell], COLUMN_MARKS)
        by_row = self.rng.random(len(cell)) < 0.5
        asked = np.where(by_row, self.vocabulary.ask_row, self.vocabulary.ask_column)
        answer = np.where(by_row, self.vocabulary.row + row, self.vocabulary.column + column)
        glyph = self.vocabulary.glyph + self.contexts.page_glyph[self.item, cell]
        return self._two_tokens(asked, glyph, answer, True, cell)

    def sheet(self):
        fill, stripe, times = self.by_address
        allowed = times == 1
        np.put_along_axis(allowed, self.contexts.page_address, False, axis=1)
        address, valid = self._pick(allowed)
        asked, answer = self._colour(fill[self.item, address], stripe[self.item, address])
        return self._two_tokens(asked, self.vocabulary.cell + address, answer, valid)

    def chain(self, allowed: np.ndarray):
        cell, valid = self._pick(allowed)
        asked, answer = self._colour(self.fill[self.item, cell], self.stripe[self.item, cell])
        glyph = self.vocabulary.glyph + self.contexts.page_glyph[self.item, cell]
        return self._two_tokens(asked, glyph, answer, valid, cell)

    def aggregate(self):
        ranked = np.sort(self.counts, axis=2)
        ink, valid = self._pick(self.defined & (ranked[..., -1] - ranked[..., -2] >= self.least))
        answer = self.vocabulary.fill + self.counts[self.item, ink].argmax(axis=1)
        return self._two_tokens(self.vocabulary.ask_most, self.vocabulary.ink + ink, answer, valid)

    def whole(self):
        ranked = np.sort(self.counts, axis=1)
        clear = (self.fill >= 0).all(axis=1, keepdims=True) & (ranked[:, -1] - ranked[:, -2] >= self.least)
        fill, valid = self._pick(clear)
        answer = self.vocabulary.ink + self.counts[self.item, :, fill].argmax(axis=1)
        return self._two_tokens(self.vocabulary.ask_where, self.vocabulary.fill + fill, answer, valid)

    def list(self):
        draws = np.where(self.fill >= 0, self.rng.random(self.fill.shape), -1.0)
        cells = np.argsort(-draws, axis=1)[:, :LISTED]
        item = self.item[:, None]
        fill, glyph = self.fill[item, cells], self.vocabulary.glyph + self.contexts.page_glyph[item, cells]
        said = np.where((fill >= 0).all(axis=1, keepdims=True), self.vocabulary.fill + fill, -1)
        # Every glyph is followed by its answer, the last one's being the end.
        pairs = np.stack([glyph, self.vocabulary.fill + np.maximum(fill, 0)], axis=2).reshape(len(item), -1)[:, :-1]
        answers = np.stack([said, np.full_like(said, -1)], axis=2).reshape(len(item), -1)[:, :-1]
        lead = np.full((len(item), 1), self.vocabulary.ask_list)
        return (
            np.concatenate([lead, pairs], axis=1),
            np.pad(answers, ((0, 0), (1, 0)), constant_values=-1),
            -1 + 0 * self.item,
        )
