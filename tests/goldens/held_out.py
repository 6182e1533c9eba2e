"""Ten further settings of every family, chosen by chance once: options that the tiny models of `table.py` do not have.

Their configurations lie in `<family>/held_out.npz`, the sizes of their images in `held_out.json`.
"""

import json
from pathlib import Path

import numpy as np

try:
    from table import FAMILIES, Picture, Row
except ImportError:
    from tests.goldens.table import FAMILIES, Picture, Row

HERE = Path(__file__).parent
AXES: dict[str, list[list[int]] | None] = json.loads((HERE / "held_out.json").read_text())
"""By family the sizes of its images, or None where it takes none."""
COUNT = 10


def settings(family: str) -> list[Row]:
    """Returns the rows of a family's held-out settings, each with one case."""
    with np.load(HERE / family / "held_out.npz") as file:
        written = json.loads(file["written"].tobytes())
    sizes = AXES[family]
    prompts = [[12]] * COUNT if sizes is None else [[5, Picture(*size), 4] for size in sizes]
    return [
        Row(family, {"held": prompt}, new_names=FAMILIES[family].new_names, setting=setting["config"])
        for setting, prompt in zip(written, prompts, strict=True)
    ]
