"""Read the goldens and rebuild the Hugging Face directory of the tiny model they were made with."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.goldens.redraw import redraw_all

GOLDENS = Path(__file__).parent


def golden_shapes(family: str) -> dict[str, list[int]]:
    """Name -> shape of every tensor of the family's tiny checkpoint, in Hugging Face's names and layout."""
    return json.loads((GOLDENS / family / "shapes.json").read_text())


def golden_arrays(family: str, case: str) -> dict[str, np.ndarray]:
    """The arrays of one case; README.md beside this file says what each is."""
    with np.load(GOLDENS / family / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


def write_checkpoint(family: str, directory: Path, config: str = "config.json") -> Path:
    """A whole Hugging Face directory for the tiny model: configuration, preprocessing and redrawn weights.

    `config` names which of the family's configuration files becomes `config.json` (`config_release.json` is written
    the way released checkpoints are).
    """
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDENS / family / config, directory / "config.json")
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (GOLDENS / family / name).is_file():
            shutil.copy(GOLDENS / family / name, directory)
    save_file(redraw_all(golden_shapes(family)), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
