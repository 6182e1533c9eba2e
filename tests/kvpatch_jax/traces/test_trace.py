"""Traces: what is written is read again, hostile files are refused by their line, recorders survive what goes wrong."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvpatch_jax.errors import TraceError
from kvpatch_jax.traces import Event, Recorder, Trace
from kvpatch_jax.traces.trace import LINE

HEADER = {"format": "kvpatch_jax.trace", "version": 1, "kind": "test", "parameters": {}}
ADD = {"at": 0.5, "session": "a", "op": "add", "chunk": "one", "tokens": 3, "span": 3}

EVENTS = (
    Event(0, "a", "add", "system", text="Be brief.", kind="text", tokens=4, span=4),
    Event(0.5, "a", "add", "one", "digest", 3, 2, payload=("images/one.png",), order_free=True),
    Event(0.5, "a", "add", "two", tokens=5, span=5, order_free=True),
    Event(1, "a", "ask", text="what?\u2028 wo? \U0001f600", steps=3),
    Event(1, "a", "reorder", order=("two", "one")),
    Event(2, "a", "fork", branch="a/left"),
    Event(2, "a/left", "slide", keep=1),
    Event(3, "a/left", "recall", "one"),
    Event(3, "a", "replace", "three", replaced="one"),
    Event(3, "a", "insert", "four", tokens=2, span=2, before="three"),
    Event(3, "a", "evict", "two"),
    Event(4, "a/left", "close"),
    Event(5, "b", "add", "one"),
)


def write(path: Path, *lines: object, end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + end)
    return path


def test_a_written_trace_reads_back_equal(tmp_path):
    trace = Trace(EVENTS, "test", {"seed": 3, "rate": 0.5, "name": "ü", "none": None})
    trace.write(tmp_path / "trace.jsonl")
    again = Trace.read(tmp_path / "trace.jsonl")
    assert (again.events, again.kind, again.parameters) == (trace.events, trace.kind, trace.parameters)
    assert again.folder == tmp_path
    assert again.sessions == ("a", "a/left", "b")
    assert [event.op for event in again.of("a/left")] == ["slide", "recall", "close"]
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_an_entry_is_what_a_window_takes():
    entry = EVENTS[1].entry
    assert (entry.id, entry.content, entry.tokens, entry.span, entry.order_free) == ("one", "digest", 3, 2, True)
    assert EVENTS[0].entry.kind == "text"
    for event in (EVENTS[3], EVENTS[-1]):
        with pytest.raises(TraceError, match="expected a piece that is placed"):
            _ = event.entry


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"at": -1.0}, "seconds, 0 or more"),
        ({"op": "explode"}, "op: got 'explode'"),
        ({"op": "slide"}, "got 'slide' without keep"),
        ({"op": "insert"}, "got 'insert' without before"),
        ({"before": "zero"}, "got 'add' with before"),
        ({"session": "x" * 300}, "of 300 characters"),
        ({"chunk": "\ud800"}, "surrogate"),
        ({"tokens": 0}, "tokens: got 0"),
        ({"span": 2**31}, "span: got 2147483648"),
        ({"order_free": True, "kind": "text"}, "of chunks alone"),
        ({"payload": ["/etc/passwd"]}, "relative path"),
        ({"payload": ["a"] * 5000}, "at most 4096"),
        ({"steps": 3}, "got 'add' with steps"),
        ({"more": 1}, "got field 'more'"),
    ],
)
def test_hostile_fields_are_refused_by_their_line(tmp_path, unchecked, fields, message):
    path = write(tmp_path / "t.jsonl", HEADER, {**ADD, "chunk": "zero"}, {**ADD, **fields})
    with pytest.raises(TraceError, match=r"line 3: .*" + message.replace("(", r"\(")):
        Trace.read(path)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[" * 100_000,
        b'{"at": NaN, "session": "a", "op": "close"}',
        b'{"at": 1, "at": 2, "session": "a", "op": "close"}',
        b'{"at": ' + b"9" * 5000 + b', "session": "a", "op": "close"}',
        b'{"at": 0, "session": "a", "op": "ask", "text": "' + b"x" * LINE + b'"}',
    ],
)
def test_lines_that_are_no_event_are_refused(tmp_path, line):
    with pytest.raises(TraceError, match="line 2"):
        Trace.read(write(tmp_path / "t.jsonl", HEADER, line))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({**HEADER, "version": 2}, "expected 'kvpatch_jax.trace' of version 1"),
        ({**HEADER, "format": "other"}, "format 'other'"),
        ({**HEADER, "more": 1}, "got field 'more'"),
        ({**HEADER, "parameters": {"a": [1]}}, r"parameters\['a'\]"),
        ({**HEADER, "parameters": dict.fromkeys(map(str, range(99)))}, "at most 64"),
    ],
)
def test_other_headers_are_refused(tmp_path, unchecked, header, message):
    with pytest.raises(TraceError, match=message):
        Trace.read(write(tmp_path / "t.jsonl", header, ADD))


def test_empty_missing_and_odd_files_are_refused(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            Trace.read(path)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(TraceError, match="line 1"):
        Trace.read(tmp_path / "empty.jsonl")
    with pytest.raises(TraceError, match="cannot be written"):
        Trace(()).write(tmp_path / "no" / "folder.jsonl")


def test_a_line_that_was_cut_off_is_left_out_only_on_request(tmp_path):
    whole = write(tmp_path / "t.jsonl", HEADER, ADD, {**ADD, "chunk": "two"})
    content = whole.read_bytes()
    first = content.index(b"\n", content.index(b"\n") + 1) + 1
    for cut in range(first + 1, len(content)):
        whole.write_bytes(content[:cut])
        with pytest.raises(TraceError, match="line 3: got one cut off"):
            Trace.read(whole)
        assert [event.chunk for event in Trace.read(whole, torn=True)] == ["one"]
    whole.write_bytes(content[:40])
    with pytest.raises(TraceError, match="line 1: got one cut off"):
        Trace.read(whole, torn=True)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (Event(4, "a/left", "close"), "expected 5.0 or later"),
        (Event(6, "a/left", "ask", text="?"), "which was closed"),
        (Event(6, "a", "add", "one"), "adds 'one' again"),
        (Event(6, "b", "recall", "two"), "'two' was never added"),
        (Event(6, "b", "reorder", order=("one", "two")), "'two' was never added"),
        (Event(6, "b", "replace", "three", replaced="four"), "'four' was never added"),
        (Event(6, "b", "fork", branch="a"), "begins branch 'a' again"),
        (Event(6, "c", "evict", "one"), "'one' was never added"),
    ],
)
def test_impossible_histories_are_refused(last, message):
    with pytest.raises(TraceError, match=message):
        Trace((*EVENTS, last))


def test_payloads_outside_of_the_folder_are_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "own.png").write_bytes(b"y")
    (inside / "folder").mkdir()
    event = lambda name: Event(0, "a", "add", name, payload=(name,))
    trace = Trace((event("own.png"),), folder=inside)
    assert trace.payloads(trace.events[0]) == (inside / "own.png",)
    for name in ("link.png", "none.png", "folder"):
        with pytest.raises(TraceError, match="expected a regular file below it"):
            trace.payloads(event(name))
    with pytest.raises(TraceError, match="folder: got None"):
        Trace(()).payloads(event("own.png"))


class NotifyingSession:
    """Notifies watchers of events, as a session does."""

    def __init__(self):
        self.watchers = []

    def notify(self, event: Event, *things: object) -> None:
        for watcher in self.watchers:
            watcher(event, things)


def test_a_recorder_writes_each_event_as_it_happens(tmp_path):
    now = iter([10.0, 10.5, 10.25, 12.0])
    session, pixels = NotifyingSession(), np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "shot.png")
    with Recorder(tmp_path / "t.jsonl", kind="mine", parameters={"keep": 4}, clock=lambda: next(now)) as recorder:
        recorder.watch(session)
        recorder.watch(session)  # twice is once
        session.notify(Event(99, "a", "add", "one", "c", 3, 3), tmp_path / "shot.png")
        session.notify(Event(0, "a", "add", "two", "c", 3, 3), pixels)
        assert len(Trace.read(tmp_path / "t.jsonl")) == 2  # already there
        session.notify(Event(0, "a", "ask", text="what?"), "what?")
    recorder.close()
    session.notify(Event(0, "a", "close"))  # after the recorder was closed

    trace = Trace.read(tmp_path / "t.jsonl")
    assert [event.at for event in trace] == [0.5, 0.5, 2.0]  # a clock that runs backwards stands still
    assert (trace.kind, trace.parameters) == ("mine", {"keep": 4})
    (first,), (second,) = trace.payloads(trace.events[0]), trace.payloads(trace.events[1])
    assert first == second  # the same pixels, kept once
    np.testing.assert_array_equal(np.asarray(Image.open(first)), pixels)


@pytest.mark.slow
def test_windows_of_a_session_follow_from_its_recorded_trace(tmp_path):
    """A real session: what the trace says of its windows is what they held."""
    from session_cases import QUESTION, image_of, reader

    from evals.loops.episodes import recorded_prompts
    from kvpatch_jax import Session

    backbone, held = reader(), []
    with Recorder(tmp_path / "t.jsonl") as recorder, Session(backbone, keep=2) as session:
        recorder.watch(session)

        def ask(who) -> None:
            str(who.ask(QUESTION, steps=1))
            held.append([(piece.entry.content, piece.entry.tokens) for piece in who.window.pieces])

        session.add("w5 w6")
        for step in range(4):
            session.add(image_of(step), order_free=True)
            ask(session)
        back = session.recall(image_of(0))
        ask(session)
        session.slide(1)
        session.replace(back, image_of(7))
        ask(session)
    visits = list(recorded_prompts(Trace.read(tmp_path / "t.jsonl")))
    assert [[(piece.shown.content, piece.shown.tokens) for piece in visit.pieces] for visit in visits] == held
    assert len(visits) == 6
    assert {visit.questions for visit in visits} == {(QUESTION,)}


def test_a_recorder_that_fails_raises_nothing_in_the_session(tmp_path, unchecked):
    session, recorder = NotifyingSession(), Recorder(tmp_path / "t.jsonl")
    recorder.watch(session)
    session.notify(Event(0, "a", "add", "one"))
    session.notify(Event(0, "a", "add", "two"), b"\x89PNG, but not really")
    session.notify(Event(0, "a", "add", "three"))
    with pytest.raises(TraceError, match="ended early"):
        recorder.close()
    recorder.close()
    assert [event.chunk for event in Trace.read(tmp_path / "t.jsonl")] == ["one"]
    with pytest.raises(TraceError, match="expected a new file"):
        Recorder(tmp_path / "t.jsonl")
    with Recorder(tmp_path / "other.jsonl") as other, pytest.raises(TraceError, match="has watchers"):
        other.watch(object())  # pyright: ignore[reportArgumentType]
