"""What the trained model is asked in the engine: contexts of four images, in an order, and questions behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evals import small_task
from evals.harness import intervals
from evals.small_task import KINDS, LEGENDS, VOCABULARY

QUESTION = (VOCABULARY.ask_glyph, VOCABULARY.cell)
"""What is asked where only chunks are to be formed."""
FRAME = (VOCABULARY.vision_start, VOCABULARY.vision_end)
"""Tokens that open and close an image."""


class Drawn:
    """Contexts, their images in order and their questions, drawn by a seed.

    The same seed gives the same contexts in any order of their legends; right answers are those of that order.
    """

    def __init__(self, count: int, seed: int, counts: Mapping[str, int], order: Sequence[int] = tuple(range(LEGENDS))):
        """Draws.

        Args:
          counts: questions of each kind, of a context. order: in which its legends stand, in front of its page.
        """
        rng = np.random.default_rng(seed)
        self.contexts = small_task.sample_contexts(rng, count).reordered(np.array(order))
        legends, pages = small_task.render(self.contexts)
        self.images = [[*legends[index, list(order)], pages[index]] for index in range(count)]
        self.questions = small_task.ask(self.contexts, rng, dict(counts))

    def asked(self, index: int) -> list[tuple[int, int]]:
        """The questions of a context, as tokens."""
        return list(zip(self.questions.ask[index].tolist(), self.questions.argument[index].tolist(), strict=True))


def prompt_of(images: Sequence[np.ndarray], question: Sequence[int]) -> dict[str, Any]:
    """Images with the tokens around them, one placeholder each, and a question behind."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images]
    ids = [*([FRAME[0], VOCABULARY.image, FRAME[1]] * len(pictures)), *question]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}


def shares(
    asked: small_task.Questions, answers: Sequence[Sequence[Mapping[str, Any]]], kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Share of answers whose first token is right, of each kind and of all, with intervals over contexts."""
    right = np.array([[answer["tokens"][0] for answer in row] for row in answers]) == asked.answer
    cluster = np.broadcast_to(np.arange(len(right))[:, None], right.shape)

    def share(chosen: np.ndarray) -> dict[str, float]:
        found = intervals.mean(right[chosen], cluster[chosen])
        return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}

    of_kind = {kind: share(asked.valid & (asked.kind == KINDS.index(kind))) for kind in kinds}
    return {**of_kind, "all": share(asked.valid)}


def prefilled(answers: Sequence[Sequence[Mapping[str, Any]]]) -> np.ndarray:
    """Tokens that the engine computed before each answer, [contexts, questions]."""
    return np.array([[answer["prompt"] - answer["cached"] for answer in row] for row in answers])
