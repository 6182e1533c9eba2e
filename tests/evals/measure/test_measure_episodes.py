"""Recorded episodes: what was asked at each step, which screenshots had left, and AndroidControl's files of records."""

import gzip
import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evals.measure import formats
from evals.measure.episodes import EpisodeStep, question_of, step_items
from evals.measure.stored_bytes import StoredBytes
from evals.measure.tfrecord import crc32c, examples, framed
from kvpatch_jax.errors import InputError
from tests.evals.measure.released import png, released, unpack


def shown(step: EpisodeStep) -> np.ndarray:
    content: Any = step.screenshots[0].content
    return drawn(content.read())


def drawn(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def test_gui_odysseys_actions_are_written_as_its_training_data(tmp_path):
    path = released(tmp_path, "gui_odyssey")
    first = formats.read_episodes(path).episodes[0]
    assert (first.id, first.goal, first.kind) == ("0", "Search for Oslo in app 0", "General_Tool")
    assert [step.response for step in first.steps] == ["CLICK: (500, 100)", "TYPE: Oslo", "SCROLL: UP", "PRESS_BACK"]
    assert [step.left for step in first.steps] == [(), (), (), ()]
    assert [piece.label for step in first.steps for piece in step.screenshots] == [f"step {n}" for n in range(1, 5)]
    kept = formats.read_episodes(path, keep=2).episodes[0]
    assert [step.left for step in kept.steps] == [(), (), (0,), (0, 1)]


def test_android_controls_records_are_read_without_tensorflow(tmp_path):
    path = released(tmp_path, "android_control")
    episodes = formats.read_episodes(path).episodes
    assert [episode.id for episode in episodes] == [str(number) for number in range(10)]
    steps = episodes[7].steps
    assert steps[0].response == '{"action_type": "click", "x": 45, "y": 128}'
    assert steps[1].response == '{"action_type": "input_text", "text": "Seoul"}'
    assert {step.answer_format for step in steps} == {"90x160"}
    # The same screens as another format has.
    screens = unpack(tmp_path, "osworld") / "osworld" / "screenshots"
    for number, step in enumerate(steps):
        np.testing.assert_array_equal(shown(step), drawn((screens / f"7_{number}.png").read_bytes()))


def test_a_trace_says_which_screenshots_left_and_what_was_answered(tmp_path):
    unpack(tmp_path, "cua_trace", "cua_trace_3", "osworld")
    for keep, name in ((1, "cua_trace"), (3, "cua_trace_3")):
        episode = formats.read_episodes(tmp_path / name / "h_cua.jsonl").episodes[2]
        assert [step.left for step in episode.steps] == [tuple(range(max(0, n + 1 - keep))) for n in range(5)]
        assert [len(step.screenshots) for step in episode.steps] == [1] * 5
        assert episode.steps[0].response == '{"arguments": {"x": 45, "y": 48}, "name": "click"}'
        # The last request's answer is not recorded.
        assert [bool(step.response) for step in episode.steps] == [True, True, True, True, False]
        assert (episode.goal, episode.system) == ("Search for Cairo in app 2", "You are a computer-use agent.")
        for number, step in enumerate(episode.steps[:4]):
            screen = tmp_path / "osworld" / "screenshots" / f"2_{number}.png"
            np.testing.assert_array_equal(shown(step), drawn(screen.read_bytes()))


def test_a_history_that_begins_again_is_an_episode_of_its_own(tmp_path):
    path = released(tmp_path, "cua_trace")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], *lines[:2]]))
    episodes = formats.read_episodes(path).episodes
    assert [(episode.id, len(episode.steps)) for episode in episodes] == [("0", 3), ("0#1", 2)]


