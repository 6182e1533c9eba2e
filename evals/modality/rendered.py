"""Contexts as rendered text: what a cell says, in small letters drawn as pixels, two lines of two in every cell.

The upper line of every cell is its address: a letter (row mark) and a digit (column mark). The lower line of an entry
is its fill and its stripe, a letter each; that of a page's cell is its glyph, a letter (shape) and a digit (ink).
"""

import functools

import numpy as np
from jaxtyping import Bool, Int

from ..sheets_task.task import COLUMN_MARKS, SHAPES, SheetsContexts
from ..small_task.task import tile

CELL, LINE = 12, 6
LETTERS, DIGITS = "ABCDEFGHIJKL", "12345678"
BRIGHT, DARK, NOISE = 240.0, 15.0, 8.0
_FONT = """
.#. ##. .## ##. ### ### .## #.# ### ..# #.# #.. .#. ##. ##. #.# ### .## ### ###
#.# #.# #.. #.# #.. #.. #.. #.# .#. ..# #.# #.. ##. ..# ..# #.# #.. #.. ..# #.#
### ##. #.. #.# ##. ##. #.# ### .#. ..# ##. #.. .#. .#. .#. ### ##. ### .#. ###
#.# #.# #.. #.# #.. #.. #.# #.# .#. #.# #.# #.. .#. #.. ..# ..# ..# #.# .#. #.#
#.# ##. .## ##. ### #.. .## #.# ### .#. #.# ### ### ### ##. ..# ##. ### .#. ###
"""


@functools.cache
def font() -> Bool[np.ndarray, "characters 5 3"]:
    """Gives the letters and then the digits, three pixels wide and five high."""
    rows = [line.split() for line in _FONT.strip().splitlines()]
    return np.array([[list(row[number]) for row in rows] for number in range(len(LETTERS + DIGITS))]) == "#"


def render(contexts: SheetsContexts) -> tuple[np.ndarray, np.ndarray]:
    """Renders a batch as text: sheets [B, sheets, height, width, 3] and pages [B, height, width, 3], uint8.

    The pixels of one context depend on its own meaning and `ink_seed` only, never on the batch around it.
    """
    digits, glyph = len(LETTERS), contexts.page_glyph
    sheets = _cells(contexts.sheet_address, contexts.sheet_fill, contexts.sheet_stripe)
    pages = _cells(contexts.page_address, glyph % SHAPES, digits + glyph // SHAPES)
    for index, seed in enumerate(contexts.ink_seed):
        rng = np.random.default_rng(int(seed))
        for cells in (sheets[index], pages[index]):
            cells += NOISE * rng.standard_normal(cells.shape, np.float32)

    size, cell = contexts.size, sheets.shape[-3:]
    sheets = sheets.reshape(*sheets.shape[:2], *size.sheet_shape, *cell)
    return tile(sheets), tile(pages.reshape(-1, *size.page_shape, *cell))


def _cells(address: Int[np.ndarray, "*n"], third: Int[np.ndarray, "*n"], fourth: Int[np.ndarray, "*n"]) -> np.ndarray:
    """Draws cells [..., 12, 12, 3] of an address and two more characters each."""
    said = [address // COLUMN_MARKS, len(LETTERS) + address % COLUMN_MARKS, third, fourth]
    cells = np.full((*address.shape, CELL, CELL, 3), DARK, np.float32)
    for place, character in enumerate(said):
        top, left = (LINE * part for part in divmod(place, 2))
        drawn = np.where(font()[character], BRIGHT, DARK)
        cells[..., top : top + 5, left + 1 : left + 4, :] = drawn[..., None]
    return cells
