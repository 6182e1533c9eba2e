"""Recorded episodes of agents as traces of windows; traces as computer-use requests, as AIPerf replays them ("H CUA").

A step's screenshots enter, those that have left since
leave, one that comes again with the same bytes is recalled, the question is what the next action is, and the answer
stays as a text behind it.

What does not survive the import: tools, delays and lengths of answers; uuids (a screenshot is named by its bytes); the
last answer of a session, which is not recorded; the place of a screenshot among the texts of its message, which follow
it. The export loses ids, contents of clips and of other chunks than single images, sizes, promises and pins, and what
of a text had left (these formats keep all texts); a session that forks becomes several that begin alike, and an order
that changes cannot be written.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.cache import content_digest
from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.utils.optional_packages import require

from .new_files import write_file
from .readers.cua_trace import INSTRUCTION, OMITTED
from .readers.episodes import Episode, action_text, canonical, question_of
from .readers.items import Piece, StoredImage

_ACTION = re.compile(r"Action \d+: (.*)\n", re.DOTALL)
_QUESTION = re.compile(rf"Goal: (.*)\n{re.escape(INSTRUCTION)}\nNext action:", re.DOTALL)


def trace_of_episodes(episodes: Iterable[Episode], folder: Path, kind: str) -> Trace:
    """Makes a trace of episodes, a session each, one second a step. Screenshots are copied into a folder, each once.

    The lead of every window is the system text, or without one the goal.

    Args:
      folder: of the trace. kind: of its header, such as the name of the format.

    Raises:
      InputError, ImageError: a screenshot that cannot be read. TraceError: texts that are longer than a trace has them.
    """
    events = list[Event]()
    for episode in episodes:
        events += _events(episode, folder)
    # Sessions side by side, in the order of time.
    events.sort(key=lambda event: event.at)
    return Trace(tuple(events), kind, {"promise": "remember"}, folder)


def _events(episode: Episode, folder: Path) -> list[Event]:
    events, ids = list[Event](), list[str]()
    shown: dict[str, int] = {}

    def record(at: int, op: Any, **fields: Any) -> None:
        events.append(Event(at, episode.id, op, **fields))

    def add_text(at: int, name: str, text: str) -> None:
        content = content_digest(text)[:32]
        record(at, "add", chunk=name, content=content, kind="text", text=text)

    add_text(0, "system", episode.system or f"Goal: {episode.goal}\n")
    for number, step in enumerate(episode.steps):
        for screenshot in step.screenshots:
            data, suffix = _image(screenshot)
            digest = content_digest(data)[:32]
            # A screenshot that comes again while it is still shown is another piece of the same content.
            id = digest if digest not in shown or shown[digest] in step.left else f"{digest} #{len(ids)}"
            again, shown[digest] = id in ids, len(ids)
            ids.append(id)
            if again:
                record(number, "recall", chunk=id)
            else:
                path = write_file(folder / "screenshots" / f"{digest}{suffix}", data)
                payload = path.relative_to(folder).as_posix()
                record(number, "add", chunk=id, content=digest, payload=(payload,))
        if step.observation:
            add_text(number, f"observation {number + 1}", f"{step.observation}\n")
        before = set(episode.steps[number - 1].left) if number else set()
        # A screenshot that was recalled has left under an earlier number, and is there again.
        present = {id for place, id in enumerate(ids) if place not in step.left}
        leaving = dict.fromkeys(ids[place] for place in step.left if place not in before)
        for id in leaving:
            if id not in present:
                record(number, "evict", chunk=id)
        record(number, "ask", text=question_of(episode, step))
        if step.response:
            add_text(number, f"action {number + 1}", action_text(number + 1, step.response))
    record(len(episode.steps), "close")
    return events


def _image(screenshot: Piece) -> tuple[bytes, str]:
    """Returns the bytes of an image, and the suffix of its file."""
    content = screenshot.content
    if isinstance(content, StoredImage):
        return content.read(), ".png"
    if isinstance(content, Path):
        return content.read_bytes(), content.suffix
    raise TraceError(f"trace: got {screenshot.label!r:.80} of another kind; expected an image")


# ---------------------------------------------------------------------------------------------------------- export


@dataclasses.dataclass
class _Message:
    """A message of a session: its role, and parts, where an image is (chunk, its data URL)."""

    role: str
    parts: list[str | tuple[str, str]]


@dataclasses.dataclass
class _Conversation:
    """What a session has said and shown so far.

    Attributes:
      left: chunks that stand as a mark. asked: whether the last event was a question, so that a text answers it.
    """

    messages: list[_Message]
    images: dict[str, str]
    left: set[tuple[int, int]]
    shown: dict[str, tuple[int, int]]
    asked: bool = False
    question: str | None = None


def write_computer_use(trace: Trace, path: Path) -> Path:
    """Writes a trace's questions as the requests of computer-use sessions, into a new file h_cua.jsonl.

    A text before the first chunk is the system's, one right after a question the agent's answer (a tool call, if it is
    JSON with name and arguments), every other one an observation.

    Raises:
      TraceError: a piece that is no text and no single image with its file, or an event that such requests cannot say.
      InputError: the file is there.
    """
    conversations: dict[str, _Conversation] = {}
    lines, times = list[str](), dict[str, float]()
    for number, event in enumerate(trace):
        talk = conversations.setdefault(event.session, _Conversation([], {}, set(), {}))
        where = f"event {number}: got {event.op!r} of {event.session!r:.40}"
        if event.op == "ask":
            _ask(talk, event)
            extra = {"delay": round(1000 * (event.at - times[event.session]), 3)} if event.session in times else {}
            times[event.session] = event.at
            record = {"session_id": event.session, "messages": _written(talk), "tools": []}
            record |= {"output_length": event.steps or 256, "extra": {"tool_choice": "auto"}} | extra
            lines.append(json.dumps(record, ensure_ascii=False))
        elif event.op == "add" and event.kind == "text" and event.text is not None:
            _say(talk, event.text)
        elif event.op == "add" and len(event.payload) == 1:
            _make_room(talk, event.keep, event.chunk)
            [file] = trace.payloads(event)
            kind = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(file.suffix.lower(), "png")
            url = f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
            talk.images[event.chunk or ""] = url
            _show(talk, event.chunk or "")
        elif event.op == "recall" and event.chunk in talk.images:
            _make_room(talk, event.keep, event.chunk)
            _show(talk, event.chunk or "")
        elif event.op == "slide":
            _make_room(talk, (event.keep or 0) + 1, None)
        elif event.op == "evict" and event.chunk in talk.shown:
            talk.left.add(talk.shown.pop(event.chunk or ""))
        elif event.op == "fork" and event.branch is not None:
            copied = [_Message(message.role, list(message.parts)) for message in talk.messages]
            conversations[event.branch] = _Conversation(
                copied, dict(talk.images), set(talk.left), dict(talk.shown), talk.asked, talk.question
            )
        elif event.op != "close":
            raise TraceError(f"{where}, which requests cannot say; expected texts and single images with their files")
        if event.op != "ask" and event.op != "evict":
            talk.asked = False
    return write_file(path, "".join(f"{line}\n" for line in lines).encode())


def _observation(talk: _Conversation) -> _Message:
    """Returns the message that observations go to: the last one, unless that is the agent's or the system's."""
    if not talk.messages or talk.messages[-1].role in ("assistant", "system"):
        first = all(message.role == "system" for message in talk.messages)
        talk.messages.append(_Message("user" if first else "tool", []))
    return talk.messages[-1]


def _say(talk: _Conversation, text: str) -> None:
    if talk.asked:
        found = _ACTION.fullmatch(text)
        talk.messages.append(_Message("assistant", [found[1] if found else text]))
    elif not talk.images and talk.question is None and not talk.messages:
        talk.messages.append(_Message("system", [text]))
    else:
        _observation(talk).parts.append(text.removesuffix("\n"))


def _ask(talk: _Conversation, event: Event) -> None:
    """Adds a question to the last observation, unless it is the one asked before."""
    if event.text != talk.question:
        found = _QUESTION.fullmatch(event.text or "")
        _observation(talk).parts.append(found[1] if found else event.text or "")
    elif not talk.messages or talk.messages[-1].role == "assistant":
        _observation(talk)
    talk.question, talk.asked = event.text, True


def _show(talk: _Conversation, chunk: str) -> None:
    message = _observation(talk)
    talk.shown[chunk] = len(talk.messages) - 1, len(message.parts)
    message.parts.append((chunk, talk.images[chunk]))


def _make_room(talk: _Conversation, keep: int | None, entering: str | None) -> None:
    """Lets the oldest chunks leave, so that `keep` are shown with the one that enters. The first one is the lead."""
    if keep is None:
        return
    pinned = 0 if any(message.role == "system" for message in talk.messages) else 1
    movable = list(talk.shown)[pinned:]
    for chunk in movable[: max(len(movable) - max(keep - 1, 0), 0)]:
        if chunk != entering:
            talk.left.add(talk.shown.pop(chunk))


def _written(talk: _Conversation) -> list[dict[str, Any]]:
    """Returns the messages of a request in OpenAI's form."""
    messages = list[dict[str, Any]]()
    calls = 0
    for number, message in enumerate(talk.messages):
        if message.role == "system":
            messages.append({"role": "system", "content": message.parts[0]})
        elif message.role == "assistant":
            call = _call(str(message.parts[0]), calls)
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]} if call else
                            {"role": "assistant", "content": message.parts[0]})  # fmt: skip
            calls += 1
        else:
            content = list[dict[str, Any]]()
            for place, part in enumerate(message.parts):
                if isinstance(part, str):
                    content.append({"type": "text", "text": part})
                elif (number, place) in talk.left:
                    content.append({"type": "text", "text": OMITTED})
                else:
                    content.append({"type": "image_url", "image_url": {"url": part[1]}, "uuid": part[0]})
            messages.append({"role": message.role, "content": content})
    return messages


