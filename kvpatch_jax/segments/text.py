"""Prompts as spans between anchors, windows inside long spans, and canonical text to compare them by.

Segment reuse (proposal, §3.1). Windows are counted from the start of their span, not of the prompt: a repeat that moved
by anything else than the stride would have no window in common otherwise.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..errors import InputError

ANCHORS = re.compile(
    r"^(?=(?:Thought|Action|Action Input|Observation|Question|Final Answer|System|User|Assistant)\s*:"
    r"|\{\"name\"|#{1,4} |<tool|<\|im_start\|>|Tool:|Example\b)",
    re.MULTILINE,
)
"""Where spans begin: tags of ReAct transcripts and chats, tool schemas, headings and examples, at a line's start."""
LONGEST, SHORTEST = 256, 8
"""Tokens of a span: longer ones are cut, shorter ones are not stored."""
WINDOW, STRIDE = 64, 32
"""Tokens of a window, and between the starts of two (64 … 128 and 32 … 64 in the proposal)."""

VOLATILE = (
    (r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?", "<time>"),
    (r"\b\d{1,2}:\d{2}(?::\d{2})?\b", "<time>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"\b(?=[a-z]*\d)[0-9a-f]{8,}\b", "<id>"),
    (r"\d{4,}", "<id>"),
)
"""Patterns of volatile text and what they become, in order. Numbers below four digits are content ("2 results")."""
_CASE_MATTERS = re.compile(r"(`[^`\n]*`|\"[^\"\n]*\")")
_PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})
_UNITS = re.compile(r"<\w+>|\w+|[^\w\s]")


class SegmentPrompt(NamedTuple):
    """A text prompt: token ids [T], its text, and the character where each token starts [T]."""

    ids: Int[np.ndarray, " T"]
    text: str
    starts: Int[np.ndarray, " T"]

    @classmethod
    def of_text(cls, text: str, encode: Callable[..., Any]) -> "SegmentPrompt":
        """Tokenises a text.

        Args:
          encode: `encode` of a `tokenizers.Tokenizer` (`backbone.tokenizer.encode`): returns `ids` and `offsets`.

        Raises:
          InputError: the text has no tokens.
        """
        encoding = encode(text, add_special_tokens=False)
        if not encoding.ids:
            raise InputError(f"prompt: got {text!r:.80}, which has no tokens; expected at least one")
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        # Tokens inside one character share its start, and offsets of special tokens can run back.
        return cls(np.array(encoding.ids, np.int32), text, np.maximum.accumulate(starts))

    def units(self, tokens: range) -> list[str]:
        """Splits the canonical text of some tokens into words, marks and masks, of which shingles are made.

        The proposal shingles tokens, but masked text has no ids, and equal words can be tokenised differently.
        """
        end = len(self.text) if tokens.stop >= len(self.ids) else int(self.starts[tokens.stop])
        return _UNITS.findall(canonicalise(self.text[int(self.starts[tokens.start]) : end]))


def canonicalise(text: str) -> str:
    """Normalises punctuation, volatile text, case outside of code and strings, and whitespace, for retrieval alone."""
    text = text.translate(_PUNCTUATION)
    for pattern, replacement in VOLATILE:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    # Every second part is code between backquotes or a string in quotes, such as a key of JSON.
    parts = [part if place % 2 else part.lower() for place, part in enumerate(_CASE_MATTERS.split(text))]
    return " ".join("".join(parts).split())


def spans(prompt: SegmentPrompt) -> list[range]:
    """Cuts a prompt at its anchors into ranges of tokens that tile it, none longer than `LONGEST`."""
    # A span begins at the first token that starts at or behind its anchor, so no token belongs to two spans.
    cuts = {int(np.searchsorted(prompt.starts, match.start())) for match in ANCHORS.finditer(prompt.text)}
    edges = sorted(cut for cut in {0} | cuts if cut < len(prompt.ids))
    pieces = []
    for start, stop in itertools.pairwise([*edges, len(prompt.ids)]):
        pieces += [range(at, min(at + LONGEST, stop)) for at in range(start, stop, LONGEST)]
    return pieces


def segments(span: range) -> list[range]:
    """Lists a span and the windows inside it, the last of which ends with it; nothing of one below `SHORTEST`."""
    if len(span) < SHORTEST:
        return []
    last = span.stop - WINDOW
    starts = [*range(span.start, last, STRIDE), last] if last > span.start else []
    return [span, *(range(start, start + WINDOW) for start in starts)]
