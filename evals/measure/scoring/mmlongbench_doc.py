"""MMLongBench-Doc's rule for short answers of five formats."""

import ast
import math
import re
from typing import Any

from ..items import Item
from .anls import similarity

_EXACT = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d+(-\d+|\s\d+)?",
        r"\d{4}[-\s]\d{2}[-\s]\d{2}",
        r"\d{4}[-\s]\d{2}",
        r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    )
)


def mmlongbench_doc(prediction: str, item: Item) -> float:
    """Scores a short answer as `eval_score` of MMLongBench-Doc's eval/eval_score.py does, by the item's answer_format.

    - "Int": whole numbers are equal, after a decimal is cut. - "Float": equal after rounding, within 1 %, or apart by a
    factor of 100 (a percentage). - "Str" and "None": ANLS that exceeds .5, after parentheses, quotes, "$" and "%" are
    cut; numbers, dates, addresses and names of files only whole. - "List": as many entries; sorted, the worst one's
    ANLS, or all equal where the first answer is a number or counts only whole.

    Left out: the published evaluation first has GPT-4o extract the short answer from a long one, and "Not answerable"
    or "Fail to answer" from refusals. Predictions here are taken as that short answer, so ask for one. Lists are read
    as literals, never evaluated.
    """
    right, said = item.answers[0], prediction.strip()
    if item.answer_format == "Int":
        try:
            return float(int(right) == int(float(said)))
        except (ValueError, OverflowError):
            return 0.0
    if item.answer_format == "Float":
        try:
            return float(_close(float(_clean(right)), float(_clean(said))))
        except ValueError:
            return 0.0
    if item.answer_format == "List":
        return _score_list(_listed(right), _listed(said))
    return _score_text(_clean(right), _clean(said))


def _score_text(right: str, said: str) -> float:
    if _only_whole(right):
        return float(right == said)
    score = similarity(right, said) if right or said else 1.0
    return score if score > 0.5 else 0.0


def _score_list(right: list[Any], said: list[Any]) -> float:
    if len(right) != len(said):
        return 0.0
    right, said = sorted(map(_clean, right)), sorted(map(_clean, said))
    if not right:
        return 1.0
    if _is_number(right[0]) or _only_whole(right[0]):
        return float(right == said)
    scores = (similarity(one, other) for one, other in zip(right, said, strict=True))
    worst = min(scores)
    return worst if worst > 0.5 else 0.0


def _listed(text: str) -> list[Any]:
    if not text.startswith("["):
        return [text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [text]
    return value if isinstance(value, list) else [value]


def _clean(value: Any) -> str:
    # The published function also strips "miles" and "million", but drops what that returns.
    text = re.sub(r"\s*\([^)]*\)", "", str(value).lower().strip()).strip()
    text = re.sub(r"^['\"]|['\"]$", "", text).strip()
    return text.lstrip("$").strip().rstrip("%").strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _only_whole(text: str) -> bool:
    """Tells whether an answer counts only as a whole: an address, a code file, a page, a number, a time, a date."""
    if "https://" in text or text.endswith((".py", "ipynb")) or text.startswith("page"):
        return True
    return "a.m." in text or "p.m." in text or any(pattern.fullmatch(text) for pattern in _EXACT)


def _decimals(number: float) -> int:
    text = str(number)
    return len(text.split(".")[-1]) if "." in text else 3


def _close(right: float, said: float) -> bool:
    for value in (right / 100, right, right * 100):
        digits = max(min(_decimals(said), _decimals(value)), 2)
        if math.isclose(value, said, rel_tol=0.01) or round(said, digits) == round(value, digits):
            return True
    return False
