"""The meaning of the task's contexts: a page whose cells show items and codes, and sheets that give items a meaning.

The *sheets* in front (a price list, a chart's key, a menu of settings) give each *item* a *value* of twelve and a
*unit* of twelve. The *page* behind them (a bill, a chart, a screen) has 8 × 8 cells, each with an item, no two alike,
and a *code*, a letter and a digit. What a cell absorbs from the sheets nothing in the cell itself shows. A few items
are on two sheets: the later one counts. Axis letter: B contexts.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from .faces import SEEN, UNSEEN

DOCUMENTS = ("bill", "chart", "screen")
"""Kinds of document: an item is a word, a bar's fill and edge, or a coloured icon."""
FIRSTS, SECONDS = 9, 8
ITEMS = FIRSTS * SECONDS
"""Items are numbered by two parts: `divmod(item, SECONDS)`."""
LETTERS, DIGITS = 8, 8
CODES = LETTERS * DIGITS
"""Codes are numbered by letter and digit: `divmod(code, DIGITS)`."""
VALUES = UNITS = 12
LEAD = 5
"""Cells of a letter, of eight, that have its most frequent value: who looks one up names it in 5 of 8 cases."""


class ContextSize(NamedTuple):
    """How large a context is: sheets, their shape in cells, and that of the page."""

    sheets: int
    sheet_shape: tuple[int, int]
    page_shape: tuple[int, int]

    @property
    def cells(self) -> int:
        """Cells of the page."""
        return math.prod(self.page_shape)

    @property
    def entries(self) -> int:
        """Entries of all sheets."""
        return self.sheets * math.prod(self.sheet_shape)


