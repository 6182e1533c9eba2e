"""Pages of documents: a folder of page images, or a PDF that an optional library draws."""

import importlib.util
import io
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ImageError, InputError

from .data_files import DataFolder
from .items import Piece, StoredImage

DPI = 144
"""Dots per inch that MMLongBench-Doc's pages are drawn at."""


class DocumentPages:
    """Documents by name, each as its pages; a document that many questions share is looked at once.

    Args:
      files: where they are. field: of the record, for messages.
    """

    def __init__(self, files: DataFolder, field: str):
        self.files, self.field = files, field
        self._pages: dict[str, tuple[Piece, ...]] = {}

    def pages(self, name: str) -> tuple[Piece, ...]:
        """Returns a document's pages: the images in the folder of its name without the suffix, or those of its PDF.

        Raises:
          InputError: neither is there, or no library draws PDFs. ImageError: a page is no image or too large.
        """
        if name not in self._pages:
            self._pages[name] = tuple(self._read(name))
        return self._pages[name]

    def _read(self, name: str) -> list[Piece]:
        stem = name[:-4] if name.lower().endswith(".pdf") else name
        try:
            folder = self.files.find(stem, self.field)
        except InputError:
            if stem == name:
                raise
        else:
            if folder.is_dir():
                images = self.files.images_in(folder, self.field)
                return [Piece(path, f"page {number}") for number, path in enumerate(images, 1)]

        path = self.files.find(name, self.field)
        return [Piece(image, f"page {number}") for number, image in enumerate(_pdf_pages(path, self.field), 1)]


def _pdf_pages(path: Path, field: str) -> list[StoredImage]:
    """Lists a PDF's pages, drawn when they are read."""
    if importlib.util.find_spec("pypdfium2") is None:
        raise InputError(
            f"{field}: got {path.name!r}; expected its pages as images in a folder {path.stem!r} beside it "
            f"(pdftoppm -r {DPI} -png), or the package pypdfium2"
        )
    document = _opened(path, field)
    count = len(document)
    document.close()

    def reader(number: int) -> Any:
        def read() -> bytes:
            document = _opened(path, field)
            try:
                image = document[number].render(scale=DPI / 72).to_pil()
                buffer = io.BytesIO()
                image.save(buffer, "png")
                return buffer.getvalue()
            finally:
                document.close()

        return read

    return [StoredImage(reader(number), f"{path.name} page {number + 1}") for number in range(count)]


def _opened(path: Path, field: str) -> Any:
    pdfium = importlib.import_module("pypdfium2")
    try:
        return pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        raise ImageError(f"{field}: got {path.name!r} ({error}); expected a PDF") from error
