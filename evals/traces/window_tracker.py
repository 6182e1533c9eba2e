"""Windows of a trace, followed event by event: the pieces of each session in order, and what was asked."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs, Entry, Window
from models import ModelBackbone

from .prefix_cache import length_of, text_tokens


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

        Of a piece or question whose length alone is known, tokens are drawn by a seed of its name.

        Raises:
          TraceError: a piece without payload, text and tokens. ImageError, InputError: what the backbone cannot read.
        """
        pieces: dict[str, Tokens] = {}
        questions: dict[str, Tokens] = {}
        for event in trace:
            if event.op == "ask" and event.text is not None and event.text not in questions:
                known = event.tokens is None
                questions[event.text] = (
                    backbone.embed(**backbone.prepare([event.text]))
                    if known
                    else drawn_tokens(backbone, event.text, event.tokens or 1)
                )
            if event.op in ("add", "replace") and content_key(event) not in pieces:
                inputs: list[Any] = list(trace.payloads(event))
                if not inputs and event.text is not None:
                    # As a session, which tells a text from a file's name.
                    inputs = [Text(event.text)]
                if inputs:
                    pieces[content_key(event)] = backbone.embed(**backbone.prepare(inputs))
                elif event.tokens is not None:
                    pieces[content_key(event)] = drawn_tokens(backbone, content_key(event), event.tokens)
                else:
                    raise TraceError(
                        f"replay: got {event.chunk!r:.80} without payload, text and tokens; expected one of them"
                    )

        return cls(pieces, questions)

    @classmethod
    def drawn(cls, sizes: "TraceSizes", backbone: ModelBackbone) -> "TraceContents":
        """Draws tokens of these numbers for everything that a trace shows and asks, by seeds of their names."""
        return cls(
            {name: drawn_tokens(backbone, name, count) for name, (count, _) in sizes.pieces.items()},
            {text: drawn_tokens(backbone, f"question {text}", count) for text, count in sizes.questions.items()},
        )

    def entry(self, event: Event) -> Entry:
        """Returns the entry that an event places, in this backbone's tokens."""
        assert event.chunk is not None
        content = content_key(event)
        tokens = self.pieces[content]
        return Entry.of_tokens(event.chunk, tokens, content, kind=event.kind, order_free=event.order_free)

    def asked(self, event: Event) -> int:
        """Returns the tokens of a question."""
        return length_of(self.questions[event.text or ""])


@dataclasses.dataclass(frozen=True)
class TraceSizes:
    """Numbers of tokens of everything that a trace shows and asks, in place of its tokens.

    Attributes:
      pieces, questions: as of `TraceContents`.
    """

    pieces: dict[str, tuple[int, int]]
    questions: dict[str, int]

    @classmethod
    def of(cls, trace: Trace, count: Callable[[Event], int] | None = None) -> "TraceSizes":
        """Reads the numbers that a trace states, and counts the others.

        Args:
          count: counts the tokens of a piece or question. None: the trace states all.

        Raises:
          TraceError: a number that is neither stated nor counted.
        """
        pieces, questions = dict[str, tuple[int, int]](), dict[str, int]()
        for place, event in enumerate(trace):
            if event.op not in ("add", "replace", "ask"):
                continue
            tokens = event.tokens if event.tokens is not None or count is None else count(event)
            if tokens is None:
                raise TraceError(
                    f"event {place}: got {event.op!r} of {event.chunk or event.text!r:.80} without tokens; expected "
                    "their number, or a function that counts them"
                )
            if event.op == "ask":
                questions[event.text or ""] = tokens
            else:
                pieces[content_key(event)] = tokens, event.span or tokens
        return cls(pieces, questions)

    def scaled(self, factor: int) -> "TraceSizes":
        """Returns numbers divided by a factor and rounded, at least 1: lengths that a small model can replay."""
        pieces = {name: max(1, round(count / factor)) for name, (count, _) in self.pieces.items()}
        questions = {text: max(1, round(count / factor)) for text, count in self.questions.items()}
        return TraceSizes({name: (count, count) for name, count in pieces.items()}, questions)

    def entry(self, event: Event) -> Entry:
        """Returns the entry that an event places."""
        content = content_key(event)
        return Entry(event.chunk or "", content, *self.pieces[content], event.kind, event.order_free)

    def asked(self, event: Event) -> int:
        """Returns the tokens of a question."""
        return self.questions[event.text or ""]


def drawn_tokens(backbone: ModelBackbone, name: str, count: int) -> Tokens:
    """Draws text tokens by a seed of a name, which stands for a content that nobody knows."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    # Ids that every vocabulary has, and that are no placeholder of an image.
    most = min(backbone.config.text.vocabulary, 290)
    ids = np.random.default_rng(seed).integers(3, most, (1, count)).astype(np.int32)
    return text_tokens(backbone, ids)


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
      event: that asks.
    """

    number: int
    session: str
    pieces: tuple[Entry, ...]
    event: Event

    @property
    def text(self) -> str:
        """The question."""
        return self.event.text or ""


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


NO_COSTS = Costs("0" * 64, 1, 0, 0, 0, ForwardCosts((0,), (0,), (0,), 0))
"""Of windows that are followed and not served."""
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


def moments(trace: Trace, contents: TraceContents | TraceSizes, costs: Costs) -> Iterator[Moment]:
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
            yield TracedQuestion(number, event.session, pieces, event)
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
