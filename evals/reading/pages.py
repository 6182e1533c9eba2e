"""Drawing pages: glyphs of a font in slots, a piece's glyphs in a cell of 3×3 slots, sixteen cells a line.

Axis letters: n cells, V glyphs, S pixels of a slot's side.
"""

import functools
import os
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from kvpatch_jax.errors import InputError

from .pieces import GLYPHS, SIDE

SLOT = 16
CELL = SIDE * SLOT
COLUMNS = 16
SIZES = (11, 12, 13, 14)
"""Pixels of an em that fonts are drawn in."""
BASELINE = 12

Cells = UInt8[np.ndarray, "n height width"]


class Style(NamedTuple):
    """Appearance of a page: font file, pixels of an em, ink and paper."""

    font: str
    size: int = 13
    ink: tuple[int, int, int] = (0, 0, 0)
    paper: tuple[int, int, int] = (255, 255, 255)


@functools.lru_cache(maxsize=512)
def glyphs(font: str | os.PathLike[str], size: int) -> UInt8[np.ndarray, "V S S"]:
    """Draws every glyph in the middle of a slot, on one baseline: the ink of each pixel, 0 … 255.

    Raises:
      InputError: a file that is no font.
    """
    from PIL import Image, ImageDraw, ImageFont

    try:
        face = ImageFont.truetype(os.fspath(font), size)
    except OSError as error:
        raise InputError(
            f"font: got {os.fspath(font)!r}, which is not read ({error}); expected a TrueType or OpenType file"
        ) from error

    sheet = np.zeros((len(GLYPHS), SLOT, SLOT), np.uint8)
    for number, letter in enumerate(GLYPHS):
        image = Image.new("L", (SLOT, SLOT))
        # "ls": the left end of the baseline. The middle of the letter's own box comes to the middle of the slot.
        left, _, right, _ = face.getbbox(letter, anchor="ls")
        ImageDraw.Draw(image).text(((SLOT - right - left) / 2, BASELINE), letter, fill=255, font=face, anchor="ls")
        sheet[number] = np.asarray(image)

    return sheet


def cells(sheet: UInt8[np.ndarray, "V S S"], letters: UInt8[np.ndarray, "n slots"]) -> Cells:
    """Puts glyphs into the slots of cells: ink [n, 48, 48]."""
    slots = sheet[letters].reshape(-1, SIDE, SIDE, SLOT, SLOT)
    return slots.transpose(0, 1, 3, 2, 4).reshape(-1, CELL, CELL)


def laid_out(ink: Cells) -> UInt8[np.ndarray, "H W"]:
    """Lays cells out in lines of sixteen."""
    lines = ink.reshape(-1, COLUMNS, CELL, CELL).transpose(0, 2, 1, 3)
    return lines.reshape(-1, COLUMNS * CELL)


def slots_of(ink: Cells) -> UInt8[np.ndarray, "n slots S S"]:
    """Cuts cells into their slots."""
    return ink.reshape(-1, SIDE, SLOT, SIDE, SLOT).transpose(0, 1, 3, 2, 4).reshape(-1, SIDE**2, SLOT, SLOT)


def coloured(ink: UInt8[np.ndarray, "*lead H W"], style: Style) -> UInt8[np.ndarray, "*lead H W 3"]:
    """Colours ink and paper."""
    share = ink[..., None].astype(np.float32) / 255
    blend = share * np.array(style.ink, np.float32) + (1 - share) * np.array(style.paper, np.float32)
    return np.round(blend).astype(np.uint8)


def draw_page(letters: UInt8[np.ndarray, "n slots"], style: Style) -> UInt8[np.ndarray, "H W 3"]:
    """Draws a page, line by line.

    Args:
      letters: of each piece (`Pieces.letters`); a multiple of sixteen pieces, sixteen lines at most.

    Raises:
      InputError: another number of pieces.
    """
    lines = len(letters) // COLUMNS
    if len(letters) != lines * COLUMNS or not 1 <= lines <= COLUMNS:
        raise InputError(f"page: got {len(letters)} pieces; expected 1 to {COLUMNS} lines of {COLUMNS}")
    return coloured(laid_out(cells(glyphs(style.font, style.size), letters)), style)
