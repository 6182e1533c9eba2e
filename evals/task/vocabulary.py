"""The words of the task: what is asked, what is answered, and the names of codes and items.

Token ids are those that the shipped instances were trained with. Axis letter: n items.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError

from .contexts import CODES, DIGITS, DOCUMENTS, FIRSTS, ITEMS, SECONDS, VALUES

_WORDS = """
bag bean beet belt bolt book bowl box bun cake can cap card clip coat coil cord cork corn cup desk dill dish door fan
fig file fish fork glue hat hook ink jam jar kale key kit lamp leek lime lock milk nail net nut oil pan pear pen pie
pin pot rice ring rope rug salt saw seed silk soap sofa tape tea tile tin toy vase wax wire yarn
"""
WORDS = tuple(_WORDS.split())
UNIT_NAMES = ("kg", "g", "l", "ml", "pc", "bx", "oz", "lb", "yd", "ft", "h", "d")
VALUE_NAMES = tuple(str(value) for value in range(1, VALUES + 1))
LETTER_NAMES = "ABCDEFGH"
CODE_NAMES = tuple(f"{LETTER_NAMES[code // DIGITS]}{code % DIGITS + 1}" for code in range(CODES))
FILLS = ("blue", "orange", "green", "red", "violet", "brown", "pink", "grey", "cyan")
EDGES = FILLS[:SECONDS]
ICONS = ("disc", "square", "triangle", "plus", "diamond", "ring", "bars", "cross")
SPECIAL = ("<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<end>")
PAD, VISION_START, VISION_END, IMAGE, VIDEO, END = range(6)
LEFT_OUT = r"(?i)[?,]|\b(what|is|the|of|in|cell|item|code)\b"
"""What a question may say besides: "What is the unit of C6?" is read as "unit C6"."""


class Vocabulary:
    """Words by token id, in groups.

    Attributes:
      names: the text of each token. first: id of the first token of each group.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]]):
        self.names: list[str] = []
        self.first: dict[str, int] = {}
        for group, words in groups.items():
            self.first[group] = len(self.names)
            self.names += words
        self._ids = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def token_to_id(self, name: str) -> int | None:
        """Finds the id of a word; None: there is no such word."""
        return self._ids.get(name)

    def __getitem__(self, name: str) -> int:
        return self._ids[name]


def _words_at(place: int) -> tuple[str, ...]:
    """Lists the letters that stand first or second in a word."""
    return tuple(sorted({word[place] for word in WORDS}))


@functools.cache
def vocabulary(drawing: str = "documents") -> Vocabulary:
    """Makes the vocabulary of a drawing."""
    groups: dict[str, Sequence[str]] = {"special": SPECIAL}
    if drawing == "plain":
        groups |= {
            "asks": ("first", "second", "value", "unit", "most", "where", "values"),
            "first of frame": [f"row-{mark}" for mark in range(1, FIRSTS + 1)],
            "second of frame": [f"column-{mark}" for mark in range(1, SECONDS + 1)],
            "letter": LETTER_NAMES,
            "value": VALUE_NAMES,
            "unit": UNIT_NAMES,
            "code": CODE_NAMES,
            "item": [f"frame-{item // SECONDS + 1}-{item % SECONDS + 1}" for item in range(ITEMS)],
        }
        return Vocabulary(groups)

    items = [*WORDS]
    items += [f"{fill}/{edge}" for fill, edge in itertools.product(FILLS, EDGES)]
    items += [f"{fill}-{icon}" for fill, icon in itertools.product(FILLS, ICONS)]
    groups |= {
        "asks": ("value", "unit", "most", "values", "letter", "digit", "first", "second"),
        "letter": LETTER_NAMES,
        "digit": [f"#{digit}" for digit in range(1, DIGITS + 1)],
        "value": VALUE_NAMES,
        "unit": UNIT_NAMES,
        "first of bill": [f"{letter}-" for letter in _words_at(0)],
        "second of bill": [f"-{letter}-" for letter in _words_at(1)],
        "first of chart": FILLS,
        "second of chart": [f"{edge}-edged" for edge in EDGES],
        "first of screen": [f"{fill}-icon" for fill in FILLS],
        "second of screen": [f"{icon}-icon" for icon in ICONS],
        "code": CODE_NAMES,
        "item": items,
    }
    return Vocabulary(groups)


def parts_of(document: np.ndarray, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds both parts of items [n], counted within their groups: letters of a word, colours, a colour and a shape."""
    first, second = np.divmod(item, SECONDS)
    initial = np.array([_words_at(0).index(word[0]) for word in WORDS])
    letter = np.array([_words_at(1).index(word[1]) for word in WORDS])
    word = document == DOCUMENTS.index("bill")
    return np.where(word, initial[item], first), np.where(word, letter[item], second)


def make_tokenizer(names: Sequence[str]) -> Any:
    """Makes a word-level tokenizer that leaves out what questions say besides the task's words."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, SPECIAL[PAD]))
    tokenizer.normalizer = normalizers.Replace(Regex(LEFT_OUT), " ")  # type: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[reportAttributeAccessIssue]
    return tokenizer


def check_words(tokenizer: Any, drawing: str) -> None:
    """Refuses a model whose tokenizer has other words than the task's: to it the questions are noise.

    Raises:
      InputError: it has other words; the message says what can be measured on it.
    """
    expected = vocabulary(drawing).names
    names = [] if tokenizer is None else [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    if names != expected:
        raise InputError(
            f"model: got one without the words of the task, drawn as {drawing}; expected an instance of "
            f"evals/trained/{drawing}. What reuse loses on any other model: python -m evals.certify --model=DIRECTORY "
            "--images=FOLDER (or --texts=FOLDER)"
        )
