"""Mooncake's traces (Qin et al. 2024, FAST'25 release) as traces of windows, and back.

JSON Lines. Fields by AIPerf's loader (`MooncakeTrace`): timestamp (ms), input_length, output_length, hash_ids (one for
each block of 512 tokens, the last may be shorter), session_id, delay (ms), or text_input in place of lengths.

A window's pieces are the whole blocks of a request, named by their hashes; the last block is what is asked. A request
of a session keeps the blocks that it begins with as the one before did, and the others leave. A request without a
session is a session of its own, as in AIPerf.

What does not survive the import: contents, of which hashes and lengths alone are known (a replay draws their tokens by
a seed of the name), what a block shows, and the time that an answer took, which a delay counts from: a delay counts
here from the request before. The export loses which pieces there were: blocks end every 512 tokens wherever a piece
ends, and a block's hash stands for all that precedes it too, as in Mooncake, so that a piece that moved or came back
is another block. Hashes are numbered anew, from 0.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError, TraceError
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.utils.strict_json import object_of
from kvpatch_jax.window import LIMIT

from .new_files import write_file
from .readers.stored_bytes import StoredBytes
from .window_tracker import NO_COSTS, TracedQuestion, TraceSizes, moments

BLOCK = 512
"""Tokens of a block."""
LINE = 1 << 20
"""The largest number of bytes of a line."""
BLOCKS = 1 << 14
"""The largest number of blocks of a request: 8 million tokens."""
REQUESTS = 200_000
"""The largest number of requests of a file."""
_FIELDS = ("type", "timestamp", "delay", "session_id", "input_length", "output_length", "hash_ids", "text_input")


@dataclasses.dataclass(frozen=True)
class MooncakeRequest:
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
    """Reads a Mooncake trace; compressed files too.

    Args:
      block: tokens of a block.

    Returns:
      A trace whose windows promise "forget" and pin nothing: each request is a prompt.

    Raises:
      TraceError: a line that is none, naming line and field. InputError: no such file, or a damaged one.
    """
    if not path.is_file():
        raise InputError(f"mooncake: got {str(path)!r:.300}; expected a file")
    timed = list[tuple[float, str, MooncakeRequest]]()
    latest: dict[str, float] = {}
    for number, (_, length, line) in enumerate(StoredBytes(path, path.name).lines(), 1):
        where = f"{path.name}, line {number}"
        if not line.strip():
            continue
        if length > LINE or len(timed) == REQUESTS:
            raise TraceError(f"{where}: got {length} bytes; expected at most {LINE}, and {REQUESTS} requests")

        request = _request(object_of(line, where, TraceError), where, f"{number}", block)
        session = request.session or f"request {number}"
        seconds = latest.get(session, 0.0) + request.delay if request.seconds is None else request.seconds
        latest[session] = seconds = max(seconds, latest.get(session, 0.0))
        timed.append((seconds, session, request))

    # In the order in which they happened; of one moment, in the file's order.
    timed.sort(key=lambda entry: entry[0])
    windows, events = dict[str, _Blocks](), list[Event]()
    for seconds, session, request in timed:
        window = windows.setdefault(session, _Blocks(session, block))
        events += window.asked(request, seconds)
        if request.session is None:
            events.append(Event(seconds, session, "close"))
    return Trace(tuple(events), "mooncake", {"promise": "forget", "lead": 0, "block": block})


class _Blocks:
    """Blocks of one session's window, by their ids."""

    def __init__(self, session: str, block: int):
        self.session, self.block = session, block
        self.shown: list[str] = []
        self.known: set[str] = set()

    def asked(self, request: MooncakeRequest, seconds: float) -> Iterator[Event]:
        """Yields the events that lead to a request's window, and the question."""
        if request.text is not None:
            yield Event(seconds, self.session, "ask", text=request.text, steps=request.steps)
            return

        ids, counts = list[str](), dict[str, int]()
        for name in request.blocks[:-1]:
            # A block that is there twice is two pieces of one content.
            counts[name] = counts.get(name, 0) + 1
            ids.append(f"block {name}" if counts[name] == 1 else f"block {name} #{counts[name]}")
        same = 0
        while same < min(len(ids), len(self.shown)) and ids[same] == self.shown[same]:
            same += 1
        for id in self.shown[same:]:
            yield Event(seconds, self.session, "evict", chunk=id)
        for id, name in zip(ids[same:], request.blocks[same:-1], strict=True):
            if id in self.known:
                yield Event(seconds, self.session, "recall", chunk=id)
            else:
                size = self.block
                yield Event(seconds, self.session, "add", id, f"mooncake {name}", tokens=size, span=size)
            self.known.add(id)
        self.shown = ids
        asked = f"mooncake {request.blocks[-1]}, {request.last} tokens"
        yield Event(seconds, self.session, "ask", text=asked, tokens=request.last, steps=request.steps)


