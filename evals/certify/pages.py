"""Draws a folder of images to certify on: `python -m evals.certify.pages --out=FOLDER`.

Pages of the small task, cut to four sizes as screenshots of one agent may be, and questions about their cells.
"""

from pathlib import Path

import numpy as np
from absl import app, flags

from .. import small_task
from ..small_task import VOCABULARY, task

SIZES = ((100, 100), (70, 100), (100, 70), (70, 70))
"""Rows and columns of pixels."""
QUESTIONS = "questions.txt"
ASKED = (("glyph?", (0, 13, 27, 44, 60)), ("fill?", (3, 35)), ("stripe?", (50,)))
"""Words of the small task, and the cells that each is asked about."""


def define_flags() -> None:
    """Defines this program's flags. Importing the module does not: other programs have flags of the same names."""
    flags.DEFINE_string(
        "out", None, "the folder: images go into images/ there, questions into questions.txt", required=True
    )
    flags.DEFINE_integer("n", 240, "images, all of them different", lower_bound=1)
    flags.DEFINE_integer("seed", 240, "of what is drawn")


def draw(folder: Path, count: int, seed: int) -> Path:
    """Draws the images and writes the questions; returns the folder of the images."""
    from PIL import Image

    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    _, pages = task.render(small_task.sample_contexts(np.random.default_rng(seed), count))
    for number, page in enumerate(pages):
        rows, columns = SIZES[number % len(SIZES)]
        Image.fromarray(page[:rows, :columns]).save(images / f"{number:03}.png")

    lines = []
    for word, cells in ASKED:
        lines += [f"{word} {VOCABULARY.names[VOCABULARY.cell + cell]}" for cell in cells]
    (folder / QUESTIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return images


def main(arguments: list[str]) -> None:
    """Parses flags and draws."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")
    print(draw(Path(flags.FLAGS.out), flags.FLAGS.n, flags.FLAGS.seed))


if __name__ == "__main__":
    define_flags()
    app.run(main)
