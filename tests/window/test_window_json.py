"""A window written as JSON reads back equal, with all that it says; damaged or hostile documents are refused."""

import copy
import json
from typing import Any

import pytest
from window_cases import chunk, note_of, patched, window_of

from kvpatch_jax.cache import text_digest
from kvpatch_jax.errors import SessionError
from kvpatch_jax.window import BARE, LIMIT, Service, Window, from_json, to_json

MADE = "0" * 32


def saved() -> Window:
    """A window with a piece of each method but "leading", a removal patch, evicted chunks, and a branch."""
    window = window_of(*"ABCD", "t", free="BC", promise="forget")
    removal = note_of(window.evict("A"), "D", "D", base="conditioned", base_antecedent=window.antecedent("D"))
    window = window.evict("A").serve({"D": patched(removal)}).serve({"B": BARE})
    window = window.serve({"C": patched(note_of(window, "C", "C"))})
    return window.append(chunk("E"), Service("restored", stored=MADE, likeness="near")).fork("x")


def document() -> dict[str, Any]:
    return json.loads(to_json(saved()))


def written(contents: dict[str, Any]) -> str:
    """A document of contents, with their digest."""
    return json.dumps(document() | {"window": contents, "digest": text_digest(json.dumps(contents, sort_keys=True))})


def test_a_window_is_read_back_as_it_was():
    for window in (saved(), window_of(lead=0), Window.empty("f" * 32, lead=3)):
        read = from_json(to_json(window), window.backbone)
        assert read == window
        assert [read.standing(id) for id in read.ids] == [window.standing(id) for id in window.ids]
        assert from_json(to_json(window).encode(), window.backbone) == window
    assert {piece.method for piece in saved().pieces} == {"prefill", "bare", "patch", "restored"}
    assert saved().piece("D").base is not None
    with pytest.raises(SessionError, match=f"of backbone '{'f' * 32}'; expected 'other'"):
        from_json(to_json(saved()), "other")


def test_damage_and_what_is_no_document_is_refused():
    for body in (
        *("", "null", "{}", "[" * 100_000, "9" * 5000, b"\xff", '"\\ud800"', '{"format": NaN}'),
        *('{"format": "kvpatch window 4"}', '{"format": "kvpatch window 5"}'),
        '{"format": "kvpatch window 5", "format": "kvpatch window 5"}',
    ):
        with pytest.raises(SessionError, match="expected"):
            from_json(body, "f" * 32)
    text = to_json(saved())
    assert '"lead": 1' in text
    with pytest.raises(SessionError, match="another digest"):
        from_json(text.replace('"lead": 1', '"lead": 2', 1), "f" * 32)


PIECE = ("pieces", 1)
ENTRY = (*PIECE, "entry")
HOSTILE: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("pieces",), [None, {"a": 1}, [3], [{}]]),
    (("evicted",), [[3], [{"id": "A"}]]),
    (("lead",), [-1, True, 1.5, 2**70]),
    (("promise",), ["neither", []]),
    (("branch",), [3]),
    ((*PIECE, "start"), [-1, 18.0, 17, LIMIT]),
    ((*PIECE, "method"), ["keep", []]),
    ((*PIECE, "made"), ["x" * 32, MADE[:-1], 3, MADE + "\n"]),
    ((*PIECE, "seen"), [None, ["x"], [[MADE]]]),
    ((*PIECE, "ways"), ["bare", [["bare"]], [["bare", -1]], [["a", 1], ["a", 1]], [["b", 1], ["a", 1]], []]),
    ((*PIECE, "ways"), [[["a", index] for index in range(9)]]),
    ((*PIECE, "source"), [3]),
    ((*PIECE, "base"), [""]),
    ((*ENTRY, "id"), ["", None, "system", "\ud800"]),
    ((*ENTRY, "content"), [""]),
    ((*ENTRY, "tokens"), [0, True, LIMIT]),
    ((*ENTRY, "span"), [0, 11, LIMIT - 1]),
    ((*ENTRY, "kind"), ["text", "image"]),
    ((*ENTRY, "order_free"), [2]),
    ((*ENTRY, "modality"), [""]),
    ((*ENTRY, "more"), [1]),
    (("pieces", -1, "entry", "span"), [LIMIT - 52]),
]
"""Places of the contents, and values that a foreign program may write there."""


def test_hostile_contents_are_refused(unchecked):
    for path, values in HOSTILE:
        for value in values:
            contents = document()["window"]
            table: Any = contents
            for key in path[:-1]:
                table = table[key]
            table[path[-1]] = value
            with pytest.raises(SessionError, match="expected"):
                from_json(written(contents), "f" * 32)


def test_contents_that_contradict_each_other_are_refused():
    contents = document()["window"]
    evicted = contents["evicted"][0]
    changes: list[dict[str, Any]] = [
        {"pieces": contents["pieces"][1:]},
        {"evicted": [evicted, evicted]},
        {"evicted": [contents["pieces"][1]["entry"]]},
        {"evicted": [{**evicted, "kind": "text", "order_free": False}]},
        {"evicted": [{**evicted, "id": f"A{index}"} for index in range(513)]},
    ]
    for change in changes:
        with pytest.raises(SessionError, match="expected"):
            from_json(written(copy.deepcopy(contents) | change), "f" * 32)
    for name in contents:
        with pytest.raises(SessionError, match="expected"):
            from_json(written({key: value for key, value in contents.items() if key != name}), "f" * 32)
