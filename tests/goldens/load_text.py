"""Read the goldens of the text families and rebuild the tiny checkpoints they were made with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.goldens.redraw import redraw_all

TEXT = Path(__file__).parent / "text"


def text_families() -> list[str]:
    """Names of the stored tiny models."""
    return sorted(path.stem for path in TEXT.glob("*.npz"))


def text_arrays(family: str) -> dict[str, np.ndarray]:
    """One prompt's arrays; README.md beside this file says what each is."""
    with np.load(TEXT / f"{family}.npz") as file:
        return {name: file[name] for name in file.files}


def text_config(family: str) -> dict[str, Any]:
    """`config.json` of the tiny model, as transformers 5 writes it."""
    return json.loads((TEXT / f"{family}.json").read_text())["config"]


def write_text_checkpoint(family: str, directory: Path, **changes: Any) -> Path:
    """A whole Hugging Face directory of the tiny model, its weights redrawn; `changes` go to `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = json.loads((TEXT / f"{family}.json").read_text())
    (directory / "config.json").write_text(json.dumps({**shapes.pop("config"), **changes}))
    save_file(redraw_all(shapes), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
