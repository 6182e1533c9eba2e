"""The small trained instances that ship with the library, one Hugging Face directory each, by drawing and name."""

from pathlib import Path

from kvpatch_jax.errors import InputError

ROOT = Path(__file__).parent
DRAWINGS = ("documents", "plain")
"""Drawings of the task (`evals.task`) that instances read; a folder each."""
DOCUMENTS = ROOT / "documents"
MAIN = "documents/qwen2_5_vl"


def shipped_names() -> list[str]:
    """Lists the shipped instances, "documents/qwen2_5_vl" and others."""
    folders = [path.parent for drawing in DRAWINGS for path in (ROOT / drawing).glob("*/config.json")]
    return sorted(folder.relative_to(ROOT).as_posix() for folder in folders)


def shipped(name: str) -> Path:
    """Finds the directory of a shipped instance, or of any checkpoint by its path.

    Args:
      name: with its drawing; one of the documents may go without.

    Raises:
      InputError: neither; the shipped ones are listed.
    """
    for path in (ROOT / name, DOCUMENTS / name, Path(name)):
        if (path / "config.json").exists():
            return path
    raise InputError(
        f"backbone: got {name!r}; expected a checkpoint directory with a config.json, or one of the shipped instances "
        f"{', '.join(shipped_names())}"
    )
