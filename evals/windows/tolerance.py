"""Which antecedents matter: a chunk's KV formed behind one history and served behind another.

In truth a chunk follows a pinned lead and pieces of its own context, the last of which is the nearest, the others the
far ones. A history replaces, drops or moves some of them, or serves them approximately. Only the chunk's KV comes from
the history; all in front of it is exact.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV
from models import ModelBackbone

from ..harness.datasets import Run
from ..harness.frame import Row
from ..harness.methods import BLIND, REFERENCE
from ..harness.parts import Part, Record
from ..harness.runner import loaded
from ..task.contexts import SIZES, sample
from ..task.dataset import ASKED
from ..task.questions import ask
from ..task.vocabulary import vocabulary
from ..texts.corpus import Document, documents
from .contents import Tail, TaskPieces, TaskTail, TextTail
from .lines import Line, Piece, text_piece
from .records import Measured, records_of, rows_of

EXACT, CANONICAL, PATCHED = "exact", "canonical", "patched"
RANK = 16
"""Of patches of antecedents, and of the patch that mends KV of another history."""
MEAN, SUM, MENDED = "mean, same nearest", "sum of each alone", "far differ, mended"
SAME_NEAREST = ("far differ", "far missing", "far moved")
LEAD_TOKENS = 4
"""Words of the vocabulary in front of the task's images. No instance was trained with a lead."""
LEAD = "The following is looked at from the first to the last."
SIZE_BEHIND = {3: "4", 7: "8"}
CHUNK, SCORED, FRONTS = 64, 32, (2, 4, 8)
"""Tokens of a text's chunk, tokens that are read behind it, and numbers of chunks in front."""
DRAWINGS, TEXTS = ("documents", "plain"), ("prose", "code")
KINDS = ("answer",)
METRICS = ("kl", "eta", "within")


class HistoryPiece(NamedTuple):
    """A piece that stood in front: its place in its context, whether that is another's, and how it was served."""

    place: int
    other: bool = False
    served: str = EXACT


History = tuple[HistoryPiece, ...]


def histories(count: int) -> dict[str, History | None]:
    """Lists the histories of a chunk behind `count` pieces, by arm; None: not even the lead.

    Histories that are an earlier one's (with two pieces the farthest is all that is far) are left out.

    Raises:
      ValueError: fewer than two pieces, so that nothing is far.
    """
    if count < 2:
        raise ValueError(f"histories: got {count} pieces in front; expected 2 or more")
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


class Contexts(NamedTuple):
    """A batch of contexts: the pinned lead, the pieces in front, the chunk that is reused, and what is asked."""

    backbone: ModelBackbone
    lead: Piece
    pieces: tuple[Piece, ...]
    chunk: Piece
    tail: Tail
    clusters: np.ndarray


class HistoryKV:
    """Phase-free KV of pieces and the chunk behind any history; each prefix of a history is prefilled once."""

    def __init__(self, contexts: Contexts):
        self.contexts = contexts
        self._others = [piece.of_others() for piece in contexts.pieces]
        self._known: dict[tuple[History, HistoryPiece | None], KV] = {}

    def piece(self, piece: HistoryPiece | None) -> Piece:
        """Finds a piece; the chunk for None."""
        if piece is None:
            return self.contexts.chunk
        return (self._others if piece.other else self.contexts.pieces)[piece.place]

    def line(self, history: History, *behind: Piece) -> Line:
        """Places the lead, a history and what follows it."""
        return Line(self.contexts.backbone, (self.contexts.lead, *map(self.piece, history), *behind))

    def conditioned(self, history: History | None, piece: HistoryPiece | None = None) -> KV:
        """Computes phase-free KV of a piece, or of the chunk, behind the lead and a history; None: alone."""
        if history is None:
            return {name: jnp.asarray(value) for name, value in self.piece(piece).chunk.kv.items()}
        if piece is not None:
            # How a piece is served does not change what it is behind its own history.
            piece = piece._replace(served=EXACT)
        if (history, piece) not in self._known:
            self._known[history, piece] = self.line(history).behind(self.front(history), self.piece(piece))
        return self._known[history, piece]

    def front(self, history: History) -> list[KV]:
        """Lists the engine-frame KV of the lead and of a history's pieces, each as it was served."""
        line = self.line(history)
        parts = [line.served(0)]
        for place, piece in enumerate(history):
            if piece.served == CANONICAL:
                parts.append(line.served(place + 1))
            elif piece.served == PATCHED:
                # The patch that belongs there: formed behind antecedents that were exact.
                exact = tuple(other._replace(served=EXACT) for other in history[:place])
                chunk, conditioned = self.piece(piece).chunk, self.conditioned(exact, piece)
                patch = kvp.form_patch(chunk, conditioned, RANK, ["history"], method="exact", dense=False)
                parts.append(line.served(place + 1, patch))
            else:
                base = self.conditioned(history[:place], piece)
                parts.append(line.served(place + 1, base=base, base_antecedent=["history"]))
        return parts


def kv_by_arm(source: HistoryKV) -> dict[str, KV]:
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


