"""The plain drawing: dark cells inside coloured frames, the frame an item, what is inside a code or two colours.

The frame's colour above and to the left is the item's first part, that below and to the right its second. A page's
cell shows a shape (the code's digit) in a colour (its letter); a sheet's a solid swatch (the value) and a striped one
(the unit). Hybrid instances read this drawing.
"""

import functools

import numpy as np

from .contexts import DIGITS, SECONDS, Contexts

CELL = 10
PALETTE = np.array(
    [
        [225, 35, 35],
        [245, 140, 20],
        [240, 235, 50],
        [40, 185, 50],
        [30, 215, 220],
        [35, 70, 235],
        [145, 45, 200],
        [245, 110, 190],
        [250, 250, 250],
        [120, 75, 30],
        [130, 130, 130],
        [20, 110, 90],
    ],
    np.float32,
)
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


@functools.cache
def shapes() -> np.ndarray:
    """Gives the shapes, bool [shapes, 8, 8]."""
    marks = np.array([list(line.replace("  ", "")) for line in _SHAPES.split("\n") if line])
    return np.moveaxis(marks.reshape(8, DIGITS, 8) == "#", 1, 0)


def render(contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
    """Draws sheets [B, sheets, H, W, 3] and pages [B, 80, 80, 3], uint8."""
    sheets, pages = _frames(contexts.sheet_item), _frames(contexts.page_item)
    # Three columns of the value and five of the unit, so that both colours take about as many pixels.
    sheets[..., 1:9, 1:4, :] = PALETTE[contexts.sheet_value][..., None, None, :]
    sheets[..., 1:9, 4:9, :] = PALETTE[contexts.sheet_unit][..., None, None, :]
    sheets[..., 3:9:3, 4:9, :] = 15.0
    mark = shapes()[contexts.page_code % DIGITS][..., None]
    pages[..., 1:9, 1:9, :] = np.where(mark, PALETTE[contexts.page_code // DIGITS][..., None, None, :], 15.0)

    for index, seed in enumerate(contexts.seed):
        rng = np.random.default_rng(int(seed))
        for cells in (sheets[index], pages[index]):
            cells += 8.0 * rng.standard_normal(cells.shape, np.float32)

    return _tile(sheets, contexts.size.sheet_shape), _tile(pages, contexts.size.page_shape)


def _frames(item: np.ndarray) -> np.ndarray:
    """Draws dark cells [..., 10, 10, 3] inside their frames."""
    cells = np.full((*item.shape, CELL, CELL, 3), 15.0, np.float32)
    first = PALETTE[item // SECONDS][..., None, :]
    second = PALETTE[item % SECONDS][..., None, :]
    cells[..., 0, :, :] = cells[..., :, 0, :] = first
    cells[..., -1, 1:, :] = cells[..., 1:, -1, :] = second
    return cells


def _tile(cells: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Puts cells [..., n, 10, 10, 3] together to images uint8."""
    lead, (rows, columns) = cells.shape[:-4], shape
    image = cells.reshape(*lead, rows, columns, CELL, CELL, 3).swapaxes(-4, -3)
    image = image.reshape(*lead, rows * CELL, columns * CELL, 3)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
