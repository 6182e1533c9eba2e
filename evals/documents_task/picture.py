"""A picture of documents, what is asked about them, and what is answered, so that a person can check it by eye."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from ..sheets_task.task import SheetsQuestions
from . import task
from .drawing import CELL, render
from .task import VOCABULARY, Documents

GAP = 8
HEADINGS = ("A bill behind its price lists", "A chart behind its keys", "A screen behind its settings")
MARKS = ("#d62728", "#1f5fd0")
"""Of the first question's cell and of the second's."""
COLOURS = 96
"""Of the picture as it is kept: noise needs many bytes."""


def question_in_words(ids: Int[np.ndarray, " N"]) -> str:
    """Says what is asked: "value of B7's item"."""
    ask, about = (VOCABULARY.names[token] for token in ids[:2])
    return {
        "value": f"value, {about}",
        "unit": f"unit, {about}",
        "most": f"most often, {about}*",
    }.get(ask, f"{ask} {about}")


def draw(
    documents: Documents, questions: SheetsQuestions, said: Mapping[str, Int[np.ndarray, "B N"]], path: Path
) -> Path:
    """Draws one context of every kind, a table of questions and answers below each; answers that are wrong are grey.

    Args:
      said: the tokens answered behind every token of the questions, by arm.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    count = len(documents)
    figure = Figure(figsize=(4.4 * count, 6.6), layout="constrained")
    axes = figure.subplots(2, count, squeeze=False, height_ratios=(2.9, 1))
    drawn, pages = render(documents)

    for index in range(count):
        whole, lefts = _side_by_side([*drawn[index], pages[index]])
        above, below = axes[0, index], axes[1, index]
        above.imshow(whole, interpolation="nearest")
        above.set_title(HEADINGS[int(documents.document[index])], fontsize=11)
        _mark(above, documents, questions, index, lefts)
        _table(below, questions, said, index)
        for axis in (above, below):
            axis.axis("off")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

    # In few colours, so that the picture stays small.
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    return path


def _side_by_side(images: list[UInt8[np.ndarray, "_ _ 3"]]) -> tuple[UInt8[np.ndarray, "H W 3"], list[int]]:
    """Returns one image beside the other on white, and where each begins."""
    height = max(image.shape[0] for image in images)
    lefts = np.cumsum([0, *(image.shape[1] + GAP for image in images)]).tolist()
    whole = np.full((height, lefts[-1] - GAP, 3), 255, np.uint8)
    for image, left in zip(images, lefts, strict=False):
        whole[: image.shape[0], left : left + image.shape[1]] = image
    return whole, lefts[:-1]


def _mark(axis, documents: Documents, questions: SheetsQuestions, index: int, lefts: list[int]) -> None:
    """Frames the first two questions' cells and the entries of their items."""
    from matplotlib.patches import Rectangle

    for number, colour in enumerate(MARKS):
        cell = int(questions.cell[index, number])
        places = [(len(lefts) - 1, documents.size.page_shape[1], cell)]
        same = documents.sheet_address[index] == documents.page_address[index, cell]
        places += [(sheet, documents.size.sheet_shape[1], entry) for sheet, entry in np.argwhere(same).tolist()]
        for image, columns, place in places:
            row, column = divmod(place, columns)
            corner = lefts[image] + column * CELL - 0.5, (row + 1) * CELL - 0.5
            axis.add_patch(Rectangle(corner, CELL, CELL, fill=False, edgecolor=colour, linewidth=1.8))


def _table(axis, questions: SheetsQuestions, said: Mapping[str, Int[np.ndarray, "B N"]], index: int) -> None:
    """Writes the questions, the right answers, and what each arm answers."""
    rows, colours = [], []
    for number in range(len(questions.kind)):
        mine = np.flatnonzero(questions.own == number)
        right = questions.answer[index, mine[-1]]
        given = [tokens[index, mine[-1]] for tokens in said.values()]
        names = ["–" if token < 0 else VOCABULARY.names[token] for token in (right, *given)]
        rows.append(
            [f"{task.sheets.KINDS[questions.kind[number]]}: {question_in_words(questions.ids[index, mine])}", *names]
        )
        ink = MARKS[number] if number < len(MARKS) else "black"
        colours.append([ink, "black", *("black" if token == right else "#a8a8a8" for token in given)])

    head = ["asked", "right", *(_short(name) for name in said)]
    table = axis.table(
        [head, *rows], loc="center", cellLoc="center", colWidths=[0.3, *[0.7 / (len(head) - 1)] * (len(head) - 1)]
    )
    table.auto_set_font_size(False)
    table.set_fontsize(6.5)
    table.scale(1, 1.25)

    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.4)
        if row:
            cell.get_text().set_color(colours[row - 1][column])


def _short(arm: str) -> str:
    """Names an arm in a narrow column."""
    name, _, choice = arm.partition(".")
    name = {"query_attention": "query", "cacheblend": "blend", "re-prefill": "prefill"}.get(name, name)
    if "budget" in choice:
        return f"{name} {float(choice.partition('=')[2]):.0%}"
    return f"{name} {choice.partition('=')[2]}".strip()
