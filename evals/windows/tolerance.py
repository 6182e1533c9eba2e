"""Which antecedents matter: a chunk's KV formed behind one history and served behind another.

In truth a chunk follows a pinned lead and pieces of its own context, the last of which is the nearest, the others the
far ones. A history replaces, drops or moves some of them, or serves them approximately. Only the chunk's KV comes from
the history; all in front of it is exact.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.models import ModelBackbone

from ..harness.datasets import Run
from ..harness.lines import AnyKV, BatchedPiece, Line, text_piece
from ..harness.methods import BLIND, REFERENCE
from ..harness.runner import loaded
from ..task.contexts import SIZES, sample
from ..task.dataset import ASKED
from ..task.questions import ask
from ..task.vocabulary import vocabulary
from ..texts.corpus import documents
from .contents import TaskPieces, TaskTail, TextTail
from .measured import Measured, WindowDataset

EXACT, CANONICAL, PATCHED = "exact", "canonical", "patched"
RANK = 16
"""Of patches of antecedents, and of the patch that mends KV of another history."""
MEAN, SUM, MENDED = "mean, same nearest", "sum of each alone", "far differ, mended"
SAME_NEAREST = ("far differ", "far missing", "far moved")
LEAD_TOKENS = 4
"""Words of the vocabulary in front of the task's images. No instance was trained with a lead."""
LEAD = "The following is looked at from the first to the last."
CHUNK, SCORED, DOCUMENT = 64, 32, 608
"""Tokens of a text's chunk, tokens that are read behind it, and tokens that a document has at least."""
PROBES = {"documents.front=3": ("documents", 3), "documents.front=7": ("documents", 7), "prose.front=2": ("prose", 2)}
"""What the contexts are, and the number of pieces in front."""


class HistoryPiece(NamedTuple):
    """A piece that stood in front: its place in its context, whether that is another's, and how it was served."""

    place: int
    other: bool = False
    served: str = EXACT


History = tuple[HistoryPiece, ...]


def histories(count: int) -> dict[str, History | None]:
    """Lists the histories of a chunk behind `count` pieces, by arm; None: not even the lead.

    Histories that are an earlier one's (with two pieces the farthest is all that is far) are left out.
    """
    truth = tuple(HistoryPiece(place) for place in range(count))
    others = tuple(HistoryPiece(place, other=True) for place in range(count))
    named: dict[str, History | None] = {
        REFERENCE: truth,
        BLIND: None,
        "far differ": (*others[:-1], truth[-1]),
        "farthest differs": (others[0], *truth[1:]),
        "far missing": truth[-1:],
        "far moved": (*truth[1:-1], truth[0], truth[-1]),
        "nearest differs": (*truth[:-1], others[-1]),
        "nearest missing": truth[:-1],
        "all differ": others,
        "the lead alone": (),
        "all canonical": tuple(piece._replace(served=CANONICAL) for piece in truth),
        "all patched": tuple(piece._replace(served=PATCHED) for piece in truth),
    }
    distinct: dict[str, History | None] = {}
    for arm, history in named.items():
        if history not in distinct.values():
            distinct[arm] = history
    return distinct


class ReusedChunk(NamedTuple):
    """A chunk that is reused in a batch of contexts: the pinned lead, the pieces in front, it, and what is asked."""

    backbone: ModelBackbone
    lead: BatchedPiece
    pieces: tuple[BatchedPiece, ...]
    chunk: BatchedPiece
    tail: TaskTail | TextTail
    clusters: np.ndarray


class HistoryKV:
    """Phase-free KV of pieces and the chunk behind any history; each prefix of a history is prefilled once."""

    def __init__(self, contexts: ReusedChunk):
        self.contexts = contexts
        self._others = [piece.of_others() for piece in contexts.pieces]
        self._known: dict[tuple[History, HistoryPiece | None], AnyKV] = {}

    def piece(self, piece: HistoryPiece | None) -> BatchedPiece:
        """Finds a piece; the chunk for None."""
        if piece is None:
            return self.contexts.chunk
        return (self._others if piece.other else self.contexts.pieces)[piece.place]

    def line(self, history: History, *behind: BatchedPiece) -> Line:
        """Places the lead, a history and what follows it."""
        return Line(self.contexts.backbone, (self.contexts.lead, *map(self.piece, history), *behind))

    def conditioned(self, history: History | None, piece: HistoryPiece | None = None) -> AnyKV:
        """Computes phase-free KV of a piece, or of the chunk, behind the lead and a history; None: alone."""
        if history is None:
            return {name: jnp.asarray(value) for name, value in self.piece(piece).chunk.kv.items()}
        if piece is not None:
            # How a piece is served does not change what it is behind its own history.
            piece = piece._replace(served=EXACT)
        if (history, piece) not in self._known:
            self._known[history, piece] = self.line(history).behind(self.front(history), self.piece(piece))
        return self._known[history, piece]

    def front(self, history: History) -> list[AnyKV]:
        """Lists the engine-frame KV of the lead and of a history's pieces, each as it was served."""
        line = self.line(history)
        parts: list[AnyKV] = [line.served(0)]
        for place, piece in enumerate(history):
            if piece.served == CANONICAL:
                parts.append(line.served(place + 1))
            elif piece.served == PATCHED:
                # The patch that belongs there: formed behind antecedents that were exact.
                exact = tuple(other._replace(served=EXACT) for other in history[:place])
                chunk, conditioned = self.piece(piece).chunk, self.conditioned(exact, piece)
                patch = kvp.form_patch(chunk, conditioned, RANK, ["history"], method="exact", dense=False, force=True)
                parts.append(line.served(place + 1, patch))
            else:
                base = self.conditioned(history[:place], piece)
                parts.append(line.served(place + 1, base=base, base_antecedent=["history"]))
        return parts


