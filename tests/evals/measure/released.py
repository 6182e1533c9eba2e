"""Ten items of each data set that `evals.measure` has a map of, laid out as released; all were drawn for this."""

import io
import tarfile
from pathlib import Path

from PIL import Image, ImageDraw

PATHS = {
    "mmlongbench_doc": "mmlongbench_doc/samples.json",
    "slidevqa": "slidevqa/annotations/test.jsonl",
    "mp_docvqa": "mp_docvqa/val.json",
    "docvqa": "docvqa/val.json",
    "hotpotqa": "hotpotqa/dev_distractor.json",
    "musique": "musique/musique_ans_dev.jsonl",
    "jsonl": "jsonl/items.jsonl",
}
"""What is read of each, below the folder of all."""


def unpack(folder: Path) -> Path:
    """Unpacks all; returns the folder."""
    with tarfile.open(Path(__file__).with_name("released.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def png(lines: list[str]) -> bytes:
    """Draws lines of text, as PNG."""
    image = Image.new("RGB", (96, 64), "white")
    ImageDraw.Draw(image).multiline_text((4, 2), "\n".join(lines), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()
