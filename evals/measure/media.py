"""Images and pages that records name or hold: found below the data's folder, and checked before decoding."""

import hashlib
import io
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kvpatch_jax.cache import expect_small
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
DPI = 144
"""Dots per inch that pages of PDFs are drawn at, as MMLongBench-Doc's are."""
LARGEST = 256 << 20
"""Largest image, as RGB pixels and as a file, in bytes: 89 megapixels."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class MediaFolder:
    """What a data set's records name: relative names below its folders, which may not lead out of them.

    Links are followed, since a hub's cache consists of them. Images inside data files, and pages of PDFs, are written
    to a temporary folder, each once, so that they are not kept in memory.
    """

    def __init__(self, base: Path, beside: Sequence[str] = ()):
        """Reads nothing yet.

        Args:
          base: the folder of the data's files. beside: names of folders in it or beside it where a release has media.
        """
        self._places = [base, *(base / name for name in beside), *(base.parent / name for name in beside)]
        self._temporary = Path(tempfile.mkdtemp(prefix="kvpatch-media-"))
        weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        self._shown: dict[Path, list[Path]] = {}

    def read(self, value: Any, field: str, names: Sequence[str] = ("{}",)) -> list[Path]:
        """Returns the image files that a field shows, a document's page by page.

        Args:
          value: the name of an image, of a PDF, or of a folder of pages; bytes, or the hub's {"bytes", "path"}; or a
            list of these.
          names: patterns of a file's name in which the value stands for {}, the first that is there.

        Raises:
          InputError: another value, an address, a name that leads out of the folder or is not there; it is
            no image, or too large. MissingExtraError: a PDF without the extra `data`.
        """
        if isinstance(value, list | tuple):
            parts = [self.read(entry, f"{field}[{number}]", names) for number, entry in enumerate(value)]
            return [path for part in parts for path in part]
        if isinstance(value, dict):
            value = value["bytes"] if isinstance(value.get("bytes"), bytes) else value.get("path")
        if isinstance(value, bytes):
            return [self._stored(value, field)]
        path = self._place(value, field, names)
        if path not in self._shown:
            self._shown[path] = list(self._images(path, field))
        return self._shown[path]

    def _place(self, name: Any, field: str, names: Sequence[str]) -> Path:
        """Finds the file or folder of a name; of a PDF first the folder of its pages, named without .pdf."""
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            raise InputError(f"{field}: got {name!r:.80}; expected a file's name")
        if _ADDRESS.match(name):
            raise InputError(f"{field}: got the address {name!r:.80}; expected a file: nothing is downloaded")
        pure = PurePosixPath(name.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts:
            raise InputError(f"{field}: got {name!r:.80}; expected a name below the data's folder")
        files = [pattern.format(name) for pattern in names]
        files = [name.removesuffix(".pdf"), *files] if name.endswith(".pdf") else files
        for place in self._places:
            for file in files:
                if (place / file).exists():
                    return place / file
        tried = ", ".join(place.name or str(place) for place in self._places)
        raise InputError(f"{field}: got {name!r:.80}, which is no file; expected it in {tried}")

    def _images(self, path: Path, field: str) -> Iterator[Path]:
        """Yields the images of a file or folder; page_10 of a folder is behind page_9."""
        if path.is_dir():
            images = [image for image in path.iterdir() if image.suffix.lower() in IMAGE_SUFFIXES]
            if not images:
                raise InputError(f"{field}: got {path.name!r} without images; expected at least one")
            for image in sorted(images, key=_place_in_order):
                yield _checked(image, field)
        elif path.suffix.lower() == ".pdf":
            for page in _pages(path, field):
                yield self._stored(page, field)
        else:
            yield _checked(path, field)

    def _stored(self, content: bytes, field: str) -> Path:
        """Writes an image's bytes to the temporary folder, named by their digest."""
        path = self._temporary / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.png"
        if not path.exists():
            path.write_bytes(content)
        return _checked(path, field)


def _place_in_order(path: Path) -> list[tuple[int, str]]:
    """Returns a key that sorts names by the numbers in them."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _checked(path: Path, field: str) -> Path:
    """Reads an image's size before it is decoded."""
    try:
        expect_small(path, LARGEST, path.name)
    except InputError as error:
        raise InputError(f"{field}: {str(error).replace(str(path), path.name)}") from error
    return path


def _pages(path: Path, field: str) -> Iterator[bytes]:
    """Draws a PDF's pages, as PNG."""
    pdfium = require("pypdfium2", "pypdfium2", "data")
    try:
        with pdfium.PdfDocument(path) as document:
            for page in document:
                buffer = io.BytesIO()
                page.render(scale=DPI / 72).to_pil().save(buffer, "png")
                yield buffer.getvalue()
    except pdfium.PdfiumError as error:
        raise InputError(f"{field}: got {path.name!r} ({error}); expected a PDF") from error
