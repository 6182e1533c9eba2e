"""What the trained model is asked in the engine: contexts of four images, in an order, and questions behind them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evals.harness import intervals
from evals.task.contexts import sample
from evals.task.drawing import images_of
from evals.task.questions import KINDS, ask
from evals.task.vocabulary import IMAGE, VISION_END, VISION_START, vocabulary

SHEETS = 3
QUESTION = (vocabulary()["first"], vocabulary()["A1"])
"""What is asked where only chunks are to be formed."""
FRAME = (VISION_START, VISION_END)
"""Tokens that open and close an image."""


class Drawn:
    """Contexts, their images in order and their questions of two tokens each, drawn by a seed.

    The same seed gives the same contexts in any order of their sheets; right answers are those of that order.

    Attributes:
      images: by context. kind: index into KINDS [Q]. answer: [contexts, Q], the token that is right; -1: not asked.
    """

    def __init__(self, count: int, seed: int, counts: Mapping[str, int], order: Sequence[int] = tuple(range(SHEETS))):
        """Draws.

        Args:
          counts: questions of each kind, of a context. order: in which its sheets stand, in front of its page.
        """
        rng, places = np.random.default_rng(seed), [*order, SHEETS]
        drawn = sample(rng, count)
        images = images_of(drawn)
        self.images = [[images[(SHEETS + 1) * index + place] for place in places] for index in range(count)]
        parts = {name: getattr(drawn, name)[:, list(order)] for name in ("sheet_item", "sheet_value", "sheet_unit")}
        self.contexts = dataclasses.replace(drawn, **parts, face=drawn.face[:, places])
        questions = ask(self.contexts, rng, dict(counts))
        self.tokens = np.stack([questions.ids[:, columns] for columns in questions.columns()], axis=1)
        self.answer = np.stack([questions.answer[:, columns[-1]] for columns in questions.columns()], axis=1)
        self.kind = questions.kind

    @property
    def valid(self) -> np.ndarray:
        """Which questions count, [contexts, Q]."""
        return self.answer >= 0

    def asked(self, index: int) -> list[tuple[int, int]]:
        """The questions of a context, as tokens."""
        return [(int(first), int(second)) for first, second in self.tokens[index]]


def prompt_of(images: Sequence[np.ndarray], question: Sequence[int]) -> dict[str, Any]:
    """Images with the tokens around them, one placeholder each, and a question behind."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images]
    ids = [*([FRAME[0], IMAGE, FRAME[1]] * len(pictures)), *question]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}


def shares(
    drawn: Drawn, answers: Sequence[Sequence[Mapping[str, Any]]], kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Share of answers whose first token is right, of each kind and of all, with intervals over contexts."""
    right = np.array([[answer["tokens"][0] for answer in row] for row in answers]) == drawn.answer
    cluster = np.broadcast_to(np.arange(len(right))[:, None], right.shape)

    def share(chosen: np.ndarray) -> dict[str, float]:
        found = intervals.mean(right[chosen], cluster[chosen])
        return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}

    of_kind = {kind: share(drawn.valid & (drawn.kind == KINDS.index(kind))) for kind in kinds}
    return {**of_kind, "all": share(drawn.valid)}


def prefilled(answers: Sequence[Sequence[Mapping[str, Any]]]) -> np.ndarray:
    """Tokens that the engine computed before each answer, [contexts, questions]."""
    return np.array([[answer["prompt"] - answer["cached"] for answer in row] for row in answers])
