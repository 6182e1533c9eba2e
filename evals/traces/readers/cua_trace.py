"""Computer-use traces as AIPerf reads them: an agent's requests, recorded (H CUA Perf; ai-dynamo/aiperf).

JSON Lines, or .jsonl.zst. Fields by AIPerf's loader and docs/tutorials/h-cua-perf.md: session_id, messages (OpenAI's
form; an image_url is a data URL, with a uuid beside it), tools, output_length, delay (ms), extra. A session's requests
follow each other. A screenshot that has left the prompt stands as the text "[Image omitted by context cleaning]" in the
observation (user or tool message) that it came with. The release keeps one screenshot a request; those before it are in
the requests before. A request's answer is the assistant's message that the next request has behind it; the last one's
is not recorded. Where a request has fewer messages or screenshots than the one before, the agent began another history,
which is an episode of its own.

Left out: tool definitions, delays and lengths, which are a load's and not a question's.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ImageError, InputError
from kvpatch_jax.utils.strict_json import loads

from .data_files import DataFolder, ReadOptions, base64_bytes
from .episodes import Episode, EpisodeSet, EpisodeStep, canonical
from .items import Piece, Refusal, StoredImage
from .records import Record, read_records
from .stored_bytes import StoredBytes

OMITTED = "[Image omitted by context cleaning]"
"""The text in place of a screenshot that has left."""

_OBSERVES = ("user", "tool")
INSTRUCTION = 'Answer with the next tool call as JSON: {"arguments": {…}, "name": …}.'


def _read(records: Iterable[Record], files: DataFolder) -> Iterator[Episode | Refusal]:
    history: list[Record] = []
    part = 0
    for record in records:
        try:
            _check(record)
        except InputError as error:
            yield Refusal(record.where, str(error))
            continue
        if history and record["session_id"] != history[-1]["session_id"]:
            yield _made(history, part, files)
            history, part = [], 0
        elif history and _begins_again(history[-1], record):
            yield _made(history, part, files)
            history, part = [], part + 1
        # Screenshots are read again from the file: a session's requests with them would fill the memory.
        history.append(Record({**record.values, "messages": _light(record["messages"])}, record.where, record.reload))
    if history:
        yield _made(history, part, files)


def _check(record: Record) -> None:
    record.name("session_id")
    for number, message in enumerate(record.list_of("messages")):
        field = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{field}: got {message!r:.80}; expected an object with role and content")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise InputError(f"{field}.content: got {content!r:.80}; expected a text or a list of parts")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise InputError(f"{field}.content[{place}]: got {part!r:.80}; expected an object with type")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise InputError(f"{field}.content[{place}].text: got {part.get('text')!r:.80}; expected a text")


def _light(messages: list[Any]) -> list[Any]:
    """Returns messages whose images are marks without their bytes."""
    light = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [{"type": "image_url"} if part["type"] == "image_url" else part for part in content]
        light.append({**message, "content": content})
    return light


def _slots(messages: list[Any]) -> list[tuple[int, int, bool]]:
    """Returns (message, part, whether the image is there) of every screenshot, there or omitted, in order."""
    slots = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if message["role"] not in _OBSERVES or not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if part["type"] == "image_url" or OMITTED in part.get("text", ""):
                slots.append((number, place, part["type"] == "image_url"))
    return slots


def _begins_again(before: Record, record: Record) -> bool:
    fewer = len(record["messages"]) < len(before["messages"])
    return fewer or len(_slots(record["messages"])) < len(_slots(before["messages"]))


def _made(history: list[Record], part: int, files: DataFolder) -> Episode | Refusal:
    try:
        return _episode(history, part, files)
    except (InputError, ImageError) as error:
        return Refusal(history[0].where, f"session {history[0]['session_id']!r:.60}: {error}")


def _episode(history: list[Record], part: int, files: DataFolder) -> Episode:
    identity = history[0].name("session_id")
    # Slots that no request shows cannot be asked about; the others are numbered in order.
    shown: dict[int, StoredImage] = {}
    first: dict[int, int] = {}
    for turn, record in enumerate(history):
        for slot, (message, place, there) in enumerate(_slots(record["messages"])):
            if there and slot not in shown:
                shown[slot] = _image(record, message, place, files)
                first[slot] = turn
    number = {slot: rank for rank, slot in enumerate(sorted(shown))}

    steps, seen = [], 0
    for turn, record in enumerate(history):
        messages = record["messages"]
        there = {slot for slot, (_, _, present) in enumerate(_slots(messages)) if present}
        new = [slot for slot in sorted(shown) if first[slot] == turn]
        steps.append(
            EpisodeStep(
                screenshots=tuple(Piece(shown[slot], f"screenshot {number[slot] + 1}") for slot in new),
                response=_response(history[turn + 1]["messages"][len(messages) :]) if turn + 1 < len(history) else "",
                left=tuple(number[slot] for slot in sorted(shown) if first[slot] <= turn and slot not in there),
                observation=_texts(messages[seen:]) if turn else "",
                where=record.where,
            )
        )
        seen = len(messages)
    opening = history[0]["messages"]
    users = [message for message in opening if message["role"] == "user"]
    return Episode(
        id=f"{identity}#{part}" if part else identity,
        goal=_texts(users) or identity,
        steps=tuple(steps),
        rule="tool_call",
        kind="",
        instruction=INSTRUCTION,
        system=_texts([message for message in opening if message["role"] == "system"], ("system",)),
    )


def _texts(messages: list[Any], roles: tuple[str, ...] = _OBSERVES) -> str:
    """Joins the texts of observations, without the marks of screenshots that left."""
    texts = []
    for message in messages:
        content = message.get("content")
        if message["role"] not in roles or not content:
            continue
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        texts += [part.replace(OMITTED, "").strip() for part in parts]
    return "\n".join(text for text in texts if text)


def _response(behind: list[Any]) -> str:
    """Returns the assistant's answer in the messages that follow a request: its tool call, or its text."""
    for message in behind:
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls")
        if (
            isinstance(calls, list)
            and calls
            and isinstance(calls[0], dict)
            and isinstance(calls[0].get("function"), dict)
        ):
            call = calls[0]["function"]
            return canonical({"name": call.get("name"), "arguments": _arguments(call.get("arguments"))})
        return _texts([message], ("assistant",))
    return ""


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _image(record: Record, message: int, place: int, files: DataFolder) -> StoredImage:
    field = f"messages[{message}].content[{place}].image_url"
    reload = record.reload

    def read() -> bytes:
        part = reload()["messages"][message]["content"][place]
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
        if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
            raise InputError(f"{field}: got {url!r:.60}; expected a data URL with base64: nothing is downloaded")
        return base64_bytes(data, field)

    return files.stored(read, field, record.where)


def read_episodes(path: Path) -> EpisodeSet:
    """Reads the sessions of a file.

    Raises:
      InputError: the file is not there, or holds no records.
    """
    if not path.is_file():
        raise InputError(f"data: got {str(path)!r:.300}, which is no file; expected one")
    refusals: list[Refusal] = []

    def records() -> Iterator[Record]:
        for record in read_records(StoredBytes(path, path.name)):
            if isinstance(record, Refusal):
                refusals.append(record)
            else:
                yield record

    found = list(_read(records(), DataFolder(path.parent, ReadOptions())))
    refusals += [entry for entry in found if isinstance(entry, Refusal)]
    episodes = [entry for entry in found if isinstance(entry, Episode)]
    return EpisodeSet("cua_trace", path, episodes, refusals)