def test_a_step_is_asked_behind_what_stayed_and_what_was_answered(tmp_path):
    path = released(tmp_path, "gui_odyssey")
    episode = formats.read_episodes(path, keep=1).episodes[0]
    items = step_items(episode)
    assert [[piece.label for piece in item.pieces] for item in items[:3]] == [
        ["step 1"], ["action 1", "step 2"], ["action 1", "action 2", "step 3"],
    ]  # fmt: skip
    assert str(items[1].pieces[0].content) == "Action 1: CLICK: (500, 100)\n"
    assert items[1].question.startswith("Goal: Search for Oslo in app 0\nAnswer with one action:")
    assert {item.cluster for item in items} == {"0"}
    assert [item.id for item in formats.read(path).items[:4]] == ["0/0", "0/1", "0/2", "0/3"]


@pytest.mark.parametrize(
    ("content", "crc"),
    [
        # RFC 3720, B.4: 32 bytes of zeros, of ones, rising, falling; and the check value of the catalogue of CRCs.
        (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C), (b"123456789", 0xE3069283), (b"", 0), (b"a", 0xC1D04330),
    ],
)  # fmt: skip
def test_crc32c_has_the_published_values(content, crc):
    assert crc32c(content) == crc


def test_crc32c_of_long_bytes_is_that_of_one_byte_after_the_other():
    content = np.random.default_rng(0).integers(0, 256, 10_007, np.uint8).tobytes()
    register = 0xFFFFFFFF
    for byte in content:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    assert crc32c(content) == register ^ 0xFFFFFFFF


def test_an_example_is_read_as_protobuf_writes_it(tmp_path):
    """By hand from the wire format: two byte strings, packed integers (one negative), unpacked ones, a float list."""
    text = b"\x0a\x01a\x12\x0b\x0a\x09\x0a\x02hi\x0a\x03you"
    packed = b"\x0a\x01n\x12\x0f\x1a\x0d\x0a\x0b\x05" + b"\xff" * 9 + b"\x01"
    single = b"\x0a\x01m\x12\x07\x1a\x05\x08\x03\x08\xac\x02"
    floats = b"\x0a\x01f\x12\x08\x12\x06\x0a\x04\x00\x00\x80\x3f"
    features = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (text, packed, single, floats))
    (tmp_path / "a").write_bytes(framed(b"\x0a" + bytes([len(features)]) + features))
    source = StoredBytes(tmp_path / "a", "a")
    (record,) = examples(source)
    assert [source.read(*span) for span in record.spans["a"]] == [b"hi", b"you"]
    assert record.integers == {"n": [5, -1], "m": [3, 300]}


def _damage(content: bytes, how: str) -> bytes:
    if how == "length":
        return struct.pack("<Q", 1 << 62) + content[8:]
    if how == "long":
        length = struct.pack("<Q", 1 << 40)
        return length + framed(length)[-4:] + content[12:]
    return {"body": content[:40] + b"?" + content[41:], "end": content[:-100], "head": content[:5]}[how]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("length", "a length whose sum is wrong"), ("long", "1099511627776 bytes; expected at most"),
        ("body", "bytes whose sum is wrong"), ("end", "a file that ends after"),
        ("head", "a length whose sum is wrong"),
    ],
)  # fmt: skip
def test_damaged_records_are_refused_by_what_is_wrong(tmp_path, how, said):
    path = released(tmp_path, "android_control")
    path.write_bytes(gzip.compress(_damage(gzip.decompress(path.read_bytes()), how)))
    (refusal,) = formats.read(path, "android_control").refusals
    assert said in refusal.reason
    assert refusal.where == "android_control-00000-of-00001"


