"""Rules for short answers: exact match and overlap of words after normalisation."""

import collections
import re
import string

from ..items import Item

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]


def normalise(text: str) -> str:
    """Normalises an answer as SQuAD's script does: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, item: Item) -> float:
    """Scores 1 where the normalised prediction is one of the normalised answers (SQuAD v1.1; HotpotQA; MuSiQue)."""
    return float(normalise(prediction) in {normalise(answer) for answer in item.answers})


def _f1(said: list[str], right: list[str]) -> float:
    same = sum((collections.Counter(said) & collections.Counter(right)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(right)
    return 2 * precision * recall / (precision + recall)


def token_f1(prediction: str, item: Item) -> float:
    """Computes the best F1 of words over the answers (SQuAD v2.0): where one is empty, 1 if both are."""
    said = normalise(prediction).split()
    scores = []
    for answer in item.answers:
        right = normalise(answer).split()
        scores.append(_f1(said, right) if said and right else float(said == right))
    return max(scores)


def hotpotqa_f1(prediction: str, item: Item) -> float:
    """Computes F1 of words as hotpot_evaluate_v1.py does: "yes", "no" and "noanswer" overlap with nothing else."""
    said = normalise(prediction)
    scores = []
    for answer in item.answers:
        right = normalise(answer)
        whole = {said, right} & {"yes", "no", "noanswer"} and said != right
        scores.append(0.0 if whole else _f1(said.split(), right.split()))
    return max(scores)


def _slidevqa_words(text: str, question: str) -> list[str]:
    """Normalises as `normalize_answer` of SlideVQA's evaluate.py does, in its order.

    After lower case: some words are rewritten ("&" and "and" become commas, "percent" goes, …), then the word after
    "how many" or "which" of the question is cut out as a unit, then punctuation and articles go, "yes…" and "no…" keep
    their first word, and numbers below twenty become digits. The question is matched in its own case, as there.
    """
    text = text.lower()
    for old, new in (
        ("this is ", ""), ("it is ", ""), ("&", ","), ("and", ","), ("percent", ""), ("organisation", "organization"),
        ("because of", ""), ("because", ""), ("due to", ""), ("hours", "hrs"), ("minites", "min"),
    ):  # fmt: skip
        text = text.replace(old, new)
    for words in ("how many", "which"):
        behind = question.partition(words)[2].split()
        # The script fails where nothing follows; there is no unit then.
        if behind:
            text = text.replace(behind[0], "")
    text = _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION))
    if text.startswith(("yes", "no")):
        text = text.split()[0]
    return [str(NUMBER_WORDS.index(word)) if word in NUMBER_WORDS else word for word in text.split()]


def _asked(item: Item) -> str:
    """Returns the question without the instruction that a reader adds in a line of its own."""
    return item.question.split("\n", 1)[0]


def slidevqa_em(prediction: str, item: Item) -> float:
    """Scores 1 where the words are the same after SlideVQA's normalisation; an answer without words scores 0."""
    said = _slidevqa_words(prediction, _asked(item))
    return float(bool(said) and any(said == _slidevqa_words(answer, _asked(item)) for answer in item.answers))


def slidevqa_f1(prediction: str, item: Item) -> float:
    """Computes F1 of words after SlideVQA's normalisation."""
    said = _slidevqa_words(prediction, _asked(item))
    return max(_f1(said, _slidevqa_words(answer, _asked(item))) for answer in item.answers)