def measure_tolerance(contexts: Contexts, probe: str) -> Measured:
    """Serves the chunk's KV of every history behind its true antecedents."""
    source, chunk, place = HistoryKV(contexts), contexts.chunk, len(contexts.pieces) + 1
    by_arm = kv_by_arm(source)
    truth = histories(len(contexts.pieces))[REFERENCE]
    assert truth is not None
    line, front, tail = source.line(truth, chunk), source.front(truth), contexts.tail

    def answers(kv: KV, patch: kvp.Patch | None = None) -> Any:
        served = line.served(place, patch, base=kv, base_antecedent=["history"])
        return tail.ask(line, [*front, served])

    measured = {arm: answers(kv) for arm, kv in by_arm.items()}
    # What a history lacks of the truth is mended as a slide's survivor is: by a patch on its KV.
    base, after = by_arm["far differ"], by_arm[REFERENCE]
    patch = kvp.removal_patch(chunk.chunk, after, base, RANK, line.antecedent(place), ["history"], method="exact")
    measured[MENDED] = answers(base, patch)
    return Measured(probe, KINDS, tail.questions, measured)


# --------------------------------------------------------------------------------------------------------- contents


def task_contexts(backbone: ModelBackbone, drawing: str, front: int, number: int, size: int, seed: int) -> Contexts:
    """Draws contexts of the task: its sheets in front, its page reused."""
    rng = np.random.default_rng([seed, front, number])
    contexts = sample(rng, size, SIZES[SIZE_BEHIND[front]], drawing=drawing)
    questions = ask(contexts, rng, ASKED)
    images = TaskPieces.of(backbone, contexts, number * 100_000 + np.arange(size))
    words = vocabulary(drawing).first["value"] + np.arange(LEAD_TOKENS)
    lead = text_piece(backbone, np.repeat(words[None], size, axis=0), "lead")
    # All kinds of question count as one.
    tail = TaskTail(images.prefix, questions, np.zeros_like(questions.kind))
    return Contexts(backbone, lead, images.sheets, images.page, tail, images.clusters)


def text_contexts(backbone: ModelBackbone, domain: str, front: int, number: int, size: int, run: Run) -> Contexts:
    """Reads documents of a domain: consecutive chunks, the next tokens scored. No document is read twice."""
    # Every number of chunks in front has documents of its own.
    first = FRONTS.index(front) * run.n + number * run.batch
    read = _documents(backbone, domain, len(FRONTS) * run.n)[first : first + size]
    ids = np.stack([document.ids for document in read])
    pieces = []
    for place in range(front + 1):
        pieces.append(text_piece(backbone, ids[:, place * CHUNK : (place + 1) * CHUNK], f"piece {place}"))
    start = (front + 1) * CHUNK
    behind = ids[:, start : start + SCORED]
    # The longest documents end with what is read.
    following = np.pad(ids, ((0, 0), (0, 1)), constant_values=-1)[:, start + 1 : start + 1 + SCORED]
    lead_ids = np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])
    lead = text_piece(backbone, np.repeat(lead_ids, size, axis=0), "lead")
    return Contexts(
        backbone, lead, tuple(pieces[:-1]), pieces[-1], TextTail(behind, following), first + np.arange(size)
    )


@functools.lru_cache(maxsize=4)
def _documents(backbone: Any, domain: str, count: int) -> list[Document]:
    tokens = (FRONTS[-1] + 1) * CHUNK + SCORED
    return documents(backbone, domain, count, tokens, tokens)


# ------------------------------------------------------------------------------------------------------ the data set


class Tolerance:
    """Histories as a data set; a probe is what the contexts are and the number of pieces in front."""

    name = "tolerance"
    probes = (
        *(f"{drawing}.front={front}" for front in SIZE_BEHIND for drawing in DRAWINGS),
        *(f"{domain}.front={front}" for front in FRONTS for domain in TEXTS),
    )

    def parts(self, run: Run) -> list[Part]:
        """Lists all parts.

        Raises:
          InputError: an unknown probe.
        """
        probes = run.probes_of(self)
        parts = []
        for probe in probes:
            for model in run.models:
                for number, size in run.batches:
                    measure = functools.partial(self.measure, run, model, probe, number, size)
                    work = size * int(probe.rpartition("=")[2])
                    parts.append(Part(f"tolerance.{probe}, {model}, batch {number}", measure, float(work)))
        return parts

    def measure(self, run: Run, model: str, probe: str, number: int, size: int) -> Iterator[Record]:
        """Measures one batch: what is answered over the chunk's KV of every history."""
        content, _, front = probe.partition(".front=")
        backbone = loaded(run.models[model])
        if content in DRAWINGS:
            contexts = task_contexts(backbone, content, int(front), number, size, run.seed)
        else:
            contexts = text_contexts(backbone, content, int(front), number, size, run)
        yield from records_of(measure_tolerance(contexts, probe), model, contexts.clusters)

    def rows(self, records: Mapping[str, Iterable[Record]]) -> list[Row]:
        """Makes rows; probes are "tolerance.documents.front=3" and so on."""
        return rows_of(self.name, records, METRICS)


TOLERANCE = Tolerance()
