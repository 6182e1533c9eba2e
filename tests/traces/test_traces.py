"""A recorded trace reads back as it was written, line by line, and hostile lines are refused by their number."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.traces import Event, Recorder, Trace

HEADER = {"format": "kvpatch_jax.trace", "version": 1}
ADD = {"at": 0.5, "session": "a", "op": "add", "chunk": "one", "tokens": 3, "span": 3}
EVENTS = (
    Event(0, "a", "add", "system", text="Be brief.", kind="text", tokens=4, span=4),
    Event(0.5, "a", "add", "one", "digest", 3, 2, payload=("images/one.png",), order_free=True),
    Event(1, "a", "ask", text="what?\u2028 wo? \U0001f600", steps=3),
    Event(1, "a", "reorder", order=("two", "one")),
    Event(2, "a", "fork", branch="a/left"),
    Event(2, "a/left", "slide", keep=1),
    Event(3, "a/left", "recall", "one"),
    Event(3, "a", "replace", "three", replaced="one"),
    Event(3, "a", "insert", "four", tokens=2, span=2, before="three"),
    Event(3, "a", "evict", "two"),
    Event(4, "a/left", "close"),
)


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_a_written_trace_reads_back_equal(tmp_path):
    Trace(EVENTS, lead=2).write(tmp_path / "trace.jsonl")
    again = Trace.read(tmp_path / "trace.jsonl")
    assert (again.events, again.lead, again.folder) == (EVENTS, 2, tmp_path)
    assert os.listdir(tmp_path) == ["trace.jsonl"]
    # A killed writer has begun a line.
    path = write(tmp_path / "cut.jsonl", HEADER, ADD, b'{"at": 1.5, "sess')
    assert [event.op for event in Trace.read(path).events] == ["add"]
    assert len(Trace.read(write(tmp_path / "ended.jsonl", HEADER, ADD)).events) == 1, "its last line is complete"


def test_lines_that_are_no_event_are_refused_by_their_number_and_files_that_are_no_trace(tmp_path, unchecked):
    for line, message in (
        (ADD | {"at": -1.0}, "seconds, 0 or more"),
        (ADD | {"op": "explode"}, "op: got 'explode'"),
        (ADD | {"op": "insert"}, "got 'insert' without before"),
        (ADD | {"chunk": "\ud800"}, "a text in UTF-8"),
        (b"{\n", "JSON"),
    ):
        with pytest.raises(InputError, match=f"line 3.*{message}"):
            Trace.read(write(tmp_path / "t.jsonl", HEADER, ADD | {"chunk": "zero"}, line))
    for header in (HEADER | {"version": 2}, HEADER | {"more": 1}, b""):
        with pytest.raises(InputError, match="line 1"):
            Trace.read(write(tmp_path / "t.jsonl", header, ADD))


def test_payloads_outside_of_the_folder_are_refused(tmp_path):
    inside = tmp_path / "inside"
    (inside / "folder").mkdir(parents=True)
    for path in (tmp_path / "secret.png", inside / "page.png"):
        path.write_bytes(b"x")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    event = lambda name: Event(0, "a", "add", "one", payload=(str(name),))
    trace = Trace((), folder=inside)
    assert trace.payloads(event("page.png")) == (inside / "page.png",)
    for name in ("link.png", "none.png", "folder", "../secret.png", tmp_path / "secret.png"):
        with pytest.raises(InputError, match="expected a regular file below"):
            trace.payloads(event(name))


def test_a_recorder_writes_each_event_as_it_happens(tmp_path):
    from PIL import Image

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "shot.png")
    with Recorder(tmp_path / "t.jsonl", lead=2) as recorder:
        recorder(Event(99, "a", "add", "one", "c", 3, 3), [tmp_path / "shot.png"])
        recorder(Event(0, "a", "add", "two", "c", 3, 3), [pixels])
        assert len(Trace.read(tmp_path / "t.jsonl").events) == 2  # already there
        recorder(Event(0, "a", "ask", text="what?"), ["what?"])
    recorder(Event(0, "a", "close"), [])  # after the recorder was closed

    trace = Trace.read(tmp_path / "t.jsonl")
    assert (trace.lead, [event.op for event in trace.events]) == (2, ["add", "add", "ask"])
    times = [event.at for event in trace.events]
    assert times == sorted(times)
    assert times[-1] < 99  # its own clock
    (first,), (second,) = trace.payloads(trace.events[0]), trace.payloads(trace.events[1])
    assert first == second  # the same pixels, stored once
    np.testing.assert_array_equal(np.asarray(Image.open(first)), pixels)


def test_a_recorder_that_fails_raises_nothing_in_the_session(tmp_path, unchecked):
    recorder = Recorder(tmp_path / "t.jsonl")
    recorder(Event(0, "a", "add", "one"))
    recorder(Event(0, "a", "add", "two"), [b"\x89PNG, but not really"])
    recorder(Event(0, "a", "add", "three"))
    with pytest.raises(InputError, match="ended early"):
        recorder.close()
    recorder.close()
    assert [event.chunk for event in Trace.read(tmp_path / "t.jsonl").events] == ["one"]
    with pytest.raises(InputError, match="expected a new file"):
        Recorder(tmp_path / "t.jsonl")
