"""Draws the README's picture: `python docs/pictures/bill.py` from the checkout's root.

One bill behind its price lists, questions about it, and what re-prefill, blind reuse and a patch answer.
"""

from pathlib import Path

import matplotlib
import numpy as np

from evals.arms import make_arms
from evals.documents_task import picture, task
from evals.documents_task.dataset import DOCUMENTS_DATASET
from evals.documents_task.drawing import CELL, render
from evals.sheets_task.reader import PackedReader, move_page
from models import load

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from PIL import Image

ROOT = Path(__file__).parents[2]
ARMS = {"re-prefill": "re-prefill", "blind": "blind\nreuse", "patch.rank=8": "patch,\nrank 8"}
ASKED = {"chain": 3, "aggregate": 1}
INKS = ("#b3261e", "#1f5fd0", "#7b1fa2")
WRONG = "#c4490c"
SEED, BILL = 7, 0


def answered():
    """Returns the first bill drawn whose questions re-prefill answers, its questions, and what each arm answers."""
    rng = np.random.default_rng([SEED, 99])
    documents = task.sample_documents(rng, 48)
    backbone = load(ROOT / "evals/trained/documents/qwen2_5_vl", dtype="float32")
    for index in np.flatnonzero(documents.document == BILL):
        bill = documents.taken(np.array([index]))
        questions = task.ask(bill, np.random.default_rng([SEED, int(index)]), ASKED)
        page = move_page(backbone, bill, DOCUMENTS_DATASET.spec)
        reader = PackedReader("documents", page, questions)
        answers = {name: reader.read(arm.cache) for name, arm in make_arms(page, ARMS)}
        said = {name: answer.log_probabilities.argmax(axis=-1)[0] for name, answer in answers.items()}
        last = [np.flatnonzero(questions.own == number)[-1] for number in range(len(questions.kind))]
        if all(said["re-prefill"][place] == questions.answer[0, place] for place in last):
            return bill, questions, said
    raise ValueError("bill: got no bill whose questions re-prefill answers; expected one among 48 documents")


def in_words(ids) -> str:
    """Returns a question as a sentence."""
    ask, about = (task.VOCABULARY.names[token] for token in ids[:2])
    match ask:
        case "value?":
            return f"price of the item in cell {about}?"
        case "unit?":
            return f"unit of the item in cell {about}?"
        case _:
            return f"most frequent price in row {about}?"


def mark(axis, bill, questions, lefts) -> None:
    """Frames the cells that are asked about, and the list entries that hold their answers."""
    for number, ink in enumerate(INKS):
        cell = int(questions.cell[0, number])
        places = [(len(lefts) - 1, bill.size.page_shape[1], cell)]
        same = bill.sheet_address[0] == bill.page_address[0, cell]
        places += [(sheet, bill.size.sheet_shape[1], entry) for sheet, entry in np.argwhere(same).tolist()]
        for image, columns, place in places:
            row, column = divmod(place, columns)
            corner = lefts[image] + column * CELL - 0.5, (row + 1) * CELL - 0.5
            axis.add_patch(Rectangle(corner, CELL, CELL, fill=False, edgecolor=ink, linewidth=2.4))


def main() -> None:
    """Draws the bill above and the answers below, readable on a telephone."""
    bill, questions, said = answered()
    figure = plt.figure(figsize=(6.4, 7.3))
    above = figure.add_axes((0.01, 0.33, 0.98, 0.635))
    images, pages = render(bill)
    whole, lefts = picture._side_by_side([*images[0], pages[0]])
    above.imshow(whole, interpolation="nearest")
    mark(above, bill, questions, lefts)
    for left, name in zip(lefts, ("list 1", "list 2", "list 3", "the bill, cached alone"), strict=True):
        above.text(left, -6, name, fontsize=11.5)
    note = "prefilled alone: it has\nnever seen the lists"
    above.text(lefts[-1], pages.shape[1] + 14, note, fontsize=11.5, va="top", color="#4a4a4a")
    above.axis("off")

    columns = (0.36, 0.50, 0.70, 0.86)

    def line(row):
        return 0.29 - 0.068 * row

    for left, name in zip(columns, ("right", *ARMS.values()), strict=True):
        figure.text(left, line(0), name, fontsize=11.5, weight="bold", va="center")
    for number in range(len(questions.kind)):
        mine = np.flatnonzero(questions.own == number)
        ink = INKS[number] if number < len(INKS) else "black"
        words = in_words(questions.ids[0, mine])
        first, _, second = words.partition(" in ")
        figure.text(0.01, line(number + 1) + 0.012, first, fontsize=11.5, color=ink)
        figure.text(0.01, line(number + 1) - 0.014, f"in {second}", fontsize=11.5, color=ink)
        right = int(questions.answer[0, mine[-1]])
        for left, token in zip(columns, (right, *(int(said[arm][mine[-1]]) for arm in ARMS)), strict=True):
            name = task.VOCABULARY.names[token].removeprefix("/")
            good = token == right
            ink = "black" if good else WRONG
            figure.text(left, line(number + 1), name if good else f"✗ {name}", fontsize=12.5, color=ink)
    path = ROOT / "docs/pictures/bill.png"
    figure.savefig(path, dpi=110)
    with Image.open(path) as drawn:  # noise takes many bytes
        few = drawn.convert("RGB").quantize(240, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
