"""The meaning of documents: that of the sheets task, in things that have names.

What the sheets task calls an address is here an *item*: a word on a bill, a series' fill and edge colour in a chart, a
coloured icon on a screen. A page's cells show an item and a *code*, a letter and a digit, no two alike. The sheets in
front (price list, the chart's key, a menu of settings) give each item a *value* of twelve and a *unit* of twelve. Every
document is drawn in a face of its own. Axis letters: B contexts, Q questions, N tokens of the questions.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from ..sheets_task import task as sheets
from ..sheets_task.task import ContextSize, SheetsContexts, SheetsQuestions
from ..sheets_task.training import SheetsRecipe as SheetsRecipe
from ..small_task.task import TaskVocabulary
from .faces import SEEN, UNSEEN

SIZES = sheets.SIZES
"""Sizes by name, as of the sheets task; a row for the title comes on top."""
DOCUMENTS = ("bill", "chart", "screen")
KINDS = tuple(kind for kind in sheets.KINDS if kind != "whole")
"""Kinds of questions. What the sheets task asks of a whole page did not leave chance there, and is not asked."""

_WORDS = """
bag bean beet belt bolt book bowl box bun cake can cap card clip coat coil cord cork corn cup desk dill dish door fan
fig file fish fork glue hat hook ink jam jar kale key kit lamp leek lime lock milk nail net nut oil pan pear pen pie
pin pot rice ring rope rug salt saw seed silk soap sofa tape tea tile tin toy vase wax wire yarn
"""
WORDS = tuple(_WORDS.split())
INITIALS, SECONDS = ("".join(sorted(set(letters))) for letters in list(zip(*WORDS, strict=False))[:2])
UNITS = ("kg", "g", "l", "ml", "pc", "bx", "oz", "lb", "yd", "ft", "h", "d")
LETTERS = "ABCDEFGH"
FILLS = ("blue", "orange", "green", "red", "violet", "brown", "pink", "grey", "cyan")
EDGES = FILLS[:8]
ICONS = ("disc", "square", "triangle", "plus", "diamond", "ring", "bars", "cross")


class DocumentsVocabulary(TaskVocabulary):
    """Token ids of the documents task; the shipped instances were trained with these.

    Attributes:
      ink, digit: the parts of a code. glyph: codes. cell: items, words, then series, then icons. fill, stripe: values
      and units. part: by kind of document, the first tokens of the two parts that an item is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        asks = ("value", "unit", "most", "values", "letter", "digit", "first", "second")
        self.ask_fill, self.ask_stripe, self.ask_most, self.ask_list, *parts = (self.add([ask]) for ask in asks)
        self.ask_letter, self.ask_digit, self.ask_first, self.ask_second = parts
        self.ink = self.add(LETTERS)
        self.digit = self.add([f"#{digit}" for digit in range(1, sheets.SHAPES + 1)])
        self.fill = self.add([str(value) for value in range(1, sheets.COLOURS + 1)])
        self.stripe = self.add(UNITS)
        self.part = (
            (self.add([f"{letter}-" for letter in INITIALS]), self.add([f"-{letter}-" for letter in SECONDS])),
            (self.add(FILLS), self.add([f"{edge}-edged" for edge in EDGES])),
            (self.add([f"{fill}-icon" for fill in FILLS]), self.add([f"{icon}-icon" for icon in ICONS])),
        )
        self.glyph = self.add([code(number) for number in range(sheets.GLYPHS)])
        self.cell = self.add(WORDS)
        self.add([f"{fill}/{edge}" for fill, edge in itertools.product(FILLS, EDGES)])
        self.add([f"{fill}-{icon}" for fill, icon in itertools.product(FILLS, ICONS)])


