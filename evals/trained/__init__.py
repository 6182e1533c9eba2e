"""The small trained backbones that ship with the library, one Hugging Face directory each."""

import json
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError

ROOT = Path(__file__).parent
SHEETS = ROOT / "sheets"
"""Instances of the sheets task (`evals.sheets_task`), each a directory of its own; those of other
architectures lie beside it, in sheets_qwen3_vl and, hybrids, sheets_qwen3_5."""
DOCUMENTS = ROOT / "documents"
"""Instances of the documents task (`evals.documents_task`), each a directory of its own."""
MAIN, CONTROL = "qwen2_5_vl", "qwen2_5_vl_no_window"


def shipped_names() -> list[str]:
    """Lists the shipped instances."""
    return sorted(path.parent.name for path in ROOT.glob("*/config.json"))


def backbone_names() -> list[str]:
    """Lists the shipped instances to compare with each other: all but the control, the first one first."""
    names = [name for name in shipped_names() if name != CONTROL]
    return sorted(names, key=lambda name: (not name.startswith(MAIN), name))


def shipped(name: str) -> Path:
    """Finds the directory of a shipped instance, or of any checkpoint by its path.

    Raises:
      InputError: neither; the shipped ones are listed.
    """
    for path in (ROOT / name, Path(name)):
        if (path / "config.json").exists():
            return path
    raise InputError(
        f"backbone: got {name!r}; expected a checkpoint directory with a config.json, or one of the shipped instances "
        f"{', '.join(shipped_names())}"
    )


def training_of(checkpoint: Path) -> dict[str, Any]:
    """Reads how an instance was trained, as disclosed beside it; {} for other checkpoints."""
    path = checkpoint / "training.json"
    return json.loads(path.read_text()) if path.exists() else {}
