"""Episodes of agents: what was seen and said, round after round, as traces record it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.traces import PLACING, Event, Trace
from kvpatch_jax.window import Entry, Window

CHARACTERS = 4
"""Characters of a token of text, where a trace states no tokens."""
OMITTED = "[Image omitted by context cleaning]"
"""The text in place of a screenshot that has left."""
LINE = 60
"""Characters of a reply that a list of earlier actions keeps."""
SCREENSHOT_TOKENS, REPLY_TOKENS, SYSTEM_TOKENS, LINE_TOKENS, PLACEHOLDER_TOKENS = 1300, 60, 200, 15, 10
"""Tokens of what no trace states, at the sizes of real agents: a screenshot, a reply, the system text, a line that
stands for a round, and a text in place of a screenshot."""
NO_BACKBONE = "0" * 64
"""Of windows that are followed and not served."""


class Shown(NamedTuple):
    """Something that a prompt shows.

    Attributes:
      content: names it; the same name shows the same.
      tokens: how many it has.
      item: as `Session.add` takes it; None: nobody knows.
    """

    content: str
    tokens: int
    item: Any = None


class PromptPiece(NamedTuple):
    """Something at a place of a prompt.

    Attributes:
      id: of the place; what is shown there may be replaced by something else.
      shown: what is there.
      movable: whether the order in which movable pieces stand has no meaning.
    """

    id: str
    shown: Shown
    movable: bool = False


class Round(NamedTuple):
    """One request of an agent.

    Attributes:
      screens: screenshots that came with it.
      text: other observations; None without.
      reply: what the agent answered; None where it is not recorded.
      line: the reply as a list of earlier actions has it.
      questions: asked at this point, to compare answers.
    """

    screens: tuple[Shown, ...]
    text: Shown | None = None
    reply: Shown | None = None
    line: Shown | None = None
    questions: tuple[str, ...] = ()


class Episode(NamedTuple):
    """What an agent saw and did.

    Attributes:
      name: unique in a run.
      system: in front of all; None: nothing. goal: the first text of the user.
      rounds: in order.
      placeholder: stands where a screenshot has left.
    """

    name: str
    system: Shown | None
    goal: Shown
    rounds: tuple[Round, ...]
    placeholder: Shown


class Prompt(NamedTuple):
    """One prompt of a session: its pieces from the front, and questions to compare answers by."""

    session: str
    pieces: tuple[PromptPiece, ...]
    questions: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------- traces


def shown(trace: Trace, event: Event) -> Shown:
    """Makes what an event places: its files or its text, with the tokens that the trace states, or usual ones."""
    paths = trace.payloads(event)
    item = kvp.Text(event.text) if event.text else (paths[0] if len(paths) == 1 else list(paths) or None)
    text = max(1, len(event.text or "") // CHARACTERS)
    tokens = event.tokens or (SCREENSHOT_TOKENS if event.kind == "chunk" else text)
    return Shown(event.content or event.text or f"{event.session} {event.chunk}", tokens, item)


def _written(text: str, tokens: int | None = None) -> Shown:
    """Makes a text."""
    return Shown(text, tokens or max(1, len(text) // CHARACTERS), kvp.Text(text))


def episodes_of(trace: Trace, placeholder: str = OMITTED) -> list[Episode]:
    """Reads what was seen and said in a trace, an episode for each session; which pieces left is the policies' choice.

    Texts before the first chunk are the system's. The first text behind a question is the agent's reply, all others
    are observations. The first question is the goal.

    Args:
      placeholder: the text in place of a screenshot that a policy lets leave.

    Raises:
      InputError: a recall of a chunk that its session never had.
    """
    episodes, events = [], dict[str, list[Event]]()
    for event in trace.events:
        events.setdefault(event.session, []).append(event)
    for session in events:
        system, rounds, seen = list[str](), list[Round](), dict[str, Shown]()
        screens, texts = list[Shown](), list[str]()
        for event in events[session]:
            if event.op in (*PLACING, "recall") and event.kind == "chunk" and event.chunk is not None:
                if event.op == "recall" and event.chunk not in seen:
                    raise InputError(f"recall of {session!r:.40}: got {event.chunk!r:.80}; expected one added before")
                known = seen[event.chunk] if event.op == "recall" else shown(trace, event)
                seen[event.chunk] = known
                screens.append(known)
            elif event.op in PLACING:
                (texts if rounds or screens else system).append(event.text or "")
            elif event.op == "ask" and rounds and not screens and not texts:
                rounds[-1] = rounds[-1]._replace(questions=(*rounds[-1].questions, event.text or ""))
            elif event.op == "ask":
                if rounds and texts:
                    reply = texts.pop(0)
                    rounds[-1] = rounds[-1]._replace(reply=_written(reply), line=_written(reply[:LINE]))
                text = _written("\n".join(texts)) if texts else None
                rounds.append(Round(tuple(screens), text, questions=(event.text or "",)))
                screens, texts = [], []
        opening = _written("\n".join(system)) if system else None
        goal = _written(rounds[0].questions[0] if rounds and rounds[0].questions[0] else placeholder)
        episodes.append(Episode(session, opening, goal, tuple(rounds), _written(placeholder, PLACEHOLDER_TOKENS)))
    return episodes


def recorded_prompts(trace: Trace) -> Iterator[Prompt]:
    """Follows the windows of a trace, and yields what each session's window shows at every question.

    Raises:
      InputError: a branch, which begins with another session's KV; an event that a window refuses, with its number.
    """
    windows, pieces = dict[str, Window](), dict[tuple[str, str], PromptPiece]()
    for number, event in enumerate(trace.events):
        window = windows.get(event.session)
        if window is None:
            # A session pins a first chunk; a first text stays in front, and may be replaced.
            window = Window.empty(NO_BACKBONE, lead=int(event.kind == "chunk") if trace.lead is None else trace.lead)
        if event.op == "fork":
            raise InputError(f"event {number}: got a branch of {event.session!r:.40}; expected sessions alone")
        if event.op == "ask":
            placed = [pieces[event.session, piece.entry.id] for piece in window.pieces]
            if event.tokens is not None:
                # A question of which the length alone is known is a part of the prompt.
                placed.append(PromptPiece("question", Shown(event.text or "", event.tokens)))
            yield Prompt(event.session, tuple(placed), (event.text or "",))
        elif event.op == "close":
            windows.pop(event.session, None)
        else:
            entry = None
            if event.op in PLACING and event.chunk is not None:
                content = shown(trace, event)
                span = event.span or content.tokens
                entry = Entry(event.chunk, content.content, content.tokens, span, event.kind, event.order_free)
                pieces[event.session, event.chunk] = PromptPiece(event.chunk, content, event.order_free)
            try:
                windows[event.session] = _changed(window, event, entry)
            except ValueError as error:
                raise InputError(f"event {number}, {event.op} of {event.session!r:.40}: {error}") from error


def _changed(window: Window, event: Event, entry: Entry | None) -> Window:
    """Makes the window after an event; before a chunk enters, the oldest leave down to the number that it states."""
    chunk = event.chunk or ""
    if event.op in ("add", "insert", "recall") and event.keep is not None and event.kind == "chunk":
        window = window.slide(max(event.keep - 1, 0))
    match event.op:
        case "add" if entry is not None:
            return window.append(entry)
        case "insert" if entry is not None:
            return window.insert(entry, event.before or "")
        case "replace" if entry is not None:
            return window.replace(event.replaced or "", entry)
        case "slide":
            return window.slide(event.keep or 0)
        case "recall":
            return window.recall(chunk)
        case "evict":
            return window.evict(chunk)
        case _:
            return window.reorder(event.order)
