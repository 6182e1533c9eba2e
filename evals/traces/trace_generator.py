"""Generator of agents' traces, with images that the shipped models can read: the small task's legends and pages.

* `screenshots`: a new one at each step, the last ones stay; a question about the newest.
* `video`: the same with frames, and every few steps a second look at one that left.
* `pages`: retrieved documents, ranked again for every question and sometimes exchanged; the page in question stands
  behind them. Rankings recur.
* `tree`: a search over one image: at each node the best branch is forked, and each branch takes another look.

A trace is a function of kind, seed and steps, and of the canvas if the tower accepts a single image size.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from kvpatch_jax.cache import content_digest
from kvpatch_jax.errors import InputError
from kvpatch_jax.traces import Event, Trace
from models import ModelBackbone

from .. import small_task
from ..harness.parts import make_out
from ..small_task import sequences, task

STEPS = 20
KEEP = {"screenshots": 3, "video": 3}
"""Images behind the pinned one: four with it, as many as the shipped models were trained with."""
SECONDS = 2.0
"""Between two steps."""
LOOK_BACK = 3
"""Steps of the video from one look back to the next."""
RANKINGS, EXCHANGE = 6, 4
"""Of the pages: rankings that recur, and questions from one exchange of a document to the next."""
BRANCHES = 3


class TracedImage(NamedTuple):
    """An image of a trace: its id, its pixels, and a question about it."""

    id: str
    pixels: np.ndarray
    question: str


class TraceBuilder:
    """Images and questions of a trace, and the events made of them."""

    def __init__(self, kind: str, seed: int, out: Path, backbone: ModelBackbone | None):
        """Creates a trace without events. Images are sized for the backbone's tower."""
        self.kind, self.out, self.backbone = kind, out, backbone
        self.random = np.random.default_rng([seed, KINDS.index(kind)])
        self.canvas = (task.LEGEND_ROWS, 3)
        if backbone is not None:
            self.canvas = sequences.form_of(backbone.config, backbone.image_config).legend_shape
        self.events: list[Event] = []
        self.time = 0.0

    def record(self, session: str, op: Any, **fields: Any) -> None:
        """Appends an event at the present time."""
        self.events.append(Event(self.time, session, op, **fields))

    def add(self, session: str, image: TracedImage, *, order_free: bool = False) -> None:
        """Appends an image that comes in, stored as a PNG file."""
        digest = content_digest(image.pixels)
        name = f"images/{digest[:24]}.png"
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.pixels).save(path, compress_level=1)

        # Tokens and span are known only for a backbone.
        tokens = span = None
        if self.backbone is not None:
            prompt = self.backbone.prepare([image.pixels])
            tokens, span = prompt["input_ids"].shape[1], int(np.asarray(prompt["position_ids"]).max()) + 1

        size = {"tokens": tokens, "span": span, "order_free": order_free}
        self.record(session, "add", chunk=image.id, content=digest[:32], payload=(name,), **size)

    def ask(self, session: str, question: str) -> None:
        """Appends a question that is answered by one token."""
        self.record(session, "ask", text=question, steps=1)

    def contexts(self, count: int) -> list[tuple[task.Contexts, np.ndarray, np.ndarray]]:
        """Draws contexts, each with its legends and its page."""
        contexts = task.sample_contexts(self.random, count)
        legends, pages = task.render(contexts, "held_out", self.canvas)
        drawn = []
        for index in range(count):
            fields = {name: value[index : index + 1] for name, value in vars(contexts).items()}
            drawn.append((type(contexts)(**fields), legends[index], pages[index]))
        return drawn

    def question(self, context: task.Contexts, kind: str, shown: list[int] | None = None) -> str:
        """Draws a question of a kind about what the legends shown say."""
        seen = np.isin(np.arange(task.LEGENDS), range(task.LEGENDS) if shown is None else shown)[None]
        asked = task.ask(context, self.random, {kind: 1}, seen)
        words = small_task.VOCABULARY.names
        return f"{words[asked.ask[0, 0]]} {words[asked.argument[0, 0]]}"

    def stream(self, count: int) -> Iterator[TracedImage]:
        """Yields images, four of a context: three legends, then the page that they explain."""
        contexts = self.contexts(-(-count // sequences.CHUNKS))
        for number in range(count):
            index, place = divmod(number, sequences.CHUNKS)
            context, legends, page = contexts[index]
            if place < task.LEGENDS:
                yield TracedImage(f"image {number}", legends[place], self.question(context, "legend", [place]))
            else:
                yield TracedImage(f"image {number}", page, self.question(context, "chain", [1, 2]))


def screenshots(trace: TraceBuilder, steps: int) -> None:
    """Looks at one image after the other."""
    for image in trace.stream(steps):
        trace.record("agent", "slide", keep=KEEP["screenshots"] - 1)
        trace.add("agent", image)
        trace.ask("agent", image.question)
        trace.time += SECONDS


def video(trace: TraceBuilder, steps: int) -> None:
    """Looks at one frame after the other, and again at frames that left, mostly at the first."""
    seen: list[TracedImage] = []
    keep, window = KEEP["video"], list[str]()
    for step, image in enumerate(trace.stream(steps)):
        trace.record("agent", "slide", keep=keep - 1)
        window = [*window[-(keep - 1) :], image.id]
        trace.add("agent", image)
        trace.ask("agent", image.question)
        seen.append(image)

        # The pinned frame never leaves.
        gone = [frame for frame in seen[1:] if frame.id not in window]

        if step % LOOK_BACK == LOOK_BACK - 1 and gone:
            back = gone[0] if trace.random.random() < 0.5 else gone[int(trace.random.integers(len(gone)))]
            trace.record("agent", "slide", keep=keep - 1)
            trace.record("agent", "recall", chunk=back.id)
            trace.ask("agent", back.question)
            window = [*window[-(keep - 1) :], back.id]

        trace.time += SECONDS


def pages(trace: TraceBuilder, steps: int) -> None:
    """Asks about one page behind documents that are ranked again."""
    (context, legends, page), *_ = trace.contexts(1)
    other = task.recolour(context, trace.random, task.LEGENDS)
    fourth = task.render(other, "held_out", trace.canvas)[0][0, 0]
    documents = [TracedImage(f"document {number}", legend, "") for number, legend in enumerate([*legends, fourth])]
    held = [document.id for document in documents[: task.LEGENDS]]
    for document in documents[: task.LEGENDS]:
        trace.add("agent", document, order_free=True)
    trace.add("agent", TracedImage("page", page, ""))

    # Few rankings recur, the first ones most often.
    rankings = list(itertools.permutations(range(task.LEGENDS)))
    rankings = [rankings[number] for number in trace.random.permutation(len(rankings))[:RANKINGS]]
    favour = 1 / np.arange(1, len(rankings) + 1)
    known, outside = set(held), documents[-1]

    for step in range(steps):
        trace.record("agent", "evict", chunk="page")
        if step % EXCHANGE == EXCHANGE - 1:
            leaving = held[int(trace.random.integers(len(held)))]
            trace.record("agent", "evict", chunk=leaving)
            if outside.id in known:
                trace.record("agent", "recall", chunk=outside.id)
            else:
                trace.add("agent", outside, order_free=True)

            known.add(outside.id)
            held[held.index(leaving)] = outside.id
            outside = next(document for document in documents if document.id == leaving)

        ranking = rankings[int(trace.random.choice(len(rankings), p=favour / favour.sum()))]
        by_name = sorted(held)
        held = [by_name[place] for place in ranking]
        trace.record("agent", "reorder", order=tuple(held))
        trace.record("agent", "recall", chunk="page")
        trace.ask("agent", trace.question(context, "chain"))
        trace.time += SECONDS


def tree(trace: TraceBuilder, steps: int) -> None:
    """Searches over one image: a question at each node, and the best of three branches continues."""
    (context, legends, page), (_, more, _), *_ = trace.contexts(2)
    best, number, looks = "agent", 0, [*legends, *more]
    trace.add(best, TracedImage("image", page, ""))

    while number < steps:
        names = []
        for branch in range(min(BRANCHES, steps - number)):
            name = f"{best}/{branch}"
            trace.record(best, "fork", branch=name)
            look = TracedImage(f"look {number}", looks[number % len(looks)], trace.question(context, "page"))
            trace.add(name, look)
            trace.ask(name, look.question)
            names.append(name)
            number += 1
            trace.time += SECONDS

        following = names[int(trace.random.integers(len(names)))]
        for name in [*names, best]:
            if name != following:
                trace.record(name, "close")

        # A new search starts where windows would exceed what the models were trained with.
        if following.count("/") >= sequences.CHUNKS - 1 and number < steps:
            trace.record(following, "close")
            following = f"agent {number}"
            trace.add(following, TracedImage("image", page, ""))

        best = following


_GENERATORS: dict[str, tuple[Callable[[TraceBuilder, int], None], str, int | None]] = {
    "screenshots": (screenshots, "remember", None),
    "video": (video, "remember", None),
    "pages": (pages, "forget", 0),
    "tree": (tree, "remember", None),
}
"""By kind: its generator, what its windows promise, and how many pieces are pinned (None: the first image)."""
KINDS = tuple(_GENERATORS)


def generate(kind: str, seed: int, out: Path, *, steps: int = STEPS, backbone: ModelBackbone | None = None) -> Trace:
    """Generates a trace, and writes its images below a folder and the trace itself as `<kind>.jsonl`.

    Args:
      steps: questions (of the video: frames, between which it looks back).
      backbone: who will read it: then events state tokens and spans, and images fit its tower.

    Raises:
      InputError: an unknown kind, or no steps. TraceError: a file that cannot be written.
    """
    if kind not in KINDS:
        raise InputError(f"traces.kind: got {kind!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"traces.steps: got {steps!r}; expected an integer >= 1")

    make_out(out)
    draw, promise, lead = _GENERATORS[kind]
    builder = TraceBuilder(kind, seed, out, backbone)
    draw(builder, steps)
    parameters = {"seed": seed, "steps": steps, "promise": promise, "lead": lead}
    trace = Trace(tuple(builder.events), kind, parameters, out)
    trace.write(out / f"{kind}.jsonl")
    return trace
