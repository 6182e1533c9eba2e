"""Folders of images and of texts that a user brings."""

from collections.abc import Collection
from pathlib import Path

from kvpatch_jax.errors import InputError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TEXT_SUFFIXES = (".txt", ".md", ".rst")


def images_of(folder: Path) -> list[Path]:
    """Lists the images in a folder and below it, by name. Raises InputError: there are none."""
    return _files(folder, "images", IMAGE_SUFFIXES)


def texts_of(folder: Path) -> list[Path]:
    """Lists the texts in a folder and below it, by name. Raises InputError: there are none."""
    return _files(folder, "texts", TEXT_SUFFIXES)


def _files(folder: Path, flag: str, suffixes: Collection[str]) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not paths:
        reason = f"has no {flag}" if folder.is_dir() else "is no folder"
        raise InputError(f"--{flag}: got {folder}, which {reason}; expected a folder with {', '.join(suffixes)}")
    return paths
