"""Windows as JSON: read back as they were, refused if damaged or hostile."""

import copy
import hashlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from window_cases import chunk, note_of, window_of

from kvpatch_jax.errors import WindowError
from kvpatch_jax.window import Window


def saved_again(document: dict) -> str:
    """Writes a document with the digest of its contents, as the format has it."""
    contents = json.dumps(document["window"], sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()
    return json.dumps(document)


@pytest.fixture(scope="module")
def document() -> dict:
    window, _ = window_of(*"ABCD", free="BC").evict("A")
    window, _ = window.bare("B")
    window, _ = window.condition("C", note_of(window, "C", "C"))
    window, _ = window.fork("branch")
    return json.loads(window.to_json())


def read(text: str | bytes, backbone: str = "fingerprint", **options) -> Window:
    return Window.from_json(text, backbone=backbone, **options)


def test_a_window_is_read_back_for_its_own_backbone(document):
    text = saved_again(document)
    window = read(text)
    assert json.loads(window.to_json()) == document
    assert read(text.encode()) == window
    with pytest.raises(WindowError, match="for backbone 'fingerprint'; expected 'other'"):
        read(text, "other")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[]", "3", "{}", "[" * 100_000, "9" * 5000, b"\xff", '"\\ud800"', 3),
        *('{"format": NaN}', '{"format": 1.5}', '{"format": "kvpatch window"}'),
        '{"format": "kvpatch window", "version": 1, "version": 1}',
    ],
)
def test_json_that_is_no_window_is_refused(unchecked, text):
    with pytest.raises(WindowError):
        read(text)


@pytest.mark.parametrize("version", [3, 5, "4", True, None])
def test_other_versions_are_refused(document, version):
    with pytest.raises(WindowError, match="version"):
        read(json.dumps(document | {"version": version}))


@pytest.mark.parametrize(
    "ways", [None, "stored", [["stored"]], [["stored", -1]], [["a", 1], ["a", 1]], [["b", 1], ["a", 1]]]
)
def test_ways_are_read_as_they_are_written_or_refused(document, ways):
    changed = copy.deepcopy(document)
    state = next(piece["state"] for piece in changed["window"]["pieces"] if piece["state"]["kind"] == "patched")
    state["ways"] = ways
    with pytest.raises(WindowError, match="ways"):
        read(saved_again(changed))


def test_damage_is_found(document):
    changed = copy.deepcopy(document)
    changed["window"]["pieces"][1]["state"]["behind"] = "0" * 32
    with pytest.raises(WindowError, match="digest"):
        read(json.dumps(changed))


def paths(value, path=()):
    """Every place in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


WORDS = ["bare", "patched", "conditioned", "evicted", "chunk", "text", "/a", "canonical", "", "\ud800"]
NUMBERS = [None, True, False, -1, 0, 1, 7, 2**30, 2**31, 2**70, 1.5]
JUNK = st.sampled_from([*WORDS, *NUMBERS, "0" * 32, [], [1], {}, {"a": 1}, [[]]])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_documents_are_refused_or_read_as_windows(unchecked, document, data):
    changed = copy.deepcopy(document)
    place = data.draw(st.sampled_from([path for path in paths(changed["window"]) if path]))
    table = changed["window"]
    for key in place[:-1]:
        table = table[key]
    if data.draw(st.booleans()) and isinstance(table, dict):
        table.pop(place[-1])
    else:
        table[place[-1]] = data.draw(JUNK)
    try:
        window = read(saved_again(changed))
    except WindowError:
        return
    assert read(window.to_json()) == window
    ends = [0, *(piece.end for piece in window.pieces)]
    assert all(piece.start >= end for piece, end in zip(window.pieces, ends, strict=False))
    str(window)
    window.append(chunk("another"))
    window.antecedent()
    window.target()
