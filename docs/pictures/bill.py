"""Draws the README's picture: `PYTHONPATH=. python docs/pictures/bill.py` writes bill.png beside it.

One bill behind its price lists, questions about it, and what re-prefill, blind reuse and a patch answer.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image

from evals.harness.methods import REFERENCE, parse
from evals.task.contexts import DOCUMENTS, sample
from evals.task.dataset import TaskBatch
from evals.task.drawing import CELL, images_of
from evals.task.questions import ask
from evals.task.vocabulary import vocabulary
from evals.trained import MAIN, shipped
from kvpatch_jax.models import load

METHODS = {"re-prefill": "re-prefill", "blind": "blind\nreuse", "patch.rank=8": "patch,\nrank 8"}
ASKED = {"chain": 3, "aggregate": 1}
INKS, WRONG = ("#b3261e", "#1f5fd0", "#7b1fa2"), "#c4490c"
WORDS = {
    "value": "price of the item\nin cell {}?",
    "unit": "unit of the item\nin cell {}?",
    "most": "most frequent price\nin row {}?",
}
SEED, GAP, CONTEXTS = 7, 12, 48


def answered_bill():
    """Reads bills until re-prefill answers all questions about one.

    Returns:
      The bill (a batch of one), its questions, and by method the token answered at each question's end.
    """
    backbone = load(shipped(MAIN), dtype="float32")
    contexts = sample(np.random.default_rng([SEED, 99]), CONTEXTS)
    for index in np.flatnonzero(contexts.document == DOCUMENTS.index("bill")):
        bill = contexts.take(np.array([index]))
        batch = TaskBatch(backbone, bill, ask(bill, np.random.default_rng([SEED, int(index)]), ASKED))
        caches = {name: parse(name).repair(backbone, batch.splice).cache for name in METHODS if name != REFERENCE}
        answers = {name: batch.read(cache) for name, cache in {REFERENCE: batch.reference, **caches}.items()}
        if answers[REFERENCE].predicted.all():
            ends = [columns[-1] for columns in batch.packed.columns()]
            tokens = {name: answer.log_probabilities[0].argmax(axis=-1)[ends] for name, answer in answers.items()}
            return bill, batch.packed, tokens
    raise SystemExit(f"got no bill whose questions re-prefill answers; expected one among {CONTEXTS} contexts")


def draw(path: Path) -> None:
    """Draws the bill above and the answers below, readable on a telephone."""
    bill, questions, answers = answered_bill()
    images = images_of(bill)
    figure = plt.figure(figsize=(6.4, 7.3))
    above = figure.add_axes((0.01, 0.33, 0.98, 0.635))
    above.axis("off")

    # The lists and the bill, side by side on white.
    lefts = np.cumsum([0] + [image.shape[1] + GAP for image in images[:-1]]).tolist()
    canvas = np.full((max(map(len, images)), lefts[-1] + images[-1].shape[1], 3), 255, np.uint8)
    for left, image in zip(lefts, images, strict=True):
        canvas[: len(image), left : left + image.shape[1]] = image
    above.imshow(canvas, interpolation="nearest")
    for left, name in zip(lefts, ("list 1", "list 2", "list 3", "the bill, cached alone"), strict=True):
        above.text(left, -6, name, fontsize=11.5)
    note = "prefilled alone: it has\nnever seen the lists"
    above.text(lefts[-1], len(images[-1]) + 14, note, fontsize=11.5, va="top", color="#4a4a4a")

    # The cells that are asked about, and the entries of the lists that hold their answers.
    for number, ink in enumerate(INKS):
        cell = int(questions.cell[0, number])
        places = [(len(lefts) - 1, bill.size.page_shape[1], cell)]
        entries = np.argwhere(bill.sheet_item[0] == bill.page_item[0, cell])
        places += [(sheet, bill.size.sheet_shape[1], entry) for sheet, entry in entries.tolist()]
        for image, columns, place in places:
            row, column = divmod(place, columns)
            corner = lefts[image] + column * CELL - 0.5, (row + 1) * CELL - 0.5
            above.add_patch(Rectangle(corner, CELL, CELL, fill=False, edgecolor=ink, linewidth=2.4))

    # A line of text per question: what is asked, the right answer, and each method's.
    names, lines, columns = vocabulary().names, 0.295 - 0.0645 * np.arange(5), (0.36, 0.50, 0.70, 0.86)
    for left, name in zip(columns, ("right", *METHODS.values()), strict=True):
        figure.text(left, lines[0], name, fontsize=11.5, weight="bold", va="center")
    for number, tokens in enumerate(questions.columns()):
        asking, about = (names[token] for token in questions.ids[0, tokens[:2]])
        ink = INKS[number] if number < len(INKS) else "black"
        figure.text(0.01, lines[number + 1], WORDS[asking].format(about), fontsize=11.5, color=ink, va="center")
        right = int(questions.answer[0, tokens[-1]])
        for left, token in zip(columns, (right, *(int(answers[name][number]) for name in METHODS)), strict=True):
            text, ink = (names[token], "black") if token == right else (f"✗ {names[token]}", WRONG)
            figure.text(left, lines[number + 1], text, fontsize=12.5, color=ink, va="center")

    figure.savefig(path, dpi=110)
    with Image.open(path) as noisy:  # noise takes many bytes
        few_colours = noisy.convert("RGB").quantize(240, dither=Image.Dither.NONE)
    few_colours.save(path, optimize=True)


if __name__ == "__main__":
    draw(Path(__file__).with_name("bill.png"))
