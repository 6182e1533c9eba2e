"""Recorded computer use as AIPerf replays it (H CUA Perf; ai-dynamo/aiperf) as traces of windows.

JSON Lines of requests, by AIPerf's loader and docs/tutorials/h-cua-perf.md: session_id, messages (OpenAI's form; an
image_url is a data URL), tools, output_length, delay, extra. A session's requests follow each other. A screenshot that
has left stands as the text "[Image omitted by context cleaning]" in the observation that it came with. Where a request
has fewer parts than the one before, or others, the agent began another history, which is a session of its own.

Left out: tools, delays and lengths, which are a load's; a session's last answer, which no request has.
"""

import base64
import binascii
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.cache import content_digest
from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.utils.atomic_files import replace

from ..measure.records import json_objects
from .episodes import OMITTED

QUESTION = "What is the next action?"
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}


class PromptPart(NamedTuple):
    """A part of a prompt: its text, or the data URL of a screenshot; `image` also where a screenshot has left."""

    text: str
    image: bool


def read_computer_use(path: Path) -> Trace:
    """Reads a computer-use trace, plain or compressed by gzip; screenshots are written into a folder beside the file.

    Raises:
      TraceError: a field that does not fit, naming line and field. InputError: as `json_objects`.
    """
    folder = path.with_name(f"{path.name.partition('.')[0]}_screenshots")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    histories, turns, events = dict[str, _History](), dict[str, int](), list[Event]()
    for fields, where in json_objects(path):
        session, messages = fields.get("session_id"), fields.get("messages")
        if not isinstance(session, str) or not 0 < len(session) <= 200:
            raise TraceError(f"{where}, session_id: got {session!r:.80}; expected a text")
        if not isinstance(messages, list):
            raise TraceError(f"{where}, messages: got {messages!r:.80}; expected a list")
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
    return Trace(tuple(events), "computer use", {"promise": "remember", "lead": 0}, folder)


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
            old == new or (old.image and new.image and OMITTED in (old.text, new.text))
            for old, new in zip(self.parts, parts, strict=False)
        ]
        return len(parts) >= len(self.parts) and all(same)

    def request(self, turn: int, parts: list[PromptPart], where: str) -> Iterator[Event]:
        """Yields the events that lead to a request, and its question."""
        for place, (old, new) in enumerate(zip(self.parts, parts, strict=False)):
            id = self.ids[place]
            if old != new and new.text == OMITTED and id is not None:
                yield Event(turn, self.session, "evict", chunk=id)
            elif old != new and id is not None:
                yield Event(turn, self.session, "recall", chunk=id)
        for place in range(len(self.parts), len(parts)):
            self.ids.append(None)
            part = parts[place]
            if not part.image:
                digest = content_digest(part.text)[:32]
                yield Event(turn, self.session, "add", f"text {place}", digest, kind="text", text=part.text)
            elif part.text != OMITTED:
                digest, payload = self._stored(part.text, f"{where}, part {place}")
                self.ids[place] = f"screen {place}"
                yield Event(turn, self.session, "add", f"screen {place}", digest, payload=(payload,))
        self.parts = parts
        yield Event(turn, self.session, "ask", text=QUESTION)

    def _stored(self, url: str, where: str) -> tuple[str, str]:
        """Writes a screenshot. Returns its digest, and its path in the folder."""
        head, comma, data = url.partition(";base64,")
        kind = head.removeprefix("data:image/")
        if not comma or kind not in _SUFFIXES:
            raise TraceError(
                f"{where}: got {url!r:.60}; expected a data URL of PNG, JPEG or WebP: nothing is downloaded"
            )
        try:
            content = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise TraceError(f"{where}: got no base64 ({error}); expected an image") from None
        digest = content_digest(content)[:32]
        target = self.folder / "images" / f"{digest}{_SUFFIXES[kind]}"
        if not target.exists():
            replace(target, content)
        return digest, target.relative_to(self.folder).as_posix()


def _parts(message: Any, where: str) -> Iterator[PromptPart]:
    """Yields the parts of a message: texts, tool calls as JSON, and screenshots."""
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(message, dict) or not isinstance(content, str | list | None):
        raise TraceError(f"{where}, messages: got {message!r:.80}; expected objects with a text or a list of parts")
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise TraceError(f"{where}, messages: got the part {part!r:.80}; expected an object with type")
        url, text = part.get("image_url"), part.get("text")
        if part["type"] == "image_url":
            url = url.get("url") if isinstance(url, dict) else url
            if not isinstance(url, str):
                raise TraceError(f"{where}, image_url: got {url!r:.60}; expected a data URL")
            yield PromptPart(url, True)
        elif not isinstance(text, str):
            raise TraceError(f"{where}, text: got {text!r:.80}; expected a text")
        elif text.strip():
            yield PromptPart(OMITTED, True) if text.strip() == OMITTED else PromptPart(text, False)
    for call in message.get("tool_calls") or ():
        yield PromptPart(json.dumps(call.get("function") if isinstance(call, dict) else call, sort_keys=True), False)
