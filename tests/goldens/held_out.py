"""Ten further settings of every family, chosen by chance once: options that the tiny models of `table.py` do not have.

Their configurations lie in `<family>/held_out.npz`, the sizes of their images in `held_out.json`.
"""

import json

from tests.goldens.load import GOLDENS, held_out
from tests.goldens.table import FAMILIES, Picture, Row

AXES: dict[str, list[list[int]] | None] = json.loads((GOLDENS / "held_out.json").read_text())
"""By family the sizes of its images, or None where it takes none."""
COUNT = 10


def settings(family: str) -> list[Row]:
    """Returns the rows of a family's held-out settings, each with one case."""
    sizes = AXES[family]
    prompts = [[12]] * COUNT if sizes is None else [[5, Picture(*size), 4] for size in sizes]
    return [
        Row(family, {"held": prompt}, new_names=FAMILIES[family].new_names, setting=setting["config"])
        for setting, prompt in zip(held_out(family)[0], prompts, strict=True)
    ]
