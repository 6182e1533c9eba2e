"""Questions about a batch of contexts, packed behind one another.

* page: a part of the item in a code's cell, or of the code in an item's: answered by the page alone.
* sheet: the value or unit of an item that is not on the page: answered by the sheets alone.
* chain, override: the value or unit of a code's item, which is on one sheet, or on two.
* aggregate: the most frequent value among a letter's cells.
* list: the values of four codes' items, one after another; each answer is read before the next code.

Axis letters: B contexts, Q questions, N tokens of all questions.
"""

import dataclasses

import numpy as np

from .contexts import CODES, DIGITS, DOCUMENTS, ITEMS, LETTERS, SECONDS, VALUES, Contexts, latest
from .vocabulary import Vocabulary, parts_of, vocabulary

KINDS = ("page", "sheet", "chain", "override", "aggregate", "list")
LISTED = 4
"""Cells of one `list` question."""


@dataclasses.dataclass(frozen=True)
class Questions:
    """Packed questions.

    Attributes:
      ids: tokens [B,N]. answer: [B,N], the token that is right after each, -1 where nothing is asked.
      number: [N], the question that each token belongs to. step: [N], its place in that question.
      kind: [Q], index into KINDS. cell: [B,Q], the page's cell asked about, -1 where there is none or more than one.
    """

    ids: np.ndarray
    answer: np.ndarray
    number: np.ndarray
    step: np.ndarray
    kind: np.ndarray
    cell: np.ndarray

    def columns(self) -> list[np.ndarray]:
        """Lists where the tokens of each question are."""
        return [np.flatnonzero(self.number == question) for question in range(len(self.kind))]

    def in_words(self, words: Vocabulary) -> list[str]:
        """Lists what is asked of the first context, those questions that have an answer."""
        answered = [tokens for tokens in self.columns() if (self.answer[0, tokens] >= 0).any()]
        return [" ".join(words.names[token] for token in self.ids[0, tokens]) for tokens in answered]


def ask(
    contexts: Contexts, rng: np.random.Generator, counts: dict[str, int], shown: np.ndarray | None = None
) -> Questions:
    """Draws `counts[kind]` questions of each kind per context, answerable from the sheets shown (all when None)."""
    asker = _Asker(contexts, rng, shown)
    makers = {
        "page": asker.page if contexts.drawing == "documents" else asker.plain_page,
        "sheet": asker.sheet,
        "chain": lambda: asker.chain(asker.times == 1),
        "override": lambda: asker.chain(asker.times > 1),
        "aggregate": asker.aggregate,
        "list": asker.list,
    }
    kinds = np.repeat(list(counts), list(counts.values())).tolist()
    ids, answers, cells = zip(*(makers[kind]() for kind in kinds), strict=True)
    sizes = [tokens.shape[1] for tokens in ids]
    return Questions(
        ids=np.concatenate(ids, axis=1).astype(np.int32),
        answer=np.concatenate(answers, axis=1).astype(np.int32),
        number=np.repeat(np.arange(len(kinds)), sizes),
        step=np.concatenate([np.arange(size) for size in sizes]),
        kind=np.array([KINDS.index(kind) for kind in kinds]),
        cell=np.stack(cells, axis=1),
    )


def value_shares(contexts: Contexts, questions: Questions, shown: np.ndarray | None = None) -> np.ndarray:
    """Computes, where an aggregate question is answered, the share [B,N,12] of its cells with each value; else 0."""
    counts = _Asker(contexts, np.random.default_rng(0), shown).counts
    letter = questions.ids - vocabulary(contexts.drawing).first["letter"]
    asked = (letter >= 0) & (letter < LETTERS) & (questions.answer >= 0)
    cells = np.take_along_axis(counts, np.where(asked, letter, 0)[..., None], axis=1)
    return (cells * asked[..., None] / np.maximum(cells.sum(axis=-1, keepdims=True), 1)).astype(np.float32)


