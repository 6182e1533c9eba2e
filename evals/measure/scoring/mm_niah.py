"""MM-NIAH's rules: letters of options, soft accuracy of lists, inclusion of a word."""

import itertools
import json
import re
from typing import Any

from ..items import Item
from .spans import NUMBER_WORDS

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_LONE_PERIOD = re.compile(r"\.(?!\d)")
_NUMBERS = {word: str(number) for number, word in enumerate([*NUMBER_WORDS, "twenty"])} | {
    word: str(10 * number)
    for number, word in enumerate(["thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 3)
}


def mm_niah(prediction: str, item: Item) -> float:
    """Scores as `is_correct` of MM-NIAH's calculate_scores.py (OpenGVLab/MM-NIAH) does.

    - An option (answer_format "choice"): the number, or one letter after "the answer is" and stars are cut out.
    - A list of counts ("list"): the share of places of the answer that are right; JSON in a fence, or the lists of an
      object one after the other. What is no JSON scores 0.
    - A text: whether the normalised answer stands in the normalised prediction as a whole word or words. The
      table of contractions is left out: it rewrites both sides alike.
    """
    if item.answer_format == "choice":
        return float(_letter(prediction) == item.answers[0])
    if item.answer_format == "list":
        return _soft_accuracy(prediction, json.loads(item.answers[0]))
    said, right = _normalise(prediction), _normalise(item.answers[0])
    return float(re.search(rf"\b{re.escape(right)}\b", said) is not None)


def _letter(prediction: str) -> str | None:
    text = prediction.strip(".")
    if text.isascii() and text.isdigit():
        number = int(text) if len(text) < 3 else 99
        return chr(ord("A") + number) if number < 26 else None
    text = text.lower().replace("the answer is", "").replace("*", "")
    if "." in text:
        text = text.split(".")[0].replace(",", "")
    text = text.strip()
    if "the camera is moving left" in text:
        return "A"
    if "the camera is moving right" in text:
        return "B"
    return text.upper() if len(text) == 1 else None


def _soft_accuracy(prediction: str, right: Any) -> float:
    try:
        said = json.loads(prediction.strip(".").replace("json", "").replace("```", "").strip())
        if isinstance(said, dict):
            said = list(itertools.chain.from_iterable(said.values()))
    except (ValueError, TypeError, RecursionError):
        return 0.0
    if not isinstance(said, list) or not isinstance(right, list) or not right:
        return 0.0
    return sum(one == other for one, other in zip(said, right, strict=False)) / len(right)


def _normalise(text: str) -> str:
    """Normalises as VQA's evaluation does: punctuation, numbers as digits, no articles, lower case."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    result = text
    for mark in _PUNCTUATION:
        # A mark beside a space goes, one inside a word becomes a space; all go where a number has a comma.
        alone = f"{mark} " in text or f" {mark}" in text or _COMMA_IN_NUMBER.search(text)
        result = result.replace(mark, "" if alone else " ")
    words = _LONE_PERIOD.sub("", result).lower().split()
    return " ".join(_NUMBERS.get(word, word) for word in words if word not in ("a", "an", "the"))
