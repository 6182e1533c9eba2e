"""Windows that close the gap of what has left, against windows that keep it: how far their answers are apart.

Where gaps are kept, what stays is the model under a mask where no token sees what had left by then, in one forward over
the positions at which everything was first seen. Where they are closed, what stays moves up, and what comes is computed
behind it there: another promise, which no single forward is.
"""

from collections.abc import Iterator

import numpy as np

from ..probes.window.image_sequence import AgentLoop, ImageSequence, read_behind
from ..small_task.scenes import Answers
from .contexts import ToleranceBatch

CLOSED = {"a gap closed": "the first piece has left, and the others moved up", "half closed": "the first half has left"}
"""Kinds of gaps, and what was done."""


class GappedLoop(AgentLoop):
    """A loop whose window keeps a gap behind the lead: a number of positions that are free."""

    gap = 0

    @property
    def line(self) -> ImageSequence:
        """What is held, in its order, all but the lead further behind."""
        line = super().line
        line.starts = line.starts + np.int32(self.gap) * (np.arange(len(line)) > 0)
        line.end += self.gap
        return line


def answers_of_gaps(batch: ToleranceBatch) -> Iterator[tuple[str, Answers, Answers]]:
    """Answers where pieces left before the chunk came: (kind, where the gap is kept, where it is closed)."""
    count = len(batch.pieces)
    whole = ImageSequence(batch.backbone, [batch.lead, *batch.pieces, batch.chunk])
    loop = AgentLoop(batch.backbone, whole.size, batch.lead)
    for piece in batch.pieces:
        loop.append(piece)

    for kind, leaving in zip(CLOSED, (1, (count + 1) // 2), strict=True):
        # With two pieces half of them is one.
        if kind == "half closed" and leaving == 1:
            continue
        answers = []
        for gap in (sum(piece.chunk.span for piece in batch.pieces[:leaving]), 0):
            window = GappedLoop(batch.backbone, whole.size)
            window.gap, window.held = gap, [loop.held[0], *loop.held[1 + leaving :]]
            window.append(batch.chunk)
            line = window.line
            answers.append(read_behind(line, line.engine(window.parts), batch.questions.behind(line.end)))
        yield kind, *answers
