"""What is measured: held-out contexts of the shipped trained models, and documents before a pretrained decoder.

A batch has a pinned lead, pieces in front, the chunk that is reused, and what is asked behind it. The pieces that take
the place of its own are those of the next context of the batch. Batches never mix the two halves that bounds are
calibrated and held out on.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models import ModelBackbone

from .. import small_task
from ..certify.packed_questions import PackedQuestions, packed
from ..certify.window_sizes import batches_of
from ..certify.window_sources import SMALL_TASK_QUESTIONS, lead_of
from ..documents_task.dataset import DOCUMENTS_DATASET
from ..harness.parts import PlannedPart
from ..probes.window.image_sequence import Image
from ..probes.window.probe_images import load_probe_images, of_ids, of_tokens
from ..sheets_task.dataset import SHEETS_DATASET
from ..small_task import scenes, sequences
from ..small_task.prefix import positions_behind, prefix_positions, within_own
from ..small_task.sequences import QuestionTokens
from ..texts import corpus as texts
from ..trained import MAIN

DECODER = "smollm2"
"""The pretrained decoder, by its name on the command line."""
DATASETS = {"sheets": SHEETS_DATASET, "documents": DOCUMENTS_DATASET}
LEAD_TOKENS = 4
"""Of the packed tasks' lead: words of the vocabulary. No model was trained with one."""
CHUNKS = {3: "4", 7: "8"}
"""Sizes of the packed tasks by their pieces in front."""


@dataclasses.dataclass(frozen=True)
class TolerancePlan:
    """Sizes of the suite.

    Attributes:
      images: of the small task, (pieces in front, contexts).
      packed: of the sheets and documents tasks, likewise.
      texts: of each domain, likewise.
      batch: contexts at a time.
      chunk, scored: tokens of a text's chunk, and of what is read behind it.
      patched: the numbers of pieces in front of texts at which patches are formed as well.
      ranks: of the patches.
      seed: of the contexts.
    """

    images: tuple[tuple[int, int], ...] = ((2, 64), (4, 64), (8, 64))
    packed: tuple[tuple[int, int], ...] = ((3, 64), (7, 32))
    texts: tuple[tuple[int, int], ...] = ((2, 16), (4, 16), (8, 8))
    batch: int = 8
    chunk: int = 64
    scored: int = 32
    patched: tuple[int, ...] = (2,)
    ranks: tuple[int, ...] = (16, 32)
    seed: int = 20261124


FULL = TolerancePlan()
QUICK = TolerancePlan(images=((2, 4),), packed=((3, 4),), texts=((2, 4),), batch=2, chunk=32, scored=8)


@dataclasses.dataclass(frozen=True, eq=False)
class ToleranceBatch:
    """Contexts of one shape.

    Attributes:
      backbone: reads them.
      lead: pinned in front.
      pieces: those in front of the chunk, in order.
      chunk: whose KV comes from other histories.
      questions: what is asked behind it.
      clusters: number of each context, [B].
      held_out: whether bounds are held out on them.
    """

    backbone: ModelBackbone
    lead: Image
    pieces: tuple[Image, ...]
    chunk: Image
    questions: PackedQuestions
    clusters: Int[np.ndarray, " B"]
    held_out: bool

    @functools.cached_property
    def others(self) -> tuple[Image, ...]:
        """The pieces of the next context."""
        return tuple(piece.of_others(1) for piece in self.pieces)


class BatchSpec(NamedTuple):
    """A batch before it is drawn: task, pieces in front, its number there, its contexts' numbers, and the half."""

    task: str
    front: int
    number: int
    clusters: Int[np.ndarray, " B"]
    held_out: bool

    @property
    def part(self) -> str:
        """Its key in the file of parts."""
        return f"{self.task}, {self.front} in front, {self.number}"


class Task(NamedTuple):
    """One kind of content.

    Attributes:
      backbone: its name on the command line and in `evals.trained`.
      sizes: reads (pieces in front, contexts) from a plan.
      load: draws and prefills a batch; the folder is for temporary files.
      other: the task that bounds are tried on as well.
      title: in tables.
    """

    backbone: str
    sizes: Callable[[TolerancePlan], tuple[tuple[int, int], ...]]
    load: Callable[[ModelBackbone, TolerancePlan, BatchSpec, Path], ToleranceBatch]
    other: str
    title: str


