"""What is asked behind a window: short questions and continuations, packed into one forward, none seeing another.

Axis letters: B windows, n tokens that are asked, P of them scored, A answers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError

from ..small_task.prefix import within_own
from ..small_task.sequences import QuestionTokens

QUESTIONS = (
    "What is shown?",
    "What changed since the last one?",
    "What is in the first one?",
    "How many are there?",
    "Which one is the largest?",
    "What does the text say?",
    "Is the last one like the first?",
    "In one word, it is",
)
"""Asked behind a user's own images and texts; an answer is the next token behind each."""


class Asked(NamedTuple):
    """Packed questions.

    Attributes:
      tail: their tokens; positions count from the window's end.
      owner: int [P], the answer that each scored token belongs to.
      valid: bool [B, A], answers that count.
      what: in words.
    """

    tail: QuestionTokens
    owner: np.ndarray
    valid: np.ndarray
    what: str

    def behind(self, end: int) -> QuestionTokens:
        """The tokens behind a window whose positions end there."""
        return self.tail._replace(positions=self.tail.positions + np.int32(end))


def packed(parts: Sequence[tuple[Int[np.ndarray, "B _"], Sequence[int]]], axes: int | None, what: str) -> Asked:
    """Packs token ids behind one another, each part at the positions right behind the window.

    Args:
      parts: ids [B, n'] with the indices of their scored tokens, each part one answer.
      axes: of the rope, None without.
    """
    sizes = [ids.shape[1] for ids, _ in parts]
    own = np.repeat(np.arange(len(parts)), sizes)
    among = within_own(own)
    first = np.cumsum([0, *sizes[:-1]])
    asked = [start + place for start, (_, scored) in zip(first, parts, strict=True) for place in scored]
    owner = [number for number, (_, scored) in enumerate(parts) for _ in scored]

    ids = np.concatenate([ids for ids, _ in parts], axis=1).astype(np.int32)
    step = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    positions = np.repeat(step[None], len(ids), axis=0)
    if axes is not None:
        positions = np.repeat(positions[..., None], axes, axis=2)
    tail = QuestionTokens(ids, positions, among, np.asarray(asked, np.int32))
    return Asked(tail, np.asarray(owner), np.ones((len(ids), len(parts)), bool), what)


def questions_of(backbone: Any, questions: Sequence[str], rows: int) -> list[tuple[np.ndarray, list[int]]]:
    """Tokens of questions that the backbone's tokenizer knows words of, each scored behind its last token.

    Raises:
      InputError: it knows none.
    """
    parts = []
    for question in questions:
        try:
            ids = np.asarray(backbone.prepare([kvp.Text(question)])["input_ids"])
        except InputError:  # no word of it is in the vocabulary
            continue
        if ids.shape[1]:
            parts.append((np.repeat(ids, rows, axis=0), [ids.shape[1] - 1]))
    if not parts:
        raise InputError(
            f"certify: the tokenizer knows no word of {questions[0]!r:.60} and {len(questions) - 1} other questions; "
            "expected --questions=FILE with some in its vocabulary, a line each"
        )
    return parts


def scored(values: np.ndarray, asked: Asked) -> np.ndarray:
    """Means over the scored tokens of each answer: [B, P] to [B, A]."""
    answers = asked.valid.shape[1]
    sums = np.stack([np.bincount(asked.owner, row, answers) for row in np.asarray(values, np.float64)])
    return sums / np.bincount(asked.owner, minlength=answers)
