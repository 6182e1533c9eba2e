"""Mooncake's and computer-use traces: what is read, what survives a round trip, what is refused by its field."""

import gzip
import json
from collections import Counter

import pytest

from evals.traces.computer_use import draw_computer_use, trace_of_episodes, write_computer_use
from evals.traces.mooncake import draw_mooncake, read_mooncake, write_mooncake
from evals.traces.readers.cua_trace import OMITTED, read_episodes
from evals.traces.window_tracker import NO_COSTS, TracedQuestion, TraceSizes, moments
from kvpatch_jax.errors import InputError, TraceError
from kvpatch_jax.traces import Event, Trace

LINES = [
    {"timestamp": 0, "session_id": "a", "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"delay": 500, "session_id": "a", "input_length": 1600, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 250.5, "input_length": 600, "output_length": 9},
    {"delay": 100, "session_id": "a", "input_length": 1300, "hash_ids": [0, 9, 4]},
    {"session_id": "a", "text_input": "And now?", "output_length": 7},
]


def written(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def asked(trace):
    sizes = TraceSizes.of(trace, lambda event: len(event.text or "image"))
    return [moment for moment in moments(trace, sizes, NO_COSTS) if isinstance(moment, TracedQuestion)]


def test_mooncake_requests_are_windows_of_whole_blocks_and_a_question(tmp_path):
    trace = read_mooncake(written(tmp_path / "m.jsonl", LINES))
    seen = asked(trace)
    shown = [[entry.content for entry in moment.pieces] for moment in seen]
    names = [[f"mooncake {number}" for number in numbers] for numbers in ((0, 1), (0, 1, 3), (0, 9))]
    # The request without a session has a window of its own, of blocks that nobody else has; by its time it is second.
    assert shown == [names[0], ["mooncake 3.0"], names[1], names[2], names[2]]
    assert [moment.event.at for moment in seen] == [0, 0.2505, 0.5, 0.6, 0.6]
    assert [moment.event.tokens for moment in seen] == [1100 - 1024, 88, 64, 1300 - 1024, None]
    assert [moment.event.steps for moment in seen] == [5, 9, None, None, 7]
    assert all(entry.tokens == 512 for moment in seen for entry in moment.pieces)
    assert seen[-1].text == "And now?"


def test_a_block_that_comes_back_is_recalled(tmp_path):
    ids = [[0, 1, 2], [0, 3, 4], [0, 1, 5]]
    lines = [{"session_id": "a", "input_length": 48, "hash_ids": hashes} for hashes in ids]
    trace = read_mooncake(written(tmp_path / "m.jsonl", lines), block=16)
    assert Counter(event.op for event in trace) == {"add": 3, "evict": 2, "recall": 1, "ask": 3}
    assert [entry.id for entry in asked(trace)[-1].pieces] == ["block 0", "block 1"]


@pytest.mark.slow
def test_mooncake_200_steps_come_back_as_they_were(tmp_path):
    path = draw_mooncake(tmp_path / "drawn.jsonl", 200, 0)
    trace = read_mooncake(path)
    again = write_mooncake(trace, tmp_path / "again.jsonl")
    first, second = ([json.loads(line) for line in file.read_text().splitlines()] for file in (path, again))
    assert len(first) == 200
    renamed: dict[int, int] = {}
    for before, after in zip(first, second, strict=True):
        for field in ("input_length", "output_length", "session_id"):
            assert before[field] == after[field]
        assert [renamed.setdefault(id, new) for id, new in zip(before["hash_ids"], after["hash_ids"], strict=True)]
        assert [renamed[id] for id in before["hash_ids"]] == after["hash_ids"]
    assert len(set(renamed.values())) == len(renamed)
    # Compressed, it is the same trace.
    (tmp_path / "drawn.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_mooncake(tmp_path / "drawn.jsonl.gz").events == trace.events


def test_a_piece_that_moved_is_another_block_for_mooncake(tmp_path):
    add = [Event(0, "a", "add", name, name, tokens=512, span=512) for name in ("one", "two", "three")]
    ask = Event(0, "a", "ask", text="?", tokens=3)
    trace = Trace((*add, ask, Event(1, "a", "evict", chunk="two"), Event(1, "a", "ask", text="?", tokens=3)))
    lines = [json.loads(line) for line in write_mooncake(trace, tmp_path / "m.jsonl").read_text().splitlines()]
    first, second = (line["hash_ids"] for line in lines)
    assert len(first) == 4
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [0, 1]}, r"line 1, hash_ids: got 2 for input_length 1100; expected 3"),
        ({"hash_ids": [0, 1, "2"]}, r"line 1, hash_ids: got .*whole numbers"),
        ({"input_length": 0}, r"line 1, input_length: got 0"),
        ({"input_length": 1 << 29}, r"line 1, input_length: .*at most 16384 blocks"),
        ({"input_length": True}, r"line 1, input_length: got True"),
        ({"text_input": "both"}, r"line 1, input_length: got both"),
        ({"input_length": None}, r"line 1, input_length: got neither"),
        ({"timestamp": -1}, r"line 1, timestamp: got -1; expected milliseconds"),
        ({"session_id": ""}, r"line 1, session_id: got ''"),
        ({"output_length": 1.5}, r"line 1, output_length: got 1.5"),
        ({"messages": []}, r"line 1, 'messages': got such a field"),
        ({"type": "bailian_trace"}, r"line 1, type: got 'bailian_trace'"),
    ],
)
def test_a_mooncake_line_is_refused_by_its_field(tmp_path, change, message):
    with pytest.raises(TraceError, match=message):
        read_mooncake(written(tmp_path / "m.jsonl", [LINES[0] | change]))


