"""The faces that documents are set in: all come with matplotlib, so they are wherever a picture can be drawn."""

import functools
from pathlib import Path

SEEN = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralBol",
)
UNSEEN = ("cmss10", "cmtt10", "DejaVuSans-Oblique")
"""Never drawn in training: Computer Modern's sans and typewriter, a family held out, and a slant held out."""
FACES = SEEN + UNSEEN
LARGEST, SMALLEST = 12, 8


@functools.cache
def face(name: str, widest: tuple[tuple[str, int], ...]):
    """Opens a face in the largest size in which every text takes no more than its pixels.

    Args:
      widest: texts and the pixels each has.
    """
    import matplotlib
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"

    for size in range(LARGEST, SMALLEST, -1):
        font = ImageFont.truetype(path, size)
        if all(font.getlength(text) <= room for text, room in widest):
            return font

    return ImageFont.truetype(path, SMALLEST)
