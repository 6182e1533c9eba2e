"""Rules for options by letters."""

import re

from ..items import Item

_PREFIXES = ("The best answer is", "The correct answer is", "The answer is", "The answer", "Answer:", "Option:")
_REJECTED = (
    "Sorry, I can't help with images of people yet.", "I can't process this file.",
    "I'm sorry, but without the image provided", "Cannot determine the answer",
)  # fmt: skip
_VERBOSE = re.compile(r"(?:correct\s+)?answer\s+is\s+\**([ABCD])\**", re.IGNORECASE)
_SPACED = str.maketrans({mark: " " for mark in ".()[],:;!*#{}"})


def _letters(item: Item) -> str:
    return "".join(chr(ord("A") + number) for number in range(len(item.options)))


def option_letter(prediction: str, item: Item) -> float:
    """Scores 1 where the letter that a prediction names is the answer (Video-MME, `extract_characters_regex`).

    Phrases such as "The best answer is" are cut out; of the rest the first capital letter that is an option's counts,
    wherever it stands. Video-MME has four options; here the letters are the item's own. As published, so that scores
    compare: in the code missing commas join four more phrases ("Best answer:" among them) to two that nobody writes,
    so they are not cut out, and "Best answer: C" counts as B.
    """
    text = prediction.strip()
    for prefix in _PREFIXES:
        text = text.replace(prefix, "")
    found = re.search(f"[{_letters(item)}]", text) if item.options else None
    return float(found is not None and found[0] == item.answers[0])


def vlmeval_option(prediction: str, item: Item) -> float:
    """Scores 1 where the option inferred from a prediction is the answer (VLMEvalKit, `can_infer` of matching_util.py).

    First letters: of the words between punctuation exactly one is an option's letter, first met among the last four
    words; or "answer is X" names one. Then texts: exactly one option's text stands in the prediction, which is not more
    than twice as long as all options together. VLMEvalKit asks a language model where both fail; here that scores 0.
    """
    letters = _letters(item)
    return float(_inferred_letter(prediction, letters) == item.answers[0] or _by_text(prediction, item, letters))


def _inferred_letter(prediction: str, letters: str) -> str | None:
    if any(phrase in prediction for phrase in _REJECTED):
        return "Z"
    words = prediction.translate(_SPACED).split()
    named = [letter for letter in letters if letter in words]
    if len(named) == 1 and words.index(named[0]) > len(words) - 5:
        return named[0]
    if not named and "Z" in words:
        return "Z"
    verbose = _VERBOSE.search(prediction)
    return verbose[1].upper() if verbose and verbose[1].upper() in letters else None


def _by_text(prediction: str, item: Item, letters: str) -> bool:
    if _inferred_letter(prediction, letters) is not None:
        return False
    text = prediction.lower()
    if len(text) > 2 * sum(len(option) for option in item.options):
        return False
    named = [letter for letter, option in zip(letters, item.options, strict=True) if option.lower() in text]
    return named == [item.answers[0]]