def _call(text: str, number: int) -> dict[str, Any] | None:
    """Returns the tool call that an answer is; None if it is a text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        return None
    return {
        "id": str(number),
        "type": "function",
        "function": {"name": value["name"], "arguments": json.dumps(value["arguments"])},
    }


def draw_computer_use(path: Path, steps: int, seed: int, *, keep: int = 3, size: int = 28, words: int = 60) -> Path:
    """Draws requests of one session by the loader's field list: `steps` screenshots, of which the newest `keep` stay.

    One screenshot in eight is one that was seen before. Every step has an observation of up to `words` words and a tool
    call.

    Args:
      path: of the file; a folder beside it keeps the screenshots. size: of a screenshot, in pixels.
    """
    image, random = require("PIL.Image", "Pillow"), np.random.default_rng(seed)
    folder, events, seen = path.parent, list[Event](), list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    shown = list[str]()

    def record(at: int, op: Any, **fields: Any) -> None:
        events.append(Event(at, "agent", op, **fields))

    record(0, "add", chunk="system", kind="text", text="You are a computer-use agent.")
    for number in range(steps):
        left = [id for id in seen if id not in shown]
        if left and random.random() < 1 / 8:
            id = left[int(random.integers(len(left)))]
            record(number, "recall", chunk=id, keep=keep)
        else:
            id, name = f"screen {len(seen)}", f"drawn/{len(seen)}.png"
            (folder / "drawn").mkdir(exist_ok=True)
            pixels = random.integers(0, 256, (size, size, 3), np.uint8)
            image.fromarray(pixels).save(folder / name, compress_level=1)
            seen.append(id)
            record(number, "add", chunk=id, payload=(name,), keep=keep)
        shown = [*shown, id][-keep:]
        count = int(random.integers(1, words + 1))
        text = " ".join(f"word{word}" for word in random.integers(0, 1000, count))
        if number:
            record(number, "add", chunk=f"observation {number}", kind="text", text=f"{text}\n")
        record(number, "ask", text="Find the invoice.", steps=20)
        call = {"name": "click", "arguments": {"x": int(random.integers(size)), "y": int(random.integers(size))}}
        record(number, "add", chunk=f"action {number}", kind="text", text=canonical(call))
    return write_computer_use(Trace(tuple(events), folder=folder), path)
