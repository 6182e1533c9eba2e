"""Questions over pages of documentation that Python brings, as plain JSON Lines: a data set that every machine has.

A context is the pages of several documents of the language reference, two pages each, a document cut wherever its first
page is full. A question is the words of the text in front of a place, and the answer the two words that stand there.
Its kind says where: *within* a page, *early* in it (the question is its first words), or *across* two, the question's
words at the end of a page and the answer's at the start of the next. A page that was cached alone does not know what
its first words follow.

`behind_the_next` puts the same questions behind the pages of the next context, which do not answer them: what is
right there is known without the pages.
"""

import dataclasses
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvpatch_jax.errors import InputError

from ...pretrained.texts import SOURCES
from ...reading.pages import COLUMNS, Style, draw_page
from ...reading.suite import styles
from ...reading.tower import PageReadingModel
from ..exports import ExportedQuestion
from ..scoring.spans import normalise

PAGES = 2
"""Pages of a document."""
KEY, ANSWER = 8, 2
"""Words of a question, and of an answer."""
TEXT_KINDS, PAGE_KINDS = ("within", "across"), ("early", "within")
"""Kinds of question about texts, and about rendered pages: those end in blank cells, behind which no word follows."""
QUESTION = '\n\n"... {}'
"""A quotation that the model goes on with."""

_WORD = re.compile(r"[A-Za-z][a-z]*")


class Place(NamedTuple):
    """A question about a context: its kind, words and answer."""

    kind: str
    question: str
    answer: str


def documents(words: int) -> Iterator[tuple[str, list[str]]]:
    """Yields names and the first words of the reference's topics that are long enough, headings and examples left out.

    Args:
      words: that each has.
    """
    for name, text in SOURCES["prose"]():
        found: list[str] = []
        for paragraph in re.split(r"\n\s*\n", text):
            # Headings are underlined, examples and tables indented.
            if paragraph[:1].isupper() and paragraph.endswith(".") and "\n " not in paragraph:
                found += paragraph.split()
        if len(found) >= words:
            yield name, found[:words]


def places(document: Sequence[str], page: int, context: str, kinds: Sequence[str]) -> list[Place]:
    """Lists what can be asked about a document of a context: one place of each kind a page.

    What is asked stands once in the context, and its answer is of plain words.

    Args:
      page: words of a page.
      context: all words of the context, single spaces between them.
    """
    made = []
    firsts = {"early": KEY, "within": (page + KEY) // 2, "across": page}
    for kind in kinds:
        for end in range(firsts[kind], len(document), page):
            question, answer = document[end - KEY : end], document[end : end + ANSWER]
            plain = all(_WORD.fullmatch(word.rstrip(".,")) and normalise(word) for word in answer)
            if plain and context.count(" ".join(question[-3:])) == 1:
                made.append(Place(kind, " ".join(question), " ".join(answer)))
    return made


def questions(contexts: int, count: int, page: int, kinds: Sequence[str] = TEXT_KINDS) -> list[list[ExportedQuestion]]:
    """Draws contexts of `count` documents with the questions behind each, as many of one kind as of another.

    Args:
      page: words of a page.

    Raises:
      InputError: the documents are too few.
    """
    source, made = documents(PAGES * page), list[list[ExportedQuestion]]()
    while len(made) < contexts:
        group = [words for _, words in itertools.islice(source, count)]
        if len(group) < count:
            raise InputError(f"--contexts: got {contexts}; expected at most {len(made)}, for want of documents")
        whole = " ".join(itertools.chain.from_iterable(group))
        asked = [place for document in group for place in places(document, page, whole, kinds)]
        pairs = min(sum(place.kind == kind for place in asked) for kind in kinds)

        pieces = []
        for document in group:
            pages = [" ".join(document[start : start + page]) for start in range(0, len(document), page)]
            pieces += [*(f"{own} " for own in pages[:-1]), f"{pages[-1]}\n\n"]
        number, own = len(made), list[ExportedQuestion]()
        for kind in kinds:
            for place in [place for place in asked if place.kind == kind][:pairs]:
                own.append(
                    ExportedQuestion(
                        id=f"{number}.{len(own)}",
                        group=f"context {number}",
                        pieces=tuple(pieces),
                        question=QUESTION.format(place.question),
                        # With the space in front that the model writes: so many tokens an answer has.
                        answers=(f" {place.answer}",),
                        kind=kind,
                    )
                )
        made.append(own)
    return made


def behind_the_next(contexts: Sequence[Sequence[ExportedQuestion]]) -> list[ExportedQuestion]:
    """Puts every context's questions behind the pages of the next one; the last one's behind the first."""
    moved = []
    for own, other in zip(contexts, [*contexts[1:], contexts[0]], strict=True):
        if other:
            moved += [dataclasses.replace(question, pieces=other[0].pieces) for question in own]
    return moved


def rendered(reader: PageReadingModel, contexts: Sequence[Sequence[ExportedQuestion]]) -> list[list[ExportedQuestion]]:
    """Draws every page as an image, in unseen faces by turns, a face a context; its last line is filled with newlines.

    Raises:
      InputError: a page of more than sixteen lines.
    """
    made = []
    for own, style in zip(contexts, styles(0, len(contexts)), strict=True):
        pages = [_drawn(reader, page, style) for page in own[0].texts] if own else []
        made.append([dataclasses.replace(question, pieces=tuple(pages)) for question in own])
    return made


def _drawn(reader: PageReadingModel, text: str, style: Style) -> bytes:
    from PIL import Image

    ids, fill = reader.prepare([text.rstrip()])["input_ids"][0], reader.prepare(["\n"])["input_ids"][0]
    whole = np.concatenate([ids, np.tile(fill, -len(ids) % COLUMNS)])
    file = io.BytesIO()
    Image.fromarray(draw_page(reader.pieces.letters[reader.pieces.rows(whole)], style)).save(file, "PNG")
    return file.getvalue()
