"""Packed questions, read from a cache of what stands in front of them, and what is answered.

Axis letters: B contexts, Q questions, N tokens of a question, M tokens of all of them, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from models import ModelBackbone

from ..arms.reused_page import KV
from ..small_task.prefix import within_own
from ..small_task.scenes import divergence, log_probabilities
from .task import SheetsQuestions


class QuestionItems(NamedTuple):
    """Packed questions as items: kind, whether it is asked, and the "answer" 1 (right), [B, Q] each."""

    kind: np.ndarray
    valid: np.ndarray
    answer: np.ndarray


class PackedAnswers:
    """What an arm answers to packed questions, item by item.

    A question of several tokens is right where all of them are, as greedy decoding would have it; its KL is their sum.
    """

    def __init__(self, log_probabilities: Float[np.ndarray, "B M V"], questions: SheetsQuestions):
        self.log_probabilities, self.questions = log_probabilities, questions

    @property
    def predicted(self) -> Int[np.ndarray, "B Q"]:
        """1 where a question is answered right, else 0."""
        expected = self.questions.answer
        right = (self.log_probabilities.argmax(axis=-1) == expected) | (expected < 0)
        return np.stack([right[:, own].all(axis=1) for own in self._spans()], axis=1).astype(int)

    def divergence_from(self, reference: "PackedAnswers") -> Float[np.ndarray, "B Q"]:
        """Computes KL(reference ‖ this) per question, in nats."""
        by_token = divergence(reference.log_probabilities, self.log_probabilities)
        by_token = np.where(self.questions.answer >= 0, by_token, 0.0)
        return np.stack([by_token[:, own].sum(axis=1) for own in self._spans()], axis=1)

    def _spans(self) -> list[Bool[np.ndarray, " M"]]:
        return [self.questions.own == number for number in range(len(self.questions.kind))]


def items_of(questions: SheetsQuestions) -> QuestionItems:
    """Returns packed questions as items."""
    asked = questions.answer >= 0
    valid = np.stack([asked[:, questions.own == number].any(axis=1) for number in range(len(questions.kind))], axis=1)
    return QuestionItems(np.broadcast_to(questions.kind, valid.shape), valid, np.ones(valid.shape, int))


def groups_of(questions: SheetsQuestions) -> list[Int[np.ndarray, "Q N"]]:
    """Groups questions by their length: of each group the columns of its questions' tokens, the shortest first."""
    by_length: dict[int, list[np.ndarray]] = {}
    for number in range(questions.own.max() + 1):
        columns = np.flatnonzero(questions.own == number)
        by_length.setdefault(len(columns), []).append(columns)
    return [np.stack(by_length[length]) for length in sorted(by_length)]


def joined_answers(
    questions: SheetsQuestions, groups: Sequence[np.ndarray], parts: Sequence[np.ndarray]
) -> PackedAnswers:
    """Puts what was answered to each group [B, M, V] into the order of the questions' tokens."""
    answers = np.zeros((*questions.ids.shape, parts[0].shape[-1]), np.float32)
    for group, part in zip(groups, parts, strict=True):
        answers[:, group.reshape(-1)] = part
    return PackedAnswers(answers, questions)


def read_packed(
    backbone: ModelBackbone,
    questions: SheetsQuestions,
    positions: Int[np.ndarray, "B M"] | Int[np.ndarray, "B M 3"],
    cache: KV,
) -> PackedAnswers:
    """Asks all questions over an engine-frame cache; each sees the cache and its own tokens.

    Args:
      positions: of the questions' tokens.
    """
    if backbone.layout.parts:
        groups = groups_of(questions)
        return joined_answers(
            questions, groups, [_read_apart(backbone, questions, positions, group, cache) for group in groups]
        )

    tokens = backbone.embed(questions.ids, positions)
    own = np.broadcast_to(within_own(questions.own), (len(questions.ids), *[questions.ids.shape[1]] * 2))
    held = next(iter(cache.values())).shape[2]
    prefix = np.ones((*questions.ids.shape, held), bool)
    mask = np.concatenate([prefix, own], axis=2)[:, None]
    return PackedAnswers(log_probabilities(backbone.prefill(tokens, cache, mask, logits="all").logits), questions)


def _read_apart(
    backbone: ModelBackbone, questions: SheetsQuestions, positions: np.ndarray, group: np.ndarray, cache: KV
) -> Float[np.ndarray, "B M V"]:
    """Asks questions of one length, each as a row of its own: a linear layer knows of no mask."""
    count, length = group.shape
    rows = len(questions.ids) * count
    wide = {name: jnp.repeat(value, count, axis=1) for name, value in cache.items()}
    ids, places = (value[:, group].reshape(rows, length, *value.shape[2:]) for value in (questions.ids, positions))
    logits = backbone.prefill(backbone.embed(ids, places), wide, logits="all").logits
    return log_probabilities(logits).reshape(len(questions.ids), count * length, -1)
