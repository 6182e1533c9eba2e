"""Drawing contexts: bills, charts and screens set in real faces, or plain coloured frames.

A document's cell is 28 × 28 pixels of two lines. On a bill the upper line is a word, on a chart a bar, on a screen an
icon; the lower line of a page is the cell's code, that of a sheet the item's value and unit. A title stands above the
cells. Texts are set by Pillow once per face, then placed, tinted and made noisy by NumPy.

Axis letters: B contexts, n cells, H and W pixels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from . import plain
from .contexts import DIGITS, SECONDS, Contexts
from .faces import FACES, face
from .vocabulary import ICONS, LETTER_NAMES, UNIT_NAMES, VALUE_NAMES, WORDS

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


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One way of drawing contexts.

    Attributes:
      render: draws sheets [B, sheets, H, W, 3] and pages [B, H, W, 3], uint8. The pixels of one context depend on its
        own meaning, faces and seed only, never on the batch around it.
      cell: pixels of a cell's side. titles: rows of cells that an image has above its own.
    """

    render: Callable[[Contexts], tuple[np.ndarray, np.ndarray]]
    cell: int
    titles: int


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
    digits = [str(digit) for digit in range(1, DIGITS + 1)]
    room = [(word, CELL - INSET) for word in WORDS]
    room += [(text, LINE - INSET) for text in (*VALUE_NAMES, *UNIT_NAMES)]
    font = face(name, tuple(room))
    font = font.font_variant(size=font.size - smaller) if smaller else font

    def lines(texts: Sequence[str], width: int, right: bool = False) -> np.ndarray:
        from PIL import Image, ImageDraw

        ink = np.zeros((len(texts), LINE, width), np.float32)
        for number, text in enumerate(texts):
            image = Image.new("L", (width, LINE))
            left = width - 1 - right_by if right else INSET + right_by
            anchor = "rs" if right else "ls"
            ImageDraw.Draw(image).text((left, BASELINE + down_by), text, fill=255, font=font, anchor=anchor)
            ink[number] = np.asarray(image, np.float32) / 255
        return ink

    return Type(
        words=lines(WORDS, CELL),
        titles=lines([*itertools.chain.from_iterable(TITLES)], CELL),
        letters=lines(LETTER_NAMES, LINE, right=True),
        digits=lines(digits, LINE),
        values=lines(VALUE_NAMES, LINE, right=True),
        units=lines(UNIT_NAMES, LINE),
    )