def test_hostile_mooncake_files_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    for text, message in (
        ('{"input_length": 5, "input_length": 6}\n', "line 1: .*twice"),
        ("[1]\n", "line 1: got a list"),
        ('{"text_input": "' + "x" * (1 << 20) + '"}\n', "line 1: got 10485.* bytes"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=message):
            read_mooncake(path)
    with pytest.raises(InputError, match="expected a file"):
        read_mooncake(tmp_path / "none.jsonl")


@pytest.mark.slow
def test_computer_use_200_steps_come_back_as_they_were(tmp_path):
    path = draw_computer_use(tmp_path / "h_cua.jsonl", 200, 0)
    found = read_episodes(path)
    assert (found.format, list(found.refusals), len(found.episodes[0].steps)) == ("cua_trace", [], 200)
    trace = trace_of_episodes(found.episodes, tmp_path / "trace", found.format)
    ops = Counter(event.op for event in trace)
    assert ops["ask"] == 200
    assert ops["recall"] > 10  # screenshots that come again
    for number, moment in enumerate(asked(trace)):
        chunks = [entry for entry in moment.pieces if entry.kind == "chunk"]
        assert len(chunks) == min(number + 1, 3)
        assert sum(entry.kind == "text" for entry in moment.pieces) == 1 + 2 * number  # all texts stay

    again = read_episodes(write_computer_use(trace, tmp_path / "again.jsonl"))
    assert trace_of_episodes(again.episodes, tmp_path / "trace", again.format).events == trace.events


def test_requests_say_what_a_window_shows(tmp_path):
    draw_computer_use(tmp_path / "h_cua.jsonl", 3, 0, keep=1)
    lines = [json.loads(line) for line in (tmp_path / "h_cua.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert set(last) == {"session_id", "messages", "tools", "output_length", "extra", "delay"}
    assert [message["role"] for message in last["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool"
    ]  # fmt: skip
    parts = [part for message in last["messages"] for part in message.get("content") or () if isinstance(part, dict)]
    assert [part["type"] for part in parts].count("image_url") == 1
    assert [part.get("text") for part in parts].count(OMITTED) == 2
    assert last["messages"][2]["tool_calls"][0]["function"]["name"] == "click"


def test_what_requests_cannot_say_is_refused(tmp_path):
    add = Event(0, "a", "add", "clip", "clip", tokens=4, span=4)
    with pytest.raises(TraceError, match=r"event 0: got 'add' of 'a', which requests cannot say"):
        write_computer_use(Trace((add,)), tmp_path / "h_cua.jsonl")
    with pytest.raises(TraceError, match=r"event 0: got 'add' of 'one' without tokens"):
        write_mooncake(Trace((Event(0, "a", "add", "one"),)), tmp_path / "m.jsonl")
