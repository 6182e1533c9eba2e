"""One context as the model sees it, with what is asked marked in the images, so that a person can check an answer."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..small_task import (
    CELL_PIXELS,
    CELLS,
    COLOUR_NAMES,
    DIGITS,
    KINDS,
    LEGENDS,
    PALETTE,
    VOCABULARY,
    Contexts,
    Questions,
)
from .figures import COLOURS, NARROW, STYLE, arm_label, family, save


class Mark(NamedTuple):
    """A rectangle in one image: image's number, left, top, width and height in pixels; a word beside it, or none."""

    image: int
    left: int
    top: int
    width: int
    height: int
    word: str = ""


Swatch = tuple[Sequence[float], bool]
"""A colour, 0…255 for red, green and blue, and whether it is striped with black."""


def answer_in_words(token: int) -> str:
    """Names what a person sees: "light 4" (a glyph), "blue" (a fill), "blue stripes"."""
    words = VOCABULARY
    if words.glyph <= token < words.fill:
        ink, digit = divmod(token - words.glyph, DIGITS)
        return f"{('light', 'dark')[ink]} {digit}"
    if words.fill <= token < words.stripe:
        return COLOUR_NAMES[token - words.fill]
    if words.stripe <= token < words.cell:
        return f"{COLOUR_NAMES[token - words.stripe]} stripes"
    return words.names[token]


def question_in_words(kind: int, ask: int, argument: int) -> str:
    """Says what is asked, rows and cells by the colours that name them: "chain: stripes, red cell of the blue row"."""
    words = VOCABULARY
    what = {words.ask_glyph: "glyph", words.ask_fill: "fill", words.ask_stripe: "stripes"}.get(
        ask, "most frequent fill"
    )

    if argument >= words.cell:
        row, cell = divmod(argument - words.cell, CELLS)
        where = f", {COLOUR_NAMES[cell]} cell of the {COLOUR_NAMES[row]} row"
    elif argument >= words.glyph:
        where = f" of the {answer_in_words(argument)}"
    else:
        where = f" of the {COLOUR_NAMES[argument - words.row]} row"

    return f"{KINDS[kind]}: {what}{where}"


def swatches() -> dict[str, Swatch]:
    """Lists the colours of all answers that name one."""
    fills = {name: (PALETTE[number].tolist(), False) for number, name in enumerate(COLOUR_NAMES)}
    return fills | {f"{name} stripes": (colour, True) for name, (colour, _) in fills.items()}


def marks_of(contexts: Contexts, questions: Questions) -> list[Mark]:
    """Marks what the questions about the first context are about, numbered from 1.

    A cell or a row of the page, and the legends' rows that define the glyph of a single cell.
    """
    found: dict[tuple[int, int, int, int, int], list[str]] = {}
    side = CELL_PIXELS

    def mark(word: str, image: int, left: int, top: int, width: int, height: int = CELL_PIXELS) -> None:
        found.setdefault((image, left, top, width, height), []).append(word)

    for number in range(questions.kind.shape[1]):
        word, row, cell = str(number + 1), int(questions.row[0, number]), int(questions.cell[0, number])
        if cell >= 0:
            mark(word, LEGENDS, side * (cell + 1), side * row, side)
            glyph = int(contexts.page_glyph[0, row, cell])
        elif row >= 0:
            mark(word, LEGENDS, 0, side * row, side * (CELLS + 1))
            continue
        else:
            glyph = int(questions.argument[0, number]) - VOCABULARY.glyph

        if KINDS[int(questions.kind[0, number])] != "page":
            for place, where in np.argwhere(contexts.legend_glyph[0, contexts.order[0]] == glyph):
                mark(word, int(place), 0, side * int(where), 3 * side)

    return [Mark(*place, word=", ".join(words)) for place, words in found.items()]