def specs_of(task: str, plan: TolerancePlan) -> Iterator[BatchSpec]:
    """Yields the batches of a task."""
    for front, count in TASKS[task].sizes(plan):
        for number, (side, _, clusters) in enumerate(batches_of(count, plan.batch)):
            yield BatchSpec(task, front, number, clusters, bool(side))


def load_small(backbone: ModelBackbone, plan: TolerancePlan, spec: BatchSpec, folder: Path) -> ToleranceBatch:
    """Draws contexts of the small task: legends, among legends that do not matter where there are more pieces.

    Behind two pieces the first legend is not there, and nothing is asked that it alone tells.
    """
    rng, rows = np.random.default_rng([plan.seed, spec.front, spec.number]), len(spec.clusters)
    contexts = small_task.sample_contexts(rng, rows)
    drawn = [load_probe_images(backbone, contexts, spec.clusters, plan.seed + more, folder) for more in range(2)]
    legends, shown = drawn[0].legends, np.ones((rows, small_task.LEGENDS), bool)
    if spec.front < len(legends):
        legends, shown[:, : len(shown[0]) - spec.front] = legends[-spec.front :], False

    # Where the legends stand among the others differs from context to context; their order does not.
    distractors = [*drawn[0].distractors, *drawn[1].distractors][: spec.front - len(legends)]
    places = np.argsort(rng.random((rows, spec.front)), axis=1)[:, : len(legends)]
    index = np.full((rows, spec.front), -1)
    np.put_along_axis(index, np.sort(places, axis=1), np.arange(len(legends))[None], axis=1)
    for row in index:
        row[row < 0] = len(legends) + np.arange(len(distractors))

    pool = [*legends, *distractors]
    asked = small_task.ask(contexts, rng, SMALL_TASK_QUESTIONS, shown)
    form, number = scenes.form_of(backbone.config, backbone.image_config), asked.answer.shape[1]
    tail = sequences.question_tokens(form, asked, np.zeros(rows, int))
    return ToleranceBatch(
        backbone=backbone,
        lead=drawn[0].lead or lead_of(backbone, rows),
        pieces=tuple(_dealt(pool, column, f"piece {place}") for place, column in enumerate(index.T)),
        chunk=drawn[0].page,
        questions=PackedQuestions(tail, np.arange(number), asked.valid, "questions of the small task"),
        clusters=spec.clusters,
        held_out=spec.held_out,
    )


def _dealt(pool: Sequence[Image], index: Int[np.ndarray, " B"], name: str) -> Image:
    """Gives each context one image of a pool of one shape."""
    rows = np.arange(len(index))

    def deal(*parts: Any) -> np.ndarray:
        return np.stack([np.asarray(part) for part in parts])[index, rows]

    tokens = jax.tree.map(lambda *parts: jnp.asarray(deal(*parts)), *(image.tokens for image in pool))
    tokens = tokens._replace(positions=pool[0].tokens.positions)
    kv = {}
    for channel in pool[0].chunk.kv:
        moved = (np.moveaxis(np.asarray(image.canonical[channel]), 1, 0) for image in pool)
        kv[channel] = np.moveaxis(deal(*moved), 0, 1)
    return Image(tokens, dataclasses.replace(pool[0].chunk, kv=kv, id=name, content=name))


