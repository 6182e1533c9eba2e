"""Draws traces of agents, with images that the shipped models can read: the small task's legends and pages.

* `screenshots`: a new one at each step, the last ones stay; a question about the newest.
* `video`: the same with frames, and every few steps one that left is looked at again.
* `pages`: retrieved documents, ranked anew for every question, and sometimes exchanged; the page that is asked about
  stands behind them. Rankings come back.
* `tree`: a search over one image: at each node the best branch is forked again, each branch takes another look.

A trace is a function of kind, seed and steps alone, but for the canvas that a tower of one image size needs.
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
from ..results.parts import make_out
from ..small_task import sequences, task

STEPS = 20
KEEP = {"screenshots": 3, "video": 3}
"""Images behind the pinned one: with it four, as many as the shipped models were trained with."""
SECONDS = 2.0
"""Between two steps."""
LOOK_BACK = 3
"""Steps of the video from one look back to the next."""
RANKINGS, EXCHANGE = 6, 4
"""Of the pages: rankings that come back, and questions from one exchange of a document to the next."""
BRANCHES = 3


class Shown(NamedTuple):
    """An image of a trace: its id, its pixels, and a question about it."""

    id: str
    pixels: np.ndarray
    question: str


class Drawing:
    """Images and questions, and the events that are made of them."""

    def __init__(self, kind: str, seed: int, out: Path, backbone: ModelBackbone | None):
        self.kind, self.out, self.backbone = kind, out, backbone
        self.random = np.random.default_rng([seed, KINDS.index(kind)])
        self.canvas = (task.LEGEND_ROWS, 3)
        if backbone is not None:
            self.canvas = sequences.form_of(backbone.config, backbone.image_config).legend_shape
        self.events: list[Event] = []
        self.at = 0.0

    def contexts(self, count: int) -> list[tuple[task.Contexts, np.ndarray, np.ndarray]]:
        """Contexts, each with its legends and its page."""
        drawn = task.sample_contexts(self.random, count)
        legends, pages = task.render(drawn, "held_out", self.canvas)
        one = lambda index: type(drawn)(**{name: value[index : index + 1] for name, value in vars(drawn).items()})
        return [(one(index), legends[index], pages[index]) for index in range(count)]

    def question(self, context: task.Contexts, kind: str, shown: list[int] | None = None) -> str:
        """A question of a kind, of what the legends shown say."""
        seen = np.isin(np.arange(task.LEGENDS), range(task.LEGENDS) if shown is None else shown)[None]
        asked = task.ask(context, self.random, {kind: 1}, seen)
        words = small_task.VOCABULARY.names
        return f"{words[asked.ask[0, 0]]} {words[asked.argument[0, 0]]}"

    def add(self, session: str, shown: Shown, *, order_free: bool = False) -> None:
        """An image that comes in, kept as a PNG file."""
        name = f"images/{content_digest(shown.pixels)[:24]}.png"
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shown.pixels).save(path, compress_level=1)
        tokens, span = self._size(shown.pixels)
        self.tell(
            session,
            "add",
            chunk=shown.id,
            content=content_digest(shown.pixels)[:32],
            tokens=tokens,
            span=span,
            order_free=order_free,
            payload=(name,),
        )

    def _size(self, pixels: np.ndarray) -> tuple[int | None, int | None]:
        """Tokens and span of an image, for a backbone."""
        if self.backbone is None:
            return None, None
        prompt = self.backbone.prepare([pixels])
        return prompt["input_ids"].shape[1], int(np.asarray(prompt["position_ids"]).max()) + 1

    def tell(self, session: str, op: Any, **fields: Any) -> None:
        """An event now."""
        self.events.append(Event(self.at, session, op, **fields))

    def stream(self, count: int) -> Iterator[Shown]:
        """Images one after the other, four of a context: three legends, then the page that they explain."""
        contexts = self.contexts(-(-count // sequences.CHUNKS))
        for number in range(count):
            which, place = divmod(number, sequences.CHUNKS)
            context, legends, page = contexts[which]
            if place < task.LEGENDS:
                yield Shown(f"image {number}", legends[place], self.question(context, "legend", [place]))
            else:
                yield Shown(f"image {number}", page, self.question(context, "chain", [1, 2]))


def screenshots(drawing: Drawing, steps: int) -> None:
    """Looks at one image after the other."""
    for shown in drawing.stream(steps):
        drawing.tell("agent", "slide", keep=KEEP["screenshots"] - 1)
        drawing.add("agent", shown)
        drawing.tell("agent", "ask", text=shown.question, steps=1)
        drawing.at += SECONDS


def video(drawing: Drawing, steps: int) -> None:
    """Looks at one frame after the other, and back at one that left, mostly at the key frames."""
    seen: list[Shown] = []
    keep, window = KEEP["video"], list[str]()
    for step, shown in enumerate(drawing.stream(steps)):
        drawing.tell("agent", "slide", keep=keep - 1)
        window = [*window[-(keep - 1) :], shown.id]
        drawing.add("agent", shown)
        drawing.tell("agent", "ask", text=shown.question, steps=1)
        seen.append(shown)
        gone = [each for each in seen[1:] if each.id not in window]
        if step % LOOK_BACK == LOOK_BACK - 1 and gone:
            back = gone[0] if drawing.random.random() < 0.5 else gone[int(drawing.random.integers(len(gone)))]
            drawing.tell("agent", "slide", keep=keep - 1)
            drawing.tell("agent", "recall", chunk=back.id)
            drawing.tell("agent", "ask", text=back.question, steps=1)
            window = [*window[-(keep - 1) :], back.id]
        drawing.at += SECONDS


def pages(drawing: Drawing, steps: int) -> None:
    """Asks about one page behind documents that are ranked anew."""
    (context, legends, page), *_ = drawing.contexts(1)
    other = task.recolour(context, drawing.random, task.LEGENDS)
    fourth = task.render(other, "held_out", drawing.canvas)[0][0, 0]
    documents = [Shown(f"document {number}", each, "") for number, each in enumerate([*legends, fourth])]
    held = [each.id for each in documents[: task.LEGENDS]]
    for each in documents[: task.LEGENDS]:
        drawing.add("agent", each, order_free=True)
    drawing.add("agent", Shown("page", page, ""))
    rankings = list(itertools.permutations(range(task.LEGENDS)))
    rankings = [rankings[each] for each in drawing.random.permutation(len(rankings))[:RANKINGS]]
    favour = 1 / np.arange(1, len(rankings) + 1)
    known, outside = set(held), documents[-1]
    for step in range(steps):
        drawing.tell("agent", "evict", chunk="page")
        if step % EXCHANGE == EXCHANGE - 1:
            leaving = held[int(drawing.random.integers(len(held)))]
            drawing.tell("agent", "evict", chunk=leaving)
            if outside.id in known:
                drawing.tell("agent", "recall", chunk=outside.id)
            else:
                drawing.add("agent", outside, order_free=True)
            known.add(outside.id)
            held[held.index(leaving)] = outside.id
            outside = next(each for each in documents if each.id == leaving)
        chosen = rankings[int(drawing.random.choice(len(rankings), p=favour / favour.sum()))]
        by_name = sorted(held)
        held = [by_name[place] for place in chosen]
        drawing.tell("agent", "reorder", order=tuple(held))
        drawing.tell("agent", "recall", chunk="page")
        drawing.tell("agent", "ask", text=drawing.question(context, "chain"), steps=1)
        drawing.at += SECONDS


def tree(drawing: Drawing, steps: int) -> None:
    """Searches over one image: a question at each node, the best of three branches goes on."""
    (context, legends, page), (_, more, _), *_ = drawing.contexts(2)
    best, number, looks = "agent", 0, [*legends, *more]
    drawing.add(best, Shown("image", page, ""))
    while number < steps:
        names = []
        for branch in range(min(BRANCHES, steps - number)):
            name = f"{best}/{branch}"
            drawing.tell(best, "fork", branch=name)
            shown = Shown(f"look {number}", looks[number % len(looks)], drawing.question(context, "page"))
            drawing.add(name, shown)
            drawing.tell(name, "ask", text=shown.question, steps=1)
            names.append(name)
            number += 1
            drawing.at += SECONDS
        following = names[int(drawing.random.integers(len(names)))]
        for name in [*names, best]:
            if name != following:
                drawing.tell(name, "close")
        # A new search where windows would grow beyond what the models were trained with.
        if following.count("/") >= sequences.CHUNKS - 1 and number < steps:
            drawing.tell(following, "close")
            following = f"agent {number}"
            drawing.add(following, Shown("image", page, ""))
        best = following


_DRAWN: dict[str, tuple[Callable[[Drawing, int], None], str, int | None]] = {
    "screenshots": (screenshots, "remember", None),
    "video": (video, "remember", None),
    "pages": (pages, "forget", 0),
    "tree": (tree, "remember", None),
}
"""By kind: who draws it, what its windows promise, how many pieces are pinned (None: the first image)."""
KINDS = tuple(_DRAWN)


def generate(kind: str, seed: int, out: Path, *, steps: int = STEPS, backbone: ModelBackbone | None = None) -> Trace:
    """Draws a trace, writes its images below a folder and the trace itself as `<kind>.jsonl`.

    Args:
      steps: questions (of the video: frames, between which it looks back).
      backbone: who will read it: tokens and spans of images are then told, and images fit its tower.

    Raises:
      InputError: another kind, or no steps. TraceError: a file that cannot be written.
    """
    if kind not in KINDS:
        raise InputError(f"traces: kind {kind!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"traces: {steps!r} steps; expected 1 or more")
    make_out(out)
    draw, promise, lead = _DRAWN[kind]
    drawing = Drawing(kind, seed, out, backbone)
    draw(drawing, steps)
    parameters = {"seed": seed, "steps": steps, "promise": promise, "lead": lead}
    trace = Trace(tuple(drawing.events), kind, parameters, out)
    trace.write(out / f"{kind}.jsonl")
    return trace
