"""Draws the README's picture: `python -m evals.task.picture`.

One bill behind its price lists, questions about it, and what re-prefill, blind reuse and a patch answer.
"""

from pathlib import Path

from ..harness import program

METHODS = {"re-prefill": "re-prefill", "blind": "blind\nreuse", "patch.rank=8": "patch,\nrank 8"}
ASKED = {"chain": 3, "aggregate": 1}
INKS, WRONG = ("#b3261e", "#1f5fd0", "#7b1fa2"), "#c4490c"
WORDS = {
    "value": "price of the item\nin cell {}?",
    "unit": "unit of the item\nin cell {}?",
    "most": "most frequent price\nin row {}?",
}
SEED, GAP = 7, 12


def answered(instance: str, drawings: int = 48):
    """Reads bills until re-prefill answers all questions about one.

    Returns:
      The bill (a batch of one), its questions, and by method the token answered at each question's end.

    Raises:
      InputError: no bill among the contexts is answered.
    """
    import numpy as np

    from kvpatch_jax.errors import InputError
    from models import load

    from ..harness.methods import REFERENCE, parse
    from ..trained import shipped
    from .contexts import DOCUMENTS, sample
    from .dataset import TaskBatch
    from .questions import ask

    backbone = load(shipped(instance), dtype="float32")
    contexts = sample(np.random.default_rng([SEED, 99]), drawings)
    for index in np.flatnonzero(contexts.document == DOCUMENTS.index("bill")):
        bill = contexts.take(np.array([index]))
        batch = TaskBatch(backbone, bill, ask(bill, np.random.default_rng([SEED, int(index)]), ASKED))
        caches = {name: parse(name).repair(backbone, batch.splice).cache for name in METHODS if name != REFERENCE}
        answers = {name: batch.read(cache) for name, cache in {REFERENCE: batch.reference, **caches}.items()}
        if answers[REFERENCE].predicted.all():
            ends = [columns[-1] for columns in batch.packed.columns()]
            said = {name: answer.log_probabilities[0].argmax(axis=-1)[ends] for name, answer in answers.items()}
            return bill, batch.packed, said
    raise InputError(f"bill: got none whose questions re-prefill answers; expected one among {drawings} contexts")


def draw(instance: str, path: Path) -> None:
    """Draws the bill above and the answers below, readable on a telephone."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.patches import Rectangle
    from PIL import Image

    from .drawing import CELL, images_of
    from .vocabulary import vocabulary

    bill, questions, said = answered(instance)
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
        for left, token in zip(columns, (right, *(int(said[name][number]) for name in METHODS)), strict=True):
            text, ink = (names[token], "black") if token == right else (f"✗ {names[token]}", WRONG)
            figure.text(left, lines[number + 1], text, fontsize=12.5, color=ink, va="center")

    figure.savefig(path, dpi=110)
    with Image.open(path) as drawn:  # noise takes many bytes
        few = drawn.convert("RGB").quantize(240, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def main() -> None:
    """Draws the picture with the instance and into the file that the flags name."""
    from absl import flags

    draw(flags.FLAGS.instance, Path(flags.FLAGS.out))
    print(f"picture: {flags.FLAGS.out}")


if __name__ == "__main__":
    from absl import flags

    flags.DEFINE_string("out", "docs/pictures/bill.png", "the picture")
    flags.DEFINE_string("instance", "documents/qwen2_5_vl", "an instance of evals/trained")
    program.start(main, "evals.task.picture: loading libraries")