class _Asker:
    """Draws one question of a kind for every context: ids [B,n], answers [B,n], cell [B]."""

    def __init__(self, contexts: Contexts, rng: np.random.Generator, shown: np.ndarray | None):
        self.contexts, self.rng, self.words = contexts, rng, vocabulary(contexts.drawing)
        self.row = np.arange(len(contexts))
        self.by_item = latest(contexts, shown)
        self.value, self.unit, self.times = (
            np.take_along_axis(table, contexts.page_item, axis=1) for table in self.by_item
        )
        # [B, letters, values]: how many cells of a letter have each value; a letter counts when all are defined.
        letter = contexts.page_code // DIGITS
        self.counts = np.zeros((len(contexts), LETTERS, VALUES), np.int64)
        np.add.at(self.counts, (self.row[:, None], letter, np.maximum(self.value, 0)), 1)
        cells, known = np.zeros((2, len(contexts), LETTERS), np.int64)
        np.add.at(cells, (self.row[:, None], letter), 1)
        np.add.at(known, (self.row[:, None], letter), self.value >= 0)
        self.defined = (cells > 0) & (known == cells)
        # On a whole page the most frequent value leads by two or more.
        self.least = 2 if contexts.size.cells == CODES else 1

    def page(self):
        cell = self._any_cell()
        item, code = (table[self.row, cell] for table in (self.contexts.page_item, self.contexts.page_code))
        of_code = np.stack([self._token("letter", code // DIGITS), self._token("digit", code % DIGITS)])
        document = self.contexts.document
        tokens = [[self.words.first[f"{part} of {kind}"] for kind in DOCUMENTS] for part in ("first", "second")]
        of_item = np.array(tokens)[:, document] + np.stack(parts_of(document, item))
        by_code = self.rng.random(len(cell)) < 0.5
        part = self.rng.integers(0, 2, len(cell))
        asked = np.where(by_code, self.words["first"], self.words["letter"]) + part
        about = np.where(by_code, self._token("code", code), self._items(item))
        answer = np.where(by_code, of_item[part, self.row], of_code[part, self.row])
        return self._two_tokens(asked, about, answer, True, cell)

    def plain_page(self):
        cell = self._any_cell()
        first, second = np.divmod(self.contexts.page_item[self.row, cell], SECONDS)
        by_first = self.rng.random(len(cell)) < 0.5
        asked = np.where(by_first, self.words["first"], self.words["second"])
        answer = np.where(by_first, self._token("first of frame", first), self._token("second of frame", second))
        code = self._token("code", self.contexts.page_code[self.row, cell])
        return self._two_tokens(asked, code, answer, True, cell)

    def sheet(self):
        value, unit, times = self.by_item
        allowed = times == 1
        np.put_along_axis(allowed, self.contexts.page_item, False, axis=1)
        item, valid = self._pick(allowed)
        asked, answer = self._value_or_unit(value[self.row, item], unit[self.row, item])
        return self._two_tokens(asked, self._items(item), answer, valid)

    def chain(self, allowed: np.ndarray):
        cell, valid = self._pick(allowed)
        asked, answer = self._value_or_unit(self.value[self.row, cell], self.unit[self.row, cell])
        code = self._token("code", self.contexts.page_code[self.row, cell])
        return self._two_tokens(asked, code, answer, valid, cell)

    def aggregate(self):
        ranked = np.sort(self.counts, axis=2)
        letter, valid = self._pick(self.defined & (ranked[..., -1] - ranked[..., -2] >= self.least))
        answer = self._token("value", self.counts[self.row, letter].argmax(axis=1))
        return self._two_tokens(self.words["most"], self._token("letter", letter), answer, valid)

    def list(self):
        draws = np.where(self.value >= 0, self.rng.random(self.value.shape), -1.0)
        cells = np.argsort(-draws, axis=1)[:, :LISTED]
        row = self.row[:, None]
        value, code = self.value[row, cells], self._token("code", self.contexts.page_code[row, cells])
        expected = np.where((value >= 0).all(axis=1, keepdims=True), self._token("value", value), -1)
        # Every code is followed by its answer; the last answer ends the question.
        pairs = np.stack([code, self._token("value", np.maximum(value, 0))], axis=2).reshape(len(row), -1)[:, :-1]
        answers = np.stack([expected, np.full_like(expected, -1)], axis=2).reshape(len(row), -1)[:, :-1]
        ids = np.concatenate([np.full((len(row), 1), self.words["values"]), pairs], axis=1)
        return ids, np.pad(answers, ((0, 0), (1, 0)), constant_values=-1), np.full(len(row), -1)

    def _any_cell(self) -> np.ndarray:
        return self.rng.integers(0, self.value.shape[1], len(self.row))

    def _pick(self, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns one index [B] per row of `allowed`, and whether it is allowed."""
        picked = np.where(allowed, self.rng.random(allowed.shape), -1.0).argmax(axis=1)
        return picked, allowed[self.row, picked]

    def _token(self, group: str, number: np.ndarray) -> np.ndarray:
        return self.words.first[group] + number

    def _items(self, item: np.ndarray) -> np.ndarray:
        """Returns tokens that name items: words, bars and icons have tokens of their own."""
        return self._token("item", self.contexts.document * ITEMS + item)

    def _value_or_unit(self, value: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        by_value = self.rng.random(len(value)) < 0.5
        asked = np.where(by_value, self.words["value"], self.words["unit"])
        return asked, np.where(by_value, self._token("value", value), self._token("unit", unit))

    def _two_tokens(self, first, second, answer, valid, cell=None):
        ids = np.stack(np.broadcast_arrays(first, second), axis=1)
        answers = np.stack([np.full(len(self.row), -1), np.where(valid, answer, -1)], axis=1)
        return ids, answers, np.full(len(self.row), -1) if cell is None else cell
