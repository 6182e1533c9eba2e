"""Mooncake's traces (Qin et al. 2024, FAST'25 release) as traces of windows.

JSON Lines. Fields by AIPerf's loader (`MooncakeTrace`): timestamp (ms), input_length, output_length, hash_ids (one for
each block of 512 tokens, the last may be shorter), session_id, delay (ms), or text_input in place of lengths.

A window's pieces are the whole blocks of a request, named by their hashes; the last block is what is asked. Of contents
only hashes and lengths are known, so that tokens can be counted and nothing can be run. A request without a session is
a session of its own, as in AIPerf. A delay counts from the request before, for the time of an answer is not known.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import LIMIT

from .json_lines import numbered_objects

BLOCK = 512
"""Tokens of a block."""
LINE = 1 << 20
"""The largest number of bytes of a line."""
BLOCKS = 1 << 14
"""The largest number of blocks of a request: 8 million tokens."""
_FIELDS = ("type", "timestamp", "delay", "session_id", "input_length", "output_length", "hash_ids", "text_input")


class Request(NamedTuple):
    """One request, as a line has it.

    Attributes:
      session: its session_id; None without.
      seconds: since the trace began; None without a timestamp. delay: seconds after the session's last request.
      blocks: hashes, the last one of `last` tokens. text: in place of blocks.
      steps: the answer's largest number of tokens; None if unknown.
    """

    session: str | None
    seconds: float | None
    delay: float
    blocks: tuple[str, ...]
    last: int
    text: str | None
    steps: int | None


def read_mooncake(path: Path, *, block: int = BLOCK) -> Trace:
    """Reads a Mooncake trace, plain or compressed by gzip.

    Args:
      block: tokens of a block.

    Raises:
      TraceError: a line that is none, naming line and field. InputError: no such file, or a damaged one.
    """
    timed, latest = list[tuple[float, str, Request]](), dict[str, float]()
    for number, (where, fields) in enumerate(numbered_objects(path, LINE), 1):
        request = _request(fields, where, str(number), block)
        session = request.session or f"request {number}"
        seconds = latest.get(session, 0.0) + request.delay if request.seconds is None else request.seconds
        latest[session] = seconds = max(seconds, latest.get(session, 0.0))
        timed.append((seconds, session, request))

    # In the order in which they happened; of one moment, in the file's order.
    timed.sort(key=lambda entry: entry[0])
    shown, known, events = dict[str, list[str]](), dict[str, set[str]](), list[Event]()
    for seconds, session, request in timed:
        before = shown.get(session, [])
        shown[session] = before if request.text is not None else _ids(request)
        events += _changes(seconds, session, before, shown[session], known.setdefault(session, set()), block)
        question, tokens = request.text, None
        if question is None:
            question, tokens = f"mooncake {request.blocks[-1]}, {request.last} tokens", request.last
        events.append(Event(seconds, session, "ask", text=question, tokens=tokens, steps=request.steps))
        if request.session is None:
            events.append(Event(seconds, session, "close"))
    return Trace(tuple(events), "mooncake", {"promise": "forget", "lead": 0, "block": block})


def _ids(request: Request) -> list[str]:
    """Names a request's whole blocks; one that is there twice is two pieces of one content."""
    ids, counts = list[str](), dict[str, int]()
    for name in request.blocks[:-1]:
        counts[name] = counts.get(name, 0) + 1
        ids.append(f"block {name}" if counts[name] == 1 else f"block {name} #{counts[name]}")
    return ids


def _changes(
    seconds: float, session: str, before: list[str], ids: list[str], known: set[str], block: int
) -> Iterator[Event]:
    """Yields the events between two windows of a session: blocks stay up to the first that differs."""
    same = 0
    while same < min(len(ids), len(before)) and ids[same] == before[same]:
        same += 1
    for id in before[same:]:
        yield Event(seconds, session, "evict", chunk=id)
    for id in ids[same:]:
        if id in known:
            yield Event(seconds, session, "recall", chunk=id)
        else:
            content = f"mooncake {id.removeprefix('block ').partition(' #')[0]}"
            yield Event(seconds, session, "add", id, content, tokens=block, span=block)
        known.add(id)


def _request(fields: dict[str, Any], where: str, name: str, block: int) -> Request:
    """Makes the request of a line; null stands for a field that is not there, as in the loader."""
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise TraceError(f"{where}, {unknown[0]!r:.80}: got such a field; expected some of {', '.join(_FIELDS)}")
    length, text, hashes = (fields.get(field) for field in ("input_length", "text_input", "hash_ids"))
    for field, value, fits, expected in (
        ("type", fields.get("type"), lambda value: value == "mooncake_trace", "'mooncake_trace'"),
        ("timestamp", fields.get("timestamp"), _is_time, "milliseconds, 0 or more"),
        ("delay", fields.get("delay"), _is_time, "milliseconds, 0 or more"),
        ("session_id", fields.get("session_id"), _is_text, "a text"),
        ("text_input", text, _is_text, "a text"),
        ("input_length", length, lambda value: _is_count(value, 1), "a whole number, 1 or more"),
        ("output_length", fields.get("output_length"), lambda value: _is_count(value, 0), "a whole number, 0 or more"),
        ("hash_ids", hashes, lambda value: isinstance(value, list) and all(map(_is_hash, value)), "whole numbers"),
    ):
        if value is not None and not fits(value):
            raise TraceError(f"{where}, {field}: got {value!r:.80}; expected {expected}")
    if (length is None) == (text is None):
        found = "neither" if length is None else "both"
        raise TraceError(f"{where}, input_length: got {found} of it and text_input; expected one")

    count = 0 if length is None else -(-length // block)
    if count > BLOCKS or (hashes is not None and len(hashes) != count):
        found = f"{'none' if hashes is None else len(hashes)} for input_length {length}"
        raise TraceError(f"{where}, hash_ids: got {found}; expected {count}, of {block} tokens each, at most {BLOCKS}")
    # Without hashes nothing is known to be the same as anything else.
    names = [f"{name}.{place}" for place in range(count)] if hashes is None else map(str, hashes)
    seconds = None if fields.get("timestamp") is None else fields["timestamp"] / 1000
    last = 0 if length is None else length - block * (count - 1)
    delay = (fields.get("delay") or 0) / 1000
    return Request(fields.get("session_id"), seconds, delay, tuple(names), last, text, fields.get("output_length"))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1 << 19


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < LIMIT


def _is_hash(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