def kv_by_arm(source: HistoryKV) -> dict[str, AnyKV]:
    """Computes the chunk's KV of every history, the mean over those with the same nearest piece, and a sum.

    The sum is the canonical behind the lead and the deficits of the single pieces, as if they added up.
    """
    count = len(source.contexts.pieces)
    by_arm = {arm: source.conditioned(history) for arm, history in histories(count).items()}
    alike = [by_arm[arm] for arm in SAME_NEAREST if arm in by_arm]
    singles = [source.conditioned((HistoryPiece(place),)) for place in range(count)]
    mean, total = {}, {}
    for name, alone in by_arm["the lead alone"].items():
        mean[name] = sum(kv[name] for kv in alike) / len(alike)
        total[name] = sum(kv[name] for kv in singles) - (count - 1) * alone
    return {**by_arm, MEAN: mean, SUM: total}


def measure_tolerance(contexts: ReusedChunk, probe: str) -> Measured:
    """Serves the chunk's KV of every history behind its true antecedents."""
    source, chunk, place = HistoryKV(contexts), contexts.chunk, len(contexts.pieces) + 1
    by_arm = kv_by_arm(source)
    truth = histories(len(contexts.pieces))[REFERENCE]
    assert truth is not None
    line, front, tail = source.line(truth, chunk), source.front(truth), contexts.tail

    def answers(kv: AnyKV, patch: kvp.Patch | None = None) -> Any:
        served = line.served(place, patch, base=kv, base_antecedent=["history"])
        return tail.ask(line, [*front, served])

    measured = {arm: answers(kv) for arm, kv in by_arm.items()}
    # What a history lacks of the truth is mended as a slide's survivor is: by a patch on its KV.
    base, after = by_arm["far differ"], by_arm[REFERENCE]
    patch = kvp.removal_patch(chunk.chunk, after, base, RANK, line.antecedent(place), ["history"], method="exact")
    measured[MENDED] = answers(base, patch)
    return Measured(probe, ("answer",), tail.questions, measured, contexts.clusters)


# --------------------------------------------------------------------------------------------------------- contents


def task_chunk(backbone: ModelBackbone, front: int, number: int, size: int, seed: int) -> ReusedChunk:
    """Draws contexts of the task: its sheets in front, its page reused."""
    rng = np.random.default_rng([seed, front, number])
    contexts = sample(rng, size, SIZES[str(front + 1)])
    questions = ask(contexts, rng, ASKED)
    images = TaskPieces.of(backbone, contexts, number * 100_000 + np.arange(size))
    words = vocabulary().first["value"] + np.arange(LEAD_TOKENS)
    lead = text_piece(backbone, np.repeat(words[None], size, axis=0), "lead")
    # All kinds of question count as one.
    tail = TaskTail(images.prefix, questions, np.zeros_like(questions.kind))
    return ReusedChunk(backbone, lead, images.sheets, images.page, tail, images.clusters)


def text_chunk(backbone: ModelBackbone, domain: str, front: int, first: int, size: int) -> ReusedChunk:
    """Reads documents of a domain from a number on: consecutive chunks, the next tokens scored."""
    read = documents(backbone, domain, first + size, DOCUMENT, DOCUMENT)[first:]
    ids = np.stack([document.ids for document in read])
    pieces = []
    for place in range(front + 1):
        pieces.append(text_piece(backbone, ids[:, place * CHUNK : (place + 1) * CHUNK], f"piece {place}"))
    start = (front + 1) * CHUNK
    tail = TextTail(ids[:, start : start + SCORED], ids[:, start + 1 : start + 1 + SCORED])
    lead_ids = np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])
    lead = text_piece(backbone, np.repeat(lead_ids, size, axis=0), "lead")
    return ReusedChunk(backbone, lead, tuple(pieces[:-1]), pieces[-1], tail, first + np.arange(size))


def measure_batch(run: Run, path: str, probe: str, number: int, size: int) -> Iterator[Measured]:
    """Measures one batch: what is answered over the chunk's KV of every history."""
    (content, front), backbone = PROBES[probe], loaded(path)
    if content == "documents":
        contexts = task_chunk(backbone, front, number, size, run.seed)
    else:
        contexts = text_chunk(backbone, content, front, number * run.batch, size)
    yield measure_tolerance(contexts, probe)


TOLERANCE = WindowDataset("tolerance", [*PROBES], ("kl", "eta", "within"), measure_batch)