SIZES = {
    "tiny": ContextSize(2, (3, 1), (2, 2)),
    "small": ContextSize(3, (7, 1), (4, 4)),
    "4": ContextSize(3, (13, 2), (8, 8)),
    "8": ContextSize(7, (11, 1), (8, 8)),
    "16": ContextSize(15, (5, 1), (8, 8)),
}
"""Sizes by name: the chunks of a context, or a small one to begin training with."""


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The meaning of a batch of contexts, and how they look.

    Attributes:
      sheet_item, sheet_value, sheet_unit: [B, sheets, entries], sheets in the order they stand in.
      page_item, page_code: [B, cells] in reading order.
      seed: [B], of the drawing's noise.
      document: [B], index into DOCUMENTS. face: [B, sheets + 1], index into `faces.FACES`, the page's last.
      variety: 0 … 1, how unlike one another documents are in paper, ink, place and noise.
      size: of every context.
      drawing: name of how they are drawn; the plain one has no documents, faces and variety.
    """

    sheet_item: np.ndarray
    sheet_value: np.ndarray
    sheet_unit: np.ndarray
    page_item: np.ndarray
    page_code: np.ndarray
    seed: np.ndarray
    document: np.ndarray
    face: np.ndarray
    variety: float
    size: ContextSize
    drawing: str = "documents"

    def __len__(self) -> int:
        return len(self.page_item)

    @property
    def sheets(self) -> int:
        """Sheets in front of the page."""
        return self.sheet_item.shape[1]

    def take(self, index: np.ndarray) -> "Contexts":
        """Takes some of the batch's contexts."""
        arrays = {name: value[index] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return dataclasses.replace(self, **arrays)


def sample(
    rng: np.random.Generator,
    count: int,
    size: ContextSize = SIZES["4"],
    *,
    unseen: bool = False,
    variety: float = 1.0,
    drawing: str = "documents",
) -> Contexts:
    """Draws `count` contexts of this size.

    Args:
      unseen: set in faces that training never draws, not in those of training.
      variety: 0 … 1, how many of the faces there are, and how unlike one another documents look; 0 is one face, black
        on white.
    """
    meaning = (np.stack(parts) for parts in zip(*[_meaning(rng, size) for _ in range(count)], strict=True))
    document, face = np.zeros(count, int), np.zeros((count, size.sheets + 1), int)
    if drawing == "documents":
        document = rng.integers(0, len(DOCUMENTS), count)
        # Both kinds of face are drawn, so that all else is the same with either.
        unseen_face = rng.integers(0, len(UNSEEN), face.shape) + len(SEEN)
        seen_face = rng.integers(0, 1 + round(variety * (len(SEEN) - 1)), face.shape)
        face = unseen_face if unseen else seen_face
    return Contexts(*meaning, document=document, face=face, variety=variety, size=size, drawing=drawing)


def _meaning(rng: np.random.Generator, size: ContextSize) -> tuple[np.ndarray, ...]:
    """Draws one context: items, values and units of the sheets, items and codes of the page, and a seed."""
    cells = size.cells
    # A twelfth of the entries is there twice; of what is there once, an eighth or so is not on the page.
    known = rng.permutation(ITEMS)[: size.entries - max(1, size.entries // 13)]
    item = rng.permutation(known)[:cells]
    # As many cells of a letter as there are letters; on the smallest page codes are any.
    side = math.isqrt(cells)
    letters = rng.permutation(LETTERS)[:side] if side > 2 else rng.permutation(0)
    code = rng.permutation(CODES)[:cells]
    if len(letters):
        digits = rng.permuted(np.tile(np.arange(DIGITS), (side, 1)), axis=1)[:, :side]
        code = rng.permutation((letters[:, None] * DIGITS + digits).reshape(-1))

    # Each letter's cells have a value of their own that leads; no other value is there twice.
    value, unit = rng.integers(0, VALUES, ITEMS), rng.integers(0, UNITS, ITEMS)
    for letter, leader in zip(letters, rng.permutation(VALUES), strict=False):
        often = LEAD if side == DIGITS else 2
        others = rng.permutation(np.delete(np.arange(VALUES), leader))[: side - often]
        value[item[code // DIGITS == letter]] = rng.permutation(np.concatenate([np.full(often, leader), others]))

    entries = _deal(rng, known, size)
    sheet_value, sheet_unit = value[entries], unit[entries]
    # The earlier entry of an item on two sheets has another value and unit.
    where: dict[int, tuple[int, ...]] = {}
    for place in itertools.product(*map(range, entries.shape)):
        earlier = where.get(int(entries[place]))
        if earlier is not None:
            for table in (sheet_value, sheet_unit):
                table[earlier] = (table[earlier] + rng.integers(1, VALUES)) % VALUES
        where[int(entries[place])] = place

    return entries, sheet_value, sheet_unit, item, code, np.array(rng.integers(0, 2**62))


def _deal(rng: np.random.Generator, known: np.ndarray, size: ContextSize) -> np.ndarray:
    """Deals items [sheets, entries]: all that are known, and some a second time on another sheet."""
    dealt = np.concatenate([known, rng.permutation(known)[: size.entries - len(known)]])
    while True:
        table = rng.permutation(dealt).reshape(size.sheets, -1)
        if all(len(set(row)) == len(row) for row in table.tolist()):
            return table


def latest(contexts: Contexts, shown: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds value, unit and times defined [B, items] by the sheets shown (bool [B, sheets]; None: all); -1: by none."""
    count = len(contexts)
    row = np.arange(count)[:, None]
    value, unit = np.full((count, ITEMS), -1), np.full((count, ITEMS), -1)
    times = np.zeros((count, ITEMS), np.int64)

    for sheet in range(contexts.sheets):
        item = contexts.sheet_item[:, sheet]
        present = np.ones((count, 1), bool) if shown is None else shown[:, sheet, None]
        for table, entries in ((value, contexts.sheet_value), (unit, contexts.sheet_unit)):
            table[row, item] = np.where(present, entries[:, sheet], table[row, item])
        times[row, item] += present

    return value, unit, times
