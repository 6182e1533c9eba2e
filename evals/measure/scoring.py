"""Scores of answers: a prediction and an item to a number in [0, 1]. What cannot be read as an answer scores 0."""

import collections
import itertools
import json
import math
import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

from rapidfuzz.distance import Levenshtein

from .items import Item

NEAR = 140
"""How far from the recorded point a tap counts, in thousandths of the screen (Android in the Wild; GUI-Odyssey)."""
LETTERS = string.ascii_uppercase

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FIRST_LETTER = re.compile(r"\W*([A-Z])(?=\W*$|\s*[).:,*\n])")
_NAMED_LETTER = re.compile(r"(?:answer|option|choice)(?:\s+is)?\W*([A-Z])\b", re.IGNORECASE)
_TYPES = ("action_type", "name", "action", "type")
_FREE_TEXTS = ("text", "app_name")


class Scorer(NamedTuple):
    """A scorer: (prediction, item) to a score, and how many tokens an answer has at most."""

    score: Callable[[str, Item], float]
    tokens: int


def normalise(text: str) -> str:
    """Normalises an answer as SQuAD's script does: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, item: Item) -> float:
    """Scores 1 where the normalised prediction is one of the normalised answers."""
    return float(normalise(prediction) in {normalise(answer) for answer in item.answers})


def token_f1(prediction: str, item: Item) -> float:
    """Computes the best F1 of words over the answers (SQuAD v2.0): where one is empty, 1 if both are."""
    predicted = normalise(prediction).split()
    scores = []
    for answer in item.answers:
        right = normalise(answer).split()
        common = (collections.Counter(predicted) & collections.Counter(right)).total()
        scores.append(2 * common / (len(predicted) + len(right)) if predicted and right else float(predicted == right))
    return max(scores)


def anls(prediction: str, item: Item) -> float:
    """Computes ANLS of DocVQA and MP-DocVQA: the best Levenshtein similarity over the answers, 0 below .5.

    Case and white space at the ends do not count. As in the MP-DocVQA framework's metrics.py, an empty prediction and
    "none" score 0, and a similarity of exactly .5 counts.
    """
    predicted = prediction.strip().lower()
    if predicted in ("", "none"):
        return 0.0
    best = max(Levenshtein.normalized_similarity(answer.strip().lower(), predicted) for answer in item.answers)
    return best if best >= 0.5 else 0.0


def choice(prediction: str, item: Item) -> float:
    """Scores 1 where a prediction names the right option: by a letter in front, as "the answer is X", or by its text.

    A text counts where it is the only option's that the prediction contains.
    """
    letters = LETTERS[: len(item.options)]
    for named in (_FIRST_LETTER.match(prediction), _NAMED_LETTER.search(prediction)):
        if named is not None and named[1].upper() in letters:
            return float(named[1].upper() in item.answers)
    text = prediction.lower()
    contained = [letter for letter, option in zip(letters, item.options, strict=True) if option.lower() in text]
    return float(len(contained) == 1 and contained[0] in item.answers)


def action(prediction: str, item: Item) -> float:
    """Scores an agent's next action: its type must be the same, and where or what it is done with.

    An action is a JSON object with its type as `action_type`, `name`, `action` or `type`, and its arguments beside it
    or in `arguments`. A point (`x`, `y`, thousandths of the screen) counts within 140 of the recorded one, as in the
    action matching of Android in the Wild and GUI-Odyssey; texts and names of apps where one contains the other or
    their similarity is .5; other arguments where they are equal. A recorded answer that is no object counts where the
    texts are equal without case. Boxes of the target element are not read.
    """
    right, predicted = _action(item.answers[0]), _action(prediction)
    if right is None:
        return float(prediction.strip().lower() == item.answers[0].strip().lower())
    if predicted is None or predicted[""] != right[""]:
        return 0.0
    if {"x", "y"} <= right.keys():
        points: list[Any] = [[arguments.get("x"), arguments.get("y")] for arguments in (predicted, right)]
        numbers = all(isinstance(value, int | float) for value in itertools.chain(*points))
        if not numbers or math.dist(*points) > NEAR:
            return 0.0
    return float(all(_same(key, predicted.get(key), right[key]) for key in right if key not in ("x", "y")))


def _action(text: str) -> dict[str, Any] | None:
    """Reads the JSON object in a text, in a fence or not: its arguments, and its type under ""."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = json.loads(text[start : end + 1]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    kind = next((key for key in _TYPES if isinstance(value.get(key), str)), None)
    if kind is None:
        return None
    arguments = value.pop("arguments", None)
    return {"": value.pop(kind).lower(), **value, **(arguments if isinstance(arguments, dict) else {})}


def _same(key: str, predicted: Any, right: Any) -> bool:
    if not isinstance(predicted, str) or not isinstance(right, str):
        return predicted == right
    first, second = predicted.strip().lower(), right.strip().lower()
    if key not in _FREE_TEXTS or not first or not second:
        return first == second
    return first in second or second in first or Levenshtein.normalized_similarity(first, second) >= 0.5


SCORERS = {
    "exact_match": Scorer(exact_match, 32),
    "token_f1": Scorer(token_f1, 32),
    "anls": Scorer(anls, 32),
    "choice": Scorer(choice, 16),
    "action": Scorer(action, 64),
}
"""All scorers by name. Those of other data sets are in lmms-eval (`evals.plugins.lmms`)."""
