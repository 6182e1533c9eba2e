"""What a trace's windows hold, whoever serves them: the pieces of each session in order, and what was asked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs, Entry, Window
from models import ModelBackbone


class Shape(NamedTuple):
    """What windows are made with: what they promise, and how many pieces are pinned (None: what `Window` pins)."""

    promise: Any
    lead: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Contents:
    """Tokens of all that a trace shows and asks, made once and shared by all ways.

    Attributes:
      pieces: by content, at positions from 0. questions: by text.
    """

    pieces: dict[str, Tokens]
    questions: dict[str, Tokens]

    @classmethod
    def of(cls, trace: Trace, backbone: ModelBackbone) -> "Contents":
        """Embeds what a trace shows; the tower's work is in no way's figures, for all need it alike.

        Raises:
          TraceError: a piece without payload and text. ImageError, InputError: what the backbone does not read.
        """
        pieces: dict[str, Tokens] = {}
        questions: dict[str, Tokens] = {}
        for event in trace:
            if event.op == "ask" and event.text is not None and event.text not in questions:
                questions[event.text] = backbone.embed(**backbone.prepare([event.text]))
            if event.op in ("add", "replace") and key_of(event) not in pieces:
                things: list[Any] = list(trace.payloads(event)) or [event.text]
                if things == [None]:
                    raise TraceError(f"replay: {event.chunk!r:.80} has neither payload nor text; expected one")
                pieces[key_of(event)] = backbone.embed(**backbone.prepare(things))
        return cls(pieces, questions)

    def entry(self, event: Event) -> Entry:
        """The piece that an event places, as this backbone reads it."""
        tokens = self.pieces[key_of(event)]
        assert event.chunk is not None
        span = int(np.asarray(tokens.positions).max()) + 1
        return Entry(event.chunk, key_of(event), tokens.embeddings.shape[1], span, event.kind, event.order_free)


def key_of(event: Event) -> str:
    """What a piece is known by: its content, or where nobody said its session and id."""
    return event.content or f"{event.session} {event.chunk}"


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question of a trace.

    Attributes:
      number: from 0. session: who asks. pieces: what its window holds, from the front. text: what is asked.
    """

    number: int
    session: str
    pieces: tuple[Entry, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Forked:
    """A session that goes on from another's window: its pieces then."""

    session: str
    branch: str
    pieces: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Closed:
    """A session that ends."""

    session: str


Moment = Asked | Forked | Closed


def shape_of(trace: Trace) -> Shape:
    """What the windows of a trace are made with, as its header says it, or as sessions have it."""
    promise, lead = trace.parameters.get("promise", "remember"), trace.parameters.get("lead")
    if promise not in ("remember", "forget") or isinstance(lead, bool) or not isinstance(lead, int | None):
        raise TraceError(f"replay: promise {promise!r:.40}, lead {lead!r:.40}; expected as Window.empty takes them")
    return Shape(promise, lead)


def moments(trace: Trace, contents: Contents, costs: Costs) -> Iterator[Moment]:
    """Follows the windows of a trace and tells what matters to those who serve them.

    What happens between two questions is told by its outcome: a server is free to do less.

    Raises:
      TraceError: an event that the windows do not take, by its number. WindowError: never.
    """
    shape, windows, number = shape_of(trace), dict[str, Window](), 0
    empty = Window.empty(costs, promise=shape.promise, lead=shape.lead)
    for place, event in enumerate(trace):
        window = windows.get(event.session, empty)
        pieces = tuple(piece.entry for piece in window.pieces)
        if event.op == "ask" and event.text is not None:
            yield Asked(number, event.session, pieces, event.text)
            number += 1
        elif event.op == "fork" and event.branch is not None:
            windows[event.branch] = window
            yield Forked(event.session, event.branch, pieces)
        elif event.op == "close":
            windows.pop(event.session, None)
            yield Closed(event.session)
        else:
            try:
                windows[event.session] = _changed(window, event, contents)
            except ValueError as error:
                raise TraceError(f"replay: event {place}, {event.op} of {event.session!r:.40}: {error}") from error


def _changed(window: Window, event: Event, contents: Contents) -> Window:
    chunk = event.chunk or ""
    if event.op in ("add", "recall") and event.keep is not None and event.kind == "chunk":
        window, _ = window.slide(max(event.keep - 1, 0))
    if event.op == "add":
        return window.append(contents.entry(event))[0]
    if event.op == "replace":
        return window.replace(event.replaced or "", contents.entry(event))[0]
    if event.op == "slide":
        return window.slide(event.keep or 0)[0]
    if event.op == "recall":
        return window.recall(chunk)[0]
    if event.op == "evict":
        return window.evict(chunk)[0]
    return window.reorder(event.order)[0]


def load_trace(path: Path) -> Trace:
    """Reads a trace, with a last line that was cut off left out."""
    return Trace.read(path, torn=True)
