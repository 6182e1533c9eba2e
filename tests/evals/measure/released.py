"""Ten items of each data set that `evals.measure` has a map of, laid out as released; all were drawn for this."""

import io
import tarfile
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "orange")
PATHS = {
    "mm_niah": "mm_niah",
    "mmlongbench_doc": "mmlongbench_doc/samples.json",
    "slidevqa": "slidevqa/annotations/test.jsonl",
    "mp_docvqa": "mp_docvqa/val.json",
    "docvqa": "docvqa/val.json",
    "video_mme": "video_mme/test.jsonl",
    "vlmeval_tsv": "vlmeval_tsv/questions.tsv",
    "hotpotqa": "hotpotqa/dev_distractor.json",
    "musique": "musique/musique_ans_dev.jsonl",
    "gui_odyssey": "gui_odyssey",
    "android_control": "android_control/android_control-00000-of-00001",
    "osworld": "osworld/trajectories.jsonl",
    "jsonl": "jsonl/items.jsonl",
}
"""What is read of each, below the folder of all."""


def unpack(folder: Path) -> Path:
    """Unpacks all; returns the folder."""
    with tarfile.open(Path(__file__).with_name("released.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def png(lines: list[str], colour: str = "white", size: tuple[int, int] = (96, 64)) -> bytes:
    """Draws lines of text above a bar of a colour, as PNG."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((4, size[1] - 14, size[0] - 4, size[1] - 4), fill=colour)
    draw.multiline_text((4, 2), "\n".join(lines), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()