@pytest.mark.parametrize(
    "body", [b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05\x0a\x03", b"\x0b", b"\xff" * 11, b"\x0a\x03\x0a\x01\xff"]
)
def test_hostile_messages_are_refused(tmp_path, body):
    (tmp_path / "a").write_bytes(framed(body))
    with pytest.raises(InputError, match=r"expected a tf\.train\.Example"):
        list(examples(StoredBytes(tmp_path / "a", "a")))


def test_an_episode_of_a_wrong_form_is_refused_by_its_field_and_the_rest_goes_on(tmp_path):
    folder = released(tmp_path, "gui_odyssey")
    damaged = {
        "0": ("steps", [], "step_length: got 4 beside 0 steps"),
        "1": ("task_info", "x", "task_info: got 'x'; expected an object"),
        "2": ("steps", [{"screenshot": "no.png", "action": "CLICK"}] * 4, "steps[0].screenshot: got 'no.png'"),
        "3": ("steps", [{"screenshot": "3_0.png", "action": "CLICK", "info": [1, 2]}] * 4, "steps[0].info: got [1, 2]"),
        "4": ("steps", [{"screenshot": "4_0.png", "action": "HOP", "info": ""}] * 4, "steps[0].action: got 'HOP'"),
        "5": ("steps", [{"screenshot": "../x.png", "action": "HOP"}] * 4, "expected a name below the data's folder"),
    }  # fmt: skip
    for name, (field, value, _) in damaged.items():
        path = folder / "annotations" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    found = formats.read_episodes(folder)
    assert [episode.id for episode in found.episodes] == ["6", "7", "8", "9"]
    assert len(found.refusals) == 6
    for refusal, (name, (_, _, said)) in zip(found.refusals, damaged.items(), strict=True):
        assert refusal.where == f"annotations/{name}.json[0]" or refusal.where == f"annotations/{name}.json:1"
        assert said in refusal.reason


def test_a_trace_with_a_wrong_message_is_refused_and_other_sessions_go_on(tmp_path):
    path = released(tmp_path, "cua_trace")
    records = [json.loads(line) for line in path.read_text().splitlines()[:15]]
    records[0]["messages"][1]["content"][1]["image_url"]["url"] = "https://example.org/a.png"
    records[6]["messages"][0] = "system"
    path.write_text("\n".join(map(json.dumps, records)))
    found = formats.read_episodes(path)
    assert [(episode.id, len(episode.steps)) for episode in found.episodes] == [("1", 4), ("2", 5)]
    reasons = {refusal.where: refusal.reason for refusal in found.refusals}
    assert "nothing is downloaded" in reasons["h_cua.jsonl:1"]
    assert reasons["h_cua.jsonl:7"].startswith("messages[0]: got 'system'; expected an object")


def test_plain_episodes_say_what_is_asked_and_what_was_answered(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png([name]))
    steps = [
        {"images": ["a.png"], "answer": "click 3"},
        {
            "images": ["b.png"],
            "text": "Page loaded.",
            "question": "Which is the total?",
            "answer": "41.20",
            "kind": "x",
        },
    ]
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "7", "goal": "Find the invoice.", "steps": steps}))
    [episode] = formats.read_episodes(path, keep=1).episodes
    first, second = episode.steps
    assert (episode.id, episode.goal) == ("7", "Find the invoice.")
    assert [first.response, second.response, second.kind, second.left] == ["click 3", "41.20", "x", (0,)]
    assert question_of(episode, second) == "Which is the total?"
    assert [Path(str(step.screenshots[0].content)).name for step in episode.steps] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None}, "goal: got neither goal nor system"),
        ({"rule": "nearly"}, "rule: got 'nearly'; expected one of "),
        ({"steps": []}, "steps: got an empty list"),
        ({"steps": ["click"]}, r"steps\[0\]: got 'click'; expected an object"),
        ({"steps": [{"screens": []}]}, r"steps\[0\].screens: got a field of this name"),
        ({"steps": [{"images": ["no.png"], "answer": "a"}]}, r"steps\[0\].images\[0\]: got 'no.png'"),
        ({"steps": [{"answer": 3}]}, r"steps\[0\].answer: got 3; expected a text"),
    ],
)
def test_a_plain_episode_is_refused_by_its_field(tmp_path, change, message):
    whole = {"id": "a", "goal": "Find it.", "steps": [{"text": "A page.", "answer": "click"}]}
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (whole, whole | {"id": "b"} | change)))
    data = formats.read_episodes(path, "episodes")
    assert [own.id for own in data.episodes] == ["a"]
    [refusal] = data.refusals
    assert refusal.where == "own.jsonl:2"
    assert re.search(message, refusal.reason), refusal.reason
