"""What stands in windows: the task's sheets and pages, or chunks of texts, and what is asked behind them."""

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV
from models import ModelBackbone

from ..harness.datasets import Questions
from ..task import questions as task_questions
from ..task.contexts import Contexts
from ..task.layout import Prefix
from ..task.reading import Answers, image_tokens, read
from ..texts.splices import TextAnswers
from .lines import Line, Piece, make_piece, places


class Tail(Protocol):
    """What is asked behind a line."""

    @property
    def questions(self) -> Questions: ...

    def ask(self, line: Line, parts: list[KV]) -> Any:
        """Asks everything behind a line whose pieces have the engine-frame KV `parts`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class TaskTail:
    """The task's packed questions. kinds: their numbers, in place of the questions' own."""

    prefix: Prefix
    packed: task_questions.Questions
    kinds: np.ndarray | None = None

    @property
    def questions(self) -> Questions:
        """Which of them count; the right answer is 1."""
        expected = self.packed.answer >= 0
        valid = np.stack([expected[:, columns].any(axis=1) for columns in self.packed.columns()], axis=1)
        kinds = self.packed.kind if self.kinds is None else self.kinds
        return Questions(np.broadcast_to(kinds, valid.shape), valid, np.ones(valid.shape, int))

    def ask(self, line: Line, parts: list[KV]) -> Answers:
        """Asks everything behind a line."""
        behind = np.full(len(self.packed.ids), line.end)
        positions = self.prefix.positions_behind(behind, self.packed.step)
        return read(line.backbone, self.packed, positions, dict(kvp.joined(*parts)))


@dataclasses.dataclass(frozen=True, eq=False)
class TextTail:
    """The next tokens of a text [B,N], each predicted from those before it."""

    ids: np.ndarray
    following: np.ndarray

    @property
    def questions(self) -> Questions:
        """Every token counts."""
        shape = self.ids.shape
        return Questions(np.zeros(shape, int), np.ones(shape, bool), self.following)

    def ask(self, line: Line, parts: list[KV]) -> TextAnswers:
        """Reads the text behind a line."""
        tokens = line.backbone.embed(self.ids, places(line.backbone, self.ids.shape, line.end))
        logits = line.backbone.prefill(tokens, kvp.joined(*parts), logits="all").logits
        return TextAnswers(jax.nn.log_softmax(logits))


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPieces:
    """The images of a batch of the task's contexts, each prefilled alone.

    Attributes:
      clusters: number of each context [B].
    """

    backbone: ModelBackbone
    contexts: Contexts
    clusters: np.ndarray
    prefix: Prefix
    sheets: tuple[Piece, ...]
    page: Piece

    @classmethod
    def of(cls, backbone: ModelBackbone, contexts: Contexts, clusters: np.ndarray) -> "TaskPieces":
        """Draws, reads and prefills every image of a batch of contexts alone."""
        prefix, _, images = image_tokens(backbone, contexts)
        mark = "-".join(map(str, contexts.seed[:2].tolist()))
        *sheets, page = (make_piece(backbone, tokens, f"{place}:{mark}") for place, tokens in enumerate(images))
        return cls(backbone, contexts, clusters, prefix, tuple(sheets), page)

    def line(self, *pieces: Piece) -> Line:
        """Places pieces behind one another."""
        return Line(self.backbone, pieces)
