"""Recorded computer use as AIPerf replays it (H CUA Perf; ai-dynamo/aiperf) as traces of windows.

JSON Lines of requests, by AIPerf's loader and docs/tutorials/h-cua-perf.md: session_id, messages (OpenAI's form; an
image_url is a data URL), tools, output_length, delay, extra. A session's requests follow each other. A screenshot that
has left stands as the text "[Image omitted by context cleaning]" in the observation that it came with. Where a request
has fewer parts than the one before, or others, the agent began another history, which is a session of its own.

Left out: tools, delays and lengths, which are a load's; a session's last answer, which no request has.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.cache import content_digest, unit_items
from kvpatch_jax.errors import InputError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.utils.atomic_files import replace

from ..measure.records import json_objects
from .episodes import OMITTED

QUESTION = "What is the next action?"
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}
"""Of the files of screenshots, by the bytes that they begin with."""


class PromptPart(NamedTuple):
    """A part of a prompt: its text, or the file of a screenshot; `image` also where a screenshot has left."""

    content: str | bytes
    image: bool


def read_computer_use(path: Path) -> Trace:
    """Reads a computer-use trace, plain or compressed by gzip; screenshots are written into a folder beside the file.

    Raises:
      InputError: a field that does not fit, naming line and field; as `json_objects`.
    """
    folder = path.with_name(f"{path.name.partition('.')[0]}_screenshots")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    histories, turns, events = dict[str, _History](), dict[str, int](), list[Event]()
    for fields, where in json_objects(path):
        session, messages = fields.get("session_id"), fields.get("messages")
        if not isinstance(session, str) or not 0 < len(session) <= 200:
            raise InputError(f"{where}, session_id: got {session!r:.80}; expected a text")
        if not isinstance(messages, list):
            raise InputError(f"{where}, messages: got {messages!r:.80}; expected a list")
        parts = list(itertools.chain.from_iterable(_parts(message, where) for message in messages))
        turn = turns[session] = turns.get(session, -1) + 1
        history = histories.get(session)
        if history is None or not history.continues(parts):
            name = session if history is None else f"{session} #{turn}"
            if history is not None:
                events.append(Event(turn, history.session, "close"))
            history = histories[session] = _History(name, folder)
        events += history.request(turn, parts, where)
    # Sessions side by side, in the order of their requests.
    events.sort(key=lambda event: event.at)
    return Trace(tuple(events), 0, folder)


class _History:
    """The parts of one session so far.

    Attributes:
      ids: of the chunk that stands at each part; None: a text, or a screenshot that no request has shown.
    """

    def __init__(self, session: str, folder: Path):
        self.session, self.folder = session, folder
        self.parts: list[PromptPart] = []
        self.ids: list[str | None] = []

    def continues(self, parts: list[PromptPart]) -> bool:
        """Returns whether a request has all that the one before had, screenshots there or left."""
        same = [
            old == new or (old.image and new.image and OMITTED in (old.content, new.content))
            for old, new in zip(self.parts, parts, strict=False)
        ]
        return len(parts) >= len(self.parts) and all(same)

    def request(self, turn: int, parts: list[PromptPart], where: str) -> Iterator[Event]:
        """Yields the events that lead to a request, and its question."""
        for place, (old, new) in enumerate(zip(self.parts, parts, strict=False)):
            id = self.ids[place]
            if old != new and new.content == OMITTED and id is not None:
                yield Event(turn, self.session, "evict", chunk=id)
            elif old != new and id is not None:
                yield Event(turn, self.session, "recall", chunk=id)
        for place in range(len(self.parts), len(parts)):
            self.ids.append(None)
            part = parts[place]
            if isinstance(part.content, bytes):
                digest, payload = self._stored(part.content, f"{where}, part {place}")
                self.ids[place] = f"screen {place}"
                yield Event(turn, self.session, "add", f"screen {place}", digest, payload=(payload,))
            elif not part.image:
                digest = content_digest(part.content)[:32]
                yield Event(turn, self.session, "add", f"text {place}", digest, kind="text", text=part.content)
        self.parts = parts
        yield Event(turn, self.session, "ask", text=QUESTION)

    def _stored(self, content: bytes, where: str) -> tuple[str, str]:
        """Writes a screenshot. Returns its digest, and its path in the folder."""
        suffix = next((suffix for magic, suffix in _SUFFIXES.items() if content.startswith(magic)), None)
        if suffix is None:
            raise InputError(f"{where}: got an image that begins with {content[:8]!r}; expected PNG, JPEG or WebP")
        digest = content_digest(content)[:32]
        target = self.folder / "images" / f"{digest}{suffix}"
        if not target.exists():
            replace(target, content)
        return digest, target.relative_to(self.folder).as_posix()


def _parts(message: Any, where: str) -> Iterator[PromptPart]:
    """Yields the parts of a message: texts, screenshots, and tool calls as JSON."""
    if not isinstance(message, dict) or "role" not in message:
        raise InputError(f"{where}, messages: got {message!r:.80}; expected objects with role and content")
    try:
        items = unit_items(message, f"{where}, messages")
    except InputError as error:
        raise InputError(str(error)) from None
    for item in items:
        if isinstance(item, bytes):
            yield PromptPart(item, True)
        elif not isinstance(item, str):
            raise InputError(f"{where}, messages: got a {type(item).__name__}; expected texts and data URLs of images")
        elif item.strip():
            yield PromptPart(OMITTED, True) if item.strip() == OMITTED else PromptPart(str(item), False)
