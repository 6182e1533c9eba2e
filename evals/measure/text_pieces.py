"""Texts divided into pieces at natural borders, so that each is cached as a chunk of its own."""

import re

_BORDERS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s+"), re.compile(r"\s+"))
"""Between paragraphs, lines, sentences, words: the first that divides a text is taken."""


def split_text(text: str, most: int) -> list[str]:
    """Divides a text at paragraphs, or lines, sentences, words where a part is longer than `most` characters.

    The pieces joined are the text. Neighbouring short parts make one piece.
    """
    return _split(text, most, 0)


def _split(text: str, most: int, border: int) -> list[str]:
    if len(text) <= most:
        return [text] if text else []
    if border == len(_BORDERS):
        return [text[start : start + most] for start in range(0, len(text), most)]

    # Each part keeps the white space behind it.
    ends = [match.end() for match in _BORDERS[border].finditer(text)]
    starts = [0, *ends]
    parts = [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]
    pieces: list[str] = []
    joins = False
    for part in parts:
        # What is left of a long part stays alone, so that the next one begins where it is written to.
        if joins and len(pieces[-1]) + len(part) <= most:
            pieces[-1] += part
        else:
            joins = len(part) <= most
            pieces.extend([part] if joins else _split(part, most, border + 1))
    return pieces
