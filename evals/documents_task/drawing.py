"""Drawing documents: words, codes and figures set by Pillow once per face, then placed, tinted and made noisy by NumPy.

A cell is 28 × 28 pixels of two lines. On a bill the upper line is a word, on a chart a bar, on a screen an icon; the
lower line of a page is the cell's code, that of a sheet the item's value and unit. A title stands above the cells.
Axis letters: n cells, H and W pixels.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from ..sheets_task import task as sheets
from .faces import FACES, face
from .task import LETTERS, UNITS, WORDS, Documents

CELL, LINE, BASELINE = 28, 14, 11
INSET = 1
TITLES = (("BILL", "LIST"), ("FIG", "KEY"), ("APP", "SET"))
"""Of a page and of its sheets, by kind of document."""
COLOURS = np.array(
    [
        [31, 119, 180],
        [255, 127, 14],
        [44, 160, 44],
        [214, 39, 40],
        [148, 103, 189],
        [110, 60, 40],
        [240, 130, 200],
        [127, 127, 127],
        [30, 200, 215],
    ],
    np.float32,
)
NOISE = 6.0
CUTS = ((0.0, 0.0, 0.0), (0.5, 0.5, 0.0), (1.0, 0.0, 0.5), (0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (1.0, 0.5, 0.0))
"""Ways in which a face is set: pixels that it is smaller by, and parts of a pixel that texts move in and down."""


class Type(NamedTuple):
    """What is set in one face, as ink 0 … 1: words and titles over a cell's width, the rest over half of it."""

    words: Float[np.ndarray, "72 14 28"]
    titles: Float[np.ndarray, "6 14 28"]
    letters: Float[np.ndarray, "8 14 14"]
    digits: Float[np.ndarray, "8 14 14"]
    values: Float[np.ndarray, "12 14 14"]
    units: Float[np.ndarray, "12 14 14"]


@functools.cache
def type_of(name: str, cut: int = 0) -> Type:
    """Sets every text of the task in a face, in one of CUTS."""
    smaller, right_by, down_by = CUTS[cut]
    values = [str(value) for value in range(1, sheets.COLOURS + 1)]
    digits = [str(digit) for digit in range(1, sheets.SHAPES + 1)]
    room = [(word, CELL - INSET) for word in WORDS] + [(text, LINE - INSET) for text in (*values, *UNITS)]
    font = face(name, tuple(room))
    font = font.font_variant(size=font.size - smaller) if smaller else font

    def lines(texts, width: int, right: bool = False) -> np.ndarray:
        from PIL import Image, ImageDraw

        set_ = np.zeros((len(texts), LINE, width), np.float32)
        for number, text in enumerate(texts):
            image = Image.new("L", (width, LINE))
            left = width - 1 - right_by if right else INSET + right_by
            anchor = "rs" if right else "ls"
            ImageDraw.Draw(image).text((left, BASELINE + down_by), text, fill=255, font=font, anchor=anchor)
            set_[number] = np.asarray(image, np.float32) / 255

        return set_

    titles = [*itertools.chain.from_iterable(TITLES)]
    return Type(
        words=lines(WORDS, CELL),
        titles=lines(titles, CELL),
        letters=lines(LETTERS, LINE, right=True),
        digits=lines(digits, LINE),
        values=lines(values, LINE, right=True),
        units=lines(UNITS, LINE),
    )


@functools.cache
def icons() -> Float[np.ndarray, "8 14 28"]:
    """Draws the icons of screens in the middle of a line, four times as large and made small."""
    from PIL import Image, ImageDraw

    shapes = []
    for number in range(sheets.SHAPES):
        image = Image.new("L", (4 * CELL, 4 * LINE))
        draw = ImageDraw.Draw(image)
        left, top, right, bottom = 34, 6, 78, 50
        middle, centre = (left + right) // 2, (top + bottom) // 2

        if number == 0:
            draw.ellipse((left, top, right, bottom), fill=255)
        elif number == 1:
            draw.rectangle((left, top, right, bottom), fill=255)
        elif number == 2:
            draw.polygon([(left, bottom), (middle, top), (right, bottom)], fill=255)
        elif number == 3:
            draw.rectangle((middle - 8, top, middle + 8, bottom), fill=255)
            draw.rectangle((left, centre - 8, right, centre + 8), fill=255)
        elif number == 4:
            draw.polygon([(left, centre), (middle, top), (right, centre), (middle, bottom)], fill=255)
        elif number == 5:
            draw.ellipse((left, top, right, bottom), outline=255, width=11)
        elif number == 6:
            for bar in range(3):
                draw.rectangle((left, top + 17 * bar, right, top + 17 * bar + 9), fill=255)
        else:
            draw.line((left, top, right, bottom), fill=255, width=13)
            draw.line((left, bottom, right, top), fill=255, width=13)

        small = image.resize((CELL, LINE), Image.Resampling.BOX)
        shapes.append(np.asarray(small, np.float32) / 255)

    return np.stack(shapes)


