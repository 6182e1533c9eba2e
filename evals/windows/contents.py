"""What stands in windows: the task's sheets and pages, or chunks of texts, and what is asked behind them."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.models import ModelBackbone

from ..harness.datasets import QuestionTable
from ..harness.lines import AnyKV, BatchedPiece, Line, make_piece, positions_of
from ..task.contexts import Contexts
from ..task.layout import Prefix
from ..task.questions import Questions
from ..task.reading import TaskAnswers, image_tokens, question_table, read
from ..texts.splices import TextAnswers


@dataclasses.dataclass(frozen=True, eq=False)
class TaskTail:
    """The task's packed questions behind a line. kinds: their numbers, in place of the questions' own."""

    prefix: Prefix
    packed: Questions
    kinds: np.ndarray | None = None

    @property
    def questions(self) -> QuestionTable:
        """Which of them count; the right answer is 1."""
        return question_table(self.packed, self.kinds)

    def ask(self, line: Line, parts: Sequence[AnyKV]) -> TaskAnswers:
        """Asks everything behind a line whose pieces have the engine-frame KV `parts`."""
        behind = np.full(len(self.packed.ids), line.end)
        positions = self.prefix.positions_behind(behind, self.packed.step)
        return read(line.backbone, self.packed, positions, dict(kvp.joined(*parts)))


@dataclasses.dataclass(frozen=True, eq=False)
class TextTail:
    """The next tokens of a text [B,N] behind a line, each predicted from those before it."""

    ids: np.ndarray
    following: np.ndarray

    @property
    def questions(self) -> QuestionTable:
        """Every token counts."""
        shape = self.ids.shape
        return QuestionTable(np.zeros(shape, int), np.ones(shape, bool), self.following)

    def ask(self, line: Line, parts: Sequence[AnyKV]) -> TextAnswers:
        """Reads the text behind a line whose pieces have the engine-frame KV `parts`."""
        tokens = line.backbone.embed(self.ids, positions_of(line.backbone, self.ids.shape, start=line.end))
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
    sheets: tuple[BatchedPiece, ...]
    page: BatchedPiece

    @classmethod
    def of(cls, backbone: ModelBackbone, contexts: Contexts, clusters: np.ndarray) -> "TaskPieces":
        """Draws, reads and prefills every image of a batch of contexts alone."""
        prefix, _, images = image_tokens(backbone, contexts)
        mark = "-".join(map(str, contexts.seed[:2].tolist()))
        *sheets, page = (make_piece(backbone, tokens, f"{place}:{mark}") for place, tokens in enumerate(images))
        return cls(backbone, contexts, clusters, prefix, tuple(sheets), page)

    def line(self, *pieces: BatchedPiece) -> Line:
        """Places pieces behind one another."""
        return Line(self.backbone, pieces)
