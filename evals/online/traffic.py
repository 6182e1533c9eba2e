"""Traffic of an agent that reads: documents in chunks, met in random orders within locality, a question after each.

A *task* is a stretch of steps after which the agent starts with an empty window. Within one it mostly reads on; it goes
back, skips, and looks into a second document. From the shift on all content is other.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import small_task
from ..pretrained import texts

SHIFTS = ("code", "records", "shuffled", "larger")
"""Content of texts from the shift on: source code, records that contradict each other, prose with shuffled tokens,
chunks twice as long; or any domain of `evals.pretrained.texts`."""
IMAGE_SHIFTS = ("awake", "noise")
"""Content of images: empty screens before the shift, or noise after it."""
ASKED = 8
"""Questions of a context at most."""
OPENINGS = ("\nIn short, this is about", "\nThe main point is that", "\nThis means that", "\nFor example,")
"""Questions about everything that was read."""
NAMES = ("apple", "bread", "chair", "door", "engine", "flower", "garden", "horse")
"""Of records, whose numbers contradict those of other chunks."""
SHREDS = 8
"""Of shredded prose, a chunk has this part of the tokens of others."""
QUOTED = 4
"""Tokens of a passage that a question quotes; what is asked is how it goes on."""


@dataclasses.dataclass(frozen=True)
class TrafficPlan:
    """Sizes of a loop.

    Attributes:
      answers, shift_at: steps in all, and the step of the shift.
      documents, pieces, chunk: documents, chunks of each, and tokens of a chunk.
      task: steps of a task, the least and the most.
      keep: chunks that stay in the window.
      onward, back, aside: shares of steps that read on, go back, and look into the task's other document; the others go
        anywhere in the document.
    """

    answers: int = 450
    shift_at: int = 300
    documents: int = 4
    pieces: int = 8
    chunk: int = 96
    task: tuple[int, int] = (8, 20)
    keep: int = 6
    onward: float = 0.65
    back: float = 0.1
    aside: float = 0.15


class TrafficStep(NamedTuple):
    """One step: the chunk that is read, the question after it, and whether a task begins with it."""

    chunk: int
    question: str
    begins: bool


class Traffic(NamedTuple):
    """Traffic of one seed: what the chunks are (token ids or pixels), the lead in front of them, and the steps."""

    name: str
    lead: Any
    chunks: tuple[Any, ...]
    steps: tuple[TrafficStep, ...]
    shift_at: int
    keep: int


def text_traffic(backbone: Any, plan: TrafficPlan, seed: int, shift: str) -> Traffic:
    """Draws traffic over prose, and over other content from the shift on.

    Raises:
      InputError: too few documents on this machine.
    """
    rng, count = random.Random(seed), plan.documents
    before = _documents(backbone, "prose", plan, plan.chunk, rng)
    if shift == "records":
        after = [_records(backbone, plan.chunk, rng) for _ in range(count * plan.pieces)]
    elif shift == "shredded":
        after = _documents(backbone, "prose", plan, plan.chunk // SHREDS, rng)
    elif shift == "larger":
        after = _documents(backbone, "prose", plan, 2 * plan.chunk, rng)
    else:
        after = _documents(backbone, "prose" if shift == "shuffled" else shift, plan, plan.chunk, rng)
    if shift == "shuffled":
        shuffled = []
        for chunk in after:
            ids = list(chunk)
            rng.shuffle(ids)
            shuffled.append(ids)
        after = shuffled

    chunks = [*before, *after]

    def ask(shown: Sequence[int]) -> str:
        if rng.random() < 0.5:
            return rng.choice(OPENINGS)
        ids = chunks[rng.choice(shown)]
        first = rng.randrange(len(ids) - QUOTED)
        quoted = backbone.tokenizer.decode(ids[first : first + QUOTED], skip_special_tokens=True)
        return f'\n"{quoted}' if quoted.strip() else OPENINGS[0]

    steps = _walk(plan, count, plan.pieces, ask, rng)
    return Traffic(
        shift, "You read documents and answer questions about them.", tuple(chunks), steps, plan.shift_at, plan.keep
    )


def image_traffic(plan: TrafficPlan, seed: int, shift: str) -> Traffic:
    """Draws traffic over images of the small task: contexts of three legends and a page that refers to them.

    Questions need a page and a legend that were read together. With the shift "awake" every image is an empty screen of
    its own shade until then, so that what precedes one hardly matters; with "noise" all are noise after it.
    """
    rng, drawn = random.Random(seed), np.random.default_rng(seed)
    images: list[np.ndarray] = []
    questions: list[list[str]] = []
    for part in ("before", "after"):
        contexts = small_task.sample_contexts(drawn, plan.documents)
        legends, pages = small_task.render(contexts)
        shown = [image for number in range(plan.documents) for image in (*legends[number], pages[number])]
        if part == "before" and shift == "awake":
            shown = [np.full_like(image, 64 + number) for number, image in enumerate(shown)]
        if part == "after" and shift == "noise":
            shown = [drawn.integers(0, 256, image.shape, np.uint8) for image in shown]
        images += shown
        questions += _texts_of(small_task.ask(contexts, drawn, {"chain": ASKED}))

    pieces = small_task.LEGENDS + 1
    steps = _walk(plan, plan.documents, pieces, lambda shown: rng.choice(questions[shown[-1] // pieces]), rng)
    # A legend of another context is pinned in front, as a session pins what comes first.
    other, _ = small_task.render(small_task.sample_contexts(drawn, 1))
    return Traffic(shift, other[0][0], tuple(images), steps, plan.shift_at, plan.keep)


def _texts_of(asked: small_task.Questions) -> list[list[str]]:
    """Writes the questions of each context as text; every context has at least one."""
    names, texts_by_row = small_task.VOCABULARY.names, []
    for ask, argument, valid in zip(asked.ask, asked.argument, asked.valid, strict=True):
        pairs = zip(ask[valid], argument[valid], strict=True)
        own = [f"{names[int(word)]} {names[int(other)]}" for word, other in pairs]
        texts_by_row.append(own or [f"{names[int(ask[0])]} {names[int(argument[0])]}"])
    return texts_by_row


def _documents(backbone: Any, domain: str, plan: TrafficPlan, chunk: int, rng: random.Random) -> list[list[int]]:
    """Reads documents of a domain, other ones for each seed, as chunks."""
    most = plan.pieces * chunk
    found = texts.documents(backbone, domain, 6 * plan.documents, most, most)
    chunks = []
    for document in rng.sample(found, plan.documents):
        ids = document.ids.tolist()
        chunks += [ids[first : first + chunk] for first in range(0, most, chunk)]
    return chunks


def _records(backbone: Any, chunk: int, rng: random.Random) -> list[int]:
    """Draws a chunk of records: the same names in each, in another order and with other numbers."""
    lines: list[str] = []
    ids: list[int] = []
    while len(ids) < chunk:
        name = rng.choice(NAMES)
        lines.append(f"{name}: {rng.randint(100, 999)}")
        ids = backbone.tokenizer.encode("\n".join(lines), add_special_tokens=False).ids
    return ids[:chunk]


def _walk(plan: TrafficPlan, documents: int, pieces: int, ask: Any, rng: random.Random) -> tuple[TrafficStep, ...]:
    """Draws the steps: chunks are numbered by document, those of after the shift behind all others."""
    steps: list[TrafficStep] = []
    shown: list[int] = []
    left, here, other = 0, 0, 0
    while len(steps) < plan.answers:
        first = 0 if len(steps) < plan.shift_at else documents
        begins = left == 0 or len(steps) == plan.shift_at
        if begins:
            left, shown = rng.randint(*plan.task), []
            one, two = rng.sample(range(first, first + documents), 2)
            here, other = one * pieces + rng.choice((0, 0, rng.randrange(pieces))), two * pieces

        else:
            draw, document = rng.random(), here // pieces
            if draw < plan.onward:
                here = document * pieces + (here + 1) % pieces
            elif draw < plan.onward + plan.back:
                here = document * pieces + (here - 1) % pieces
            elif draw < plan.onward + plan.back + plan.aside:
                here, other = other, here
            else:
                here = document * pieces + rng.randrange(pieces)

        # What is in the window is read there. The next one is taken that is not, of the next document if need be.
        inside, moved = set(shown[-plan.keep :]), 0
        while here in inside:
            moved += 1
            document = here // pieces
            if moved % pieces == 0:
                document = first + (document - first + 1) % documents
            here = document * pieces + (here + 1) % pieces
        shown.append(here)
        left -= 1
        steps.append(TrafficStep(here, ask(shown[-plan.keep :]), begins))
    return tuple(steps)