def parts_of(document: np.ndarray, address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds both parts of items, counted within their groups: letters of a word, colours, a colour and a shape."""
    first, second = np.divmod(address, sheets.COLUMN_MARKS)
    initial = np.array([INITIALS.index(word[0]) for word in WORDS])
    letter = np.array([SECONDS.index(word[1]) for word in WORDS])
    word = document == DOCUMENTS.index("bill")
    return np.where(word, initial[address], first), np.where(word, letter[address], second)


def code(glyph: int) -> str:
    """Names a code: a letter (the section of the page) and a digit."""
    return f"{LETTERS[glyph // sheets.SHAPES]}{glyph % sheets.SHAPES + 1}"


VOCABULARY = DocumentsVocabulary()


@dataclasses.dataclass(frozen=True)
class Documents(SheetsContexts):
    """The meaning of a batch of contexts, as `SheetsContexts`, and how they are drawn.

    document: [B], index into DOCUMENTS. face: [B, sheets + 1], index into the faces seen, or behind those into the
    unseen; the page's last. variety: [B], 0 … 1, how unlike one another documents are in paper, ink, place and noise.
    """

    document: np.ndarray
    face: np.ndarray
    variety: np.ndarray

    def taken(self, index: np.ndarray) -> "Documents":
        """Takes some of the batch's contexts."""
        parts = {name: value[index] for name, value in vars(self).items() if name != "size"}
        return Documents(**parts, size=self.size)


def sample_documents(
    rng: np.random.Generator, count: int, size: ContextSize = SIZES["4"], unseen: bool = False, variety: float = 1.0
) -> Documents:
    """Draws `count` contexts of this size.

    Args:
      unseen: set in faces that training never draws, not in those of training.
      variety: 0 … 1, how many of the faces there are, and how unlike one another documents look; 0 is one face, black
        on white.
    """
    contexts = sheets.sample_contexts(rng, count, size)
    document = rng.integers(0, len(DOCUMENTS), count)
    # Both are drawn, so that all else is the same in either.
    others = rng.integers(0, len(UNSEEN), (count, size.sheets + 1)) + len(SEEN)
    face = rng.integers(0, 1 + round(variety * (len(SEEN) - 1)), others.shape)
    return Documents(
        **vars(contexts),
        document=document,
        face=others if unseen else face,
        variety=np.full(count, variety),
    )


class _Asker(sheets.Asker):
    """Words the questions of the sheets task in codes, items, values and units."""

    contexts: Documents
    vocabulary = VOCABULARY

    def _items(self, address: np.ndarray) -> np.ndarray:
        """Returns tokens that name items: words, series and icons have tokens of their own."""
        return VOCABULARY.cell + self.contexts.document * sheets.ADDRESSES + address

    def page(self):
        cell = self.rng.integers(0, self.fill.shape[1], len(self.item))
        address, glyph = (of[self.item, cell] for of in (self.contexts.page_address, self.contexts.page_glyph))
        of_code = np.stack([VOCABULARY.ink + glyph // sheets.SHAPES, VOCABULARY.digit + glyph % sheets.SHAPES])
        of_item = np.array(VOCABULARY.part).T[:, self.contexts.document]
        of_item = of_item + np.stack(parts_of(self.contexts.document, address))
        by_code = self.rng.random(len(cell)) < 0.5
        part = self.rng.integers(0, 2, len(cell))
        asked = np.where(by_code, VOCABULARY.ask_first, VOCABULARY.ask_letter) + part
        about = np.where(by_code, VOCABULARY.glyph + glyph, self._items(address))
        answer = np.where(by_code, of_item[part, self.item], of_code[part, self.item])
        return self._two_tokens(asked, about, answer, True, cell)

    def sheet(self):
        ids, said, cell = super().sheet()
        ids[:, 1] = self._items(ids[:, 1] - VOCABULARY.cell)
        return ids, said, cell


def ask(
    documents: Documents, rng: np.random.Generator, counts: dict[str, int], shown: np.ndarray | None = None
) -> SheetsQuestions:
    """Draws `counts[kind]` questions of each kind per context, answerable from the sheets shown (all when None).

    * page: a part of the item in a code's cell, or of the code in an item's.
    * sheet: the value or unit of an item that is not on the page.
    * chain, override: the value or unit of a code's item, which is on one sheet, or on two.
    * aggregate: the most frequent value among a letter's cells.
    * list: the values of four codes' items, one after another; each answer is read before the next code.
    """
    return sheets.ask(documents, rng, counts, shown, _Asker)


@dataclasses.dataclass(frozen=True)
class DocumentsRecipe(SheetsRecipe):
    """Every training choice; see that of the sheets task.

    reading: steps at first that ask most of all what the page alone tells, so that reading is learnt first.
    plain, varied: until the first of these steps all documents look alike, from the second on they vary in full.
    """

    steps: int = 3200
    tiny: int = 1500
    small: int = 500
    longer: int = 2800
    proportions: int = 2700
    aggregate: int = 6
    whole: int = 0
    reading: int = 400
    plain: int = 500
    varied: int = 1100

    def asked(self, step: int) -> dict[str, int]:
        """Returns how many questions of each kind a step packs behind each context."""
        if step >= self.tiny:
            return self.questions
        if step < self.reading:
            return {"page": 8, "sheet": 4, "chain": 4, "override": 1}
        return {"page": 4, "sheet": 4, "chain": 10, "override": 2}

    def drawn(self, step: int) -> dict[str, Any]:
        """Returns how unlike one another the documents of a step look."""
        return {"variety": float(np.clip((step - self.plain) / max(self.varied - self.plain, 1), 0, 1))}
