"""Mooncake's traces (Qin et al. 2024, FAST'25 release) as traces of windows.

JSON Lines. Fields by AIPerf's loader (`MooncakeTrace`): timestamp (ms), input_length, output_length, hash_ids (one for
each block of 512 tokens, the last may be shorter), session_id, delay (ms), or text_input in place of lengths.

A window's pieces are the whole blocks of a request, named by their hashes; the last block is what is asked. Of contents
only hashes and lengths are known, so that tokens can be counted and nothing can be run. A request without a session is
a session of its own, as in AIPerf. A delay counts from the request before, for the time of an answer is not known.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import LIMIT

from ..measure.records import json_objects

BLOCK = 512
"""Tokens of a block."""
BLOCKS = 1 << 14
"""The largest number of blocks of a request: 8 million tokens."""


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1 << 19


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: value == "mooncake_trace", "'mooncake_trace'"),
    "timestamp": (_is_time, "milliseconds, 0 or more"),
    "delay": (_is_time, "milliseconds, 0 or more"),
    "session_id": (_is_text, "a text"),
    "text_input": (_is_text, "a text"),
    "input_length": (lambda value: type(value) is int and 0 < value < LIMIT, "a whole number, 1 or more"),
    "output_length": (lambda value: type(value) is int and 0 <= value < LIMIT, "a whole number, 0 or more"),
    "hash_ids": (lambda value: isinstance(value, list) and {*map(type, value)} <= {int}, "whole numbers"),
}
"""Fields of a line: what fits, and in words."""


class MooncakeRequest(NamedTuple):
    """One request.

    Attributes:
      blocks: hashes of the whole blocks in front of what is asked; None: those of the request before.
      question: what is asked, or a name for it. tokens: of a question that only has a name.
      steps: the answer's largest number of tokens; None if unknown.
    """

    blocks: list[str] | None
    question: str
    tokens: int | None
    steps: int | None


def read_mooncake(path: Path) -> Trace:
    """Reads a Mooncake trace, plain or compressed by gzip.

    Raises:
      InputError: a field that does not fit, naming line and field; as `json_objects`.
    """
    timed, latest = list[tuple[float, str, bool, MooncakeRequest]](), dict[str, float]()
    for number, (values, where) in enumerate(json_objects(path), 1):
        # Null stands for a field that is not there, as in the loader.
        fields = {name: value for name, value in values.items() if value is not None}
        request = _request(fields, where, number)
        session = fields.get("session_id") or f"request {number}"
        earlier = latest.get(session, 0.0)
        seconds = fields["timestamp"] / 1000 if "timestamp" in fields else earlier + fields.get("delay", 0) / 1000
        latest[session] = max(seconds, earlier)
        timed.append((latest[session], session, "session_id" in fields, request))

    # In the order in which they happened; of one moment, in the file's order.
    timed.sort(key=lambda entry: entry[0])
    shown, known, events = dict[str, list[str]](), dict[str, set[str]](), list[Event]()
    for seconds, session, goes_on, request in timed:
        before = shown.get(session, [])
        shown[session] = before if request.blocks is None else _ids(request.blocks)
        events += _changes(seconds, session, before, shown[session], known.setdefault(session, set()))
        events.append(Event(seconds, session, "ask", text=request.question, tokens=request.tokens, steps=request.steps))
        if not goes_on:
            events.append(Event(seconds, session, "close"))
    return Trace(tuple(events), lead=0)


def _ids(blocks: list[str]) -> list[str]:
    """Names whole blocks; one that is there twice is two pieces of one content."""
    ids, counts = list[str](), dict[str, int]()
    for name in blocks:
        counts[name] = counts.get(name, 0) + 1
        ids.append(f"block {name}" if counts[name] == 1 else f"block {name} #{counts[name]}")
    return ids


def _changes(seconds: float, session: str, before: list[str], ids: list[str], known: set[str]) -> Iterator[Event]:
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
            yield Event(seconds, session, "add", id, content, tokens=BLOCK, span=BLOCK)
        known.add(id)


def _request(fields: dict[str, Any], where: str, number: int) -> MooncakeRequest:
    """Makes the request of a line."""
    for field, value in fields.items():
        if field not in _FIELDS:
            raise InputError(f"{where}, {field!r:.80}: got such a field; expected some of {', '.join(_FIELDS)}")
        fits, expected = _FIELDS[field]
        if not fits(value):
            raise InputError(f"{where}, {field}: got {value!r:.80}; expected {expected}")
    length, text, steps = (fields.get(field) for field in ("input_length", "text_input", "output_length"))
    if (length is None) == (text is None):
        shown = "neither" if length is None else "both"
        raise InputError(f"{where}, input_length: got {shown} of it and text_input; expected one")
    if length is None:
        return MooncakeRequest(None, str(text), None, steps)

    count = -(-length // BLOCK)
    hashes = fields.get("hash_ids")
    if count > BLOCKS or (hashes is not None and len(hashes) != count):
        shown = f"{'none' if hashes is None else len(hashes)} for input_length {length}"
        raise InputError(f"{where}, hash_ids: got {shown}; expected {count}, of {BLOCK} tokens each, at most {BLOCKS}")
    # Without hashes nothing is known to be the same as anything else.
    *blocks, last = [f"{number}.{place}" for place in range(count)] if hashes is None else map(str, hashes)
    tokens = length - BLOCK * (count - 1)
    return MooncakeRequest(blocks, f"mooncake {last}, {tokens} tokens", tokens, steps)