def example_figure(
    legend_images: Sequence[np.ndarray] | np.ndarray,
    page_image: np.ndarray,
    question_texts: Sequence[str],
    answers_by_arm: Mapping[str, Sequence[str]],
    path: Path,
    correct: Sequence[str] | None = None,
    marks: Sequence[Mark] = (),
    swatches: Mapping[str, Swatch] | None = None,
) -> Path:
    """Draws one context as the model sees it, and what every arm answers.

    Args:
      legend_images: uint8 [height, width, 3] each, in the order they stand in the window.
      page_image: uint8 [height, width, 3].
      question_texts: one per question.
      answers_by_arm: arm → one answer per question, columns in this order.
      path: the PNG to write.
      correct: the right answers (or put them in answers_by_arm["answer"]); wrong ones are then marked with a cross.
      marks: places in the images that a question is about, each with the question's number.
      swatches: what is drawn in front of an answer that names a colour.

    Raises:
      ValueError: an arm answers another number of questions than were asked.
    """
    columns = {"answer": correct} if correct is not None else {}
    columns |= answers_by_arm
    correct = columns.get("answer")
    for arm, answers in columns.items():
        if len(answers) != len(question_texts):
            raise ValueError(
                f"answers of arm {arm!r}: got {len(answers)}; expected {len(question_texts)}, one per question"
            )

    images = [*legend_images, page_image]
    widths = [image.shape[1] / image.shape[0] for image in images]
    # The page's cells are the smallest things that have to be made out.
    widths = [*(width + 0.12 for width in widths[:-1]), 2.3 * widths[-1]]
    height, table = 2.4, 0.5 + 0.44 * len(question_texts)

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, height + table), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[height, table])
        for place, panel in enumerate(halves[0].subplots(1, len(images), width_ratios=widths, squeeze=False)[0]):
            panel.imshow(images[place], interpolation="nearest")
            panel.set_axis_off()
            panel.set_title("page" if place == len(images) - 1 else f"legend {place + 1}", loc="center")
            for mark in marks:
                if mark.image == place:
                    _draw_mark(panel, mark)

        _answer_table(halves[1].subplots(), question_texts, columns, correct, swatches or {})
        return save(figure, "One example: what is seen, asked and answered", path)


def _draw_mark(panel: Axes, mark: Mark) -> None:
    """Frames a place in an image, with the mark's word at its corner."""
    corner = mark.left - 0.5, mark.top - 0.5
    # White around black is seen on any colour.
    for colour, width in (("white", 4.0), ("black", 1.8)):
        edge: dict[str, Any] = {"edgecolor": colour, "linewidth": width, "clip_on": False}
        panel.add_patch(Rectangle(corner, mark.width, mark.height, fill=False, **edge))
    if mark.word:
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.8}
        style: dict[str, Any] = {"fontsize": 7.5, "fontweight": "bold", "ha": "right", "va": "bottom", "zorder": 5}
        panel.text(*corner, mark.word, bbox=box, **style)


def _answer_table(
    panel: Axes,
    questions: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    correct: Sequence[str] | None,
    swatches: Mapping[str, Swatch],
) -> None:
    """Draws each question with its answers in the line below: whole on a telephone."""
    panel.set_axis_off()
    panel.set(xlim=(0, 1), ylim=(len(questions) - 0.2, -0.9))
    panel.axhline(-0.3, color="#888888", linewidth=0.8)
    for row, question in enumerate(questions):
        panel.text(0, row, question, va="center")

    for place, (arm, answers) in enumerate(columns.items()):
        x = place / max(len(columns), 1)
        panel.text(x, -0.35, textwrap.fill(arm_label(arm), 18), color=COLOURS.get(family(arm), "#222222"), va="bottom")
        for row, answer in enumerate(answers):
            wrong = correct is not None and answer != correct[row]
            text, colour = (f"✗ {answer}", COLOURS["blind"]) if wrong else (answer, "#222222")
            middle, shift = row + 0.45, 0.0
            if answer in swatches:
                # A small box in the answer's colour, with three black lines where it is striped.
                rgb, striped = swatches[answer]
                shift, face = 0.04, tuple(value / 255 for value in rgb)
                box = Rectangle((x, middle - 0.16), 0.03, 0.32, facecolor=face, edgecolor="#666666", linewidth=0.5)
                panel.add_patch(box)
                for line in np.linspace(-0.1, 0.1, 3) if striped else ():
                    level = middle + line
                    panel.plot([x, x + 0.03], [level] * 2, color="black", linewidth=1.1, solid_capstyle="butt")
            panel.text(x + shift, middle, text, color=colour, va="center", fontsize=7.5)
