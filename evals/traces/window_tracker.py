"""Windows of a trace, followed event by event: the pieces of each session in order, and what was asked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs, Entry, Window
from models import ModelBackbone


class TraceConfig(NamedTuple):
    """Promise of a trace's windows, and how many pieces are pinned (None: as `Window` pins by default)."""

    promise: Any
    lead: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class TraceContents:
    """Tokens of everything that a trace shows and asks, embedded once and shared by all replay modes.

    Attributes:
      pieces: by content, at positions from 0.
      questions: by text.
    """

    pieces: dict[str, Tokens]
    questions: dict[str, Tokens]

    @classmethod
    def of(cls, trace: Trace, backbone: ModelBackbone) -> "TraceContents":
        """Embeds what a trace shows. The tower's work is in no mode's figures, because all modes need it alike.

        Raises:
          TraceError: a piece without payload and text. ImageError, InputError: what the backbone cannot read.
        """
        pieces: dict[str, Tokens] = {}
        questions: dict[str, Tokens] = {}
        for event in trace:
            if event.op == "ask" and event.text is not None and event.text not in questions:
                questions[event.text] = backbone.embed(**backbone.prepare([event.text]))
            if event.op in ("add", "replace") and content_key(event) not in pieces:
                inputs: list[Any] = list(trace.payloads(event)) or [event.text]
                if inputs == [None]:
                    raise TraceError(f"replay: got {event.chunk!r:.80} without payload and text; expected one of them")
                pieces[content_key(event)] = backbone.embed(**backbone.prepare(inputs))

        return cls(pieces, questions)

    def entry(self, event: Event) -> Entry:
        """Returns the entry that an event places, in this backbone's tokens."""
        assert event.chunk is not None
        content = content_key(event)
        tokens = self.pieces[content]
        return Entry.of_tokens(event.chunk, tokens, content, kind=event.kind, order_free=event.order_free)


def content_key(event: Event) -> str:
    """Returns what identifies a piece: its content or, if the trace lacks that, its session and id."""
    return event.content or f"{event.session} {event.chunk}"


@dataclasses.dataclass(frozen=True)
class TracedQuestion:
    """A question of a trace.

    Attributes:
      number: from 0.
      session: which asks.
      pieces: of its window, from the front.
      text: of the question.
    """

    number: int
    session: str
    pieces: tuple[Entry, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class TracedFork:
    """A branch that starts from a session's window, with its pieces then."""

    session: str
    branch: str
    pieces: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class TracedClose:
    """The end of a session."""

    session: str


Moment = TracedQuestion | TracedFork | TracedClose


def config_of(trace: Trace) -> TraceConfig:
    """Returns the configuration of a trace's windows, from its header or a session's defaults.

    Raises:
      TraceError: values that no window has.
    """
    promise, lead = trace.parameters.get("promise", "remember"), trace.parameters.get("lead")
    if promise not in ("remember", "forget") or isinstance(lead, bool) or not isinstance(lead, int | None):
        raise TraceError(f"replay: got promise {promise!r:.40}, lead {lead!r:.40}; expected as Window.empty takes them")
    return TraceConfig(promise, lead)


def moments(trace: Trace, contents: TraceContents, costs: Costs) -> Iterator[Moment]:
    """Follows the windows of a trace, and yields what whoever serves them has to do.

    Only the outcome of what happens between two questions is yielded: a server is free to do less.

    Raises:
      TraceError: an event that a window refuses, with its number.
    """
    config, windows, number = config_of(trace), dict[str, Window](), 0
    empty = Window.empty(costs, promise=config.promise, lead=config.lead)
    for place, event in enumerate(trace):
        window = windows.get(event.session, empty)
        pieces = tuple(piece.entry for piece in window.pieces)
        if event.op == "ask" and event.text is not None:
            yield TracedQuestion(number, event.session, pieces, event.text)
            number += 1
        elif event.op == "fork" and event.branch is not None:
            windows[event.branch] = window
            yield TracedFork(event.session, event.branch, pieces)
        elif event.op == "close":
            windows.pop(event.session, None)
            yield TracedClose(event.session)
        else:
            try:
                entry = contents.entry(event) if event.op in ("add", "replace") else None
                windows[event.session] = changed(with_room(window, event), event, entry)
            except ValueError as error:
                what = f"event {place}, {event.op} of {event.session!r:.40}"
                raise TraceError(f"replay: got {what}: {error}; expected one that the window takes") from error


def with_room(window: Window, event: Event) -> Window:
    """Slides a window for a chunk that comes in. The event states how many chunks stay, the new one included."""
    if event.op in ("add", "recall") and event.keep is not None and event.kind == "chunk":
        window, _ = window.slide(max(event.keep - 1, 0))
    return window


def changed(window: Window, event: Event, entry: Entry | None) -> Window:
    """Returns a window after an event that changes it.

    Args:
      entry: what the event places ("add", "replace").

    Raises:
      ValueError: the window refuses it.
    """
    chunk = event.chunk or ""
    if event.op == "slide":
        return window.slide(event.keep or 0)[0]
    if event.op == "recall":
        return window.recall(chunk)[0]
    if event.op == "evict":
        return window.evict(chunk)[0]
    if event.op == "reorder":
        return window.reorder(event.order)[0]
    assert entry is not None
    return window.append(entry)[0] if event.op == "add" else window.replace(event.replaced or "", entry)[0]


def load_trace(path: Path) -> Trace:
    """Reads a trace, without a last line that was cut off."""
    return Trace.read(path, torn=True)
