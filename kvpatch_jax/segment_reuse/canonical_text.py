"""Canonical text: prompts with case, whitespace, punctuation and volatile spans normalised, for retrieval alone.

Segment reuse (proposal, §3.1) compares prompts in this form, so that a new timestamp or request number does not hide a
repeat. What is executed are always the prompt's own token ids.
"""

import dataclasses
import re

from ..errors import ConfigError

VOLATILE = (
    (r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?", "<time>"),
    (r"\b\d{1,2}:\d{2}(?::\d{2})?\b", "<time>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"\b(?=[a-z]*\d)[0-9a-f]{8,}\b", "<id>"),
    (r"\d{4,}", "<id>"),
)
"""Patterns of volatile spans and what they become: times, then identifiers in hexadecimal or of four digits or more.

Shorter numbers are content ("2 results"), and stay.
"""
CASE_MATTERS = r"`[^`\n]*`|\"[^\"\n]*\""
"""Spans that keep their case: code between backquotes, and strings (keys and values of JSON)."""
_PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})
_UNITS = re.compile(r"<\w+>|\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class CanonicalRules:
    """Rules that make text canonical.

    Attributes:
      volatile: (regular expression, replacement) pairs, applied in this order, without regard to case.
      case_matters: regular expression of spans that are not lowercased; "" lowercases all text.

    Raises:
      ConfigError: an expression that cannot be compiled.
    """

    volatile: tuple[tuple[str, str], ...] = VOLATILE
    case_matters: str = CASE_MATTERS

    def __post_init__(self) -> None:
        for pattern in (*(pattern for pattern, _ in self.volatile), self.case_matters):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"canonical rules: got pattern {pattern!r} ({error}); expected a regular expression"
                ) from error


def canonicalise(text: str, rules: CanonicalRules | None = None) -> str:
    """Normalises punctuation, volatile spans, case where that is safe, and whitespace, in this order."""
    rules = rules or CanonicalRules()
    text = text.translate(_PUNCTUATION)
    for pattern, replacement in rules.volatile:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)

    # Spans between those that keep their case are lowercased.
    parts, end = [], 0
    for kept in re.finditer(rules.case_matters, text) if rules.case_matters else ():
        parts += [text[end : kept.start()].lower(), kept.group()]
        end = kept.end()
    parts.append(text[end:].lower())
    return " ".join("".join(parts).split())


def canonical_units(text: str, rules: CanonicalRules | None = None) -> list[str]:
    """Splits canonical text into words, marks and masks: the units that shingles are made of.

    The proposal shingles tokens. Masked text has no token ids of its own, and the tokens of equal words differ where
    tokenisation drifts, so that shingles are of these units; a prompt without text is shingled by its ids.
    """
    return _UNITS.findall(canonicalise(text, rules))
