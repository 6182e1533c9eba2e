"""Traces of others: what is read of Mooncake's and computer-use files, and what is refused by line and field."""

import base64
import gzip
import io
import json

import numpy as np
import pytest
from PIL import Image

from evals.harness.datasets import Run
from evals.loops.computer_use import read_computer_use
from evals.loops.dataset import LOOPS
from evals.loops.episodes import OMITTED, Shown, episodes_of, recorded_prompts
from evals.loops.mooncake import read_mooncake
from kvpatch_jax.errors import InputError
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


def test_mooncake_requests_are_windows_of_blocks(tmp_path):
    path = written(tmp_path / "m.jsonl", LINES)
    trace = read_mooncake(path)
    prompts = list(recorded_prompts(trace))
    contents = [[piece.shown.content.removeprefix("mooncake ") for piece in prompt.pieces] for prompt in prompts]
    # The request without a session has blocks that nobody else has; by its time it is second.
    assert contents[:2] == [["0", "1", "2, 76 tokens"], ["3.0", "3.1, 88 tokens"]]
    assert contents[2:4] == [["0", "1", "3", "4, 64 tokens"], ["0", "9", "4, 276 tokens"]]
    assert [sum(piece.shown.tokens for piece in prompt.pieces) for prompt in prompts[:4]] == [1100, 600, 1600, 1300]
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_mooncake(tmp_path / "m.jsonl.gz").events == trace.events


def test_mooncake_is_priced_without_a_model(tmp_path):
    path = written(tmp_path / "m.jsonl", LINES[:4])
    run = Run({}, (), ("re-prefill", "prefix cache"), 1, 1, 0, {"trace": str(path), "format": "mooncake"})
    rows = LOOPS.rows({part.key: list(part.measure()) for part in LOOPS.parts(run)})
    found = {row["arm"]: row["value"] for row in rows if row["metric"] == "tokens"}
    assert found == {"re-prefill": (1100 + 600 + 1600 + 1300) / 4, "prefix cache": (1100 + 600 + 576 + 788) / 4}
    with pytest.raises(InputError, match="contents are not known"):
        list(LOOPS.parts(run._replace(models={"m": "some/model"}))[-1].measure())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [0, 1]}, r"jsonl:1, hash_ids: got 2 for input_length 1100; expected 3"),
        ({"input_length": 1 << 29}, r"jsonl:1, hash_ids: .*at most 16384"),
        ({"text_input": "both"}, r"jsonl:1, input_length: got both"),
        ({"messages": []}, r"jsonl:1, 'messages': got such a field"),
    ],
)
def test_a_mooncake_line_is_refused_by_its_field(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read_mooncake(written(tmp_path / "m.jsonl", [LINES[0] | change]))
    with pytest.raises(InputError, match="got damaged bytes"):
        read_mooncake(tmp_path / "none.jsonl")


def screenshot(number: int) -> dict:
    file = io.BytesIO()
    Image.fromarray(np.full((28, 28, 3), number, np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, "uuid": str(number)}


def requests() -> list[dict]:
    """Three requests of one session, each with its newest screenshot alone, and one that begins again."""
    gone = {"type": "text", "text": OMITTED}
    call = {"id": "1", "type": "function", "function": {"name": "click", "arguments": '{"x": 1}'}}
    system = {"role": "system", "content": "You use a computer."}
    lines = []
    for turn in range(3):
        messages: list[dict] = [system]
        for number in range(turn + 1):
            words = [{"type": "text", "text": "Pay the bill."}] if not number else []
            messages.append({"role": "user", "content": [*words, screenshot(number) if number == turn else gone]})
            if number < turn:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines.append({"session_id": "a", "messages": messages, "tools": [], "output_length": 9})
    return [*lines, {"session_id": "a", "messages": [system, {"role": "user", "content": [screenshot(9)]}]}]


def test_computer_use_shows_what_each_request_shows(tmp_path):
    trace = read_computer_use(written(tmp_path / "h.jsonl", requests()))
    prompts = list(recorded_prompts(trace))
    kinds = [[piece.id.partition(" ")[0] for piece in prompt.pieces] for prompt in prompts]
    assert kinds[:3] == [["text", "text", "screen"], ["text"] * 3 + ["screen"], ["text"] * 4 + ["screen"]]
    assert [prompt.session for prompt in prompts] == ["a", "a", "a", "a #3"]
    first, again = episodes_of(trace)
    assert (len(first.rounds), len(again.rounds)) == (3, 1)
    assert first.system == Shown("You use a computer.\nPay the bill.", 8, "You use a computer.\nPay the bill.")
    assert "click" in str(first.rounds[0].reply)
    assert Image.open(first.rounds[2].screens[0].item).getpixel((0, 0)) == (2, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"session_id": 3}, "jsonl:1, session_id: got 3"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "jsonl:1, messages, part 0: got"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}]},
            "jsonl:1, messages, part 0: got 'https://x'; expected a data URL",
        ),
    ],
)
def test_a_computer_use_line_is_refused_by_its_field(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read_computer_use(written(tmp_path / "h.jsonl", [requests()[0] | change]))


def test_a_history_in_front_grows_while_screenshots_leave():
    text = {"kind": "text", "tokens": 3, "span": 3}
    events = (
        Event(0, "a", "add", "h1", "h1", text="One.", **text),
        Event(1, "a", "add", "s1", "s1", 9, 9, keep=2),
        Event(2, "a", "add", "s2", "s2", 9, 9, keep=2),
        Event(3, "a", "replace", "h2", "h2", text="One, two.", replaced="h1", **text),
        Event(4, "a", "insert", "s0", "s0", 9, 9, before="s2", keep=2),
        Event(5, "a", "ask", text="and now?"),
        Event(6, "a", "add", "s3", "s3", 9, 9, keep=1),
        Event(7, "a", "ask", text="and now?"),
    )
    prompts = list(recorded_prompts(Trace(events)))
    assert [[piece.id for piece in prompt.pieces] for prompt in prompts] == [["h2", "s0", "s2"], ["h2", "s3"]]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (Event(1, "a", "fork", branch="b"), "event 1: got a branch of 'a'"),
        (Event(1, "a", "add", "one"), "event 1, add of 'a'"),
        (Event(1, "a", "recall", "two"), "event 1, recall of 'a'"),
        (Event(1, "a", "reorder", order=("one", "two")), "event 1, reorder of 'a'"),
        (Event(1, "a", "replace", "three", replaced="four"), "event 1, replace of 'a'"),
        (Event(1, "c", "evict", "one"), "event 1, evict of 'c'"),
    ],
)
def test_what_cannot_have_happened_is_refused_by_its_number(last, message):
    trace = Trace((Event(0, "a", "add", "one", "1", tokens=3, span=3), last))
    with pytest.raises(InputError, match=message):
        list(recorded_prompts(trace))
    if last.op == "recall":
        with pytest.raises(InputError, match="expected one added before"):
            episodes_of(trace)