def load_packed(backbone: ModelBackbone, plan: TolerancePlan, spec: BatchSpec, folder: Path) -> ToleranceBatch:
    """Draws contexts of the sheets or documents task: every sheet in front, the page reused."""
    dataset = DATASETS[spec.task]
    task = dataset.spec
    rng, rows = np.random.default_rng([plan.seed, spec.front, spec.number]), len(spec.clusters)
    contexts = task.sample(rng, rows, task.sizes[CHUNKS[spec.front]])
    questions = task.ask(contexts, rng, dataset.questions)

    form = task.form_of(backbone.config, backbone.image_config, contexts.size)
    pixels = backbone.config.family.vision.process(task.images(contexts), backbone.image_config)
    positions, _ = prefix_positions(form, np.ones((rows, form.chunks), bool), np.zeros(rows, int))
    whole = backbone.embed(np.tile(form.ids, (rows, 1)), positions, **pixels)
    images = []
    for place, where in enumerate(form.slices):
        local = np.broadcast_to(form.chunk_local[place], (rows, *form.chunk_local[place].shape))
        tokens = whole.take(where.start, where.stop)._replace(positions=local)
        images.append(of_tokens(backbone, tokens, f"piece {place}", f"{spec.part}, piece {place}"))

    # Scored are the tokens that name an answer; an answer of several is one answer.
    counts = questions.answer >= 0
    asked = np.flatnonzero(counts.any(axis=0))
    named, owner = np.unique(questions.own[asked], return_inverse=True)
    tail = QuestionTokens(
        questions.ids.astype(np.int32),
        positions_behind(form, np.zeros(rows, int), questions.step),
        within_own(questions.own),
        asked.astype(np.int32),
    )
    valid = np.stack([counts[:, questions.own == question].any(axis=1) for question in named], axis=1)
    words = np.arange(LEAD_TOKENS, dtype=np.int32) + task.vocabulary.fill
    return ToleranceBatch(
        backbone=backbone,
        lead=of_ids(backbone, np.repeat(words[None], rows, axis=0), "lead", "lead"),
        pieces=tuple(images[:-1]),
        chunk=images[-1],
        questions=PackedQuestions(tail, owner, valid, f"questions of the {spec.task} task"),
        clusters=spec.clusters,
        held_out=spec.held_out,
    )


def load_texts(backbone: ModelBackbone, plan: TolerancePlan, spec: BatchSpec, folder: Path) -> ToleranceBatch:
    """Reads documents of a domain: consecutive pieces, the next tokens scored. No document is read twice."""
    sizes = TASKS[spec.task].sizes(plan)
    longest = max(front for front, _ in sizes)
    most = (longest + 1) * plan.chunk + plan.scored
    documents = _documents(backbone, spec.task, sum(count for _, count in sizes), most)
    # Shorter contexts take the documents that longer ones leave.
    first = sum(count for front, count in sizes if front < spec.front)
    ids = np.stack([documents[first + cluster].ids for cluster in spec.clusters])

    rows, pieces = len(ids), []
    for place in range(spec.front + 1):
        part = ids[:, place * plan.chunk : (place + 1) * plan.chunk]
        pieces.append(of_ids(backbone, part, f"piece {place}", f"{spec.part}, piece {place}"))

    first = (spec.front + 1) * plan.chunk
    behind = ids[:, first : first + plan.scored]
    questions = packed([(behind, range(plan.scored))], backbone.layout.rope.axes, f"the next {plan.scored} tokens")
    return ToleranceBatch(
        backbone=backbone,
        lead=lead_of(backbone, rows),
        pieces=tuple(pieces[:-1]),
        chunk=pieces[-1],
        questions=questions,
        clusters=spec.clusters,
        held_out=spec.held_out,
    )


@functools.cache
def _documents(backbone: Any, domain: str, count: int, tokens: int) -> list[texts.Document]:
    return texts.documents(backbone, domain, count, tokens, tokens)


def _images(plan: TolerancePlan) -> tuple[tuple[int, int], ...]:
    return plan.images


def _packed(plan: TolerancePlan) -> tuple[tuple[int, int], ...]:
    return plan.packed


def _texts(plan: TolerancePlan) -> tuple[tuple[int, int], ...]:
    return plan.texts


TASKS: dict[str, Task] = {
    "small": Task(MAIN, _images, load_small, "sheets", "the small task"),
    "sheets": Task(f"sheets/{MAIN}", _packed, load_packed, "documents", "the sheets task"),
    "documents": Task(f"documents/{MAIN}", _packed, load_packed, "sheets", "the documents task"),
    "prose": Task(DECODER, _texts, load_texts, "code", "prose, SmolLM2"),
    "code": Task(DECODER, _texts, load_texts, "prose", "code, SmolLM2"),
}
"""What is measured, by its name in rows."""


def backbones() -> list[str]:
    """Lists the backbones of all tasks by their names on the command line."""
    return list(dict.fromkeys(task.backbone for task in TASKS.values()))


def tasks_of(names: Sequence[str]) -> list[str]:
    """Lists the tasks that these backbones do."""
    return [task for task, about in TASKS.items() if about.backbone in names]


def interleaved(parts: Sequence[Sequence[PlannedPart]]) -> list[PlannedPart]:
    """Takes parts of each group in turn, so that an unfinished run is a picture of the whole."""
    rounds = itertools.zip_longest(*parts)
    return [part for part in itertools.chain.from_iterable(rounds) if part is not None]
