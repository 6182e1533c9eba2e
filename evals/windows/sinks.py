"""How many tokens an attention sink needs: of what a window began with only the first n tokens stay while it slides.

A window's first text or image leaves but for its first tokens, then pieces leave in order while others come; each came
once, behind what was there. Survivors are compared with a re-prefill of what is left, the first tokens among it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.models import ModelBackbone

from ..harness.datasets import Run
from ..harness.lines import BatchedPiece, GrowingWindow, Line, make_piece, text_piece
from ..harness.methods import REFERENCE
from ..harness.runner import loaded
from ..task.vocabulary import vocabulary
from .contents import TaskTail, TextTail
from .measured import Measured, WindowDataset
from .tolerance import CHUNK, ReusedChunk, task_chunk, text_chunk

KEPT = "survivors"
PINNED = {"text": (0, 1, 2, 4, 8, 16), "image": (0, 4, 16, 1024)}
"""Tokens that stay, by what the window begins with; more than it has: all of it."""
PROSE, IMAGES = 3, 4
"""Pieces at the end of a window, all of which came after the first tokens were alone: chunks of prose, or images."""


def measure_sink(
    backbone: ModelBackbone, pieces: Sequence[BatchedPiece], tail: TaskTail | TextTail, pinned: int
) -> dict[str, Any]:
    """Slides over pieces, of whose first only `pinned` tokens stay, until the last half of the others is left.

    Returns:
      Answers by arm: behind what is left as it was computed once, and behind a re-prefill of it.
    """
    first, *others = pieces
    size, count = min(pinned, first.size), len(others) // 2
    room = sum(piece.size for piece in [first, *others[: count + 1]])
    window = GrowingWindow(backbone, room)
    for piece in [first, *others[:count]]:
        window.append(piece)

    # From here on the first piece is only its first tokens, which nothing in front of them changed.
    begin = [make_piece(backbone, first.tokens.take(0, size), f"first {size}")] if size else []
    window.pieces[:1] = begin
    window.parts[:1] = [{name: kv[:, :, :size] for name, kv in window.parts[0].items()}] if size else []
    for piece in others[count:]:
        del window.pieces[len(begin)], window.parts[len(begin)]
        window.append(piece)

    again = GrowingWindow(backbone, room)
    for piece in window.pieces:
        again.append(piece)
    line = Line(backbone, window.pieces)
    return {arm: tail.ask(line, line.placed(served.parts)) for arm, served in ((REFERENCE, again), (KEPT, window))}


def window_contents(run: Run, path: str, probe: str, number: int, size: int) -> tuple[ReusedChunk, list[BatchedPiece]]:
    """Draws what windows show: consecutive chunks of prose; if a model sees, images of others, then the task's."""
    backbone: ModelBackbone = loaded(path)
    if backbone.image_config is None:
        drawn = text_chunk(backbone, "prose", 2 * PROSE, number * run.batch, size)
        return drawn, [*drawn.pieces, drawn.chunk]
    drawn = task_chunk(backbone, IMAGES - 1, number, size, run.seed)
    shown = [*drawn.pieces, drawn.chunk]
    words = np.repeat(vocabulary().first["value"] + np.arange(CHUNK)[None], size, axis=0)
    first = text_piece(backbone, words, "first") if probe == "text" else drawn.chunk.of_others().of_others()
    return drawn, [first, *(piece.of_others() for piece in shown), *shown]


def measure_batch(run: Run, path: str, probe: str, number: int, size: int) -> Iterator[Measured]:
    """Measures one batch with every number of first tokens."""
    drawn, pieces = window_contents(run, path, probe, number, size)
    for pinned in PINNED[probe]:
        answers = measure_sink(drawn.backbone, pieces, drawn.tail, pinned)
        yield Measured(f"{probe}.pinned={pinned}", ("next",), drawn.tail.questions, answers, drawn.clusters)


SINKS = WindowDataset("sinks", [*PINNED], ("kl", "flips"), measure_batch)