def render(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Draws a batch: sheets [B, sheets, H, W, 3] and pages [B, H, W, 3], uint8.

    The pixels of one context depend on its own meaning, faces and `ink_seed` only, never on the batch around it.
    """
    sheets_drawn, pages = [], []
    for index, seed in enumerate(documents.ink_seed):
        rng = np.random.default_rng(int(seed))
        *drawn, page = (_document(documents, index, image, rng) for image in range(documents.sheets + 1))
        sheets_drawn.append(np.stack(drawn))
        pages.append(page)
    return np.stack(sheets_drawn), np.stack(pages)


def _document(documents: Documents, index: int, image: int, rng: np.random.Generator) -> UInt8[np.ndarray, "H W 3"]:
    """Draws one image of a context, its last one the page: a title, and cells of two lines."""
    kind, variety = int(documents.document[index]), float(documents.variety[index])
    is_page = image == documents.sheets
    # The face in a cut that is drawn from as many as documents vary.
    cuts = 1 + round(variety * (len(CUTS) - 1))
    set_ = type_of(FACES[documents.face[index, image]], int(rng.integers(0, cuts)))
    if is_page:
        letter, digit = np.divmod(documents.page_glyph[index], sheets.SHAPES)
        lower = np.concatenate([set_.letters[letter], set_.digits[digit]], axis=2)
        address, (rows, columns) = documents.page_address[index], documents.size.page_shape
    else:
        values, units = documents.sheet_fill[index, image], documents.sheet_stripe[index, image]
        lower = np.concatenate([set_.values[values], set_.units[units]], axis=2)
        address, (rows, columns) = documents.sheet_address[index, image], documents.size.sheet_shape

    paper = 255 - variety * rng.uniform(0, 30, 3).astype(np.float32)
    ink = variety * rng.uniform(0, 90, 3).astype(np.float32)
    cells = np.broadcast_to(paper, (len(address), CELL, CELL, 3)).copy()
    # What tells the cells apart: a bill shades every second row, a chart has base lines, a screen has frames.
    if kind == 0:
        cells.reshape(rows, columns, *cells.shape[1:])[1::2] *= 0.95
        cells[:, -1] *= 0.8
    elif kind == 1:
        cells[:, LINE] *= 0.6
    else:
        cells[:, [0, -1]] *= 0.75
        cells[:, :, [0, -1]] *= 0.75

    upper = set_.words[address] if kind == 0 else np.zeros_like(lower)
    if kind == 1:
        _draw_bars(cells[:, :LINE], address, variety if is_page else None, rng)
    elif kind == 2:
        first, second = np.divmod(address, sheets.COLUMN_MARKS)
        cells[:, :LINE] += icons()[second][..., None] * (COLOURS[first][:, None, None] - cells[:, :LINE])
    cells = _inked(cells, np.concatenate([upper, lower], axis=1), ink)

    # A title stands on a darker band above the cells.
    band = np.zeros((columns, CELL, CELL), np.float32)
    band[0, LINE // 2 : LINE // 2 + LINE] = set_.titles[2 * kind + (not is_page)]
    head = np.broadcast_to(paper * 0.85, (*band.shape, 3))
    whole = np.concatenate([_inked(head, band, ink), cells])
    drawn = whole.reshape(rows + 1, columns, CELL, CELL, 3).swapaxes(1, 2)
    drawn = drawn.reshape((rows + 1) * CELL, columns * CELL, 3)
    # The whole document is a pixel off now and then, as scans and screenshots are.
    down, right = np.where(rng.random(2) < variety, rng.integers(-1, 2, 2), 0)
    drawn = np.roll(drawn, (down, right), axis=(0, 1))
    drawn = drawn + NOISE * variety * rng.standard_normal((*drawn.shape[:2], 1), np.float32)
    return np.clip(drawn + 0.5, 0, 255).astype(np.uint8)


def _inked(paper: np.ndarray, text: np.ndarray, ink: np.ndarray) -> np.ndarray:
    """Lays ink [3] over paper [n,28,28,3] where text [n,28,28] is."""
    return paper + text[..., None] * (ink - paper)


def _draw_bars(upper: np.ndarray, address: np.ndarray, variety: float | None, rng: np.random.Generator) -> None:
    """Draws a chart's bars into the upper lines of cells [n,14,28,3]: a series' fill inside its edge colour.

    A page's bars are of any height, as `variety` has it; those of a key (None) are all alike.
    """
    first, second = np.divmod(address, sheets.COLUMN_MARKS)
    height = np.full(len(upper), 11)
    if variety is not None:
        height = np.where(rng.random(len(upper)) < variety, rng.integers(9, 13, len(upper)), height)
    row, column = np.arange(LINE)[:, None], np.arange(CELL)
    top = (LINE - height)[:, None, None]
    bar = (row >= top) & (column >= 5) & (column < 23)
    inside = (row >= top + 3) & (row < LINE - 3) & (column >= 8) & (column < 20)
    upper[...] = np.where(bar[..., None], COLOURS[second][:, None, None], upper)
    upper[...] = np.where(inside[..., None], COLOURS[first][:, None, None], upper)