@functools.cache
def icons() -> Float[np.ndarray, "8 14 28"]:
    """Draws the icons of screens in the middle of a line, four times as large and made small."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = 34, 6, 78, 50
    middle, centre = (left + right) // 2, (top + bottom) // 2
    shapes = []
    for name in ICONS:
        image = Image.new("L", (4 * CELL, 4 * LINE))
        draw = ImageDraw.Draw(image)
        if name == "disc":
            draw.ellipse((left, top, right, bottom), fill=255)
        elif name == "square":
            draw.rectangle((left, top, right, bottom), fill=255)
        elif name == "triangle":
            draw.polygon([(left, bottom), (middle, top), (right, bottom)], fill=255)
        elif name == "plus":
            draw.rectangle((middle - 8, top, middle + 8, bottom), fill=255)
            draw.rectangle((left, centre - 8, right, centre + 8), fill=255)
        elif name == "diamond":
            draw.polygon([(left, centre), (middle, top), (right, centre), (middle, bottom)], fill=255)
        elif name == "ring":
            draw.ellipse((left, top, right, bottom), outline=255, width=11)
        elif name == "bars":
            for bar in range(3):
                draw.rectangle((left, top + 17 * bar, right, top + 17 * bar + 9), fill=255)
        else:
            draw.line((left, top, right, bottom), fill=255, width=13)
            draw.line((left, bottom, right, top), fill=255, width=13)

        small = image.resize((CELL, LINE), Image.Resampling.BOX)
        shapes.append(np.asarray(small, np.float32) / 255)

    return np.stack(shapes)


def render_documents(contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
    """Draws bills, charts and screens: sheets [B, sheets, H, W, 3] and pages [B, H, W, 3], uint8."""
    sheets, pages = [], []
    for index, seed in enumerate(contexts.seed):
        rng = np.random.default_rng(int(seed))
        *images, page = (_document(contexts, index, image, rng) for image in range(contexts.sheets + 1))
        sheets.append(np.stack(images))
        pages.append(page)
    return np.stack(sheets), np.stack(pages)


def _document(contexts: Contexts, index: int, image: int, rng: np.random.Generator) -> UInt8[np.ndarray, "H W 3"]:
    """Draws one image of a context, its last one the page: a title, and cells of two lines."""
    kind, variety, is_page = int(contexts.document[index]), contexts.variety, image == contexts.sheets
    # A face has the more cuts the more documents vary.
    cuts = 1 + round(variety * (len(CUTS) - 1))
    texts = type_of(FACES[contexts.face[index, image]], int(rng.integers(0, cuts)))
    if is_page:
        letter, digit = np.divmod(contexts.page_code[index], DIGITS)
        lower = np.concatenate([texts.letters[letter], texts.digits[digit]], axis=2)
        item, (rows, columns) = contexts.page_item[index], contexts.size.page_shape
    else:
        values, units = contexts.sheet_value[index, image], contexts.sheet_unit[index, image]
        lower = np.concatenate([texts.values[values], texts.units[units]], axis=2)
        item, (rows, columns) = contexts.sheet_item[index, image], contexts.size.sheet_shape

    paper = 255 - variety * rng.uniform(0, 30, 3).astype(np.float32)
    ink = variety * rng.uniform(0, 90, 3).astype(np.float32)
    cells = np.broadcast_to(paper, (len(item), CELL, CELL, 3)).copy()
    # What tells cells apart: a bill shades every second row, a chart has base lines, a screen has frames.
    if kind == 0:
        cells.reshape(rows, columns, *cells.shape[1:])[1::2] *= 0.95
        cells[:, -1] *= 0.8
    elif kind == 1:
        cells[:, LINE] *= 0.6
    else:
        cells[:, [0, -1]] *= 0.75
        cells[:, :, [0, -1]] *= 0.75

    upper = texts.words[item] if kind == 0 else np.zeros_like(lower)
    if kind == 1:
        _draw_bars(cells[:, :LINE], item, variety if is_page else None, rng)
    elif kind == 2:
        first, second = np.divmod(item, SECONDS)
        cells[:, :LINE] += icons()[second][..., None] * (COLOURS[first][:, None, None] - cells[:, :LINE])
    cells = _inked(cells, np.concatenate([upper, lower], axis=1), ink)

    # A title stands on a darker band above the cells.
    band = np.zeros((columns, CELL, CELL), np.float32)
    band[0, LINE // 2 : LINE // 2 + LINE] = texts.titles[2 * kind + (not is_page)]
    head = np.broadcast_to(paper * 0.85, (*band.shape, 3))
    pixels = np.concatenate([_inked(head, band, ink), cells])
    pixels = pixels.reshape(rows + 1, columns, CELL, CELL, 3).swapaxes(1, 2)
    pixels = pixels.reshape((rows + 1) * CELL, columns * CELL, 3)
    # A document is a pixel off now and then, as scans and screenshots are.
    down, right = np.where(rng.random(2) < variety, rng.integers(-1, 2, 2), 0)
    pixels = np.roll(pixels, (down, right), axis=(0, 1))
    pixels = pixels + NOISE * variety * rng.standard_normal((*pixels.shape[:2], 1), np.float32)
    return np.clip(pixels + 0.5, 0, 255).astype(np.uint8)


def _inked(paper: np.ndarray, text: np.ndarray, ink: np.ndarray) -> np.ndarray:
    """Lays ink [3] over paper [n,28,28,3] where text [n,28,28] is."""
    return paper + text[..., None] * (ink - paper)


def _draw_bars(upper: np.ndarray, item: np.ndarray, variety: float | None, rng: np.random.Generator) -> None:
    """Draws a chart's bars into the upper lines of cells [n,14,28,3]: a series' fill inside its edge colour.

    A page's bars are of any height, as `variety` has it; those of a key (None) are all alike.
    """
    first, second = np.divmod(item, SECONDS)
    height = np.full(len(upper), 11)
    if variety is not None:
        height = np.where(rng.random(len(upper)) < variety, rng.integers(9, 13, len(upper)), height)
    row, column = np.arange(LINE)[:, None], np.arange(CELL)
    top = (LINE - height)[:, None, None]
    bar = (row >= top) & (column >= 5) & (column < 23)
    inside = (row >= top + 3) & (row < LINE - 3) & (column >= 8) & (column < 20)
    upper[...] = np.where(bar[..., None], COLOURS[second][:, None, None], upper)
    upper[...] = np.where(inside[..., None], COLOURS[first][:, None, None], upper)


DRAWINGS = {
    "documents": Drawing(render_documents, CELL, titles=1),
    "plain": Drawing(plain.render, plain.CELL, titles=0),
}


def images_of(contexts: Contexts) -> list[np.ndarray]:
    """Draws every context's sheets in their order, then its page: B · chunks images uint8 [H,W,3]."""
    images = []
    for sheets, page in zip(*DRAWINGS[contexts.drawing].render(contexts), strict=True):
        images += [*sheets, page]
    return images
