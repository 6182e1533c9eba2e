"""Questions behind a window, packed into one forward in which none sees another.

Axis letters: B windows, n tokens of all questions, P scored tokens, A answers.
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


class PackedQuestions(NamedTuple):
    """Packed questions.

    Attributes:
      tail: their tokens; positions count from the window's end.
      owner: int [P], the answer that each scored token belongs to.
      valid: bool [B, A], the answers that count.
      description: in words.
    """

    tail: QuestionTokens
    owner: np.ndarray
    valid: np.ndarray
    description: str

    def behind(self, end: int) -> QuestionTokens:
        """Returns the tokens behind a window whose positions end at `end`."""
        return self.tail._replace(positions=self.tail.positions + np.int32(end))

    def of_valid(self, rows: np.ndarray) -> np.ndarray:
        """Returns a number per window, [B], as one per valid answer."""
        return np.repeat(rows[:, None], self.valid.shape[1], axis=1)[self.valid]

    def scored(self, values: np.ndarray) -> np.ndarray:
        """Returns the mean over the scored tokens of each answer: [B, P] to [B, A]."""
        answers = self.valid.shape[1]
        sums = np.stack([np.bincount(self.owner, row, answers) for row in np.asarray(values, np.float64)])
        return sums / np.bincount(self.owner, minlength=answers)


def packed(parts: Sequence[tuple[Int[np.ndarray, "B _"], Any]], axes: int | None, description: str) -> PackedQuestions:
    """Packs token ids one behind the other, each part at the positions right behind the window.

    Args:
      parts: ids [B, n'] with the indices of their scored tokens, [k] or [B, k]; each part is one answer.
      axes: of the rope; None without.
    """
    rows, sizes = len(parts[0][0]), [ids.shape[1] for ids, _ in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    asked, owner = [], []
    for answer, (start, (_, scored)) in enumerate(zip(starts, parts, strict=True)):
        places = start + np.asarray(scored, np.int32)
        asked.append(np.broadcast_to(places, (rows, places.shape[-1])))
        owner += [answer] * places.shape[-1]

    ids = np.concatenate([ids for ids, _ in parts], axis=1).astype(np.int32)
    step = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    positions = np.repeat(step[None], len(ids), axis=0)
    if axes is not None:
        positions = np.repeat(positions[..., None], axes, axis=2)

    among = within_own(np.repeat(np.arange(len(parts)), sizes))
    tail = QuestionTokens(ids, positions, among, np.concatenate(asked, axis=1).astype(np.int32))
    return PackedQuestions(tail, np.asarray(owner), np.ones((len(ids), len(parts)), bool), description)


def tokens_of(backbone: Any, questions: Sequence[str]) -> list[Int[np.ndarray, " _"]]:
    """Returns the tokens of the questions that have words in the backbone's vocabulary."""
    found = []
    for question in questions:
        try:
            ids = np.asarray(backbone.prepare([kvp.Text(question)])["input_ids"])[0]
        except InputError:  # none of its words is in the vocabulary
            continue
        if len(ids):
            found.append(ids)
    return found


def questions_of(backbone: Any, questions: Sequence[str], rows: int) -> list[tuple[np.ndarray, list[int]]]:
    """Returns the tokens of questions that have words in the backbone's vocabulary, each scored at its last token.

    Raises:
      InputError: no question has any.
    """
    found = tokens_of(backbone, questions)
    if not found:
        raise InputError(
            f"certify: got {len(questions)} questions, such as {questions[0]!r:.60}, without a word that the tokenizer "
            "knows; expected --questions=FILE with some in its vocabulary, a line each"
        )
    return [(np.repeat(ids[None], rows, axis=0), [len(ids) - 1]) for ids in found]


def packed_by_row(
    rows: Sequence[Sequence[Int[np.ndarray, " _"]]], number: int, longest: int, axes: int | None
) -> PackedQuestions:
    """Packs questions that differ by window, each scored at its last token.

    Args:
      rows: tokens of the questions behind each window: at least one, at most `number`.
      number, longest: questions behind a window, and tokens of one, at most in all batches, so that one program reads
        them all. What is filled up repeats a question, and does not count.
      axes: of the rope; None without.
    """
    parts, valid = list[Any](), np.zeros((len(rows), number), bool)
    for place in range(number):
        ids, last = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), 1), np.int32)
        for row, questions in enumerate(rows):
            own = questions[min(place, len(questions) - 1)]
            # Tokens behind the last one are not seen by it.
            ids[row, : len(own)], last[row] = own, len(own) - 1
            valid[row, place] = place < len(questions)
        parts.append((ids, last))
    whole = packed(parts, axes, f"what was asked behind each window, at most {number} questions, a token each")
    return whole._replace(valid=valid)
