"""Segmentation of prompts: spans between anchors, which tile a prompt, and overlapping windows inside long spans.

Segment reuse (proposal, §3.1). Windows of a fixed stride that are counted from the start of the prompt do not meet
again once a repeat has moved by something else than the stride. Here they are counted from the anchor in front of them.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..errors import ConfigError, InputError
from ..utils.kinds import is_whole

REACT_ANCHORS = (
    r"(?m)^(?=(?:Thought|Action|Action Input|Observation|Question|Final Answer|System|User|Assistant)\s*:)",
    r"(?m)^(?=\{\"name\"|#{1,4} |<tool|<\|im_start\|>|Tool:|Example\b)",
)
"""Where spans begin: tags of ReAct transcripts and chats, tool schemas, headings and examples, at a line's start."""


@dataclasses.dataclass(frozen=True)
class Segmentation:
    """How prompts are cut.

    Attributes:
      anchors: regular expressions over text; a span begins at the start of every match.
      token_anchors: sequences of token ids that begin a span, for prompts without text too.
      longest: tokens of a span at most; longer ones are cut.
      shortest: tokens that a segment has at least to be indexed and stored.
      window, stride: tokens of a window and between the starts of two (64 … 128 and 32 … 64 in the proposal).

    Raises:
      ConfigError: an expression that cannot be compiled, an empty token anchor, or sizes that do not fit together.
    """

    anchors: tuple[str, ...] = REACT_ANCHORS
    token_anchors: tuple[tuple[int, ...], ...] = ()
    longest: int = 256
    shortest: int = 8
    window: int = 64
    stride: int = 32

    def __post_init__(self) -> None:
        for pattern in self.anchors:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"anchors: got {pattern!r} ({error}); expected a regular expression") from error
        if not all(self.token_anchors):
            raise ConfigError("token_anchors: got an empty sequence; expected token ids")

        for name in ("longest", "shortest", "window", "stride"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise ConfigError(f"segmentation {name}: got {value!r:.80}; expected a whole number from 1")
        if not self.shortest <= self.window <= self.longest or self.stride > self.window:
            raise ConfigError(
                f"segmentation: got shortest {self.shortest}, window {self.window}, longest {self.longest} and stride "
                f"{self.stride}; expected shortest ≤ window ≤ longest, and stride ≤ window"
            )


class SegmentPrompt(NamedTuple):
    """Prompt as token ids, with the text that each token begins in, or without text.

    Attributes:
      ids: int [T].
      text: the prompt's text; None: anchors and shingles are of token ids alone.
      starts: int [T], the character where each token starts; None without text.
    """

    ids: Int[np.ndarray, " T"]
    text: str | None = None
    starts: Int[np.ndarray, " T"] | None = None

    @classmethod
    def of_text(cls, text: str, encode: Callable[..., Any]) -> "SegmentPrompt":
        """Tokenises a text.

        Args:
          encode: `encode` of a `tokenizers.Tokenizer` (`backbone.tokenizer.encode`): returns `ids` and `offsets`.

        Raises:
          InputError: the text has no tokens.
        """
        encoding = encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        # Tokens inside one character share its start, and offsets of special tokens can run back.
        return cls(as_ids(encoding.ids), text, np.maximum.accumulate(starts))

    def characters(self, start: int, stop: int) -> str:
        """Returns the text of tokens start … stop-1; "" without text."""
        if self.text is None or self.starts is None:
            return ""
        end = len(self.text) if stop >= len(self.ids) else int(self.starts[stop])
        return self.text[int(self.starts[start]) : end]


def as_ids(ids: Any) -> Int[np.ndarray, " T"]:
    """Converts token ids to int32 [T].

    Raises:
      InputError: no ids, or anything else than one axis of whole numbers.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(
            f"prompt: got ids of shape {array.shape} and dtype {array.dtype}; expected integers [T], T ≥ 1"
        )
    return array.astype(np.int32)


class TokenRange(NamedTuple):
    """Tokens start … stop-1 of a prompt."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def spans(prompt: SegmentPrompt, how: Segmentation) -> list[TokenRange]:
    """Cuts a prompt at its anchors into spans that tile it, none longer than `how.longest`."""
    T, cuts = len(prompt.ids), {0}
    if prompt.text is not None and prompt.starts is not None:
        for pattern in how.anchors:
            for match in re.finditer(pattern, prompt.text):
                # The first token that starts at or after the anchor: a token never belongs to two spans.
                cuts.add(int(np.searchsorted(prompt.starts, match.start())))
    for pattern in how.token_anchors:
        cuts.update(occurrences(prompt.ids, pattern).tolist())

    edges = sorted(cut for cut in cuts if cut < T)
    found = []
    for start, stop in itertools.pairwise([*edges, T]):
        found += [TokenRange(at, min(at + how.longest, stop)) for at in range(start, stop, how.longest)]
    return found


def windows(span: TokenRange, how: Segmentation) -> list[TokenRange]:
    """Lays overlapping windows inside a span that is longer than one, counted from its start; the last ends with it."""
    if span.length <= how.window:
        return []
    starts = [*range(span.start, span.stop - how.window, how.stride), span.stop - how.window]
    return [TokenRange(start, start + how.window) for start in starts]


def segments(span: TokenRange, how: Segmentation) -> list[TokenRange]:
    """Lists what is indexed and looked up of a span: itself and its windows; nothing of one that is too short."""
    return [] if span.length < how.shortest else [span, *windows(span, how)]


def occurrences(ids: Int[np.ndarray, " T"], pattern: tuple[int, ...]) -> Int[np.ndarray, " N"]:
    """Finds where a sequence of one or more token ids begins in a prompt, increasing; occurrences may overlap."""
    count = max(len(ids) - len(pattern) + 1, 0)
    starts = np.flatnonzero(ids[:count] == pattern[0])
    # Most starts fail at the next token, so this takes one pass over the prompt for a pattern of any length.
    for offset, token in enumerate(pattern[1:], 1):
        starts = starts[ids[starts + offset] == token]
    return starts