def _request(fields: dict[str, Any], where: str, name: str, block: int) -> MooncakeRequest:
    """Returns the request of a line.

    Raises:
      TraceError: an unknown field, a value of another type or out of range, or lengths that contradict each other.
    """
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise TraceError(
            f"{where}, {unknown[0]!r:.80}: got such a field; expected some of {', '.join(_FIELDS)} (requests with "
            "messages are computer-use traces)"
        )
    # The loader takes null for a field that is not there.
    given = {field: value for field, value in fields.items() if value is not None}
    if given.get("type", "mooncake_trace") != "mooncake_trace":
        raise TraceError(f"{where}, type: got {given['type']!r:.80}; expected 'mooncake_trace'")

    def number(field: str, least: int) -> int | None:
        value = given.get(field)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or not least <= value < LIMIT):
            raise TraceError(f"{where}, {field}: got {value!r:.80}; expected a whole number from {least} to 2**30")
        return value

    def seconds(field: str) -> float | None:
        value = given.get(field)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        if value is not None and not fits:
            raise TraceError(f"{where}, {field}: got {value!r:.80}; expected milliseconds, 0 or more")
        return None if value is None else value / 1000

    session, text, hashes = given.get("session_id"), given.get("text_input"), given.get("hash_ids")
    for field, value, most in (("session_id", session, 200), ("text_input", text, 1 << 19)):
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= most):
            raise TraceError(f"{where}, {field}: got {value!r:.80}; expected a text of 1 to {most} characters")

    length = number("input_length", 1)
    if (length is None) == (text is None):
        found = "neither" if length is None else "both"
        raise TraceError(f"{where}, input_length: got {found} of it and text_input; expected one")
    blocks = 0 if length is None else -(-length // block)
    if blocks > BLOCKS:
        raise TraceError(f"{where}, input_length: got {length} tokens; expected at most {BLOCKS} blocks of {block}")
    if hashes is None:
        # Nothing is known to be the same as anything else.
        hashes = [f"{name}.{place}" for place in range(blocks)]
    elif not isinstance(hashes, list) or not all(isinstance(id, int) and not isinstance(id, bool) for id in hashes):
        raise TraceError(f"{where}, hash_ids: got {hashes!r:.80}; expected a list of whole numbers")
    elif len(hashes) != blocks:
        raise TraceError(
            f"{where}, hash_ids: got {len(hashes)} for input_length {length}; expected {blocks}, of {block} tokens each"
        )
    last = 0 if length is None else length - block * (blocks - 1)
    names = tuple(str(id) for id in hashes)
    steps = number("output_length", 0)
    return MooncakeRequest(session, seconds("timestamp"), seconds("delay") or 0.0, names, last, text, steps)


def write_mooncake(
    trace: Trace, path: Path, *, block: int = BLOCK, count: Callable[[Event], int] | None = None
) -> Path:
    """Writes a trace's questions as Mooncake's requests, into a new file.

    Args:
      block: tokens of a block.
      count: counts the tokens of a piece or question that the trace does not state. None: the trace states all.

    Raises:
      TraceError: a piece or question of unknown length; a trace that no window can follow. InputError: the file is
      there.
    """
    sizes = TraceSizes.of(trace, count)
    numbers: dict[bytes, int] = {}
    lines = []
    for moment in moments(trace, sizes, NO_COSTS):
        if not isinstance(moment, TracedQuestion):
            continue
        # What precedes a block is part of its hash, so one digest runs on over the whole request.
        chain, hashes, filled = hashlib.blake2b(digest_size=16), list[int](), 0
        asked = sizes.asked(moment.event)
        parts = [(entry.content or entry.id, entry.tokens) for entry in moment.pieces]
        for name, tokens in [*parts, (f"question {moment.text}", asked)]:
            begin = 0
            while begin < tokens:
                taken = min(block - filled, tokens - begin)
                chain.update(json.dumps([name, begin, taken]).encode())
                begin, filled = begin + taken, (filled + taken) % block
                if not filled:
                    hashes.append(numbers.setdefault(chain.digest(), len(numbers)))
        if filled:
            hashes.append(numbers.setdefault(chain.digest(), len(numbers)))

        length = sum(tokens for _, tokens in parts) + asked
        line = {"timestamp": round(1000 * moment.event.at, 3), "session_id": moment.session, "input_length": length}
        steps = {} if moment.event.steps is None else {"output_length": moment.event.steps}
        lines.append(json.dumps(line | steps | {"hash_ids": hashes}))
    return write_file(path, "".join(f"{line}\n" for line in lines).encode())


def draw_mooncake(path: Path, steps: int, seed: int, *, block: int = BLOCK) -> Path:
    """Draws requests of one session by the loader's field list: a prompt that grows by a turn of 1 to 4 blocks each.

    Every fortieth turn begins again behind the first two blocks, as agents do that summarise what they have seen.
    """
    random = np.random.default_rng(seed)
    lines, hashes, following = list[str](), [0, 1], 2
    for number in range(steps):
        if number and number % 40 == 0:
            hashes = hashes[:2]
        count = int(random.integers(1, 5))
        hashes = [*hashes, *range(following, following + count)]
        # The last block is partly filled, and another one once it is full.
        last, following = int(random.integers(1, block)), following + count + 1
        ids = [*hashes, following - 1]
        line = {"session_id": "agent", "input_length": block * len(hashes) + last, "hash_ids": ids}
        line |= {"output_length": int(random.integers(8, 200))}
        lines.append(json.dumps(line | ({"delay": 500} if number else {"timestamp": 0})))
    return write_file(path, "".join(f"{line}\n" for line in lines).encode())
